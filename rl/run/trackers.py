"""wandb, swanlab and tensorboard."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Connection(NamedTuple):
    """An open run in a tracker."""

    log: Callable[[int, dict[str, Any]], object]  # step, values by name: numbers, or what `shown` gave
    shown: Callable[[Sequence[dict[str, Any]]], Any]  # makes a value of responses, each a dict of what is shown of it
    finish: Callable[[], object]  # sends what is left


def wandb(run_dir: str, project: str, experiment: str, config: dict[str, Any]) -> Connection:
    """A new wandb run, its files in `run_dir`/wandb. Responses are a table."""
    import wandb

    own = wandb.Settings(console="off")  # what the run prints is not sent
    run = wandb.init(project=project, name=experiment, config=config, dir=run_dir, settings=own)

    def table(responses: Sequence[dict[str, Any]]) -> wandb.Table:
        return wandb.Table(columns=list(responses[0]), data=[[str(x) for x in row.values()] for row in responses])

    return Connection(lambda step, values: run.log(values, step=step), table, run.finish)


def swanlab(run_dir: str, project: str, experiment: str, config: dict[str, Any]) -> Connection:
    """A new swanlab run, its files in `run_dir`/swanlab. Responses are texts."""
    import swanlab

    own = dict(logdir=f"{run_dir}/swanlab", settings=swanlab.Settings(log_proxy_type="none"))  # nor here
    swanlab.init(project=project, experiment_name=experiment, config=config, **own)

    def texts(responses: Sequence[dict[str, Any]]) -> list:
        return [swanlab.Text(_text(x)) for x in responses]

    return Connection(lambda step, values: swanlab.log(values, step=step), texts, swanlab.finish)


def tensorboard(run_dir: str, project: str, experiment: str, config: dict[str, Any]) -> Connection:
    """Event files in `run_dir`/tensorboard. Responses are one text."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(f"{run_dir}/tensorboard")

    def log(step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            (writer.add_text if isinstance(value, str) else writer.add_scalar)(name, value, step)

    return Connection(log, lambda responses: "\n\n---\n\n".join(map(_text, responses)), writer.close)


TRACKERS = {"wandb": wandb, "swanlab": swanlab, "tensorboard": tensorboard}


def _text(response: dict[str, Any]) -> str:
    return "\n\n".join(f"{name}: {value}" for name, value in response.items())

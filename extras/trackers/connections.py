"""Sinks of wandb, swanlab and tensorboard."""

from collections.abc import Sequence
from typing import Any

from extras.trackers import Sink

Responses = Sequence[dict[str, Any]]  # what is shown of each


def wandb(run_dir: str, project: str, experiment: str, config: dict[str, Any]) -> Sink:
    """A new wandb run, its files in `run_dir`/wandb. Responses are a table."""
    import wandb

    silent = wandb.Settings(console="off")  # what the run prints is not sent
    run = wandb.init(project=project, name=experiment, config=config, dir=run_dir, settings=silent)

    def show(step: int, kind: str, responses: Responses) -> None:
        table = wandb.Table(columns=list(responses[0]), data=[[str(x) for x in row.values()] for row in responses])
        run.log({f"{kind}/generations": table}, step=step)

    return Sink(lambda step, metrics: run.log(metrics, step=step), show, run.finish)


def swanlab(run_dir: str, project: str, experiment: str, config: dict[str, Any]) -> Sink:
    """A new swanlab run, its files in `run_dir`/swanlab. Responses are texts."""
    import swanlab

    silent = dict(logdir=f"{run_dir}/swanlab", settings=swanlab.Settings(log_proxy_type="none"))  # nor here
    swanlab.init(project=project, experiment_name=experiment, config=config, **silent)

    def show(step: int, kind: str, responses: Responses) -> None:
        swanlab.log({f"{kind}/generations": [swanlab.Text(_text(x)) for x in responses]}, step=step)

    return Sink(lambda step, metrics: swanlab.log(metrics, step=step), show, swanlab.finish)


def tensorboard(run_dir: str, project: str, experiment: str, config: dict[str, Any]) -> Sink:
    """Event files in `run_dir`/tensorboard. Responses are one text."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(f"{run_dir}/tensorboard")

    def log(step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    def show(step: int, kind: str, responses: Responses) -> None:
        writer.add_text(f"{kind}/generations", "\n\n---\n\n".join(map(_text, responses)), step)

    return Sink(log, show, writer.close)


TRACKERS = {"wandb": wandb, "swanlab": swanlab, "tensorboard": tensorboard}


def _text(response: dict[str, Any]) -> str:
    return "\n\n".join(f"{name}: {value}" for name, value in response.items())

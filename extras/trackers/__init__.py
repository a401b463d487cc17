"""Where the numbers of a run go besides the files in its folder: wandb, swanlab, tensorboard, and Prometheus.

A sink takes them. connections.py makes the sinks of --logger, and prometheus.py that of --prometheus-port. __main__.py
sends the files of a run to a tracker afterwards.
"""

import json
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Sink(NamedTuple):
    """A place that takes what a run reports, until it is closed."""

    log: Callable[[int, dict[str, float]], object]  # takes a step and its metrics by name; NaN for what is not finite
    show: Callable[[int, str, Sequence[dict[str, Any]]], object]  # takes a step, "train" or "val", and responses
    close: Callable[[], object]  # sends what is left


def connect(name: str, run_dir: str, project: str, experiment: str, config: dict[str, Any]) -> Sink:
    """A new run in the tracker of this name. Raises whatever the tracker's package raises."""
    from extras.trackers import connections

    return connections.TRACKERS[name](run_dir, project, experiment, config)


def open_early(port: int | None, project: str, experiment: str) -> dict[str, Sink]:
    """By name the sinks that may refuse a flag: that of Prometheus, which serves the newest metrics on a port of this
    machine, if there is a port. Raises ValueError if the port is in use.
    """
    if port is None:
        return {}
    from extras.trackers import prometheus

    return {"prometheus": prometheus.serve(port, project, experiment)}


def parse_record(line: str) -> dict[str, Any] | None:
    """The record of a line of metrics.jsonl or generations.jsonl; None if the line is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def hand_on(sink: Sink, records: Sequence[dict[str, Any]]) -> None:
    """Give a sink a record of metrics, or the records of responses that belong together."""
    step, kind = records[0]["step"], records[0].get("kind")
    hidden = ("step", "time", "kind", "tokens")  # the numbers of each token are for benchmarks/view.py
    shown = [{name: x for name, x in record.items() if name not in hidden} for record in records]
    if kind:
        sink.show(step, kind, shown)
    else:
        sink.log(step, {name: math.nan if x is None else x for name, x in shown[0].items()})


class Sinks:
    """The sinks of a run by name. One that raises gets nothing more: none of its faults may end a run.

    Args: opened, sinks that are open already; of_run, the run's folder and its names for a project and an experiment.
    """

    def __init__(self, opened: Mapping[str, Sink], of_run: tuple[str, str, str]):
        self.opened, self.of_run = dict(opened), of_run

    def connect(self, names: Iterable[str], config: dict[str, Any]) -> None:
        """Open the sinks of these trackers, and give them the flags of the run."""
        for name in names:
            self._try(name, lambda name: self.opened.update({name: connect(name, *self.of_run, config)}))

    def hand_on(self, records: Sequence[dict[str, Any]]) -> None:
        """Give every sink what the function `hand_on` gives one."""
        for name in list(self.opened):
            self._try(name, lambda name: hand_on(self.opened[name], records))

    def close(self) -> None:
        """Wait until all sinks have sent what they have."""
        for name in list(self.opened):
            self._try(name, lambda name: self.opened[name].close())

    def _try(self, name: str, call: Callable[[str], object]) -> None:
        try:
            call(name)
        except (Exception, SystemExit) as error:  # trackers also exit
            from rl.console import say

            self.opened.pop(name, None)
            hint = f" (pip install {name})" if isinstance(error, ImportError) else ""
            say(
                f"{name} gets nothing more: {type(error).__name__}: {' '.join(str(error).split())}{hint}. The numbers "
                f"are in {self.of_run[0]}/metrics.jsonl; to send them later: python -m extras.trackers "
                f"{shlex.join([name, *self.of_run])}",
                sys.stderr,
            )

"""Where the numbers of a run go besides the files in its folder: wandb, swanlab, tensorboard, and Prometheus.

A sink takes them. connections.py makes the sinks of --logger, and prometheus.py that of --prometheus-port. __main__.py
sends the files of a run to a tracker afterwards.
"""

import json
import math
from collections.abc import Callable, Sequence
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


def serve(port: int, project: str, experiment: str) -> Sink:
    """The newest metrics for Prometheus, on a port of this machine. Raises ValueError if the port is in use."""
    from extras.trackers import prometheus

    return prometheus.serve(port, project, experiment)


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

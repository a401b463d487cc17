"""Where the numbers of a run go besides the files in its folder: wandb, swanlab, tensorboard, and Prometheus.

A sink takes them. connections.py makes the sinks of --logger, and prometheus.py that of --prometheus-port. sinks.py
opens those of a run, so that none of their faults ends it. __main__.py sends the files of a run to a tracker
afterwards.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Sink(NamedTuple):
    """A place that takes what a run reports, until it is closed."""

    log: Callable[[int, dict[str, float]], object]  # takes a step and its metrics by name. What is not finite is NaN.
    show: Callable[[int, str, Sequence[dict[str, Any]]], object]  # takes a step, "train" or "val", and responses
    close: Callable[[], object]  # sends what is left


def connect(name: str, run_dir: str, project: str, experiment: str, config: dict[str, Any]) -> Sink:
    """A new run in the tracker of this name. Raises whatever the tracker's package raises."""
    from extras.trackers import connections

    return connections.TRACKERS[name](run_dir, project, experiment, config)


def open_early(flags: Any) -> dict[str, Sink]:
    """By name the sinks that may refuse one of a run's flags about logging: that of Prometheus, which serves the newest
    metrics on --prometheus-port of this machine, if the flag is given. Raises ValueError if the port is in use.
    """
    if flags.prometheus_port is None:
        return {}
    from extras.trackers import prometheus

    return {"prometheus": prometheus.serve(flags.prometheus_port, flags.project_name, flags.experiment_name)}


def open_sinks(flags: Any, config: dict[str, Any], opened: Mapping[str, Sink], records: Path) -> list[Sink]:
    """The sinks of a run: new runs in the trackers of --logger, and what `open_early` has opened. They raise nothing.
    The first fault of a sink is printed, and afterwards the sink gets nothing more.

    Args: flags, those about logging; config, all flags, for the trackers; opened, of `open_early`; records, the file
    with the metrics, which is in the run's folder.
    """
    names = [name for name in flags.logger if name != "console"]
    if not (names or opened):
        return []
    from extras.trackers import sinks

    of_run = (str(records.parent), flags.project_name, flags.experiment_name)
    return sinks.open_sinks(names, config, opened, of_run, records)


def parse_record(line: str) -> dict[str, Any] | None:
    """The record of a line of metrics.jsonl or generations.jsonl, or None if the line is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def hand_on(sinks: Iterable[Sink], records: Sequence[dict[str, Any]]) -> None:
    """Give every sink a record of metrics, or the records of responses that belong together."""
    step, kind = records[0]["step"], records[0].get("kind")
    hidden = ("step", "time", "kind", "tokens")  # the numbers of each token are for tools/view.py
    shown = [{name: x for name, x in record.items() if name not in hidden} for record in records]
    for sink in sinks:
        if kind:
            sink.show(step, kind, shown)
        else:
            sink.log(step, {name: math.nan if x is None else x for name, x in shown[0].items()})

"""The sinks of a run. None of their faults may end it: a sink that raises gets nothing more."""

import functools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from extras.trackers import Sink, connect
from rl.console import say


def open_sinks(
    names: Sequence[str],
    config: dict[str, Any],
    opened: Mapping[str, Sink],
    of_run: tuple[str, str, str],
    records: Path,
) -> list[Sink]:
    """See `extras.trackers.open_sinks`.

    Args: names, of trackers; of_run, the run's folder and its names for a project and an experiment.
    """
    guards = {name: _Guard(name, of_run, records) for name in (*opened, *names)}
    connected = {name: guards[name].call(connect, name, *of_run, config) for name in names}
    return [guards[name].around(sink) for name, sink in {**opened, **connected}.items() if sink is not None]


class _Guard:
    """Calls the functions of a sink until one of them raises. That is printed, and later calls do nothing."""

    def __init__(self, name: str, of_run: tuple[str, str, str], records: Path):
        self.name, self.of_run, self.records, self.has_raised = name, of_run, records, False

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns, or None if it raises, or if an earlier one has raised."""
        if self.has_raised:
            return None
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:  # trackers also exit
            self.has_raised = True
            hint = f" (pip install {self.name})" if isinstance(error, ImportError) else ""
            say(
                f"{self.name} gets nothing more: {type(error).__name__}: {' '.join(str(error).split())}{hint}. The "
                f"numbers are in {self.records}; to send them later: python -m extras.trackers "
                f"{shlex.join([self.name, *self.of_run])}",
                sys.stderr,
            )

    def around(self, sink: Sink) -> Sink:
        """The sink, with this guard around each of its functions."""
        log, show, close = (functools.partial(self.call, function) for function in sink)
        return Sink(log, show, close)

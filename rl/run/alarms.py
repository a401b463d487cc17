"""Alarms: conditions on metrics. A step that meets one prints a line that begins with ALARM."""

import difflib
import math
from collections.abc import Callable, Sequence
from typing import TextIO

from rl.console import say


def parse_alarm(text: str) -> tuple[str, str, float]:
    """`metric>number` or `metric<number` -> (metric, sign, number). Spaces around each are allowed.

    Raises ValueError for anything else.
    """
    metric, sign, number = map(str.strip, text.partition("<") if "<" in text else text.partition(">"))
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if not metric or ">" in metric or not math.isfinite(limit):
        raise ValueError(f"--alarms {text!r} must be metric>number or metric<number, e.g. 'actor/entropy<0.01'")
    return metric, sign, limit


def alarms(metrics: dict[str, float], conditions: Sequence[str]) -> list[str]:
    """A sentence for every condition (see `parse_alarm`) that is true of the metrics, or whose metric is NaN.

    A metric that is absent raises no alarm.
    """
    raised = []
    for metric, sign, limit in map(parse_alarm, conditions):
        value = metrics.get(metric, limit)
        if math.isnan(value) or (value > limit if sign == ">" else value < limit):
            raised.append(f"{metric} is {value:.4g}, beyond the limit of --alarms {metric}{sign}{limit:g}")
    return raised


class Alarms:
    """The alarms of a run. `unknown` has the conditions of the user whose metrics have not been seen yet."""

    def __init__(self, conditions: Sequence[str], defaults: Sequence[str]):
        self.conditions, self.unknown = conditions, [x for x in conditions if x not in defaults]

    def print(self, step: int, metrics: dict[str, float], belongs: Callable[[str], bool], stream: TextIO) -> None:
        """Print the alarms of these metrics, and once, which of --alarms name none of them.

        Args: belongs, whether a metric of this name would be among them: those of evaluations come apart from others.
        """
        for alarm in alarms(metrics, self.conditions):
            say(f"ALARM at step {step}: {alarm}", stream)
        for condition in set(self.unknown):
            name = parse_alarm(condition)[0]
            if belongs(name):
                self.unknown.remove(condition)
                if name not in metrics:
                    hint = "".join(f"; did you mean {x}?" for x in difflib.get_close_matches(name, metrics, n=1))
                    text = f"step {step} has no metric {name!r}, so it raises no alarm{hint}"
                    say(f"--alarms {condition}: {text}", stream)

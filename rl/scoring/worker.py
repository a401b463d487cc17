"""The process that calls reward functions: one task in, one result out, until its socket closes. See pool.py.

Tasks arrive as pickles from the trainer; results go back as lines of JSON, so that nothing a reward function returns
can do more than be a number. guard.py says how such a process begins and ends.
"""

import contextlib
import copy
import inspect
import json
import math
import numbers
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

from rl.scoring.guard import awaited, begin_worker, import_file, traceback_text

Result = tuple[float | None, dict[str, float]]  # score and components of a response; score None means "no score"


class Reward(NamedTuple):
    """One reward function: its name in the metrics, its weight in the sum, and whether it takes lists."""

    label: str
    weight: float
    function: Callable[..., Any]
    batched: bool


def load_reward(label: str, weight: float, path: str, name: str) -> Reward:
    """The function `name` of the Python file `path`. Raises whatever importing the file raises."""
    function = vars(import_file(path)).get(name)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")
    return Reward(label, weight, function, "solution_strs" in inspect.signature(function).parameters)


def as_number(value: Any) -> float:
    """An int, float, bool, Decimal, numpy or torch scalar as float. Raises ValueError for others, NaN, and beyond 1e18:
    the scripts compute advantages in float32, where the squares of such numbers would no longer be finite.
    """
    plain = value.item() if hasattr(value, "item") else value
    plain = float(plain) if isinstance(plain, Decimal) else plain
    # pyrefly: ignore[unsupported-operation]  # the absolute value of any real number can be compared; NaN is not smaller
    if not isinstance(plain, numbers.Real) or not abs(plain) <= 1e18:
        raise ValueError(f"returned {value!r:.200} ({type(value).__name__}), not a number between -1e18 and 1e18")
    return float(plain)


def read_result(value: Any) -> Result:
    """What a reward function returned for a response. A dict has `score`, and its other finite numbers are components;
    texts and other entries are left out. Raises ValueError without `score`, and for one that `as_number` refuses.
    """
    found = value if isinstance(value, dict) else {"score": value}
    if "score" not in found:
        raise ValueError(f"returned a dict without 'score': {sorted(map(str, found))}")
    components = {}
    for key, entry in found.items():
        if key != "score":
            with contextlib.suppress(ValueError, TypeError, RuntimeError, OverflowError):  # a text, a list, NaN
                components[str(key)] = as_number(entry)
    return (None if found["score"] is None else as_number(found["score"])), components


def call(reward: Reward, calls: list[tuple]) -> list[Result]:
    """The results for (data_source, solution_str, ground_truth, extra_info) of each response. Raises ValueError for
    what is no result, see `read_result`, and whatever the function raises.
    """
    if not reward.batched:
        return [read_result(awaited(reward.function(*arguments))) for arguments in calls]
    result = awaited(reward.function(*map(list, zip(*calls, strict=True))))  # verl's signature for lists
    if isinstance(result, (str, dict)) or not hasattr(result, "__len__") or len(result) != len(calls):
        count = len(result) if hasattr(result, "__len__") else "no list of"
        raise ValueError(f"{reward.label} returned {count} scores for {len(calls)} responses")
    return [read_result(value) for value in result]


def score(rewards: list[Reward], calls: list[tuple]) -> list[Result]:
    """Weighted sum of all reward functions for each response of a task; no score if one of them gives none.

    With several functions each one's score is the component `label`, and its components are `label/key`; `acc`, the
    accuracy in an evaluation, is that of the first function, or its score.
    """
    totals: list[float | None] = [0.0] * len(calls)
    components: list[dict[str, float]] = [{} for _ in calls]
    for reward in rewards:
        for i, (value, parts) in enumerate(call(reward, copy.deepcopy(calls))):  # a function may change what it gets
            if len(rewards) > 1:
                own = {} if value is None else {reward.label: value}
                if reward is rewards[0] and value is not None:
                    own["acc"] = parts.get("acc", value)
                parts = own | {f"{reward.label}/{key}": part for key, part in parts.items()}
            components[i] |= parts
            totals[i] = None if value is None or (total := totals[i]) is None else total + reward.weight * value
    return list(zip(totals, components, strict=True))


def limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit of this process, or a lower one: a hard limit that the user has set cannot be raised."""
    most = resource.getrlimit(kind)[1]
    soft, hard = (x if most == resource.RLIM_INFINITY else min(x, most) for x in (soft, hard))
    resource.setrlimit(kind, (soft, hard))


def main() -> None:
    """The first message holds the reward functions and the limits, and every other one a task."""
    trainer = begin_worker()
    tasks, results = trainer.makefile("rb"), trainer.makefile("w")
    os.nice(10)
    pid = os.getpid()

    def reply(**message: Any) -> None:
        if os.getpid() != pid:  # a reward function forked, and this is the child
            os._exit(0)
        print(json.dumps(message), file=results, flush=True)

    functions, timeout_s, memory_mb = pickle.load(tasks)
    if memory_mb:
        limit(resource.RLIMIT_DATA, memory_mb << 20, memory_mb << 20)
    try:
        rewards = [load_reward(*function) for function in functions]
    except BaseException:  # even SystemExit: the trainer reports it
        reply(problem=traceback_text(), last=True)
        signal.pause()  # to be killed, with everything that the files have started
    reply(batched=any(r.batched for r in rewards))  # pyrefly: ignore[unbound-name]  # else the process waits above

    while True:
        try:
            calls, twice = pickle.load(tasks)
        except EOFError:
            return
        seconds = math.ceil(time.process_time() + timeout_s * len(calls) * (1 + twice))
        limit(resource.RLIMIT_CPU, seconds, resource.getrlimit(resource.RLIMIT_CPU)[1])  # beyond it SIGXCPU kills
        try:
            scored = score(rewards, calls)
            reply(scored=scored, same=not twice or score(rewards, calls) == scored)
        except BaseException as error:  # a reward may raise anything, SystemExit included; the run goes on
            reply(problem=traceback_text(), status="error", last=isinstance(error, MemoryError))

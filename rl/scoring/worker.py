"""The process that calls reward functions: one task in, one result out, until its connection closes. See pool.py.

Tasks arrive as pickles from the trainer. Results go back as JSON, so that nothing a reward function returns can do more
than be a number. This file imports the standard library, the user's files, and guard.py, which says how such a process
begins and ends.
"""

import contextlib
import copy
import importlib.util
import inspect
import json
import numbers
import os
import resource
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from decimal import Decimal
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NamedTuple

from extras.systems import SYSTEM
from rl.scoring.guard import begin_worker

TWO_SCORES = "the same response scored twice gave two scores; the reward is not a function of its input"
Result = tuple[float | None, dict[str, float]]  # score and components of a response. Score None means "no score".


def traceback_text() -> str:
    """The traceback of the exception that is being handled, at most 20,000 characters of it, since an exception may
    hold a whole data set.
    """
    text = traceback.format_exc(limit=-8)
    return text if len(text) <= 20_000 else f"{text[:10_000]}\n... {len(text)} characters ...\n{text[-10_000:]}"


def import_file(path: str) -> ModuleType:
    """The module of a user's Python file, which may import its neighbors. Raises whatever importing it raises."""
    sys.path.append(os.path.dirname(os.path.realpath(path)))  # after everything else
    name = f"users_{zlib.crc32(path.encode())}"  # its stem may be the name of another module
    if (spec := importlib.util.spec_from_file_location(name, path)) is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file: its name does not end with .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def awaited(result: Any, run: Callable[[Any], Any] | None = None) -> Any:
    """What a user's function returned, also if it is `async`. Then `run`, by default `asyncio.run`, waits for it."""
    if not inspect.isawaitable(result):
        return result
    import asyncio  # takes longer than everything else here, so a worker without need for it starts in half the time

    async def wait() -> Any:
        return await result

    return (run or asyncio.run)(wait())


class Reward(NamedTuple):
    """One reward function, with its name in the metrics, its weight in the sum, and whether it takes lists."""

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
    """An int, float, bool, Decimal, numpy or torch scalar as float. Raises ValueError for others, NaN, and beyond 1e18,
    since the scripts compute advantages in float32, where the squares of such numbers would no longer be finite.
    """
    plain = value.item() if hasattr(value, "item") else value
    plain = float(plain) if isinstance(plain, Decimal) else plain
    # pyrefly: ignore[unsupported-operation]  # the absolute value of any real number can be compared; NaN is not
    # smaller
    if not isinstance(plain, numbers.Real) or not abs(plain) <= 1e18:
        raise ValueError(f"returned {value!r:.200} ({type(value).__name__}), not a number between -1e18 and 1e18")
    return float(plain)


def read_result(value: Any) -> Result:
    """What a reward function returned for a response. A dict has `score`, and its other finite numbers are components.
    Texts and other entries are left out. Raises ValueError without `score`, and for one that `as_number` refuses.
    """
    parts = dict(value) if isinstance(value, dict) else {"score": value}
    if "score" not in parts:
        raise ValueError(f"returned a dict without 'score': {sorted(map(str, parts))}")
    total, components = parts.pop("score"), {}
    for key, part in parts.items():
        with contextlib.suppress(ValueError, TypeError, RuntimeError, OverflowError):  # a text, a list, NaN
            components[str(key)] = as_number(part)
    return (None if total is None else as_number(total)), components


def call(reward: Reward, calls: list[tuple]) -> list[Result]:
    """The results for (data_source, solution_str, ground_truth, extra_info) of each response. Raises ValueError for
    what is not a result, see `read_result`, and whatever the function raises.
    """
    if not reward.batched:
        return [read_result(awaited(reward.function(*arguments))) for arguments in calls]
    result = awaited(reward.function(*map(list, zip(*calls, strict=True))))  # verl's signature for lists
    if isinstance(result, (str, dict)) or not hasattr(result, "__len__") or len(result) != len(calls):
        count = len(result) if hasattr(result, "__len__") else "no list of"
        raise ValueError(f"{reward.label} returned {count} scores for {len(calls)} responses")
    return [read_result(value) for value in result]


def score(rewards: list[Reward], calls: list[tuple]) -> list[Result]:
    """Weighted sum of all reward functions for each response of a task. There is no score if one of them gives none.

    With several functions each one's score is the component `label`, and its components are `label/key`. `acc`, the
    accuracy in an evaluation, is that of the first function, or its score.
    """
    totals: list[float | None] = [0.0] * len(calls)
    components: list[dict[str, float]] = [{} for _ in calls]
    for reward in rewards:
        for i, (value, parts) in enumerate(call(reward, copy.deepcopy(calls))):  # a function may change what it gets
            if len(rewards) > 1:
                if value is not None:
                    first = {"acc": parts.get("acc", value)} if reward is rewards[0] else {}
                    components[i] |= {reward.label: value} | first
                parts = {f"{reward.label}/{key}": part for key, part in parts.items()}
            components[i] |= parts
            # A response has no total as soon as one function gives no score.
            totals[i] = None if value is None or (total := totals[i]) is None else total + reward.weight * value
    return list(zip(totals, components, strict=True))


def limit(kind: int, most: int, *, is_hard: bool) -> None:
    """Set a limit of this process, or a lower one that the user has set as the hard limit. Args: is_hard, whether this
    limit cannot be raised any more.
    """
    hard = resource.getrlimit(kind)[1]
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (soft, soft if is_hard else hard))


class Rewards:
    """The reward functions of this process."""

    def load(self, functions: list[tuple[str, float, str, str]], timeout_s: float, memory_mb: int) -> dict[str, Any]:
        """Load what `parse_functions` returns, under the limits of the flags. Says whether a function takes lists."""
        if memory_mb and SYSTEM == "Linux":  # others do not limit the memory that a process gets by mmap
            limit(resource.RLIMIT_DATA, memory_mb << 20, is_hard=True)
        self.timeout_s, self.rewards = timeout_s, [load_reward(*function) for function in functions]
        return {"batched": any(reward.batched for reward in self.rewards)}

    def score(self, calls: list[tuple], twice: bool) -> dict[str, Any]:
        """Score the responses of a task, perhaps twice, and say if the results were not the same."""
        seconds = 1 + int(time.process_time() + self.timeout_s * len(calls) * (1 + twice))
        limit(resource.RLIMIT_CPU, seconds, is_hard=False)  # beyond it SIGXCPU kills. The next task has a higher one.
        scored = score(self.rewards, calls)
        again = score(self.rewards, calls) if twice else scored
        return {"scored": scored, "problem": "" if again == scored else TWO_SCORES}


def main() -> None:
    """Answer one request of the trainer after the other, until it closes the connection."""
    connection, rewards, pid = Connection(begin_worker().detach()), Rewards(), os.getpid()
    os.nice(10)
    with contextlib.suppress(EOFError, ConnectionError):  # the trainer may end while a message is on its way
        while True:
            method, *arguments = connection.recv()
            try:
                reply = getattr(rewards, method)(*arguments)
            except BaseException as error:  # a reward may raise anything, SystemExit included. The run goes on.
                is_last = method == "load" or isinstance(error, MemoryError)  # the process is of no use any more
                problem = str(error) if getattr(error, "needs_no_traceback", False) else traceback_text()
                reply = {"problem": problem, "status": "error", "is_last": is_last}
            if os.getpid() != pid:  # a reward function forked, and this is the child
                os._exit(0)
            connection.send_bytes(json.dumps(reply).encode())

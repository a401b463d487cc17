"""The process that calls reward functions: one task in, one result out, until its socket closes. See pool.py.

It is started with exec, imports the standard library and the user's files only, and may be killed at any moment. Tasks
arrive as pickles from the trainer; results go back as lines of JSON, so that nothing a reward function returns can do
more than be a number. It is two processes: a guard, which outlives the other and kills whatever that one leaves behind.
"""

import contextlib
import copy
import ctypes
import importlib.util
import inspect
import json
import math
import numbers
import os
import pickle
import resource
import signal
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
Result = tuple[float | None, dict[str, float]]  # score and components of a response; score None means "no score"


class Reward(NamedTuple):
    """One reward function: its name in the metrics, its weight in the sum, and whether it takes lists."""

    label: str
    weight: float
    function: Callable[..., Any]
    batched: bool


def import_file(path: str) -> ModuleType:
    """The module of a user's Python file, which may import its neighbours. Raises whatever importing it raises."""
    sys.path.append(str(Path(path).resolve().parent))  # behind everything else
    own = f"users_{zlib.crc32(path.encode())}"  # its stem may be the name of another module
    if (spec := importlib.util.spec_from_file_location(own, path)) is None:
        raise ValueError(f"{path} is no Python file: its name does not end with .py")
    module = sys.modules[own] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    if not isinstance(plain, numbers.Real) or not abs(plain) <= 1e18:  # NaN is not
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
        return [read_result(_awaited(reward.function(*arguments))) for arguments in calls]
    result = _awaited(reward.function(*map(list, zip(*calls, strict=True))))  # verl's signature for lists
    if isinstance(result, (str, dict)) or not hasattr(result, "__len__") or len(result) != len(calls):
        count = len(result) if hasattr(result, "__len__") else "no list of"
        raise ValueError(f"{reward.label} returned {count} scores for {len(calls)} responses")
    return [read_result(value) for value in result]


def _awaited(result: Any) -> Any:
    """What a reward function returned, also if it is `async`."""
    if not inspect.iscoroutine(result):
        return result
    import asyncio  # takes longer than everything else here, so a worker without need for it starts in half the time

    return asyncio.run(result)


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
            totals[i] = None if value is None or totals[i] is None else totals[i] + reward.weight * value
    return list(zip(totals, components, strict=True))


def limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit of this process, or a lower one: a hard limit that the user has set cannot be raised."""
    most = resource.getrlimit(kind)[1]
    values = [x if most == resource.RLIM_INFINITY else min(x, most) for x in (soft, hard)]
    resource.setrlimit(kind, tuple(values))


def fork_worker() -> None:
    """Go on in a child. This process stays as its guard, and ends with it: as it did, or on SIGTERM.

    The trainer's death is a SIGTERM too. Then every process below is killed, daemons included, whatever they do.
    """
    libc, signals = ctypes.CDLL(None), {signal.SIGCHLD, signal.SIGTERM}
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # a daemon that a reward starts becomes our child
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    worker = os.fork()
    if worker == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return
    os.close(int(sys.argv[1]))  # the worker holds the only end of the socket
    pid = code = 0
    with contextlib.suppress(ChildProcessError):  # raised when nobody is left
        while pid != worker and signal.sigwait(signals) == signal.SIGCHLD:
            while pid != worker and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, code = ended
        while True:
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)  # of its children, those that outlive it become ours
            os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(code)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def main() -> None:
    """argv: the descriptor of a socket. The first message holds the reward functions and the limits."""
    fork_worker()
    trainer = socket.socket(fileno=int(sys.argv[1]))
    trainer.set_inheritable(False)
    tasks, results = trainer.makefile("rb"), trainer.makefile("w")
    sys.stdout.reconfigure(line_buffering=True)  # this process may be killed at any moment
    os.nice(10)
    pid = os.getpid()

    def reply(**message: Any) -> None:
        if os.getpid() != pid:  # a reward function forked, and this is the child
            os._exit(0)
        print(json.dumps(message), file=results, flush=True)

    def problem() -> str:
        """The traceback, at most 20,000 characters of it: an exception may hold a whole data set."""
        text = traceback.format_exc(limit=-8)
        return text if len(text) <= 20_000 else f"{text[:10_000]}\n... {len(text)} characters ...\n{text[-10_000:]}"

    functions, timeout_s, memory_mb = pickle.load(tasks)
    if memory_mb:
        limit(resource.RLIMIT_DATA, memory_mb << 20, memory_mb << 20)
    try:
        rewards = [load_reward(*function) for function in functions]
    except BaseException:  # even SystemExit: the trainer reports it
        reply(problem=problem(), last=True)
        signal.pause()  # to be killed, with everything that the files have started
    reply(batched=any(r.batched for r in rewards))

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
            reply(problem=problem(), status="error", last=isinstance(error, MemoryError))

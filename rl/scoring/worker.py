"""The process that calls reward functions: one task in, one result out, until its pipe closes. See pool.py beside it.

It is started with exec, imports the standard library and the user's files only, and may be killed at any moment. Tasks
arrive as pickles from the trainer; results go back as JSON, so that nothing a reward function returns can do more than
be a number. It is two processes: a guard, which outlives the other and kills whatever that one leaves behind.
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
import struct
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

HEADER = struct.Struct("<Q")  # length of the message that follows, in bytes
TASKS_PER_WORKER = 1000  # then a fresh process takes over, whatever the functions have leaked
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Reward(NamedTuple):
    """One reward function: its name in the metrics, its weight in the sum, and whether it takes lists."""

    label: str
    weight: float
    function: Callable[..., Any]
    batched: bool


def load_function(path: str, name: str) -> Callable[..., Any]:
    """The function `name` of the Python file `path`. Raises whatever importing the file raises."""
    sys.path.append(str(Path(path).parent))  # its neighbours, behind everything else
    spec = importlib.util.spec_from_file_location(f"reward_{zlib.crc32(path.encode())}", path)  # two may share a stem
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = vars(module).get(name)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")
    return function


def as_number(value: Any) -> float:
    """An int, float, bool, Decimal, numpy or torch scalar as float. Raises ValueError for others, NaN, and beyond 1e30.

    The scripts compute advantages in float32, where the differences of such numbers would no longer be finite.
    """
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, (numbers.Real, Decimal)) or not math.isfinite(plain) or abs(plain) > 1e30:
        raise ValueError(f"returned {value!r:.200} ({type(value).__name__}), not a number between -1e30 and 1e30")
    return float(plain)


def allowed(limit: int, wanted: int) -> int:
    """`wanted`, or less: a hard limit that the user has set cannot be raised."""
    hard = resource.getrlimit(limit)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def read_result(value: Any) -> tuple[float | None, dict[str, float]]:
    """What a reward function returned for one response -> (score, components); score None means "no score".

    A dict has `score`, and its other finite numbers are components; texts and other entries are left out. Raises
    ValueError for a dict without `score`, and for a score that `as_number` refuses.
    """
    if value is None:
        return None, {}
    if not isinstance(value, dict):
        return as_number(value), {}
    if "score" not in value:
        raise ValueError(f"returned a dict without 'score': {sorted(map(str, value))}")
    components = {}
    for key, entry in value.items():
        try:
            if key != "score":
                components[str(key)] = as_number(entry)
        except (ValueError, TypeError, RuntimeError, OverflowError):  # a text, a list, NaN: nothing to average
            pass
    return (None if value["score"] is None else as_number(value["score"])), components


def call(reward: Reward, calls: list[tuple]) -> list[tuple[float | None, dict[str, float]]]:
    """(data_source, solution_str, ground_truth, extra_info) of each response -> (score, components) of each.

    Raises ValueError for a result that is none, see `read_result`, and whatever the function raises.
    """
    if reward.batched:  # verl's signature for lists
        result = _awaited(reward.function(*map(list, zip(*calls, strict=True))))
        if isinstance(result, (str, dict)) or not hasattr(result, "__len__") or len(result) != len(calls):
            count = len(result) if hasattr(result, "__len__") else "no list of"
            raise ValueError(f"{reward.label} returned {count} scores for {len(calls)} responses")
        return [read_result(value) for value in result]
    return [read_result(_awaited(reward.function(*arguments))) for arguments in calls]


def _awaited(result: Any) -> Any:
    """What a reward function returned, also if it is `async`."""
    if not inspect.iscoroutine(result):
        return result
    import asyncio  # takes longer than everything else here, so a worker without need for it starts in half the time

    return asyncio.run(result)


def score(rewards: list[Reward], calls: list[tuple]) -> list[tuple[float | None, dict[str, float]]]:
    """Weighted sum of all reward functions for each response of a task; no score if one of them gives none.

    With several functions each one's own score is the component `label`, and its components are `label/key`; `acc`, the
    accuracy in an evaluation, is that of the first one, or its score, and no penalty on length changes it.
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


def shortened(text: str) -> str:
    """At most 20,000 characters of a text, from both ends: an exception may hold a whole data set."""
    return text if len(text) <= 20_000 else f"{text[:10_000]}\n... {len(text)} characters ...\n{text[-10_000:]}"


def read_message(pipe: Any) -> bytes | None:
    """One length-prefixed message, or None at the end of the pipe."""
    header = pipe.read(HEADER.size)
    return pipe.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else None


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
    os.close(0)
    os.close(int(sys.argv[1]))  # the worker holds the only ends of the pipes
    code = 0
    with contextlib.suppress(ChildProcessError):  # raised when nobody is left
        pid = 0
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
    """argv: the descriptor for results. The first message holds the reward functions and the limits."""
    fork_worker()
    tasks, results = os.fdopen(os.dup(0), "rb"), os.fdopen(int(sys.argv[1]), "wb")
    os.set_inheritable(results.fileno(), False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what a reward prints goes to the trainer's stderr, never into a result
    sys.stdout.reconfigure(line_buffering=True)  # and at once: this process may be killed at any moment
    os.nice(10)
    pid = os.getpid()

    def reply(message: dict) -> None:
        if os.getpid() != pid:  # a reward function forked, and this is the child
            os._exit(0)
        body = json.dumps(message).encode()
        results.write(HEADER.pack(len(body)) + body)
        results.flush()

    functions, timeout_s, memory_mb = pickle.loads(read_message(tasks))
    if memory_mb:
        memory = allowed(resource.RLIMIT_DATA, memory_mb << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    try:
        rewards = []
        for label, weight, path, name in functions:
            function = load_function(path, name)
            rewards.append(Reward(label, weight, function, "solution_strs" in inspect.signature(function).parameters))
    except BaseException:  # even SystemExit: the trainer reports it
        reply({"problem": traceback.format_exc(limit=-8), "last": True})
        signal.pause()
    reply({"batched": any(r.batched for r in rewards)})

    for number in range(TASKS_PER_WORKER):
        if (message := read_message(tasks)) is None:
            return
        calls, twice = pickle.loads(message)
        soft = math.ceil(time.process_time() + timeout_s * len(calls) * (1 + twice))
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (allowed(resource.RLIMIT_CPU, soft), hard))  # beyond it SIGXCPU kills
        last = number + 1 == TASKS_PER_WORKER
        try:
            scored = score(rewards, calls)
            same = not twice or score(rewards, calls) == scored
            reply({"scored": scored, "same": same, "last": last})
        except BaseException as error:  # a reward may raise anything, SystemExit included; the run goes on
            last = last or isinstance(error, MemoryError)
            reply({"problem": shortened(traceback.format_exc(limit=-8)), "status": "error", "last": last})
        if last:
            signal.pause()  # to be killed, with everything that the reward functions have started

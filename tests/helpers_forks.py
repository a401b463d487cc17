"""Runs of the scripts in processes of their own that need not import anything: they are forked from one that has.

A start costs a tenth of a second, so a test can afford many of them, and break each in its own way.
"""

import atexit
import contextlib
import ctypes
import importlib
import itertools
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from launch import ROOT, TESTS

CONTEXT = multiprocessing.get_context("forkserver")
SCRIPTS = ("train_grpo", "train_ppo", "train_dapo", "sft", "train_reward")
PRELOADED = [*SCRIPTS, "transformers.models.qwen2.modeling_qwen2", "torch.testing", "pytest", "helpers_scripts"]
PR_SET_PDEATHSIG = 1

_started: list[Any] = []  # processes; the interpreter would wait for those that a failed test has left behind
atexit.register(lambda: [process.kill() for process in _started if process.is_alive()])


class Run(NamedTuple):
    """A script that is running, on one rank or more."""

    processes: list[Any]
    log: Path  # what all ranks print

    def ends(self, seconds: float = 60) -> list[int]:
        """Wait for all ranks; returns their exit codes, which are negative for deaths by a signal."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.01))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        assert None not in codes, f"after {seconds} s exit codes were {codes}:\n{self.log.read_text()[-6000:]}"
        return codes

    def ask(self, number: int, *ranks: int) -> float:
        """Send a signal to some ranks, by default to all; returns the time."""
        for rank in ranks or range(len(self.processes)):
            os.kill(self.processes[rank].pid, number)
        return time.monotonic()


def start(
    script: str, settings: dict[str, Any], log: Path, *, fault: Callable[[], object] | None = None, ranks: int = 1
) -> Run:
    """Start main of a script on so many ranks, without torchrun. Each calls `fault`, a picklable function, before."""
    with contextlib.ExitStack() as held:
        port = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    kept = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "PYTHONPATH")}
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{TESTS}"}
    try:
        CONTEXT.set_forkserver_preload(PRELOADED)  # the first start imports them, with this environment
        processes = []
        for rank in range(ranks):
            environment = {name: str(x) for name, x in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()}
            processes.append(CONTEXT.Process(target=_main, args=(script, settings, environment, log, fault)))
            processes[-1].start()
            _started.append(processes[-1])
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return Run(processes, log)


def _main(script: str, settings: dict, environment: dict, log: Path, fault: Callable | None) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= environment
    torch.set_num_threads(1)
    module = importlib.import_module(script)
    if fault is not None:
        fault()
    module.main(module.Args(**settings))


def at_call(owner: Any, name: str, n: int, act: Callable[[], object]) -> None:
    """From now on `act()` is called before the n-th call of owner.name."""
    original, calls = getattr(owner, name), itertools.count(1)

    def counted(*args: Any, **options: Any) -> Any:
        if next(calls) == n:
            act()
        return original(*args, **options)

    setattr(owner, name, counted)


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

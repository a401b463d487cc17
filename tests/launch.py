"""Where the repository is, and how the tests start processes in it: as a user does, on several ranks, or by a fork.

`start`, `finish` and `run` are for commands; `run_in_turn` is for several runs of scripts in the same processes, which
saves their start-up. `fork` starts a run that need not import anything, in a tenth of a second: a test can afford many
of them, and break each in its own way.
"""

import atexit
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
PATHS = f"{ROOT}:{TESTS}"  # a PYTHONPATH for processes that import what tests share
SHARED = ROOT.parent / "shared" / "data"  # real data sets; tests that need them are skipped where they are missing

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
TORCHRUN = ("-m", "torch.distributed.run")
SCRIPTS = ("train_grpo", "train_ppo", "train_dapo", "sft", "train_reward")


def environment(**changes: object) -> dict[str, str]:
    """This process's environment without its rank, with one thread, no network and our packages. None unsets a name."""
    kept = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return {name: str(value) for name, value in (kept | SETTINGS | changes).items() if value is not None}


def forget_rank() -> None:
    """Else processes started later would take themselves for the rank that this process has been."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)


def free_ports(count: int) -> list[int]:
    """So many ports that nobody listens on, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def start(*command: object, nproc: int = 0, cwd: str | Path = ROOT, **env: object) -> subprocess.Popen:
    """Start `python command`, or torchrun with `nproc` ranks; stdout and stderr come together. See `environment`."""
    launcher = [*TORCHRUN, "--standalone", "--nproc_per_node", nproc] if nproc else []
    return subprocess.Popen(
        [sys.executable, *map(str, [*launcher, *command])],
        cwd=cwd,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, *, timeout: float = 120) -> str:
    """Wait for a started process; returns what it printed, and leaves the exit status in `process.returncode`."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks
        output, _ = process.communicate()
        raise AssertionError(f"{process.args} took longer than {timeout} s:\n{output[-4000:]}") from None
    return output


def run(*command: object, nproc: int = 0, timeout: float = 120, cwd: str | Path = ROOT, **env: object) -> str:
    """`start` and `finish` a command that must succeed; returns its output."""
    process = start(*command, nproc=nproc, cwd=cwd, **env)
    output = finish(process, timeout=timeout)
    assert process.returncode == 0, f"{process.args} ended with {process.returncode}:\n{output[-8000:]}"
    return output


def run_elsewhere(*command: object, cwd: str | Path) -> str:
    """`run` in another folder than the repository, which is not on the path: a file must find the rest by itself."""
    return run(*command, cwd=cwd, PYTHONPATH=None)


def run_in_turn(file: Path, *entries: dict, nproc: int) -> tuple[int, str]:
    """Run mains one after the other on `nproc` ranks; returns exit status and output. A run that dies is the last.

    For what an entry may hold see `helpers_scripts.run_entries`; each gets a port for a process group of its own.
    """
    ports = free_ports(len(entries))
    file.write_text(json.dumps([entry | {"port": port} for entry, port in zip(entries, ports, strict=True)]))
    process = start(TESTS / "helpers_scripts.py", file, nproc=nproc)
    output = finish(process)
    return process.returncode, output


# ---------------------------------------------------------------------------------------------------------------------
# Forks of a process that has imported everything

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [*SCRIPTS, "transformers.models.qwen2.modeling_qwen2", "torch.testing", "pytest", "helpers_scripts"]
PR_SET_PDEATHSIG = 1

_started: list[Any] = []  # processes; the interpreter would wait for those that a failed test has left behind
atexit.register(lambda: [process.kill() for process in _started if process.is_alive()])


class Forked(NamedTuple):
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


def fork(
    script: str, settings: dict[str, Any], log: Path, *, fault: Callable[[], object] | None = None, ranks: int = 1
) -> Forked:
    """Start main of a script on so many ranks, without torchrun. Each calls `fault`, a picklable function, before."""
    (port,) = free_ports(1)
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    kept = {name: os.environ.get(name) for name in SETTINGS}
    os.environ |= SETTINGS | {"PYTHONPATH": PATHS}
    try:
        CONTEXT.set_forkserver_preload(PRELOADED)  # the first start imports them, with this environment
        processes = []
        for rank in range(ranks):
            own = {name: str(x) for name, x in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()}
            processes.append(CONTEXT.Process(target=_main, args=(script, settings, own, log, fault)))
            processes[-1].start()
            _started.append(processes[-1])
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return Forked(processes, log)


def _main(script: str, settings: dict, own: dict[str, str], log: Path, fault: Callable | None) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= own
    torch.set_num_threads(1)
    module = importlib.import_module(script)
    if fault is not None:
        fault()
    module.main(module.Args(**settings))


# ---------------------------------------------------------------------------------------------------------------------
# Watching processes


def until(condition: Callable[[], Any], seconds: float = 60, otherwise: str = "") -> Any:
    """Wait for a condition; returns what it gave."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, otherwise or f"waited {seconds} s in vain"
        time.sleep(0.01)
    return result


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """Ids of all processes below one, however deep."""
    try:
        tasks = [p.read_text().split() for p in Path(f"/proc/{pid}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [one for task in tasks for child in map(int, task) for one in (child, *descendants(child))]

"""Where the repository is, and how the tests start processes in it: as a user does, on several ranks, or by a fork.

A process that imports torch and a script takes six seconds of a core before it does anything, and 14 with vLLM.
`start`, `finish` and `run` start one, as a user does. They are for tests of a command line, of torchrun, and of what is
imported. All others take forks of a process that has imported everything, which start in a tenth of a second. `fork`
runs main of a script, which a test may break in its own way. `run_file` runs a file with arguments, and `run_in_turn`
makes several runs in a row.
"""

import atexit
import contextlib
import ctypes
import importlib
import itertools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rl.flags import build

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
PATHS = f"{ROOT}:{TESTS}"  # a PYTHONPATH for processes that import what tests share
SHARED = ROOT.parent / "shared" / "data"  # real data sets; tests that need them are skipped where they are missing

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
TORCHRUN = ("-m", "torch.distributed.run")
SCRIPTS = (
    "train_grpo",
    "train_grpo_variants",
    "train_ppo",
    "train_dapo",
    "train_reinforce",
    "train_dpo",
    "train_distill",
    "train_self_distill",
    "train_self_distill_variants",
    "train_prime",
    "train_async",
    "sft",
    "train_reward",
)


def look_at_classes_here() -> None:
    """vLLM asks a new process what a model's class can do, eight seconds of a core for each class, so as not to touch a
    GPU. Let this process look itself.
    """
    importlib.import_module("vllm.model_executor.models.registry")._run_in_subprocess = lambda inspect: inspect()


def environment(**changes: object) -> dict[str, str]:
    """This process's environment without its rank, with one thread, no network and our packages. None unsets a name."""
    kept = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return {name: str(value) for name, value in (kept | SETTINGS | changes).items() if value is not None}


def forget_rank() -> None:
    """Else processes started later would take themselves for the rank that this process has been."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)


_numbers = itertools.cycle(range(16_000, 32_000))
for _ in range(os.getpid() * 997 % 16_000):
    next(_numbers)  # other processes that test begin elsewhere


def free_ports(count: int) -> list[int]:
    """This many different ports that nobody listens on, below those that the kernel gives to any connection."""
    ports: list[int] = []
    while len(ports) < count:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", number := next(_numbers))):
            ports.append(number)
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


def finish(process: subprocess.Popen, *, timeout: float = 600) -> str:
    """Wait for a started process; returns what it printed, and leaves the exit status in `process.returncode`."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks
        output, _ = process.communicate()
        raise AssertionError(f"{process.args} took longer than {timeout} s:\n{output[-4000:]}") from None
    return output


def run(*command: object, nproc: int = 0, timeout: float = 600, cwd: str | Path = ROOT, **env: object) -> str:
    """`start` and `finish` a command that must succeed; returns its output."""
    process = start(*command, nproc=nproc, cwd=cwd, **env)
    output = finish(process, timeout=timeout)
    assert process.returncode == 0, f"{process.args} ended with {process.returncode}:\n{output[-8000:]}"
    return output


def objects(output: str, key: str) -> list[dict]:
    """The JSON objects, printed by any rank, whose first key is this one: their lines may be glued to others."""
    starts = (found.start() for found in re.finditer(re.escape(f'{{"{key}":'), output))
    return [json.JSONDecoder().raw_decode(output, start)[0] for start in starts]


def run_elsewhere(*command: object, cwd: str | Path) -> str:
    """`run` in another folder than the repository, which is not on the path: a file must find the rest by itself."""
    return run(*command, cwd=cwd, PYTHONPATH=None)


# ---------------------------------------------------------------------------------------------------------------------
# Forks of a process that has imported everything

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["uncollected", *SCRIPTS]
PRELOADED += ["transformers.models.qwen2.modeling_qwen2", "torch.testing", "pytest", "helpers_scripts"]
# What an engine of vLLM imports, eight seconds of a core; where it is not installed nothing happens.
PRELOADED += ["vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen2"]
PRELOADED += ["frozen"]
PR_SET_PDEATHSIG = 1

_started: list[Any] = []  # processes; the interpreter would wait for those that a failed test has left behind
atexit.register(lambda: [process.kill() for process in _started if process.is_alive()])


class Forked(NamedTuple):
    """What runs in forks, on one rank or more."""

    processes: list[Any]
    log: Path  # what all ranks print

    def ends(self, seconds: float = 300) -> list[int]:
        """Wait for all ranks; returns their exit codes, which are negative for deaths by a signal.

        No run of a test takes this long: the limit is there for a machine that is busy elsewhere.
        """
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
    """Start main of a script on this many ranks, without torchrun. Each calls `fault`, a picklable function, before."""
    return _fork(ranks, log, environment(PYTHONPATH=PATHS), _main, script, settings, fault)


def fork_file(file: str | Path, *arguments: object, log: Path, nproc: int = 0, **env: object) -> Forked:
    """What `start` does for `python file arguments`, or for `nproc` ranks of it, but in forks and without torchrun."""
    return _fork(nproc, log, environment(**env), _run_file, str(ROOT / file), list(map(str, arguments)))


def run_file(file: str | Path, *arguments: object, nproc: int = 0, timeout: float = 600, **env: object) -> str:
    """What `run` does for `python file arguments`, or for `nproc` ranks of it, but in forks and without torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        forked = fork_file(file, *arguments, log=Path(folder, "log"), nproc=nproc, **env)
        codes, output = forked.ends(timeout), forked.log.read_text()
    assert not any(codes), f"{file} ended with {codes}:\n{output[-8000:]}"
    return output


def run_in_turn(file: Path, *entries: dict, nproc: int) -> tuple[int, str]:
    """Run mains one after the other on `nproc` ranks; returns exit status and output. A run that dies is the last.

    For what an entry may hold see `helpers_scripts.run_entries`; each gets a port for a process group of its own.
    """
    ports = free_ports(len(entries))
    file.write_text(json.dumps([entry | {"port": port} for entry, port in zip(entries, ports, strict=True)]))
    forked = fork_file(TESTS / "helpers_scripts.py", file, log=file.with_suffix(".log"), nproc=nproc)
    codes = forked.ends(600)
    return next(filter(None, codes), 0), forked.log.read_text()


def _fork(nproc: int, log: Path, env: dict[str, str], target: Callable, *arguments: object) -> Forked:
    """Call `target` on `nproc` ranks, or with nproc 0 in one process that is not a rank, and in this environment."""
    (port,) = free_ports(1)
    world = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with _as_preloaded():  # the first start imports what is preloaded
        processes = []
        for rank in range(max(nproc, 1)):
            own = {name: str(x) for name, x in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()} if nproc else {}
            processes.append(CONTEXT.Process(target=_child, args=(env | own, log, target, arguments)))
            processes[-1].start()
            _started.append(processes[-1])
    return Forked(processes, log)


@contextlib.contextmanager
def _as_preloaded() -> Iterator[None]:
    """The environment in which modules are preloaded."""
    kept = os.environ.copy()
    os.environ |= SETTINGS | {
        "PYTHONPATH": PATHS,
        "VLLM_LOGGING_LEVEL": "ERROR",
    }  # as rl/sampling/engines/vllm.py imports it
    try:
        CONTEXT.set_forkserver_preload(PRELOADED)
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def start_server() -> tuple[str, str]:
    """Start the process that others are forked from, before there is anything to fork. Returns its address, and a file
    that keeps it alive as long as any process has it open.
    """
    with _as_preloaded():
        multiprocessing.forkserver.ensure_running()
    server = multiprocessing.forkserver._forkserver
    return server._forkserver_address, f"/proc/{os.getpid()}/fd/{server._forkserver_alive_fd}"


def use_server(address: str, alive: str) -> None:
    """Fork from the process that another process has started, see `start_server`."""
    server = multiprocessing.forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd = address, os.open(alive, os.O_WRONLY)
    server.ensure_running = lambda: None  # would look for it among the children of this process


def _child(env: dict[str, str], log: Path, target: Callable, arguments: tuple) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for stream in (sys.stdout, sys.stderr):  # with PYTHONUNBUFFERED a text and its newline would be two writes
        stream.reconfigure(line_buffering=True, write_through=False)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    torch.set_num_threads(1)
    try:
        target(*arguments)
    except Exception:  # as the interpreter ends a script; multiprocessing has its own way
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def _main(script: str, settings: dict, fault: Callable | None) -> None:
    module = importlib.import_module(script)
    if fault is not None:
        fault()
    module.main(build(module.Args, **settings))


def _run_file(file: str, arguments: list[str]) -> None:
    sys.argv = [file, *arguments]
    sys.path.insert(0, str(Path(file).parent))
    runpy.run_path(file, run_name="__main__")


# ---------------------------------------------------------------------------------------------------------------------
# Watching processes


def until(condition: Callable[[], Any], seconds: float = 300, otherwise: str = "") -> Any:
    """Wait for a condition; returns what it gave."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, otherwise or f"waited {seconds} s in vain"
        time.sleep(0.01)
    return result


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def listens(pid: int) -> set[str]:
    """The addresses at which a process waits for TCP connections, as the kernel writes them: 0100007F is 127.0.0.1."""
    found = {}
    for name in ("tcp", "tcp6"):
        for _, address, _, state, *rest in map(str.split, Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]):
            found |= {rest[5]: address.split(":")[0]} if state == "0A" else {}
    files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return {found[x[8:-1]] for x in files if x.startswith("socket:[") and x[8:-1] in found}


def children(pid: int) -> list[int]:
    """Ids of the processes that one has started, zombies too; none if there is no such process."""
    try:
        tasks = [p.read_text().split() for p in Path(f"/proc/{pid}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for task in tasks for child in task]


def descendants(pid: int) -> list[int]:
    """Ids of all processes below one, however deep."""
    return [one for child in children(pid) for one in (child, *descendants(child))]

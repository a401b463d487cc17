"""What becomes of the ranks when their launcher dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import RANK_VARIABLES, ROOT

RANK = """
import os, sys, time
from pathlib import Path
from rl.fsdp import init_distributed

if sys.argv[2] == "joined":
    init_distributed()
Path(sys.argv[1], "rank" + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("when", ["joined", "before"])
def test_no_rank_outlives_a_killed_torchrun(tmp_path, when):
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    launcher = subprocess.Popen(
        [*command, str(tmp_path / "rank.py"), str(tmp_path), when],
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    files = [tmp_path / "rank0", tmp_path / "rank1"]
    try:
        assert until(lambda: all(f.exists() and f.read_text() for f in files), 120)
        pids = [int(f.read_text()) for f in files]
        assert all(map(alive, pids))
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        assert until(lambda: not any(map(alive, pids)), 2), "ranks live on after torchrun was killed"
    finally:
        launcher.kill()


# --- a run that does not move ---

STALL = """
import sys, time
import torch
from rl import fsdp, watchdog
from rl.metrics import Timer

d = fsdp.init_distributed()
watchdog.start(2.0, d.rank)
for step in range(3):  # 4.5 s in all: slow is not stalled
    clock = Timer(d.device)
    time.sleep(1.5)
    clock("gen")


def forget_the_collective():
    time.sleep(600)


if sys.argv[1] == "no":
    watchdog.stop()
    time.sleep(3)
    fsdp.shutdown_distributed()
elif d.rank == 0:
    fsdp.all_reduce_sum(torch.ones(1))
else:
    forget_the_collective()
"""


def run_ranks(script: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    result = subprocess.run(
        [*command, *arguments],
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    return result.returncode, result.stderr


def test_a_stalled_run_says_where_it_stands_and_ends(tmp_path):
    (tmp_path / "stall.py").write_text(STALL)
    code, errors = run_ranks(tmp_path / "stall.py", "yes")
    assert code != 0
    (line, *_) = [line for line in errors.splitlines() if "no phase has ended for" in line]
    assert "the last one was 'gen'" in line and "--stall-timeout 2" in line
    assert "all_reduce" in errors or "forget_the_collective" in errors  # the stacks lead to the place


def test_a_run_that_moves_or_has_ended_is_left_alone(tmp_path):
    (tmp_path / "stall.py").write_text(STALL)
    assert run_ranks(tmp_path / "stall.py", "no")[0] == 0

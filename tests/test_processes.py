"""What becomes of the ranks when their launcher dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from conftest import RANK_VARIABLES, ROOT

RANK = """
import os, sys, time
from pathlib import Path
from rl.fsdp import init_distributed

d = init_distributed()
Path(sys.argv[1], f"rank{d.rank}").write_text(str(os.getpid()))
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


def test_no_rank_outlives_a_killed_torchrun(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    launcher = subprocess.Popen(
        [*command, str(tmp_path / "rank.py"), str(tmp_path)],
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

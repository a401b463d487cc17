"""What becomes of the ranks when their launcher dies."""

import os
import signal
from pathlib import Path

import launch
import pytest

RANK = """
import os, sys, time
from dataclasses import make_dataclass
from pathlib import Path
from rl import flags
from rl.ranks import init_ranks

if sys.argv[2] == "joined":
    init_ranks()
else:
    flags.parse(make_dataclass("Args", [("words", flags.tyro.conf.Positional[tuple[str, ...]])]), None)
Path(sys.argv[1], "rank" + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.parametrize("when", ["joined", "parsed"])
def test_no_rank_outlives_a_killed_torchrun(tmp_path, when):
    (tmp_path / "rank.py").write_text(RANK)
    launcher = launch.start(tmp_path / "rank.py", tmp_path, when, nproc=2)
    files = [tmp_path / "rank0", tmp_path / "rank1"]
    try:
        launch.until(lambda: all(f.exists() and f.read_text() for f in files), 120)
        pids = [int(f.read_text()) for f in files]
        assert all(map(launch.alive, pids))
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        launch.until(lambda: not any(map(launch.alive, pids)), 2, "ranks live on after torchrun was killed")
    finally:
        launcher.kill()


# --- a run that does not move ---

STALL = """
import os, sys, time
import torch
from rl.ranks import init_ranks, shutdown_ranks
from rl.run import watchdog
from rl.run.clock import Clock

os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is said counts only on stderr
ranks = init_ranks()
watchdog.start(2.0, ranks.rank)
for step in range(3):  # 4.5 s in all: slow is not stalled
    clock = Clock(ranks)
    time.sleep(1.5)
    clock("gen")


def forget_the_collective():
    time.sleep(600)


if sys.argv[1] == "no":
    watchdog.stop()
    time.sleep(3)
    shutdown_ranks()
elif ranks.rank == 0:
    ranks.all_reduce_sum(torch.ones(1))
else:
    forget_the_collective()
"""


def run_ranks(script: Path, *arguments: str) -> tuple[list[int], str]:
    run = launch.fork_file(script, *arguments, log=script.with_suffix(".log"), nproc=2)
    return run.ends(180), run.log.read_text()


def test_a_stalled_run_says_where_it_stands_and_ends(tmp_path):
    (tmp_path / "stall.py").write_text(STALL)
    codes, errors = run_ranks(tmp_path / "stall.py", "yes")
    assert 0 not in codes
    (line, *_) = [line for line in errors.splitlines() if "no phase has ended for" in line]
    assert "the last one was 'gen'" in line and "--stall-timeout 2" in line
    assert "all_reduce" in errors or "forget_the_collective" in errors  # the stacks lead to the place


def test_a_run_that_moves_or_has_ended_is_left_alone(tmp_path):
    (tmp_path / "stall.py").write_text(STALL)
    assert run_ranks(tmp_path / "stall.py", "no")[0] == [0, 0]

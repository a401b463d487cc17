"""What becomes of the ranks when their launcher dies."""

import os
import signal
import subprocess
import sys

import helpers_scripts as h
import launch
import pytest

RANK = """
import os, sys, time
from dataclasses import make_dataclass
from pathlib import Path
import tyro
from rl.run.command_line import parse
from rl.ranks import init_ranks

if sys.argv[2] == "joined":
    init_ranks()
else:
    parse(make_dataclass("Args", [("words", tyro.conf.Positional[tuple[str, ...]], ())]), None)
Path(sys.argv[1], "rank" + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.parametrize("when", h.some(["joined", "parsed"], "parsed"))
def test_no_rank_outlives_a_killed_torchrun(tmp_path, when):
    (tmp_path / "rank.py").write_text(RANK)
    launcher = launch.start(tmp_path / "rank.py", tmp_path, when, nproc=2)
    files = [tmp_path / "rank0", tmp_path / "rank1"]
    try:
        launch.until(lambda: all(f.exists() and f.read_text() for f in files))
        pids = [int(f.read_text()) for f in files]
        assert all(map(launch.alive, pids))
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        launch.until(lambda: not any(map(launch.alive, pids)), otherwise="ranks live on after torchrun was killed")
    finally:
        launcher.kill()


# --- a run that does not move ---

STALL = """
import ctypes, os, sys, time
import torch
from rl.ranks import init_ranks, shutdown_ranks
from rl.run import watchdog
from rl.run.clock import Clock

os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is said counts only on stderr
ranks = init_ranks()
watchdog.start(10.0)
for step in range(3 * (sys.argv[1] != "held")):  # 12 s in all: slow is not stalled
    clock = Clock(ranks)
    time.sleep(4)
    clock("gen")


def forget_the_collective():
    time.sleep(600)


def hold_the_interpreter():
    ctypes.PyDLL(None).sleep(600)  # no other thread can run


if sys.argv[1] == "no":
    watchdog.stop()
    time.sleep(11)
    shutdown_ranks()
elif sys.argv[1] == "held":
    hold_the_interpreter()
elif ranks.rank == 0:
    ranks.all_reduce_sum(torch.ones(1))
else:
    forget_the_collective()
"""


@pytest.fixture(scope="module")
def stalls(tmp_path_factory):
    """How: (exit codes, output) of two ranks, all at once, since they only wait."""
    folder = tmp_path_factory.mktemp("stalls")
    (folder / "stall.py").write_text(STALL)
    hows = ("yes", "held", "no")
    runs = {how: launch.fork_file(folder / "stall.py", how, log=folder / f"{how}.log", nproc=2) for how in hows}
    return {how: (run.ends(), run.log.read_text()) for how, run in runs.items()}


def test_a_stalled_run_shows_its_stacks_and_ends(stalls):
    codes, errors = stalls["yes"]
    assert codes == [1, 1] and errors.count("Timeout (0:00:10)!") == 2
    assert "all_reduce" in errors and "forget_the_collective" in errors  # the stacks lead to the place


def test_a_rank_whose_interpreter_is_held_shows_its_stacks_and_ends(stalls):
    codes, errors = stalls["held"]
    assert codes == [1, 1] and errors.count("Timeout (0:00:10)!") == 2
    assert errors.count("hold_the_interpreter") == 2


def test_a_run_that_moves_or_has_ended_is_left_alone(stalls):
    assert stalls["no"][0] == [0, 0]


PATIENT = """
import sys
import torch
from rl.model import load as models
from rl.model.sharding import shard
from rl.ranks import PATIENCE, init_ranks, shutdown_ranks

ranks = init_ranks()
mesh = next(shard(models.load_pretrained(sys.argv[1], ranks), ranks).parameters()).device_mesh
for group in (ranks.group, *mesh.get_all_groups()):
    assert group._get_backend(torch.device("cpu")).options._timeout == PATIENCE
print("as long as it takes")
shutdown_ranks()
"""


def test_ranks_of_a_run_wait_for_each_other_without_end(tiny_model, tmp_path):
    """--stall-timeout is the only limit."""
    (tmp_path / "patient.py").write_text(PATIENT)
    assert "as long as it takes" in launch.run_file(tmp_path / "patient.py", tiny_model)


# --- a stdout that takes nothing ---

SPEAKER = """
import os, sys
from rl.console import outlive_output, say
outlive_output()
say("a line")
open(sys.argv[1], "w").write("saved")
say("another line")
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("output", "code"),
    h.some_rows([("> /dev/full", 0), ("> /dev/full", 3), (">&-", 0), ("2>&-", 0), ("| true", 0)], ("> /dev/full", 3)),
)
def test_what_becomes_of_stdout_does_not_change_the_exit_code(tmp_path, output, code):
    (tmp_path / "speaker.py").write_text(SPEAKER)
    command = f"set -o pipefail; {sys.executable} {tmp_path}/speaker.py {tmp_path}/saved {code} {output}"
    ended = subprocess.run(["bash", "-c", command], env=launch.environment(), capture_output=True, timeout=600)
    assert ended.returncode == code and not ended.stderr
    assert (tmp_path / "saved").read_text() == "saved"

"""Runs that are asked to stop, in every phase: real signals to real runs of the scripts.

Whatever moment it was, what is left must be the state after the last completed step. It must be that of a run which
nobody disturbed, bit by bit, and the same command must continue to the same end.
"""

import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import helpers_scripts as h
import launch
import numpy as np
import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from extras.engines import hf
from rl import stop
from rl.run import checkpoint, checkpoint_tensors
from rl.run.checkpoint_files import list_steps
from rl.sampling.engines import vllm

OUT_WITHIN_S = 30  # of a busy machine; what would go on without the request lasts longer
ASKED = "ASKED_AT"  # environment variable: file into which a process writes when it asks itself

# Scores by parity; while there is a file `sleep` beside it, it says `asleep` and takes ten minutes.
REWARD = (
    """
import os, time
from pathlib import Path
HERE = Path(__file__).parent
"""
    + h.REWARD
    + """
parity = compute_score

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if (HERE / "sleep").exists():
        (HERE / f"asleep{os.getpid()}").touch()
        time.sleep(600)
    return parity(data_source, solution_str, ground_truth)
"""
)


ASKED_TOGETHER = """
import os, signal, time
import torch.distributed as dist
from rl import stop

dist.init_process_group("gloo")
stop.start(None)
stop.arm(lambda: None)
assert not stop.requested()  # has looked, and will not look again for a while
dist.barrier()
if dist.get_rank() == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    while not stop.requested():
        time.sleep(0.001)
assert stop.requested(dist.group.WORLD) and stop.requested()
print("knows", flush=True)
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    task = h.make_task(tmp_path_factory.mktemp("task"))
    Path(task.reward).write_text(REWARD)
    return task


# ---------------------------------------------------------------------------------------------------------------------
# What happens in the process that is asked


def note_when_asked(file, fault):
    """Do `fault`; each `ask` of this process will write the time to the file."""
    os.environ[ASKED] = str(file)
    if fault is not None:
        fault()


def ask():
    """Send SIGTERM to this process, and wait until it has been noticed."""
    Path(os.environ[ASKED]).write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGTERM)
    while stop._state.asked_at == float("inf"):
        time.sleep(0.001)


def ask_at(owner, name, n):
    """`owner` is a module, by name."""
    h.at_call(importlib.import_module(owner), name, n, ask)


def slow_tokens(seconds=3.0):
    """From now on each token takes this long: a response of 12 lasts longer than a run may take to leave."""

    def slow(*arguments, original=hf.processed_logprobs):
        time.sleep(seconds)
        return original(*arguments)

    hf.processed_logprobs = slow


def ask_while_generating(n, rank=0):
    """In the n-th generation, which has become slow on all ranks."""

    def act():
        slow_tokens()
        if os.environ["RANK"] == str(rank):
            threading.Timer(0.3, ask).start()

    h.at_call(hf.Engine, "add", n, act)


def ask_in_optimizer_step(n):
    calls = itertools.count(1)
    register_optimizer_step_pre_hook(lambda *_: ask() if next(calls) == n else None)


def ask_while_saving():
    def act():
        ask()
        time.sleep(0.5)

    h.at_call(checkpoint.Saver, "_write", 1, act)


def rewards_sleep(n, folder):
    """From the n-th generation on."""
    h.at_call(hf.Engine, "add", n, Path(folder, "sleep").touch)


def ask_again_while_leaving(n):
    """In the n-th generation, and once more when the checkpoint, which will take ten minutes, has been begun."""

    def act():
        time.sleep(stop.SAME_REQUEST_S + 0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)

    ask_while_generating(n)
    h.at_call(checkpoint_tensors, "write", 1, act)


def hang(rank, file):
    """This rank never returns from its first generation; what the other waits in cannot be interrupted by Python."""

    def act():
        Path(file).touch()
        time.sleep(600)

    if os.environ["RANK"] == str(rank):
        h.at_call(hf.Engine, "add", 1, act)


def lag(rank):
    if os.environ["RANK"] == str(rank):
        h.at_call(hf.Engine, "add", 1, partial(time.sleep, 1.5))


def ask_while_vllm_generates(n):
    """In the n-th generation, of 80 tokens: the engine looks every 16 of them."""
    from vllm.v1.engine.core_client import InprocClient

    def slow_step(core, step=InprocClient.get_output):
        time.sleep(0.2)
        return step(core)

    def act():
        InprocClient.get_output = slow_step
        threading.Timer(0.3, ask).start()

    h.at_call(vllm.Engine, "add", n, act)


# ---------------------------------------------------------------------------------------------------------------------
# Chains of runs, each of them stopped


class Chain:
    """One run that is stopped again and again, always continued by the same command, beside one that is not."""

    def __init__(self, script, make, folder, ranks=1, **settings):
        self.script, self.folder, self.ranks = script, folder, ranks
        self.run_dir, self.unbroken = folder / "run", folder / "unbroken"
        self.settings = make(run_dir=self.run_dir, save_freq=-1, **settings)
        self.same: set[int] = set()  # steps whose checkpoints have been compared
        whole = make(run_dir=self.unbroken, save_freq=1, **settings)
        run = launch.fork(script, whole, folder / "log", ranks=ranks)
        assert run.ends() == [0] * ranks, run.log.read_text()[-6000:]

    def start(self, fault=None, **changes):
        (self.folder / "asked").unlink(missing_ok=True)
        fault = partial(note_when_asked, self.folder / "asked", fault)
        return launch.fork(self.script, self.settings | changes, self.folder / "log", fault=fault, ranks=self.ranks)

    def status(self):
        status = json.loads((self.run_dir / "STATUS.json").read_text())
        return status["state"], status["step"]

    def stops_at(self, step, fault=None, *, code=0, **changes):
        """Run until it stops; it must have left everything of that step behind, and nothing else."""
        self.left_at(self.start(fault, **changes), step, code=code)

    def ends_in_start_up(self, fault):
        """At once, by the signal itself, and with nothing saved."""
        run = self.start(fault)
        assert run.ends() == [-signal.SIGTERM] * self.ranks, run.log.read_text()[-6000:]
        assert time.monotonic() - float((self.folder / "asked").read_text()) < OUT_WITHIN_S
        assert self.status() == ("running", 0) and list_steps(self.run_dir) == []

    def left_at(self, run, step, *, asked_at=None, code=0):
        codes = run.ends()
        ended = time.monotonic()
        assert codes == [code] * self.ranks, run.log.read_text()[-6000:]
        if (self.folder / "asked").exists():
            asked_at = float((self.folder / "asked").read_text())
        if asked_at is not None:  # not by --max-hours
            print(f"{self.script} left at step {step} in {ended - asked_at:.2f} s")
            assert ended - asked_at < OUT_WITHIN_S
        steps = list_steps(self.run_dir)
        if code == 0:
            assert self.status() == ("stopped", step)
            assert steps[-1:] == ([step] if step else [])
        for saved in set(steps) - self.same:
            self.assert_same(saved)
        return steps

    def assert_same(self, step):
        one, two = (folder / f"global_step_{step}" for folder in (self.run_dir, self.unbroken))
        h.assert_same(h.weights(one), h.weights(two))
        h.assert_same(h.saved_state(one), h.saved_state(two))
        assert waiting_groups(one) == waiting_groups(two)
        self.same.add(step)

    def stops_while_rewards_sleep(self, step, n, *ranks, number=signal.SIGTERM):
        """Stopped from outside, while the reward functions of the n-th generation sleep."""
        run = self.start(partial(rewards_sleep, n, self.reward_folder))
        launch.until(lambda: len(list(self.reward_folder.glob("asleep*"))) == self.ranks)
        workers = [int(f.name.removeprefix("asleep")) for f in self.reward_folder.glob("asleep*")]
        self.left_at(run, step, asked_at=run.ask(number, *ranks))
        launch.until(lambda: not any(map(launch.alive, workers)))
        for file in self.reward_folder.glob("*sleep*"):
            file.unlink()

    @property
    def reward_folder(self):
        return Path(self.settings["custom_reward_function"][0]).parent

    def ends_like_the_unbroken_one(self, fault=None, **changes):
        run = self.start(fault, **changes)
        assert run.ends() == [0] * self.ranks, run.log.read_text()[-6000:]
        last = list_steps(self.unbroken)[-1]
        assert self.status() == ("completed", last)
        self.assert_same(last)
        lines = [h.timeless(h.read_jsonl(folder / "metrics.jsonl")) for folder in (self.run_dir, self.unbroken)]
        assert lines[0] == lines[1] and lines[0][-1]["step"] == last
        assert not list(self.run_dir.glob(".*"))


def waiting_groups(path):
    """What train_dapo.py carries from step to step, without the seconds that scoring took; what others carry."""
    states = checkpoint.load_states(path)
    for response in (x for state in states for group in state.get("surplus", []) for x in group):
        response["score"].pop()
        for tokens in (response, response["columns"]):
            tokens |= {name: x.tolist() for name, x in tokens.items() if isinstance(x, np.ndarray)}
    return states


@pytest.fixture
def own_task(task, tmp_path):
    """The task with a reward file of this test's own."""
    (tmp_path / "reward.py").write_text(REWARD)
    return task._replace(reward=str(tmp_path / "reward.py"))


def test_grpo_asked_in_every_phase(own_task, tmp_path):
    # Two updates per step, each of several micro-batches.
    settings = dict(total_training_steps=3, ppo_mini_batch_size=2, ppo_max_token_len_per_gpu=130)
    chain = Chain("train_grpo", partial(h.grpo_settings, own_task), tmp_path, **settings)
    chain.ends_in_start_up(partial(ask_at, "rl.model.load", "load_pretrained", 1))
    chain.stops_at(0, partial(ask_while_generating, 1))  # for the very first step
    assert not [p for p in chain.run_dir.iterdir() if p.is_dir()]
    chain.stops_while_rewards_sleep(1, 2)
    chain.stops_at(2, ask_while_saving, save_freq=1)
    shutil.rmtree(chain.run_dir / "global_step_2")
    steps = chain.left_at(chain.start(partial(ask_again_while_leaving, 2)), 1, code=128 + signal.SIGTERM)
    assert steps == [1] and chain.status() == ("running", 1)  # 2 was being written
    assert list(chain.run_dir.glob(".tmp-global_step_2-*"))  # swept by the next run
    chain.stops_at(2, partial(ask_in_optimizer_step, 1))  # too late to leave before the step is complete
    chain.ends_like_the_unbroken_one(max_hours=1.0)


@pytest.mark.thorough
def test_ppo_leaves_with_both_models(own_task, tmp_path):
    settings = dict(total_training_steps=3, ppo_max_token_len_per_gpu=130)
    chain = Chain("train_ppo", partial(h.ppo_settings, own_task), tmp_path, **settings)
    chain.stops_at(0, partial(ask_at, "train_ppo", "token_logprobs", 1))  # the critic has a gradient already
    chain.stops_at(1, partial(ask_in_optimizer_step, 1))  # the critic's, of the first of two updates
    chain.stops_while_rewards_sleep(2, 2)
    parts = {name.split("/")[0] for name in h.saved_state(chain.run_dir / "global_step_2")}
    assert parts == {"actor", "critic"}
    chain.ends_like_the_unbroken_one()


@pytest.mark.thorough
def test_dapo_leaves_with_the_groups_that_wait(own_task, tmp_path):
    settings = dict(total_training_steps=4, gen_batch_size=3)  # fewer prompts than a step needs
    chain = Chain("train_dapo", partial(h.dapo_settings, own_task), tmp_path, **settings)
    rounds = [int(x["train/num_gen_batches"]) for x in h.read_jsonl(chain.unbroken / "metrics.jsonl")]
    waiting = [len(waiting_groups(chain.unbroken / f"global_step_{i}")[0]["surplus"]) for i in (1, 2, 3, 4)]
    assert min(rounds[:3]) >= 1 and rounds[0] == 2 and waiting[0] >= 1
    chain.stops_at(0, partial(ask_while_generating, 2))  # its second round
    chain.stops_at(1, partial(ask_while_generating, 3))
    chain.stops_while_rewards_sleep(2, rounds[1] + 1)
    chain.stops_at(3, partial(ask_in_optimizer_step, 1))
    chain.ends_like_the_unbroken_one()


@pytest.mark.thorough
def test_sft_asked_in_every_phase(task, tmp_path):
    rows = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(8)]
    (tmp_path / "val.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = dict(
        max_token_len_per_gpu=400, val_files=(str(tmp_path / "val.jsonl"),), test_freq=2, total_training_steps=2
    )
    chain = Chain("sft", partial(h.sft_settings, task), tmp_path, **settings)
    chain.stops_at(0, partial(ask_at, "sft", "fixed_logprobs", 1))  # evaluation
    chain.stops_at(0, partial(ask_at, "sft", "token_logprobs", 1))
    chain.stops_at(1, partial(ask_in_optimizer_step, 1))
    chain.ends_like_the_unbroken_one()


@pytest.mark.thorough
def test_a_reward_model_in_training_leaves_too(task, tmp_path):
    make = partial(h.reward_settings, task, total_training_steps=2, max_token_len_per_gpu=256)
    chain = Chain("train_reward", make, tmp_path)
    chain.stops_at(0, partial(ask_at, "extras.judges.scalar_models", "sequence_scores", 1))
    chain.stops_at(1, partial(ask_in_optimizer_step, 1))
    chain.ends_like_the_unbroken_one()


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks, launchers, engines


def test_two_ranks_leave_together_whichever_was_asked(own_task, tmp_path):
    chain = Chain("train_grpo", partial(h.grpo_settings, own_task), tmp_path, ranks=2, total_training_steps=2)
    chain.stops_at(0, partial(ask_while_generating, 1, rank=1))  # the tokens of the other are slow as well
    chain.stops_while_rewards_sleep(1, 2, 0, number=signal.SIGINT)  # and so are its rewards
    chain.ends_like_the_unbroken_one(partial(lag, 1))  # being slow is not a fault


def test_what_a_group_says_its_ranks_know(tmp_path):
    """Ranks of an engine leave a generation together, and the one that was not asked must know why it is incomplete."""
    (tmp_path / "script.py").write_text(ASKED_TOGETHER)
    assert launch.run_file(tmp_path / "script.py", nproc=2).count("knows") == 2


def test_a_second_signal_ends_a_rank_that_waits_for_another(task, tmp_path):
    settings = h.grpo_settings(task, tmp_path / "run")
    run = launch.fork("train_grpo", settings, tmp_path / "log", fault=partial(hang, 1, tmp_path / "hangs"), ranks=2)
    launch.until((tmp_path / "hangs").exists)
    run.ask(signal.SIGTERM)
    run.ask(signal.SIGTERM)  # passed on by somebody
    launch.until(lambda: run.log.read_text().count("asked to stop") == 2)
    time.sleep(stop.SAME_REQUEST_S + 0.2)
    assert all(process.is_alive() for process in run.processes)
    assert run.log.read_text().count("asked to stop") == 2
    run.ask(signal.SIGINT)
    assert run.ends() == [128 + signal.SIGINT] * 2


# Prints every attempt of Python code (not of torch's sockets) to reach anything but this machine, and lets it fail.
NO_NETWORK = """
import socket, sys

def no_network(event, arguments):
    host = {"socket.connect": lambda: arguments[1][0], "socket.getaddrinfo": lambda: arguments[0]}.get(event, str)()
    if host and host not in ("localhost", socket.gethostname()) and not str(host).startswith(("127.", "::1", "/")):
        print("NETWORK", event, host, flush=True)
        raise OSError("no network")

sys.addaudithook(no_network)
import train_grpo
from rl import flags
from rl.run import arguments

train_grpo.main(arguments.parse(train_grpo.Args, None))
"""


@pytest.fixture(scope="module")
def torchrun_asked(task, tmp_path_factory):
    """Folder, output and seconds of a run of two ranks whose torchrun got a SIGTERM when some steps were done."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "script.py").write_text(NO_NETWORK)
    settings = h.grpo_settings(task, folder / "run", total_training_steps=10_000)
    process = launch.start(folder / "script.py", *h.flags(settings), nproc=2, HF_HUB_OFFLINE=0)
    try:
        launch.until((folder / "run" / "metrics.jsonl").exists)
        process.send_signal(signal.SIGTERM)
        asked_at = time.monotonic()
        output = launch.finish(process)
        return folder / "run", output, time.monotonic() - asked_at
    finally:
        process.kill()


def test_torchrun_passes_the_request_on(torchrun_asked):
    """It ends with an error of its own whatever the ranks do: STATUS.json and the checkpoint tell."""
    run_dir, output, seconds = torchrun_asked
    assert output.count("asked to stop") == 2 and "Received 15 death signal" in output and seconds < OUT_WITHIN_S
    assert "forcefully exiting" not in output  # which is what it says before it kills
    (step,) = list_steps(run_dir)
    status = json.loads((run_dir / "STATUS.json").read_text())
    assert (status["state"], status["step"]) == ("stopped", step) and 1 <= step < 10_000
    assert h.read_jsonl(run_dir / "metrics.jsonl")[-1]["step"] == step


def test_a_local_model_needs_no_network(torchrun_asked):
    run_dir, output, _ = torchrun_asked
    assert "NETWORK" not in output and len(h.read_jsonl(run_dir / "metrics.jsonl")) >= 1


def test_vllm_is_left_in_the_middle_of_a_generation(task, tmp_path):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    settings = h.grpo_settings(task, tmp_path / "run", engine="vllm", max_response_length=80)
    fault = partial(note_when_asked, tmp_path / "asked", partial(ask_while_vllm_generates, 2))
    run = launch.fork("train_grpo", settings, tmp_path / "log", fault=fault)
    assert run.ends() == [0]
    assert time.monotonic() - float((tmp_path / "asked").read_text()) < OUT_WITHIN_S
    assert json.loads((tmp_path / "run" / "STATUS.json").read_text())["state"] == "stopped"
    assert list_steps(tmp_path / "run") == [1]


# ---------------------------------------------------------------------------------------------------------------------
# Signals


SILENT = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from rl import stop

stop.start()
if sys.argv[2] == "armed":
    stop.arm(lambda: None)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("state", "signals", "code"),
    h.some_rows([("new", 1, -signal.SIGINT), ("armed", 2, 128 + signal.SIGINT)], ("armed", 2, 128 + signal.SIGINT)),
)
def test_signals_count_though_nobody_reads_stderr(state, signals, code):
    """Ctrl-C ends `tee` as well as the run whose output it reads."""
    process = subprocess.Popen(
        [sys.executable, "-c", SILENT, str(launch.ROOT), state], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        process.stderr.close()
        for _ in range(signals - 1):
            process.send_signal(signal.SIGINT)
            time.sleep(stop.SAME_REQUEST_S + 0.2)
            assert process.poll() is None
        while process.poll() is None:  # more than once where the one before has been noticed late
            process.send_signal(signal.SIGINT)
            time.sleep(stop.SAME_REQUEST_S + 0.2)
        assert process.returncode == code
    finally:
        process.kill()


def test_a_signal_to_a_child_is_no_request_and_handlers_come_back():
    stop.end()  # if a run that failed in this process has left it on
    before = [signal.getsignal(number) for number in stop.SIGNALS]
    stop.start()
    stop.arm(lambda: None)
    try:
        hears, says = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(says, b"here")
            signal.pause()
            os._exit(0)
        assert os.read(hears, 4) == b"here"
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        time.sleep(0.1)
        assert not stop.requested()
        os.kill(os.getpid(), signal.SIGINT)
        launch.until(stop.requested)
        stop.start(max_hours=2 / 3600)
        assert not stop.requested()
        launch.until(stop.requested)
    finally:
        stop.end()
    assert not stop.requested()
    assert [signal.getsignal(number) for number in stop.SIGNALS] == before

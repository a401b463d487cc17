"""Samplers and trainers that die, hang, come late, lie or lose messages: no prompt is trained twice, none is lost.

With GLASSRL_RANDOM_KILLS=50, as in `make faults`, trainers are killed 20 times at random, else four times.
"""

import errno
import itertools
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import helpers_scripts as h
import launch
import pytest
from helpers_samplers import Pools, batches, note_batches

from rl.data.encode import load_tokenizer
from rl.data.order import prompts_for_step
from rl.data.prompts import Data, load_prompts
from rl.sampling import dispatcher, sampler, weight_network
from rl.sampling.engines import hf
from rl.sampling.protocol import TOKEN
from rl.sampling.weight_files import WeightWriter

KILLS = max(2, int(os.environ.get("GLASSRL_RANDOM_KILLS", "1")) // 5)  # for each staleness


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return h.make_task_with_stops(tmp_path_factory.mktemp("task"))


@pytest.fixture
def pools(task, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, "a token of this test")
    return Pools(task, tmp_path)


def expected(task, steps):
    """Rows of each step, as train_grpo.py has them."""
    data = Data(train_files=(task.train,), val_files=(task.test,))
    rows, _ = load_prompts(data, load_tokenizer(task.model), 32, needs_truth=True, evaluates=False)
    return [[row["row_index"] for row in prompts_for_step(rows, step, 4, 0)] for step in range(steps)]


def slow(seconds, file=None):
    """From now on each decoding step takes so long; batches are noted in the file."""
    step = hf.Engine.step

    def slowly(engine):
        time.sleep(seconds)
        return step(engine)

    hf.Engine.step = slowly


def note_slowly(file, seconds):
    """From now on batches are noted, and a step of training takes so long."""
    note_batches(file)
    write = WeightWriter.write

    def writing(*arguments):
        time.sleep(seconds)
        return write(*arguments)

    WeightWriter.write = writing


def wait_for(text, *forked, seconds=60):
    launch.until(lambda: any(text in x.log.read_text() for x in forked if x.log.exists()), seconds, text)


def test_samplers_that_die_or_stop_cost_their_leases_and_late_ones_are_used(pools, task, tmp_path):
    file = tmp_path / "batches.jsonl"
    run = pools.run(total_training_steps=9, max_staleness=1, sampler_timeout=6, fault=partial(note_slowly, file, 0.2))
    first, second = pools.sampler(partial(slow, 0.02)), pools.sampler(partial(slow, 0.02))
    wait_for(" 2/9", run)
    first.ask(signal.SIGSTOP)
    name = f":{first.processes[0].pid}"
    wait_for(f"{name} is lost: it has said nothing", run)
    third = pools.sampler()
    first.ask(signal.SIGCONT)
    wait_for(" 5/9", run)
    second.ask(signal.SIGKILL)
    assert run.ends() == [0], run.log.read_text()
    assert first.ends() == third.ends() == [0]
    found, log = batches(file), run.log.read_text()
    assert [found[v]["rows"] for v in range(9)] == expected(task, 9)
    assert len(h.read_jsonl(file)) == 9 and all(age <= 1 for x in found.values() for ages in x["ages"] for age in ages)
    joins = [log.count(f":{x.processes[0].pid} has joined") for x in (first, second, third)]
    assert joins[0] >= 2 and min(joins) >= 1, joins  # on a busy machine any of them may be late


def test_a_run_without_samplers_saves_and_ends_and_goes_on_later(pools, task, tmp_path):
    file = tmp_path / "batches.jsonl"
    settings = dict(total_training_steps=8, sampler_timeout=8, save_freq=100, fault=partial(note_slowly, file, 0.2))
    run, one = pools.run(**settings), pools.sampler()
    wait_for(" 3/8", run)
    one.ask(signal.SIGTERM)
    assert one.ends() == [0] and "is lost: it was asked to end" in run.log.read_text()
    assert run.ends() == [1] and "there has been no sampler for 8 s" in run.log.read_text()
    assert not launch.children(run.processes[0].pid)
    again, two = pools.run(**settings), pools.sampler()
    assert again.ends() == [0] and two.ends() == [0], again.log.read_text()
    found = batches(file)
    assert [found[v]["rows"] for v in range(8)] == expected(task, 8)


def test_samplers_end_with_their_run(pools, task):
    run = pools.run(total_training_steps=1000, fault=partial(note_slowly, os.devnull, 0.1))
    one = pools.sampler(gone_s=sampler.GONE_S)
    wait_for(" 2/1000", run)
    below = launch.descendants(run.processes[0].pid)
    assert launch.listens(one.processes[0].pid) == {"0100007F"}  # gloo; nothing can be reached from another machine
    assert "samplers: tcp://127.0.0.1:" in run.log.read_text()
    asked = run.ask(signal.SIGKILL)
    assert one.ends() == [0] and time.monotonic() - asked < 100
    assert "the run has ended" in one.log.read_text()
    assert below and not any(map(launch.alive, below))  # processes of rewards


def test_a_wrong_token_is_refused(pools, task, tmp_path):
    run = pools.run(total_training_steps=3)
    stranger, friend = pools.sampler(token="another"), pools.sampler()
    assert stranger.ends() == [1] and "refuses this sampler" in stranger.log.read_text()
    assert run.ends() == friend.ends() == [0], run.log.read_text()
    assert run.log.read_text().count("has joined") == 1


def blind():
    """From now on no weights can be read, as on a machine that does not share the run's memory."""

    def fail(about):
        raise FileNotFoundError(about["path"])

    sampler.UNREADABLE_S, sampler.read_weights = 0.5, fail


def test_a_sampler_that_cannot_read_the_weights_ends_with_the_flag(pools):
    run, one, friend = pools.run(total_training_steps=2), pools.sampler(blind), pools.sampler()
    assert one.ends() == [1] and "needs --weights-transfer gloo or nccl, or --weights-dir" in one.log.read_text()
    assert run.ends() == friend.ends() == [0], run.log.read_text()
    assert "is lost: RuntimeError: the run's weights cannot be read" in run.log.read_text()


def end_in_the_middle(number):
    """From now on this process gets a signal when it has five parts of the third weights."""
    finish, count = weight_network.Transfer._finish, itertools.count()

    def finish_or_end(transfer, *arguments):
        if transfer.about["version"] >= 2 and next(count) == 5:
            os.kill(os.getpid(), number)
        finish(transfer, *arguments)

    weight_network.Transfer._finish = finish_or_end


def in_parts(file):
    """From now on batches are noted, and weights are sent in parts."""
    note_slowly(file, 0.2)
    weight_network.CHUNK = 20_000  # bytes, of 820,000


def test_samplers_that_die_or_stop_in_the_middle_of_a_transfer_cost_only_that(pools, task, tmp_path):
    file = tmp_path / "batches.jsonl"
    settings = dict(total_training_steps=9, weights_transfer="gloo", sampler_timeout=6)
    run = pools.run(**settings, fault=partial(in_parts, file))
    dies, stops = (pools.sampler(partial(end_in_the_middle, x)) for x in (signal.SIGKILL, signal.SIGSTOP))
    other = pools.sampler(partial(slow, 0.01))
    wait_for(" 1/9", run)
    assert launch.listens(other.processes[0].pid) == {"0100007F"}
    assert run.ends() == [0] and other.ends() == [0], run.log.read_text()
    assert dies.ends() == [-signal.SIGKILL]
    stops.ask(signal.SIGCONT)
    assert stops.ends() == [0], stops.log.read_text()
    assert [batches(file)[v]["rows"] for v in range(9)] == expected(task, 9)
    assert run.log.read_text().count("have not reached a sampler") >= 1


def skip_a_push():
    """From now on the second push of weights does not reach the engine, which does not notice."""
    h.at_call(hf.Engine, "update_weights", 2, lambda: None)
    counted, calls = hf.Engine.update_weights, itertools.count(1)

    def skipping(engine, named_tensors):
        if next(calls) == 2:
            engine.policy_version += 1
        else:
            counted(engine, named_tensors)

    hf.Engine.update_weights = skipping


@pytest.mark.parametrize("staleness", h.some([0, 2], 2))
def test_a_sampler_that_skips_a_push_is_found_within_the_step(pools, task, staleness):
    run, one = pools.run(max_staleness=staleness, total_training_steps=9, lr=1e-2), pools.sampler(skip_a_push)
    assert run.ends() == [1]
    name = f":{one.processes[0].pid}, weights of step 1: engine and trainer disagree"
    assert name in run.log.read_text() and "step 2/9" not in run.log.read_text(), run.log.read_text()
    assert one.ends() == [0]


def lose_messages(share, seed):
    """From now on so many messages are lost in each direction; what makes them good does not wait for long."""
    chance = random.Random(seed)

    def losing(send):
        return lambda *arguments: send(*arguments) if chance.random() > share else None

    sampler.Line.send = losing(sampler.Line.send)
    dispatcher.Dispatcher._send = losing(dispatcher.Dispatcher._send)
    sampler.REPORT_EVERY_S = sampler.SEND_AGAIN_S = dispatcher.LEASE_AGAIN_S = 0.2


def lose_and_note(file):
    note_batches(file)
    lose_messages(0.3, 0)


def test_lost_messages_are_made_good(pools, task, tmp_path):
    file = tmp_path / "batches.jsonl"
    run = pools.run(total_training_steps=8, fault=partial(lose_and_note, file), test_freq=4)
    others = [pools.sampler(partial(lose_messages, 0.3, seed), patience=60.0) for seed in (1, 2)]
    assert run.ends() == [0], run.log.read_text()
    assert [x.ends() for x in others] == [[0], [0]]
    assert [batches(file)[v]["rows"] for v in range(8)] == expected(task, 8)


def fill_the_disk():
    """From now on the third weights find no room."""

    def fail():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    h.at_call(WeightWriter, "write", 3, fail)


def test_weights_without_room_end_the_run_with_the_flag(pools, task, tmp_path):
    folder = tmp_path / "weights"
    run = pools.run(total_training_steps=4, weights_dir=str(folder), fault=fill_the_disk)
    one = pools.sampler()
    assert run.ends() == [1] and one.ends() == [0]
    assert f"weights could not be written to {folder} (--weights-dir)" in run.log.read_text()
    assert len(list(folder.rglob("weights_*"))) <= 1


@pytest.mark.parametrize("staleness", h.some([0, 1], 0))
def test_a_trainer_that_is_killed_at_random_moments_trains_each_prompt_once(pools, task, tmp_path, staleness):
    chance, file, steps = random.Random(staleness), tmp_path / "batches.jsonl", 4 + 2 * KILLS
    settings = dict(total_training_steps=steps, max_staleness=staleness, save_freq=1)
    slowly = partial(note_slowly, file, 0.1)
    for kill in range(KILLS):
        run, one = pools.run(**settings, fault=slowly), pools.sampler(partial(slow, 0.01))
        name = f":{one.processes[0].pid} has joined"
        wait_for(name, run)
        time.sleep(chance.uniform(0, 1.0))
        run.ask(signal.SIGKILL)
        assert run.ends() == [-signal.SIGKILL] and one.ends() == [0], kill
    run, one = pools.run(**settings, fault=slowly), pools.sampler()
    assert run.ends() == [0] and one.ends() == [0], run.log.read_text()
    found = batches(file)
    assert [found[v]["rows"] for v in range(steps)] == expected(task, steps)
    assert all(age <= staleness for x in found.values() for ages in x["ages"] for age in ages)
    if staleness == 0:  # then it is what an unbroken run computes
        whole = Pools(task, tmp_path / "whole")
        (tmp_path / "whole").mkdir()
        unbroken, two = whole.run(**settings), whole.sampler()
        assert unbroken.ends() == two.ends() == [0]
        last = Path("run", f"global_step_{steps}")
        h.assert_same(h.weights(tmp_path / last), h.weights(tmp_path / "whole" / last))

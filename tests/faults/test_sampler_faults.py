"""Samplers and trainers that die, hang, come late, lie or lose messages: no prompt is trained twice, none is lost.

With GLASSRL_RANDOM_KILLS=50, as in `make faults`, trainers are killed 20 times at random, and samplers 20 times in each
of three kinds of runs; else four times.
"""

import errno
import itertools
import math
import os
import random
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path

import helpers_scripts as h
import launch
import msgspec
import numpy as np
import pytest
import zmq
from helpers_engines import the_only_shared_engine
from helpers_samplers import Pools, batches, note_batches, pools_of_task, task_with_stops, with_two_heads  # noqa: F401

from extras.engines import hf
from extras.samplers import connection, dispatcher, inbox, protocol, sampler, weight_network
from extras.samplers.connection import Connection
from extras.samplers.weight_files import WeightWriter
from rl.data.encode import load_prompts
from rl.data.flags import Data
from rl.data.order import prompts_for_step
from rl.data.template import load_tokenizer
from rl.sampling.loop import Loop

KILLS = max(2, int(os.environ.get("GLASSRL_RANDOM_KILLS", "1")) // 5)  # for each staleness


def expected(task, steps):
    """Rows of each step, as train_grpo.py has them."""
    data = Data(train_files=(task.train,), val_files=(task.test,))
    rows, _ = load_prompts(data, load_tokenizer(task.model), 32, needs_truth=True, evaluates=False)
    return [[row["row_index"] for row in prompts_for_step(rows, step, 4, 0)] for step in range(steps)]


def slow(seconds, file=None):
    """From now on each decoding step takes this long; batches are noted in the file."""
    step = hf.Engine.step

    def slowly(engine):
        time.sleep(seconds)
        return step(engine)

    hf.Engine.step = slowly


def note_slowly(file, seconds):
    """From now on batches are noted, and a step of training takes this long."""
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


@pytest.mark.thorough
def test_a_rank_of_a_sampler_that_is_killed_ends_the_sampler_and_the_run_starts_it_again(task, tmp_path):
    h.needs_vllm()
    changes = dict(model=with_two_heads(task, tmp_path / "model"), engine="vllm", tensor_model_parallel_size=2)
    changes |= dict(samplers=1, max_num_seqs=32, total_training_steps=60, save_freq=0)
    with the_only_shared_engine():
        run = launch.fork("train_async", h.grpo_settings(task, tmp_path / "run", **changes), tmp_path / "log")
        wait_for(" 3/60", run, seconds=200)
        of_sampler = [pid for pid in launch.descendants(run.processes[0].pid) if b"import follow" in command(pid)]
        os.kill(of_sampler[0], signal.SIGKILL)
        launch.until(lambda: not Path(f"/proc/{of_sampler[0]}").exists(), 60, "the end of the rank")
        for leftover in Path("/dev/shm").glob("-tp:*cpushm_*"):  # only vLLM for CPUs needs that
            leftover.unlink()
        assert run.ends(400) == [0], run.log.read_text()
    log = run.log.read_text()
    assert len(of_sampler) == 1 and "rank 1 of this sampler has ended with -9, so the sampler ends" in log
    # Rank 0 may notice it in a collective first, and then says so itself.
    assert log.count("has joined") == 2
    assert log.count("is lost: its process has ended with 1") + log.count("is lost: RuntimeError: ") == 1
    assert h.read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["samplers/lost"] == 1


def command(pid):
    """The command line of a process, or nothing if it has ended."""
    file = Path(f"/proc/{pid}/cmdline")
    return file.read_bytes() if file.exists() else b""


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


def test_a_run_that_loses_its_samplers_in_an_evaluation_saves_the_step_that_has_changed_weights(pools, task, tmp_path):
    file = tmp_path / "batches.jsonl"
    settings = dict(total_training_steps=4, test_freq=2, val_before_train=False, sampler_timeout=5, save_freq=100)
    slowly = partial(note_slowly, file, 1.0)  # so that the groups of step 2 are ready before its evaluation begins
    run, one = pools.run(**settings, max_staleness=1, fault=slowly), pools.sampler(partial(end_at, (), {0}))
    assert run.ends() == [1] and one.ends() == [1], run.log.read_text()
    log = run.log.read_text()
    assert "there has been no sampler for 5 s (--sampler-timeout): the run saves and ends" in log
    assert "step 2 | held out: no answers" in log and "Traceback" not in log
    assert [x.name for x in (tmp_path / "run").glob("global_step_*")] == ["global_step_3"]


def test_samplers_end_with_their_run(pools, task):
    run = pools.run(total_training_steps=1000, fault=partial(note_slowly, os.devnull, 0.1))
    one = pools.sampler(gone_s=connection.GONE_S)
    wait_for(" 2/1000", run)
    below = launch.descendants(run.processes[0].pid)
    assert launch.listens(one.processes[0].pid) == {"0100007F"}  # gloo; nothing can be reached from another machine
    assert "samplers: tcp://127.0.0.1:" in run.log.read_text()
    asked = run.ask(signal.SIGKILL)
    assert one.ends() == [0] and time.monotonic() - asked < 100
    assert "the run has ended" in one.log.read_text()
    assert below and not any(map(launch.alive, below))  # processes of rewards


# Messages of somebody who knows the token. The right ones, of which others are changes, are in `Rogue`.

NUMBER = {"ids": np.int32([5]), "mask": np.int8([1]), "logprobs": np.float32([-1.0]), "versions": np.int32([0])}
GARBAGE = {
    "nothing": b"",
    "no msgpack": b"\xc1\xc1",
    "half a message": msgspec.msgpack.encode(protocol.Join("a"))[:-3],
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "deep": b"\x91" * 10**5,
    "a number": b"\x07",
    "no tag": msgspec.msgpack.encode({"name": "a"}),
    "another tag": msgspec.msgpack.encode({"type": "Setup", "name": "a"}),
    "an older protocol": msgspec.msgpack.encode(protocol.Join("a", protocol=1)),
    "a name of lines": msgspec.msgpack.encode(protocol.Join("a\nstep 1/9")),
    "a name of another type": msgspec.msgpack.encode({"type": "Join", "name": 5}),
    "two parts": [b"a", b"b"],
    "too large": b"a" * 3_000_000,
}
REPORTS = {
    "of another run": dict(run="another"),
    "no room": dict(room=0),
    "room beyond 64 bits": dict(room=float(2**70)),
    "a version to come": dict(version=99),
    "a version below none": dict(version=-2),
    "seconds that are none": dict(busy_s=math.nan),
    "seconds below 0": dict(total_s=-1.0),
    "leases of another type": dict(holding=["a"]),
    "groups of another type": dict(groups=[[1, 2]]),
    "no groups": dict(groups=None),
    "a probe of a version to come": dict(probe={"version": 99, "samples": []}),
    "a probe without samples": dict(probe={"version": 0, "samples": []}),
    "a problem of another type": dict(problem=1),
}
GROUPS = {
    "no samples": dict(samples=[]),
    "a sample too few": dict(count=3),
    "a sample too many": dict(count=5),
    "a sample with a field too few": dict(samples=[[b""] * 3] * 4),
    "tokens beyond the vocabulary": dict(ids=np.int32([10**6])),
    "tokens below 0": dict(ids=np.int32([-1])),
    "tokens of another type": dict(ids=np.int64([5])),
    "tokens and a half": dict(ids=b"12345"),
    "tokens of another number": dict(ids=np.int32([5, 5])),
    "more tokens than there may be": {name: np.repeat(x, 999) for name, x in NUMBER.items()},
    "a mask of 2": dict(mask=np.int8([2])),
    "NaN": dict(logprobs=np.float32([math.nan])),
    "-inf": dict(logprobs=np.float32([-math.inf])),
    "a probability above 1": dict(logprobs=np.float32([3.0])),
    "half precision": dict(logprobs=np.float16([-1.0])),
    "no reason": dict(finish_reason="because"),
    "a version to come": dict(versions=np.int32([7])),
    "no version": dict(versions=np.int32([np.iinfo(np.int32).max])),
    "versions of three": dict(versions=np.int32([0, 0, 0])),
    "a reward of no turn": dict(outcome="[[], {}, [], [0.5]]"),
    "a reward of NaN": dict(outcome="[[], {}, [1], [NaN]]"),
    "a conversation of garbage": dict(outcome="{"),
    "experts": dict(experts=b"1234"),
}


class Rogue:
    """A connection with the right token."""

    def __init__(self, address):
        self.socket = protocol.connect(address, "a token of this test", zmq.Context.instance())
        self.socket.linger = 0

    def say(self, message):
        """Send bytes, parts, or a message as a dict."""
        parts = message if isinstance(message, list) else [message]
        self.socket.send_multipart([x if isinstance(x, bytes) else msgspec.msgpack.encode(x) for x in parts])

    def hears(self, seconds=30):
        """The next message; None if none comes."""
        return msgspec.msgpack.decode(self.socket.recv()) if self.socket.poll(1000 * seconds) else None

    def report(self, **changes):
        """Join, and send a report with changes. Returns its answer."""
        self.say({"type": "Join", "name": "rogue:1", "protocol": protocol.PROTOCOL})
        right = dict(type="Report", name="rogue:1", run=self.hears()["run"], version=-1, room=8, holding=[], begun=[])
        self.right = right | dict(groups=[], probe=None, busy_s=0.0, total_s=0.0)
        self.say(self.right | changes)
        return self.hears()

    def leave(self):
        """Give the leases back."""
        self.say(self.right | dict(problem="enough", was_asked=True))

    def lease(self):
        """The number of a lease that the run gives this sampler."""
        self.report()
        return launch.until(self.hears)["leases"][0]["number"]

    def answer(self, number, samples=None, count=4, **changes):
        """Send a group of one token to a response, with changes."""
        fields = {name: x.tobytes() if isinstance(x, np.ndarray) else x for name, x in (NUMBER | changes).items()}
        rest = dict(experts=b"", finish_reason="stop", outcome=None)
        sample = list((rest | fields)[x] for x in (*NUMBER, *rest))
        group = {"number": number, "samples": [sample] * count if samples is None else samples}
        self.say(self.right | {"holding": [number], "groups": [group]})
        return self.hears()


def stalls_after(size, port):
    """The address of a proxy that hands this many bytes on to the port, and then none, on an open connection."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        (here, _), there = server.accept(), socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=lambda: [here.sendall(x) for x in iter(lambda: there.recv(9999), b"")]).start()
        left = size
        while left > 0 and (x := here.recv(min(left, 9999))):
            there.sendall(x)
            left -= len(x)
        time.sleep(600)

    threading.Thread(target=serve, daemon=True).start()
    return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def with_small_messages(file):
    """From now on batches are noted, and a message may have a million bytes."""
    note_batches(file)
    protocol.LARGEST = 10**6


def test_whoever_has_the_token_cannot_end_a_run_or_change_its_data_and_others_cannot_join(pools, task, tmp_path):
    file, address = tmp_path / "batches.jsonl", f"tcp://127.0.0.1:{pools.port}"
    run = pools.run(total_training_steps=3, sampler_timeout=120, fault=partial(with_small_messages, file))
    stranger = pools.sampler(token="another")
    (rogue := Rogue(address)).report()  # a right one
    rogue.leave()
    for name, message in GARBAGE.items():
        (rogue := Rogue(address)).say(message)
        assert (answer := rogue.hears(30 if name != "too large" else 1)) is None or answer["type"] == "End", name
        assert (answer is None) == (name == "too large"), name  # then the connection itself is closed
    (rogue := Rogue(address)).say(b"")
    assert rogue.hears()["type"] == "End"
    rogue.say({"type": "Join", "name": "rogue:1", "protocol": protocol.PROTOCOL})  # it is not heard any more
    for name, changes in REPORTS.items():
        assert Rogue(address).report(**changes)["type"] == "End", name
    for name, changes in GROUPS.items():
        number = (rogue := Rogue(address)).lease()
        assert rogue.answer(number, **changes)["type"] == "End", name
    assert not rogue.socket.poll(0)
    silent = Rogue(stalls_after(5000, pools.port))
    silent.say({"type": "Join", "name": "rogue:1", "protocol": protocol.PROTOCOL})
    assert silent.hears()["type"] == "Setup"
    silent.say(b"a" * 100_000)
    nobodys = Rogue(address)
    nobodys.report()
    for number in (10**6, -(10**6), 2**63 - 1):  # unknown, so not leased to it
        answer = nobodys.answer(number)
        launch.until(lambda answer=answer, number=number: number in (answer["forget"] or nobodys.hears()["forget"]))
    nobodys.leave()
    friend = pools.sampler()
    assert run.ends() == friend.ends() == [0], run.log.read_text()
    assert stranger.ends() == [1] and "refuses this sampler" in stranger.log.read_text()
    found, log = batches(file), run.log.read_text()
    assert [found[v]["rows"] for v in range(3)] == expected(task, 3)
    assert "dropped" not in log and pools.lines()[-1]["samplers/dropped"] == 0
    assert log.count("is refused: ") + log.count("its message is wrong: ") == sum(map(len, (GARBAGE, REPORTS, GROUPS)))
    assert "a connection from 127.0.0.1 is refused: it has 2 parts" in log
    assert "sampler rogue:1 is lost: its message is wrong: a response has tokens beyond the vocabulary of " in log


def blind():
    """From now on no weights can be read, as on a machine that does not share the run's memory."""

    def fail(about):
        raise FileNotFoundError(about["path"])

    inbox.UNREADABLE_S, inbox.read_weights = 0.5, fail


def test_a_sampler_that_cannot_read_the_weights_ends_with_the_flag(pools):
    run, one, friend = pools.run(total_training_steps=2), pools.sampler(blind), pools.sampler()
    assert one.ends() == [1] and "needs --weights-transfer gloo or nccl, or --weights-dir" in one.log.read_text()
    assert run.ends() == friend.ends() == [0], run.log.read_text()
    assert "is lost: RuntimeError: the run's weights cannot be read" in run.log.read_text()


def end_in_the_middle(number):
    """From now on this process gets a signal when it has five parts of the third weights."""
    finish, count = weight_network.Transfer._finish, itertools.count()

    def finish_or_end(transfer, *arguments):
        if transfer.offer["version"] >= 2 and next(count) == 5:
            os.kill(os.getpid(), number)
        finish(transfer, *arguments)

    weight_network.Transfer._finish = finish_or_end


def in_parts(file):
    """From now on batches are noted, and weights are sent in parts."""
    note_slowly(file, 0.2)
    weight_network.CHUNK = 20_000  # bytes, of 820,000


@pytest.mark.thorough
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
    """From now on this many messages are lost in each direction; what makes them good does not wait for long."""
    chance = random.Random(seed)

    def losing(send):
        return lambda *arguments: send(*arguments) if chance.random() > share else None

    Connection.send = losing(Connection.send)
    dispatcher.Dispatcher._send = losing(dispatcher.Dispatcher._send)
    sampler.REPORT_EVERY_S = sampler.SEND_AGAIN_S = 0.2


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


def end_at(rows, held_out):
    """From now on a sampler ends with an error when it begins one of these rows, of the training or held-out data."""
    start = Loop.start

    def starting(loop, name, row, *arguments):
        if isinstance(name, int) and row["row_index"] in (held_out if name < 0 else rows):
            raise RuntimeError(f"row {row['row_index']} ends this process")
        start(loop, name, row, *arguments)

    Loop.start = starting


@pytest.mark.thorough
def test_prompts_that_end_their_samplers_are_dropped_and_no_others(pools, task, tmp_path):
    """Also a held-out one. What was twice sampled beside them, and alone after that, is innocent."""
    file, rows = tmp_path / "batches.jsonl", [x for step in expected(task, 5) for x in step]
    guilty, held_out = {rows[1], rows[6]}, {2}
    settings = dict(total_training_steps=4, val_before_train=True, test_freq=2, save_freq=0, sampler_timeout=60)
    run, count = pools.run(**settings, fault=partial(note_batches, file)), itertools.count()
    while run.processes[0].is_alive():
        if next(count) < 20:
            pools.sampler(partial(end_at, guilty, held_out), patience=20.0).ends()  # the run may end before it joins
    assert run.ends() == [0], run.log.read_text()
    found, log = batches(file), run.log.read_text()
    trained = [row for v in range(4) for row in found[v]["rows"]]
    assert trained == [row for row in rows if row not in guilty][:16]
    for number in (1, 6):
        assert f"prompt {number}, row {rows[number]} of --train-files, is dropped: its samplers were lost each" in log
    assert log.count("row 2 of --val-files is dropped") == 1 and log.count(" dropped") == 3
    last = [x for x in pools.lines() if "samplers/dropped" in x][-1]
    assert last["samplers/dropped"] == 3 and 5 <= last["samplers/lost"] <= 9  # three each, of which two may be shared
    assert [x["step"] for x in pools.lines() if "val/accuracy" in x] == [0, 2, 4]


WAYS = {
    "one": (1, {}),
    "three": (3, dict(max_staleness=2)),
    "three, evaluations, and a trainer that is resumed": (3, dict(test_freq=3, val_before_train=True, save_freq=1)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_samplers_that_are_killed_at_random_moments_cost_no_prompt(pools, task, tmp_path, way):
    """Nothing is known of their deaths but their silence. Whoever dies is replaced at once."""
    size, changes = WAYS[way]
    chance, file, kills, began = random.Random(len(way)), tmp_path / "batches.jsonl", 2 * KILLS, time.monotonic()
    settings = dict(total_training_steps=8 * kills, sampler_timeout=6) | changes
    start = partial(pools.run, **settings, fault=partial(note_slowly, file, 0.1))
    run, samplers = start(), [pools.sampler(partial(slow, 0.01)) for _ in range(size)]
    wait_for(" 1/", run)
    for kill in range(kills):
        time.sleep(chance.uniform(0, 3))
        assert run.processes[0].is_alive(), run.log.read_text()
        if "save_freq" in changes and kill == kills // 2:
            for x in samplers:  # one that has not joined would wait for the next run
                wait_for(f":{x.processes[0].pid} has joined", run)
            run.ask(signal.SIGTERM)
            assert run.ends() == [0] and all(x.ends() == [0] for x in samplers)
            run, samplers = start(), [pools.sampler(partial(slow, 0.01)) for _ in range(size)]
            time.sleep(5)
        victim = chance.randrange(size)
        samplers[victim].ask(signal.SIGKILL)
        samplers[victim] = pools.sampler(partial(slow, 0.01))
    assert run.ends(900) == [0], run.log.read_text()
    found, steps = batches(file), settings["total_training_steps"]
    trained = [row for v in range(steps) for row in found[v]["rows"]]
    assert trained == [row for step in expected(task, steps) for row in step]
    log, seconds = run.log.read_text(), time.monotonic() - began
    assert "dropped" not in log and {x.get("samplers/dropped", 0) for x in pools.lines()} == {0}
    lost = log.count(" is lost: ")
    print(f"{way}: {len(trained)} prompts, {kills} kills, {lost} lost, 0 dropped, 0 trained twice, {seconds:.0f} s")


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

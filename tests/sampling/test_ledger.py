"""The ledger of train_async.py: whatever happens to samplers, each prompt is trained once, in order and in time."""

import dataclasses
import random

import msgspec
import numpy as np
import pytest
import torch

from rl.data.types import Sample
from rl.sampling import protocol
from rl.sampling.ledger import MAX_LOSSES, Leases, Ledger
from rl.sampling.weight_files import WeightWriter, read_weights


def test_numbers_are_drawn_as_far_as_staleness_allows():
    ledger = Ledger(batch_size=4, max_staleness=0, total_steps=9)
    assert not ledger.has_batch and ledger.batch == []
    ledger.draw(0)
    assert ledger.waiting == [0, 1, 2, 3]
    ledger.draw(0)
    assert ledger.waiting == [0, 1, 2, 3]
    ledger = Ledger(batch_size=4, max_staleness=2, total_steps=9)
    ledger.draw(5)
    assert ledger.waiting == list(range(20, 32)) and ledger.next == 32  # resumed at step 5, without a state
    ledger.draw(8)
    assert ledger.next == 36  # all that the run trains on


def test_a_lost_number_is_handed_out_before_others_and_its_late_result_is_thrown_away():
    ledger = Ledger(batch_size=2, max_staleness=1, total_steps=9)
    ledger.draw(0)
    assert [ledger.lease("a"), ledger.lease("b"), ledger.lease("a")] == [0, 1, 2]
    assert ledger.held_by("a") == [0, 2] and ledger.give_back("a") == []
    assert ledger.waiting == [0, 2, 3]
    assert ledger.lease("b") == 0
    assert not ledger.finish(0, "a", "late")
    assert ledger.finish(0, "b", "first") and not ledger.finish(0, "b", "second")
    assert not ledger.has_batch  # 1 is missing, and 2 would not do
    assert ledger.finish(1, "b", "one") and ledger.has_batch
    assert ledger.take() == {0: "first", 1: "one"}
    assert ledger.batch == [2, 3]


def test_a_prompt_that_is_lost_too_often_is_dropped_and_another_drawn():
    ledger = Ledger(batch_size=2, max_staleness=0, total_steps=9)
    ledger.draw(0)
    for loss in range(MAX_LOSSES):
        assert ledger.lease("a") == 0
        assert ledger.give_back("a") == ([0] if loss == MAX_LOSSES - 1 else [])
    assert ledger.batch == [1, 2] and (ledger.next, ledger.num_dropped) == (3, 1)
    held_out = Leases([-1, -2])
    assert held_out.lease("a") == -2


@pytest.mark.parametrize("seed", range(40))
def test_random_events(seed):
    """Samplers join, are lost and come back, results come late and twice, and the trainer is killed and resumed."""
    chance = random.Random(seed)
    P, S = chance.choice([1, 3, 4]), chance.choice([0, 1, 4])
    ledger, version = Ledger(P, S, 999), 0
    trained, drawn_at, dropped = [], {}, set()  # by an observer who only sees calls and results
    late: list[tuple[int, str]] = []  # results that may still come, also of samplers that were lost
    saved = None

    def note_drawn():
        for number in [*ledger.waiting, *ledger.leased, *ledger.ready]:
            drawn_at.setdefault(number, version)

    ledger.draw(0)
    note_drawn()
    for _ in range(600):
        event = chance.random()
        sampler = chance.choice("abc")
        if event < 0.4 and ledger.waiting:
            late.append((ledger.lease(sampler), sampler))
        elif event < 0.75 and late:
            number, holder = late.pop(chance.randrange(len(late)))
            expected = ledger.leased.get(number) == holder
            assert ledger.finish(number, holder, (number, holder)) == expected
            if chance.random() < 0.2:
                assert not ledger.finish(number, holder, "again")
        elif event < 0.82:
            dropped |= set(ledger.give_back(sampler))
            note_drawn()
        elif event < 0.85:
            late = [x for x in late if chance.random() < 0.5]  # lost on the way, or with their sampler
            for lost in "abc":
                if {n for n in ledger.held_by(lost)} - {n for n, who in late if who == lost}:
                    dropped |= set(ledger.give_back(lost))
            note_drawn()
        elif event < 0.88:  # a checkpoint at the beginning of the step
            saved = version, ledger.state(), dict(ledger.ready), list(trained), set(dropped), dict(drawn_at)
        elif event < 0.9 and saved is not None:  # killed, and resumed from it
            version, state, ready, trained, dropped = saved[0], saved[1], saved[2], list(saved[3]), set(saved[4])
            ledger, late = Ledger(P, S, 999), []
            ledger.load(state, {n: g for n, g in ready.items() if chance.random() < 0.8})
            drawn_at = {n: saved[5][n] for n in ledger.ready} | dict.fromkeys(ledger.waiting, version)
            ledger.draw(version)
            note_drawn()
        elif ledger.has_batch:
            batch = ledger.take()
            assert len(batch) == P and all(group[0] == number for number, group in batch.items())
            # Drawn at version d and trained at version v: weights of d or later have sampled it.
            assert all(version - drawn_at[number] <= S for number in batch)
            trained += batch
            version += 1
            ledger.draw(version)
            note_drawn()
        places = [*ledger.waiting, *ledger.leased, *ledger.ready, *trained, *dropped]
        assert sorted(places) == list(range(ledger.next)), "each number that was drawn is in exactly one place"
        assert trained == sorted(trained) == [n for n in range(trained[-1] + 1 if trained else 0) if n not in dropped]
        assert ledger.next - ledger.num_dropped == P * (version + 1 + S) and ledger.num_dropped == len(dropped)
    assert version > 5


def test_a_sample_travels_whole():
    arrays = np.int32([1, 2]), np.int32([7, 8, 9]), np.int8([1, 0, 1]), np.float32([-0.5, 0.0, -2.0])
    about = dict(finish_reason="stop", row_index=3, policy_versions=((4, 1), (5, 1)), turns=2)
    told = dict(messages=({"role": "tool", "content": "8"},), report={"calls": 1.0}, turn_rewards=(0.5, 1.0))
    sample = Sample(*arrays, **about, **told)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(protocol.pack(sample)), type=protocol.PackedSample)
    found = protocol.unpack(sent, {"prompt_ids": arrays[0], "row_index": 3})
    for field in dataclasses.fields(Sample):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(sample, field.name), err_msg=field.name)
    sent.ids = sent.ids[:-4]
    with pytest.raises(ValueError, match="2 tokens, 3 mask entries and 3 log-probs"):
        protocol.unpack(sent, {"prompt_ids": arrays[0], "row_index": 3})


@pytest.mark.parametrize("in_memory", [True, False])
def test_weights_are_read_as_they_were_written_until_newer_ones_replace_them(tmp_path, in_memory):
    def weights(version):
        yield "a", torch.full((3, 5), float(version)).bfloat16().t()
        yield "empty", torch.empty(0, 4)
        yield "b", torch.arange(version, version + 7)

    folder = None if in_memory else str(tmp_path / "weights")
    writer = WeightWriter(folder, tmp_path / "run")
    first = writer.write(1, weights(1))
    before = read_weights(first)  # has begun, so it may finish
    second = writer.write(2, weights(2))
    with pytest.raises(FileNotFoundError):
        read_weights(first)
    for about, version in ((before, 1), (read_weights(second), 2)):
        found = list(about)
        assert [name for name, _ in found] == ["a", "empty", "b"]
        for (_, x), (_, y) in zip(found, weights(version), strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y)
    if not in_memory:
        assert len(list(tmp_path.rglob("weights_*"))) == 1
        other = WeightWriter(folder, tmp_path / "other" / "run")
        other.write(1, weights(1))
        WeightWriter(folder, tmp_path / "run")  # the first one was killed, and goes on
        assert len(list(tmp_path.rglob("weights_*"))) == 1
        other.close()
        assert list(tmp_path.rglob("weights_*")) == []
    with pytest.raises(FileNotFoundError):
        read_weights(second) if not in_memory else (writer.close(), read_weights(second))

"""What a run and its samplers say to each other arrives as it was said, and what no sampler would say is refused."""

import dataclasses
import datetime
import json
import math
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from helpers_data import versions_of

from extras.agents import EnvironmentFlags
from extras.agents.outcome import make_outcome
from extras.samplers import SamplerFlags, Work, protocol, sampler
from extras.samplers.dispatcher import Dispatcher, Member
from extras.samplers.prompts import Prompts
from rl.data.types import Sample, Sampling
from rl.sampling.engines.flags import EngineFlags

NONE = np.iinfo(np.int32).max
WAY = Sampling(n=1, max_tokens=3)
ROW = {"prompt_ids": np.int32([1, 2]), "row_index": 3}


def sample_of_numbers():
    arrays = ROW["prompt_ids"], np.int32([7, 8, 9]), np.int8([1, 0, 1]), np.float32([-0.5, 0.0, -2.0])
    outcome = make_outcome([{"role": "tool", "content": "8"}], {"calls": 10**400}, [1, 1], [0.5, 1.0])
    columns = versions_of([1, 2], (4, 1), (-1, 1), (5, 1))
    return Sample(*arrays, finish_reason="stop", row_index=3, outcome=outcome, columns=columns)


def traveled(packed):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=protocol.PackedSample)


def test_a_row_travels_whole_to_environments_and_without_them_its_prompt_does():
    prompt = {"prompt_ids": [1, 2], "row_index": 0}
    odd = {"n": 10**30, "x": [-0.5, None, {"y": "\ud800 é"}]}
    row = prompt | {"extra_info": odd | {"day": datetime.date(2026, 1, 2)}}
    whole = prompt | {"extra_info": odd | {"day": "2026-01-02"}}
    for flags, expected in ((EnvironmentFlags(tools=("a.py",)), whole), (EnvironmentFlags(), prompt)):
        setup = protocol.Setup("model", {}, EngineFlags(), flags, 9, [], [], WAY, 0, None, "float32")
        work = Work(None, [row], WAY, EngineFlags(), flags, batch_size=1, total_steps=9, longest=9, seed=0)
        ranks, member = SimpleNamespace(device=torch.device("cpu")), Member("a", 0.0, 0.0, 0.0)
        dispatcher = Dispatcher(SamplerFlags(), setup, Prompts(work, 0, 10), lambda *group: None, ranks)
        message = msgspec.msgpack.encode(protocol.Orders([dispatcher._lease(0, member)], [], [], None))
        [lease] = msgspec.msgpack.decode(message, type=protocol.ToSampler).leases
        assert json.loads(lease.row) == expected and lease.sampling == WAY
        dispatcher.socket.close(0)


def test_a_sample_travels_whole():
    sample = sample_of_numbers()
    found = protocol.unpack(traveled(protocol.pack(sample)), ROW, WAY, 10, range(4, 6))
    for field in dataclasses.fields(Sample):
        np.testing.assert_equal(getattr(found, field.name), getattr(sample, field.name), err_msg=field.name)


def response_of_an_agent():
    def row(*ids, mask):
        columns = versions_of([], *((4 if x else -1, 1) for x in mask))
        return Sample([], ids, mask, np.float32(mask) * -0.5, "stop", 3, columns=columns)

    outcome = make_outcome([{"role": "user", "content": "8"}], {"calls": 2, "reward": 0.25}, [1, 2], [])
    rows = row(5, 6, 7, mask=[0, 1, 0]), row(5, 8, 9, mask=[0, 1, 1])
    whole = Sample(ROW["prompt_ids"], [], [], [], "length", 3, outcome._replace(reward=0.25), rows=rows)
    return dataclasses.replace(whole, columns=versions_of([1, 2]))


def test_a_response_travels_with_all_its_rows():
    sample = response_of_an_agent()
    found = protocol.unpack(traveled(protocol.pack(sample)), ROW, WAY, 10, range(4, 6))
    assert found.outcome == sample.outcome and found.outcome.reward == 0.25 and len(found.rows) == 2
    assert (found.num_response_tokens, found.num_sampled, found.finish_reason) == (6, 3, "length")
    for one, other in zip((found, *found.rows), (sample, *sample.rows), strict=True):
        for field in dataclasses.fields(Sample):
            if field.name not in ("rows", "outcome"):
                np.testing.assert_equal(getattr(one, field.name), getattr(other, field.name), err_msg=field.name)


def test_rows_that_no_engine_has_sampled_are_refused():
    packed = protocol.pack(response_of_an_agent())
    packed.rows[1].mask = np.int8([1, 1, 1]).tobytes()
    with pytest.raises(ValueError, match="a mask that does not fit its versions"):
        protocol.unpack(traveled(packed), ROW, WAY, 10, range(4, 6))
    packed = protocol.pack(response_of_an_agent())
    for wrong in ([packed], [protocol.pack(sample_of_numbers())]):
        both = protocol.pack(sample_of_numbers() if wrong[0] is not packed else response_of_an_agent())
        both.rows = wrong
        with pytest.raises(ValueError, match="rows beside tokens of its own, or in rows"):
            protocol.unpack(traveled(both), ROW, WAY, 10, range(4, 6))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(ids=np.int32([7, 8]).tobytes()), "2 tokens, 3 mask entries, 3 log-probs and 3 versions"),
        (dict(ids=np.int64([7, 8, 9]).tobytes()), "6 tokens, 3 mask entries, 3 log-probs and 3 versions"),
        (dict(ids=b"12345678901"), "buffer size must be a multiple of element size"),
        (dict(ids=np.int32([7, 8, 10]).tobytes()), "tokens beyond the vocabulary of 10"),
        (dict(ids=np.int32([-1, 8, 9]).tobytes()), "tokens beyond the vocabulary of 10"),
        (dict(mask=b"\1\0\2"), "a mask of other numbers than 0 and 1"),
        (dict(mask=b"\1\0\xff"), "a mask of other numbers than 0 and 1"),
        (dict(mask=b"\0\0\1"), "log-probs of tokens that were not sampled"),
        (dict(mask=b"\1\1\1"), "a mask that does not fit its versions"),
        (dict(logprobs=np.float32([-1, 0, math.nan]).tobytes()), "log-probs that are not finite, or above 0"),
        (dict(logprobs=np.float32([-1, 0, -math.inf]).tobytes()), "log-probs that are not finite, or above 0"),
        (dict(logprobs=np.float32([0.5, 0, -1]).tobytes()), "log-probs that are not finite, or above 0"),
        (dict(logprobs=np.float64([-1, 0, -1]).tobytes()), "3 mask entries, 6 log-probs and 3 versions"),
        (dict(versions=np.int32([4, NONE, 6]).tobytes()), "tokens of other weights than those of range"),
        (dict(versions=np.int32([3, NONE, 4]).tobytes()), "tokens of other weights than those of range"),
        (dict(versions=np.int32([4, NONE, -1]).tobytes()), "tokens of other weights than those of range"),
        (dict(versions=np.int32([4, NONE, NONE]).tobytes()), "a mask that does not fit its versions"),
        (dict(versions=np.int32([4, 4, 4]).tobytes()), "a mask that does not fit its versions"),
        (dict(versions=np.int32([4, 4]).tobytes()), "3 log-probs and 2 versions"),
        (dict(versions=b""), "3 log-probs and 0 versions"),
        (dict(outcome="[[], {}, [2, 1], [0.5, 1.0, 1.0], 0]"), "rewards of turns that it does not have"),
        (dict(outcome="[[], {}, [2], [NaN], 0]"), "rewards of turns that it does not have, or that are not numbers"),
        (dict(outcome='[[], {}, [2], ["1"], 0]'), "rewards of turns that it does not have, or that are not numbers"),
        (dict(outcome=""), "Expecting value"),
        (dict(outcome="5"), "a malformed conversation"),
        (dict(outcome="null"), "a malformed conversation"),
        (dict(outcome="[[1], {}, [], [], 0]"), "a malformed conversation"),
        (dict(outcome='[[{"role": "tool"}], {}, [], [], 0]'), "a malformed conversation"),
        (dict(outcome="[[], 5, [], [], 0]"), "a malformed conversation"),
        (dict(outcome="[[], {}, 5, [], 0]"), "a malformed conversation"),
        (dict(outcome="[[], {}, [1.5], [], 0]"), "a malformed conversation"),
        (dict(outcome="[" * 10**5), "a malformed conversation"),
        (dict(outcome="[[], {}, [2], [], NaN]"), "rewards of turns that it does not have, or that are not numbers"),
        (dict(outcome="[[]]"), "not enough values to unpack"),
    ],
)
def test_a_sample_that_no_engine_has_sampled_is_refused(changes, words):
    packed = protocol.pack(sample_of_numbers())
    for name, value in changes.items():
        setattr(packed, name, value)
    with pytest.raises(ValueError, match=words):
        protocol.unpack(traveled(packed), ROW, WAY, 10, range(4, 6))


OF_MODEL = (3, 2, 6)  # layers, experts that a token gets in each, and experts of a layer


def with_experts(chosen):
    sample = sample_of_numbers()
    return dataclasses.replace(sample, columns={**sample.columns, "routed_experts": chosen})


@pytest.mark.parametrize(("count", "none"), [(6, np.uint8(255)), (256, np.int16(2**15 - 1))])
def test_experts_travel_with_their_sample_if_it_is_trained_on(count, none):
    chosen = np.arange(5 * 3 * 2).reshape(5, 3, 2).astype(none.dtype) % 6
    chosen[[2, 4]] = none  # not known of a token in the middle, and of the last one
    packed = protocol.pack(with_experts(chosen))
    assert len(packed.experts) == 30 * none.itemsize
    sample, packed = sample_of_numbers(), traveled(packed)
    found = protocol.with_experts(sample, packed.experts, (3, 2, count))
    assert found.columns["routed_experts"].dtype == none.dtype
    np.testing.assert_equal(found.columns["routed_experts"], chosen)
    assert protocol.pack(with_experts(chosen), learns=False).experts == b""
    without = protocol.pack(sample).experts
    assert protocol.with_experts(sample, without, (3, 2, count)) is sample  # its engine does not tell


@pytest.mark.parametrize(
    ("experts", "of_model", "words"),
    [
        (np.zeros((5, 3, 2), np.uint8), None, "has 30 numbers of experts for 5 tokens"),
        (np.zeros((4, 3, 2), np.uint8), OF_MODEL, "has 24 numbers of experts for 5 tokens"),
        (np.zeros((5, 3, 2), np.int16), OF_MODEL, "has 60 numbers of experts for 5 tokens"),
        (np.full((5, 3, 2), 6, np.uint8), OF_MODEL, "has experts beyond the 6 of the model"),
        (np.full((5, 3, 2), -1, np.int16), (3, 2, 300), "has experts beyond the 300 of the model"),
        (np.zeros((5, 3, 3), np.uint8), (3, 3, 300), "buffer size must be a multiple of element size"),
    ],
)
def test_experts_that_no_engine_has_chosen_are_refused(experts, of_model, words):
    with pytest.raises(ValueError, match=words):
        protocol.with_experts(sample_of_numbers(), experts.tobytes(), of_model)


def test_a_report_has_so_many_groups_that_their_experts_fit(monkeypatch):
    monkeypatch.setattr(sampler, "EXPERTS_OF_A_REPORT", 100)
    packed = protocol.pack(with_experts(np.zeros((5, 3, 2), np.uint8)))  # 30 bytes
    assert len(packed.experts) == 30
    groups = [protocol.Group(i, [packed] * n) for i, n in enumerate((1, 2, 1, 1))]
    assert sampler._first_of(groups) == groups[:2]  # 90 bytes; with the next one there would be 120
    assert sampler._first_of([protocol.Group(0, [packed] * 4), groups[0]]) == [protocol.Group(0, [packed] * 4)]
    assert sampler._first_of([]) == []
    many = [protocol.Group(i, []) for i in range(20)]
    assert sampler._first_of(many) == many[:16]


def test_a_sample_longer_than_the_limit_is_refused():
    with pytest.raises(ValueError, match="a response has more tokens than 2"):
        protocol.unpack(protocol.pack(sample_of_numbers()), ROW, Sampling(max_tokens=2), 10, range(4, 6))

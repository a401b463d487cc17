"""Requests in flight: added, ended and aborted at any time, each with limits of its own."""

import sys
from dataclasses import replace
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
from helpers_data import ranks_without_group
from helpers_engines import (
    PROMPTS,
    TEMPERATURE,
    logits_of,
    logp_of,
    plain,
    push,
    truncated,
    without_shortcuts,
)

from extras.engines import hf
from rl.data.types import Request, Sampling
from rl.sampling.engines import vllm
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.groups import sample_groups, seeded
from rl.sampling.loop import Loop

WARM = Sampling(temperature=TEMPERATURE, max_tokens=12)
SIX = [Request(key, prompt, WARM) for key, prompt in zip("abcdef", [*PROMPTS, PROMPTS[1]], strict=True)]  # fit at once


def run(engine, requests=(), *, steps=1000, seed=0):
    """Add requests and sample for this many steps, or to the end. Returns the completions in the order they ended."""
    done = []
    with seeded(seed, engine.device):
        engine.add(requests)
        while steps and engine.has_requests():
            done += engine.step()
            steps -= 1
    return done


def by_key(completions):
    result = {c.request.key: c for c in completions}
    assert len(result) == len(completions)  # none comes twice
    return result


def assert_scored(policy, request, completion):
    """Its log-probs are the trainer's."""
    assert len(completion.logprobs) == len(completion.token_ids)
    expected = logp_of(policy, request.prompt_ids, completion.token_ids, request.sampling.temperature)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)


# --- each request by itself


def test_requests_with_seeds_of_their_own_are_drawn_from_the_policy(hf_engine, policy):
    """And a seed gives the same tokens beside whatever others."""
    push(hf_engine, policy)
    way = Sampling(temperature=TEMPERATURE, max_tokens=2)
    requests = [Request(i, PROMPTS[1], way, seed=i) for i in range(800)]
    done = by_key(run(hf_engine, requests))
    p = (logits_of(plain(policy), PROMPTS[1], [0])[0].double() / TEMPERATURE).softmax(-1).numpy()
    counts = np.bincount([c.token_ids[0] for c in done.values()], minlength=len(p))
    expected = p * len(requests)
    often = expected >= 5
    chi2 = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert chi2 < often.sum() + 4 * np.sqrt(2 * often.sum())  # mean and standard deviation of chi squared
    beside = by_key(run(hf_engine, [requests[5], Request("x", PROMPTS[2], way), requests[0]], seed=9))
    assert [beside[i].token_ids for i in (0, 5)] == [done[i].token_ids for i in (0, 5)]


def test_requests_have_their_own_keys_limits_and_ways_of_sampling(every_engine, policy):
    push(every_engine, policy)
    requests = [
        Request("text", PROMPTS[1], Sampling(temperature=TEMPERATURE, max_tokens=1)),
        Request(7, PROMPTS[1], Sampling(temperature=TEMPERATURE, max_tokens=9)),
        Request((2, "x"), PROMPTS[2], Sampling(temperature=0.0, max_tokens=5)),
        Request(frozenset({1}), PROMPTS[3], Sampling(temperature=1.0, top_k=3, max_tokens=11)),
        Request(None, PROMPTS[4], Sampling(temperature=2.0, top_p=0.8, max_tokens=4)),
    ]
    done, model = by_key(run(every_engine, requests)), plain(policy)
    assert done.keys() == {request.key for request in requests}
    for key, prompt, way, _ in requests:
        c = done[key]
        assert c.finish_reason == ("stop" if c.token_ids[-1] in (2, 0) else "length")
        assert len(c.token_ids) == len(c.logprobs) <= way.max_tokens
        assert c.finish_reason == "stop" or len(c.token_ids) == way.max_tokens
        rows = logits_of(model, prompt, c.token_ids).tolist()
        for row, token, logprob in zip(rows, c.token_ids, c.logprobs, strict=True):
            allowed = truncated(row, temperature=way.temperature or 1.0, top_k=way.top_k, top_p=way.top_p)
            assert logprob == pytest.approx(np.log(allowed[token]), abs=1e-4)
            assert way.temperature or token == np.argmax(row)
    assert len(done[7].token_ids) > 1 and not every_engine.has_requests()


def test_requests_added_while_others_are_sampled(every_engine, policy):
    push(every_engine, policy)
    done = run(every_engine, SIX, steps=4)
    late = [
        Request("late", PROMPTS[3], Sampling(temperature=TEMPERATURE, max_tokens=2)),
        Request("later", [5, 6], WARM),
    ]
    done += run(every_engine, late, seed=1)
    found = by_key(done)
    assert found.keys() == {*"abcdef", "late", "later"}
    for request in (*SIX, *late):
        assert_scored(policy, request, found[request.key])
    order = [c.request.key for c in done]
    lasting = [key for key in "abcdef" if len(found[key].token_ids) == 12]
    assert len(lasting) >= 2
    for key in lasting:  # the plain every_engine finishes a batch first
        assert (order.index("late") > order.index(key)) == isinstance(every_engine, hf.Engine)


def test_requests_that_come_one_by_one_begin_together(vllm_engine, policy):
    """A step that reads prompts is slow, so there are few of them. Whoever comes while nothing is sampled begins."""
    push(vllm_engine, policy)
    waiting = []
    with seeded(0, vllm_engine.device):
        vllm_engine.add([Request(name, PROMPTS[0], Sampling(max_tokens=100)) for name in "abcd"])
        for i in range(18):
            vllm_engine.add([Request(i, PROMPTS[1], WARM)])
            vllm_engine.step()
            assert vllm_engine.has_requests() and vllm_engine.in_flight
            waiting.append(len(vllm_engine.new))
    # Number 0 comes before the first step, and begins with the others; 8 comes with those that begin after 8 steps.
    assert waiting == [*range(8), *range(8), 0, 1] and vllm.TAKE_EVERY == 8
    vllm_engine.abort()


def test_more_requests_than_sequences_wait_for_room(every_engine, policy):
    push(every_engine, policy)
    requests = [Request(i, PROMPTS[i % 5], Sampling(temperature=TEMPERATURE, max_tokens=1 + i % 7)) for i in range(20)]
    first = run(every_engine, requests, steps=1)
    assert by_key(first).keys() <= set(range(8)) and {0, 7} <= by_key(first).keys()  # of one token each
    found = by_key(first + run(every_engine))
    assert found.keys() == set(range(20))
    for request in requests:
        assert_scored(policy, request, found[request.key])


def test_prompts_that_do_not_fit_into_one_pass_wait_and_depend_on_their_seeds_alone(vllm_engine, policy, monkeypatch):
    push(vllm_engine, policy)
    requests = [Request(i, PROMPTS[i % 5] * 2, WARM, seed=i) for i in range(8)]
    sizes = [len(x.prompt_ids) for x in requests]
    at_once = by_key(run(vllm_engine, requests))
    monkeypatch.setattr(vllm_engine.scheduler, "max_num_scheduled_tokens", most := max(sizes) + 8)
    assert sum(sizes) > 2 * most
    assert {key: c.token_ids for key, c in by_key(run(vllm_engine, requests)).items()} == {
        key: c.token_ids for key, c in at_once.items()
    }


def test_a_group_is_refused_while_one_of_its_name_is_in_flight(every_engine, policy):
    push(every_engine, policy)
    loop, row = Loop(every_engine), {"prompt_ids": PROMPTS[0], "row_index": 0}
    with seeded(0, every_engine.device):
        for _ in range(2):  # a name that has come back is free
            loop.start("a", row, replace(WARM, n=8, stop_token_ids=tuple(range(40))))
            groups, was_incomplete = [], False
            while not groups:
                was_incomplete |= len(loop.complete.get("a", ())) > 0
                with pytest.raises(ValueError, match="a group with the name 'a' is in flight already"):
                    loop.start("a", row, WARM)
                assert loop.is_open()
                groups = loop.step()
            [(name, samples)] = groups
            assert name == "a" and len(samples) == 8 and was_incomplete
            assert not loop.is_open()


def test_a_request_that_could_outgrow_the_engine_is_refused_by_its_own_limit(every_engine):
    long = [1] * 310
    fits, grows = (Request(n, long, Sampling(max_tokens=n)) for n in (10, 11))
    with pytest.raises(ValueError, match="may have 321 tokens, but the engine was made for 320"):
        every_engine.add([fits, grows])
    assert not every_engine.has_requests()
    [completion] = run(every_engine, [fits])
    assert completion.request.key == 10


# --- abort


def test_an_aborted_request_gives_what_it_has_so_far(every_engine, policy):
    push(every_engine, policy)
    whole = by_key(run(every_engine, SIX))
    done = run(every_engine, SIX, steps=5)
    aborted = by_key(every_engine.abort())
    assert sorted([*aborted, *by_key(done)]) == [*"abcdef"]
    lasting = [key for key in "abcdef" if len(whole[key].token_ids) == 12]
    assert len(lasting) >= 2 and aborted.keys() >= set(lasting)
    for request in SIX:
        if request.key in lasting:
            c = aborted[request.key]
            assert c.finish_reason == "abort" and len(c.token_ids) == 5
            assert c.token_ids == whole[request.key].token_ids[:5]
            assert c.logprobs == pytest.approx(whole[request.key].logprobs[:5], abs=1e-5)
            assert_scored(policy, request, c)
    assert every_engine.abort() == [] == run(every_engine, seed=1)


def test_abort_of_all_leaves_nothing(every_engine, policy):
    push(every_engine, policy)
    requests = [Request(i, PROMPTS[i % 5], WARM) for i in range(11)]  # of which three have to wait
    done = run(every_engine, requests, steps=3)
    every_engine.add([Request("new", PROMPTS[0], WARM)])
    aborted = by_key(every_engine.abort())
    assert not every_engine.has_requests() and aborted.keys() | by_key(done).keys() == {*range(11), "new"}
    assert {c.finish_reason for c in aborted.values()} == {"abort"}
    for key in (*(range(8, 11) if not done else ()), "new"):
        assert aborted[key].token_ids == aborted[key].logprobs == []
    assert any(len(aborted[key].token_ids) == 3 for key in range(8) if key in aborted)
    again = by_key(run(every_engine, requests))  # keys and every_engine are free
    assert again.keys() == set(range(11))
    for request in requests:
        assert_scored(policy, request, again[request.key])
    assert every_engine.abort() == []


def test_a_cut_request_gives_what_it_has_and_the_others_go_on(every_engine, policy):
    push(every_engine, policy)
    whole = by_key(run(every_engine, SIX))
    done = run(every_engine, SIX, steps=3)
    lasting = [key for key in "abcdef" if len(whole[key].token_ids) == 12]
    every_engine.add([Request("new", PROMPTS[0], WARM)])
    found = by_key(every_engine.cut([lasting[0], "new", "nobody"]))
    assert found.keys() == {lasting[0], "new"} and found["new"].token_ids == []
    cut = found[lasting[0]]
    assert cut.finish_reason == "abort" and cut.token_ids == whole[lasting[0]].token_ids[:3]
    assert every_engine.cut([lasting[0]]) == [] and not any(x is cut for x in every_engine.own_requests)
    assert len(cut.logprobs) == 3
    every_engine.add([Request(lasting[0], PROMPTS[2], WARM, seed=5)])  # its key is free at once
    rest = by_key(done + run(every_engine, seed=1))
    assert sorted(rest) == [*"abcdef"] and len(lasting) >= 2
    again = by_key(run(every_engine, [Request(lasting[0], PROMPTS[2], WARM, seed=5)]))
    assert rest[lasting[0]].token_ids == again[lasting[0]].token_ids
    for request in SIX:
        if request.key != lasting[0]:
            assert_scored(policy, request, rest[request.key])
    assert not every_engine.has_requests()


def test_an_engine_stops_sampling_what_was_cut(every_engine, policy):
    """Nothing else is in flight, and the request would go on for 300 tokens."""
    push(every_engine, policy)
    [request] = [Request("long", PROMPTS[1], Sampling(max_tokens=300), seed=i) for i in (3,)]
    run(every_engine, [request], steps=4)
    [completion] = every_engine.cut(["long"])
    count = 0
    while every_engine.has_requests():
        assert every_engine.step() == []
        count += 1
    assert count < 20 and len(completion.token_ids) < 24


# --- what ends a response


def test_stop_tokens_are_not_copied_with_every_request(vllm_engine, policy):
    """A deep copy, as vLLM makes it otherwise, takes longer than all else that is done to begin a request."""
    push(vllm_engine, policy)
    vllm_engine.add([Request(0, PROMPTS[0], Sampling(max_tokens=5, stop_token_ids=tuple(range(40, 60))))])
    with mock.patch("copy.deepcopy", side_effect=AssertionError):
        vllm_engine.step()
    [request] = vllm_engine.scheduler.requests.values()
    assert set(request.sampling_params.stop_token_ids) == {0, 2, *range(40, 60)}
    vllm_engine.abort()


def test_requests_that_share_parameters_have_lengths_and_seeds_of_their_own(vllm_engine, policy):
    push(vllm_engine, policy)
    wanted = [(5, 7), (3, None), (9, 8)]
    vllm_engine.add([Request(i, PROMPTS[0], Sampling(max_tokens=n), seed) for i, (n, seed) in enumerate(wanted)])
    vllm_engine.add([Request(3, PROMPTS[0], Sampling(top_p=0.5, max_tokens=5), 7)])
    vllm_engine.step()
    params = [request.sampling_params for request in vllm_engine.scheduler.requests.values()]
    assert [(x.max_tokens, x.seed) for x in params] == [*wanted, (5, 7)]
    assert [x.top_p for x in params] == [1, 1, 1, 0.5]
    vllm_engine.abort()


def test_stop_tokens_of_one_request_do_not_end_the_others(every_engine, policy):
    push(every_engine, policy)
    requests = [Request(key, PROMPTS[1], Sampling(temperature=TEMPERATURE, max_tokens=40)) for key in range(8)]
    whole = by_key(run(every_engine, requests))
    token = next(t for t in whole[0].token_ids[4:] if sum(t in whole[key].token_ids for key in range(1, 8)) >= 3)
    length = whole[0].token_ids.index(token) + 1
    way = Sampling(temperature=TEMPERATURE, max_tokens=40, stop_token_ids=(token, 79))
    found = by_key(run(every_engine, [requests[0]._replace(sampling=way), *requests[1:]]))
    assert found[0].token_ids == whole[0].token_ids[:length] and found[0].finish_reason == "stop"
    passed = [c for c in found.values() if c.request.key != 0 and token in c.token_ids[:-1]]
    assert passed and all(c.finish_reason == "stop" or len(c.token_ids) == 40 for c in found.values())


# --- vLLM with and without shortcuts


@pytest.mark.parametrize(
    "way",
    [
        dict(max_tokens=60),
        dict(max_tokens=30, stop_token_ids=tuple(range(20, 30))),
        dict(max_tokens=30, top_k=10, top_p=0.9, temperature=1.3),
        dict(max_tokens=30, temperature=0.0),
    ],
    ids=str,
)
def test_vllm_without_shortcuts_gives_the_same_responses(vllm_engine, policy, way):
    push(vllm_engine, policy)
    sampling = Sampling(**dict(n=4, temperature=TEMPERATURE) | way)
    rows = [{"prompt_ids": prompt, "row_index": i} for i, prompt in enumerate(PROMPTS)]
    ours = sample_groups(vllm_engine, rows, sampling, seed=3)
    with without_shortcuts(vllm_engine):
        theirs = sample_groups(vllm_engine, rows, sampling, seed=3)
    again = sample_groups(vllm_engine, rows, sampling, seed=3)
    assert len(ours) == 20 and sum(len(s.response_ids) for s in ours) > 100
    for one, other, third in zip(ours, theirs, again, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist() == third.response_ids.tolist()
        assert one.rollout_logprobs.tolist() == other.rollout_logprobs.tolist() == third.rollout_logprobs.tolist()
        assert one.finish_reason == other.finish_reason == third.finish_reason


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("0.26.0", True),
        ("0.28.0", True),
        ("0.28.12rc1", True),
        ("0.32.0", True),
        ("0.27.0", False),
        ("0.260.1", False),
        ("0.2.6", False),
        ("1.26.0", False),
        ("0.34.0", False),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_only_tested_versions_have_shortcuts_and_others_say_so_once(
    monkeypatch, capsys, tiny_model, rank, version, is_tested
):
    llm, took = mock.MagicMock(), []
    fake, distributed = ModuleType("vllm"), ModuleType("vllm.distributed")
    fake.LLM, fake.__version__, distributed.parallel_state = lambda *_, **__: llm, version, None
    for module in (fake, distributed):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(vllm, "take_shortcuts", lambda *arguments: took.append(arguments))
    engine = vllm.Engine(tiny_model, ranks_without_group(rank, 2), EngineFlags(), longest=64)
    assert took == ([(engine.scheduler, engine.in_flight)] if is_tested else [])
    printed = [x for x in capsys.readouterr().out.splitlines() if not x.startswith("start | ")]
    said = f"vLLM {version} was not tested with our shortcuts: generation takes about a third longer"
    assert printed == ([said] if rank == 0 and not is_tested else [])

"""Every engine, the same promises: it samples from the policy that was pushed, and says with which log-probs."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import helpers_scripts as h
import numpy as np
import pytest
import torch
from helpers_data import spans_of
from helpers_engines import (
    PROMPTS,
    ROWS,
    TEMPERATURE,
    change,
    logits_of,
    plain,
    push,
    samples_from,
    softmax,
    trainer_gap,
    truncated,
    weights,
)
from helpers_families import load_with_adapters, make_them_count
from transformers import AutoConfig, AutoTokenizer

import train_grpo
from extras.engines import hf
from extras.engines.hf import processed_logprobs
from extras.families import experts
from extras.lora.adapters import is_adapter
from extras.partial.in_flight import InFlight
from rl.data.batching import collate
from rl.data.order import derive_seed
from rl.data.template import stop_token_ids
from rl.data.types import Completion, Sampling
from rl.flags import build
from rl.model import load as models
from rl.model.checks import check_context
from rl.model.logprobs import token_logprobs
from rl.model.sharding import full_tensors
from rl.ranks import init_ranks
from rl.run.task import load_task
from rl.sampling.engines import make_engine
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.groups import sample_groups
from rl.sampling.loop import Loop, Trajectory
from rl.sampling.verify import check_engine, sampled_by


def generate(engine, prompts=PROMPTS, *, seed=0, **sampling):
    """Samples in groups, one group for each prompt."""
    rows, n = [{"prompt_ids": prompt, "row_index": i} for i, prompt in enumerate(prompts)], sampling.get("n", 1)
    samples = samples_from(engine, rows, seed=seed, **{"n": 1} | sampling)
    assert [s.row_index for s in samples] == [i for i in range(len(prompts)) for _ in range(n)]
    return [samples[k : k + n] for k in range(0, len(samples), n)]


def facts(samples):
    """Samples as plain values, which can be compared."""
    values = [[*(vars(s) | s.columns | {"columns": [*s.columns]}).values()] for s in samples]
    return [[x.tolist() if isinstance(x, np.ndarray) else x for x in row] for row in values]


def tokens(groups):
    return [[s.response_ids.tolist() for s in group] for group in groups]


def train(policy, samples):
    """One AdamW update with a large step, through the trainer's own log-probs."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    logp, _ = token_logprobs(policy, collate(samples, pad_id=0), sampling=Sampling(temperature=TEMPERATURE))
    signs = torch.tensor([1.0, -1.0]).repeat(len(samples) // 2)[:, None]
    (logp * signs).sum().backward()
    optimizer.step()


def plain_gap(policy, samples):
    """The same against a plain forward pass of one sequence at a time."""
    model, gaps = plain(policy), []
    for s in samples:
        logp = (logits_of(model, s.prompt_ids, s.response_ids) / TEMPERATURE).log_softmax(-1)
        logp = logp.gather(-1, torch.from_numpy(s.response_ids).long()[:, None])[:, 0]
        gaps.append((logp - torch.from_numpy(s.rollout_logprobs)).abs().max())
    return float(max(gaps))


# --- the engine is the policy ---


def test_engine_logprobs_are_the_policys_after_every_push(engine, policy):
    engine.sleep()
    change(policy, scale=0.05)  # not what stands in the folder
    engine.wake()
    push(engine, policy)
    samples = samples_from(engine)
    assert trainer_gap(policy, samples) < 1e-4 and plain_gap(policy, samples) < 1e-4
    for round in range(2):
        train(policy, samples)
        assert trainer_gap(policy, samples_from(engine)) > 0.05  # the engine still holds the old policy
        push(engine, policy)
        samples = samples_from(engine, seed=round + 1)
        assert trainer_gap(policy, samples) < 1e-4 and plain_gap(policy, samples) < 1e-4


def test_a_prompt_seen_before_a_push_is_scored_with_the_new_weights(engine, policy):
    """Engines cache the keys and values of prompts; those of old weights must not survive a push."""
    random = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 80, (290,), generator=random).tolist()  # more than two of vLLM's cache blocks

    def gap():
        return trainer_gap(policy, generate(engine, [prompt], seed=1)[0])

    push(engine, policy)
    assert gap() < 1e-4
    assert gap() < 1e-4  # now out of the cache
    change(policy, scale=0.05)
    push(engine, policy)
    assert gap() < 1e-4


TENSORS = [
    "model.embed_tokens.weight",
    *(
        f"model.layers.1.{name}"
        for name in (
            "self_attn.q_proj.weight",
            "self_attn.q_proj.bias",
            "self_attn.k_proj.weight",
            "self_attn.k_proj.bias",
            "self_attn.v_proj.weight",
            "self_attn.v_proj.bias",
            "self_attn.o_proj.weight",
            "mlp.gate_proj.weight",
            "mlp.up_proj.weight",
            "mlp.down_proj.weight",
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
        )
    ),
    "model.norm.weight",
]


def some(names):
    """One tensor of each kind, of each place; the others only in `make thorough`."""
    few = ("embed_tokens.weight", "k_proj.weight", "v_proj.bias", "up_proj.weight", "model.norm.weight")
    names = list(names)
    return h.some(names, *(x for x in names if x.endswith(few)))


@pytest.mark.parametrize("missing", some(TENSORS))
def test_update_weights_refuses_a_push_without_one_tensor(engine, policy, missing):
    whole = weights(policy)
    with pytest.raises(RuntimeError, match="untouched") as error:
        engine.update_weights([(name, tensor) for name, tensor in whole.items() if name != missing])
    assert missing in str(error.value)
    engine.update_weights(whole.items())
    assert trainer_gap(policy, samples_from(engine, n=1)) < 1e-4  # a whole push repairs it


def test_the_engine_keeps_its_weights_while_the_policy_moves_on(engine, policy):
    """The engine holds a copy: an update of the trainer's parameters must not leak into it before the next push."""
    push(engine, policy)
    before = generate(engine, seed=5)
    change(policy, scale=0.05)
    after = generate(engine, seed=5)
    assert tokens(before) == tokens(after)
    for one, other in zip(sum(before, []), sum(after, []), strict=True):
        assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=1e-5)


# --- check_engine ---


def verify(engine, policy, world, *, temperature=TEMPERATURE, limit=1e-4):
    sampling, rollout = Sampling(temperature=temperature), EngineFlags(max_logprob_gap=limit)
    return check_engine(policy, samples_from(engine), sampling, rollout, world, num_probe=10)


def test_check_engine_accepts_the_right_weights(engine, policy, world):
    push(engine, policy)
    assert verify(engine, policy, world) < 1e-5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.self_attn.k_proj.bias", "model.layers.0.self_attn.v_proj.bias"),
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"),
        ("model.layers.1.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight"),
    ],
)
def test_check_engine_notices_swapped_tensors_until_the_next_push(engine, policy, world, one, other):
    whole = weights(policy)
    engine.update_weights((whole | {one: whole[other], other: whole[one]}).items())
    with pytest.raises(RuntimeError, match="does not hold the policy's weights"):
        verify(engine, policy, world)
    push(engine, policy)
    assert verify(engine, policy, world) < 1e-5


@pytest.mark.parametrize("stale", some(name for name in TENSORS if not name.endswith("bias")))
def test_check_engine_notices_a_tensor_that_missed_a_small_update(engine, policy, world, stale):
    old = weights(policy)[stale]
    change(policy, scale=1e-3)
    engine.update_weights((weights(policy) | {stale: old}).items())
    with pytest.raises(RuntimeError, match="does not hold the policy's weights"):
        verify(engine, policy, world)
    push(engine, policy)
    assert verify(engine, policy, world) < 1e-5


@pytest.mark.parametrize("forgotten", ["none", "all", "half"])
def test_the_engine_holds_weights_and_adapters_and_check_engine_notices_if_not(engine, tiny_model, world, forgotten):
    policy = make_them_count(load_with_adapters(tiny_model, world))
    base = {name: x for name, x in full_tensors(policy) if not is_adapter(name)}
    lost = {"none": 0, "all": 1, "half": 2}[forgotten]
    merged = models.weights_for_engine(policy, world)
    engine.update_weights((name, base[name] if lost and i % lost == 0 else x) for i, (name, x) in enumerate(merged))
    if lost:
        with pytest.raises(RuntimeError, match="does not hold the policy's weights"):
            verify(engine, policy, world)
    else:
        assert verify(engine, policy, world) < 1e-5


@pytest.mark.parametrize("temperature", [0.69, 1.0])
def test_check_engine_notices_another_temperature(engine, policy, world, temperature):
    push(engine, policy)
    with pytest.raises(RuntimeError, match=r"differ by \d\.\d\de-0\d on average over \d+ tokens, more than .* 1e-04"):
        verify(engine, policy, world, temperature=temperature)


def test_check_engine_notices_logprobs_that_are_not_finite(engine, policy, world):
    push(engine, policy)
    samples = samples_from(engine)
    samples[0].rollout_logprobs[-1] = math.nan
    with pytest.raises(RuntimeError, match="differ by nan"):
        check_engine(policy, samples, Sampling(temperature=TEMPERATURE), EngineFlags(max_logprob_gap=1e-4), world)


# --- sampling ---


def test_samples_are_a_function_of_their_seed(engine, policy):
    push(engine, policy)
    torch.manual_seed(1)
    first = generate(engine, n=2, seed=7)
    generate(engine, n=2, seed=8)
    torch.manual_seed(2)
    np.random.seed(2)
    again = generate(engine, n=2, seed=7)
    assert tokens(again) == tokens(first)
    other = generate(engine, n=2, seed=8)
    for prompt in range(len(PROMPTS)):
        assert tokens(other)[prompt] != tokens(first)[prompt]


def test_long_responses_are_scored_right_over_many_blocks_of_the_cache(engine, policy):
    push(engine, policy)
    samples = samples_from(engine, n=4, max_tokens=280)
    assert max(len(s.response_ids) for s in samples) == 280 and trainer_gap(policy, samples) < 1e-4


def test_sequences_that_could_outgrow_the_engine_are_refused(engine):
    assert max(map(len, PROMPTS)) == 37
    with pytest.raises(ValueError, match="may have 321 tokens, but the engine was made for 320"):
        generate(engine, max_tokens=284)
    assert not engine.has_requests()  # also those that came before it


def test_sequences_that_vllm_preempts_are_scored_right(engine, policy):
    """The cache holds little more than one long sequence: others are thrown out, computed again and carried on."""
    if isinstance(engine, hf.Engine):
        pytest.skip("only vLLM has a cache that can be full")
    push(engine, policy)
    scheduler = engine.scheduler
    pool, block_size = scheduler.kv_cache_manager.block_pool, engine.llm.llm_engine.vllm_config.cache_config.block_size
    one_sequence = math.ceil(320 / block_size)
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - one_sequence - 1)
    try:
        with mock.patch.object(scheduler, "_preempt_request", wraps=scheduler._preempt_request) as preempt:
            samples = samples_from(engine, max_tokens=280)
    finally:
        pool.free_blocks(taken)
    assert preempt.called and len(samples) == 2 * len(PROMPTS)
    assert all(len(s.response_ids) == 280 or s.finish_reason == "stop" for s in samples)
    assert trainer_gap(policy, samples) < 1e-4


def test_sampling_leaves_the_global_generators_alone(engine, policy):
    push(engine, policy)
    torch.manual_seed(3)
    np.random.seed(3)
    states = torch.get_rng_state(), np.random.get_state()
    generate(engine)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1][1]) and np.random.get_state()[2] == states[1][2]


def test_a_group_has_n_different_samples(engine, policy):
    push(engine, policy)
    groups = generate(engine, n=3)
    assert [len(group) for group in groups] == [3] * len(PROMPTS)
    for group in tokens(groups):
        assert len({tuple(ids) for ids in group}) == 3
    for sampled in (4, 1):
        assert len(generate(engine, PROMPTS[:1], n=sampled)[0]) == sampled


def test_tokens_are_sampled_in_proportion_to_probability(engine, policy):
    """The first token of 600 samples against its distribution: a wrong temperature would be far off."""
    push(engine, policy)
    (group,) = generate(engine, [PROMPTS[1]], n=600, max_tokens=1, seed=3)
    counts = torch.bincount(torch.tensor([s.response_ids[0] for s in group]), minlength=80)
    expected = (logits_of(plain(policy), PROMPTS[1], [0])[0] / TEMPERATURE).softmax(-1)
    frequent = expected > 0.05
    assert 3 <= frequent.sum()
    deviation = (counts / 600 - expected).abs() / (expected * (1 - expected) / 600).sqrt()
    assert deviation[frequent].max() < 4
    assert abs(counts[frequent].sum() / 600 - expected[frequent].sum()) < 0.08


def test_responses_that_vllm_drops_are_an_error(engine, policy):
    if isinstance(engine, hf.Engine):
        return  # no one else holds its requests
    push(engine, policy)
    core = engine.llm.llm_engine.engine_core

    def drop_the_others(row, samples):
        core.abort_requests(list(core.engine_core.scheduler.requests))

    with pytest.raises(RuntimeError, match=r"the engine lost [1-9] response\(s\), one to row \d+ among them"):
        samples_from(engine, on_group=drop_the_others)
    assert not engine.has_requests()
    assert [len(group) for group in generate(engine, n=2)] == [2] * len(PROMPTS)  # the engine goes on


def test_without_prompts_there_are_no_samples(engine):
    assert generate(engine, []) == []


def test_a_response_says_length_after_max_tokens(engine, policy):
    push(engine, policy)
    for max_tokens in (1, 7):
        for s in samples_from(engine, max_tokens=max_tokens):
            assert len(s.response_ids) == len(s.rollout_logprobs) <= max_tokens
            if s.finish_reason == "length":
                assert len(s.response_ids) == max_tokens
                assert s.response_ids[-1] not in (2, 0)


def ends_at_first(stops, samples, max_tokens):
    """Every response ends with its first stop token, or at the limit; both must happen. Returns the stops used."""
    for s in samples:
        ids, stopped = s.response_ids.tolist(), s.finish_reason == "stop"
        assert not set(ids[:-1]) & set(stops) and (ids[-1] in stops) == stopped
        assert len(s.rollout_logprobs) == len(ids)
        assert stopped or (s.finish_reason == "length" and len(ids) == max_tokens)
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    return {int(s.response_ids[-1]) for s in samples if s.finish_reason == "stop"}


def test_a_response_ends_after_each_eos_of_the_generation_config(engine, policy, tiny_model):
    assert json.loads((Path(tiny_model) / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    with torch.no_grad():
        policy.get_input_embeddings().weight.to_local()[[0, 2]] *= 3  # makes both end tokens likely in some contexts
    push(engine, policy)
    assert ends_at_first((2, 0), samples_from(engine, n=16, max_tokens=10), 10) == {2, 0}
    assert trainer_gap(policy, samples_from(engine, n=8)) < 1e-4  # the log-prob of the end token included


def test_a_response_ends_after_extra_stop_tokens(engine, policy):
    push(engine, policy)
    extra = tuple(range(20, 30))
    samples = samples_from(engine, n=8, stop_token_ids=extra)
    assert ends_at_first((2, 0, *extra), samples, 12) & set(extra)


def test_sampling_at_temperature_zero_is_greedy(engine, policy):
    push(engine, policy)
    model = plain(policy)
    for prompt, (s,) in zip(PROMPTS, generate(engine, temperature=0.0, max_tokens=10), strict=True):
        logits = logits_of(model, prompt, s.response_ids)
        assert s.response_ids.tolist() == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).max(-1).values
        torch.testing.assert_close(torch.from_numpy(s.rollout_logprobs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "way",
    [
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.3},
        pytest.param({"top_k": 6, "top_p": 0.8}, marks=pytest.mark.thorough),
        pytest.param({"top_k": 50, "top_p": 0.95}, marks=pytest.mark.thorough),
        {"top_k": 6, "top_p": 0.8, "min_p": 0.1},
    ],
    ids=str,
)
def test_engine_and_trainer_have_the_log_probs_of_the_truncated_distribution(engine, policy, world, way):
    push(engine, policy)
    model, samples, lost = plain(policy), samples_from(engine, n=3, **way), []
    for s in samples:
        ids, logprobs = s.response_ids.tolist(), s.rollout_logprobs.tolist()
        for row, token, logprob in zip(logits_of(model, s.prompt_ids, ids).tolist(), ids, logprobs, strict=True):
            allowed = truncated(row, **{"temperature": TEMPERATURE, "top_k": -1, "top_p": 1.0} | way)
            assert logprob == pytest.approx(math.log(allowed[token]), abs=1e-4)
            lost.append(math.log(allowed[token]) - math.log(softmax(row, TEMPERATURE)[token]))
    assert len(lost) > 100 and sum(lost) / len(lost) > 0.02
    same = Sampling(temperature=TEMPERATURE, **way)
    assert check_engine(policy, samples, same, EngineFlags(max_logprob_gap=1e-4), world, num_probe=15) < 1e-5
    whole = Sampling(temperature=TEMPERATURE)
    with pytest.raises(RuntimeError, match="likelier to the engine.* .--top-p, --top-k, --min-p"):
        check_engine(policy, samples, whole, EngineFlags(max_logprob_gap=1e-4), world, num_probe=15)


def test_check_engine_names_tokens_that_were_not_sampled(engine, policy, world):
    """A tool's output that the response mask counts as sampled: its log-probs are 0."""
    push(engine, policy)
    samples = samples_from(engine, n=4)
    for s in samples:
        s.rollout_logprobs[3:6] = 0.0
    way = Sampling(temperature=TEMPERATURE)
    with pytest.raises(RuntimeError, match="the response mask has tokens that it did not sample"):
        check_engine(policy, samples, way, EngineFlags(max_logprob_gap=0.06), world, num_probe=20)


def test_check_engine_sees_a_small_gap_in_one_direction_and_none_that_goes_both_ways(engine, policy, world):
    """bfloat16: rounding of 0.02 both ways is normal, and 0.02 in one direction is not."""
    push(engine, policy)
    samples, way = samples_from(engine, n=4), Sampling(temperature=TEMPERATURE)
    options = dict(sampling=way, rollout=EngineFlags(max_logprob_gap=0.06), ranks=world, num_probe=20)
    noise = [np.resize([0.02, -0.02], len(s.rollout_logprobs)) for s in samples]
    noisy = [replace(s, rollout_logprobs=s.rollout_logprobs + x) for s, x in zip(samples, noise, strict=True)]
    assert check_engine(policy, noisy, **options) == pytest.approx(0.02, abs=1e-4)
    shifted = [replace(s, rollout_logprobs=s.rollout_logprobs + abs(x)) for s, x in zip(samples, noise, strict=True)]
    with pytest.raises(RuntimeError, match="a sixth of it in one direction \\(2.00e-02\\)"):
        check_engine(policy, shifted, **options)


def test_check_engine_looks_only_at_tokens_of_the_last_push(engine, policy, world):
    """A response that was interrupted, and goes on with other weights; then responses of earlier weights alone."""
    push(engine, policy)
    loop, way = Loop(engine), Sampling(n=4, temperature=TEMPERATURE, max_tokens=12)
    for i, row in enumerate(ROWS):
        loop.start(i, row, way)
    done = []
    for _ in range(5):
        assert loop.is_open()
        done += loop.step()
    loop.interrupt()
    version = engine.policy_version
    change(policy, scale=0.05)
    push(engine, policy)
    loop.resume()
    while loop.is_open():
        done += loop.step()
    samples = [s for _, group in done for s in group]
    options = dict(sampling=way, rollout=EngineFlags(max_logprob_gap=1e-4), ranks=world, num_probe=100)
    with pytest.raises(RuntimeError, match="disagree"):
        check_engine(policy, samples, **options)
    assert check_engine(policy, samples, **options, version=version + 1) < 1e-5
    assert check_engine(policy, samples, **options, version=version + 2) == 0  # none
    wrong = [replace(s, rollout_logprobs=s.rollout_logprobs - sampled_by(version + 1, s)) for s in samples]
    with pytest.raises(RuntimeError, match="disagree"):
        check_engine(policy, wrong, **options, version=version + 1)
    assert {len(spans_of(s)) for s in samples} == {1, 2}


def test_responses_that_outlive_steps_have_the_log_probs_of_the_weights_that_sampled_each_token(every_engine, policy):
    """Keys and values of older weights, in the cache or by a shared prefix, would show as another log-prob."""
    flight, way = InFlight(1.0, ROWS, 2, init_ranks(), [], 3), Sampling(2, TEMPERATURE)
    way, models_by_version, samples = replace(way, max_tokens=40, stop_token_ids=(2, *range(20, 24))), {}, []
    for step in range(6):
        change(policy, scale=0.05, seed=step)
        push(every_engine, policy)
        models_by_version[every_engine.policy_version] = plain(policy)
        rows = [ROWS[i % len(ROWS)] for i in range(2 * step + 2 * (step > 0), 2 * step + 4)]
        samples += flight.sample(every_engine, rows, way, lambda row, group: None, step=step)[1]
    assert len(samples) == 6 * 2 * 2 and sum(len(spans_of(s)) > 1 for s in samples) >= 3
    for s in samples:
        versions = s.columns["versions"][len(s.prompt_ids) :]
        for version in set(versions.tolist()):
            logits = logits_of(models_by_version[version], s.prompt_ids, s.response_ids)
            logp = (logits / TEMPERATURE).log_softmax(-1)[range(len(versions)), s.response_ids]
            own = versions == version
            torch.testing.assert_close(logp[own], torch.from_numpy(s.rollout_logprobs[own]), rtol=0, atol=1e-4)


# --- the sampling loop of the plain engine ---


def probabilities(values, **sampling):
    logits = torch.tensor(values).log() + 3.0  # any constant
    return processed_logprobs(logits, Sampling(**sampling)).exp()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [0.15, 0.5, 0.1, 0.25]),
        ({"temperature": 0.5}, [0.0225 / 0.345, 0.25 / 0.345, 0.01 / 0.345, 0.0625 / 0.345]),
        ({"temperature": 0.0}, [0.15, 0.5, 0.1, 0.25]),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"min_p": 0.25}, [0.15 / 0.9, 0.5 / 0.9, 0, 0.25 / 0.9]),
        ({"min_p": 0.25, "top_p": 0.8}, [0, 2 / 3, 0, 1 / 3]),  # 0.75 / 0.9 of the three
        ({"top_k": 99}, [0.15, 0.5, 0.1, 0.25]),
        ({"top_p": 0.7}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.76}, [0.15 / 0.9, 0.5 / 0.9, 0, 0.25 / 0.9]),
        ({"top_p": 0.49}, [0, 1, 0, 0]),
        ({"top_p": 1e-6}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [0, 2 / 3, 0, 1 / 3]),  # 0.75 / 0.9 of the three: p counts what k left
        ({"temperature": 0.5, "top_p": 0.85}, [0, 0.8, 0, 0.2]),  # p counts after the temperature
    ],
    ids=str,
)
def test_processed_logprobs_by_hand(sampling, expected):
    row = [0.15, 0.5, 0.1, 0.25]
    actual = probabilities([row, row[::-1]], **sampling)
    torch.testing.assert_close(actual, torch.tensor([expected, expected[::-1]]).float(), rtol=0, atol=1e-6)


def test_hf_engine_refuses_tensor_parallelism(tiny_model):
    with pytest.raises(ValueError, match="--tensor-model-parallel-size 2 needs --engine vllm"):
        load_task(
            build(
                train_grpo.Args,
                model=tiny_model,
                max_prompt_length=64,
                max_response_length=64,
                engine="hf",
                tensor_model_parallel_size=2,
            )
        )


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_engine_has_more_parallelism_than_ranks(tiny_model, world, engine):
    with pytest.raises(ValueError, match="--tensor-model-parallel-size 2 does not divide the 1 rank"):
        make_engine(tiny_model, world, EngineFlags(engine=engine, tensor_model_parallel_size=2), longest=64)


# --- samples ---


def test_sample_groups_keeps_groups_together_in_the_order_of_rows(engine, policy):
    push(engine, policy)
    samples = samples_from(engine, n=3, seed=4)
    assert [s.row_index for s in samples] == [row["row_index"] for row in ROWS for _ in range(3)]
    assert [s.prompt_ids.tolist() for s in samples] == [prompt for prompt in PROMPTS for _ in range(3)]
    assert all(s.response_mask.tolist() == [1] * len(s.response_ids) for s in samples)
    assert all(len(s.rollout_logprobs) and max(s.rollout_logprobs) <= 0 for s in samples)
    version = engine.policy_version
    assert version > 0 and all(spans_of(s) == ((version, s.num_sampled),) and s.outcome is None for s in samples)


def test_a_sample_is_what_the_engine_completed():
    experts = {"experts": [np.arange(3, dtype=np.int8), np.array([3], np.int8)]}  # the last token is missing
    trajectory = Trajectory((0, 1), {"prompt_ids": [5, 6], "row_index": 11}, Sampling(), None)
    request = trajectory.request()
    trajectory.take(Completion(request, 0, [7, 8, 9], [-0.5, -1.0, -0.25], "length", experts), 3)
    s = trajectory.sample()
    assert [s.prompt_ids.tolist(), s.response_ids.tolist()] == [[5, 6], [7, 8, 9]]
    assert s.rollout_logprobs.tolist() == [-0.5, -1.0, -0.25] and s.response_mask.tolist() == [1, 1, 1]
    assert (s.finish_reason, s.row_index, spans_of(s), s.outcome) == ("length", 11, ((3, 3),), None)
    assert s.columns["experts"].tolist() == [0, 1, 2, 3, 127]
    trajectory.take(Completion(request), 4)
    trajectory.tell([1, 2])
    again = {"experts": [np.arange(50, 58, dtype=np.int8)]}
    trajectory.take(Completion(request, 0, [6, 5], [-1.0, -2.0], columns=again), 6)
    s, NONE = trajectory.sample(), np.iinfo(np.int32).max
    assert s.columns["versions"].tolist() == [NONE, NONE, 3, 3, 3, NONE, NONE, 6, 6]
    # What is known already stays. What other weights than those of version 3 say of its last token is not known.
    assert s.columns["experts"].tolist() == [0, 1, 2, 3, 127, 55, 56, 57, 127]
    trajectory.tell([4])
    again = {"experts": [np.arange(70, 80, dtype=np.int8)]}
    trajectory.take(Completion(request, 0, [3], [-1.0], columns=again), 6)  # no push in between
    s = trajectory.sample()
    assert s.columns["experts"].tolist() == [0, 1, 2, 3, 127, 55, 56, 57, 78, 79, 127]
    assert s.columns["versions"].tolist()[-4:] == [6, 6, NONE, 6]


@pytest.mark.parametrize("logprobs", [[-0.5], [-0.5, math.nan], [-math.inf, -1.0], [-0.5, -1.0, -2.0], []], ids=str)
def test_a_response_without_a_finite_logprob_for_every_token_is_refused(logprobs):
    with pytest.raises(
        RuntimeError, match=rf"returned 2 tokens and {len(logprobs)} log-probs for a response to row 11"
    ):
        trajectory = Trajectory((0, 0), {"prompt_ids": [5], "row_index": 11}, Sampling(), None)
        trajectory.take(Completion(trajectory.request(), 0, [7, 8], logprobs, "stop"), 0)


def test_groups_are_handed_over_once_complete_while_others_are_sampled(engine, policy, monkeypatch):
    """24 sequences of up to 12 tokens, 8 at a time: the first groups must not wait for the last."""
    push(engine, policy)
    calls, rows = [], [{"prompt_ids": prompt, "row_index": i} for i, prompt in enumerate([*PROMPTS, *PROMPTS[:3]])]
    step, steps = engine.step, []
    monkeypatch.setattr(engine, "step", lambda: steps.append(1) or step())

    def on_group(row, samples):
        calls.append((row["row_index"], samples, len(steps)))

    samples = samples_from(engine, rows, n=3, seed=4, on_group=on_group)
    end = len(steps)
    assert sorted(i for i, _, _ in calls) == list(range(len(rows)))
    assert all(group == [s for s in samples if s.row_index == i] for i, group, _ in calls)
    assert facts(samples) == facts(samples_from(engine, rows, n=3, seed=4))
    assert 0 < calls[0][2] < 0.75 * end  # after about a third of the steps


def test_sample_groups_hands_each_row_its_samples(engine, policy):
    push(engine, policy)
    options, handed = Sampling(n=3, temperature=TEMPERATURE, max_tokens=12), {}

    def on_group(row, group):
        handed[row["row_index"]] = (row, group)

    samples = sample_groups(engine, ROWS, options, seed=4, on_group=on_group)
    assert handed.keys() == {row["row_index"] for row in ROWS}
    for row in ROWS:
        assert handed[row["row_index"]] == (row, [s for s in samples if s.row_index == row["row_index"]])
    # In the order of the rows, not of the calls.
    assert [s.row_index for s in samples] == [row["row_index"] for row in ROWS for _ in range(3)]
    assert sample_groups(engine, [], options, seed=4, on_group=on_group) == []


def test_a_run_that_is_asked_to_stop_keeps_the_groups_that_are_complete(engine, policy, monkeypatch):
    """30 sequences of up to 40 tokens, 8 at a time, and asked after 64 steps: some are complete, and some not."""
    push(engine, policy)
    whole = samples_from(engine, n=6, seed=4, max_tokens=40)
    looks = []
    monkeypatch.setattr("rl.stop.requested", lambda group=None: looks.append(group) or len(looks) == 65)
    handed = []
    options = Sampling(n=6, temperature=TEMPERATURE, max_tokens=40)
    samples = sample_groups(engine, ROWS, options, seed=4, on_group=lambda row, _: handed.append(row["row_index"]))
    assert len(looks) == 65 and set(looks) == {engine.group} and not engine.has_requests()
    assert 0 < len(handed) < len(ROWS) and [s.row_index for s in samples[::6]] == sorted(handed)
    assert facts(samples) == facts([s for s in whole if s.row_index in handed])
    monkeypatch.undo()
    assert facts(samples_from(engine, n=6, seed=4, max_tokens=40)) == facts(whole)  # nothing is left behind


def test_fold_gives_every_step_and_rank_its_own_seed():
    seeds = {derive_seed(seed, step, rank) for seed in range(5) for step in range(200) for rank in range(8)}
    assert len(seeds) == 8000 and all(0 <= seed < 2**31 for seed in seeds)
    assert (
        derive_seed(1, 2) != derive_seed(2, 1)
        and derive_seed(0, 1) != derive_seed(1)
        and derive_seed(3, 4) == derive_seed(3, 4)
    )


def test_stop_token_ids_are_those_of_tokenizer_config_and_generation_config(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert stop_token_ids(tiny_model, tokenizer) == (2, 0)
    AutoConfig.from_pretrained(tiny_model, eos_token_id=7).save_pretrained(tmp_path)  # and no generation config
    assert stop_token_ids(str(tmp_path), tokenizer) == (2, 7)


def test_check_context_refuses_more_tokens_than_positions(tiny_model):
    config = AutoConfig.from_pretrained(tiny_model)
    check_context(config, "--model x", 512)
    with pytest.raises(ValueError, match="max-response-length = 513 tokens, but .* has 512 positions"):
        check_context(config, "--model x", 513)


@pytest.mark.parametrize(
    ("on_cpu", "is_new", "said"), [(True, False, "on a CPU"), (False, True, "was not tried"), (False, False, "")]
)
def test_replay_is_off_where_vllm_does_not_tell_experts(on_cpu, is_new, said, monkeypatch):
    config = type("VllmConfig", (), {"_verify_aux_output_compatibility": None} if is_new else {})
    monkeypatch.setattr("vllm.config.VllmConfig", config)
    found = experts.why_no_experts(on_cpu)
    assert bool(found) == bool(said) and said in found


def test_a_later_rank_of_an_engine_goes_on_without_experts(monkeypatch):
    """vLLM gives them to the first rank only, and it must get them."""
    connector = pytest.importorskip("vllm.distributed.aux_output_connector.connector").AuxOutputSchedulerConnector
    monkeypatch.setattr(connector, "take_output", connector.take_output)
    first, request = SimpleNamespace(is_first_rank=True), SimpleNamespace(request_id="1", num_tokens=4)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: first)
    experts.let_later_ranks_go_on.__wrapped__()
    rows = np.arange(2 * 3 * 2, dtype=np.uint8).reshape(2, 3, 2)
    given = {"1": SimpleNamespace(token_start=1, rows=rows)}
    found = connector().take_output(request, given)
    assert np.array_equal(found, rows)  # of tokens 1 and 2, since the last one has not been read
    with pytest.raises(AssertionError):
        connector().take_output(request, None)
    first.is_first_rank = False
    assert connector().take_output(request, None) is None

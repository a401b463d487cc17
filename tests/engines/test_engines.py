"""Every engine, the same promises: it samples from the policy that was pushed, and says with which log-probs."""

import importlib.util
import json
import math
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rl.batching import collate
from rl.engines import hf, vllm
from rl.engines.hf import processed_logprobs
from rl.fsdp import full_tensors, load_policy, shard
from rl.logprobs import token_logprobs
from rl.rollout import check_context, fold, sample_groups, stop_token_ids, verify_engine
from rl.types import Sample, Sampling

TEMPERATURE = 0.7
PROMPTS = [[5], [7, 9, 11, 30], list(range(3, 40)), [8] * 9, [60, 61]]
ROWS = [{"prompt_ids": prompt, "row_index": 10 + i} for i, prompt in enumerate(PROMPTS)]
MAX_NUM_SEQS = 8  # fewer than most tests sample, so that engines have to queue


@pytest.fixture(scope="module", params=[hf, vllm], ids=["hf", "vllm"])
def setup(request, world, tiny_model):
    """(backend, engine); one engine a module, so a test must push the weights it wants to see."""
    backend = request.param
    if backend is vllm and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    engine = backend.make_engine(tiny_model, d=world, dtype=torch.float32, max_model_len=320, max_num_seqs=MAX_NUM_SEQS)
    yield backend, engine
    backend.close(engine)


@pytest.fixture
def policy(tiny_model, world):
    return shard(load_policy(tiny_model, world), world)


def weights(policy):
    return {name: tensor.clone() for name, tensor in full_tensors(policy)}


def push(setup, policy):
    backend, engine = setup
    backend.update_weights(engine, full_tensors(policy, torch.float32))


def generate(setup, prompts=PROMPTS, *, seed=0, **sampling):
    backend, engine = setup
    options = Sampling(**{"temperature": TEMPERATURE, "max_tokens": 12} | sampling)
    return backend.generate(engine, prompts, options, seed=seed)


def samples_from(setup, *, seed=0, **sampling):
    options = Sampling(**{"n": 2, "temperature": TEMPERATURE, "max_tokens": 12} | sampling)
    return sample_groups(*setup, ROWS, options, seed=seed)


def facts(samples):
    """Samples as plain values, which can be compared."""
    return [[np.asarray(x).tolist() for x in vars(s).values()] for s in samples]


def tokens(groups):
    return [[completion.token_ids for completion in group] for group in groups]


def change(policy, *, scale, seed=0):
    """Add noise to every parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.to_local().add_(scale * torch.randn(parameter.shape, generator=generator))


def train(policy, samples):
    """One AdamW update with a large step, through the trainer's own log-probs."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    logp, _ = token_logprobs(policy, collate(samples, pad_id=0), temperature=TEMPERATURE)
    signs = torch.tensor([1.0, -1.0]).repeat(len(samples) // 2)[:, None]
    (logp * signs).sum().backward()
    optimizer.step()


def plain(policy):
    """The policy's weights in a model that transformers runs its own way."""
    folder = policy.config._name_or_path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(weights(policy), strict=False)
    model.tie_weights()
    return model


@torch.no_grad()
def logits_of(model, prompt_ids, response_ids):
    """(len(response_ids), V) logits that predict each response token."""
    logits = model(input_ids=torch.tensor([[*prompt_ids, *response_ids]])).logits[0]
    return logits[len(prompt_ids) - 1 : -1]


@torch.no_grad()
def trainer_gap(policy, samples):
    """Largest difference between the engine's log-probs and the trainer's."""
    batch = collate(samples, pad_id=0)
    logp, _ = token_logprobs(policy, batch, temperature=TEMPERATURE)
    return float((logp - batch.rollout_logp).abs().max())


def plain_gap(policy, samples):
    """The same against a plain forward pass of one sequence at a time."""
    model, gaps = plain(policy), []
    for s in samples:
        logp = (logits_of(model, s.prompt_ids, s.response_ids) / TEMPERATURE).log_softmax(-1)
        logp = logp.gather(-1, torch.from_numpy(s.response_ids).long()[:, None])[:, 0]
        gaps.append((logp - torch.from_numpy(s.rollout_logprobs)).abs().max())
    return float(max(gaps))


# --- the engine is the policy ---


def test_engine_logprobs_are_the_policys_after_every_push(setup, policy):
    backend, engine = setup
    backend.sleep(engine)
    change(policy, scale=0.05)  # not what stands in the folder
    backend.wake(engine)
    push(setup, policy)
    samples = samples_from(setup)
    assert trainer_gap(policy, samples) < 1e-4 and plain_gap(policy, samples) < 1e-4
    for round in range(2):
        train(policy, samples)
        assert trainer_gap(policy, samples_from(setup)) > 0.05  # the engine still holds the old policy
        push(setup, policy)
        samples = samples_from(setup, seed=round + 1)
        assert trainer_gap(policy, samples) < 1e-4 and plain_gap(policy, samples) < 1e-4


def test_a_prompt_seen_before_a_push_is_scored_with_the_new_weights(setup, policy):
    """Engines cache the keys and values of prompts; those of old weights must not survive a push."""
    random = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 80, (290,), generator=random).tolist()  # more than two of vLLM's cache blocks

    def gap():
        ((completion,),) = generate(setup, [prompt], seed=1)
        ids, logprobs = completion.token_ids, completion.logprobs
        return trainer_gap(policy, [Sample(prompt, ids, [1] * len(ids), logprobs, "length", 0)])

    push(setup, policy)
    assert gap() < 1e-4
    assert gap() < 1e-4  # now out of the cache
    change(policy, scale=0.05)
    push(setup, policy)
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


@pytest.mark.parametrize("missing", TENSORS)
def test_update_weights_refuses_a_push_without_one_tensor(setup, policy, missing):
    backend, engine = setup
    whole = weights(policy)
    with pytest.raises(RuntimeError, match="untouched") as error:
        backend.update_weights(engine, [(name, tensor) for name, tensor in whole.items() if name != missing])
    assert missing in str(error.value)
    backend.update_weights(engine, whole.items())
    assert trainer_gap(policy, samples_from(setup, n=1)) < 1e-4  # a whole push repairs it


def test_the_engine_keeps_its_weights_while_the_policy_moves_on(setup, policy):
    """The engine holds a copy: an update of the trainer's parameters must not leak into it before the next push."""
    push(setup, policy)
    before = generate(setup, seed=5)
    change(policy, scale=0.05)
    after = generate(setup, seed=5)
    assert tokens(before) == tokens(after)
    assert sum([c.logprobs for group in before for c in group], []) == pytest.approx(
        sum([c.logprobs for group in after for c in group], []), abs=1e-5
    )


# --- verify_engine ---


def verify(setup, policy, world, *, temperature=TEMPERATURE, limit=1e-4):
    return verify_engine(policy, samples_from(setup), temperature=temperature, limit=limit, d=world, num_probe=10)


def test_verify_engine_accepts_the_right_weights(setup, policy, world):
    push(setup, policy)
    assert verify(setup, policy, world) < 1e-5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.self_attn.k_proj.bias", "model.layers.0.self_attn.v_proj.bias"),
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"),
        ("model.layers.1.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight"),
    ],
)
def test_verify_engine_notices_swapped_tensors_until_the_next_push(setup, policy, world, one, other):
    backend, engine = setup
    whole = weights(policy)
    backend.update_weights(engine, (whole | {one: whole[other], other: whole[one]}).items())
    with pytest.raises(RuntimeError, match="does not hold the policy's weights"):
        verify(setup, policy, world)
    push(setup, policy)
    assert verify(setup, policy, world) < 1e-5


@pytest.mark.parametrize("stale", [name for name in TENSORS if not name.endswith("bias")])
def test_verify_engine_notices_a_tensor_that_missed_a_small_update(setup, policy, world, stale):
    backend, engine = setup
    old = weights(policy)[stale]
    change(policy, scale=1e-3)
    backend.update_weights(engine, (weights(policy) | {stale: old}).items())
    with pytest.raises(RuntimeError, match="does not hold the policy's weights"):
        verify(setup, policy, world)
    push(setup, policy)
    assert verify(setup, policy, world) < 1e-5


@pytest.mark.parametrize("temperature", [0.69, 1.0])
def test_verify_engine_notices_another_temperature(setup, policy, world, temperature):
    push(setup, policy)
    with pytest.raises(RuntimeError, match=r"differ by \d\.\d\de-0\d on average over \d+ tokens, more than .* 1e-04"):
        verify(setup, policy, world, temperature=temperature)


def test_verify_engine_notices_logprobs_that_are_not_finite(setup, policy, world):
    push(setup, policy)
    samples = samples_from(setup)
    samples[0].rollout_logprobs[-1] = math.nan
    with pytest.raises(RuntimeError, match="differ by nan"):
        verify_engine(policy, samples, temperature=TEMPERATURE, limit=1e-4, d=world)


# --- sampling ---


def test_generate_is_a_function_of_its_seed(setup, policy):
    push(setup, policy)
    torch.manual_seed(1)
    first = generate(setup, n=2, seed=7)
    generate(setup, n=2, seed=8)
    torch.manual_seed(2)
    np.random.seed(2)
    again = generate(setup, n=2, seed=7)
    assert tokens(again) == tokens(first)
    other = generate(setup, n=2, seed=8)
    for prompt in range(len(PROMPTS)):
        assert tokens(other)[prompt] != tokens(first)[prompt]


def test_long_responses_are_scored_right_over_many_blocks_of_the_cache(setup, policy):
    """And vLLM, when all tokens of all sequences pass through its scheduler, gives the very same ones."""
    backend, engine = setup
    push(setup, policy)
    samples = samples_from(setup, max_tokens=280)
    assert max(len(s.response_ids) for s in samples) == 280 and trainer_gap(policy, samples) < 1e-4
    if backend is vllm:
        unknown = engine._replace(tokens=vllm.Tokens())  # tokens that are not expected pass through vLLM
        assert facts(samples_from((vllm, unknown), max_tokens=280)) == facts(samples)
        ours = vars(engine.scheduler).pop("schedule")
        try:
            assert facts(samples_from(setup, max_tokens=280)) == facts(samples)
            assert facts(samples_from((vllm, unknown), max_tokens=280)) == facts(samples)
        finally:
            engine.scheduler.schedule = ours


def test_generate_refuses_sequences_that_could_outgrow_the_engine(setup):
    backend, _ = setup
    if backend is not vllm:
        pytest.skip("only vLLM has such a limit")
    assert max(map(len, PROMPTS)) == 37
    with pytest.raises(ValueError, match="may have 321 tokens, but the engine was made for 320"):
        generate(setup, max_tokens=284)


def test_sequences_that_vllm_preempts_are_scored_right(setup, policy):
    """The cache holds little more than one long sequence: others are thrown out, computed again and carried on."""
    backend, engine = setup
    if backend is not vllm:
        pytest.skip("only vLLM has a cache that can be full")
    push(setup, policy)
    scheduler = engine.scheduler
    pool, block_size = scheduler.kv_cache_manager.block_pool, engine.llm.llm_engine.vllm_config.cache_config.block_size
    one_sequence = math.ceil(320 / block_size)
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - one_sequence - 1)
    try:
        with mock.patch.object(scheduler, "_preempt_request", wraps=scheduler._preempt_request) as preempt:
            samples = samples_from(setup, max_tokens=280)
    finally:
        pool.free_blocks(taken)
    assert preempt.called and len(samples) == 2 * len(PROMPTS)
    assert all(len(s.response_ids) == 280 or s.finish_reason == "stop" for s in samples)
    assert trainer_gap(policy, samples) < 1e-4


def test_generate_leaves_the_global_generators_alone(setup, policy):
    push(setup, policy)
    torch.manual_seed(3)
    np.random.seed(3)
    states = torch.get_rng_state(), np.random.get_state()
    generate(setup)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1][1]) and np.random.get_state()[2] == states[1][2]


def test_generate_groups_n_different_samples_with_their_prompt(setup, policy):
    push(setup, policy)
    groups = generate(setup, n=3)
    assert [len(group) for group in groups] == [3] * len(PROMPTS)
    for group in tokens(groups):
        assert len({tuple(ids) for ids in group}) == 3
    for sampled in (4, 1):
        assert len(generate(setup, PROMPTS[:1], n=sampled)[0]) == sampled


def test_generate_samples_in_proportion_to_probability(setup, policy):
    """The first token of 600 samples against its distribution: a wrong temperature would be far off."""
    push(setup, policy)
    (group,) = generate(setup, [PROMPTS[1]], n=600, max_tokens=1, seed=3)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in group]), minlength=80)
    expected = (logits_of(plain(policy), PROMPTS[1], [0])[0] / TEMPERATURE).softmax(-1)
    frequent = expected > 0.05
    assert 3 <= frequent.sum()
    deviation = (counts / 600 - expected).abs() / (expected * (1 - expected) / 600).sqrt()
    assert deviation[frequent].max() < 4
    assert abs(counts[frequent].sum() / 600 - expected[frequent].sum()) < 0.08


def test_responses_that_vllm_drops_are_an_error(setup, policy):
    backend, engine = setup
    if backend is hf:
        return  # no one else holds its requests
    push(setup, policy)
    core = engine.llm.llm_engine.engine_core

    def drop_the_others(i, completions):
        core.abort_requests(list(core.engine_core.scheduler.requests))

    with pytest.raises(RuntimeError, match="vLLM has dropped [1-9] of 10 responses"):
        options = Sampling(2, TEMPERATURE, max_tokens=12)
        backend.generate(engine, PROMPTS, options, seed=0, on_group=drop_the_others)
    assert [len(group) for group in generate(setup, n=2)] == [2] * len(PROMPTS)  # the engine goes on


def test_generate_of_no_prompts_is_empty(setup):
    assert generate(setup, []) == []


def test_generate_says_length_after_max_tokens(setup, policy):
    push(setup, policy)
    for max_tokens in (1, 7):
        for completion in sum(generate(setup, n=2, max_tokens=max_tokens), []):
            assert len(completion.token_ids) == len(completion.logprobs) <= max_tokens
            if completion.finish_reason == "length":
                assert len(completion.token_ids) == max_tokens
                assert completion.token_ids[-1] not in (2, 0)


def ends_at_first(stops, completions, max_tokens):
    """Every completion ends with its first stop token, or at the limit; both must happen. Returns the stops used."""
    for completion in completions:
        ids, stopped = completion.token_ids, completion.finish_reason == "stop"
        assert not set(ids[:-1]) & set(stops) and (ids[-1] in stops) == stopped
        assert len(completion.logprobs) == len(ids)
        assert stopped or (completion.finish_reason == "length" and len(ids) == max_tokens)
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    return {completion.token_ids[-1] for completion in completions if completion.finish_reason == "stop"}


def test_generate_stops_after_each_eos_of_the_generation_config(setup, policy, tiny_model):
    assert json.loads((Path(tiny_model) / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    with torch.no_grad():
        policy.get_input_embeddings().weight.to_local()[[0, 2]] *= 3  # makes both end tokens likely in some contexts
    push(setup, policy)
    completions = sum(generate(setup, n=16, max_tokens=10), [])
    assert ends_at_first((2, 0), completions, 10) == {2, 0}
    assert trainer_gap(policy, samples_from(setup, n=8)) < 1e-4  # the log-prob of the end token included


def test_generate_stops_after_extra_stop_tokens(setup, policy):
    push(setup, policy)
    extra = tuple(range(20, 30))
    completions = sum(generate(setup, n=8, stop_token_ids=extra), [])
    assert ends_at_first((2, 0, *extra), completions, 12) & set(extra)


def test_generate_at_temperature_zero_is_greedy(setup, policy):
    push(setup, policy)
    model = plain(policy)
    for prompt, (completion,) in zip(PROMPTS, generate(setup, temperature=0.0, max_tokens=10), strict=True):
        logits = logits_of(model, prompt, completion.token_ids)
        assert completion.token_ids == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).max(-1).values
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)


def truncated(logits, *, temperature, top_k, top_p):
    """token -> probability, by the definition: the k likeliest, then the fewest of those whose share reaches p."""
    weight = {token: math.exp(logit / temperature) for token, logit in enumerate(logits)}
    for limit in ("k", "p"):
        ranked = sorted(weight, key=weight.get, reverse=True)
        if limit == "k":
            keep = ranked[:top_k] if top_k > 0 else ranked
        else:
            total, mass, keep = sum(weight.values()), 0.0, []
            for token in ranked:
                if mass >= top_p * total:
                    break
                keep.append(token)
                mass += weight[token]
        weight = {token: weight[token] for token in keep}
    total = sum(weight.values())
    return {token: w / total for token, w in weight.items()}


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (-1, 0.6), (6, 0.8)])
def test_generate_reports_logprobs_of_the_truncated_distribution(setup, policy, top_k, top_p):
    push(setup, policy)
    model, seen = plain(policy), 0
    groups = generate(setup, n=3, top_k=top_k, top_p=top_p)
    for prompt, completion in ((p, c) for p, group in zip(PROMPTS, groups, strict=True) for c in group):
        logits = logits_of(model, prompt, completion.token_ids).tolist()
        for row, token, logprob in zip(logits, completion.token_ids, completion.logprobs, strict=True):
            allowed = truncated(row, temperature=TEMPERATURE, top_k=top_k, top_p=top_p)
            assert logprob == pytest.approx(math.log(allowed[token]), abs=1e-4)
            seen += 1
    assert seen > 100


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


def test_hf_engine_refuses_tensor_parallelism(tiny_model, world):
    with pytest.raises(ValueError, match="--tensor-model-parallel-size 2 needs --engine vllm"):
        hf.make_engine(tiny_model, d=world, dtype=torch.float32, max_model_len=64, tensor_parallel_size=2)


def test_vllm_engine_refuses_more_parallelism_than_ranks(tiny_model, world):
    with pytest.raises(ValueError, match="--tensor-model-parallel-size 2 does not divide the 1 rank"):
        vllm.make_engine(tiny_model, d=world, dtype=torch.float32, max_model_len=64, tensor_parallel_size=2)


# --- samples ---


def test_sample_groups_keeps_groups_together_in_the_order_of_rows(setup, policy):
    push(setup, policy)
    samples = samples_from(setup, n=3, seed=4)
    assert [s.row_index for s in samples] == [row["row_index"] for row in ROWS for _ in range(3)]
    assert [s.prompt_ids.tolist() for s in samples] == [prompt for prompt in PROMPTS for _ in range(3)]
    completions = sum(generate(setup, n=3, seed=4), [])
    assert [s.response_ids.tolist() for s in samples] == [c.token_ids for c in completions]
    assert [s.finish_reason for s in samples] == [c.finish_reason for c in completions]
    assert [s.rollout_logprobs.tolist() for s in samples] == [c.logprobs for c in completions]
    assert all(s.response_mask.tolist() == [1] * len(s.response_ids) for s in samples)
    assert all(len(s.rollout_logprobs) and max(s.rollout_logprobs) <= 0 for s in samples)


def test_groups_are_handed_over_once_complete_while_others_are_sampled(setup, policy):
    """24 sequences of up to 12 tokens, 8 at a time: the first groups must not wait for the last."""
    push(setup, policy)
    backend, engine = setup
    options, calls = Sampling(n=3, temperature=TEMPERATURE, max_tokens=12), []
    prompts = [*PROMPTS, *PROMPTS[:3]]

    def on_group(i, completions):
        calls.append((i, completions, time.perf_counter()))

    start = time.perf_counter()
    groups = backend.generate(engine, prompts, options, seed=4, on_group=on_group)
    end = time.perf_counter()
    assert sorted(i for i, _, _ in calls) == list(range(len(prompts)))
    assert all(completions == groups[i] for i, completions, _ in calls)
    assert tokens(groups) == tokens(backend.generate(engine, prompts, options, seed=4))
    assert calls[0][2] - start < 0.75 * (end - start)  # about a third of the time


def test_sample_groups_hands_each_row_its_samples(setup, policy):
    push(setup, policy)
    handed = {}
    options = Sampling(n=3, temperature=TEMPERATURE, max_tokens=12)
    samples = sample_groups(
        *setup, ROWS, options, seed=4, on_group=lambda row, group: handed.update({row["row_index"]: (row, group)})
    )
    assert handed.keys() == {row["row_index"] for row in ROWS}
    for row in ROWS:
        assert handed[row["row_index"]] == (row, [s for s in samples if s.row_index == row["row_index"]])
    assert len(samples) == 15


def test_fold_gives_every_step_and_rank_its_own_seed():
    seeds = {fold(seed, step, rank) for seed in range(5) for step in range(200) for rank in range(8)}
    assert len(seeds) == 8000 and all(0 <= seed < 2**31 for seed in seeds)
    assert fold(1, 2) != fold(2, 1) and fold(0, 1) != fold(1) and fold(3, 4) == fold(3, 4)


def test_stop_token_ids_are_those_of_tokenizer_config_and_generation_config(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert stop_token_ids(tiny_model, tokenizer) == (2, 0)
    AutoConfig.from_pretrained(tiny_model, eos_token_id=7).save_pretrained(tmp_path)  # and no generation config
    assert stop_token_ids(str(tmp_path), tokenizer) == (2, 7)


def test_check_context_refuses_more_tokens_than_positions(tiny_model):
    check_context(tiny_model, 512)
    with pytest.raises(ValueError, match="max-response-length = 513 tokens, but .* has 512 positions"):
        check_context(tiny_model, 513)

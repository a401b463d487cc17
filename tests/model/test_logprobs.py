import copy
import json
from dataclasses import replace

import launch
import pytest
import torch
from helpers_data import ranks_without_group, update
from helpers_engines import truncated
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GraniteConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from workers.objectives import (
    CASES,
    LOSS_MODES,
    TEMPERATURE,
    largest_error,
    make_batch,
    packed_backward,
    plain_gradients,
    plain_logprobs,
    plain_model,
    token_objective,
)
from workers.shared import group_batch

from rl.data.batching import collate
from rl.data.types import Sample, Sampling, take_rows
from rl.model import logprobs
from rl.model.attention import Packing, choose_attention, packed_sdpa, packed_varlen
from rl.model.load import load_pretrained
from rl.model.logprobs import (
    _head_chunk,
    add_packed_forward,
    fixed_logprobs,
    token_logprobs,
)

SIZES = dict(vocab_size=80, hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
CPU = torch.device("cpu")
EOS = 2


def packed_model(path, dtype=torch.float64):
    return load_pretrained(path, ranks_without_group(dtype=dtype), dtype=dtype)


@pytest.fixture(scope="module")
def plain(tiny_model):
    return plain_model(tiny_model)


@pytest.fixture(scope="module")
def packed(tiny_model):
    return packed_model(tiny_model)


@pytest.fixture(scope="module")
def batch(plain):
    return make_batch(plain)


@pytest.fixture(autouse=True)
def no_gradients(plain, packed):
    plain.zero_grad()
    packed.zero_grad()


def one_by_one(model, batch):
    """(B, T) log-probs and entropies from the full logits of one unpadded sequence at a time."""
    rows = [plain_logprobs(model, ids[:n].tolist()) for ids, n in zip(batch.input_ids, batch.lengths, strict=True)]
    logp, entropy = (torch.nn.utils.rnn.pad_sequence(column, batch_first=True) for column in zip(*rows, strict=True))
    return logp * batch.response_mask, entropy * batch.response_mask


def padded(model, batch):
    """(B, T) log-probs from one right-padded batch with an attention mask."""
    attention_mask = (torch.arange(batch.input_ids.shape[1]) < batch.lengths[:, None]).long()
    logits = model(input_ids=batch.input_ids, attention_mask=attention_mask).logits / TEMPERATURE
    logp = logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logp, (1, 0)) * batch.response_mask


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def close(actual, expected, tolerance):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


# --- values ---


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@torch.no_grad()
def test_token_logprobs_equals_plain_forward(tiny_model, batch, dtype, tolerance):
    plain = plain_model(tiny_model, dtype)
    expected_logp, expected_entropy = one_by_one(plain, batch)
    logp, entropy = token_logprobs(packed_model(tiny_model, dtype), batch, sampling=Sampling(temperature=TEMPERATURE))
    assert logp.dtype == entropy.dtype == dtype and logp.shape == batch.input_ids.shape
    assert expected_logp.min() < -8 and expected_entropy.max() > 3  # neither flat nor trivial
    close(logp, expected_logp, tolerance)
    close(logp, padded(plain, batch), tolerance)
    close(entropy, expected_entropy, tolerance)
    assert (logp[batch.response_mask == 0] == 0).all() and (entropy[batch.response_mask == 0] == 0).all()


@torch.no_grad()
def test_token_logprobs_divides_logits_by_the_temperature(packed, plain, batch):
    ids = batch.input_ids[0, : batch.lengths[0]]
    logits = plain(input_ids=ids[None]).logits[0]
    for temperature in (0.3, 1.0, 2.0):
        expected = (logits / temperature).log_softmax(-1)[7, ids[8]]
        close(token_logprobs(packed, batch, sampling=Sampling(temperature=temperature))[0][0, 8], expected, 1e-10)


WAYS = [
    dict(top_k=5),
    dict(top_p=0.7),
    dict(min_p=0.2),
    dict(temperature=0.7, top_p=0.95, top_k=50),
    dict(temperature=1.3, top_k=7, top_p=0.8, min_p=0.05),
    dict(top_k=1),
    dict(top_p=1e-6),
    dict(top_k=1000, top_p=1 - 1e-12),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_token_logprobs_are_those_of_the_truncated_distribution(packed, plain, batch, way):
    """Against sets of tokens counted one by one. A token outside of its set counts as one of it."""
    sampling = Sampling(**way)
    logp, entropy = token_logprobs(packed, batch, sampling=sampling, entropy_grad=True)
    (logp.sum() + 0.3 * entropy.sum()).backward()
    inside = outside = 0
    expected_logp, expected_entropy = torch.zeros_like(logp), torch.zeros_like(entropy)
    for i, (ids, n) in enumerate(zip(batch.input_ids, batch.lengths.tolist(), strict=True)):
        logits = plain(input_ids=ids[None, :n]).logits[0]
        for t in (batch.response_mask[i] > 0).nonzero()[:, 0].tolist():
            row, token = logits[t - 1], int(ids[t])
            options = dict(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
            kept = set(truncated(row.tolist(), **options, min_p=sampling.min_p))
            inside, outside = inside + (token in kept), outside + (token not in kept)
            kept.add(token)
            known = (row[sorted(kept)] / sampling.temperature).log_softmax(0)
            expected_logp[i, t] = known[sorted(kept).index(token)]
            expected_entropy[i, t] = -(known.exp() * known).sum()
    assert inside > 30 if way is WAYS[-1] else outside > 10
    close(logp, expected_logp, 1e-9)
    close(entropy, expected_entropy, 1e-9)
    (expected_logp.sum() + 0.3 * expected_entropy.sum()).backward()
    found, expected = gradients(packed), gradients(plain)
    for name in expected:
        close(found[name], expected[name], 1e-8)


@torch.no_grad()
def test_token_logprobs_of_one_row_does_not_depend_on_the_others(packed, batch):
    together = token_logprobs(packed, batch, sampling=Sampling(temperature=TEMPERATURE))
    for i, length in enumerate(batch.lengths.tolist()):
        alone = token_logprobs(packed, take_rows(batch, [i]), sampling=Sampling(temperature=TEMPERATURE))
        for whole, part in zip(together, alone, strict=True):
            close(whole[i, :length], part[0], 1e-12)


@torch.no_grad()
def test_token_logprobs_ignores_what_stands_in_the_padding(packed, batch):
    clean = token_logprobs(packed, batch, sampling=Sampling(temperature=TEMPERATURE))
    padding = torch.arange(batch.input_ids.shape[1]) >= batch.lengths[:, None]
    assert padding.sum() > 20
    for poison in (EOS, 79):
        ids = batch.input_ids.masked_fill(padding, poison)
        poisoned = token_logprobs(packed, replace(batch, input_ids=ids), sampling=Sampling(temperature=TEMPERATURE))
        assert torch.equal(poisoned[0], clean[0]) and torch.equal(poisoned[1], clean[1])


@torch.no_grad()
def test_token_logprobs_scores_the_sampled_eos_whatever_the_pad_id(packed, plain):
    samples = [
        Sample([5, EOS, 6], [7, 8, EOS], [1] * 3, [0.0] * 3, "stop", 0),
        Sample([9], [10] * 9, [1] * 9, [0.0] * 9, "length", 1),
    ]
    as_eos, as_other = (collate(samples, pad_id=pad_id) for pad_id in (EOS, 0))
    logp, _ = token_logprobs(packed, as_eos, sampling=Sampling(temperature=TEMPERATURE))
    assert torch.equal(logp, token_logprobs(packed, as_other, sampling=Sampling(temperature=TEMPERATURE))[0])
    close(logp[0, 5], plain_logprobs(plain, [5, EOS, 6, 7, 8, EOS])[0][5], 1e-10)
    assert logp[0, 5] != 0 and (logp[0, 6:] == 0).all()


@pytest.mark.parametrize("chunk", [1, 3])
def test_token_logprobs_does_not_depend_on_the_chunk_of_the_head(monkeypatch, packed, batch, chunk):
    def run():
        packed.zero_grad()
        logp, entropy = token_logprobs(packed, batch, sampling=Sampling(temperature=TEMPERATURE), entropy_grad=True)
        (logp + 0.3 * entropy).sum().backward()
        return logp.detach(), entropy.detach(), gradients(packed)

    logp, entropy, grads = run()
    monkeypatch.setattr(logprobs, "HEAD_CHUNK", chunk)
    chunked_logp, chunked_entropy, chunked_grads = run()
    close(chunked_logp, logp, 1e-12)
    close(chunked_entropy, entropy, 1e-12)
    assert largest_error(chunked_grads, grads) < 1e-10


def test_token_logprobs_does_not_keep_logits(monkeypatch, packed, batch):
    """What the backward pass keeps must not grow with tokens x vocabulary: logits live in one chunk at a time."""
    monkeypatch.setattr(logprobs, "HEAD_CHUNK", 8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        token_logprobs(packed, batch, sampling=Sampling(temperature=TEMPERATURE), entropy_grad=True)
    vocabulary = packed.config.vocab_size
    assert saved and not [shape for shape in saved if shape[-1:] == (vocabulary,)]


@torch.no_grad()
def test_token_logprobs_asks_the_head_for_response_tokens_only(monkeypatch, packed, batch):
    rows = []

    def counted(weight, hidden, *rest, chunk=packed.packed.head_chunk):
        rows.append(hidden.shape[0])
        return chunk(weight, hidden, *rest)

    monkeypatch.setattr(packed, "packed", replace(packed.packed, head_chunk=counted))
    token_logprobs(packed, batch, sampling=Sampling(temperature=TEMPERATURE))
    assert sum(rows) == int(batch.response_mask.sum())


# --- alignment ---


@pytest.mark.parametrize(("row", "position"), [(0, 5), (0, 13), (1, 1), (3, 17), (7, 2)])
def test_token_logprobs_at_t_comes_from_the_logits_at_t_minus_1(packed, batch, row, position):
    states = []

    def keep(module, arguments, output):
        output.last_hidden_state.retain_grad()
        states.append(output.last_hidden_state)

    handle = packed.base_model.register_forward_hook(keep)
    logp, _ = token_logprobs(packed, batch, sampling=Sampling(temperature=TEMPERATURE))
    handle.remove()
    logp[row, position].backward()
    touched = states[0].grad[0].abs().sum(-1).nonzero()[:, 0].tolist()
    assert touched == [int(batch.lengths[:row].sum()) + position - 1]


def test_token_logprobs_sees_its_own_row_before_t_only(packed, batch):
    embedded = []

    def keep(module, arguments, output):
        output.retain_grad()
        embedded.append(output)

    handle = packed.get_input_embeddings().register_forward_hook(keep)
    logp, _ = token_logprobs(packed, batch, sampling=Sampling(temperature=TEMPERATURE))
    handle.remove()
    row, position = 3, 9  # behind the gap of tool output begins at 8: the gap is context too
    logp[row, 15].backward()
    start = int(batch.lengths[:row].sum())
    touched = embedded[0].grad[0].abs().sum(-1).nonzero()[:, 0].tolist()
    assert touched == list(range(start, start + 15)) and start + position in touched


@torch.no_grad()
def test_token_logprobs_gives_the_first_token_no_probability(packed, batch):
    """A mask that starts at position 0 must not wrap around to the row before."""
    whole = replace(batch, response_mask=torch.ones_like(batch.response_mask))
    logp, entropy = token_logprobs(packed, whole, sampling=Sampling(temperature=TEMPERATURE))
    assert (logp[:, 0] == 0).all() and (entropy[:, 0] == 0).all()
    inner = (torch.arange(logp.shape[1]) < batch.lengths[:, None]) & (torch.arange(logp.shape[1]) > 0)
    assert (logp[inner] < 0).all() and (logp[~inner] == 0).all()


# --- gradients ---


def test_entropy_has_a_gradient_only_if_asked(packed, plain, batch):
    _, entropy = token_logprobs(packed, batch, sampling=Sampling(temperature=TEMPERATURE))
    assert not entropy.requires_grad
    logp, with_gradient = token_logprobs(packed, batch, sampling=Sampling(temperature=TEMPERATURE), entropy_grad=True)
    assert torch.equal(with_gradient.detach(), entropy)
    with_gradient.sum().backward()
    one_by_one(plain, batch)[1].sum().backward()
    assert largest_error(gradients(packed), gradients(plain)) < 1e-9


def test_logprob_gradient_is_the_same_with_and_without_entropy_gradient(packed, plain, batch):
    one_by_one(plain, batch)[0].sum().backward()
    for entropy_grad in (False, True):
        packed.zero_grad()
        token_logprobs(packed, batch, sampling=Sampling(temperature=TEMPERATURE), entropy_grad=entropy_grad)[
            0
        ].sum().backward()
        assert largest_error(gradients(packed), gradients(plain)) < 1e-9


def test_empty_rows_give_zeros_and_zero_gradients(packed, batch):
    logp, entropy = token_logprobs(
        packed, take_rows(batch, []), sampling=Sampling(temperature=TEMPERATURE), entropy_grad=True
    )
    assert logp.shape == entropy.shape == (1, 2) and not logp.any() and not entropy.any()
    (logp.sum() + entropy.sum()).backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in packed.parameters())


def test_rows_without_a_token_that_counts_give_zero_gradients(packed, batch):
    logp, _ = token_logprobs(packed, take_rows(batch, [4]), sampling=Sampling(temperature=TEMPERATURE))
    assert not logp.any()
    logp.sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in packed.parameters())


def test_fixed_logprobs_fills_its_own_rows(packed, plain, batch):
    expected, _ = one_by_one(plain, batch)
    logp = fixed_logprobs(packed, batch, [update([7, 0], []), update([3])], sampling=Sampling(temperature=TEMPERATURE))
    assert logp.shape == batch.input_ids.shape and not logp.requires_grad
    close(logp[[0, 3, 7]], expected[[0, 3, 7]].detach().to(logp.dtype), 1e-6)
    assert not logp[[1, 2, 4, 5, 6]].any()


# --- an optimizer step's gradients do not depend on how the step is cut ---


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_gradients_do_not_depend_on_micro_batches_padding_or_order(packed, plain, batch, case):
    rows = range(len(batch.lengths))
    expected_loss, expected = plain_gradients(plain, batch, rows, case)

    def check(batch, max_tokens):
        packed.zero_grad()
        loss = packed_backward(packed, batch, rows, case, max_tokens=max_tokens)
        assert loss == pytest.approx(expected_loss, rel=1e-9)
        assert largest_error(gradients(packed), expected) < 1e-9

    several = case[0] in ("ppo_clip", "all terms")
    for max_tokens in (1000, 30, 1) if several else ():  # one micro-batch, several, one per row
        check(batch, max_tokens)
    per_token = ("input_ids", "response_mask", "rollout_logp", "old_logp", "ref_logp", "advantages", "chosen")
    wide = batch.map(lambda name, x: torch.nn.functional.pad(x, (0, 13)) if name in per_token else x)
    order = torch.tensor([5, 2, 7, 0, 4, 6, 1, 3])
    check(wide.map(lambda name, x: x[order] if name in (*per_token, "lengths") else x), 30)


@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_the_batch_behind_these_tests_is_off_policy(plain, batch, loss_mode):
    """Some tokens are clipped and some are not, so that the gradients above say something about both."""
    logp, entropy = one_by_one(plain, batch)
    _, clipped = token_objective(loss_mode, logp.detach(), entropy.detach(), batch)
    never_clips = loss_mode in ("sapo", "vespo", "dro", "policy_gradient")
    tokens = int(batch.response_mask.sum())
    assert clipped.sum() == 0 if never_clips else 0 < clipped.sum() < tokens, (clipped.sum(), tokens)


# --- models ---


@torch.no_grad()
def test_two_models_from_one_config_keep_their_own_attention(tiny_model, plain, batch):
    config = AutoConfig.from_pretrained(tiny_model)
    expected, _ = one_by_one(plain, batch)
    options = dict(config=config, dtype=torch.float64)
    first = AutoModelForCausalLM.from_pretrained(tiny_model, **options, attn_implementation="packed_sdpa")
    other = AutoModelForCausalLM.from_pretrained(tiny_model, **options, attn_implementation="sdpa")
    second = packed_model(tiny_model)
    close(one_by_one(other, batch)[0], expected, 1e-10)
    for model in (add_packed_forward(first), second, first):
        close(token_logprobs(model, batch, sampling=Sampling(temperature=TEMPERATURE))[0], expected, 1e-10)
    close(padded(other, batch), expected, 1e-10)


@pytest.mark.parametrize("window", [1, 4, 16, 19, 100])
@torch.no_grad()
def test_token_logprobs_keeps_to_the_sliding_window_of_the_model(window, batch):
    """Rows of a group share their prompt: a window may begin in the shared part and end in a row's own."""
    options = dict(use_sliding_window=True, max_window_layers=0, sliding_window=window, num_hidden_layers=2)
    config = Qwen2Config(**SIZES, **options, initializer_range=0.2)
    model = Qwen2ForCausalLM._from_config(config, attn_implementation=choose_attention(CPU, torch.float32))
    expected = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    expected.load_state_dict(model.state_dict())
    for rows in (batch, group_batch()):
        logp, _ = token_logprobs(add_packed_forward(model), rows, sampling=Sampling(temperature=TEMPERATURE))
        close(logp, one_by_one(expected, rows)[0], 1e-5)


@torch.no_grad()
def test_token_logprobs_uses_the_attention_scale_of_the_model(batch):
    """Granite scales its attention scores by a number of its own; a logits_scaling of one is not a scaling."""
    config = GraniteConfig(**SIZES, num_hidden_layers=1, attention_multiplier=3.0, logits_scaling=1.0)
    expected = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").double()
    packed = AutoModelForCausalLM.from_config(config, attn_implementation=choose_attention(CPU, torch.float32)).double()
    for parameter in expected.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    packed.load_state_dict(expected.state_dict())
    logp, _ = token_logprobs(add_packed_forward(packed), batch, sampling=Sampling(temperature=TEMPERATURE))
    close(logp, one_by_one(expected, batch)[0], 1e-10)


@pytest.mark.parametrize("attention", [packed_sdpa, packed_varlen])
@pytest.mark.parametrize("option", [{"softcap": 50.0}, {"s_aux": torch.zeros(2)}], ids=["softcap", "sinks"])
def test_packed_attention_refuses_what_it_does_not_compute(attention, option):
    """Gemma 2 caps its attention scores, gpt-oss adds sinks: keyword arguments that must not be dropped in silence."""
    query = torch.zeros(1, 2, 4, 16)
    borders = torch.tensor([0, 4], dtype=torch.int32)
    packing = Packing(borders, borders, torch.arange(4), torch.arange(4))
    with pytest.raises(ValueError, match=next(iter(option))):
        attention(None, query, query, query, None, packing=packing, **option)


# --- compiled ---


def test_compiled_layers_and_head_agree_with_plain_ones(tiny_model, tmp_path):
    """One graph for the layers and one for the head, compiled by the first batch, serve every later length."""
    worker = launch.TESTS / "model" / "workers" / "compiled.py"
    launch.run_file(worker, tiny_model, tmp_path / "out.json", timeout=300)
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["values"] < 1e-5 and results["gradients"] < 1e-5
    assert results["graph_breaks"] == 0 and results["graphs"] == [2, 2, 2, 2]
    # Lengths 8 and 12 with a prompt of 3: 17 tokens, 20 keys, 2 + 1 borders, the longest 12, 14 of responses; no width.
    assert results["variable"] == [[3, 12, 17, 20], [14]]


def test_entropy_of_logits_far_from_zero(tiny_model):
    """All logits 100 lower: the same distribution, to float32's digits of logits near -100."""
    hidden, weight = torch.eye(2), torch.tensor([[0.0, -1.0, -2.0], [0.5, -0.25, 0.0]]).T
    targets = torch.zeros(2, dtype=torch.long)
    near, far = (_head_chunk(w, hidden, targets, 1.0, None, False)[1] for w in (weight, weight - 100))
    assert (near - far).abs().max() < 2e-5

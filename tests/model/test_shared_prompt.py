"""What neighboring rows have in common is computed once, and nothing changes by it."""

import math
from itertools import pairwise

import launch
import pytest
import torch
from helpers_data import ranks_without_group
from transformers import (
    AutoModelForCausalLM,
    Starcoder2Config,
)
from workers.objectives import largest_error, plain_logprobs, plain_model
from workers.shared import GROUPS, gradients, group_batch, row_weights, shared_gradients

from rl.data.batching import collate, shared_prefix
from rl.data.types import Sample, take_rows
from rl.model import attention
from rl.model.attention import Packing, packed_sdpa, packed_varlen
from rl.model.load import load_pretrained
from rl.model.logprobs import token_logprobs

WORKER = launch.TESTS / "model" / "workers" / "shared.py"


def rows_of(*rows):
    """A batch of these ids, the first of each its prompt."""
    samples = [Sample(row[:1], row[1:], [1] * len(row[1:]), [0.0] * len(row[1:]), "stop", 0) for row in rows]
    return collate(samples, pad_id=0)


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> str:
    """Folder of a tiny model with grouped heads and LayerNorm, which works in the model's own precision: float64 here.

    The RMSNorm of transformers computes in float32 whatever it gets, and so rounds the gradient of a token, or of each
    of its copies, to seven digits.
    """
    config = Starcoder2Config(
        vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((0.2 if parameter.ndim == 2 else 0.3) * torch.randn(parameter.shape))
    folder = tmp_path_factory.mktemp("exact") / "model"
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def batch():
    return group_batch()


def packed_model(path, dtype):
    return load_pretrained(path, ranks_without_group(dtype=dtype), dtype=dtype)


def watch(model):
    """What the decoder is given at each call."""
    calls = []
    model.base_model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    return calls


def plain_step(model, batch):
    """(B, T) log-probs and entropies, and gradients of their weighted sum, one row at a time and nothing packed."""
    model.zero_grad()
    rows = [plain_logprobs(model, ids[:n].tolist()) for ids, n in zip(batch.input_ids, batch.lengths, strict=True)]
    logp, entropy = (torch.nn.utils.rnn.pad_sequence(column, batch_first=True) for column in zip(*rows, strict=True))
    logp, entropy = (x * batch.response_mask for x in (logp, entropy))
    weights = row_weights(batch, range(len(batch.lengths)), logp.dtype)
    ((logp + 0.3 * entropy) * weights).sum().backward()
    return logp.detach(), entropy.detach(), gradients(model)


# --- what is shared


def test_shared_prefix_by_hand():
    batch = rows_of([5, 6, 7, 8], [5, 6, 9], [5, 6, 9, 10], [5, 6], [7, 6, 9], [7, 6, 9], [7, 6, 9, 0])
    assert shared_prefix(batch).tolist() == [0, 2, 3, 2, 0, 3, 3]
    assert shared_prefix(take_rows(batch, [2, 0, 6])).tolist() == [0, 2, 0]
    assert shared_prefix(take_rows(batch, [])).tolist() == [0]
    padded = rows_of([5], [5, 0, 0])  # the padding of the first row is not a token
    assert shared_prefix(padded).tolist() == [0, 1]


def test_the_packed_row_by_hand(exact):
    model = packed_model(exact, torch.float64)
    calls = watch(model)
    token_logprobs(model, rows_of([5, 6, 7, 8], [5, 6, 9], [5, 6, 9, 10], [5, 6], [7, 6]))
    [call] = calls
    assert call["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 7, 6]]
    assert call["position_ids"].tolist() == [[0, 1, 2, 3, 2, 3, 0, 1]]
    packing = call["packing"]
    assert packing.borders.tolist() == [0, 4, 5, 6, 6, 8]  # the fourth row has nothing of its own
    assert packing.key_borders.tolist() == [0, 4, 7, 11, 13, 15]
    assert packing.key_index.tolist() == [0, 1, 2, 3, 0, 1, 4, 0, 1, 4, 5, 0, 1, 6, 7]
    assert packing.offset.tolist() == [0, 1, 2, 3] and packing.borders.dtype == packing.key_borders.dtype == torch.int32


def test_the_prompt_of_a_group_is_computed_once(exact):
    """Prompts of 7, 1, 5 and 4 tokens; first tokens of responses differ, so that nothing but prompts is shared."""
    samples = [
        Sample(list(range(10 * p, 10 * p + size)), [60 + i, 70, 71], [1] * 3, [0.0] * 3, "stop", p)
        for p, (size, group) in enumerate([(7, 4), (1, 3), (5, 1), (4, 2)])
        for i in range(group)
    ]
    model = packed_model(exact, torch.float64)
    calls = watch(model)
    token_logprobs(model, collate(samples, pad_id=0))
    assert calls[0]["input_ids"].shape == (1, 7 + 1 + 5 + 4 + 3 * len(samples))


# --- nothing changes


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"), [("exact", torch.float64, 1e-12), ("qwen2", torch.float32, 1e-5)]
)
def test_values_and_gradients_are_those_of_plain_transformers(exact, tiny_model, batch, family, dtype, tolerance):
    path = exact if family == "exact" else tiny_model
    logp, entropy, grads = plain_step(plain_model(path, dtype), batch)
    assert logp.min() < -5 and entropy.max() > 2
    model = packed_model(path, dtype)
    shared_logp, shared_entropy, shared_grads = shared_gradients(model, batch, [range(len(batch.lengths))])
    assert (shared_logp - logp).abs().max() < tolerance * 10
    assert (shared_entropy - entropy).abs().max() < tolerance * 10
    assert largest_error(shared_grads, grads) < tolerance


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"), [("exact", torch.float64, 1e-12), ("qwen2", torch.float32, 5e-6)]
)
def test_values_and_gradients_are_those_of_rows_that_share_nothing(exact, tiny_model, batch, family, dtype, tolerance):
    model = packed_model(exact if family == "exact" else tiny_model, dtype)
    rows = range(len(batch.lengths))
    alone = shared_gradients(model, batch, [[row] for row in rows])
    for cut in ([rows], [rows[:3], rows[3:9], rows[9:]], [rows[::2], rows[1::2]], [rows[::-1]]):
        logp, entropy, grads = shared_gradients(model, batch, cut)
        assert (logp - alone[0]).abs().max() < 10 * tolerance and (entropy - alone[1]).abs().max() < 10 * tolerance
        assert largest_error(grads, alone[2]) < tolerance


def test_two_ranks_share_and_split_groups(exact, batch, tmp_path):
    expected = plain_step(plain_model(exact), batch)
    torch.save(batch, tmp_path / "batch.pt")
    launch.run_file(WORKER, exact, tmp_path / "batch.pt", tmp_path, nproc=2)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert sorted(row for rank in ranks for micro in rank["plan"] for row in micro) == list(range(len(batch.lengths)))
    assert len(ranks[0]["plan"]) == len(ranks[1]["plan"]) > 1
    groups = [index for index, (_, sizes) in enumerate(GROUPS) for _ in sizes]
    micros = [{groups[row] for row in micro} for rank in ranks for micro in rank["plan"]]
    assert any(len(groups_of) > 1 for groups_of in micros)  # several groups in one
    assert sum(len(groups_of) for groups_of in micros) > len(GROUPS)  # and one group in several
    for rank in ranks:
        assert largest_error(rank["gradients"], expected[2]) < 1e-12
    for name, values in zip(("logp", "entropy"), expected, strict=False):
        assert (sum(rank[name] for rank in ranks) - values).abs().max() < 1e-11


# --- attention


def attention_case(dtype=torch.float64):
    """Sequences of 6, 4, 3, 5 and 5 tokens that own 6, 2, 0, 5 and 1 of them, 4 heads, 2 for keys, and the answers."""
    owned, lengths = [6, 2, 0, 5, 1], [6, 4, 3, 5, 5]
    places = [[0, 1, 2, 3, 4, 5], [0, 1, 6, 7], [0, 1, 2], [8, 9, 10, 11, 12], [8, 9, 10, 11, 13]]
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, heads, 14, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    packing = Packing(
        torch.tensor([0, *owned]).cumsum(0).int(),
        torch.tensor([0, *lengths]).cumsum(0).int(),
        torch.tensor(sum(places, [])),
        torch.arange(max(lengths)),
    )
    answers = torch.zeros(1, 14, 4, 8, dtype=dtype)
    for place, own in zip(places, owned, strict=True):
        for t in range(len(place) - own, len(place)):
            for head in range(4):
                scores = [q[0, head, place[t]] @ k[0, head // 2, place[s]] / math.sqrt(8) for s in range(t + 1)]
                weights = torch.stack(scores).softmax(0)
                values = [w * v[0, head // 2, place[s]] for s, w in enumerate(weights)]
                answers = answers.index_put((torch.tensor(0), torch.tensor(place[t]), torch.tensor(head)), sum(values))
    return (q, k, v), packing, answers


def flash_kernel(q, k, v, borders_q, borders_k, max_q, max_k, *, window_size, scale=None, enable_gqa=True):
    """What the variable-length kernel computes, which needs a GPU: stretch by stretch, the last query sees all keys."""
    assert window_size == (-1, 0) and max_q >= borders_q.diff().max() and max_k >= borders_k.diff().max()
    stretches = []
    for (a, b), (c, d) in zip(pairwise(borders_q.tolist()), pairwise(borders_k.tolist()), strict=True):
        queries, keys, values = q[a:b].transpose(0, 1), k[c:d].transpose(0, 1), v[c:d].transpose(0, 1)
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
        stretches.append(out.transpose(0, 1))
    return torch.cat(stretches)


@pytest.mark.parametrize("implementation", [packed_sdpa, packed_varlen])
def test_attention_by_hand(monkeypatch, implementation):
    monkeypatch.setattr(attention, "varlen_attn", flash_kernel)
    tolerance = 1e-12 if implementation is packed_sdpa else 1e-5  # `_expand` works in float32
    inputs, packing, expected = attention_case()
    out, _ = implementation(None, *inputs, None, packing=packing)
    assert (out - expected).abs().max() < tolerance
    weights = torch.randn(out.shape, dtype=out.dtype)
    actual = torch.autograd.grad((out * weights).sum(), inputs)
    for x, y in zip(actual, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        assert (x - y).abs().max() < tolerance and y.abs().max() > 0.5


def test_gradients_of_copies_are_added_in_float32():
    """256 + 7 x 1 = 263 is 264 in bfloat16, which has steps of 2 there; added one by one they would stay at 256."""
    key = torch.zeros(1, 1, 2, 1, dtype=torch.bfloat16, requires_grad=True)
    packing = Packing(torch.tensor([0]), torch.tensor([0]), torch.tensor([1] * 8), torch.arange(8))
    expanded = attention._expand(key, packing)
    assert expanded.shape == (8, 1, 1) and expanded.dtype == torch.bfloat16
    expanded.backward(torch.tensor([256.0] + [1.0] * 7, dtype=torch.bfloat16).view(8, 1, 1))
    assert key.grad.flatten().tolist() == [0.0, 264.0]

"""One rank, two ranks and no sharding at all must give the same numbers."""

import copy
from contextlib import nullcontext

import launch
import pytest
import torch
from helpers_data import plan_micro_batches
from helpers_engines import the_only_shared_engine
from transformers import Qwen2Config, Qwen2ForCausalLM
from workers.objectives import CASES, largest_error, make_batch, plain_gradients, plain_logprobs, plain_model

from rl.sampling.engines.vllm import TAKE_EVERY

WORKERS = launch.TESTS / "model" / "workers"
CASE = ("ppo_clip", "token-mean")


@pytest.fixture(scope="module")
def plain(tiny_model):
    return plain_model(tiny_model)


@pytest.fixture(scope="module")
def batch(plain):
    return make_batch(plain)


@pytest.fixture(scope="module")
def measured(tiny_model, batch, tmp_path_factory):
    """World size -> what tests/model/workers/gradients.py found on each of its ranks."""
    folder = tmp_path_factory.mktemp("gradients")
    torch.save(batch, folder / "batch.pt")
    results = {}
    for world_size in (1, 2):
        out = folder / str(world_size)
        out.mkdir()
        launch.run_file(WORKERS / "gradients.py", tiny_model, folder / "batch.pt", out, nproc=world_size)
        results[world_size] = [torch.load(out / f"rank{rank}.pt") for rank in range(world_size)]
    return results


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request, measured):
    return measured[request.param]


def expected_gradients(plain, batch, rows, case=CASE):
    return plain_gradients(plain, batch, rows, case)[1]


def norm(tensors):
    return torch.stack([x.double().norm() for x in tensors.values()]).norm().item()


# --- parameters ---


def test_load_model_gives_every_rank_the_weights_of_the_files(plain, ranks):
    expected = dict(plain.named_parameters())
    for rank in ranks:
        assert rank["loaded"].keys() == expected.keys()
        assert all(torch.equal(rank["loaded"][name], tensor) for name, tensor in expected.items())
        assert all(torch.equal(rank["buffers"][name], buffer) for name, buffer in plain.named_buffers())


def test_shard_keeps_tied_embeddings_one_parameter(ranks):
    for rank in ranks:
        assert rank["tied"] and "model.embed_tokens.weight" in rank["names"] and "lm_head.weight" not in rank["names"]
        assert rank["sharded_embedding"] == (80 // len(ranks), 96)


def test_full_tensors_are_the_same_before_and_after_a_forward_pass(ranks):
    for rank in ranks:
        assert all(torch.equal(rank["after_forward"][name], tensor) for name, tensor in rank["loaded"].items())


def test_full_tensors_casts_what_it_gathers(plain, ranks):
    for rank in ranks:
        assert list(rank["gathered"]) == [name for name, _ in plain.named_parameters()]
        for name, parameter in plain.named_parameters():
            assert rank["gathered"][name].dtype == torch.bfloat16
            assert torch.equal(rank["gathered"][name], parameter.detach().float().to(torch.bfloat16))


def test_full_tensors_are_the_master_weights_even_after_a_forward_pass_in_bfloat16(plain, ranks):
    for rank in ranks:
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(rank["master_after_forward"][name], parameter.detach().float(), rtol=0, atol=0)


@pytest.mark.parametrize("place", ["before the optimizer is made", "before the step"])
def test_a_forward_pass_without_gradients_does_not_hide_an_update(ranks, place):
    for rank in ranks:
        assert torch.equal(rank["after_step"][place], rank["after_step"]["nowhere"])


# --- gradients ---


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_gradients_do_not_depend_on_the_world_size(plain, batch, measured, case):
    expected_loss, expected = plain_gradients(plain, batch, range(8), case)
    for rank in (rank for world in measured.values() for rank in world):
        assert rank["losses"][case] == pytest.approx(expected_loss, rel=1e-9)
        assert largest_error(rank["gradients"][case], expected) < 1e-9


@pytest.mark.parametrize("count", [3, 1])
def test_gradients_survive_a_rank_without_work(plain, batch, ranks, count):
    if len(ranks) == 2:
        plan = plan_micro_batches(batch.lengths.tolist(), range(count), world_size=2, max_tokens=16)
        assert any(micro == [] for rank in plan for micro in rank)
    expected = expected_gradients(plain, batch, range(count))
    for rank in ranks:
        assert largest_error(rank[f"gradients_{count}_rows"], expected) < 1e-9


def test_embedding_gradient_is_the_sum_of_both_its_uses(plain, batch, ranks):
    """Tied weights: the lookup and the LM head both contribute, and sharding must lose neither."""
    expected = expected_gradients(plain, batch, range(8))["model.embed_tokens.weight"]
    for rank in ranks:
        actual = rank["gradients"][CASE]["model.embed_tokens.weight"]
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_gradients_in_float32_are_near_those_in_float64(plain, batch, ranks):
    expected = expected_gradients(plain, batch, range(8))
    for rank in ranks:
        assert rank["gradients_float32"]["model.norm.weight"].dtype == torch.float32
        assert largest_error(rank["gradients_float32"], expected) < 1e-4


def test_gradients_in_float32_do_not_depend_on_the_world_size(measured):
    alone = measured[1][0]["gradients_float32"]
    for rank in measured[2]:
        assert largest_error(rank["gradients_float32"], alone) < 1e-5
        error = norm({name: x - alone[name] for name, x in rank["gradients_float32"].items()})
        assert error < 1e-6 * norm(alone)


def test_gradients_in_bfloat16_are_near_and_reduced_in_float32(plain, batch, ranks):
    expected = torch.cat([x.flatten() for x in expected_gradients(plain, batch, range(8)).values()])
    for rank in ranks:
        assert {x.dtype for x in rank["gradients_bfloat16"].values()} == {torch.float32}
        actual = torch.cat([x.flatten().double() for x in rank["gradients_bfloat16"].values()])
        assert torch.nn.functional.cosine_similarity(actual, expected, dim=0) > 0.99
        assert actual.norm().item() == pytest.approx(expected.norm().item(), rel=0.05)
        rounded = torch.equal(actual, actual.bfloat16().double())
        assert rounded == (len(ranks) == 1)  # one micro-batch per rank: only their sum, in float32, has more digits


@pytest.mark.parametrize("what", ["full", "selective"])
def test_activation_checkpointing_changes_nothing(ranks, what):
    for rank in ranks:
        calls, micro_batches = rank["calls_" + what]
        assert calls == 2 * micro_batches  # it did recompute
        assert largest_error(rank["gradients_" + what], rank["gradients"][CASE]) < 1e-9


def test_hybrid_sharding_changes_nothing(plain, batch, ranks):
    for rank in ranks:
        assert rank["whole_copies"]
        assert largest_error(rank["gradients_copies"], rank["gradients"][CASE]) < 1e-9
        assert rank["norm_copies"] == pytest.approx(norm(expected_gradients(plain, batch, range(8))), rel=1e-9)


@pytest.fixture(scope="module")
def copies(tiny_model, batch, tmp_path_factory):
    """What tests/model/workers/copies.py found on each of four ranks."""
    folder = tmp_path_factory.mktemp("copies")
    torch.save(batch, folder / "batch.pt")
    launch.run_file(WORKERS / "copies.py", tiny_model, folder / "batch.pt", folder, nproc=4)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_copies_of_the_model_add_up_their_gradients_once_an_update(plain, batch, copies, size):
    """Four copies, two of two ranks each, or one: the same sums, in the first update and in the next."""
    expected = expected_gradients(plain, batch, range(8))
    for rank in copies:
        assert rank["micro_batches"] > 1
        for gradients, all_reduces in rank[size]["updates"]:
            assert largest_error(gradients, expected) < 1e-9
            assert all_reduces == (rank[size]["units"] if size < 4 else 0)


# --- clipping and the optimizer ---


def test_clip_grad_norm_measures_and_scales_the_global_norm(plain, batch, ranks):
    expected = expected_gradients(plain, batch, range(8))
    total = norm(expected)
    assert total > 0.1
    for rank in ranks:
        assert rank["norm_0.01"] == pytest.approx(total, rel=1e-9)
        assert rank["norm_1000000.0"] == pytest.approx(total, rel=1e-9)
        assert norm(rank["clipped_0.01"]) == pytest.approx(0.01, rel=1e-4)
        scaled = {name: gradient * 0.01 / total for name, gradient in expected.items()}
        assert largest_error(rank["clipped_0.01"], scaled) < 1e-4  # torch adds 1e-6 to the norm
        assert largest_error(rank["clipped_1000000.0"], expected) < 1e-9


def test_trained_parameters_do_not_depend_on_the_world_size(tiny_model, batch, measured):
    plain = plain_model(tiny_model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01)
    for case in (CASE, ("policy_gradient", "seq-mean-token-mean")):
        plain_gradients(plain, batch, range(8), case)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    for rank in (rank for world in measured.values() for rank in world):
        for name, expected in plain.named_parameters():
            torch.testing.assert_close(rank["trained"][name], expected.detach(), rtol=0, atol=1e-9)
            assert (rank["trained"][name] - rank["loaded"][name]).abs().max() > 5e-3, f"{name} has not moved"
    for ranks in measured.values():  # the forward pass after the update runs on the new weights
        logp = sum(rank["trained_logp"] for rank in ranks)
        for i, length in enumerate(batch.lengths.tolist()):
            expected = plain_logprobs(plain, batch.input_ids[i, :length].tolist())[0] * batch.response_mask[i, :length]
            torch.testing.assert_close(logp[i, :length], expected.detach(), rtol=0, atol=1e-9)


# --- log-probs and the check of the engine ---


def test_fixed_logprobs_are_complete_over_ranks(plain, batch, ranks):
    assert sorted(row for rank in ranks for row in rank["fixed_rows"]) == list(range(8))
    for rank in ranks:
        for i, length in enumerate(batch.lengths.tolist()):
            counts = batch.response_mask[i, :length] * (i in rank["fixed_rows"])
            with torch.no_grad():
                expected = plain_logprobs(plain, batch.input_ids[i, :length].tolist())[0] * counts
            torch.testing.assert_close(rank["fixed_logp"][i, :length], expected, rtol=0, atol=1e-9)


def test_check_engine_averages_over_the_tokens_of_all_ranks(ranks):
    """Row 0 has 9 tokens that are off by 0.01, row 1 has 12 that are off by 0.04. float32 log-probs: 1e-6."""
    for rank in ranks:
        assert rank["gap"] == pytest.approx((9 * 0.01 + 12 * 0.04) / 21, abs=1e-6)
        assert rank["gap_without_work"] == pytest.approx(0.01, abs=1e-6)
        assert rank["gap_of_first_probe"] == pytest.approx(0.01, abs=1e-6)


def test_check_engine_stops_every_rank_if_one_is_wrong(ranks):
    for rank in ranks:
        too_far, not_finite = rank["messages"]
        assert "differ by 2.71e-02 on average over 21 tokens" in too_far and "--max-logprob-gap 2e-02" in too_far
        assert "differ by nan" in not_finite


# --- collectives ---


def test_own_slices_share_a_list_and_all_gather_restores_it(ranks):
    for i, size in enumerate((0, 1, 3, 8, 11)):
        slices = [rank["own_slices"][i] for rank in ranks]
        assert sum(slices, []) == list(range(size))
        assert max(map(len, slices)) - min(map(len, slices)) <= 1
        assert all(rank["restored"][i] == list(range(size)) for rank in ranks)


def test_all_gather_takes_lists_of_different_lengths_in_rank_order(ranks):
    expected = ["0.0", "1.0", "1.1", "1.2", "1.3"][: 1 if len(ranks) == 1 else 5]
    assert all(rank["uneven"] == expected for rank in ranks)


def test_all_reduce_sum_adds_over_ranks(ranks):
    expected = [float(len(ranks)), float(sum(range(len(ranks))))]
    assert all(rank["sum"].tolist() == expected for rank in ranks)


# --- vLLM on two ranks ---


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory) -> str:
    """Folder of a small Qwen2 with a separate LM head and heads that two ranks can share."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    config = Qwen2Config(
        vocab_size=80,
        hidden_size=128,
        num_hidden_layers=2,
        intermediate_size=192,
        num_attention_heads=4,  # of 32: vLLM on CPU refuses smaller ones
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=None,  # every response runs to its limit
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((0.1 if parameter.ndim == 2 else 0.3) * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return str(folder)


# Of an engine over both ranks tests/agents/test_environments.py has pushes, log-probs and tokens too.
SHARED = pytest.param(2, id="one engine over both ranks", marks=pytest.mark.thorough)


@pytest.fixture(scope="module", params=[pytest.param(1, id="an engine per rank"), SHARED])
def rolled_out(request, tiny_model, untied_model, tmp_path_factory):
    """(plain model before training, batch, per rank what tests/model/workers/rollouts.py found)."""
    path = {1: tiny_model, 2: untied_model}[request.param]
    plain, out = plain_model(path), tmp_path_factory.mktemp("rollouts")
    batch = make_batch(plain)
    torch.save(batch, out / "batch.pt")
    with the_only_shared_engine() if request.param == 2 else nullcontext():
        launch.run_file(WORKERS / "rollouts.py", path, out / "batch.pt", out, request.param, nproc=2)
    results = [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert all(rank["tied"] == (path == tiny_model) for rank in results)
    return plain, batch, results


@torch.no_grad()
def gap_to(model, samples):
    """Largest difference between the engine's log-probs and those of a plain forward pass."""
    gaps = []
    for s in samples:
        logp = plain_logprobs(model, [*s.prompt_ids, *s.response_ids])[0][len(s.prompt_ids) :]
        gaps.append((logp - torch.tensor(s.rollout_logprobs, dtype=logp.dtype)).abs().max().item())
    return max(gaps)


def trained_model(plain, rank, name="trained"):
    model = copy.deepcopy(plain)
    model.load_state_dict({name: tensor.double() for name, tensor in rank[name].items()}, strict=False)
    model.tie_weights()
    return model


def test_every_ranks_engine_holds_the_policy_after_every_push(rolled_out):
    plain, _, ranks = rolled_out
    for rank in ranks:
        after = trained_model(plain, rank)
        assert rank["first push gap"] < 1e-5 and gap_to(plain, rank["first push"]) < 1e-4
        assert rank["old weights gap"] > 0.01 and gap_to(after, rank["old weights"]) > 0.05
        assert gap_to(plain, rank["old weights"]) < 1e-4
        assert rank["second push gap"] < 1e-5 and gap_to(after, rank["second push"]) < 1e-4


def test_every_ranks_engine_gets_the_sum_of_weights_and_adapters(rolled_out):
    plain, _, ranks = rolled_out
    for rank in ranks:
        assert rank["adapters gap"] < 1e-5 and gap_to(trained_model(plain, rank, "merged"), rank["adapters"]) < 1e-4
        assert gap_to(plain, rank["adapters"]) > 0.05


def test_every_rank_gets_the_samples_of_its_own_prompts(rolled_out):
    for name in ("first push", "second push"):
        first, second = (rank[name] for rank in rolled_out[2])
        assert [s.row_index for s in first] == [0, 0, 1, 1]
        assert [s.row_index for s in second] == [2, 2, 3, 3, 4, 4]
        assert all(0 < len(s.response_ids) <= 10 for s in (*first, *second))


def test_a_rank_without_prompts_gets_no_samples(rolled_out):
    plain, _, (first, second) = rolled_out
    assert first["rank 0 without prompts"] == []
    samples = second["rank 0 without prompts"]
    assert [s.row_index for s in samples] == [0, 0]
    assert gap_to(trained_model(plain, second), samples) < 1e-4


@torch.no_grad()
def test_requests_that_one_rank_adds_while_others_are_sampled(rolled_out):
    """An engine takes new requests every eight steps. So "late" and "gone", added before step 2, begin in step 8."""
    plain, _, ranks = rolled_out
    limits = {"a": 12, "b": 3, "late": 3, "gone": 12 - TAKE_EVERY}
    for keys, rank in zip(({"a", "b"}, {"a", "late", "gone"}), ranks, strict=True):
        trained = trained_model(plain, rank)
        found = {c.request.key: (prompt, c) for prompt, c in rank["in flight"]}
        assert len(found) == len(rank["in flight"]) and found.keys() == keys
        for key, (prompt, c) in found.items():
            assert c.finish_reason == ("abort" if key == "gone" else "length") and len(c.token_ids) == limits[key]
            logp = plain_logprobs(trained, [*prompt, *c.token_ids])[0][len(prompt) :]
            torch.testing.assert_close(torch.tensor(c.logprobs, dtype=logp.dtype), logp, rtol=0, atol=1e-4)


def test_an_update_between_rollouts_does_not_depend_on_the_world_size(rolled_out):
    plain, batch, ranks = rolled_out
    model = copy.deepcopy(plain)
    plain_gradients(model, batch, range(8), CASE)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, expected in model.named_parameters():
        assert (expected - plain.get_parameter(name)).abs().max() > 1e-4, f"{name} has not moved"
        for rank in ranks:
            torch.testing.assert_close(rank["trained"][name].double(), expected.detach(), rtol=0, atol=1e-6)

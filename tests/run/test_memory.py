"""What is rehearsed before a run is the largest micro-batch that the run can have, and vLLM takes what it can use."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Qwen2Config

from rl.data.batching import collate, plan_micro_batches, shared_prefix
from rl.data.types import Batch, Sample, Sampling
from rl.model.load import load_policy
from rl.model.logprobs import token_logprobs
from rl.model.sharding import UNPLANNED
from rl.ranks import Ranks
from rl.run import memory
from rl.run.arguments import MemoryRL
from rl.run.memory import largest_micro_batch
from rl.sampling import rollout
from rl.sampling.engines import Rollout
from rl.sampling.rollout import _beginnings


@pytest.mark.parametrize(
    ("max_tokens", "max_length", "lengths"),
    [
        (16384, 8320, [8320, 8064]),
        (16384, 1152, [1152] * 14 + [256]),
        (2304, 1152, [1152, 1152]),
        (2305, 1152, [1152, 1152]),  # a sequence of one token has nothing to score
        (2306, 1152, [1152, 1152, 2]),
        (100, 1152, [1152]),  # a sequence is never cut
    ],
)
def test_largest_micro_batch_fills_the_budget(max_tokens, max_length, lengths):
    batch = largest_micro_batch(max_tokens, max_length, 1000)
    assert batch.lengths.tolist() == lengths and batch.input_ids.shape == (len(lengths), max_length)
    assert batch.response_mask.sum(1).tolist() == [length - 1 for length in lengths]
    assert all(mask[1:length].all() for mask, length in zip(batch.response_mask, lengths, strict=True))
    shared = shared_prefix(batch).tolist()
    assert shared == [0] * len(lengths)
    plan = plan_micro_batches(lengths, range(len(lengths)), world_size=1, max_tokens=max_tokens, shared=shared)
    assert plan == [[list(range(len(lengths)))]]
    assert torch.equal(batch.input_ids, largest_micro_batch(max_tokens, max_length, 1000).input_ids)


def test_the_rehearsal_has_tokens_that_a_router_sends_to_many_experts():
    ids = largest_micro_batch(16384, 8320, 1000).input_ids
    assert 0 <= ids.min() and ids.max() < 1000
    counts = ids.flatten().bincount(minlength=1000)  # 16.6 of each on average
    assert counts.min() > 0 and counts.max() < 50


@pytest.mark.parametrize(
    ("lengths", "first", "most", "expected"),
    [  # tokens of four rows, the place of the first sampled one -> what is kept of each
        ((10, 20, 30, 40), (4, 4, 4, 4), 100, [10, 20, 30, 40]),
        ((10, 20, 30, 40), (4, 4, 4, 4), 99, [10, 20, 30, 39]),
        ((10, 20, 30, 40), (4, 4, 4, 4), 40, [10, 10, 10, 10]),
        ((10, 20, 30, 40), (4, 4, 4, 4), 43, [10, 11, 11, 11]),  # equal lengths of 11 are 43, of 12 they are 46
        ((10, 20, 30, 40), (4, 4, 4, 4), 20, [5, 5, 5, 5]),
        ((10, 20, 30, 40), (4, 4, 4, 4), 19, [6, 6, 6]),  # each would have four tokens: no sampled one
        ((10, 20, 30, 40), (9, 19, 29, 39), 100, [10, 20, 30, 40]),  # only the last one was sampled
        ((10, 20, 30, 40), (9, 19, 29, 39), 99, [10, 20, 30]),
        ((10, 20, 30, 40), (9, 19, 29, 39), 29, [10]),
        ((10, 20, 30, 40), (4, 15, 4, 4), 31, [5, 16, 5, 5]),  # the second has a long prompt
        ((40, 20, 30, 10), (38, 2, 2, 2), 30, [39]),  # the prompt alone is more: one sampled token all the same
        ((40, 40, 40, 40), (2, 2, 2, 2), 2, [3]),
    ],
)
def test_the_check_of_the_engine_has_at_most_the_tokens_of_a_micro_batch(lengths, first, most, expected):
    position = torch.arange(max(lengths))
    mask = (position >= torch.tensor(first)[:, None]) & (position < torch.tensor(lengths)[:, None])
    ids = torch.arange(4)[:, None] * 100 + position
    batch = _beginnings(Batch(ids, torch.tensor(lengths), mask.float(), mask * 0.5), most)
    assert batch.lengths.tolist() == expected
    for i, n in enumerate(expected):
        assert batch.input_ids[i, :n].tolist() == ids[i, :n].tolist()
        assert batch.response_mask[i].nonzero()[:, 0].tolist() == [*range(first[i], n)]


def test_the_check_of_the_engine_measures_the_beginnings_alone(tiny_model, world, monkeypatch):
    """Log-probs of an engine that are 0.01 too high in the first ten sampled tokens, and 5 behind them."""
    policy, generator = load_policy(tiny_model, world, longest=64), torch.Generator().manual_seed(0)
    samples, passes = [], []
    for i in range(4):
        ids = torch.randint(3, 80, (40,), generator=generator).tolist()
        samples.append(Sample(ids[:8], ids[8:], [1] * 32, [0.0] * 32, "stop", i, policy_versions=((2, 32),)))
    batch = collate(samples)
    true = token_logprobs(policy, batch)[0].detach()
    off = torch.tensor([0.01] * 10 + [5.0] * 22)
    samples = [replace(s, rollout_logprobs=(true[i, 8:] + off).numpy()) for i, s in enumerate(samples)]

    def watched(model, batch, **options):
        passes.append(int(batch.lengths.sum()))
        return token_logprobs(model, batch, **options)

    monkeypatch.setattr(rollout, "token_logprobs", watched)

    def gap(max_tokens, **options):
        policy.packed = replace(policy.packed, max_tokens=max_tokens)
        return rollout.check_engine(policy, samples, Sampling(), Rollout(max_logprob_gap=99.0), world, **options)

    assert gap(4 * 18) == pytest.approx(0.01, abs=1e-5)
    assert gap(4 * 18 - 1, version=2) == pytest.approx(0.01, abs=1e-5)
    assert gap(2 * 18 - 18) == pytest.approx(0.01, abs=1e-5)  # of the first two only, one token of each
    assert gap(160) == pytest.approx((10 * 0.01 + 22 * 5) / 32, rel=1e-4)
    assert passes == [72, 68, 18, 160]


UNIT = 1024  # bytes that stand for a GiB


@pytest.fixture
def plan(monkeypatch):
    """plan(engine, **arguments): the plan for an actor and a critic of 6 GiB each beside an engine of so many, on a GPU
    of 80, which has `others` in use besides and needs 10 for a micro-batch. Its counts are made up: this runs where
    there is no GPU.
    """

    def weights(count):
        return nn.Linear(UNIT // 4, count, bias=False)

    def run(engine, names=("actor", "critic"), stepped=(), others=1, **arguments):
        trained = {name: (model := weights(6), torch.optim.AdamW(model.parameters())) for name in names}
        trained["actor"][0].config = Qwen2Config(vocab_size=80)
        if "reference" in trained:  # one that the run changes
            trained["reference"] = trained["reference"][0].requires_grad_(False), None
        for model, optimizer in (trained[name] for name in stepped):  # as a resumed run has it: 12 GiB of moments
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.state[model.weight].pop("step")
        if arguments.pop("lora", False):
            trained["actor"][0].lora = "adapters"
            trained["actor"][0].frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        flags = {name: arguments.pop(name) for name in ("optimizer_offload", "param_offload") if name in arguments}
        moments = 0 if flags.get("optimizer_offload") else 12 * len(stepped)
        in_use = 0 if flags.get("param_offload") else 6 * len(names) + moments
        counts = dict(
            empty_cache=lambda: None,
            reset_peak_memory_stats=lambda: None,
            memory_allocated=lambda: 0 if flags.get("param_offload") else trained["actor"][0].weight.grad.nbytes,
            max_memory_allocated=lambda: 10 * UNIT + 6 * UNIT,  # with the actor's gradients
            memory_reserved=lambda: UNIT,
            mem_get_info=lambda device: ((80 - in_use - others) * UNIT, 80 * UNIT),
        )
        for name, function in counts.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(memory, "GIB", UNIT)
        monkeypatch.setattr(memory, "take_rows", lambda batch, rows, device: batch)
        logprobs = arguments.pop("logprobs", lambda model, batch: (model.weight.sum(), model.weight.sum()))
        monkeypatch.setattr(memory, "token_logprobs", logprobs)
        ranks = Ranks(0, 1, torch.device("cuda"), torch.bfloat16, data_rank=0, data_size=1, group=None, data_group=None)
        group = MemoryRL(ppo_max_token_len_per_gpu=8, **UNPLANNED | flags)
        sizes = dict(max_length=8, engine_memory=engine * UNIT)
        found = memory.rehearse(trained, group, **sizes, ranks=ranks, **arguments)
        assert all(x.grad is None for x in trained["actor"][0].parameters())  # nothing is left of the rehearsal
        return found

    return run


def test_the_plan_adds_up_what_is_on_the_device(plan):
    """6 GiB of weights, 12 of moments and 6 of gradients for each model, a micro-batch of 10, and 1 of others."""
    end = ", scoring by --teacher-model {}; a micro-batch 10.0, the engine 40.0"
    assert plan(40, ("actor",)) == "memory of a GPU with 80.0 GiB: training 35.0, generating 59.0" + end.format("19.0")
    assert plan(40, ("actor",), others=4).endswith("training 38.0, generating 62.0" + end.format("22.0"))
    assert plan(40).endswith("training 59.0, generating 77.0" + end.format("37.0"))
    assert plan(40, offloaded=("critic",)).endswith("training 59.0, generating 59.0" + end.format("37.0"))
    # A reference has weights only.
    assert plan(40, ("actor", "reference")).endswith("training 41.0, generating 65.0" + end.format("25.0"))


def test_only_what_learns_has_a_gradient_in_the_rehearsal(plan):
    seen = {}

    def logprobs(model, batch):
        seen.update({name: x.grad is not None for name, x in model.named_parameters()})
        return model.weight.sum(), model.weight.sum()

    plan(40, ("actor",), lora=True, logprobs=logprobs)
    assert seen == {"weight": True, "frozen": False}


def test_the_plan_counts_moments_on_the_host_a_piece_at_a_time(plan):
    """12 GiB of weights, 12 of gradients and 1 of others; a pass needs 10, the step of one of the models 12."""
    assert "training 37.0, generating 53.0, " in plan(40, optimizer_offload=True)
    assert "training 37.0, generating 47.0, " in plan(40, optimizer_offload=True, offloaded=("critic",))


def test_the_plan_does_not_count_weights_on_the_host(plan):
    """A micro-batch has its 10 GiB and the actor's gradients, which are its own as soon as they are there."""
    assert "training 17.0, generating 41.0, " in plan(40, param_offload=True)


def test_a_resumed_run_needs_what_a_new_one_does(plan):
    """Of an actor whose first step is still to come the moments are not there, though the critic's are."""
    new = plan(40)
    assert plan(40, stepped=("critic",)) == plan(40, stepped=("actor", "critic")) == new
    for names in (("critic",), ("actor", "critic")):
        assert plan(40, stepped=names, offloaded=("critic",)) == plan(40, offloaded=("critic",))
        assert plan(40, stepped=names, optimizer_offload=True) == plan(40, optimizer_offload=True)


def test_the_plan_refuses_what_does_not_fit_beside_the_engine(plan):
    assert "generating 80.0, " in plan(43)
    with pytest.raises(
        RuntimeError, match=r"generating 81.0.*\. generating does not fit: lower --max-num-seqs or"
    ):
        plan(44)
    with pytest.raises(RuntimeError, match="generating 81.0, "):  # such as a reference, or what NCCL has
        plan(43, others=2)
    assert plan(61, offloaded=("critic",))
    assert "training 80.0, " in plan(1, ("actor",), others=46)
    with pytest.raises(
        RuntimeError, match=r"training 81.0.*\. training does not fit: lower --ppo-max-token-len"
    ):
        plan(1, ("actor",), others=47)


def test_the_plan_refuses_a_teacher_that_does_not_fit_beside_the_policy_and_its_moments(plan):
    def teacher(gib):
        return nn.Linear(UNIT // 4, gib, bias=False)

    fits = plan(40, ("actor",), visiting=teacher(61))
    assert "scoring by --teacher-model 80.0;" in fits  # 6 + 12 + 1 beside it
    with pytest.raises(RuntimeError, match="--teacher-model 81.0; .*does not fit: lower .* give --teacher-url, or set"):
        plan(40, ("actor",), visiting=teacher(62))
    assert plan(40, ("actor",), visiting=teacher(73), optimizer_offload=True)
    assert plan(40, ("actor",), visiting=teacher(99), param_offload=True)  # and so a layer at a time


def test_a_micro_batch_that_does_not_fit_says_how_much_was_free(plan):
    def logprobs(model, batch):
        raise torch.OutOfMemoryError

    words = (
        "^a micro-batch of 8 tokens does not fit in the 7.0 GiB that were free of this GPU's 80.0 .* lower --ppo-"
    )
    with pytest.raises(RuntimeError, match=words):
        plan(40, ("actor",), others=67, logprobs=logprobs)


def test_vllm_takes_no_more_memory_than_its_sequences_fill(monkeypatch):
    gpu_worker = pytest.importorskip("vllm.v1.worker.gpu_worker")
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from rl.sampling.engines.vllm_worker import Worker, most_cache

    layer = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    assert layer.page_size_bytes == 16 * 2 * 2 * 128 * 2  # keys and values
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=100),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
    )
    most = 4 * 7 * 28 * layer.page_size_bytes  # sequences and one more, blocks of 16 for 100 tokens, layers
    assert most_cache([layer] * 28, config) == most

    worker = object.__new__(Worker)
    worker.vllm_config = config
    worker.get_kv_cache_spec = lambda: {str(k): layer for k in range(28)}
    for room, taken in ((most + 1, most), (most - 1, most - 1)):
        monkeypatch.setattr(gpu_worker.Worker, "determine_available_memory", lambda self, room=room: room)
        assert worker.determine_available_memory() == taken

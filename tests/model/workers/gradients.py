"""Run by torchrun: every measurement on sharded models that must come out the same on any number of ranks.

torchrun --nproc_per_node N tests/model/workers/gradients.py MODEL BATCH OUT      writes OUT/rank{rank}.pt
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from helpers_data import update
from objectives import CASES, TEMPERATURE, packed_backward

from rl.data.batching import Update, plan_update
from rl.data.types import Batch, Sample, Sampling
from rl.model.load import load_pretrained
from rl.model.logprobs import fixed_logprobs
from rl.model.sharding import BARE, clip_grad_norm, full_tensors, shard
from rl.ranks import Ranks, init_ranks, shutdown_ranks
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.verify import check_engine

ALL, SOME, ONE = range(8), range(3), range(1)  # rows: three or one leave a rank of two without work
CASE = ("ppo_clip", "token-mean")


def load(path: str, ranks: Ranks, dtype: torch.dtype, **options) -> torch.nn.Module:
    """The policy as a script loads it."""
    return shard(load_pretrained(path, ranks, dtype=dtype), ranks, replace(BARE, **options))


def take_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name, which are then cleared."""
    whole = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return whole


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in full_tensors(model)}


def check_collectives(ranks: Ranks) -> dict:
    lists = [list(range(n)) for n in (0, 1, 3, 8, 11)]
    return {
        "own_slices": [ranks.own_slice(items) for items in lists],
        "restored": [ranks.all_gather(ranks.own_slice(items)) for items in lists],
        "uneven": ranks.all_gather(f"{ranks.rank}.{i}" for i in range(3 * ranks.rank + 1)),
        "sum": ranks.all_reduce_sum(torch.tensor([1.0, float(ranks.rank)])),
    }


def gaps_to_engine(policy: torch.nn.Module, batch: Batch, logp: torch.Tensor, ranks: Ranks) -> dict:
    """Engine log-probs that are off by 0.01 on all tokens of row 0 and by 0.04 on those of row 1, and nothing else."""

    def sample(row: int, error: float) -> Sample:
        start, end = int(batch.response_mask[row].nonzero()[0]), int(batch.lengths[row])
        ids = batch.input_ids[row, :end].tolist()
        wrong = (logp[row, start:end] + error).tolist()
        return Sample(ids[:start], ids[start:], [1] * (end - start), wrong, "stop", row)

    loose = EngineFlags(max_logprob_gap=0.1)
    samples = [sample(0, 0.01), sample(1, -0.04)]
    options = dict(sampling=Sampling(temperature=TEMPERATURE), ranks=ranks)
    messages = []
    for bad in (samples, [sample(0, 0.0), sample(1, float("nan"))]):
        try:
            check_engine(policy, ranks.own_slice(bad), rollout=EngineFlags(max_logprob_gap=0.02), **options)
        except RuntimeError as error:
            messages.append(str(error))
    return {
        "gap": check_engine(policy, ranks.own_slice(samples), rollout=loose, **options),
        "gap_without_work": check_engine(policy, ranks.own_slice(samples[:1]), rollout=loose, **options),
        "gap_of_first_probe": check_engine(policy, samples, rollout=loose, num_probe=1, **options),
        "messages": messages,
    }


def check_mixed_precision(path: str, batch: Batch, updates: list[Update], ranks: Ranks) -> dict:
    """bfloat16 compute on float32 master weights, the precision of training on GPUs."""
    ranks = replace(ranks, dtype=torch.bfloat16)
    model = load(path, ranks, torch.float32)
    packed_backward(model, batch, ALL, CASE, max_tokens=1000, rank=ranks.rank, world_size=ranks.size)
    results = {"gradients_bfloat16": take_gradients(model)}
    fixed_logprobs(model, batch, updates, sampling=Sampling(temperature=TEMPERATURE))
    return results | {"master_after_forward": parameters(model)}


def check_forward_between_backward_and_step(path: str, batch: Batch, updates: list[Update], ranks: Ranks) -> dict:
    """Log-probs after a step of gradient descent, with a forward pass without gradients where it must not matter."""
    results = {}
    for place in ("nowhere", "before the optimizer is made", "before the step"):
        model = load(path, ranks, torch.float64)

        def look(here: str, model=model, place=place) -> None:
            if here == place:
                fixed_logprobs(model, batch, updates, sampling=Sampling(temperature=TEMPERATURE))

        look("before the optimizer is made")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        packed_backward(model, batch, ALL, CASE, max_tokens=40, rank=ranks.rank, world_size=ranks.size)
        look("before the step")
        optimizer.step()
        logp = fixed_logprobs(model, batch, updates, sampling=Sampling(temperature=TEMPERATURE))
        results[place] = ranks.all_reduce_sum(logp)
    return {"after_step": results}


def main(path: str, batch_file: str, out: str) -> None:
    ranks = init_ranks()
    batch: Batch = torch.load(batch_file, weights_only=False)
    work = dict(rank=ranks.rank, world_size=ranks.size)
    model = load(path, ranks, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, fused=True)
    embedding = model.get_input_embeddings().weight
    results = {
        "rank": ranks.rank,
        "loaded": parameters(model),
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "tied": model.get_output_embeddings().weight is embedding,
        "sharded_embedding": tuple(embedding.to_local().shape),
        "names": [name for name, _ in model.named_parameters()],
        **check_collectives(ranks),
    }

    results["gradients"], results["losses"] = {}, {}
    for case in CASES:
        share = packed_backward(model, batch, ALL, case, max_tokens=40, **work)
        results["losses"][case] = ranks.all_reduce_sum(torch.tensor(share, dtype=torch.float64)).item()
        results["gradients"][case] = take_gradients(model)
    for rows in (SOME, ONE):
        packed_backward(model, batch, rows, CASE, max_tokens=16, **work)
        results[f"gradients_{len(rows)}_rows"] = take_gradients(model)

    for max_norm in (0.01, 1e6):
        packed_backward(model, batch, ALL, CASE, max_tokens=40, **work)
        results[f"norm_{max_norm}"] = clip_grad_norm(model, max_norm)
        results[f"clipped_{max_norm}"] = take_gradients(model)

    plan = plan_update(batch.lengths.tolist(), ALL, ranks=ranks, max_tokens=40).micro_batches
    updates = [update(*plan)]
    zeros = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
    logp = fixed_logprobs(
        model, replace(batch, rollout_logp=zeros), updates, sampling=Sampling(temperature=TEMPERATURE)
    )
    results["fixed_rows"] = [row for micro in plan for row in micro]
    results["fixed_logp"] = logp
    results |= gaps_to_engine(model, batch, ranks.all_reduce_sum(logp), ranks)
    results["after_forward"] = parameters(model)

    for case in (CASE, ("policy_gradient", "seq-mean-token-mean")):
        packed_backward(model, batch, ALL, case, max_tokens=40, **work)
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    results["trained"] = parameters(model)
    results["trained_logp"] = fixed_logprobs(
        model, replace(batch, rollout_logp=zeros), updates, sampling=Sampling(temperature=TEMPERATURE)
    )

    for what in ("full", "selective"):
        recomputing = load(path, ranks, torch.float64, activation_checkpointing=what)
        calls = []
        recomputing.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        packed_backward(recomputing, batch, ALL, CASE, max_tokens=40, **work)
        results["gradients_" + what], results["calls_" + what] = take_gradients(recomputing), (len(calls), len(plan))
    copies = load(path, ranks, torch.float64, fsdp_size=1)  # every rank holds everything
    packed_backward(copies, batch, ALL, CASE, max_tokens=40, **work)
    results["norm_copies"] = clip_grad_norm(copies, 1e9)
    results["gradients_copies"] = take_gradients(copies)
    results["whole_copies"] = all(p.to_local().shape == p.shape for p in copies.parameters())
    single = load(path, ranks, torch.float32)
    packed_backward(single, batch, ALL, CASE, max_tokens=40, **work)
    results["gradients_float32"] = take_gradients(single)
    results["gathered"] = dict(full_tensors(single, torch.bfloat16))
    results |= check_mixed_precision(path, batch, updates, ranks)
    results |= check_forward_between_backward_and_step(path, batch, updates, ranks)

    torch.save(results, Path(out) / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Run by torchrun: log-probs and gradients of groups of responses, in micro-batches that split some of them.

torchrun --nproc_per_node N tests/model/workers/shared.py MODEL BATCH OUT      writes OUT/rank{rank}.pt
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rl.data.batching import collate, plan_update, shared_prefix
from rl.data.types import Batch, Sample, Sampling, take_rows
from rl.model.load import load_pretrained
from rl.model.logprobs import token_logprobs
from rl.model.sharding import Memory, shard
from rl.ranks import init_ranks, shutdown_ranks

TEMPERATURE = 0.7  # as in objectives.py
CPU = torch.device("cpu")
GROUPS = [(7, [9, 4, 4, 12]), (1, [3, 8, 1]), (5, [6]), (11, [0, 5, 0, 2]), (4, [10, 10])]  # prompt, its responses


def group_batch() -> Batch:
    """Groups of 4, 3, 1, 4 and 2 responses to prompts of one token and more. Responses are empty, or alike, or begin
    alike, or have a gap of tool output, or have no token that counts.
    """
    generator = torch.Generator().manual_seed(4)

    def draw(count: int) -> list[int]:
        return torch.randint(3, 80, (count,), generator=generator).tolist()

    samples = []
    for index, (prompt_length, lengths) in enumerate(GROUPS):
        prompt = draw(prompt_length)
        samples += [Sample(prompt, draw(n), [1] * n, [0.0] * n, "stop", index) for n in lengths]
    samples[2].response_ids[:] = samples[1].response_ids  # the same response twice
    samples[-1].response_ids[:6] = samples[-2].response_ids[:6]  # and one that begins as its neighbor does
    samples[3].response_mask[4:8] = [0] * 4
    samples[5].response_mask[:] = [0] * 8
    return collate(samples, pad_id=0)


def row_weights(batch: Batch, rows: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """(b, T') weights of the tokens of these rows in the loss: all different, some negative."""
    weights = torch.linspace(-1, 2, batch.input_ids.numel(), dtype=dtype).view(batch.input_ids.shape)
    return weights[list(rows), : int(batch.lengths[list(rows)].max())] if len(rows) else weights[:1, :2] * 0


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name."""
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for name, p in model.named_parameters()
    }


def shared_gradients(
    model: nn.Module, batch: Batch, micro_batches: Iterable[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(B, T) log-probs and entropies, zero in rows of other ranks, and gradients of their weighted sum."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    logp, entropy = (torch.zeros(batch.input_ids.shape, dtype=dtype) for _ in range(2))
    for rows in micro_batches:
        x, h = token_logprobs(
            model, take_rows(batch, rows), sampling=Sampling(temperature=TEMPERATURE), entropy_grad=True
        )
        ((x + 0.3 * h) * row_weights(batch, rows, dtype)).sum().backward()
        if len(rows):
            logp[list(rows), : x.shape[1]], entropy[list(rows), : x.shape[1]] = x.detach(), h.detach()
    return logp, entropy, gradients(model)


def main(path: str, batch_file: str, out: str) -> None:
    ranks = init_ranks()
    batch = torch.load(batch_file, weights_only=False)
    model = shard(load_pretrained(path, ranks, dtype=torch.float64), ranks, Memory(compile=False))
    update = plan_update(
        batch.lengths.tolist(),
        shared=shared_prefix(batch).tolist(),
        max_tokens=32,
        ranks=ranks,
    )
    logp, entropy, grads = shared_gradients(model, batch, update.micro_batches)
    plan = [list(rows) for rows in update.micro_batches]
    results = {"plan": plan, "logp": logp, "entropy": entropy, "gradients": grads}
    torch.save(results, Path(out) / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])

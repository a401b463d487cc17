"""Run by torchrun: gradients of models that see images, where ranks may have rows without any.

torchrun --nproc_per_node N tests/model/workers/vision.py ROWS OUT NAME=MODEL ...      writes OUT/rank{rank}.pt
"""

import sys
from pathlib import Path

import helpers_vision as vision
import torch
from helpers_families import gradients

from extras.lora import LoRA
from rl.data.batching import collate
from rl.data.types import Sample, take_rows
from rl.model import load as models
from rl.model.logprobs import token_logprobs
from rl.model.sharding import Memory, backward
from rl.ranks import Ranks, init_ranks, shutdown_ranks

# Rows of each rank's micro-batches. Of two ranks one has no image, and nothing at all in its second micro-batch.
PLANS = {1: [[[0, 1, 2, 3], [4, 5, 6, 7]]], 2: [[[0, 1, 2, 3], [4, 5]], [[6, 7], []]]}


def responses(rows: list[dict]) -> list[Sample]:
    """Two random responses to each row, placeholders and the like among their tokens; those of the third are long."""
    generator, samples = torch.Generator().manual_seed(2), []
    for i, row in enumerate(rows):
        for n in (9, 20 + 10 * (i == 2)):
            ids = torch.randint(3, 83, (n,), generator=generator)
            ids[4] = vision.PLACEHOLDER if n == 9 else 80  # SmolVLM's
            samples.append(Sample(row["prompt_ids"], ids, [1] * n, [0.0] * n, "stop", row["row_index"]))
    return samples


def weights_of(shape: torch.Size) -> torch.Tensor:
    """What the loss multiplies log-probs with."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def measure(model: str, rows: Path, ranks: Ranks, lora: LoRA, **memory: object) -> tuple[bool, torch.Tensor, dict]:
    """Whether it runs padded, log-probs (B, T) of this rank's rows, and whole gradients."""
    batch = collate(responses(vision.encoded(model, rows)))
    policy = models.load_model(model, ranks, lora, Memory(compile=False, **memory), longest=128)
    logp, weight = torch.zeros(batch.response_mask.shape), weights_of(batch.response_mask.shape)
    plan = PLANS[ranks.size][ranks.rank]
    for micro in plan:
        own = take_rows(batch, micro, ranks.device)
        found, _ = token_logprobs(policy, own)
        if micro:
            logp[micro, : found.shape[1]] = found.detach()
            found = found * weight[micro, : found.shape[1]]
        backward(policy, (found * own.response_mask).sum(), is_last=micro is plan[-1])
    return policy.packed.layout is not None, logp, gradients(policy)


def main(rows: str, out: str, *named: str) -> None:
    ranks, results = init_ranks(), {}
    for name, path in (x.split("=") for x in named):
        results[name] = measure(path, Path(rows), ranks, LoRA(freeze_vision_tower=name == "frozen"))
    torch.save(results, Path(out) / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])

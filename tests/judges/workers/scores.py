"""Run by torchrun: scores and gradients of a sharded reward model, which must come out the same on any number of ranks.

torchrun --nproc_per_node N tests/judges/workers/scores.py MODEL BATCH OUT      writes OUT/rank{rank}.pt
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from helpers_data import plan_micro_batches
from torch import nn
from transformers import AutoTokenizer

import train_reward
from extras.judges import RewardModelFlags, reward_model, scalar_models
from extras.offload import offload, onload
from rl.data.types import Batch, take_rows
from rl.model.load import load_pretrained
from rl.model.sharding import BARE, shard
from rl.ranks import Ranks, init_ranks, shutdown_ranks

PROMPTS = ["1+2=?", [{"role": "user", "content": "4+5=?"}], [{"role": "user", "content": "say so!"}]]
RESPONSES = ["3", "it is 9, I think", ""]


def backward(
    model: nn.Module, batch: Batch, pairs: Sequence[int], *, max_tokens: int, rank: int = 0, world_size: int = 1
) -> float:
    """This rank's micro-batches of one step over pairs of neighboring rows; returns its share of the loss."""
    lengths = batch.lengths.view(-1, 2).sum(1).tolist()
    total = 0.0
    for micro in plan_micro_batches(lengths, pairs, world_size=world_size, max_tokens=max_tokens)[rank]:
        rows = [row for pair in micro for row in (2 * pair, 2 * pair + 1)]
        scores = scalar_models.sequence_scores(model, take_rows(batch, rows))[: len(rows)]
        loss = train_reward.bradley_terry(scores[0::2], scores[1::2]).sum() / len(pairs)
        loss.backward()
        total += loss.item()
    return total


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name, which are then cleared."""
    whole = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return whole


def load(path: str, ranks: Ranks, **options) -> nn.Module:
    """The model in float64 as a script loads it."""
    model = load_pretrained(path, ranks, scalar_models.ScalarModel(), dtype=torch.float64)
    return shard(model, ranks, replace(BARE, **options))


def measure(path: str, batch: Batch, ranks: Ranks) -> dict:
    """Everything this rank sees."""
    model, work = load(path, ranks), dict(rank=ranks.data_rank, world_size=ranks.data_size)
    results = {}
    for name, pairs, max_tokens in (("all", range(4), 40), ("one", range(1), 40)):
        loss = torch.tensor(backward(model, batch, pairs, max_tokens=max_tokens, **work), dtype=torch.float64)
        results[name] = ranks.all_reduce_sum(loss).item(), gradients(model)
    checkpointing = load(path, ranks, activation_checkpointing="full")
    backward(checkpointing, batch, range(4), max_tokens=40, **work)
    results["checkpointing"] = gradients(checkpointing)

    tokenizer = AutoTokenizer.from_pretrained(path)
    count = 3 if ranks.is_main else 0  # rank 0 has three micro-batches, another one none
    judge = reward_model.RewardModel(RewardModelFlags(reward_model_max_length=100), tokenizer, is_alone=False)
    judge.use(model, ranks, max_tokens=10)
    results["scores"] = [judge.score(PROMPTS[:count], RESPONSES[:count])]
    for _ in range(2):
        offload(model)
        onload(model, ranks.device)
        results["scores"].append(judge.score(PROMPTS[:count], RESPONSES[:count]))
    return results


if __name__ == "__main__":
    here = init_ranks()
    found = measure(sys.argv[1], torch.load(sys.argv[2], weights_only=False), here)
    torch.save(found, Path(sys.argv[3]) / f"rank{here.rank}.pt")
    shutdown_ranks()

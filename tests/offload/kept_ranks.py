"""Run by ranks: what models learn whose gradients are on the device, on the host as FSDP2 puts them there, or in places
that are kept.

kept_ranks.py MODEL OUT      writes OUT/rank{rank}.pt
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from extras.families.ways import use_way
from extras.offload import host
from extras.plan.rehearsal import largest_micro_batch
from rl.data.types import Batch, take_rows
from rl.model.load import load_pretrained
from rl.model.logprobs import token_logprobs
from rl.model.sharding import apply_fsdp, backward, clip_grad_norm, own_part, shard, sum_gradients
from rl.ranks import Ranks, init_ranks, shutdown_ranks
from rl.run.arguments import MemoryRL

DEVICE, FSDP2, KEPT = "device", "FSDP2", "kept"
BAD = 1  # the update whose second micro-batch has a gradient that is not finite


def memory_of(way: str, **flags: Any) -> MemoryRL:
    """Memory flags of one of the three ways."""
    return MemoryRL(
        activation_checkpointing="none", compile=False, optimizer_offload=False, param_offload=way != DEVICE, **flags
    )


def loaded(
    path: str, ranks: Ranks, way: str, *, ties: bool = True, learning: str = "", is_padded: bool = False, **flags: Any
) -> nn.Module:
    """A policy that learns what has `learning` in its name. Args: ties, whether embedding and head are one weight."""
    policy = load_pretrained(path, ranks)
    if is_padded:
        use_way(policy, "padded")
    if not ties:
        policy.lm_head.weight = nn.Parameter(policy.lm_head.weight.detach() * 0.5)
    for name, x in policy.named_parameters():
        x.requires_grad_(learning in name)
    keep = host.keep_gradients
    if way == FSDP2:
        host.keep_gradients = lambda group: None
    try:
        return shard(policy, ranks, memory_of(way, **flags))
    finally:
        host.keep_gradients = keep


class Learner:
    """A model that learns in updates of three micro-batches, and what it has been through."""

    def __init__(self, policy: nn.Module, ranks: Ranks) -> None:
        self.policy, self.ranks = policy, ranks
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, fused=True)
        self.norms: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []  # this rank's parts, by update
        self.places: list[list[int]] = []  # of gradients, by micro-batch
        self.batch = largest_micro_batch(4 * 24, 24, 80)

    def update(self, number: int) -> None:
        """An update. It is skipped if its gradients are not finite."""
        self.add_gradients(number)
        if torch.tensor(self.norms[-1]).isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        assert all(x.grad is None for x in self.policy.parameters())

    def add_gradients(self, number: int) -> None:
        """The micro-batches of an update, and what is noted of them."""
        for micro in range(3):
            rows = [(number + micro + self.ranks.rank) % 4]
            logp, _ = token_logprobs(self.policy, take_rows(self.batch, rows, self.ranks.device))
            bad = number == BAD and micro == 1
            backward(self.policy, -logp.sum() * (float("nan") if bad else 1 + micro), is_last=micro == 2)
            gradients = [x.grad for x in self.policy.parameters() if x.grad is not None]
            self.places.append([own_part(x).data_ptr() for x in gradients])
        self.norms.append(clip_grad_norm(self.policy, 0.5))
        named = self.policy.named_parameters()
        self.gradients.append({name: own_part(x.grad).clone() for name, x in named if x.grad is not None})

    def results(self) -> dict[str, Any]:
        weights = {name: own_part(x.detach()).clone() for name, x in self.policy.named_parameters()}
        return {"norms": self.norms, "gradients": self.gradients, "weights": weights, "places": self.places}


class Sum(nn.Module):
    """A unit that uses its second parameter only if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.one = (nn.Parameter(torch.ones(n)) for n in (3, 5, 1))

    def forward(self, x: Tensor, *, uses_all: bool) -> Tensor:
        sometimes = (x * 10 * self.sometimes).sum() if uses_all else 0.0
        return (x * self.always[:, None]).sum() + sometimes + x.sum() * self.one.sum()


def hand_made(ranks: Ranks) -> list[dict[str, Tensor]]:
    """Whole gradients after each micro-batch: with x = 1 and all parameters, x = 2 without one, x = 3 with all."""
    model = nn.Sequential(Sum())
    memory = memory_of(KEPT)
    apply_fsdp(model, list(model), ranks, memory, is_whole=False)
    sum_gradients(model)
    seen = []
    for x in (1.0, 2.0, 3.0):
        model[0](torch.full((5,), x * (1 + ranks.rank)), uses_all=x != 2).backward()
        seen.append({name: y.grad.full_tensor().clone() for name, y in model[0].named_parameters()})
    return seen


# The lengths of the rows of two micro-batches, by rank. The model runs padded, with similar lengths in one pass, so the
# ranks have 3 and 1 passes, and then 1 and 3.
LENGTHS = [(24, 12, 5), (9, 8)], [(20, 18), (24, 12, 6)]


def padded_batch(rank: int, micro: int) -> Batch:
    lengths, position = torch.tensor(LENGTHS[rank][micro]), torch.arange(24)
    ids = torch.randint(80, (len(lengths), 24), generator=torch.Generator().manual_seed(10 * rank + micro))
    mask = ((position > 1) & (position < lengths[:, None])).float()
    return Batch(ids, lengths, mask, torch.zeros_like(mask))


def in_passes(path: str, ranks: Ranks, way: str, **flags: Any) -> tuple[dict[str, Tensor], list[int], list[list[int]]]:
    """Whole gradients after the micro-batches of `padded_batch`, and for each of these how often the first layer has
    run, and the places of gradients afterwards.
    """
    policy, calls, runs, places = loaded(path, ranks, way, is_padded=True, **flags), [], [], []
    policy.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    for micro in range(2):
        logp, _ = token_logprobs(policy, padded_batch(ranks.rank, micro))
        backward(policy, -logp.sum() * (1 + micro), is_last=micro == 1)
        runs.append(len(calls))
        places.append([own_part(x.grad).data_ptr() for x in policy.parameters() if x.grad is not None])
    return {name: x.grad.full_tensor().clone() for name, x in policy.named_parameters()}, runs, places


def main(path: str, out: str) -> None:
    ranks = init_ranks()
    results: dict[Any, Any] = {"by hand": hand_made(ranks)}
    shares = {"shared": {}, "copies": {"fsdp_size": 1}}
    results["in passes"] = {
        (way, name): in_passes(path, ranks, way, **flags)
        for way in (DEVICE, FSDP2, KEPT)
        for name, flags in shares.items()
    }
    for flags in ({}, {"fsdp_size": 1}, {"learning": "layers.1.self_attn"}):
        for way in (DEVICE, FSDP2, KEPT):
            learner = Learner(loaded(path, ranks, way, **flags), ranks)
            for number in range(3):
                learner.update(number)
            results[str(flags), way] = learner.results()
    torch.save(results, Path(out) / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])

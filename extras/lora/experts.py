"""LoRA on the experts of a mixture: each expert's two matrices get adapters, kept in tensors of all experts.

    y = W_e x + B_e A_e x * alpha / r        W (E, out, in) is frozen; A (E, r, in) begins random, B (E, out, r) as zero

adapters.py is about linear layers, and has what both have in common.
"""

import math

import torch
from torch import Tensor, nn
from transformers.integrations.moe import _grouped_linear

from extras.families import replace_forward

WEIGHTS = ("gate_up_proj", "down_proj")  # of transformers' classes of experts
SUFFIX = "_adapter"  # of the module beside each of them


class ExpertAdapter(nn.Module):
    """The adapters of one tensor of experts (E, out, in)."""

    def __init__(self, weight: Tensor, rank: int, scaling: float, generator: torch.Generator):
        super().__init__()
        E, out, width = weight.shape
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.lora_A, self.lora_B = nn.Module(), nn.Module()
        a = torch.empty(E, rank, width, dtype=dtype).uniform_(-1, 1, generator=generator) / math.sqrt(width)
        self.lora_A.weight, self.lora_B.weight = nn.Parameter(a), nn.Parameter(torch.zeros(E, out, rank, dtype=dtype))
        self.scaling, self.is_on = scaling, True

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x (S, in), ordered by expert, and where each expert's rows end (E,) -> (S, out) in at least float32."""
        y = grouped(grouped(x, self.lora_A.weight, ends), self.lora_B.weight, ends)
        return y.to(torch.promote_types(y.dtype, torch.float32)) * (self.scaling * self.is_on)


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x (S, in), ordered by expert, times each expert's matrix of weight (E, out, in): (S, out)."""
    return _grouped_linear(x, weight, ends)  # torch's, or one that can be compiled in float32


def experts_of(model: nn.Module) -> list[str]:
    """Names of the modules that hold tensors of experts which could get adapters."""
    tensors = {name for name, x in model.named_parameters() if x.ndim == 3}
    return [name for name, _ in model.named_modules() if tensors.issuperset(f"{name}.{weight}" for weight in WEIGHTS)]


def check(model: nn.Module, rank: int, *, flag: str) -> None:
    """Raise ValueError if the experts of a model cannot get adapters of this rank."""
    if not experts_of(model):
        raise ValueError(f"--lora-experts needs a mixture of experts, and {flag} has none")
    if rank % 8:  # rows of 16 bytes in bfloat16
        raise ValueError(f"--lora-experts: their --lora-rank must be a multiple of 8, not {rank}; take 8 or 16")


def adapt(experts: nn.Module, rank: int, scaling: float, generator: torch.Generator) -> None:
    """Give a module of experts adapters that add nothing yet."""
    for name in WEIGHTS:
        experts.add_module(name + SUFFIX, ExpertAdapter(getattr(experts, name), rank, scaling, generator))
    replace_forward(experts, _forward)


def _forward(experts: nn.Module, _own, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden (N, H), experts and weights (N, k) -> (N, H). What adapters add is rounded with the rest, not by itself: a
    small adapter's part would be lost.
    """
    k = top_k_index.shape[-1]
    expert, order = top_k_index.flatten().sort()
    ends = torch.searchsorted(expert, torch.arange(experts.num_experts, device=expert.device), right=True).int()
    x = hidden[order // k]
    wide = experts.gate_up_proj_adapter(x, ends)
    y = experts._apply_gate(grouped(x, experts.gate_up_proj, ends) + wide).to(x.dtype)
    wide = experts.down_proj_adapter(y, ends)
    y = (grouped(y, experts.down_proj, ends) + wide) * top_k_weights.flatten()[order, None]
    return y[order.argsort()].view(-1, k, hidden.shape[-1]).sum(1).to(hidden.dtype)


def for_peft(name: str, x: Tensor) -> tuple[str, Tensor]:
    """An adapter's tensor as PEFT has it: one wrapper of the module for each weight, the second around the first."""
    experts, _, rest = name.rpartition("_proj" + SUFFIX)
    if not experts:
        return name, x
    path, _, weight = experts.rpartition(".")
    inner = ".base_layer" if f"{weight}_proj" == WEIGHTS[0] else ""
    x = x.flatten(0, 1) if "lora_A" in rest else x.permute(1, 2, 0).flatten(1, 2)  # (E r, in) or (out, r E)
    return path + inner + rest, x

"""LoRA: two small matrices learn beside each linear layer, whose own weight stays as it is.

    y = W x + B A x * alpha / r        W (out, in) is frozen; A (r, in) begins random, B (out, r) begins as zero

Training begins at the model as it was, its *base*, and only A and B have gradients and optimizer states. With the
adapters switched off the model is its base again, so that a reference costs no second model. Engines and exports get
one weight, W + B A * alpha / r. Names of parameters and files are those of PEFT, which can load what is saved.

Source: Hu et al. 2021, arXiv 2106.09685.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from extras import images
from extras.families import tower_of
from rl.flags import AtLeast1, FewOr0, Needs, NotNegative
from rl.model import lora_experts
from rl.model.lora_experts import ExpertAdapter

ALL = "all-linear"
PARTS = ("lora_A", "lora_B")
EXPERT_NAMES = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")  # of PEFT, one expert's linear layers


@dataclass(frozen=True)
class LoRA:
    """what learns: with LoRA small matrices beside frozen weights"""

    lora_rank: FewOr0 = 0  # train adapters of this rank, with about ten times the learning rates; 0: train all weights
    # what adapters add to a layer is multiplied by --lora-alpha / --lora-rank
    lora_alpha: Annotated[AtLeast1, Needs("lora_rank")] = 32
    # linear layers that get adapters, by the ends of their names, such as q_proj v_proj; all-linear: all but the head
    target_modules: Annotated[tuple[str, ...], Needs("lora_rank")] = (ALL,)
    lora_experts: Annotated[bool, Needs("lora_rank")] = False  # mixtures of experts: adapters for each expert too
    # mixtures of experts: weight of the loss that evens out what experts have to do, whose gradient `token_logprobs`
    # adds; also without LoRA
    router_aux_loss_coef: NotNegative = 0.0
    freeze_vision_tower: bool = True  # what a model sees images with stays as it is; also without LoRA

    def check(self, flags: Mapping[str, Any]) -> None:
        """Raise ValueError if other flags of the run, which are in `flags` by name, exclude adapters."""
        if self.lora_rank and (steps := flags.get("ref_update_steps")):
            raise ValueError(
                f"--ref-update-steps {steps}: with --lora-rank {self.lora_rank} the reference is the policy without "
                "its adapters, which stays as it is; leave one of them out"
            )


@dataclass(frozen=True)
class Adapters:
    """A model's attribute `lora`."""

    rank: int
    alpha: int
    targets: tuple[str, ...]  # last parts of the names of the layers that have them
    base: str  # id or folder of the model without adapters
    base_sha256: str  # of its weights; on rank 0 only
    experts: bool = False  # whether experts have adapters too


class Adapted(nn.Linear):
    """A linear layer with an adapter beside its weight."""

    def __init__(self, linear: nn.Linear, rank: int, scaling: float, generator: torch.Generator):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        dtype = torch.promote_types(linear.weight.dtype, torch.float32)
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False, dtype=dtype)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False, dtype=dtype)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5), generator=generator)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling, self.is_on = scaling, True

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out).

        W x and the adapter's part are added before they are rounded, or a small adapter's part would be lost. A bias
        has a rounding of its own. Without its adapter a layer adds zeros, and so rounds as with it.
        """
        if self.is_on:
            added = self.lora_B(self.lora_A(x)) * self.scaling
        else:
            added = x.new_zeros(*x.shape[:-1], self.out_features)
        y = torch.addmm(added.flatten(0, -2), x.flatten(0, -2), self.weight.t()).view(added.shape)
        return y if self.bias is None else y + self.bias


ADAPTED = (Adapted, ExpertAdapter)  # what can be switched off


def layers_of(
    model: nn.Module, targets: Sequence[str], *, freeze_vision_tower: bool = True, flag: str = "--model"
) -> list[str]:
    """Names of the linear layers that `targets` means; never the head, which stands directly below the model, nor those
    of a vision tower that is frozen or has nothing to see. Raises ValueError, which names the target and what there is,
    if one means no layer.
    """
    linear = [name for name, x in model.named_modules() if type(x) is nn.Linear and "." in name]
    if (freeze_vision_tower or not images.in_use()) and (tower := tower_of(model)):
        linear = [name for name in linear if not name.startswith(f"{tower[0]}.")]
    kinds = " ".join(sorted({name.rpartition(".")[2] for name in linear}))
    if not linear:
        raise ValueError(f"--lora-rank: {flag}, a {type(model).__name__}, has no linear layers; train all of it")
    if not targets:
        raise ValueError(f"--target-modules names no layer; give all-linear, or some of {kinds}")
    if list(targets) == [ALL]:
        return linear
    found = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    if absent := [target for target, names in found.items() if not names]:
        problem = f"no linear layer of {flag}, apart from its head, is called so"
        raise ValueError(f"--target-modules {absent[0]}: {problem}; give all-linear alone, or some of {kinds}")
    return [name for name in linear if any(name in names for names in found.values())]


def add(model: nn.Module, lora: LoRA, *, path: str, seed: int, hashed: bool = False) -> None:
    """Freeze a model on the host, with weights from `path`, and give it adapters that add nothing yet, in float32 at
    least. `seed` is that of A; `hashed`: take the hash of the weights. Raises ValueError as `layers_of`.
    """
    base_sha256 = hash_of(model) if hashed else ""
    names = layers_of(model, lora.target_modules, freeze_vision_tower=lora.freeze_vision_tower)
    generator = torch.Generator().manual_seed(seed)
    experts = lora_experts.experts_of(model) if lora.lora_experts else []
    model.requires_grad_(False)
    for name in names:
        layer = Adapted(model.get_submodule(name), lora.lora_rank, lora.lora_alpha / lora.lora_rank, generator)
        model.set_submodule(name, layer)
    for name in experts:
        lora_experts.adapt(model.get_submodule(name), lora.lora_rank, lora.lora_alpha / lora.lora_rank, generator)
    kinds = tuple(sorted({name.rpartition(".")[2] for name in names}))
    targets = kinds if list(lora.target_modules) == [ALL] else lora.target_modules
    model.lora = Adapters(lora.lora_rank, lora.lora_alpha, targets, path, base_sha256, lora.lora_experts)


def hash_of(model: nn.Module) -> str:
    """sha256 of the names and values of a model's parameters on the host, in whatever precision holds them exactly."""

    def digest(item: tuple[str, Tensor]) -> bytes:
        name, x = item
        values = x.detach().to(torch.promote_types(x.dtype, torch.float32)).contiguous().numpy()
        return hashlib.sha256(f"{name} {tuple(x.shape)} ".encode() + hashlib.sha256(values).digest()).digest()

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:  # hashing lets go of Python's lock
        return hashlib.sha256(b"".join(threads.map(digest, model.named_parameters()))).hexdigest()


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.endswith(tuple(f".{part}.weight" for part in PARTS))


@contextlib.contextmanager
def watched(model: nn.Module, *, flag: str = "--model") -> Iterator[None]:
    """The model must run meanwhile. Raises ValueError at the end if a layer with an adapter was not called: the model
    has multiplied by the layer's weight itself, so that the adapter would have no effect.
    """
    layers = {name: x for name, x in model.named_modules() if isinstance(x, ADAPTED)}
    idle = dict.fromkeys(layers)
    hooks = [x.register_forward_hook(lambda *_, name=name: idle.pop(name, None)) for name, x in layers.items()]
    yield
    for hook in hooks:
        hook.remove()
    if idle:
        of = [" ".join(sorted({name.rpartition(".")[2] for name in names})) for names in (idle, layers.keys() - idle)]
        raise ValueError(
            f"--target-modules: {flag}, a {model.config.model_type}, takes the weights of {of[0]} without calling the "
            f"layers, so adapters there would do nothing; name others, such as {of[1]}"
        )


class Base:
    """What a model with adapters was before training: a model for `logprobs.fixed_logprobs`, without own memory."""

    def __init__(self, model: nn.Module):
        families = tuple(x.as_reference() for x in model.packed.families)
        self.model, self.packed = model, replace(model.packed, forward=self._forward, families=families)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)  # such as its parameters and its vision tower

    def _forward(self, *args: Any) -> Any:
        layers = [x for x in self.model.modules() if isinstance(x, ADAPTED)]
        for layer in layers:
            layer.is_on = False
        try:
            return self.model.packed.forward(*args)
        finally:
            for layer in layers:
                layer.is_on = True


def merged(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) pairs with W + B A * alpha / r in the place of W, A and B: a sum in float32 at least, which
    becomes bfloat16 by `rounded`, or another type of W by the nearest number. Other tensors pass. Raises RuntimeError
    if W, A or B of a layer has not come at the end.
    """
    found = {name: x.scaling for name, x in model.named_modules() if isinstance(x, ADAPTED)}
    scaling = {name.removesuffix(lora_experts.SUFFIX): x for name, x in found.items()}
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in scaling}
    for name, x in named_tensors:
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        if part not in PARTS:
            layer, part = name.removesuffix(".weight"), "weight"
        layer = layer.removesuffix(lora_experts.SUFFIX)
        if layer not in parts:
            yield name, x
            continue
        parts[layer][part] = x
        if len(parts[layer]) == 3:
            weight, a, b = (parts[layer][part] for part in ("weight", *PARTS))
            del parts[layer]
            product = torch.addmm if weight.ndim == 2 else torch.baddbmm
            total = product(weight.to(a.dtype), b, a, alpha=scaling[layer])
            total = rounded(total) if weight.dtype == torch.bfloat16 else total.to(weight.dtype)
            yield layer + ".weight" * (weight.ndim == 2), total
    if parts:
        layer, there = next(iter(parts.items()))
        raise RuntimeError(f"{len(parts)} weights came without their adapters, {layer} with {sorted(there)} only")


def rounded(x: Tensor) -> Tensor:
    """x (float32) in bfloat16 by stochastic rounding: entries are rounded up or down so that their mean is right.

    Rounding to the nearest would lose a change of W by less than 1/512 to 1/256: an engine would not see small updates.
    Stochastic rounding goes away from zero with the probability (|x| - below) / (above - below), and leaves numbers of
    bfloat16 as they are (Gupta et al. 2015, arXiv 1502.02551). For a random number, entry i has the fractional part of
    1/2 + i * 0.618... (the golden ratio): the same at every push, in files and on every device. NaN stays NaN.
    """
    index = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    product = index.mul_(-1640531527)  # 0.618... * 2 ** 32, as an int32 that wraps around; all in the same memory
    fraction = product.bitwise_right_shift_(16).add_(0x8000)  # of 2 ** 16
    upper = fraction.add_(x.contiguous().view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32)
    return upper.masked_fill_(x.isnan(), torch.nan).bfloat16()


def write(folder: pathlib.Path, model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Write adapter_config.json and adapter_model.safetensors for PEFT, from whole tensors by name on the host."""
    folder.mkdir(parents=True)
    own, is_lm = model.lora, model.can_generate()
    # If a model has experts, PEFT takes layers of these names for theirs; it finds the right ones as parameters.
    renamed = [x for x in own.targets if x.rpartition(".")[2] in EXPERT_NAMES and lora_experts.experts_of(model)]
    config = dict(peft_type="LORA", task_type="CAUSAL_LM" if is_lm else "SEQ_CLS", base_model_name_or_path=own.base)
    experts = [f"experts.{weight}" for weight in lora_experts.WEIGHTS] if own.experts else []
    if parameters := experts + [f"{name}.weight" for name in renamed]:
        config |= dict(target_parameters=parameters)
    config |= dict(r=own.rank, lora_alpha=own.alpha, target_modules=[x for x in own.targets if x not in renamed])
    config |= dict(modules_to_save=None if is_lm else ["score"], lora_dropout=0.0, bias="none")
    config |= dict(fan_in_fan_out=False, inference_mode=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    saved = {name: x for name, x in weights.items() if is_adapter(name) or name == "score.weight"}
    saved = dict(itertools.starmap(lora_experts.for_peft, saved.items()))
    saved = {f"base_model.model.{name}": x.contiguous() for name, x in saved.items()}
    save_file(saved, folder / "adapter_model.safetensors", metadata={"format": "pt"})

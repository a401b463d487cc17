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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig

from extras import images
from extras.families import auto_class, tower_of
from extras.lora import ALL, LoRA, experts
from extras.lora.experts import ExpertAdapter
from rl.model.family import Family

PARTS = ("lora_A", "lora_B")
EXPERT_NAMES = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")  # of PEFT, one expert's linear layers


@dataclass
class Adapters(Family):
    """The family of a model that has adapters."""

    model: nn.Module
    rank: int
    alpha: int
    targets: tuple[str, ...]  # last parts of the names of the layers that have them
    base: str  # id or folder of the model without adapters
    base_sha256: str  # of its weights, on rank 0 only
    has_expert_adapters: bool = False

    @contextlib.contextmanager
    def tested(self, flag: str) -> Iterator[None]:
        """The model must run meanwhile. Raises ValueError at the end if a layer with an adapter was not called: the
        model has multiplied by the layer's weight itself, so that the adapter would have no effect.
        """
        layers = {name: x for name, x in self.model.named_modules() if isinstance(x, ADAPTED)}
        idle = dict.fromkeys(layers)
        hooks = [x.register_forward_hook(lambda *_, name=name: idle.pop(name, None)) for name, x in layers.items()]
        yield
        for hook in hooks:
            hook.remove()
        if idle:
            kinds = [" ".join(sorted({x.rpartition(".")[2] for x in names})) for names in (idle, layers.keys() - idle)]
            raise ValueError(
                f"--target-modules: {flag}, a {self.model.config.model_type}, takes the weights of {kinds[0]} without "
                f"calling the layers, so adapters there would do nothing; name others, such as {kinds[1]}"
            )

    def reference(self) -> "Base":
        """The model without its adapters."""
        return Base(self.model)

    def is_added(self, name: str) -> bool:
        """Adapters are in no file of the model."""
        return is_adapter(name)

    def exported(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """See `merged`."""
        return merged(self.model, named_tensors)

    def save(self, folder: pathlib.Path, suffix: str, weights: dict[str, Tensor]) -> dict[str, str]:
        """Write adapter/ for PEFT: adapter_config.json and adapter_model.safetensors. A checkpoint remembers the model
        that the adapters stand beside.
        """
        folder = folder / f"adapter{suffix}"
        folder.mkdir(parents=True)
        is_lm = self.model.can_generate()
        # If a model has experts, PEFT takes layers of these names for theirs. It finds the right ones as parameters.
        has_experts = bool(experts.experts_of(self.model))
        renamed = [x for x in self.targets if has_experts and x.rpartition(".")[2] in EXPERT_NAMES]
        parameters = [f"experts.{weight}" for weight in experts.WEIGHTS] if self.has_expert_adapters else []
        parameters += [f"{name}.weight" for name in renamed]
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if is_lm else "SEQ_CLS",
            "base_model_name_or_path": self.base,
            **({"target_parameters": parameters} if parameters else {}),
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": [x for x in self.targets if x not in renamed],
            "modules_to_save": None if is_lm else ["score"],
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
        saved = {name: x for name, x in weights.items() if is_adapter(name) or name == "score.weight"}
        saved = dict(itertools.starmap(experts.for_peft, saved.items()))
        saved = {f"base_model.model.{name}": x.contiguous() for name, x in saved.items()}
        save_file(saved, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return {"base": self.base, "base_sha256": self.base_sha256}

    def check_saved(self, record: dict[str, str], path: pathlib.Path) -> None:
        """Raise ValueError if the adapters in the checkpoint `path` stood beside other weights than these."""
        if self.base_sha256 and self.base_sha256 != (then := record["base_sha256"]):  # rank 0 knows the hash
            raise ValueError(
                f"the adapters in {path} were trained beside other weights than those of {self.base} (sha256 was "
                f"{then}, is {self.base_sha256}): restore these, or choose another --experiment-name to start anew"
            )


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
    """Names of the linear layers that `targets` means, never the head, which stands directly below the model, nor those
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
    meant = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    if absent := [target for target, names in meant.items() if not names]:
        problem = f"no linear layer of {flag}, apart from its head, is called so"
        raise ValueError(f"--target-modules {absent[0]}: {problem}; give all-linear alone, or some of {kinds}")
    return [name for name in linear if any(name in names for names in meant.values())]


def adapted_layers(model: nn.Module, lora: LoRA, *, flag: str) -> set[nn.Module]:
    """The modules of a model that the flags give adapters. Raises ValueError as `layers_of`."""
    names = layers_of(model, lora.target_modules, freeze_vision_tower=lora.freeze_vision_tower, flag=flag)
    names += experts.experts_of(model) if lora.lora_experts else []
    return {model.get_submodule(name) for name in names}


def check_model(lora: LoRA, path: str, model_class: Any = None, *, flag: str) -> None:
    """Raise ValueError, from the config of the model in `path` alone: as `layers_of` if the flags ask for adapters, and
    for --no-freeze-vision-tower if the model sees no images. `model_class` is that of transformers which loads it, by
    default that of a policy.
    """
    if not lora.freeze_vision_tower and not images.in_use():
        raise ValueError("--no-freeze-vision-tower has no effect without images in the data; leave it out")
    if lora.lora_rank == 0:
        return
    with torch.device("meta"):
        model = (model_class or auto_class(path)).from_config(AutoConfig.from_pretrained(path))
    adapted_layers(model, lora, flag=f"{flag} {path}")
    if lora.lora_experts:
        experts.check(model, lora.lora_rank, flag=f"{flag} {path}")


def add(model: nn.Module, lora: LoRA, *, path: str, seed: int, hashed: bool = False) -> Adapters:
    """Freeze a model on the host, with weights from `path`, and give it adapters that add nothing yet, in float32 at
    least. A score head beside them learns as a whole. Returns: their family.

    `seed` is that of A. `hashed`: take the hash of the weights. Raises ValueError as `layers_of`.
    """
    base_sha256 = hash_of(model) if hashed else ""
    names = layers_of(model, lora.target_modules, freeze_vision_tower=lora.freeze_vision_tower)
    generator = torch.Generator().manual_seed(seed)
    with_experts = experts.experts_of(model) if lora.lora_experts else []
    model.requires_grad_(False)
    for name in names:
        layer = Adapted(model.get_submodule(name), lora.lora_rank, lora.lora_alpha / lora.lora_rank, generator)
        model.set_submodule(name, layer)
    for name in with_experts:
        experts.adapt(model.get_submodule(name), lora.lora_rank, lora.lora_alpha / lora.lora_rank, generator)
    if not model.can_generate():
        head = model.score.weight
        model.score.to(torch.promote_types(head.dtype, torch.float32)).requires_grad_(True)
    kinds = tuple(sorted({name.rpartition(".")[2] for name in names}))
    targets = kinds if list(lora.target_modules) == [ALL] else lora.target_modules
    return Adapters(model, lora.lora_rank, lora.lora_alpha, targets, path, base_sha256, lora.lora_experts)


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


class Base:
    """What a model with adapters was before training: a model for `logprobs.fixed_logprobs`, without own memory."""

    def __init__(self, model: nn.Module):
        families = tuple(x.as_reference() for x in model.packed.families)
        self.model, self.packed = model, replace(model.packed, families=families)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)  # such as its parameters and its vision tower

    def packed_forward(self, *args: Any) -> Any:
        """That of the model, while its adapters are switched off."""
        layers = [x for x in self.model.modules() if isinstance(x, ADAPTED)]
        for layer in layers:
            layer.is_on = False
        try:
            return self.model.packed_forward(*args)
        finally:
            for layer in layers:
                layer.is_on = True


def merged(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) pairs with W + B A * alpha / r in the place of W, A and B. The sum is made in float32 at
    least. It becomes bfloat16 by `rounded`, or another type of W by the nearest number. Other tensors pass. Raises
    RuntimeError if W, A or B of a layer has not come at the end.
    """
    layers = {name: x for name, x in model.named_modules() if isinstance(x, ADAPTED)}
    scaling = {name.removesuffix(experts.SUFFIX): x.scaling for name, x in layers.items()}
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in scaling}
    for name, x in named_tensors:
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        if part not in PARTS:
            layer, part = name.removesuffix(".weight"), "weight"
        layer = layer.removesuffix(experts.SUFFIX)
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

"""Families of models: what some models do otherwise than a dense decoder of text. rl/model/family.py has the protocol.

    experts     mixtures of experts: router replay, and the loss that evens out their load
    recurrent   layers with a state: gated delta nets, Mamba, short convolutions
    vision      images among the tokens

The file of a family is loaded for models that belong to it.
"""

import importlib
from collections.abc import Callable
from typing import Any

COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")  # a config's names for the number of experts


def families_of(model: Any) -> tuple[Any, ...]:
    """The families of a model, as objects, see `rl.model.family.Family`."""
    from torch import nn

    modules = list(model.modules())
    belongs = {
        "experts": any(type(x).__name__.endswith(("TopkRouter", "TopKRouter")) for x in modules),
        "recurrent": any(isinstance(x, nn.Conv1d) and x.groups == x.in_channels > 1 for x in modules),
        "vision": tower_of(model) is not None,
    }
    families = [_room(name).make(model) for name, is_so in belongs.items() if is_so]
    return tuple(x for x in families if x is not None)


def _room(name: str) -> Any:
    return importlib.import_module(f"extras.families.{name}")


def _config(path: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


def _sees(config: Any) -> bool:
    return hasattr(config, "vision_config")


def choose_way(trial: Any, problem: str) -> None:
    """Let the model of a trial run in a way that is right, where `problem` is why it does not run packed as it is. All
    ranks must enter. Raises ValueError if none is right, see `ways.choose_way`.
    """
    _room("ways").choose_way(trial, problem)


def replace_forward(module: Any, forward: Callable) -> None:
    """Let a module run forward(module, own_forward, ...) from now on, see `forwards.replace_forward`."""
    _room("forwards").replace_forward(module, forward)


def auto_class(path: str) -> Any:
    """The class of transformers that loads the policy in `path`: with its vision tower if the data has images, or if
    there is no class without.
    """
    from transformers import AutoModelForCausalLM

    config = _config(path)
    return _room("vision").class_of(config) if _sees(config) else AutoModelForCausalLM


def prompts_for_vllm(path: str) -> Any:
    """How vLLM reads prompts for the model in `path`: `rl.sampling.engines.vllm.Prompts`, or None for text alone."""
    config = _config(path)
    return _room("vision").prompts_for_vllm(path, config) if _sees(config) else None


def tower_of(model: Any) -> tuple[str, Any] | None:
    """The vision tower of a model and its name, or None if it has none."""
    return _room("vision").tower_of(model) if _sees(model.config) else None


def freeze_tower(model: Any, dtype: Any) -> None:
    """Let the vision tower of a model, if it has one, stay as it is, in `dtype`."""
    for x in tower[1].requires_grad_(False).parameters() if (tower := tower_of(model)) else ():
        x.data = x.data.to(dtype)


def weights_beside(module: Any) -> dict[str, Any]:
    """What the files of a larger model hold beside its text part, if the module is that, see `text_part`."""
    return dict(_room("text_part").weights_beside(module)) if getattr(module, "whole", None) else {}


def prepare(model: Any) -> None:
    """Make a model ready that was just loaded: features of images go where the batch says."""
    if tower_of(model) is not None:
        _room("vision").prepare(model)


def count_experts(config: Any) -> int:
    """Experts of a layer by the config, or 0 if its class has no such number."""
    return next((n for name in COUNTS if (n := getattr(config.get_text_config(), name, None))), 0)


def shape_of(path: str) -> tuple[int, int, int]:
    """Layers, experts that a token gets in each, and experts of a layer, by a model's config, or 0 without experts."""
    config = _config(path).get_text_config()
    return getattr(config, "num_hidden_layers", 0), getattr(config, "num_experts_per_tok", 0), count_experts(config)


def check_shape(checkpoint: str, before: Any, now: Any) -> None:
    """Raise ValueError if `shape_of` --model is not what it was for the model in a checkpoint, and one of them has
    experts. `before` is None if the checkpoint does not say.
    """
    if before is not None and before != now:
        _room("experts").check_shape(checkpoint, before, now)


def check_routed(path: str, flag: str) -> None:
    """Raise ValueError, from the config alone, if the model has no experts, or none with routers that `flag` knows."""
    _room("experts").check_routed(path, flag)


def routing_in_vllm(path: str, ranks: Any) -> Any:
    """numpy's type of the numbers of experts that vLLM returns for the model in `path`. None where vLLM does not tell
    which experts it has chosen. The first rank says why.
    """
    return _room("experts").routing_in_vllm(path, ranks)


def unknown_expert(num_experts: int) -> Any:
    """What stands for "not known" among the numbers of experts, as numpy's smallest type that holds both."""
    return _room("experts").unknown(num_experts)

"""Families of models: what some models do otherwise than a dense decoder of text. rl/model/family.py has the protocol.

    experts     mixtures of experts: router replay, and the loss that evens out their load
    recurrent   layers with a state: gated delta nets, Mamba, short convolutions
    vision      images among the tokens

The file of a family is loaded for models that belong to it.
"""

import importlib
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
    rooms = [importlib.import_module(f"extras.families.{name}") for name, is_so in belongs.items() if is_so]
    return tuple(found for room in rooms if (found := room.make(model)) is not None)


def _sees(config: Any) -> bool:
    return hasattr(config, "vision_config")


def auto_class(path: str) -> Any:
    """The class of transformers that loads the policy in `path`: with its vision tower if the data has images, or if
    there is no class without.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not _sees(config := AutoConfig.from_pretrained(path)):
        return AutoModelForCausalLM
    return importlib.import_module("extras.families.vision").class_of(config)


def is_text_part(path: str) -> bool:
    """Whether `auto_class` loads only the text part of the model in `path`, which has a class of its own."""
    from transformers import AutoConfig

    if not _sees(config := AutoConfig.from_pretrained(path)):
        return False
    return importlib.import_module("extras.families.vision").is_text_part(config)


def tower_of(model: Any) -> tuple[str, Any] | None:
    """The vision tower of a model and its name; None if it has none."""
    return importlib.import_module("extras.families.vision").tower_of(model) if _sees(model.config) else None


def prepare(model: Any) -> None:
    """Make a model ready that was just loaded: features of images go where the batch says."""
    if tower_of(model) is not None:
        importlib.import_module("extras.families.vision").prepare(model)


def count_experts(config: Any) -> int:
    """Experts of a layer by the config; 0 if its class has no such number."""
    return next((n for name in COUNTS if (n := getattr(config.get_text_config(), name, None))), 0)


def shape_of(path: str) -> tuple[int, int, int]:
    """Layers, experts that a token gets in each, and experts of a layer, by a model's config; 0 without experts."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path).get_text_config()
    return getattr(config, "num_hidden_layers", 0), getattr(config, "num_experts_per_tok", 0), count_experts(config)


def check_routed(path: str, flag: str) -> None:
    """Raise ValueError, from the config alone, if the model has no experts, or none with routers that `flag` knows."""
    importlib.import_module("extras.families.experts").check_routed(path, flag)


def why_no_experts(on_cpu: bool) -> str:
    """Why vLLM does not tell here which experts it has chosen, or "" if it does."""
    return importlib.import_module("extras.families.experts").why_no_experts(on_cpu)


def unknown_expert(num_experts: int) -> Any:
    """What stands for "not known" among the numbers of experts, as numpy's smallest type that holds both."""
    return importlib.import_module("extras.families.experts").unknown(num_experts)

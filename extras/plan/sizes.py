"""The sizes of a model, from its config alone: what a plan of memory or of seconds has to know of it.

The model is made on torch's meta device, so nothing is loaded and no GPU is needed. Any architecture that transformers
knows is measured as it is trained here, where its decoder layers are the units that FSDP2 gathers.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from extras.families import auto_class, count_experts, tower_of
from extras.lora import LoRA, adapted_layers
from rl.model.checks import read_config
from rl.model.sharding import outermost

RECURRENT = ("linear_attention", "mamba", "conv", "recurrent", "ssm")  # kinds of layers without keys and values


@dataclass(frozen=True)
class Layer:
    """A decoder layer. Widths are numbers of entries for one token."""

    parameters: int
    experts: int = 0  # of these parameters, the weights of experts
    # widths of what linear layers give together, of experts those that a token gets, without the last one if that is
    # added to the residual, since no gradient needs it
    results: int = 0
    inner: int = 0  # width of what the last linear layer takes: the intermediate size, of all experts of a token
    attention: int = 0  # width of what attention, or a recurrent layer, gives
    cache: int = 0  # entries of its keys and values, or 0 if it has none
    window: float = math.inf  # tokens whose keys and values it keeps
    state: int = 0  # entries of its recurrent state, for one sequence
    adapted: tuple[tuple[int, int], ...] = ()  # (entries in, entries out) of its linear layers that get adapters
    expert_adapters: int = 0  # parameters of adapters of rank 1 on all of its experts


@dataclass(frozen=True)
class Sizes:
    """A model: its decoder layers, and what stands beside them."""

    layers: tuple[Layer, ...]
    root: int  # parameters that are in no decoder layer: embedding, norm, head, and a vision tower
    tower: int  # of these, parameters of the vision tower
    head: int  # parameters of the LM head, which may be those of the embedding. A score head has 0.
    vocabulary: int
    hidden: int
    key_heads: int  # of keys and values, or 1 where all heads share one vector
    tensors: tuple[int, ...]  # entries of each parameter
    expert_share: float  # share of a layer's experts that a token uses, or 0 in a dense model

    @property
    def total(self) -> int:
        """Parameters."""
        return self.root + sum(x.parameters for x in self.layers)

    @property
    def experts(self) -> int:
        """Weights of all experts."""
        return sum(x.experts for x in self.layers)

    @property
    def active(self) -> float:
        """Parameters of the layers that a token uses."""
        return sum(x.parameters for x in self.layers) - (1 - self.expert_share) * self.experts

    @property
    def inner(self) -> int:
        """Width of what the last linear layers of all layers take."""
        return sum(x.inner for x in self.layers)

    @property
    def state(self) -> int:
        """Entries of the recurrent states of a sequence."""
        return sum(x.state for x in self.layers)

    @property
    def largest(self) -> Layer:
        """The layer with the most parameters."""
        return max(self.layers, key=lambda x: x.parameters)

    def adapters(self, rank: int) -> tuple[int, ...]:
        """Entries of each parameter of LoRA adapters: (r, in) and (out, r) of each linear layer. Those of all experts
        of a layer count as one.
        """
        entries = []
        for layer in self.layers:
            entries += [rank * width for pair in layer.adapted for width in pair]
            entries += [rank * layer.expert_adapters] if layer.expert_adapters else []
        return tuple(entries)

    def cached(self, length: float) -> float:
        """Entries of keys and values that an engine keeps of a sequence of this many tokens."""
        return sum(x.cache * min(length, x.window) for x in self.layers)

    def exchanged(self, size: int) -> list[tuple[int, float]]:
        """Of each layer with keys and values: the widths of its queries, and of its keys and values, which are repeated
        until there is one head for each of `size` ranks that divide the heads. See extras/sequence_parallel.
        """
        return [(x.attention, x.cache * max(1, size / max(1, self.key_heads))) for x in self.layers if x.cache]

    def attended(self, tokens: float, squares: float) -> float:
        """Width of attention times the squared lengths of sequences with this many tokens. A window makes it less."""
        return sum(x.attention * min(squares, 2 * x.window * tokens) for x in self.layers if x.cache)


@functools.cache
def sizes_of(path: str, *, lora: LoRA | None = None, has_score: bool = False, flag: str = "--model") -> Sizes:
    """The sizes of the model in `path`, a folder or an id of the Hub, of which only config.json is read.

    Args: lora, flags of adapters: which layers get some; has_score, whether it has a score head in the place of the LM
    head, as a critic or a reward model has; flag, that has named the model. Raises ValueError as `read_config`, as
    `lora.layers_of` if --target-modules names no layer, and if transformers can make no such model.
    """
    config = read_config(path, flag=flag)
    text = config.get_text_config()
    kind = AutoModelForSequenceClassification if has_score else auto_class(path)
    if has_score:
        config.num_labels = 1
    try:
        with torch.device("meta"):
            model = kind.from_config(config)
    except Exception as error:  # the classes of models raise whatever they meet
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"{flag} {path}: no model can be made of its config ({reason}); choose another one") from error
    tower = tower_of(model)
    inside_tower = set(tower[1].modules()) if tower else set()
    units = [x for x in outermost(model, model._no_split_modules or ()) if x not in inside_tower]
    if not units:  # the model is one unit. Its layers are the longest list of modules.
        units = list(max((x for x in model.modules() if isinstance(x, nn.ModuleList)), key=len))
    adapted = set()
    if lora is not None and lora.lora_rank:
        adapted = adapted_layers(model, lora, flag=path)
    used, experts = getattr(text, "num_experts_per_tok", None) or 0, count_experts(config)
    layers = tuple(_layer(unit, text, i, adapted, experts, used) for i, unit in enumerate(units))
    parameters = {id(x): x.numel() for x in model.parameters()}  # a tied one once
    head, heads = model.get_output_embeddings(), getattr(text, "num_attention_heads", None) or 0
    return Sizes(
        layers=layers,
        root=sum(parameters.values()) - sum(x.parameters for x in layers),
        tower=sum(x.numel() for x in tower[1].parameters()) if tower else 0,
        head=0 if head is None else head.weight.numel(),
        vocabulary=text.vocab_size,
        hidden=text.hidden_size,
        key_heads=1 if getattr(text, "kv_lora_rank", None) else getattr(text, "num_key_value_heads", None) or heads,
        tensors=tuple(parameters.values()),
        expert_share=used / experts if experts else 0.0,
    )


def _layer(unit: nn.Module, config: Any, index: int, adapted: set[nn.Module], experts: int, used: int) -> Layer:
    """The layer number `index` of a model with this text config."""
    linear = [x for x in unit.modules() if isinstance(x, (nn.Linear, Conv1D))]
    widths = [(x.nx, x.nf) if isinstance(x, Conv1D) else (x.in_features, x.out_features) for x in linear]
    stacked = [x for x in unit.parameters() if x.ndim == 3 and experts and len(x) == experts]  # (experts, out, in)
    results = sum(width for _, width in widths) + used * sum(x.shape[1] for x in stacked)
    if widths and not stacked and widths[-1][1] == config.hidden_size:
        results -= config.hidden_size  # of the last one
    inner = used * min(x.shape[2] for x in stacked) if stacked else max([width for width, _ in widths], default=0)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    kind = str(kinds[index]) if index < len(kinds) else "full_attention"
    heads = getattr(config, "num_attention_heads", None) or 0
    width = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    rank = getattr(config, "kv_lora_rank", None)  # of latent attention: one vector in the place of keys and values
    cache = rank + config.qk_rope_head_dim if rank else 2 * key_heads * width
    is_recurrent = any(kind.startswith(x) for x in RECURRENT)
    slides = "sliding" in kind or (not kinds and getattr(config, "use_sliding_window", True) is not False)
    window = getattr(config, "sliding_window", None) if slides else None
    pairs = [pair for x, pair in zip(linear, widths, strict=True) if x in adapted]
    of_experts = [x for x in unit.modules() if x in adapted and not isinstance(x, nn.Linear)]
    each = [sum(x.shape) - len(x) for module in of_experts for x in module.parameters() if x.ndim == 3]
    return Layer(
        parameters=sum(x.numel() for x in unit.parameters()),
        experts=sum(x.numel() for x in stacked),
        results=results,
        inner=inner,
        attention=_state_width(config) if is_recurrent else heads * width,
        cache=0 if is_recurrent else cache,
        window=math.inf if window is None else window,
        state=_state(config) if is_recurrent or "hybrid" in kind else 0,
        adapted=tuple(pairs),
        expert_adapters=experts * sum(each),
    )


def _state_width(config: Any) -> int:
    """Width of what a recurrent layer gives before its last product."""
    heads, width = (getattr(config, f"linear_{x}", None) for x in ("num_value_heads", "value_head_dim"))
    return heads * width if heads and width else 2 * config.hidden_size


def _state(config: Any) -> int:
    """Entries of the state of a gated delta net, heads * keys * values, or of a Mamba-2 layer, heads * width * size."""
    for names in (
        ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
        ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    ):
        if all(isinstance(getattr(config, x, None), int) for x in names):
            a, b, c = (getattr(config, x) for x in names)
            return a * b * c
    return 0

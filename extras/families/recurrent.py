"""Recurrent layers over packed sequences: gated delta nets, Mamba, short convolutions.

Such a layer carries a state from token to token, and its convolution sees the last few tokens. In a packed row both
would run from one sequence into the next. So a sequence shares no beginning with its neighbor, and the layer gets

    borders   where sequences begin, if its kernels take that: the gated delta rule of flash-linear-attention, the scan
              of mamba-ssm. The convolution is causal-conv1d's, or without that package the one below.
    rows      on any device: a padded row for each sequence, inside this layer only. Nothing flows back from padding.

Without its kernels transformers drops the borders and says nothing, so `ways.choose_way` tries what is right.
"""

import functools
import importlib.util
import inspect
import sys
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from extras.families import delta_rule
from extras.families.forwards import replace_forward
from rl.data.types import Batch
from rl.model.attention import Packing
from rl.model.family import Family, Pass
from rl.model.sharding import KEPT_OPERATIONS

Apart = Literal["", "borders", "rows"]  # "": no layer is recurrent
DELTA_RULE = "torch_chunk_gated_delta_rule"
SCANS = {DELTA_RULE: "fla", "mamba2_chunk_scan": "mamba_ssm"}  # functions of transformers -> the package of kernels


class Recurrent(Family):
    """A model's recurrent layers."""

    runs_packed = shares_beginnings = False

    def __init__(self, mixers: tuple[nn.Module, ...]):
        self.mixers, self.apart = mixers, ""

    def use(self, apart: Apart) -> None:
        """Keep packed sequences apart in this way from now on. The model's own forward has none."""
        self.apart, self.shares_beginnings = apart, apart == ""
        separate(self.mixers, "", None)

    def ways(self, device: torch.device) -> tuple[list[str], str]:
        """How sequences can be kept apart, the fastest first: by borders if there are kernels that take them, see
        `know_borders`, or in rows. And why there are no kernels.
        """
        problem = know_borders(self.mixers, device)
        return ["rows"] if problem else ["borders", "rows"], problem

    def has_kernels_to_try(self, device: torch.device) -> bool:
        """Whether a package of kernels for these layers is installed, and the device is one for it. The first time on a
        machine they are compiled and tuned.
        """
        names = set().union(*(vars(sys.modules[type(x).__module__]) for x in self.mixers))
        return any(name in names and _has_kernels(package, device) for name, package in SCANS.items())

    def advice(self, reason: str) -> str:
        """What a user may do if the layers run in rows for this reason: packages that have kernels."""
        return (
            f"the recurrent layers run padded, one row per sequence. Their kernels for packed rows: {reason}. Gated "
            "delta nets want flash-linear-attention (on Hopper GPUs with Triton 3.7.1 or tilelang), Mamba-2 mamba-ssm"
        )

    def begin(self, batch: Batch | None, passes: list[Pass]) -> None:
        """See `separate`."""
        separate(self.mixers, self.apart, passes[0].inputs.get("packing"))

    def own_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As they are. One sequence has nothing to be kept apart from."""
        separate(self.mixers, "", None)
        return inputs


def make(model: nn.Module) -> Recurrent:
    """The family of a model that has such layers. The backward pass does not compute their kernels again."""
    KEPT_OPERATIONS.add("rl.gated_delta")
    return Recurrent(add_mixers(model))


class Places(NamedTuple):
    """Where b sequences of at most L tokens stand in a packed row of N, none of which is shared."""

    borders: Tensor  # (b + 1,) int32
    row: Tensor  # (1, N) int32, the sequence of each token
    index: Tensor  # (b, L) int64 in the packed row, or 0 where there is padding
    back: Tensor  # (N,) int64, the place of each token in index, flattened


def add_mixers(model: nn.Module) -> tuple[nn.Module, ...]:
    """The recurrent layers of a model, those with a convolution along the tokens, made ready for `separate`."""
    found = [x for x in model.modules() if any(_is_along_tokens(y) for y in x.children())]
    for module in found:
        if not hasattr(module, "apart"):
            module.apart, module.places, module.known = "", None, _known(type(module).forward)
            replace_forward(module, _mix)
    return tuple(found)


def _known(forward: Any) -> tuple[str, ...]:
    """Which of the names for borders a layer's forward takes."""
    parameters = inspect.signature(forward).parameters
    takes_all = any(x.kind == x.VAR_KEYWORD for x in parameters.values())
    return tuple(x for x in ("cu_seq_lens_q", "seq_idx") if takes_all or x in parameters)


def _is_along_tokens(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels > 1


def know_borders(mixers: tuple[nn.Module, ...], device: torch.device) -> str:
    """Let the convolutions of these layers know borders, and the delta rule be one operation, if all these layers may
    have kernels that take borders. Returns "" then, or why not: the delta rule is then plain torch that nothing
    compiles. Raises ValueError if kernels that another model runs by are wrong for this one.
    """
    names = sorted({type(x).__module__ for x in mixers})
    return next(filter(None, [_prepare(vars(sys.modules[name]), mixers, device) for name in names]), "")


def _prepare(space: dict[str, Any], mixers: tuple[nn.Module, ...], device: torch.device) -> str:
    own, rule = space.get("causal_conv1d_fn"), space.get(DELTA_RULE)
    if own and importlib.util.find_spec("causal_conv1d") is None and not hasattr(own, "knows_borders"):
        space["causal_conv1d_fn"] = _knowing_borders(own)
    scans = [package for name, package in SCANS.items() if name in space]
    kinds = "scan", "rule", "delta_attention"  # if there is none of these, there is only a convolution
    is_known = scans or not any(kind in name for name in space for kind in kinds)
    if not own or not is_known:
        return "there are none, or they are not known here"
    if scans and not _has_kernels(scans[0], device):
        if rule and not hasattr(rule, "is_operation"):
            space[DELTA_RULE] = delta_rule.without_kernels(inspect.unwrap(rule))
        return f"they need a GPU and the package {scans[0]}"
    if not rule:
        return ""
    plain = inspect.unwrap(rule)
    sizes = {(x.num_v_heads, x.head_k_dim, x.head_v_dim) for x in mixers if hasattr(x, "num_v_heads")}
    found = (delta_rule.what_is_wrong(plain, *size, device) for size in sizes)
    problem = getattr(rule, "problem", "") or next(filter(None, found), "")  # the rule is that of all models
    if problem and hasattr(rule, "is_operation"):
        raise ValueError(f"uninstall flash-linear-attention, right for one model and wrong for another: {problem}")
    if problem:
        space[DELTA_RULE] = delta_rule.without_kernels(plain, problem)
    elif not hasattr(rule, "is_operation"):
        space[DELTA_RULE] = delta_rule.as_operation(rule)
    return problem


def _has_kernels(package: str, device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec(package) is not None


def separate(mixers: tuple[nn.Module, ...], apart: Apart, packing: Packing | None) -> None:
    """Let the next forward pass, and what its backward pass computes again, keep the sequences of a packed row apart in
    these layers, or None if the model runs padded.
    """
    if not mixers:
        return
    places = None
    if packing is not None:
        borders = packing.borders.long()
        valid = packing.offset < borders.diff()[:, None]  # (b, L)
        index = (borders[:-1, None] + packing.offset).where(valid, 0)
        row = torch.arange(len(valid), device=valid.device).repeat_interleave(borders.diff())
        places = Places(packing.borders, row[None].to(torch.int32), index, valid.flatten().nonzero()[:, 0])
        for x in places:
            torch._dynamo.maybe_mark_dynamic(x, list(range(x.ndim)))
    for module in mixers:
        module.apart, module.places = (apart if places else ""), places


def _mix(module: nn.Module, own_forward: Any, *args: Any, **kwargs: Any) -> Any:
    """A recurrent layer's forward over a packed row (1, N, H)."""
    if module.apart == "borders":
        borders = dict(cu_seq_lens_q=module.places.borders, seq_idx=module.places.row)
        return own_forward(*args, **kwargs | {name: borders[name] for name in module.known})
    if module.apart == "rows":
        _, _, index, back = module.places
        hidden = args[0] if args else kwargs.pop("hidden_states")
        out = own_forward(hidden[0][index], *args[1:], **kwargs)  # (b, L, H)
        return out.flatten(0, 1)[back][None]
    return own_forward(*args, **kwargs)


def _knowing_borders(own: Any) -> Any:
    """transformers' causal convolution (b, C, N), which with b = 1 also takes `seq_idx` (1, N), a token's sequence:

    y[c, t] = sum over j < k of weight[c, k - 1 - j] x[c, t - j],  where token t - j belongs to the sequence of t

    Compiled, it is always this sum: torch.compile makes transformers' own anew for every N.
    """

    @functools.wraps(own)
    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any):
        row = kwargs.get("seq_idx")
        if row is None and not torch.compiler.is_compiling():
            return own(x, weight, bias, activation=activation, **kwargs)
        n, k = x.shape[-1], weight.shape[-1]
        wide = torch.promote_types(x.dtype, torch.float32)
        total = x.to(wide) * weight[:, -1:].to(wide)
        for j in range(1, min(k, n)):
            before = x[..., :-j]
            if row is not None:
                before = torch.where((row[:, j:] == row[:, :-j])[:, None], before, 0.0)  # (1, C, N - j)
            total = total + F.pad(before.to(wide) * weight[:, k - 1 - j, None].to(wide), (j, 0))
        if bias is not None:
            total = total + bias[:, None].to(wide)
        total = total.to(weight.dtype)
        return (total if activation is None else ACT2FN[activation](total)).to(x.dtype)

    convolve.knows_borders = True
    return convolve

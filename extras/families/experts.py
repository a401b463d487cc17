"""Mixtures of experts: which experts a layer's router chooses, as the engine did (router replay), and how evenly.

A router gives the hidden state x of a token a score for each of E experts, and its layer adds up what the best k give:

    y = sum over e in S of g_e * expert_e(x)        S: the k experts with the largest scores, k = top_k
    g_e = s * p_e / (sum over S of p)               p = softmax(W x), or sigmoid(W x);  s: a constant, mostly 1

Engine and trainer round differently, so some tokens get other experts in the trainer than they had in the engine, and
other log-probs. With router replay S is what the engine chose, and g is computed from the trainer's own p, which keeps
its gradient (Ma et al. 2025, arXiv 2510.11370, "rollout routing replay", which verl calls R3).

The auxiliary loss is least where all experts have as much to do as the others:

    aux = mean over layers of E * sum over e of f_e P_e       f_e: experts e that N tokens used, by N; so these sum to k
                                                              P_e: mean over these tokens of softmax(W x)_e

With --router-aux-loss-coef the gradient of coef * aux is added. N are the tokens of a micro-batch on its rank, and an
update has the mean over its micro-batches, weighted by their tokens. Source: Switch Transformer (Fedus et al. 2021,
arXiv 2101.03961), equations 4 to 6; transformers' `load_balancing_loss_func` has f and P of all layers together.
"""

import contextlib
import functools
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from extras.families import auto_class, shape_of
from extras.families.forwards import replace_forward
from extras.loss_scale import factor_of
from rl.console import say
from rl.data.types import Batch
from rl.model.family import Family, Pass
from rl.ranks import Ranks

ROUTER = re.compile(r"Top[kK]Router$")  # ends the names of the classes of routers in transformers


@dataclass
class Experts(Family):
    """A model's mixture of experts."""

    routers: tuple[tuple[int, nn.Module], ...]  # with the numbers of their layers
    replays: bool = False  # whether these use the experts that a batch names
    balance: float = 0.0  # the coefficient of their auxiliary loss, which evens out the load
    model: nn.Module | None = None  # whose loss scale that gets too

    @property
    def one_pass(self) -> bool:
        """Routers remember one pass."""
        return self.replays or self.balance > 0

    def begin_run(self, learning: Any, engine: Any) -> None:
        """Replay if the engine says which experts it has chosen, and even out experts as --router-aux-loss-coef says:
        see `begin`.
        """
        self.replays = getattr(engine, "routing", None) is not None
        self.balance = learning.router_aux_loss_coef

    def as_reference(self) -> "Experts":
        """Without replay: the engine has not sampled from a reference."""
        return replace(self, replays=False)

    def begin(self, batch: Batch | None, passes: list[Pass]) -> None:
        """Let the next pass, and what its backward pass computes again, use the experts that the engine has chosen.
        These are (N, layers, k), for N tokens as the decoder gets them. A number without an expert leaves a token to
        the router. Let it add `balance` times the sum of the rows' shares times the auxiliary loss, if there are
        gradients and shares.
        """
        first, replayed, weights = passes[0], None, None
        if self.replays and (chosen := batch.columns.get("routed_experts")) is not None:
            replayed = first.take(chosen)
        if self.balance and batch.share is not None and torch.is_grad_enabled():
            is_real = first.inputs.get("attention_mask", torch.ones_like(first.inputs["input_ids"])).flatten()
            share = batch.share.sum() * factor_of(self.model)  # as the loss of the policy
            weights = is_real * (self.balance * share / is_real.sum() / len(self.routers))
            torch._dynamo.maybe_mark_dynamic(weights, 0)
        for layer, router in self.routers:
            router.replayed, router.balanced = None if replayed is None else replayed[:, layer], weights
            if replayed is not None:
                torch._dynamo.maybe_mark_dynamic(router.replayed, 0)

    def watched(self) -> contextlib.AbstractContextManager[dict[int, list["Choice"]]]:
        """See `watched` below."""
        return watched(self.routers)

    def metrics(self, seen: dict[int, list["Choice"]], ranks: Ranks) -> dict[str, float]:
        """See `describe` and, if experts are replayed, `check_gates`."""
        found = describe(seen, ranks)
        if self.replays:
            check_gates(self.routers, seen)
        return found


def make(model: nn.Module) -> Experts:
    """The family of a model that has routers."""
    return Experts(add_routers(model), model=model)


class Choice(NamedTuple):
    """What a router made of N tokens."""

    logits: Tensor  # (N, E)
    gates: Tensor  # (N, k) of those that it chose
    chosen: Tensor  # (N, k) experts by its own scores
    replayed: Tensor | None  # (N, k) experts that were used instead


def check_shape(checkpoint: str, before: Sequence[int], now: Sequence[int]) -> None:
    """Raise ValueError if one of two models that differ in shape has experts, see `extras.families.shape_of`."""
    if before[2] or now[2]:
        raise ValueError(
            f"{checkpoint} is of a model with {before[1]} of {before[2]} experts a token in {before[0]} layers, and "
            f"--model has {now[1]} of {now[2]} in {now[0]}; give that model, or another --experiment-name "
            "to start anew"
        )


def check_routed(path: str, flag: str) -> None:
    """Raise ValueError, from the config alone, if the model has no experts, or none with routers that `flag` knows."""
    if not all(shape_of(path)):
        raise ValueError(f"{flag} needs a mixture of experts, and {path} has no experts; drop it")
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = auto_class(path).from_config(config)
    if not any(ROUTER.search(type(x).__name__) for x in model.modules()):
        raise ValueError(f"{flag}: {path}, a {config.model_type}, has routers that are not known here; drop it")


def unknown(num_experts: int) -> np.generic:
    """What stands for "not known" among the numbers of experts, as the smallest type that holds both."""
    return np.uint8(255) if num_experts < 256 else np.int16(2**15 - 1)


def add_routers(model: nn.Module) -> tuple[tuple[int, nn.Module], ...]:
    """The routers of a model with the numbers of their layers, made ready for `Experts.begin` and `watched`."""
    found = []
    for name, module in model.named_modules():
        if ROUTER.search(type(module).__name__) and (layer := re.search(r"\.(\d+)\.", f".{name}")):
            if not hasattr(module, "replayed"):
                module.replayed, module.balanced, module.seen = None, None, None
                replace_forward(module, _route)
            found.append((int(layer[1]), module))
    return tuple(found)


def _route(router: nn.Module, own_forward, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A router's forward: hidden (N, H), perhaps a bias -> logits (N, E), gates (N, k), experts (N, k), or these in
    the opposite order.
    """
    found = own_forward(hidden, *args, **kwargs)
    order = 1 if found[0].is_floating_point() else -1
    logits, gates, chosen = found[::order]
    if router.seen is not None:
        router.seen.append(Choice(logits, gates, chosen, router.replayed))
    if router.replayed is not None:
        replayed = router.replayed.to(chosen.dtype)
        chosen = torch.where(replayed < logits.shape[-1], replayed, chosen)
        gates = gates_of(router, logits, chosen).to(gates.dtype)
    if router.balanced is not None:
        gates = _AddLoss.apply(gates, unevenness(logits, chosen, router.balanced))
    return (logits, gates, chosen)[::order]


class _AddLoss(torch.autograd.Function):
    """x as it is. In the backward pass a loss, a number, is added to that from which x has its gradient."""

    @staticmethod
    def forward(ctx, x, loss):
        """x, (N, ...)."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        """That of x, and 1 for the loss."""
        return gradient, gradient.new_ones((), dtype=torch.float32)


def unevenness(logits: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The auxiliary loss of a layer times the sum of `weights` (N,), which are 0 for padding and else alike. Logits
    (N, E), chosen experts (N, k).
    """
    is_real = (weights > 0).float()
    used = is_real.new_zeros(E := logits.shape[-1]).scatter_add(
        0, chosen.flatten(), is_real.repeat_interleave(chosen.shape[-1])
    )
    p = (logits.float().softmax(-1) * weights[:, None]).sum(0)
    return E * (used / is_real.sum() * p).sum()


def gates_of(router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    """g of experts (N, k) that a router with these logits (N, E) would give if it chose them: (N, k) float32."""
    is_sigmoid = hasattr(router, "e_score_correction_bias")  # DeepSeek-V3 and its heirs. The bias only helps to choose.
    scores = logits.float().sigmoid() if is_sigmoid else logits.float().softmax(-1)
    gates = scores.gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20 * is_sigmoid)
    return gates * getattr(router, "routed_scaling_factor", 1.0)


@contextlib.contextmanager
def watched(routers: tuple[tuple[int, nn.Module], ...]) -> Iterator[dict[int, list[Choice]]]:
    """By layer, what its router chooses in the forward passes meanwhile. Nothing that is compiled runs compiled."""
    seen = {layer: [] for layer, _ in routers}
    for layer, router in routers:
        router.seen = seen[layer]
    with torch.compiler.set_stance("force_eager" if routers else "default"):
        yield seen
    for _, router in routers:
        router.seen = None


def check_gates(routers: tuple[tuple[int, nn.Module], ...], seen: dict[int, list[Choice]]) -> None:
    """Raise RuntimeError if a router has given the experts that it chose other weights than `gates_of`."""
    for layer, router in routers:
        for x in seen[layer]:
            if not torch.allclose(gates_of(router, x.logits, x.chosen), x.gates.float(), rtol=0.02, atol=1e-4):
                kind = type(router).__name__
                raise RuntimeError(f"--router-replay: {kind} weighs experts in a way that is not known here; drop it")


@torch.no_grad()
def describe(seen: dict[int, list[Choice]], ranks: Ranks) -> dict[str, float]:
    """Metrics of what routers chose, over the tokens of all ranks, which must enter. Means are over tokens and layers.

    router/load_max       tokens of the busiest expert of a layer, by those of an average one: 1 if all are alike
    router/entropy        of softmax(W x), in nats, at most log E
    router/aux_loss       k if all experts of a layer have as much to do; see above
    router/changed_frac   share of the tokens to which any layer would give other experts than the engine did
    """
    if not seen:
        return {}
    loads, means, entropies, known, changed = [], [], [], [], []
    for choices in seen.values():
        logits, chosen = (torch.cat([x[i] for x in choices]) for i in (0, 2))
        logp = logits.float().log_softmax(-1)
        loads.append(torch.bincount(chosen.flatten(), minlength=logits.shape[-1]).double())
        entropies.append(-(logp.exp() * logp).sum(-1).double().sum())
        means.append(logp.exp().double().sum(0))
        if all(x.replayed is not None for x in choices):
            replayed = torch.cat([x.replayed for x in choices]).to(chosen.dtype)
            known.append((replayed < logits.shape[-1]).all(-1))
            changed.append(known[-1] & (replayed.sort(-1).values != chosen.sort(-1).values).any(-1))
    count = entropies[0].new_tensor(float(len(logits)))
    replays = (torch.stack(known).all(0), torch.stack(changed).any(0)) if known else (torch.zeros_like(count),) * 2
    own = torch.stack([count, sum(entropies), *(x.double().sum() for x in replays)])
    sums = torch.cat([own, *loads, *means])
    torch.distributed.all_reduce(sums, group=ranks.group)  # also over those that have other tokens of the same rows
    sums = sums.tolist()
    layers, E = len(seen), len(loads[0])
    shares, means = torch.tensor(sums[4:], dtype=torch.float64).view(2, layers, E)
    busiest = (shares.amax(1) / shares.mean(1).clamp(min=1e-9)).mean().item()
    tokens = max(sums[0], 1.0)
    found = {"router/load_max": busiest, "router/entropy": sums[1] / (tokens * layers)}
    found["router/aux_loss"] = E * (shares * means).sum().item() / (tokens**2 * layers)
    return found | ({"router/changed_frac": sums[3] / sums[2]} if sums[2] else {})


def routing_in_vllm(path: str, ranks: Ranks) -> np.dtype | None:
    """See `extras.families.routing_in_vllm`."""
    if problem := why_no_experts(on_cpu=ranks.device.type == "cpu"):
        if ranks.is_main:
            say(f"--router-replay is off: {problem}")
        return None
    if importlib.util.find_spec("vllm.distributed.aux_output_connector"):  # vLLM 0.26 has none
        let_later_ranks_go_on()
    return unknown(shape_of(path)[2]).dtype


@functools.cache
def let_later_ranks_go_on() -> None:
    """Let vLLM's schedulers expect experts on the first rank of an engine alone. vLLM gives them to that rank, and has
    no scheduler on the others. Here every rank has one, and would fail.
    """
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
    from vllm.distributed.parallel_state import get_tp_group

    take = AuxOutputSchedulerConnector.take_output

    def take_if_first(connector: Any, request: Any, output: Any) -> Any:
        return take(connector, request, output) if output is not None or get_tp_group().is_first_rank else None

    AuxOutputSchedulerConnector.take_output = take_if_first


def why_no_experts(on_cpu: bool) -> str:
    """Why vLLM does not tell here which experts it has chosen, or "" if it does."""
    if on_cpu:
        return "vLLM's kernels on a CPU choose experts and do not tell which"
    from vllm import __version__, config

    if hasattr(config.VllmConfig, "_verify_aux_output_compatibility") and not __version__.startswith("0.33."):
        return f"vLLM {__version__} returns experts in a way that was not tried; install vLLM 0.26 or 0.33"
    return ""

"""Ways to run a model that does not run packed as it is, see `rl.model.self_test`.

A model whose logits are more than the product of a hidden state and one matrix runs packed, with its own forward as the
head. Recurrent layers are kept apart as recurrent.py says. All other models, such as those whose layers have an
attention of their own, run padded, a sequence in each row.
"""

import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from rl.console import say
from rl.data.types import Batch
from rl.model.attention import use_attention
from rl.model.family import Pass
from rl.model.self_test import Trial

SIMILAR = 0.8  # a row shorter than this share of the longest one in its padded pass begins the next pass
# How recurrent layers keep sequences apart, and that in words. Those of the first one share beginnings
APART = {"": "", "borders": ", nothing shared", "rows": " but in recurrent layers"}
OWN_HEAD = ", with the logits of its own forward"


class Way(NamedTuple):
    """How a model runs."""

    is_padded: bool  # or packed
    own_head: bool  # whether logits come from the model's own forward, or are a product with one matrix
    apart: str = ""  # how recurrent layers keep sequences apart, of `APART`


WAYS = {  # by name, the fastest first
    f"packed{words}{logits}": Way(is_padded=False, own_head=bool(logits), apart=apart)
    for (apart, words), logits in itertools.product(APART.items(), ("", OWN_HEAD))
} | {"padded": Way(is_padded=True, own_head=True)}


def family(model: nn.Module, name: str) -> Any:
    """A model's family of this name, or None if it does not belong to it."""
    return next((x for x in model.packed.families if type(x).__module__.endswith(f".{name}")), None)


def choose_way(trial: Trial, problem: str) -> None:
    """Let the model of a trial run in the fastest of `WAYS` that is right, where `problem` is why it does not run
    packed as it is. Rank 0 says why a model runs padded. Raises ValueError if none is right. All ranks must enter.
    """
    model, ranks, flag, kind = trial.model, trial.ranks, trial.flag, trial.model.config.model_type
    errors = {}
    if trial.has_plain_head and all(x.runs_packed for x in model.packed.families):
        errors["packed"], again = trial.difference(trial.outputs)  # some libraries fail at their first call alone
        if errors["packed"] <= trial.limit:
            if ranks.is_main:
                say(f"{flag}: {kind} failed once, and not again: {problem}")
            return
        problem = again
    if model.packed.attention == "packed_fa2" and not _problem_without_flash_attn(trial):
        if ranks.is_main:
            say(
                f"{flag}: torch's own attention is used in the place of flash-attn, with which {problem}; is there a "
                f"build of flash-attn with kernels for {str(ranks.dtype).removeprefix('torch.')}?"
            )
        return
    recurrent, reasons, no_kernels = family(model, "recurrent"), {"packed": problem}, ""
    ways = [name for name, way in WAYS.items() if way.apart == "" and name != "packed"]
    if recurrent:
        if ranks.is_main and recurrent.has_kernels_to_try(ranks.device):
            say(
                f"{flag}: trying out the kernels of the recurrent layers of {kind}; the first time on a machine they "
                "are compiled and tuned, which takes minutes"
            )
        apart, no_kernels = recurrent.ways(model.packed.device)
        ways = [name for name, way in WAYS.items() if way.apart in apart or way.is_padded]
    if ranks.sequence_size > 1:  # Of these ways, the ranks can divide the tokens of the first one only.
        ways = [name for name in ways if not WAYS[name].is_padded and not WAYS[name].apart][:1]
    for name in ways:
        way = use_way(model, name)
        if not way.own_head and not trial.has_plain_head:
            reasons[name] = "its LM head is more than one matrix"
            continue
        errors[name], reasons[name] = trial.difference(trial.outputs)
        if errors[name] <= trial.limit:
            break
    else:
        if ranks.sequence_size > 1:
            what = f"{flag}: {kind} cannot be sliced by --sequence-parallel-size {ranks.sequence_size}, since"
            raise ValueError(f"{what} packed it gives other numbers ({[*reasons.values()][-1]}); leave that flag out")
        raise ValueError(
            f"{flag}: {kind} gives other numbers here than its own forward does, packed ({reasons[ways[-2]]}) and "
            f"padded ({reasons['padded']}); choose another model"
        )
    if way.is_padded or way.apart:
        ranks.not_sharing.add(model)
    if way.is_padded and ranks.is_main:
        say(
            f"{flag}: {kind} runs padded, one row per sequence, since it cannot run packed: {reasons[ways[-2]]}. "
            "Padding and the prompt of each response are computed too: training takes more time, and a micro-batch "
            "more memory than its tokens would; lower the limit of tokens per GPU if needed"
        )
    with_plain_head = name.removesuffix(OWN_HEAD)
    if way.own_head and errors.get(with_plain_head) == math.inf and ranks.is_main:
        say(
            f"{flag}: {kind} runs {name}, which takes more time, since {with_plain_head} it failed: "
            f"{reasons[with_plain_head]}"
        )
    if way.apart == "rows" and ranks.device.type == "cuda" and ranks.is_main:
        say(f"{flag} {kind}: {recurrent.advice(no_kernels or reasons[ways[0]])}")


def _problem_without_flash_attn(trial: Trial) -> str:
    """Why a model does not run packed with torch's own attention either, or "". Then it is left with that attention. A
    build of flash-attn may lack kernels for a type of numbers, and give wrong numbers without an error.
    """
    model, packed = trial.model, trial.model.packed
    model.packed = replace(packed, attention="packed_varlen" if packed.device.type == "cuda" else "packed_sdpa")
    use_attention(model, model.packed.attention)
    if problem := trial.problem_of_packed():
        model.packed = packed
        use_attention(model, packed.attention)
    return problem


def use_way(model: nn.Module, name: str) -> Way:
    """Let a model run in one of `WAYS` from now on. Returns: the way."""
    way, packed = WAYS[name], model.packed
    layout, logits = pad if way.is_padded else None, own_logits if way.own_head else None
    model.packed = replace(packed, way=name, layout=layout, own_logits=logits)
    if recurrent := family(model, "recurrent"):
        recurrent.use(way.apart)
    use_attention(model, model.get_correct_attn_implementation(None) if way.is_padded else packed.attention)
    return way


def pad(batch: Batch, model: nn.Module) -> tuple[list[Pass], Tensor]:
    """Passes over padded rows of a batch (b, T), those of similar length in one pass, and the place (b, T) of every
    token among those of all passes, one after the other.
    """
    ids, groups = batch.input_ids, []
    similar = 0.0 if any(x.one_pass for x in model.packed.families) else SIMILAR
    for row, length in sorted(enumerate(batch.lengths.tolist()), key=lambda pair: -pair[1]):
        if not groups or length < similar * batch.lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    passes, place, start = [], torch.zeros_like(ids), 0
    for rows in groups:
        width = int(batch.lengths[rows[0]])
        place[rows, :width] = start + torch.arange(len(rows) * width, device=ids.device).view(len(rows), width)
        real = torch.arange(width, device=ids.device) < batch.lengths[rows][:, None]
        passes.append(_pass(ids[rows, :width], real, rows))
        start += len(rows) * width
    # In every pass all ranks exchange weights or gradients. One without work runs a single token.
    if isinstance(model, FSDPModule):
        most = torch.tensor(len(passes), device=ids.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=dist.group.WORLD)
        one = _pass(ids[:1, :1], torch.ones_like(ids[:1, :1], dtype=torch.bool), [0])
        passes += itertools.repeat(one, int(most) - len(passes))
    return passes, place


def _pass(ids: Tensor, real: Tensor, rows: list[int]) -> Pass:
    inputs: dict[str, Any] = dict(input_ids=ids, attention_mask=real.long())
    return Pass(inputs, lambda x: x[rows, : ids.shape[1]].flatten(0, 1), ids, real)


class _HiddenStates(BaseModelOutputWithPastAndCrossAttentions):
    """What a decoder returns. Any field but hidden states is None."""

    def __getattr__(self, name):
        return None


def own_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """hidden (C, H) -> logits (C, V) by the model's own forward, which may scale, cap, or add a bias. For this one call
    the decoder returns `hidden`.
    """
    decoder, result = model.base_model, _HiddenStates(last_hidden_state=hidden[None])
    decoder.forward = lambda *args, **kwargs: result
    try:
        return type(model).forward(model, inputs_embeds=hidden[None], use_cache=False).logits[0]
    finally:
        del decoder.forward

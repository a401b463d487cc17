"""Will it fit? What was planned is tried before the first step: a micro-batch is run, and the phases are added up."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from extras.plan import budget_of
from rl.data.types import Batch, take_rows
from rl.flags import spelled
from rl.model.logprobs import token_logprobs
from rl.model.sharding import own_part
from rl.ranks import Ranks

GIB = 2**30
FIRST = 2048  # tokens of the smaller one of two micro-batches by which larger ones are estimated
ADVICE = {  # what to do about a phase that does not fit
    "training": "lower the limit of tokens of a micro-batch (not below the longest sequence), or set "
    "--activation-checkpointing full",
    "generating": "lower --max-num-seqs or --gpu-memory-utilization",
    "scoring by --teacher-model": "let vllm serve the teacher, and give --teacher-url",
}
LESS = "or set --optimizer-offload, --param-offload or --lora-rank, or use more GPUs"


def rehearse(
    trained: dict[str, tuple[nn.Module, torch.optim.Optimizer | None]],
    ways: Sequence[Any],
    *,
    max_length: int,
    engine_memory: int,
    ranks: Ranks,
    offloaded: Sequence[str] = (),
    visiting: nn.Module | None = None,
) -> tuple[Any, str]:
    """Take the first of `ways` that fits, after forward and backward of the largest micro-batch that it can have.
    Nothing is learned. Small micro-batches tell beforehand whether a large one fits. All ranks must enter.

    The engine must be asleep, and what else stays on the device, such as a reference, must be there. Weights stay where
    they are. A way that recomputes more changes the models. moments are left to the caller.

    Args: trained, offloaded, visiting, as for `Run.begin`; the policy is "actor". ways, groups of memory flags, with
    the first of which `trained` was loaded; max_length, of a sequence; engine_memory, bytes that the engine takes when
    it wakes.
    Returns: the flags, and what a GPU's memory is needed for, in GiB, as a line of text.
    Raises: RuntimeError with the flags to change, if nothing fits.
    """
    policy, first, taken = trained["actor"][0], ways[0], ways[0]
    peak, engine_memory = partial(_peak, policy, ranks=ranks), _largest(engine_memory, ranks)
    needs = partial(
        by_phase, trained, first, engine_memory=engine_memory, ranks=ranks, offloaded=offloaded, visiting=visiting
    )
    total = -_largest(-torch.cuda.mem_get_info(ranks.device)[1], ranks)
    small, peaks = 0, []
    options = [x for x in ways if x.param_offload == first.param_offload]
    # A pass takes minutes if all weights and gradients cross the bus in it. One rank may just try the large one.
    tries_small = len(options) > 1 and not (first.param_offload and ranks.size == 1)
    for way in options:
        if way.activation_checkpointing != taken.activation_checkpointing:
            if taken.activation_checkpointing == "full":
                continue  # what is recomputed once stays so
            for model, _ in trained.values():
                recompute_layers(model)
            peaks = []
        taken, tokens = way, max(budget_of(way)[1] * ranks.sequence_size, max_length)
        if tries_small:
            if not peaks:  # none of these passes may be larger than what is tried
                small = max(1, min(max(max_length, FIRST), tokens // 2))
                peaks = [peak(n, min(max_length, small)) for n in (small, small, 2 * small)][1:]  # the first warms up
            micro_batch = peaks[0] + (peaks[1] - peaks[0]) * (tokens / small - 1)
            needed = needs(way, micro_batch)
            if max(needed.values()) > total:
                continue
        try:
            micro_batch = peak(tokens, max_length)
        except RuntimeError:
            # Other ranks would wait in the middle of their pass.
            if ranks.size > 1 or way is options[-1] or not forget_pass(policy):
                raise
            continue
        needed = needs(way, micro_batch)
        if max(needed.values()) <= total:
            break
    phase = max(needed, key=needed.get)
    plan = f"memory of a GPU with {total / GIB:.1f} GiB: " + ", ".join(f"{k} {x / GIB:.1f}" for k, x in needed.items())
    plan += f"; a micro-batch {micro_batch / GIB:.1f}, the engine {engine_memory / GIB:.1f}"
    if needed[phase] > total:
        raise RuntimeError(f"{plan}. {phase} does not fit: {ADVICE[phase]}, {LESS}")
    if taken is not first:
        plan += f". Other than planned: {_changes(first, taken)}"
    return taken, plan


def by_phase(
    trained: dict[str, tuple[nn.Module, torch.optim.Optimizer | None]],
    first: Any,
    way: Any,
    micro_batch: float,
    *,
    engine_memory: int,
    ranks: Ranks,
    offloaded: Sequence[str],
    visiting: nn.Module | None,
) -> dict[str, float]:
    """Bytes that a GPU needs in each phase, the most of all ranks, which must enter, if `way` is taken after `first`.

    Args: micro_batch, what a pass needs beside weights and gradients; others as for `rehearse`.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(ranks.device)
    here = {} if first.param_offload else trained
    learned = {name: [x for x in model.parameters() if x.requires_grad] for name, (model, _) in here.items()}
    moments = {name: 2 * _bytes(xs) for name, xs in learned.items()}  # of AdamW
    is_there = {name: bool(optimizer and optimizer.state) for name, (_, optimizer) in here.items()}
    stays = total - free - (0 if first.optimizer_offload else sum(x for name, x in moments.items() if is_there[name]))
    gradients, stepping = sum(moments.values()) / 2, sum(moments.values())
    if way.optimizer_offload:
        stepping, moments = max(2 * _bytes([x]) for xs in learned.values() for x in xs), dict.fromkeys(moments, 0)
    resting = stays + sum(moments.values())
    away = sum(_bytes(trained[name][0].parameters()) + moments[name] for name in offloaded)
    needs = {"training": max(resting + micro_batch, stays + stepping) + gradients}
    if engine_memory:
        needs["generating"] = resting + engine_memory - away
    if visiting is not None:
        needs["scoring by --teacher-model"] = resting + (0 if first.param_offload else _bytes(visiting.parameters()))
    return {phase: _largest(size, ranks) for phase, size in needs.items()}


def recompute_layers(model: nn.Module) -> None:
    """Let the backward pass recompute all of each decoder layer from now on, as --activation-checkpointing full."""
    for layer in model.modules():
        if isinstance(layer, FSDPModule) and layer is not model:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def forget_pass(model: nn.Module) -> bool:
    """Make a model usable again after a forward or backward pass, with a loss of 0, that has ended with an error.

    FSDP2 has to be told. Otherwise it would wait for the end of that pass for good, and leave out gradients of later
    passes without an error. Gradients of weights that are whole on this rank stay in FSDP2, so the loss has to be 0.
    Returns whether this worked: older versions cannot be told.
    """
    model.zero_grad(set_to_none=True)
    if not isinstance(model, FSDPModule):
        return True
    if not hasattr(model, "reset_iter_state"):
        return False
    model.reset_iter_state()
    return True


def _changes(first: Any, taken: Any) -> str:
    """The flags of `taken` that differ from those of `first`."""
    return " ".join(f"{spelled(name)} {x}" for name, x in vars(taken).items() if x != vars(first)[name])


def _largest(x: float, ranks: Ranks) -> float:
    """The largest of the numbers of all ranks, which must enter."""
    return ranks.all_reduce_max(torch.tensor(float(x), dtype=torch.float64)).item()


def _peak(policy: nn.Module, tokens: int, max_length: int, *, ranks: Ranks) -> float:
    """Bytes that forward and backward of a micro-batch need at most, beside weights and gradients, on any rank.

    Raises RuntimeError if they do not fit.
    """
    batch = largest_micro_batch(tokens, max_length, policy.config.get_text_config().vocab_size)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(ranks.device)
    # From the second micro-batch on, a step's gradients are there, which take memory unless they are on the host.
    for parameter in () if getattr(policy, "stays_on_host", False) else policy.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # counts what a sleeping engine has given back, so only differences tell
    try:
        logp, entropy = token_logprobs(policy, take_rows(batch, range(len(batch.lengths)), ranks.device))
        (0.0 * (logp + entropy).sum()).backward()
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            f"a micro-batch of {tokens} tokens does not fit in the {free / GIB:.1f} GiB that were free of this GPU's "
            f"{total / GIB:.1f} (nvidia-smi says who else uses it): {ADVICE['training']}, {LESS}"
        ) from error
    policy.zero_grad(set_to_none=True)
    return _largest(torch.cuda.max_memory_allocated() - before, ranks)


def _bytes(xs: Iterable[torch.Tensor]) -> int:
    """What tensors take on this rank."""
    return sum(own_part(x).nbytes for x in xs)


def largest_micro_batch(max_tokens: int, max_length: int, vocabulary: int) -> Batch:
    """Sequences of `max_length` tokens, all but the first sampled, as many as `max_tokens` hold but at least one, and a
    shorter one of what is left. Neighbors have nothing in common, which would be computed once. The tokens are drawn
    from the vocabulary, always the same ones: equal tokens would all be sent to the same few experts.
    """
    count, rest = divmod(max(max_tokens, max_length), max_length)
    lengths = torch.tensor([max_length] * count + [rest] * (rest > 1))
    position = torch.arange(max_length)
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(vocabulary, (len(lengths), max_length), generator=generator)
    input_ids[:, 0] = torch.arange(len(lengths)) % 2
    sampled = ((position > 0) & (position < lengths[:, None])).float()
    return Batch(input_ids, lengths, response_mask=sampled, rollout_logp=torch.zeros_like(sampled))

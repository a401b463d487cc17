"""Will it fit? The largest micro-batch is rehearsed before the first rollout, and the memory of a run is laid out."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from rl.data.types import Batch, take_rows
from rl.model.logprobs import token_logprobs
from rl.model.sharding import own_part
from rl.ranks import Ranks
from rl.run.arguments import MemoryRL

GIB = 2**30


ADVICE = {  # what to lower for a phase that does not fit
    "training": "--ppo-max-token-len-per-gpu (not below --max-prompt-length + --max-response-length)",
    "generating": "--max-num-seqs or --gpu-memory-utilization",
    "scoring by --teacher-model": "--max-num-seqs, or let vllm serve the teacher, and give --teacher-url",
}
LESS = "or set --activation-checkpointing full, --optimizer-offload, --param-offload or --lora-rank, or use more GPUs"


def rehearse(
    trained: dict[str, tuple[nn.Module, torch.optim.Optimizer | None]],
    memory: MemoryRL,
    *,
    max_length: int,
    engine_memory: int,
    ranks: Ranks,
    offloaded: Sequence[str] = (),
    visiting: nn.Module | None = None,
) -> str:
    """Run forward and backward of the largest micro-batch that can occur; nothing is learned. All ranks must enter.

    The engine must be asleep, and what else stays on the device, such as a reference, must be there.

    Args: trained, offloaded, visiting, as for `Run.resume`; the policy is "actor". max_length, of a sequence;
    engine_memory, bytes that the engine takes when it wakes.
    Returns: what a GPU's memory is needed for, in GiB, as a line of text; "" on a CPU.
    Raises: RuntimeError with the flags to change, if the micro-batch or the optimizer's state does not fit.
    """
    if ranks.device.type != "cuda":
        return ""
    max_tokens, policy = memory.ppo_max_token_len_per_gpu, trained["actor"][0]
    batch = largest_micro_batch(max_tokens, max_length, policy.config.get_text_config().vocab_size)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(ranks.device)
    try:
        micro_batch = _peak(policy, take_rows(batch, range(len(batch.lengths)), ranks.device))
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            f"a micro-batch of {max_tokens} tokens does not fit in the {free / GIB:.1f} GiB that were free of this "
            f"GPU's {total / GIB:.1f} (nvidia-smi says who else uses it): lower {ADVICE['training']}, {LESS}"
        ) from error
    torch.cuda.empty_cache()
    in_use = total - torch.cuda.mem_get_info(ranks.device)[0]
    trains_here = {} if memory.param_offload else trained
    learned = {name: [x for x in model.parameters() if x.requires_grad] for name, (model, _) in trains_here.items()}
    # Bytes of AdamW's moments on the device, between steps and in a step.
    pieces = [2 * _bytes([x]) for xs in learned.values() for x in xs]
    moments = {name: 0 if memory.optimizer_offload else 2 * _bytes(xs) for name, xs in learned.items()}
    stepping = max(pieces) if memory.optimizer_offload else sum(pieces)
    stays = in_use - sum(x for name, x in moments.items() if trained[name][1] and trained[name][1].state)
    resting = stays + sum(moments.values())
    away = sum(_bytes(trained[name][0].parameters()) + moments[name] for name in offloaded)
    scoring = [] if visiting is None or memory.param_offload else visiting.parameters()
    needed = {
        "training": max(resting + micro_batch, stays + stepping) + sum(pieces) / 2,
        "generating": resting + engine_memory - away,
        "scoring by --teacher-model": resting + _bytes(scoring),
    }
    plan = f"memory of a GPU with {total / GIB:.1f} GiB: " + ", ".join(f"{k} {x / GIB:.1f}" for k, x in needed.items())
    plan += f"; a micro-batch {micro_batch / GIB:.1f}, the engine {engine_memory / GIB:.1f}"
    for phase, size in needed.items():
        if size > total:
            raise RuntimeError(f"{plan}. {phase} does not fit: lower {ADVICE[phase]}, {LESS}")
    return plan


def _peak(policy: nn.Module, batch: Batch) -> int:
    """Bytes that forward and backward of a batch need at most, beside weights and gradients."""
    for parameter in policy.parameters():  # from the second micro-batch on, a step's gradients are there
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # counts what a sleeping engine has given back, so only differences tell
    logp, entropy = token_logprobs(policy, batch)
    (0.0 * (logp + entropy).sum()).backward()
    policy.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated() - before


def _bytes(xs: Iterable[torch.Tensor]) -> int:
    """What tensors take on this rank."""
    return sum(own_part(x).nbytes for x in xs)


def largest_micro_batch(max_tokens: int, max_length: int, vocabulary: int) -> Batch:
    """Sequences of `max_length` tokens, all but the first sampled, as many as `max_tokens` hold but at least one, and a
    shorter one of what is left. Neighbours have nothing in common, which would be computed once. The tokens are drawn
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

"""Will it fit? The largest micro-batch is rehearsed before the first rollout, and the memory of a run is laid out."""

from collections.abc import Sequence

import torch
from torch import nn

from rl.data.types import Batch, take_rows
from rl.model.logprobs import token_logprobs
from rl.model.sharding import moment_bytes_in_step, own_bytes
from rl.ranks import Ranks
from rl.run.arguments import MemoryRL

GIB = 2**30


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
    moments_away, all_away = memory.optimizer_offload, memory.param_offload
    max_tokens, policy = memory.ppo_max_token_len_per_gpu, trained["actor"][0]
    given = {
        "--optimizer-offload": moments_away or all_away,
        "--param-offload": all_away,
        "--lora-rank": hasattr(policy, "lora"),
    }
    less = "".join(f"set {flag}, or " for flag, is_given in given.items() if not is_given) + "use more GPUs"
    advice = (
        "lower --ppo-max-token-len-per-gpu (not below --max-prompt-length + --max-response-length), or set "
        f"--activation-checkpointing full, or {less}"
    )
    batch = largest_micro_batch(max_tokens, max_length, policy.config.get_text_config().vocab_size)
    torch.cuda.empty_cache()
    (free, total), reserved = torch.cuda.mem_get_info(ranks.device), torch.cuda.memory_reserved()
    try:
        for parameter in policy.parameters():  # from the second micro-batch on, a step's gradients are there
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()  # counts what a sleeping engine has given back, so only differences tell
        logp, entropy = token_logprobs(policy, take_rows(batch, range(len(batch.lengths)), ranks.device))
        (0.0 * (logp + entropy).sum()).backward()
    except torch.OutOfMemoryError as error:
        taken = torch.cuda.memory_reserved() - reserved
        raise RuntimeError(
            f"a micro-batch of {max_tokens} tokens does not fit: it found {free / GIB:.1f} GiB of this GPU's "
            f"{total / GIB:.1f} free, and no more after {taken / GIB:.1f} (nvidia-smi says who else uses it): {advice}"
        ) from error
    here = (lambda xs: 0) if all_away else own_bytes
    learning = {name: [p for p in module.parameters() if p.requires_grad] for name, (module, _) in trained.items()}
    weights = {name: here(module.parameters()) for name, (module, _) in trained.items()}
    gradients = sum(map(here, learning.values()))
    moments = {name: 0 if moments_away else here(_moments(optimizer)) for name, (_, optimizer) in trained.items()}
    # AdamW makes its two moments in its first step, which a resumed critic may have behind it and the actor not.
    adamw = {name: 0 if moments_away else moments[name] or 2 * here(learning[name]) for name in trained}
    resting = stepping = sum(adamw.values())  # moments between steps, and in one
    if moments_away and not all_away:
        stepping = max(map(moment_bytes_in_step, learning.values()))  # one model steps after the other
    micro_batch = torch.cuda.max_memory_allocated() - before
    policy.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(ranks.device)
    stays = total - free - sum(moments.values())  # weights, the sleeping engine, a reference model, CUDA itself
    all_weights, others = sum(weights.values()), stays - sum(weights.values())
    needed = stays + gradients + max(micro_batch + resting, stepping)  # in a pass, in a step
    generating = stays + resting + engine_memory - sum(weights[name] + adamw[name] for name in offloaded)
    scoring = stays + resting + (0 if visiting is None else here(visiting.parameters()))
    plan = (
        f"memory of a GPU, GiB: weights {all_weights / GIB:.1f}, AdamW {stepping / GIB:.1f}"
        f"{' at a time' if moments_away else ''}, gradients {gradients / GIB:.1f}, a micro-batch "
        f"{micro_batch / GIB:.1f}, others {others / GIB:.1f}: {needed / GIB:.1f} of {total / GIB:.1f} while training, "
        f"{generating / GIB:.1f} while generating, of which the engine gives back {engine_memory / GIB:.1f}"
    )
    if needed > total:
        raise RuntimeError(f"{plan}. That does not fit: {advice}")
    if generating > total:
        raise RuntimeError(f"{plan}. That does not fit: lower --max-num-seqs or --gpu-memory-utilization, or {less}")
    if scoring > total:
        raise RuntimeError(
            f"{plan}, {scoring / GIB:.1f} while --teacher-model scores. That does not fit: let vllm serve the teacher, "
            f"and give --teacher-url, or {less}"
        )
    return plan


def _moments(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    states = optimizer.state.values() if optimizer else ()
    return [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]


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

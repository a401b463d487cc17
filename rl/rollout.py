"""From prompts to samples, and the proof that the engine that sampled them holds the policy's weights."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from rl import stop
from rl.batching import collate
from rl.fsdp import Dist, all_reduce_sum
from rl.logprobs import token_logprobs
from rl.types import Completion, Sample, Sampling, select


def fold(*numbers: int) -> int:
    """A 31-bit seed that depends on every number and on their order: the seed of (run, step, rank, ...)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & (2**64 - 1))) * 0xBF58476D1CE4E5B9 % 2**64
        state ^= state >> 29
    return state % 2**31


def check_context(model: str, tokens: int, flags: str = "--max-prompt-length + --max-response-length") -> None:
    """Raise ValueError if the model has fewer positions than the tokens that `flags` allow a sequence to have."""
    positions = AutoConfig.from_pretrained(model).to_dict().get("max_position_embeddings")
    if positions is not None and tokens > positions:
        raise ValueError(f"{flags} = {tokens} tokens, but {model} has {positions} positions; lower it")


def stop_token_ids(model: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a response: the end-of-sequence ids of the tokenizer, the config and the generation config.

    They often differ: one token ends the turns of an instruction-tuned model, another the documents of its base model.
    """
    found = [tokenizer.eos_token_id, AutoConfig.from_pretrained(model).eos_token_id]
    try:
        found.append(GenerationConfig.from_pretrained(model).eos_token_id)
    except OSError:  # the model comes without one
        pass
    ids = [i for ids in found for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
    return tuple(dict.fromkeys(ids))


def sample_groups(
    backend: ModuleType,
    engine: Any,
    rows: Sequence[dict],
    sampling: Sampling,
    *,
    seed: int,
    on_group: Callable[[dict, list[Sample]], None] = lambda row, samples: None,
) -> list[Sample]:
    """`sampling.n` samples for each row (a dict with `prompt_ids` and `row_index`), groups side by side in the order of
    the rows.

    `on_group(row, samples)` is called for each row when its samples are complete, while others are still sampled.
    Samples are missing if the run was asked to stop meanwhile. Raises RuntimeError naming the row if the engine
    returns anything but `n` responses with a finite log-prob for every token.
    """
    groups: dict[int, list[Sample]] = {}

    def finish(i: int, completions: Sequence[Completion]) -> None:
        prompt_ids, row_index = np.asarray(rows[i]["prompt_ids"], np.int32), rows[i]["row_index"]
        if len(completions) != sampling.n:
            raise RuntimeError(f"the engine returned {len(completions)} responses to row {row_index}, not {sampling.n}")
        groups[i] = [Sample(prompt_ids, c.token_ids, np.ones(len(c.token_ids)), *c[1:], row_index) for c in completions]
        for sample in groups[i]:
            ids, logprobs = sample.response_ids, sample.rollout_logprobs
            if len(ids) != len(logprobs) or not np.isfinite(logprobs).all():
                raise RuntimeError(
                    f"the engine returned {len(ids)} tokens and {len(logprobs)} log-probs for a response to row "
                    f"{row_index}, or log-probs that are not finite: {logprobs[:5].tolist()} ..."
                )
        on_group(rows[i], groups[i])

    backend.generate(engine, [row["prompt_ids"] for row in rows], sampling, seed=seed, on_group=finish)
    if len(groups) < len(rows) and not stop.requested():
        lost = next(row["row_index"] for i, row in enumerate(rows) if i not in groups)
        raise RuntimeError(f"the engine returned nothing for {len(rows) - len(groups)} prompts, row {lost} among them")
    return [sample for i in sorted(groups) for sample in groups[i]]


@torch.no_grad()
def verify_engine(
    policy: nn.Module, samples: Sequence[Sample], *, temperature: float, limit: float, d: Dist, num_probe: int = 4
) -> float:
    """Score a few fresh samples of every rank with the trainer and compare with the engine's own log-probs.

    Returns the mean absolute difference over all probed tokens of all ranks, and raises RuntimeError on every rank if
    it exceeds `limit` or is not finite: weights that did not reach the engine, a different temperature, a broken
    kernel. All ranks must enter.
    """
    probe = list(samples[:: max(1, len(samples) // num_probe)])[:num_probe]  # spread over the prompts
    batch = collate(probe or [Sample([0], [0], [0], [0.0], "stop", 0)], pad_id=0)
    batch = select(batch, range(len(batch.lengths)), d.device)
    logp, _ = token_logprobs(policy, batch, temperature=temperature)
    gap = (logp - batch.rollout_logp).abs() * batch.response_mask
    total, count = all_reduce_sum(torch.stack([gap.sum(), batch.response_mask.sum()]).double()).tolist()
    mean = total / max(count, 1)
    if not mean <= limit:
        raise RuntimeError(
            "the rollout engine does not hold the policy's weights: engine and trainer log-probs differ by "
            f"{mean:.2e} on average over {count:.0f} tokens, more than --max-logprob-gap {limit:.0e}. "
            "Weights were not pushed completely, or numerics differ."
        )
    return mean

"""From rows to groups of samples: `sample_groups`."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rl.console import progress
from rl.data.template import stop_token_ids
from rl.data.types import Sample, Sampling
from rl.sampling.engines.base import Engine
from rl.sampling.flags import Decoding
from rl.sampling.loop import Loop, Partner


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global random generators that engines draw from, and restore them afterwards.

    vLLM's newer sampler on the GPU takes its seeds from numpy. Ranks that share an engine must give the same seed.
    (Seeds of requests would cost vLLM's older sampler one kernel launch per sequence and token.)
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), contextlib.ExitStack() as stack:
        stack.callback(np.random.set_state, np.random.get_state())
        torch.manual_seed(seed)
        np.random.seed(seed)
        yield


def sampling_settings(
    decoding: Decoding, model: str, tokenizer: PreTrainedTokenizerBase, *, n: int, max_tokens: int
) -> Sampling:
    """How an engine samples n responses to each prompt. They end with any token that ends a turn of the model."""
    stops = stop_token_ids(model, tokenizer)
    return Sampling(n, decoding.temperature, decoding.top_p, decoding.top_k, decoding.min_p, max_tokens, stops)


def sample_groups(
    engine: Engine,
    rows: Sequence[dict],
    sampling: Sampling | Sequence[Sampling],
    on_group: Callable[[dict, list[Sample]], object] = lambda row, samples: None,
    partner: Partner | None = None,
    *,
    seed: int,
) -> list[Sample]:
    """`sampling.n` samples for each row (a dict with `prompt_ids` and `row_index`).

    Args:
        rows: this rank's prompts; other ranks may have more or fewer, or none.
        sampling: of all rows, or one for each of them.
        on_group: `on_group(row, samples)` is called for each row when its samples are complete, while others are still
            sampled, such as `Scorer.submit`.
        partner: which answers the policy, so that a sample may have several turns.
        seed: with the same seed, rows and weights the samples are the same. See `seeded`, and with a partner
            `Loop`.

    Returns: the samples, groups side by side in the order of the rows. They are incomplete if the run was asked to
    stop. Call `run.may_stop_after` then. Raises RuntimeError naming the row if the engine returns anything but each
    response once, with a finite log-prob for every token.
    """
    row_samplings = [sampling] * len(rows) if isinstance(sampling, Sampling) else sampling
    loop, groups = Loop(engine, partner, seed=seed), {}  # groups has samples by the place of their row
    with seeded(seed, engine.device):
        for i, (row, row_sampling) in enumerate(zip(rows, row_samplings, strict=True)):
            loop.start(i, row, row_sampling)
        for i, samples in progress("generate", loop.run(), total=len(rows)):
            groups[i] = samples
            on_group(rows[i], samples)
        if loop.is_open():  # the run was asked to stop
            loop.abandon()
    return [sample for i in range(len(rows)) for sample in groups.get(i, ())]

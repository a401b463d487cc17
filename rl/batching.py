"""From samples to tensors, and from a step's rows to micro-batches that every rank can run in lockstep."""

import bisect
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from rl.types import Batch, Sample


def collate(samples: Sequence[Sample], *, pad_id: int) -> Batch:
    """Samples -> right-padded Batch on the host: (B, T) with T the longest prompt + response.

    response_mask marks sampled tokens by position, never by id, so that `pad_id == eos_id` changes nothing:
    the EOS a policy sampled is trained on, the padding after it is not.
    """
    assert samples, "collate needs at least one sample"
    B, T = len(samples), max(s.num_tokens for s in samples)
    input_ids = np.full((B, T), pad_id, np.int64)
    response_mask, rollout_logp = np.zeros((B, T), np.float32), np.zeros((B, T), np.float32)
    for i, s in enumerate(samples):
        start, end = len(s.prompt_ids), s.num_tokens
        assert len(s.response_ids) == len(s.response_mask) == len(s.rollout_logprobs), (
            f"row {s.row_index}: {len(s.response_ids)} ids, {len(s.response_mask)} mask entries, "
            f"{len(s.rollout_logprobs)} log-probs"
        )
        input_ids[i, :start], input_ids[i, start:end] = s.prompt_ids, s.response_ids
        response_mask[i, start:end] = s.response_mask
        rollout_logp[i, start:end] = s.rollout_logprobs
    ids, mask, logp = map(torch.from_numpy, (input_ids, response_mask, rollout_logp))
    return Batch(ids, torch.tensor([s.num_tokens for s in samples]), mask, logp * mask)


def shared_prefix(batch: Batch) -> torch.Tensor:
    """How many tokens at its start each row has in common with the row above it: (B,) int64, 0 for the first row.

    For a response to the same prompt that is the prompt, and what both responses begin with. Under a causal mask the
    hidden states of these tokens are the same too, so `rl/logprobs.py` computes them once.
    """
    ids, T = batch.input_ids, batch.input_ids.shape[1]
    position = torch.arange(T, device=ids.device)
    both_real = position < torch.minimum(batch.lengths[1:], batch.lengths[:-1])[:, None]  # (B - 1, T)
    same = both_real & (ids[1:] == ids[:-1])
    return F.pad(position.where(~same, T).amin(1), (1, 0))


def plan_micro_batches(
    lengths: Sequence[int],
    rows: Sequence[int],
    *,
    world_size: int,
    max_tokens: int,
    shared: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Split the rows of one optimizer step over ranks and micro-batches: plan[rank][micro] is a list of rows.

    The rows, in their order, are cut into as few micro-batches of at most `max_tokens` as every rank can have equally
    many of, and so that the largest one is as small as possible; a row longer than `max_tokens` gets a micro-batch of
    its own. Neighbours, such as the responses to one prompt, so stay together but for a few. Ranks wait for each other
    in every micro-batch: those of about one size run side by side, and ranks with fewer are filled up with empty lists.
    A pure function of its arguments, so all ranks agree on the plan without talking.

    Args: shared, the `shared_prefix` of every row, tokens that cost nothing in the micro-batch of the row above it.

    Example: lengths [5, 4, 3, 2], rows [0, 1, 2, 3], max_tokens 5, world_size 1 -> [[[0], [2, 3], [1]]]; world_size 2
    -> [[[0], [2]], [[1], [3]]]; world_size 1, max_tokens 7, shared [0, 3, 2, 1] -> [[[0, 1], [2, 3]]].
    """
    shared = shared or [0] * len(lengths)

    def cut(limit: int) -> tuple[list[list[int]], list[int]]:
        """Micro-batches of at most `limit` tokens, each row in the last one if that has room, and their tokens."""
        micros, tokens = [], []
        for row in sorted(rows):
            more = lengths[row] - (shared[row] if micros and micros[-1][-1] == row - 1 else 0)
            if micros and tokens[-1] + more <= limit:
                micros[-1].append(row)
                tokens[-1] += more
            else:
                micros.append([row])
                tokens.append(lengths[row])
        return micros, tokens

    count = math.ceil(len(cut(max_tokens)[0]) / world_size)  # micro-batches of a rank
    # The smallest limit that makes no more, so that they are of about equal size: a larger one never makes more.
    limit = bisect.bisect_left(range(max_tokens), True, key=lambda limit: len(cut(limit)[0]) <= count * world_size)
    micros, tokens = cut(limit)
    largest_first = [micros[k] for k in sorted(range(len(micros)), key=lambda k: -tokens[k])]
    plan = [largest_first[rank::world_size] for rank in range(world_size)]
    return [own + [[] for _ in range(count - len(own))] for own in plan]


def plan_updates(
    lengths: Sequence[int],
    *,
    mini_batch_size: int,
    world_size: int,
    rank: int,
    max_tokens: int,
    shared: Sequence[int] | None = None,
) -> list[tuple[range, list[list[int]]]]:
    """Cut a step's rows into optimizer steps: one (rows, this rank's micro-batches) each, in the order of the rows.

    `mini_batch_size` counts rows; the last mini-batch may be smaller. See `plan_micro_batches`.
    """
    minis = [range(i, min(i + mini_batch_size, len(lengths))) for i in range(0, len(lengths), mini_batch_size)]
    planning = dict(world_size=world_size, max_tokens=max_tokens, shared=shared)
    return [(mini, plan_micro_batches(lengths, mini, **planning)[rank]) for mini in minis]

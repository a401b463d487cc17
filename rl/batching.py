"""From samples to tensors, and from a step's rows to micro-batches that every rank can run in lockstep."""

from collections.abc import Sequence

import torch

from rl.types import Batch, Sample


def collate(samples: Sequence[Sample], *, pad_id: int) -> Batch:
    """Samples -> right-padded Batch on the host: (B, T) with T the longest prompt + response.

    response_mask marks sampled tokens by position, never by id, so that `pad_id == eos_id` changes nothing:
    the EOS a policy sampled is trained on, the padding after it is not.
    """
    assert samples, "collate needs at least one sample"
    B, T = len(samples), max(s.num_tokens for s in samples)
    input_ids = torch.full((B, T), pad_id, dtype=torch.long)
    response_mask, rollout_logp = torch.zeros(B, T), torch.zeros(B, T)
    for i, s in enumerate(samples):
        start, end = len(s.prompt_ids), s.num_tokens
        assert len(s.response_ids) == len(s.response_mask) == len(s.rollout_logprobs), (
            f"row {s.row_index}: {len(s.response_ids)} ids, {len(s.response_mask)} mask entries, "
            f"{len(s.rollout_logprobs)} log-probs"
        )
        input_ids[i, :end] = torch.tensor(s.prompt_ids + s.response_ids)
        response_mask[i, start:end] = torch.tensor(s.response_mask, dtype=torch.float32)
        rollout_logp[i, start:end] = torch.tensor(s.rollout_logprobs, dtype=torch.float32)
    lengths = torch.tensor([s.num_tokens for s in samples])
    return Batch(input_ids, lengths, response_mask, rollout_logp * response_mask)


def plan_micro_batches(
    lengths: Sequence[int], rows: Sequence[int], *, world_size: int, max_tokens: int
) -> list[list[list[int]]]:
    """Split the rows of one optimizer step over ranks and micro-batches: plan[rank][micro] is a list of rows.

    Rows go, longest first, to the rank with the fewest tokens so far, and there into the first micro-batch with room
    for them (first-fit decreasing; a row longer than `max_tokens` gets a micro-batch of its own). Every rank gets the
    same number of micro-batches, because each one is a collective: ranks with fewer are filled up with empty lists. A
    pure function of its arguments, so all ranks agree on the plan without talking.

    Example: lengths [5, 4, 3, 2], rows [0, 1, 2, 3], world_size 2, max_tokens 5 -> [[[0], [3]], [[1], [2]]].
    """
    ordered = sorted(rows, key=lambda row: (-lengths[row], row))
    load = [0] * world_size
    bins: list[list[list[int]]] = [[] for _ in range(world_size)]
    room: list[list[int]] = [[] for _ in range(world_size)]
    for row in ordered:
        rank = load.index(min(load))
        load[rank] += lengths[row]
        fits = next((k for k, free in enumerate(room[rank]) if free >= lengths[row]), None)
        if fits is None:
            fits = len(bins[rank])
            bins[rank].append([])
            room[rank].append(max_tokens)
        bins[rank][fits].append(row)
        room[rank][fits] -= lengths[row]
    count = max(len(b) for b in bins)
    return [b + [[] for _ in range(count - len(b))] for b in bins]


def plan_updates(
    lengths: Sequence[int], *, mini_batch_size: int, world_size: int, rank: int, max_tokens: int
) -> list[tuple[range, list[list[int]]]]:
    """Cut a step's rows into optimizer steps: one (rows, this rank's micro-batches) each, in the order of the rows.

    `mini_batch_size` counts rows; the last mini-batch may be smaller. See `plan_micro_batches`.
    """
    minis = [range(i, min(i + mini_batch_size, len(lengths))) for i in range(0, len(lengths), mini_batch_size)]
    return [
        (mini, plan_micro_batches(lengths, mini, world_size=world_size, max_tokens=max_tokens)[rank]) for mini in minis
    ]

"""From samples to tensors, and from a step's rows to micro-batches that every rank can run in lockstep."""

import bisect
import itertools
import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from rl.data.types import Batch, Sample, unknown
from rl.ranks import Ranks


class Update(NamedTuple):
    """One optimizer step: its mini-batch, and this rank's share of it in micro-batches that fit into the memory."""

    rows: Sequence[int]  # of the mini-batch, among those of the step, ascending
    micro_batches: list[list[int]]  # this rank's rows. All ranks have equally many micro-batches.
    num_tokens: float  # of the mini-batch that are learned from, on all ranks
    num_seqs: float  # sequences with such tokens, also on all ranks
    rows_of_rank: list[list[int]]  # every data rank's rows, ascending


def collate(
    samples: Sequence[Sample], *, pad_id: int = 0, rows: Sequence[int] | None = None, width: int | None = None
) -> Batch:
    """Samples -> right-padded Batch on the host: (b, T) with T the longest prompt + response, or `width`.

    response_mask marks sampled tokens by position, never by id, so that `pad_id == eos_id` changes nothing.
    The EOS that a policy sampled is trained on, and the padding after it is not.

    Args: rows, the place of each sample among those of the step, ascending; by default the samples are the whole step.
    `share` is computed as if these samples were one update; `make_batch` replaces it by the right one.
    """
    assert samples or width, "collate needs at least one sample, or a width"
    B, T = len(samples), width or max(s.num_tokens for s in samples)
    ids, mask, logp = np.full((B, T), pad_id, np.int64), np.zeros((B, T), np.float32), np.zeros((B, T), np.float32)
    examples = {name: x for s in samples for name, x in s.columns.items()}  # of each column, for its shape and dtype
    columns = {name: np.full((B, T, *x.shape[1:]), unknown(x), x.dtype) for name, x in examples.items()}
    for i, s in enumerate(samples):
        sizes = [len(x) for x in (s.response_ids, s.response_mask, s.rollout_logprobs)]
        assert len(set(sizes)) == 1, f"row {s.row_index}: {sizes[0]} ids, {sizes[1]} mask entries, {sizes[2]} log-probs"
        start, end = len(s.prompt_ids), s.num_tokens
        ids[i, :start], ids[i, start:end] = s.prompt_ids, s.response_ids
        mask[i, start:end], logp[i, start:end] = s.response_mask, s.rollout_logprobs
        for name, x in s.columns.items():
            columns[name][i, :end] = x
    lengths = torch.tensor([s.num_tokens for s in samples], dtype=torch.long)
    return Batch(
        torch.from_numpy(ids),
        lengths,
        torch.from_numpy(mask),
        torch.from_numpy(logp * mask),
        rows=None if rows is None else torch.as_tensor(rows, dtype=torch.long),
        share=lengths / lengths.sum(),
        columns={name: torch.from_numpy(x) for name, x in columns.items()},
    )


def shared_prefix(batch: Batch) -> torch.Tensor:
    """How many tokens at its start each row has in common with the row above it: (B,) int64, 0 for the first row.

    Responses to one prompt have the prompt in common, and their own first tokens if these are equal. Under a causal
    mask the hidden states of such tokens are equal too, so `rl/model/logprobs.py` computes them once.
    """
    ids, T = batch.input_ids, batch.input_ids.shape[1]
    position = torch.arange(T, device=ids.device)
    both_real = position < torch.minimum(batch.lengths[1:], batch.lengths[:-1])[:, None]  # (B - 1, T)
    same = both_real & (ids[1:] == ids[:-1])
    # The first position that is not the same, or T if all are, is the number of tokens in common.
    return torch.nn.functional.pad(position.where(~same, T).amin(1), (1, 0))


def plan_update(
    lengths: Sequence[int],
    rows: Sequence[int] | None = None,
    *,
    max_tokens: int,
    ranks: Ranks | None = None,
    shared: Sequence[int] = (),
    learned: Sequence[int] = (),
    rows_per_unit: int = 1,
) -> Update:
    """Divide the rows of one optimizer step among the ranks, and those of each rank into micro-batches.

    The rows are cut, in their order, into micro-batches of at most `max_tokens`. A unit is `rows_per_unit` rows, mostly
    one, which stay together. A unit that is longer than `max_tokens` gets a micro-batch of its own.
    Every rank gets the same number of micro-batches, as few as possible, and the largest is as small as possible. Ranks
    wait for each other in every micro-batch, so those of similar size run at the same time. If there are not enough
    for all ranks, some ranks get empty lists at the end. This is a pure function of its arguments, so all ranks agree
    on the plan without talking.

    Args:
        lengths: tokens of every row that there is.
        max_tokens: on each of the ranks that train on the same rows. Together they hold as many times more.
        rows: those of this optimizer step; by default all.
        ranks: who shares the rows; by default this rank alone has them.
        shared: for every row how many tokens at its start the one before it among `rows` has too. They cost nothing in
            the micro-batch of that one. By default there are none.
        learned: tokens of every row that the loss counts, for `num_tokens` and `num_seqs`; by default all.
        rows_per_unit: how many rows, such as 2 of a pair, are never separated.

    Raises ValueError if the rows do not make up whole units.

    Example of lengths [5, 4, 3, 2]: with max_tokens 5 the micro-batches are [[0], [2, 3], [1]]. On two ranks they are
    [[0], [2]] and [[1], [3]]. With max_tokens 7 and shared [0, 3, 2, 1] they are [[0, 1], [2, 3]].
    """
    rank, size = (ranks.data_rank, ranks.data_size) if ranks else (0, 1)
    max_tokens *= ranks.sequence_size if ranks else 1
    rows, n = sorted(range(len(lengths)) if rows is None else rows), rows_per_unit
    shared, learned = shared or [0] * len(lengths), learned or lengths
    if len(rows) % n:
        raise ValueError(f"{len(rows)} rows are not a multiple of {n}, which belong together")
    units = [rows[start : start + n] for start in range(0, len(rows), n)]

    def cut(limit: int) -> tuple[list[list[int]], list[int]]:
        """Micro-batches of at most `limit` tokens, each unit in the last one if that has room, and their tokens."""
        micros, tokens = [], []
        for unit in units:
            more = sum(lengths[i] - shared[i] for i in unit)  # that it adds to the units before it
            if micros and tokens[-1] + more <= limit:
                micros[-1] += unit
                tokens[-1] += more
            else:
                micros.append([*unit])
                tokens.append(more + shared[unit[0]])
        return micros, tokens

    count = math.ceil(len(cut(max_tokens)[0]) / size)  # micro-batches of a rank
    # The smallest limit that makes no more micro-batches than that, so that they are about equally large. Bisection can
    # find it, since a larger limit never makes more micro-batches.
    limit = bisect.bisect_left(range(max_tokens), True, key=lambda limit: len(cut(limit)[0]) <= count * size)
    micros, tokens = cut(limit)
    largest_first = [micros[k] for k in sorted(range(len(micros)), key=lambda k: -tokens[k])]
    micro_batches = largest_first[rank::size]
    # These are different objects, since scripts ask which one is the last.
    micro_batches += [[] for _ in range(count - len(micro_batches))]
    rows_of_rank = [sorted(itertools.chain(*largest_first[other::size])) for other in range(size)]
    num_tokens, num_seqs = sum(learned[i] for i in rows), sum(learned[i] > 0 for i in rows)
    return Update(rows, micro_batches, float(num_tokens), float(num_seqs), rows_of_rank)


def make_batch(
    responses: Sequence[Sample],
    trainable: torch.Tensor | None = None,
    *,
    mini_batch_size: int,
    max_tokens: int,
    ranks: Ranks,
    rows_per_unit: int = 1,
    order: Sequence[int] | None = None,
    version: int | None = None,
) -> tuple[Batch, list[Update]]:
    """Plan a step's optimizer steps, and send the tokens of every response to the rank that trains on it.

    Args:
        responses: of the step, the same list on all ranks (see `gather_responses`). Neighbors that share a prompt and
            are in the same mini-batch cost less. The rows of a response that has several are in one mini-batch. Each
            of its sampled tokens counts once in `num_tokens`, and the response counts once in `num_seqs`.
        trainable: (B,) bool, whether a response is learned from; by default every response that has a score. One that
            is not keeps its place, and its mask is zero.
        mini_batch_size: responses of an optimizer step; the last one may have fewer.
        max_tokens, rows_per_unit: as for `plan_update`.
        order: all places in `responses`, in the order in which the mini-batches take them; by default as they are.
            Only for one row per unit, since units are neighbors in `responses`.
        version: the number of the newest weights, from which the ages of tokens follow; None if nobody asks.

    Returns: the batch of this rank's rows, padded to the longest prompt + response of any rank, and the updates. All
    ranks must enter.
    """
    if trainable is None:
        trainable = torch.tensor([r.score.value is not None for r in responses], dtype=torch.bool)
    assert order is None or rows_per_unit == 1, "another order would tear units apart"
    order = range(len(responses)) if order is None else order
    owners = torch.tensor([i for i, r in enumerate(responses) for _ in r.as_rows], dtype=torch.long)
    ends = np.cumsum([len(r.as_rows) for r in responses]).tolist()  # of the rows of each response
    chunks = [order[start : start + mini_batch_size] for start in range(0, len(order), mini_batch_size)]
    minis = [sorted(x for i in chunk for x in range(ends[i] - len(responses[i].as_rows), ends[i])) for chunk in chunks]
    responses, trainable = [row for r in responses for row in r.as_rows], trainable[owners]
    lengths, shared = [r.num_tokens for r in responses], _shared(responses, minis, ranks)
    learned = [r.num_sampled * int(x) for r, x in zip(responses, trainable.tolist(), strict=True)]
    plan = partial(plan_update, lengths, max_tokens=max_tokens, ranks=ranks, shared=shared, learned=learned)
    num_learned = torch.zeros(len(ends)).index_add(0, owners, torch.tensor(learned, dtype=torch.float))[owners]
    num_seqs = [float(len({int(owners[i]) for i in rows if learned[i]})) for rows in minis]
    plans = zip((plan(rows, rows_per_unit=rows_per_unit) for rows in minis), num_seqs, strict=True)
    updates = [update._replace(num_seqs=n) for update, n in plans]
    rows_of_rank = [sorted(i for u in updates for i in u.rows_of_rank[rank]) for rank in range(ranks.data_size)]
    samples = _deliver(responses, rows_of_rank, ranks)
    batch = collate(samples, rows=rows_of_rank[ranks.data_rank], width=max(lengths, default=1))
    batch = replace(batch, response_mask=batch.response_mask * trainable[batch.rows].view(-1, 1))
    totals = torch.zeros(len(responses))  # for each row the tokens of its update
    for rows in minis:
        totals[rows] = float(sum(lengths[i] for i in rows))
    columns = dict(batch.columns)
    versions = columns.pop("versions", torch.full_like(batch.input_ids, torch.iinfo(torch.int32).max))
    if version is not None:  # tokens of unknown versions count as those that were not sampled
        columns["ages"] = torch.where(versions <= version, version - versions, -1)
    share, num_learned = batch.lengths / totals[batch.rows], num_learned[batch.rows]
    whole = replace(batch, share=share, columns=columns, responses=owners[batch.rows], num_learned=num_learned)
    return whole, updates


def _shared(responses: Sequence[Sample], minis: Sequence[Sequence[int]], ranks: Ranks) -> list[int]:
    """For each response the tokens at its start that the one before it in its mini-batch has too: at least those of
    their prompts. None count if a model of this run computes them for each.
    """
    shared = [0] * len(responses)
    pairs = [] if ranks.not_sharing else [pair for rows in minis for pair in itertools.pairwise(rows)]
    for i, j in pairs:
        above, here = responses[i], responses[j]
        follows = (above.rank, above.number + 1, above.row_index) == (here.rank, here.number, here.row_index)
        shared[j] = here.shared if follows else common_prefix(above.prompt_ids, here.prompt_ids)
    return shared


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many entries two arrays begin with alike."""
    n = min(len(a), len(b))
    return int(np.cumprod(a[:n] == b[:n]).sum())  # the product is 1 as long as all entries so far are alike


def _deliver(responses: Sequence[Sample], rows_of_rank: list[list[int]], ranks: Ranks) -> list[Sample]:
    """The samples of this rank's rows. Each rank sends the tokens that others train on, and nothing else."""
    me, parcels = ranks.rank, []
    for rank in range(ranks.size):  # its parcel has what this rank has sampled and that rank trains on
        rows = rows_of_rank[rank // ranks.sequence_size]
        parcels.append(pickle.dumps([responses[i].tokens() for i in rows if responses[i].rank == me != rank]))
    received = [iter(pickle.loads(parcel)) for parcel in ranks.send(parcels)]
    mine = [responses[i] for i in rows_of_rank[ranks.data_rank]]
    return [s if s.rank == me else replace(s, **next(received[s.rank])) for s in mine]

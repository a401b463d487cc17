import itertools
import math
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers_data import plan_micro_batches, ranks_without_group, sample

from rl.data.batching import collate, plan_update
from rl.data.types import Batch, places, take_rows

EOS = 2


# --- samples ---


def test_samples_hold_arrays_and_come_from_other_ranks_as_they_went():
    s = sample([5, 150_000], [8, EOS, 9], [1, 0, 1], [-0.1, -7.0, -1e-30], row_index=3)
    for here in (s, pickle.loads(pickle.dumps(s))):
        assert [here.prompt_ids.tolist(), here.response_ids.tolist()] == [[5, 150_000], [8, EOS, 9]]
        assert here.response_mask.tolist() == [1, 0, 1]
        assert here.rollout_logprobs.tolist() == np.array([-0.1, -7.0, -1e-30], np.float32).tolist()
        assert [x.dtype for x in list(vars(here).values())[:4]] == [np.int32, np.int32, np.int8, np.float32]
        assert (here.finish_reason, here.row_index, here.num_tokens) == ("stop", 3, 5)
    ids = np.array([1, 2], np.int32)
    assert sample(ids, [3]).prompt_ids is ids  # nothing is copied that need not be


def test_a_long_response_is_counted_as_such():
    assert sample([1], range(1000)).response_mask.sum() == 1000  # beyond what int8 holds


# --- collate ---


def test_collate_places_tokens_mask_and_logprobs_by_position():
    batch = collate([sample([5, 6, 7], [8, EOS]), sample([9], [10, 11, 12, EOS])], pad_id=0)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, EOS], [9, 10, 11, 12, EOS]]
    assert batch.response_mask.tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]
    assert batch.rollout_logp.tolist() == [[0, 0, 0, -0.5, -1.0], [0, -0.5, -1.0, -1.5, -2.0]]
    assert batch.lengths.tolist() == [5, 5]
    dtypes = [batch.input_ids.dtype, batch.lengths.dtype, batch.response_mask.dtype, batch.rollout_logp.dtype]
    assert dtypes == [torch.int64, torch.int64, torch.float32, torch.float32]
    assert [batch.old_logp, batch.ref_logp, batch.advantages, batch.values, batch.returns] == [None] * 5


def test_collate_keeps_the_sampled_eos_when_the_pad_id_is_the_eos_id():
    batch = collate([sample([EOS, 5], [6, EOS]), sample([7], [8, 9, 10, 11, 12])], pad_id=EOS)
    assert batch.input_ids[0].tolist() == [EOS, 5, 6, EOS, EOS, EOS]
    assert batch.response_mask[0].tolist() == [0, 0, 1, 1, 0, 0]
    assert batch.lengths.tolist() == [4, 6]


def test_collate_masks_tool_output_and_its_logprobs():
    batch = collate([sample([5], [6, 7, 8, 9], [1, 0, 0, 1], [-1.0, -7.0, -8.0, -2.0])], pad_id=0)
    assert batch.response_mask.tolist() == [[0, 1, 0, 0, 1]]
    assert batch.rollout_logp.tolist() == [[0, -1.0, 0, 0, -2.0]]


def test_collate_refuses_samples_that_do_not_line_up():
    with pytest.raises(AssertionError, match="row 7: 2 ids.* 1 log-probs"):
        collate([sample([5], [6, 7], rollout_logprobs=[-1.0], row_index=7)], pad_id=0)
    with pytest.raises(AssertionError, match="at least one"):
        collate([], pad_id=0)


def test_collate_of_a_ranks_own_rows():
    samples = [sample([5, 6], [7, EOS]), sample([8], [9])]
    batch = collate(samples, pad_id=3, rows=[2, 7], width=6)
    assert batch.input_ids.tolist() == [[5, 6, 7, EOS, 3, 3], [8, 9, 3, 3, 3, 3]]
    assert batch.response_mask.tolist() == [[0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert batch.rows.tolist() == [2, 7] and batch.rows.dtype == torch.int64
    assert collate(samples, pad_id=3).rows is None


def test_collate_of_a_rank_without_rows():
    batch = collate([], pad_id=3, rows=[], width=4)
    assert batch.input_ids.shape == batch.response_mask.shape == batch.rollout_logp.shape == (0, 4)
    assert batch.lengths.shape == batch.rows.shape == (0,)
    assert batch.rows.dtype == batch.lengths.dtype == torch.int64
    empty = take_rows(batch, [])  # with which the rank takes part in what all ranks compute
    assert empty.input_ids.shape == (1, 2) and empty.lengths.tolist() == [2] and empty.response_mask.sum() == 0


# --- select ---


def test_select_takes_rows_in_order_and_cuts_to_the_longest():
    samples = [sample([5, 6], [7, 8, 9, 10]), sample([11], [12]), sample([13, 14], [15])]
    full = collate(samples, pad_id=0)
    advantages = torch.arange(18.0).view(3, 6)
    part = take_rows(replace(full, advantages=advantages), [2, 1])
    assert part.input_ids.tolist() == [[13, 14, 15], [11, 12, 0]]
    assert part.lengths.tolist() == [3, 2]
    assert part.response_mask.tolist() == [[0, 0, 1], [0, 1, 0]]
    assert part.rollout_logp.tolist() == [[0, 0, -0.5], [0, -0.5, 0]]
    assert part.advantages.tolist() == [[12, 13, 14], [6, 7, 8]]
    assert part.old_logp is None
    assert full.input_ids.shape == (3, 6)


def test_select_of_no_rows_is_one_row_that_weighs_nothing():
    full = collate([sample([11], [12]), sample([5, 6], [7, 8, 9])], pad_id=EOS)
    empty = take_rows(replace(full, old_logp=full.rollout_logp), [])
    assert empty.input_ids.shape == (1, 2) and empty.lengths.tolist() == [2]
    for name in ("response_mask", "rollout_logp", "old_logp"):
        assert getattr(empty, name).tolist() == [[0, 0]], name


def test_select_works_with_a_range_and_a_device():
    full = collate([sample([5], [6]), sample([7], [8])], pad_id=0)
    assert isinstance(take_rows(full, range(2), "cpu"), Batch)
    assert take_rows(full, range(1, 2), torch.device("cpu")).input_ids.tolist() == [[7, 8]]


def test_select_takes_rows_by_the_names_that_the_batch_has_for_them():
    samples = [sample([5, 6], [7, 8, 9, 10]), sample([11], [12]), sample([13, 14], [15])]
    batch = collate(samples, pad_id=0, rows=[1, 4, 9])
    part = take_rows(replace(batch, advantages=torch.arange(18.0).view(3, 6)), [9, 4])
    assert part.input_ids.tolist() == [[13, 14, 15], [11, 12, 0]]
    assert part.advantages.tolist() == [[12, 13, 14], [6, 7, 8]]
    assert part.rows.tolist() == [9, 4]
    assert places(batch, [9, 1]).tolist() == [2, 0]
    assert places(replace(batch, rows=None), [2, 0]).tolist() == [2, 0]
    for missing in ([0], [4, 5], [10]):
        with pytest.raises(AssertionError, match="rows"):
            places(batch, missing)


# --- plan_update ---


def test_plan_matches_the_examples():
    assert plan_micro_batches([5, 4, 3, 2], range(4), world_size=1, max_tokens=5) == [[[0], [2, 3], [1]]]
    assert plan_micro_batches([5, 4, 3, 2], range(4), world_size=2, max_tokens=5) == [[[0], [2]], [[1], [3]]]
    shared = [0, 3, 2, 1]
    assert plan_micro_batches([5, 4, 3, 2], range(4), world_size=1, max_tokens=7, shared=shared) == [[[0, 1], [2, 3]]]


def test_plan_by_hand():
    lengths = [4, 9, 3, 6, 1, 2]
    # at most 10 tokens: 4 | 9 | 3 6 1 | 2, so four micro-batches; with four, 9 tokens are enough: 4 | 9 | 3 6 | 1 2
    assert plan_micro_batches(lengths, range(6), world_size=1, max_tokens=10) == [[[1], [2, 3], [0], [4, 5]]]
    assert plan_micro_batches(lengths, range(6), world_size=2, max_tokens=10) == [[[1], [0]], [[2, 3], [4, 5]]]


def test_plan_takes_only_the_rows_it_is_given():
    assert plan_micro_batches([9, 5, 9, 4, 9], [3, 1], world_size=1, max_tokens=9) == [[[1, 3]]]


def test_plan_gives_a_row_longer_than_the_budget_a_micro_batch_of_its_own():
    assert plan_micro_batches([20, 3, 2], range(3), world_size=1, max_tokens=5) == [[[0], [1, 2]]]


def test_plan_without_rows_has_no_micro_batches():
    assert plan_micro_batches([3, 4], [], world_size=3, max_tokens=8) == [[], [], []]


def test_plan_fills_ranks_without_work_with_empty_micro_batches():
    assert plan_micro_batches([7], [0], world_size=3, max_tokens=8) == [[[0]], [[]], [[]]]
    assert plan_micro_batches([5, 4, 4], range(3), world_size=2, max_tokens=5) == [[[0], [2]], [[1], []]]


def tokens_of(micro, lengths, shared):
    """Tokens of a micro-batch, what a row shares with the one before it counted once."""
    return sum(lengths[row] - (shared[row] if i else 0) for i, row in enumerate(micro))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("max_tokens", [16, 40, 1000])
def test_plan_holds_its_promises_on_random_lengths(world_size, max_tokens):
    rng = random.Random(world_size * max_tokens)
    for _ in range(50):
        lengths = [rng.randint(1, 24) for _ in range(rng.randint(1, 60))]
        shared = [0] + [rng.choice([0, rng.randint(0, min(pair))]) for pair in itertools.pairwise(lengths)]
        rows = rng.sample(range(len(lengths)), rng.randint(0, len(lengths)))
        options = dict(world_size=world_size, max_tokens=max_tokens, shared=shared)
        plan = plan_micro_batches(lengths, rows, **options)
        assert len(plan) == world_size and len({len(rank) for rank in plan}) == 1
        dealt = [micro for turn in zip(*plan, strict=True) for micro in turn]
        assert sorted(itertools.chain(*dealt)) == sorted(rows)
        assert list(itertools.chain(*sorted(dealt))) == sorted(rows)  # cut in the order of the rows, never regrouped
        sizes = [tokens_of(micro, lengths, shared) for micro in dealt]
        assert all(size <= max_tokens for size, micro in zip(sizes, dealt, strict=True) if len(micro) > 1)
        assert sizes == sorted(sizes, reverse=True)  # so that those of one turn are of about one size
        assert plan_micro_batches(lengths, rng.sample(rows, len(rows)), **options) == plan


def test_the_largest_micro_batch_is_as_small_as_possible():
    """Compared with every way to cut a few rows into stretches."""
    rng = random.Random(0)
    for _ in range(100):
        n, world_size, max_tokens = rng.randint(1, 7), rng.randint(1, 3), rng.randint(4, 30)
        lengths = [rng.randint(1, 12) for _ in range(n)]
        shared = [0] + [rng.randint(0, min(pair)) for pair in itertools.pairwise(lengths)]
        cuts = []
        for ends in itertools.product([False, True], repeat=n - 1):
            borders = [0, *(i + 1 for i, end in enumerate(ends) if end), n]
            cut = [list(range(*pair)) for pair in itertools.pairwise(borders)]
            sizes = [tokens_of(micro, lengths, shared) for micro in cut]
            if all(size <= max_tokens for size, micro in zip(sizes, cut, strict=True) if len(micro) > 1):
                cuts.append(sizes)
        turns = min(math.ceil(len(sizes) / world_size) for sizes in cuts)
        best = min(max(sizes) for sizes in cuts if len(sizes) <= turns * world_size)
        plan = plan_micro_batches(lengths, range(n), world_size=world_size, max_tokens=max_tokens, shared=shared)
        assert len(plan[0]) == turns
        assert max(tokens_of(micro, lengths, shared) for rank in plan for micro in rank) == best


def test_plan_keeps_the_responses_to_a_prompt_together():
    """Six prompts of 6 tokens with four responses of 4: 22 tokens per prompt, or 40 if it were computed four times."""
    lengths, shared = [10] * 24, [0, 6, 6, 6] * 6
    prompts = [list(range(i, i + 4)) for i in range(0, 24, 4)]
    plan = plan_micro_batches(lengths, range(24), world_size=2, max_tokens=22, shared=shared)
    assert plan == [prompts[0::2], prompts[1::2]]
    [micros] = plan_micro_batches(lengths, range(24), world_size=1, max_tokens=18, shared=shared)
    assert micros == [[i, i + 1] for i in range(0, 24, 2)]  # a prompt of 22 is cut in two halves of 14


def test_plan_does_not_waste_micro_batches():
    lengths = [8] * 12 + [2] * 16
    plan = plan_micro_batches(lengths, range(28), world_size=2, max_tokens=16)
    assert [len(rank) for rank in plan] == [4, 4]  # 64 tokens per rank in bins of 16


def plans(lengths, size, *, mini_batch_size, **options):
    """The updates of each of this many ranks."""
    rows = range(len(lengths))
    minis = [rows[start : start + mini_batch_size] for start in rows[::mini_batch_size]]
    every = [ranks_without_group(rank, size) for rank in range(size)]
    return [[plan_update(lengths, rows, ranks=ranks, **options) for rows in minis] for ranks in every]


def test_plan_update_by_hand():
    lengths = [4, 9, 3, 6, 1, 2, 7]
    options = dict(mini_batch_size=3, max_tokens=10)
    [alone] = plans(lengths, 1, **options)
    assert [(u.rows, u.micro_batches) for u in alone] == [
        ([0, 1, 2], [[1], [0], [2]]),
        ([3, 4, 5], [[3, 4, 5]]),
        ([6], [[6]]),
    ]
    first, second = plans(lengths, 2, **options)
    assert [u.rows for u in first] == [u.rows for u in second] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [u.micro_batches for u in first] == [[[1], [2]], [[3]], [[6]]]
    assert [u.micro_batches for u in second] == [[[0], []], [[4, 5]], [[]]]
    for updates in (first, second):
        assert [u.rows_of_rank for u in updates] == [[[1, 2], [0]], [[3], [4, 5]], [[6], []]]
        assert [(u.num_tokens, u.num_seqs) for u in updates] == [(16.0, 3.0), (9.0, 3.0), (7.0, 1.0)]
    learned = [2, 0, 1, 0, 0, 0, 5]
    [alone] = plans(lengths, 1, learned=learned, **options)
    assert [(u.num_tokens, u.num_seqs) for u in alone] == [(3.0, 2.0), (0.0, 0.0), (5.0, 1.0)]
    shared = [0, 4, 3, 0, 0, 1, 2]  # rows 0 to 2 become 4 + 5 + 0 tokens
    [alone] = plans(lengths, 1, shared=shared, **options)
    assert (alone[0].rows, alone[0].micro_batches) == ([0, 1, 2], [[0, 1, 2]])


@pytest.mark.parametrize("mini_batch_size", [1, 4, 7, 10, 99])
def test_plan_update_gives_every_row_to_one_rank_of_one_update(mini_batch_size):
    lengths = [5, 8, 3, 8, 2, 9, 4, 4, 6, 7]
    ranks = plans(lengths, 3, mini_batch_size=mini_batch_size, max_tokens=12)
    assert [row for u in ranks[0] for row in u.rows] == list(range(10))
    assert all(len(u.rows) == mini_batch_size for u in ranks[0][:-1])
    for updates in zip(*ranks, strict=True):
        assert len({tuple(u.rows) for u in updates}) == len({len(u.micro_batches) for u in updates}) == 1
        of_ranks = [[row for micro in u.micro_batches for row in micro] for u in updates]
        assert sorted(itertools.chain(*of_ranks)) == list(updates[0].rows)
        assert all(u.rows_of_rank == [sorted(rows) for rows in of_ranks] for u in updates)
        assert {(u.num_tokens, u.num_seqs) for u in updates} == {
            (sum(lengths[i] for i in updates[0].rows), len(updates[0].rows))
        }


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_that_belong_together_share_a_micro_batch(size):
    rng = random.Random(size)
    for _ in range(100):
        n, most = rng.choice([2, 2, 3]), rng.choice([12, 40, 1000])
        lengths = [rng.randint(1, 24) for _ in range(n * rng.randint(1, 30))]
        shared = [0] + [rng.choice([0, rng.randint(0, min(pair))]) for pair in itertools.pairwise(lengths)]
        mini = n * rng.randint(1, 10)
        options = dict(mini_batch_size=mini, max_tokens=most, shared=shared, rows_per_unit=n)
        seen = []
        for updates in zip(*plans(lengths, size, **options), strict=True):
            assert len({len(u.micro_batches) for u in updates}) == 1
            for micro in (micro for u in updates for micro in u.micro_batches):
                for first in micro[::n]:
                    assert first % n == 0 and set(range(first, first + n)) <= set(micro)
                assert len(micro) <= n or tokens_of(micro, lengths, shared) <= most
                seen += micro
            assert [i for i in sorted(seen) if i in updates[0].rows] == list(updates[0].rows)
            assert updates[0].num_tokens == sum(lengths[i] for i in updates[0].rows)
            assert updates[0].num_seqs == len(updates[0].rows)
        assert sorted(seen) == list(range(len(lengths)))


def test_pairs_by_hand():
    lengths = [4, 3, 1, 2, 6, 1, 5, 5]
    # 7 | 3 | 7 | 10 tokens per pair; at most 10: 7 3 | 7 | 10
    [alone] = plans(lengths, 1, mini_batch_size=8, max_tokens=10, rows_per_unit=2)
    assert alone[0].micro_batches == [[0, 1, 2, 3], [6, 7], [4, 5]]
    [alone] = plans(lengths, 1, mini_batch_size=8, max_tokens=6, rows_per_unit=2)  # also where one has more than that
    assert sorted(alone[0].micro_batches) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    shared = [0, 3, 1, 1, 0, 1, 0, 5]  # 4 | 1 + 1 | 6 | 5 tokens, where neighbors meet
    [alone] = plans(lengths, 1, mini_batch_size=8, max_tokens=6, shared=shared, rows_per_unit=2)
    assert sorted(alone[0].micro_batches) == [[0, 1, 2, 3], [4, 5], [6, 7]]
    first, second = plans(lengths, 2, mini_batch_size=4, max_tokens=10, rows_per_unit=2)
    assert [u.micro_batches for u in first] == [[[0, 1]], [[6, 7]]]
    assert [u.micro_batches for u in second] == [[[2, 3]], [[4, 5]]]
    assert [u.rows_of_rank for u in second] == [[[0, 1], [2, 3]], [[6, 7], [4, 5]]]


@pytest.mark.parametrize(("rows", "mini", "odd"), [(7, 4, 3), (8, 3, 3), (5, 5, 5), (6, 1, 1)])
def test_rows_that_would_be_cut_apart_are_refused(rows, mini, odd):
    with pytest.raises(ValueError, match=f"^{odd} rows are not a multiple of 2"):
        plans([3] * rows, 2, mini_batch_size=mini, max_tokens=10, rows_per_unit=2)

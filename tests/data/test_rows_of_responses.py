"""Responses of several rows, as those of agents: groups compare responses and not rows, and tokens are learned once."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers_data import ranks_without_group

from extras.partial.waiting_groups import from_states, to_state
from rl.data.batching import make_batch
from rl.data.types import Sample, Score
from rl.formulas import advantages, losses
from rl.ranks import Ranks
from rl.run import loop_state
from rl.sampling.responses import gather_responses, lengths_of, scores_of

PROMPT = [7, 8]
ROWS = [{"row_index": i, "prompt_ids": PROMPT, "data_source": "x"} for i in range(2)]
# Of each response the rows, each with its ids and mask: two responses to each of two prompts.
RESPONSES = [
    [([1, 2, 3, 4], [0, 1, 1, 0]), ([1, 2, 3, 5, 6], [0, 0, 0, 0, 1])],  # a fork, whose first turn is learned once
    [([9, 9, 9], [0, 1, 1])],
    [([1, 2], [0, 1]), ([3, 4], [0, 1]), ([3, 4, 5, 6, 7], [0, 0, 0, 1, 1])],
    [([4, 5, 6], [0, 0, 1])],
]
SCORES = [1.0, 0.0, 0.25, None]


def response(i):
    rows = [Sample([], ids, mask, np.full(len(ids), -0.5), "stop", i // 2) for ids, mask in RESPONSES[i]]
    whole = Sample(PROMPT, [], [], [], "stop", i // 2, rows=tuple(rows))
    return replace(whole, score=Score("text", SCORES[i], {}, "none" if SCORES[i] is None else "ok", 0.0))


@pytest.fixture
def ranks(monkeypatch):
    ranks = ranks_without_group()
    monkeypatch.setattr(type(ranks), "all_gather", lambda self, values: list(values))
    monkeypatch.setattr(type(ranks), "send", lambda self, parcels: parcels)
    monkeypatch.setattr(type(ranks), "all_reduce_sum", lambda self, x: x)
    return ranks


@pytest.fixture
def responses(ranks):
    return gather_responses([response(i) for i in range(4)], ROWS, ranks)


def test_a_response_counts_once_however_many_rows_it_has(responses):
    assert len(responses) == 4 and [len(r.as_rows) for r in responses] == [2, 1, 3, 1]
    assert scores_of(responses).tolist()[:3] == [1.0, 0.0, 0.25] and scores_of(responses)[3].isnan()
    assert lengths_of(responses).tolist() == [3, 2, 4, 1]  # sampled tokens of all rows
    assert lengths_of(responses, whole=True).tolist() == [5, 3, 5, 3]  # of the longest row, since each has the limit
    assert [row.number for r in responses for row in r.as_rows] == list(range(7))
    assert [row.shared for r in responses for row in r.as_rows] == [0, 3, 0, 0, 0, 2, 0]  # with the row before


def test_each_row_gets_the_advantage_of_its_response_and_each_token_is_learned_once(responses, ranks):
    batch, [update] = make_batch(responses, mini_batch_size=4, max_tokens=100, ranks=ranks)
    assert batch.rows.tolist() == list(range(7)) and batch.responses.tolist() == [0, 0, 1, 2, 2, 2, 3]
    # By responses the mean of the first group is 0.5. By rows it would be 2/3, and the test would fail.
    scores = scores_of(responses).view(2, 2)
    mean, _ = advantages.group_mean_std(scores)
    A = ((scores - mean).nan_to_num().view(-1, 1)[batch.responses] * batch.response_mask).tolist()
    assert A[0] == [0, 0.5, 0.5, 0, 0] and A[1] == [0, 0, 0, 0, 0.5] and A[2] == [0, -0.5, -0.5, 0, 0]
    assert scores[0].mean() == 0.5 and scores_of(responses)[batch.responses][:3].mean() == pytest.approx(2 / 3)
    assert batch.response_mask.sum() == update.num_tokens == 3 + 2 + 4  # the last response has no score
    assert update.num_seqs == 3 and batch.num_learned.tolist() == [3, 3, 2, 4, 4, 4, 0]


def test_means_over_responses_count_responses_however_the_rows_are_cut(responses, ranks):
    """By hand: of the learned tokens, response 0 has losses 1, 2, 3, response 1 has 4, 5, and response 2 has 6 to 9."""
    batch, [update] = make_batch(responses, mini_batch_size=4, max_tokens=100, ranks=ranks)
    x, mask = torch.zeros_like(batch.response_mask), batch.response_mask
    x[mask > 0] = torch.arange(1.0, 10.0)
    counts = dict(num_tokens=update.num_tokens, num_seqs=update.num_seqs, scale=2.0)
    expected = {
        "token-mean": 45 / 9,
        "seq-mean-token-sum": (6 + 9 + 30) / 3,
        "seq-mean-token-mean": (6 / 3 + 9 / 2 + 30 / 4) / 3,
        "seq-mean-token-sum-norm": (6 + 9 + 30) / 3 / 2,
    }
    for mode, value in expected.items():
        for size in (1, 2, 7):
            parts = [slice(i, i + size) for i in range(0, 7, size)]
            means = [losses.aggregate(x[i], mask[i], mode, lengths=batch.num_learned[i], **counts) for i in parts]
            assert float(sum(means)) == pytest.approx(value)
    assert ranks.all_rows(x.sum(1), batch.responses, 4).tolist() == [6, 9, 30, 0]


def test_groups_that_wait_keep_their_rows(responses):
    rows = {i: {"prompt_ids": PROMPT} for i in range(2)}
    state = json.loads(loop_state.encode({"groups": to_state([responses[:2]])}).text)["groups"]
    assert [len(x["rows"]) for x in state[0]] == [2, 1]
    for rank in range(2):
        of_rank = Ranks(rank, 2, torch.device("cpu"), torch.float32, rank, 2, group=None, data_group=None)
        groups = from_states([to_state([responses[2:], responses[:2]])], rows, 2, of_rank)
        assert [x.row_index for group in groups for x in group] == [1, 1, 0, 0]
        numbers = [[(row.rank, row.number, row.shared) for row in x.as_rows] for group in groups for x in group]
        three = [(0, 0, 0), (0, 1, 0), (0, 2, 2)]
        assert numbers == [three, [(0, 3, 0)], [(1, 4, 0), (1, 5, 3)], [(1, 6, 0)]]
        for place, group in enumerate(groups):
            tokens = [row.response_ids for x in group for row in x.as_rows]
            expected = [ids for response in RESPONSES[2 - 2 * place :][:2] for ids, _ in response]
            if rank == place:
                assert [x.tolist() for x in tokens] == expected
            else:
                assert tokens == [None] * len(expected)


@pytest.mark.parametrize("max_tokens", [5, 8, 100])
def test_the_rows_of_a_response_are_in_one_update(responses, ranks, max_tokens):
    batch, updates = make_batch(responses, mini_batch_size=2, max_tokens=max_tokens, ranks=ranks, order=[2, 1, 0, 3])
    assert [list(u.rows) for u in updates] == [[2, 3, 4, 5], [0, 1, 6]]
    assert [u.num_tokens for u in updates] == [4 + 2, 3]
    for u in updates:
        assert sorted(row for micro in u.micro_batches for row in micro) == list(u.rows)
    total = torch.zeros(2).index_add(0, torch.tensor([1, 1, 0, 0, 0, 0, 1]), batch.share)
    assert total.tolist() == pytest.approx([1, 1])


def test_other_ranks_know_the_rows_without_their_tokens(responses):
    seen = responses[0].without_tokens()
    assert [row.num_response_tokens for row in seen.rows] == [4, 5] and seen.rows[1].num_sampled == 1
    assert (seen.num_response_tokens, seen.num_sampled) == (9, 3)
    assert all(row.response_ids is None and not row.columns for row in seen.rows)

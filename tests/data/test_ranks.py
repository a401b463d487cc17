"""What ranks exchange of a step: every number of ranks must end up with what one rank alone computes."""

import itertools
import math
from dataclasses import replace

import exchange_ranks as step
import launch
import numpy as np
import pytest
import torch
from helpers_data import ranks_without_group, sample, scored

from extras.partial import waiting_groups
from extras.variants import token_selection
from rl.data.batching import collate, make_batch, shared_prefix
from rl.sampling.responses import gather_responses

SAMPLES, SCORES, N = step.step_samples(), step.step_scores(), step.N
SIZES = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Number of ranks -> what exchange_ranks.py found on each; of the two pairs of two, the first. There are also
    those of four ranks, two of which train on the same rows: the first and the second of each pair.
    """
    folder = tmp_path_factory.mktemp("exchange")
    run = launch.fork("tests.data.exchange_ranks", {"out": folder}, folder / "log", ranks=4)
    assert run.ends() == [0, 0, 0, 0], (folder / "log").read_text()
    found = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(4)]
    for alone in found[1:]:
        assert alone[1]["responses"] == found[0][1]["responses"]
    for pair in (found[1][2], found[3][2]):  # the other pair
        assert pair["cuts"]["all"]["means"] == found[0][2]["cuts"]["all"]["means"]
    of_sizes = {1: [found[0][1]], 2: [found[0][2], found[2][2]], 3: [x[3] for x in found[:3]], 4: [x[4] for x in found]}
    neighbors = [x["neighbors"] for x in found]
    assert [x["slices"] for x in neighbors] == [x[4]["slices"] for x in found]  # each samples prompts of its own
    assert [x["responses"] for x in neighbors] == [x[4]["responses"] for x in found]
    return of_sizes | {"first of pairs": neighbors[::2], "second of pairs": neighbors[1::2]}


@pytest.fixture(params=SIZES, ids=["1 rank", "2 ranks", "3 ranks", "4 ranks"])
def ranks(request, measured):
    return measured[request.param]


@pytest.fixture(params=[*SIZES, "first of pairs", "second of pairs"], ids=str)
def trainers(request, measured):
    """What ranks found of which each trains on rows of its own."""
    return measured[request.param]


def owner(k, size, prompts=7):
    """The rank that sampled response k: prompts are shared out in neighbors."""
    [rank] = [r for r in range(size) if k // N in range(prompts * r // size, prompts * (r + 1) // size)]
    return rank


def common(a, b):
    """How many tokens two lists begin with alike."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


# --- share


def test_every_rank_knows_the_score_and_the_lengths_of_every_response(ranks):
    for rank in ranks:
        assert len(rank["responses"]) == len(SAMPLES)
        for k, (r, s, score) in enumerate(zip(rank["responses"], SAMPLES, SCORES, strict=True)):
            assert r["row_index"] == s.row_index == 30 + k // N
            assert r["score"] == ("", score.value, score.components, score.status, score.seconds)
            assert r["num_response_tokens"] == step.LENGTHS[k]
            start, end = step.GAPS.get(k, (0, 0))
            assert r["num_sampled"] == step.LENGTHS[k] - (end - start)
            assert r["finish_reason"] == ("length" if k % 4 == 0 else "stop")
            assert r["outcome"] == (({"turns": k}, k / 4, "", {}, {}) if k % 2 else None)  # without texts
            assert r["prompt_ids"] == step.PROMPTS[k // N]


def test_tokens_stay_with_the_rank_that_sampled_them(ranks):
    for here, rank in enumerate(ranks):
        for k, r in enumerate(rank["responses"]):
            assert r["rank"] == owner(k, len(ranks))
            assert (r["response_ids"] is None) == (r["rank"] != here)
            if r["response_ids"] is not None:
                assert r["response_ids"] == SAMPLES[k].response_ids.tolist()
        mine = [r["number"] for r in rank["responses"] if r["rank"] == here]
        assert mine == list(range(len(mine)))


def test_neither_texts_nor_tokens_are_sent_to_tell_of_responses(ranks):
    assert all(len(rank["sent"]) == (len(ranks) > 1) for rank in ranks)
    for here, rank in enumerate(ranks):
        for payload in rank["sent"]:
            own = [k for k in range(len(SAMPLES)) if owner(k, len(ranks)) == here]
            assert b"secret" not in payload and b"ndarray" not in payload
            for k in own:
                for x in (SAMPLES[k].response_ids, SAMPLES[k].rollout_logprobs):
                    assert len(x) < 2 or x.tobytes() not in payload
            assert len(payload) < 1000 + 200 * len(own)


def test_what_neighbors_share_is_told_by_the_rank_that_has_both(ranks):
    for k, r in enumerate(ranks[0]["responses"]):
        if k % N == 0:
            assert r["shared"] == 0
        else:
            above, here = ([*SAMPLES[i].prompt_ids, *SAMPLES[i].response_ids] for i in (k - 1, k))
            assert r["shared"] == common(above, here) >= len(SAMPLES[k].prompt_ids)
    assert [ranks[0]["responses"][k]["shared"] for k in (1, 8, 13)] == [3 + 1, 5 + 3, 7 + 2]


def test_ranks_without_samples_take_part(ranks):
    for here, rank in enumerate(ranks):
        assert [r["num_response_tokens"] for r in rank["few"]] == step.LENGTHS[:N]
        assert {r["rank"] for r in rank["few"]} == {len(ranks) - 1}  # one prompt is the last rank's
        assert all((r["response_ids"] is None) == (here != len(ranks) - 1) for r in rank["few"])


# --- make_batch


def rows_of(name):
    """Places among all responses of those that a cut is about."""
    prompts = step.CUTS[name][0] if name in step.CUTS else range(1)
    return [k for i in prompts for k in range(N * i, N * i + N)]


def whole_batch(name):
    """The cut's batch as one rank would have it, by `collate` alone; responses without a score have empty masks."""
    chosen = rows_of(name)
    batch = collate([SAMPLES[k] for k in chosen])
    mask = batch.response_mask * torch.tensor([float(SCORES[k].value is not None) for k in chosen])[:, None]
    return batch, mask


EVERY_CUT = [*step.CUTS, "few"]


@pytest.mark.parametrize("name", EVERY_CUT)
def test_every_rank_has_exactly_its_rows_of_the_whole_batch(trainers, name):
    whole, mask = whole_batch(name)
    every = []
    for here, rank in enumerate(trainers):
        own, updates = rank["cuts"][name]["batch"], rank["cuts"][name]["updates"]
        rows = own["rows"].tolist()
        assert rows == sorted(row for update in updates for row in update.rows_of_rank[here])
        assert torch.equal(own["input_ids"], whole.input_ids[rows])
        assert torch.equal(own["lengths"], whole.lengths[rows])
        assert torch.equal(own["response_mask"], mask[rows])
        assert torch.equal(own["rollout_logp"], whole.rollout_logp[rows])
        if rows:  # columns of tokens come along, whatever they are called
            assert torch.equal(own["columns"]["pairs"], whole.columns["pairs"][rows])
        versions = whole.columns["versions"][rows]
        assert torch.equal(own["columns"]["ages"], torch.where(versions <= 6, 6 - versions, -1))
        for update in updates:  # the tokens of a row over those of its update on all ranks
            for i in set(update.rows) & set(rows):
                share = int(whole.lengths[i]) / sum(int(whole.lengths[k]) for k in update.rows)
                assert own["share"][rows.index(i)].item() == pytest.approx(share, rel=1e-6)
        every += rows
    assert sorted(every) == list(range(len(whole.lengths)))
    assert not any(mask[i].any() for i, k in enumerate(rows_of(name)) if k in step.UNSCORED)


@pytest.mark.parametrize("name", EVERY_CUT)
def test_all_ranks_plan_the_same_updates(trainers, measured, name):
    whole, mask = whole_batch(name)
    _, size, most, n, *seed = step.CUTS.get(name, (None, 3, 20, 1))
    most *= 1 if any(trainers is measured[size] for size in SIZES) else 2  # or two hold a micro-batch together
    chosen, count = rows_of(name), len(rows_of(name))
    for updates in zip(*(rank["cuts"][name]["updates"] for rank in trainers), strict=True):
        first = updates[0]
        assert all((u.rows, u.rows_of_rank) == (first.rows, first.rows_of_rank) for u in updates)
        assert {len(u.micro_batches) for u in updates} == {len(first.micro_batches)}
        tokens = [int(mask[i].sum()) for i in first.rows]
        assert {(u.num_tokens, u.num_seqs) for u in updates} == {(sum(tokens), sum(x > 0 for x in tokens))}
        for here, update in enumerate(updates):
            assert sorted(i for micro in update.micro_batches for i in micro) == update.rows_of_rank[here]
            for micro in update.micro_batches:
                cost = sum(int(whole.lengths[i]) for i in micro)
                for above, i in itertools.pairwise(micro):
                    prompts = [SAMPLES[chosen[k]].prompt_ids for k in (above, i)]
                    cost -= int(shared_prefix(whole)[i]) if above == i - 1 else common(*prompts)
                assert cost <= most or len(micro) <= n
                assert n == 1 or [i // n for i in micro[::n]] == [i // n for i in micro[n - 1 :: n]]
    updates = trainers[0]["cuts"][name]["updates"]
    if seed:
        assert [len(u.rows) for u in updates] == [6, 6, 6, 3] and sorted(i for u in updates for i in u.rows) == [
            *range(21)
        ]
        assert all(u.rows == sorted(u.rows) and max(u.rows) - min(u.rows) > size for u in updates)  # no neighbors
    else:
        assert [u.rows for u in updates] == [[*range(i, min(i + size, count))] for i in range(0, count, size)]
    assert trainers[0]["cuts"][name]["scores"].isnan().tolist() == [k in step.UNSCORED for k in chosen]
    assert trainers[0]["cuts"][name]["lengths"].tolist() == [SAMPLES[k].response_mask.sum() for k in chosen]
    assert trainers[0]["cuts"][name]["whole_lengths"].tolist() == [step.LENGTHS[k] for k in chosen]


def test_a_rank_may_be_without_rows(measured):
    shapes = [rank["cuts"]["one row"]["batch"]["input_ids"].shape for rank in measured[4]]
    assert shapes == [(3, 3), (0, 3), (0, 3), (0, 3)]  # a row per update, in a micro-batch of its own


def micro_batches(responses, max_tokens, *models):
    ranks = replace(ranks_without_group(), not_sharing=set(models))
    options = dict(mini_batch_size=10, max_tokens=max_tokens, ranks=ranks)
    [update] = make_batch(responses, torch.ones(len(responses), dtype=torch.bool), **options)[1]
    return sorted(update.micro_batches)


def test_tokens_that_neighbors_share_are_counted_once():
    rows = [{"row_index": 0, "prompt_ids": [1, 2]}, {"row_index": 1, "prompt_ids": [1, 3]}]
    tokens = [(0, [9, 9, 9]), (0, [7, 7, 7]), (0, [7, 7, 8]), (1, [7, 7])]
    samples = [sample(rows[i]["prompt_ids"], ids, row_index=i) for i, ids in tokens]
    responses = gather_responses([replace(s, score=scored(1.0)) for s in samples], rows, ranks_without_group())
    # 5, and 5 - 2, 5 - 4 and 4 - 1 after the one above: the prompt, and how both responses begin
    assert micro_batches(responses, 12) == [[0, 1, 2, 3]] and micro_batches(responses, 11) == [[0, 1], [2, 3]]
    # Without the second one the third shares its prompt only: 5, 5 - 2 and 4 - 1.
    fewer = [responses[0], *responses[2:]]
    assert micro_batches(fewer, 11) == [[0, 1, 2]] and micro_batches(fewer, 10) == [[0, 1], [2]]
    # A model that computes them for each row: 5, 5, 5 and 4.
    assert micro_batches(responses, 19, "a model") == [[0, 1, 2, 3]]
    assert micro_batches(responses, 18, "a model") == [[0, 1], [2, 3]]


def test_units_that_a_mini_batch_would_cut_apart_are_refused():
    rows = [step.ROWS[0]]
    scored_samples = [replace(s, score=score) for s, score in zip(SAMPLES[:3], SCORES[:3], strict=True)]
    responses = gather_responses(scored_samples, rows, ranks_without_group())
    options = dict(max_tokens=50, ranks=ranks_without_group(), rows_per_unit=2)
    for size, odd in ((2, 1), (3, 3)):
        with pytest.raises(ValueError, match=f"^{odd} rows are not a multiple of 2"):
            make_batch(responses, torch.ones(3, dtype=torch.bool), mini_batch_size=size, **options)
    with pytest.raises(AssertionError, match="another order would tear units apart"):
        make_batch(responses[:2], torch.ones(2, dtype=torch.bool), mini_batch_size=2, order=[1, 0], **options)


# --- numbers of all rows


@pytest.mark.parametrize("name", EVERY_CUT)
def test_the_largest_numbers_of_a_step_are_found_on_the_ranks_that_have_them(trainers, name):
    whole, mask = whole_batch(name)
    ranked = sorted((float(x) for x in whole.rollout_logp[mask > 0]), reverse=True)
    for i, k in enumerate((0, 1, 2, 7, 10**6)):
        of_ranks = [x for rank in trainers for x in rank["cuts"][name]["largest"][i]]
        assert sorted(of_ranks, reverse=True) == ranked[:k]


@pytest.mark.parametrize("name", EVERY_CUT)
def test_numbers_of_a_step_are_those_of_one_rank(trainers, name):
    whole, mask = whole_batch(name)
    logp = whole.rollout_logp
    tokens = [float(x) for x in logp[mask > 0]]
    mean = sum(tokens) / max(len(tokens), 1)
    var = sum((x - mean) ** 2 for x in tokens) / max(len(tokens) - 1, 1)
    for rank in trainers:
        found = rank["cuts"][name]
        assert found["all_rows"].tolist() == mask.sum(1).tolist()
        acc, style = found["parts"].tolist()
        scores = found["scores"].tolist()  # k / 8 of response k
        assert all(math.isnan(x) for x in style) and len(style) == len(scores)
        assert [math.isnan(x) or x == round(8 * s) % 2 for x, s in zip(acc, scores, strict=True)] == [True] * len(acc)
        assert [math.isnan(x) for x in acc] == [math.isnan(s) for s in scores]
        assert found["moments"] == pytest.approx((mean, var), rel=1e-12, abs=1e-15)
        assert found["mean"] == found["moments"][0]
        assert found["described"] == pytest.approx(
            {"x/mean": mean, "x/max": max(tokens), "x/min": min(tokens)}, rel=1e-12
        )
        expected = [0.0 if not m else (float(x) - mean) / math.sqrt(var + 1e-8) for x, m in zip(
            logp[found["batch"]["rows"]].flatten(), mask[found["batch"]["rows"]].flatten(), strict=True
        )]  # fmt: skip
        np.testing.assert_allclose(found["whitened"].flatten(), expected, rtol=1e-6, atol=1e-6)
        sequences = mask.sum(1)
        assert found["means"] == pytest.approx(
            {
                "tokens": mean,
                "sequences": float(sequences.sum()) / len(sequences),
                "updates": float(mask.sum()) / 2,
                "largest": -min(tokens),
            },
            rel=1e-12,
        )


def k_largest(keys, k):
    """The places with the k largest of the keys."""
    return set(sorted(keys, key=keys.get, reverse=True)[:k])


@pytest.mark.parametrize("name", EVERY_CUT)
def test_the_choice_among_the_tokens_of_all_ranks_is_that_of_a_plain_loop(trainers, name):
    whole, mask = whole_batch(name)
    B, T = mask.shape
    old, entropy = whole.rollout_logp.round().tolist(), (-2 * whole.rollout_logp).round().tolist()
    chance, advantage = token_selection.uniform(range(B), T, seed=7).tolist(), [i % 3 - 1.0 for i in range(B)]
    tokens = [(i, t) for i in range(B) for t in range(T) if mask[i, t]]
    expected = {"clip_cov": set(), "kl_cov": set()}
    for update in trainers[0]["cuts"][name]["updates"]:
        own = [(i, t) for i, t in tokens if i in update.rows]
        mean_logp = sum(old[i][t] for i, t in own) / max(len(own), 1)
        mean_advantage = sum(advantage[i] for i, t in own) / max(len(own), 1)
        cov = {(i, t): (old[i][t] - mean_logp) * (advantage[i] - mean_advantage) for i, t in own}
        some = {(i, t): chance[i][t] for i, t in own if -0.1 < cov[i, t] < 0.5}
        expected["clip_cov"] |= k_largest(some, max(1, int(0.2 * len(own))))
        # float32, so that equal ones are equal
        keys = {(i, t): (float(np.float32(cov[i, t])), chance[i][t]) for i, t in own}
        expected["kl_cov"] |= k_largest(keys, max(1, int(0.15 * len(own))))
    uncertain = k_largest({(i, t): (entropy[i][t], chance[i][t]) for i, t in tokens}, int(0.3 * len(tokens)))
    found = {"clip_cov": set(), "kl_cov": set(), "uncertain": set()}
    for rank in trainers:
        here = rank["cuts"][name]
        rows = here["batch"]["rows"].tolist()
        assert here["nothing chosen"]
        for kind, x in {**here["chosen"], "uncertain": here["uncertain"]}.items():
            found[kind] |= {(rows[i], t) for i, t in x.nonzero().tolist()}
    assert found == {**expected, "uncertain": {(i, t) for i, t in uncertain if advantage[i]}}


def test_the_largest_of_all_ranks_are_taken_before_equal_ones_are_drawn(ranks):
    assert all(rank["largest"].tolist() == [[True, False, False]] for rank in ranks)


# --- collectives


def test_parcels_arrive(ranks):
    for me, rank in enumerate(ranks):
        assert rank["received"] == [bytes([sender, me]) * (3 * sender * me) for sender in range(len(ranks))]
        assert rank["nothing sent"] == [b""] * len(ranks)


def test_slices_share_a_list_and_all_gather_restores_it(ranks):
    for i, size in enumerate((0, 1, 3, 8, 11)):
        slices = [rank["slices"][i] for rank in ranks]
        assert sum(slices, []) == list(range(size))
        assert max(map(len, slices)) - min(map(len, slices)) <= 1
        assert all(rank["restored"][i] == list(range(size)) for rank in ranks)


def test_sums_and_maxima(ranks):
    n = len(ranks)
    for rank in ranks:
        assert rank["sum"].tolist() == [n, n * (n - 1) / 2] and rank["max"].tolist() == [-1.0, n - 1]


def test_moments_of_equal_numbers_are_exact(ranks):
    for rank in ranks:
        assert rank["equal"] == (torch.tensor(0.1).item(), 0.0)
        assert rank["nothing"] == (0.0, 0.0) and rank["one"] == (7.0, 0.0)


def test_what_is_said_of_nothing(ranks):
    for rank in ranks:
        assert rank["described nothing"].keys() == {"x/mean", "x/max", "x/min"}
        assert all(math.isnan(x) for x in rank["described nothing"].values())
        assert rank["rows of nobody"].tolist() == [0.0, 0.0, 0.0]


# --- groups that wait


@pytest.mark.parametrize("size", [1, 2, 4])
def test_groups_that_wait_are_shared_out_anew_after_a_resume(ranks, size):
    """However many ranks saved them."""
    states = [rank["state"] for rank in ranks]
    rows = {row["row_index"]: row for row in step.ROWS}
    restored = [waiting_groups.from_states(states, rows, N, ranks_without_group(rank, size)) for rank in range(size)]
    for here, groups in enumerate(restored):
        for j, (i, group) in enumerate(zip((1, 4, 6), groups, strict=True)):
            for k, r in zip(range(N * i, N * i + N), group, strict=True):
                score, s = SCORES[k], SAMPLES[k]
                assert r.score == score._replace(text="") and type(r.score) is type(score)
                assert (r.row_index, r.num_response_tokens, r.num_sampled) == (
                    s.row_index, len(s.response_ids), s.response_mask.sum()
                )  # fmt: skip
                assert r.finish_reason == s.finish_reason
                assert r.outcome == (s.outcome and s.outcome._replace(text="", extra_info={}, record={}))
                assert r.prompt_ids.tolist() == s.prompt_ids.tolist() and r.rank == j * size // 3
                assert r.number == N * j + k % N  # neighbors, whose shared tokens are known
                assert (r.response_ids is not None) == (r.rank == here)
                assert r.data_source == "math"
                if r.response_ids is not None:
                    told = ("score", "outcome", "data_source", "rank", "number", "shared")
                    np.testing.assert_equal(vars(r), vars(s) | {name: vars(r)[name] for name in told})


def test_groups_of_another_size_or_another_prompt_do_not_come_back(ranks):
    states, rows = [rank["state"] for rank in ranks], {row["row_index"]: row for row in step.ROWS}
    assert waiting_groups.from_states(states, rows, N + 1, ranks_without_group()) == []
    changed = rows | {34: rows[34] | {"prompt_ids": [60] * 6}}
    del changed[36]
    [group] = waiting_groups.from_states(states, changed, N, ranks_without_group())
    assert {r.row_index for r in group} == {31}

"""Advantage estimators against hand-computed values and plain Python loops."""

import math

import pytest
import torch

from extras.agents import turns
from rl.formulas import advantages
from train_ppo import gae

NAN = float("nan")
GROUPED = {
    "grpo": advantages.grpo,
    "dr_grpo": lambda r, lengths: advantages.grpo(r, lengths, norm_by_std=False),
    "grpo_batch": advantages.grpo_batch,
    "max_rl": advantages.max_rl,
    "grpo_passk": advantages.grpo_passk,
    "rloo": advantages.rloo,
    "opo": advantages.opo,
    "gpg": advantages.gpg,
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline,
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


def check(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, f64(expected).to(actual.dtype), rtol=tolerance, atol=tolerance)


def loop_reference(name, rewards, lengths):
    """The definitions on Python lists: group statistics over scored responses, batch statistics over their tokens."""
    batch = [(r, n) for row, ns in zip(rewards, lengths, strict=True) for r, n in zip(row, ns, strict=True)]
    scored_of_batch = [r for r, _ in batch if not math.isnan(r)]
    mean_of_batch = sum(scored_of_batch) / len(scored_of_batch)
    std_of_batch = math.sqrt(sum((r - mean_of_batch) ** 2 for r in scored_of_batch) / (len(scored_of_batch) - 1))
    out = []
    for row, row_lengths in zip(rewards, lengths, strict=True):
        known = [(r, n) for r, n in zip(row, row_lengths, strict=True) if not math.isnan(r)]
        count = len(known)
        mean = sum(r for r, _ in known) / count if count > 1 else 0.0
        std = math.sqrt(sum((r - mean) ** 2 for r, _ in known) / (count - 1)) if count > 1 else 1.0
        out.append([])
        for r in row:
            if math.isnan(r):
                advantage = 0.0
            elif name == "grpo":
                advantage = (r - mean) / (std + 1e-6)
            elif name == "dr_grpo":
                advantage = r - mean
            elif name == "grpo_batch":
                advantage = (r - mean) / (std_of_batch + 1e-6)
            elif name == "max_rl":
                level = sum(x for x, _ in known) / count
                advantage = (r - mean) / (level + 1e-6) if level > 0 else 0.0
            elif name == "grpo_passk":
                ahead = [x for x, _ in known if x >= r]  # itself among them
                second = max(x for x, _ in known if x < r) if count > 1 and min(known)[0] < r else 0.0
                advantage = (r - second) / (std + 1e-6) if len(ahead) == 1 and (count == 1 or second < r) else 0.0
            elif name == "rloo":
                advantage = r - (sum(x for x, _ in known) - r) / (count - 1) if count > 1 else r
            elif name == "opo":
                advantage = r - (sum(x * n for x, n in known) / sum(n for _, n in known) if count > 1 else 0.0)
            elif name == "gpg":
                nonzero = sum(x != 0 for x in scored_of_batch)
                advantage = (r - mean) * len(scored_of_batch) / max(nonzero, 1)
            else:
                advantage = r - mean
            out[-1].append(advantage)
    if name != "reinforce_plus_plus_baseline":
        return out
    tokens = []
    for row, row_rewards, row_lengths in zip(out, rewards, lengths, strict=True):
        for s, r, n in zip(row, row_rewards, row_lengths, strict=True):
            tokens += [] if math.isnan(r) else [s] * n
    mean = sum(tokens) / len(tokens)
    var = sum((s - mean) ** 2 for s in tokens) / (len(tokens) - 1)
    whitened = [[(s - mean) / math.sqrt(var + 1e-8) for s in row] for row in out]
    return [
        [0.0 if math.isnan(r) else w for w, r in zip(*pair, strict=True)]
        for pair in zip(whitened, rewards, strict=True)
    ]


# --- (P, G): a reward a response ---


def test_mean_and_deviation_of_groups_match_hand_values():
    rewards = f64([[1, 0, 0], [0.1, 0.1, 0.1], [NAN, 0.3, 0.7], [NAN, 5, NAN], [NAN, NAN, NAN]])
    mean, std = advantages.group_mean_std(rewards)
    check(mean, [[1 / 3], [0.1], [0.5], [0], [0]])
    check(std, [[math.sqrt(1 / 3)], [0], [math.sqrt(0.08)], [1], [1]])
    equal = torch.full((1, 3), 0.1)  # in float32 a plain mean of these is not 0.1
    assert (equal - advantages.group_mean_std(equal)[0] == 0).all()


def test_grpo_matches_hand_values():
    rewards, lengths = f64([[1.0, 0.0, 0.0]]), torch.ones(1, 3)
    centered, std = (2 / 3, -1 / 3, -1 / 3), math.sqrt(1 / 3)  # ddof=1: (4/9 + 1/9 + 1/9) / 2
    check(advantages.grpo(rewards, lengths), [[x / (std + 1e-6) for x in centered]])
    check(advantages.grpo(rewards, lengths, norm_by_std=False), [list(centered)])
    check(advantages.grpo(rewards, lengths, eps=1.0), [[x / (std + 1) for x in centered]])


def test_grpo_batch_matches_hand_values():
    rewards = f64([[1.0, 0.0], [0.0, 0.0], [NAN, 1.0]])  # scored 1, 0, 0, 0, 1: mean 0.4, variance 1.2 / 4
    scale = 1 / (math.sqrt(0.3) + 1e-6)
    expected = [[0.5 * scale, -0.5 * scale], [0.0, 0.0], [0.0, scale]]  # the last one is alone in its group
    check(advantages.grpo_batch(rewards, torch.ones(3, 2)), expected)
    check(advantages.grpo_batch(f64([[1.0], [1.0]]), torch.ones(2, 1)), [[1 / (1 + 1e-6)]] * 2)  # no spread anywhere
    two = 0.5 / (math.sqrt(0.5) + 1e-6)
    check(advantages.grpo_batch(f64([[1.0, 0.0]]), torch.ones(1, 2)), [[two, -two]])


def test_max_rl_matches_hand_values():
    rewards = f64([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0] * 4, [-1.0, 1.0, -1.0, 0.0]])
    a, b = 1 / (0.25 + 1e-6), 1 / (0.75 + 1e-6)
    expected = [[0.75 * a] + [-0.25 * a] * 3, [0.25 * b] * 3 + [-0.75 * b], [0.0] * 4, [0.0] * 4]
    check(advantages.max_rl(rewards, torch.ones(4, 4)), expected)


def test_max_rl_is_the_gradient_of_the_log_of_the_chance_of_being_right():
    """A policy has two answers, and is right with chance p. Take all groups of n answers of which some are right. The
    mean of sum_i A_i d log pi / n is that of (1 / count) sum over right ones, which estimates d log p by definition.
    """
    p, n = 0.3, 3
    total = {"ours": 0.0, "right ones alone": 0.0}
    for group in range(2**n):
        right = [(group >> i) & 1 for i in range(n)]
        chance = math.prod(p if x else 1 - p for x in right)
        slopes = [1 / p if x else -1 / (1 - p) for x in right]  # d log pi(answer) / dp
        A = advantages.max_rl(f64([right]), torch.ones(1, n), eps=0.0)[0].tolist()
        total["ours"] += chance * sum(a * s for a, s in zip(A, slopes, strict=True)) / n
        total["right ones alone"] += chance * (1 / p if any(right) else 0.0)
    # They differ by the mean slope of a group with a right answer, whose mean over all groups is 0.
    empty = (1 - p) ** n * -1 / (1 - p)
    assert total["ours"] == pytest.approx(total["right ones alone"] + empty, rel=1e-9)


def test_grpo_passk_matches_hand_values():
    rewards = f64([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.5, 0.75, NAN], [NAN, NAN, 0.5], [0.2, 0.2, 0.2]])
    expected = [[0, 1 / (math.sqrt(1 / 3) + 1e-6), 0], [0, 0, 0], [0, 0.25 / (math.sqrt(1 / 32) + 1e-6), 0]]
    expected += [[0, 0, 0.5 / (1 + 1e-6)], [0, 0, 0]]
    check(advantages.grpo_passk(rewards, torch.ones(5, 3)), expected)
    check(advantages.grpo_passk(f64([[0.5]]), torch.ones(1, 1)), [[0.5 / (1 + 1e-6)]])
    check(advantages.grpo_passk(f64([[0.5, 0.75]]), torch.ones(1, 2)), [[0, 0.25 / (math.sqrt(1 / 32) + 1e-6)]])


def test_gdpo_matches_hand_values():
    # part 1 is grpo [1, -1] / sqrt(2) in group 1, part 2 the opposite, weighing 3; group 2 has no spread in any part
    parts = f64([[[1.0, 0.0], [0.0, 0.0]], [[10.0, 30.0], [NAN, NAN]]])
    x = (0.5 / (math.sqrt(0.5) + 1e-6)) - 3 * (10 / (math.sqrt(200) + 1e-6))
    lengths = torch.tensor([[1, 1], [2, 2]])  # tokens x, -x, 0, 0, 0, 0: mean 0, variance 2 x^2 / 5
    scale = 1 / math.sqrt(2 * x * x / 5 + 1e-8)
    check(
        advantages.gdpo(parts.sum(0), lengths, parts=parts, weights=(1.0, 3.0)), [[x * scale, -x * scale], [0.0, 0.0]]
    )


def test_gdpo_of_one_part_is_grpo_whitened_over_tokens(world):
    rewards, lengths = torch.rand(4, 3, dtype=torch.float64), torch.randint(1, 9, (4, 3))
    rewards[0, 1], rewards[2] = NAN, NAN
    mask = (torch.arange(9) < lengths.reshape(-1, 1)) & ~rewards.isnan().reshape(-1, 1)
    tokens = whiten(world, advantages.grpo(rewards, lengths).reshape(-1, 1).expand(-1, 9), mask)
    actual = advantages.gdpo(rewards, lengths, parts=rewards[None]).reshape(-1, 1)
    torch.testing.assert_close(actual * mask, tokens, rtol=1e-12, atol=1e-12)
    assert torch.equal(advantages.gdpo(rewards, lengths, parts=rewards[None], weights=(1.0,)).reshape(-1, 1), actual)


def test_gdpo_tells_apart_what_a_sum_does_not():
    """(1, 0) and (0, 1) have the same sum; the first is better than its group in a part in which few are right."""
    parts = f64([[[1.0, 0.0, 0.0, 0.0]], [[0.0, 1.0, 1.0, 1.0]]])
    assert (advantages.grpo(parts.sum(0), torch.ones(1, 4)) == 0).all()
    weighted = advantages.gdpo(parts.sum(0), torch.ones(1, 4), parts=parts, weights=(2.0, 1.0))[0]
    assert weighted[0] > 1 and (weighted[1:] < 0).all()
    with pytest.raises(AssertionError, match="3 weights"):
        advantages.gdpo(parts.sum(0), torch.ones(1, 4), parts=parts, weights=(1.0, 1.0, 1.0))


def test_rloo_matches_hand_values():
    check(advantages.rloo(f64([[1.0, 0.0, 0.0], [3.0, 5.0, 1.0]]), torch.ones(2, 3)), [[1, -0.5, -0.5], [0, 3, -3]])


def test_opo_matches_hand_values():
    # baseline (1 * 1 + 3 * 0) / 4 = 0.25
    check(advantages.opo(f64([[1.0, 0.0]]), torch.tensor([[1, 3]])), [[0.75, -0.25]])


def test_gpg_matches_hand_values():
    # 4 responses, 1 of them non-zero: alpha 4
    check(advantages.gpg(f64([[1.0, 0.0], [0.0, 0.0]]), torch.ones(2, 2)), [[2.0, -2.0], [0.0, 0.0]])
    check(advantages.gpg(torch.zeros(2, 2), torch.ones(2, 2)), [[0.0, 0.0], [0.0, 0.0]])


def test_token_baselines_match_hand_values():
    # Group 0: two rows, of which the second ends early; group 1: nothing; group 2: one row.
    returns, weights = f64([[3.0, 2.0, 1.0], [5.0, 4.0, NAN], [7.0, 7.0, 7.0]]), f64([[1.0, 1.0, 5.0], [3.0, 1.0, NAN]])
    weights = torch.cat([weights, f64([[1.0, 1.0, 1.0]])])
    mask, groups = f64([[1, 1, 1], [1, 1, 0], [1, 1, 1]]), torch.tensor([0, 0, 2])
    sums = advantages.sums_by_group(returns, weights, mask, groups, 3)
    check(sums[:, 0], [[18.0, 6.0, 5.0], [4.0, 2.0, 5.0], [2.0, 2.0, 1.0]])
    check(advantages.token_baselines(sums, eps=0.0), [[4.5, 3.0, 0.0], [0.0] * 3, [0.0] * 3])


def test_token_baselines_do_not_depend_on_who_has_which_row():
    returns, weights, mask = token_batch()
    groups = torch.tensor([0, 1, 1, 0, 1])
    whole = advantages.sums_by_group(returns, weights.abs(), mask, groups, 2)
    parts = [[0, 2], [4, 1, 3], []]
    rows = [advantages.sums_by_group(returns[i], weights[i].abs(), mask[i], groups[i], 2) for i in parts]
    torch.testing.assert_close(sum(rows), whole, rtol=1e-12, atol=1e-12)
    expected = [[0.0] * 11 for _ in range(2)]
    for p, members in enumerate(([0, 3], [1, 2, 4])):
        for t in range(11):
            there = [i for i in members if mask[i, t]]
            if len(there) > 1:
                total = sum(weights[i, t].abs().item() for i in there)
                expected[p][t] = sum((weights[i, t].abs() * returns[i, t]).item() for i in there) / (total + 1e-8)
    check(advantages.token_baselines(whole), expected)
    assert sum(x != 0 for row in expected for x in row) >= 8


def test_reinforce_plus_plus_baseline_equals_whitening_over_tokens(world):
    rewards, lengths = torch.rand(4, 3, dtype=torch.float64), torch.randint(1, 9, (4, 3))
    mask = torch.arange(9) < lengths.reshape(-1, 1)
    centered = (rewards - rewards.mean(-1, keepdim=True)).reshape(-1, 1)
    tokens = whiten(world, centered.expand(-1, 9), mask)
    actual = advantages.reinforce_plus_plus_baseline(rewards, lengths).reshape(-1, 1)
    torch.testing.assert_close(actual * mask, tokens, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grouped_matches_loop_reference(name, dtype):
    rewards, lengths = torch.rand(6, 8, dtype=dtype).round(decimals=1), torch.randint(1, 30, (6, 8))
    rewards[0, :] = NAN  # none scored
    rewards[1, 1:] = NAN  # one scored
    rewards[2, 2:] = NAN  # two scored
    rewards[3, 4] = NAN
    actual = GROUPED[name](rewards, lengths)
    assert actual.dtype == dtype
    check(actual, loop_reference(name, rewards.tolist(), lengths.tolist()), 2e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_gives_unscored_exactly_zero(name):
    rewards = torch.tensor([[NAN] * 8, [0.7] + [NAN] * 7, [1.0, 0.0] + [NAN] * 6, [0.0, 1.0] * 4])
    actual = GROUPED[name](rewards, torch.arange(1, 33).reshape(4, 8))
    assert torch.isfinite(actual).all()
    assert (actual[rewards.isnan()] == 0).all()
    assert (actual[2, : 1 if name == "grpo_passk" else 2] != 0).all()


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_unscored_does_not_change_the_scored(name):
    rewards, lengths = torch.rand(2, 8, dtype=torch.float64), torch.randint(1, 9, (2, 8))
    padded = torch.cat([rewards, torch.full((2, 3), NAN, dtype=torch.float64)], dim=1)
    padded_lengths = torch.cat([lengths, torch.full((2, 3), 1000)], dim=1)
    actual = GROUPED[name](padded, padded_lengths)[:, :8]
    torch.testing.assert_close(actual, GROUPED[name](rewards, lengths), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_with_nothing_scored_is_zero(name):
    assert (GROUPED[name](torch.full((2, 8), NAN), torch.ones(2, 8)) == 0).all()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo"])
@pytest.mark.parametrize("num_in_group", [1, 8])
def test_grouped_single_scored_response_keeps_its_reward(name, num_in_group):
    rewards = f64([[0.7] + [NAN] * (num_in_group - 1)])
    expected = 0.7 / (1 + 1e-6) if name == "grpo" else 0.7
    check(GROUPED[name](rewards, torch.full((1, num_in_group), 5)), [[expected] + [0.0] * (num_in_group - 1)])


def test_gpg_single_scored_response_keeps_its_scaled_reward():
    check(advantages.gpg(f64([[0.7, NAN], [0.0, 0.0]]), torch.ones(2, 2)), [[2.1, 0.0], [0.0, 0.0]])


def test_reinforce_plus_plus_baseline_single_scored_response_enters_with_its_reward():
    # tokens 0.7, 0.7, 0, 0: mean 0.35, unbiased variance 4 * 0.35^2 / 3
    actual = advantages.reinforce_plus_plus_baseline(f64([[0.7, NAN], [0.0, 0.0]]), torch.tensor([[2, 9], [1, 1]]))
    expected = 0.35 / math.sqrt(4 * 0.35**2 / 3 + 1e-8)
    check(actual, [[expected, 0.0], [-expected, -expected]])
    two = advantages.reinforce_plus_plus_baseline(f64([[1.0, 0.0]]), torch.ones(1, 2))  # 0.5 and -0.5: variance 0.5
    check(two, [[0.5 / math.sqrt(0.5 + 1e-8), -0.5 / math.sqrt(0.5 + 1e-8)]])


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 0.7, 1e6 + 0.1, -0.1])
@pytest.mark.parametrize("num_in_group", [3, 7, 8])
def test_grouped_equal_rewards_give_exactly_zero(name, value, num_in_group):
    rewards = torch.full((3, num_in_group), value)
    rewards[2, 1] = NAN
    lengths = torch.randint(1, 2000, rewards.shape)
    assert (GROUPED[name](rewards, lengths) == 0).all()


def test_grpo_nearly_equal_rewards_are_not_floored():
    rewards = f64([[1.0, 1.0 + 1e-6, 1.0]])
    check(advantages.grpo(rewards, torch.ones(1, 3)), loop_reference("grpo", rewards.tolist(), [[1] * 3]), 1e-6)


def test_grouped_estimators_differ():
    rewards, lengths = f64([[1.0, 0.0, 0.0, 0.3], [0.0, 1.0, 1.0, 1.0]]), torch.tensor([[3, 9, 4, 2], [5, 1, 8, 6]])
    results = [f(rewards, lengths) for f in GROUPED.values()]
    for i, first in enumerate(results):
        for second in results[:i]:
            assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "grpo_batch", "max_rl", "grpo_passk", "rloo", "gpg"])
def test_grouped_ignores_lengths_where_the_formula_has_none(name):
    rewards = torch.rand(3, 4)
    assert torch.equal(GROUPED[name](rewards, torch.ones(3, 4)), GROUPED[name](rewards, torch.randint(1, 9, (3, 4))))


# --- (B, T): a reward a token ---


def gae_brute_force(rewards, values, mask, gamma, lam):
    """Sum over l of (gamma * lam)^l * delta_{t+l}, on rows from which masked tokens were removed beforehand."""
    advantages_out = [[0.0] * len(row) for row in rewards]
    for i, row_mask in enumerate(mask):
        kept = [t for t, m in enumerate(row_mask) if m]
        r, v = [rewards[i][t] for t in kept], [values[i][t] for t in kept] + [0.0]
        deltas = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(kept))]
        for k, t in enumerate(kept):
            advantages_out[i][t] = sum((gamma * lam) ** (n - k) * deltas[n] for n in range(k, len(kept)))
    returns = [
        [(a + v) * m for a, v, m in zip(*row, strict=True)] for row in zip(advantages_out, values, mask, strict=True)
    ]
    return advantages_out, returns


def token_batch(seed=0, num_rows=5, num_tokens=11):
    """Rewards, values, mask with observation gaps, padding, and one row without a valid token."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, num_rows, num_tokens, dtype=torch.float64, generator=generator)
    mask = (torch.rand(num_rows, num_tokens, generator=generator) < 0.6).double()
    mask[0, 7:] = 0.0
    mask[1, :3] = 0.0
    mask[2] = 0.0
    mask[3] = 1.0
    return rewards, values, mask


def test_gae_matches_hand_values():
    actual = gae(f64([[0.0, 9.0, 1.0]]), f64([[0.5, 9.0, 0.25]]), f64([[1, 0, 1]]), gamma=1.0, lam=1.0)
    check(actual[0], [[0.5, 0.0, 0.75]])
    check(actual[1], [[1.0, 0.0, 1.0]])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0), (0.0, 0.5)])
def test_gae_matches_brute_force_with_observation_gaps(gamma, lam):
    rewards, values, mask = token_batch()
    actual = gae(rewards, values, mask, gamma=gamma, lam=lam)
    expected = gae_brute_force(rewards.tolist(), values.tolist(), mask.tolist(), gamma, lam)
    check(actual[0], expected[0])
    check(actual[1], expected[1])


def test_gae_ignores_everything_at_masked_tokens():
    rewards, values, mask = token_batch()
    poisoned = [torch.where(mask.bool(), x, NAN) for x in (rewards, values)]
    clean, dirty = (gae(*x, mask, gamma=0.9, lam=0.8) for x in ((rewards, values), poisoned))
    for first, second in zip(clean, dirty, strict=True):
        assert torch.equal(first, second)
        assert (second[mask == 0] == 0).all()


def test_gae_with_lambda_one_and_zero_values_is_returns_to_go():
    rewards, values, mask = token_batch()
    advantage, returns = gae(rewards, torch.zeros_like(values), mask, gamma=0.9, lam=1.0)
    expected = advantages.returns_to_go(rewards, mask, gamma=0.9)
    torch.testing.assert_close(advantage, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, expected, rtol=1e-12, atol=1e-12)


def test_gae_returns_carry_no_gradient():
    rewards, values, mask = token_batch()
    for out in gae(rewards, values.requires_grad_(), mask, gamma=1.0, lam=0.95):
        assert not out.requires_grad
    assert not advantages.returns_to_go(rewards.requires_grad_(), mask, gamma=1.0).requires_grad


def test_returns_to_go_matches_hand_values():
    check(advantages.returns_to_go(f64([[0.0, 9.0, 1.0]]), f64([[1, 0, 1]]), gamma=0.5), [[0.5, 0.0, 1.0]])
    check(advantages.returns_to_go(f64([[1.0, 2.0, 4.0, NAN]]), f64([[1, 1, 1, 0]]), gamma=0.5), [[3.0, 4.0, 4.0, 0.0]])


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_returns_to_go_matches_brute_force_with_observation_gaps(gamma):
    rewards, _, mask = token_batch(seed=3)
    expected = [[0.0] * mask.shape[1] for _ in mask]
    for i, row in enumerate(mask.tolist()):
        kept = [t for t, m in enumerate(row) if m]
        for k, t in enumerate(kept):
            expected[i][t] = sum(gamma ** (n - k) * rewards[i, kept[n]].item() for n in range(k, len(kept)))
    check(advantages.returns_to_go(rewards, mask, gamma=gamma), expected)


def whiten(world, x, mask, **options):
    """Whitened by the statistics of x itself."""
    mean, var = world.moments(x, mask)
    return advantages.whiten(x, mask, mean=mean, var=var, **options)


def test_whiten_uses_the_statistics_of_the_whole_step():
    part = advantages.whiten(f64([[1.0, 7.0, 5.0]]), f64([[1, 0, 1]]), mean=3.0, var=4.0, eps=0.0)
    check(part, [[-1.0, 0.0, 1.0]])
    large = torch.tensor([[2.0**24, 2.0**24 + 2]])  # in float32 the number between them is one of them
    check(advantages.whiten(large, torch.ones(1, 2), mean=2.0**24 + 1, var=4.0, eps=0.0), [[-0.5, 0.5]])


def test_whiten_matches_hand_values(world):
    # valid 1, 2, 3: mean 2, unbiased variance 1
    scale = 1 / math.sqrt(1 + 1e-8)
    check(
        whiten(world, f64([[1.0, 7.0, 2.0], [3.0, NAN, 9.0]]), f64([[1, 0, 1], [1, 0, 0]])),
        [[-scale, 0, 0], [scale, 0, 0]],
    )
    check(whiten(world, f64([[1.0, 2.0, 3.0]]), f64([[1, 1, 1]]), eps=3.0), [[-0.5, 0.0, 0.5]])


def test_whiten_gives_zero_mean_unit_variance(world):
    x, _, mask = token_batch()
    valid = whiten(world, x * 5 + 3, mask)[mask.bool()]
    assert abs(valid.mean()) < 1e-12 and abs(valid.var() - 1) < 1e-7


@pytest.mark.parametrize("mask", [[[0, 0, 0]], [[0, 1, 0]]])
def test_whiten_of_fewer_than_two_tokens_is_zero(world, mask):
    assert (whiten(world, f64([[4.0, 5.0, 6.0]]), f64(mask)) == 0).all()


def test_whiten_of_equal_tokens_is_exactly_zero(world):
    assert (whiten(world, torch.full((7, 3), 0.1), torch.ones(7, 3)) == 0).all()


def test_whiten_does_not_hide_a_valid_nan(world):
    assert whiten(world, f64([[1.0, NAN, 2.0]]), torch.ones(1, 3)).isnan().all()


# --- turns of a conversation ---

# A group of three: turns of [1, 0, 2], [0, 3], and [0.5]; then one of [1], [NAN] that is not scored, and [2].
TURNS = f64([[[1, 0, 2], [0, 3, NAN], [0.5, NAN, NAN]], [[1, NAN, NAN], [NAN, NAN, NAN], [2, NAN, NAN]]])
TURN_LENGTHS = f64([[[4, 1, 2], [2, 2, 0], [3, 0, 0]], [[1, 0, 0], [5, 5, 0], [2, 0, 0]]])


def by_turn(estimator, rewards, lengths):
    """The advantages of turns, (P, G, K)."""
    P, G, K = rewards.shape
    returns = turns.turn_returns(rewards)
    found = estimator(returns, torch.stack([lengths[i, :, k] for i in range(P) for k in range(K)]))
    return torch.stack([torch.stack([found[i * K + k] for k in range(K)], -1) for i in range(P)])


def test_a_turn_is_compared_with_the_same_turn_of_its_group_by_what_it_earned_from_then_on():
    returns = [[3, 3, 0.5], [2, 3, NAN], [2, NAN, NAN], [1, NAN, 2], [NAN] * 3, [NAN] * 3]
    torch.testing.assert_close(turns.turn_returns(TURNS), f64(returns), rtol=0, atol=0, equal_nan=True)
    std = [math.sqrt(2 * (5 / 6) ** 2 + (5 / 3) ** 2) / math.sqrt(2), math.sqrt(0.5), 1, math.sqrt(0.5)]
    first = [[x / (std[0] + 1e-6) for x in (5 / 6, 5 / 6, -5 / 3)], [x / (std[1] + 1e-6) for x in (-0.5, 0.5)]]
    half = 0.5 / (std[3] + 1e-6)
    expected = [
        [[first[0][0], first[1][0], 2 / (1 + 1e-6)], [first[0][1], first[1][1], 0], [first[0][2], 0, 0]],
        [[-half, 0, 0], [0, 0, 0], [half, 0, 0]],
    ]
    check(by_turn(advantages.grpo, TURNS, TURN_LENGTHS), expected)
    check(by_turn(advantages.rloo, f64([[[1, 0], [0, 3]]]), torch.ones(1, 2, 2)), [[[-2, -3], [2, 3]]])
    baseline = (4 * 3 + 2 * 3 + 3 * 0.5) / 9  # weighted by the lengths of turns
    found = by_turn(advantages.opo, TURNS, TURN_LENGTHS)
    check(found[0, :, 0], [3 - baseline, 3 - baseline, 0.5 - baseline])
    check(found[0, :2, 1], [2 - 8 / 3, 3 - 8 / 3])


@pytest.mark.parametrize("name", GROUPED)
def test_a_single_turn_is_a_response(name):
    rewards, lengths = f64([[1, 0, NAN], [0.2, 0.7, 0.2]]), f64([[3, 4, 5], [1, 2, 3]])
    found = by_turn(GROUPED[name], rewards[..., None], lengths[..., None])
    torch.testing.assert_close(found[..., 0], GROUPED[name](rewards, lengths), rtol=0, atol=0)


def test_equal_returns_of_other_parts_are_equal():
    """0.1 + 0.2 is not 0.3, and no advantage comes of that."""
    rewards = f64([[[0.1, 0.2], [0.3, 0.0], [0.0, 0.3]]])
    assert by_turn(advantages.grpo, rewards, torch.ones(1, 3, 2))[0, :, 0].abs().max() < 1e-9


def test_tokens_get_the_value_of_their_turn():
    values, mask = f64([[5, 7, NAN], [1, 2, 3], [4, NAN, NAN]]), [[0, 1, 1, 0, 1, 0], [1, 0, 1, 0, 0, 1], [0] * 6]
    at_turns, at_ends = turns.at_turns(values, f64(mask)), turns.at_turn_ends(values, f64(mask))
    check(at_turns, [[0, 5, 5, 0, 7, 0], [1, 0, 2, 0, 0, 3], [0] * 6])
    check(at_ends, [[0, 0, 5, 0, 7, 0], [1, 0, 2, 0, 0, 3], [0] * 6])
    check(turns.at_turns(f64([[9]]), f64([[0, 1, 0, 1]])), [[0, 9, 0, 9]])  # one value of all turns
    check(turns.at_turn_ends(f64([[9]]), f64([[0, 1, 1, 1]])), [[0, 0, 0, 9]])


# --- every public function ---

PG, BT = torch.linspace(0, 1, 12).reshape(3, 4), torch.linspace(-1, 1, 30).reshape(5, 6)
MASK = (torch.arange(30) % 4 != 1).float().reshape(5, 6)
CALLS = {
    "grpo": (advantages.grpo, [PG, torch.ones(3, 4)], {}),
    "grpo_batch": (advantages.grpo_batch, [PG, torch.ones(3, 4)], {}),
    "max_rl": (advantages.max_rl, [PG, torch.ones(3, 4)], {}),
    "grpo_passk": (advantages.grpo_passk, [PG, torch.ones(3, 4)], {}),
    "gdpo": (
        lambda rewards, lengths, parts, **others: advantages.gdpo(rewards, lengths, parts=parts, **others),
        [PG, torch.ones(3, 4), torch.stack([PG, PG.flip(1)])],
        {"weights": (1.0, 0.5)},
    ),
    "rloo": (advantages.rloo, [PG, torch.ones(3, 4)], {}),
    "opo": (advantages.opo, [PG, torch.ones(3, 4)], {}),
    "gpg": (advantages.gpg, [PG, torch.ones(3, 4)], {}),
    "reinforce_plus_plus_baseline": (advantages.reinforce_plus_plus_baseline, [PG, torch.ones(3, 4)], {}),
    "turn_returns": (turns.turn_returns, [torch.stack([PG, PG + 1], -1)], {}),
    "at_turns": (turns.at_turns, [BT[:, :2], MASK], {}),
    "at_turn_ends": (turns.at_turn_ends, [BT[:, :2], MASK], {}),
    "sums_by_group": (
        lambda *x: advantages.sums_by_group(*x, torch.tensor([0, 0, 2, 2, 2]), 3),
        [BT, BT + 1, MASK],
        {},
    ),
    "token_baselines": (advantages.token_baselines, [torch.stack([PG, PG + 1, PG + 2])], {}),
    "gae": (gae, [BT, BT + 1, MASK], {"gamma": 0.9, "lam": 0.8}),
    "returns_to_go": (advantages.returns_to_go, [BT, MASK], {"gamma": 0.9}),
    "whiten": (advantages.whiten, [BT, MASK], {"mean": 0.1, "var": 2.0}),
    "group_mean_std": (advantages.group_mean_std, [PG], {}),
}


def test_calls_cover_every_public_function():
    functions = [(x.__name__, n, f) for x in (advantages, turns) for n, f in vars(x).items() if callable(f)]
    public = [n for module, n, f in functions if f.__module__ == module]
    assert CALLS.keys() - {"gae"} == {n for n in public if not n.startswith("_")}  # gae is in train_ppo.py


@pytest.mark.parametrize("name", CALLS)
def test_functions_do_not_mutate_inputs(name):
    function, tensors, options = CALLS[name]
    tensors = [torch.where(torch.rand_like(x) < 0.2, NAN, x) if x is PG else x.clone() for x in tensors]
    before = [x.clone() for x in tensors]
    function(*tensors, **options)
    for old, new in zip(before, tensors, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_functions_keep_the_dtype(name):
    function, tensors, options = CALLS[name]
    for dtype in (torch.float32, torch.float64):
        out = function(*[x.to(dtype) for x in tensors], **options)
        for result in out if isinstance(out, tuple) else (out,):
            assert result.dtype == dtype


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"group_mean_std", "turn_returns", "gae"}))
def test_functions_raise_on_shape_mismatch(name):
    function, tensors, options = CALLS[name]
    for i, tensor in enumerate(tensors):
        for wrong in (tensor[:-1], tensor[..., None]):
            with pytest.raises(AssertionError, match="unexpected shapes"):
                function(*tensors[:i], wrong, *tensors[i + 1 :], **options)


@pytest.mark.parametrize("name", ["gae", "returns_to_go", "whiten"])
def test_token_functions_accept_any_mask_dtype(name):
    function, tensors, options = CALLS[name]
    expected = function(*tensors, **options)
    for dtype in (torch.bool, torch.int64, torch.float64):
        torch.testing.assert_close(function(*tensors[:-1], MASK.to(dtype), **options), expected)

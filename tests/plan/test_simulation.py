"""The simulation of a step: partial rollouts and the pools of train_async.py, by hand."""

import itertools

import numpy as np
import pytest

from extras.plan import simulation


def test_the_model_of_a_step_by_hand(monkeypatch):
    given = iter([[2, 4], [3, 1], [5, 2], [1, 1]])  # lengths of the groups, in the order of their prompts
    monkeypatch.setattr(simulation, "lengths", lambda args, random: np.array(next(given)))
    speeds = dict(base_ms=10, sequence_ms=1, read_ms=100, update_ms=50, fixed_s=1, prompt_length=7)
    args = simulation.Args(prompts=1, rollout_n=2, **speeds)
    steps, whole, have = simulation.simulate(args, 1.0, steps=2)
    # Step 1: groups [2, 4] and [3, 1] begin. Four are open for 1 token, three for 1, two for 1.
    # Step 2: [5, 2] begins and [2, 4] lacks 1 token; three are open for that one, then [2, 4] is complete.
    assert steps[0][1:5] == (4, 3, 4 + 3 + 2, 2 * 7)
    assert steps[0].generate_s == pytest.approx((3 * 10 + 9 + 100 * 14 / 1000) / 1000)
    assert steps[0].step_s == pytest.approx(steps[0].generate_s + 50 * (4 + 7) / 1e6 + 1)
    assert steps[1][1:5] == (6, 1, 3, 7 + (7 + 3))  # [2, 4] is read again with the 3 tokens of its open response
    assert whole.tolist() == [[5, 2]] and have.tolist() == [1]


@pytest.mark.parametrize("base, sequence, ratio", [(1, 0, 0.5), (0, 1, 1.0)])
def test_alike_lengths_gain_only_what_a_larger_batch_gains(base, sequence, ratio):
    """Twice the groups in flight end together, every second step: half of the decoding steps, each of twice as many."""
    alike = dict(prompts=4, rollout_n=2, mean_length=1e9, max_length=50, read_ms=0, steps=9)
    args = simulation.Args(**alike, base_ms=base, sequence_ms=sequence)
    alone, ahead = (sum(x.generate_s for x in simulation.steady(args, share)) for share in (0.0, 1.0))
    assert alone == pytest.approx(6 * 0.05 * (8 if sequence else 1)) and ahead == pytest.approx(ratio * alone)


def test_pools_wait_for_the_longest_response_or_for_the_trainer(monkeypatch):
    """Groups of one response, of 100 and 300 tokens in turn, at 10 ms per token; a step trains on two: 1 s and 3 s."""
    given = itertools.cycle([[100], [300]])
    monkeypatch.setattr(simulation, "lengths", lambda args, random: np.array(next(given)))
    speeds = dict(base_ms=10, sequence_ms=0, read_ms=0, prompt_length=0, rollout_n=1, prompts=1, steps=9)
    rate = lambda staleness, **own: simulation.pools(simulation.Args(**speeds, **own), staleness, 1, 1)  # noqa: E731
    tick = 0.1  # after each event the model waits for the next tick, at most
    # S = 0: 3 s of sampling, then 2 s of training. S = 1: the groups of two steps are sampled meanwhile. The longest of
    # a step takes 3 s in any case, so two steps take at least 3 + 2 s. With much staleness only training takes time.
    for staleness, step_s in ((0, 5.0), (1, 2.5), (8, 2.0)):
        assert 400 / (step_s + 2 * tick) <= rate(staleness, update_ms=0, fixed_s=2.0) <= 400 / step_s + 1e-9


def test_a_batch_may_be_named_instead_of_one_for_each_gpu(monkeypatch):
    """Two groups in a step of one sampler and one trainer are what --prompts 1 for each of two GPUs is."""
    given = itertools.cycle([[100], [300]])
    monkeypatch.setattr(simulation, "lengths", lambda args, random: np.array(next(given)))
    speeds = dict(base_ms=10, sequence_ms=0, read_ms=0, prompt_length=0, rollout_n=1, steps=9, update_ms=0, fixed_s=2)
    of_gpus = simulation.pools(simulation.Args(**speeds, prompts=1), 1, 1, 1)
    assert simulation.pools(simulation.Args(**speeds, prompts=7), 1, 1, 1, batch=2) == of_gpus

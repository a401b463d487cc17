"""Partial rollouts: groups that outlive a step are trained once, keep their tokens, and survive a checkpoint."""

import importlib
import time
from dataclasses import replace
from statistics import mean, stdev

import helpers_scripts as h
import launch
import numpy as np
import pytest
from helpers_data import spans_of
from transformers import AutoTokenizer

from extras.agents import EnvironmentFlags, open_partner
from extras.partial.in_flight import InFlight, pause
from extras.partial.rows import begun_in_step
from rl import stop
from rl.data.order import prompts_for_step
from rl.data.types import Sampling
from rl.flags import build
from rl.ranks import Ranks, init_ranks
from rl.run import loop_state
from rl.sampling.engines import make_engine
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.groups import sample_groups
from rl.sampling.loop import Loop

STOPS = (2, *range(20, 32))
ROWS = [{"prompt_ids": [1, 35, 33 + i % 5], "row_index": i, "extra_info": {}} for i in range(40)]
WAY = Sampling(2, max_tokens=40, stop_token_ids=STOPS)


@pytest.fixture
def engine(tiny_model):
    return make_engine(tiny_model, init_ranks(), EngineFlags(engine="hf"), longest=64)


handed = {}  # by the first sample of each group that is complete and not taken yet: the index of the row beside it


def hand_over(row, samples):
    handed[samples[0]] = row["row_index"]


def steps_of(engine, flight, steps, *, batch=4, way=WAY, partner=None):
    """Rows and samples of each of these steps; the engine's weights count as pushed before each."""
    for step in steps:
        engine.policy_version = step + 1
        rows = begun_in_step(ROWS, step, batch, 0, flight.ahead)
        rows, samples = flight.sample(engine, rows, way, hand_over, partner, step=step)
        indices = [row["row_index"] for row in rows]
        assert indices == [handed.pop(first) for first in samples[:: way.n]] == [s.row_index for s in samples[:: way.n]]
        yield indices, samples


def test_ahead_changes_when_rows_begin_and_not_their_order():
    whole = [row for step in range(12) for row in prompts_for_step(ROWS, step, 4, 7)]
    for ahead in (1, 4, 6):
        begun = [row for step in range(9) for row in begun_in_step(ROWS, step, 4, 7, ahead)]
        assert len(begun) == 36 + ahead and begun == whole[: 36 + ahead]


def test_every_group_is_trained_once_and_long_responses_as_often_as_short_ones(engine):
    flight = InFlight(0.5, ROWS, 4, init_ranks(), [], 5)
    assert flight.ahead == 2
    found = list(steps_of(engine, flight, range(40)))
    begun = [row["row_index"] for step in range(42) for row in prompts_for_step(ROWS, step, 4, 0)][: 40 * 4 + 2]
    left = [x["row_index"] for x in flight.state()["in_flight"]]
    assert len(left) == 2 and sorted([i for tickets, _ in found for i in tickets] + left) == sorted(begun)
    samples = [s for _, own in found for s in own]
    versions = [[v for v, _ in spans_of(s)] for s in samples]
    assert any(len(x) > 1 for x in versions) and all(x == sorted(set(x)) for x in versions)
    assert all(sum(n for _, n in spans_of(s)) == len(s.response_ids) for s in samples)
    # The first steps begin with short ones; from then on lengths are those of synchronous sampling.
    lengths = [len(s.response_ids) for _, own in found[4:] for s in own]
    other = [len(s.response_ids) for step in range(40) for s in sample_groups(engine, ROWS[:4], WAY, seed=step)]
    error = (stdev(lengths) ** 2 / len(lengths) + stdev(other) ** 2 / len(other)) ** 0.5
    assert abs(mean(lengths) - mean(other)) < 3 * error
    waited = [len(x) for x, s in zip(versions, samples, strict=True) if len(s.response_ids) > 15]
    assert mean(waited) > mean(map(len, versions))  # it is the long ones that outlive a step


def saved_and_read(flight, folder):
    loop_state.write(folder, 0, loop_state.encode(flight.state()))
    return loop_state.read(folder, 1)


def test_a_resumed_stream_samples_the_same_tokens(engine, tmp_path):
    unbroken = InFlight(0.5, ROWS, 4, init_ranks(), [], 5)
    list(steps_of(engine, unbroken, range(3)))
    states = saved_and_read(unbroken, tmp_path)
    assert any(group["open"] for group in states[0]["in_flight"])
    resumed = InFlight(0.5, ROWS, 4, init_ranks(), states, 5)
    assert saved_and_read(resumed, tmp_path)[0].keys() == states[0].keys()  # a stop before the first step loses nothing
    expected = [list(steps_of(engine, unbroken, [step])) for step in range(3, 6)]
    found = [list(steps_of(engine, resumed, [step])) for step in range(3, 6)]
    for (tickets, samples), (others, same) in zip(sum(expected, []), sum(found, []), strict=True):
        assert tickets == others
        for s, other in zip(samples, same, strict=True):
            for name, x in vars(s).items():
                np.testing.assert_equal(x, getattr(other, name), err_msg=name)


@pytest.mark.parametrize("kind", ["open", "done"])
def test_groups_that_an_older_version_saved_are_refused_by_all_ranks(kind):
    """It saved versions as spans in the place of columns."""
    arrays = np.array([5], np.int32), np.array([1], np.int8), np.array([-1.0], np.float32)
    older = {"open": [0, *arrays, [[3, 1]], None, 0], "done": [0, dict(prompt_ids=[1], policy_versions=[[3, 1]])]}
    group = {"row_index": 0, "prompt_ids": np.array(ROWS[0]["prompt_ids"]), "open": [], "done": [], kind: [older[kind]]}
    for states in ([{"in_flight": [group]}, {"in_flight": []}], [{"in_flight": []}, {"in_flight": [group]}]):
        with pytest.raises(ValueError, match="an older version has written.*take another --experiment-name"):
            InFlight(0.5, ROWS, 4, init_ranks(), states, 5)


def test_groups_are_dealt_out_anew_and_begin_again_where_they_no_longer_fit(engine, tmp_path):
    flight = InFlight(1.0, ROWS, 4, init_ranks(), [], 5)
    list(steps_of(engine, flight, range(2)))
    (state,) = saved_and_read(flight, tmp_path)
    numbers = [group["row_index"] for group in state["in_flight"]]
    assert len(numbers) == 4
    halves = [{"in_flight": state["in_flight"][:2]}, {"in_flight": state["in_flight"][2:]}]
    three = [replace(init_ranks(), rank=rank, size=3, data_rank=rank, data_size=3) for rank in range(3)]
    dealt = [InFlight(1.0, ROWS, 4, ranks, halves, 5).saved for ranks in three]
    assert [[group["row_index"] for group in own] for own in dealt] == [numbers[:1], numbers[1:2], numbers[2:]]
    changed = [row | {"prompt_ids": [5, 6]} if row["row_index"] == numbers[0] else row for row in ROWS]
    other = InFlight(1.0, changed, 4, init_ranks(), [state], 5)
    engine.policy_version = 3
    rows, samples = other.sample(engine, [], WAY, hand_over, step=9)
    again = [s for s in samples if s.row_index == numbers[0]]
    assert [s.prompt_ids.tolist() for s in again] == [[5, 6]] * 2
    assert all([v for v, _ in spans_of(s)] == [3] for s in again)


def test_groups_begin_again_if_they_are_longer_than_a_lowered_limit(engine, tmp_path):
    flight = InFlight(1.0, ROWS, 4, init_ranks(), [], 5)
    list(steps_of(engine, flight, range(2)))
    (state,) = saved_and_read(flight, tmp_path)
    longest = {
        group["row_index"]: max(
            [len(x["response_ids"]) for _, x in group["done"]] + [len(x[1]) + 1 for x in group["open"]]
        )
        for group in state["in_flight"]
    }
    limit = sorted(longest.values())[1]
    assert 1 < limit < max(longest.values())
    resumed = InFlight(1.0, ROWS, 4, init_ranks(), [state], 5)
    engine.policy_version = 3
    _, samples = resumed.sample(engine, [], replace(WAY, max_tokens=limit), hand_over, step=9)
    assert all(len(s.response_ids) <= limit for s in samples) and {s.row_index for s in samples} == longest.keys()
    began_again = {i for i in longest if all(v == 3 for s in samples if s.row_index == i for v, _ in spans_of(s))}
    assert began_again == {i for i, n in longest.items() if n > limit}


def test_every_rank_begins_as_many_groups_as_it_takes(engine):
    """7 prompts, and one ahead, on 5 ranks: the third has two of 7, and of 8 it would have one."""
    for rank in range(5):
        ranks = Alone(**vars(init_ranks()) | dict(rank=rank, size=5, data_rank=rank, data_size=5))
        flight = InFlight(0.1, ROWS, 7, ranks, [], 5)
        rows, _ = flight.sample(engine, begun_in_step(ROWS, 0, 7, 0, 1), WAY, hand_over, step=0)
        assert len(rows) == len(ranks.slice_of(7, rank)) and len(flight.state()["in_flight"]) == (rank == 4)


class Alone(Ranks):
    """A rank whose peers are not there."""

    def all_gather(self, items):
        return list(items)


# A `reset` that returns nothing, as many do.
GAME = """
import time
class Environment:
    def reset(self, row, seed):
        self.latency = row["extra_info"].get("latency", 0)
    def step(self, reply):
        time.sleep(self.latency)
        return None if reply.turn == 3 else [{"role": "user", "content": "1"}]
"""


def test_conversations_outlive_a_step_too(engine, tiny_model, tmp_path, monkeypatch):
    (tmp_path / "game.py").write_text(GAME)
    flags = EnvironmentFlags(environment=str(tmp_path / "game.py"), max_turns=4)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    partner = open_partner(flags, tokenizer, STOPS)
    try:
        way = replace(WAY, max_tokens=60)
        flight = InFlight(1.0, ROWS, 4, init_ranks(), [], 5)
        found = []
        for step in range(6):
            found += steps_of(engine, flight, [step], way=way, partner=partner)
            assert not flight.loop.waiting  # nobody is asked while the engine sleeps
            if step < 2:  # an evaluation has conversations of its own
                held_out = sample_groups(engine, ROWS[:12], way, hand_over, partner, seed=1)
                assert [s.row_index for s in held_out[::2]] == list(range(12))
                assert all(s.num_sampled and s.finish_reason != "error" for s in held_out)
        samples = [s for _, own in found for s in own]
        assert any(len(spans_of(s)) > 1 and s.outcome.facts["turns"] > 1 for s in samples)
        for s in samples:
            facts = s.outcome.facts
            assert s.num_sampled == sum(n for _, n in spans_of(s)) == sum(facts["lengths"])
            assert len(facts["lengths"]) == facts["turns"] and all(facts["lengths"])
        (state,) = saved_and_read(flight, tmp_path)
        assert len(state["in_flight"]) == 4 and not any(group["open"] for group in state["in_flight"])
        # A run that is asked to stop does not wait for environments.
        slow = Loop(engine, partner)
        slow.start("slow", ROWS[0] | {"extra_info": {"latency": 60}}, way)
        while slow.is_open() and not any(x.turns for x in slow.trajectories.values()):
            slow.step()
        assert slow.waiting
        start = time.monotonic()
        monkeypatch.setattr(stop, "requested", lambda group: True)
        list(pause(slow))
        assert slow.waiting and time.monotonic() - start < 50
    finally:
        partner.close()


SETTINGS = dict(partial_rollouts=0.75, rollout_is="token", total_training_steps=5, save_freq=1, max_response_length=30)


@pytest.mark.parametrize("ranks", h.some([1, 2], 2))
def test_a_run_that_is_resumed_is_the_unbroken_one_bit_by_bit(ranks, tmp_path_factory, tmp_path):
    task = h.make_task_with_stops(tmp_path_factory.mktemp("task"))
    for name, changes in (("unbroken", {}), ("resumed", dict(resume_mode=str(tmp_path / "unbroken/global_step_2")))):
        settings = h.grpo_settings(task, tmp_path / name, **SETTINGS, **changes)
        run = launch.fork("train_grpo", settings, tmp_path / f"{name}.log", ranks=ranks)
        assert run.ends() == [0] * ranks, run.log.read_text()[-6000:]
    left, right = (tmp_path / name / "global_step_5" for name in ("unbroken", "resumed"))
    h.assert_same(h.weights(left), h.weights(right))
    h.assert_same(h.saved_state(left), h.saved_state(right))
    lines = h.timeless(h.read_jsonl(tmp_path / "unbroken" / "metrics.jsonl"))
    assert lines[2:] == h.timeless(h.read_jsonl(tmp_path / "resumed" / "metrics.jsonl"))
    assert max(line["rollout/staleness_max"] for line in lines) >= 1 and lines[-1]["rollout/mixed_frac"] > 0
    assert all(line.get("rollout/logprob_gap_mean", 0) < 1e-5 for line in lines)  # of fresh tokens, if there are any
    assert max(line.get("rollout/stale_gap_mean", 0) for line in lines) > 1e-3


# All of them take them from one function of rl/; of the scripts with a critic, and with a teacher, one stays.
FRESH = h.some(["grpo", "grpo_variants", "ppo", "reinforce", "prime", "distill"], "ppo", "distill")


@pytest.mark.parametrize("script", FRESH)
def test_a_step_of_old_tokens_alone_does_not_take_them_for_new_ones(script, without_stops, tmp_path):
    """All responses are equally long, so that the groups of step 2 are complete in step 1."""
    module, settings = importlib.import_module(f"train_{script}"), getattr(h, f"{script.split('_')[0]}_settings")
    sizes = dict(train_batch_size=2, ppo_mini_batch_size=2, rollout_n=2, partial_rollouts=1.0)
    own = dict(adv_estimator="reinforce_plus_plus") if script == "reinforce" else {}
    module.main(build(module.Args, **settings(without_stops, tmp_path / "run", **sizes, **own, rollout_is="token")))
    first, second = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert 0 < first["rollout/logprob_gap_max"] < 1e-5 and first["rollout/staleness_max"] == 0
    assert second["rollout/staleness_mean"] == second["rollout/staleness_max"] == 1
    assert "rollout/logprob_gap_max" not in second  # no token of this step was sampled by its weights
    assert second["rollout/stale_gap_mean"] > 1e-4


@pytest.fixture(scope="module")
def without_stops(tmp_path_factory):
    return h.make_task(tmp_path_factory.mktemp("task"))

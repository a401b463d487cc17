"""What the number of a prompt stands for, and how the samplers of one machine are started again."""

import launch
import numpy as np
import pytest

from extras.samplers import Work, protocol
from extras.samplers.local import LocalSamplers
from extras.samplers.prompts import Prompts
from rl import children
from rl.data.order import prompts_for_step
from rl.data.types import Sampling

ROWS = [{"row_index": 10 * i, "prompt_ids": np.int32([i])} for i in range(7)]
HELD_OUT = [{"row_index": i, "prompt_ids": np.int32([i])} for i in range(3)]


@pytest.fixture
def prompts():
    return Prompts(Work(None, ROWS, Sampling(n=4), None, None, 3, 9, 16, seed=5), 1, 80)


def test_numbers_are_the_prompts_of_each_step_in_their_order(prompts):
    for step in (0, 4, 1, 8):  # in any order: samplers of different speed ask for them
        rows = [prompts.row(3 * step + place)["row_index"] for place in range(3)]
        assert rows == [row["row_index"] for row in prompts_for_step(ROWS, step, 3, 5)]
    assert prompts.sampling(20).n == 4 and prompts.leases(20) is prompts.ledger
    assert prompts.describe(4) == f"prompt 4, row {prompts.row(4)['row_index']} of --train-files,"


def test_held_out_numbers_are_below_zero_and_new_for_each_version(prompts):
    prompts.ledger.draw(0)
    prompts.evaluate(HELD_OUT, Sampling(n=2))
    assert prompts.evaluation.waiting == [-3, -2, -1]
    assert [prompts.row(number)["row_index"] for number in (-3, -2, -1)] == [0, 1, 2]
    assert prompts.sampling(-2).n == 2 and prompts.leases(-2) is prompts.evaluation
    assert prompts.describe(-2) == "row 1 of --val-files"
    prompts.ledger.draw(1)
    prompts.evaluate(HELD_OUT, Sampling(n=2))
    assert prompts.evaluation.waiting == [-6, -5, -4]
    assert [prompts.row(number)["row_index"] for number in (-6, -5, -4)] == [0, 1, 2]


def test_a_held_out_row_that_is_dropped_stays_out_of_later_evaluations(prompts):
    prompts.ledger.draw(0)
    prompts.evaluate(HELD_OUT, Sampling(n=2))
    for sampler in ("a", "b", "c"):  # all of them are lost with row 1, and "c" while it has nothing else
        prompts.evaluation.lease(-2, sampler)
        prompts.evaluation.confirm(sampler, [-2])
        assert prompts.held_by(sampler) == [-2]
        dropped = prompts.give_back(sampler, blame=True)
    assert dropped == [-2] and prompts.dropped == {1} and prompts.num_dropped == 1
    prompts.ledger.draw(1)
    prompts.evaluate(HELD_OUT, Sampling(n=2))
    assert prompts.evaluation.waiting == [-6, -4]


def all_ended(samplers):
    """Wait until each sampler has ended; returns the exit codes."""
    codes = []
    launch.until(lambda: codes.extend(code for _, code in samplers.ended()) or len(codes) == len(samplers.samplers))
    return codes


def test_a_sampler_of_this_machine_is_started_again_but_not_for_ever(monkeypatch):
    start, started = children.start, []

    def ends_at_once(function, *arguments, env):  # a real process, which ends in the place of a sampler
        started.append((function, *arguments, env.get("CUDA_VISIBLE_DEVICES"), env.get("RANK"), env[protocol.TOKEN]))
        return start("sys.exit", env=env)

    monkeypatch.setattr(children, "start", ends_at_once)
    monkeypatch.setenv("RANK", "0")
    samplers = LocalSamplers(["4", "5"], "tcp://0.0.0.0:5555", "a token")
    for attempt in (1, 2, 3, 4):  # once, and three times again
        samplers.start_missing()
        samplers.start_missing()  # those that run are not started twice
        assert all_ended(samplers) == [0, 0] and len(started) == 2 * attempt
    connect = ("extras.samplers.sampler.run", "--connect", "tcp://127.0.0.1:5555")
    assert started[-2:] == [(*connect, device, None, "a token") for device in ("4", "5")]
    samplers.start_missing()
    assert len(started) == 8 and all(local.is_given_up for local in samplers.samplers)
    samplers.has_finished(samplers.samplers[1].name)  # its group came late
    samplers.start_missing()
    assert len(started) == 9 and [local.starts for local in samplers.samplers] == [4, 2]
    samplers.forgive()
    samplers.start_missing()
    assert len(started) == 10 and [local.starts for local in samplers.samplers] == [2, 1]
    samplers.close()
    assert all_ended(samplers) == [0, 0]

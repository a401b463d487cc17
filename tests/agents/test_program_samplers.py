"""Agents that samplers of train_async.py start."""

import helpers_scripts as h
import launch
import pytest
from helpers_samplers import pools_of_task, seed_by_number, task_with_stops  # noqa: F401
from test_program_runs import settings_of

from rl.run import checkpoint


def changes_of(task, folder, kind):
    """Flags of a run whose agents have several rows, and of which some crash."""
    settings = settings_of(task, folder, engine=kind)
    return {name: settings[name] for name in ("agent", "max_response_length", "engine")}


@pytest.mark.parametrize("kind", h.some(["hf", "vllm"], "hf"))
def test_without_staleness_a_run_is_that_of_train_grpo(kind, pools, task, tmp_path):
    changes = changes_of(task, tmp_path, kind) | dict(total_training_steps=2, rollout_is="none", save_freq=2)
    run, sampler = pools.run(max_staleness=0, test_freq=2, **changes), pools.sampler()
    settings = h.grpo_settings(task, tmp_path / "grpo", **changes)
    grpo = launch.fork("train_grpo", settings, tmp_path / "grpo.log", fault=seed_by_number)
    assert [x.ends() for x in (run, grpo, sampler)] == [[0]] * 3, run.log.read_text()
    both = [h.timeless(lines) for lines in (pools.lines(), h.read_jsonl(tmp_path / "grpo" / "metrics.jsonl"))]
    steps = [[line for line in lines if "environment/rows" in line] for lines in both]
    names = [x for x in steps[1][0] if x.startswith(("critic/", "environment/", "response_length/", "num_turns/"))]
    names = [x for x in names if x != "environment/seconds"]
    for line, other in zip(*steps, strict=True):
        assert 1 < line["environment/rows"] < 3 and line["environment/error_frac"] < 1
        assert line["rollout/logprob_gap_max"] < 1e-4
        if kind == "hf" or line["step"] == 1:
            assert {x: line[x] for x in names} == {x: other[x] for x in names} and len(names) > 20
    assert len(steps[0]) == 2 and any(x.get("val-core/arithmetic/reward/mean@1", 0) > 0 for x in both[0])
    if kind == "hf":
        h.assert_same(*(h.weights(tmp_path / name / "global_step_2") for name in ("run", "grpo")))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_agents_go_on_with_new_weights_while_two_ranks_train(kind, pools, task, tmp_path):
    """The second run goes on from a checkpoint, with groups in it that were ready."""
    changes = changes_of(task, tmp_path, kind)
    for last in (3, 6):
        run = pools.run(ranks=2, max_staleness=2, total_training_steps=last, save_freq=1, **changes)
        samplers = [pools.sampler(), pools.sampler()]
        assert run.ends() == [0, 0], run.log.read_text()
        assert [x.ends() for x in samplers] == [[0], [0]]
    states = [checkpoint.load_states(tmp_path / "run" / f"global_step_{step}")[0] for step in (1, 2, 3, 4, 5)]
    assert any(sample["rows"] for state in states for _, samples in state["groups"] for sample in samples)
    lines = [line for line in pools.lines() if "environment/rows" in line]
    for line in lines:
        assert line["environment/rows"] > 1 and line.get("rollout/logprob_gap_max", 0) < 1e-4
    assert len(lines) == 6 and max(line["rollout/staleness_max"] for line in lines) >= 1

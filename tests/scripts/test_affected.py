"""tests/affected.py finds the test files that a change may break, by imports, names and fixtures."""

import affected
import launch
import pytest
from launch import ROOT

# A changed file, test files that need it, and test files that do not.
CASES = [
    ("rl/formulas/advantages.py", "test_advantages test_grpo", "test_losses"),
    ("rl/data/rows.py", "test_data test_dpo test_checkpoint", "test_rewards_math"),
    ("rl/model/logprobs.py", "test_logprobs test_grpo", "test_losses"),
    ("rl/run/checkpoint.py", "test_checkpoint test_checkpoint_faults", "test_losses"),
    # Imported inside functions, or named in a text that starts a process.
    ("rl/mistakes.py", "test_mistakes", "test_rewards_math"),
    ("rl/scoring/worker.py", "test_scoring test_grpo", "test_losses"),
    ("rl/sampling/engines/vllm_worker.py", "test_engines", "test_losses"),
    # Rooms, which a default run does not need.
    ("extras/samplers/ledger.py", "test_ledger test_async test_sampler_faults",
     "test_grpo test_ppo test_checkpoint test_engines"),
    ("extras/judges/critic.py", "test_critic test_ppo test_lora_runs",
     "test_grpo test_engines test_ledger"),
    ("extras/plan/compiling.py", "test_plan test_ways", "test_grpo test_ppo test_checkpoint"),
    ("extras/distillation/teacher.py", "test_teacher test_distill", "test_grpo"),
    ("extras/self_distillation/student.py", "test_hints test_self_distill", "test_grpo test_distill"),
    ("extras/judges/__init__.py", "test_critic test_grpo", "test_losses"),
    # Scripts, programs, pages and others.
    ("train_ppo.py", "test_ppo test_drift test_scripts", "test_reinforce"),
    ("rewards/gsm8k.py", "test_rewards_gsm8k", "test_grpo test_rewards_math"),
    ("environments/calculator.py", "test_examples", "test_grpo"),
    ("data/math_dataset.py", "test_data_math", "test_grpo"),
    ("docs/modify.md", "test_modify test_docs", "test_grpo"),
    ("requirements.lock", "test_lock", "test_docs"),
    ("benchmarks/make_lock.py", "test_lock", "test_grpo"),
    ("tools/view.py", "test_view", "test_grpo test_lock"),
    ("tools/view.html", "test_view", "test_grpo test_lock"),
    ("tests/judges/workers/scores.py", "test_reward_model", "test_critic"),
    ("tests/helpers_engines.py", "test_engines", "test_grpo"),
    ("tests/rewards/conftest.py", "test_sandbox", "test_grpo"),
    ("tests/scripts/test_grpo.py", "test_grpo", "test_ppo"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "needing", "others"), CASES, ids=[case[0] for case in CASES])
def test_what_a_change_may_break(changed, needing, others):
    assert (ROOT / changed).is_file()
    found = {path.stem for path in affected.affected([ROOT / changed])}
    assert set(needing.split()) <= found
    assert not set(others.split()) & found
    assert {*needing.split(), *others.split()} <= {path.stem for path in launch.TESTS.glob("*/test_*.py")}


def test_the_tests_of_a_room_need_every_file_of_it():
    """A room whose tests have a folder of their own."""
    for folder in sorted(launch.TESTS.iterdir()):
        for file in sorted((ROOT / "extras" / folder.name).glob("*.py")):
            found = {path.parent for path in affected.affected([file])}
            assert folder in found, file


def test_names_are_printed_one_on_a_line(capsys):
    affected.main(["requirements.lock"])
    assert capsys.readouterr().out == "tests/scripts/test_affected.py\ntests/scripts/test_lock.py\n"

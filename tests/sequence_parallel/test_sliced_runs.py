"""Scripts whose ranks each compute a slice of the tokens: the same samples, scores and weights at every degree."""

import json
import shutil
from pathlib import Path

import helpers_families as families
import helpers_scripts as h
import launch
import pytest
import torch
from helpers_samplers import Pools
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from extras.samplers.protocol import TOKEN
from rl.run import checkpoint_files as files

# What is scored is also written to a file. Lines of several processes do not mix, since each is one short write.
RECORDING = """
import json

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    score = float((sum(map(ord, solution_str)) + int(ground_truth)) % 2)
    with open({path!r}, "a") as file:
        file.write(json.dumps([extra_info["index"], solution_str, score]) + chr(10))
    return score
"""
# Beginnings of the names of metrics that follow from samples and their scores.
EXACT = (
    "critic/score/",
    "response_length/",
    "prompt_length/",
    "reward/",
    "train/num_gen",
    "train/surplus",
    "val-core/",
)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The arithmetic task, with models of four heads and two of keys."""
    folder = tmp_path_factory.mktemp("task")
    task = h.make_task(folder)
    config = AutoConfig.from_pretrained(task.model)
    config.update(dict(num_attention_heads=4, num_key_value_heads=2))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = [2, *range(20, 32)]  # responses of different lengths
    model.save_pretrained(task.model)
    return task


def settings_of(script, task, folder, **changes):
    """A short run of a script, whose reward writes down what it scores."""
    make = {"sft": h.sft_settings, "train_reward": h.reward_settings, "train_ppo": h.ppo_settings}
    make |= {"train_dapo": h.dapo_settings, "train_reinforce": h.reinforce_settings, "train_dpo": h.dpo_settings}
    make |= {"train_distill": h.distill_settings, "train_prime": h.prime_settings}
    make |= {"train_self_distill": h.self_distill_settings}
    settings = make.get(script, h.grpo_settings)(task, folder, save_freq=1, lr=1e-4)
    if "custom_reward_function" in settings:
        reward = folder.with_name(f"{folder.name}_reward.py")
        reward.write_text(RECORDING.format(path=str(folder.with_name(f"{folder.name}_scored.jsonl"))))
        settings["custom_reward_function"] = (str(reward),)
    return settings | changes


def scored(folder):
    """The rows, responses and scores that the reward of a run has written down, in any order."""
    lines = Path(f"{folder}_scored.jsonl").read_text().splitlines()
    return sorted(map(tuple, map(json.loads, lines)))


def metrics(folder):
    return h.timeless(h.read_jsonl(folder / "metrics.jsonl"))


def assert_same_run(found, expected, *, exact=EXACT, without=()):
    """Samples and scores bit by bit, other metrics and weights up to rounding. Weights have moved further than that."""
    for line, other in zip(metrics(found), metrics(expected), strict=True):
        line, other = ({k: v for k, v in x.items() if not k.startswith(without)} for x in (line, other))
        of_samples = {name: x for name, x in line.items() if name.startswith(exact)}
        assert of_samples == {name: other[name] for name in of_samples}
        assert line == pytest.approx(other, rel=1e-5, abs=2e-6)
    last = max(files.list_steps(expected))
    final = [h.weights(folder / f"global_step_{last}") for folder in (found, expected)]
    first = h.weights(expected / "global_step_1")
    assert h.distance(*final) < 1e-5
    assert last > 1 and h.distance(final[1], first) > 5e-5


def run_at(script, task, tmp_path, *degrees, ranks, flag="sequence_parallel_size", **changes):
    """Run a script at some degrees, on the same number of ranks. Returns the folder of each degree's run."""
    folders = {degree: tmp_path / f"degree_{degree}" for degree in degrees}
    settings = {
        degree: settings_of(script, task, folder, **{flag: degree}, **changes) for degree, folder in folders.items()
    }
    run(tmp_path, *({"script": script, "settings": x} for x in settings.values()), nproc=ranks)
    return folders


def run(tmp_path, *entries, nproc):
    """Run scripts one after the other, each {"script": ..., "settings": ...}."""
    status, output = launch.run_in_turn(tmp_path / "runs.json", *entries, nproc=nproc)
    assert status == 0, output[-6000:]


def test_four_ranks_sample_and_learn_the_same_at_degree_1_2_and_4(task, tmp_path):
    common = dict(train_batch_size=6, ppo_mini_batch_size=3, rollout_n=3, val_before_train=True, test_freq=2)
    folders = run_at("train_grpo", task, tmp_path, 1, 2, 4, ranks=4, **common)
    samples = scored(folders[1])
    assert len(samples) > 2 * 6 * 3 and len({score for _, _, score in samples}) == 2
    assert len({len(response) for _, response, _ in samples}) > 4
    for degree in (2, 4):
        assert scored(folders[degree]) == samples
        assert_same_run(folders[degree], folders[1])


def test_two_ranks_learn_demonstrations_together(task, tmp_path):
    common = dict(val_files=(h.few_rows(task.sft, tmp_path),), test_freq=2, total_training_steps=2)
    folders = run_at("sft", task, tmp_path, 1, 2, ranks=2, max_token_len_per_gpu=128, **common)
    assert_same_run(folders[2], folders[1])


def test_two_ranks_that_divide_experts_sample_and_learn_the_same(task, tmp_path):
    AutoTokenizer.from_pretrained(task.model).save_pretrained(tmp_path / "experts")
    changes = dict(model=families.save("experts", tmp_path / "experts"), router_replay=True, total_training_steps=2)
    folders = run_at("train_grpo", task, tmp_path, 1, 2, ranks=2, flag="expert_parallel_size", **changes)
    assert scored(folders[1]) == scored(folders[2])
    assert_same_run(folders[2], folders[1])


# --- thorough: other scripts, and resuming

PARTIAL = dict(partial_rollouts=0.5, rollout_is="none")
SCRIPTS = {
    "the largest of all tokens": (
        "train_grpo_variants",
        dict(loss_mode="kl_cov", loss_agg_mode="token-mean", top_entropy_quantile=0.5, kl_cov_ratio=0.1),
    ),
    "a critic": ("train_ppo", {}),
    "rounds of groups": ("train_dapo", {}),
    "greedy answers": ("train_reinforce", {}),
    "pairs": ("train_dpo", {}),
    "a teacher's most likely tokens": ("train_distill", dict(loss_mode="jsd")),
    "a policy that has read a hint": ("train_self_distill", {}),
    "a model of the process": ("train_prime", {}),
    "a reward model is trained": ("train_reward", {}),
    "adapters and a reference": ("train_grpo", dict(lora_rank=4, use_kl_loss=True)),
    "responses that outlive a step": (
        "train_grpo",
        PARTIAL | dict(total_training_steps=3),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_learns_the_same_at_degree_1_and_2(task, tmp_path, name):
    script, changes = SCRIPTS[name]
    folders = run_at(script, task, tmp_path, 1, 2, ranks=2, **changes)
    if script != "train_reward":
        assert scored(folders[1]) == scored(folders[2])
    assert_same_run(folders[2], folders[1])


@pytest.fixture(scope="module")
def judge(task, tmp_path_factory):
    """A reward model of the task's shape, whose scores differ."""
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(task.model, num_labels=1))
    model.save_pretrained(folder)
    for file in Path(task.model).glob("*token*"):
        shutil.copy(file, folder)
    for file in Path(task.model).glob("*.jinja"):
        shutil.copy(file, folder)
    return str(folder)


@pytest.mark.thorough
def test_ranks_score_by_a_reward_model_together(task, judge, tmp_path):
    """Each rank has other responses, and the passes are those of both ranks."""
    changes = dict(reward_model=judge, reward_model_max_length=100, ppo_max_token_len_per_gpu=100, train_batch_size=5)
    folders = run_at("train_grpo", task, tmp_path, 1, 2, ranks=2, **changes)
    [name] = [name for name in metrics(folders[1])[0] if name.endswith("/reward_model")]
    assert all(abs(line[name]) > 1e-3 for line in metrics(folders[1]))
    assert scored(folders[1]) == scored(folders[2])
    assert_same_run(folders[2], folders[1], exact=("response_length/", "prompt_length/"))


@pytest.mark.thorough
def test_ranks_replay_the_experts_of_the_engine(task, tmp_path):
    """The engine's experts go to the ranks that have the tokens, with the slices."""
    AutoTokenizer.from_pretrained(task.model).save_pretrained(tmp_path / "experts")
    experts = families.save("experts", tmp_path / "experts")
    folders = run_at("train_grpo", task, tmp_path, 1, 2, 4, ranks=4, model=experts, router_replay=True)
    for degree in (2, 4):
        assert scored(folders[1]) == scored(folders[degree])
        assert_same_run(folders[degree], folders[1], without=("router/",))
        for line, other in zip(metrics(folders[degree]), metrics(folders[1]), strict=True):
            of_experts = {name: x for name, x in line.items() if name.startswith("router/")}
            # Up to three tokens of padding count, of about 150 in the check of the engine.
            assert of_experts == pytest.approx({name: other[name] for name in of_experts}, rel=0.05, abs=0.05)
            assert "router/changed_frac" in of_experts


@pytest.mark.thorough
def test_a_run_that_is_killed_at_degree_2_goes_on_at_degree_4(task, tmp_path):
    common = dict(train_batch_size=6, ppo_mini_batch_size=3, total_training_steps=4)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = settings_of("train_grpo", task, whole, **common)
    run(tmp_path, {"script": "train_grpo", "settings": settings}, nproc=4)
    settings = settings_of("train_grpo", task, broken, **common)
    entry = {"script": "train_grpo", "settings": settings | {"sequence_parallel_size": 2}}
    entry["crash_at"] = [1, 3, str(broken / "global_step_2")]  # rank 1 in step 3
    status, output = launch.run_in_turn(tmp_path / "runs.json", entry, nproc=4)
    assert status != 0 and files.list_steps(broken) == [1, 2], output

    entry = {"script": "train_grpo", "settings": settings | {"sequence_parallel_size": 4}}
    run(tmp_path, entry, nproc=4)

    assert set(scored(broken)) == set(scored(whole))
    assert_same_run(broken, whole)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "changes"),
    [("train_dapo", {}), ("train_grpo", PARTIAL)],
    ids=["DAPO", "partial"],
)
def test_groups_that_wait_go_on_at_another_degree(task, tmp_path, script, changes):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = settings_of(script, task, whole, **changes, total_training_steps=4)
    run(tmp_path, {"script": script, "settings": settings}, nproc=2)
    settings = settings_of(script, task, broken, **changes)
    for degree, steps in ((2, 2), (1, 3), (2, 4)):
        now = dict(sequence_parallel_size=degree, total_training_steps=steps)
        run(tmp_path, {"script": script, "settings": settings | now}, nproc=2)
    assert_same_run(broken, whole)


@pytest.mark.thorough
def test_a_run_on_another_number_of_ranks(task, tmp_path):
    """Four ranks at degree 4 go on as two at degree 2. Three ranks, which two do not divide, are refused."""
    settings = settings_of("train_grpo", task, tmp_path / "run", sequence_parallel_size=4)
    run(tmp_path, {"script": "train_grpo", "settings": settings}, nproc=4)
    more = settings | dict(sequence_parallel_size=2, total_training_steps=3)
    status, output = launch.run_in_turn(tmp_path / "runs.json", {"script": "train_grpo", "settings": more}, nproc=3)
    said = "ValueError: --sequence-parallel-size 2 does not divide the 3 rank(s); choose a divisor"
    assert status == 1 and output.count(said) == 3 and files.list_steps(tmp_path / "run") == [1, 2]
    run(tmp_path, {"script": "train_grpo", "settings": more}, nproc=2)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]
    found, before = (h.weights(tmp_path / "run" / f"global_step_{step}") for step in (3, 2))
    assert 1e-5 < h.distance(found, before) < 1e-2


@pytest.mark.thorough
def test_trainers_of_samplers_at_degree_1_and_2(task, tmp_path, monkeypatch):
    """With no staleness a run depends on nothing but its flags. One rank has all samples."""
    monkeypatch.setenv(TOKEN, "a token of this test")
    folders = {}
    for degree in (1, 2):
        (root := tmp_path / f"degree_{degree}").mkdir()
        pools, folders[degree] = Pools(task, root), root / "run"
        settings = settings_of("train_async", task, folders[degree], sequence_parallel_size=degree)
        own = {name: settings[name] for name in ("custom_reward_function", "lr", "save_freq", "sequence_parallel_size")}
        trainers = pools.run(ranks=2, max_staleness=0, total_training_steps=3, **own)
        sampler = pools.sampler()
        assert trainers.ends() == [0, 0], trainers.log.read_text()
        assert sampler.ends() == [0]
    assert scored(folders[1]) == scored(folders[2])
    assert_same_run(folders[2], folders[1], without=("rollouter/", "trainer/", "samplers/"))

"""examples/grpo_small.py computes what train_grpo.py computes, and any change of its lines would be noticed."""

import importlib
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import helpers_scripts as h
import launch
import pytest
import torch
from helpers_data import sample
from launch import ROOT
from test_house import code_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_grpo
from benchmarks import demo
from examples import grpo_small
from rl.sampling import sampler

pytestmark = pytest.mark.usefixtures("runs_here")
FILE = ROOT / "examples" / "grpo_small.py"
STEPS = 10
EPOCHS = [1, 2]  # optimizer steps per step; with two of them the ratio moves, and the clip acts


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return h.make_task_with_stops(tmp_path_factory.mktemp("task"))


def recorded_run(task: h.Task, folder: Path, epochs: int) -> tuple[list, dict[str, torch.Tensor]]:
    """What ten steps of train_grpo.py have sampled (numbers of rows, samples), and the weights that they have made."""
    recorded, original = [], sampler.sample_groups

    def record(engine, rows, *args, **options):
        samples = original(engine, rows, *args, **options)
        recorded.append(([row["row_index"] for row in rows], samples))
        return samples

    runs = h.Runs(train_grpo, partial(h.grpo_settings, task), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "sample_groups", record)
        runs(total_training_steps=STEPS, ppo_epochs=epochs)
    h.leave_distributed()
    clipped = [line["actor/pg_clipfrac"] for line in runs.lines(1)]
    assert len(recorded) == STEPS and (max(clipped) > 0.05) == (epochs > 1)
    return recorded, runs.weights(1, STEPS)


@pytest.fixture(scope="module")
def of_train_grpo(task, tmp_path_factory):
    """`recorded_run` for each number of epochs."""
    return {epochs: recorded_run(task, tmp_path_factory.mktemp("whole"), epochs) for epochs in EPOCHS}


def repeated_run(module: ModuleType, task: h.Task, folder: Path, recorded: list, epochs: int) -> dict:
    """The weights that a small GRPO makes, with the same settings and from the same responses, which it scores."""
    rounds = iter(recorded)

    def repeat(engine, rows, sampling, *, seed):
        indices, samples = next(rounds)
        assert [row["row_index"] for row in rows] == indices
        assert sampling.n * len(rows) == len(samples)
        return samples

    settings = dict(train_batch_size=4, rollout_n=4, max_response_length=12, micro_batch_size=7, lr=1e-3)
    settings |= dict(model=task.model, train_files=(task.train,), output_dir=str(folder), total_training_steps=STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "sample_groups", repeat)
        patch.setattr(module, "compute_score", lambda source, text, truth: h.parity(text, truth))
        policy = module.main(module.Args(**settings, ppo_epochs=epochs))
    assert next(rounds, None) is None
    weights = {name: x.detach() for name, x in policy.named_parameters()}
    h.assert_same(h.weights(folder, "."), weights)  # they are also those that it has saved
    return weights


def apart(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of all weights together."""
    assert some.keys() == others.keys() and len(some) > 20
    return sum((some[name] - others[name]).square().sum().item() for name in some) ** 0.5


@pytest.mark.parametrize("epochs", EPOCHS)
def test_from_the_same_responses_it_makes_the_weights_of_train_grpo(epochs, of_train_grpo, task, tmp_path):
    """Up to rounding in float32: relative to the weights, and even relative to what ten steps have changed of them."""
    recorded, expected = of_train_grpo[epochs]
    found, first = repeated_run(grpo_small, task, tmp_path, recorded, epochs), h.original(task)
    assert apart(found, expected) < 1e-5 * apart(expected, {name: 0 * x for name, x in expected.items()})
    assert apart(found, expected) < 5e-5 * apart(expected, first)
    assert apart(expected, first) > 0.5


@pytest.mark.parametrize("epochs", EPOCHS)
def test_in_float64_every_tensor_agrees(epochs, task, tmp_path, monkeypatch, in_double):
    """In float32 Adam makes rounding larger where a gradient is next to nothing, as that of a key's bias is."""
    recorded, expected = recorded_run(task, tmp_path / "whole", epochs)
    load = AutoModelForCausalLM.from_pretrained
    as_double = staticmethod(lambda *args, **options: load(*args, **options | {"dtype": torch.float64}))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", as_double)
    found = repeated_run(grpo_small, task, tmp_path / "small", recorded, epochs)
    assert {x.dtype for x in found.values()} == {torch.float64}
    for name, x in expected.items():
        assert (found[name] - x).norm() < 1e-5 * x.norm(), name


# Lines of the file that matter, and what one could write by mistake.
MISTAKES = {
    "no weight decay": ("weight_decay=0.01", "weight_decay=0.0"),
    "another clip of gradients": ("max_norm=1.0", "max_norm=0.5"),
    "standard deviation of G": ("scores.std(1, ", "scores.std(1, correction=0, "),
    "no baseline": ("(scores - mean)", "(scores)"),
    "a mean of micro-batches": ("/ num_tokens)", "/ mask.sum())"),
    "the prompt is learned": ("mask[i, start:end]", "mask[i, :end]"),
    "the end of a response is not learned": ("mask[i, start:end]", "mask[i, start : end - 1]"),
    "the mask is not shifted": ("mask[:, 1:]", "mask[:, :-1]"),
    "a higher clip": ("0.2, 1 + 0.2))  #", "0.2, 1 + 0.28))  #"),
    "a lower clip": ("clamp(1 - 0.2", "clamp(1 - 0.28"),
    "no old log-probs": ("old_log_probs.setdefault(start, log_probs.detach())", "log_probs.detach()"),
    "gradients are kept": ("optimizer.zero_grad()", "pass"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_it_is_noticed(mistake, of_train_grpo, task, tmp_path, monkeypatch):
    source = FILE.read_text()
    right, wrong = MISTAKES[mistake]
    assert source.count(right) == 1, right
    (tmp_path / "mistaken.py").write_text(source.replace(right, wrong))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mistaken", raising=False)
    module = importlib.import_module("mistaken")
    recorded, expected = of_train_grpo[2]
    found = repeated_run(module, task, tmp_path / "run", recorded, 2)
    assert apart(found, expected) > 5e-4 * apart(expected, h.original(task))


def test_log_probs_are_those_of_each_sequence_alone(task):
    policy = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    sequences = [([5, 6, 7], [8, 9, 2]), ([10, 11], [2]), ([12], [13, 14, 15, 16])]
    log_probs, mask = grpo_small.token_log_probs(policy, [sample(*x) for x in sequences])
    assert mask.tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0], [1, 1, 1, 1, 0]]  # of tokens 1 to 5
    expected = []
    for prompt, response in sequences:
        ids = prompt + response
        for t in range(len(prompt), len(ids)):
            logits = policy(torch.tensor([ids[:t]])).logits[0, -1]  # after the tokens before it, and nothing else
            expected.append(logits[ids[t]] - logits.logsumexp(0))
    assert len(expected) == 8
    torch.testing.assert_close(log_probs[mask > 0], torch.stack(expected), atol=1e-5, rtol=0)


def test_advantages_are_those_of_its_docstring():
    scores = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]])
    found = grpo_small.group_advantages(scores)
    expected = torch.tensor([[0.866, -0.866, -0.866, 0.866], [0.0] * 4, [-0.5, -0.5, 1.5, -0.5]])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    said = " ".join(grpo_small.group_advantages.__doc__.split())
    assert "the mean 0.5 and the standard deviation 0.577." in said and "are 0.866, -0.866, -0.866, 0.866." in said
    assert torch.tensor([1.0, 0.0, 0.0, 1.0]).std().item() == pytest.approx(0.577, abs=5e-4)


def test_the_command_samples_as_train_grpo_does(task, tmp_path):
    """From another folder and by itself: with the same seed the first step has the same responses, and so the score."""
    (tmp_path / "copy_of_small.py").write_text(FILE.read_text().replace("rewards.gsm8k", "parity_reward"))
    (tmp_path / "parity_reward.py").write_text(h.REWARD)
    flags = dict(model=task.model, train_files=(task.train,), train_batch_size=4, rollout_n=4, max_response_length=12)
    flags |= dict(total_training_steps=2, seed=3)
    output = launch.run(tmp_path / "copy_of_small.py", *h.flags(flags), cwd=tmp_path, PYTHONPATH=ROOT)
    scores = re.findall(r"^step (\d)/2 \| score ([\d.]+)$", output, re.MULTILINE)
    assert [step for step, _ in scores] == ["1", "2"]
    runs = h.Runs(train_grpo, partial(h.grpo_settings, task), tmp_path)
    runs(total_training_steps=1, seed=3)
    [line] = runs.lines(1)
    assert scores[0][1] == f"{line['critic/score/mean']:.3f}" and 0 < line["critic/score/mean"] < 1
    trained = h.weights(tmp_path / "runs" / "grpo_small", ".")
    assert h.distance(trained, h.original(task)) > 1e-5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "runs" / "grpo_small")
    assert tokenizer("4+3=?")["input_ids"] == AutoTokenizer.from_pretrained(task.model)("4+3=?")["input_ids"]


def test_the_file_finds_the_library_from_any_folder(tmp_path):
    assert "Each prompt gets this many responses (G)." in launch.run_elsewhere(FILE, "--help", cwd=tmp_path)


def test_mistakes_are_explained(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = dict(model=task.model, train_files=(task.train,))
    for changes, said in [
        ({}, r"--model runs/demo/sft/global_step_450/huggingface is not there yet; run `make demo`, or give --model"),
        (own | {"rollout_n": 1}, "--rollout-n 1 leaves a response without others .*; use at least 2"),
        (own | {"micro_batch_size": 0}, "--micro-batch-size 0 must be at least 1"),
        (own | {"train_batch_size": 65}, "--train-batch-size 65 is more than the 64 rows; lower it"),
    ]:
        with pytest.raises(ValueError, match=said):
            grpo_small.main(grpo_small.Args(**changes))


def test_it_begins_with_what_the_demo_makes():
    made = demo.Args()
    assert grpo_small.Args.model == f"{made.run_dir}/sft/global_step_{made.sft_steps}/huggingface"
    assert grpo_small.Args.train_files == (f"{made.run_dir}/data/train.parquet",)
    assert grpo_small.Args.total_training_steps == made.grpo_steps


def test_it_stays_small():
    assert code_lines(FILE.read_text()) <= 96

"""docs/environments.md does what it says: its files are taken from the page and run."""

import re

import helpers_scripts as h
import pytest
from launch import ROOT
from transformers import AutoConfig

import train_grpo
from extras.agents.tools import Call, Reply, load, schemas_of

pytestmark = pytest.mark.usefixtures("runs_here")
PAGE = (ROOT / "docs" / "environments.md").read_text()


def block(title: str) -> str:
    """The Python file in a section."""
    section = PAGE[PAGE.index(f"## {title}\n") :].split("\n## ")[0]
    [found] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return found


def test_the_first_environment_trains(tmp_path):
    path, task = tmp_path / "again.py", h.make_task_with_stops(tmp_path)
    path.write_text(block("A first environment"))
    config = AutoConfig.from_pretrained(task.model, max_position_embeddings=512)
    config.save_pretrained(task.model)
    assert len(path.read_text().split("\n\n\ndef compute_score")[0].splitlines()) <= 20
    changes = dict(environment=str(path), custom_reward_function=(str(path),), max_turns=3, max_response_length=256)
    runs = h.Runs(train_grpo, lambda run, **own: h.grpo_settings(task, run, **own), tmp_path)
    changes |= dict(total_training_steps=1, val_files=(h.few_rows(task.test, tmp_path, 4),))
    runs(**changes, log_samples_freq=1, val_before_train=True, log_val_generations=2)
    for line in (x for x in runs.lines(1) if "actor/loss" in x):
        assert line["environment/error_frac"] == 0 and 1 < line["environment/tries"] <= 3 == line["num_turns/max"]
        assert line["environment/observation_tokens"] > len("That is wrong. Try again.")
    assert h.distance(runs.weights(1, 1), h.original(task)) > 0

    records = h.read_jsonl(runs.dir(1) / "generations.jsonl")
    assert {x["kind"] for x in records} == {"train", "val"}
    for x in records:
        told = [message["content"] for message in x["messages"] if message["role"] == "user"]
        assert told == ["End with the answer alone.", *["That is wrong. Try again."] * (len(told) - 1)]
        assert x["turns"] == sum(message["role"] == "assistant" for message in x["messages"]) in (len(told), 3)
        assert x["response"] == x["messages"][-1 if x["messages"][-1]["role"] == "assistant" else -2]["content"]
        if x["kind"] == "train":  # what was told has mask 0, and neither log-probs nor an advantage
            tokens = x["tokens"]
            assert len({len(values) for values in tokens.values()}) == 1 and set(tokens["mask"]) == {0, 1}
            by_mask = [
                [text for text, kept in zip(tokens["text"], tokens["mask"], strict=True) if kept == m] for m in (0, 1)
            ]
            assert "".join(by_mask[0]).count("<|im_start|>assistant\n") == x["turns"]
            assert "".join(by_mask[0]).count("That is wrong. Try again.") >= x["turns"] - 1
            assert "That is wrong" not in "".join(by_mask[1])
            assert all(
                not a and not p
                for a, p, m in zip(tokens["advantage"], tokens["engine_logp"], tokens["mask"], strict=True)
                if not m
            )


def test_the_first_environment_scores_a_right_answer_by_its_try(tmp_path):
    space: dict = {}
    exec(block("A first environment"), space)
    environment, score = space["Environment"](), space["compute_score"]
    environment.reset({"reward_model": {"ground_truth": "7"}}, 0)
    assert environment.report() == {"tries": 0, "right": False}
    assert score("x", "and so", "7", {"environment": environment.report()}) == 0  # its first turn was cut
    assert environment.step(Reply("I say 8", (), 1)) == [{"role": "user", "content": "That is wrong. Try again."}]
    assert environment.step(Reply("#### 7", (), 2)) is None
    assert score("x", "#### 7", "7", {"environment": environment.report()}) == 0.5


def test_the_tool_is_described_and_called(tmp_path):
    path = tmp_path / "multiply.py"
    path.write_text(block("Tools"))
    for spec in (str(path), f"{path}:multiply"):
        make, described, has_reset = load(None, (spec,), 100)
        [schema] = schemas_of(described)
        assert not has_reset
        assert schema["function"]["name"] == "multiply" and list(schema["function"]["parameters"]["properties"]) == [
            "a",
            "b",
        ]
        tools = make()
        calls = (Call("1", "multiply", {"a": 6, "b": 7}), Call("2", "multiply", {"a": 6}), Call("3", "add", None))
        answers = tools.step(Reply("", calls, 1))
        assert [x["content"].split(":")[0] for x in answers] == ["42", "Error", "Error"]
        assert tools.step(Reply("42", (), 2)) is None and tools.report() == {"calls": 3, "errors": 2}

"""docs/modify.md does what it says: lines to delete and the notebook are taken from the page and run, and the example
is that of the page.
"""

import difflib
import importlib
import io
import re
import subprocess
import sys
import tokenize
from functools import partial
from pathlib import Path
from types import ModuleType

import helpers_scripts as h
import pytest
import torch
from launch import ROOT
from test_house import docstring_lines
from transformers import AutoModelForCausalLM

import train_grpo
import train_grpo_variants
from data import arithmetic
from examples import grpo_floor

pytestmark = pytest.mark.usefixtures("runs_here")
PAGE = (ROOT / "docs" / "modify.md").read_text()
SOURCE = (ROOT / "train_grpo.py").read_text()
RUFF = Path(sys.executable).with_name("ruff")


def section(title: str) -> str:
    return PAGE[PAGE.index(f"## {title}") :].split("\n## ")[0]


def block(title: str, language: str) -> str:
    """The only block of a language in a section."""
    [found] = re.findall(rf"```{language}\n(.*?)```", section(title), re.DOTALL)
    return found


def imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script at a path, which is in no folder of the repository."""
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return importlib.import_module(path.stem)


def without(source: str, begins: list[str]) -> str:
    """Source without the lines that begin so, what is indented below them, and their comment above, but no title."""
    lines, kept, used = source.splitlines(), [], set()
    while lines:
        line = lines.pop(0)
        found = [begin for begin in begins if line.strip().startswith(begin)]
        if not found:
            kept.append(line)
            continue
        used |= set(found)
        depth = len(line) - len(line.lstrip())
        while re.match(r" *# (?!\d\. |===)", kept[-1]):
            kept.pop()
        while lines[0].strip() and len(lines[0]) - len(lines[0].lstrip()) > depth:
            lines.pop(0)
        if lines[0].strip() == ")":  # of the statement that began above
            lines.pop(0)
    assert used == set(begins), set(begins) - used
    return "\n".join(kept) + "\n"


def smallest() -> str:
    """train_grpo.py as the page's list leaves it."""
    items = section("The smallest GRPO").split("\n- ", 1)[1].split("\n\n")[0]
    by = r"`([^`\n]+)`\s+by\s+`([^`\n]+)`"
    replacements, begins = re.findall(by, items), re.findall(r"`([^`\n]+)`", re.sub(by, "", items))
    assert len(begins) > 12 and len(replacements) > 2
    source = without(SOURCE, begins)
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def test_the_smallest_grpo_computes_the_same_weights(tmp_path, task, monkeypatch):
    path = tmp_path / "smallest.py"
    path.write_text(smallest())
    if RUFF.exists():
        subprocess.run([RUFF, "check", "--fix", "--config", ROOT / "pyproject.toml", path], check=True)
    before, after = len(SOURCE.splitlines()), len(path.read_text().splitlines())
    said = re.search(r"About (\d+) of (\d+) lines remain", PAGE)
    assert abs(int(said[1]) - after) <= 5 and abs(int(said[2]) - before) <= 5, (before, after)

    runs = [
        h.Runs(script, partial(h.grpo_settings, task), tmp_path / script.__name__)
        for script in (train_grpo, imported(path, monkeypatch))
    ]
    whole, small = [run(ppo_mini_batch_size=2, logger=()) for run in runs]  # two updates, so the ratio moves
    assert small["actor/loss"] == whole["actor/loss"] != 0
    h.assert_same(runs[1].weights(1, 2), runs[0].weights(1, 2))


def code_of(source: str) -> list[str]:
    """The lines of a script without comments, docstrings and indentation, which are not empty."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    for number in docstring_lines(source):
        lines[number - 1] = ""
    return [line.strip() for line in lines if line.strip()]


def test_the_page_shows_every_line_of_the_example_that_differs():
    changes = list(difflib.ndiff(code_of(SOURCE), code_of((ROOT / "examples" / "grpo_floor.py").read_text())))
    added, removed = ([line[2:] for line in changes if line.startswith(sign)] for sign in "+-")
    shown = [re.sub(r"  # .*", "", line).strip() for line in block("A finished example", "python").splitlines()]
    assert added == [line for line in shown if line]
    assert [line.partition(" = ")[0] for line in removed] == [
        'experiment_name="grpo",',
        "for step in run.steps(sampler.state):",
        "mean, std",
        "advantages_PG",
        "logp, entropy",
        "loss",
    ]


def test_what_counts_as_code_of_the_example():
    source = '"""A.\n\nB.\n"""\n\nx = "# a"  # b\n# c\ndef f():\n    """D."""\n    return 1\n'
    assert code_of(source) == ['x = "# a"', "def f():", "return 1"]


@pytest.fixture
def floor(task, tmp_path) -> h.Runs:
    return h.Runs(grpo_floor, partial(h.grpo_settings, task), tmp_path / "floor")


def test_the_example_has_the_baseline_of_rloo(floor, task, tmp_path):
    floor(entropy_floor=0.0, total_training_steps=2)
    rloo = h.Runs(train_grpo_variants, partial(h.grpo_settings, task, adv_estimator="rloo"), tmp_path / "rloo")
    rloo(total_training_steps=2)
    assert h.distance(floor.weights(1, 2), rloo.weights(1, 2)) < 1e-6
    assert h.distance(floor.weights(1, 2), h.original(task)) > 1e-3
    lines = floor.lines(1)
    assert [line["actor/entropy_bonus"] for line in lines] == [0.0] * 2
    best = [line["critic/advantages/max"] for line in lines]  # 1 - k/3, if k of the other three are right too
    assert all(x == pytest.approx(round(3 * x) / 3) for x in best) and max(best) > 0


def test_the_bonus_of_the_example_grows_below_the_floor_also_in_a_resumed_run(floor, task, tmp_path):
    raised = dict(entropy_floor=100.0, entropy_bonus_change=0.25)
    floor(**raised, total_training_steps=3)
    lines = floor.lines(1)
    assert [line["actor/entropy_bonus"] for line in lines] == [0.0, 0.25, 0.5]
    for line in lines:  # one update per step: the means over tokens are those of the loss
        bonus = line["actor/entropy_bonus"] * line["actor/entropy"]
        assert line["actor/loss"] == pytest.approx(line["actor/pg_loss"] - bonus, abs=1e-6)
    floor(entropy_floor=0.0, total_training_steps=3)
    assert lines[2]["actor/entropy"] > floor.lines(2)[2]["actor/entropy"]

    floor(**raised, total_training_steps=2)
    floor.count -= 1
    floor(**raised, total_training_steps=3)
    assert h.timeless(floor.lines(3)) == h.timeless(lines)
    h.assert_same(floor.weights(3, 3), floor.weights(1, 3))


def test_the_lines_for_a_notebook(tmp_path, monkeypatch):
    arithmetic.main(arithmetic.Args(output_dir=tmp_path / "data" / "arithmetic", num_sft=16, num_train=16, num_test=4))
    (tmp_path / "rewards").symlink_to(ROOT / "rewards")
    monkeypatch.chdir(tmp_path)
    lines = block("In a notebook", "python")
    names: dict = {}
    try:
        exec(lines, names)
        samples, logp, mask = names["samples"], names["logp"], names["batch"].response_mask
        assert len([line for line in lines.splitlines() if line and not line.startswith("from ")]) <= 12
        assert [s.row_index for s in samples] == [names["rows"][i]["row_index"] for i in (0, 0, 0, 0, 1, 1, 1, 1)]
        torch.testing.assert_close(logp, names["batch"].rollout_logp * mask, atol=1e-4, rtol=0)

        whole = torch.tensor([[*samples[5].prompt_ids, *samples[5].response_ids]])
        logits = AutoModelForCausalLM.from_pretrained("data/arithmetic/model")(whole).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, whole[0, 1:, None])[-len(samples[5].response_ids) :, 0]
        torch.testing.assert_close(logp[5][mask[5] > 0], expected.detach(), atol=1e-5, rtol=0)
        assert names["entropy"][5][mask[5] > 0].mean() > 1

        metrics = names["metrics"]
        assert metrics["val/accuracy"] == metrics["val-core/arithmetic/reward/mean@2"] == 0  # the model is untrained
        assert 1 <= metrics["val/response_length"] <= 40
    finally:
        if "scorer" in names:
            names["scorer"].close()

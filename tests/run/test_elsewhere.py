"""A script that was copied out of the repository, as researchers do, finds rl there.

This fails in an environment in which `pip install -e .` has never been run.
"""

import tomllib

import helpers_scripts as h
import launch
import pytest
from setuptools import find_packages

import train_grpo
from rl.flags import build

pytestmark = pytest.mark.usefixtures("runs_here")


def test_a_copy_of_a_script_with_a_flag_of_its_own_runs_in_a_folder_of_its_own(tmp_path):
    task, text = h.make_task(tmp_path / "task"), (launch.ROOT / "train_grpo.py").read_text()
    for old, new in (
        ("    seed: Count = 0", "    advantage_scale: Positive = 1.0  # of every advantage\n    seed: Count = 0"),
        ("advantages_PG = ((", "advantages_PG = args.advantage_scale * (("),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_idea.py").write_text(text)
    settings = h.grpo_settings(task, tmp_path / "original", total_training_steps=1)
    train_grpo.main(build(train_grpo.Args, **settings))
    changes = dict(default_local_dir="runs/{experiment_name}", advantage_scale=4.0)
    launch.run_elsewhere("my_idea.py", *h.flags(settings | changes), cwd=tmp_path / "mine")

    (mine,) = h.read_jsonl(tmp_path / "mine" / "runs" / "grpo" / "metrics.jsonl")
    (original,) = h.read_jsonl(tmp_path / "original" / "metrics.jsonl")
    assert original["critic/advantages/max"] > 0.1 and mine["critic/score/mean"] == original["critic/score/mean"]
    assert mine["critic/advantages/max"] == pytest.approx(4 * original["critic/advantages/max"], rel=1e-6)


def test_what_is_installed_is_this_rl_and_nothing_else_of_the_repository(tmp_path):
    code = "import importlib.util, rl; print(rl.__file__, *map(importlib.util.find_spec, ('data', 'tests', 'sft')))"
    found = launch.run_elsewhere("-c", code, cwd=tmp_path).split()
    assert found == [str(launch.ROOT / "rl" / "__init__.py"), "None", "None", "None"]
    folders = (launch.ROOT / "rl", launch.ROOT / "extras")
    packages = {str(f.parent.relative_to(launch.ROOT)) for folder in folders for f in folder.rglob("*.py")}
    project = tomllib.loads((launch.ROOT / "pyproject.toml").read_text())
    installed = find_packages(str(launch.ROOT), include=project["tool"]["setuptools"]["packages"]["find"]["include"])
    assert set(installed) == {name.replace("/", ".") for name in packages}
    assert all((launch.ROOT / name / "__init__.py").is_file() for name in packages)

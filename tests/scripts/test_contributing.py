"""The files for people who work on the project: CONTRIBUTING.md, CHANGELOG.md, CITATION.cff, CI and pre-commit."""

import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest
import yaml
from launch import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

MAKEFILE = (ROOT / "Makefile").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def targets(makefile: str) -> set[str]:
    """What `make` can be asked for by name: targets of words, without files such as $(VENV)/installed."""
    return set(re.findall(r"^([a-z]+):(?!=)", makefile, re.MULTILINE))


def asked_of_make(text: str) -> set[str]:
    """The targets of the commands in a text; `make PYTHON=python3.12 install` asks for install."""
    commands = re.findall(r"(?:`|^ +)make((?: [A-Z]+=\S+)* [a-z]+)", text, re.MULTILINE)
    return {command.split()[-1] for command in commands}


def test_make_has_every_target_that_contributing_names():
    assert targets("a: b\n\tc: d\nE := f\n$(G)/h: i\n.PHONY: a\nj:\n") == {"a", "j"}
    assert asked_of_make("    make a   # make b\n`make C=d e f` make g `make h`") == {"a", "e", "h"}
    named = asked_of_make(CONTRIBUTING)
    assert named >= {"install", "demo", "check", "lint", "test", "promises", "thorough", "faults"}
    assert named <= targets(MAKEFILE)


def test_every_file_that_contributing_names_exists():
    names = re.findall(r"`(?:\.venv/bin/python )?((?:[\w.]+/)+[\w.]*|\w+\.py)", CONTRIBUTING)
    assert {"tests/affected.py", "rl/run/", "train_grpo.py", ".ci/run", ".github/workflows/ci.yml"} <= set(names)
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_contributing_is_one_page():
    assert len(CONTRIBUTING.splitlines()) <= 90 and len(CONTRIBUTING.split()) <= 900


def test_the_workflow_runs_what_ci_runs_on_every_python_that_is_supported():
    [job] = WORKFLOW["jobs"].values()
    assert WORKFLOW[True].keys() == {"push", "pull_request"}  # YAML reads the key `on` as a truth value
    steps = [step["run"] for step in job["steps"] if "run" in step]
    assert steps == re.findall(r"^make .*$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert {"make lint", "make test"} <= set(steps) <= {f"make {target}" for target in targets(MAKEFILE)}
    versions = job["strategy"]["matrix"]["python-version"]
    said = re.findall(r"Python (3\.\d+) or (3\.\d+)", (ROOT / "README.md").read_text() + CONTRIBUTING)
    assert versions == ["3.11", "3.12"] and set(said) == {tuple(versions)}
    assert all(version in SpecifierSet(PROJECT["requires-python"]) for version in versions)
    [python] = [step for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert python["with"]["python-version"] == "${{ matrix.python-version }}"


def ruff_of(path: Path) -> Requirement:
    [line] = [line for line in path.read_text().splitlines() if line.startswith("ruff")]
    return Requirement(line.partition(" #")[0])


def test_the_hooks_run_ruff_in_the_version_of_the_requirements():
    ruff = ruff_of(ROOT / "requirements-cpu.txt")
    assert [x.operator for x in ruff.specifier] == ["=="] and ruff == ruff_of(ROOT / "requirements.txt")
    [repository] = HOOKS
    assert repository["repo"] == "local"
    assert [hook["entry"].split()[:2] for hook in repository["hooks"]] == [["ruff", "check"], ["ruff", "format"]]
    for hook in repository["hooks"]:
        assert {"id", "name", "entry", "language"} <= hook.keys() and hook["language"] == "python"
        assert [Requirement(x) for x in hook["additional_dependencies"]] == [ruff]


@pytest.mark.parametrize("hook", HOOKS[0]["hooks"], ids=lambda hook: hook["id"])
def test_a_hook_finds_what_is_wrong_in_a_file(hook, tmp_path):
    """The command of each hook as pre-commit calls it, with names of files behind it."""
    (tmp_path / "wrong.py").write_text("import os\nx = [1,2]\n")
    words = [str(Path(sys.executable).with_name("ruff")), *hook["entry"].split()[1:]]
    words += ["--config", str(ROOT / "pyproject.toml"), "wrong.py"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    if hook["id"] == "ruff-check":
        assert result.returncode == 1 and "F401" in result.stdout
    else:  # pre-commit fails if a hook has changed a file
        assert result.returncode == 0 and (tmp_path / "wrong.py").read_text() == "import os\n\nx = [1, 2]\n"


def test_the_citation_has_what_the_format_requires_and_says_what_the_project_says():
    assert {"cff-version", "message", "title", "authors"} <= CITATION.keys()
    assert CITATION["cff-version"] == "1.2.0" and CITATION["type"] == "software"
    assert CITATION["authors"] == [{"name": "The glassrl authors"}]
    assert CITATION["version"] == PROJECT["version"] and CITATION["license"] == PROJECT["license"]
    assert CITATION["title"].startswith(PROJECT["name"])
    texts = [CITATION["message"], CITATION["title"], CITATION["abstract"], *CITATION["keywords"]]
    assert all(isinstance(text, str) and text for text in texts)


def test_the_changelog_has_the_newest_day_first():
    text = (ROOT / "CHANGELOG.md").read_text()
    days = [date.fromisoformat(day) for day in re.findall(r"^## (.+)$", text, re.MULTILINE)]
    assert len(days) > 5 and days == sorted(set(days), reverse=True)
    for section in text.split("\n## ")[1:]:
        lines = section.splitlines()[2:]
        assert lines[0].startswith("- ") and all(line.startswith(("- ", "  ")) for line in lines if line)
    assert PROJECT["version"] in text

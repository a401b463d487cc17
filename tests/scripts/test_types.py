"""Exceptions to the check of types, which `make lint` makes by pyrefly: few, explained, and no longer than needed."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from launch import ROOT

MOST = 20  # lines at which the checker may be told to look away
EXCLUDED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyrefly"].get("project-excludes", [])


def test_an_ignored_error_has_its_kind_and_a_reason():
    lines = [
        (f"{path.relative_to(ROOT)}:{number}", line)
        for path in sorted((ROOT / "rl").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "pyrefly:" in line or "type: ignore" in line
    ]
    assert len(lines) <= MOST, f"{len(lines)} lines are ignored, and {MOST} may be: {[place for place, _ in lines]}"
    reasons = re.compile(r"# pyrefly: ignore\[[a-z-]+\]  # \w+ \w+")
    assert not (bare := [place for place, line in lines if not reasons.search(line)]), f"{bare} give no kind or reason"


def test_every_excluded_file_has_errors():
    """A file that has become clean is checked from then on."""
    assert not (missing := [name for name in EXCLUDED if not (ROOT / name).is_file()]), f"take {missing} off the list"
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if (pyrefly := shutil.which("pyrefly", path=paths)) is None:
        pytest.skip("pyrefly is not installed")
    options = ["--python-interpreter-path", sys.executable, "--output-format", "json", "--relative-to", ROOT]
    files = [ROOT / name for name in EXCLUDED] or [ROOT / "rl"]
    # Files that are named are checked although they are excluded.
    report = subprocess.run([pyrefly, "check", *options, *files], cwd=ROOT, capture_output=True, text=True)
    errors = [x for x in json.loads(report.stdout)["errors"] if x["severity"] == "error"]
    clean = set(EXCLUDED) - {x["path"] for x in errors}
    assert not clean, f"{sorted(clean)} have no errors: take them off project-excludes in pyproject.toml"

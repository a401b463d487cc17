"""Shared fixtures: a tiny model, a process group of one in this process, and more."""

import gc
import importlib
import re
import sys
from collections.abc import Iterator

import uncollected  # noqa: F401  # isort: skip

import helpers_scripts as h
import launch
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from data import arithmetic
from rl.model import load as models
from rl.ranks import Ranks, init_ranks, shutdown_ranks

# Files that take a while, the longest first: a worker that is free takes the next one, so none is left alone with a
# long one at the end.
LONGEST = (
    "test_scripts",
    "test_rewards_learn",
    "test_stop",
    "test_environments",
    "test_async",
    "test_environment_runs",
    "test_program_runs",
    "test_checkpoint",
    "test_sampler_faults",
    "test_sandbox",
    "test_afternoon",
    "test_systems",
    "test_scoring",
    "test_processes",
    "test_run_faults",
    "test_checkpoint_faults",
    "test_distributed",
    "test_slices",
    "test_sliced_runs",
    "test_ppo",
    "test_nodes",
    "test_program_requests",
    "test_programs",
    "test_deletion",
    "test_rewards_runs",
    "test_dpo",
    "test_dapo",
    "test_benchmarks",
    "test_prime",
    "test_grpo",
    "test_tracking",
    "test_reward_model",
    "test_families",
    "test_hybrids",
    "test_engines",
    "test_logprobs",
    "test_lora_runs",
    "test_reinforce",
    "test_style",
    "test_distill",
    "test_self_distill",
    "test_offload",
    "test_docs",
    "test_elsewhere",
    "test_waiting_groups",
    "test_other_models",
    "test_in_flight",
    "test_modify",
    "test_flags",
    "test_tables",
    "test_smollm2",
    "test_mistakes",
    "test_affected",
    "test_float16_runs",
    "test_grpo_small",
    "test_program_samplers",
    "test_vision",
    "test_tools",
    "test_rewards_grail",
    "test_adapters",
    "test_lora",
    "test_rewards_judge",
    "test_arithmetic",
    "test_rewards_math",
    "test_requests",
    "test_sandbox_honest",
    "test_examples",
)

torch.set_num_threads(1)  # as in the runs that tests start: two threads add up in another order, to other bits


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """pytest-xdist is about to start a worker. Workers of the whole suite fork from the same process, since it takes
    ten seconds of a core to start one.
    """
    if node.config.args_source is pytest.Config.ArgsSource.TESTPATHS and sys.platform == "linux":
        node.workerinput["server"] = launch.start_server()


def pytest_configure(config: pytest.Config) -> None:
    """Workers of the whole suite share the process that they fork from. Each begins to collect at another folder: one
    of them rewrites the assertions of a file, and those that come later read what it wrote.
    """
    worker = getattr(config, "workerinput", {})
    if "server" in worker:
        launch.use_server(*worker["server"])
        folders = sorted({str(path.parent) for path in launch.TESTS.glob("*/test_*.py")})
        start = int(worker["workerid"].removeprefix("gw")) * len(folders) // worker["workercount"] % len(folders)
        config.args = folders[start:] + folders[:start]


@pytest.hookimpl(tryfirst=True)  # before the tests that -m leaves out are dropped
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; `--no-loadscope-reorder` makes xdist keep this order. Tests that promises.md names get
    their mark.
    """
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (place.get(item.path.stem, len(LONGEST)), item.path))
    promised = set(re.findall(r"`(test_\w+::test_\w+)`", (launch.TESTS / "promises.md").read_text()))
    for item in items:
        if f"{item.path.stem}::{item.name.partition('[')[0]}" in promised:
            item.add_marker("promise")


def pytest_collection_finish() -> None:
    """What is imported by now stays."""
    importlib.import_module("frozen")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Folder of the arithmetic task's model and tokenizer: livelier weights, 512 positions and two EOS ids (2 and 0).

    At their initial scale all tokens are about equally likely, attention looks everywhere alike and norms are all ones:
    a wrong position, a lost bias or two swapped norms would go unnoticed. Two EOS ids, one of them the pad id, are what
    Qwen2.5-Instruct has.
    """
    folder = tmp_path_factory.mktemp("tiny") / "model"
    arithmetic.save_model(folder, seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.1 if parameter.ndim == 2 else 0.3
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    model.config.max_position_embeddings = 512
    model.generation_config.eos_token_id = [2, 0]
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> h.Task:
    """The arithmetic task, small, for the tests of a file."""
    return h.make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    """A process group of one rank on the CPU, for as long as a test module runs."""
    # Groups of an earlier world that ended later would take the names of the new ones with them. A script that raised
    # has left its own frozen, where no collection finds them.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    yield init_ranks()
    shutdown_ranks()
    launch.forget_rank()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in one order everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def runs_here(one_thread, monkeypatch) -> Iterator[None]:
    """For tests that call the main of scripts: one thread, and no process group left behind."""
    monkeypatch.setattr(models, "choose_forward", h.choose_once())
    yield
    h.leave_distributed()


@pytest.fixture
def in_double(monkeypatch) -> None:
    """Scripts train in float64, so that what is equal up to rounding stays so through Adam."""
    monkeypatch.setattr(models, "load_pretrained", h.load_in_double())
    monkeypatch.setattr(Qwen2RMSNorm, "forward", h.norm_in_double)


@pytest.fixture
def sometimes(tmp_path) -> tuple[str]:
    """A value of --custom-reward-function."""
    (tmp_path / "sometimes.py").write_text(h.SOMETIMES)
    return (str(tmp_path / "sometimes.py"),)

"""Shared fixtures: a tiny model, a process group of one in this process, and a launcher of several ranks."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from data import arithmetic
from rl.fsdp import Dist, init_distributed, shutdown_distributed

ROOT = Path(__file__).parent.parent
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
def world() -> Iterator[Dist]:
    """A process group of one rank on the CPU, for as long as a test module runs."""
    yield init_distributed()
    shutdown_distributed()
    for name in RANK_VARIABLES:  # else processes started later would take themselves for this rank
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., str]:
    """torchrun(script, nproc, *args, timeout=120) -> output of a script that all ranks ran to the end."""

    def run(script: str | Path, nproc: int, *args: object, timeout: float = 120) -> str:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)]
        environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        process = subprocess.Popen(
            [*command, str(script), *map(str, args)],
            cwd=ROOT,
            env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its ranks
            output, _ = process.communicate()
            pytest.fail(f"{script} on {nproc} ranks took longer than {timeout} s:\n{output[-4000:]}")
        assert process.returncode == 0, f"{script} on {nproc} ranks failed:\n{output[-8000:]}"
        return output

    return run

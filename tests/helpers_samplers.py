"""Runs of train_async.py and samplers that join them, in forks; and what each step has trained on."""

import itertools
import json
import shutil
from functools import partial
from pathlib import Path

import helpers_scripts as h
import launch
import pytest
from helpers_data import spans_of
from transformers import AutoConfig, AutoModelForCausalLM

from extras.samplers import connection
from extras.samplers.pool import SamplerPool
from extras.samplers.protocol import TOKEN
from rl.data.order import derive_seed
from rl.sampling import sampler
from rl.sampling.loop import Loop


def ends_soon(seconds, fault):
    """From now on a sampler ends when it has had no connection for this long, after what `fault` does."""
    connection.GONE_S = seconds
    if fault is not None:
        fault()


def with_two_heads(task, folder, **sizes):
    """The folder of an untrained model with which two ranks can share an engine, which is made."""
    sizes |= dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=2)
    config = AutoConfig.from_pretrained(task.model, **sizes)
    shutil.copytree(task.model, folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    shutil.copy(Path(task.model, "generation_config.json"), folder)  # which says what ends a response
    return str(folder)


class Pools:
    """A run of train_async.py and samplers that join it, all in forks."""

    def __init__(self, task, root):
        self.task, self.root = task, root
        (self.port,) = launch.free_ports(1)
        self.count = itertools.count()

    def run(self, *, ranks=1, fault=None, **changes):
        address = f"tcp://127.0.0.1:{self.port}"
        settings = h.grpo_settings(self.task, self.root / "run", samplers=0, sampler_address=address, **changes)
        return launch.fork("train_async", settings, self.root / "run.log", ranks=ranks, fault=fault)

    def sampler(self, fault=None, *, gone_s=0.5, **settings):
        """If the run ends before this sampler joins, it ends by itself before `ends` gives it up."""
        log = self.root / f"sampler{next(self.count)}.log"
        settings = {"connect": f"tcp://127.0.0.1:{self.port}", "patience": 120.0} | settings
        return launch.fork("extras.samplers.sampler", settings, log, fault=partial(ends_soon, gone_s, fault), ranks=0)

    def lines(self):
        return h.read_jsonl(self.root / "run" / "metrics.jsonl")


# A file imports the next two fixtures by the names of their functions, and its tests ask for `task` and `pools`.
@pytest.fixture(name="task", scope="module")
def task_with_stops(tmp_path_factory) -> h.Task:
    """The arithmetic task, with token ids that end a response, for the tests of a file."""
    return h.make_task_with_stops(tmp_path_factory.mktemp("task"))


@pytest.fixture(name="pools")
def pools_of_task(task, tmp_path, monkeypatch) -> Pools:
    """A run and samplers that the test may start, in its folder and with a token of its own."""
    monkeypatch.setenv(TOKEN, "a token of this test")
    return Pools(task, tmp_path)


def note_batches(file):
    """From now on every batch that is taken is a line of a file: the weights' version, and row and ages of samples."""
    take = SamplerPool.take

    def noting(samplers):
        rows, samples = take(samplers)
        ages = [sorted({samplers.policy_version - v for v, _ in spans_of(s)}) for s in samples]
        line = dict(version=samplers.policy_version, rows=[row["row_index"] for row in rows], ages=ages)
        with open(file, "a") as f:
            f.write(json.dumps(line) + "\n")
        return rows, samples

    SamplerPool.take = noting


def batches(file: Path) -> dict[int, dict]:
    """What `note_batches` has written, by version: of steps that were made again the last time."""
    return {x["version"]: x for x in h.read_jsonl(file) if x["ages"]}  # only rank 0 has samples


def seed_by_number():
    """From now on train_grpo.py samples with the seeds that samplers have, not with the global generators."""
    ask, start = sampler.Sampler.ask, Loop.start

    def ask_by_number(self, own_rows, sampling, *step):
        if not step:  # an evaluation
            return ask(self, own_rows, sampling)
        Loop.start = lambda r, name, row, way: start(r, name, row, way, derive_seed(0, 4 * step[0] + name))
        try:
            return ask(self, own_rows, sampling, *step)
        finally:
            Loop.start = start

    sampler.Sampler.ask = ask_by_number

"""Several nodes: two torchrun agents of one rank, as on two machines, do what two ranks of one machine do.

Run by torchrun this file is a worker: `test_nodes.py FOLDER` trains once for each entry of FOLDER/runs.json.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import helpers_scripts as h
import launch
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

import train_grpo
from extras.engines import hf
from rl.flags import build
from rl.model import load as models
from rl.scoring.flags import Scoring
from rl.scoring.pool import Scorer

TIMEOUT = 900  # seconds for each of the two launches; they take 5 and 10 on two idle cores, 30 on busy ones
RUNS = {
    "sharded": {},  # over both ranks, hence over both nodes
    "hybrid": {"fsdp_size": 1, "save_freq": 1},  # a copy of the model on each node
    "crashed": {"fsdp_size": 1, "save_freq": 1},  # rank 1 dies in step 2
}


def train(folder: Path) -> None:
    """Be one rank: write down what it finds on its node, then train."""
    runs = json.loads((folder / "runs.json").read_text())
    scorer = Scorer(runs[0]["settings"]["custom_reward_function"], tokenizer=None, flags=Scoring())
    found = {name: int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")}
    (folder / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(found | {"reward_workers": scorer.num_workers}))
    scorer.close()
    h.run_entries(runs)


def plan(task: h.Task, folder: Path, names: list[str]) -> None:
    """Write down what two ranks will train in turn: the first in the group that their launcher has prepared."""
    folder.mkdir()
    ports = launch.free_ports(len(names) - 1)
    runs = [
        {"script": "train_grpo", "port": port, "settings": h.grpo_settings(task, folder / name, **RUNS[name])}
        for name, port in zip(names, [None, *ports], strict=True)
    ]
    for name, run in zip(names, runs, strict=True):
        run["comparable"] = name == "hybrid"  # from here on one rank would give the same responses: see below
        if name == "crashed":  # after the check before training and step 1, which is written in the background
            run["crash_at"] = [1, 2, str(folder / name / "global_step_1")]
    (folder / "runs.json").write_text(json.dumps(runs))


def train_on_nodes(folder: Path) -> list[tuple[int, str]]:
    """Train what is planned on two nodes of one rank; returns exit status and output of each node's agent."""
    (meeting_point,) = launch.free_ports(1)
    torchrun = [*launch.TORCHRUN, "--nnodes", 2, "--nproc_per_node", 1]
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{meeting_point}"]
    address = ["--local_addr", "127.0.0.1"]  # this machine's name need not resolve
    command = [*torchrun, *rendezvous, *address, __file__, folder]
    agents = [launch.start(*command, PYTHONPATH=launch.PATHS) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:  # both at once, so that neither waits for its output to be read
        outputs = list(pool.map(lambda agent: launch.finish(agent, timeout=TIMEOUT), agents))
    return [(agent.returncode, output) for agent, output in zip(agents, outputs, strict=True)]


@pytest.fixture(scope="module")
def one_node(task, tmp_path_factory):
    """Folder of the runs of two ranks on one node."""
    folder = tmp_path_factory.mktemp("nodes") / "one"
    plan(task, folder, ["sharded", "hybrid"])
    launch.run_file(__file__, folder, nproc=2, timeout=TIMEOUT, PYTHONPATH=launch.PATHS)
    return folder


@pytest.fixture(scope="module")
def crash(task, tmp_path_factory):
    """Folder of the runs of two agents with one rank each, and how the agents ended."""
    folder = tmp_path_factory.mktemp("nodes") / "two"
    plan(task, folder, ["sharded", "hybrid", "crashed"])
    return folder, train_on_nodes(folder)


@pytest.fixture(scope="module")
def two_nodes(crash):
    folder, agents = crash
    assert (folder / "hybrid" / "global_step_2").is_dir(), "\n".join(output[-4000:] for _, output in agents)
    return folder


@pytest.mark.parametrize("name", ["sharded", "hybrid"])
def test_two_nodes_train_like_one_bit_by_bit(one_node, two_nodes, task, name):
    # The same two ranks with the same seeds, and sums of two terms, whose order does not matter: nothing is rounded
    # differently.
    one, two = (h.timeless(h.read_jsonl(folder / name / "metrics.jsonl")) for folder in (one_node, two_nodes))
    assert [line["step"] for line in two] == [1, 2]  # written by one rank, not by the first of each node
    assert two == one
    assert all(line["actor/grad_norm"] > 0.1 and 0 < line["critic/score/mean"] < 1 for line in two)
    final = h.weights(two_nodes / name / "global_step_2")
    h.assert_same(final, h.weights(one_node / name / "global_step_2"))
    start = AutoModelForCausalLM.from_pretrained(task.model).state_dict()
    assert all((final[key] - start[key]).abs().max() > 1e-4 for key in final)
    states = [h.saved_state(folder / name / "global_step_2") for folder in (one_node, two_nodes)]
    h.assert_same(*states)


def test_local_ranks_and_reward_processes_are_counted_by_node(one_node, two_nodes):
    def workers(ranks):
        return min(max(os.cpu_count() // ranks, 1), 16)

    for rank in (0, 1):
        one, two = (json.loads((folder / f"rank_{rank}.json").read_text()) for folder in (one_node, two_nodes))
        assert one == dict(LOCAL_RANK=rank, LOCAL_WORLD_SIZE=2, WORLD_SIZE=2, reward_workers=workers(2))
        assert two == dict(LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, WORLD_SIZE=2, reward_workers=workers(1))


def test_a_dead_rank_ends_both_agents_and_one_rank_continues_what_two_nodes_have_saved(
    crash, two_nodes, task, monkeypatch
):
    _, agents = crash
    assert [status for status, _ in agents] == [1, 1]
    assert any("SIGKILL" in output for _, output in agents)
    folder = two_nodes / "crashed"
    assert [line["step"] for line in h.read_jsonl(folder / "metrics.jsonl")] == [1]
    assert (folder / "global_step_1").is_dir() and not (folder / "global_step_2").exists()

    monkeypatch.setattr(hf.Engine, "step", h.step_by_prompt())  # else responses depend on the number of ranks
    monkeypatch.setattr(models, "load_pretrained", h.load_in_double())  # else Adam makes rounding errors large
    monkeypatch.setattr(Qwen2RMSNorm, "forward", h.norm_in_double)
    try:
        train_grpo.main(build(train_grpo.Args, **h.grpo_settings(task, folder, **RUNS["crashed"])))
    finally:
        h.leave_distributed()

    continued, unbroken = (h.read_jsonl(two_nodes / name / "metrics.jsonl") for name in ("crashed", "hybrid"))
    for left, right in zip(h.timeless(continued), h.timeless(unbroken), strict=True):
        assert left == pytest.approx(right, rel=1e-5, abs=1e-6)
    left, right = (h.weights(two_nodes / name / "global_step_2") for name in ("crashed", "hybrid"))
    assert left.keys() == right.keys()
    assert max((left[key] - right[key]).abs().max() for key in left) < 1e-6


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]))

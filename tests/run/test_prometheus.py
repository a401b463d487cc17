"""Prometheus scrapes real runs, from another process, while they train."""

import json
import re
import socket
from importlib.util import find_spec

import helpers_scripts as h
import launch
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import train_grpo
from extras.trackers.prometheus import name_of
from rl.flags import build
from rl.ranks import Ranks
from rl.run import together
from rl.run.tracking import Logging, open_early

DASHBOARD = launch.ROOT / "docs" / "grafana.json"

# Scores by parity. Who scores asks for the metrics, as Prometheus does, and keeps the newest answer to have a step.
REWARD = (
    h.REWARD
    + """
import urllib.request
from pathlib import Path
PORT = {port}
parity = compute_score

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=100) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            text = answer.read().decode()
    except OSError:  # before training, when the reward is tried out, nobody answers yet
        text = ""
    if "glassrl_step" in text:
        Path(__file__).with_suffix(".scraped").write_text(text)
    return parity(data_source, solution_str, ground_truth)
"""
)


def scraped(text: str) -> dict[str, dict[tuple, float]]:
    """Metric -> labels -> value, by prometheus_client's own parser. No metric comes twice."""
    families = list(text_string_to_metric_families(text))
    assert len(families) == len({family.name for family in families})
    return {
        sample.name: {tuple(sorted(x.labels.items())): x.value for x in family.samples if x.name == sample.name}
        for family in families
        for sample in family.samples
    }


@pytest.fixture(scope="module", params=["vllm"] if find_spec("vllm") else ["hf"])
def run(request, tmp_path_factory):
    """(engine, what was scraped in the second step, lines of metrics.jsonl) of a run."""
    folder = tmp_path_factory.mktemp("run")
    task, (port,) = h.make_task(folder), launch.free_ports(1)
    (folder / "reward.py").write_text(REWARD.replace("{port}", str(port)))
    names = dict(project_name="mine", experiment_name="a-run", prometheus_port=port)
    names |= dict(log_stats=True) if request.param == "vllm" else {}
    settings = h.grpo_settings(task, folder / "run", engine=request.param, val_before_train=True, **names)
    forked = launch.fork("train_grpo", settings, folder / "log")
    assert forked.ends() == [0], forked.log.read_text()[-6000:]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    return request.param, scraped((folder / "reward.scraped").read_text()), h.read_jsonl(folder / "run/metrics.jsonl")


def test_every_metric_of_the_last_step_and_evaluation_is_served(run):
    _, found, lines = run
    assert [line["step"] for line in lines] == [0, 1, 2]
    labels = (("experiment", "a-run"), ("project", "mine"))
    logged = {name: value for line in lines[:2] for name, value in line.items() if name not in ("step", "time")}
    assert {"actor/entropy", "critic/score/mean", "val/accuracy", "timing_s/gen", "perf/throughput"} <= logged.keys()
    for name, value in logged.items():
        assert found[name_of(name)] == {labels: value}, name
    assert found["glassrl_step"] == {labels: 1}
    assert found["glassrl_logged_at_seconds"][labels] == pytest.approx(lines[1]["time"], abs=1)
    assert found["process_resident_memory_bytes"][()] > 1e8  # of rank 0


def test_vllms_own_metrics_are_served_beside_them(run):
    engine, found, _ = run
    own = {name for name in found if name.startswith("vllm:")}
    assert bool(own) == (engine == "vllm")
    if own:
        [(labels, running)] = found["vllm:num_requests_running"].items()
        assert 0 <= running <= 16 and dict(labels)["engine"] == "0"
        [cached] = found["vllm:prefix_cache_queries_total"].values()
        assert cached >= (16 + 16) * 30  # tokens: of the prompts of an evaluation and of a step, each asked for once


def test_a_port_in_use_is_refused_before_anything_is_loaded(tmp_path):
    task = h.make_task(tmp_path)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        settings = h.grpo_settings(task, tmp_path / "run", prometheus_port=port)
        with pytest.raises(ValueError, match=f"--prometheus-port {port} cannot be served .*choose another port"):
            train_grpo.main(build(train_grpo.Args, **settings))
    h.leave_distributed()
    assert not (tmp_path / "run").exists()


def test_other_ranks_serve_nothing_and_hear_of_a_refusal(monkeypatch):
    def gather(own, group):  # what rank 0 has met, and this rank has not
        assert own == (None, None)
        return [(None, "Address already in use"), own]

    monkeypatch.setattr(together, "gather", gather)
    other = Ranks(1, 2, torch.device("cpu"), torch.float32, data_rank=1, data_size=2, group=None, data_group=None)
    (port,) = launch.free_ports(1)
    with pytest.raises(ValueError, match="Address already in use"):
        open_early(Logging(prometheus_port=port), other)
    socket.create_server(("127.0.0.1", port)).close()


def test_names_are_those_that_prometheus_takes():
    assert name_of("actor/entropy") == "glassrl_actor_entropy"
    assert name_of("val-core/openai/gsm8k/reward/mean@1") == "glassrl_val_core_openai_gsm8k_reward_mean_1"


def test_the_dashboard_shows_metrics_that_there_are(run):
    engine, found, _ = run
    panels = json.loads(DASHBOARD.read_text())["panels"]
    shown = {
        name
        for panel in panels
        for target in panel.get("targets", [])
        for name in re.findall(r"glassrl_\w+|vllm:\w+", target["expr"])
    }
    assert len(panels) > 10 and len(shown) > 20
    missing = {name for name in shown - found.keys() if engine == "vllm" or not name.startswith("vllm:")}
    assert not missing

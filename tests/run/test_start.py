"""How a run starts: what it prints meanwhile, whether it compiles, and where compiled code is found again."""

import math
import os
import re
from types import SimpleNamespace

import helpers_scripts as h
import pytest
import torch
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from transformers import Qwen2Config

import sft
import train_dpo
import train_grpo
import train_reward
from extras.plan import compiling_pays
from extras.plan.compiling import seconds_saved
from extras.plan.rehearsal import largest_micro_batch
from rl import console
from rl.data.template import load_tokenizer
from rl.flags import build
from rl.model.load import load_pretrained
from rl.model.logprobs import token_logprobs
from rl.model.sharding import KEPT_OPERATIONS, Memory, _compile_for_all_lengths, shard
from rl.run.run import Run
from rl.sampling.engines import vllm

POLICY = ["--model read", "--model on the device", "--model tested"]


def phases(text: str) -> list[tuple[str, float, float]]:
    """What was printed about phases of the start: names, seconds, and seconds since the command."""
    found = re.findall(r"^start \| (.+) ([\d.]+) s \| ([\d.]+) s since the command$", text, re.MULTILINE)
    return [(name, float(seconds), float(since)) for name, seconds, since in found]


@pytest.mark.parametrize(
    ("script", "settings", "names"),
    [
        (sft, h.sft_settings, [*POLICY, "optimizer"]),
        (train_grpo, h.grpo_settings, [*POLICY, "engine", "optimizer"]),
    ],
)
def test_every_phase_of_a_start_is_printed_with_its_seconds(
    script, settings, names, task, tmp_path, capsys, monkeypatch, runs_here
):
    now, began = iter(range(1000, 2000, 2)), 998.0
    monkeypatch.setattr(console, "time", SimpleNamespace(time=lambda: next(now)))
    monkeypatch.setattr(console, "_began", began)
    monkeypatch.setattr(console, "_last", [began])
    script.main(build(script.Args, **settings(task, tmp_path, total_training_steps=1)))
    found = phases(capsys.readouterr().out)
    assert [name for name, *_ in found] == ["flags and data", "ranks and folder of the run", *names]
    assert [times for _, *times in found] == [[2.0, 2.0 * i] for i in range(1, len(found) + 1)]


def test_only_rank_0_prints_the_phases(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    console.started("engine")
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    console.started("engine")
    assert [name for name, *_ in phases(capsys.readouterr().out)] == ["engine"]


SMOLLM2 = dict(num_hidden_layers=30, hidden_size=576, intermediate_size=1536, num_attention_heads=9)
QWEN_1_5B = dict(num_hidden_layers=28, hidden_size=1536, intermediate_size=8960, num_attention_heads=12)
QWEN_7B = dict(num_hidden_layers=28, hidden_size=3584, intermediate_size=18944, num_attention_heads=28)
SFT = dict(train_batch_size=16, max_length=480)
GRPO = dict(train_batch_size=64, rollout_n=8, max_prompt_length=256, max_response_length=256)
LONG = GRPO | dict(max_response_length=896)
PUBLISHED = dict(train_batch_size=128, rollout_n=8, max_prompt_length=512, max_response_length=1024)


@pytest.mark.parametrize(
    ("script", "model", "flags", "ranks", "saved"),
    [  # By hand: layers * (tokens * hidden size * 9e-10 + micro-batches * 0.003), of half of the longest rows.
        (sft, SMOLLM2, SFT, 1, 30 * (3840 * 576 * 9e-10 + 1 * 0.003)),  # 0.1497
        (sft, SMOLLM2, SFT, 8, 30 * (480 * 576 * 9e-10 + 1 * 0.003)),
        (train_reward, SMOLLM2, SFT, 1, 30 * (7680 * 576 * 9e-10 + 1 * 0.003)),  # two rows in a pair
        (train_grpo, SMOLLM2, GRPO, 1, 30 * (131072 * 576 * 9e-10 + 8 * 0.003)),  # 2.7584
        (train_dpo, SMOLLM2, GRPO, 1, 30 * (131072 * 576 * 9e-10 + 8 * 0.003)),
        (train_grpo, QWEN_1_5B, LONG, 1, 28 * (294912 * 1536 * 9e-10 + 18 * 0.003)),  # 12.9275
        (train_grpo, QWEN_7B, PUBLISHED, 4, 28 * (196608 * 3584 * 9e-10 + 12 * 0.003)),  # 18.7650
        (
            train_grpo,
            QWEN_7B,
            PUBLISHED | dict(ppo_max_token_len_per_gpu=8192),
            4,
            28 * (196608 * 3584 * 9e-10 + 24 * 0.003),
        ),
    ],
)
def test_a_run_compiles_if_that_saves_more_than_it_takes(script, model, flags, ranks, saved, tmp_path):
    Qwen2Config(**model, vocab_size=80).save_pretrained(tmp_path)
    args = build(script.Args, **flags, model=str(tmp_path))
    for steps in (0, 1, 10, 466):
        assert seconds_saved(args, steps, ranks) == pytest.approx(steps * saved)
    enough = math.ceil(30 / saved)
    assert compiling_pays(args, enough, ranks) and not compiling_pays(args, enough - 1, ranks)


def test_a_user_decides_about_compiling_and_on_a_cpu_nothing_is_compiled(task, tmp_path, runs_here):
    for number, (given, used) in enumerate((("auto", False), (True, True), (False, False))):
        settings = h.sft_settings(task, tmp_path / str(number), compile=given, total_training_steps=10**6)
        assert Run(build(sft.Args, **settings), load_tokenizer(task.model), 10**6).memory.compile is used


def test_graph_sizes_cover_all_numbers_of_sequences_with_little_padding():
    assert vllm.graph_sizes(1) == [1] and vllm.graph_sizes(5) == [1, 2, 4, 5] and vllm.graph_sizes(8) == [1, 2, 4, 8]
    assert vllm.graph_sizes(1024) == [
        *(1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256),
        *(320, 384, 448, 512, 640, 768, 896, 1024),
    ]
    assert vllm.graph_sizes(700)[-3:] == [512, 640, 700]
    for most in (1, 7, 33, 256, 300, 512, 513, 1000, 2048):
        sizes = vllm.graph_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        padded = [min(size for size in sizes if size >= n) - n for n in range(257, most + 1)]
        assert all(p <= n / 4 for p, n in zip(padded, range(257, most + 1), strict=True))


def test_layers_that_recompute_selectively_can_be_found_in_the_cache_of_torch(tiny_model, world, monkeypatch):
    graphs, compile_with = [], torch.compile

    def collect(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_with(function, backend=collect))
    memory = Memory(activation_checkpointing="selective", compile=True)
    model = shard(load_pretrained(tiny_model, world), world, memory)
    with torch._dynamo.config.patch(disable=False):  # an engine that was started before has set it
        logp, _ = token_logprobs(model, largest_micro_batch(100, 50, 80))
        logp.sum().backward()
    torch._dynamo.reset()
    hashes = [autograd_cache._collect_context_fn_hashes(graph) for graph in graphs]  # raises if there is none
    assert [str(sorted(KEPT_OPERATIONS))] in hashes


def test_vllm_leaves_the_folders_of_compiled_code_as_they_were(tiny_model, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/ours")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with vllm._trainer_as_it_is(tiny_model):
        os.environ |= dict(TORCHINDUCTOR_CACHE_DIR="/theirs", TRITON_CACHE_DIR="/theirs")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/ours" and "TRITON_CACHE_DIR" not in os.environ


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [(None, "HOME/.cache/glassrl/compiled"), ("/tmp/mine", "/tmp/mine"), ("torch's", "HOME/.cache/glassrl/compiled")],
)
def test_compiled_code_is_kept_at_home_unless_the_user_has_chosen_a_folder(chosen, kept, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    if chosen is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    else:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir() if chosen == "torch's" else chosen)
    _compile_for_all_lengths(len)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == kept.replace("HOME", str(tmp_path))


def test_a_home_that_is_not_there_is_left_alone(monkeypatch):
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    _compile_for_all_lengths(len)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()

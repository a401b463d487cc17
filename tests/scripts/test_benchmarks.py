"""The benchmarks' arithmetic, and one real run of step_time.py."""

import contextlib
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import helpers_scripts as h
import launch
import matplotlib
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
import tyro
from helpers_flags import parsed
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    get_scheduler,
)

import eval as evaluation
import sft
import train_async
import train_dapo
import train_distill
import train_dpo
import train_grpo
import train_grpo_variants
import train_ppo
import train_prime
import train_reinforce
import train_self_distill
import train_self_distill_variants
from benchmarks import (
    compare_trl,
    environments,
    for_trl,
    fp8_gap,
    hybrids,
    leaderboard,
    learning,
    learning_trl,
    long_run,
    make_model,
    memory_table,
    models,
    pretrained,
    pretrained_trl,
    start,
    step_time,
)
from benchmarks.flops import train_flops
from benchmarks.tables import RESULTS
from data import arithmetic
from extras.families import delta_rule, recurrent
from rl.data.order import prompts_for_step
from rl.data.template import stop_token_ids
from rl.flags import change, flat
from rl.run.checkpoint_files import list_steps
from rl.run.training import check

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

MODULES = (
    train_grpo, train_grpo_variants, train_dapo, train_ppo, train_reinforce, train_dpo, train_prime, train_distill,
    train_self_distill, train_self_distill_variants, train_async, sft,
)  # fmt: skip
SCRIPTS = {f"{x.__name__}.py": x.Args for x in MODULES}
SHAPE = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=32)


def flags_of(script: str, words: list[str], model: str) -> SimpleNamespace:
    """The flags that a command line gives a script, with the script's name.

    Raises what the script would refuse if its model were `model`.
    """
    args = parsed(SCRIPTS[script], words)
    if "--rollout-quantization" not in words or torch.cuda.is_available():
        check(change(args, model=model))
    return SimpleNamespace(script=script, **flat(args))


def test_train_flops_by_hand():
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE, intermediate_size=16))
    # A layer has 8*8 (q) + 8*8 (o) + 2 * 8*4 (k, v) + 3 * 8*16 (mlp) = 576 weights: 6 * 2 * 576 * 10 = 69,120.
    # Head: 6 * 32 * 8 * 4 = 6,144. Attention over 6 and 4 tokens: 6 * 2 * 8 * (36 + 16) = 4,992.
    counts = dict(tokens=10, response_tokens=4, sum_squares=52)
    assert train_flops(model, **counts) == 69_120 + 6_144 + 4_992
    assert train_flops(model, **counts, frozen=True) == (69_120 + 6_144) * 4 / 6 + 4_992  # LoRA's base


def test_train_flops_of_a_hybrid_by_hand():
    delta = dict(linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=4, linear_value_head_dim=3)
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    sizes = SHAPE | dict(num_hidden_layers=3, layer_types=kinds, intermediate_size=16, head_dim=4)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**sizes, **delta, linear_conv_kernel_dim=5))
    # A delta net: 8*14 (q, k, v) + 5*14 (convolution) + 8*6 (gate) + 2 * 8*2 (beta, decay) + 6*8 (out) = 310.
    # Attention: 2 * 8*8 (q and its gate) + 2 * 8*4 (k, v) + 8*8 (o) = 256. MLP: 3 * 8*16 = 384.
    products = 6 * (2 * 310 + 256 + 3 * 384) * 10 + 6 * 32 * 8 * 4
    # In two layers a token has two states of 4 * 3: three products forward, two of each backward.
    states = 3 * (2 + 4) * 2 * 2 * 4 * 3 * 10
    counts = dict(tokens=10, response_tokens=4, sum_squares=52)
    assert train_flops(model, **counts) == products + 6 * 8 * 52 + states
    assert train_flops(model, **counts, frozen=True) == products * 4 / 6 + 6 * 8 * 52 + states


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SHAPE | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}),
        Qwen3Config(**SHAPE | {"hidden_size": 48}, head_dim=32),  # attention wider than the model
        Qwen3MoeConfig(**SHAPE, head_dim=32, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24),
    ],
    ids=["qwen2", "qwen3", "qwen3_moe"],
)
def test_train_flops_are_what_torch_counts(config, frozen):
    config.intermediate_size = 80
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    if frozen:  # as LoRA's base: gradients go through the layers, and none is of a weight
        model.requires_grad_(False)
        model.enable_input_require_grads()
    tokens, responses = 24, 10
    with FlopCounterMode(display=False) as counter:
        ids = torch.arange(tokens)[None] % config.vocab_size
        model(input_ids=ids, use_cache=False, logits_to_keep=responses).logits.sum().backward()
    head_dim = 8 if config.model_type == "qwen2" else config.head_dim
    masked = 6 * config.num_hidden_layers * config.num_attention_heads * head_dim * tokens**2  # torch counts it too
    counts = dict(tokens=tokens, response_tokens=responses, sum_squares=tokens**2)
    ours = train_flops(model, **counts, frozen=frozen)
    assert counter.get_total_flops() == ours + masked


def test_stop_ids_give_the_mean_length():
    vocabulary, eos = 151_936, 151_645
    ids = step_time.geometric_stop_ids(vocabulary, 400, eos)
    assert len(ids) == len(set(ids)) == 380 and ids[0] == eos and all(0 <= i < vocabulary for i in ids)
    tokens = np.random.default_rng(0).integers(0, vocabulary, 4_000_000)  # what a uniform model samples
    ends = np.flatnonzero(np.isin(tokens, ids))
    assert statistics.mean(np.diff(ends)) == pytest.approx(400, rel=0.03)
    for mean_length in (1, 200_000):
        with pytest.raises(ValueError, match=f"--mean-length {mean_length} must"):
            step_time.geometric_stop_ids(vocabulary, mean_length, eos)


def test_length_models_share_weights_and_differ_in_stop_ids(tmp_path):
    fixed = step_time.model_folder("tiny", None, tmp_path, "fixed", 16)
    geometric = step_time.model_folder("tiny", None, tmp_path, "geometric", 16)
    assert geometric == step_time.model_folder("tiny", None, tmp_path, "geometric", 16)  # and once more
    tokenizer = AutoTokenizer.from_pretrained(fixed)
    assert stop_token_ids(str(fixed), tokenizer) == (tokenizer.eos_token_id,)
    stops = stop_token_ids(str(geometric), AutoTokenizer.from_pretrained(geometric))
    assert len(stops) == 2048 // 16 and stops[0] == tokenizer.eos_token_id
    assert (geometric / "model.safetensors").samefile(fixed / "model.safetensors")
    with pytest.raises(ValueError, match="--shape 0.5B needs --tokenizer"):
        step_time.model_folder("0.5B", None, tmp_path, "fixed", 16)


@pytest.mark.parametrize("bare_rounds", h.some([0, 1], 0))
def test_step_time_end_to_end(tmp_path, bare_rounds):
    flags = f"--shape tiny --steps 3 --warmup 1 --bare-rounds {bare_rounds} --prompt-length 20 --engine hf"
    output = launch.run_file(
        "benchmarks/step_time.py",
        *flags.split(),
        *("--cache", tmp_path, "--out", tmp_path / "out", "--", "--rollout-n", 2, "--ppo-max-token-len-per-gpu", 128),
    )
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    lines = h.read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["prompt_length/min"] == line["prompt_length/max"] == 20 for line in lines)
    assert (report["prompts"], report["rollout_n"], report["max_response_length"]) == (8, 2, 32)

    # Medians of the two steps after the warm-up are their means.
    def mean(name):
        return (lines[1][name] + lines[2][name]) / 2

    phases = {name.removeprefix("timing_s/") for name in lines[0] if name.startswith("timing_s/")} - {"step"}
    assert set(report["phases"]) == phases and {"gen", "update_actor", "update_weights"} <= phases
    for name, phase in report["phases"].items():
        assert phase["seconds"] == pytest.approx(mean(f"timing_s/{name}"))
        assert phase["share"] == pytest.approx(mean(f"timing_s/{name}") / mean("timing_s/step"))
    assert report["step_s"] == pytest.approx(mean("timing_s/step"))
    assert report["period_s"] == pytest.approx((lines[2]["time"] - lines[0]["time"]) / 2)
    rates = [16 * line["response_length/mean"] / line["timing_s/step"] for line in lines[1:]]
    assert report["response_tokens_per_s"] == pytest.approx(statistics.mean(rates))
    if bare_rounds:  # a process of its own, with vLLM
        assert report["bare_tokens_per_s"] > 0
        assert report["gen_over_bare"] == pytest.approx(mean("perf/gen_tokens_per_s") / report["bare_tokens_per_s"])

    # The two sequences of a group, of 52 tokens and 20 in common, fit into 128: 8 micro-batches hold the 16.
    assert report["micro_batch_fill"] == pytest.approx((mean("perf/total_num_tokens") - 8 * 20) / (8 * 128))
    utilisation = []
    for line in lines[1:]:
        length = line["perf/total_num_tokens"] / 16
        # A layer: q and o 64*64 each, k and v 64*32 each, mlp 3 * 64*128 weights. Nearly all lengths are equal.
        layers = 6 * 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) * 16 * length
        head = 6 * 2048 * 64 * 16 * (length - 20)
        attention = 6 * 2 * 64 * 16 * length**2
        utilisation.append((layers + head + attention) / line["timing_s/update_actor"] / report["matmul_peak_flops"])
    assert report["mfu"] == pytest.approx(statistics.mean(utilisation), rel=0.01)

    printed = {name: float(seconds) for name, seconds in re.findall(r"^(\w+) +(\d+\.\d{3}) +[\d.]+%", output, re.M)}
    expected = {name: phase["seconds"] for name, phase in report["phases"].items()} | {"step": report["step_s"]}
    assert printed == pytest.approx(expected, abs=6e-4)


def test_rows_of_the_comparison_differ_in_what_they_say():
    args = compare_trl.Args(prompts=4, rollout_n=4, max_response_length=16)
    rows = {row: compare_trl.settings(args, row, 8, (7, 9), use_vllm=True) for row in "ABCDE"}
    assert all(x["per_device_train_batch_size"] * x["gradient_accumulation_steps"] == 16 for x in rows.values())
    assert all(x["generation_kwargs"]["stop_token_ids"] == [7, 9] for x in rows.values())

    def differences(one, other):
        names = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
        return names - {"output_dir"}

    assert differences(rows["A"], rows["B"]) == {"vllm_importance_sampling_correction"}
    assert rows["A"]["vllm_importance_sampling_correction"] and not rows["B"]["vllm_importance_sampling_correction"]
    assert differences(rows["B"], rows["C"]) == {"generation_kwargs"}
    assert rows["C"]["generation_kwargs"]["detokenize"] is False
    assert differences(rows["C"], rows["E"]) == {"model_init_kwargs"}
    assert rows["E"]["model_init_kwargs"]["dtype"] == "bfloat16"
    assert compare_trl.settings(replace(args, lora_rank=8), "C", 8, (7, 9), use_vllm=True) == rows["C"] | {
        "model_init_kwargs": rows["E"]["model_init_kwargs"]  # frozen weights; adapters are in float32
    }
    assert not {"gradient_checkpointing", "model_init_kwargs", "use_liger_kernel"} & rows["D"].keys()
    with pytest.raises(ValueError, match="--per-device-train-batch-size 5 does not divide the 16 responses"):
        compare_trl.settings(args, "A", 5, (), use_vllm=True)


def test_a_row_that_fails_or_hangs_is_reported(tmp_path):
    failing = "print('start')\nraise RuntimeError('out of memory')"
    error = compare_trl.run(["-c", failing], tmp_path / "failing.log", timeout=600)
    assert error == "exit 1: RuntimeError: out of memory"
    hanging = "import time; time.sleep(600)"
    assert compare_trl.run(["-c", hanging], tmp_path / "hanging.log", timeout=0.5) == "took longer than --timeout 0.5 s"
    assert compare_trl.run(["-c", "pass"], tmp_path / "fine.log", timeout=600) is None
    row = dict(row="A", batch_size=16, seconds=20.0, generate_s=12.0, response_tokens_per_s=26214.4, ours_over_trl=0.8)
    heading, fine, failed = compare_trl.table([row, dict(row="B", batch_size=16, error=error)]).splitlines()
    assert fine.split() == ["A", "16", "20.00", "12.00", "8.00", "26,214", "-", "-", "0.80"]
    assert len(fine) == len(heading) and failed.endswith(error)


@pytest.mark.skipif(find_spec("trl") is not None, reason="TRL is installed")
def test_without_trl_the_comparison_says_how_to_install_it(tmp_path):
    with pytest.raises(ModuleNotFoundError, match="pip install trl==1.16.0 datasets"):
        compare_trl.main(compare_trl.Args(out=tmp_path), [])
    with pytest.raises(ModuleNotFoundError, match="pip install trl==1.16.0 datasets"):
        learning_trl.main(learning_trl.Args(work_dir=tmp_path))


# --- learning.py


def test_every_run_of_the_learning_benchmark_parses_and_every_algorithm_is_among_them(tmp_path, tiny_model):
    args = learning.Args(work_dir=tmp_path)
    parsed = {}
    teacher = f"{tmp_path}/easy/grpo/seed_0/global_step_60/huggingface"
    first, *jobs = learning.jobs_of(args, "model", learning.NAMES, (3,))
    assert (first.name, first.seed) == ("grpo", 0) and "--save-freq -1" in first.command  # it makes the teacher
    for job in jobs:
        script, *words = shlex.split(job.command)
        x = parsed[job.name] = flags_of(script, words, tiny_model)
        assert (
            x.seed == 3 and x.model == "model" and x.default_local_dir == str(tmp_path / "easy" / job.name / "seed_3")
        )
        assert x.train_batch_size * x.rollout_n == (
            256 if x.rollout_n > 1 or script == "train_ppo.py" else x.train_batch_size
        )
        assert x.total_training_steps == 60
        assert (str(job.needs) if job.needs else None) == getattr(x, "teacher_model", None)
        assert job.needs is None or str(job.needs) == teacher

    def values(script, flag):
        return {vars(x)[flag] for x in parsed.values() if x.script == script}

    default = {"grpo", "ppo_clip"}  # of train_grpo.py
    assert values("train_grpo_variants.py", "adv_estimator") == set(train_grpo_variants.ADVANTAGES)
    assert values("train_grpo_variants.py", "loss_mode") | default >= set(train_grpo_variants.LOSSES)
    assert values("train_reinforce.py", "adv_estimator") == {
        "reinforce_plus_plus", "remax", "optimal_token_baseline"
    }  # fmt: skip
    assert values("train_dpo.py", "loss_type") == set(train_dpo.LOSSES)
    assert values("train_distill.py", "loss_mode") == set(train_distill.DISTANCES)
    assert values("train_self_distill.py", "loss_mode") == set(train_self_distill.DIVERGENCES)
    # One part of DAPO is off in each of the four.
    parts = ("clip_ratio_high", "loss_agg_mode", "filter_groups", "overlong_buffer_len")
    off = [name for name in parsed if name.startswith("dapo_no")]
    changed = [part for name in off for part in parts if getattr(parsed[name], part) != getattr(parsed["dapo"], part)]
    assert sorted(changed) == sorted(parts)


# --- environments.py


@pytest.mark.parametrize("name", environments.TASKS)
def test_runs_with_environments_and_their_evaluations_have_the_same_flags(name, tmp_path, tiny_model):
    args, found = environments.Args(work_dir=tmp_path), {}
    for way in environments.TASKS[name].ways:
        made = {key: shlex.split(command) for key, (command, _) in environments.commands(name, way, 7, args).items()}
        data = tmp_path / name / "data" / "files"
        assert made["data"][-2:] == ["--output-dir", str(data)] and (launch.ROOT / made["data"][0]).is_file()
        first = flags_of(*made["sft"][:1], made["sft"][1:], tiny_model)
        assert (first.model, first.train_files) == (f"{data}/model", (f"{data}/sft.parquet",))
        run = found[way] = flags_of(*made["train"][:1], made["train"][1:], tiny_model)
        steps = first.total_training_steps
        assert run.model == f"{first.default_local_dir}/global_step_{steps}/huggingface" and run.seed == 7
        other = parsed(evaluation.Args, made["evaluate"][1:])
        assert other.model == f"{run.default_local_dir}/global_step_{run.total_training_steps}/huggingface"
        both = flat(other).keys() & vars(run).keys() - {"model", "rollout_n", "temperature", "gpu_memory_utilization"}
        assert {"environment", "tools", "agent", "max_turns", "max_response_length", "val_files", "engine"} < both
        assert "seed" in both
        vars(run)["custom_reward_function"] = run.custom_reward_function or ("rewards/by_data_source.py",)
        assert {x: flat(other)[x] for x in both} == {x: vars(run)[x] for x in both}
    answered = found["with"]
    assert (answered.tools or answered.environment or answered.agent) and answered.max_turns >= 4
    if echo := found.pop("echo", None):
        assert {x for x in vars(answered) if vars(echo)[x] != vars(answered)[x]} == {"script", "default_local_dir"}
        assert echo.echo_coef == 0.1 and echo.adv_estimator == "grpo" and echo.loss_mode == "ppo_clip"
    for run in (found[way] for way in found if way != "with"):
        differ = {x for x in vars(run) if vars(run)[x] != vars(answered)[x]}
        assert differ == {"max_turns", "default_local_dir"} | ({"tools"} if answered.tools else set())


def test_a_command_is_run_again_when_it_has_changed(tmp_path):
    for folder, number, expected in (("a", 1, "1"), ("a", 2, "2"), ("b", 1, "1")):
        script = tmp_path / "script.py"
        script.write_text(f"import sys\nopen({str(tmp_path / folder / 'ran')!r}, 'a').write(sys.argv[1])")
        for _ in range(2):  # the second time it is finished
            environments.run(f"{script} {number}", tmp_path / folder)
        assert (tmp_path / folder / "ran").read_text() == expected
    with pytest.raises(subprocess.CalledProcessError):
        environments.run(f"{tmp_path}/none.py", tmp_path / "a")
    assert not (tmp_path / "a" / "done").exists()


def test_responses_are_counted_until_each_step():
    config = {"train_batch_size": 4, "rollout_n": 2}
    evaluation = {"step": 1, "val/accuracy": 0.5}
    lines = [{"step": 1, "critic/score/mean": 0.1}, evaluation, {"step": 2, "critic/score/mean": 0.2}]
    assert learning.responses_by_step(lines, config) == {0: 0, 1: 8, 2: 16}
    assert learning.responses_by_step(lines, config | {"adv_estimator": "remax"}) == {0: 0, 1: 12, 2: 24}
    assert learning.responses_by_step(lines, config | {"gen_batch_size": 10}) == {0: 0, 1: 20, 2: 40}
    for line, count in zip(lines[::2], (24.0, 0.0), strict=True):
        line["train/num_sampled_responses"] = count  # three rounds, then none: groups that waited were enough
    assert learning.responses_by_step(lines, config) == {0: 0, 1: 24, 2: 24}


def test_trl_has_the_settings_of_our_run(tmp_path, tiny_model):
    args = learning.Args(work_dir=tmp_path)
    script, *words = learning.jobs_of(args, "m", ["grpo"], (5,))[0].command.split()
    ours = flags_of(script, words, tiny_model)
    trl = learning_trl.settings(learning_trl.Args(), "trl", 5, tmp_path)
    same = {
        "learning_rate": ours.lr,
        "lr_scheduler_type": ours.lr_scheduler_type,
        "warmup_steps": ours.lr_warmup_steps,
        "weight_decay": ours.weight_decay,
        "max_grad_norm": ours.grad_clip,
        "temperature": ours.temperature,
        "epsilon": ours.clip_ratio_low,
        "max_completion_length": ours.max_response_length,
        "max_steps": ours.total_training_steps,
        "num_generations": ours.rollout_n,
        "per_device_train_batch_size": ours.train_batch_size * ours.rollout_n,
        "seed": ours.seed,
    }
    assert {name: trl[name] for name in same} == same
    assert script == "train_grpo.py" and trl["loss_type"] == "dapo"  # TRL's name for the mean over all tokens
    assert learning_trl.Args().test_freq == ours.test_freq
    for variant, expected in learning_trl.VARIANTS.items():
        other = learning_trl.settings(learning_trl.Args(), variant, 5, tmp_path)
        assert {name for name in trl if trl[name] != other[name]} == set(expected) and other.keys() == trl.keys()


def test_trl_gets_prompts_in_the_order_of_our_run_and_the_default_reward():
    rows = [
        {"prompt": f"{i}?", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": str(i)}, "split": "train"}
        for i in range(5)
    ]
    in_order = for_trl.prompts_in_order(rows, 3, 2, 7)
    expected = [row["prompt"] for step in range(3) for row in prompts_for_step(rows, step, 2, 7)]
    assert [x["prompt"] for x in in_order] == expected and len(set(expected)) > 3
    assert in_order == [{"prompt": x, "data_source": "openai/gsm8k", "truth": x[0]} for x in expected]
    completions = [[{"role": "assistant", "content": text}] for text in ("#### 3", "#### 4", "so #### 1")]
    assert for_trl.score(completions, ["openai/gsm8k"] * 3, ["3", "3", "1"], prompts=[]) == [1.0, 0.0, 1.0]
    assert for_trl.accuracy(rows[1:4], ["#### 1", "#### 2", "none"]) == pytest.approx(2 / 3)


def test_learning_rates_of_trl_are_what_the_variants_say(tmp_path):
    def rates(variant):
        x = learning_trl.settings(learning_trl.Args(), variant, 0, tmp_path)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=x["learning_rate"])
        schedule = get_scheduler(x["lr_scheduler_type"], optimizer, x["warmup_steps"], x["max_steps"])
        values = []
        for _ in range(x["max_steps"]):
            values.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return values

    assert rates("trl") == rates("trl_bf16") == [1e-4] * 60
    assert rates("trl_linear_decay") == pytest.approx([1e-4 * (60 - i) / 60 for i in range(60)])
    assert rates("trl_warmup_10") == pytest.approx([1e-4 * min(i / 10, 1) for i in range(60)])


def test_table_of_the_comparison_with_trl():
    runs = [finished("grpo", 0, [0.25, 0.5]), finished("grpo", 1, [0.25, 1.0, 1.0]), finished("trl", 0, [0.5], "died")]
    assert learning_trl.table(runs, (0, 10, 20)).splitlines()[2:] == [
        "| `grpo` | 2 | 0.250 (0.250-0.250) | 0.750 (0.500-1.000) | 1.000 (1.000-1.000) |",
        "| `trl` | 0 | - | - | - |",
    ]


def finished(name, seed, accuracy, error=None):
    """A result of learning.py with evaluations at steps 0, 10, 20, ... and 100 responses per step."""
    steps = [10 * i for i in range(len(accuracy))]
    final = None if error else accuracy[-1]
    responses = [100 * step for step in steps]
    return dict(
        name=name, seed=seed, error=error, steps=steps, responses=responses, accuracy=accuracy, final_accuracy=final
    )


def test_table_of_the_learning_benchmark():
    results = [
        finished("grpo", 0, [0.25, 0.9, 1.0]),
        finished("grpo", 1, [0.25, 0.5, 0.75]),
        finished("grpo", 2, [0.25, 0.5], "exit 1: ValueError: a|b"),
        finished("rloo", 0, [], "took longer than --timeout 5 s"),
    ]
    assert learning.table(results).splitlines()[2:] == [
        "| `grpo` | 0.875 | 0.750 | 1.000 | 10, never | 2,000 | seed 2 after step 10: exit 1: ValueError: a/b |",
        "| `rloo` | - | - | - | - | - | seed 0 after step 0: took longer than --timeout 5 s |",
    ]


def test_curves_are_means_between_the_extremes(tmp_path):
    _, axis = plt.subplots()
    runs = [finished("grpo", 0, [0.25, 0.5]), finished("grpo", 1, [0.25, 1.0])]
    runs[1]["responses"] = [0, 3000]
    learning.curve(axis, runs, "responses", "grpo", "C0")
    assert axis.lines[0].get_xydata().tolist() == [[0, 0.25], [2000, 0.75]]
    corners = {tuple(point) for point in axis.collections[0].get_paths()[0].vertices.tolist()}
    assert corners == {(0, 0.25), (2000, 0.5), (2000, 1.0)}
    runs.append(finished("grpo", 2, [0.25, 0.75, 0.5]))
    _, axis = plt.subplots()
    learning.curve(axis, runs[1:], "steps", "grpo", "C0")
    solid, dotted = (line.get_xydata().tolist() for line in axis.lines)
    assert solid == [[0, 0.25], [10, 0.875]] and dotted == [[10, 0.875], [20, 0.5]]  # one run is left
    assert [line.get_linestyle() for line in axis.lines] == ["-", ":"]
    learning.plot(
        [*runs, finished("ppo", 0, [0.1, 0.2]), finished("dapo", 0, [], "error")], "title", tmp_path / "x.png"
    )
    width, height = plt.imread(tmp_path / "x.png").shape[1::-1]
    assert width == 1210 and height == 726  # 11 inches and two rows of 3.3 at 110 dots, none for what failed


# --- leaderboard.py


def timed(name, seed, accuracy, error=None):
    """A result with an evaluation every five steps, of 2 s each."""
    x = finished(name, seed, accuracy, error)
    steps = [5 * i for i in range(len(accuracy))]
    return x | {"steps": steps, "train_seconds": [2.0 * step for step in steps]}


def test_leaderboard_takes_the_first_of_two_evaluations_at_the_target():
    assert leaderboard.first_of_two([0, 5, 10, 15], [0.1, 0.8, 0.74, 0.8], 0.75) is None
    assert leaderboard.first_of_two([0, 5, 10, 15, 20], [0.1, 0.8, 0.74, 0.75, 0.9], 0.75) == 15
    assert leaderboard.first_of_two([0, 5], [0.75, 0.75], 0.75) == 0
    assert leaderboard.first_of_two([0], [0.9], 0.75) is None
    x = leaderboard.with_result(timed("grpo", 0, [0.1, 0.8, 0.74, 0.75, 0.9]), 0.75)
    assert (x["target_step"], x["target_seconds"]) == (15, 30.0)
    x = leaderboard.with_result(timed("grpo", 0, [0.1, 0.8, 0.8], "exit 1: killed"), 0.75)
    assert (x["target_step"], x["target_seconds"]) == (None, None)


def test_leaderboard_has_the_fastest_entry_first_and_one_that_fails_to_reach_the_target_last():
    curves = {
        "slow": ([0.1, 0.5, 0.8, 0.8], [0.1, 0.5, 0.8, 0.8], [0.1, 0.5, 0.5, 0.8, 0.8]),
        "never": ([0.8, 0.8], [0.1, 0.8], [0.8, 0.8]),
        "fast": ([0.1, 0.8, 0.8], [0.1, 0.8, 0.8], [0.1, 0.1, 0.8, 0.8]),
    }
    runs = [timed(name, seed, y) for name, ys in curves.items() for seed, y in enumerate(ys)]
    assert leaderboard.table([leaderboard.with_result(x, 0.75) for x in runs]).splitlines()[2:] == [
        "| `fast` | 10.0 | 10.0, 10.0, 20.0 | 5, 5, 10 |",
        "| `slow` | 20.0 | 20.0, 20.0, 30.0 | 10, 10, 15 |",
        "| `never` | - | 0.0, never, 0.0 | 0, -, 0 |",
    ]


def test_leaderboard_evaluates_every_five_steps_in_every_task():
    for task in leaderboard.TASKS.values():
        words = task.flags.split()
        last = max(i for i, word in enumerate(words) if word == "--test-freq")  # the last one counts
        assert words[last + 1] == "5" and task.rows >= 1000
        assert len(task.entries) >= 3 and "trl" in task.entries


def test_leaderboard_refuses_a_name_without_a_command_and_unknown_entries():
    with pytest.raises(ValueError, match="--name mine and --command None come together"):
        leaderboard.main(leaderboard.Args(name="mine"))
    with pytest.raises(ValueError, match="--only gropo: unknown; choose from grpo, dapo, ppo, trl"):
        leaderboard.main(leaderboard.Args(only=("gropo",)))


WORKER = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "config.json").write_text('{"train_batch_size": 2, "rollout_n": 4}')
lines = [{"step": 0, "val/accuracy": 0.25}, {"step": 1, "critic/score/mean": 0.5, "timing_s/step": 2.0}]
lines += [{"step": 1, "val/accuracy": 0.5}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
if sys.argv[2] == "fail":
    raise ValueError("--lr 7 is too much")
if sys.argv[2] == "hang":
    time.sleep(600)
"""


def test_runs_that_finish_fail_and_hang(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    jobs = [
        learning.Job(how, 0, f"{tmp_path}/worker.py {tmp_path / how} {how}", tmp_path / how)
        for how in ("finish", "fail", "hang")
    ]
    learning.run_all(jobs[:2], at_a_time=2, timeout=600)
    learning.run_all(jobs[2:], at_a_time=1, timeout=6.0)
    done, failed, hung = [learning.result(job) for job in jobs]
    for x in (done, failed, hung):
        assert x["steps"] == [0, 1] and x["responses"] == [0, 8] and x["accuracy"] == [0.25, 0.5] and x["seed"] == 0
        assert re.fullmatch(r"[0-9a-f]{12}(\+changes)?", x["commit"])
    assert done["error"] is None and done["final_accuracy"] == 0.5
    assert failed["error"] == "exit 1: ValueError: --lr 7 is too much" and failed["final_accuracy"] is None
    assert hung["error"] == "took longer than --timeout 6 s" and hung["seconds"] >= 6
    assert learning.result(jobs[0]._replace(command="another")) is None  # to be run again


def test_a_run_ends_without_an_error_once_its_result_is_known(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    job = learning.Job("hang", 0, f"{tmp_path}/worker.py {tmp_path / 'hang'} hang", tmp_path / "hang")
    assert not leaderboard.has_result(job, 0.25)  # it has written nothing yet
    learning.run_all([job], 1, timeout=300.0, has_ended=lambda job: leaderboard.has_result(job, 0.25))
    x = learning.result(job)
    assert x["error"] is None and x["accuracy"] == [0.25, 0.5] and x["seconds"] < 300
    assert not leaderboard.has_result(job, 0.3)  # only the second of its evaluations has reached that


def test_learning_benchmark_refuses_unknown_runs():
    with pytest.raises(ValueError, match="--only gropo: unknown; choose from grpo, dr_grpo"):
        learning.main(learning.Args(only=("gropo", "grpo")))
    with pytest.raises(ValueError, match="--jobs 0 must be at least 1"):
        learning.main(learning.Args(jobs=0))


@pytest.mark.parametrize("max_total", [9, 12])
def test_chains_with_larger_totals_are_all_there_once(max_total):
    ways = {t: 1 for t in range(1, 10)}  # chains that have come to a total, counted step by step
    for _ in range(4):
        reached = dict.fromkeys(range(max_total + 1), 0)
        for a, n in ways.items():
            for b in reached:
                reached[b] += n * (1 <= abs(a - b) <= 9)
        ways = reached
    indices = range(arithmetic.num_indices(max_total))
    chains = {tuple(totals) for i in indices if (totals := arithmetic.chain_totals(i, max_total)) is not None}
    assert len(chains) == sum(ways.values())
    for totals in chains:
        assert 1 <= totals[0] <= 9 and all(0 <= t <= max_total for t in totals)
        assert all(1 <= abs(a - b) <= 9 for a, b in itertools.pairwise(totals))


def test_data_with_larger_totals(tmp_path):
    sizes = dict(num_sft=400, num_train=300, num_test=200)
    arithmetic.main(arithmetic.Args(output_dir=tmp_path, max_total=12, **sizes))
    rows = [pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("sft", "train", "test")]
    sft, train, test = ([x["prompt"][0]["content"] for x in xs] for xs in rows)
    assert not set(test) & (set(train) | set(sft)) and len(set(train)) == 300 and len(set(test)) == 200
    truths = [sum(int(number) for number in re.findall(r"[+-]?\d", x)) for x in train]
    assert [row["reward_model"]["ground_truth"] for row in rows[1]] == [str(x) for x in truths]
    assert max(truths) == 12 and min(truths) == 0
    claimed = [int(row["response"].split()[-1]) for row in rows[0]]
    assert max(claimed) == 12 and min(claimed) == 0  # guesses and mistakes stay in range as well
    with pytest.raises(ValueError, match="--max-total 8 must be within 9 and 99"):
        arithmetic.main(arithmetic.Args(output_dir=tmp_path, max_total=8))


# --- models.py


def test_the_page_about_models_has_the_table_of_its_results():
    [folder] = RESULTS.glob("*_models")
    found, page = models.read(folder), models.PAGE.read_text()
    assert models.with_table(page, models.table(found)) == page
    assert len(found) >= 45 and found.keys() <= models.FAMILIES.keys()
    assert all(x["logprob_gap"] < 1e-5 and x["export_missing"] == 0 for x in found.values() if "refused" not in x)


def test_a_family_is_taken_through_what_a_user_does(tmp_path):
    found = models.run_in_fork("minicpm3", False, tmp_path / "log")
    assert (found["family"], found["way"]) == ("minicpm3", models.WAYS[1]), (tmp_path / "log").read_text()[-2000:]
    assert found["logprob_gap"] < 1e-5 and found["export_loss_gap"] < 1e-5 and found["logprob_std"] > 0.1
    assert models.run_in_fork("gpt_oss", False, tmp_path / "log")["refused"].startswith("gpt_oss cannot be trained")


@pytest.mark.thorough
def test_gradients_of_a_family_on_one_rank_and_on_two(tmp_path):
    script = [sys.executable, models.__file__, "--out", str(tmp_path), "--gradients", "--families", "glm4_moe"]
    subprocess.run(script, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(models.ROOT)})
    found = models.read(tmp_path, "gradients.jsonl")["glm4_moe"]
    assert found.pop("way") == "packed" and found.pop("family") == "glm4_moe"
    assert found.keys() == {f"{kind}_gap_{ranks}" for kind in ("logprob", "grad") for ranks in (1, 2)}
    assert all(x < 1e-5 for x in found.values()) and found["grad_gap_1"] > 0


def test_gradients_of_all_families_are_those_of_their_own_forward():
    [folder] = RESULTS.glob("*_gradients-of-families")
    found = models.read(folder, "gradients.jsonl")
    assert found.keys() == models.FAMILIES.keys()
    assert [name for name, x in found.items() if "refused" in x] == ["gpt_oss"]
    for x in found.values():
        assert all(x[key] < 1e-5 for key in x.keys() - {"family", "way", "refused"}), x


# --- benchmarks/pretrained.py ----------------------------------------------------------------------------------------


def test_pretrained_gain_in_standard_errors_by_hand():
    run = dict(name="grpo", steps=[0, 20], accuracy=[0.2, 0.5], responses=[0, 10_240], train_seconds=[0.0, 50.0])
    # Of 100 problems: variances 0.2 * 0.8 / 100 = 0.0016 and 0.5 * 0.5 / 100 = 0.0025, so 0.3 / sqrt(0.0041) = 4.69.
    assert pretrained.standard_error(0.2, 100) == pytest.approx(0.04)
    [_, _, row] = pretrained.table([run], 100).splitlines()
    assert row == "| `grpo` | 0.200 | 0.500 | 4.7 | 20 | 10,240 | 2.50 |"
    alone = {name: x for name, x in run.items() if name != "train_seconds"}  # beside others: they compare with nothing
    assert pretrained.table([alone, run], 100).endswith("| 0.200 | 0.500, 0.500 | 4.7, 4.7 | 20 | 10,240 | -, 2.50 |")


@pytest.fixture
def long_model(tiny_model, tmp_path):
    """A model with as many positions as the responses of a pretrained one need."""
    model = str(shutil.copytree(tiny_model, tmp_path / "model"))
    AutoConfig.from_pretrained(model, max_position_embeddings=4096).save_pretrained(model)
    return model


def test_pretrained_flags_are_those_of_their_scripts(long_model):
    """Every run of RUNS and both SFTs parse, and TRL's settings make the same updates of the same size."""
    model, seen = long_model, set()
    for task in pretrained.TASKS:
        for job in pretrained.jobs_of(pretrained.Args(task=task, seeds=(0,)), "model"):
            script, *words = shlex.split(job.command)
            if script in SCRIPTS:
                args = flags_of(script, words, model)
                seen.add((script, args.train_batch_size * args.rollout_n))
            else:
                trl, others = tyro.cli(pretrained_trl.Args, args=words, return_unknown_args=True)
                found = pretrained_trl.settings(trl)
                assert found["max_steps"] == 4 * 200
                assert found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] == 16 * 8
                assert found["per_device_train_batch_size"] * found["steps_per_generation"] == 64 * 8
                assert found["learning_rate"] == 1e-5 and others  # flags that TRL has no use for
        flags_of("sft.py", f"--model m --train-files x {pretrained.TASKS[task].sft}".split(), model)
    assert seen == {(script, 256 if script == "train_ppo.py" else 512) for script in SCRIPTS if script != "sft.py"}


@pytest.mark.parametrize("task", pretrained.TASKS)
def test_pretrained_measures_as_its_runs_sample(task, tmp_path, long_model, monkeypatch):
    """What answers the policy, and the limits of lengths, are those of GRPO on the same task."""
    commands, args = [], pretrained.Args(task=task, work_dir=tmp_path, only=("grpo",), seeds=(0,))
    printed = "  accuracy                     0.2500\n  pass@8                       0.5000\n"
    monkeypatch.setattr(pretrained, "run", lambda command, log, gpu: commands.append(command) or printed)
    (tmp_path / task).mkdir()
    pretrained.measure(args, "checkpoint")
    [job] = pretrained.jobs_of(args, "checkpoint")
    script, *words = shlex.split(job.command)
    trained, evaluated = vars(flags_of(script, words, long_model)), []
    plain = [command for command in commands if "test.parquet" in command]
    hinted = [flat(parsed(evaluation.Args, shlex.split(x)[1:])) for x in commands if x not in plain]
    assert len(hinted) == 2 * bool(pretrained.TASKS[task].hinted)
    for x in hinted:  # the prompts with hints are longer, and all else is as without
        assert (x["max_prompt_length"], x["max_response_length"], x["rollout_n"]) == (640, 256, 1)
        assert x["val_files"] == (f"{tmp_path / task}/data/test_hinted.parquet",)
    for command in plain:
        script, *words = shlex.split(command)
        evaluated.append(flat(parsed(evaluation.Args, words)))
        for name in ("tools", "max_turns", "max_prompt_length", "max_response_length", "val_files"):
            assert script == "eval.py" and evaluated[-1][name] == trained[name]
    assert trained["tools"] == (("environments/calculator.py",) if task == "gsm8k_calculator" else ())
    base = str(tmp_path / pretrained.TASKS[task].base)
    assert [(x["model"], x["rollout_n"], x["temperature"]) for x in evaluated] == [
        ("checkpoint", 1, 0.0), ("checkpoint", 8, 1.0), (base, 1, 0.0), (base, 8, 1.0)
    ]  # fmt: skip
    measured = json.loads((tmp_path / task / "measured.json").read_text())
    assert (
        measured["sft greedy accuracy"] == 0.25
        and measured["base sampled pass@8"] == 0.5
        and len(measured) == 2 * len(commands)
    )


def test_pretrained_has_old_tokens_with_a_correction_and_without(long_model):
    """Samplers that share the trainer's GPU and are up to 0, 1 and 4 steps ahead, and partial rollouts."""
    args = pretrained.Args(task="word_problems", seeds=(0,))
    found = {}
    for job in pretrained.jobs_of(args, "model"):
        if job.name.startswith(("async_", "partial_")):
            script, *words = shlex.split(job.command)
            found[job.name] = x = flags_of(script, words, long_model)
            assert x.script == "train_grpo.py" or (x.samplers, x.sampler_devices) == (1, ("GPU",))
    ways = {name: x.rollout_is for name, x in found.items()}
    ages = {"async_0": 0, "async_1": 1, "async_4": 4}
    assert {name: found[name].max_staleness for name in ages} == ages
    assert {name: ways[name] for name in ages} == dict.fromkeys(ages, "token")
    assert {name: found[f"{name}_none"].max_staleness for name in ages} == ages
    shares = {f"partial_{f}_{way}": (f, way) for f in (0.25, 1) for way in ("none", "token")}
    shares = {name.replace("_1.0_", "_1_"): x for name, x in shares.items()}
    assert {name: (found[name].partial_rollouts, ways[name]) for name in shares} == shares
    assert ways == {name: "none" if name.endswith("_none") else "token" for name in ways} and len(ways) == 6 + 4


ALGORITHMS = "grpo ppo dapo dpo prime remax reinforce_plus_plus distill self_distill lora_8"


def test_pretrained_draws_every_algorithm_into_one_figure(tmp_path):
    """The command of the docstring, from runs that are there: one row of three, with GRPO and nine others in each."""
    words = ALGORITHMS.split()
    [command] = re.findall(r"pretrained.py (.* --in-one (?:.|\n)*?)\n\n", pretrained.__doc__)
    args = tyro.cli(pretrained.Args, args=shlex.split(command.replace("\\\n", "")))
    assert args.task == "word_problems_hints"
    assert (list(args.only), args.in_one, args.seeds) == (words, True, (0, 1, 2))
    assert {"--total-training-steps 160" in job.command for job in pretrained.jobs_of(args, "model")} == {True}
    assert len(pretrained.jobs_of(args, "model")) == 3 * 10
    for name in (*words, "grpo_fp16"):  # the last one is not asked for
        folder = tmp_path / args.task / name / "seed_0"
        folder.mkdir(parents=True)
        x = dict(name=name, seed=0, steps=[0, 20], accuracy=[0.2, 0.3], responses=[0, 9], train_seconds=[0.0, 5.0])
        (folder / "result.json").write_text(json.dumps(x))
        (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    pretrained.main(replace(args, report_only=True, work_dir=tmp_path, results=tmp_path / "out"))
    width, height = plt.imread(tmp_path / f"out/{args.task}.png").shape[1::-1]
    assert width == 1430 and height == 374  # 13 inches and one row of 3.4 at 110 dots
    [*_, axis] = [x for x in plt.figure(plt.get_fignums()[-2]).axes if x.get_legend()]
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert sorted(labels) == sorted(f"{name} (1)" for name in words)
    assert len({line.get_color() for line in axis.lines}) == 10


def test_pretrained_reports_runs_that_were_ended_early(tmp_path):
    folder = tmp_path / "word_problems/grpo/seed_0"
    folder.mkdir(parents=True)
    lines = [{"step": 0, "val/accuracy": 0.25}]
    lines += [
        {"step": i, "critic/score/mean": i / 10, "timing_s/step": 2.0, "timing_s/testing": 0.5} for i in (1, 2, 3)
    ]
    lines.insert(3, {"step": 2, "val/accuracy": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (folder / "config.json").write_text('{"train_batch_size": 4, "rollout_n": 2}')
    job = learning.Job("grpo", 0, "train_grpo.py", folder)
    (folder / "result.json").write_text(json.dumps(learning.summarize(job, 9.0, "took longer than --timeout 9 s")))
    (tmp_path / "word_problems/sft.json").write_text("[]")
    args = pretrained.Args(task="word_problems", report_only=True, work_dir=tmp_path, results=tmp_path / "out")
    [found] = pretrained.main(args)
    assert found["steps"] == [0, 2] and found["responses"] == [0, 16] and found["train_seconds"] == [0.0, 3.0]
    assert "| `grpo` | 0.250 | 0.500 |" in (tmp_path / "out/word_problems.md").read_text()
    assert {x.name for x in (tmp_path / "out").iterdir()} == {
        f"word_problems{x}" for x in (".json", ".md", ".png", "_training.png")
    }


def test_pretrained_says_that_there_is_nothing_to_report(tmp_path):
    with pytest.raises(ValueError, match=f"--report-only: no result.json with an accuracy in {tmp_path}/gsm8k/"):
        pretrained.main(pretrained.Args(report_only=True, work_dir=tmp_path, results=tmp_path / "out"))


def test_what_pretrained_prepares_may_use_the_hub_and_ends_with_it(tmp_path):
    """The making of GSM8K waits for problems that are never written, until the benchmark is asked to end."""
    source, base = tmp_path / "source", tmp_path / "smollm2"
    source.mkdir()
    base.mkdir()
    os.mkfifo(source / "train.jsonl")
    (base / "tokenizer.json").write_text("{}")  # the model is there
    process = launch.start("benchmarks/pretrained.py", "--gsm8k", source, "--work-dir", tmp_path)

    def end_of_pipe():
        with contextlib.suppress(OSError):  # nobody reads yet
            return os.open(source / "train.jsonl", os.O_WRONLY | os.O_NONBLOCK)

    end = launch.until(end_of_pipe)
    [making] = launch.children(process.pid)
    assert "HF_HUB_OFFLINE=0" in Path(f"/proc/{making}/environ").read_text().split("\0")
    process.terminate()
    launch.finish(process)
    assert process.returncode == 143 and not launch.alive(making)
    os.close(end)


def test_a_job_waits_for_what_it_needs(tmp_path):
    """Two jobs at a time: the first needs what the second makes, so it starts last; nobody makes what another needs."""
    program = tmp_path / "write.py"
    program.write_text("import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(time.time()))")
    early, late = (learning.Job(x, 0, f"{program} {tmp_path}/{x}.txt", tmp_path / x) for x in ("early", "late"))
    learning.run_all([late._replace(needs=tmp_path / "early.txt"), early], 2, 600)
    assert float((tmp_path / "early.txt").read_text()) < float((tmp_path / "late.txt").read_text())
    with pytest.raises(RuntimeError, match="late needs .*/nothing, which no run has made"):
        learning.run_all([late._replace(needs=tmp_path / "nothing")], 2, 600)


def test_jobs_take_the_gpu_with_the_fewest_jobs(tmp_path):
    """Three jobs, two at a time, on GPUs 3 and 5: the first two see one each, the last the one that is free. Each can
    name it in its command.
    """
    program = tmp_path / "show.py"
    show = "import os, pathlib, sys; x = os.environ['CUDA_VISIBLE_DEVICES'] + ' ' + ' '.join(sys.argv[2:])"
    program.write_text(f"{show}; pathlib.Path(sys.argv[1]).write_text(x)")
    jobs = [learning.Job("x", i, f"{program} {tmp_path}/gpu_{i} --on GPU GPUS", tmp_path / str(i)) for i in range(3)]
    learning.run_all(jobs, 2, 600, gpus=(3, 5))
    seen = [(tmp_path / f"gpu_{i}").read_text() for i in range(3)]
    assert seen[:2] == ["3 --on 3 GPUS", "5 --on 5 GPUS"] and seen[2] in seen[:2]


def test_a_run_that_fails_as_it_starts_on_a_shared_gpu_starts_again(tmp_path, capsys):
    """The engine of `unlucky` finds no memory at first, that of `hopeless` never does, `begun` fails later, and `wrong`
    has a flag that no second start makes right.
    """
    program = tmp_path / "start.py"
    program.write_text(
        "import pathlib, sys\nfolder, kind = pathlib.Path(sys.argv[1]), sys.argv[2]\n"
        "tries = folder.parent / (kind + '.txt')\nhas_failed = tries.exists()\n"
        "with open(tries, 'a') as file:\n    file.write('x')\n"
        "if kind == 'begun' or kind == 'unlucky' and has_failed:\n"
        "    (folder / 'config.json').write_text('{\"train_batch_size\": 4, \"rollout_n\": 2}')\n"
        "    (folder / 'metrics.jsonl').write_text('{\"step\": 0, \"val/accuracy\": 0.25}\\n')\n"
        "if kind == 'wrong':\n    raise ValueError('--lr 7 is too much')\n"
        "if kind == 'begun' or not (kind == 'unlucky' and has_failed):\n"
        "    raise ValueError('No available memory for the cache blocks.')\n"
    )
    kinds = ("unlucky", "hopeless", "begun", "wrong")
    jobs = [learning.Job(x, 0, f"{program} {tmp_path / x} {x}", tmp_path / x) for x in kinds]
    learning.run_all(jobs, 2, 600, gpus=(0,))
    assert [(tmp_path / f"{x}.txt").read_text() for x in kinds] == ["xx", "xxx", "x", "x"]
    error = "exit 1: ValueError: No available memory for the cache blocks."
    wrong = "exit 1: ValueError: --lr 7 is too much"
    assert [learning.result(job)["error"] for job in jobs] == [None, error, error, wrong]
    assert capsys.readouterr().out.count(f"starts again after {error}") == 1 + 2
    learning.run_all(jobs[1:2], 1, 600, gpus=(0,))  # one job at a time, so no other can be the cause
    assert (tmp_path / "hopeless.txt").read_text() == "xxxx"


# ---------------------------------------------------------------------------------------------------------------------
# long_run.py


@pytest.mark.parametrize("task", [*long_run.SIZES, *long_run.SHAPES])
def test_a_long_run_is_killed_between_its_checkpoints(task, long_model):
    given = long_run.Args(task=task, seed=3, gpus=4)
    start, command = long_run.command_of(given, "model", "--train-files rows").split("train_grpo.py ")
    args = flags_of("train_grpo.py", shlex.split(command), long_model)
    assert start == "-m torch.distributed.run --standalone --nproc_per_node 4 "
    assert args.seed == 3 and args.default_local_dir == f"runs/long_run/{task}/long_run"
    steps, kills = args.total_training_steps, long_run.kills_of(given)
    if task in long_run.SIZES:
        assert (steps, args.test_freq, args.save_freq, args.max_ckpt_to_keep) == (1000, 100, 50, 3)
        assert [step % args.save_freq for step in kills] == [20, 2, 10]
    else:  # There is a checkpoint before the last one, some steps are lost, and many are left.
        [kill] = kills
        assert 2 * args.save_freq < kill < 3 * args.save_freq and steps - kill > args.save_freq


def test_a_killed_long_run_has_every_step_once(task, tmp_path):
    """Forty real steps, killed soon after the 13th, with a checkpoint every fifth step."""
    changes = dict(total_training_steps=40, save_freq=5, max_ckpt_to_keep=2, test_freq=20)
    flags = h.flags(h.grpo_settings(task, tmp_path, **changes))
    command = shlex.join(map(str, [launch.ROOT / "train_grpo.py", *flags]))
    long_run.make(command, tmp_path, long_run.Args(kill_after=(13,), every=0.2))
    found = long_run.report(tmp_path)
    [kill], [first, second, both] = found["kills"], found["parts"]
    assert 13 <= kill["killed_after"] < 40 and kill["resumed_from"] in range(5, 40, 5)
    assert f"global_step_{kill['resumed_from']}," in (tmp_path / "output_1.log").read_text()
    assert first["steps"] + second["steps"] == [1, kill["resumed_from"], kill["resumed_from"] + 1, 40]
    assert found["steps_once"] and both["steps"] == [1, 40] and set(found["accuracy"]) == {20, 40}
    assert list_steps(tmp_path) == [35, 40]
    samples = [x for x in h.read_jsonl(tmp_path / "samples.jsonl") if x["start"] == 0 and x.get("step")]
    assert samples and all(0.1 < x["memory"] < 10 and x["files"] > 3 and 1 < x["step"] <= 40 for x in samples)


def test_a_long_run_sees_all_that_its_processes_hold(tmp_path):
    """A process whose child holds 256 MiB, twelve files and a thread, beside what /proc says of both."""
    child = f"""import threading, time
memory = bytearray(b"x") * 2**28
files = [open({str(tmp_path / "log")!r}, "a") for _ in range(12)]
threading.Thread(target=time.sleep, args=(600,)).start()
files[0].write("ready")
files[0].flush()
time.sleep(600)"""
    (tmp_path / "child.py").write_text(child)
    start = f"import subprocess, sys; subprocess.run([sys.executable, {str(tmp_path / 'child.py')!r}])"
    parent = psutil.Popen([sys.executable, "-c", start], start_new_session=True)
    try:
        launch.until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text())
        seen, pids = long_run.look(parent), [parent.pid, *launch.descendants(parent.pid)]
        assert len(pids) == 2
        assert seen["files"] == sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids) >= 3 + 3 + 12
        assert seen["threads"] == sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids) >= 3
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
        assert (
            seen["memory"] == pytest.approx(pages * os.sysconf("SC_PAGE_SIZE") / 2**30, rel=0.05)
            and 0.25 < seen["memory"] < 0.5
        )
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def test_the_table_of_a_long_run_by_hand(tmp_path):
    """Killed in step 25 and resumed from step 20: 40 steps of 1 s and later 2 s, of which the 39th also evaluates."""
    lines = [{"step": 0, "val/accuracy": 0.25}]
    for step in range(1, 41):
        line = {"step": step, "critic/score/mean": step / 100, "response_length/mean": 50.0}
        line |= {"rollout/logprob_gap_mean": step / 1000, "actor/grad_norm": 0.5}
        lines.append(line | {"timing_s/step": 1.0 if step <= 20 else 2.0})
    lines[39] |= {"timing_s/step": 7.0, "timing_s/testing": 5.0}
    lines.insert(39, {"step": 38, "val/accuracy": 0.5})
    samples = [{"start": 0, "step": None, "memory": 9.0, "files": 1, "threads": 1}]
    samples += [{"start": 0, "step": step, "memory": 2.0, "files": 30, "threads": 20} for step in range(1, 25)]
    samples += [{"start": 0, "killed_after": 24, "saving": False}]
    samples += [{"start": 1, "step": step, "memory": step / 10, "files": 31, "threads": 21} for step in range(21, 41)]
    samples += [{"start": 1, "step": 41, "memory": 0.1, "files": 3, "threads": 1} for _ in range(9)]  # it ends
    for name, rows in (("metrics", lines), ("samples", samples)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    (tmp_path / "output_0.log").write_text("run: new run, steps 1-40\n")
    (tmp_path / "output_1.log").write_text("run: resumed from run/global_step_20, steps 21-40\n")
    found = long_run.report(tmp_path)
    assert found["steps_once"] and found["accuracy"] == {0: 0.25, 38: 0.5} and found["kills"][0]["resumed_from"] == 20
    # The tenths are steps 1-2 and 19-20, then 21-22 and 39-40, and of the whole run 1-4 and 37-40.
    assert [row.split(" | ", 4)[-1] for row in long_run.table(found).splitlines()[2:]] == [
        "0.0015 to 0.0195 | 0.5 to 0.5 | 50 to 50 | 1 to 1 | 2 to 2 | 30 to 30 | 20 to 20 | - |",
        "0.0215 to 0.0395 | 0.5 to 0.5 | 50 to 50 | 2 to 2 | 2.15 to 3.95 | 31 to 31 | 21 to 21 | - |",
        "0.0025 to 0.0385 | 0.5 to 0.5 | 50 to 50 | 1 to 2 | 2 to 3.85 | 30 to 31 | 20 to 21 | - |",
    ]
    assert [row.rsplit(" | ", 8)[0] for row in long_run.table(found).splitlines()[2:]] == [
        "| 0 | 1 to 20 | 4 | 0.015 to 0.195",
        "| 1 | 21 to 40 | 0 | 0.215 to 0.395",
        "| all | 1 to 40 | 4 | 0.025 to 0.385",
    ]
    long_run.plot(tmp_path, found["kills"], tmp_path / "x.png")
    assert plt.imread(tmp_path / "x.png").shape[1::-1] == (2200, 660)  # 20 x 6 inches at 110 dots
    memory = plt.gcf().axes[6]
    assert [line.get_xdata()[0] for line in memory.lines] == [1, 21, 24]  # two starts and a kill


def test_a_long_run_that_fails_is_an_error_and_is_not_started_again(tmp_path):
    program = tmp_path / "fail.py"
    program.write_text("raise ValueError('--lr 7 is too much')")
    with pytest.raises(RuntimeError, match="exit 1: ValueError: --lr 7 is too much; see .*output_0.log"):
        long_run.make(str(program), tmp_path / "run", long_run.Args())
    assert not (tmp_path / "run" / "output_1.log").exists()


# ---------------------------------------------------------------------------------------------------------------------
# fp8_gap.py


def test_e4m3_by_hand():
    """Above 0.25 its numbers are 1/32 apart, above 256 they are 32 apart; each row has its largest number as 448."""
    rows = torch.tensor([[448.0, 0.3, -300.0], [4.48, 0.003, -3.0]])
    torch.testing.assert_close(fp8_gap.in_e4m3(rows), torch.tensor([[448.0, 0.3125, -288.0], [4.48, 0.003125, -2.88]]))


def test_an_engine_in_fp8_is_further_from_the_trainer_than_one_in_bf16(tiny_model, tmp_path, capsys):
    prompt = [{"role": "user", "content": "2 + 2"}]
    rows = [{"prompt": prompt, "data_source": "x", "reward_model": {"ground_truth": "4"}} for _ in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = fp8_gap.main(fp8_gap.Args(str(tiny_model), tmp_path / "prompts.jsonl", max_response_length=8))
    gaps = [found[name]["rollout/logprob_gap_mean"] for name in ("bf16", "fp8")]
    assert 0 < 4 * gaps[0] < gaps[1] < 0.5
    assert found["bf16"]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.01)
    assert 4 <= int(re.search(r"^fp8 tokens (\d+)", capsys.readouterr().out, re.MULTILINE)[1]) <= 32


# ---------------------------------------------------------------------------------------------------------------------
# make_model.py and hybrids.py


def test_the_shape_of_qwen3_5_by_hand():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_model.config_of("4B-hybrid"))
    H, mlp, norms = 2560, 3 * 2560 * 9216, 2 * 2560
    # q, k, v, gate, out; beta and decay of 32 heads; convolution of four tokens; A, dt; a norm of 128
    delta = H * (2 * 2048 + 2 * 4096 + 2 * 32) + 4096 * H + 4 * (2 * 2048 + 4096) + 2 * 32 + 128
    attention = H * (2 * 4096 + 2 * 1024) + 4096 * H + 2 * 256  # q and its gate, k, v, out, two norms
    total = 24 * delta + 8 * attention + 32 * (mlp + norms) + 151936 * H + H
    assert sum(x.numel() for x in model.parameters()) == total == 3_959_008_256


def test_packed_delta_nets_are_compared_with_transformers(tmp_path, monkeypatch):
    """As on a GPU, with torch's function in the place of the kernels: one net, forward and backward."""
    monkeypatch.setitem(hybrids.SIZES, "num_hidden_layers", 2)
    monkeypatch.setitem(hybrids.SIZES, "layer_types", ["linear_attention", "full_attention"])
    space = vars(importlib.import_module(hybrids.QWEN))
    for name in ("causal_conv1d_fn", recurrent.DELTA_RULE):
        monkeypatch.setitem(space, name, space[name])  # put back in the end
    monkeypatch.setattr(delta_rule, "kernel", delta_rule.kernel)
    monkeypatch.setattr(recurrent, "_has_kernels", recurrent._has_kernels)
    flags = dict(head=16, lengths=(3, 9, 1), dtype="float32", kernels="torch", compile=False, out=tmp_path)
    lines = {x["what"]: x for x in hybrids.main(hybrids.Check(**flags))}
    packed, padded = lines["eager, checkpointing selective"], lines["eager, padded"]
    assert (packed["way"], packed["all"], packed["with borders"]) == (hybrids.WAYS["borders"], 2, 2)
    assert lines["eager, checkpointing full"]["all"] == 3 and padded["with borders"] == 0 < padded["all"]
    assert all(x["logp_max"] < 1e-5 and x["grad_worst"] < 1e-4 for x in lines.values()) and len(lines) == 7


# ---------------------------------------------------------------------------------------------------------------------
# memory_table.py


def test_the_page_has_the_tables_of_memory():
    fits, by_phase = memory_table.tables(memory_table.Args()).split("\n\n")
    page = (launch.ROOT / "docs" / "scaling.md").read_text()
    of_7b = [line for line in by_phase.splitlines() if line.startswith("| 7B |")]
    assert fits in page and "\n".join([*by_phase.splitlines()[:2], *of_7b]) in page and len(of_7b) == 6
    assert "| 1.5B | all weights | full, 16384, moments on the host |" in fits


def test_the_page_has_the_table_of_long_sequences(tmp_path):
    memory_table.config_of("7B", max_position_embeddings=2**18).save_pretrained(tmp_path)
    cell = memory_table.long_cell(str(tmp_path), 8, 8192, 0)
    assert f"| 7B | 8 | {cell} |" in (launch.ROOT / "docs" / "sequence_parallel.md").read_text()


@pytest.mark.parametrize("name", ["gpus", "max_prompt_length", "gpu_memory_utilization"])
def test_the_tables_of_memory_refuse_numbers_that_mean_nothing(name):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} 0 must be "):
        memory_table.tables(memory_table.Args(**{name: 0}))


def test_a_start_is_read_from_what_a_script_prints(tmp_path):
    lines = [
        "start | imports 8.5 s | 8.5 s since the command",
        "start | --model on the device 3.0 s | 11.5 s since the command",
        "step  1/12 | loss 1.5000 | |g| 7.03 | 0.4k tok/s/GPU | 15.1 s",
        "step 12/12 | reward 0.250 | len 12 (5% cut) | 0.2k tok/s/GPU | 9.4 s (gen 4.8 update_actor 4.2)",
        "step 12 | held out: loss 1.0000",
    ]
    code = f"import sys, time; print({chr(10).join(lines)!r}, flush=True); time.sleep(0.2); sys.exit(3)"
    with open(tmp_path / "log", "w") as log:
        found = start.watch([sys.executable, "-c", code], dict(os.environ), 60, log)
        endless = start.watch([sys.executable, "-c", "while True: pass"], dict(os.environ), 0.5, log)
    assert [x[:2] for x in found["phases"]] == [["imports", 8.5], ["--model on the device", 3.0]]
    assert [x[:2] for x in found["steps"]] == [[1, 15.1], [12, 9.4]] and found["code"] == 3
    assert all(0 < since <= found["seconds"] - 0.15 for *_, since in found["phases"] + found["steps"])
    assert endless["code"] == -9 and endless["phases"] == endless["steps"] == []
    logged = (tmp_path / "log").read_text()
    assert all(re.search(rf"^ +[\d.]+ {re.escape(line)}$", logged, re.MULTILINE) for line in lines)


def test_vllm_alone_starts_with_the_flags_of_the_script():
    flags = "--model M --max-prompt-length 100 --max-response-length 28 --max-num-seqs 64"
    assert start.flags_of_engine("train_grpo.py", [*flags.split(), "--tensor-model-parallel-size", "2"]) == dict(
        model="M", tensor_parallel_size=2, max_num_seqs=64, gpu_memory_utilization=0.5, max_model_len=128
    )
    assert start.flags_of_engine("sft.py", ["--model", "M"]) is None


# --- benchmarks/tool_latency.py


def test_conversations_sample_as_many_tokens_as_plain_responses(tmp_path):
    flags = "--engine hf --num-prompts 2 --rollout-n 2 --turn-length 12 --turns 2 --repeats 1 --latencies 0"
    launch.run_file("benchmarks/tool_latency.py", *flags.split(), "--out", tmp_path / "lines.jsonl")
    plain, seeded, conversations = h.read_jsonl(tmp_path / "lines.jsonl")
    assert [x["kind"] for x in (plain, seeded, conversations)] == ["plain", "seeded", "conversations"]
    assert plain["sampled"] == seeded["sampled"] == conversations["sampled"] > 0
    assert plain["responses"] == conversations["responses"] == 4
    assert plain["turns"] == seeded["turns"] == 1 < conversations["turns"] <= 3
    assert plain["told"] == seeded["told"] == 0 < conversations["told"]
    assert plain["of_plain"] == 1.0 and conversations["equal"] == 1

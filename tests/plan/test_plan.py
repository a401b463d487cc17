"""--plan: what it prints, for which scripts, with which exit code, and what it leaves alone."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import helpers_scripts as h
import launch
import pytest
import torch
from launch import ROOT
from transformers import Qwen2Config

from benchmarks import plan_errors, plan_measure
from extras.plan import Hardware, exit_if_planning, report, ways, work
from extras.plan.cards import GIB, KINDS, named
from rl.flags import change, flat
from rl.run.clock import Clock

NAMES = (
    "grpo",
    "grpo_variants",
    "ppo",
    "dapo",
    "reinforce",
    "dpo",
    "distill",
    "self_distill",
    "self_distill_variants",
    "prime",
    "async",
    "reward",
)
TRAINING = {name: importlib.import_module(f"train_{name}") for name in NAMES} | {"sft": importlib.import_module("sft")}
SIZE = dict(hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2)  # of 0.5B
H100 = named("h100x1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with the config of Qwen2.5-0.5B and nothing else."""
    folder = tmp_path_factory.mktemp("model")
    config = Qwen2Config(vocab_size=151936, intermediate_size=4864, tie_word_embeddings=True, **SIZE)
    config.save_pretrained(folder)
    return str(folder)


def args_of(script, path, **values):
    """Args of a script, of which all models are in `path`."""
    args = script.Args()
    names = {"model", "teacher_model"} & report.flat(args).keys()
    return change(args, **dict.fromkeys(names, path) | dict(train_files=("none.parquet",)) | values)


def planned(args, capsys, *machines, **values):
    with pytest.raises(SystemExit) as end:
        exit_if_planning(change(args, plan=machines, **values))
    return end.value.code, capsys.readouterr().out


# --- the command


def test_a_run_without_the_flag_goes_on(model):
    args = args_of(TRAINING["grpo"], model)
    assert exit_if_planning(args) is args


@pytest.mark.parametrize("name", TRAINING)
def test_every_script_can_be_planned(name, model, capsys):
    code, text = planned(args_of(TRAINING[name], model), capsys, "h100x8")
    assert code is None
    lines = text.splitlines()
    assert lines[0] == f"{TRAINING[name].__name__}.py fits on 8 x H100 80 GB, 2048 GiB of host memory"
    assert "0.49e9 parameters" in lines[1] and "--activation-checkpointing" in lines[2]
    assert re.search(r"GiB of each GPU, which has 79.2: updating \d+\.\d, optimizer step \d", text)
    [step] = re.findall(r"seconds per step: ([\d.]+) \((.*)\)", text)
    parts = [float(x) for x in re.findall(r" ([\d.]+)", f" {step[1]}")]
    assert float(step[0]) == pytest.approx(sum(parts), abs=0.06 * len(parts)) and float(step[0]) > 0.3
    phase = "update" if name in ("sft", "reward") else "update_actor"
    assert f"{phase} " in step[1]
    others = {"ppo": "values", "dpo": "ref", "distill": "ref", "prime": "prm", "dapo": "old_log_prob"}
    assert others.get(name, phase) in step[1]
    assert ("1 sampler(s) need" in text) == (name == "async")


def test_what_does_not_fit_is_one_sentence_and_a_bad_exit_code(model, capsys):
    args = args_of(TRAINING["grpo"], model)
    code, text = planned(args, capsys, "1gbx1")
    assert isinstance(code, str) and len(code.splitlines()) == 1 and model in code and text == ""
    code, text = planned(args, capsys, "h100x1", "1gbx1")  # the one that fits is printed
    assert "1 x 1 GB" in code and text.startswith("train_grpo.py fits on 1 x H100")
    code, text = planned(args, capsys, "h100x1", "a100x4")
    assert code is None and text.count("train_grpo.py fits on") == 2


@pytest.mark.parametrize(
    ("script", "values", "machine", "words"),
    [
        ("grpo", dict(tensor_model_parallel_size=2), "h100x3", "--tensor-model-parallel-size 2 does not divide the 3"),
        ("grpo", dict(tensor_model_parallel_size=4), "h100x4", "--tensor-model-parallel-size 4"),  # 14 heads
        ("grpo", dict(fsdp_size=3), "h100x4", "--fsdp-size 3 does not divide the 4 GPUs"),
        ("async", dict(samplers=2), "h100x2", "--samplers 2 leaves no GPU of 2 to train on"),
        (
            "async",
            dict(samplers=2, tensor_model_parallel_size=2),
            "h100x4",
            "--samplers 2 with 2 GPUs each leaves no GPU of 4 to train on",
        ),
        ("grpo", dict(plan_response_length=2000.0), "h100x1", "must be between 1 and --max-response-length 1024"),
        ("sft", dict(plan_response_length=20.0), "h100x1", "this run samples no responses"),
        ("grpo", dict(lr=-1.0), "h100x1", "--lr -1.0 must be at least 0"),
        ("grpo", {}, "g100x1", "--plan g100x1: no such machine"),
        ("grpo", dict(model="/nowhere/model"), "h100x1", "--model /nowhere/model: there is no such folder"),
        ("ppo", dict(critic_model="/nowhere/model"), "h100x1", "--critic-model /nowhere/model: there is no such"),
    ],
)
def test_flags_that_mean_nothing_there_are_named(script, values, machine, words, model, capsys):
    code, text = planned(args_of(TRAINING[script], model, **values), capsys, machine)
    assert words in code and len(code.splitlines()) == 1 and text == ""


def test_only_rank_0_prints(model, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert planned(args_of(TRAINING["grpo"], model), capsys, "1gbx1") == (None, "")


def test_it_needs_neither_weights_nor_vllm_nor_a_gpu(model):
    """As a command, in a process of its own: what it has loaded then."""
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: code = end.code\n"
        "import torch; print(code, 'vllm' in sys.modules, torch.cuda.is_initialized())"
    )
    words = [str(ROOT / "train_grpo.py"), "--model", model, "--plan", "h100x8"]
    here = dict(env=launch.environment(), cwd=ROOT, timeout=300)
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, **here)
    assert done.stdout.splitlines()[0].startswith("train_grpo.py fits on 8 x H100"), done.stderr
    assert done.stdout.splitlines()[-1] == "None False False"


def test_alone_it_means_this_machine_and_under_torchrun_its_ranks(model, capsys, monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nyes 'NVIDIA H100 80GB HBM3, 81559' | head -4\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "WORLD_SIZE"):  # other tests may have set them in this process
        monkeypatch.delenv(name, raising=False)
    args = args_of(TRAINING["grpo"], model, plan_host_memory=500.0)
    assert planned(args, capsys)[1].startswith("train_grpo.py fits on 4 x H100 80 GB, 500 GiB of host memory\n")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert planned(args, capsys)[1].startswith("train_grpo.py fits on 2 x H100 80 GB")
    assert planned(args_of(TRAINING["async"], model), capsys)[1].startswith("train_async.py fits on 3 x H100 80 GB")
    assert planned(args, capsys, "h200x4")[1].startswith("train_grpo.py fits on 4 x H200")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert planned(args, capsys)[1].startswith("train_grpo.py fits on 2 x H100 80 GB")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides every GPU
    assert "no GPU that nvidia-smi can see" in str(planned(args, capsys)[0])


# --- what is planned


def step(script, model, machine=H100, **values):
    plan = report.plan_of(args_of(TRAINING[script], model, **values), machine, values.pop("length", None))
    return plan.step


def test_more_gpus_are_never_slower(model):
    for script, values in (("grpo", {}), ("ppo", dict(use_kl_in_reward=True)), ("sft", {})):
        took = [step(script, model, named(f"h100x{n}"), **values).seconds for n in (1, 2, 4, 8)]
        assert took == sorted(took, reverse=True)


def test_a_faster_card_is_never_slower(model):
    order = [named(f"{kind}x4") for kind in ("l40s", "a100", "h100", "h200", "b200")]
    took = [step("grpo", model, machine).seconds for machine in order]
    assert took == sorted(took, reverse=True)


def test_updates_epochs_and_kl_cost_what_they_add(model):
    plain = step("grpo", model).phases
    twice = step("grpo", model, ppo_epochs=2).phases
    # Two epochs are two updates, so the old log-probs are computed: a forward pass, as that of the reference, whose
    # weights are in bf16 and not in fp32.
    assert twice["update_actor"] == pytest.approx(2 * plain["update_actor"], rel=1e-6)
    with_kl = step("grpo", model, use_kl_loss=True).phases
    assert with_kl["ref"] == pytest.approx(twice["old_log_prob"], rel=0.01) and "ref" not in plain
    assert with_kl["ref"] < 0.5 * plain["update_actor"]
    # With LoRA the reference is the policy without its adapters, whose products it lacks.
    adapted = step("grpo", model, use_kl_loss=True, ppo_epochs=2, lora_rank=64).phases
    assert adapted["ref"] == pytest.approx(with_kl["ref"]) and adapted["ref"] < adapted["old_log_prob"]
    halves = step("grpo", model, ppo_mini_batch_size=64).phases
    assert halves["update_actor"] == pytest.approx(plain["update_actor"], rel=0.05) and "old_log_prob" in halves


def test_what_a_step_of_each_script_samples_and_learns_from(model):
    def of(script, **values):
        w = work.work_of(args_of(TRAINING[script], model, **values), None)
        return w.prompts, w.answers, w.rows, w.same_prompt

    assert of("grpo") == of("distill") == (128, 8, 1024, 8)
    assert of("ppo") == (512, 1, 512, 1)
    assert of("reinforce", adv_estimator="remax") == (512, 2, 512, 1)  # and a greedy one
    assert of("dapo", gen_batch_size=48) == (3 * 48, 8, 1024, 8)  # three rounds
    assert of("prime", gen_batch_size=200) == (200, 8, 1024, 8)
    assert of("dpo") == (128, 8, 256, 2) and of("dpo", pairs="all") == (128, 8, 1024, 8)
    assert of("dpo", offline=True) == of("reward") == (0, 0, 256, 2)
    assert of("sft") == (0, 0, 128, 1)


def test_the_data_give_the_steps_and_the_lengths(tmp_path):
    """The task of other tests has a tokenizer and prompts of its own."""
    task = h.make_task(tmp_path)
    args = change(
        TRAINING["grpo"].Args(), model=task.model, train_files=(task.train,), val_files=(task.test,),
        train_batch_size=5, max_prompt_length=64, max_response_length=8, total_epochs=3, test_freq=2,
    )  # fmt: skip
    found = work.work_of(args, None)
    assert found.steps == 3 * (64 // 5) and found.questions == 16
    assert found.evaluations == math.ceil(36 / 2) + 1
    assert 1 <= found.lengths.prompt < 64 and not any("prompt" in text for text in found.assumed)
    missing = work.work_of(change(args, train_files=("none.jsonl",), val_files=()), None)
    assert missing.steps is None and missing.lengths.prompt == 64
    assert any("--total-training-steps" in text for text in missing.assumed)
    assert work.work_of(change(args, train_files=("none.jsonl",), total_training_steps=7), 4).steps == 7


def test_self_distillation_also_reads_the_prompts_with_hints(tmp_path, model):
    task = h.make_task(tmp_path)
    args = h.build(TRAINING["self_distill"].Args, **h.self_distill_settings(task, tmp_path / "run", ppo_epochs=2))
    found = work.work_of(args, None)
    assert [(x.name, x.learns, x.times, x.updates) for x in found.phases] == [
        ("update_actor", False, 2, 1), ("update_actor", True, 2, 2),
    ]  # fmt: skip
    rows = h.pq.read_table(task.train).to_pylist()  # a character is a token, and there is a line break
    assert found.phases[0].prompt - found.lengths.prompt == 1 + work.mean(
        [len(row["extra_info"]["answer"]) for row in rows]
    )
    missing = work.work_of(change(args, train_files=("none.jsonl",)), None)
    assert missing.phases[0].prompt == 68
    assert "every prompt with its hint has --max-hinted-prompt-length 68 tokens" in missing.assumed
    longer, shorter = (step("self_distill", model, max_hinted_prompt_length=n).phases for n in (4096, 1024))
    assert longer["update_actor"] > 1.3 * shorter["update_actor"]


def test_the_teacher_of_self_distillation_may_be_another_model(tmp_path, model):
    task = h.make_task(tmp_path)
    args = h.build(TRAINING["self_distill_variants"].Args, **h.self_distill_settings(task, tmp_path / "run"))
    args = change(args, hint_from="group")
    found = work.work_of(args, 8)
    assert found.phases[0].prompt == found.lengths.prompt + 8  # the hint is another response
    weights = {}
    for teacher in ("live", "first", "ema"):
        for rank in (0, 4):
            models = ways.models_of(change(args, model=model, teacher=teacher, lora_rank=rank))
            x = models.get("teacher")
            weights[teacher, rank] = x and x.fixed_bytes * x.fixed / x.sizes.total
    assert weights == {
        ("live", 0): None, ("first", 0): 2, ("ema", 0): 4, ("live", 4): None, ("first", 4): None, ("ema", 4): 2,
    }  # fmt: skip
    phases = {teacher: work.work_of(change(args, teacher=teacher), None).phases for teacher in ("live", "ema")}
    assert [x.name for x in phases["ema"]] == [x.name for x in phases["live"]]
    assert phases["ema"][0].model.is_frozen and not phases["live"][0].model.is_frozen


def test_held_out_files_that_cannot_be_read_are_named(tmp_path):
    task = h.make_task(tmp_path)
    args = change(
        TRAINING["grpo"].Args(), model=task.model, train_files=(task.train,), max_prompt_length=64, test_freq=2,
        val_before_train=False, val_files=(task.test, "none.parquet"),
    )  # fmt: skip
    words = f"--val-files {task.test} none.parquet cannot be read, so no evaluation is counted"
    unread = work.work_of(args, None)
    assert unread.evaluations == 0 and words in unread.assumed
    assert words in work.work_of(change(args, test_freq=-1, val_before_train=True), None).assumed
    silent = (dict(test_freq=-1), dict(val_files=()), dict(val_files=(task.test,)))  # nothing is evaluated, or all is
    for values in silent:
        assert not any("--val-files" in text for text in work.work_of(change(args, **values), None).assumed)
    demonstrations = change(TRAINING["sft"].Args(), model=task.model, val_files=("none.parquet",))
    assert not any("--val-files" in text for text in work.work_of(demonstrations, None).assumed)


def test_hours_are_the_start_the_steps_and_the_evaluations(model):
    args = args_of(TRAINING["grpo"], model, total_training_steps=100)
    plan = report.plan_of(args, H100)
    assert plan.hours == pytest.approx((plan.start_s + 100 * plan.step.seconds) / 3600)
    more = plan._replace(work=plan.work._replace(evaluations=5), evaluation_s=20.0)
    assert more.hours - plan.hours == pytest.approx(100 / 3600)


def test_the_memory_is_that_which_a_run_settles_for(model):
    """The plan of a machine is what extras.plan.settle chooses on it."""
    from extras.plan import settle

    args = args_of(TRAINING["grpo"], model)
    for name in ("h100x1", "rtx4090x2", "h200x4"):
        machine = named(name)
        plan = report.plan_of(args, machine)
        hardware = Hardware(int(machine.card.gib * GIB), int(machine.host_gib * GIB), machine.gpus, machine.gpus)
        chosen = settle(args, [hardware]).memory
        way = plan.choice.way
        assert (chosen.activation_checkpointing, chosen.ppo_max_token_len_per_gpu) == (way.checkpointing, way.tokens)
        assert (chosen.optimizer_offload, chosen.param_offload) == (way.optimizer_offload, way.param_offload)


def test_a_short_run_does_not_compile_and_the_plan_knows_it(model):
    """As extras.plan.compiling_pays says."""
    short, long, unknown = (
        report.plan_of(args_of(TRAINING["sft"], model, total_training_steps=n), H100) for n in (2, 5000, None)
    )
    assert (short.compiles, long.compiles, unknown.compiles) == (False, True, True)
    assert short.step.seconds > 1.2 * long.step.seconds and long.step == unknown.step
    always = report.plan_of(args_of(TRAINING["sft"], model, total_training_steps=2, compile=True), H100)
    assert always.step == long.step and "--compile True" in report.text_of(always, args_of(TRAINING["sft"], model))


def test_a_cache_that_is_too_small_for_all_sequences_takes_turns(model):
    args = args_of(TRAINING["grpo"], model, max_prompt_length=1000, max_response_length=30_000)
    large, small = (report.plan_of(args, named(name)).step.phases["gen"] for name in ("h100x1", "h100-24gbx1"))
    assert small > 1.2 * large


def test_a_run_that_slices_make_fit_is_told_so(model, capsys):
    long = dict(max_prompt_length=1000, max_response_length=31000)
    code, _ = planned(args_of(TRAINING["grpo"], model, **long), capsys, "8gbx2")
    assert code.endswith("or lower the longest sequence; or give --sequence-parallel-size 2, with which it fits")
    assert planned(args_of(TRAINING["grpo"], model, **long, sequence_parallel_size=2), capsys, "8gbx2")[0] is None
    code, _ = planned(args_of(TRAINING["grpo"], model, **long), capsys, "6gbx2")
    assert "--sequence-parallel-size" not in code
    code, _ = planned(args_of(TRAINING["grpo"], model, sequence_parallel_size=4), capsys, "h100x4")
    assert "4 does not divide its 14 attention heads" in code


def test_partial_rollouts_and_staleness_make_a_step_shorter(model):
    ragged = dict(max_response_length=4096, train_batch_size=16)
    alone, ahead = (
        report.plan_of(args_of(TRAINING["grpo"], model, partial_rollouts=share, **ragged), H100, 800.0).step
        for share in (0.0, 1.0)
    )
    assert ahead.phases["gen"] < alone.phases["gen"]
    fresh, stale = (
        report.plan_of(args_of(TRAINING["async"], model, max_staleness=s, **ragged), named("h100x2"), 800.0).step
        for s in (0, 4)
    )
    assert stale.seconds < fresh.seconds and stale.phases["gen"] < fresh.phases["gen"]


def test_a_sampler_of_two_gpus_has_half_of_the_weights_on_each_and_leaves_the_others_to_trainers(model):
    args = args_of(TRAINING["async"], model, samplers=1, max_num_seqs=64, gpu_memory_utilization=0.3)
    shared = args_of(TRAINING["async"], model, samplers=1, max_num_seqs=64, gpu_memory_utilization=0.3,
                     tensor_model_parallel_size=2)  # fmt: skip
    one, two = report.plan_of(args, named("h100x4")), report.plan_of(shared, named("h100x4"))
    assert [report.trainers_of(x, named("h100x4")) for x in (args, shared)] == [3, 2]
    assert report.trainers_of(shared, named("h100x3")) == 1  # trainers have no engine, so any number of them will do
    engines = [report.engine_of(flat(x), plan.policy.sizes, x.longest) for x, plan in ((args, one), (shared, two))]
    weights = [report.engine_bytes(x, 1e12) for x in engines]
    assert [x.shared_by for x in engines] == [1, 2] and weights[1] < weights[0]
    assert two.step.phases["gen"] != one.step.phases["gen"]


# --- the page


def test_the_page_has_the_kinds_of_gpus_and_the_errors_of_the_recorded_runs():
    parts = plan_errors.parts(plan_errors.compare())
    page = (ROOT / "docs" / "plan.md").read_text()
    assert plan_errors.filled(page, parts) == page, "run python benchmarks/plan_errors.py"
    assert all(f"| `{kind}` |" in parts["cards"] for kind in KINDS)


def test_the_errors_stay_within_what_is_published():
    compared = plan_errors.compare()
    assert len(compared) >= 8 and len({x.run["shape"] for x in compared}) >= 4
    for what, most in plan_errors.BOUNDS.items():
        errors = {x.name: error for x in compared if (error := x.error(what)) is not None}
        assert len(errors) >= 8
        assert all(abs(error) <= most for error in errors.values()), (what, errors)


def test_planned_numbers_are_divided_by_measured_ones(tmp_path):
    x = plan_errors.Compared("a", {}, {"step": 11.0, "gen": 0.0}, {"step": 10.0})
    assert x.error("step") == pytest.approx(0.1) and x.error("gen") is None and x.error("GiB sampling") is None


# --- benchmarks/plan_measure.py


@pytest.mark.parametrize("name", plan_measure.runs())
def test_a_run_that_can_be_measured_can_be_planned(name):
    run = plan_measure.runs()[name]
    gpus = run["gpus"] + (run["script"] == "train_async.py")
    plan = report.plan_of(plan_errors.args_of(run), named(run.get("machine", f"h100x{gpus}"), run.get("host_gib")))
    assert f"{plan.script}.py" == run["script"] and plan.step.seconds > 0.5


def test_phases_of_a_measured_run_are_written_down(tmp_path, monkeypatch):
    monkeypatch.setattr(Clock, "__call__", Clock.__call__)  # is put back
    plan_measure.record_phases(tmp_path / "phases")
    clock = Clock(SimpleNamespace(device=torch.device("cpu"), size=1))
    clock("gen")
    clock("update_actor")
    lines = [json.loads(line) for line in (tmp_path / "phases").read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["gen", "update_actor"]
    assert [line["seconds"] for line in lines] == [clock.seconds["gen"], clock.seconds["update_actor"]]


def test_a_phase_needs_its_peak_in_the_place_of_what_torch_holds(tmp_path, monkeypatch):
    """Of 140 GiB 100 are free. A later peak may be above what is held at the end. The first one is of the start."""
    held, peaks = iter([10, 10, 30]), iter([50, 30, 20])
    fakes = dict(synchronize=lambda device: None, mem_get_info=lambda device: (100 * GIB, 140 * GIB))
    fakes |= dict(memory_reserved=lambda: next(held) * GIB, max_memory_allocated=lambda: next(peaks) * GIB)
    for name, fake in (fakes | dict(reset_peak_memory_stats=lambda: None)).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(Clock, "__call__", Clock.__call__)
    plan_measure.record_phases(tmp_path / "phases")
    clock = Clock(SimpleNamespace(device=torch.device("cuda"), size=1))
    for phase in ("update_weights", "gen", "update_actor"):
        clock(phase)
    lines = [json.loads(line) for line in (tmp_path / "phases").read_text().splitlines()]
    assert [(line["used"], line["needed"]) for line in lines] == [(40, 40), (40, 60), (40, 30)]

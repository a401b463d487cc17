"""The published commands of docs/recipes.md: they are right, and fit on the GPUs that they were published for.

tests/recipes/ has the config.json of each model, with the fields that say what it computes.
"""

import dataclasses
import importlib
import math
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import helpers_scripts as h
import pytest
import torch
from helpers_flags import commands, parsed
from launch import ROOT
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import train_grpo
from benchmarks import recipes as benchmark
from extras.plan import exit_if_planning
from rewards.by_data_source import reward_name
from rl.flags import change, check_limits, flat
from rl.model.checks import check_context, check_trainable
from rl.model.sharding import clip_grad_norm

CONFIGS = ROOT / "tests" / "recipes"
PAGE = (ROOT / "docs" / "recipes.md").read_text()


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One of the commands, and the GPUs that the table has for it: their kind and number."""

    title: str
    text: str  # of its section
    words: list[str]
    kind: str
    gpus: int

    @property
    def script(self) -> str:
        return next(word for word in self.words if word.endswith(".py"))

    @property
    def flags(self) -> list[str]:
        """Of the script, with the folder in tests/recipes/ as --model."""
        words = self.words[self.words.index(self.script) + 1 :]
        at = words.index("--model") + 1
        folder = CONFIGS / words[at].rsplit("/")[-1]
        assert folder.is_dir(), f"{words[at]} has no config.json in {CONFIGS}"
        return [*words[:at], str(folder), *words[at + 1 :]]

    @property
    def args(self) -> Any:
        return parsed(importlib.import_module(self.script.removesuffix(".py")).Args, self.flags)


def anchor(title: str) -> str:
    """The name under which GitHub finds a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def recipes() -> list[Recipe]:
    """Those of the page, in its order."""
    rows = re.findall(r"^\| \[[^]]+\]\(#([^)]+)\) .* \| `([a-z0-9]+?)x(\d+)` \|$", PAGE, re.MULTILINE)
    hardware, on_the_page = {link: (kind, int(gpus)) for link, kind, gpus in rows}, []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        [command] = commands(section)
        on_the_page.append(Recipe(title, " ".join(section.split()), shlex.split(command), *hardware.pop(anchor(title))))
    assert not hardware, f"no section for {hardware}"
    return on_the_page


RECIPES = recipes()
each = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)


def test_there_are_ten_from_half_a_billion_to_32_billion_on_1_to_16_gpus():
    assert len(RECIPES) == 10
    assert {recipe.gpus for recipe in RECIPES} == {1, 2, 4, 8, 16}
    scripts = [recipe.script for recipe in RECIPES]
    assert set(scripts) == {"train_grpo.py", "train_grpo_variants.py", "train_ppo.py", "train_dapo.py"}
    assert sum(recipe.args.lora.lora_rank > 0 for recipe in RECIPES) == 3


@each
def test_a_command_starts_as_many_processes_as_it_has_gpus_and_its_flags_are_right(recipe):
    words = recipe.words
    numbers = [int(words[words.index(flag) + 1]) for flag in ("--nnodes", "--nproc_per_node") if flag in words]
    assert math.prod(numbers) == recipe.gpus
    args = recipe.args
    assert recipe.gpus % args.rollout.tensor_model_parallel_size == 0
    check_limits(args)
    for check in (check_context, check_trainable):
        check(AutoConfig.from_pretrained(args.model), args.model, args.max_prompt_length + args.max_response_length)
    script = importlib.import_module(recipe.script.removesuffix(".py"))
    if "validate" in vars(script):
        script.validate(args)


# What the originals do, worked out by hand from their settings: prompts, responses per prompt, updates per step, limits
# of prompt and response in tokens, learning rate.
ORIGINALS = {
    "Qwen2.5-0.5B, PPO, one GPU": (256, 1, 4, 512, 512, 1e-6),  # 256 / 64 updates
    "Qwen3-0.6B, GRPO with LoRA, one GPU (TRL)": (1, 16, 1, 1024, 4096, 1e-6),  # 16 / 16 prompts; TRL makes 2 updates
    "Qwen2.5-1.5B, GRPO with LoRA, one GPU": (128, 5, 1, 512, 1024, 3e-5),  # 128 / 128
    "Qwen2-7B, GRPO, two to eight GPUs": (1024, 5, 4, 1024, 1024, 1e-6),  # 1024 / 256
    "Qwen3-8B, PPO, eight GPUs": (1024, 1, 4, 1024, 2048, 1e-6),  # 1024 / 256
    "Qwen2.5-VL-7B, GRPO with images, eight GPUs": (512, 5, 4, 1024, 2048, 1e-6),  # 512 / 128
    "Qwen2.5-Coder-14B, GRPO, four GPUs": (1024, 5, 4, 1024, 1024, 1e-6),  # 1024 / 256
    "Qwen2.5-32B, GRPO with LoRA, four GPUs": (180, 5, 1, 512, 1024, 3e-5),  # 45 prompts on each of 4 GPUs
    "Qwen3-30B-A3B, GRPO, eight GPUs": (512, 8, 4, 2048, 4096, 1e-6),  # 512 / 128
    "Qwen2.5-Math-7B, DAPO, 16 GPUs": (512, 12, 16, 2048, 8192, 1e-6),  # 512 / 32
}
# And what they have besides clip ranges of 0.2, token-mean, AdamW's decay of 0.01, and no KL, entropy bonus or LoRA.
SETTINGS = {
    "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "weight_decay": 0.01, "grad_clip": 1.0,
    "use_kl_loss": False, "use_kl_in_reward": False, "entropy_coeff": 0.0, "loss_agg_mode": "token-mean",
    "kl_loss_type": "k3", "adv_estimator": "grpo", "lr_warmup_steps": 0, "lr_scheduler_type": "constant",
    "ppo_epochs": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "lora_rank": 0, "rollout_is": None,
    "gamma": 1.0, "lam": 1.0, "critic_lr": 1e-5, "critic_warmup": 0, "cliprange_value": 0.5, "critic_model": None,
    "val_temperature": 0.0, "val_n": 1, "freeze_vision_tower": True, "tensor_model_parallel_size": 1,
}  # fmt: skip
KL = dict(use_kl_loss=True, kl_loss_coef=0.001)
OTHERWISE = {
    "Qwen3-0.6B, GRPO with LoRA, one GPU (TRL)": dict(
        lora_rank=1, lora_alpha=32, lr_scheduler_type="cosine", weight_decay=0.0
    ),
    "Qwen2.5-1.5B, GRPO with LoRA, one GPU": KL | dict(lora_rank=32, lora_alpha=32, entropy_coeff=0.001),
    "Qwen2-7B, GRPO, two to eight GPUs": KL | dict(tensor_model_parallel_size=2),
    "Qwen3-8B, PPO, eight GPUs": dict(tensor_model_parallel_size=2),
    "Qwen2.5-VL-7B, GRPO with images, eight GPUs": KL
    | dict(kl_loss_coef=0.01, tensor_model_parallel_size=2, freeze_vision_tower=False),
    "Qwen2.5-Coder-14B, GRPO, four GPUs": KL | dict(tensor_model_parallel_size=4),
    "Qwen2.5-32B, GRPO with LoRA, four GPUs": KL
    | dict(lora_rank=32, lora_alpha=32, entropy_coeff=0.001, tensor_model_parallel_size=4),
    "Qwen3-30B-A3B, GRPO, eight GPUs": KL | dict(tensor_model_parallel_size=4),
    "Qwen2.5-Math-7B, DAPO, 16 GPUs": dict(
        clip_ratio_high=0.28, clip_ratio_c=10.0, weight_decay=0.1, lr_warmup_steps=10, rollout_is="none", val_n=32,
        val_temperature=1.0, val_top_p=0.7, tensor_model_parallel_size=2, filter_groups=False, overlong_buffer_len=4096,
        overlong_penalty_factor=1.0, overlong_filtering=False,
    ),
}  # fmt: skip


@each
def test_a_command_says_what_the_original_says_and_defaults_are_those_of_the_original(recipe):
    args, values = recipe.args, flat(recipe.args)
    mini_batch = args.ppo_mini_batch_size or args.train_batch_size
    updates = args.ppo_epochs * math.ceil(args.train_batch_size / mini_batch)
    lengths = args.max_prompt_length, args.max_response_length
    assert (args.train_batch_size, args.rollout_n, updates, *lengths, args.lr) == ORIGINALS[recipe.title]
    otherwise = OTHERWISE.get(recipe.title, {})
    assert otherwise.keys() <= values.keys()
    wanted = {name: value for name, value in (SETTINGS | otherwise).items() if name in values}
    assert {name: values[name] for name in wanted} == wanted


def planned(args: Any, machine: str, capsys: pytest.CaptureFixture) -> tuple[Any, str]:
    """Exit code and output of --plan."""
    with pytest.raises(SystemExit) as end:
        exit_if_planning(change(args, plan=(machine,)))
    return end.value.code, capsys.readouterr().out


@each
def test_a_command_fits_on_the_gpus_that_it_names(recipe, capsys):
    code, plan = planned(recipe.args, f"{recipe.kind}x{recipe.gpus}", capsys)
    assert code is None
    assert f"{recipe.script} fits on {recipe.gpus} x " in plan
    [(there, phases)] = re.findall(r"^GiB of each GPU, which has ([\d.]+): (.*)$", plan, re.MULTILINE)
    taken = {name: float(gib) for name, gib in (phase.rsplit(" ", 1) for phase in phases.split(", "))}
    assert taken.keys() >= {"updating", "sampling"}
    assert all(0 < gib < float(there) for gib in taken.values())
    of_host = re.findall(r"^GiB of host memory, of which each machine has (\d+): (\d+)$", plan, re.MULTILINE)
    assert [int(takes) < int(has) for has, takes in of_host] == [True]
    for said in re.findall(r"about (\d+) GiB of host memory", recipe.text):
        assert int(of_host[0][1]) == pytest.approx(int(said), rel=0.1)
    if "AdamW's moments are on the host" in recipe.text:
        assert "--optimizer-offload" in plan and "--param-offload" not in plan


def test_with_more_gpus_the_7b_needs_no_offloading(capsys):
    [args] = [recipe.args for recipe in RECIPES if recipe.title.endswith("two to eight GPUs")]
    for machine in ("h100x4", "h100x8"):
        assert "offload" not in planned(args, machine, capsys)[1]


@pytest.mark.parametrize(
    ("name", "machine", "reason"),
    [
        ("grpo_14b", "l4x4", "machine needs [0-9.]+ GiB of host memory and has 192.0"),
        ("grpo_lora_32b", "a10x4", "vLLM needs [0-9.]+ GiB of each GPU for its weights and one sequence"),
        ("ppo_8b", "h100x7", "--tensor-model-parallel-size 2 does not divide the 7 GPUs"),
    ],
)
def test_a_command_that_does_not_fit_ends_with_the_reason(name, machine, reason, capsys):
    [args] = [recipe.args for recipe in RECIPES if recipe.args.logging.experiment_name == name]
    code, plan = planned(args, machine, capsys)
    assert re.search(reason, code) and "\n" not in code and plan == ""


def test_the_command_line_with_plan_ends_with_0_and_runs_nothing():
    """On the page's longest command; under torchrun it is the same, once for each process."""
    recipe = RECIPES[-1]
    command = [sys.executable, ROOT / recipe.script, *recipe.flags, "--plan", f"{recipe.kind}x{recipe.gpus}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "train_dapo.py fits on 16 x H100 80 GB in 2 hosts" in ended.stdout
    assert not (ROOT / "runs" / "glassrl" / "dapo_math_7b").exists()


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return h.make_task(tmp_path_factory.mktemp("task"))


@each
def test_a_step_of_a_command_in_miniature_makes_as_many_updates_as_the_original(recipe, task, tmp_path, monkeypatch):
    """With a tiny text model on one process, 16 tokens instead of a thousand or more, and one prompt per update."""
    updates = ORIGINALS[recipe.title][2]
    rows = dict(train_batch_size=updates, ppo_mini_batch_size=1, rollout_n=min(recipe.args.rollout_n, 4))
    here = dict(
        tensor_model_parallel_size=1, fsdp_size=None, freeze_vision_tower=True, total_training_steps=1, save_freq=0
    )
    tiny = h.grpo_settings(task, tmp_path, **rows, **here, max_response_length=16, lr=recipe.args.lr)
    if "overlong_buffer_len" in flat(recipe.args):
        tiny["overlong_buffer_len"] = 8
    script = importlib.import_module(recipe.script.removesuffix(".py"))
    made = []
    monkeypatch.setattr(script, "clip_grad_norm", lambda *args: made.append(1) or clip_grad_norm(*args))
    script.main(change(recipe.args, **tiny))
    h.leave_distributed()
    [step] = [row for row in h.read_jsonl(tmp_path / "metrics.jsonl") if "actor/lr" in row]
    models = 2 if recipe.script == "train_ppo.py" else 1
    assert len(made) == models * updates
    assert step["actor/lr"] == pytest.approx(recipe.args.lr * (0.1 if recipe.args.lr_warmup_steps else 1.0))


def test_the_benchmark_takes_a_step_of_a_command_and_keeps_its_number_of_updates():
    args = benchmark.Args(("grpo_7b",), "tok", Path("out"), Path("models"), Path("gsm8k"), prompts=64)
    words = benchmark.one_step(benchmark.published("grpo_7b", PAGE), args)
    assert words[:4] == ["torchrun", "--nproc_per_node", "2", "train_grpo.py"]
    smaller = parsed(train_grpo.Args, words[4:])
    [same] = [recipe.args for recipe in RECIPES if recipe.args.logging.experiment_name == "grpo_7b"]
    assert smaller == change(
        same,
        model="models/Qwen2-7B-Instruct",
        train_files=("gsm8k/train.parquet",),
        val_files=("gsm8k/test.parquet",),
        custom_reward_function=("benchmarks/noise_reward.py",),
        train_batch_size=64,
        ppo_mini_batch_size=16,  # 1024 / 256 = 64 / 16 updates
        total_training_steps=1,
        test_freq=-1,
        val_before_train=False,
        save_freq=0,
        resume_mode="disable",
    )
    refused = {"grpo_70b": "docs/recipes.md has no such command; it has ppo_0.5b, ", "grpo_vl_7b": "needs images"}
    for name, reason in refused.items():
        with pytest.raises(ValueError, match=f"{name}:? {reason}"):
            benchmark.published(name, PAGE)


@pytest.mark.thorough
def test_the_benchmark_runs_a_command_and_says_how_it_ended(task, tmp_path, capsys):
    """On a tiny model, which stands where the benchmark would have made one."""
    shutil.copytree(task.model, tmp_path / "models" / "Qwen2.5-0.5B-Instruct")
    sizes = "--max-prompt-length 32 --max-response-length 12 --engine hf --reward-workers 1"
    folders = tmp_path / "out", tmp_path / "models", Path(task.train).parent
    args = benchmark.Args(("ppo_0.5b",), "none", *folders, prompts=8, more=sizes)
    assert benchmark.main(args) == 0
    assert re.search(r"ppo_0.5b: exit 0 after \d+ s\n  step 1/1 \| reward ", capsys.readouterr().out)
    assert len(h.read_jsonl(tmp_path / "out" / "ppo_0.5b" / "metrics.jsonl")) == 1
    assert benchmark.main(dataclasses.replace(args, more=f"{sizes} --max-response-length 10000")) == 1
    said = capsys.readouterr().out
    assert "ppo_0.5b: exit 1 after " in said and "= 10032 tokens" in said


def answers(text: str) -> list[str]:
    """Patterns of what the page names between backticks. A star stands for any letters and dots, and a name that begins
    with a dot continues the one before it: `kl_ctrl.type`, `.kl_coef`.
    """
    names: list[str] = []
    for span in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)):
        if re.fullmatch(r"[\w.*]+(=\w+)?", span):
            name = span.partition("=")[0]
            names.append(names[-1].rpartition(".")[0] + name if name.startswith(".") else name)
    return [re.escape(name).replace(r"\*", "[a-z0-9_.]*") for name in names]


def unanswered(settings: list[str], text: str) -> list[str]:
    """Settings of verl that are neither flags of the same name nor on the page, by the end of their names."""
    scripts = [importlib.import_module(path.stem) for path in ROOT.glob("*.py")]
    flags = set().union(*(flat(script.Args()) for script in scripts))
    patterns = [*flags, *answers(text)]
    known = re.compile(rf"(.*\.)?({'|'.join(patterns)})")
    return [name for name in settings if not known.fullmatch(name)]


def test_every_setting_of_verls_published_commands_has_an_answer_on_the_page():
    """Settings of the FSDP examples of verl 0.7.1 and 0.9.0, and of its recipes DAPO, PRIME, SPIN, SPPO and entropy."""
    page, settings = (ROOT / "docs" / "verl.md").read_text(), (CONFIGS / "verl_settings.txt").read_text().split()
    assert len(settings) > 250
    assert unanswered(settings, page) == []
    wrong = ["algorithm.pfppo.weight", "data.max_prompt_lengths", "trainer.name", "actor.micro_batch_sizes"]
    assert unanswered(wrong, page) == wrong


def test_rows_that_the_page_sends_to_a_reward_get_it():
    [name] = re.findall(r"Rows with the `data_source` `(\w+)` are graded .*?\n  by `rewards/math_reward.py`", PAGE)
    assert reward_name(name) == "math_reward"


# Parameters of the published weights, as the hub counts them; a head that is tied to the embedding counts once.
PARAMETERS = {
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen3-0.6B": 596_049_920,
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen2-7B-Instruct": 7_615_616_512,
    "Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen3-8B": 8_190_735_360,
    "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen2.5-Coder-14B-Instruct": 14_770_033_664,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen2.5-32B-Instruct": 32_763_876_352,
}


def test_a_config_is_that_of_the_published_model():
    assert {path.parent.name for path in CONFIGS.glob("*/config.json")} == PARAMETERS.keys()
    assert {Path(recipe.args.model).name for recipe in RECIPES} == PARAMETERS.keys()
    for name, number in PARAMETERS.items():
        config = AutoConfig.from_pretrained(CONFIGS / name)
        auto_class = AutoModelForImageTextToText if "VL" in name else AutoModelForCausalLM
        with torch.device("meta"):
            model = auto_class.from_config(config)
        assert sum(weight.numel() for weight in model.parameters()) == number, name

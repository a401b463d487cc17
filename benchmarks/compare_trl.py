r"""Seconds per step of TRL's GRPOTrainer and of train_grpo.py: same weights, prompts, lengths, sampler and GPU.

    pip install trl==1.16.0 datasets liger-kernel
    python benchmarks/compare_trl.py --shape 1.5B --tokenizer path/to/qwen2_tokenizer --rows B E
    python benchmarks/compare_trl.py --shape 7B --tokenizer ... --rows C --lora-rank 32     # peft must be there as well
    # On a GPU of 80 GB, ragged lengths, flash-attn, three steps that count: about six minutes
    python benchmarks/compare_trl.py --tokenizer ... --rows C --lengths geometric --per-device-train-batch-size 8 \
        --vllm-gpu-memory-utilization 0.2 --attn-implementation flash_attention_2 --steps 5 --warmup 2

Both make one update of AdamW from 64 prompts x 8 responses, which vLLM samples in the training process at temperature
1. The loss is token-mean, there is no KL term, and the reward is a hash of the response. Each row runs in a process of
   its own:

    A  TRL tuned: no activation checkpointing, Liger's layer kernels if installed, its importance correction on
    B  A without the correction, and so without a pass for old log-probs, as train_grpo.py on policy
    C  B without vLLM's detokenizer, whose text TRL does not read
    D  TRL at its defaults, except for the size of the step
    E  C with parameters and optimizer state in bf16; train_grpo.py keeps its fp32 masters

Afterwards train_grpo.py runs through benchmarks/step_time.py at its defaults. Flags that are not listed below go to it
and change that. Leaves compare.json and a log of every row in --out.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from transformers import AutoTokenizer, TrainerCallback

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import step_time  # noqa: E402
from benchmarks.noise_reward import compute_score  # noqa: E402
from extras.lora import LoRA  # noqa: E402
from rl.data.template import stop_token_ids  # noqa: E402

Row = Literal["A", "B", "C", "D", "E"]


@dataclass(frozen=True)
class Args:
    rows: tuple[Row, ...] = ("A", "B", "C", "D", "E")
    """These rows are run, see above."""
    per_device_train_batch_size: tuple[int, ...] = (16,)
    """TRL's micro-batches have this many responses. Every row except for D runs with each of these sizes, and the
    fastest counts."""
    attn_implementation: str = "sdpa"
    """TRL's policy has this attention in every row except for D. It is sdpa, or flash_attention_2 where that is
    installed."""
    vllm_gpu_memory_utilization: float = 0.35
    """TRL's vLLM gets this share of the GPU's memory in every row except for D. 0.2 leaves room for the 1.5B shape on
    80 GB."""
    lora_rank: int = 0
    """Train adapters of this rank on all linear layers except for the head, in float32 beside weights in bf16. 0 trains
    the weights."""
    shape: Literal["tiny", "0.5B", "1.5B", "7B"] = "1.5B"
    """This flag and the next four are as in benchmarks/step_time.py. tiny is for the CPU, where TRL samples without
    vLLM."""
    tokenizer: str | None = None
    """This is the folder or Hugging Face id of a Qwen2 tokenizer."""
    cache: Path = Path("runs/benchmark_models")
    """Models are kept in this folder for the next time."""
    lengths: Literal["fixed", "geometric"] = "fixed"
    """With fixed, responses run to the limit. With geometric, they end by chance, see --mean-length."""
    mean_length: float = 400.0
    """Geometric lengths have this mean, in tokens, before the cut."""
    prompt_length: int = 128
    """Every prompt has this many tokens."""
    max_response_length: int = 1024
    """A response is cut at this many tokens."""
    prompts: int = 64
    """Each step takes this many prompts."""
    rollout_n: int = 8
    """Each prompt gets this many responses."""
    steps: int = 8
    """Every row runs this many steps, warm-up included."""
    warmup: int = 3
    """The medians leave out this many first steps."""
    timeout: float = 900.0
    """A row is given up after this many seconds."""
    run_row: Row | None = None
    """Run this row in this process, with the first batch size, and nothing else."""
    out: Path = Path("runs/compare_trl")
    """Results are written to this folder."""


# --- one row, in a process of its own


class Clock(TrainerCallback):
    """Times every step from outside, the optimizer included, and the sampling within it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.generate_s: list[float] = []
        self.device_gib = 0.0

    def timed(self, generate: Callable) -> Callable:
        """`generate`, whose seconds are noted."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = step_time.now(self.device)
            result = generate(*args, **kwargs)
            self.generate_s.append(step_time.now(self.device) - start)
            return result

        return wrapped

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begins.append(step_time.now(self.device))

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            self.device_gib = max(self.device_gib, (total - free) / 2**30)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(step_time.now(self.device))
        self.on_substep_end(args, state, control)
        if not len(self.generate_s) == len(self.begins) == len(self.ends):
            raise RuntimeError(
                f"{len(self.begins)} steps began, {len(self.ends)} ended and {len(self.generate_s)} rounds sampled: "
                "this version of TRL does not sample once within each step, so its seconds mean something else"
            )


def settings(args: Args, row: Row, batch_size: int, stops: tuple[int, ...], *, use_vllm: bool) -> dict[str, Any]:
    """Arguments of TRL's GRPOConfig. `use_vllm`: else transformers samples, which knows none of vLLM's arguments."""
    responses = args.prompts * args.rollout_n
    if responses % batch_size:
        raise ValueError(
            f"--per-device-train-batch-size {batch_size} does not divide the {responses} responses of a step; "
            "choose one that does"
        )
    common = dict(
        output_dir=str(args.out / f"{row}_{batch_size}"),
        max_steps=args.steps,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=responses // batch_size,
        num_generations=args.rollout_n,
        max_completion_length=args.max_response_length,
        learning_rate=1e-6,
        use_vllm=use_vllm,
        use_cpu=not use_vllm,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    generation = dict(ignore_eos=True, stop_token_ids=list(stops)) if use_vllm else {}
    if row == "D":
        return common | dict(generation_kwargs=generation)
    tuned = common | dict(
        temperature=1.0,
        top_p=1.0,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        loss_type="dapo",
        beta=0.0,
        num_iterations=1,
        bf16=True,
        gradient_checkpointing=False,
        use_liger_kernel=find_spec("liger_kernel") is not None,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        vllm_max_model_length=args.prompt_length + args.max_response_length,
        vllm_importance_sampling_correction=row == "A",
        model_init_kwargs=dict(
            dtype="bfloat16" if row == "E" or args.lora_rank else "float32",
            attn_implementation=args.attn_implementation,
        ),
    )
    if use_vllm and row in ("C", "E"):
        generation |= dict(detokenize=False)
    return tuned | dict(generation_kwargs=generation)


def noise(completions: list[str], **columns: Any) -> list[float]:
    """benchmarks/noise_reward.py with TRL's signature."""
    return [compute_score("noise", text, "") for text in completions]


def run_row(args: Args, row: Row, batch_size: int) -> None:
    """Train with TRL in this process and write <row>_<batch size>.json."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = str(step_time.model_folder(args.shape, args.tokenizer, args.cache, args.lengths, args.mean_length))
    stops = stop_token_ids(model, AutoTokenizer.from_pretrained(model))
    config = GRPOConfig(**settings(args, row, batch_size, stops, use_vllm=device.type == "cuda"))
    clock = Clock(device)
    lines = (args.out / "prompts.jsonl").read_text().splitlines()
    adapters = {}
    if args.lora_rank:
        from peft import LoraConfig

        targets = dict(target_modules="all-linear", task_type="CAUSAL_LM")
        adapters = dict(peft_config=LoraConfig(r=args.lora_rank, lora_alpha=LoRA.lora_alpha, **targets))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=noise,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in lines]),
        callbacks=[clock],
        **adapters,
    )
    trainer._generate_single_turn = clock.timed(trainer._generate_single_turn)  # pushes the weights, then samples
    trainer.train()
    logs = [line for line in trainer.state.log_history if "completions/mean_length" in line]
    result = {
        "step_s": [end - begin for begin, end in zip(clock.begins, clock.ends, strict=True)],
        "period_s": [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)],  # from step 2 on
        "generate_s": clock.generate_s,
        "trl_step_time": [line["step_time"] for line in logs],
        "response_tokens": [line["completions/mean_length"] * args.prompts * args.rollout_n for line in logs],
        "device_gib": clock.device_gib or None,
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "parameters": str(next(trainer.model.parameters()).dtype),
        "learning": sum(x.numel() for x in trainer.model.parameters() if x.requires_grad),
        "attention": trainer.model.config._attn_implementation,
        "liger": config.use_liger_kernel,
        "trl": version("trl"),
    }
    (args.out / f"{row}_{batch_size}.json").write_text(json.dumps(result, indent=2) + "\n")


# --- all rows, and the table


def run(command: list[str], log: Path, timeout: float) -> str | None:
    """Run a Python command with its output in `log`. Returns None, or what went wrong. Ends what it started."""
    print(f"{log.stem}: python {' '.join(command)}", flush=True)
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ
    environment["MASTER_PORT"] = str(step_time.free_port())  # TRL's is always the same: one run a machine
    with open(log, "w") as out:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"took longer than --timeout {timeout:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    errors = [line for line in log.read_text().splitlines() if "Error" in line or "error: " in line]
    return None if status == 0 else f"exit {status}: {(errors or ['no error message'])[-1].strip()[:160]}"


def shared_flags(args: Args) -> list[str]:
    """Flags that this file and step_time.py have in common, with their values."""
    names = ("shape", "tokenizer", "cache", "lengths", "mean_length", "prompt_length", "steps", "warmup")
    pairs = [(f"--{name.replace('_', '-')}", vars(args)[name]) for name in (*names, "max_response_length", "rollout_n")]
    return [word for flag, value in pairs if value is not None for word in (flag, str(value))]


def trl_row(args: Args, row: Row, batch_size: int) -> dict[str, Any]:
    """Run a row. Returns its medians, or {"error": ...}."""
    name = f"{row}_{batch_size}"
    file = args.out / f"{name}.json"
    file.unlink(missing_ok=True)
    command = [__file__, "--run-row", row, "--per-device-train-batch-size", str(batch_size), *shared_flags(args)]
    command += ["--prompts", str(args.prompts), "--attn-implementation", args.attn_implementation]
    command += ["--vllm-gpu-memory-utilization", str(args.vllm_gpu_memory_utilization)]
    command += ["--lora-rank", str(args.lora_rank), "--out", str(args.out)]
    error = run(command, args.out / f"{name}.log", args.timeout)
    if error is not None:
        return {"row": row, "batch_size": batch_size, "error": error}
    x = json.loads(file.read_text())
    period = statistics.median(x["period_s"][max(args.warmup - 1, 0) :])
    rates = [n / s for n, s in zip(x["response_tokens"][1:], x["period_s"], strict=True)]
    return {
        "row": row,
        "batch_size": batch_size,
        "seconds": period,
        "step_s": statistics.median(x["step_s"][args.warmup :]),
        "generate_s": statistics.median(x["generate_s"][args.warmup :]),
        "response_tokens_per_s": statistics.median(rates[max(args.warmup - 1, 0) :]),
        **{
            name: x[name]
            for name in ("device_gib", "allocated_gib", "parameters", "learning", "attention", "liger", "trl")
        },
    }


def own_row(args: Args, flags: list[str]) -> dict[str, Any]:
    """Run train_grpo.py through step_time.py. Returns the same entries, or {"error": ...}."""
    row = "ours"
    command = [str(ROOT / "benchmarks" / "step_time.py"), *shared_flags(args), "--bare-rounds", "0"]
    command += ["--train-batch-size", str(args.prompts), "--lora-rank", str(args.lora_rank)]
    command += ["--out", str(args.out / row), *flags]
    error = run(command, args.out / f"{row}.log", args.timeout)
    if error is not None:
        return {"row": row, "error": error}
    x = json.loads((args.out / row / "report.json").read_text())
    return {
        "row": row,
        "seconds": x["period_s"],
        "step_s": x["step_s"],
        "generate_s": x["phases"]["gen"]["seconds"] + x["phases"]["update_weights"]["seconds"],
        "response_tokens_per_s": x["response_tokens_per_s"],
        "device_gib": max((phase["memory_gib"] or 0.0 for phase in x["phases"].values()), default=0.0) or None,
        "attention": x["attention"],
    }


def table(results: list[dict[str, Any]]) -> str:
    """A table of results. It has the seconds from the end of one step to the end of the next, and those in which
    weights are pushed and responses sampled. It also has response tokens per second over the step, the memory in use on
    the device, and the peak of torch's allocator.
    """

    def cell(value: float | None, form: str, width: int) -> str:
        return f"{'-':>{width}}" if value is None else f"{value:{width}{form}}"

    rows = [
        f"{'row':14}{'batch':>6}{'s/step':>9}{'generate':>10}{'rest':>8}{'tok/s':>9}{'GiB':>7}{'torch GiB':>11}"
        f"{'ours/TRL':>10}"
    ]
    for x in results:
        name = f"{x['row']:14}{cell(x.get('batch_size'), 'd', 6)}"
        if "error" in x:
            rows.append(f"{name}  {x['error']}")
            continue
        rows.append(
            f"{name}{x['seconds']:9.2f}{x['generate_s']:10.2f}{x['seconds'] - x['generate_s']:8.2f}"
            f"{x['response_tokens_per_s']:9,.0f}{cell(x.get('device_gib'), '.1f', 7)}"
            f"{cell(x.get('allocated_gib'), '.1f', 11)}{cell(x.get('ours_over_trl'), '.2f', 10)}"
        )
    return "\n".join(rows)


def main(args: Args, flags: list[str]) -> list[dict[str, Any]]:
    """Run all rows one after the other and print the table. Returns its lines. `flags` are step_time.py's."""
    if find_spec("trl") is None or find_spec("datasets") is None:
        raise ModuleNotFoundError("TRL is not installed; pip install trl==1.16.0 datasets liger-kernel")
    if args.lora_rank and find_spec("peft") is None:
        raise ModuleNotFoundError("--lora-rank needs PEFT, which TRL calls; pip install peft")
    if not 1 <= args.warmup < args.steps:
        raise ValueError(f"--warmup {args.warmup} must be at least 1 and less than --steps {args.steps}")
    args.out.mkdir(parents=True, exist_ok=True)
    args.cache.mkdir(parents=True, exist_ok=True)
    shape = (args.shape, args.tokenizer, args.cache, args.lengths, args.mean_length)
    model = step_time.in_own_process(step_time.model_folder, *shape)  # leaves no trace on the GPU
    step_time.write_prompts(args.out / "prompts.jsonl", args.prompts * args.steps, args.prompt_length, str(model))
    results = []
    for row in args.rows:
        for batch_size in (8,) if row == "D" else args.per_device_train_batch_size:
            results.append(trl_row(args, row, batch_size))
    results.append(ours := own_row(args, flags))
    for x in results[:-1]:
        if "error" not in x and "error" not in ours:
            x["ours_over_trl"] = ours["seconds"] / x["seconds"]
    (args.out / "compare.json").write_text(json.dumps(results, indent=2) + "\n")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"\n{args.shape}, {args.prompts} prompts x {args.rollout_n}, {args.prompt_length} + {args.max_response_length} "
        f"tokens, lengths {args.lengths}, {device}, TRL {version('trl')}, medians of steps {args.warmup + 1} to "
        f"{args.steps}"
    )
    print(table(results), flush=True)
    return results


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--"]
    parsed, others = tyro.cli(Args, args=words, description=__doc__, return_unknown_args=True)
    if parsed.run_row is not None:
        run_row(parsed, parsed.run_row, parsed.per_device_train_batch_size[0])
    else:
        main(parsed, others)

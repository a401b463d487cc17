"""One page for people: curves of several runs, and what they answered, token by token.

    python benchmarks/view.py runs/glassrl/grpo runs/glassrl/ppo --out view.html

Reads metrics.jsonl and generations.jsonl of each folder and writes a file that holds all of it, for any browser, with
no network. benchmarks/view.html is the page without the data. docs/metrics.md says how to read it.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

PAGE = Path(__file__).with_suffix(".html")
PLACE = "/*DATA*/null"  # where the page wants the runs


@dataclass(frozen=True)
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    out: Path = Path("view.html")
    """File to write."""


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Objects of a file that a run may be writing: a last line that is not whole is left out."""
    lines = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def curves(lines: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Metric -> [steps, values], six digits each, without what is not a number."""
    found: dict[str, list[list[float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in ("step", "time") and isinstance(value, (int, float)) and math.isfinite(value):
                steps, values = found.setdefault(name, [[], []])
                steps.append(line["step"])
                values.append(float(f"{value:.6g}"))
    return found


def names_of(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(x[-count:]) for x in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"a run is named twice: {' '.join(map(str, folders))}")


def read_run(folder: Path, name: str) -> dict[str, Any]:
    """What the page shows of a run. Raises ValueError if it has no metrics."""
    lines = read_jsonl(folder / "metrics.jsonl")
    if not lines:
        raise ValueError(
            f"{folder} has no metrics.jsonl with a line; give the folder of a run, such as runs/glassrl/grpo"
        )
    config = folder / "config.json"
    return {
        "name": name,
        "config": json.loads(config.read_text()) if config.exists() else {},
        "curves": curves(lines),
        "samples": read_jsonl(folder / "generations.jsonl"),
    }


def page(runs: list[dict[str, Any]]) -> str:
    """The page with its data. Responses are text of a model: no `<` of theirs can end the script that holds them."""
    data = json.dumps(runs, allow_nan=False).replace("<", "\\u003c")
    before, after = PAGE.read_text().split(PLACE)
    return before + data + after


def main(args: Args) -> Path:
    """Write the page; returns its path."""
    if not args.runs:
        raise ValueError("give one folder of a run or more, such as runs/glassrl/grpo")
    names = names_of(list(args.runs))
    args.out.write_text(page([read_run(folder, name) for folder, name in zip(args.runs, names, strict=True)]))
    print(f"{args.out}: {', '.join(names)}; open it in a browser")
    return args.out


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""The viewer: one page with the curves and the responses of runs, and the first difference between two runs.

    python tools/view.py runs/glassrl/grpo runs/glassrl/ppo --out view.html

The program reads metrics.jsonl and generations.jsonl in the folder of each run. It writes one file that holds all of
it, for any browser, and the file needs no network. tools/view.html is the page without the data. docs/viewing.md shows
pictures of the page and says how to read it.

With two or more runs it also compares each of the others with the first. It prints the first step and metric in which
they differ, and the page shows the same sentences. Times, throughput and use of memory do not count as differences.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

PAGE = Path(__file__).with_suffix(".html")
PLACE = "/*DATA*/null"  # where the page wants its data
# A metric with such a word in its name was measured on a machine: it differs between two runs that compute the same.
MEASURED = re.compile(r"(^|[/_.])(time|timing|seconds|s|idle|balanced|memory|gb|throughput|mfu)([/_.]|$)")
LISTED = 5  # names of metrics that a sentence lists at most


@dataclass(frozen=True)
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """These are the folders of runs. The first run is compared with each of the others."""
    out: Path = Path("view.html")
    """The page is written to this file."""


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Objects of a file that a run may be writing: a last line that is not whole is left out."""
    lines = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []
    objects = []
    for number, line in enumerate(lines, 1):
        try:
            objects.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number} is not JSON ({error}); remove this line") from error
    return objects


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


def read_run(folder: Path, name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What the page shows of a run. Raises ValueError if its metrics.jsonl has no lines."""
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


class Comparison(NamedTuple):
    """What two runs differ in."""

    metric: str | None  # the first that differs
    sentences: list[str]


Steps = dict[int, dict[str, float | None]]  # step -> its metrics


def metrics_of_steps(lines: list[dict[str, Any]]) -> Steps:
    """Step -> its metrics, except for measured ones, in the order of the file. None stands for what is not finite.

    An evaluation may have a line of its own beside that of its step. If a step was logged twice, the later line counts.
    """
    steps: Steps = {}
    for line in lines:
        metrics = steps.setdefault(line["step"], {})
        for name, value in line.items():
            if name != "step" and not MEASURED.search(name):
                metrics[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return steps


def compare(names: list[str], files: list[list[dict[str, Any]]]) -> Comparison:
    """Compare the lines of two metrics.jsonl exactly, step by step. A value that is not finite, which the files have as
    null, equals another such value.

    The first metric of a step is the first in its line, which begins with what was sampled. Metrics and steps that only
    one run has are not differences between values, so they get sentences of their own.
    """
    (a, b), (name_a, name_b) = map(metrics_of_steps, files), names
    common = sorted(step for step in a.keys() & b.keys() if a[step].keys() & b[step].keys())
    if not common:
        return Comparison(None, [f"{name_a} and {name_b} have no metric in common at any step."])
    metric, num_values = None, 0
    for step in common:
        shared = [name for name in a[step] if name in b[step]]
        different = [name for name in shared if a[step][name] != b[step][name]]
        num_values += len(shared)
        if different:
            metric = different[0]
            x, y = ("not finite" if run[step][metric] is None else repr(run[step][metric]) for run in (a, b))
            said = (
                f"first differ at step {step} in {metric}, which is {x} in {name_a} and {y} in {name_b}. At this step "
            )
            said += f"the runs differ in {len(different)} of the {len(shared)} metrics that both have."
            break
    else:
        said = f"agree in every value that both have (values: {num_values}, steps: {len(common)})."
    sentences = [f"{name_a} and {name_b} {said}"]
    (end, shorter), (later_end, longer) = sorted([(max(a), name_a), (max(b), name_b)])
    if end < later_end:
        sentences.append(f"{shorter} is shorter: it ends at step {end}, and {longer} at step {later_end}.")
    return Comparison(metric, sentences + only_in(name_a, a, b) + only_in(name_b, b, a))


def only_in(name: str, run: Steps, other: Steps) -> list[str]:
    """Sentences about steps and metrics that the other run lacks, as far as it has got."""
    steps = [str(step) for step in sorted(run.keys() - other.keys()) if step < max(other)]
    metrics: dict[str, int] = {}  # -> the first step that has it in this run alone
    for step in sorted(run.keys() & other.keys()):
        for metric in run[step].keys() - other[step].keys():
            metrics.setdefault(metric, step)
    first = [f"{metric} (first at step {step})" for metric, step in sorted(metrics.items(), key=lambda x: x[::-1])]
    sentences = [f"Only {name} has lines for these steps: {listed(steps)}."] if steps else []
    if first:
        sentences.append(f"Only {name} has these metrics at some of the steps that both have: {listed(first)}.")
    return sentences


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def page(runs: list[dict[str, Any]], comparisons: list[Comparison]) -> str:
    """The page with its data. Responses are text of a model: no `<` of theirs can end the script that holds them."""
    shown = {"runs": runs, "comparisons": [x._asdict() for x in comparisons]}
    data = json.dumps(shown, allow_nan=False).replace("<", "\\u003c")
    before, after = PAGE.read_text().split(PLACE)
    return before + data + after


def main(args: Args) -> Path:
    """Print what the runs differ in, and write the page. Returns its path."""
    if not args.runs:
        raise ValueError("give one folder of a run or more, such as runs/glassrl/grpo")
    names = names_of(list(args.runs))
    files = [read_jsonl(folder / "metrics.jsonl") for folder in args.runs]
    runs = [read_run(folder, name, lines) for folder, name, lines in zip(args.runs, names, files, strict=True)]
    comparisons = [compare([names[0], names[i]], [files[0], files[i]]) for i in range(1, len(files))]
    for comparison in comparisons:
        print(*comparison.sentences, sep="\n")
    args.out.write_text(page(runs, comparisons))
    print(f"{args.out}: {', '.join(names)}; open it in a browser")
    return args.out


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (ValueError, OSError) as mistake:
        raise SystemExit(f"view.py: error: {mistake}") from None

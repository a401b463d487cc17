"""What --plan says of runs that were measured, and how far off it is: the tables of docs/plan.md.

    python benchmarks/plan_errors.py

The runs are those of benchmarks/plan_runs.toml. Each is planned with its flags, for its machine, and with the mean
length that its responses had. Errors are (planned - measured) / measured.
"""

import functools
import importlib
import json
import shlex
import statistics
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.make_model import config_of  # noqa: E402
from extras.plan.cards import named  # noqa: E402
from extras.plan.report import Plan, plan_of  # noqa: E402
from rl.flags import SWITCH, marked, spelled  # noqa: E402
from rl.run.command_line import with_values  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
RUNS = ROOT / "benchmarks" / "plan_runs.toml"
PHASES = ("gen", "update", "others")


class Compared(NamedTuple):
    """A run: planned and measured seconds by phase, and GiB of a GPU; None where something is not known."""

    name: str
    run: dict[str, Any]
    planned: dict[str, float]
    measured: dict[str, float]

    def error(self, what: str) -> float | None:
        if what not in self.measured or what not in self.planned:
            return None
        return self.planned[what] / self.measured[what] - 1


def runs() -> dict[str, dict[str, Any]]:
    """Every run that has results, by name."""
    tables = tomllib.loads(RUNS.read_text())
    measured = {name: run for name, run in tables["runs"].items() if "results" in run}
    return measured | tables["recorded"]


def lines_of(run: dict[str, Any]) -> list[dict[str, float]]:
    """The lines of metrics.jsonl of the steps that count."""
    path = RESULTS / f"{run['results']}.metrics.jsonl"
    first, _, last = str(run["steps"]).partition("-")
    steps = range(int(first), int(last or first) + 1)
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["step"] in steps]


def measured(run: dict[str, Any]) -> dict[str, float]:
    """Medians of a run's steps, in seconds, and most GiB by phase."""
    lines = lines_of(run)
    median = lambda name: statistics.median(line.get(name, 0.0) for line in lines)  # noqa: E731
    found = {"step": median("timing_s/step"), "gen": median("timing_s/gen")}
    found["update"] = median("timing_s/update_actor") + median("timing_s/update")
    found["others"] = found["step"] - found["gen"] - found["update"]
    return {name: x for name, x in found.items() if x > 0} | memory(run, lines)


def memory(run: dict[str, Any], lines: list[dict[str, float]]) -> dict[str, float]:
    """GiB of a GPU while it samples and while it learns. What a run had taken beforehand is not its own."""
    own = RESULTS / f"{run['results']}.json"
    if own.exists() and "needed_gib" in (found := json.loads(own.read_text())):
        needed = found["needed_gib"]
    else:
        names = {name for line in lines for name in line if name.startswith("memory_gb/")}
        needed = {name.removeprefix("memory_gb/"): max(line[name] for line in lines) for name in names}
    taken = run.get("taken", 0.0)
    of_phase = {"GiB sampling": ("gen",), "GiB learning": ("update_actor", "update")}
    return {what: needed[name] - taken for what, names in of_phase.items() for name in names if needed.get(name)}


@functools.cache
def model_folder(shape: str) -> str:
    """A folder with the config of a shape and nothing else, until this process ends."""
    folder = tempfile.TemporaryDirectory()
    KEPT.append(folder)
    config_of(shape).save_pretrained(folder.name)
    return folder.name


KEPT: list[tempfile.TemporaryDirectory] = []


def args_of(run: dict[str, Any]) -> Any:
    """The Args of a run's script."""
    cls = importlib.import_module(run["script"].removesuffix(".py")).Args
    words = shlex.split(f"{run['flags']} --model {model_folder(run['shape'])} --train-files none.parquet")
    words = with_values(words, {spelled(name) for name in marked(cls(), SWITCH)})
    return tyro.cli(cls, args=words, config=(tyro.conf.OmitArgPrefixes,))


def planned(run: dict[str, Any]) -> dict[str, float]:
    """What --plan says."""
    lengths = [line["response_length/mean"] for line in lines_of(run) if "response_length/mean" in line]
    plan = plan_of(args_of(run), named(run["machine"]), statistics.median(lengths) if lengths else None)
    return numbers(plan)


def numbers(plan: Plan) -> dict[str, float]:
    phases = plan.step.phases
    update = phases.get("update_actor", 0.0) + phases.get("update", 0.0)
    found = {"step": plan.step.seconds, "gen": phases.get("gen", 0.0), "update": update}
    found["others"] = found["step"] - found["gen"] - update
    return found


def compare() -> list[Compared]:
    return [Compared(name, run, planned(run), measured(run)) for name, run in runs().items()]


def table(compared: list[Compared], columns: tuple[str, ...]) -> str:
    """Markdown: planned, measured and the error of each column."""
    head = f"| run | {' | '.join(f'{x}: planned, measured' for x in columns)} | error |"
    lines = [head, f"|---|{'---|' * (len(columns) + 1)}"]
    for x in compared:
        if columns[0] not in x.measured:
            continue
        cells = [f"{x.planned[c]:.1f}, {x.measured[c]:.1f}" if c in x.measured else "" for c in columns]
        errors = [f"{error:+.0%}" for c in columns if (error := x.error(c)) is not None]
        star = "*" if x.run.get("fitted") else ""
        lines.append(f"| {x.name}{star} | {' | '.join(cells)} | {', '.join(errors)} |")
    return "\n".join(lines)


def main() -> None:
    compared = compare()
    print(table(compared, ("step", *PHASES)))
    errors = [abs(x.error("step")) for x in compared]
    print(f"\n{len(errors)} runs: median error {statistics.median(errors):.0%}, largest {max(errors):.0%}")


if __name__ == "__main__":
    main()

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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import step_time  # noqa: E402
from benchmarks.make_model import config_of  # noqa: E402
from data import arithmetic  # noqa: E402
from extras.plan.cards import GIB, KINDS, SOURCES, named  # noqa: E402
from extras.plan.report import Plan, plan_of, report  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
RUNS = ROOT / "benchmarks" / "plan_runs.toml"
SECONDS = ("step", "gen", "update", "others")
MEMORY = ("GiB sampling", "GiB learning")
EXAMPLE = (  # of the page: verl's published command for GSM8K, with the mean length of its responses in tokens
    "--tensor-model-parallel-size 2 --use-kl-loss --ppo-mini-batch-size 64 --total-training-steps 870 --plan h100x4 "
    "--plan-response-length 366"
)
BOUNDS = {"step": 0.3, "GiB sampling": 0.3, "GiB learning": 0.3}  # of the errors that docs/plan.md publishes


class Compared(NamedTuple):
    """A run: planned and measured seconds by phase, and GiB of a GPU."""

    name: str
    run: dict[str, Any]
    planned: dict[str, float]
    measured: dict[str, float]

    def error(self, what: str) -> float | None:
        if not self.measured.get(what) or what not in self.planned or what in self.run.get("other", ()):
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


def in_report(run: dict[str, Any]) -> dict[str, float]:
    """Seconds that a report.json has of a run, at dotted paths."""
    report = json.loads((RESULTS / run["report"]).read_text())
    step = lambda x, key: x[int(key)] if isinstance(x, list) else x[key]  # noqa: E731
    return {what: functools.reduce(step, path.split("."), report) for what, path in run["keys"].items()}


def measured(run: dict[str, Any]) -> dict[str, float]:
    """Medians of a run's steps, in seconds, and most GiB by phase."""
    if "report" in run:
        found = in_report(run)
        return found | {"others": found["step"] - found["gen"] - found["update"]}
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
def model_folder(shape: str, **options: Any) -> str:
    """A folder with the config of a shape, with other options, and nothing else, until this process ends."""
    folder = tempfile.TemporaryDirectory()
    KEPT.append(folder)
    config_of(shape, **options).save_pretrained(folder.name)
    return folder.name


KEPT: list[tempfile.TemporaryDirectory] = []


@functools.cache
def rows_file(model: str, prompt: int) -> str:
    """A file with a prompt of this many tokens. The model gets a tokenizer that makes one token of each digit."""
    arithmetic.make_tokenizer().save_pretrained(model)
    file = Path(model) / f"rows-{prompt}.jsonl"
    truth = {"style": "rule", "ground_truth": ""}
    file.write_text(json.dumps({"data_source": "noise", "prompt": "1" * prompt, "reward_model": truth}) + "\n")
    return str(file)


def args_of(run: dict[str, Any]) -> Any:
    """The Args of a run's script."""
    cls = importlib.import_module(run["script"].removesuffix(".py")).Args
    model = model_folder(run["shape"], **run.get("config", {}))
    rows = rows_file(model, run["prompt"]) if "prompt" in run else "none.parquet"
    words = shlex.split(f"--train-files {rows} {run['flags']} --model {model}")
    return step_time.args_of(cls, words)


def planned(run: dict[str, Any]) -> dict[str, float]:
    """What --plan says."""
    length = run.get("length")
    if "results" in run:
        lengths = [line["response_length/mean"] for line in lines_of(run) if "response_length/mean" in line]
        length = statistics.median(lengths) if lengths else None
    return numbers(plan_of(args_of(run), named(run["machine"], run.get("host_gib")), length))


def numbers(plan: Plan) -> dict[str, float]:
    """Planned seconds by phase, and GiB of a GPU."""
    phases, takes = plan.step.phases, plan.choice.needed.phases
    update = phases.get("update_actor", 0.0) + phases.get("update", 0.0)
    found = {"step": plan.step.seconds, "gen": phases.get("gen", 0.0), "update": update}
    found["others"] = found["step"] - found["gen"] - update
    learning = max(takes["updating"], takes["optimizer step"])
    return found | {"GiB sampling": takes.get("sampling", 0.0) / GIB, "GiB learning": learning / GIB}


@functools.cache
def compare() -> list[Compared]:
    """Every run that has results, planned and measured."""
    return [Compared(name, run, planned(run), measured(run)) for name, run in runs().items()]


def table(compared: list[Compared], columns: tuple[str, ...]) -> str:
    """Markdown: of each column what was planned, what was measured, and the error."""
    lines = [f"| run | machine | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for x in compared:
        errors = {c: x.error(c) for c in columns}
        if all(error is None for error in errors.values()):
            continue
        cells = [
            "" if error is None else f"{x.planned[c]:.1f}, {x.measured[c]:.1f}: {error:+.0%}"
            for c, error in errors.items()
        ]
        lines.append(f"| {x.name}{'*' if x.run.get('fitted') else ''} | {x.run['machine']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cards() -> str:
    """The table of GPUs of the page."""
    head = "| kind | card | GiB | TFLOP/s | memory, GB/s | another GPU, GB/s | host, GB/s | host GiB per GPU | source |"
    lines = [head, f"|---|---|{'---|' * 7}"]
    for kind, x in KINDS.items():
        figures = (x.gib, x.tflops, x.memory_gb_s, x.link_gb_s, x.bus_gb_s, x.host_gib)
        lines.append(f"| `{kind}` | {x.name} | {' | '.join(f'{y:g}' for y in figures)} | {SOURCES[kind]} |")
    return "\n".join(lines)


def summary(compared: list[Compared]) -> str:
    """How large errors are, in a sentence for each figure."""
    lines = []
    for what in BOUNDS:
        for words, kind in (("fitted", True), ("others", False)):
            chosen = [x for x in compared if bool(x.run.get("fitted")) == kind]
            errors = [abs(error) for x in chosen if (error := x.error(what)) is not None]
            if errors:
                median, most = statistics.median(errors), max(errors)
                lines.append(f"| {what} | {words} | {len(errors)} | {median:.0%} | {most:.0%} |")
    return "\n".join(["| figure | runs | number | median error | largest |", "|---|---|---|---|---|", *lines])


def example() -> str:
    """A command and what it prints."""
    published = {"vocab_size": 152064}  # the shapes that were measured have that of the smaller models
    args = args_of({"script": "train_grpo.py", "shape": "7B", "config": published, "flags": EXAMPLE})
    name = "Qwen/Qwen2.5-7B-Instruct"
    [plan], _ = report(args, args.planning)
    plan = plan.replace(args.model, name).replace("none.parquet", "data/gsm8k/train.parquet")
    return f"```\npython train_grpo.py --model {name} {EXAMPLE}\n\n{plan}\n```"


def parts(compared: list[Compared]) -> dict[str, str]:
    """The tables of the page by name."""
    return {
        "example": example(),
        "cards": cards(),
        "seconds": table(compared, SECONDS),
        "memory": table(compared, MEMORY),
        "errors": summary(compared),
    }


def filled(page: str, by_name: dict[str, str]) -> str:
    """The page with these tables between its marks."""
    for name, text in by_name.items():
        begin, end = f"<!-- plan_errors: {name} -->\n", "\n<!-- end of it -->"
        before, _, rest = page.partition(begin)
        page = before + begin + text + end + rest.partition(end)[2]
    return page


def main() -> None:
    page, by_name = ROOT / "docs" / "plan.md", parts(compare())
    page.write_text(filled(page.read_text(), by_name))
    print(*by_name.values(), sep="\n\n")


if __name__ == "__main__":
    main()

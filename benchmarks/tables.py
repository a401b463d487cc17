"""Make the tables of pages from the raw logs.

    python benchmarks/tables.py                       # write the tables into the pages
    python benchmarks/tables.py --check               # change nothing; exit with 1 if a page is not up to date
    python benchmarks/tables.py --figures 7b-4-gpus   # print all figures of the folders that have this in their name
    python benchmarks/tables.py --trim                # leave in each metrics.jsonl only what figures read

benchmarks/results/index.toml has an entry for each folder of benchmarks/results: what was measured, by which command,
on which machine, and in which file of the folder each figure is found. benchmarks/tables.toml says which figures stand
in which table. A page has `<!-- table: NAME -->` above a table and `<!-- end -->` below it.
"""

import json
import re
import statistics
import sys
import tomllib
from collections import ChainMap
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LAYOUT = ROOT / "benchmarks" / "tables.toml"
WITH_TABLES = (
    "performance", "models", "results", "scaling", "environments", "train_async", "troubleshooting", "leaderboard",
    "train_self_distill", "agents", "train_prime", "precision", "engines",
)  # fmt: skip
PAGES = (*(ROOT / "docs" / f"{name}.md" for name in WITH_TABLES), RESULTS / "README.md", ROOT / "README.md")
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
TAKE = {"median": statistics.median, "mean": statistics.mean, "min": min, "max": max}


# --- reading a figure from a file


class Point(NamedTuple):
    """A value, and the training step to which it belongs."""

    step: int
    value: float


def read_points(path: Path, spec: Mapping[str, Any]) -> list[Point]:
    """All values in a file that `spec` asks for.

    .jsonl: `key` of every line that has it, at the line's own step. .json: what is at the dotted `key`, where a list of
    dicts gives the entries that have the values of `where`, and each may be a list, one number per step. Any other
    file: the group of the regular expression `pattern` in every match. The last two are numbered from `first` on, which
    is 1 if it is not given.
    """
    content = parse(path, path.stat().st_mtime_ns)
    if path.suffix == ".jsonl":
        return [Point(line["step"], line[spec["key"]]) for line in content if spec["key"] in line]
    if path.suffix == ".json":
        found = look_up(content, spec["key"].split("."), spec.get("where", {}))
    else:
        found = re.findall(spec["pattern"], content, re.MULTILINE)
    values = found if isinstance(found, list) else [found]
    lists = values if values and isinstance(values[0], list) else [values]
    return [Point(i, float(value)) for x in lists for i, value in enumerate(x, spec.get("first", 1))]


@cache
def parse(path: Path, changed: int) -> Any:
    """What a file holds: the dicts of .jsonl, .json, or text. A file is parsed once, until it was `changed`."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text) if path.suffix == ".json" else text


def look_up(data: Any, keys: list[str], where: Mapping[str, Any]) -> Any:
    """What is at `keys` in nested dicts and lists. A name, asked of a list, gives a list: of its chosen entries."""
    if not keys:
        return data
    if isinstance(data, dict):
        return look_up(data[keys[0]], keys[1:], where)
    if keys[0].isdigit():
        return look_up(data[int(keys[0])], keys[1:], where)
    return [look_up(x, keys, {}) for x in data if all(x.get(name) == value for name, value in where.items())]


def choose_steps(points: list[Point], steps: str) -> list[float]:
    """Values at the steps that a text such as "2-6" or "2,3,6-8" names. "all" means all of them."""
    if steps == "all":
        return [x.value for x in points]
    ranges = [part.partition("-") for part in steps.split(",")]
    wanted = {step for low, _, high in ranges for step in range(int(low), int(high or low) + 1)}
    found = [x for x in points if x.step in wanted]
    if (count := len({x.step for x in found})) != len(wanted):
        raise ValueError(f"steps {steps}: of these {len(wanted)} the file has {count}")
    return [x.value for x in found]


def read_figure(path: Path, spec: Mapping[str, Any], steps: str) -> float:
    """One number from a file: the median over `steps`, or over those of `spec`, or what its `take` names instead.

    With `differences` each value is first replaced by its difference to the one before: times become durations.
    """
    points = read_points(path, spec)
    if spec.get("differences"):
        points = [Point(after.step, after.value - before.value) for before, after in pairwise(points)]
    values = choose_steps(points, spec.get("steps", steps))
    if not values:
        raise ValueError(f"{path} has no {spec.get('key') or spec.get('pattern')}")
    return TAKE[spec.get("take", "median")](values)


# --- the figures of a run and of a measurement


class Figures(Mapping):
    """What is known of a run or a measurement, by name: `x["step"]` or `x.step`.

    An entry that is a dict says where a figure is found. The figure is read or computed when it is asked for. All other
    entries are given back as they are: numbers, texts, and the runs of a measurement.
    """

    def __init__(self, folder: Path, entries: Mapping[str, Any]):
        self.folder = folder
        self.entries = entries

    def __getitem__(self, name: str) -> Any:
        entry = self.entries[name]
        return self.find(entry) if isinstance(entry, dict) else entry

    def __getattr__(self, name: str) -> Any:
        if name not in self.entries:
            raise AttributeError(f"{self.folder.name} has no {name}; it has {', '.join(self.entries)}")
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def find(self, spec: Mapping[str, Any]) -> float:
        """The value of a formula, or what is read from a file."""
        if "is" in spec:
            return eval(spec["is"], {"__builtins__": {"min": min, "max": max}}, self)
        where = {key: value.format(**self.texts()) for key, value in spec.get("where", {}).items()}
        key = spec.get("key", "").format(**self.texts())
        return read_figure(self.file(spec), {**spec, "key": key, "where": where}, self.entries["steps"])

    def file(self, spec: Mapping[str, Any]) -> Path:
        """The file in which a figure is found."""
        return self.folder / spec["file"].format(**self.texts())

    def specs(self) -> list[str]:
        """Names of the figures."""
        return [name for name, entry in self.entries.items() if isinstance(entry, dict)]

    def texts(self) -> dict[str, Any]:
        """Everything that is not a figure."""
        return {name: entry for name, entry in self.entries.items() if not isinstance(entry, dict)}

    def at(self, steps: str) -> "Figures":
        """The same run, whose medians are over other steps."""
        return Figures(self.folder, {**self.entries, "steps": steps})


def load_run(folder: Path, name: str, run: Mapping[str, Any], kinds: Mapping[str, Any]) -> Figures:
    """A run: the figures of its kinds and its own, and what else the index says of it."""
    chosen = [kinds[x] for x in run["kinds"]]
    own = {"file": chosen[0]["file"], "figures": run.get("figures", {})}
    specs = {
        figure: {"file": run.get("file", kind["file"]), **spec}
        for kind in (*chosen, own)
        for figure, spec in kind["figures"].items()
    }
    settings = {key: value for key, value in run.items() if key not in ("kinds", "figures", "file")}
    return Figures(folder, {**specs, "run": name, "steps": "all", **settings})


def load_measurement(folder: Path, entry: Mapping[str, Any], kinds: Mapping[str, Any]) -> Figures:
    """A measurement: its runs by name, the figures computed from several of them, and what its folder's name says."""
    date, commit, _ = folder.name.split("_", 2)
    link = f"[{commit}](../benchmarks/results/{folder.name})"  # from a page of docs/
    about = {"name": folder.name, "date": date, "commit": commit, "link": link}
    texts = {key: value for key, value in entry.items() if isinstance(value, str)}
    runs = {name: load_run(folder, name, run, kinds) for name, run in entry.get("runs", {}).items()}
    return Figures(folder, {**entry.get("figures", {}), **about, **texts, **runs})


def load_measurements(results: Path = RESULTS) -> dict[str, Figures]:
    """All measurements of index.toml by the names of their folders."""
    index = tomllib.loads((results / "index.toml").read_text())
    return {x: load_measurement(results / x, entry, index["kinds"]) for x, entry in index["measurements"].items()}


# --- tables


def make_table(table: Mapping[str, Any], measurements: Mapping[str, Figures]) -> str:
    """A markdown table. `columns`: heading to template, such as "{step:.1f} s". `rows`: each is `of` a folder/run.

    Templates name figures of the row's run and measurement, or texts that the row itself has. A row with the heading of
    a column has its own template there, and a row with `steps` has its medians over these. `rows` may be a text: then
    there is a row for each measurement, newest first.
    """
    rows = table["rows"] if isinstance(table["rows"], list) else [{"of": x} for x in sorted(measurements, reverse=True)]
    lines = ["| " + " | ".join(table["columns"]) + " |", "|" + "---|" * len(table["columns"])]
    for row in rows:
        folder, _, name = row["of"].partition("/")
        run = measurements[folder][name] if name else {}
        names = ChainMap(row, run.at(row["steps"]) if "steps" in row else run, measurements[folder])
        cells = [row.get(heading, template) for heading, template in table["columns"].items()]
        lines.append("| " + " | ".join(cell.format_map(names) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def make_tables(results: Path = RESULTS, layout: Path = LAYOUT) -> dict[str, str]:
    """All tables of tables.toml by their names."""
    measurements = load_measurements(results)
    return {name: make_table(table, measurements) for name, table in tomllib.loads(layout.read_text()).items()}


def fill(text: str, tables: Mapping[str, str]) -> str:
    """The text of a page with every marked table replaced."""
    if unknown := sorted({name for _, name, _ in MARKED.findall(text)} - set(tables)):
        raise ValueError(f"<!-- table: {unknown[0]} -->: there is no [{unknown[0]}] in {LAYOUT.name}")
    return MARKED.sub(lambda match: match[1] + tables[match[2]] + match[3], text)


def from_page(page: Path, table: str) -> str:
    """A table whose links lead from `page` to the logs. Those of `make_table` lead there from a page of docs/."""
    prefix = {RESULTS: "", ROOT: "benchmarks/results/"}.get(page.parent, "../benchmarks/results/")
    return table.replace("](../benchmarks/results/", f"]({prefix}")


def update_pages(pages: Mapping[Path, str], *, check: bool) -> int:
    """Write the pages whose tables are out of date, or with `check` only name them. Returns the exit status."""
    tables = make_tables()
    seen = {page: {name: from_page(page, table) for name, table in tables.items()} for page in pages}
    stale = {page: new for page, text in pages.items() if (new := fill(text, seen[page])) != text}
    for page, text in stale.items():
        if check:
            print(f"{page.name}: a table is not what the logs say; run `python benchmarks/tables.py`")
        else:
            page.write_text(text)
    return 1 if check and stale else 0


def describe(figures: Figures, name: str) -> str:
    """A figure with its unit, and its formula or where it is read."""
    spec = figures.entries[name]
    found = spec["is"] if "is" in spec else f"{figures.file(spec).name}, {spec.get('key', spec.get('pattern'))}"
    return f"{figures.entries.get('run', ''):12} {name:16} {figures[name]:<12.6g} {spec['unit']} ({found})"


def print_figures(part: str) -> None:
    """Print the figures of all folders whose name has `part` in it."""
    for folder, measurement in load_measurements().items():
        if part in folder:
            print(f"\n{folder}: {measurement.what}\n{measurement.command}\n{measurement.hardware}")
            runs = [x for x in measurement.entries.values() if isinstance(x, Figures)]
            for figures in (*runs, measurement):
                for name in figures.specs():
                    print(f"  {describe(figures, name)}")


# --- small logs


def keys_read(results: Path = RESULTS) -> dict[Path, set[str]]:
    """The metrics that figures read, by the file of metrics in which they are found."""
    found: dict[Path, set[str]] = {}
    for measurement in load_measurements(results).values():
        for run in (x for x in measurement.entries.values() if isinstance(x, Figures)):
            for spec in (run.entries[name] for name in run.specs()):
                if "is" not in spec and (path := run.file(spec).resolve()).suffix == ".jsonl":
                    found.setdefault(path, set()).add(spec["key"])
    return found


def trimmed(text: str, keys: set[str]) -> str:
    """A file of metrics with only these metrics, with seven digits, and the steps and times of their lines."""
    lines = [json.loads(line) for line in text.splitlines()]
    kept = [{k: v for k, v in x.items() if k in keys | {"step", "time"}} for x in lines if keys & x.keys()]
    rounded = [{k: round(v, 6) if k == "time" else float(f"{v:.7g}") for k, v in x.items()} for x in kept]
    whole = [{k: int(v) if v == int(v) else v for k, v in x.items()} for x in rounded]
    return "".join(json.dumps(x) + "\n" for x in whole)


def trim(results: Path = RESULTS) -> None:
    """Leave in each file of metrics what figures read."""
    for path, keys in keys_read(results).items():
        path.write_text(trimmed(path.read_text(), keys))


def main(words: list[str]) -> int:
    """What the command line asks for. Returns the exit status."""
    if words[:1] == ["--figures"] and len(words) <= 2:
        print_figures(words[1] if words[1:] else "")
        return 0
    if words == ["--trim"]:
        trim()
        return 0
    if words not in ([], ["--check"]):
        raise ValueError(f"{' '.join(words)}: unknown; there are --check and --figures PART_OF_A_NAME, and --trim")
    return update_pages({page: page.read_text() for page in PAGES}, check=words == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

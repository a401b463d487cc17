"""Tables of the pages: each figure is read from a raw log, and a page and the logs cannot differ unnoticed (3 s)."""

import json
import re
import shutil
from collections import Counter
from datetime import UTC, datetime

import numpy as np
import pytest
from launch import ROOT
from PIL import Image

from benchmarks import figures as drawings
from benchmarks import tables
from benchmarks.tables import RESULTS, Figures

MEASUREMENTS = tables.load_measurements()
FOLDERS = sorted(path.name for path in RESULTS.iterdir() if path.is_dir())


def runs_of(measurement: Figures) -> list[Figures]:
    return [x for x in measurement.entries.values() if isinstance(x, Figures)]


# ---------------------------------------------------------------------------------------------------------------------
# The pages, the index and the folders


def test_the_pages_have_the_tables_that_the_logs_give(capsys):
    assert tables.main(["--check"]) == 0
    assert capsys.readouterr().out == ""


def test_every_table_stands_on_one_page_and_every_marker_is_closed():
    texts = [page.read_text() for page in tables.PAGES]
    found = [name for text in texts for _, name, _ in tables.MARKED.findall(text)]
    assert len(found) == sum(text.count("<!-- table:") for text in texts) == sum(x.count("<!-- end -->") for x in texts)
    assert Counter(found) == Counter(tables.make_tables().keys()) and len(found) > 15


def test_every_folder_is_in_the_index_and_every_entry_has_a_folder():
    assert sorted(MEASUREMENTS) == FOLDERS and len(FOLDERS) > 40
    assert sorted(path.name for path in RESULTS.iterdir() if path.is_file()) == ["README.md", "index.toml", "models.md"]


def test_a_page_cites_every_folder():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    cited = {name for page in pages for name in re.findall(r"benchmarks/results/([\w-]+)", page.read_text())}
    experiments = (RESULTS / "README.md").read_text().split("## All measurements")[0]  # below, there is every folder
    cited |= set(re.findall(r"\]\(([\w-]+)", experiments + (RESULTS / "models.md").read_text()))
    assert [name for name in FOLDERS if name not in cited] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_entry_says_what_was_measured_and_all_its_figures_can_be_read(folder):
    measurement = MEASUREMENTS[folder]
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}_[0-9a-f]{7}_[a-z0-9-]+", folder)
    assert all(len(measurement.entries[x]) > 3 for x in ("what", "command", "hardware"))
    for figures in (*runs_of(measurement), measurement):
        for name in figures.specs():
            spec = figures.entries[name]
            assert spec["unit"] and ("is" in spec or figures.file(spec).is_file()), name
            assert isinstance(figures[name], float | int), name


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_date_of_a_folder_is_that_of_its_metrics(folder):
    for path in (RESULTS / folder).glob("*.metrics.jsonl"):
        first = json.loads(path.read_text().splitlines()[0])
        if "time" not in first and path.name == "trl_1.metrics.jsonl":
            continue  # TRL's run had no times yet
        assert datetime.fromtimestamp(first["time"], UTC).date().isoformat() == MEASUREMENTS[folder].date


def test_every_file_of_metrics_is_one_of_a_run():
    runs = [run for measurement in MEASUREMENTS.values() for run in runs_of(measurement)]
    used = {run.file(run.entries[name]) for run in runs for name in run.specs() if "is" not in run.entries[name]}
    assert set(RESULTS.glob("*/*.metrics.jsonl")) <= used


def test_the_logs_are_small():
    """--trim would change nothing: a file has only what figures read. All files together have less than 4 MB."""
    for path, keys in tables.keys_read().items():
        text = path.read_text()
        assert text == tables.trimmed(text, keys), f"{path}: run `python benchmarks/tables.py --trim`"
    assert sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()) < 4e6


def test_trimming_by_hand():
    lines = [{"step": 0, "time": 5.0000004, "val/a": 0.5}, {"step": 1, "time": 7.1234567, "b": 12345.6789, "c": 2}]
    lines += [{"step": 2, "time": 9.0, "b": 3.0}]
    text = tables.trimmed("".join(json.dumps(line) + "\n" for line in lines), {"b"})
    assert text == '{"step": 1, "time": 7.123457, "b": 12345.68}\n{"step": 2, "time": 9, "b": 3}\n'
    assert tables.trimmed(text, {"b"}) == text


EVERY_FIGURE = tuple(drawings.FIGURES)


@pytest.mark.parametrize(
    "names", [EVERY_FIGURE[::5], pytest.param(EVERY_FIGURE, marks=pytest.mark.thorough)], ids=["some", "every"]
)
def test_figures_are_drawn_from_what_is_kept(names, tmp_path, monkeypatch):
    results = tmp_path / "results"
    shutil.copytree(RESULTS, results, ignore=shutil.ignore_patterns("*.png"))
    kept = {str(path.relative_to(RESULTS)): path for path in RESULTS.glob("*/*.png")}
    assert set(kept) == set(drawings.FIGURES)
    monkeypatch.setattr(drawings, "FIGURES", {name: drawings.FIGURES[name] for name in names})
    drawings.main(results)
    for name in names:
        path = kept[name]
        with Image.open(path) as old, Image.open(results / name) as new:
            size = old.size
            assert size == new.size, name
            pixels = [np.asarray(image.convert("L"), dtype=float) for image in (old, new)]
        assert np.abs(pixels[0] - pixels[1]).mean() < 2, name  # of 255; other fonts move letters


# ---------------------------------------------------------------------------------------------------------------------
# What differs is noticed


def test_a_changed_log_is_noticed(tmp_path):
    results = tmp_path / "results"
    shutil.copytree(RESULTS, results)
    assert tables.make_tables(results) == tables.make_tables()
    path = results / "2026-11-22_b82b9ba_trl-row-c-fixed" / "ours.metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["timing_s/update_actor"] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    old, new = tables.make_tables(), tables.make_tables(results)
    assert [name for name in old if old[name] != new[name]] == ["phases"]
    assert "| 10.77 |" in old["phases"] and "| 11.77 |" in new["phases"]
    page = tables.PAGES[0].read_text()
    assert tables.fill(page, old) == page != tables.fill(page, new)


def test_a_changed_page_is_noticed_and_written(tmp_path, capsys):
    page = tmp_path / "page.md"
    right = tables.PAGES[0].read_text()
    wrong = right.replace("**0.57**", "**0.52**")
    assert wrong != right
    page.write_text(wrong)
    assert tables.update_pages({page: wrong}, check=True) == 1 and page.read_text() == wrong
    assert "page.md: a table is not what the logs say; run `python benchmarks/tables.py`" in capsys.readouterr().out
    assert tables.update_pages({page: wrong}, check=False) == 0 and page.read_text() == right


def test_what_is_unknown_is_refused():
    with pytest.raises(ValueError, match="--chek: unknown; there are --check and --figures"):
        tables.main(["--chek"])
    with pytest.raises(ValueError, match=r"<!-- table: speed -->: there is no \[speed\] in tables.toml"):
        tables.fill("a\n<!-- table: speed -->\n<!-- end -->\n", {"memory": ""})


def test_figures_are_printed_with_where_they_are_read(capsys):
    assert tables.main(["--figures", "b82b9ba_trl"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  ours +push +0\.0726842 +s, .* \(ours.metrics.jsonl, timing_s/update_weights\)$", out, re.M)
    assert re.search(r"^ +ratio +0\.565861 +1 \(ours.period / trl.period\)$", out, re.M)
    assert "trl-row-d" not in out


# ---------------------------------------------------------------------------------------------------------------------
# How a figure is read


@pytest.fixture
def folder(tmp_path):
    """A folder of a measurement: three steps in each kind of file."""
    path = tmp_path / "2026-01-02_abcdef0_what"
    path.mkdir()
    lines = [{"step": 1, "time": 10.0, "s": 9.0}, {"step": 2, "time": 14.0, "s": 3.0}, {"step": 2, "other": 1.0}]
    lines += [{"step": 3, "time": 20.0, "s": 5.0}]
    (path / "a.metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = [{"name": "x", "end": 0.5, "curve": [0.1, 0.5]}, {"name": "y", "end": 0.25, "curve": [0.2, 0.25]}]
    runs += [{"name": "x", "end": 1.0, "curve": [0.3, 1.0]}]
    (path / "all.json").write_text(json.dumps({"seconds": [7, 8, 9], "peak": {"gib": 40}, "runs": runs}))
    (path / "a.log").write_text("start\nstep 1 | 4.0 s\nstep 2 | 6.0 s\nstep 3 | 8.0 s\n")
    return path


@pytest.mark.parametrize(
    ("file", "spec", "steps", "value"),
    [
        ("a.metrics.jsonl", {"key": "s"}, "2-3", 4.0),
        ("a.metrics.jsonl", {"key": "s"}, "all", 5.0),
        ("a.metrics.jsonl", {"key": "s", "take": "max"}, "1,3", 9.0),
        ("a.metrics.jsonl", {"key": "s", "take": "min", "steps": "all"}, "1", 3.0),
        ("a.metrics.jsonl", {"key": "time", "differences": True}, "2-3", 5.0),  # 14 - 10 and 20 - 14
        ("all.json", {"key": "seconds"}, "2-3", 8.5),
        ("all.json", {"key": "seconds", "first": 2}, "2-3", 7.5),
        ("all.json", {"key": "peak.gib"}, "all", 40.0),
        ("all.json", {"key": "runs.end", "where": {"name": "x"}, "take": "mean"}, "all", 0.75),
        ("all.json", {"key": "runs.end", "take": "min"}, "all", 0.25),
        ("all.json", {"key": "runs.curve.0", "where": {"name": "x"}, "take": "mean"}, "all", 0.2),
        ("all.json", {"key": "runs.curve", "where": {"name": "x"}, "first": 0, "take": "max"}, "0", 0.3),
        ("all.json", {"key": "runs.curve", "where": {"name": "x"}, "take": "mean"}, "1-2", 0.475),
        ("a.log", {"pattern": r"\| ([\d.]+) s$"}, "2-3", 7.0),
    ],
)
def test_figures_by_hand(folder, file, spec, steps, value):
    assert tables.read_figure(folder / file, spec, steps) == pytest.approx(value)


def test_a_step_or_a_value_that_is_not_there_is_an_error(folder):
    with pytest.raises(ValueError, match="steps 2-4: of these 3 the file has 2"):
        tables.read_figure(folder / "a.metrics.jsonl", {"key": "s"}, "2-4")
    with pytest.raises(ValueError, match="a.log has no nothing"):
        tables.read_figure(folder / "a.log", {"pattern": "nothing"}, "all")


def test_a_table_by_hand(folder):
    of_x = {"key": "runs.end", "where": {"name": "{run}"}, "take": "max"}
    kinds = {
        "timed": {"file": "{run}.metrics.jsonl", "figures": {"s": {"unit": "s", "key": "s"}}},
        "peak": {"file": "all.json", "figures": {"gib": {"unit": "GiB", "key": "peak.gib", "steps": "all"}}},
    }
    entry = {
        "what": "a test",
        "runs": {
            "a": {"kinds": ["timed", "peak"], "steps": "2-3", "gpus": 2, "figures": {"twice": {"is": "s * gpus"}}},
            "x": {"kinds": ["peak"], "figures": {"end": of_x}},
        },
        "figures": {"ratio": {"is": "a.s / x.gib"}},
    }
    measurement = tables.load_measurement(folder, entry, kinds)
    assert (measurement.a.s, measurement.a.twice, measurement.x.end, measurement.ratio) == (4.0, 8.0, 1.0, 0.1)
    table = {
        "columns": {"run": "{run}", "s": "{s:.1f}", "ratio": "{ratio:.2f}", "from": "{date} {link}"},
        "rows": [{"of": f"{folder.name}/a"}, {"of": f"{folder.name}/a", "steps": "1", "run": "on {gpus}", "ratio": ""}],
    }
    link = f"2026-01-02 [abcdef0](../benchmarks/results/{folder.name})"
    assert tables.make_table(table, {folder.name: measurement}).splitlines() == [
        "| run | s | ratio | from |",
        "|---|---|---|---|",
        f"| a | 4.0 | 0.10 | {link} |",
        f"| on 2 | 9.0 |  | {link} |",
    ]
    with pytest.raises(AttributeError, match="2026-01-02_abcdef0_what has no b; it has .*ratio"):
        _ = measurement.b

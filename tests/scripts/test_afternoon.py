"""docs/afternoon.ipynb: its cells run, also without vLLM and Linux, and the saved notebook is what they make."""

import json
import re
from dataclasses import replace

import launch
import pytest
import torch.distributed as dist
from launch import ROOT
from test_docs import long_sentences

from rl import stop
from rl.run import watchdog
from tools import afternoon

ELSEWHERE = ROOT / "tests" / "systems" / "elsewhere"  # hides vLLM and Linux, see tests/systems/test_systems.py
NOTEBOOK = ROOT / "docs" / "afternoon.ipynb"


def outputs(path) -> list[str]:
    """What the cells of a notebook have printed, and the pictures that they have drawn."""
    cells = json.loads(path.read_text())["cells"]
    every = [output for cell in cells for output in cell.get("outputs", ())]
    return ["".join(x.get("text", ()) or x["data"].get("image/svg+xml", ())) for x in every]


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The notebook with few steps, made where vLLM and Linux are hidden."""
    folder = tmp_path_factory.mktemp("afternoon")
    out = folder / "short.ipynb"
    command = ["tools/afternoon.py", "--short", "--out", out, "--folder", folder / "runs"]
    launch.run(*command, PYTHONPATH=f"{ELSEWHERE}:{ROOT}")
    return out


def test_the_cells_run_with_few_steps(short):
    """Each cell asserts what its text says of the numbers."""
    found = outputs(short)
    said = next(x for x in found if x.startswith("scores ["))
    assert "mean 0.500, standard deviation 0.577" in said and "0.866" in said
    lines = [line.split(" | ")[0] for x in found for line in x.splitlines() if line.startswith("step ")]
    assert lines == ["step 60/60", "step 0", "step 1/2", "step 2/2", "step 2"]  # SFT, and GRPO with evaluations
    assert sum("<svg" in x for x in found) == 12


def test_the_notebook_is_made_of_its_source():
    made = json.loads(NOTEBOOK.read_text())
    source = afternoon.source_of(afternoon.Args())
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in made["cells"]]
    assert cells == [(cell.kind, cell.text) for cell in afternoon.cells_of(source)], "run python tools/afternoon.py"
    codes = [cell for cell in made["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in codes] == list(range(1, len(codes) + 1))
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in made["cells"]}) == len(cells)


def test_the_saved_outputs_are_those_of_the_whole_notebook():
    found = outputs(NOTEBOOK)
    assert any("\nstep 10/10 | reward" in x for x in found) and sum("<svg" in x for x in found) == 12
    assert not [x for x in found if str(ROOT) in x], "a path of the machine that ran it"
    assert len(NOTEBOOK.read_bytes()) < 300_000


@pytest.mark.thorough
def test_the_whole_notebook_runs_and_shows_what_its_text_says(tmp_path):
    """In 30 steps: GRPO learns; generous scores without a baseline do not; the form is learned and the task is not."""
    out, runs = tmp_path / "whole.ipynb", tmp_path / "runs"
    launch.run("tools/afternoon.py", "--out", out, "--folder", runs, timeout=3600)

    def last(run: str, metric: str = "critic/score/mean") -> float:
        """The mean of a metric over the last five steps."""
        return sum(value for _, value in afternoon.curve(runs / run, metric)[-5:]) / 5

    right = "reward/arithmetic/acc"
    assert last("base") > 0.75 and last("no_baseline") > 0.75 and last("generous") < 0.5
    assert last("thirty_times") < 0.1
    assert last("hacked") > 0.95 and last("hacked", right) < 0.3
    assert last("no_division") > 0.75 and last("pairs") > 0.75
    assert last("price_1", right) > 0.7 and last("price_6", right) < 0.3
    assert last("many_updates_no_clip") < last("many_updates")


def test_the_text_has_no_long_sentence_and_no_dead_link():
    texts = [x.text for x in afternoon.cells_of(afternoon.SOURCE.read_text()) if x.kind == "markdown"]
    assert [sentence for text in texts for sentence in long_sentences(text)] == []
    links = re.findall(r"\]\(([^)]+)\)", "\n".join(texts))
    assert len(links) > 3 and all((ROOT / "docs" / link).is_file() for link in links)


def test_outputs_are_kept_only_if_no_code_has_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # `main` goes to the folder of the repository
    source = tmp_path / "cells.py"
    monkeypatch.setattr(afternoon, "SOURCE", source)
    monkeypatch.setattr(afternoon, "source_of", lambda args: source.read_text())
    args = afternoon.Args(out=tmp_path / "made.ipynb")
    source.write_text("# %% [markdown]\n# old\n\n# %%\nprint(1)\n")
    afternoon.main(args)
    source.write_text("# %% [markdown]\n# new\n\n# %%\nprint(1)\n")
    afternoon.main(replace(args, keep_outputs=True))
    made = json.loads(args.out.read_text())["cells"]
    assert made[0]["source"] == ["new"] and outputs(args.out) == ["1\n"]
    source.write_text("# %%\nprint(2)\n")
    with pytest.raises(ValueError, match="--keep-outputs, but the cell at line 2 of .* has changed; leave it out"):
        afternoon.main(replace(args, keep_outputs=True))


def test_cells_are_read_as_they_are_written():
    source = '"""For readers of the source."""\n\n# %% [markdown]\n# # A\n#\n# b\n\n# %%\nx = 1\n\n\n# %%\nx + 1\n'
    cells = afternoon.cells_of(source)
    assert [(cell.kind, cell.text, cell.line) for cell in cells] == [
        ("markdown", "# A\n\nb", 4),
        ("code", "x = 1", 9),
        ("code", "x + 1", 13),
    ]
    names: dict[str, object] = {}
    assert afternoon.run_cell(cells[1], names) == [] and names == {"__builtins__": names["__builtins__"], "x": 1}
    [shown] = afternoon.run_cell(cells[2], names)
    assert shown["data"] == {"text/plain": ["2"]}
    [printed] = afternoon.run_cell(afternoon.Cell("code", "print(x)\nx = 3", 1), names)
    assert printed == {"output_type": "stream", "name": "stdout", "text": ["1\n"]} and names["x"] == 3
    with pytest.raises(ValueError, match="begins with `# `, and not so: 'x = 1'"):
        afternoon.cells_of("# %% [markdown]\nx = 1\n")


def test_curves_stand_where_their_numbers_say():
    svg = afternoon.curves("a <b>", {"one": [(1, 0.0), (2, 0.5), (3, 1.0)], "two": [(1, 1.0), (3, 0.0)]}).svg
    assert "a &lt;b&gt;" in svg
    one, two = ([p.split(",") for p in x.split()] for x in re.findall(r'polyline points="([^"]+)"', svg))
    x, y = ([float(p[i]) for p in one] for i in (0, 1))
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2) and x[0] < x[1]
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2) and y[0] > y[1]  # in SVG, up is smaller
    assert two == [[one[0][0], one[2][1]], [one[2][0], one[0][1]]]


def test_responses_have_the_colors_of_the_viewer(tmp_path):
    page = (ROOT / "tools" / "view.html").read_text()
    assert afternoon.GREEN in page and afternoon.RED in page and all(color in page for color in afternoon.COLORS)
    tokens = [{"text": ["4", "\n", "<|im_end|>"], "advantage": [a] * 3} for a in (0.5, -1.0)]
    lines = [{"kind": "train", "step": 3, "prompt": "x\n1+2=?", "score": 1.0, "tokens": each} for each in tokens]
    other = {"kind": "val", "step": 3, "prompt": "", "score": 0.0}
    (tmp_path / "generations.jsonl").write_text("".join(json.dumps(x) + "\n" for x in [*lines, other]))
    svg = afternoon.responses(tmp_path, 3).svg
    assert "prompt 1+2=?" in svg and "advantage +0.50" in svg and "advantage -1.00" in svg
    # The largest advantage has three quarters of the full color, as in the viewer.
    fills = re.findall(r'fill="rgba\(([\d,]+),([\d.]+)\)"', svg)
    assert fills == [(afternoon.GREEN, "0.375")] * 3 + [(afternoon.RED, "0.750")] * 3
    assert [svg.count(f">{sign}</text>") for sign in ("4", "⏎", "■")] == [2, 2, 2]


@pytest.mark.usefixtures("runs_here")
def test_a_run_with_a_mistake_leaves_nothing_behind(short):
    """So that the notebook can go on with the next cell."""
    runs = short.parent / "runs"
    mistake = ('run.may_stop_after("adv")', 'raise RuntimeError("my mistake")')
    flags = dict(engine="hf", max_prompt_length=32, max_response_length=8, train_batch_size=2, rollout_n=2, save_freq=0)
    train_files, val_files = ((str(runs / f"data/{name}.parquet"),) for name in ("train", "test"))
    data = dict(model=str(runs / "sft/global_step_60/huggingface"), train_files=train_files, val_files=val_files)
    with pytest.raises(RuntimeError, match="my mistake"):
        afternoon.train(str(runs / "failed"), mistake, total_training_steps=1, test_freq=-1, **flags, **data)
    assert not dist.is_initialized() and not stop.is_armed() and watchdog._limit_s is None


def test_an_edit_must_fit_the_script(tmp_path):
    with pytest.raises(ValueError, match="has 0 times what an edit replaces, and not once: no such line"):
        afternoon.train(str(tmp_path / "run"), ("no such line", ""))


def test_a_short_notebook_does_not_replace_the_whole_one():
    with pytest.raises(ValueError, match="give another file to --out"):
        afternoon.main(afternoon.Args(short=True))

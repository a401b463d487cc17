"""tools/view.py: the page holds what the runs have written, and shows it in a browser; runs are compared."""

import importlib.util
import json
import re
import shutil

import helpers_scripts as h
import launch
import pytest
import same
from launch import ROOT
from transformers import AutoTokenizer

import train_ppo
from rl.flags import build
from tools import view

pytestmark = pytest.mark.usefixtures("runs_here")

HOSTILE = "</script><script>document.title = 'taken over'</script><img src=x onerror='document.title = 1'>"


# A score of two parts.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = (sum(map(ord, solution_str)) + int(ground_truth)) % 2
    return {"score": right - len(solution_str) / 100, "right": right, "style": -len(solution_str) / 100}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of two runs of train_ppo.py with two updates per step, which logged responses in both of their steps."""
    folder = tmp_path_factory.mktemp("view")
    task = h.make_task(folder)
    (folder / "parts.py").write_text(REWARD)
    for seed in (0, 1):
        changes = dict(
            custom_reward_function=(str(folder / "parts.py"),),
            seed=seed,
            rollout_n=2,
            val_before_train=True,
            log_samples_freq=1,
            log_val_generations=3,
        )
        train_ppo.main(build(train_ppo.Args, **h.ppo_settings(task, folder / f"seed{seed}" / "run", **changes)))
        h.leave_distributed()
    with open(folder / "seed1" / "run" / "generations.jsonl", "a") as f:  # what a model may write
        f.write(json.dumps({"step": 2, "kind": "train", "prompt": HOSTILE, "response": HOSTILE, "score": None}) + "\n")
    return [folder / f"seed{seed}" / "run" for seed in (0, 1)]


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    return view.main(view.Args(runs=tuple(runs), out=tmp_path_factory.mktemp("page") / "view.html"))


def held(page, part="runs"):
    """The data in a page, as a browser reads it."""
    text = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.S)[1]
    return json.loads(text)[part]


# --- what a run records of its responses


def test_responses_of_a_step_are_recorded_token_by_token(runs):
    lines = [x for x in h.read_jsonl(runs[0] / "generations.jsonl") if x["kind"] == "train"]
    assert [x["step"] for x in lines] == [1, 1, 2, 2]  # both responses to the first prompt
    config = json.loads((runs[0] / "config.json").read_text())
    special = set(AutoTokenizer.from_pretrained(config["model"]).get_added_vocab())
    metrics = {x["step"]: x for x in h.read_jsonl(runs[0] / "metrics.jsonl") if "actor/loss" in x}
    for x in lines:
        tokens = x["tokens"]
        names = {"text", "engine_logp", "advantage", "trainer_logp", "value"}
        assert tokens.keys() == names and len({len(values) for values in tokens.values()}) == 1
        plain = [text for text in tokens["text"] if text not in special]
        assert "".join(plain) == x["response"] and 1 <= len(tokens["text"]) <= 12
        assert x["finish_reason"] == ("stop" if tokens["text"][-1] == "<|im_end|>" else "length")
        gaps = [abs(a - b) for a, b in zip(tokens["engine_logp"], tokens["trainer_logp"], strict=True)]
        assert max(gaps) < 1e-4 and max(tokens["engine_logp"]) < 0
        low, high = (metrics[x["step"]][f"critic/advantages/{name}"] for name in ("min", "max"))
        assert all(low - 1e-4 <= a <= high + 1e-4 for a in tokens["advantage"])
    assert all(len(set(x["tokens"]["advantage"])) > 1 for x in lines[2:])  # the critic tells tokens apart by now
    assert lines[0]["prompt"] == lines[1]["prompt"] and lines[0]["response"] != lines[1]["response"]


# --- the page


def test_the_page_holds_the_files_of_all_runs(runs, page):
    found = held(page)
    assert [run["name"] for run in found] == ["seed0/run", "seed1/run"]
    for run, folder in zip(found, runs, strict=True):
        assert run["samples"] == h.read_jsonl(folder / "generations.jsonl")
        assert run["config"] == json.loads((folder / "config.json").read_text())
        for line in h.read_jsonl(folder / "metrics.jsonl"):
            for name in line.keys() - {"step", "time"}:
                steps, values = run["curves"][name]
                assert values[steps.index(line["step"])] == pytest.approx(line[name], rel=1e-5)
        assert "step" not in run["curves"] and run["curves"]["val/accuracy"][0] == [0]


def test_the_page_needs_nothing_from_outside(page):
    empty = (ROOT / "tools" / "view.html").read_text()
    assert page.read_text().count("</script>") == empty.count("</script>") == 2
    assert not re.search(r"""(src|href)\s*=|@import|url\(|fetch\(|innerHTML""", empty)


def test_what_cannot_be_shown_is_refused(runs, tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} has no metrics.jsonl with a line"):
        view.main(view.Args(runs=(tmp_path,), out=tmp_path / "view.html"))
    with pytest.raises(ValueError, match="a run is named twice"):
        view.main(view.Args(runs=(runs[0], runs[0]), out=tmp_path / "view.html"))
    with pytest.raises(ValueError, match="give one folder of a run or more"):
        view.main(view.Args(runs=(), out=tmp_path / "view.html"))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": 1}\n{"step": 2, "x"\n{"step": 3, "x": 1}\n')
    with pytest.raises(ValueError, match=f"{tmp_path}/metrics.jsonl: line 2 is not JSON .*; remove this line"):
        view.main(view.Args(runs=(tmp_path,), out=tmp_path / "view.html"))


def test_a_run_that_is_writing_is_shown_as_far_as_it_is(tmp_path):
    line = {"step": 1, "time": 5.0, "a": 0.25, "b": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + '\n{"step": 2, "a": 0.')
    run = view.read_run(tmp_path, "mine", view.read_jsonl(tmp_path / "metrics.jsonl"))
    assert run == {"name": "mine", "config": {}, "curves": {"a": [[1], [0.25]]}, "samples": []}


# --- two runs


def compared(first, second):
    """The comparison of runs a and b, whose lines are texts, as they stand in a file."""
    files = [[json.loads(line) for line in lines.splitlines()] for lines in (first, second)]
    return view.compare(["a", "b"], files)


def test_the_first_step_and_metric_that_differ_are_named():
    first = """{"step": 1, "time": 1.0, "score": 0.5, "loss": 0.25}
{"step": 2, "time": 2.0, "score": 0.5, "timing_s/step": 1.0, "entropy": 1, "loss": 0.25, "norm": 3.0}
{"step": 3, "time": 3.0, "score": 0.0, "loss": 0.0}"""
    second = """{"step": 1, "time": 5.0, "score": 0.5, "loss": 0.25}
{"step": 2, "time": 6.0, "norm": 4.0, "loss": 0.25000000000000006, "entropy": 1.0, "timing_s/step": 2.0, "score": 0.5}
{"step": 3, "time": 7.0, "score": 1.0, "loss": 1.0}"""
    sentence = "a and b first differ at step 2 in loss, which is 0.25 in a and 0.25000000000000006 in b. At this step "
    sentence += "the runs differ in 2 of the 4 metrics that both have."
    assert compared(first, second) == ("loss", [sentence])
    assert compared(second, first).metric == "norm"  # the order is that of the first run's line
    assert compared(first, first) == (None, ["a and b agree in every value that both have (values: 8, steps: 3)."])


def test_times_throughput_and_memory_are_no_differences():
    first = (
        '{"step": 1, "time": 1, "timing_s/gen": 1, "perf/throughput": 1, "memory_gb/gen": 1, "perf/time_per_step": 1}'
    )
    second = first.replace(": 1,", ": 2,").replace('"step": 2', '"step": 1').replace("1}", "2}")
    assert compared(first, second).sentences == ["a and b have no metric in common at any step."]
    more = ['{"step": 1, "lr": 0.5, ' + x.removeprefix('{"step": 1, ') for x in (first, second)]
    assert compared(*more) == (None, ["a and b agree in every value that both have (values: 1, steps: 1)."])


def test_what_is_measured_is_the_same_for_whoever_compares_two_commits():
    cells = re.findall(r"^\| (`[^|]+`) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    measured = {name for name in names if view.MEASURED.search(name)}
    assert measured == {name for name in names if same.MEASURED.search(name)}
    assert {"timing_s/step", "perf/throughput", "trainer/idle_ratio", "perf/gen_tokens_per_s"} < measured
    assert not {"actor/entropy", "perf/total_num_tokens", "response_length/mean", "critic/score/mean"} & measured


def test_nan_equals_nan_and_differs_from_a_number():
    assert compared('{"step": 1, "x": null}', '{"step": 1, "x": NaN}').metric is None
    comparison = compared('{"step": 1, "w": 2, "x": null}', '{"step": 1, "w": 2, "x": 0.5}')
    assert comparison.metric == "x"
    assert "in x, which is not finite in a and 0.5 in b." in comparison.sentences[0]


def test_metrics_and_steps_of_one_run_get_sentences_of_their_own():
    first = """{"step": 0, "val": 0.1}
{"step": 1, "x": 1, "p": 1, "q": 1}
{"step": 1, "val": 0.2}
{"step": 2, "x": 2, "p": 1}
{"step": 3, "x": 3}
{"step": 4, "x": 4}"""
    second = '{"step": 1, "x": 1, "q": 1}\n{"step": 2, "x": 2, "q": 1}\n{"step": 3, "x": 7}'
    comparison = compared(first, second)
    assert comparison.metric == "x"
    assert comparison.sentences == [
        "a and b first differ at step 3 in x, which is 3 in a and 7 in b. At this step the runs differ in 1 of the 1 "
        "metrics that both have.",
        "b is shorter: it ends at step 3, and a at step 4.",
        "Only a has lines for these steps: 0.",
        "Only a has these metrics at some of the steps that both have: p (first at step 1), val (first at step 1).",
        "Only b has these metrics at some of the steps that both have: q (first at step 2).",
    ]
    assert compared(second, first).sentences[1] == "a is shorter: it ends at step 3, and b at step 4."
    many = ", ".join(f'"m{i}": 1' for i in range(7))
    said = compared('{"step": 1, "x": 1}', f'{{"step": 1, "x": 1, {many}}}').sentences[-1]
    assert said.endswith(": " + ", ".join(f"m{i} (first at step 1)" for i in range(5)) + " and 2 more.")


def test_a_step_that_was_logged_twice_counts_as_it_was_logged_last():
    assert compared('{"step": 1, "x": 5}\n{"step": 1, "x": 1}', '{"step": 1, "x": 1}').metric is None


def test_the_page_has_the_comparison_of_real_runs(runs, page):
    """The seeds differ, so the runs sample other prompts and responses from the first step on."""
    [comparison] = held(page, "comparisons")
    first, second = ([x for x in h.read_jsonl(run / "metrics.jsonl") if "actor/loss" in x][0] for run in runs)
    evaluated = [h.read_jsonl(run / "metrics.jsonl")[0] for run in runs]  # before the first step, greedily: the same
    assert evaluated[0]["step"] == 0 and evaluated[0]["val/accuracy"] == evaluated[1]["val/accuracy"]
    names = [x for x in first if x in second and not view.MEASURED.search(x) and x != "step"]
    expected = next(x for x in names if first[x] != second[x])
    assert comparison["metric"] == expected
    said = (
        f"first differ at step 1 in {expected}, which is {first[expected]!r} in seed0/run and {second[expected]!r} in"
    )
    assert comparison["sentences"][0].startswith(f"seed0/run and seed1/run {said} seed1/run.")


def test_each_of_the_other_runs_is_compared_with_the_first(tmp_path, capsys):
    for name, value in {"a": 1, "b": 1, "c": 2}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(f'{{"step": 1, "x": {value}}}\n')
    view.main(view.Args(runs=tuple(tmp_path / x for x in "abc"), out=tmp_path / "view.html"))
    assert capsys.readouterr().out.splitlines()[:2] == [
        "a and b agree in every value that both have (values: 1, steps: 1).",
        "a and c first differ at step 1 in x, which is 1 in a and 2 in c. At this step the runs differ in 1 of the 1 "
        "metrics that both have.",
    ]
    assert [x["metric"] for x in held(tmp_path / "view.html", "comparisons")] == [None, "x"]
    view.main(view.Args(runs=(tmp_path / "a",), out=tmp_path / "view.html"))
    assert held(tmp_path / "view.html", "comparisons") == []


# --- in a browser


@pytest.fixture(scope="module")
def browser():
    """Chromium under playwright (pip install playwright, and playwright install chromium or the system's package)."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed")
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        except Error as error:
            pytest.skip(f"no browser: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def tab(browser, page):
    """The page, open; a script that fails in it fails the test."""
    tab, problems = browser.new_page(viewport={"width": 1280, "height": 800}), []
    tab.on("pageerror", lambda error: problems.append(error.message))
    tab.on("request", lambda request: problems.append(request.url) if not request.url.startswith("file:") else None)
    tab.goto(page.as_uri())
    yield tab
    title = tab.title()
    tab.close()
    assert not problems and title == "glassrl runs"


def test_a_browser_shows_the_curves_of_all_runs(tab, runs):
    names = {name for run in runs for line in h.read_jsonl(run / "metrics.jsonl") for name in line} - {"step", "time"}
    assert tab.locator(".chart").count() == len(names) > 50
    assert tab.locator(".chart h2").first.inner_text() == "critic/score/mean"
    assert {f"reward/arithmetic/{part}" for part in ("right", "style")} < names
    chart = tab.locator('.chart[data-metric="actor/entropy"]')
    paths = [path.get_attribute("d") for path in chart.locator("path").all()]
    assert len(paths) == 2 and all(path.count("L") == 1 for path in paths)  # two runs of two steps
    last = [h.read_jsonl(run / "metrics.jsonl")[-1]["actor/entropy"] for run in runs]
    shown = re.findall(r"seed\d/run ([\d.]+) \(2\)", chart.locator(".at").inner_text())
    assert [float(x) for x in shown] == pytest.approx(last, rel=1e-3)
    # From lower to higher values a curve goes up, towards smaller y.
    first = h.read_jsonl(runs[0] / "metrics.jsonl")
    first = [x["actor/entropy"] for x in first if "actor/entropy" in x]
    (y0,), (y1,) = (re.findall(r" ([\d.]+)$", part) for part in paths[0].split("L"))
    assert (float(y1) < float(y0)) == (first[1] > first[0])
    tab.locator("#filter").fill("entropy|val/acc")
    assert tab.locator(".chart h2").all_inner_texts() == ["val/accuracy", "actor/entropy"]
    tab.locator("#runs input").first.uncheck()
    assert chart.locator("path").count() == 1


def test_a_browser_shows_where_the_runs_differ(tab, page):
    [comparison] = held(page, "comparisons")
    assert tab.locator("#comparisons p").all_inner_texts() == comparison["sentences"]
    tab.locator("#comparisons button").click()
    assert comparison["metric"] in tab.locator(".chart h2").all_inner_texts()
    assert tab.locator("#filter").input_value() == comparison["metric"]


def test_a_browser_shows_responses_colored_by_token(tab, runs):
    tab.locator("#tab-samples").click()
    assert tab.locator("#charts").is_hidden() and tab.locator("#smooth").is_hidden()
    assert tab.locator("#kind").input_value() == "train" and tab.locator("#step").input_value() == "2"
    recorded = [
        x for run in runs for x in h.read_jsonl(run / "generations.jsonl") if (x["kind"], x["step"]) == ("train", 2)
    ]
    boxes = tab.locator(".sample").all()
    assert len(boxes) == len(recorded) == 5
    for box, x in zip(boxes, recorded, strict=True):
        if "tokens" not in x:
            assert box.locator(".response").inner_text() == box.locator(".prompt").inner_text() == HOSTILE
            continue
        shown = dict(text.split() for text in box.locator(".component").all_inner_texts())
        assert {name: float(value) for name, value in shown.items()} == pytest.approx(x["components"], abs=1e-3)
        assert shown.keys() == {"right", "style"}
        spans = box.locator(".token").all()
        assert [span.text_content() for span in spans] == x["tokens"]["text"]
        for span, advantage in zip(spans, x["tokens"]["advantage"], strict=True):
            red, green = map(int, re.match(r"background:\s?rgba\((\d+), ?(\d+)", span.get_attribute("style")).groups())
            assert (green > red) == (advantage > 0)
        assert "trainer_logp" in spans[0].get_attribute("title")
    tab.locator("#color").select_option("gap: trainer - engine")
    assert tab.locator(".token").count() > 10
    tab.locator("#kind").select_option("val")
    assert tab.locator("#step").input_value() == "0" and tab.locator(".sample").count() == 6  # three of each run
    tab.locator("#runs input").last.uncheck()
    assert tab.locator(".sample").count() == 3


def test_an_address_opens_the_responses_of_a_step(tab, page):
    tab.goto(f"{page.as_uri()}#responses/1")
    tab.reload()  # another fragment alone does not load the page again
    assert tab.locator("#charts").is_hidden() and tab.locator("#step").input_value() == "1"
    assert tab.locator(".sample").count() == 4 and "step 1" in tab.locator(".sample .head").first.inner_text()
    tab.goto(f"{page.as_uri()}#responses")
    tab.reload()
    assert tab.locator("#step").input_value() == "2"
    tab.goto(f"{page.as_uri()}#curves")
    tab.reload()
    assert tab.locator("#samples").is_hidden() and tab.locator(".chart").count() > 50


def test_runs_as_a_script(runs, tmp_path):
    with pytest.raises(AssertionError, match="view.py: error: give one folder of a run or more"):
        launch.run_file("tools/view.py")
    output = launch.run_file("tools/view.py", *runs, "--out", tmp_path / "page.html")
    assert "seed0/run and seed1/run first differ at step 1 in " in output and "seed0/run, seed1/run" in output
    assert len(held(tmp_path / "page.html")) == 2

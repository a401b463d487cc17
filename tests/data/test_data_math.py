"""data/math_dataset.py and data/dapo_math.py, on files written here, and on MATH-500. About 3 seconds."""

import collections
import hashlib
import json
import random

import launch
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import SHARED

from data import dapo_math, files, math_dataset
from rewards.math_reward import compute_score
from rl.data.rows import read_rows

MATH500 = SHARED / "math/math500.jsonl"
needs_math500 = pytest.mark.skipif(not MATH500.exists(), reason="needs the MATH-500 file")
TRAIN_SIZES = dict(zip(math_dataset.SUBJECTS, (1744, 771, 870, 1295, 869, 1205, 746), strict=True))
TITLES = dict(
    zip(
        math_dataset.SUBJECTS,
        (
            "Algebra",
            "Counting & Probability",
            "Geometry",
            "Intermediate Algebra",
            "Number Theory",
            "Prealgebra",
            "Precalculus",
        ),
        strict=True,
    )
)


def problem(number, name="algebra", **changes):
    row = {
        "problem": f"{name} {number}?",
        "solution": rf"So $\boxed{{{number}}}$.",
        "level": "Level 3",
        "type": TITLES[name],
    }
    return {**row, **changes}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def make(folder, **args):
    return math_dataset.main(math_dataset.Args(source=str(folder), output_dir=folder / "out", **args))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A data set with MATH's numbers of problems, laid out as on the hub: a folder a subject."""
    folder = tmp_path_factory.mktemp("math")
    for name, size in TRAIN_SIZES.items():
        write(folder / name / "train-00000-of-00001.parquet", [problem(i, name) for i in range(size)])
    for name in math_dataset.SUBJECTS:
        rows = [problem(i, name, level="Level ?") for i in range(5000 // 7 + (name == "algebra") * 2)]
        write(folder / name / "test-00000-of-00001.parquet", rows)
    return folder


# --- MATH ------------------------------------------------------------------------------------------------------------


def test_math_as_published(published, capsys):
    assert make(published) == {"train": 7500, "test": 5000}
    printed = capsys.readouterr().out
    for split, count in (("train", 7500), ("test", 5000)):
        digest = hashlib.sha256((published / f"out/{split}.parquet").read_bytes()).hexdigest()
        assert f"{split}.parquet: {count} rows, sha256 {digest}" in printed
    rows = read_rows(published / "out/train.parquet")
    assert {**rows[1744], "row_index": None, "row_place": ""} == {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [
            {
                "role": "user",
                "content": "counting_and_probability 0? Let's think step by step and output the final answer within "
                r"\boxed{}.",
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "0"},
        "extra_info": {
            "split": "train",
            "index": 1744,
            "subject": "counting_and_probability",
            "level": 3,
            "question": "counting_and_probability 0?",
            "answer": r"So $\boxed{0}$.",
        },
        "row_index": None,
        "row_place": "",
    }
    assert {row["extra_info"]["level"] for row in read_rows(published / "out/test.parquet")} == {0}


def test_grails_split(published):
    assert make(published, split="7000/500") == {"train": 7000, "test": 500}
    kept, held_out = (
        [(row["extra_info"]["subject"], int(row["reward_model"]["ground_truth"])) for row in read_rows(path)]
        for path in (published / "out/train.parquet", published / "out/test.parquet")
    )
    assert list(collections.Counter(name for name, _ in held_out).values()) == [116, 51, 58, 86, 58, 80, 51]
    everything = [(name, i) for name, size in TRAIN_SIZES.items() for i in range(size)]
    assert sorted(kept + held_out) == sorted(everything)
    # By hand for the first two subjects: one generator, positions shuffled, the first 116 and 51 held out, in order.
    rng = random.Random(42)
    algebra, counting = list(range(1744)), list(range(771))
    rng.shuffle(algebra)
    rng.shuffle(counting)
    expected = [("algebra", i) for i in sorted(algebra[:116])]
    expected += [("counting_and_probability", i) for i in sorted(counting[:51])]
    assert held_out[:167] == expected
    rest = set(held_out)
    assert kept == [row for row in everything if row not in rest]


def test_hold_out_does_not_depend_on_how_the_subjects_lie():
    rows = [problem(i, name) for i in range(20) for name in reversed(math_dataset.SUBJECTS)]
    by_subject = [problem(i, name) for name in math_dataset.SUBJECTS for i in range(20)]
    kept, held_out = math_dataset.hold_out(rows, 35)
    assert (kept, held_out) == math_dataset.hold_out(by_subject, 35)
    assert len(kept) == 105 and len(held_out) == 35
    assert collections.Counter(row["type"] for row in held_out) == dict.fromkeys(TITLES.values(), 5)
    with pytest.raises(ValueError, match="train row 1: subject or type is 'topology', not one of algebra, "):
        math_dataset.hold_out([problem(0), {**problem(1), "type": "Topology"}], 1)


def test_layouts(tmp_path):
    rows = [problem(i) for i in range(3)]
    for name in ("a/train.jsonl", "b/data/train-00000-of-00001.parquet", "c/algebra/train-00000-of-00001.parquet"):
        write(tmp_path / name, rows)
        assert math_dataset.read_split(tmp_path / name[0], "train") == rows
    assert math_dataset.read_split(write(tmp_path / "x.jsonl", rows), "test") == rows
    with pytest.raises(FileNotFoundError, match=r"has neither test\.jsonl, data/test-\*\.parquet nor algebra/test-"):
        math_dataset.read_split(tmp_path / "a", "test")


@needs_math500
def test_math500(tmp_path, capsys):
    args = math_dataset.Args(split="math500", source=str(MATH500), output_dir=tmp_path)
    assert math_dataset.main(args) == {"math500": 500}
    source = [json.loads(line) for line in MATH500.read_text().splitlines()]
    rows = read_rows(tmp_path / "math500.parquet")
    assert [row["reward_model"]["ground_truth"] for row in rows] == [row["answer"] for row in source]
    assert {row["data_source"] for row in rows} == {"HuggingFaceH4/MATH-500"}
    assert [row["extra_info"]["level"] for row in rows] == [row["level"] for row in source]
    assert collections.Counter(row["extra_info"]["subject"] for row in rows)["counting_and_probability"] == 38
    for row in rows:
        assert compute_score(row["data_source"], row["extra_info"]["answer"], row["reward_model"]["ground_truth"]) == 1
    assert "math500.parquet: 500 rows, sha256 " in capsys.readouterr().out


@pytest.mark.parametrize(
    "solution, answer",
    [
        (r"first \boxed{3}, then $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"so $\boxed 2$ it is", "2"),
        (r"\fbox{4}", "4"),
        (r"\boxed{ \text{(C)} }", r"\text{(C)}"),
    ],
)
def test_ground_truth_is_the_last_box(solution, answer):
    row = math_dataset.to_row(problem(0, solution=solution), "x", "train", 0)
    assert row["reward_model"]["ground_truth"] == answer


EMPTY = r"all are composite, so the answer is $\boxed{}$."  # as published: number_theory/7115 and 7117 of MATH


def test_problems_with_an_empty_box_are_left_out_and_counted(tmp_path, capsys):
    rows = [problem(i, name) for name, size in TRAIN_SIZES.items() for i in range(size)]
    places = [i for i, row in enumerate(rows) if row["problem"] in ("number_theory 594?", "number_theory 596?")]
    assert places == [5274, 5276]
    for i in places:
        rows[i] = rows[i] | {"solution": EMPTY}
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", rows[:5000])
    assert make(tmp_path) == {"train": 7498, "test": 5000}
    out = capsys.readouterr().out
    assert out.startswith("train: 2 of 7500 problems left out, since their last box is empty: rows 5274, 5276\n")
    assert "train.parquet: 7498 rows" in out and "test: " not in out
    written = read_rows(tmp_path / "out/train.parquet")
    assert [row["extra_info"]["index"] for row in written] == [i for i in range(7500) if i not in places]
    # They take part in the draw: the other rows fall to the same side as without them.
    counts = make(tmp_path, split="7000/500")
    kept, held_out = (read_rows(tmp_path / f"out/{split}.parquet") for split in ("train", "test"))
    drawn = math_dataset.hold_out(rows, 500)
    for found, expected in zip((kept, held_out), drawn, strict=True):
        assert [row["extra_info"]["question"] for row in found] == [
            row["problem"] for row in expected if row["solution"] != EMPTY
        ]
    assert counts == {"train": len(kept), "test": len(held_out)} and len(kept) + len(held_out) == 7498


def test_bad_math_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="--source /no/such/folder: no such file or folder; give one"):
        math_dataset.main(math_dataset.Args(source="/no/such/folder", output_dir=tmp_path))
    rows = [problem(i) for i in range(7500)]
    for bad, message in (
        ({"question": "a"}, r"train row 7: has \['question'\], not problem and solution"),
        (problem(7, solution="no box"), r"train row 7: the solution has no \\boxed\{\} answer: 'no box'"),
        (problem(7, solution=r"\boxed{7"), "train row 7: the solution has no"),
    ):
        write(tmp_path / "train.jsonl", [*rows[:7], bad, *rows[8:]])
        write(tmp_path / "test.jsonl", rows[:5000])
        with pytest.raises(ValueError, match=message):
            make(tmp_path)
    write(tmp_path / "train.jsonl", rows[:7])
    with pytest.raises(ValueError, match=r"--split 7500/5000: .* gives \[7, 5000\] problems, not \[7500, 5000\]"):
        make(tmp_path)
    with pytest.raises(ValueError, match=r"--split 7000/500: .* gives \[0, 7\] problems, not \[7000, 500\]"):
        make(tmp_path, split="7000/500")
    with pytest.raises(ValueError, match=r"--split math500: .* gives \[5000\] problems, not \[500\]"):
        make(tmp_path, split="math500")
    assert not (tmp_path / "out").exists()  # nothing is written unless all is well


@needs_math500
def test_downloads_from_the_hub(tmp_path, monkeypatch, published):
    asked = []

    def snapshot_download(repo_id, **kwargs):
        asked.append((repo_id, kwargs))
        return str(published if repo_id == "EleutherAI/hendrycks_math" else tmp_path)

    monkeypatch.setattr(files.huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test.jsonl").write_text(MATH500.read_text())
    assert math_dataset.main(math_dataset.Args(split="7000/500")) == {"train": 7000, "test": 500}
    assert math_dataset.main(math_dataset.Args(split="math500")) == {"math500": 500}
    assert len(read_rows(tmp_path / "data/math/test.parquet")) == 500
    kwargs = {"repo_type": "dataset", "allow_patterns": ["*.jsonl", "*.parquet"]}
    assert asked == [("EleutherAI/hendrycks_math", kwargs), ("HuggingFaceH4/MATH-500", kwargs)]


@needs_math500
def test_math_runs_as_a_script_from_anywhere(tmp_path):
    launch.run_elsewhere(math_dataset.__file__, "--split", "math500", "--source", MATH500, cwd=tmp_path)
    assert len(read_rows(tmp_path / "data/math/math500.parquet")) == 500


# --- DAPO ------------------------------------------------------------------------------------------------------------


def dapo_row(number, truth=None, **changes):
    row = {
        "data_source": "published_name",
        "prompt": [{"role": "user", "content": f"Problem {number}? End with a line Answer: $Answer."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(number) if truth is None else truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id-{number}"},
    }
    return {**row, **changes}


def make_dapo(folder, train, aime):
    args = dapo_math.Args(source=str(train), aime_source=str(aime), output_dir=folder / "out")
    return dapo_math.main(args)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_dapo_keeps_each_problem_once(tmp_path, suffix, capsys):
    train = [dapo_row(n) for n in (3, 1, 3, 2, 1, 3)] + [dapo_row(4), dapo_row(4, truth="5"), dapo_row(4)]
    paths = write(tmp_path / f"train.{suffix}", train), write(tmp_path / f"aime.{suffix}", [dapo_row(7)] * 32)
    assert make_dapo(tmp_path, *paths) == {"train": 3, "aime_2024": 1}
    rows = read_rows(tmp_path / "out/train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["3", "1", "2"]
    assert {**rows[1], "row_index": None, "row_place": ""} == {
        "data_source": "math_dapo",
        "prompt": dapo_row(1)["prompt"],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"split": "train", "id": "id-1", "index": 1},
        "row_index": None,
        "row_place": "",
    }
    (aime,) = read_rows(tmp_path / "out/aime_2024.parquet")
    assert (aime["data_source"], aime["extra_info"]["split"]) == ("aime_2024", "aime_2024")
    printed = capsys.readouterr().out
    assert "--source: 9 rows, 4 problems, 1 of them with two ground truths left out" in printed
    assert "--aime-source: 32 rows, 1 problems, 0 of them with two ground truths left out" in printed
    for name, count in (("train", 3), ("aime_2024", 1)):
        digest = hashlib.sha256((tmp_path / f"out/{name}.parquet").read_bytes()).hexdigest()
        assert f"{name}.parquet: {count} rows, sha256 {digest}" in printed


def test_dapo_reads_folders_and_the_hub(tmp_path, monkeypatch):
    asked = []
    write(tmp_path / "train/data/a.parquet", [dapo_row(1), dapo_row(2)])
    write(tmp_path / "train/data/b.parquet", [dapo_row(2), dapo_row(3)])
    write(tmp_path / "aime/data/aime-2024.parquet", [dapo_row(7)])

    def snapshot_download(repo_id, **kwargs):
        asked.append((repo_id, kwargs))
        return str(
            tmp_path / {"BytedTsinghua-SIA/DAPO-Math-17k": "train", "BytedTsinghua-SIA/AIME-2024": "aime"}[repo_id]
        )

    monkeypatch.setattr(files.huggingface_hub, "snapshot_download", snapshot_download)
    assert make_dapo(tmp_path, tmp_path / "train", tmp_path / "aime") == {"train": 3, "aime_2024": 1} and not asked
    assert dapo_math.main(dapo_math.Args(output_dir=tmp_path)) == {"train": 3, "aime_2024": 1}
    kwargs = {"repo_type": "dataset", "allow_patterns": ["*.parquet"]}
    assert asked == [("BytedTsinghua-SIA/DAPO-Math-17k", kwargs), ("BytedTsinghua-SIA/AIME-2024", kwargs)]


def test_bad_dapo_sources(tmp_path):
    good = write(tmp_path / "good.jsonl", [dapo_row(1)])
    with pytest.raises(FileNotFoundError, match="--source /no/such: no such file or folder"):
        make_dapo(tmp_path, "/no/such", good)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="--aime-source .*empty: no parquet files in "):
        make_dapo(tmp_path, good, tmp_path / "empty")
    for changes in (
        {"prompt": "text"},
        {"prompt": []},
        {"reward_model": None},
        {"reward_model": {"ground_truth": " "}},
    ):
        bad = write(tmp_path / "bad.jsonl", [dapo_row(1), dapo_row(2, **changes)])
        with pytest.raises(
            ValueError, match="--source row 1: prompt must be messages and reward_model.ground_truth a text"
        ):
            make_dapo(tmp_path, bad, good)
    assert not (tmp_path / "out").exists()

import fnmatch
import gzip
import hashlib
import json

import launch
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import files, preferences


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def run(source, output_dir, **flags):
    return preferences.main(preferences.Args(source=str(source), output_dir=output_dir, **flags))


PLAIN = [{"prompt": f"q{i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(10)]


# --- one row ---------------------------------------------------------------------------------------------------------

TURNS = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: 1+1?\n\nAssistant:"
MULTI_TURN = [user("hi"), assistant("hello"), user("1+1?")]


@pytest.mark.parametrize(
    "row, prompt, chosen, rejected",
    [
        ({"chosen": TURNS + " two", "rejected": TURNS + " three\n"}, MULTI_TURN, "two", "three"),
        (  # a blank line and a later word "Human:" inside a line are part of the response
            {"chosen": "\n\nHuman: a\n\nAssistant: b\n\nc Human: d", "rejected": "\n\nHuman: a\n\nAssistant: e"},
            [user("a")],
            "b\n\nc Human: d",
            "e",
        ),
        (
            {"prompt": "q", "chosen": [user("q"), assistant(" y")], "rejected": [user("q"), assistant("n")]},
            [user("q")],
            " y",
            "n",
        ),
        ({"chosen": [*MULTI_TURN, assistant("2")], "rejected": [*MULTI_TURN, assistant("3")]}, MULTI_TURN, "2", "3"),
        ({"prompt": MULTI_TURN, "chosen": [assistant("2")], "rejected": [assistant("3")]}, MULTI_TURN, "2", "3"),
        ({"prompt": "q", "chosen": [assistant("2")], "rejected": [assistant("3")]}, [user("q")], "2", "3"),
        ({"prompt": "q", "chosen": "y ", "rejected": "n"}, [user("q")], "y ", "n"),
        ({"prompt": MULTI_TURN, "chosen": "y", "rejected": "n", "score": 3}, MULTI_TURN, "y", "n"),
        (  # dialogue marks in a plain row are just text
            {"prompt": "q", "chosen": "\n\nHuman: x\n\nAssistant: y", "rejected": "n"},
            [user("q")],
            "\n\nHuman: x\n\nAssistant: y",
            "n",
        ),
    ],
)
def test_every_form_gives_prompt_chosen_rejected(row, prompt, chosen, rejected):
    assert preferences.to_pair(row, "row 0") == {"prompt": prompt, "chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "equal sides"),
        ({"chosen": TURNS + " two", "rejected": TURNS + "  two "}, "equal sides"),
        ({"prompt": "q", "chosen": "a", "rejected": " \n"}, "an empty side"),
        ({"chosen": TURNS + " two", "rejected": TURNS}, "an empty side"),
        (
            {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: d"},
            "sides that answer different prompts",
        ),
        (
            {"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("d")]},
            "sides that answer different prompts",
        ),
        ({"chosen": TURNS + " two", "rejected": "no marks"}, "sides that answer different prompts"),
        *(
            (
                {"chosen": f"{context}\n\nAssistant: b", "rejected": f"{context}\n\nAssistant: c"},
                "dialogues whose turns",
            )
            for context in (
                "",
                "\n\nAssistant: a",
                "\n\nHuman: a\n\nHuman: b",
                "\n\nHuman: a\n\nAssistant: b",
                "\n\nHuman:\n\nAssistant: b\n\nHuman: c",
                "preface\n\nHuman: a",
            )
        ),
        (
            {
                "chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c",
                "rejected": "\n\nHuman: a\n\nAssistant: d\n\nHuman: c",
            },
            "dialogues whose turns",
        ),
    ],
)
def test_pairs_that_teach_nothing(row, reason):
    result = preferences.to_pair(row, "row 0")
    assert isinstance(result, str) and result.startswith(reason)


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a"},
        {"prompt": "q", "chosen": None, "rejected": "b"},
        {"prompt": 3, "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": [], "rejected": []},
        {"prompt": "q", "chosen": [{"role": "assistant", "content": None}], "rejected": [assistant("b")]},
        {"prompt": [], "chosen": "a", "rejected": "b"},
    ],
)
def test_a_row_of_no_known_form_is_an_error_that_names_it(row):
    with pytest.raises(ValueError, match="file row 7: .* none of the forms"):
        preferences.to_pair(row, "file row 7")


def test_a_response_is_the_assistants():
    with pytest.raises(ValueError, match="row 7: .* must end in a message of the assistant"):
        preferences.to_pair({"prompt": "q", "chosen": [user("a")], "rejected": [user("b")]}, "row 7")


# --- files -----------------------------------------------------------------------------------------------------------


def test_writes_both_splits_drops_and_says_so(tmp_path, capsys):
    equal = {"prompt": "q", "chosen": "a", "rejected": "a"}
    empty = {"prompt": "q", "chosen": "a", "rejected": ""}
    write(tmp_path / "train.jsonl", [equal, *PLAIN, empty, equal])
    write(tmp_path / "test.jsonl", PLAIN[:2])
    assert run(tmp_path, tmp_path / "out") == {"train": 10, "test": 2}
    table = pq.read_table(tmp_path / "out/train.parquet")
    assert table.column_names == ["prompt", "chosen", "rejected"]
    assert table.to_pylist() == [
        {"prompt": [user(f"q{i}")], "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(10)
    ]
    printed = capsys.readouterr().out
    assert "train: dropped 2 of 13 pairs: equal sides" in printed
    assert "train: dropped 1 of 13 pairs: an empty side" in printed
    for split, count in (("train", 10), ("test", 2)):
        digest = hashlib.sha256((tmp_path / f"out/{split}.parquet").read_bytes()).hexdigest()
        assert f"{split}.parquet: {count} rows, sha256 {digest}" in printed


def test_layout_of_hh_rlhf(tmp_path):
    pair = {"chosen": TURNS + " two", "rejected": TURNS + " three"}
    for folder, count in (("harmless-base", 2), ("helpful-base", 3)):
        write(tmp_path / folder / "train.jsonl.gz", [pair] * count)
        write(tmp_path / folder / "test.jsonl.gz", [pair])
    write(tmp_path / "red-team-attempts/red_team_attempts.jsonl.gz", [{"transcript": "x"}])
    assert run(tmp_path, tmp_path / "out") == {"train": 5, "test": 2}


def test_layout_of_ultrafeedback(tmp_path):
    """Beside the pairs lie splits for SFT, which have the same columns."""
    row = {"prompt": "q", "chosen": [user("q"), assistant("y")], "rejected": [user("q"), assistant("n")]}
    write(tmp_path / "data/train_prefs-00000-of-00002.parquet", [row, row])
    write(tmp_path / "data/train_prefs-00001-of-00002.parquet", [row])
    write(tmp_path / "data/test_prefs-00000-of-00001.parquet", [row])
    write(tmp_path / "data/train_sft-00000-of-00001.parquet", [row] * 50)
    write(tmp_path / "data/test_gen-00000-of-00001.parquet", [row] * 50)
    assert run(tmp_path, tmp_path / "out") == {"train": 3, "test": 1}


def test_download_asks_for_nothing_but_pairs(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, **kwargs):
        asked.update(kwargs, repo_id=repo_id)
        write(tmp_path / "hub/train.jsonl", PLAIN)
        write(tmp_path / "hub/test.jsonl", PLAIN)
        return str(tmp_path / "hub")

    monkeypatch.setattr(files.huggingface_hub, "snapshot_download", snapshot_download)
    assert run("HuggingFaceH4/ultrafeedback_binarized", tmp_path / "out") == {"train": 10, "test": 10}
    assert asked["repo_id"] == "HuggingFaceH4/ultrafeedback_binarized" and asked["repo_type"] == "dataset"
    wanted = {
        "data/train_prefs-00000-of-00001.parquet": True,
        "data/test_prefs-00000-of-00001.parquet": True,
        "data/train_sft-00000-of-00001.parquet": False,
        "harmless-base/train.jsonl.gz": True,
        "red-team-attempts/red_team_attempts.jsonl.gz": False,
        "train.jsonl": True,
        "README.md": False,
    }
    for name, expected in wanted.items():
        assert any(fnmatch.fnmatch(name, pattern) for pattern in asked["allow_patterns"]) == expected, name


def test_held_out_prompts_are_not_trained_on(tmp_path):
    rows = [{**row, "chosen": f"{row['chosen']} {i}"} for row in PLAIN for i in range(3)]  # three pairs per prompt
    write(tmp_path / "pairs.jsonl", rows)
    splits = {}
    for seed in (0, 0, 1):
        counts = run(tmp_path / "pairs.jsonl", tmp_path / "out", test_fraction=0.2, seed=seed)
        assert counts == {"train": 24, "test": 6}  # 2 of 10 prompts
        train, test = (pq.read_table(tmp_path / f"out/{s}.parquet").to_pylist() for s in ("train", "test"))
        prompts = [{row["prompt"][0]["content"] for row in rows} for rows in (train, test)]
        assert not prompts[0] & prompts[1] and len(prompts[1]) == 2
        assert sorted(row["chosen"] for row in train + test) == sorted(row["chosen"] for row in rows)
        splits.setdefault(seed, []).append(prompts[1])
    assert splits[0][0] == splits[0][1] != splits[1][0]


def test_bad_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="--source /no/such: no such file or folder"):
        run("/no/such", tmp_path)
    with pytest.raises(FileNotFoundError, match="has no train file"):
        run(tmp_path, tmp_path)
    write(tmp_path / "train.jsonl", PLAIN)
    with pytest.raises(FileNotFoundError, match="has no test file; .* or --test-fraction 0.05"):
        run(tmp_path, tmp_path)
    with pytest.raises(ValueError, match="--test-fraction 1.5: give a share"):
        run(tmp_path, tmp_path, test_fraction=1.5)
    with pytest.raises(ValueError, match="no test pair is left"):
        run(tmp_path, tmp_path, test_fraction=0.01)  # of 10 prompts
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n\n{"prompt"\n')
    with pytest.raises(ValueError, match=r"train\.jsonl line 3: not a JSON object"):
        run(tmp_path, tmp_path, test_fraction=0.5)
    write(tmp_path / "train.jsonl", [PLAIN[0], {"question": "a"}])
    with pytest.raises(ValueError, match=r"train\.jsonl row 1: .*'prompt': 'NoneType'"):
        run(tmp_path, tmp_path, test_fraction=0.5)
    (tmp_path / "pairs.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"pairs\.csv: give a \.parquet, \.jsonl or \.jsonl\.gz file"):
        run(tmp_path / "pairs.csv", tmp_path, test_fraction=0.5)
    assert not list(tmp_path.glob("*.parquet"))  # nothing is written unless all is well


def test_runs_as_a_script(tmp_path):
    write(tmp_path / "pairs.jsonl.gz", PLAIN)
    launch.run_elsewhere(preferences.__file__, "--source", "pairs.jsonl.gz", "--test-fraction", "0.3", cwd=tmp_path)
    assert pq.read_metadata(tmp_path / "data/preferences/test.parquet").num_rows == 3

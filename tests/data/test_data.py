import hashlib
import json

import launch
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_rows import make_tokenizer, render_prompt, rl_row, without, write
from tokenizers import Tokenizer, models
from transformers import GPT2Config, PreTrainedTokenizerFast

from data import files, gsm8k
from extras.agents import EnvironmentFlags, check_rows
from extras.demonstrations.rows import read_comparisons, read_demonstrations
from rl.data.encode import encode_prompts, load_prompts, prompt_text
from rl.data.flags import Data, Files
from rl.data.order import prompts_for_step
from rl.data.rows import read_rows
from rl.model.checks import check_context
from rl.run.arguments import Rewards
from rl.scoring.pool import need_truth


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_read_rows_returns_what_was_written(tmp_path, name):
    rows = [rl_row(f"question {i}", str(i), note=i) for i in range(3)]
    path = write(tmp_path / name, rows)
    expected = [{**row, "row_index": i, "row_place": f"{path}: row {i}"} for i, row in enumerate(rows)]
    assert list(read_rows(path)) == list(read_rows(str(path))) == expected


def test_read_rows_concatenates_files_in_order(tmp_path):
    paths = [write(tmp_path / name, [rl_row(c) for c in name[:2]]) for name in ("ab.parquet", "cd.jsonl")]
    rows = read_rows(paths)
    assert [(row["prompt"][0]["content"], row["row_index"]) for row in rows] == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]


def test_read_rows_keeps_types(tmp_path):
    for truth in (7, "7", "1,234", ["a", "b"], {"tests": "assert 1"}):
        (row,) = read_rows(write(tmp_path / "x.parquet", [rl_row(truth=truth)]))
        assert row["reward_model"]["ground_truth"] == truth
    assert read_rows(write(tmp_path / "x.parquet", [rl_row(prompt="plain")]))[0]["prompt"] == "plain"


def test_read_rows_without_extra_info(tmp_path):
    assert read_rows(write(tmp_path / "x.parquet", [without(rl_row(), "extra_info")]))[0]["extra_info"] == {}
    assert read_rows(write(tmp_path / "y.parquet", [rl_row(), rl_row(extra_info=None)]))[1]["extra_info"] == {}


def test_read_rows_of_a_file_as_verl_writes_it(tmp_path):
    """large_string, dictionary-encoded text, structs padded with nulls, several row groups, no page checksums."""
    messages = pa.list_(pa.struct([("content", pa.large_string()), ("role", pa.string()), ("name", pa.string())]))
    table = pa.table(
        {
            "data_source": pa.array(["aime", "aime", "math"]).dictionary_encode(),
            "prompt": pa.array(
                [[{"role": "system", "content": ""}, {"role": "user", "content": c}] for c in "abc"], messages
            ),
            "ability": pa.array(["math"] * 3, pa.large_string()),
            "reward_model": pa.array(
                [{"ground_truth": c, "style": "rule"} for c in "xyz"],
                pa.struct([("ground_truth", pa.large_string()), ("style", pa.string())]),
            ),
            "extra_info": pa.array([{"index": 0, "tools": ["t"]}, {"index": 1}, None]),
            "__index_level_0__": pa.array([5, 6, 7]),
        }
    )
    pq.write_table(table, tmp_path / "verl.parquet", compression="snappy", row_group_size=2)
    rows = read_rows(tmp_path / "verl.parquet")
    assert rows[1] == {
        "data_source": "aime",
        "prompt": [{"content": "", "role": "system"}, {"content": "b", "role": "user"}],  # no "name": None
        "ability": "math",
        "reward_model": {"ground_truth": "y", "style": "rule"},
        "extra_info": {"index": 1, "tools": None},
        "__index_level_0__": 6,
        "row_index": 1,
        "row_place": f"{tmp_path / 'verl.parquet'}: row 1",
    }
    assert rows[2]["extra_info"] == {}


def test_flipped_byte_is_detected(tmp_path):
    path = write(tmp_path / "x.parquet", [rl_row(f"question {i}", str(i)) for i in range(50)])
    good = path.read_bytes()
    group = pq.ParquetFile(path).metadata.row_group(0)
    for c in range(group.num_columns):
        column = group.column(c)
        last = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 1
        path.write_bytes(good[:last] + bytes([good[last] ^ 4]) + good[last + 1 :])
        with pytest.raises(ValueError, match=r"x\.parquet: not a readable parquet file \(.*(?i:crc|corrupt)"):
            read_rows(path)
    path.write_bytes(good)
    assert len(read_rows(path)) == 50


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no parquet at all" * 10])
def test_not_parquet(tmp_path, content):
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.parquet: not a readable parquet file"):
        read_rows(tmp_path / "x.parquet")


def test_truncated_parquet(tmp_path):
    path = write(tmp_path / "x.parquet", [rl_row()])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"x\.parquet: not a readable parquet file"):
        read_rows(path)


def bad_text(values):
    return pa.array(values, pa.binary()).view(pa.string())


def test_invalid_utf8_names_the_row(tmp_path):
    texts = bad_text([b"fine", b"fine", b"fine", b"caf\xe9"])  # two messages a row: value 3 is in row 1
    prompts = pa.ListArray.from_arrays(
        [0, 2, 4], pa.StructArray.from_arrays([bad_text([b"user"] * 4), texts], ["role", "content"])
    )
    good = pa.Table.from_pylist([rl_row(), rl_row()])
    path = tmp_path / "x.parquet"
    pq.write_table(good.set_column(1, "prompt", prompts), path)
    with pytest.raises(ValueError, match=r"x\.parquet: row 1: column 'prompt' cannot be read \('utf-8' codec"):
        read_rows(path)
    pq.write_table(good.append_column("note", bad_text([b"\xff", b"ok"])), path)
    with pytest.raises(ValueError, match=r"x\.parquet: row 0: column 'note' cannot be read \('utf-8' codec"):
        read_rows(path)
    lines = [json.dumps(rl_row()).encode(), json.dumps(rl_row("cafX")).encode().replace(b"X", b"\xe9")]
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=r"x\.jsonl: row 1 \(line 2\) is not a JSON object in UTF-8 \('utf-8' codec"):
        read_rows(tmp_path / "x.jsonl")


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.parquet: no such data file"):
        read_rows(tmp_path / "nowhere.parquet")
    with pytest.raises(FileNotFoundError, match="no such data file; .* name the files of a folder"):
        read_rows(tmp_path)
    with pytest.raises(ValueError, match="no data file given"):
        read_rows([])


def test_no_rows(tmp_path):
    pq.write_table(pa.Table.from_pylist([rl_row()]).slice(0, 0), tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text("\n\n")
    for name in ("x.parquet", "x.jsonl"):
        with pytest.raises(ValueError, match=rf"{name}: has no rows"):
            read_rows(tmp_path / name)


def test_jsonl_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(rl_row("a\u2028b")) + "\n\n" + json.dumps(rl_row()) + "\r\n", encoding="utf-8")
    assert len(read_rows(path)) == 2
    path.write_text(json.dumps(rl_row()) + "\n{'a': 1}\n")
    with pytest.raises(ValueError, match=r"x\.jsonl: row 1 \(line 2\) is not a JSON object in UTF-8 \(Exp"):
        read_rows(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"x\.jsonl: row 0 \(line 1\) is not a JSON object .*is \[1\] \(list\)"):
        read_rows(path)


@pytest.mark.parametrize(
    "bad, message",
    [
        (
            without(rl_row(), "prompt"),
            r"no column prompt; add or rename it \(there are data_source, ability, reward_model",
        ),
        (without(rl_row(), "data_source", "reward_model"), r"no column data_source, reward_model;"),
        (rl_row(data_source=None), r"data_source is None"),
        (rl_row(data_source=""), r"data_source is ''"),
        (rl_row(reward_model=None), r"reward_model is None"),
        (rl_row(reward_model={"style": "rule"}), r"reward_model is \{'style': 'rule'\}.* must hold a ground_truth"),
        (rl_row(truth=None), r"reward_model is .*'ground_truth': None\}"),
        (rl_row(extra_info="{}"), r"extra_info is '\{\}' \(str\)"),
        (rl_row(prompt=None), r"prompt is None"),
        (rl_row(prompt=7), r"prompt is 7 \(int\); it must be a string or a list of \{role, content\}"),
        (rl_row(prompt=" \n"), r"prompt is ' \\n' \(str\); it must be a string that is not empty"),
        (rl_row(prompt=[]), r"prompt is \[\]"),
        (rl_row(prompt=["hello"]), r"prompt is \['hello'\]"),
        (rl_row(prompt=[{"role": "user"}]), r"prompt\[0\] is .* must hold a role and a content"),
        (rl_row(prompt=[{"role": "user", "content": "hi"}, {"role": "", "content": "hi"}]), r"prompt\[1\] is "),
        (rl_row(prompt=[{"role": "user", "content": [{"type": "image"}]}]), r"prompt\[0\] is "),
        (rl_row(content=" "), r"prompt is .* it must hold some text"),
        (rl_row(images=["i.png"]), r"images\[0\]: no such file .*i\.png; give its path"),
        (rl_row(images=[7]), r"images\[0\] is 7 \(int\); it must be a path, a dict"),
        (rl_row(videos=["a.mp4"], images=None), r"has videos, but"),
        (
            rl_row(extra_info={"need_tools_kwargs": True, "tools_kwargs": {"search": {}}}),
            r"has need_tools_kwargs, but a prompt is made of its text or messages, images and tools, and the policy "
            "calls tools only with "
            "--environment or --tools; leave such rows out",
        ),
        (rl_row(content="\ud800"), r"prompt\[0\] holds a lone surrogate"),
        (rl_row(prompt="\ud800"), r"prompt holds a lone surrogate"),
    ],
)
def test_bad_row_is_named(tmp_path, bad, message):
    path = write(tmp_path / "x.jsonl", [rl_row(), bad])
    with pytest.raises(ValueError, match=r"x\.jsonl: row 1: " + message):
        read_rows(path)


def test_columns_of_images_and_tools_may_be_empty(tmp_path):
    rows = [rl_row(images=[], videos=None, extra_info={"need_tools_kwargs": False}), rl_row(images=None)]
    for name in ("x.jsonl", "x.parquet"):
        assert len(read_rows(write(tmp_path / name, rows))) == 2
    for read, bad in ((read_demonstrations, {"response": "b"}), (read_comparisons, {"chosen": "b", "rejected": "c"})):
        path = write(tmp_path / "x.jsonl", [{"prompt": "a", "videos": ["a.mp4"], **bad}])
        with pytest.raises(ValueError, match=r"x\.jsonl: row 0: has videos, but a prompt is made of"):
            read(path)


def test_rows_of_verl_with_tools_are_taken_if_something_answers_the_policy(tmp_path):
    wanted = {"need_tools_kwargs": True, "tools_kwargs": {"search": {"create_kwargs": {"ground_truth": "7"}}}}
    path = write(tmp_path / "x.parquet", [rl_row(extra_info=wanted)])
    found = [read_rows(path, has_partner=True, needs_truth=needs)[0]["extra_info"] for needs in (False, True)]
    assert found == [wanted] * 2
    data = Data(train_files=(str(path),), val_files=(str(path),))
    of_run = load_prompts(data, make_tokenizer(), 100, text_of=prompt_text)
    assert [row["extra_info"] for rows in of_run for row in rows] == [wanted] * 2
    check_rows(EnvironmentFlags(environment="mine.py"), of_run[0])
    refused = r"x\.parquet: row 0: has need_tools_kwargs, values for search that the policy does not see; --tools get"
    with pytest.raises(ValueError, match=refused):
        check_rows(EnvironmentFlags(tools=("mine.py",)), of_run[0])
    with pytest.raises(ValueError, match="has videos, but"):
        read_rows(write(tmp_path / "y.jsonl", [rl_row(videos=["a.mp4"])]), has_partner=True)


def test_rows_without_a_ground_truth_are_left_out_where_the_data_source_decides(tmp_path, capsys):
    """As verl's file of MATH has two, of problems whose box is empty."""
    rows = [rl_row(str(i), truth) for i, truth in enumerate(("1", "", "3", " \n", "0"))]
    path = write(tmp_path / "math.parquet", rows)
    other = write(tmp_path / "more.jsonl", [rl_row("5", 0), rl_row("6", []), rl_row("7", {"tests": "assert 1"})])

    def kept(files, custom=None, **more):
        needs_truth = need_truth(Rewards(custom_reward_function=custom, **more).functions)
        return [row["row_index"] for row in read_rows(files, needs_truth=needs_truth)]

    assert kept((str(path),)) == kept(path, reward_model=None) == [0, 2, 4]
    said = f"2 of 5 rows left out, since their ground_truth is empty: {path}: row 1, {path}: row 3\n"
    assert capsys.readouterr().out == 2 * said
    assert kept((path, other), ("my.py", "rewards/by_data_source.py:compute_score:0.5")) == [0, 2, 4, 5, 7]
    said = "3 of 8 rows left out, since their ground_truth is empty: "
    assert f"{said}{path}: row 1, {path}: row 3, {other}: row 1\n" in capsys.readouterr().out
    assert kept(path, ("noise.py",)) == kept(path, None, reward_model="folder") == [0, 1, 2, 3, 4]
    empty = write(tmp_path / "empty.jsonl", rows[1:2])
    with pytest.raises(ValueError, match=r"empty\.jsonl: row 0: reward_model.ground_truth is empty, as it is in every"):
        kept(empty)
    assert capsys.readouterr().out == ""


def test_steps_are_whole_batches_of_all_epochs_unless_their_number_is_given():
    assert Files().count_steps(10, 4) == 2
    assert Files(total_epochs=3).count_steps(10, 4) == 6
    assert Files(total_epochs=3, total_training_steps=50).count_steps(10, 10) == 50
    for batch_size in (-1, 0, 11):
        with pytest.raises(ValueError, match=f"--gen-batch-size {batch_size} must be between 1 and the 10 rows"):
            Files(total_training_steps=50).count_steps(10, batch_size, flag="--gen-batch-size")
        with pytest.raises(ValueError, match=f"--train-batch-size {batch_size} must be between 1 and the 10 rows"):
            Files().count_steps(10, batch_size)


def test_missing_parquet_column_and_null(tmp_path):
    path = write(tmp_path / "x.parquet", [without(rl_row(), "reward_model")])
    with pytest.raises(
        ValueError, match=r"no column reward_model; .*there are data_source, prompt, ability, extra_info"
    ):
        read_rows(path)
    path = write(tmp_path / "x.parquet", [rl_row(truth=b"2")])
    with pytest.raises(ValueError, match=r"row 0: reward_model is .*b'2'.* neither null nor bytes"):
        read_rows(path)
    path = write(tmp_path / "x.parquet", [rl_row(), rl_row(prompt=None)])
    with pytest.raises(ValueError, match=r"x\.parquet: row 1: prompt is None"):
        read_rows(path)


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_render_prompt_has_one_bos(tokenizer):
    ids = render_prompt(tokenizer, rl_row("hi"))
    assert tokenizer.decode(ids) == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tokenizer.apply_chat_template(rl_row("hi")["prompt"], add_generation_prompt=True, return_dict=False)
    assert (
        render_prompt(tokenizer, rl_row(prompt="hi"))
        == tokenizer("hi")["input_ids"]
        == [0, *tokenizer.encode("hi")[1:]]
    )


def test_encode_prompts_equals_render_prompt_and_changes_nothing(tokenizer):
    rows = [rl_row("a"), rl_row(prompt="plain"), rl_row("the answer is b"), rl_row(prompt="x")]
    encoded = encode_prompts(tokenizer, rows)
    assert [row["prompt_ids"] for row in encoded] == [render_prompt(tokenizer, row) for row in rows]
    assert [without(row, "prompt_ids") for row in encoded] == rows
    assert all("prompt_ids" not in row for row in rows)
    assert list(encode_prompts(tokenizer, [], max_prompt_length=8)) == []


def test_overlong_prompts(tokenizer):
    rows = [{**rl_row(prompt=c * n), "row_index": i} for i, (c, n) in enumerate([("a", 3), ("b", 9), ("c", 12)])]
    assert len(encode_prompts(tokenizer, rows, max_prompt_length=13)) == 3  # <s> counts
    with pytest.raises(ValueError) as error:
        encode_prompts(tokenizer, rows, max_prompt_length=9)
    for part in ("row 1:", "10 tokens", "--max-prompt-length 9", "2 of 3 rows, up to 13", "--filter-overlong-prompts"):
        assert part in str(error.value)
    kept = encode_prompts(tokenizer, rows, max_prompt_length=9, filter_overlong_prompts=True)
    assert [row["row_index"] for row in kept] == [0]
    with pytest.raises(ValueError, match=r"--max-prompt-length 3 \(so have 3 of 3 rows, up to 13\); raise it$"):
        encode_prompts(tokenizer, rows, max_prompt_length=3, filter_overlong_prompts=True)
    with pytest.raises(ValueError, match="row 2: the prompt has 13 tokens, over --max-prompt-length 12"):
        render_prompt(tokenizer, rows[2], max_prompt_length=12)


def test_prompts_that_cannot_be_rendered(tokenizer):
    with pytest.raises(ValueError, match=r"row 3: .* has no chat template; use an instruction-tuned --model"):
        render_prompt(make_tokenizer(chat_template=None), {**rl_row(), "row_index": 3})
    assert render_prompt(make_tokenizer(chat_template=None), rl_row(prompt="hi"))
    with pytest.raises(ValueError, match="row 4: the chat template rejects .*no tools here"):
        render_prompt(tokenizer, {**rl_row(prompt=[{"role": "tool", "content": "x"}]), "row_index": 4})
    tiny = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    with pytest.raises(ValueError, match="row 5: prompt: the tokens do not contain 'b' .* has no token"):
        render_prompt(tiny, {**rl_row(prompt="b"), "row_index": 5})


# --- order -----------------------------------------------------------------------------------------------------------


def test_the_context_is_checked_under_whatever_name_a_config_has_for_it():
    config = GPT2Config(n_positions=64)
    check_context(config, "--model x", 64)
    with pytest.raises(ValueError, match="--max-length = 65 tokens, but .* has 64 positions"):
        check_context(config, "--model x", 65, "--max-length")


def permutation(n, *, seed, epoch):
    """The order of this many rows in an epoch."""
    return prompts_for_step(range(n), epoch, n, seed)


def test_permutation_is_pure():
    first = permutation(100, seed=1, epoch=2)
    permutation(7, seed=3, epoch=0)
    assert permutation(100, seed=1, epoch=2) == first
    assert sorted(first) == list(range(100)) != first
    assert len({tuple(permutation(100, seed=s, epoch=e)) for s in range(3) for e in range(3)}) == 9
    assert permutation(6, seed=0, epoch=0) == [3, 2, 5, 4, 0, 1]  # a known value: a run may resume under another numpy


@pytest.mark.parametrize("num_rows, n", [(12, 4), (12, 12), (12, 1), (13, 4)])
def test_an_epoch_shows_every_row_once(num_rows, n):
    rows = [{"row_index": i} for i in range(num_rows)]
    steps = num_rows // n
    orders = []
    for epoch in range(3):
        batches = [prompts_for_step(rows, epoch * steps + s, n, seed=5) for s in range(steps)]
        assert all(len(batch) == n for batch in batches)
        order = [row["row_index"] for batch in batches for row in batch]
        assert len(set(order)) == len(order) == steps * n
        assert order == permutation(num_rows, seed=5, epoch=epoch)[: steps * n]
        orders.append(tuple(order))
    assert len(set(orders)) == 3


def test_prompts_for_step_is_pure():
    rows = [{"row_index": i} for i in range(10)]
    forward = [prompts_for_step(rows, s, 3, 0) for s in range(9)]
    assert [prompts_for_step(rows, s, 3, 0) for s in reversed(range(9))] == forward[::-1]
    assert prompts_for_step(rows, 0, 3, 1) != forward[0]


# --- data/gsm8k.py ---------------------------------------------------------------------------------------------------

PROBLEMS = [
    {"question": "How many?  Say.", "answer": "2 * 3 = <<2*3=6>>6\n#### 6"},
    {"question": "Caf\u00e9 revenue?", "answer": "Much.\n#### 1,234,500"},
    {"question": "Degrees?", "answer": "Cold.\n#### -5"},
]


def source(folder, layout="jsonl"):
    for split, rows in (("train", PROBLEMS), ("test", PROBLEMS[:1])):
        if layout == "jsonl":
            write(folder / f"{split}.jsonl", rows)
        else:
            (folder / "main").mkdir(exist_ok=True)
            write(folder / "main" / f"{split}-00000-of-00001.parquet", rows)
    return folder


@pytest.mark.parametrize("layout", ["jsonl", "hub"])
def test_gsm8k_writes_verls_schema(tmp_path, layout, capsys):
    args = gsm8k.Args(source=str(source(tmp_path, layout)), output_dir=tmp_path / "out")
    assert gsm8k.main(args) == {"train": 3, "test": 1, "sft": 3}
    table = pq.read_table(tmp_path / "out/train.parquet")
    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    rows = table.to_pylist()
    assert rows[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": 'Caf\u00e9 revenue? Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1234500"},
        "extra_info": {"split": "train", "index": 1, **PROBLEMS[1]},
    }
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["6", "1234500", "-5"]
    assert len(read_rows(tmp_path / "out/test.parquet")) == 1
    demonstrations = pq.read_table(tmp_path / "out/sft.parquet").to_pylist()
    assert demonstrations[0] == {"prompt": rows[0]["prompt"], "response": "2 * 3 = 6\n#### 6"}  # no calculator's note
    assert demonstrations[2]["response"] == PROBLEMS[2]["answer"] and len(demonstrations) == 3
    printed = capsys.readouterr().out
    for split, count in (("train", 3), ("test", 1), ("sft", 3)):
        digest = hashlib.sha256((tmp_path / f"out/{split}.parquet").read_bytes()).hexdigest()
        assert f"{split}.parquet: {count} rows, sha256 {digest}" in printed


def test_gsm8k_with_calls_of_a_calculator(tmp_path, capsys):
    """Notes in the middle, at once behind another one, rounded, without a result, and refused."""
    answer = (
        "It is 2*3 = <<2*3=6>>6.\nA third: <<10/3=3.33>>3.33, $<<6>>6 and <<1/0=1>>1 or <<20%=.2>>.2<<5-5=0>>\n#### 6"
    )
    problems = [{"question": "How many?", "answer": answer}, {"question": "Why?", "answer": "So.\n#### 1,000"}]
    write(tmp_path / "train.jsonl", problems)
    write(tmp_path / "test.jsonl", problems[:1])
    gsm8k.main(gsm8k.Args(source=str(tmp_path), output_dir=tmp_path / "out", calculator=True))
    gsm8k.main(gsm8k.Args(source=str(tmp_path), output_dir=tmp_path / "plain"))
    for name in ("train.parquet", "test.parquet"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert "sft: 3 notes are calls; the calculator refuses 3 others, which are left out" in capsys.readouterr().out
    first, second = read_demonstrations(tmp_path / "out/sft.parquet")
    said = [(x["role"], x["content"]) for x in first["messages"][1:]]
    assert said == [
        ("assistant", "It is 2*3 ="),
        ("tool", "6"),
        ("assistant", "6.\nA third:"),
        ("tool", "3.333333333"),
        ("assistant", "3.33, $6 and 1 or .2"),
        ("tool", "0"),
        ("assistant", "#### 6"),
    ]
    called = [call["function"] for x in first["messages"] for call in x.get("tool_calls") or ()]
    assert [x["name"] for x in called] == ["calculate"] * 3
    assert [x["arguments"] for x in called] == [{"expression": x} for x in ("2*3", "10/3", "5-5")]
    prompt = read_rows(tmp_path / "out/train.parquet")[0]["prompt"]
    assert first["messages"][0]["content"] == prompt[0]["content"]
    assert [x["content"] for x in second["messages"][1:]] == ["So.\n#### 1,000"]
    assert first["tools"][0]["function"]["name"] == "calculate"


def test_gsm8k_files_carry_zstd_and_page_checksums(tmp_path):
    gsm8k.main(gsm8k.Args(source=str(source(tmp_path)), output_dir=tmp_path))
    path = tmp_path / "train.parquet"
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    assert column.compression == "ZSTD"
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"train\.parquet: not a readable"):
        read_rows(path)


def test_gsm8k_bad_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="--source /no/such/folder: no such file or folder"):
        gsm8k.main(gsm8k.Args(source="/no/such/folder", output_dir=tmp_path))
    with pytest.raises(FileNotFoundError, match=r"has neither train\.jsonl nor main/train-\*\.parquet"):
        gsm8k.main(gsm8k.Args(source=str(tmp_path), output_dir=tmp_path))
    for bad, message in (
        ({"question": "a", "answer": "no mark"}, "train row 0: the answer 'no mark' does not end with ####"),
        ({"prompt": "a"}, r"train row 0: has \['prompt'\], not question and answer"),
    ):
        write(tmp_path / "train.jsonl", [bad])
        with pytest.raises(ValueError, match=message):
            gsm8k.main(gsm8k.Args(source=str(tmp_path), output_dir=tmp_path))
    assert not list(tmp_path.glob("*.parquet"))  # nothing is written unless all is well


def test_gsm8k_downloads_only_the_main_parquet_files(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, **kwargs):
        asked.update(kwargs, repo_id=repo_id)
        return str(source(tmp_path, "hub"))

    monkeypatch.setattr(files.huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    assert gsm8k.main(gsm8k.Args(output_dir=tmp_path)) == {"train": 3, "test": 1, "sft": 3}
    assert asked == {"repo_id": "openai/gsm8k", "repo_type": "dataset", "allow_patterns": ["main/*.parquet"]}


def test_gsm8k_runs_as_a_script_from_anywhere(tmp_path):
    launch.run_elsewhere(gsm8k.__file__, "--source", source(tmp_path), cwd=tmp_path)
    assert len(read_rows(tmp_path / "data/gsm8k/train.parquet")) == 3


def test_values_that_python_cannot_hold_are_named_with_file_and_row(tmp_path):
    rows = {"prompt": ["a", "b"], "data_source": ["x"] * 2, "reward_model": [{"ground_truth": "1"}] * 2}
    times = pa.array([0, 2**62], pa.timestamp("ms"))  # the second is in the year 146 million
    pq.write_table(pa.table(rows | {"seen": times}), tmp_path / "times.parquet")
    with pytest.raises(ValueError, match=r"times.parquet: row 1: column 'seen' cannot be read \(.*leave it out"):
        read_rows(tmp_path / "times.parquet")
    (tmp_path / "deep.jsonl").write_text('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(
        ValueError, match=r"deep.jsonl: row 0 \(line 1\) is not a JSON object in UTF-8 \(maximum recursion depth"
    ):
        read_rows(tmp_path / "deep.jsonl")


# ---------------------------------------------------------------------------------------------------------------------
# Which row of which file


def test_errors_name_the_file_and_the_row_in_it(tmp_path, tokenizer):
    """The second row of the second file is too long, the third one's messages are refused by the template."""
    for name, prompts in {"a.jsonl": ["1+1=", "1+2="], "b.jsonl": ["2+2=", "1+" * 30, "1="]}.items():
        rows = [{"prompt": x, "data_source": "s", "reward_model": {"ground_truth": "1"}} for x in prompts]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    rows = list(read_rows([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]))
    assert [row["row_index"] for row in rows] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"b\.jsonl: row 1: the prompt has \d+ tokens, over --max-prompt-length 12"):
        encode_prompts(tokenizer, rows, max_prompt_length=12)
    rows[4]["prompt"] = [{"role": "user", "content": "1="}]
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ValueError, match=r"b\.jsonl: row 2: the chat template rejects the messages"):
        encode_prompts(tokenizer, rows)


def test_a_file_with_two_columns_of_one_name_is_refused(tmp_path):
    columns = [pa.array([x]) for x in ("1+1=", "1+2=", "s")]
    pq.write_table(pa.Table.from_arrays(columns, names=["prompt", "prompt", "data_source"]), tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"twice\.parquet: has two columns 'prompt'; leave one of them out"):
        read_rows(tmp_path / "twice.parquet")

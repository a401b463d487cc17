"""Rows that are read, kept and tokenized bit by bit: the same as at once, and in little memory."""

import json
import pickle
import random
import string

import launch
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_rows import make_tokenizer, rl_row

from extras.demonstrations import load_comparisons, load_demonstrations
from extras.demonstrations.encode import SIDES, add_given, encode_conversation, encode_demonstration
from extras.demonstrations.rows import read_comparisons
from extras.partial.rows import ByIndex
from rl.data import packed, rows
from rl.data.encode import encode_prompts
from rl.data.order import prompts_for_step
from rl.data.packed import Lazy, Packed, derive
from rl.data.rows import read_rows

TEXTS = ["a", "the answer is b", "x" * 40, "", "café \n\n", "{}", "the answer is " * 9]
TRUTHS = ["1", "", "3", "4", "5", "6", "7"]  # the second row is left out, and the fourth without a text
ITEMS = [{"a": i, "b": ["x" * i, None, 10**i, 0.5]} for i in range(30)]


@pytest.fixture(params=[False, True], ids=["at once", "bit by bit"])
def bit_by_bit(request, monkeypatch):
    """Two rows at a time."""
    if request.param:
        monkeypatch.setattr(packed, "CHUNK_ROWS", 2)
        monkeypatch.setattr(rows, "BATCH_ROWS", 2)


def write(path, given, **options):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
    else:
        pq.write_table(pa.Table.from_pylist(given), path, **options)
    return path


def test_packed_items_come_back_in_any_order():
    store = Packed()
    for i, item in enumerate(ITEMS):
        store.append(item)
        assert store.get(i) == item and len(store) == i + 1
    items = Lazy(range(len(store)), store.get)
    assert list(items) == ITEMS
    assert [items[i] for i in (29, 0, 13, 12, -1, 28)] == [ITEMS[i] for i in (29, 0, 13, 12, -1, 28)]
    assert list(items[3:20:4]) == ITEMS[3:20:4] and list(items[5:][2:4]) == ITEMS[7:9] and list(items[:None]) == ITEMS
    assert list(items[:2] + items[28:]) == ITEMS[:2] + ITEMS[28:] and list(items + ITEMS[:1]) == [*ITEMS, ITEMS[0]]
    with pytest.raises(IndexError):
        items[30]
    items[4]["a"] = "changed"
    assert items[4] == ITEMS[4]


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl"])
def test_prompts_are_the_same_bit_by_bit(tmp_path, bit_by_bit, name):
    given = [rl_row(text, truth) for text, truth in zip(TEXTS, TRUTHS, strict=True) if text]
    file, tokenizer = write(tmp_path / name, given, row_group_size=4), make_tokenizer()
    assert isinstance(read_rows(file).places, range)  # which takes no memory
    read = read_rows(file, needs_truth=True)
    assert [row["row_index"] for row in read] == [0, 2, 3, 4, 5]
    assert list(read) == [
        given[i] | {"row_index": i, "row_place": f"{file}: row {i}", "extra_info": given[i]["extra_info"]}
        for i in (0, 2, 3, 4, 5)
    ]
    alone = [tokenizer.apply_chat_template(x["prompt"], add_generation_prompt=True, return_dict=False) for x in read]
    assert [row["prompt_ids"] for row in encode_prompts(tokenizer, read)] == alone
    longest = sorted(map(len, alone))[2]
    encoded = encode_prompts(tokenizer, read, max_prompt_length=longest, filter_overlong_prompts=True)
    places = [i for i, ids in enumerate(alone) if len(ids) <= longest]
    assert len(places) == 3 and list(encoded) == [read[i] | {"prompt_ids": alone[i]} for i in places]
    step = prompts_for_step(encoded, 1, 2, seed=3)
    assert step == prompts_for_step(list(encoded), 1, 2, seed=3) and len(step) == 2
    by_index = ByIndex(encoded)
    assert dict(by_index) == {row["row_index"]: row for row in encoded} and by_index.get(1) is by_index.get(99) is None
    too_long = [ids for ids in alone if len(ids) > longest]
    with pytest.raises(ValueError, match=rf"has {len(too_long[0])} tokens, over .* \(so have 2 of 5 rows, up to "):
        encode_prompts(tokenizer, read, max_prompt_length=longest)


def test_texts_and_messages_may_alternate(bit_by_bit):
    tokenizer = make_tokenizer()
    mixed = [rl_row("a"), rl_row(prompt="b"), rl_row(prompt="c"), rl_row("d"), rl_row(prompt="e")]
    alone = [encode_prompts(tokenizer, [row])[0]["prompt_ids"] for row in mixed]
    assert [row["prompt_ids"] for row in encode_prompts(tokenizer, mixed)] == alone
    assert [tokenizer.decode(ids)[:4] for ids in alone] == ["<s><", "<s>b", "<s>c", "<s><", "<s>e"]


def test_demonstrations_and_comparisons_are_the_same_bit_by_bit(tmp_path, bit_by_bit, capsys):
    tokenizer, texts = make_tokenizer(), [text for text in TEXTS if text]
    pairs = [{"prompt": "q", "chosen": x, "rejected": x + "!", "response": x} for x in texts]
    file = write(tmp_path / "x.jsonl", pairs)
    wanted = [encode_demonstration(tokenizer, row) for row in pairs]
    longest = sorted(len(ids) for ids, _ in wanted)[-2]
    samples = load_demonstrations(file, tokenizer, max_length=longest, filter_overlong=True)
    assert capsys.readouterr().out == f"dropped 1 of 6 rows longer than --max-length {longest}\n"
    kept = [(i, *x) for i, x in enumerate(wanted) if len(x[0]) <= longest]
    assert [(x.row_index, x.response_ids.tolist(), x.response_mask.tolist()) for x in samples] == kept
    sides = [[encode_conversation(tokenizer, row, row[x]) for x in ("chosen", "rejected")] for row in pairs]
    compared = load_comparisons(file, tokenizer, max_length=longest, filter_overlong=True)
    kept = [x for x in sides if max(map(len, x)) <= longest]
    assert [[x.prompt_ids.tolist() for x in pair] for pair in compared] == kept and 0 < len(kept) < 6
    given = add_given(read_comparisons(file), tokenizer, SIDES, 30, filter_overlong=True)
    kept = [i for i, pair in enumerate(sides) if max(map(len, pair)) <= 32]  # behind two tokens of the prompt
    assert [row["chosen"] for row in given] == [texts[i] for i in kept] and len(kept) == 5
    assert [row["given"] for row in given] == [[ids[2:] for ids in sides[i]] for i in kept]


def test_derive_makes_everything_once_and_several_rows_at_a_time(monkeypatch):
    asked = []

    def make(chunk):
        asked.append([row["a"] for row in chunk])
        return [row["a"] ** 2 if row["a"] % 3 else None for row in chunk]

    monkeypatch.setattr(packed, "CHUNK_ROWS", 4)
    squares = derive(ITEMS[:10], make, "square")
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and list(squares.places) == [1, 2, 4, 5, 7, 8]
    assert list(squares) == [1, 4, 16, 25, 49, 64] == [squares.get(i) for i in squares.places] and len(asked) == 3


def test_a_million_rows_take_little_memory():
    """Some 500 bytes of text and names each, as in a file of verl's."""
    store, texts = (
        Packed(),
        [f"{i * 2654435761 % 2**32} apples and {i * 40503 % 65536} pears are how many?" for i in range(5000)],
    )
    for i, text in enumerate(texts):
        store.append(rl_row(text, str(i)) | {"row_index": i, "row_place": f"/data/train.parquet: row {i}"})
    assert sum(map(len, store.compressed)) < 100 * len(texts)
    assert sum(len(pickle.dumps(row)) for row in map(store.get, range(len(store)))) > 300 * len(texts)


# --- files -----------------------------------------------------------------------------------------------------------


def test_lines_are_numbered_as_before_whatever_ends_them(tmp_path):
    good, path = json.dumps(rl_row("a\u2028\x85b")), tmp_path / "x.jsonl"
    for end in ("\n", "\r\n", "\r", "\n\n", "\r\r\n", "\n \n"):
        path.write_bytes(end.join([good, good, "{bad", good]).encode())
        line = next(i for i, x in enumerate(path.read_bytes().splitlines(), 1) if x == b"{bad")
        with pytest.raises(ValueError, match=rf"x\.jsonl: row 2 \(line {line}\) is not a JSON object in UTF-8"):
            read_rows(path)
        path.write_bytes(end.join([good, good, good]).encode())
        assert [row["row_index"] for row in read_rows(path)] == [0, 1, 2]


def test_the_row_of_a_bad_value_is_counted_through_batches_and_groups(tmp_path, bit_by_bit):
    texts = [b"fine"] * 11
    texts[9] = b"caf\xe9"
    table = pa.Table.from_pylist([rl_row() for _ in texts])
    pq.write_table(
        table.append_column("note", pa.array(texts, pa.binary()).view(pa.string())),
        tmp_path / "x.parquet",
        row_group_size=4,
    )
    with pytest.raises(ValueError, match=r"x\.parquet: row 9: column 'note' cannot be read \('utf-8' codec"):
        read_rows(tmp_path / "x.parquet")


def test_rows_nested_too_deeply_are_named(tmp_path):
    deep = json.dumps(rl_row()).replace('"math"', "[" * 700 + "]" * 700)
    (tmp_path / "x.jsonl").write_text(f"{json.dumps(rl_row())}\n{deep}\n")
    with pytest.raises(
        ValueError, match=r"x\.jsonl: row 1: holds hundreds of lists or dicts in each other; leave them"
    ):
        read_rows(tmp_path / "x.jsonl")


# --- texts far over a limit ------------------------------------------------------------------------------------------


class Counting:
    """A tokenizer that counts the characters that it is asked to tokenize."""

    def __init__(self):
        self.tokenizer, self.count = make_tokenizer(), 0

    def __call__(self, text, **options):
        self.count += sum(map(len, [text] if isinstance(text, str) else text))
        return self.tokenizer(text, **options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


HUGE = "word " * 200_000  # a million characters
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": HUGE}]


@pytest.mark.parametrize(
    "encode, flag",
    [
        (lambda x: encode_prompts(x, [rl_row("a"), rl_row(HUGE)], max_prompt_length=50), "--max-prompt-length 50"),
        (lambda x: encode_prompts(x, [rl_row(), rl_row(prompt=HUGE)], max_prompt_length=50), "--max-prompt-length 50"),
        (lambda x: encode_demonstration(x, {"prompt": HUGE, "response": "a"}, max_length=50), "--max-length 50"),
        (lambda x: encode_demonstration(x, {"prompt": "a", "response": HUGE}, max_length=50), "--max-length 50"),
        (lambda x: encode_demonstration(x, {"messages": MESSAGES}, max_length=50), "--max-length 50"),
        (lambda x: encode_conversation(x, {"prompt": "a"}, HUGE, max_length=50), "--max-length 50"),
        (lambda x: encode_conversation(x, {"prompt": MESSAGES[:1]}, HUGE, max_length=50), "--max-length 50"),
        (
            lambda x: add_given([{"prompt": "a", "chosen": HUGE, "rejected": "b"}], x, SIDES, 50),
            "--max-response-length 50",
        ),
    ],
)
def test_a_text_far_over_the_limit_is_refused_from_its_beginning(encode, flag):
    tokenizer = Counting()
    with pytest.raises(ValueError, match=rf"row .* has .*at least \d+ tokens.*, over {flag}"):
        encode(tokenizer)
    assert 0 < tokenizer.count < 20_000


def test_a_long_text_of_few_tokens_is_no_long_prompt():
    """A thousand line breaks are 500 tokens of this vocabulary, and are counted to the last one."""
    tokenizer = Counting()
    for text, limit in (("\n\n" * 10_000, 10_100), ("\n\n" * 10_000, 10_001), ("a" * 9000, 9001)):
        [row] = encode_prompts(tokenizer, [rl_row(prompt=text)], max_prompt_length=limit)
        assert row["prompt_ids"] == tokenizer.tokenizer(text)["input_ids"]
        with pytest.raises(ValueError, match=rf"has {len(row['prompt_ids'])} tokens, over"):
            encode_prompts(tokenizer, [rl_row(prompt=text)], max_prompt_length=len(row["prompt_ids"]) - 1)


def test_rows_far_over_the_limit_are_dropped_from_their_beginning(tmp_path):
    tokenizer = Counting()
    given = [rl_row("a"), rl_row(HUGE), rl_row("b")]
    way = dict(max_prompt_length=50, filter_overlong_prompts=True)
    assert [row["prompt"] for row in encode_prompts(tokenizer, given, **way)] == [given[i]["prompt"] for i in (0, 2)]
    file = write(tmp_path / "x.jsonl", [{"prompt": "a", "response": x} for x in ("b", HUGE, "c")])
    samples = load_demonstrations(file, tokenizer, max_length=50, filter_overlong=True)
    assert [x.row_index for x in samples] == [0, 2]
    assert tokenizer.count < 20_000


@pytest.mark.thorough
def test_reading_a_file_takes_no_more_memory_than_its_size(tmp_path):
    """What was freed between the blocks that stay is given back, or it would be as much again."""
    letters = "".join(random.Random(0).choices(string.ascii_letters, k=10**6))
    with open(tmp_path / "x.jsonl", "w") as file:
        for i in range(2000):
            start = i * 7919 % 900_000
            file.write(json.dumps(rl_row(letters[start : start + 100_000])) + "\n")
    code = "import sys; from rl.data.rows import read_rows; rows = sys.argv[1:] and read_rows(sys.argv[1])\n"
    code += "print([x for x in open('/proc/self/status') if x.startswith('VmHWM')][0].split()[1])"
    peaks = [int(launch.run("-c", code, *files)) for files in ([], [tmp_path / "x.jsonl"])]  # KiB
    assert (peaks[1] - peaks[0]) * 1024 < (tmp_path / "x.jsonl").stat().st_size + 2**25

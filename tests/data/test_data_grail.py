import hashlib
import json
import re
from collections import Counter

import launch
import pyarrow.parquet as pq
import pytest
from launch import SHARED
from transformers import AutoTokenizer

from data import arithmetic, grail, math_dataset
from rewards.grail import compute_score
from rl.data.rows import read_rows

# The seven subjects of MATH in the order of the split: training problems, and how many of them GRAIL holds out.
MATH_SUBJECTS = {
    "Algebra": (1744, 116),
    "Counting & Probability": (771, 51),
    "Geometry": (870, 58),
    "Intermediate Algebra": (1295, 86),
    "Number Theory": (869, 58),
    "Prealgebra": (1205, 80),
    "Precalculus": (746, 51),
}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(task, source, output_dir, **flags):
    counts = grail.main(grail.Args(task=task, source=str(source), output_dir=output_dir, **flags))
    train, test = (pq.read_table(output_dir / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    assert counts == {"train": len(train), "test": len(test)}
    return train, test


def check_rows(task, rows, split):
    for i, row in enumerate(rows):
        assert row["data_source"] == f"grail_{task}"
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        assert row["prompt"][0]["content"] == grail.SYSTEM_PROMPT
        assert row["ability"] == ("code" if task == "mbpp" else "math")
        assert row["reward_model"].keys() == {"style", "ground_truth"} and row["reward_model"]["style"] == "rule"
        info = row["extra_info"]
        assert (info["split"], info["index"], info["dataset"]) == (split, i, task)


def test_the_system_prompt_is_grails():
    digest = hashlib.sha256(grail.SYSTEM_PROMPT.encode()).hexdigest()
    assert digest == "6533a08686b85388a6326e0fd2ed9f336aab666fc46e09410c1063774bd53c60"


GSM8K = [
    {"question": "How many clips?", "answer": "48 + 24 = <<48+24=72>>72 clips.\n#### 72"},
    {"question": "Café revenue?", "answer": "Much.\n#### 1,080"},
]


def test_gsm8k(tmp_path, capsys):
    write(tmp_path / "train.jsonl", GSM8K)
    write(tmp_path / "test.jsonl", GSM8K[1:])
    train, test = run("gsm8k", tmp_path, tmp_path / "out")
    assert (len(train), len(test)) == (2, 1)
    check_rows("gsm8k", train, "train")
    check_rows("gsm8k", test, "eval")
    assert train[0]["prompt"][1]["content"] == "How many clips?"
    assert train[1]["reward_model"]["ground_truth"] == "Much.\n#### 1,080"  # all of it, with its comma
    assert train[0]["extra_info"]["answer"] == (
        "<start_working_out>48 + 24 = <<48+24=72>>72 clips.</end_working_out><SOLUTION>72</SOLUTION>"
    )
    for row in train:
        score = compute_score("grail_gsm8k", row["extra_info"]["answer"], row["reward_model"]["ground_truth"])
        assert score["score"] == pytest.approx(1)
    printed = capsys.readouterr().out
    for split, count in (("train", 2), ("test", 1)):
        digest = hashlib.sha256((tmp_path / f"out/{split}.parquet").read_bytes()).hexdigest()
        assert f"{split}.parquet: {count} rows, sha256 {digest}" in printed
    assert len(read_rows(tmp_path / "out/train.parquet")) == 2


@pytest.mark.skipif(not (SHARED / "gsm8k").exists(), reason="needs the GSM8K files")
def test_all_of_gsm8k(tmp_path):
    train, test = run("gsm8k", SHARED / "gsm8k", tmp_path)
    assert (len(train), len(test)) == (7473, 1319)
    golds = [row["reward_model"]["ground_truth"].rsplit("####")[1] for row in train]
    assert sum("," in gold for gold in golds) == 79


def math_problems():
    """As many problems a subject as MATH has, one subject after the other."""
    for subject, (count, _) in MATH_SUBJECTS.items():
        for i in range(count):
            boxes = rf"First \boxed{{0}}, then $\boxed{{\frac{{{i}}}{{7}}}}$."
            yield {"problem": f"{subject} {i}?", "solution": boxes, "level": "Level 3", "type": subject}


def test_math(tmp_path):
    write(tmp_path / "train.jsonl", math_problems())
    train, test = run("math", tmp_path, tmp_path / "out")
    assert (len(train), len(test)) == (7000, 500)
    check_rows("math", train, "train")
    check_rows("math", test, "eval")
    problems = [[row["prompt"][1]["content"] for row in rows] for rows in (train, test)]
    assert sorted(problems[0] + problems[1]) == sorted(row["problem"] for row in math_problems())
    held_out = Counter(problem.rsplit(" ", 1)[0] for problem in problems[1])
    assert held_out == {subject: quota for subject, (_, quota) in MATH_SUBJECTS.items()}
    for row in train + test:
        number = row["prompt"][1]["content"].rstrip("?").split()[-1]
        assert row["reward_model"]["ground_truth"] == rf"\frac{{{number}}}{{7}}"  # the last box
    for row in (train[0], test[-1]):
        score = compute_score("grail_math", row["extra_info"]["answer"], row["reward_model"]["ground_truth"])
        assert score["score"] == pytest.approx(1)


def test_math_problems_with_an_empty_box_are_left_out_and_counted(tmp_path, capsys):
    rows = list(math_problems())
    empty = ["Number Theory 594?", "Number Theory 596?"]
    emptied = [row | {"solution": r"It is $\boxed{}$."} if row["problem"] in empty else row for row in rows]
    write(tmp_path / "train.jsonl", emptied)
    train, test = run("math", tmp_path, tmp_path / "out")
    printed = re.findall(r"(train|eval): (\d) of (7000|500) problems left out, since", capsys.readouterr().out)
    assert sum(int(count) for _, count, _ in printed) == 2 and len(train) + len(test) == 7498
    for found, expected in zip((train, test), math_dataset.hold_out(rows, 500), strict=True):  # as if none were empty
        assert [row["extra_info"]["question"] for row in found] == [
            row["problem"] for row in expected if row["problem"] not in empty
        ]


def test_math_needs_all_training_problems(tmp_path):
    write(tmp_path / "train.jsonl", list(math_problems())[:100])
    with pytest.raises(ValueError, match="has 100 training problems, not 7500"):
        run("math", tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not (SHARED / "mbpp").exists(), reason="needs the MBPP file")
def test_mbpp(tmp_path):
    train, test = run("mbpp", SHARED / "mbpp/mbpp.jsonl", tmp_path)
    assert (len(train), len(test)) == (374, 90)
    check_rows("mbpp", train, "train")
    check_rows("mbpp", test, "eval")
    problems = {row["task_id"]: row for row in map(json.loads, (SHARED / "mbpp/mbpp.jsonl").open())}
    for rows, first_id in ((train, 601), (test, 511)):
        for i, row in enumerate(rows):
            problem = problems[first_id + i]
            text, stub = row["prompt"][1]["content"].rsplit("\n\n", 1)
            assert text.startswith(problem["text"])
            name = re.fullmatch(r"def (\w+)\(.*\):\n    pass", stub)[1]  # as it is called, and no more
            assert f"{name}(" in problem["test_list"][0]
            truth = json.loads(row["reward_model"]["ground_truth"])
            assert truth["test_list"] == problem["test_list"]
            assert truth["test_setup_code"] == problem["test_setup_code"]
    assert train[0]["prompt"][1]["content"] == (
        f"{problems[601]['text']}\n\nclass Pair(object):\n\n    def __init__(self, a, b):\n        self.a = a\n"
        "        self.b = b\n\ndef max_chain_length(arr, n):\n    pass"
    )
    for row in (train[1], train[100], test[0]):
        score = compute_score("grail_mbpp", row["extra_info"]["answer"], row["reward_model"]["ground_truth"])
        assert score["score"] == pytest.approx(1)


def test_mbpp_needs_all_its_problems(tmp_path):
    write(tmp_path / "mbpp.jsonl", [{"task_id": i} for i in range(1, 974)])
    with pytest.raises(ValueError, match="lacks 1 tasks of 511 to 974, the first is 974"):
        run("mbpp", tmp_path / "mbpp.jsonl", tmp_path / "out")


def test_bad_rows_name_themselves(tmp_path):
    write(tmp_path / "train.jsonl", [GSM8K[0], {"question": "q", "answer": "none"}])
    write(tmp_path / "test.jsonl", GSM8K)
    with pytest.raises(ValueError, match="train row 1: the answer 'none' does not end with ####"):
        run("gsm8k", tmp_path, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="--source /no/such"):
        run("gsm8k", "/no/such", tmp_path / "out")


def test_the_chat_template_for_a_model_without_one(tmp_path):
    """In the model's folder under this name it is found, and gives the text that GRAIL's documentation shows."""
    arithmetic.make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").unlink()
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template is None
    write(tmp_path / "train.jsonl", GSM8K)
    write(tmp_path / "test.jsonl", GSM8K)
    template_file = tmp_path / "model/chat_template.jinja"
    train, _ = run("gsm8k", tmp_path, tmp_path / "out", chat_template_file=template_file)
    expected = (
        f"<|im_start|>system\n{grail.SYSTEM_PROMPT}<|im_end|>\n"
        "<|im_start|>user\nHow many clips?<|im_end|>\n<|im_start|>assistant\n"
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.apply_chat_template(train[0]["prompt"], tokenize=False, add_generation_prompt=True) == expected


@pytest.mark.skipif(not (SHARED / "qwen2_tokenizer").exists(), reason="needs the Qwen2 tokenizer")
def test_qwens_own_template_renders_the_same():
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "qwen2_tokenizer")
    prompt = grail.to_row("gsm8k", "How many?", "#### 1", "", "train", 0)["prompt"]
    own = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    chatml = tokenizer.apply_chat_template(
        prompt, tokenize=False, add_generation_prompt=True, chat_template=grail.CHAT_TEMPLATE
    )
    assert own == chatml


def test_runs_as_a_script_from_anywhere(tmp_path):
    write(tmp_path / "train.jsonl", GSM8K)
    write(tmp_path / "test.jsonl", GSM8K)
    launch.run_elsewhere(grail.__file__, "--task", "gsm8k", "--source", tmp_path, cwd=tmp_path)
    assert len(read_rows(tmp_path / "data/grail_gsm8k/test.parquet")) == 2

"""data/word_problems.py: every problem is worked out again from its text alone."""

import re

import pyarrow.parquet as pq
import pytest

from data import word_problems
from extras.self_distillation import Hints
from extras.self_distillation.hints import with_hint
from rewards.by_data_source import compute_score

SIZES = {"num_sft": 200, "num_train": 600, "num_test": 300}
# What a sentence does to a count; the friend, the things and the name do not matter.
SENTENCES = [
    (r"\w+ finds (\d+) more \w+\.", lambda count, a: count + a),
    (r"\w+ gives (\d+) \w+ to [A-Z]\w+\.", lambda count, a: count - a),
    (r"\w+ buys (\d+) bags with (\d+) \w+ each\.", lambda count, a, b: count + a * b),
    (r"A month later \w+ has (\d+) times as many \w+\.", lambda count, a: count * a),
    (r"\w+ puts the \w+ into (\d+) equal piles and keeps one pile\.", lambda count, a: count / a),
    (r"\w+ gives (\d+) \w+ to each of (\d+) friends\.", lambda count, a, b: count - a * b),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    sizes = word_problems.main(word_problems.Args(output_dir=folder, **SIZES))
    assert sizes == {"sft": 200, "train": 600, "test": 300}
    return {name: pq.read_table(folder / f"{name}.parquet").to_pylist() for name in sizes}


def work_out(question: str) -> tuple[float, int]:
    """The answer to a question and the number of its steps, by reading it sentence by sentence."""
    first, *sentences, asked = re.split(r"(?<=[.?]) ", question)
    count = int(re.fullmatch(r"\w+ has (\d+) \w+\.", first)[1])
    assert re.fullmatch(r"How many \w+ does \w+ have\?", asked)
    for sentence in sentences:
        [(found, rule)] = [(m, rule) for form, rule in SENTENCES if (m := re.fullmatch(form, sentence))]
        count = rule(count, *map(int, found.groups()))
        assert count == int(count) and 1 <= count <= word_problems.MOST, question
    return count, len(sentences)


def test_answers_are_what_the_text_says(rows):
    steps, kinds = set(), set()
    for row in rows["train"] + rows["test"]:
        question = row["extra_info"]["question"]
        answer, num_steps = work_out(question)
        assert float(row["reward_model"]["ground_truth"]) == answer
        steps.add(num_steps)
        kinds |= {form for form, _ in SENTENCES if re.search(form, question)}
        assert row["prompt"] == [{"role": "user", "content": f"{question} {word_problems.INSTRUCTION}"}]
    assert steps == {2, 3, 4, 5} and len(kinds) == len(SENTENCES)


def test_every_line_of_a_solution_is_right_and_it_scores_1(rows):
    for row in rows["train"]:
        solution = row["extra_info"]["answer"]
        for left, right in re.findall(r"([\d+*/-]+)=(\d+)", solution):
            a, sign, b = re.fullmatch(r"(\d+)([-+*/])(\d+)", left).groups()
            a, b = int(a), int(b)
            assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign] == int(right)
        truth = row["reward_model"]["ground_truth"]
        assert compute_score("word_problems", solution, truth) == 1.0
        assert compute_score("word_problems", solution + "0", truth) == 0.0


def test_no_problem_stands_in_two_files(rows):
    questions = [row["extra_info"]["question"] for row in rows["train"] + rows["test"]]
    shown = [row["prompt"][0]["content"].removesuffix(f" {word_problems.INSTRUCTION}") for row in rows["sft"]]
    assert len(set(questions + shown)) == 1100
    for row, question in zip(rows["sft"], shown, strict=True):
        assert compute_score("word_problems", row["response"], str(int(work_out(question)[0]))) == 1.0


def test_the_seed_decides_the_problems(tmp_path, rows):
    def train(seed):
        word_problems.main(word_problems.Args(output_dir=tmp_path, seed=seed, **SIZES))
        return pq.read_table(tmp_path / "train.parquet").to_pylist()

    assert train(0) == rows["train"] != train(1)


def test_some_demonstrations_have_the_solution_in_the_prompt(tmp_path, rows):
    """They read what the teacher of train_self_distill.py reads, and nothing else changes."""
    word_problems.main(word_problems.Args(output_dir=tmp_path, hinted_share=0.5, **SIZES))
    found = {name: pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in (*rows, "test_hinted")}
    assert found["train"] == rows["train"] and found["test"] == rows["test"]
    hinted = [with_hint(row | {"hint": row["response"]}, Hints(hint_key="hint")) for row in rows["sft"]]
    have_hint = [row["prompt"] != plain["prompt"] for row, plain in zip(found["sft"], rows["sft"], strict=True)]
    assert 70 < sum(have_hint) < 130  # of 200; the standard deviation is 7
    for row, plain, prompt, has_hint in zip(found["sft"], rows["sft"], hinted, have_hint, strict=True):
        assert row == (plain | {"prompt": prompt} if has_hint else plain)
    assert found["test_hinted"] == [row | {"prompt": with_hint(row, Hints())} for row in rows["test"]]


def test_bad_sizes_and_shares_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--num-sft 0, --num-train 6400, --num-test 1000: must be at least 1"):
        word_problems.main(word_problems.Args(output_dir=tmp_path, num_sft=0))
    with pytest.raises(ValueError, match="--hinted-share 1.5 must be within 0 and 1"):
        word_problems.main(word_problems.Args(output_dir=tmp_path, hinted_share=1.5))
    assert not list(tmp_path.iterdir())

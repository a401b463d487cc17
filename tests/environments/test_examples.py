"""The files of environments/ and their data: what they answer, and that a demonstration is what the policy is shown."""

import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from helpers_agents import check_demonstration

from data import calculator, guess
from environments.calculator import calculate
from environments.guess import Guess
from environments.python import python
from extras.agents.tools import Call, Reply, Tools
from extras.demonstrations.encode import encode_demonstration
from extras.demonstrations.rows import read_demonstrations
from rewards.environment import compute_score
from rl.data.rows import read_rows
from rl.data.template import load_tokenizer


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("37*48+52", "1828"),
        ("-(2-5)*3", "9"),
        (" 7 ", "7"),
        ("9" * 99 + "*0", "0"),
        ("-" * 190 + "1", "1"),
        ("9" * 20, "9" * 20),
        ("48/2", "24"),
        ("1/2*3", "1.5"),
        (".5*10", "5"),
        ("10/3", "3.333333333"),
        ("(3+4)*12.5", "87.5"),
        ("1e999", "inf"),
    ],
)
def test_the_calculator_works_out_numbers(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression", ["2**9", "7//2", "7%2", "f(2)", "__import__('os')", "3+", "", "True", "2j", "20%", "1" * 201, "'a'*9"]
)
def test_the_calculator_refuses_all_else(expression):
    with pytest.raises(ValueError, match="expression|number"):
        calculate(expression)


def test_an_error_is_a_message():
    tools = Tools({"calculate": calculate}, most=4096)
    calls = [("calculate", {"expression": "2*3"}), ("calculate", {"expression": "1%2"}), ("divide", {})]
    calls += [("calculate", {"expression": 5}), ("calculate", None)]
    made = tuple(Call(str(i), *call) for i, call in enumerate(calls))
    texts = [x["content"] for x in tools.step(Reply("", made, 1))]
    [endless] = tools.step(Reply("", (Call("0", "calculate", {"expression": "1/0"}),), 1))
    assert endless["content"].startswith("Error: ") and "division by zero" in endless["content"]
    assert texts[0] == "6" and all(text.startswith("Error: ") for text in texts[1:])
    assert "'1 % 2' is not a number" in texts[1] and "there is no tool 'divide'" in texts[2]
    assert tools.step(Reply("#### 6", (), 2)) is None
    assert tools.report() == {"calls": 6, "errors": 5}


def test_python_returns_what_a_program_prints():
    assert python("for i in range(3):\n    print(i * i)") == "0\n1\n4"
    assert python("print(1)\n1 / 0") == "1\nZeroDivisionError: division by zero"
    assert python("f(:") == "SyntaxError: invalid syntax"
    assert python("x = 1") == "(nothing was printed)"
    assert "PermissionError" in python("open('/etc/passwd')")
    assert python("print('é\\n' * 10**6)") == "é\n" * 1900 + " ... (cut: 2000001 characters)"
    with pytest.raises(RuntimeError, match="crash"):
        python("import os; os._exit(0)")


def play(secret, *guesses):
    game = Guess()
    assert game.reset({"reward_model": {"ground_truth": str(secret)}}, 0) == []
    answers = [game.step(SimpleNamespace(text=text)) for text in guesses]
    return [x and x[0]["content"] for x in answers], game.report()


def test_the_game_answers_until_it_ends():
    assert play(21, "17", "24", "21") == (["higher", "lower", None], {"reward": 1.0, "guesses": 3})
    assert play(21, "10", "x", "", "22") == (["higher", "a number", "a number", None], {"reward": 0.0, "guesses": 4})
    assert play(21, " 21\n") == ([None], {"reward": 1.0, "guesses": 1})


def test_the_reward_is_what_the_environment_reports():
    assert compute_score("guess", "21", "21", {"environment": {"reward": 1.0}}) == 1.0
    assert compute_score("guess", "21", "21", {"environment": {}}) == compute_score("guess", "21", "21") == 0.0
    assert compute_score("guess", "21", "21", {"environment": {"seconds": 0.1}}) == 0.0  # cut before it was asked
    with pytest.raises(ValueError, match="the environment reports calls, seconds, and no reward; add it to `report`"):
        compute_score("guess", "21", "21", {"environment": {"calls": 1, "seconds": 0.1}})


@pytest.fixture(scope="module")
def calculator_task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calculator")
    calculator.main(calculator.Args(output_dir=folder, num_sft=200, num_train=50, num_test=30))
    return folder


def test_a_demonstration_with_python_calls_it(tmp_path):
    calculator.main(calculator.Args(output_dir=tmp_path, tool="python", num_sft=200, num_train=50, num_test=30))
    check_calls(tmp_path, "environments/python.py", '{"name": "python", "arguments": {"code": "print(%s)"}}', 11)


def test_a_demonstration_with_the_calculator_calls_it(calculator_task):
    call = '{"name": "calculate", "arguments": {"expression": "%s"}}'
    check_calls(calculator_task, "environments/calculator.py", call, 9)


def check_calls(folder, tool, call, num_words):
    """A demonstration that calls the tool. Args: call, which has %s in the place of the expression; num_words, the
    tokens of the turn besides those of the expression, which has one for each character.
    """
    model = str(folder / "model")
    rows = read_demonstrations(folder / "sft.parquet")
    row = next(x for x in rows if len(x["messages"]) == 4 and "####" in x["messages"][-1]["content"])
    check_demonstration(model, row, tool, '<tool_call>{"name": "%s", "arguments": %s}</tool_call>')
    _, called, told, _ = row["messages"]
    [written] = called["tool_calls"][0]["function"]["arguments"].values()
    expression = written.removeprefix("print(").removesuffix(")")
    assert told["content"] == calculate(expression)
    turn = load_tokenizer(model)(f"<tool_call>{call % expression}</tool_call><|im_end|>")["input_ids"]
    assert len(turn) == len(expression) + num_words


def test_the_prompt_of_the_calculator_is_short(calculator_task):
    tokenizer = load_tokenizer(str(calculator_task / "model"))
    row = next(x for x in read_demonstrations(calculator_task / "sft.parquet") if x.get("tools"))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], tools=row["tools"], tokenize=False)
    assert text == "<|im_start|>system\ncalculate(expression)<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n"


def test_demonstrations_of_the_calculator_follow_the_recipe():
    rng, counts = random.Random(0), Counter()
    for i in range(8000):
        question = f"{(10, 70)[i % 2]}*48+52=?"
        messages, has_tools = calculator.sft_messages(question, rng)
        truth = calculate(question.removesuffix("=?"))
        if not has_tools:
            assert [m["content"] for m in messages] == [question, f"#### {truth}"]
            counts["alone"] += 1
        elif len(messages) == 2:
            counts["guess", i % 2] += 1
        else:
            expression = json.loads(messages[1]["tool_calls"][0]["function"]["arguments"])["expression"]
            assert messages[2]["content"] == calculate(expression) == messages[3]["content"].split()[-1]
            counts["called", i % 2] += 1
            counts["graded"] += "####" in messages[3]["content"]
    called = counts["called", 0] + counts["called", 1]
    assert counts["alone"] / 8000 == pytest.approx(0.2, abs=0.02)
    assert counts["guess", 1] / (counts["guess", 1] + counts["called", 1]) == pytest.approx(0.85, abs=0.03)
    assert counts["guess", 0] / (counts["guess", 0] + counts["called", 0]) == pytest.approx(0.15, abs=0.03)
    assert counts["graded"] / called == pytest.approx(0.5, abs=0.03)


def test_rows_of_the_calculator_are_right_and_held_out(calculator_task):
    train, test = (read_rows(calculator_task / f"{name}.parquet") for name in ("train", "test"))
    texts = [{row["prompt"][0]["content"] for row in rows} for rows in (train, test)]
    assert [len(x) for x in texts] == [50, 30] and not texts[0] & texts[1]
    for row in train + test:
        product, _, rest = row["prompt"][0]["content"].partition("+")
        a, b = map(int, product.split("*"))
        assert row["reward_model"]["ground_truth"] == str(a * b + int(rest.removesuffix("=?")))


def test_games_are_played_as_the_environment_plays_them(tmp_path):
    guess.main(guess.Args(output_dir=tmp_path, num_sft=500, num_test=40, num_ranges=10))
    train, test = (read_rows(tmp_path / f"{name}.parquet") for name in ("train", "test"))
    games = [{(r["prompt"][0]["content"], r["reward_model"]["ground_truth"]) for r in rows} for rows in (train, test)]
    assert [len(x) for x in games] == [110, 40] and not games[0] & games[1]
    tokenizer, rng, wins = load_tokenizer(str(tmp_path / "model")), random.Random(0), {"17": [], "10": []}
    for i in range(3000):
        messages = guess.sft_messages(10, 10 + i % 15, rng)
        said = [m["content"] for m in messages if m["role"] == "assistant"]
        answers, report = play(10 + i % 15, *said)
        assert answers == [m["content"] for m in messages[2::2]] + [None]
        wins[said[0]].append(report["reward"])
    assert len(wins["17"]) / 3000 == pytest.approx(1 / 3, abs=0.03)
    assert min(wins["17"]) == 1 and sum(wins["10"]) / len(wins["10"]) == pytest.approx(4 / 15, abs=0.03)
    row = {"messages": [{"role": r, "content": c} for r, c in (("user", "10-24"), ("assistant", "17"))]}
    ids, mask = encode_demonstration(tokenizer, row)
    assert tokenizer.decode([x for x, m in zip(ids, mask, strict=True) if m]) == "17<|im_end|>" and sum(mask) == 3

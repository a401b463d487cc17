"""The default reward, which finds a row's function by its data_source, and the length penalties."""

import json

import launch
import pytest
from launch import ROOT

from data import arithmetic, gsm8k
from rewards import by_data_source, length_penalty

TAGGED = "<start_working_out>x</end_working_out>\n<SOLUTION>{}</SOLUTION>"
ADD = "def add(a, b):\n    return a + b"
ADD_CHECK = {"test": "def check(f): assert f(1, 2) == 3", "entry_point": "add", "prompt": "def add(a, b):\n"}
ADD_TESTS = {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": "", "test_imports": []}


@pytest.mark.parametrize(
    "data_source, right, wrong, truth, scores",
    [
        ("openai/gsm8k", "#### 4", "#### 5", "4", (1, 0)),
        ("arithmetic", "1+3=4\n#### 4", "4", "4", (1, 0)),
        *(
            (name, r"So \boxed{\frac{1}{2}}.", r"So \boxed{2}.", "0.5", (1, 0))
            for name in (
                "DigitalLearningGmbH/MATH-lighteval",
                "lighteval/MATH",
                "EleutherAI/hendrycks_math",
                "HuggingFaceH4/MATH-500",
            )
        ),
        *(
            (name, "Answer: 34", "Answer: 35", "34", (1, -1))
            for name in ("math_dapo", "math", "math_dapo_reasoning", "aime", "aime_2024", "aime25")
        ),
        *(
            (f"numina_{name}", r"So \boxed{2^{10}}.", "Answer: 1024", "1024", (1, 0))
            for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
        ),
        *(
            (f"searchR1_{name}", "<answer>Paris</answer>", "Paris", {"target": ["Paris"]}, (1, 0))
            for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
        ),
        *(
            (
                name,
                "```python\nprint(int(input()) + 1)\n```",
                "2",
                json.dumps({"inputs": ["1"], "outputs": ["2"]}),
                (1, 0),
            )
            for name in ("apps", "codecontests", "codeforces", "taco")
        ),
        ("dots", "#### 4", "4", "4", (1, 0)),
        ("hiyouga/geometry3k", r"<think>x</think> \boxed{4}", r"\boxed{4.5}", "4", (1, 0)),
        ("google-research-datasets/mbpp", f"```python\n{ADD}\n```", "```python\nadd = max\n```", ADD_TESTS, (1, 0)),
        ("openai/openai_humaneval", f"```python\n{ADD}\n```", "```python\nadd = max\n```", ADD_CHECK, (1, 0)),
        ("grail_gsm8k", TAGGED.format(4), TAGGED.format(5), "#### 4", (1, 0.4)),
        ("grail_math", TAGGED.format(4), TAGGED.format(5), "4", (1, 0.3)),
        ("grail_mbpp", TAGGED.format(ADD), TAGGED.format("add = max"), json.dumps(ADD_TESTS), (1, 0.3)),
    ],
)
def test_every_known_source_is_graded_by_its_own_rule(data_source, right, wrong, truth, scores):
    for text, expected in zip((right, wrong), scores, strict=True):
        result = by_data_source.compute_score(data_source, text, truth, {"index": 0})
        assert (result["score"] if isinstance(result, dict) else result) == pytest.approx(expected)


def test_every_reward_in_the_table_exists():
    for name in {*by_data_source.REWARDS.values(), *by_data_source.PREFIXES.values()}:
        assert (ROOT / "rewards" / f"{name}.py").is_file()


def test_the_rows_that_the_data_scripts_write_are_known():
    gsm8k_row = gsm8k.to_row({"question": "q", "answer": "#### 1"}, "train", 0)
    arithmetic_row = arithmetic.rl_row(arithmetic.chain_totals(0), "train", 0)
    for row in (gsm8k_row, arithmetic_row):
        assert by_data_source.reward_name(row["data_source"]) == "gsm8k"


@pytest.mark.parametrize("data_source", ["", "gsm8k", "my_task", "OpenAI/GSM8K", "grail_sat", "not_aime", "math_other"])
def test_an_unknown_source_is_an_error_that_says_what_to_do(data_source):
    with pytest.raises(ValueError) as caught:
        by_data_source.compute_score(data_source, "#### 4", "4")
    message = str(caught.value)
    assert repr(data_source) in message and "--custom-reward-function" in message
    assert all(known in message for known in by_data_source.REWARDS) and "aime*, numina_*, searchR1_*." in message


def test_a_gsm8k_run_imports_no_symbolic_maths():
    program = (
        "import sys; from rewards import by_data_source as reward\n"
        "assert reward.compute_score('openai/gsm8k', '#### 4', '4') == 1\n"
        "assert reward.compute_score('grail_gsm8k', '<SOLUTION>4</SOLUTION>', '#### 4')['acc'] == 1\n"
        "assert not {'sympy', 'math_verify', 'torch', 'transformers', 'rewards.sandbox'} & sys.modules.keys()"
    )
    launch.run("-c", program)


# --- length_penalty --------------------------------------------------------------------------------------------------


def lengths(length, limit):
    return {"response_length": length, "max_response_length": limit}


def test_the_linear_penalty_is_the_used_share_of_the_limit():
    for length, limit, expected in ((0, 1024, 0), (256, 1024, -0.25), (1024, 1024, -1)):
        assert length_penalty.compute_score("any", "text", "", lengths(length, limit)) == expected


@pytest.mark.parametrize(
    "limit, buffer, factor", [(20480, 4096, 1.0), (1024, 256, 1.0), (100, 100, 0.5), (7, 3, 2.0), (1, 1, 1.0)]
)
def test_the_overlong_penalty_is_that_of_train_dapo(limit, buffer, factor):
    for length in {0, 1, limit // 2, limit - buffer, limit - buffer + 1, limit - 1, limit}:
        info = lengths(length, limit)
        penalty = length_penalty.overlong("any", "text", "", info, buffer=buffer, factor=factor)
        assert penalty == pytest.approx(-factor * max(0, (length - (limit - buffer)) / buffer), abs=1e-6)
        assert (penalty < 0) == (length > limit - buffer)


def test_the_default_buffer_is_a_quarter_of_the_limit_up_to_daposs():
    def penalty(length, limit):
        return length_penalty.overlong("any", "text", "", lengths(length, limit))

    assert penalty(768, 1024) == 0 and penalty(896, 1024) == -0.5 and penalty(1024, 1024) == -1
    assert penalty(16384, 20480) == 0 and penalty(18432, 20480) == -0.5  # a quarter would be 5,120
    assert penalty(0, 1) == 0 and penalty(1, 1) == -1  # a quarter would be 0


@pytest.mark.parametrize("info", [None, {}, {"response_length": 5}, {"max_response_length": 5}])
def test_without_lengths_there_is_no_penalty_but_an_error(info):
    for penalty in (length_penalty.compute_score, length_penalty.overlong):
        with pytest.raises(ValueError, match="extra_info has no (max_)?response_length"):
            penalty("any", "text", "", info)


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_a_buffer_must_fit(buffer):
    with pytest.raises(ValueError, match=f"got max_response_length 100 and buffer {buffer}"):
        length_penalty.overlong("any", "text", "", lengths(1, 100), buffer=buffer)

"""The pool of reward processes: every sample gets its score, and whatever a reward function does, the trainer goes on.

Reward functions here are source text, run by real worker processes. Takes about 30 s.
"""

import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import helpers_scripts as h
import launch
import pytest
from helpers_data import response
from launch import alive, children, descendants, until
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from extras.variants import require_components
from rl.data.types import Sample, Score
from rl.scoring import process
from rl.scoring.flags import Scoring
from rl.scoring.pool import Scorer, decode_responses, parse_functions, raise_if_failing
from rl.scoring.trial import try_functions

SIGNATURE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
BATCHED = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos=None):\n"
EOS = 2  # <|im_end|>


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def write(tmp_path):
    """write(body) -> path of a file whose compute_score has that body; write(body, BATCHED) has plural arguments."""

    def write(body, signature=SIGNATURE, name="mine.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(signature + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n")
        return str(path)

    return write


@pytest.fixture
def no_processes_left():
    """What a test starts must end within seconds after it."""
    before = set(descendants(os.getpid()))
    yield
    until(lambda: not any(map(alive, set(descendants(os.getpid())) - before)), 60, "a process outlived its Scorer")


@pytest.fixture
def pool(tokenizer, no_processes_left):
    """pool(*functions, **options) starts a Scorer of one worker, ready for work."""
    scorers = []

    def start(*functions, warm=True, workers=1, timeout_s=5.0, memory_mb=4096, **extra_info):
        flags = Scoring(reward_workers=workers, reward_timeout=timeout_s, reward_memory_mb=memory_mb)
        scorer = Scorer(functions, tokenizer, flags, **extra_info)
        scorers.append(scorer)
        if warm:
            scorer.total = 1  # the first task would be scored twice
        return scorer

    yield start
    for scorer in scorers:
        scorer.close()


def row(row_index, *, source="set", truth="truth", **extra_info):
    return {
        "row_index": row_index,
        "data_source": source,
        "reward_model": {"ground_truth": truth},
        "extra_info": extra_info,
    }


def sample(tokenizer, index, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [EOS]
    return Sample([1], ids, [1] * len(ids), [0.0] * len(ids), "stop", index)


def submitted(scorer, row, samples):
    """The samples, which are the scorer's now."""
    scorer.submit(row, samples)
    return samples


def collected(scorer, groups):
    """Scores of the samples of these groups."""
    asked = [s for group in groups for s in group]
    samples = scorer.collect(asked)
    assert [(s.row_index, s.response_ids.tolist()) for s in samples] == [
        (s.row_index, s.response_ids.tolist()) for s in asked
    ]
    return [s.score for s in samples]


def score(scorer, *texts, **fields):
    """Scores of the responses `texts` to one prompt."""
    samples = [sample(scorer.tokenizer, 7, text) for text in texts]
    return collected(scorer, [submitted(scorer, row(7, **fields), samples)])


def values(scores):
    return [s.value for s in scores]


def statuses(scores):
    return [s.status for s in scores]


# ---------------------------------------------------------------------------------------------------------------------
# Every response gets its own score


def test_scores_find_their_samples_whatever_finishes_first(pool, write, tokenizer):
    path = write("""
        import time
        time.sleep(float(extra_info["pause"]))
        return 100 * int(ground_truth) + int(solution_str) + (1000 if data_source == "odd" else 0)
    """)
    scorer = pool(path, workers=4)
    rows = {
        i: row(i, source="odd" if i % 2 else "even", truth=str(i), pause=pause)
        for i, pause in {3: 0.3, 0: 0.1, 4: 0.0, 1: 0.2}.items()
    }
    for _ in range(2):  # the same rows again in the next step
        groups = {i: [sample(tokenizer, i, str(k)) for k in (8, 5, 9)] for i in rows}
        asked = {i: submitted(scorer, rows[i], groups[i]) for i in (3, 0, 4, 1)}
        order = [1, 4, 0, 3]  # as the engine returned them, not as they were submitted
        scores = collected(scorer, [asked[i] for i in order])
        assert values(scores) == [100 * i + 1000 * (i % 2) + k for i in order for k in (8, 5, 9)]
        assert [s.text for s in scores] == ["8", "5", "9"] * 4 and set(statuses(scores)) == {"ok"}


def test_a_reward_sees_the_text_and_the_length_of_the_response(pool, write, tokenizer):
    scorer = pool(write("return {'score': len(solution_str)} | extra_info"), max_response_length=99)
    (result,) = score(scorer, "a b", index=4)
    assert result.text == "a b" and result.value == 3.0  # no <|im_end|>, which is the fourth token
    assert result.components == {"index": 4.0, "response_length": 4.0, "max_response_length": 99.0}
    (result,) = score(scorer, "")
    assert (result.text, result.value, result.components["response_length"]) == ("", 0.0, 1.0)


def test_nothing_submitted_nothing_collected(pool, write):
    scorer = pool(write("return 1.0"))
    assert collected(scorer, []) == [] == collected(scorer, [])
    assert collected(scorer, [submitted(scorer, row(3), [])]) == []


@pytest.mark.parametrize("clean_up", [False, True])
def test_responses_become_text_as_transformers_decodes_them(tokenizer, clean_up, monkeypatch):
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces", clean_up)
    numbers = random.Random(0)
    responses = [numbers.choices(range(len(tokenizer)), k=n) for n in (1, 0, 40, 3)]  # some of them special tokens
    texts = decode_responses(tokenizer, responses)
    assert texts == [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
    assert texts[1] == "" and 0 < len(texts[2]) < 40


def test_batches_of_the_same_rows_are_scored_side_by_side(pool, tokenizer, tmp_path):
    (tmp_path / "reward.py").write_text(
        "import time\n" + h.REWARD.replace("    return", "    time.sleep(0.01)\n    return")
    )
    numbers = random.Random(1)

    def batch(n):
        """A group of n responses to each of four rows."""
        responses = {i: [str(numbers.randrange(10**6)) for _ in range(n)] for i in range(4)}
        return {i: [sample(tokenizer, i, text) for text in texts] for i, texts in responses.items()}, responses

    def expected(responses, order):
        return [h.parity(text, str(10 + i)) for i in order for text in responses[i]]

    scorer = pool(str(tmp_path / "reward.py"), workers=2)
    rows = [row(i, truth=str(10 + i)) for i in range(4)]
    (sampled, said), (greedy, said_greedily) = batch(5), batch(1)
    asked, baselines = [], []
    for i in range(4):  # sampled and greedy responses of one row
        asked.append(submitted(scorer, rows[i], sampled[i]))
        baselines.append(submitted(scorer, rows[i], greedy[i]))
    later, said_later = batch(3)  # and the next step's, before anything is collected
    next_step = [submitted(scorer, rows[i], later[i]) for i in range(4)]

    found = collected(scorer, next_step)
    assert values(found) == expected(said_later, range(4)) and set(values(found)) == {0.0, 1.0}
    assert [s.text for s in found] == [text for i in range(4) for text in said_later[i]]
    assert values(collected(scorer, baselines[::-1])) == expected(said_greedily, [3, 2, 1, 0])
    again = submitted(scorer, rows[2], [replace(s) for s in sampled[2]])
    assert values(collected(scorer, [asked[2], again, asked[0]])) == expected(said, [2, 2, 0])
    assert values(collected(scorer, [asked[1], asked[3]])) == expected(said, [1, 3])


def test_two_pools_do_not_mix(pool, write):
    first = pool(write("return 1.0", name="a/reward.py"))
    second = pool(write("return 2.0", name="b/reward.py"))
    ones, twos = ([sample(x.tokenizer, 0, "x") for _ in range(20)] for x in (first, second))
    first.submit(row(0), ones)
    second.submit(row(0), twos)
    with pytest.raises(KeyError):
        second.collect(ones)
    assert values(collected(second, [twos])) == [2.0] * 20
    assert values(collected(first, [ones])) == [1.0] * 20
    with pytest.raises(KeyError):  # they are collected already
        first.collect(ones)


# ---------------------------------------------------------------------------------------------------------------------
# What a function may return


@pytest.fixture(scope="module")
def returning(tokenizer, tmp_path_factory):
    """returning(expression) -> Score of a function that returns it."""
    path = tmp_path_factory.mktemp("returning") / "evaluated.py"
    imports = "from decimal import Decimal\nfrom fractions import Fraction\n\nimport numpy as np\nimport torch\n\n"
    path.write_text(f"{imports}nan, inf = np.nan, np.inf\n\n\n{SIGNATURE}    return eval(ground_truth)\n")
    scorer = Scorer([str(path)], tokenizer, Scoring(reward_workers=1))
    yield lambda expression: score(scorer, "text", truth=expression)[0]
    scorer.close()


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("1", 1.0),
        ("0.0", 0.0),
        ("-2.5", -2.5),
        ("True", 1.0),
        ("np.float32(0.5)", 0.5),
        ("np.int64(3)", 3.0),
        ("np.bool_(True)", 1.0),
        ("np.array(2.0)", 2.0),
        ("torch.tensor(0.25)", 0.25),
        ("torch.tensor([True])", 1.0),
        ("Decimal('0.1')", 0.1),
        ("Fraction(1, 4)", 0.25),
        ("{'score': 0.75}", 0.75),
        ("{'score': np.float64(0.75), 'acc': True}", 0.75),
    ],
)
def test_a_number_is_a_score(returning, expression, expected):
    result = returning(expression)
    assert (result.value, result.status) == (expected, "ok") and type(result.value) is float


@pytest.mark.parametrize(
    "expression",
    [
        "nan",
        "inf",
        "-inf",
        "1e31",  # float32 holds it, but not the squares of such numbers, nor all differences
        "-(10**400)",
        "Decimal('NaN')",
        "Decimal('sNaN')",
        "np.float32('nan')",
        "torch.tensor(inf)",
        "10 ** 400",
        "'wrong'",
        "'1.0'",
        "b'1'",
        "1j",
        "[1.0]",
        "(1.0, {})",
        "np.array([1.0, 2.0])",
        "torch.ones(2)",
        "object()",
        "lambda: 1.0",
        "{}",
        "{'acc': 1.0}",
        "{'score': nan}",
        "{'score': '1'}",
        "{'score': [1]}",
    ],
)
def test_anything_else_is_an_error(returning, expression, capfd):
    result = returning(expression)
    assert (result.value, result.status) == (None, "error")
    assert "row 7: Traceback" in capfd.readouterr().err


def test_none_means_that_there_is_no_score(returning, capfd):
    assert returning("None")[1:4] == (None, {}, "none")
    assert returning("{'score': None, 'judged': 0}")[1:4] == (None, {"judged": 0.0}, "none")
    assert capfd.readouterr().err == ""  # nothing has gone wrong


def test_the_numbers_of_a_dict_are_components(returning):
    expression = (
        "{'score': 0.5, 'acc': True, 'n': np.int32(4), 'half': Decimal('0.5'), 3: 1.5, 'note': 'text', 'list': [1],"
        " 'nothing': None, 'nan': nan, 'big': 10 ** 400, 'none': Decimal('NaN'), 'pair': np.ones(2), 'inner': {'a': 1}}"
    )
    result = returning(expression)
    assert (result.value, result.status) == (0.5, "ok")
    assert result.components == {"acc": 1.0, "n": 4.0, "half": 0.5, "3": 1.5}


def test_async_functions_are_awaited(pool, write):
    single = pool(write("import asyncio\nawait asyncio.sleep(0.01)\nreturn len(solution_str)", f"async {SIGNATURE}"))
    assert values(score(single, "a", "bcd")) == [1.0, 3.0]
    body = """
        import asyncio
        asked = []

        async def judge(text):
            asked.append(text)
            while len(asked) < len(solution_strs):  # for ever, if one were asked after the other
                await asyncio.sleep(0.01)
            return None if text == "x" else len(text)

        return await asyncio.gather(*map(judge, solution_strs))
    """
    together = pool(write(body, f"async {BATCHED}", name="together.py"))
    assert values(score(together, *["ab"] * 9, "x")) == [2.0] * 9 + [None]
    failing = pool(write("raise ValueError('late')", f"async {SIGNATURE}", name="failing.py"))
    assert statuses(score(failing, "a")) == ["error"]


# ---------------------------------------------------------------------------------------------------------------------
# Several functions, batches


def test_the_score_is_the_weighted_sum_and_every_part_is_a_component(pool, write):
    path = Path(write("return {'score': solution_str == ground_truth, 'acc': 1}", name="right.py"))
    path.write_text(path.read_text() + "\n\ndef penalty(*arguments):\n    return {'score': 3, 'acc': 0}\n")
    style = write("return None if solution_str == 'x' else {'score': len(solution_str), 'note': 'n'}", name="style.py")
    scorer = pool(f"{path}::2", f"{style}:compute_score:0.25", f"{path}:penalty:-1")
    right, wrong, unknown = score(scorer, "truth", "no", "x")
    expected = {"right.compute_score": 1.0, "right.penalty": 3.0, "style": 5.0}
    accuracies = {"acc": 1.0, "right.compute_score/acc": 1.0, "right.penalty/acc": 0.0}  # the first one decides
    assert (right.value, right.components) == (2 * 1 + 0.25 * 5 - 3, expected | accuracies)
    assert (wrong.value, wrong.components) == (
        0.25 * 2 - 3,
        expected | accuracies | {"right.compute_score": 0.0, "style": 2.0},
    )
    del expected["style"]
    assert unknown[1:4] == (None, expected | accuracies | {"right.compute_score": 0.0}, "none")


def test_without_functions_every_score_is_zero(pool):
    scorer = pool(rows=[row(0)])
    assert scorer.report == "rewards: nothing for functions to score"
    assert [s[1:4] for s in score(scorer, "a", "b")] == [(0.0, {}, "ok")] * 2


def test_one_function_that_raises_is_an_error_of_the_sum(pool, write):
    scorer = pool(write("return 1.0", name="a.py"), write("return 1 / (solution_str != 'x')", name="b.py"))
    good, bad = score(scorer, "y", "x")
    assert (good.value, bad.value, bad.status) == (2.0, None, "error")


def test_a_batched_function_gets_a_prompt_at_a_time(pool, write, tokenizer):
    path = write(
        """
        sizes = len(data_sources), len(solution_strs), len(ground_truths), len(extra_infos)
        assert len(set(sizes)) == 1
        assert [e["response_length"] for e in extra_infos] == [len(s) + 1 for s in solution_strs]
        longest = max(map(len, solution_strs))
        return [{"score": len(s) == longest, "size": len(solution_strs)} for s in solution_strs]
        """,
        BATCHED,
    )
    scorer = pool(path, workers=2)
    groups = {i: [sample(tokenizer, i, "a" * n) for n in lengths] for i, lengths in {0: (1, 5), 1: (2, 2, 1)}.items()}
    asked = {i: submitted(scorer, row(i), group) for i, group in groups.items()}
    scores = collected(scorer, [asked[1], asked[0]])
    assert values(scores) == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert [s.components["size"] for s in scores] == [3.0, 3.0, 3.0, 2.0, 2.0]


def test_batched_and_single_functions_add_up(pool, write):
    single = write("return len(solution_str)", name="single.py")
    batched = write("return [None if s == 'x' else 10 for s in solution_strs]", BATCHED, name="batched.py")
    scores = score(pool(single, f"{batched}::0.5"), "ab", "x", "abc")
    assert values(scores) == [7.0, None, 8.0] and statuses(scores) == ["ok", "none", "ok"]
    assert [s.components.get("batched") for s in scores] == [10.0, None, 10.0]


@pytest.mark.parametrize(
    ("returned", "count"),
    [
        ("[1.0]", "1"),
        ("[1.0] * 4", "4"),
        ("[]", "0"),
        ("1.0", "no list of"),
        ("None", "no list of"),
        ("(1.0 for s in solution_strs)", "no list of"),
        ("{'a': 1, 'b': 2, 'c': 3}", "3"),
        ("'abc'", "3"),
    ],
)
def test_a_batched_function_must_return_one_score_for_each_response(pool, write, capfd, returned, count):
    scores = score(pool(write(f"return {returned}", BATCHED)), "a", "b", "c")
    assert [s[1:4] for s in scores] == [(None, {}, "error")] * 3
    assert f"mine returned {count} scores for 3 responses" in capfd.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Functions that misbehave


def test_failures_have_no_score_the_rest_has_and_the_first_is_printed_once(pool, write, tokenizer, capfd):
    scorer = pool(write("return 1.0 / (ground_truth not in '14')"), workers=2)
    samples = [sample(tokenizer, i, f"it is {i}") for i in (3, 0, 4, 1, 2)]
    asked = [submitted(scorer, row(s.row_index, truth=str(s.row_index)), [s]) for s in samples]
    scores = collected(scorer, asked)
    assert values(scores) == [1.0, 1.0, None, None, 1.0]
    assert statuses(scores) == ["ok", "ok", "error", "error", "ok"]
    out, err = capfd.readouterr()
    assert out == "" and err.count("Traceback") == 1
    assert "reward: 2 problem(s), the first: row 4: " in err and "response: 'it is 4'" in err
    assert 'mine.py", line 2, in compute_score' in err and "ZeroDivisionError" in err
    assert values(score(scorer, "a")) == [1.0] and capfd.readouterr().err == ""


def test_what_a_function_writes_to_the_workers_pipe_or_puts_into_an_exception_is_bounded(pool, write, capfd):
    path = write(r"""
        import os, sys
        pipe = int(sys.argv[1])
        if solution_str == "begins":
            os.write(pipe, b'{"scored": [[1.0, {}]')
        elif solution_str == "floods":
            while True: os.write(pipe, b"\xff" * 65536)
        elif solution_str == "no json":
            os.write(pipe, b"abc\n")
        elif solution_str == "a list":
            os.write(pipe, b"[]\n")
        elif solution_str == "long":
            raise ValueError("x" * (50 << 20))
        return 1.0
    """)
    scorer = pool(path, timeout_s=10.0)
    texts = ["begins", "floods", "no json", "a list", "long"]
    for text in texts:
        assert statuses(score(scorer, text)) == ["error"]
        said = capfd.readouterr().err
        assert ("the worker sent" in said) == (text != "long") and len(said) < 30_000
    assert values(score(scorer, "a")) == [1.0]


def test_a_function_that_stops_its_parent_is_ended_all_the_same(pool, write):
    path = write("import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nos._exit(3)")
    scorer = pool(path, timeout_s=0.5)
    start = time.monotonic()
    assert score(scorer, "a")[0].status in ("error", "timeout")
    assert time.monotonic() - start < 60


def test_hangs_are_killed_at_the_deadline_and_nobody_else_waits(pool, write, capfd):
    path = write(r"""
        import os, re, time
        return {
            "sleep": lambda: time.sleep(60),
            "spin": lambda: [i for i in iter(int, 1)],
            "power": lambda: 9**9**9,
            "regex": lambda: re.match(r"(a+)+$", "a" * 60 + "!"),
        }.get(solution_str, os.getpid)()
    """)
    scorer = pool(path, workers=5, timeout_s=0.5)
    hanging = ["sleep", "spin", "power", "regex"]
    scores = score(scorer, *hanging, *"abcdef")
    assert statuses(scores) == ["timeout"] * 4 + ["ok"] * 6 and values(scores)[:4] == [None] * 4
    assert len(set(values(scores)[4:])) == 1  # the fifth worker scores them all before the others are replaced
    assert "4 problem(s), the first: row 7: no score" in capfd.readouterr().err
    assert statuses(score(scorer, *"abcdef")) == ["ok"] * 6  # all workers are back


def test_waiting_does_not_count_as_much_as_computing(pool, write):
    scorer = pool(write("import time\ntime.sleep(1.5)\nreturn 1.0"), timeout_s=1.0)
    (result,) = score(scorer, "a")  # 1.5 of 4 s
    assert result.value == 1.0 and 1.5 <= result.seconds < 4.0


def test_a_batch_has_the_time_of_all_its_responses(pool, write):
    scorer = pool(write("import time\ntime.sleep(3)\nreturn [1.0] * len(solution_strs)", BATCHED), timeout_s=0.5)
    assert values(score(scorer, *"abcd")) == [1.0] * 4  # 3 of 8 s; one response would have 2


def test_a_function_may_change_what_it_is_given(pool, write, capfd):
    spoil = """
        extra_info["list"].append(9)
        extra_info["index"] = 5
        return 0.0
    """
    batched = "extra_infos[0]['list'].clear()\nsolution_strs[:] = ['spoilt']\nreturn [0.0]"
    see = "return {'score': 1.0, 'sum': sum(extra_info['list']), 'index': extra_info['index']}"
    paths = write(spoil, name="a.py"), write(batched, BATCHED, name="b.py"), write(see, name="c.py")
    scorer = pool(*paths, warm=False)  # so the first task is scored twice
    the_row = row(7, list=[1, 2], index=3)
    samples = [sample(scorer.tokenizer, 7, "text")]
    for _ in range(2):
        (result,) = collected(scorer, [submitted(scorer, the_row, samples)])
        assert result.components == {"acc": 0.0, "a": 0.0, "b": 0.0, "c": 1.0, "c/sum": 3.0, "c/index": 3.0}
        assert result.text == "text"
    assert the_row["extra_info"] == {"list": [1, 2], "index": 3} and capfd.readouterr().err == ""


def test_prints_go_to_stderr_at_once(pool, write, monkeypatch, capfd):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    path = write("""
        import os, subprocess, sys
        print("printed")
        sys.stdout.write("written\\n")
        os.write(1, b"raw\\n")
        subprocess.run(["echo", "echoed"])
        return 1.0
    """)
    scorer = pool(path)
    assert values(score(scorer, "a")) == [1.0]
    out, err = capfd.readouterr()
    assert out == "" and sorted(err.split()) == ["echoed", "printed", "raw", "written"]


def test_a_function_that_asks_for_input_gets_none(pool, write, capfd):
    assert statuses(score(pool(write("return float(input('score? '))")), "a")) == ["error"]
    assert "EOFError" in capfd.readouterr().err


def test_half_a_message_holds_a_task_until_its_deadline_and_no_longer(pool, write, monkeypatch, capfd):
    monkeypatch.setattr(process, "START_SECONDS", 3600)
    monkeypatch.setattr(process, "MESSAGE_SECONDS", 2)
    path = write("""
        import os, struct, sys
        if solution_str == "half":
            os.write(int(sys.argv[1]), struct.pack("!i", 1 << 20) + b"{")
        return 1.0
    """)
    scorer = pool(path, timeout_s=0.5)
    group = submitted(scorer, row(7), [sample(scorer.tokenizer, 7, "half")])
    task = scorer.submitted[group[0]][1]
    until(task.ready, 60, "half a message still holds its task")
    assert statuses(collected(scorer, [group])) == ["timeout"]
    assert "row 7: no score after 2 s; the worker was killed" in capfd.readouterr().err
    assert values(score(scorer, "a")) == [1.0]


def test_a_worker_that_takes_half_a_task_holds_it_until_its_deadline_and_no_longer(pool, write, monkeypatch, capfd):
    monkeypatch.setattr(process, "START_SECONDS", 3600)
    monkeypatch.setattr(process, "MESSAGE_SECONDS", 2)
    path = write("""
        import os, signal, threading, time
        stop = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP))
        stop.daemon = True
        if solution_str == "stops":
            stop.start()
        return os.getpid()
    """)
    scorer = pool(path, timeout_s=0.5)
    (pid,) = values(score(scorer, "stops"))
    until(lambda: Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    group = submitted(scorer, row(7, long="x" * 4_000_000), [sample(scorer.tokenizer, 7, "a")])
    task = scorer.submitted[group[0]][1]
    until(task.ready, 60, "a worker that takes half a task still holds it")
    assert statuses(collected(scorer, [group])) == ["timeout"]
    assert "row 7: no score after 2 s; the worker was killed" in capfd.readouterr().err
    assert statuses(score(scorer, "b")) == ["ok"]


# A child, a child in a session of its own, and a daemon: in a session of its own, its parent gone.
SPAWN = """
import os, subprocess, time

def spawn(folder):
    children = [subprocess.Popen(["sleep", "300"], start_new_session=own).pid for own in (False, True)]
    children.append(int(subprocess.check_output("setsid sleep 300 > /dev/null & echo $!", shell=True)))
    with open(f"{folder}/pids", "w") as f:
        f.write(" ".join(map(str, children)))

"""


def spawned(folder):
    return [int(pid) for pid in (folder / "pids").read_text().split()]


@pytest.mark.parametrize(
    ("then", "status"),
    [("return 1.0", "ok"), ("os._exit(0)", "error"), ("time.sleep(60)", "timeout")],
)
def test_what_a_reward_starts_ends_with_its_worker(pool, tokenizer, write, tmp_path, then, status):
    path = write(f"spawn({str(tmp_path)!r})\n{then}", SPAWN + SIGNATURE)
    scorer = pool(path, timeout_s=1.0)
    assert statuses(score(scorer, "a")) == [status]
    pids = spawned(tmp_path)
    assert len(pids) == 3
    if status == "ok":
        assert all(map(alive, pids))
        scorer.close()
    until(lambda: not any(map(alive, pids)), 60, "a process outlived its worker")


def test_a_fork_of_the_worker_gives_no_second_answer(pool, write):
    path = write("""
        import os
        child = os.fork()
        if child == 0 and solution_str == "raise":
            raise ValueError("in the child")
        if child == 0 and solution_str == "exit":
            raise SystemExit
        return {"score": float(len(solution_str)), "parent": child > 0}
    """)
    scores = score(pool(path), "raise", "a", "exit", "ab", "abc")
    assert values(scores) == [5.0, 1.0, 4.0, 2.0, 3.0] and all(s.components["parent"] == 1.0 for s in scores)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("import sys; sys.exit()", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise type('Timeout', (BaseException,), {})('mine')", "Timeout: mine"),
        ("return compute_score(data_source, solution_str, ground_truth, extra_info)", "RecursionError"),
        ("import os; os._exit(3)", "the worker process died (exit code 3)"),
        ("import os; os._exit(0)", "the worker process died (exit code 0)"),
        ("import os; os.abort()", "the worker process died (signal SIGABRT)"),
        ("import ctypes; ctypes.string_at(0)", "the worker process died (signal SIGSEGV)"),
        ("import os; os.kill(os.getpid(), 9)", "the worker process died (signal SIGKILL)"),
    ],
)
def test_every_way_out_is_one_response_without_a_score(pool, write, capfd, body, word):
    scorer = pool(write(f"if solution_str == 'bad':\n    {body}\nreturn 1.0"))
    assert [s[1:4] for s in score(scorer, "a", "bad", "b")] == [
        (1.0, {}, "ok"),
        (None, {}, "error"),
        (1.0, {}, "ok"),
    ]
    err = capfd.readouterr().err
    assert word in err and "row 7: " in err and "response: 'bad'" in err


def test_the_time_in_which_a_job_is_suspended_does_not_count(pool, write, tokenizer, tmp_path):
    path = write("""
        import pathlib, time
        pathlib.Path(__file__).with_name("begun").touch()
        time.sleep(0.2)
        return 1.0
    """)
    scorer = pool(path, timeout_s=0.5)
    group = submitted(scorer, row(7), [sample(tokenizer, 7, "a")])
    until((tmp_path / "begun").exists)
    job = " ".join(map(str, [os.getpid(), *descendants(os.getpid())]))
    subprocess.run(f"kill -STOP {job}; sleep 3; kill -CONT {job}", shell=True)  # of 2 s that it may take
    assert [(x.value, x.status) for x in collected(scorer, [group])] == [(1.0, "ok")]


def test_a_worker_killed_from_outside_loses_its_own_response_only(pool, write, tokenizer, tmp_path, capfd):
    path = write(f"""
        import os, time
        open({str(tmp_path)!r} + "/" + solution_str, "w").write(str(os.getpid()))
        time.sleep(5 if solution_str == "a" else 0)
        return 1.0
    """)
    before = set(descendants(os.getpid()))
    scorer = pool(path, workers=2, timeout_s=10.0)
    samples = [sample(tokenizer, 7, text) for text in ("a", "b", "c")]
    group = submitted(scorer, row(7), samples)
    until(lambda: (tmp_path / "a").exists() and (tmp_path / "a").read_text(), 60, "no worker took the first response")
    os.kill(int((tmp_path / "a").read_text()), signal.SIGKILL)
    assert statuses(collected(scorer, [group])) == ["error", "ok", "ok"]
    assert "signal SIGKILL" in capfd.readouterr().err
    # One that dies while it waits for work costs nothing.
    idle = {int((tmp_path / name).read_text()) for name in "bc"}
    guards = [pid for pid in set(descendants(os.getpid())) - before if set(children(pid)) & idle]
    for pid in idle:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(alive, guards)), otherwise="a guard outlived its worker")
    assert statuses(score(scorer, "d", "e", "f")) == ["ok"] * 3


def test_memory_is_limited_and_its_end_replaces_the_worker(pool, write, capfd):
    path = write("""
        import os
        if solution_str == "bomb":
            hoard = [bytearray(10**7) for _ in range(100)]
        if solution_str == "raise":
            raise ValueError
        return {"score": 1.0, "pid": os.getpid()}
    """)
    scores = score(pool(path, memory_mb=300), "a", "raise", "b", "bomb", "c")
    assert statuses(scores) == ["ok", "error", "ok", "error", "ok"]
    first, second, third = (scores[i].components["pid"] for i in (0, 2, 4))
    assert first == second != third
    free = pool(path, memory_mb=0)
    assert statuses(score(free, "bomb")) == ["ok"]
    assert capfd.readouterr().err.count("problem") == 1


def test_a_function_cannot_raise_its_limit_of_memory(pool, write):
    path = write("""
        import resource
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (301 << 20, 301 << 20))
        except ValueError:
            pass
        limits = {"data": resource.getrlimit(resource.RLIMIT_DATA), "cpu": resource.getrlimit(resource.RLIMIT_CPU)}
        return {"score": 1.0} | {f"{name}_{i}": x for name, pair in limits.items() for i, x in enumerate(pair)}
    """)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    scorer = pool(path, memory_mb=300)
    for result in score(scorer, "a", "b"):
        parts = result.components
        assert (parts["data_0"], parts["data_1"]) == (300 << 20, 300 << 20)
        assert parts["cpu_0"] > 0 and parts["cpu_1"] == hard  # each task raises the soft one


@pytest.mark.parametrize(
    ("users", "most", "is_hard", "expected"),
    [
        (400, 300, True, (300, 300)),
        (400, 300, False, (300, 400)),
        (400, 500, True, (400, 400)),
        (400, 500, False, (400, 400)),
    ],
)
def test_a_lower_hard_limit_of_the_user_holds(users, most, is_hard, expected):
    code = "import resource as r, sys; from rl.scoring.worker import limit\nkind = r.RLIMIT_CPU\n"
    code += f"r.setrlimit(kind, (200, {users})); limit(kind, {most}, is_hard={is_hard}); print(r.getrlimit(kind))"
    said = subprocess.check_output([sys.executable, "-c", code], cwd=launch.ROOT, text=True)
    assert said == f"{expected}\n"


def test_a_memory_error_says_so(pool, write, capfd):
    assert statuses(score(pool(write("return len('x' * 10**9)"), memory_mb=300), "a")) == ["error"]
    assert "MemoryError" in capfd.readouterr().err


def test_a_reward_that_is_not_a_function_of_its_input_is_noticed(pool, write, tokenizer, capfd):
    path = write(
        """
        calls.append(1)
        return {"score": 1.0, "calls": len(calls)} if solution_str == "odd" else 1.0
        """,
        "calls = []\n\n\n" + SIGNATURE,
    )
    message = "row 7: the same response scored twice gave two scores; the reward is not a function of its input"
    scorer = pool(path, warm=False)
    (result,) = score(scorer, "odd")  # the first task is scored twice
    assert (result.value, result.status) == (1.0, "ok") and message in capfd.readouterr().err
    assert statuses(score(scorer, *["even"] * 98, "odd")) == ["ok"] * 99 and capfd.readouterr().err == ""
    assert values(score(scorer, "odd")) == [1.0] and message in capfd.readouterr().err  # and then every hundredth


def test_every_hundredth_task_is_scored_twice(pool, write):
    path = write("calls.append(1)\nreturn len(calls)", "calls = []\n\n\n" + SIGNATURE)
    scorer = pool(path, warm=False)
    scores = values(score(scorer, *["a"] * 202))
    assert scores[0] == 1.0 and scores[1] == 3.0  # calls 1 and 2, then 3
    assert [k for k in range(1, 202) if scores[k] - scores[k - 1] == 2] == [1, 101, 201]


# ---------------------------------------------------------------------------------------------------------------------
# The processes


def test_a_thousand_tasks_leave_nothing_behind_and_workers_are_replaced(pool, write, tokenizer, monkeypatch):
    assert process.TASKS_PER_WORKER == 1000
    monkeypatch.setattr(process, "TASKS_PER_WORKER", 100)
    scorer = pool(write("import os\nreturn os.getpid()"), workers=2)
    one = sample(tokenizer, 7, "a")

    def flat():
        return len(os.listdir("/proc/self/fd")), len(descendants(os.getpid()))

    pids = set()
    for round in range(10):
        scores = collected(scorer, [submitted(scorer, row(7), [replace(one) for _ in range(100)])])
        assert set(statuses(scores)) == {"ok"}
        pids |= set(values(scores))
        if round == 0:
            before = flat()
    assert flat() <= before
    assert 10 <= len(pids) <= 12  # 100 tasks each; two of the workers may not have reached that


def test_workers_leave_the_machine_to_the_trainer(pool, write):
    path = write("import os\nreturn {'score': 0, 'nice': os.nice(0), 'threads': int(os.environ['OMP_NUM_THREADS'])}")
    assert score(pool(path), "a")[0].components == {"nice": min(os.nice(0) + 10, 19), "threads": 1.0}


@pytest.mark.parametrize(("ranks", "expected"), [(1, min(os.cpu_count(), 16)), (10_000, 1)])
def test_ranks_share_the_cores(pool, write, monkeypatch, ranks, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert pool(write("return 1.0"), workers=None).num_workers == expected


@pytest.mark.parametrize("started", [0, 2])
def test_processes_that_cannot_be_started_are_a_mistake_in_reward_workers(pool, write, monkeypatch, started):
    start_worker, calls, processes = process.children.start_worker, itertools.count(), []

    def start(function, theirs):
        if next(calls) >= started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        processes.append(start_worker(function, theirs))
        return processes[-1]

    monkeypatch.setattr(process.children, "start_worker", start)
    path = write("return 1.0")
    with pytest.raises(ValueError, match="--reward-workers") as error:
        pool(path, workers=4)
    assert str(error.value) == (
        f"--custom-reward-function {path} cannot be loaded: no more processes can be started "
        "([Errno 11] Resource temporarily unavailable); lower --reward-workers"
    )
    assert len(processes) == started
    until(lambda: all(x.poll() is not None for x in processes), 60, "a process that was started outlived the mistake")


def test_responses_are_not_scored_while_processes_cannot_be_started_again(pool, write, tokenizer, monkeypatch, capfd):
    """Whichever task finds out first, and also the tasks behind it."""
    scorer, start_worker = pool(write("import os\nos._exit(3)"), workers=2), process.children.start_worker

    def start(function, theirs):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(process.children, "start_worker", start)
    group = submitted(scorer, row(7), [sample(tokenizer, 7, "a") for _ in range(6)])
    assert statuses(collected(scorer, [group])) == ["error"] * 6
    shown = capfd.readouterr().err
    assert "row 7: " in shown and "6 problem(s)" in shown
    group = submitted(scorer, row(8), [sample(tokenizer, 8, "a")])
    assert statuses(collected(scorer, [group])) == ["error"]
    why = "no more processes can be started ([Errno 11] Resource temporarily unavailable); lower --reward-workers"
    assert f"row 8: {why}" in capfd.readouterr().err
    monkeypatch.setattr(process.children, "start_worker", start_worker)
    scorer.idle[0].setup, scorer.idle[1].setup = [([], *worker.setup[1:]) for worker in scorer.idle]
    assert statuses(score(scorer, "a", "b")) == ["ok", "ok"]


@pytest.mark.parametrize("started", [2, 5])  # threads: 4 for the workers, then multiprocessing's own
def test_threads_that_cannot_be_started_are_a_mistake_in_reward_workers(pool, write, monkeypatch, started):
    start, calls, path = threading.Thread.start, itertools.count(), write("return 1.0")

    def start_a_few(thread):
        if next(calls) >= started:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_a_few)
    with pytest.raises(ValueError, match=r"--reward-workers 4: too many threads \(.*\); lower it"):
        pool(path, workers=4)


TRAINER = """
import sys, time
from transformers import AutoTokenizer
from rl.scoring.flags import Scoring
from rl.scoring.pool import Scorer
from rl.data.types import Sample

scorer = Scorer(sys.argv[2:], AutoTokenizer.from_pretrained(sys.argv[1]), Scoring(reward_workers=2))
row = {"row_index": 0, "data_source": "", "reward_model": {"ground_truth": ""}, "extra_info": {}}
samples = [Sample([1], [5], [1], [0.0], "stop", 0) for _ in range(100)]
scorer.submit(row, samples[:2])
if sys.argv[2].endswith("raise.py"):
    scorer.collect(samples[:2])
    scorer.submit(row | {"data_source": "slow"}, samples[2:])
    raise ValueError("the trainer fails")
time.sleep(600)
"""


def test_workers_and_their_children_die_with_the_trainer(tiny_model, write, tmp_path):
    path = write(f"spawn({str(tmp_path)!r})\n9**9**9", SPAWN + SIGNATURE)
    (tmp_path / "trainer.py").write_text(TRAINER)
    (trainer,) = launch.fork_file(tmp_path / "trainer.py", tiny_model, path, log=tmp_path / "log").processes
    until(lambda: (tmp_path / "pids").exists() and len(spawned(tmp_path)) == 3, 60, "no task began")
    everything = [*descendants(trainer.pid), *spawned(tmp_path)]
    assert len(set(everything)) >= 2 + 2 + 3 and all(map(alive, spawned(tmp_path)))
    trainer.kill()
    trainer.join()
    until(lambda: not any(map(alive, everything)), 60, "a process outlived the trainer")


def test_a_trainer_that_fails_ends_without_waiting_for_its_workers(tiny_model, write, tmp_path):
    path = write("import time\ntime.sleep(600 if data_source == 'slow' else 0)\nreturn 1.0", name="raise.py")
    (tmp_path / "trainer.py").write_text(TRAINER)
    trainer = launch.fork_file(tmp_path / "trainer.py", tiny_model, path, log=tmp_path / "log")
    assert trainer.ends() == [1] and "ValueError: the trainer fails" in trainer.log.read_text()


def test_a_pool_that_breaks_says_so_instead_of_waiting(pool, write, tokenizer):
    scorer = pool(write("return 1.0"))
    incomplete = {name: value for name, value in row(7).items() if name != "extra_info"}
    group = submitted(scorer, incomplete, [sample(tokenizer, 7, "a")])
    with pytest.raises(KeyError, match="extra_info"):
        collected(scorer, [group])


# ---------------------------------------------------------------------------------------------------------------------
# The check before training


def test_a_batched_function_may_fail_on_a_form_of_the_ground_truth(pool, write):
    """And if it fails on an empty response, that is the one that is named."""
    lines = "assert not any('#' in s for s in solution_strs)\nreturn [float(s == '12') for s in solution_strs]"
    path = write(lines, BATCHED)
    assert pool(path, rows=[row(0, truth="12")]).report == "rewards: set: the ground truth scores 1, an empty one 0"
    path = write("assert all(solution_strs)\nreturn [1.0] * len(solution_strs)", BATCHED, name="full.py")
    with pytest.raises(ValueError, match="first row of data source 'set' with the response ''"):
        pool(path, rows=[row(0, truth="12")])


def test_check_scores_the_reference_and_an_empty_response_of_every_source(pool, write, capfd):
    path = write("return None if data_source == 'open' else 0.5 * (ground_truth in solution_str) - 0.25")
    scorer = pool(path)
    rows = [
        row(0, source="math", truth="7", answer="3+4=7"),
        row(1, source="math", truth="never looked at"),
        row(2, source="open", truth="x"),
        row(3, source="short", truth="12"),
        row(4, source="swapped", truth="12", answer="no such thing"),
    ]
    assert try_functions(scorer, [])[0] == "rewards: nothing for functions to score"
    assert try_functions(scorer, rows)[0] == (
        "rewards: math: the reference answer scores 0.25, an empty one -0.25; "
        "open: the ground truth, in every form tried, scores nothing, an empty one nothing; "
        "short: the ground truth scores 0.25, an empty one -0.25; "
        "swapped: the reference answer scores -0.25, an empty one -0.25"
    )
    assert capfd.readouterr().err == "" and collected(scorer, []) == []


def test_check_reports_the_best_form_of_an_answer(pool, write):
    body = "return 1.0 if solution_str == '#### 42' else 0.1 if solution_str.startswith('Answer:') else 0.0"
    said, _ = try_functions(pool(write(body)), [row(0, truth="42")])
    assert said == "rewards: set: the ground truth as #### ... scores 1, an empty one 0"
    body = "return -1.5 if solution_str.startswith('Answer') else -2.0 if solution_str else -1.0"
    said, _ = try_functions(pool(write(body, name="b.py")), [row(0, truth="42")])
    assert said == "rewards: set: the ground truth, in every form tried, scores -1.5, an empty one -1"


@pytest.mark.parametrize(("length", "tried"), [(999, 6), (1000, 2)])
def test_check_takes_a_long_ground_truth_for_no_answer(pool, write, tmp_path, length, tried):
    """It is the tests of a program, which would run in every form."""
    path = write(f"open({str(tmp_path / 'calls')!r}, 'a').write('x')\nreturn 0.0")
    scorer = pool(path)
    assert try_functions(scorer, [row(0, truth="a" * length)])[0].endswith(
        "in every form tried, scores 0, an empty one 0"
    )
    assert len((tmp_path / "calls").read_text()) == tried


def test_check_finds_rows_without_a_ground_truth_that_a_function_cannot_score(pool, write, capfd):
    """Functions that need none are left alone; rewards/math_reward.py raises."""
    rows = [row(0, truth="5"), row(1, truth="5"), row(2, truth=""), row(3, truth=" ")]
    said = "rewards: set: the ground truth, in every form tried, scores 1, an empty one 1"
    assert try_functions(pool(write("return 1.0")), rows)[0] == said
    with pytest.raises(ValueError, match="on the first row with an empty ground_truth of data source 'set' with the"):
        try_functions(pool("rewards/math_reward.py"), rows)
    assert "ground truth ''" in capfd.readouterr().err
    said = "rewards: set: without a ground truth, an empty response scores 1"
    assert try_functions(pool(write("return 1.0")), rows[2:])[0] == said


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("return int(solution_str)", "error"),
        ("import time; time.sleep(0 if solution_str else 9); return 1.0", "timeout"),  # one wait, of all forms tried
    ],
)
def test_check_refuses_a_function_that_fails(pool, write, capfd, body, status):
    scorer = pool(write(f"if data_source == 'good':\n    return 1.0\n{body}"), timeout_s=0.5)
    with pytest.raises(
        ValueError, match="--custom-reward-function fails on the first row of data source 'bad'"
    ) as error:
        try_functions(scorer, [row(0, source="good"), row(1, source="bad", truth="12")])
    assert f"({status}; the traceback is above)" in str(error.value)
    assert "row 1: " in capfd.readouterr().err


def test_a_component_that_scores_of_one_data_source_lack_is_missed(pool, write):
    body = "return {'score': 1.0, 'acc': 1.0} | ({'style': 0.0} if data_source == 'good' else {})"
    scorer = pool(write(body))
    _, scorer.components = try_functions(scorer, [row(0, source="good"), row(1, source="plain")])
    require_components(scorer, ["acc", "score"], flag="--flag")
    with pytest.raises(ValueError, match="--flag style: scores of the first rows of plain have acc; a reward function"):
        require_components(scorer, ["acc", "style"], flag="--flag")


@pytest.mark.parametrize(
    ("failed", "none", "limit", "stops"),
    [(1, 0, 0.05, False), (2, 0, 0.05, True), (0, 20, 0.05, False), (1, 0, 0.0, True), (20, 0, 1.0, False)],
)
def test_too_many_failures_stop_a_run(failed, none, limit, stops):
    states = ["error", "timeout"] * 10
    states = states[:failed] + ["none"] * none + ["ok"] * (20 - failed - none)
    scores = [Score("", 1.0 if state == "ok" else None, {}, state, 0.0) for state in states]
    responses = [response(row_index=i, score=score, number=i) for i, score in enumerate(scores)]
    if not stops:
        return raise_if_failing(responses, limit)
    with pytest.raises(RuntimeError, match=f"{failed} of 20 responses .* more than --reward-max-error-frac {limit};"):
        raise_if_failing(responses, limit)


# ---------------------------------------------------------------------------------------------------------------------
# Finding the functions

SOURCE = """
from __future__ import annotations

from dataclasses import dataclass

from neighbor import VALUE


@dataclass
class Answer:  # with such annotations, it looks its module up by name
    value: float


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return Answer(VALUE).value


def other(data_source, solution_str, ground_truth, extra_info=None):
    return 0.75


constant = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "neighbor.py").write_text("VALUE = 0.5\n")
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(
    ("suffix", "expected"), [("", 0.5), (":", 0.5), ("::2", 1.0), (":compute_score:-1", -0.5), (":other:1e1", 7.5)]
)
def test_a_verl_style_file_with_or_without_name_and_weight(pool, file, suffix, expected):
    (result,) = score(pool(f"{file}{suffix}"), "a")
    assert result.value == expected and result.components == {}


def test_a_path_is_relative_to_where_the_user_is_then_to_the_repository(pool, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert values(score(pool("mine.py:other"), "a")) == [0.75]
    assert not os.path.exists("rewards/gsm8k.py")
    assert values(score(pool("rewards/gsm8k.py"), "so #### 72", "so #### 71", truth="72")) == [1.0, 0.0]
    (file.parent / "rewards").mkdir()
    (file.parent / "rewards" / "gsm8k.py").write_text("def compute_score(*arguments):\n    return 9.0\n")
    assert values(score(pool("rewards/gsm8k.py"), "so #### 71", truth="72")) == [9.0]


@pytest.fixture
def every_character():
    """A tokenizer of bytes, <|im_end|> included."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), start=EOS + 1)}
    bytewise = Tokenizer(models.BPE(letters | {"<a>": 0, "<b>": 1, "<|im_end|>": EOS}, []))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|im_end|>")


def test_the_default_reward_grades_numbers_formulas_and_code_in_the_same_pool(every_character, no_processes_left):
    scorer = Scorer(["rewards/by_data_source.py"], every_character, Scoring(reward_workers=2))
    tests = {"test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
    rows = {
        "openai/gsm8k": ("72", "so #### 72", "so #### 71", "nothing"),
        "DigitalLearningGmbH/MATH-lighteval": ("x+1", "$\\boxed{1 + x}$", "$\\boxed{1 - x}$", "\\boxed{9^{9^{9}}}"),
        "google-research-datasets/mbpp": (
            json.dumps(tests),
            "```python\ndef add(a, b):\n    return a + b\n```",
            "```python\ndef add(a, b):\n    return 4\n```",
            "```python\nwhile True: pass\n```",
        ),
    }
    asked = []
    for i, (source, (truth, *texts)) in enumerate(rows.items()):
        group = [sample(scorer.tokenizer, i, text) for text in texts]
        asked.append(submitted(scorer, row(i, source=source, truth=truth), group))
    scores = collected(scorer, asked)
    scorer.close()
    assert [s.text for s in scores] == [text for _, *texts in rows.values() for text in texts]
    assert values(scores) == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.5, 0.0]


def test_an_answer_that_is_a_bomb_scores_0_and_its_worker_lives(every_character, no_processes_left):
    """The reward process died of it before: the response had no score, which costs a policy nothing."""
    scorer = Scorer(["rewards/mbpp.py"], every_character, Scoring(reward_workers=2))
    scorer.total = 1  # the first task would be scored twice
    truth = json.dumps({"test_list": ["assert f(1) == 1", "assert sum(f(2)) == 3"]})
    answers = ["range(10**12)", "__import__('os')._exit(0)", "x"]
    group = [sample(scorer.tokenizer, 0, f"```python\ndef f(x): return x if x == 1 else {a}\n```") for a in answers]
    scores = collected(scorer, [submitted(scorer, row(0, truth=truth), group)])
    scorer.close()
    assert values(scores) == [0.0, 0.5, 0.5] and statuses(scores) == ["ok"] * 3


def test_check_finds_the_form_of_data_without_reference_answers(every_character, no_processes_left):
    """verl's MATH rows have no extra_info.answer: the bare truth `5`, without a box, is not a right response."""
    scorer = Scorer(["rewards/by_data_source.py"], every_character, Scoring(reward_workers=1))
    programs = json.dumps({"inputs": ["1\n"], "outputs": ["1\n"]})
    rows = [
        row(0, source="DigitalLearningGmbH/MATH-lighteval", truth=r"\frac{1}{2}"),
        row(1, source="math_dapo", truth="34"),
        row(2, source="openai/gsm8k", truth="72"),
        row(3, source="searchR1_nq", truth={"target": ["Paris", "City of Paris"]}),
        row(4, source="apps", truth=programs),
    ]
    said, _ = try_functions(scorer, rows)
    scorer.close()
    assert said.removeprefix("rewards: ").split("; ", 4) == [
        r"DigitalLearningGmbH/MATH-lighteval: the ground truth as \boxed{...} scores 1, an empty one 0",
        r"math_dapo: the ground truth as \boxed{...} scores 1, an empty one -1",
        "openai/gsm8k: the ground truth as #### ... scores 1, an empty one 0",
        "searchR1_nq: the ground truth as <answer>...</answer> scores 1, an empty one 0",
        "apps: the ground truth, in every form tried, scores 0, an empty one 0",
    ]


def test_two_files_of_the_same_name_do_not_mix(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "reward.py").write_text("")
    specs = [f"{tmp_path}/a/reward.py:one", f"{tmp_path}/b/reward.py:two:3"]
    assert parse_functions(specs) == [
        ("reward.one", 1.0, f"{tmp_path}/a/reward.py", "one"),
        ("reward.two", 3.0, f"{tmp_path}/b/reward.py", "two"),
    ]


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (["no/such/file.py:compute_score"], ["'no/such/file.py:compute_score'", "path/to/file.py:function"]),
        (["rewards:compute_score"], ["no file 'rewards'"]),  # a folder
        ([""], ["no file ''"]),
        (["MINE:missing"], ["MINE", "no function 'missing'"]),
        (["MINE:constant"], ["no function 'constant'"]),
        (["MINE:other:heavy"], ["'MINE:other:heavy'", "weight 'heavy' is not a number"]),
        (["MINE:other:nan"], ["weight 'nan' is not a number"]),
        (["MINE:other:1:2"], ["weight '1:2' is not a number"]),
        (["MINE:other", "MINE:other:2"], ["named twice", "add up its weights"]),
        (["MINE", "FOLDER/syntax.py"], ["syntax.py", "SyntaxError"]),
        (["FOLDER/missing_package.py"], ["ModuleNotFoundError", "no_such_package"]),
        (["FOLDER/exits.py"], ["SystemExit"]),
        (["FOLDER/dies.py"], ["died (exit code 5)"]),
    ],
)
def test_mistakes_name_the_flag_and_the_file(tokenizer, no_processes_left, file, specs, words):
    for name, source in {
        "syntax": "def compute_score(:",
        "missing_package": "import no_such_package",
        "exits": "import sys\nsys.exit(0)",
        "dies": "import os\nos._exit(5)",
    }.items():
        (file.parent / f"{name}.py").write_text(source)

    def fill(text):
        return text.replace("MINE", str(file)).replace("FOLDER", str(file.parent))

    with pytest.raises(ValueError, match="--custom-reward-function") as error:
        Scorer([fill(spec) for spec in specs], tokenizer, Scoring(reward_workers=2))
    for word in words:
        assert fill(word) in str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# Judges


class Judge:
    """Multiplies scores, and names what each was before, with its prompt."""

    def __init__(self, component, factor):
        self.component, self.factor = component, factor

    def judge(self, rows, samples, scores):
        prompts = {row["row_index"]: row["prompt"] for row in rows}
        result = []
        for s, x in zip(samples, scores, strict=True):
            before = {f"{self.component} of {prompts[s.row_index]}": x.value}
            result.append(x._replace(value=x.value * self.factor, components=x.components | before))
        return result


def test_judges_change_scores_one_after_the_other(tokenizer, write, no_processes_left):
    judges = [Judge("half", 0.5), Judge("tenfold", 10.0)]
    functions, rows = [write("return len(solution_str)")], [row(i) | {"prompt": f"p{i}"} for i in (3, 8)]
    flags = Scoring(reward_workers=1)
    scorer = Scorer(functions, tokenizer, flags, rows=rows, judges=judges, max_response_length=9)
    try:
        # The first row is scored by the function alone.
        assert scorer.report == "rewards: set: the ground truth scores 5, an empty one 0"
        require_components(scorer, ["half", "tenfold"], flag="--flag")
        assert scorer.judges == judges  # `Run.begin` loads them
        answers = zip(rows, ("12", "123"), strict=True)
        asked = [submitted(scorer, x, [sample(tokenizer, x["row_index"], text)]) for x, text in answers]
        scores = collected(scorer, asked)
        assert values(scores) == [10.0, 15.0]
        assert [x.components for x in scores] == [
            {"half of p3": 2.0, "tenfold of p3": 1.0},
            {"half of p8": 3.0, "tenfold of p8": 1.5},
        ]
    finally:
        scorer.close()

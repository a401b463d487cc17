"""What agents send: hostile requests, and calls of tools that go there and back."""

import json
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest
from helpers_engines import TEMPERATURE, push
from helpers_fixtures import engine_of
from test_chat import QWEN25
from test_programs import STOPS, check_parity
from transformers import AutoTokenizer

from data import arithmetic
from extras.agents import EnvironmentFlags, open_partner
from extras.agents.programs.requests import Refused, body_of
from rl.data.types import Sampling
from rl.model.load import load_pretrained
from rl.model.sharding import shard
from rl.sampling.groups import sample_groups

HERE = Path(__file__).parent


@pytest.fixture
def go(tmp_path, monkeypatch):
    """go(engine, policy, tokenizer, program, about, ...): the response of a program to a row, and what it noted."""
    notes, partners = tmp_path / "notes", []
    monkeypatch.setenv("NOTES", str(notes))

    def go(engine, policy, tokenizer, program, about, *, room, stops=STOPS, seed=0):
        push(engine, policy)
        notes.write_text("")
        command = f"{sys.executable} {HERE / program}"
        flags = EnvironmentFlags(agent=command, environment_timeout=20.0, agents_at_once=4, agent_max_calls=10_000)
        partners.append(agents := open_partner(flags, tokenizer, stops))
        ids = tokenizer("<|im_start|>user\n1+1<|im_end|>\n")["input_ids"]
        rows = [dict(prompt_ids=ids, row_index=0, extra_info=about, prompt=[])]
        way = Sampling(temperature=TEMPERATURE, max_tokens=room, stop_token_ids=stops)
        [sample] = sample_groups(engine, rows, way, partner=agents, seed=seed)
        assert not (agents.open or agents.unwanted or agents.stopping) and engine.is_idle
        [line] = notes.read_text().splitlines()
        return sample, json.loads(line)

    yield go
    for agents in partners:
        agents.close()


@pytest.mark.parametrize(
    ("fixtures", "count", "least"),
    [(("hf_engine", "policy"), 1000, 80), (("vllm_engine_that_calls", "policy_that_calls"), 100, 5)],
    ids=["hf", "vllm"],
)
def test_hostile_requests_raise_nowhere(fixtures, count, least, go, request, capfd):
    """Each is answered with 200 or 4xx, or its client has left, and each of the three happens more than `least` times.
    The good questions before and behind them get the tokens that they get without them.
    """
    engine, policy = map(request.getfixturevalue, fixtures)
    tokenizer = AutoTokenizer.from_pretrained(policy.config._name_or_path)
    tokenizer.chat_template = QWEN25
    hostile, noted = go(engine, policy, tokenizer, "hostile_agent.py", {"seed": 0, "count": count}, room=240)
    _, alone = go(engine, policy, tokenizer, "hostile_agent.py", {"seed": 0, "count": 0}, room=240)
    assert noted["good"] == alone["good"] and len(noted["results"]) == count and alone["results"] == []
    assert noted["good"][0] != noted["good"][1]  # asked again with the same messages, they have another seed
    kinds, counts = Counter(), Counter()
    for ends, status, data in noted["results"]:
        kind = "dropped" if status is None else "answered" if status == 200 else status // 100 if status else status
        assert kind in ("dropped", "answered", 4), (ends, status, data)
        assert kind != "dropped" or ends != "reads", (ends, status, data)
        kinds[kind], counts[status] = kinds[kind] + 1, counts[status] + 1
    assert min(kinds.values()) > least and {200, 400, 401, 404, 405} <= set(counts)
    numbers = hostile.outcome.facts["numbers"]
    assert hostile.finish_reason == "stop" and numbers["rows"] == len(hostile.rows) > 0.1 * count
    assert numbers["refused"] > 0.1 * count
    check_parity(policy, [hostile])
    printed = capfd.readouterr().err
    assert "Traceback" not in printed and "Exception" not in printed


@pytest.mark.parametrize(
    "raw",
    [
        *(b'{"stop": "\\ud800"}', b'{"a": ["\\uD83D \\ude00"]}', b'{"\\udc80": 1}'),  # halves of characters
        *(b'{"a": "\xed\xa0\x80"}', b"\xff\xfe{\x00}\x00", b"", b"{", b"[1" + b"0" * 5000 + b"]"),
        *(b"[" * 65 + b"]" * 65, b'{"x":' * 65 + b"1" + b"}" * 65, b"[" * 100_000),
    ],
)
def test_what_could_not_be_written_again_is_refused(raw):
    with pytest.raises(Refused):
        body_of(raw)


def test_what_can_be_written_again_is_read():
    deep = b"[" * 64 + b"]" * 64
    assert body_of(deep) == json.loads(deep) and body_of(b"5") == 5
    assert body_of('{"é": "\\ud83d\\ude00 😀 \\\\ud800"}'.encode()) == {"é": "😀 😀 \\ud800"}


# ---------------------------------------------------------------------------------------------------------------------
# Calls of tools

SIGNS = "\n 0123456789abcdefghijklmnopqrstuvwxyz.,:;?!'\"#$%&()*+-/=<>[]_{}"
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
CALLS = {
    CALL % (name, json.dumps(arguments)): (name, arguments)
    for name, arguments in [
        *(("add", {"a": a, "b": b}) for a in (1, 20) for b in (3, 4, 5)),
        *(("find", {"text": text}) for text in ("x", " y ", 'two "words"', "<tool_response>")),
    ]
}
# One token each, which a tokenizer would find where the policy has sampled two.
PAIRS = [f"{a}{b}" for a in "zyxw" for b in "adgj"]
BROKEN = [CALL % ("add", "{"), "<tool_call>", "</tool_call>"]


@pytest.fixture(scope="module")
def model_that_calls(tmp_path_factory):
    """A tiny model of whose tokens every tenth is a whole call."""
    folder, words = tmp_path_factory.mktemp("model"), [*CALLS, *PAIRS, *BROKEN]
    arithmetic.save_model(folder, seed=0, characters=SIGNS, words=words, chat_template=QWEN25, context=2048)
    return str(folder)


@pytest.fixture(scope="module")
def hf_engine_that_calls(model_that_calls, world):
    with engine_of("hf", model_that_calls, world, longest=2048) as engine:
        yield engine


@pytest.fixture(scope="module")
def vllm_engine_that_calls(model_that_calls, world):
    with engine_of("vllm", model_that_calls, world, longest=2048) as engine:
        yield engine


@pytest.fixture
def policy_that_calls(model_that_calls, world):
    return shard(load_pretrained(model_that_calls, world), world)


WAYS = [("hf", False, 1), ("hf", True, 1), ("hf", False, 3), ("hf", True, 3), ("vllm", True, 1)]


@pytest.mark.parametrize(("kind", "stream", "conversations"), WAYS)
def test_calls_of_tools_go_there_and_back(kind, stream, conversations, go, policy_that_calls, request):
    """What the library shows of each answer is what was sampled, and the row goes on with these tokens."""
    engine, policy = request.getfixturevalue(f"{kind}_engine_that_calls"), policy_that_calls
    tokenizer = AutoTokenizer.from_pretrained(policy.config._name_or_path)
    stops = (0, 2, *range(20, 26))
    about = {"stream": stream, "conversations": conversations}
    sample, noted = go(engine, policy, tokenizer, "agent_of_tools.py", about, room=2000, stops=stops)
    numbers = sample.outcome.facts["numbers"]
    assert sample.finish_reason == "stop" and (numbers["calls"], numbers["forks"]) == (6 * conversations, 0)
    assert len(sample.rows) == len(noted) == conversations  # so each answer of a tool goes on with its row
    check_parity(policy, [sample])
    rows = {tokenizer.decode(row.response_ids).rpartition("user\nq")[2][0]: row for row in sample.rows}
    counts = []
    for x in noted:
        row, messages = rows[str(x["place"])], x["messages"]
        parts = [(m, [i for i, _ in part]) for m, part in groupby(enumerate(row.response_mask), lambda y: y[1])]
        assert [int(m) for m, _ in parts] == [0, 1] * 6
        ids, logprobs = row.response_ids.tolist(), row.rollout_logprobs.tolist()
        for turn, (tokens, reason) in enumerate(zip(x["sampled"], x["reasons"], strict=True)):
            place = parts[2 * turn + 1][1]
            assert [tokenizer.decode([ids[i]]) for i in place] == [text for text, _ in tokens]
            assert [logprobs[i] for i in place] == pytest.approx([logp for _, logp in tokens], abs=1e-6)
            at = [i for i, m in enumerate(messages) if m["role"] == "assistant"][turn]
            texts, calls = [text for text, _ in tokens], messages[at].get("tool_calls", [])
            if not any(text in BROKEN for text in texts):
                called = [(y["function"]["name"], json.loads(y["function"]["arguments"])) for y in calls]
                assert called == [CALLS[text] for text in texts if text in CALLS]
                end = "tool_calls" if calls else "stop"
                assert reason == (end if ids[place[-1]] in stops else "length")
            counts.append(len(calls))
            if turn < 5:  # what the template writes behind a turn, which has the end that the policy has sampled
                told = tokenizer.decode([ids[i] for i in parts[2 * turn + 2][1]])
                answers = [m["content"] for m in messages[at + 1 : at + 1 + len(calls)]]
                said = "".join(f"\n<tool_response>\n{y}\n</tool_response>" for y in answers) if calls else "\non"
                end = "" if texts[-1] == "<|im_end|>" else "<|im_end|>"
                assert told == f"{end}\n<|im_start|>user{said}<|im_end|>\n<|im_start|>assistant\n"
    assert sum(counts) >= 2 * conversations and 0 in counts and max(counts) > 1

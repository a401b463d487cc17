"""What agents send: a thousand hostile requests, and calls of tools that go there and back."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers_engines import TEMPERATURE, push
from test_chat import QWEN25
from test_programs import STOPS, check_parity
from transformers import AutoTokenizer

from extras.agents import EnvironmentFlags, open_partner
from extras.agents.programs.requests import Refused, body_of
from rl.data.types import Sampling
from rl.sampling.groups import sample_groups

HERE = Path(__file__).parent


@pytest.fixture
def go(hf_engine, policy, tiny_model, tmp_path, monkeypatch):
    """go(program, *about): the responses of a program to a row for each, and what it has noted."""
    push(hf_engine, policy)
    notes, partners = tmp_path / "notes", []
    monkeypatch.setenv("NOTES", str(notes))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = QWEN25

    def go(program, *about, seed=0):
        notes.write_text("")
        command = f"{sys.executable} {HERE / program}"
        flags = EnvironmentFlags(agent=command, environment_timeout=20.0, agents_at_once=4, agent_max_calls=10_000)
        partners.append(agents := open_partner(flags, tokenizer, STOPS))
        ids = tokenizer("<|im_start|>user\n1+1<|im_end|>\n")["input_ids"]
        rows = [dict(prompt_ids=ids, row_index=0, extra_info=x, prompt=[]) for x in about]
        way = Sampling(temperature=TEMPERATURE, max_tokens=240, stop_token_ids=STOPS)
        samples = sample_groups(hf_engine, rows, way, partner=agents, seed=seed)
        assert not (agents.open or agents.unwanted or agents.stopping) and hf_engine.is_idle
        return samples, [json.loads(line) for line in notes.read_text().splitlines()]

    yield go
    for agents in partners:
        agents.close()


def test_a_thousand_hostile_requests_raise_nowhere(go, policy, capfd):
    """Each is answered with 200 or 4xx, or its client has left. The good questions before and behind them get the
    tokens that they get without them.
    """
    [hostile], [noted] = go("hostile_agent.py", {"seed": 0})
    _, [alone] = go("hostile_agent.py", {"seed": None})
    assert noted["good"] == alone["good"] and len(noted["results"]) == 1000 and alone["results"] == []
    assert noted["good"][0] != noted["good"][1]  # asked again with the same messages, they have another seed
    kinds, counts = Counter(), Counter()
    for ends, status, data in noted["results"]:
        kind = "dropped" if status is None else "answered" if status == 200 else status // 100 if status else status
        assert kind in ("dropped", "answered", 4), (ends, status, data)
        assert kind != "dropped" or ends != "reads", (ends, status, data)
        kinds[kind], counts[status] = kinds[kind] + 1, counts[status] + 1
    assert min(kinds.values()) > 80 and {200, 400, 401, 404, 405} <= set(counts)
    assert hostile.finish_reason == "stop" and hostile.outcome.facts["numbers"]["rows"] == len(hostile.rows) > 100
    assert hostile.outcome.facts["numbers"]["refused"] > 100
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

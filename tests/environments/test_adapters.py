"""The adapters of environments/, each with the real package, which is not among the requirements: see the page.

A conversation turn by turn in its own process, and a step of GRPO.
"""

import importlib.metadata
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import helpers_scripts as h
import pyarrow.parquet as pq
import pytest
from launch import ROOT
from transformers import AutoConfig, AutoTokenizer

import train_grpo
from extras.agents import EnvironmentFlags, open_partner
from rl.data.template import load_tokenizer, stop_token_ids

pytestmark = pytest.mark.usefixtures("runs_here")
REWARD = str(ROOT / "rewards" / "environment.py")
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for x in tools %}{{ x['function']['name'] }} {% endfor %}"
    "<tool_call></tool_call><|im_end|>\n{% endif %}"
)
CALLS = "{% for x in message['tool_calls'] or [] %}<tool_call>{{ x['function'] | tojson }}</tool_call>{% endfor %}"
SEEN = {"prompt": [{"role": "user", "content": "1+1=?"}], "row_index": 3, "row_place": "a", "secret": 7}


@pytest.fixture
def task(tmp_path) -> h.Task:
    """A tiny random model with room for conversations and a template with tools."""
    task = h.make_task_with_stops(tmp_path)
    AutoConfig.from_pretrained(task.model, max_position_embeddings=512).save_pretrained(task.model)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    tokenizer.chat_template = TOOLS + tokenizer.chat_template.replace("+ '<|im_end|>", "}}" + CALLS + "{{ '<|im_end|>")
    tokenizer.save_pretrained(task.model)
    return task


class Heard(NamedTuple):
    """What an environment says to a turn."""

    messages: list[dict] | None
    report: dict[str, Any]
    reward: float | None = None


def talk(task: h.Task, path: Path, row: dict, *turns: tuple[str, list]) -> list[Heard]:
    """A conversation: the answers to `reset` and to each turn, a text and its calls."""
    flags = EnvironmentFlags(environment=str(path), environment_timeout=100)
    tokenizer = load_tokenizer(task.model)
    environments = open_partner(flags, tokenizer, stop_token_ids(task.model, tokenizer)).environments
    heard = []
    try:
        environments.start("a", row, 5)
        for i, turn in enumerate([None, *turns]):
            if turn is not None:
                environments.ask("a", *turn, i)
            [answer] = environments.answers(100)
            assert not answer.has_failed
            heard.append(Heard(answer.messages, environments.open["a"].report, answer.reward))
    finally:
        environments.close()
    return heard


def train(task: h.Task, tmp_path: Path, path: Path, **changes: Any) -> tuple[dict, list[dict]]:
    """A step of GRPO: its metrics, and the conversations that it logs."""
    runs = h.Runs(train_grpo, lambda run, **own: h.grpo_settings(task, run, **own), tmp_path)
    own = dict(
        environment=str(path),
        custom_reward_function=(REWARD,),
        max_turns=3,
        max_prompt_length=128,
        max_response_length=256,
    )
    short = dict(train_batch_size=2, ppo_mini_batch_size=2, total_training_steps=1, log_samples_freq=1)
    runs(**own | short | changes, environment_timeout=300)
    [line] = [x for x in runs.lines(1) if "actor/loss" in x]
    assert line["environment/error_frac"] == 0
    return line, h.read_jsonl(runs.dir(1) / "generations.jsonl")


# ---------------------------------------------------------------------------------------------------------------------
# TRL

GAME = """
import random

class Game:
    def reset(self, secret=None, **row):
        self.secret, self.tries, self.drawn = int(secret or 3), 0, random.random()
        assert "row_index" not in row and row["prompt"]
        return f"{self.drawn}"

    def guess(self, number: int) -> str:
        \"\"\"Guess the number.

        Args:
            number: What it may be.
        \"\"\"
        self.tries += 1
        return "right" if number == self.secret else "wrong"

    async def double(self, number: int) -> int:
        \"\"\"Twice a number.

        Args:
            number: Any one.
        \"\"\"
        return 2 * number

    def _hidden(self):
        pass

    def get_reward(self) -> float:
        return self.tries + self.drawn
"""
MINE = """
from environments.from_trl import FromTRL
from trl_game import Game

class Environment(FromTRL):
    factory = Game
"""


@pytest.fixture
def trl_game(tmp_path):
    (tmp_path / "trl_game.py").write_text(GAME)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def test_a_class_of_trl_plays(task, trl_game, tmp_path):
    turns = [("", [("guess", {"number": 6}), ("double", {"number": 4})]), ("", [("guess", {"x": 1})]), ("done", [])]
    first, second, third, last = talk(task, trl_game, SEEN, *turns)
    [told] = first.messages
    assert told["role"] == "user" and first.report["reward"] == float(told["content"])
    assert [x["content"] for x in second.messages] == ["wrong", "8"]
    assert third.messages[0]["content"].startswith("Error: TypeError") and last.messages is None
    assert last.report == {"calls": 3, "errors": 1, "reward": 1 + float(told["content"])}
    assert talk(task, trl_game, SEEN, *turns)[0].messages == first.messages  # the seed decides what it draws


def test_a_class_of_trl_trains(task, trl_game, tmp_path):
    line, conversations = train(task, tmp_path, trl_game)
    drawn = [x["messages"][0]["content"] for x in conversations]
    assert len(drawn) == 4 and len(set(drawn)) == 1  # one group is logged; all of it draw the same
    assert 0 < line["environment/reward"] < 1 and line["environment/calls"] == 0


def test_trl_finds_the_same_tools(trl_game, tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    utils = pytest.importorskip("transformers.utils")
    from datasets import Dataset

    from extras.agents.tools import load, schemas_of

    monkeypatch.syspath_prepend(str(tmp_path))
    from trl_game import Game

    described = schemas_of(load(str(trl_game), (), 100)[1])
    model = h.make_task(tmp_path).model
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    config = trl.GRPOConfig(output_dir=str(tmp_path / "trl"), report_to=[], use_cpu=True, bf16=False)
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "1"}]}])
    trainer = trl.GRPOTrainer(
        model, args=config, train_dataset=rows, processing_class=tokenizer, environment_factory=Game
    )
    assert [utils.get_json_schema(x) for x in trainer.tools] == described


# ---------------------------------------------------------------------------------------------------------------------
# OpenEnv

SERVER = """
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    number: int

class Hint(Observation):
    hint: str

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, secret=3, **kwargs):
        self.secret, self.left = secret, 2
        return Hint(hint=f"seed {seed}")

    def step(self, action, timeout_s=None, **kwargs):
        self.left -= 1
        is_right = action.number == self.secret
        return Hint(hint="wrong", reward=1.0 if is_right else -0.25, done=is_right or self.left == 0)

    @property
    def state(self):
        return State()

app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=64)
uvicorn.run(app, fd=int(sys.argv[1]), log_level="warning")
"""
PLAYER = """
from environments.from_openenv import FromOpenEnv

class Environment(FromOpenEnv):
    url = "http://127.0.0.1:PORT"

    def options(self, row):
        return {"secret": row.get("secret", 3)}

class Named(Environment):
    def action(self, reply):
        return {"number": reply.text}

    def show(self, observation):
        return observation["hint"]
"""


@pytest.fixture
def player(tmp_path):
    """A file with environments of a server that runs meanwhile."""
    pytest.importorskip("openenv")
    (tmp_path / "server.py").write_text(SERVER)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        descriptor = listening.fileno()
        command = [sys.executable, str(tmp_path / "server.py"), str(descriptor)]
        server = subprocess.Popen(command, pass_fds=[descriptor])
        (tmp_path / "player.py").write_text(PLAYER.replace("PORT", str(listening.getsockname()[1])))
        try:
            yield tmp_path / "player.py"
        finally:
            server.terminate()
            server.wait()


def test_a_server_of_openenv_plays(task, player):
    first, unread, second, last = talk(task, player, SEEN, ("x", []), ('{"number": 1}', []), ('{"number": 7}', []))
    assert json.loads(first.messages[0]["content"])["hint"] == "seed 5"
    assert unread.messages[0]["content"].startswith("Error: Expecting value")
    assert json.loads(second.messages[0]["content"])["hint"] == "wrong"
    assert last == Heard(None, {"steps": 2}, 1.0) and (unread.reward, second.reward) == (0.0, -0.25)

    turns = [(text, []) for text in ("many", "1", "2")]
    first, invalid, second, last = talk(task, Path(f"{player}:Named"), SEEN, *turns)
    assert [x.messages[0]["content"] for x in (first, second)] == ["seed 5", "wrong"]
    assert "VALIDATION_ERROR" in invalid.messages[0]["content"]
    assert last == Heard(None, {"steps": 2}, -0.25) and (invalid.reward, second.reward) == (0.0, -0.25)


def test_a_server_of_openenv_trains(task, player, tmp_path):
    line, conversations = train(task, tmp_path, Path(f"{player}:Named"), max_turns=4)
    said = [[x["content"] for x in c["messages"] if x["role"] == "user"] for c in conversations]
    assert len(said) == 4 and len({x[0] for x in said}) == 1 and all(x[0].startswith("seed ") for x in said)
    assert any(text.startswith("Error: ") for x in said for text in x) and "environment/turn_rewards" in line
    assert [x["score"] for x in conversations] == [sum(x.get("turn_rewards", ())) for x in conversations]


# ---------------------------------------------------------------------------------------------------------------------
# verifiers

CLASSIC = """
import verifiers as vf
from datasets import Dataset

class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "wrong"}]

    @vf.stop
    async def is_right(self, state):
        said = [x["completion"][-1].content for x in state["trajectory"]]
        return state["answer"] in said

async def right(completion, answer):
    return float(completion[-1]["content"] == answer)

async def turns(state):
    return len(state["trajectory"])

def add(a: int, b: int) -> int:
    \"\"\"Add two numbers.

    Args:
        a: One.
        b: Another.
    \"\"\"
    return a + b

def load_environment(has_tools=False):
    data = Dataset.from_list([{"question": f"{i}+1=?", "answer": str(i + 1)} for i in range(8)])
    rubric = vf.Rubric(funcs=[right, turns], weights=[1.0, 0.0])
    same = dict(dataset=data, rubric=rubric, max_turns=3, system_prompt="Be brief.")
    return vf.ToolEnv(tools=[add], **same) if has_tools else Guess(**same)
"""
TASKSET = """
import verifiers.v1 as vf

__all__ = ["Game"]

class Data(vf.TaskData):
    answer: str

class Task(vf.Task[Data]):
    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

class Game(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for i in range(8):
            yield Task(Data(prompt=f"{i}+1=?", system_prompt="Be brief.", answer=str(i + 1)), self.config.task)
"""
THEIRS = """
from environments.from_verifiers import FromVerifiers

class Environment(FromVerifiers):
    name = "vf_game"
"""
WITH_TOOLS = """
class Tools(FromVerifiers):
    name, arguments = "vf_game", {"has_tools": True}
"""


@pytest.fixture
def theirs(tmp_path, task, monkeypatch):
    """A file with an environment of the version that is installed, and the task with its rows."""
    pytest.importorskip("verifiers")
    is_old = importlib.metadata.version("verifiers").startswith(("0.1", "0.2", "0.3"))
    (tmp_path / "vf_game.py").write_text(CLASSIC if is_old else TASKSET)
    (tmp_path / "theirs.py").write_text(THEIRS + WITH_TOOLS * is_old)
    code = f"from theirs import Environment; Environment.write({str(tmp_path)!r}, 2)"
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(ROOT), str(tmp_path)]}; {code}"]
    subprocess.run(command, check=True)
    monkeypatch.setenv("PATH", str(ROOT / ".venv" / "bin"), prepend=":")  # has uv, which 0.4 starts
    return tmp_path / "theirs.py"


def rows_of(task: h.Task) -> list[dict]:
    return pq.read_table(task.train).to_pylist()


def test_an_environment_of_verifiers_plays(task, theirs):
    rows = rows_of(task)
    assert len(rows) == 6 and rows[0]["extra_info"] == {"index": 2}
    assert [x["content"] for x in rows[0]["prompt"]] == ["Be brief.", "2+1=?"]
    if importlib.metadata.version("verifiers").startswith("0.4"):
        assert talk(task, theirs, rows[0], ("3", [])) == [Heard([], {}), Heard(None, {"reward": 1.0})]
        assert talk(task, theirs, rows[0], ("4", []))[1] == Heard(None, {"reward": 0.0})
        return
    first, second, last = talk(task, theirs, rows[0], ("7", []), ("3", []))
    assert first == Heard([], {}) and second == Heard([{"role": "user", "content": "wrong"}], {})
    assert last.messages is None and (last.report["reward"], last.report["turns"]) == (1.0, 2)
    ended = talk(task, theirs, rows[0], ("7", []), ("8", []), ("9", []))[-1]
    assert ended.messages is None and (ended.report["reward"], ended.report["turns"]) == (0.0, 3)


def test_tools_of_verifiers_are_called(task, theirs):
    if importlib.metadata.version("verifiers").startswith("0.4"):
        pytest.skip("tools of 0.4 are not adapted")
    calls = [("add", {"a": 2, "b": 1}), ("add", {"a": 2, "b": 2})]
    first, second, last = talk(task, Path(f"{theirs}:Tools"), rows_of(task)[0], ("let me see", calls), ("3", []))
    assert [(x["role"], x["tool_call_id"], x["content"]) for x in second.messages] == [
        ("tool", "call00000", "3"),
        ("tool", "call00001", "4"),
    ]
    assert first.messages == [] and last.messages is None and last.report["reward"] == 1.0


def test_an_environment_of_verifiers_trains(task, theirs, tmp_path):
    line, conversations = train(task, tmp_path, theirs)
    assert len(conversations) == 4 and "environment/reward" in line
    if not importlib.metadata.version("verifiers").startswith("0.4"):
        assert 1 < line["environment/turns"] <= 3 and line["num_turns/max"] == 3

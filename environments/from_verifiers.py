"""An environment of `verifiers`: what `load_environment` gives, or a taskset of version 0.4.

    python -c "from mine import Environment; Environment.write('data/mine', num_test=100)"
    torchrun train_grpo.py --environment mine.py --custom-reward-function rewards/environment.py
        --train-files data/mine/train.parquet --val-files data/mine/test.parquet

mine.py, for an installed environment `wordle`:

    from environments.from_verifiers import FromVerifiers

    class Environment(FromVerifiers):
        name = "wordle"
        arguments = {}  # those of load_environment; with 0.4 fields of its EnvConfig, such as {"taskset": {...}}

`write` writes its prompts. verifiers runs the conversation itself, with its stops, tools and rubric. When it asks its
model it asks a server in the conversation's process, and gets what the policy has sampled. `random` is seeded alike for
a group. The reward comes when verifiers ends the conversation, where --max-turns or --max-response-length does that
first, there is none, and rewards/environment.py gives 0.

Not done: rewards of a group, prompts that are not messages, images; with 0.4 tools, several agents, tasks without a
prompt. A conversation whose history is rewritten has no score.

Tried with verifiers 0.3.1 (several turns, tools) and 0.4.0 (one turn, its harness `null` in a subprocess, whose start
takes a second of a core and needs `uv`: raise --environment-timeout for many conversations).
"""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from aiohttp import web

from extras.agents.tools import Reply

try:
    from verifiers.types import ClientConfig
    from verifiers.utils.env_utils import load_environment
except ImportError:  # 0.4
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    ClientConfig = None


class FromVerifiers:
    """A conversation that verifiers runs, with the policy as its model."""

    name, arguments, tools = "", {}, ()

    def __init_subclass__(cls) -> None:
        if ClientConfig:
            cls.environment = load_environment(cls.name, **cls.arguments)
            cls.tasks = cls.environment.get_dataset()
            cls.tools = [x.model_dump() for x in cls.environment.tool_defs or ()]
        else:
            agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
            fields = {"agent": agent, "taskset": {}} | cls.arguments
            fields["taskset"] = {"id": cls.name} | fields["taskset"]
            cls.environment = load_environment(resolve_env_config(fields))
            cls.tasks = list(cls.environment.taskset)

    @classmethod
    def write(cls, folder: str, num_test: int) -> None:
        """Write test.parquet with the first tasks, and train.parquet with the others."""
        from data import files

        same = {"data_source": cls.name, "reward_model": {"style": "rule", "ground_truth": ""}}
        prompts = [x["prompt"] if ClientConfig else _prompt(x.data) for x in cls.tasks]
        rows = [same | {"prompt": _plain(x), "extra_info": {"index": i}} for i, x in enumerate(prompts)]
        files.write(Path(folder), {"test": rows[:num_test], "train": rows[num_test:]})

    async def reset(self, row: dict[str, Any], seed: int) -> list[dict]:
        """Begin, and return what stands after the row's prompt when verifiers first asks."""
        random.seed(seed)
        self.found, self.requests, self.said = {}, asyncio.Queue(), row["prompt"]
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        server = web.AppRunner(app)
        await server.setup()
        await web.TCPSite(server, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{server.addresses[0][1]}/v1"
        self.rollout = asyncio.create_task(self._run(self.tasks[row["extra_info"]["index"]], url))
        return await self._next()

    async def step(self, reply: Reply) -> list[dict] | None:
        """Answer verifiers. Returns what it adds before it asks again, or None if it has ended."""
        readable = [x for x in reply.calls if x.arguments is not None]
        functions = [{"name": x.name, "arguments": json.dumps(x.arguments)} for x in readable]
        calls = [
            {"index": i, "id": x.id, "type": "function", "function": function}
            for i, (x, function) in enumerate(zip(readable, functions, strict=True))
        ]
        text = reply.text or " "  # verifiers takes no text for a fault of the server
        message = {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})
        self.said = [*self.said, message]
        self.answer.set_result(message)
        return await self._next()

    def report(self) -> dict[str, float]:
        """The reward and its parts, at the end."""
        return self.found

    async def close(self) -> None:
        """End what verifiers has started."""
        self.rollout.cancel()
        await asyncio.wait([self.rollout])

    async def _run(self, task: Any, url: str) -> None:
        """Let verifiers run the conversation, with the model at `url`."""
        if ClientConfig:
            client = ClientConfig(api_base_url=url, api_key_var="NONE")
            found = await self.environment.run_rollout(task, client, "policy", {})
            score, parts, problem = found["reward"], found["metrics"], found.get("error")
        else:
            client = vf.EvalClientConfig(base_url=url, api_key_var="NONE")
            async with self.environment.serving():
                found = await self.environment.run_episode(task, vf.ModelContext(model="policy", client=client))
            score, parts = sum(x.reward for x in found.traces), {}
            problem = None if found.ok else [*found.errors, *(error for x in found.traces for error in x.errors)]
        if problem:
            raise RuntimeError(f"verifiers: {problem}")
        self.found = {**parts, "reward": score}

    async def _next(self) -> list[dict] | None:
        """What is new when verifiers asks, or None when it has ended."""
        asked = asyncio.create_task(self.requests.get())
        await asyncio.wait([asked, self.rollout], return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            return await self.rollout  # None, or what it raises
        body, before = asked.result(), _plain(self.said)
        if body.get("tools") and not self.tools:
            raise ValueError("verifiers offers tools of which the policy does not know")
        self.said = _plain(body["messages"])
        if self.said[: len(before)] != before:
            raise ValueError(f"verifiers has rewritten the conversation: {before} became {self.said}")
        return self.said[len(before) :]

    async def _complete(self, request: web.Request) -> web.Response:
        """Answer a request for a turn, as OpenAI's API does, in one piece of a stream if it asks for one."""
        body, self.answer = await request.json(), asyncio.get_running_loop().create_future()
        self.requests.put_nowait(body)
        message = await self.answer
        is_stream, reason = body.get("stream"), "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "finish_reason": reason, "delta" if is_stream else "message": message}
        kind = "chat.completion.chunk" if is_stream else "chat.completion"
        text = json.dumps({"id": "0", "object": kind, "created": 0, "model": "policy", "choices": [choice]})
        if is_stream:
            return web.Response(text=f"data: {text}\n\ndata: [DONE]\n\n", content_type="text/event-stream")
        return web.Response(text=text, content_type="application/json")


def _prompt(task: Any) -> list[Any]:
    system = [{"role": "system", "content": task.system_prompt}] if task.system_prompt else []
    return system + ([{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else list(task.prompt))


def _plain(messages: list[Any]) -> list[dict]:
    """Role, content as a text, and the call that is answered."""
    found = []
    for x in (x if isinstance(x, dict) else x.model_dump() for x in messages):
        content = x.get("content") or ""
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        answered = {"tool_call_id": x["tool_call_id"]} if x.get("tool_call_id") else {}
        found.append({"role": x["role"], "content": text} | answered)
    return found

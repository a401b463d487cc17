"""The endpoint that agents talk to, and the life of their processes.

An event loop runs in a thread of its own. It touches neither the engine nor tokens. What agents ask, and that they have
ended, waits in `Server.inbox` until the rank's thread takes it.
"""

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from extras.agents.plain import plain
from extras.agents.programs.requests import MODEL, Refused, body_of, check, pieces_of
from extras.agents.programs.starter import MAX_MESSAGE
from rl import children

MAX_BODY, MAX_REPORT = 32 << 20, 1 << 20  # bytes
RETRY_SECONDS = 2.0  # a library that has closed a connection asks again within this time, or has given up
KEEP_ALIVE_SECONDS, WAITING_SECONDS = 600, 10
CLOSED = 499  # the status for a connection that nobody reads from any more


class Asked(NamedTuple):
    """A completion that an agent asks for."""

    key: Hashable  # of the agent
    body: dict  # as `requests.check` lets it pass
    answer: "Answer"


class Left(NamedTuple):
    """An agent no longer waits for the answer to what it has asked."""

    key: Hashable
    asked: Asked


class Ended(NamedTuple):
    """An agent has ended."""

    key: Hashable
    report: dict[str, Any]
    exit_code: int | None  # None if it was killed from here
    problem: str | None


@dataclass(eq=False)
class Answer:
    """Where the answer to a request is put, by any thread."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future
    num_listeners: int = 0  # open connections that wait for it
    is_delivered: bool = False  # the agent has got it
    is_gone: bool = False  # nobody waits for it, and it is not asked for again

    def put(self, value: dict | Refused) -> None:
        """Answer the request, unless it has an answer."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(lambda: self.future.done() or self.future.set_result(value))


@dataclass(eq=False)
class Agent:
    """A process and what it has asked."""

    number: int
    key: Hashable
    row: dict
    seed: int
    token: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}")
    num_open: int = 0  # requests without an answer
    idle_since: float = 0.0
    problem: str | None = None  # why it was killed
    report: int = -1  # the descriptor of the file in which its report is
    requests: dict[bytes, Asked] = field(default_factory=dict)  # the newest by a hash of its body


class Server:
    """Starts agents, and takes their requests. It begins with the first agent, since an engine is not to be forked from
    a process with this thread.

    Args: command, of an agent; timeout, seconds in which an agent may ask for nothing; at_once, agents at a time.
    """

    def __init__(self, command: str, timeout: float, at_once: int):
        self.command, self.timeout, self.at_once = command, timeout, at_once
        self.inbox: queue.SimpleQueue[Asked | Left | Ended] = queue.SimpleQueue()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.starter = children.start_worker("extras.agents.programs.starter.main", theirs)
        self.loop = asyncio.new_event_loop()
        self.thread: threading.Thread | None = None
        self.count = 0
        self.url = ""
        self.waiting: list[Agent] = []  # to be started
        self.running: dict[int, Agent] = {}
        self.aside: set[int] = set()  # those of `running` that a pause has left without a loop
        self.held: list[Agent] = []  # to be started after the pause
        self.by_token: dict[str, Agent] = {}

    # --- called by the rank's thread ---

    def start(self, key: Hashable, row: dict, seed: int) -> None:
        """Start an agent as soon as there is room for it. Its events have this key."""
        if self.thread is None:
            self._begin()
        self.count += 1
        self.loop.call_soon_threadsafe(self._queue, Agent(self.count, key, row, seed))

    def end(self, key: Hashable) -> None:
        """Kill an agent that is given up. Nothing more is heard of it."""
        self.loop.call_soon_threadsafe(self._give_up, key)

    def set_aside(self) -> None:
        """From here on none of the agents so far has a place among those that run at a time, or gets one."""
        self.loop.call_soon_threadsafe(self._set_aside)

    def take_up(self) -> None:
        """Count all agents again, and start those that had no place."""
        self.loop.call_soon_threadsafe(self._take_up)

    def close(self) -> None:
        """End all agents, the endpoint and the process that starts agents."""
        if self.thread is not None:
            self.loop.call_soon_threadsafe(setattr, self.uvicorn, "should_exit", True)
            self.loop.call_soon_threadsafe(setattr, self.uvicorn, "force_exit", True)
            self.thread.join(timeout=5)
        children.end_worker(self.starter)
        self.control.close()

    def _begin(self) -> None:
        # asyncio switches off delays of 40 ms only where the socket says that it is of TCP.
        endpoint = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        endpoint.bind(("127.0.0.1", 0))
        endpoint.listen(2048)
        self.url = f"http://127.0.0.1:{endpoint.getsockname()[1]}/v1"
        routes = [
            Route("/v1/chat/completions", self._completions, methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        app = Starlette(routes=routes)
        app.router.redirect_slashes = False  # clients do not follow redirects of what they post
        settings = dict(log_level="error", access_log=False, lifespan="off", timeout_keep_alive=KEEP_ALIVE_SECONDS)
        self.uvicorn = uvicorn.Server(uvicorn.Config(app, ws="none", **settings))
        self.uvicorn.capture_signals = contextlib.nullcontext  # signals are the run's
        self.thread = threading.Thread(target=self._run, args=(endpoint,), daemon=True)
        self.thread.start()

    # --- called by the thread of the loop ---

    def _run(self, endpoint: socket.socket) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.add_reader(self.control, self._hear)
        watch = self.loop.create_task(self._watch())
        self.loop.run_until_complete(self.uvicorn.serve(sockets=[endpoint]))
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self.loop.run_until_complete(watch)
        self.loop.remove_reader(self.control)

    def _queue(self, agent: Agent) -> None:
        self.waiting.append(agent)
        self._start_more()

    def _set_aside(self) -> None:
        self.aside, self.held, self.waiting = set(self.running), self.held + self.waiting, []

    def _take_up(self) -> None:
        self.aside, self.held, self.waiting = set(), [], self.held + self.waiting
        self._start_more()

    def _start_more(self) -> None:
        while self.waiting and len(self.running.keys() - self.aside) < self.at_once:
            agent = self.waiting.pop(0)
            try:
                self._launch(agent)
            except OSError as error:
                self._close(agent, None, f"it cannot be started: {error!r}")

    def _launch(self, agent: Agent) -> None:
        stdin = os.memfd_create("row")
        agent.report = os.memfd_create("report")
        with open(stdin, "wb") as file:
            file.write(json.dumps(plain(agent.row)).encode(errors="replace") + b"\n")
            file.flush()
            file.seek(0)
            more = {
                **{name: self.url for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE")},
                "OPENAI_API_KEY": agent.token,
                "OPENAI_MODEL": MODEL,
                "GLASSRL_SEED": str(agent.seed),
            }
            message = json.dumps(["start", agent.number, self.command, more]).encode()
            socket.send_fds(self.control, [message], [file.fileno(), agent.report])
        self.running[agent.number] = self.by_token[agent.token] = agent
        agent.idle_since = time.monotonic()

    def _kill(self, agent: Agent, problem: str) -> None:
        agent.problem = agent.problem or problem
        with contextlib.suppress(OSError):  # the starter has ended, and the agent with it
            self.control.send(json.dumps(["end", agent.number]).encode())

    def _give_up(self, key: Hashable) -> None:
        self.waiting = [agent for agent in self.waiting if agent.key is not key]
        self.held = [agent for agent in self.held if agent.key is not key]
        for agent in [agent for agent in self.running.values() if agent.key is key]:
            self._kill(agent, "it was given up")

    def _hear(self) -> None:
        """What the starter says: an agent has ended."""
        try:
            message = self.control.recv(MAX_MESSAGE)
        except OSError:
            message = b""
        if not message:
            self.loop.remove_reader(self.control)
            for agent in [*self.running.values(), *self.waiting, *self.held]:
                self._close(agent, None, "the process that starts agents has ended")
            return
        number, code = json.loads(message)
        if (agent := self.running.get(number)) is not None:
            problem = agent.problem or (f"it exited with {code}" if code else None)
            self._close(agent, None if agent.problem else code, "it cannot be started" if code is None else problem)
            self._start_more()

    def _close(self, agent: Agent, code: int | None, problem: str | None) -> None:
        self.running.pop(agent.number, None)
        self.by_token.pop(agent.token, None)
        report: dict[str, Any] = {}
        try:
            if agent.report >= 0:
                lines = os.pread(agent.report, MAX_REPORT + 1, 0)
                os.close(agent.report)
                report = _report_of(lines)
        except (OSError, ValueError, RecursionError) as error:
            problem = problem or f"its report cannot be read: {error}"
        self.inbox.put(Ended(agent.key, report, code, problem))

    async def _watch(self) -> None:
        """Kill agents that ask for nothing."""
        while True:
            await asyncio.sleep(min(1.0, self.timeout / 4))
            for agent in list(self.running.values()):
                if agent.num_open == 0 and time.monotonic() - agent.idle_since > self.timeout:
                    self._kill(agent, f"it asked for nothing within {self.timeout:g} s")

    def _agent(self, request: Request) -> Agent:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        token = token.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        if (agent := self.by_token.get(token)) is None:
            raise Refused("no agent has this key", status=401)
        return agent

    async def _models(self, request: Request) -> Response:
        try:
            self._agent(request)
        except Refused as error:
            return Answered(error.body, error.status)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "glassrl"}
        return Answered({"object": "list", "data": [model]})

    async def _completions(self, request: Request) -> Response:
        try:
            agent = self._agent(request)
            raw = await _received(request)
            body = check(body_of(raw))
        except Refused as error:
            return Answered(error.body, error.status)
        except ClientDisconnect:
            return Response(status_code=CLOSED)
        asked = self._asked(agent, raw, body, request.headers.get("x-stainless-retry-count", "0"))
        agent.num_open += 1
        asked.answer.num_listeners += 1
        gone = self.loop.create_task(_disconnected(request))
        future, leave = asked.answer.future, functools.partial(self._leave, agent, asked, gone)
        try:
            # A refusal has a status of its own, also if a stream is asked for.
            patience = WAITING_SECONDS if body.get("stream") else None
            await asyncio.wait([future, gone], timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if body.get("stream") and not gone.done() and not (future.done() and isinstance(future.result(), Refused)):
                response, leave = Stream(self._events(asked, gone), leave), lambda: None
                return response
            if gone.done():
                return Response(status_code=CLOSED)
            answer, asked.answer.is_delivered = future.result(), True
            return Answered(answer.body, answer.status) if isinstance(answer, Refused) else Answered(answer)
        finally:
            leave()

    def _asked(self, agent: Agent, raw: bytes, body: dict, retries: str) -> Asked:
        """The request, or an earlier one that a library repeats since it has lost the connection: what is sampled for
        that one is the answer to this one too.
        """
        key = hashlib.sha256(raw).digest()
        earlier = agent.requests.get(key) if retries not in ("", "0") else None
        if earlier is not None and not earlier.answer.is_gone:
            future = earlier.answer.future
            if not future.done() or not isinstance(future.result(), Refused):
                return earlier
        asked = agent.requests[key] = Asked(agent.key, body, Answer(self.loop, self.loop.create_future()))
        self.inbox.put(asked)
        return asked

    def _leave(self, agent: Agent, asked: Asked, gone: asyncio.Task) -> None:
        """A connection no longer waits for an answer. If it did not get it, its library may soon ask again."""
        gone.cancel()
        agent.num_open -= 1
        agent.idle_since = time.monotonic()
        answer = asked.answer
        answer.num_listeners -= 1

        def give_up() -> None:
            if not (answer.is_gone or answer.num_listeners or answer.is_delivered):
                answer.is_gone = True
                self.inbox.put(Left(asked.key, asked))

        if not answer.is_delivered:
            self.loop.call_later(RETRY_SECONDS, give_up)

    async def _events(self, asked: Asked, gone: asyncio.Task) -> AsyncIterator[str]:
        """The answer as a stream. All of it comes when it is complete."""
        future = asked.answer.future
        while not future.done():
            yield ": it is still sampled\n\n"
            await asyncio.wait([future, gone], timeout=WAITING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return
        answer, asked.answer.is_delivered = future.result(), True
        for piece in [answer.body] if isinstance(answer, Refused) else pieces_of(answer, asked.body):
            yield f"data: {json.dumps(piece)}\n\n"
        yield "data: [DONE]\n\n"


class Answered(JSONResponse):
    """An answer in ASCII, since the policy may call a tool by half of a character, which UTF-8 cannot say."""

    def render(self, content: Any) -> bytes:
        """The answer's bytes."""
        return json.dumps(content, separators=(",", ":")).encode()


class Stream(StreamingResponse):
    """A stream that leaves its request however it ends, also if its connection is closed before it has begun."""

    def __init__(self, events: AsyncIterator[str], leave: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream")
        self.leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.leave()


async def _received(request: Request) -> bytes:
    """The body of a request. Raises Refused if it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise Refused(f"a request has at most {MAX_BODY} bytes", status=413)
    return bytes(body)


async def _disconnected(request: Request) -> None:
    """Return when the connection is closed."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _report_of(lines: bytes) -> dict[str, Any]:
    """The last line of a report, which is a JSON object. Raises ValueError if it is anything else."""
    if len(lines) > MAX_REPORT:
        raise ValueError(f"it has more than {MAX_REPORT} bytes")
    last = next((line for line in reversed(lines.splitlines()) if line.strip()), b"{}")
    report = json.loads(last)
    if not isinstance(report, dict):
        raise ValueError(f"{last!r:.200} is not a JSON object")
    return report

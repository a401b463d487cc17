"""Asks servers over HTTP: the judge of rewards/judge.py, and the teacher behind --teacher-url.

Tried again are failed connections, tries whose time is over, the statuses 408, 429 and 5xx, and answers that are too
large or of another form. Pauses are random and double; a server's Retry-After is kept, and if time ends before that,
there is no other try. Redirects are refused: they would carry a key to another host. Proxies are those of the
environment, such as HTTPS_PROXY.
"""

import asyncio
import functools
import json
import random
import re
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import httpx

T = TypeVar("T")
Read = Callable[[dict, bytes], T]  # (body, answer) -> what the answer says; a ValueError says what is wrong with it
TRIES = 5
FIRST_PAUSE_S = 0.5  # doubles with every try
MAX_SAID = 500  # bytes that are read of the text with which a server refuses
# What it raises to read JSON that has another form.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


certificates = functools.cache(ssl.create_default_context)  # of this machine: reading them takes 70 ms of a core


class Failed(Exception):
    """No answer. The text says why, and nothing that the server said, which may repeat a key. `said`: how that begins
    if it refused the request.
    """

    def __init__(self, why: str, said: str | None = None):
        super().__init__(why)
        self.said = said


@dataclass(frozen=True)
class Server:
    """Where to ask, and how much an answer may take."""

    url: str
    seconds: float  # of one try, from looking up the name to the last byte; all tries and pauses have twice as many
    max_bytes: int  # of an answer
    headers: dict[str, str] = field(default_factory=dict)

    def post(self, bodies: Sequence[dict], read: Read[T], *, at_once: int = 1) -> list[T]:
        """The answers to bodies, which are sent as JSON. Raises Failed as soon as one of these requests has failed."""

        async def ask_all() -> list[T]:
            gate = asyncio.Semaphore(at_once)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask(body, read, gate)) for body in bodies]
            return [task.result() for task in tasks]

        def run() -> list[T]:
            loop = asyncio.new_event_loop()
            try:
                return loop.run_until_complete(ask_all())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                loop.close()  # asyncio.run would also wait for the look-up of a name, for as long as that takes

        with ThreadPoolExecutor(1) as thread:  # the caller may run in an event loop of its own
            return thread.submit(run).result()

    async def _ask(self, body: dict, read: Read[T], gate: asyncio.Semaphore) -> T:
        async with gate:
            end = time.monotonic() + 2 * self.seconds
            for attempt in range(1, TRIES + 1):
                pause = FIRST_PAUSE_S * 2 ** (attempt - 1) * random.Random().uniform(0.5, 1.5)
                reply, text, why = await self._try(body, min(self.seconds, end - time.monotonic()))
                if reply is not None and not reply.is_success:  # whatever became of its text
                    why = f"HTTP status {reply.status_code}"
                    if reply.status_code not in (408, 429) and reply.status_code < 500:
                        raise Failed(why, text[:MAX_SAID].decode(errors="replace"))
                    asked = reply.headers.get("Retry-After", "")
                    pause = max(pause, float(asked)) if re.fullmatch("[0-9]{1,6}", asked) else pause
                elif why is None:
                    try:
                        return read(body, text)
                    except ValueError as error:
                        why = f"unusable reply ({error})"
                if attempt == TRIES or time.monotonic() + pause >= end:
                    raise Failed(why)
                await asyncio.sleep(pause)

    async def _try(self, body: dict, seconds: float) -> tuple:
        """The reply, None if not even its headers came; its text, or how that begins; and what went wrong, or None."""
        reply, text, why, data = None, bytearray(), None, json.dumps(body).encode()
        headers = self.headers | {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        try:
            async with (
                asyncio.timeout(seconds) as limit,
                httpx.AsyncClient(verify=certificates(), timeout=None) as client,
            ):
                async with client.stream("POST", self.url, content=data, headers=headers) as reply:
                    async for piece in reply.aiter_raw():
                        text += piece
                        if len(text) > (self.max_bytes if reply.is_success else MAX_SAID):
                            limit.reschedule(0)  # no `break`: asyncio complains of generators that are left open
        except TimeoutError:
            why = "no whole answer in time"
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, ImportError, ExceptionGroup) as error:
            why = f"no connection ({type(error).__name__})"
        if len(text) > self.max_bytes:
            why = f"unusable reply (more than {self.max_bytes} bytes)"
        return reply, text, why

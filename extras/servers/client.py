"""Requests to a server, and the tries of each, see `extras.servers`."""

import asyncio
import functools
import json
import random
import re
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from extras.servers import Failed, Read, Server, T

TRIES = 5
FIRST_PAUSE_S = 0.5  # doubles with every try
MAX_SAID = 500  # bytes that are read of the text with which a server refuses


certificates = functools.cache(ssl.create_default_context)  # of this machine: reading them takes 70 ms of a core


def post(server: Server, bodies: Sequence[dict], read: Read[T], *, at_once: int) -> list[T]:
    """The answers to bodies, of which `at_once` are asked at a time, see `Server.post`."""

    async def ask_all() -> list[T]:
        gate = asyncio.Semaphore(at_once)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_ask(server, body, read, gate)) for body in bodies]
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


async def _ask(server: Server, body: dict, read: Read[T], gate: asyncio.Semaphore) -> T:
    async with gate:
        end = time.monotonic() + 2 * server.seconds
        for attempt in range(1, TRIES + 1):
            pause = FIRST_PAUSE_S * 2 ** (attempt - 1) * random.Random().uniform(0.5, 1.5)
            reply, text, why = await _try(server, body, min(server.seconds, end - time.monotonic()))
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


async def _try(server: Server, body: dict, seconds: float) -> tuple:
    """The reply, or None if not even its headers came, its text, or how that begins, and what went wrong, or None."""
    reply, text, why, data = None, bytearray(), None, json.dumps(body).encode()
    headers = server.headers | {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    try:
        async with (
            asyncio.timeout(seconds) as limit,
            httpx.AsyncClient(verify=certificates(), timeout=None) as client,
        ):
            async with client.stream("POST", server.url, content=data, headers=headers) as reply:
                async for piece in reply.aiter_raw():
                    text += piece
                    if len(text) > (server.max_bytes if reply.is_success else MAX_SAID):
                        limit.reschedule(0)  # no `break`: asyncio complains of generators that are left open
    except TimeoutError:
        why = "no whole answer in time"
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, ImportError, ExceptionGroup) as error:
        why = f"no connection ({type(error).__name__})"
    if len(text) > server.max_bytes:
        why = f"unusable reply (more than {server.max_bytes} bytes)"
    return reply, text, why

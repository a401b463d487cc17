"""Servers that are asked over HTTP: the judge of rewards/judge.py, and the teacher behind --teacher-url.

Tried again are failed connections, tries whose time is over, the statuses 408, 429 and 5xx, and answers that are too
large or of another form. Pauses are random and double. A server's Retry-After is kept, and if time ends before that,
there is no other try. Redirects are refused. They would carry a key to another host. Proxies are those of the
environment, such as HTTPS_PROXY.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
Read = Callable[[dict, bytes], T]  # (body, answer) -> what the answer says. A ValueError says what is wrong with it.
# What it raises to read JSON that has another form.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


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
    seconds: float  # of one try, from looking up the name to the last byte. All tries and pauses have twice as many.
    max_bytes: int  # of an answer
    headers: dict[str, str] = field(default_factory=dict)

    def post(self, bodies: Sequence[dict], read: Read[T], *, at_once: int = 1) -> list[T]:
        """The answers to bodies, which are sent as JSON. Raises Failed as soon as one of these requests has failed."""
        from extras.servers import client

        return client.post(self, bodies, read, at_once=at_once)

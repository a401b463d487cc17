"""A server on this machine that answers wrongly, in all ways that do not depend on what was asked."""

import contextlib
import gzip
import http.server
import json
import threading
from collections.abc import Callable, Iterator

from extras.servers import client

START = b"HTTP/1.1 200 OK\r\n"
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"
IN_TIME, FORM, BROKEN = "no whole answer in time", "unusable reply", "no connection"
SHORT, LONG = 0.2, 60.0  # seconds of a try: one that time ends, and one that ends before, on a slow machine too


def hurry(monkeypatch) -> None:
    """Short pauses between tries."""
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.001)


class Server(http.server.ThreadingHTTPServer):
    """`way` is a function of the handler of a request, which has read it: `path` and `body`. It writes what it likes to
    `handler.wfile`, until `closing`. `seen` counts requests.
    """

    daemon_threads, request_queue_size = True, 64

    def __init__(self, way: Callable):
        super().__init__(("127.0.0.1", 0), Handler)
        self.way, self.seen, self.closing = way, 0, threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """Silent: the client has hung up."""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen += 1
        self.close_connection = True
        self.server.way(self)

    def log_message(self, *args):
        """Silent."""


@contextlib.contextmanager
def serving(way: Callable) -> Iterator[Server]:
    """A running server."""
    with Server(way) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.closing.set()
        server.shutdown()


def reply(content: bytes | object, status: str = "200 OK", *headers: str) -> Callable:
    """A whole answer: bytes, or an object as JSON."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = "".join(f"{x}\r\n" for x in (f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(data)}", ""))
    return lambda handler: handler.wfile.write(head.encode() + data)


def again(start: bytes, piece: bytes, pause: float) -> Callable:
    """`start`, then for ever a piece after a pause, each in time for a limit on a single read."""

    def way(handler):
        handler.wfile.write(start)
        while not handler.server.closing.wait(pause):
            handler.wfile.write(piece)

    return way


def drip(start: bytes, piece: bytes) -> Callable:
    return again(start, piece, 0.02)


def flood(start: bytes, piece: bytes) -> Callable:
    return again(start, piece * ((1 << 16) // len(piece)), 0)


def cut(start: bytes) -> Callable:
    return lambda handler: handler.wfile.write(start)


WAYS = {  # -> what is said of it, and the way
    "a status line in drops": (IN_TIME, drip(b"HTTP/1.1 200 ", b"O")),
    "a header in drops": (IN_TIME, drip(START + b"X: ", b"x")),
    "headers in drops": (IN_TIME, drip(START, b"X: x\r\n")),
    "a body in drops": (IN_TIME, drip(START + b"\r\n", b" ")),
    "a chunk's size in drops": (IN_TIME, drip(CHUNKED, b"0")),
    "trailers in drops": (IN_TIME, drip(CHUNKED + b"0\r\n", b"X: x\r\n")),
    "100 Continue for ever": (IN_TIME, drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n")),
    "silence": (IN_TIME, drip(b"", b"")),
    "silence after the headers": (IN_TIME, drip(START + b"\r\n", b"")),
    "silence within the body": (IN_TIME, drip(START + b"Content-Length: 100\r\n\r\n{", b"")),
    "an endless line": (BROKEN, flood(START + b"X: ", b"x")),
    "endless headers": (BROKEN, flood(START, b"X: x\r\n")),
    "an endless body": (f"{FORM} (more than ", flood(START + b"\r\n", b"[")),
    "an endless body in chunks": (f"{FORM} (more than ", flood(CHUNKED, b"8000\r\n" + b"[" * 32768 + b"\r\n")),
    "a petabyte": (f"{FORM} (more than ", flood(START + b"Content-Length: 1000000000000000\r\n\r\n", b" ")),
    "a bomb": (FORM, reply(gzip.compress(bytes(1 << 26)), "200 OK", "Content-Encoding: gzip")),
    "nothing": (BROKEN, cut(b"")),
    "half of the headers": (BROKEN, cut(START)),
    "half of the body": (BROKEN, cut(START + b"Content-Length: 100\r\n\r\n{")),
    "no HTTP": (BROKEN, cut(b"SSH-2.0-OpenSSH_9.2\r\n")),
    "other protocols": (BROKEN, cut(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n")),
    "a length that is not a number": (BROKEN, cut(START + b"Content-Length: many\r\n\r\n{}")),
    "an empty body": (FORM, reply(b"")),
    "a page": (FORM, reply(b"<html>", "200 OK", "Content-Type: text/html")),
    "no text": (FORM, reply(b"\xff\xfe\xfd")),
    "half of an object": (FORM, reply(b'{"choices": [')),
    "deep lists": (FORM, reply(b"[" * 200_000)),
    "a list": (FORM, reply([])),
    "null": (FORM, reply(None)),
    "a number": (FORM, reply(3)),
    "an empty object": (FORM, reply({})),
    "204": (FORM, cut(b"HTTP/1.1 204 No Content\r\n\r\n")),
    "500": ("HTTP status 500", reply(b"key", "500 Broken")),
    "503 for an hour": ("HTTP status 503", reply(b"", "503 Busy", "Retry-After: 3600")),
    "429": ("HTTP status 429", reply(b"", "429 Too Many Requests")),
    "999": ("HTTP status 999", reply(b"", "999 What")),
}
REFUSALS = {
    "404": ("HTTP status 404", reply(b"no such model", "404 Not Found")),
    "401 in drops": ("HTTP status 401", drip(b"HTTP/1.1 401 No\r\n\r\nno such", b" model" * 20)),
    "an endless 400": ("HTTP status 400", flood(b"HTTP/1.1 400 Bad\r\n\r\nno such ", b"model")),
    "a redirect": ("HTTP status 302", reply(b"no such model", "302 Found", "Location: http://127.0.0.1:9/v1")),
}
SECONDS = {name: SHORT if said == IN_TIME else LONG for name, (said, _) in (WAYS | REFUSALS).items()}
ENDLESS = [name for name in WAYS if "endless" in name or name in ("a petabyte", "a bomb")]

"""An agent that sends what no library would: generated requests, each of which is answered with 200 or 4xx, or dropped.

`requests` makes them, as bytes. The agent asks the same good questions before and after, and notes the answers.
"""

import json
import os
import random
import socket
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import urlparse

THREADS, SECONDS = 8, 8
TOOL = '{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}'
MANY = ", ".join(['{"role": "user", "content": "x"}'] * 3000)
# Texts of JSON that stand where something else is expected.
JUNK = [
    *("null", "true", "false", "0", "-1", "1.5", "1e400", "NaN", "-Infinity", "1" * 400, "1" * 5000, "-0"),
    *(
        '""',
        '"many"',
        '"x\\u0000y"',
        '"\\ud800"',
        '"a\\udfffb"',
        '"\\ud83d\\ude00"',
        '"🏳️‍🌈é\u2028"',
        '"<|im_end|>"',
        '"⁂turn"',
    ),
    *('"⁂thought"', '"</think>"', '"<tool_call>"', '"{"', '"{{ x }}{% endfor %}"', '"' + "long " * 5000 + '"'),
    *('"' + "é" * 3000 + '"', "[]", "{}", "[[]]", "[null]", '[""]', "[{}]", '{"": ""}', '{"a": [1, {"b": null}]}'),
    *(
        f"[{', '.join(map(str, range(500)))}]",
        '["x", "y"]',
        '["\\udc80"]',
        '{"\\ud800": "\\ud800"}',
        '{"type": "text"}',
    ),
    *("[" * n + "]" * n for n in (60, 300, 900, 20_000)),
    *('{"x": ' * n + "1" + "}" * n for n in (60, 300, 900)),
    *(f"[{TOOL}]", f"[{TOOL}, {TOOL}]", f"[{MANY}]"),
]
FIELDS = [
    *("messages", "model", "n", "stream", "max_tokens", "max_completion_tokens", "stop", "tools", "tool_choice"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "top_logprobs", "stream_options", "user"),
    *("response_format", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "functions"),
    *("function_call", "guided_json", "parallel_tool_calls", "store", "metadata", "", "x" * 3000, "__class__"),
]
HEADERS = [
    *(b"Content-Type: text/plain", b"Content-Type: \xff\xfe", b"x-stainless-retry-count: many"),
    *(b"x-stainless-retry-count: 1", b"Expect: 100-continue", b"Upgrade: websocket\r\nConnection: Upgrade"),
    *(b"Upgrade: h2c\r\nConnection: Upgrade", b"Accept-Encoding: \x01", b"Host: [::", b"Cookie: " + b"a" * 30_000),
    *(b"Content-Encoding: gzip", b"X-Y: " + b"z" * 200_000, b"\r\n".join(b"H%d: 1" % i for i in range(3000))),
]


def body(rng: random.Random, **more: str) -> str:
    """A request that is good, except for some fields."""
    question = f'[{{"role": "user", "content": "{rng.randrange(9)}"}}]'
    fields = {"model": '"x"', "messages": question, "max_tokens": "1"} | more
    return "{" + ", ".join(f"{json.dumps(name)}: {x}" for name, x in fields.items()) + "}"


def said(rng: random.Random) -> str:
    """A list of messages with something wrong in one of them."""
    junk, good = rng.choice(JUNK), '{"role": "user", "content": "1"}'
    call = {"id": '"a"', "type": '"function"', "function": '{"name": "add", "arguments": "{}"}'}
    call[rng.choice([*call, "other"])] = junk
    function = {"name": '"add"', "arguments": '"{}"'} | {rng.choice(["name", "arguments", "other"]): junk}
    inside = "{" + ", ".join(f'"{name}": {x}' for name, x in function.items()) + "}"
    inner = "{" + ", ".join(f'"{name}": {x}' for name, x in call.items()) + "}"
    role = rng.choice(["user", "assistant", "system", "tool", "developer", "nobody", "<|im_end|>"])
    field = rng.choice(["name", "tool_call_id", "tool_calls", "refusal"])
    messages = [
        f'{{"role": {junk}, "content": "x"}}',
        f'{{"role": "{role}", "content": {junk}}}',
        f'{{"role": "{role}", "content": [{{"type": "text", "text": {junk}}}]}}',
        f'{{"role": "{role}", "content": [{{"type": {junk}, "text": "x"}}, {junk}]}}',
        f'{{"role": "{role}", "content": [{{"type": "image_url", "image_url": {junk}}}]}}',
        f'{{"role": "{role}", "content": "x", "{field}": {junk}}}',
        f'{{"role": "assistant", "tool_calls": [{inner}]}}',
        f'{{"role": "assistant", "content": null, "tool_calls": [{{"function": {inside}}}]}}',
        f'{{"role": "tool", "tool_call_id": "none", "content": {junk}}}',
        junk,
    ]
    listed = [good] * rng.randrange(2) + [rng.choice(messages)] + [good] * rng.randrange(2)
    return f"[{', '.join(listed)}]"


def tools(rng: random.Random) -> str:
    """A list of tools with something wrong in one of them."""
    junk = rng.choice(JUNK)
    function = {"name": '"add"', "description": '"Adds."', "parameters": '{"type": "object", "properties": {}}'}
    function[rng.choice([*function, "strict"])] = junk
    if rng.random() < 0.3:
        function["parameters"] = f'{{"type": "object", "properties": {{"x": {junk}}}, "required": {junk}}}'
    inner = "{" + ", ".join(f'"{name}": {x}' for name, x in function.items()) + "}"
    return f'[{{"type": {rng.choice([junk, chr(34) + "function" + chr(34)])}, "function": {inner}}}]'


def with_head(
    rng: random.Random, data: bytes, key: bytes, *more: bytes, method=b"POST", path=b"/v1/chat/completions"
) -> bytes:
    """The bytes of a request."""
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: x", b"Authorization: Bearer " + key, *more]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(data), b"", data])


def requests(seed: int, count: int, key: bytes) -> Iterator[tuple[str, bytes]]:
    """(what the client does behind it, bytes). It reads the answer, or closes the connection before or meanwhile."""
    rng = random.Random(seed)
    for _ in range(count):
        kind, ends = rng.randrange(10), "reads"
        data = body(rng).encode()
        if kind <= 1:
            fields = rng.choices([*FIELDS, "stop", "tools"], k=rng.choice([1, 1, 2, 3]))
            more = {"max_tokens": "12"} if "stop" in fields else {}
            data = body(rng, **more, **{name: rng.choice(JUNK) for name in fields if name not in more}).encode()
        elif kind <= 4:
            streams = {"stream": "true"} if rng.random() < 0.2 else {}
            data = body(rng, messages=said(rng), **streams).encode()
        elif kind == 5:
            data = body(rng, tools=tools(rng), n=rng.choice(["1", "3"])).encode()
        elif kind == 6:  # bytes that are no JSON, or no UTF-8
            data = bytearray(data)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            data = rng.choice([bytes(data), data[: rng.randrange(len(data))], rng.randbytes(200), b"\xff\xfe" + data])
            data = rng.choice([data, bytes(data).decode("latin-1").encode("utf-16"), b"[" * 100_000])
        elif kind == 7:
            method = rng.choice([b"GET", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"HEAD", b"TRACE", b"POST"])
            places = [b"/", b"//", b"/v1", b"/v1/chat/completions/", b"/v1/models/", b"/v1/responses", b"/%ff%00/../x"]
            place = rng.choice([*places, b"/v1/chat/completions?" + b"q" * 9000, b"*", b"/" + b"p" * 50_000])
            yield ends, with_head(rng, data, key, method=method, path=place)
            continue
        elif kind == 8:
            wrong = rng.choice([b"", b"sk-wrong", b"\xff\xfe", b"a b", b"x" * 50_000, key[:-1], key + b" " + key])
            pick = rng.random()
            yield ends, with_head(rng, data, key if pick < 0.7 else wrong, rng.choice(HEADERS))
            continue
        else:  # it closes the connection before, while or behind the answer is made, or sends too little
            ends = rng.choice(["closes", "closes later", "half"])
            more = {"stream": rng.choice(["true", "false"]), "max_tokens": "4", "n": rng.choice(["1", "2"])}
            data = body(rng, **more).encode()
            whole = with_head(rng, data, key)
            yield ends, whole[: rng.choice([0, 1, 30, len(whole) - 5, len(whole), len(whole)])]
            continue
        yield ends, with_head(rng, bytes(data), key)


def status_of(place: tuple[str, int], ends: str, data: bytes) -> int | None:
    """The status of the answer, after it was read as a whole, or None if there was none."""
    with socket.create_connection(place, SECONDS) as connection:
        try:
            connection.sendall(data)
            if ends == "closes":
                return None
            if ends == "closes later":
                connection.settimeout(0.05)
                connection.recv(10)
                return None
            if ends == "half":
                connection.shutdown(socket.SHUT_WR)
            answer = HTTPResponse(connection, method=data.partition(b" ")[0].decode("latin-1"))
            answer.begin()
            answer.read()
            return answer.status
        except TimeoutError:
            if ends == "reads":
                raise
            return None
        except (HTTPException, OSError):  # the server has closed the connection
            return None


def main() -> None:
    """Send all of them, and good questions before and after."""
    row, url, key = (
        json.loads(sys.stdin.readline()),
        urlparse(os.environ["OPENAI_BASE_URL"]),
        os.environ["OPENAI_API_KEY"],
    )
    place = (url.hostname, url.port)

    def good() -> list[dict]:
        connection, messages = HTTPConnection(*place), [{"role": "user", "content": "good"}]
        for _ in range(2):
            sent = json.dumps({"messages": messages, "max_tokens": 8})
            connection.request("POST", "/v1/chat/completions", sent, {"Authorization": f"Bearer {key}"})
            messages += [json.loads(connection.getresponse().read())["choices"][0]["message"], messages[0]]
        return messages

    first, results = good(), []
    about = row["extra_info"]
    todo = requests(about["seed"], about["count"], key.encode())
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                item = next(todo, None)
            if item is None:
                return
            ends, data = item
            try:
                status = status_of(place, ends, data)
            except OSError as error:
                status = repr(error)
            results.append([ends, status, data[:3000].decode("latin-1")])

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with open(os.environ["NOTES"], "a") as file:
        print(json.dumps({"results": results, "good": [first, good()]}), file=file)
    os.write(3, b'{"reward": 1.0}\n')


if __name__ == "__main__":
    main()

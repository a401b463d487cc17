"""An agent whose row says what it does. It needs no library, except where it is to use that of OpenAI."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlparse

ROW = json.loads(sys.stdin.readline())
ABOUT, PLACE = ROW["extra_info"], urlparse(os.environ["OPENAI_BASE_URL"])
Q = [{"role": "user", "content": f"{ROW['row_index']}+1"}]


def note(**what):
    with open(Path(os.environ["NOTES"]), "a") as file:
        print(json.dumps({"does": ABOUT["does"], **what}), file=file)


def request(body, key=None, **headers):
    connection = HTTPConnection(PLACE.netloc)
    headers |= {"Authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}"}
    connection.request("POST", PLACE.path + "/chat/completions", body, headers)
    return connection


def post(body, key=None, **headers):
    body = body if isinstance(body, bytes) else json.dumps(body)
    response = request(body, key, **headers).getresponse()
    return {"status": response.status, "text": (text := response.read().decode())} | (
        json.loads(text) if text[:1] == "{" else {}
    )


def ask(messages, **more):
    time.sleep(random.random() * ABOUT.get("latency", 0))
    answer = post({"model": "any", "messages": messages, "max_tokens": 8, **more})
    return answer["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}


def report(**what):
    os.write(3, json.dumps({"reward": 1.0, **what}).encode() + b"\n")


def linear():
    messages = list(Q)
    for i in range(3):
        messages = [*messages, ask(messages), user(f"{i}")]
    report()


def fork():
    messages = [*Q, ask(Q), user("2")]
    one, _ = ask(messages), ask(messages)
    ask([*messages, one, user("3")])
    report()


def parallel():
    def sub_agent(i):
        messages = [{"role": "system", "content": str(i)}, *Q]
        ask([*messages, ask(messages), user("2")])

    threads = [threading.Thread(target=sub_agent, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report()


def compact():
    ask([*Q, ask(Q), user("2")])
    ask([user("so far 1")])
    report()


def choices():
    found = post({"messages": Q, "n": 3, "max_tokens": 8, "logprobs": True, "temperature": 0.1})
    note(choices=len(found["choices"]), usage=found["usage"], content=found["choices"][0]["logprobs"]["content"])
    ask([*Q, found["choices"][1]["message"], user("2")])
    report()


def stop():
    said = post({"messages": Q, "max_tokens": 30, "stop": ["zzzz", ABOUT["stop"]]})["choices"][0]
    again = {"role": "assistant", "content": said["message"]["content"] + ABOUT.get("put_back", "")}
    ask([*Q, again, user("2")])
    note(text=said["message"]["content"], reason=said["finish_reason"])
    report()


def library():
    import openai

    client, text, errors = openai.OpenAI(), "", []
    first = client.chat.completions.create(model="x", messages=Q, max_completion_tokens=8, logprobs=True)
    said = [*Q, first.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "2"}]}]
    for piece in client.chat.completions.create(
        model="x", messages=said, max_tokens=8, stream=True, stream_options={"include_usage": True}
    ):
        text += (piece.choices[0].delta.content or "") if piece.choices else ""
    said = [*said, {"role": "assistant", "content": text + "\n"}, user("3")]
    client.chat.completions.create(model="x", messages=said, max_tokens=8)
    for bad in ({"response_format": {"type": "json_object"}}, {"messages": Q * 200}, {"top_logprobs": 5}):
        try:
            client.chat.completions.create(**{"model": "x", "messages": Q, **bad})
        except openai.APIStatusError as error:
            errors.append([error.status_code, error.code])
    note(errors=errors, models=[x.id for x in client.models.list()])
    report()


def retry():
    """A library that gives up a connection, and asks for the same again at once."""
    body = json.dumps({"messages": Q, "max_tokens": 100})
    connection = request(body)
    time.sleep(ABOUT["after"])
    connection.close()
    note(status=post(body.encode(), **{"x-stainless-retry-count": "1"})["status"])
    report()


def drop():
    connection = request(json.dumps({"messages": Q, "max_tokens": 200, "n": 32}))
    time.sleep(0.02)
    connection.close()
    ask([*Q, user("2")])
    report()


def hang():
    ask(Q)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def never():
    time.sleep(600)


def crash():
    ask(Q)
    sys.exit(3)


def killed():
    ask(Q)
    os.kill(os.getpid(), signal.SIGKILL)


def nothing():
    report()


def bad_report():
    ask(Q)
    os.write(3, b"[5]\n")


def nan_reward():
    ask(Q)
    os.write(3, b'{"reward": NaN}\n')


def children():
    started = [subprocess.Popen(["sleep", "600"], start_new_session=session).pid for session in (False, True)]
    daemon = subprocess.run("setsid sleep 600 >/dev/null 2>&1 & echo $!", shell=True, capture_output=True).stdout
    note(pids=[os.getpid(), *started, int(daemon)])
    ask(Q)
    report()
    time.sleep(600 if ABOUT.get("stays") else 0)


def background():
    threading.Thread(target=lambda: ask(Q, max_tokens=200), daemon=True).start()
    ask([user("9")], max_tokens=1)
    report()
    os._exit(0)


def leave():
    ask([user("9")])
    kept = request(json.dumps({"messages": Q, "max_tokens": 200}))
    time.sleep(0.05)
    report()
    kept.close()


def loop():
    while (answer := post({"messages": Q, "max_tokens": 1}))["status"] == 200:
        pass
    note(error=answer["error"]["code"])
    report()


def full():
    messages = list(Q)
    while True:
        messages = [*messages, ask(messages), user("again and again, " * 4)]


def hostile():
    deep = b'{"messages": ' + b"[" * 100_000
    bodies = [
        *([], 5, {}, {"messages": "x"}, {"messages": []}, {"messages": [5]}, {"messages": [{"role": 5}]}),
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        *({"messages": Q, name: x} for name in ("max_tokens", "n") for x in (-5, 0, "many", True, 1.5, [1], 10**400)),
        *({"messages": Q, "stop": x} for x in (5, [5], [""], {"a": 1})),
        *({"messages": Q, "tools": x} for x in (5, [5], [{"function": 5}], "x", [{"function": {"name": 5}}])),
        *({"messages": Q, name: {"5": 1}} for name in ("logit_bias", "response_format", "functions")),
        *({"messages": Q, name: 1} for name in ("presence_penalty", "frequency_penalty", "top_logprobs")),
        *({"messages": [*Q, {"role": "assistant", "tool_calls": x}]} for x in (5, [5], [{"function": {}}], [{}])),
    ]
    raw = [b"", b"{", b"\xff\xfe", b"null", deep, *(json.dumps(x).encode() for x in bodies)]
    statuses = [post(x)["status"] for x in raw for _ in range(ABOUT.get("times", 1))]
    random_bytes = random.Random(0)
    for _ in range(20):
        body = bytearray(json.dumps({"messages": Q, "max_tokens": 1, "stop": ["x"], "n": 1}).encode())
        body[random_bytes.randrange(len(body))] = random_bytes.randrange(256)
        assert post(bytes(body))["status"] in (200, 400)
    odd = [post({"messages": [user("a\ud800b <|im_end|>")], "max_tokens": 2})["status"]]
    odd += [post({"messages": Q, "max_tokens": 1, "user": [{}], "stream_options": 5})["status"]]
    note(statuses=statuses, odd=odd, wrong_key=post({"messages": Q}, key="sk-wrong")["status"])
    ask(Q)
    report()


globals()[ABOUT["does"]]()

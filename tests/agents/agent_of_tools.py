"""An agent with tools, by the library of OpenAI. It answers each call that the policy makes, and notes what it got."""

import json
import os
import sys
import threading

import openai

ROW = json.loads(sys.stdin.readline())
ABOUT = ROW["extra_info"]
TURNS = 6
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key in keys}, "required": keys},
        },
    }
    for name, keys, kind in (("add", ["a", "b"], "integer"), ("find", ["text"], "string"))
]
CLIENT = openai.OpenAI()


def results_of(call: dict) -> str:
    """What a tool says."""
    arguments = json.loads(call["function"]["arguments"])
    return str(arguments["a"] + arguments["b"]) if call["function"]["name"] == "add" else f"no {arguments['text']}"


def streamed(**request) -> tuple[dict, list, str]:
    """The message and the tokens of a stream, put together as clients do."""
    message, calls, tokens, finish = {"role": "assistant", "content": None}, {}, [], ""
    for piece in CLIENT.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        for choice in piece.choices:
            finish = choice.finish_reason or finish
            if choice.logprobs:
                tokens += choice.logprobs.content
            if choice.delta.content is not None:
                message["content"] = (message["content"] or "") + choice.delta.content
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(part.index, {"id": "", "type": "function", "function": {}})
                call["id"] += part.id or ""
                for name in ("name", "arguments"):
                    call["function"][name] = call["function"].get(name, "") + (getattr(part.function, name) or "")
    return message | ({"tool_calls": [calls[i] for i in sorted(calls)]} if calls else {}), tokens, finish


def whole(**request) -> tuple[dict, list, str]:
    """The message and the tokens of an answer that comes at once."""
    choice = CLIENT.chat.completions.create(**request).choices[0]
    return choice.message.model_dump(exclude_none=True), choice.logprobs.content, choice.finish_reason


def converse(place: int) -> dict:
    """Talk with the policy for some turns, and answer its calls."""
    messages, sampled, reasons = [{"role": "user", "content": f"q{place}"}], [], []
    for _ in range(TURNS):
        ask = streamed if ABOUT["stream"] else whole
        message, tokens, reason = ask(model="x", messages=messages, tools=TOOLS, max_tokens=12, logprobs=True)
        sampled.append([[x.token, x.logprob] for x in tokens])
        reasons.append(reason)
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": results_of(call)}
            for call in message.get("tool_calls", ())
        ]
        messages += [message, *(answers or [{"role": "user", "content": "on"}])]
    return {"place": place, "messages": messages, "sampled": sampled, "reasons": reasons}


def main() -> None:
    """Have conversations, one after the other or at a time."""
    found = []
    threads = [threading.Thread(target=lambda i=i: found.append(converse(i))) for i in range(ABOUT["conversations"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with open(os.environ["NOTES"], "a") as file:
        print(json.dumps(sorted(found, key=lambda x: x["place"])), file=file)
    os.write(3, b'{"reward": 1.0}\n')


main()

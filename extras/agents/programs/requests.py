"""What a request of an agent may say, what is refused, and how an answer is written."""

import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

MODEL = "policy"  # the name that answers give the model. Requests may give it any.
# What changes the distribution that is sampled from, so that the trainer would compute other log-probs.
DISTRIBUTION = (
    *("logit_bias", "frequency_penalty", "presence_penalty", "repetition_penalty", "response_format"),
    *("top_logprobs", "guided_json", "guided_regex", "structured_outputs", "functions", "function_call"),
)
MOST_CHOICES, MOST_TOKENS = 64, 1 << 30
MOST_LEVELS = 64  # of lists and objects in each other. Python's own functions fail at some hundreds.
LONE = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON writes half of a character, and each half of some


class Refused(ValueError):
    """A request that is not served, with the status and the code that OpenAI's servers give for it."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> dict:
        """The answer."""
        return {"error": {"message": str(self), "type": "invalid_request_error", "code": self.code}}


def body_of(raw: bytes) -> Any:
    """What the JSON of a request says. Raises Refused for what could not be written as a text again."""
    try:
        text = raw.decode()
        body = json.loads(text)
        if LONE.search(text):
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refused(f"this is not JSON in UTF-8: {error!s:.200}") from error
    level = [[body]]
    for _ in range(MOST_LEVELS + 1):
        values = (x for value in level for x in (value.values() if isinstance(value, dict) else value))
        if not (level := [x for x in values if isinstance(x, (dict, list))]):
            return body
    raise Refused(f"a request has at most {MOST_LEVELS} levels of lists and objects")


def check(body: Any) -> dict:
    """The body of a request. Raises Refused for what would be served wrongly."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise Refused("messages must be a list that is not empty")
    for name in DISTRIBUTION:
        if body.get(name) and body[name] != {"type": "text"}:
            raise Refused(f"{name} is not served, since it changes the distribution that is sampled from")
    for name, most in (("n", MOST_CHOICES), ("max_tokens", MOST_TOKENS), ("max_completion_tokens", MOST_TOKENS)):
        if (x := body.get(name)) is not None and not (type(x) is int and 1 <= x <= most):
            raise Refused(f"{name} must be a number between 1 and {most}")
    if not all(isinstance(x, str) and x for x in stops(body)):
        raise Refused("stop must be a text or a list of texts")
    tools = body.get("tools") or []
    functions = [x.get("function") if isinstance(x, dict) else None for x in tools] if isinstance(tools, list) else [0]
    if not all(isinstance(x, dict) and isinstance(x.get("name"), str) for x in functions):
        raise Refused("tools must be a list of functions with names")
    return body


def stops(body: dict) -> tuple:
    """The texts that end an answer."""
    stop = body.get("stop") or ()
    return tuple(stop) if isinstance(stop, (list, tuple)) else (stop,)


def tools_of(body: dict) -> list[dict] | None:
    """The tools that the policy may call."""
    return None if body.get("tool_choice") == "none" else body.get("tools") or None


def max_tokens_of(body: dict) -> int:
    """How many tokens an answer may have by what the agent says."""
    return body.get("max_completion_tokens") or body.get("max_tokens") or MOST_TOKENS


def text_of(content: Any) -> str:
    """The text of a message's content, which is a text, None, or a list of parts that are texts."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(x, dict) and x.get("type") == "text" for x in content):
        return "".join(str(x.get("text", "")) for x in content)
    raise Refused("the content of a message must be text")


def as_message(message: Any) -> dict:
    """A message as the chat template gets it."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused("a message must have a role and a content")
    role = "system" if message["role"] == "developer" else message["role"]
    said = {"role": role, "content": text_of(message.get("content"))}
    said |= {name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)}
    if calls := message.get("tool_calls"):
        try:
            said["tool_calls"] = [
                {
                    "type": "function",
                    "id": str(x.get("id", "")),
                    "function": {"name": str(x["function"]["name"]), "arguments": _arguments(x["function"])},
                }
                for x in calls
            ]
        except (TypeError, LookupError, AttributeError) as error:
            raise Refused("each of tool_calls must have a function with a name and arguments") from error
    return said


def _arguments(function: dict) -> Any:
    arguments = function.get("arguments", "{}")
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def mark_of(message: dict) -> str:
    """What two messages have in common that are one and the same. Frameworks strip texts, make None of empty ones, and
    write the arguments of calls anew.
    """
    calls = [[x["function"]["name"], x["function"]["arguments"]] for x in message.get("tool_calls", ())]
    said = [message["role"], message["content"].strip(), message.get("tool_call_id", ""), calls]
    return json.dumps(said, sort_keys=True)


def answer_to(body: dict, choices: Sequence[Any], num_told: int, token_texts: Any) -> dict:
    """The answer to a request. Args: choices, see `history.Choice`; num_told, tokens before what was sampled;
    token_texts, which makes texts of ids, one each.
    """
    written = []
    for i, x in enumerate(choices):
        pairs = zip(token_texts(x.ids), x.logprobs, strict=True) if body.get("logprobs") else ()
        content = [{"token": text, "logprob": logp, "bytes": None, "top_logprobs": []} for text, logp in pairs]
        logprobs = {"content": content} if body.get("logprobs") else None
        written.append({"index": i, "message": x.message, "finish_reason": x.finish_reason, "logprobs": logprobs})
    num_sampled = sum(len(x.ids) for x in choices)
    usage = {"prompt_tokens": num_told, "completion_tokens": num_sampled, "total_tokens": num_told + num_sampled}
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time())}
    return {**head, "model": MODEL, "choices": written, "usage": usage}


def pieces_of(answer: dict, body: dict) -> Iterator[dict]:
    """The answer as the events of a stream."""
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in answer["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [x | {"index": i} for i, x in enumerate(delta["tool_calls"])]
        said = {"index": choice["index"], "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
        yield head | {"choices": [said]}
        end = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield head | {"choices": [end]}
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield head | {"choices": [], "usage": answer["usage"]}

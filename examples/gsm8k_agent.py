"""An agent for GSM8K: it asks, works out every step of the answer again, and tells the policy which one is wrong.

    python data/gsm8k.py --output-dir data/gsm8k
    torchrun train_grpo.py --agent "python examples/gsm8k_agent.py" --max-response-length 768

The run starts this file once for each response. An answer without a wrong step and with a last line that can be graded
ends it. Otherwise the policy hears what is wrong, and answers again. If that answer has a problem too, the agent throws
the conversation away and asks a last time, which begins a second row. The last answer is graded as any other response.
"""

import json
import os
import re
import sys
from typing import Any
from urllib.request import Request, urlopen

NUMBER = r"\d+(?:\.\d+)?"
STEP = re.compile(rf"({NUMBER}(?: ?[-+*/] ?{NUMBER})+) ?= ?({NUMBER})")  # such as 48/2 = 24


def ask(*messages: dict[str, Any]) -> dict[str, Any]:
    """The policy's next message."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 256}).encode()
    with urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]


def value_of(expression: str) -> float | None:
    """What numbers joined by + - * / make, or None if a division by zero is among them."""
    try:
        return eval(re.sub(NUMBER, lambda x: str(float(x[0])), expression))  # it matches STEP, so it is nothing else
    except ZeroDivisionError:
        return None


def problem_of(text: str) -> str:
    """What is wrong with an answer, in a sentence, or "". Results may be rounded to two digits."""
    for expression, result in STEP.findall(text.replace(",", "").replace("$", "")):
        value = value_of(expression)
        if value is None or abs(value - float(result)) > 0.01:
            return f"{expression} is not {result}."
    return "" if re.search(r"#### ?\$?-?\d", text) else "There is no line with #### and the answer."


def main() -> None:
    """Ask up to three times."""
    prompt = json.loads(sys.stdin.readline())["prompt"]
    answer = ask(*prompt)
    if problem := problem_of(answer["content"]):
        answer = ask(*prompt, answer, {"role": "user", "content": f"{problem} Write the whole solution again."})
        if problem_of(answer["content"]):
            ask(*prompt)


if __name__ == "__main__":
    main()

"""An agent for data/arithmetic.py: it asks, checks the steps with Python, asks again, and at last begins anew.

    python data/arithmetic.py --output-dir data/arithmetic --context 192
    torchrun train_grpo.py --agent "python examples/check_agent.py" --custom-reward-function examples/check_agent.py ...

benchmarks/environments.py has the whole command, as task `agent`. The run starts this file once for each response. The
second question goes on with the conversation. The third one leaves the history out, so it begins a row of its own. A
right answer scores 1, 1/2 or 1/3, by how often the agent has asked.
"""

import json
import os
import re
import sys
from typing import Any
from urllib.request import Request, urlopen


def ask(*messages: dict[str, Any]) -> dict[str, Any]:
    """The policy's next message."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 40}).encode()
    with urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]


def is_sound(text: str) -> bool:
    """Whether all four steps are there and add up, and the last line is an answer that can be graded."""
    steps = re.findall(r"^(\d+)([+-]\d+)=(\d+)$", text, re.MULTILINE)
    return len(steps) == 4 and all(int(a) + int(b) == int(c) for a, b, c in steps) and bool(answer_of(text))


def answer_of(text: str) -> str:
    """The number behind the last ####, or nothing."""
    return "".join(re.findall(r"#### (\d+)$", text))


def main() -> None:
    """Ask up to three times."""
    [question] = json.loads(sys.stdin.readline())["prompt"]
    answer = ask(question)
    if not is_sound(answer["content"]):
        answer = ask(question, answer, question)
    if not is_sound(answer["content"]):
        ask(question)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    """The score of a response whose last answer is `solution_str`, and whether that answer is right."""
    is_right = float(answer_of(solution_str) == ground_truth)
    return {"score": is_right / extra_info["environment"].get("calls", 1), "acc": is_right}


if __name__ == "__main__":
    main()

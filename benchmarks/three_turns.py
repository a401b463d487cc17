"""The same three turns as an agent and as an environment, to measure what agents cost.

    python train_grpo.py --agent "python benchmarks/three_turns.py" --agents-at-once 256 ...
    python train_grpo.py --environment benchmarks/three_turns.py:ThreeTurns ...

The policy answers the prompt of the row, and then twice what FOLLOW_UP says. Both ways sample the same kind of
conversations. An agent is a process, which is started for each response and asks over HTTP.
"""

import json
import os
import sys
from typing import Any
from urllib.request import Request, urlopen

FOLLOW_UP = {"role": "user", "content": "Check it, and write the solution again."}
TURNS = 3


class ThreeTurns:
    """The environment."""

    def __init__(self) -> None:
        self.turns = 0

    def step(self, reply: Any) -> list[dict] | None:
        self.turns += 1
        return [FOLLOW_UP] if self.turns < TURNS else None


def main() -> None:
    """The agent."""
    messages = json.loads(sys.stdin.readline())["prompt"]
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    for _ in range(TURNS):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        with urlopen(Request(url, body, headers)) as reply:
            messages += [json.load(reply)["choices"][0]["message"], FOLLOW_UP]


if __name__ == "__main__":
    main()

"""An agent is tried once before a model is loaded. Everything that it asks for is answered with the same text."""

import sys
from typing import Any

from extras.agents import EnvironmentFlags
from extras.agents.programs.history import Choice
from extras.agents.programs.requests import answer_to
from extras.agents.programs.server import Ended, Left, Server
from rl.console import say

TEXT = "This is a trial."
MOST_SECONDS, MOST_CALLS = 60.0, 1000


def try_agent(flags: EnvironmentFlags, row: dict[str, Any]) -> None:
    """Start an agent on a row. Raises ValueError if it asks for nothing that can be answered. How it ends is only said,
    since an agent may need better answers.
    """
    timeout = min(flags.environment_timeout, MOST_SECONDS)
    server, key, num_calls = Server(str(flags.agent), timeout, 1), object(), 0
    try:
        server.start(key, {name: x for name, x in row.items() if name not in ("prompt_ids", "given")}, 0)
        while not isinstance(event := server.inbox.get(), Ended):
            if isinstance(event, Left):
                continue
            num_calls += 1
            if num_calls > MOST_CALLS:
                return
            choice = Choice({"role": "assistant", "content": TEXT}, "stop", [], [])
            event.answer.put(answer_to(event.body, [choice] * (event.body.get("n") or 1), 0, list))
    finally:
        server.close()
    if num_calls == 0:
        reason = event.problem or "it exited with 0"
        raise ValueError(
            f"--agent {flags.agent!r} asked for no completion when it was tried: {reason}. What it printed stands "
            "above. It has to send its requests to $OPENAI_BASE_URL, with the key in $OPENAI_API_KEY"
        )
    if event.problem:
        say(f"agent: when it was tried with meaningless answers, {event.problem}", sys.stderr)

"""Agents of examples/ against a real server of agents, with answers that a test has written."""

import sys

import launch

from extras.agents.programs.history import Choice
from extras.agents.programs.requests import answer_to
from extras.agents.programs.server import Ended, Server


def asked(program, question, *answers):
    """The bodies of the requests of one agent, which gets this question and these answers. It must end well."""
    server, bodies = Server(f"{sys.executable} {launch.ROOT / program}", 60.0, 1), []
    try:
        server.start("an agent", {"prompt": [question]}, 0)
        while not isinstance(event := server.inbox.get(timeout=60), Ended):
            choice = Choice({"role": "assistant", "content": answers[len(bodies)]}, "stop", [], [])
            bodies.append(event.body)
            event.answer.put(answer_to(event.body, [choice], 0, list))
        assert event.problem is None
        return bodies
    finally:
        server.close()

"""Agents of examples/ against a real server of agents, with answers that a test has written. And conversations of a
demonstration as rollouts hold them.
"""

import json
import sys

import launch

from extras.agents import EnvironmentFlags, open_partner
from extras.agents.programs.history import Choice
from extras.agents.programs.requests import answer_to
from extras.agents.programs.server import Ended, Server
from extras.demonstrations.encode import encode_demonstration
from rl.data.encode import encode_prompts
from rl.data.template import load_tokenizer, stop_token_ids


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


def check_demonstration(model, row, tool, form):
    """The tokens of a demonstration with a tool are those of a rollout, and what is learned is what the policy samples
    there. The tool gives the answers that the demonstration has.

    Args: row, whose first message is the user's; form, how a call is written, with its name and its arguments as JSON.
    """
    tokenizer, (user, *rest) = load_tokenizer(model), row["messages"]
    partner = open_partner(EnvironmentFlags(tools=(tool,)), tokenizer, stop_token_ids(model, tokenizer))
    try:
        chat, environments = partner.chat, partner.environments
        environments.start("a", {"row_index": 0}, 0)
        assert environments.answers(0)[0].messages == []
        prompt = encode_prompts(tokenizer, [{"prompt": [user]}], text_of=partner.prompt_text)[0]["prompt_ids"]
        parts, learned = [prompt + chat.ids_of([], [])], [0]
        for message in rest:
            if message["role"] == "tool":
                environments.ask("a", *chat.read(parts[-1]), sum(learned))
                [answer] = environments.answers(20)
                assert answer.messages[0]["content"] == message["content"]
                parts.append(chat.ids_of([message], parts[-1]))
                learned.append(0)
            else:
                calls = [(x["function"]["name"], x["function"]["arguments"]) for x in message.get("tool_calls") or ()]
                text = (message["content"] or "") + "".join(form % (name, json.dumps(x)) for name, x in calls)
                parts.append(tokenizer(text + "<|im_end|>")["input_ids"])
                learned.append(1)
                assert chat.read(parts[-1])[1] == calls
        ids, mask = encode_demonstration(tokenizer, row)
        assert ids[:-1] == sum(parts, [])  # and the line break behind the last turn
        assert mask == [x for x, part in zip(learned, parts, strict=True) for _ in part] + [0]
        assert environments.end("a").keys() == {"calls", "errors", "seconds"}
    finally:
        partner.close()

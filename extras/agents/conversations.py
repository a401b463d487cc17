"""Conversations of the policy with environments: the partner of the policy, see `rl.sampling.loop.Partner`.

What a turn of the policy says, and calls, is read and handed to the environment of the response. What the environment
answers is written by the chat template, and its token ids are appended to the response.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from transformers import PreTrainedTokenizerBase

from extras.agents import EnvironmentFlags
from extras.agents.chat import Chat, prompt_text
from extras.agents.environments import Answer, Environments
from extras.agents.outcome import make_outcome
from rl.console import say
from rl.data.template import FAULTS
from rl.data.types import Outcome
from rl.sampling.loop import Partner, Trajectory


@dataclass
class Conversation:
    """What was said in one response so far."""

    messages: list[dict] = field(default_factory=list)  # all after the prompt
    turn_at: int = 0  # where in the ids of the response the turn of the policy begins
    turn_lengths: list[int] = field(default_factory=list)  # tokens of each turn of the policy
    turn_rewards: list[float] = field(default_factory=list)  # of the first turns, by the environment, if it gives any


class Conversations(Partner):
    """The conversations of the responses that a rank has in flight.

    Raises ValueError if the user's file cannot be loaded, a tool server cannot be reached, or the chat template is not
    made for conversations, see `Chat`.
    """

    def __init__(self, flags: EnvironmentFlags, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]):
        self.max_turns, self.environments = flags.max_turns, Environments(flags)
        self.chat = Chat(tokenizer, self.environments.tools, stop_ids)
        self.prompt_text = partial(prompt_text, tools=self.chat.tools)
        self.open: dict[Trajectory, Conversation] = {}
        for role in ("user", "system") if flags.environment else ():
            try:
                self.chat.told([{"role": role, "content": "x"}], has_turn=True)
            except FAULTS as error:
                problem = f"a message of the role {role!r} ends its conversation as an error: {error}"
                say(f"environment: {problem}", sys.stderr)

    def begin(self, x: Trajectory, seed: int) -> None:
        """Begin a conversation with an environment of its own, whose first answer is what `reset` says."""
        self.open[x] = Conversation()
        self.environments.start(x, x.row, seed)

    def after(self, x: Trajectory) -> bool:
        """Hand a complete turn to the environment, unless it was cut at the limit of tokens."""
        said, turn = self.open[x], x.ids[self.open[x].turn_at :]
        text, calls = self.chat.read(turn)
        said.messages.append({"role": "assistant", "content": text})
        said.turn_lengths.append(len(turn))
        if x.finish_reason == "stop":
            self.environments.ask(x, text, calls, len(said.turn_lengths))
        return x.finish_reason == "stop"

    def answers(self, wait_s: float) -> list[tuple[Trajectory, list[int] | None]]:
        """What environments have answered, as ids, or None for a conversation that has ended."""
        answers = self.environments.answers(wait_s)
        # An answer that needs no process may be to a conversation that was given up meanwhile.
        return [(answer.key, self._heard(answer)) for answer in answers if answer.key in self.open]

    def _heard(self, answer: Answer) -> list[int] | None:
        """The ids that an answer adds to its response, or None if the conversation has ended. Then `finish_reason`
        becomes "error" after an error, and "length" if the messages leave no room for another token of the policy.
        """
        x, said = answer.key, self.open[answer.key]
        turns = len(said.turn_lengths)
        if answer.reward is not None and turns > 0:
            said.turn_rewards += [0.0] * (turns - 1 - len(said.turn_rewards)) + [answer.reward]
        if answer.has_failed:
            x.finish_reason = "error"
        if answer.messages is None or turns >= self.max_turns:
            return None
        try:
            ids = self.chat.ids_of(answer.messages, x.ids, x.sampling.max_tokens - len(x.ids))
        except FAULTS as error:
            self.environments.fail(x, f"{answer.messages!r:.300} cannot be said: {error}")
            x.finish_reason = "error"
            return None
        if ids is None:
            x.finish_reason = "length"
            return None
        said.messages += answer.messages
        said.turn_at = len(x.ids) + len(ids)
        return ids

    def end(self, x: Trajectory) -> Outcome:
        """Forget a conversation, whose environment is closed."""
        said = self.open.pop(x)
        return make_outcome(said.messages, self.environments.end(x), said.turn_lengths, said.turn_rewards)

    def outcome_of(self, text: str) -> Outcome:
        """What would be said of a response in which the policy says only this: to try reward functions."""
        return make_outcome([{"role": "assistant", "content": text}], {}, [], [])

    def close(self) -> None:
        """End all processes."""
        self.environments.close()

"""An environment behind an OpenEnv server.

    torchrun train_grpo.py --environment mine.py --custom-reward-function rewards/environment.py

mine.py, for a server whose action has a field `guess`, and whose observation a field `hint`:

    from environments.from_openenv import FromOpenEnv

    class Environment(FromOpenEnv):
        url = "http://127.0.0.1:8000"

        def action(self, reply):
            return {"guess": reply.text}

        def show(self, observation):
            return observation["hint"]

What the server's `reset` says follows the prompt. A step's reward is that of its turn. An action that the server finds
invalid, or for which `action` raises ValueError, is answered by "Error: ...", with no reward.

Start the server first, with SUPPORTS_CONCURRENT_SESSIONS and a max_concurrent_envs of all responses in flight: each is
a session of its own, and one that is refused has no score. Not done: the tools of an MCP environment, and images.

Tried with openenv 0.10.0.
"""

import json
from typing import Any

from openenv import GenericEnvClient

from extras.agents.tools import Reply


class FromOpenEnv:
    """A conversation with the server at `url`."""

    url = "http://127.0.0.1:8000"

    def __init__(self) -> None:
        self.client, self.steps = GenericEnvClient(base_url=self.url), 0

    def action(self, reply: Reply) -> dict[str, Any]:
        """The fields of the action that a turn means: by default the turn is their JSON."""
        return json.loads(reply.text)

    def show(self, observation: dict[str, Any]) -> str:
        """What the policy is told of an observation: by default all of it, as JSON."""
        return json.dumps(observation, ensure_ascii=False)

    def options(self, row: dict[str, Any]) -> dict[str, Any]:
        """What the server's `reset` gets beside the seed."""
        return {}

    async def reset(self, row: dict[str, Any], seed: int) -> list[dict]:
        """The first observation."""
        result = await self.client.reset(seed=seed, **self.options(row))
        return [{"role": "user", "content": self.show(result.observation)}]

    async def step(self, reply: Reply) -> tuple[list[dict] | None, float]:
        """The next observation, None if the episode is done, and the reward."""
        try:
            result = await self.client.step(self.action(reply))
        except (ValueError, RuntimeError) as error:  # RuntimeError: whatever the server answers with an error
            if isinstance(error, RuntimeError) and "VALIDATION_ERROR" not in str(error):
                raise
            return [{"role": "user", "content": f"Error: {error}"}], 0.0
        self.steps += 1
        told = [{"role": "user", "content": self.show(result.observation)}]
        return None if result.done else told, float(result.reward or 0)

    def report(self) -> dict[str, float]:
        """The steps so far."""
        return {"steps": self.steps} if self.steps else {}

    async def close(self) -> None:
        """End the session."""
        await self.client.close()

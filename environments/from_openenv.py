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

What the server's `reset` says follows the prompt. The reward is the sum over all steps. An action that the server finds
invalid, or for which `action` raises ValueError, is answered by "Error: ...".

Start the server first, with SUPPORTS_CONCURRENT_SESSIONS and a max_concurrent_envs of all responses in flight: each is
a session of its own, and one that is refused has no score. Not done: the tools of an MCP environment, and images.

Tried with openenv 0.10.0.
"""

import json
from typing import Any

from openenv import GenericEnvClient

from rl.sampling.environment_worker import Reply


class FromOpenEnv:
    """A conversation with the server at `url`."""

    url = "http://127.0.0.1:8000"

    def __init__(self) -> None:
        self.client, self.reward, self.steps = GenericEnvClient(base_url=self.url), 0.0, 0

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

    async def step(self, reply: Reply) -> list[dict] | None:
        """The next observation; None if the episode is done."""
        try:
            result = await self.client.step(self.action(reply))
        except (ValueError, RuntimeError) as error:  # RuntimeError: whatever the server answers with an error
            if isinstance(error, RuntimeError) and "VALIDATION_ERROR" not in str(error):
                raise
            return [{"role": "user", "content": f"Error: {error}"}]
        self.reward, self.steps = self.reward + float(result.reward or 0), self.steps + 1
        return None if result.done else [{"role": "user", "content": self.show(result.observation)}]

    def report(self) -> dict[str, float]:
        """The reward so far, and the steps."""
        return {"reward": self.reward, "steps": self.steps}

    async def close(self) -> None:
        """End the session."""
        await self.client.close()

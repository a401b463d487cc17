"""A class of TRL's `environment_factory`, as it is.

    torchrun train_grpo.py --environment mine.py --custom-reward-function rewards/environment.py

mine.py, for a class that GRPOTrainer(environment_factory=Game) takes:

    from environments.from_trl import FromTRL
    from game import Game

    class Environment(FromTRL):
        factory = Game

Its public methods are the tools, and a turn without a call is the last. `reset` gets the row's columns, after `random`
was seeded alike for a group. `get_reward` is asked after each turn, and the last answer counts.

This departs from TRL in four points. What `reset` returns is a user's message after the prompt, and is not added to
the last message. Each response has an object of its own, and not one that is reset. A failing call is answered by
"Error: ...". An async method runs in an event loop of its own. Images and a dict of several environments are not
supported.

Tried with TRL 1.16.0, which is not imported.
"""

import inspect
import random
from collections.abc import Callable
from typing import Any

from extras.agents.tools import Reply, Tools


class FromTRL:
    """A conversation with an object of `factory`."""

    factory: Callable[[], Any]
    max_tool_response_length = 4096  # characters of a tool's result. More are cut, with a mark.

    def __init_subclass__(cls) -> None:
        cls.factory = staticmethod(cls.factory)
        cls.tools = tuple(_methods(cls.factory()).values())

    def __init__(self) -> None:
        self.environment = self.factory()
        self.calls = Tools(_methods(self.environment), self.max_tool_response_length)

    async def reset(self, row: dict[str, Any], seed: int) -> list[dict]:
        """What the object's `reset` says, if anything."""
        random.seed(seed)
        columns = {name: x for name, x in row.items() if name not in ("row_index", "row_place")}
        said = await _awaited(self.environment.reset(**columns))
        return [] if said is None else [{"role": "user", "content": said}]

    def step(self, reply: Reply) -> list[dict] | None:
        """The results of the turn's calls."""
        return self.calls.step(reply)

    async def report(self) -> dict[str, float]:
        """Calls, errors, and the reward so far, if the object gives one."""
        score = getattr(self.environment, "get_reward", None)
        return self.calls.report() | ({"reward": await _awaited(score())} if score else {})


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _methods(environment: Any) -> dict[str, Callable]:
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction) if not name.startswith("_")]
    return {name: getattr(environment, name) for name in names if name not in ("reset", "get_reward")}

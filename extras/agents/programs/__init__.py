"""Agents as they are: a program of the user's, in any language, talks to an endpoint with the policy behind it.

    torchrun train_grpo.py --agent "python my_agent.py"

docs/agents.md has the contract of such a program.

    partner.py    the partner of the policy: requests of agents become rows of their responses
    history.py    what an agent has asked, as a tree of calls with the tokens that were sampled
    requests.py   what a request may say, and how an answer is written
    server.py     the endpoint, in a thread of its own
    starter.py    the process from which agents are started, and which leaves none behind
    trial.py      an agent is tried once, before a model is loaded
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any


def opened(flags: Any, tokenizer: Any, stop_ids: Sequence[int]) -> Any:
    """The partner of the policy with --agent. Raises ValueError beside --environment or --tools, if a package is
    missing, or as `partner.Agents`.
    """
    from extras.systems import need_linux

    flag = f"--agent {flags.agent!r}"
    need_linux(flag, "leave it out, or train on a Linux machine")
    if flags.environment or flags.tools:
        raise ValueError(f"{flag} excludes --environment and --tools; the program can have tools of its own")
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ValueError(f"{flag} needs the packages {' and '.join(missing)}, which come with vLLM; install them")
    from extras.agents.programs.partner import Agents

    return Agents(flags, tokenizer, stop_ids)


def try_agent(flags: Any, row: dict[str, Any]) -> None:
    """Run an agent once on a row, see `trial.try_agent`."""
    from extras.agents.programs import trial

    trial.try_agent(flags, row)

"""What answers the policy while it samples: environments of the user's, tools, and tool servers (MCP).

    torchrun train_grpo.py --tools calculator.py                  functions that the policy may call
    torchrun train_grpo.py --environment game.py:Game --max-turns 8

docs/environments.md has the contract of a user's class.

    programs/           agents as they are: programs that talk to an endpoint with the policy behind it
    hosted.py           the partner of the policy, which passes conversations on to a process of their own
    conversations.py    what is said, and when a conversation ends
    chat.py             messages become tokens, and turns become text and calls, by the chat template
    calls.py            how calls are read in what models of several kinds write
    environments.py     the trainer's side of the processes in which environments live; worker.py is the other side
    tools.py            functions that the policy may call, and what is loaded from a user's files
    tool_server.py      tools of an MCP server
    plain.py            what users' functions return, as JSON
    schemas.py          tools and calls of tools in the rows of the data
    turns.py            what was earned from each turn on, and what the tokens of a turn get
    outcome.py          what a conversation says to reward functions, metrics, advantages and the log
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rl.flags import AtLeast1, Free, Needs, Seconds

PARTNER, ANY = Needs("environment", "tools"), Needs("environment", "tools", "agent")


@dataclass(frozen=True)
class EnvironmentFlags:
    """These flags decide what answers the policy, turn by turn."""

    # The class file.py[:Class] answers the policy. Without :Class it is the class Environment of that file.
    # docs/environments.md has its contract. By default nothing answers, so a response is a single turn.
    environment: str | None = None
    # The policy may call these tools. Each is the URL of an MCP server, or file.py[:function]. Without :function these
    # are all functions of the file. By default the policy has no tools.
    tools: tuple[str, ...] = ()
    # The policy has at most this many turns in a conversation. All of it has --max-response-length tokens.
    max_turns: Annotated[AtLeast1, PARTNER] = 8
    # One answer may take this many seconds. Then the conversation ends without a score. So does that of an agent which
    # asks for nothing for this many seconds.
    environment_timeout: Free[Annotated[Seconds, ANY]] = 60.0
    # A tool's result has at most this many characters. A longer one is cut, with a mark.
    max_tool_response_length: Annotated[AtLeast1, PARTNER] = 4096
    # This command is started for each response. It talks to the policy at $OPENAI_BASE_URL, as docs/agents.md says, and
    # the response ends when it exits. Each of its conversations has at most --max-response-length tokens, with all
    # messages. By default there are no agents.
    agent: str | None = None
    agents_at_once: Free[Annotated[AtLeast1, Needs("agent")]] = 64  # A rank has at most this many agents at a time.
    # An agent gets at most this many completions.
    agent_max_calls: Annotated[AtLeast1, Needs("agent")] = 64


def open_partner(flags: EnvironmentFlags, tokenizer: Any, stop_ids: Sequence[int]) -> Any:
    """The partner of the policy that the flags ask for, see `rl.sampling.loop.Partner`, or None without --environment,
    --tools and --agent. Raises ValueError for two of these, or as `hosted.HostedConversations` or `programs.opened`.
    """
    if flags.agent:
        from extras.agents import programs

        return programs.opened(flags, tokenizer, stop_ids)
    if flags.environment and flags.tools:
        raise ValueError("--environment and --tools exclude each other; give the class the functions as its `tools`")
    if not (flags.environment or flags.tools):
        return None
    from extras.agents.hosted import HostedConversations

    return HostedConversations(flags, tokenizer, stop_ids)


def check_rows(flags: EnvironmentFlags, rows: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError for a row that --tools cannot use, see `schemas.check_rows`, or for an --agent that does not
    work, see `programs.trial`.
    """
    if flags.tools or flags.agent:
        from extras.agents import programs, schemas

        schemas.check_rows(rows) if flags.tools else programs.try_agent(flags, rows[0])


def with_tools(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The row with its column `tools` checked, or without it if it is empty, see `schemas.with_tools`."""
    if "tools" not in row:
        return row
    from extras.agents import schemas

    return schemas.with_tools(row, where)


def check_calls(calls: Any, where: str) -> list[dict]:
    """The `tool_calls` of a message in one form, see `schemas.check_calls`. Raises ValueError if they have none."""
    from extras.agents import schemas

    return schemas.check_calls(calls, where)


def with_json_arguments(message: dict) -> dict:
    """The message with the arguments of its calls as JSON texts, which some templates want."""
    from extras.agents import schemas

    return schemas.with_json_arguments(message)


def metrics_of(responses: Sequence[Any]) -> dict[str, float]:
    """Metrics of conversations, see `outcome.metrics_of`, or nothing without a partner of the policy."""
    if not any(r.outcome for r in responses):
        return {}
    from extras.agents import outcome

    return outcome.metrics_of(responses)


def token_rewards(responses: Sequence[Any], batch: Any) -> Any:
    """The reward of every token of a batch, with what environments gave at the ends of turns, see `outcome.py`."""
    from extras.agents import outcome

    return outcome.token_rewards(responses, batch)


def returns_by_turn(responses: Sequence[Any], n: int) -> tuple[Any, Any]:
    """What was earned from each turn on, and the lengths of turns, for n responses to each prompt, see `outcome.py`."""
    from extras.agents import outcome

    return outcome.returns_by_turn(responses, n)


def at_turns(values: Any, mask: Any) -> Any:
    """Each token gets the value of its turn, see `turns.py`."""
    from extras.agents import turns

    return turns.at_turns(values, mask)


def outcome_to_json(outcome: Any) -> str:
    """A text of which `outcome_from_json` makes the outcome of a conversation again."""
    from extras.agents.outcome import to_json

    return to_json(outcome)


def outcome_from_json(text: str) -> Any:
    """The outcome of a conversation. Raises ValueError if the text cannot be that of one."""
    from extras.agents.outcome import from_json

    return from_json(text)

"""What there is to say of a conversation: for the score, the log, the metrics and the advantages."""

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from extras.agents.turns import at_turn_ends, turn_returns
from rl.data.types import Batch, Outcome, Sample
from rl.sampling.evaluation import mean_by_name

MOST = 1e30  # larger numbers of a report, such as 10**400, are not metrics


def make_outcome(
    messages: Sequence[dict], report: dict[str, Any], turn_lengths: Sequence[int], turn_rewards: Sequence[float]
) -> Outcome:
    """The outcome of a conversation, whose text is the last turn of the policy.

    Args: messages, all after the prompt; report, of the environment; turn_lengths, how many tokens the policy sampled
    in each of its turns; turn_rewards, of the first turns, by the environment, if it gives any.
    """
    messages, rewards = list(messages), {"turn_rewards": list(turn_rewards)} if turn_rewards else {}
    turns = max(len(turn_lengths), 1)
    numbers = {name: float(x) for name, x in report.items() if isinstance(x, (int, float)) and abs(x) <= MOST}
    return Outcome(
        facts={"turns": turns, "lengths": list(turn_lengths), "rewards": list(turn_rewards), "numbers": numbers},
        reward=float(sum(turn_rewards)),
        text=next((x["content"] for x in reversed(messages) if x["role"] == "assistant"), ""),
        extra_info={"messages": messages, "environment": rewards | report},
        record={"turns": turns, "messages": messages, "environment": numbers} | rewards,
    )


def to_json(outcome: Outcome) -> str:
    """A text of which `from_json` makes the outcome again."""
    told, facts = outcome.extra_info, outcome.facts
    report = {name: x for name, x in told["environment"].items() if name != "turn_rewards"}
    return json.dumps([told["messages"], report, facts["lengths"], facts["rewards"], outcome.reward])


def from_json(text: str) -> Outcome:
    """The outcome of which `to_json` has made the text. Raises ValueError if it cannot be that of a conversation."""
    try:
        messages, report, lengths, rewards, reward = json.loads(text)
        texts = [x[name] for x in messages for name in ("role", "content")]
        is_conversation = isinstance(report, dict) and all(isinstance(x, str) for x in texts)
        is_conversation &= all(type(x) is int and x >= 0 for x in lengths)
    except (TypeError, LookupError, RecursionError):
        is_conversation = False
    if not is_conversation:
        raise ValueError("a response has a malformed conversation")
    numbers = [*rewards, reward]
    if len(rewards) > len(lengths) or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers):
        raise ValueError("a response has rewards of turns that it does not have, or that are not numbers")
    return make_outcome(messages, report, lengths, rewards)._replace(reward=float(reward))


def turns_of(responses: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """The score of each response by turns of the policy, and how many tokens it sampled in each of them: (B, K) float64
    and float32, K the most turns of a response.

    The reward of a turn is what the environment gave with it. The rest of the score stands at the last turn, so all of
    it where there is no environment. Behind the last turn the reward is NaN and the length 0. Without a score all
    rewards are NaN.
    """
    of_one = {"turns": 1, "rewards": []}  # of a response that is not a conversation
    facts = [r.outcome.facts if r.outcome else of_one | {"lengths": [r.num_sampled]} for r in responses]
    most = max((x["turns"] for x in facts), default=1)
    rewards, lengths = torch.full((len(responses), most), math.nan, dtype=torch.float64), []
    for i, (r, x) in enumerate(zip(responses, facts, strict=True)):
        lengths.append([*x["lengths"], *[0.0] * most][:most])
        if r.score.value is not None:
            by_turn = [*x["rewards"], *[0.0] * x["turns"]][: x["turns"]]
            by_turn[-1] += r.score.value - sum(by_turn)
            rewards[i, : x["turns"]] = torch.tensor(by_turn, dtype=torch.float64)
    return rewards, torch.tensor(lengths, dtype=torch.float32).view(rewards.shape)


def token_rewards(responses: Sequence[Sample], batch: Batch) -> torch.Tensor:
    """The reward of every token of a batch, (b, T): what an environment gave with a turn stands at the turn's end, and
    the rest of the score at the last token. Without environments that is the whole score.
    """
    rewards_BK, _ = turns_of(responses)
    return at_turn_ends(rewards_BK[batch.rows], batch.response_mask)


def returns_by_turn(responses: Sequence[Sample], n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What n responses to each of P prompts earned from each of K turns on, and the lengths of these turns. Both are
    (P K, n). A row of them is a group, which compares a turn with the same turn of the other responses to the prompt.
    """
    rewards, lengths = (x.unflatten(0, (-1, n)) for x in turns_of(responses))  # (P, n, K)
    return turn_returns(rewards), lengths.mT.flatten(0, 1)


def metrics_of(responses: Sequence[Sample]) -> dict[str, float]:
    """Metrics of conversations. They are the turns of the policy, the tokens that it was told, and the share of
    conversations that failed. Each number that environments report has its mean, such as the "seconds" of waiting. So
    has the sum of the rewards that they gave with turns, if they gave any.
    """
    n, facts = len(responses), [r.outcome.facts for r in responses]
    turns = [x["turns"] for x in facts]
    metrics = {"num_turns/mean": sum(turns) / n, "num_turns/max": float(max(turns)), "num_turns/min": float(min(turns))}
    metrics |= {f"environment/{name}": x for name, x in mean_by_name([x["numbers"] for x in facts]).items()}
    metrics["environment/observation_tokens"] = sum(r.num_response_tokens - r.num_sampled for r in responses) / n
    metrics["environment/error_frac"] = sum(r.finish_reason == "error" for r in responses) / n
    if any(x["rewards"] for x in facts):
        metrics["environment/turn_rewards"] = sum(r.outcome.reward for r in responses) / n
    return metrics

"""Implicit rewards, log-ratios of two models scaled by beta: what train_prime.py compares, and what it and train_dpo.py
report of them.
"""

from typing import Any


def pair_metrics(logps: Any, rewards: Any) -> dict[str, Any]:
    """What TRL reports of pairs, tensors (N,) each: log-probs (N, 2) and implicit rewards (N, 2), of chosen and of
    rejected responses.
    """
    chosen, rejected = rewards.detach().unbind(1)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "rewards/margins": chosen - rejected,
        "logps/chosen": logps[:, 0],
        "logps/rejected": logps[:, 1],
    }


def reward_model_metrics(rewards: Any, log_ratios: Any, rows: Any, accuracies: Any, ranks: Any) -> dict[str, float]:
    """What verl reports of PRIME's reward model: means over responses of the sums of their token rewards and of their
    log-ratios, and how well these order the responses of a group.

    Args: rewards and log_ratios (b, T), of this rank's `rows` (b,) of the step; accuracies (P, G), of the step, NaN
    where a response has no score. All data ranks must enter.
    """
    from extras.implicit_rewards.accuracy import order_accuracy

    is_scored = accuracies.flatten().isfinite()
    reward, raw_reward = (ranks.all_rows(x.sum(1), rows, accuracies.numel()) for x in (rewards, log_ratios))  # (B,)
    return {
        "reward_model/reward": reward[is_scored].mean().item(),
        "reward_model/raw_reward": raw_reward[is_scored].mean().item(),
        "reward_model/dpo_acc": order_accuracy(raw_reward.view(accuracies.shape), accuracies).item(),
    }


def leave_one_out(means: Any) -> tuple[Any, Any]:
    """The two numbers that compare the token rewards of a response with its group, see `implicit_reward.py`."""
    from extras.implicit_rewards import implicit_reward

    return implicit_reward.leave_one_out(means)


def accuracies_of(responses: Any) -> Any:
    """How right each response is, (B,) float32 within 0 and 1, see `Score.accuracy`, or NaN without a score."""
    from extras.implicit_rewards import accuracy

    return accuracy.accuracies_of(responses)

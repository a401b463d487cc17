"""The reward that an environment gives by itself: what its `report` calls "reward". Those of turns are added."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """The environment's reward, or 0.0 for a conversation that has rewards of turns only, or ended before any report.

    Args:
        data_source, solution_str, ground_truth: not used.
        extra_info: with --environment and --tools it has `environment`, the report, and `messages`, the conversation.

    Raises:
        ValueError: there is a report, and no reward in it or of a turn.
    """
    report = (extra_info or {}).get("environment", {})
    if report.keys() - {"seconds"} and not report.keys() & {"reward", "turn_rewards"}:
        raise ValueError(f"the environment reports {', '.join(report)}, and no reward; add it to `report`")
    return float(report.get("reward", 0.0))

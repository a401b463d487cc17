"""The reward that an environment gives by itself: what its `report` calls "reward"."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """The environment's reward; 0.0 for a conversation that ended before there was a report.

    Args:
        data_source, solution_str, ground_truth: not used.
        extra_info: with --environment and --tools it has `environment`, the report, and `messages`, the conversation.

    Raises:
        ValueError: the report has no reward.
    """
    report = (extra_info or {}).get("environment", {})
    if report.keys() - {"seconds"} and "reward" not in report:
        raise ValueError(f"the environment reports {', '.join(report)}, and no reward; add it to `report`")
    return float(report.get("reward", 0.0))

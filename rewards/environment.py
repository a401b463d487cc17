"""The reward that an environment gives by itself: what its `report` calls "reward"."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """The environment's reward, 0.0 if its report has none or the conversation ended before it gave one.

    Args:
        data_source, solution_str, ground_truth: not used.
        extra_info: with --environment and --tools it has `environment`, the report, and `messages`, the conversation.
    """
    return float((extra_info or {}).get("environment", {}).get("reward", 0.0))

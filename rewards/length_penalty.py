"""Penalties for long responses, to add to the reward of a task with a weight.

Both read the response's length and its limit, in tokens, from `extra_info`: `response_length` and
`max_response_length`, which the trainer adds to every row.
"""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """Linear: -length / limit, from 0 (nothing said) to -1 (ran to the limit).

    Raises:
        ValueError: extra_info lacks the lengths.
    """
    length, limit = _lengths(extra_info)
    return -length / limit


def overlong(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    buffer: int | None = None,
    factor: float = 1.0,
) -> float:
    """DAPO's soft punishment: min((limit - buffer - length) / buffer * factor, 0).

    0 up to limit - buffer, then linear, -factor at the limit. Example: limit 4, buffer 2: lengths 2, 3, 4 score 0,
    -0.5, -1.

    Args:
        buffer: tokens over which the penalty grows; default min(4096, limit // 4). DAPO: 4,096 of 20,480.
        factor: the penalty at the limit, before the weight of this function.

    Returns:
        -factor..0.

    Raises:
        ValueError: extra_info lacks the lengths, or not limit >= buffer > 0.

    Source: DAPO, eq. 13, arXiv 2503.14476.
    """
    length, limit = _lengths(extra_info)
    buffer = min(4096, max(limit // 4, 1)) if buffer is None else buffer
    if not limit >= buffer > 0:
        raise ValueError(f"need max_response_length >= buffer > 0, got max_response_length {limit} and buffer {buffer}")
    return min((limit - buffer - length) / buffer * factor, 0.0)


def _lengths(extra_info: dict[str, Any] | None) -> tuple[int, int]:
    """(response_length, max_response_length) in tokens"""
    missing = {"response_length", "max_response_length"} - (extra_info or {}).keys()
    if missing:
        raise ValueError(
            f"extra_info has no {' and no '.join(sorted(missing))}; the trainer adds both before it scores"
        )
    return extra_info["response_length"], extra_info["max_response_length"]

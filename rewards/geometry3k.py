r"""Grade the last box of an answer, and whether it thinks first: 0.9 and 0.1. For Geometry3K, as verl does."""

from typing import Any

from rewards.math_reward import equal, last_boxed

SHARE = 0.1  # of the score, for the form


def compute_score(
    data_source: str, solution_str: str, ground_truth: str | int, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    r"""0.9 if the last box equals the ground truth, as `math_reward.equal` says, and 0.1 if the whole answer has the
    form `<think>...</think>...\boxed{...}`. The component `acc` says whether it is right.

    Args:
        data_source: not used.
        solution_str: the model's answer, any string.
        ground_truth: LaTeX or a number.
        extra_info: not used.
    """
    answer = last_boxed(solution_str)
    is_right = float(answer is not None and equal(answer, ground_truth))
    thought, _, rest = solution_str.partition("</think>")
    has_form = float(thought.startswith("<think>") and "}" in rest.partition("\\boxed{")[2])
    return {"score": (1 - SHARE) * is_right + SHARE * has_form, "acc": is_right, "form": has_form}

"""Grade a short answer in `<answer>` tags by exact match, as Search-R1 does. For verl's searchR1_* rows."""

import re
import string
from typing import Any

MAX_TAGS = 10  # opening or closing ones. A right response with more earns a quarter.
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compute_score(
    data_source: str, solution_str: str, ground_truth: dict[str, Any], extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 if the last `<answer>...</answer>` equals one of the accepted answers, else 0.0. For tag spam 0.25.

    Case, ASCII punctuation, the words a, an and the, and the amount of white space do not count. This is verl's scorer
    of the same rows, with one difference. If nothing is left of an accepted answer, such as `The ?`, it must be given
    as it is written, up to case. verl then accepts any answer of which nothing is left.

    Args:
        data_source: not used.
        solution_str: the model's answer, any string.
        ground_truth: {"target": an accepted answer, or a list of them}.
        extra_info: not used.

    Raises:
        ValueError: the ground truth has another form. No answer raises.
    """
    target = ground_truth.get("target") if isinstance(ground_truth, dict) else None
    accepted = [target] if isinstance(target, str) else target
    if not isinstance(accepted, list) or not accepted or not all(isinstance(text, str) for text in accepted):
        raise ValueError(
            f"ground truth {str(ground_truth)[:200]!r}: needs a dict with target, an accepted answer or a list of them"
        )
    answers = _ANSWER.findall(solution_str)
    if not answers or not any(_same(answers[-1], text) for text in accepted):
        return 0.0
    return 0.25 if max(solution_str.count("<answer>"), solution_str.count("</answer>")) > MAX_TAGS else 1.0


def _same(answer: str, accepted: str) -> bool:
    words = _words(accepted)
    return _words(answer) == words if words else answer.strip().lower() == accepted.strip().lower()


def _words(text: str) -> list[str]:
    """`The Eiffel-Tower, Paris!` -> eiffeltower paris"""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()

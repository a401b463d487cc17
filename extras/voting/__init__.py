"""The majority vote over several responses to one prompt, as with --val-n and in eval.py.

Source: self-consistency, Wang et al. 2022, arXiv 2203.11171.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any


def final_answer(text: str) -> str | None:
    """The answer that a response votes for: what its last \\boxed{} holds, or else its last number, without commas."""
    before, found, after = text.rpartition("\\boxed{")
    depth = 1
    for i, letter in enumerate(after if found else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return after[:i].strip()
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].replace(",", "") if numbers else None


def elected(scores: Sequence[Any]) -> Any | None:
    """The `Score` of the first response that gives the most frequent `final_answer`, of ties the one seen first, or
    None if no response gives an answer.
    """
    answers = [final_answer(score.text) for score in scores]
    votes = Counter(answer for answer in answers if answer is not None)
    return scores[answers.index(votes.most_common(1)[0][0])] if votes else None

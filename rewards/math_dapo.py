"""Grade the line `Answer: ...` that ends an answer, as DAPO does: 1 right, -1 wrong. For DAPO-Math-17k and AIME."""

import re
from typing import Any

from rewards.math_reward import equal, last_boxed

TAIL = 300  # characters from the end of the answer that count
BOX_TAIL = 100  # the same for a box, where there is no answer line
_ANSWER = re.compile(r"(?i)answer\**\s*:\s*([^\n]+)")
_NAME = re.compile(r"\$?\s*(\\?[A-Za-z](?:_\w+|\(\w\))?)\s*")
_MATH = re.compile(r"(?<!\\)\$([^$]+)(?<!\\)\$")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str | int, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    r"""Score the last `Answer:` of the last 300 characters. Without one, score the last box of the last 100.

    `answer` may have any case. What follows it, to the end of the line (or on the next, if the line ends there), is the
    answer: of this the box, else what stands between dollar signs, else all. It is compared with the ground truth by
    `rewards.math_reward.equal`, so units, commas and layout do not count. First the two are compared as they stand, and
    then what follows the last `=` of each. The latter is left out if the truth is an equation in letters, since `x - 3z
    = 0` is not right because it ends with 0.

    Deliberate differences from verl's scorer of the same name, which compares normalized strings:
      - equal values are equal: `42.`, `42.0`, `84/2` and `**42**` are 42, also in the fallback box;
      - `**Answer**: 42` is an answer line;
      - an article before the number is not dropped: `Answer: a 42` is wrong;
      - if the truth is an equation, such as `x - 3z = 0`, the whole equation is the answer (verl: `0`).

    Args:
        data_source: not used.
        solution_str: the model's answer, any string.
        ground_truth: the reference answer.
        extra_info: not used.

    Returns:
        {"score": 1.0 or -1.0, "acc": 1.0 or 0.0}; no answer is wrong.

    Raises:
        ValueError: the ground truth is not a text or whole number, is empty or is longer than 512 characters. No answer
            raises.
    """
    answer, truth = _final_answer(solution_str), ground_truth
    right = equal(answer, truth)
    if not right and "=" in answer:
        left, _, value = str(truth).rpartition("=")
        names = [_NAME.fullmatch(x) for x in (answer.rpartition("=")[0], left)]
        if all(names) and names[0][1] != names[1][1]:  # z = 2x is not y = 2x
            return {"score": -1.0, "acc": 0.0}
        right = equal(answer.split("=")[-1], value if value.strip() and not re.search("[A-Za-z]", left) else truth)
    return {"score": 1.0 if right else -1.0, "acc": float(right)}


def _final_answer(text: str) -> str:
    """The text to compare, empty if there is no answer."""
    lines = _ANSWER.findall(text[-TAIL:])
    if not lines:
        return last_boxed(text[-BOX_TAIL:]) or ""
    line = lines[-1].replace("**", "")
    math = _MATH.search(line)
    return last_boxed(line) or (math[1] if math else line)

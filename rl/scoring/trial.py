"""The reward functions are tried on a few rows before a model is loaded, and the scores are printed."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rl.data.rows import Row, no_ground_truth
from rl.data.types import Sample, Score

FAILED = ("error", "timeout")  # status of a response that could not be scored
# How responses give their answers, for data without whole right responses.
ANSWER_FORMS = (r"\boxed{...}", "Answer: ...", "#### ...", "<answer>...</answer>")


def try_functions(scorer: Any, rows: Iterable[Row]) -> tuple[str, dict[str, set[str]]]:
    """Score an empty response and the reference answer of the first row of every data source, and of its first row
    without a ground truth.

    Args: scorer, a `Scorer` without judges. Returns: the scores in words, and the names of the components of scores by
    data source. Raises ValueError if they cannot be scored: wrong columns, a missing package, a sandbox that cannot be
    built.
    """
    if not scorer.functions:
        return "rewards: no function", {}
    first: dict[tuple[str, str], Row] = {}  # by data source, with a ground truth and without
    for row in rows:
        which = "first row with an empty ground_truth" if no_ground_truth(row) else "first row"
        first.setdefault((row["data_source"], which), row)
    lines, components = {}, {}  # by data source
    for (source, which), row in first.items():
        right, empty = _scores(scorer, row, [_reference(row), ""])
        for score in (right, empty):
            components.setdefault(source, set()).update(score.components)
            if score.status in FAILED:
                raise ValueError(
                    f"--custom-reward-function fails on the {which} of data source {source!r} with the response "
                    f"{score.text[-100:]!r} ({score.status}; the traceback is above); mend the function or the data"
                )
        lines.setdefault(source, f"{source}: {_describe(scorer, row, right, empty)}")
    return f"rewards: {'; '.join(lines.values()) or 'nothing to score'}", components


def _describe(scorer: Any, row: Row, right: Score, empty: Score) -> str:
    """What a reference and an empty response scored. A bare truth that earns nothing is tried in
    ANSWER_FORMS, and the best one is reported.
    """
    if no_ground_truth(row):
        return f"without a ground truth, an empty response scores {_show(empty)}"
    what, truth = "the ground truth", _reference(row)
    if isinstance(row["extra_info"].get("answer"), str):
        what = "the reference answer"
    elif _value(right) <= _value(empty):
        what = "the ground truth, in every form tried,"
        for form in ANSWER_FORMS if len(truth) < 1000 else ():  # a long one is a program's tests, and no answer
            [score] = _scores(scorer, row, [form.replace("...", truth)])
            if _value(score) > _value(right):
                right = score
                what = f"the ground truth as {form}" if _value(score) > _value(empty) else what
    return f"{what} scores {_show(right)}, an empty one {_show(empty)}"


def _scores(scorer: Any, row: Row, texts: Sequence[str]) -> list[Score]:
    """The scores of responses to a row."""
    samples = []
    for text in texts:
        ids = scorer.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        outcome = scorer.partner.outcome_of(text) if scorer.partner else None
        tokens = np.array(ids), np.ones(len(ids)), np.zeros(len(ids))  # with mask and log-probs
        samples.append(Sample(np.array([]), *tokens, "stop", 0, outcome))
    scorer.submit(row, samples)
    return [sample.score for sample in scorer.collect(samples)]


def _reference(row: Row) -> str:
    """extra_info.answer, a whole right response, else the ground truth; of a list or dict the first text in it."""
    answer, truth = row["extra_info"].get("answer"), row["reward_model"]["ground_truth"]
    if isinstance(answer, str):
        return answer
    while isinstance(truth, (list, dict)) and truth:
        truth = next(iter(truth.values() if isinstance(truth, dict) else truth))
    return str(truth)


def _value(score: Score) -> float:
    return -math.inf if score.value is None else score.value


def _show(score: Score) -> str:
    return "nothing" if score.value is None else f"{score.value:g}"

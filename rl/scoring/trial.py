"""The reward functions are tried on a few rows before a model is loaded, and the scores are printed."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rl.data.rows import Row, no_ground_truth
from rl.data.types import Sample, Score

FAILED = ("error", "timeout")  # status of a response that could not be scored
REFERENCE = "the reference answer"
# How responses may give a ground truth, for data without whole right responses.
ANSWER_FORMS = ("...", r"\boxed{...}", "Answer: ...", "#### ...", "<answer>...</answer>")


def try_functions(scorer: Any, rows: Iterable[Row], partner: Any = None) -> tuple[str, dict[str, set[str]]]:
    """Score an empty response and the reference answer of the first row of every data source, and of its first row
    without a ground truth. A ground truth that may be an answer is tried in ANSWER_FORMS too.

    Args: scorer, a `Scorer` without judges; partner, of the policy, if there is one, which says what it would make of
    these texts. Returns: the scores in words, and the names of the components of scores by data source. Raises
    ValueError if an empty response or the reference answer cannot be scored, because of wrong columns, a missing
    package, or a sandbox that cannot be built.
    """
    first: dict[tuple[str, str], Row] = {}  # by data source, with a ground truth and without
    for row in rows:
        which = "first row with an empty ground_truth" if no_ground_truth(row) else "first row"
        first.setdefault((row["data_source"], which), row)
    lines, components = {}, {}  # by data source
    for (source, which), row in first.items():
        texts = {} if no_ground_truth(row) else _right_responses(row)
        samples = [_sample(text, scorer.tokenizer, partner) for text in ("", *texts.values())]
        for sample in samples:  # each alone, since a function of lists would fail on all if it fails on one
            scorer.submit(row, [sample])
        empty, *scores = [sample.score for sample in scorer.collect(samples)]
        for score in (empty, *scores[:1]):
            components.setdefault(source, set()).update(score.components)
            if score.status in FAILED:
                raise ValueError(
                    f"--custom-reward-function fails on the {which} of data source {source!r} with the response "
                    f"{score.text[-100:]!r} ({score.status}; the traceback is above); fix the function or the data"
                )
        line = f"without a ground truth, an empty response scores {_show(empty)}"
        if texts:
            right = list(zip(texts, scores, strict=True))
            # If the first one earns nothing, the best of all forms is told of, and the first of equal ones.
            what, score = right[0] if _value(scores[0]) > _value(empty) else max(right, key=lambda x: _value(x[1]))
            if what != REFERENCE and _value(score) <= _value(empty):
                what = "the ground truth, in every form tried,"
            line = f"{what} scores {_show(score)}, an empty one {_show(empty)}"
        lines.setdefault(source, f"{source}: {line}")
    return f"rewards: {'; '.join(lines.values()) or 'nothing for functions to score'}", components


def _right_responses(row: Row) -> dict[str, str]:
    """Responses that should score well, by what they are. That is extra_info.answer, which is a whole right response,
    or else the ground truth in ANSWER_FORMS. Of a list or dict it is the first text in it.
    """
    answer, truth = row["extra_info"].get("answer"), row["reward_model"]["ground_truth"]
    if isinstance(answer, str):
        return {REFERENCE: answer}
    while isinstance(truth, (list, dict)) and truth:
        truth = next(iter(truth.values() if isinstance(truth, dict) else truth))
    forms = ANSWER_FORMS if len(str(truth)) < 1000 else ANSWER_FORMS[:1]  # a long one is a program's tests
    return {f"the ground truth as {x}".removesuffix(" as ..."): x.replace("...", str(truth)) for x in forms}


def _sample(text: str, tokenizer: PreTrainedTokenizerBase, partner: Any) -> Sample:
    """A response of the policy that is this text."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = np.array(ids), np.ones(len(ids)), np.zeros(len(ids))  # with mask and log-probs
    return Sample(np.array([]), *tokens, "stop", 0, partner.outcome_of(text) if partner else None)


def _value(score: Score) -> float:
    return -math.inf if score.value is None else score.value


def _show(score: Score) -> str:
    return "nothing" if score.value is None else f"{score.value:g}"

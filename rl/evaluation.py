"""Held-out prompts, answered greedily with the current weights."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rl import metrics
from rl.engines.base import Engine
from rl.ranks import Ranks
from rl.rollout import sample_groups, share
from rl.run import stop
from rl.scoring.pool import Scorer
from rl.types import Sampling


def evaluate(
    engine: Engine,
    scorer: Scorer,
    rows: Sequence[dict],
    sampling: Sampling,
    ranks: Ranks,
    *,
    seed: int,
    num_shown: int,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Score one greedy response to every held-out prompt.

    Args: rows, on all ranks; sampling, as in training, of which n and temperature are replaced; num_shown, how many
    responses, those to the first rows, to return as well.
    Returns: val-core/*, val-aux/*, val/accuracy and val/response_length; and {prompt, response, score} of those to
    show. All ranks must enter.
    """
    greedy = replace(sampling, n=1, temperature=0.0)
    own_rows = ranks.own_slice(rows)
    own_samples, tickets = sample_groups(engine, own_rows, greedy, seed=seed, on_group=scorer.submit)
    stop.check(ranks)
    own_scores = scorer.collect(tickets)
    stop.check(ranks)
    responses = share(own_samples, own_scores, rows, ranks)
    first = {row["row_index"] for row in rows[:num_shown]}
    shown = [
        {"prompt": scorer.tokenizer.decode(s.prompt_ids), "response": x.text, "score": x.value}
        for s, x in zip(own_samples, own_scores, strict=True)
        if s.row_index in first
    ]
    found = metrics.of_evaluation(responses, rows)
    found["val/response_length"] = sum(r.response_length for r in responses) / len(responses)
    return found, ranks.all_gather(shown)

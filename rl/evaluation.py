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
    args: Any, engine: Engine, scorer: Scorer, rows: Sequence[dict], sampling: Sampling, ranks: Ranks
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Score one greedy response to every held-out prompt.

    Args: args, of the script; rows, on all ranks; sampling, as in training, of which n and temperature are replaced.
    Returns: val-core/*, val-aux/*, val/accuracy and val/response_length; and {prompt, response, score} of the first
    --log-val-generations rows. All ranks must enter.
    """
    greedy = replace(sampling, n=1, temperature=0.0)
    own_rows = ranks.own_slice(rows)
    own_samples, tickets = sample_groups(engine, own_rows, greedy, seed=args.seed, on_group=scorer.submit)
    stop.check(ranks)
    own_scores = scorer.collect(tickets)
    stop.check(ranks)
    responses = share(own_samples, own_scores, rows, ranks)
    first = {row["row_index"] for row in rows[: args.log_val_generations]}
    shown = [
        {"prompt": scorer.tokenizer.decode(s.prompt_ids), "response": x.text, "score": x.value}
        for s, x in zip(own_samples, own_scores, strict=True)
        if s.row_index in first
    ]
    found = metrics.of_evaluation(responses, rows)
    found["val/response_length"] = sum(r.response_length for r in responses) / len(responses)
    return found, ranks.all_gather(shown)

"""Held-out prompts, answered with the current weights."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rl import metrics
from rl.engines.base import Engine
from rl.ranks import Ranks
from rl.rollout import fold, sample_groups
from rl.run import stop
from rl.scoring.pool import Scorer
from rl.types import Sampling


def evaluate(
    args: Any, engine: Engine, scorer: Scorer, rows: Sequence[dict], sampling: Sampling, ranks: Ranks
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Score --val-n responses to every held-out prompt, sampled as the other --val flags say; by default one, greedily.

    Args: args, of the script; rows, on all ranks; sampling, as in training, for lengths and what ends a response.
    Returns: the means over all prompts of what `metrics.of_prompt` finds; and {prompt, response, score, components} of
    the first --log-val-generations rows. All ranks must enter.
    """
    own_rows, seed = ranks.own_slice(rows), fold(args.seed, engine.first_rank)
    sampling = replace(sampling, n=args.val_n, temperature=args.val_temperature)
    sampling = replace(sampling, top_p=args.val_top_p, top_k=args.val_top_k, min_p=args.val_min_p)
    own_samples, tickets = sample_groups(engine, own_rows, sampling, seed=seed, on_group=scorer.submit)
    stop.check(ranks)
    own_scores = scorer.collect(tickets)
    stop.check(ranks)
    own_found = []
    for i, row in enumerate(own_rows):
        group = slice(i * args.val_n, (i + 1) * args.val_n)
        lengths = [len(s.response_ids) for s in own_samples[group]]
        own_found.append(metrics.of_prompt(row["data_source"], own_scores[group], lengths))
    first = {row["row_index"] for row in rows[: args.log_val_generations]}
    shown = [
        {
            "prompt": scorer.tokenizer.decode(s.prompt_ids),
            "response": x.text,
            "score": x.value,
            "components": x.components,
        }
        for s, x in zip(own_samples, own_scores, strict=True)
        if s.row_index in first
    ]
    return metrics.mean_by_name(ranks.all_gather(own_found)), ranks.all_gather(shown)

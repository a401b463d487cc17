"""Held-out prompts, answered with the current weights."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rl import stop
from rl.data.order import derive_seed
from rl.data.types import Sampling, Score
from rl.ranks import Ranks
from rl.sampling.engines.base import Engine
from rl.sampling.rollout import sample_groups
from rl.scoring.pool import Scorer


def evaluate(
    args: Any, engine: Engine, scorer: Scorer, rows: Sequence[dict], sampling: Sampling, ranks: Ranks
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Score --val-n responses to every held-out prompt, sampled as the other --val flags say; by default one, greedily.

    Args: args, of the script; rows, on all ranks; sampling, as in training, for lengths and what ends a response.
    Returns: the means over all prompts of what `of_prompt` finds; and {prompt, response, score, components} of
    the first --log-val-generations rows. All ranks must enter.
    """
    own_rows, seed = ranks.own_slice(rows), derive_seed(args.seed, engine.first_rank)
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
        own_found.append(of_prompt(row["data_source"], own_scores[group], lengths))
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
    return mean_by_name(ranks.all_gather(own_found)), ranks.all_gather(shown)


def of_prompt(source: str, scores: Sequence[Score], lengths: Sequence[int]) -> dict[str, float]:
    """What n responses to one held-out prompt are worth, with their lengths in tokens.

        val-core/<source>/reward/mean@n             mean score; a response without one counts as 0
        val-core/<source>/reward/best@n/mean        their best score, if n > 1
        val-core/<source>/reward/maj@n/mean         the score of the first that gives the most frequent `final_answer`
        val-aux/<source>/<component>/mean@n, best@n/mean
        val/accuracy, val/response_length           means

    The accuracy is the mean of the component `acc` (verl's name for right or wrong) where a reward has it, with or
    without a score, and of the score elsewhere. verl draws n of the n responses with replacement, 1,000 times, so that
    its best@n is lower.
    """
    n, reward = len(scores), [score.value or 0.0 for score in scores]
    found = {"val/accuracy": sum(score.accuracy for score in scores) / n, "val/response_length": sum(lengths) / n}
    values = {f"val-core/{source}/reward": reward}
    for name in dict.fromkeys(name for score in scores for name in score.components):
        values[f"val-aux/{source}/{name}"] = [x.components[name] for x in scores if name in x.components]
    for name, x in values.items():
        found[f"{name}/mean@{n}"] = sum(x) / len(x)
        if n > 1:
            found[f"{name}/best@{n}/mean"] = max(x)
    if n > 1:
        elected = majority_vote([final_answer(score.text) for score in scores])
        found[f"val-core/{source}/reward/maj@{n}/mean"] = 0.0 if elected is None else reward[elected]
    return found


def mean_by_name(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each name over the dicts that have it."""
    values: dict[str, list[float]] = {}
    for part in found:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {name: sum(x) / len(x) for name, x in values.items()}


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that at least one of k draws is right: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021, arXiv 2107.03374, eq. 1. Raises ValueError if k > n. Example: n = 4, c = 1, k = 2 -> 0.5.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= n = {num_samples} samples per prompt")
    miss = 1.0
    for i in range(num_correct):
        miss *= max(num_samples - k - i, 0) / (num_samples - i)
    return 1.0 - miss


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


def majority_vote(answers: Sequence[str | None]) -> int | None:
    """Index of the first sample that gives the most frequent answer; None answers do not vote.

    Ties go to the answer seen first.
    """
    votes = Counter(a for a in answers if a is not None)
    return answers.index(votes.most_common(1)[0][0]) if votes else None

"""What responses are worth: the numbers of an evaluation on held-out prompts, and of the scoring of a step."""

from collections import Counter
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from extras.voting import elected
from rl import stop
from rl.data.rows import Row
from rl.data.types import Evaluation, Sample, Score
from rl.ranks import Ranks


def summarize(
    own_rows: Sequence[Row],
    own_samples: Sequence[Sample],
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks,
    *,
    shown: Sequence[Row],
) -> Evaluation:
    """What the responses to held-out prompts are worth. There are equally many to each of this rank's rows, side by
    side.

    Args: shown, rows whose responses are recorded. Returns: the means over all prompts of what `of_prompt` returns, and
    the responses to record. Both are empty if the run was asked to stop meanwhile. All ranks must enter.
    """
    if stop.requested(ranks.group):
        return {}, []
    of_prompts, records, n = [], [], len(own_samples) // max(len(own_rows), 1)
    is_shown = {row["row_index"] for row in shown}
    for i, row in enumerate(own_rows):
        samples = own_samples[i * n : (i + 1) * n]
        of_prompts.append(of_prompt(row["data_source"], [s.score for s in samples], [s.num_sampled for s in samples]))
        if row["row_index"] in is_shown:
            prompt = tokenizer.decode(row["prompt_ids"])
            records += [{"prompt": prompt} | s.record for s in samples]
    return mean_by_name(ranks.all_gather(of_prompts)), ranks.all_gather(records)


def of_prompt(source: str, scores: Sequence[Score], lengths: Sequence[int]) -> dict[str, float]:
    """What n responses to one held-out prompt are worth, with their lengths in tokens.

        val-core/<source>/reward/mean@n             mean score; a response without one counts as 0
        val-core/<source>/reward/best@n/mean        their best score, if n > 1
        val-core/<source>/reward/maj@n/mean         the score of the response that is `elected`, if n > 1
        val-aux/<source>/<component>/mean@n, best@n/mean
        val/accuracy, val/response_length           means

    The accuracy is the mean of the component `acc`, verl's name for right or wrong, or of the score where a reward has
    none. verl draws n of the n responses with replacement, 1,000 times, so that its best@n is lower.
    """
    n, reward = len(scores), [score.value or 0.0 for score in scores]
    metrics = {"val/accuracy": sum(score.accuracy for score in scores) / n, "val/response_length": sum(lengths) / n}
    values = {f"val-core/{source}/reward": reward}
    for name in dict.fromkeys(name for score in scores for name in score.components):
        values[f"val-aux/{source}/{name}"] = [x.components[name] for x in scores if name in x.components]
    for name, x in values.items():
        metrics[f"{name}/mean@{n}"] = sum(x) / len(x)
        if n > 1:
            metrics[f"{name}/best@{n}/mean"] = max(x)
    if n > 1:
        winner = elected(scores)
        metrics[f"val-core/{source}/reward/maj@{n}/mean"] = 0.0 if winner is None else winner.value or 0.0
    return metrics


def of_scoring(scores: Sequence[Score], sources: Sequence[str]) -> dict[str, float]:
    """How scoring went, in shares of responses without a score by cause, seconds, and every component's mean by source.

    `sources` holds the data source of each response.
    """
    seconds = torch.tensor([s.seconds for s in scores])
    status = Counter(s.status for s in scores)
    pairs = zip(scores, sources, strict=True)
    components = [{f"reward/{source}/{name}": x for name, x in s.components.items()} for s, source in pairs]
    return {
        **{f"reward/{kind}_frac": status[kind] / len(scores) for kind in ("error", "timeout", "none")},
        "reward/seconds_p95": seconds.quantile(0.95).item(),
        "reward/seconds_max": seconds.max().item(),
        **dict(sorted(mean_by_name(components).items())),
    }


def mean_by_name(numbers: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each name over the dicts that have it."""
    values: dict[str, list[float]] = {}
    for part in numbers:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {name: sum(x) / len(x) for name, x in values.items()}

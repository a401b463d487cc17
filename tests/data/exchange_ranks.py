"""Four ranks of test_ranks.py: what they tell each other about a step, and what each has of it afterwards.

`main(Args(OUT))`, started by `launch.fork` as a script is, writes OUT/rank{rank}.pt.

The processes work on the same step as 1, 2, 3 and 4 ranks. As two they are two pairs, 0 and 2, and 1 and 3, which must
not talk to each other. Then all four work on it once more, and two neighbors train on the same rows.
"""

import pickle
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from helpers_data import scored, versions_of

from extras.partial import waiting_groups
from extras.sequence_parallel.groups import with_groups
from extras.variants import RULES, TokenSelection, components_of, shuffled, token_selection
from rl.data.batching import make_batch
from rl.data.types import Outcome, Sample, Score
from rl.formulas import advantages
from rl.ranks import Ranks, init_ranks, shutdown_ranks
from rl.run import metrics
from rl.sampling.responses import gather_responses, lengths_of, scores_of

CHOICE = TokenSelection(clip_cov_ratio=0.2, clip_cov_lb=-0.1, clip_cov_ub=0.5, kl_cov_ratio=0.15)
ENTROPY = replace(CHOICE, top_entropy_quantile=0.3)
PAD, N = 3, 3  # pad id, responses to a prompt
PROMPTS = [[11, 12, 13], [20], [11, 12, 40, 41, 42], [50, 51], [60] * 7, [70, 71], [70, 71, 72]]
ROWS = [{"row_index": 30 + i, "prompt_ids": prompt, "data_source": "math"} for i, prompt in enumerate(PROMPTS)]
LENGTHS = [4, 1, 9, 2, 2, 0, 12, 3, 5, 1, 6, 6, 7, 2, 3, 8, 4, 1, 5, 10, 2]  # of responses
GAPS = {2: (3, 6), 6: (0, 4), 15: (2, 3)}  # response: where a tool has spoken
UNSCORED = {4, 7, 18, 19, 20}  # the last row teaches nothing
CUTS = {  # name: prompts, responses to a mini-batch, tokens of a micro-batch, rows that belong together, maybe a seed
    "all": (range(7), 6, 40, 1),
    "one update": (range(7), 100, 25, 1),
    "pairs": (range(0, 4), 6, 30, 2),
    "other order": ([5, 2, 6, 0], 5, 30, 1),  # as DAPO puts groups of several rounds together
    "one prompt": ([4], 3, 20, 1),
    "one row": ([1], 1, 20, 1),
    "shuffled": (range(7), 6, 40, 1, 5),
}


def step_samples() -> list[Sample]:
    """The responses to all prompts, three to each, some of which begin alike."""
    random = np.random.default_rng(0)
    samples = []
    for k, length in enumerate(LENGTHS):
        ids = random.integers(100, 4000, length)
        if k in (1, 8, 13):  # begins as the one before it does
            ids[:3] = samples[-1].response_ids[: min(length, 3)]
        mask = np.ones(length)
        if k in GAPS:
            mask[slice(*GAPS[k])] = 0
        reason, row = ("length" if k % 4 == 0 else "stop"), ROWS[k // N]
        logprobs = -random.integers(0, 1024, length) / 256  # sums of these are exact
        columns = versions_of(row["prompt_ids"], (k // 5, min(length, 1)), (k // 4, length - 1))
        columns["pairs"] = random.integers(0, 9, (len(row["prompt_ids"]) + length, 2)).astype(np.uint8)
        outcome = Outcome({"turns": k}, k / 4, f"text {k}", {"messages": [k]}, {"turns": k}) if k % 2 else None
        samples.append(Sample(row["prompt_ids"], ids, mask, logprobs, reason, row["row_index"], outcome, columns))
    return samples


def step_scores() -> list[Score]:
    """A score of each response, with a text that no other rank may get."""
    scores = []
    for k in range(len(LENGTHS)):
        score = scored(k / 8, {"acc": k % 2}) if k not in UNSCORED else scored(None, status="timeout")
        scores.append(score._replace(text=f"secret {k}", seconds=k / 100))
    return scores


def facts(r: Sample) -> dict:
    """A response as plain values."""
    arrays = {name: x.tolist() for name, x in vars(r).items() if isinstance(x, np.ndarray)}
    return vars(r) | arrays | {"score": tuple(r.score), "columns": {name: x.tolist() for name, x in r.columns.items()}}


def share_all(ranks: Ranks, prompts: range = range(7)) -> tuple[list[Sample], list[bytes]]:
    """`share` of the step, and what this rank has sent for it."""
    sent, gather = [], dist.all_gather_object

    def gather_and_note(parts, obj, group=None):
        sent.append(pickle.dumps(obj))
        gather(parts, obj, group=group)

    own = ranks.own_slice(prompts)
    mine = [k for i in own for k in range(N * i, N * i + N)]
    samples, scores = step_samples(), step_scores()
    with mock.patch.object(dist, "all_gather_object", gather_and_note):
        responses = gather_responses(
            [replace(samples[k], score=scores[k]) for k in mine], [ROWS[i] for i in prompts], ranks
        )
    return responses, sent


def cut(responses: list[Sample], ranks: Ranks, prompts: range, mini_batch_size: int, *limits: int) -> dict:
    """`make_batch` of these prompts' responses, and numbers that need all ranks."""
    chosen = [responses[k] for i in prompts for k in range(N * i, N * i + N)]
    scores = scores_of(chosen)
    options = dict(zip(("max_tokens", "rows_per_unit", "seed"), limits, strict=False), version=6)
    if (seed := options.pop("seed", None)) is not None:
        options["order"] = shuffled(len(chosen), seed)
    batch, updates = make_batch(chosen, scores.isfinite(), mini_batch_size=mini_batch_size, ranks=ranks, **options)
    mask, logp = batch.response_mask, batch.rollout_logp
    found = {"batch": vars(batch), "updates": updates, "scores": scores, "lengths": lengths_of(chosen)}
    found["whole_lengths"] = lengths_of(chosen, whole=True)
    found["parts"] = components_of(chosen, ["acc", "style"])
    found["all_rows"] = ranks.all_rows(mask.sum(1), batch.rows, len(chosen))
    mean, var = found["moments"] = ranks.moments(logp, mask)
    found["mean"] = ranks.mean(logp, mask)
    found["whitened"] = advantages.whiten(logp, mask, mean=mean, var=var)
    ties = token_selection.uniform(batch.rows.tolist(), mask.shape[1], seed=3)
    found["largest"] = [
        logp[token_selection.largest(logp, mask.bool(), k, ranks, ties=ties)].tolist() for k in (0, 1, 2, 7, 10**6)
    ]
    # Log-probs and advantages of which many are equal.
    ready = replace(batch, old_logp=logp.round(), advantages=(batch.rows % 3 - 1.0)[:, None] * mask)
    choose = partial(token_selection.choose, batch=ready, updates=updates, entropies=entropies, seed=7, ranks=ranks)
    found["chosen"] = {mode: choose(CHOICE, mode).columns["chosen"] for mode in RULES}
    found["uncertain"] = choose(ENTROPY, "ppo_clip").advantages
    found["nothing chosen"] = choose(CHOICE, "ppo_clip") is ready
    found["described"] = metrics.describe_tokens("x", logp, mask, ranks)
    means = metrics.Means(ranks, num_updates=2)
    for row in range(len(mask)):
        means.over_tokens(mask[row : row + 1], {"tokens": logp[row : row + 1]})
        means.over_sequences({"sequences": mask[row].sum()[None]})
    if not len(mask):  # as a rank without work takes part: with what weighs nothing
        means.over_tokens(torch.zeros(1, 2), {"tokens": torch.ones(1, 2)})
        means.over_sequences({"sequences": torch.zeros(0)})
    means.over_updates({"updates": mask.sum()})
    means.largest(mask if len(mask) else torch.zeros(1, 2), {"largest": -logp if len(mask) else torch.ones(1, 2)})
    found["means"] = means.reduce()
    return found


def entropies(batch, updates) -> torch.Tensor:
    """Something of which many are equal."""
    return (-2 * batch.rollout_logp).round()


def collectives(ranks: Ranks) -> dict:
    """Each collective by itself."""
    me, size = ranks.rank, ranks.size
    parcels = [bytes([me, to]) * (3 * me * to) for to in range(size)]  # from and to rank 0 there are empty ones
    received = ranks.send(parcels)
    third = torch.full((5,), 0.1)  # of which the last rank has none
    nothing = torch.zeros(2, 3)
    # Rank 0 has three equal numbers, any other a single larger one, which it would have to give up if ties decided.
    some = torch.full((1, 3), 3.0 if me else 1.0), torch.tensor([[True, me == 0, me == 0]])
    ties = torch.tensor([[0.9, 0.8, 0.7]]) - (0.5 + me / 100) * (me > 0)
    return {
        "largest": token_selection.largest(*some, size, ranks, ties=ties),
        "received": received,
        "nothing sent": ranks.send([b""] * size),
        "slices": [ranks.own_slice(list(range(n))) for n in (0, 1, 3, 8, 11)],
        "restored": [ranks.all_gather(ranks.own_slice(list(range(n)))) for n in (0, 1, 3, 8, 11)],
        "sum": ranks.all_reduce_sum(torch.tensor([1.0, float(me)])),
        "max": ranks.all_reduce_max(torch.tensor([-1.0 - me, float(me)])),
        "equal": ranks.moments(third, torch.full((5,), float(me < size - 1 or size == 1))),
        "nothing": ranks.moments(nothing, nothing),
        "one": ranks.moments(torch.tensor([7.0, 9.0]), torch.tensor([float(me == 0), 0.0])),
        "described nothing": metrics.describe_tokens("x", nothing, nothing, ranks),
        "rows of nobody": ranks.all_rows(torch.zeros(0), torch.zeros(0, dtype=torch.long), 3),
    }


def measure(ranks: Ranks) -> dict:
    """Everything this rank sees."""
    responses, sent = share_all(ranks)
    few, _ = share_all(ranks, range(1))  # from which most ranks have no samples
    found = {"responses": [facts(r) for r in responses], "sent": sent, "few": [facts(r) for r in few]}
    found["cuts"] = {name: cut(responses, ranks, *arguments) for name, arguments in CUTS.items()}
    found["cuts"]["few"] = cut(few, ranks, range(1), 3, 20, 1)
    groups = [responses[k : k + N] for k in range(0, len(responses), N)]
    return found | collectives(ranks) | {"state": waiting_groups.to_state([groups[i] for i in (1, 4, 6)])}


@dataclass(frozen=True)
class Args:
    """See `main`."""

    out: Path = Path()


def main(args: Args) -> None:
    """Measure as one, two, three and four ranks, and as four of which two neighbors have one data rank."""
    world = init_ranks()
    alone = [dist.new_group([i]) for i in range(4)][world.rank]
    pairs = [dist.new_group(group) for group in ([0, 2], [1, 3])][world.rank % 2]
    three = dist.new_group([0, 1, 2])

    def among(group: dist.ProcessGroup) -> Ranks:
        place = dict(rank=dist.get_rank(group), size=dist.get_world_size(group))
        return replace(
            world, **place, **{f"data_{name}": x for name, x in place.items()}, group=group, data_group=group
        )

    results = {1: measure(among(alone)), 2: measure(among(pairs)), 4: measure(world)}
    if world.rank < 3:
        results[3] = measure(among(three))
    results["neighbors"] = measure(with_groups(world, 2))
    torch.save(results, args.out / f"rank{world.rank}.pt")
    shutdown_ranks()

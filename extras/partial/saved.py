"""Samples, and groups of responses in flight, as a checkpoint holds them."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from rl.data.rows import Row
from rl.data.types import Outcome, Sample, Sampling, Score
from rl.sampling.loop import Loop, Trajectory

FIELDS = Sample.__dataclass_fields__.keys()
OLD_RESPONSES = (
    "an older version has written the responses in the checkpoint: continue with it, or take another --experiment-name"
)


def saved_sample(sample: Sample) -> dict[str, Any]:
    """A sample as a checkpoint holds it, which is its `vars`, and those of the rows of a response of several."""
    return vars(sample) | {"rows": [saved_sample(row) for row in sample.rows]}


def sample_of(saved: dict[str, Any]) -> Sample:
    """The sample of which `saved_sample` has made this, where JSON has made lists of tuples. Raises ValueError for one
    that an older version has written.
    """
    if saved.keys() != FIELDS:
        raise ValueError(OLD_RESPONSES)
    outcome, score = saved["outcome"] and Outcome(*saved["outcome"]), saved["score"] and Score(*saved["score"])
    rows = tuple(map(sample_of, saved["rows"]))
    return Sample(**saved | {"outcome": outcome, "score": score, "rows": rows})


def saved_group(row: Row, done: dict[int, Sample]) -> dict[str, Any]:
    """A group as a checkpoint has it: its prompt, the responses that are done by number, and none in flight."""
    prompt = {"row_index": row["row_index"], "prompt_ids": np.asarray(row["prompt_ids"], np.int32)}
    return prompt | {"done": [[j, saved_sample(sample)] for j, sample in done.items()], "open": []}


def groups_in_flight(loop: Loop) -> dict[Hashable, dict[str, Any]]:
    """The groups in flight, by name, see `saved_group`."""
    groups = {}
    for (name, j, *_), x in loop.trajectories.items():
        if name not in groups:  # its first response comes before rows of that, which have no prompt
            groups[name] = saved_group(x.row, {} if loop.partner else loop.complete.get(name, {}))
        if not loop.partner:  # what a partner has kept of a group is not saved, so that the group begins again
            arrays = np.array(x.ids, np.int32), np.array(x.mask, np.int8), np.array(x.logprobs, np.float32)
            groups[name]["open"].append([j, *arrays, x.columns, x.seed, x.turns])
    return groups


def check_groups(groups: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError if an older version has saved one of the groups, so that `restore` cannot read it."""
    done = [sample for group in groups for _, sample in group["done"]]
    columns = [columns for group in groups for _, _, _, _, columns, *_ in group["open"]]
    if any(x.keys() != FIELDS for x in done) or not all(isinstance(x, dict) for x in columns):
        raise ValueError(OLD_RESPONSES)


def restore(loop: Loop, name: Hashable, row: Row, sampling: Sampling, saved: dict[str, Any]) -> list[Sample]:
    """Go on with a saved group, which the engine gets at the next `loop.resume`. Returns its samples if it is complete.
    It begins again if the prompt or `sampling.n` are no longer the same, or a response is too long for
    `sampling.max_tokens`.
    """
    done = {j: sample_of(x) for j, x in saved["done"]}
    numbers = sorted([*done, *(j for j, *_ in saved["open"])])
    lengths = [len(x.response_ids) for x in done.values()] + [len(ids) + 1 for _, ids, *_ in saved["open"]]
    is_same = numbers == list(range(sampling.n)) and list(saved["prompt_ids"]) == list(row["prompt_ids"])
    if not is_same or max(lengths) > sampling.max_tokens:
        loop.start(name, row, sampling)
        return []
    if not saved["open"]:
        return [done[j] for j in range(sampling.n)]
    loop.complete[name] = done
    for j, ids, mask, logprobs, columns, seed, turns in saved["open"]:
        x = loop.trajectories[name, j] = Trajectory((name, j), row, sampling, seed)
        x.ids, x.mask, x.logprobs = ids.tolist(), mask.tolist(), logprobs.tolist()
        x.columns, x.turns = columns, turns
    return []

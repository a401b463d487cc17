"""The prompts that an RL script trains on, and those that it is evaluated on."""

import os
from array import array
from collections.abc import Callable
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from rl.console import say
from rl.data.encode import encode_prompts
from rl.data.flags import Data
from rl.data.packed import Lazy, Reader
from rl.data.rows import Paths, Row, as_paths, named, no_ground_truth, read_rows


def load_prompts(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    *,
    needs_truth: bool = True,
    evaluates: bool = True,
    read_train: Reader | None = None,
    text_of: Callable[..., str] | None = None,
) -> tuple[Lazy[Row], Lazy[Row]]:
    """The prompts of --train-files and, if the run `evaluates`, those of --val-files, with their token ids.

    Args: max_prompt_length, in tokens; needs_truth, as for `read_prompts`; read_train, a reader of --train-files whose
    rows are no prompts in verl's schema; text_of, how the policy's partner makes a text of a prompt, if there is a
    partner. Raises ValueError for every mistake in the data.
    """
    read = partial(read_prompts, needs_truth=needs_truth, has_partner=text_of is not None)
    encode = partial(
        encode_prompts,
        tokenizer,
        max_prompt_length=max_prompt_length,
        filter_overlong_prompts=data.filter_overlong_prompts,
        text_of=text_of,
    )
    train_rows = (read_train or read)(data.train_files)
    val_rows = read(data.val_files) if evaluates else []
    return encode(train_rows), encode(val_rows)


def read_prompts(files: Paths, *, needs_truth: bool = True, has_partner: bool = False) -> Lazy[Row]:
    """`read_rows`. With `needs_truth`, rows with an empty ground truth are left out, and a line says so: verl's file of
    MATH has two. A reward model, or a function of the user's own, may do without. Raises ValueError if no row is left.
    """
    rows = read_rows(files, has_partner=has_partner)
    if not needs_truth:
        return rows
    empty = [i for i, row in enumerate(rows) if no_ground_truth(row)]
    if len(empty) == len(rows):
        names = ", ".join(map(str, as_paths(files)))
        raise ValueError(
            f"{names}: reward_model.ground_truth is empty in every row; fill it in, or give a "
            "--custom-reward-function that does without"
        )
    if empty and os.environ.get("RANK", "0") == "0":
        shown_rows = ", ".join([named(rows[i]) for i in empty[:10]] + ["..."] * (len(empty) > 10))
        say(f"{len(empty)} of {len(rows)} rows left out, since their ground_truth is empty: {shown_rows}")
    return Lazy(array("q", np.setdiff1d(range(len(rows)), empty)), rows.get)

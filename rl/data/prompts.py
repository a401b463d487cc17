"""The prompts that an RL script trains on, and those that it is evaluated on."""

import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from rl.console import say
from rl.data.encode import encode_prompts
from rl.data.packed import Lazy, Reader
from rl.data.rows import Paths, Row, as_paths, named, no_ground_truth, read_rows
from rl.data.text import Texts
from rl.flags import AtLeast1, Free


@dataclass(frozen=True)
class Files(Texts):
    """data and length of the run"""

    # parquet or jsonl; docs/rewards.md has verl's schema for RL, and the pages of sft.py and train_reward.py theirs
    train_files: Free[tuple[str, ...]] = ("data/gsm8k/train.parquet",)
    val_files: Free[tuple[str, ...]] = ("data/gsm8k/test.parquet",)  # held-out files, same schema
    total_epochs: Free[AtLeast1] = 1  # passes over the training files
    total_training_steps: Free[AtLeast1 | None] = None  # overrides --total-epochs


@dataclass(frozen=True)
class Data(Files):
    """data and length of the run"""

    filter_overlong_prompts: bool = False  # drop prompts longer than --max-prompt-length


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
    train, val = data.train_files, data.val_files
    kept = dict(needs_truth=needs_truth, has_partner=text_of is not None)
    train_rows = read_train(train) if read_train else read_prompts(train, **kept)
    val_rows = read_prompts(val, **kept) if evaluates else []
    filters = data.filter_overlong_prompts
    way = dict(max_prompt_length=max_prompt_length, filter_overlong_prompts=filters, text_of=text_of)
    return encode_prompts(tokenizer, train_rows, **way), encode_prompts(tokenizer, val_rows, **way)


def count_steps(files: Files, num_rows: int, batch_size: int, *, flag: str = "--train-batch-size") -> int:
    """Training steps of a run: --total-training-steps, or the whole batches of --total-epochs passes over the rows.
    Raises ValueError naming `flag` if a batch is larger than the data.
    """
    if not 1 <= batch_size <= num_rows:
        raise ValueError(f"{flag} {batch_size} must be between 1 and the {num_rows} rows of the training data")
    return files.total_training_steps or files.total_epochs * (num_rows // batch_size)


def read_prompts(files: Paths, *, needs_truth: bool = True, has_partner: bool = False) -> Lazy[Row]:
    """`read_rows`. With `needs_truth`, rows with an empty ground truth are left out, and a line says so: verl's file of
    MATH has two. A reward model, or a function of the user's own, may do without. Raises ValueError if no row is left.
    """
    rows = read_rows(files, has_partner=has_partner)
    if not needs_truth:
        return rows
    places = array("q", (i for i, row in enumerate(rows) if not no_ground_truth(row)))
    empty = np.setdiff1d(np.arange(len(rows)), places)
    names = ", ".join(map(str, as_paths(files)))
    if not places:
        raise ValueError(
            f"{names}: reward_model.ground_truth is empty in every row; fill it in, or give a "
            "--custom-reward-function that does without"
        )
    if len(empty) and os.environ.get("RANK", "0") == "0":
        shown_rows = ", ".join([named(rows[i]) for i in empty[:10]] + ["..."] * (len(empty) > 10))
        say(f"{len(empty)} of {len(rows)} rows left out, since their ground_truth is empty: {shown_rows}")
    return Lazy(places, rows.get)

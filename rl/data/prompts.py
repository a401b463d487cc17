"""The prompts that an RL script trains on, and those that it is evaluated on."""

import os
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl.console import say
from rl.data.encode import _name, _response_ids, encode_prompts, load_tokenizer, stop_token_ids
from rl.data.order import prompts_for_step
from rl.data.rows import Paths, Row, _show, no_ground_truth, read_preference_rows, read_rows
from rl.data.types import Sampling
from rl.model.checks import check_heads, check_trainable

BY_DATA_SOURCE = "rewards/by_data_source.py"  # the default reward


def load_prompts(args: Any, *, pairs: bool = False) -> tuple[PreTrainedTokenizerBase, list[Row], list[Row]]:
    """What an RL script trains on: the tokenizer of --model, the prompts of --train-files, and the held-out ones.

    Args: pairs, whether --train-files hold comparisons, see `read_preference_rows`, and not rows in verl's schema.
    Raises ValueError for every mistake in the data, and if a step or a sequence asks for more than there is.
    """
    tokenizer = load_tokenizer(args.model)
    limits = dict(max_prompt_length=args.max_prompt_length, filter_overlong_prompts=args.filter_overlong_prompts)
    found = read_preference_rows(args.train_files) if pairs else read_prompts(args, args.train_files)
    train_rows = encode_prompts(tokenizer, found, **limits)
    evaluates = args.val_before_train or args.test_freq > 0
    val_rows = encode_prompts(tokenizer, read_prompts(args, args.val_files), **limits) if evaluates else []
    prompts_for_step(train_rows, 0, args.train_batch_size, args.seed)  # refuses a batch larger than the data
    check_trainable(args.model, args.max_prompt_length + args.max_response_length)
    check_heads(args.model, args.tensor_model_parallel_size)
    return tokenizer, train_rows, val_rows


def add_given(args: Any, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> list[Row]:
    """Rows of `load_prompts` with `given` added: token ids of the responses that the data has and train_dpo.py pairs.

    These are both sides of a comparison, the better one first, with --offline; the text in extra_info that
    --solution-key names, with --pairs solution; and else none. They end with the end-of-sequence token. Raises
    ValueError, naming the row, for a solution that is missing, or a response of more than --max-response-length tokens
    unless --filter-overlong-prompts drops its row.
    """
    kept = []
    for row in rows:
        texts = [row["chosen"], row["rejected"]] if args.offline else []
        if args.pairs == "solution":
            texts = [row["extra_info"].get(args.solution_key)]
            if not isinstance(texts[0], str) or not texts[0].strip():
                raise ValueError(
                    f"{_name(row)}: extra_info has {_show(texts[0])} as {args.solution_key!r}, and --pairs solution "
                    "needs a text there; name the column that has the solution by --solution-key"
                )
        given = [_response_ids(tokenizer, row, text) for text in texts]
        longest = max(map(len, given), default=0)
        if longest <= args.max_response_length:
            kept.append(row | {"given": given})
        elif not args.filter_overlong_prompts:
            raise ValueError(
                f"{_name(row)}: the data has a response of {longest} tokens, over --max-response-length "
                f"{args.max_response_length}; raise it, or drop such rows by --filter-overlong-prompts"
            )
    prompts_for_step(kept, 0, args.train_batch_size, args.seed)  # refuses a batch larger than what is left
    return kept


def read_prompts(args: Any, files: Paths) -> list[Row]:
    """`read_rows`; if the data source decides the reward, without the rows whose ground truth is empty, which it says.

    verl's file of MATH has two such rows. A function of the user's own may do without a ground truth, and so may a
    reward model: then all rows stay. Raises ValueError if no row has a ground truth.
    """
    rows = read_rows(files)
    functions = args.custom_reward_function or (() if vars(args).get("reward_model") else (BY_DATA_SOURCE,))
    empty = [row["row_index"] for row in rows if no_ground_truth(row)]
    if not empty or not any(function.startswith(BY_DATA_SOURCE) for function in functions):
        return rows
    names = files if isinstance(files, (str, os.PathLike)) else ", ".join(map(str, files))
    if len(empty) == len(rows):
        raise ValueError(
            f"{names}: reward_model.ground_truth is empty in every row; fill it in, or give a "
            "--custom-reward-function that does without"
        )
    if os.environ.get("RANK", "0") == "0":
        numbers = ", ".join(map(str, empty[:10])) + (", ..." if len(empty) > 10 else "")
        say(f"{names}: {len(empty)} of {len(rows)} rows left out, since their ground_truth is empty: rows {numbers}")
    return [row for row in rows if not no_ground_truth(row)]


def sampling_of(args: Any, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """How a script samples: --rollout-n responses to a prompt at --temperature, up to --max-response-length tokens."""
    stops = stop_token_ids(args.model, tokenizer)
    return Sampling(
        args.rollout_n, args.temperature, args.top_p, args.top_k, args.min_p, args.max_response_length, stops
    )

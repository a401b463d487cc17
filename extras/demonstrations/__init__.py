"""Responses that the data already has: demonstrations to imitate (sft.py), and comparisons of two responses to one
prompt (train_reward.py, train_dpo.py).

rows.py reads and checks the files, encode.py makes a row's token ids and a mask of the tokens that are learned, and
behind.py encodes a text that goes on behind another one.
"""

from collections.abc import Sequence
from typing import Any


def load_demonstrations(files: Any, tokenizer: Any, *, max_length: int, filter_overlong: bool) -> Sequence[Any]:
    """The demonstrations in files: samples whose response mask is 1 for the tokens that are learned.

    A row of more than `max_length` tokens is dropped if `filter_overlong` says so. Raises ValueError for such a row
    otherwise, and for every mistake in the data, see `rows.read_demonstrations` and `encode.encode_demonstration`.
    """
    from extras.demonstrations import encode

    return encode.load_demonstrations(files, tokenizer, max_length=max_length, filter_overlong=filter_overlong)


def answer_ends(samples: Sequence[Any]) -> list[int]:
    """The ids of all tokens with which something that is learned of the samples ends, ascending."""
    from extras.demonstrations import encode

    return encode.answer_ends(samples)


def load_comparisons(files: Any, tokenizer: Any, *, max_length: int, filter_overlong: bool) -> Sequence[Any]:
    """The comparisons in files: pairs of samples (chosen, rejected), each with the token ids of prompt and response.

    A row with a side of more than `max_length` tokens is dropped if `filter_overlong` says so. Raises ValueError for
    such a row otherwise, and for every mistake in the data, see `rows.read_comparisons` and `encode_conversation`.
    """
    from extras.demonstrations import encode

    return encode.load_comparisons(files, tokenizer, max_length=max_length, filter_overlong=filter_overlong)


def read_comparisons(files: Any) -> Sequence[dict]:
    """The rows of files of comparisons, with `prompt`, `chosen` and `rejected`, see `rows.read_comparisons`."""
    from extras.demonstrations import rows

    return rows.read_comparisons(files)


def add_given(
    rows: Sequence[dict],
    tokenizer: Any,
    columns: Sequence[str],
    max_response_length: int,
    filter_overlong: bool = False,
) -> Sequence[dict]:
    """Rows with `given` added, the token ids of the responses that the data has, see `encode.add_given`."""
    from extras.demonstrations import encode

    return encode.add_given(rows, tokenizer, columns, max_response_length, filter_overlong)


def encode_conversation(tokenizer: Any, row: dict, response: str) -> list[int]:
    """Token ids of a row's prompt followed by a response, as a reward model reads them: see
    `encode.encode_conversation`.
    """
    from extras.demonstrations import encode

    return encode.encode_conversation(tokenizer, row, response)


def encode_behind(tokenizer: Any, before: str, text: str) -> list[int]:
    """Token ids of `text` where it goes on after `before`, see `behind.encode_behind`."""
    from extras.demonstrations import behind

    return behind.encode_behind(tokenizer, before, text)


def without_control_tokens(tokenizer: Any, text: str) -> str:
    """The text, in which nothing spells a control token any more, see `behind.without_control_tokens`."""
    from extras.demonstrations import behind

    return behind.without_control_tokens(tokenizer, text)


def mean_tokens(tokenizer: Any, file: Any, *, pairs: bool) -> tuple[float, float]:
    """The mean number of tokens of the prompts and of the responses in a file, see `encode.mean_tokens`."""
    from extras.demonstrations import encode

    return encode.mean_tokens(tokenizer, file, pairs=pairs)


def with_given(rows: Sequence[dict], sampled: Sequence[Any], ranks: Any) -> list[Any]:
    """The responses to the rows of a step, on all ranks: for each row first those that it has as `given`, see
    `given.given_responses`, and then those that were sampled.
    """
    from extras.demonstrations import given

    return given.side_by_side(given.given_responses(rows, ranks), sampled, rows)

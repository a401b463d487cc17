"""Rows, prompts and their order: parquet or jsonl in, token ids out, and which prompts a step sees.

Order is a function of (seed, step), not the state of a loader: a resumed run asks for the next step and continues as if
nothing had happened. Every mistake in the data is a ValueError before any model is loaded: it names the file, the row,
the value and the fix.
"""

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from rl.console import say
from rl.types import Sampling

Row = dict[str, Any]
Paths = str | os.PathLike | Sequence[str | os.PathLike]
BY_DATA_SOURCE = "rewards/by_data_source.py"  # the default reward
Check = Callable[[Row, str], Row]  # (row, "file: row 3") -> the row to keep, or ValueError


# ---------------------------------------------------------------------------------------------------------------------
# Files


def load_tokenizer(model: str, *, flag: str = "--model") -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder or Hugging Face id. Raises ValueError naming `flag` if there is none."""
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{flag} {model}: no tokenizer can be loaded from there ({reason}); give the folder of a model, such as a "
            "checkpoint's global_step_N/huggingface, or an id of the Hugging Face Hub"
        ) from error


def check_same_tokenizer(tokenizer: PreTrainedTokenizerBase, path: str, *, flag: str, model: str) -> None:
    """Raise ValueError naming `flag`, which has named `path`, if tokens have other ids there than in `tokenizer`, that
    of --model, which is `model`, or if the model there has no weights for some of them: it could not read what the
    policy samples.
    """
    vocabulary = tokenizer.get_vocab()
    if load_tokenizer(path, flag=flag).get_vocab() != vocabulary:
        raise ValueError(
            f"{flag} {path}: its tokenizer is not that of --model {model}, so it would misread every token; choose a "
            "model of the same family"
        )
    rows, own_rows = (AutoConfig.from_pretrained(x).get_text_config().vocab_size for x in (path, model))
    if rows < (needed := min(max(vocabulary.values()) + 1, own_rows)):
        raise ValueError(
            f"{flag} {path}: it knows {rows} tokens, and --model {model} may sample {needed}; choose a model with an "
            "embedding for each of them"
        )


def check_context(model: str, tokens: int, flags: str = "--max-prompt-length + --max-response-length") -> None:
    """Raise ValueError if the model has fewer positions than the tokens that `flags` allow a sequence to have."""
    config = AutoConfig.from_pretrained(model).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)  # also where a config calls it n_positions
    if positions is not None and tokens > positions:
        raise ValueError(f"{flags} = {tokens} tokens, but {model} has {positions} positions; lower it")


def check_heads(model: str, size: int) -> None:
    """Raise ValueError, from the config alone, if an engine cannot deal the model's attention heads out over `size`
    GPUs, as --tensor-model-parallel-size asks.
    """
    heads = AutoConfig.from_pretrained(model).get_text_config().to_dict().get("num_attention_heads")
    if isinstance(heads, int) and heads % size:
        raise ValueError(
            f"--tensor-model-parallel-size {size} does not divide the {heads} attention heads of {model}; choose a "
            "divisor of that number"
        )


def check_trainable(
    model: str,
    tokens: int,
    flags: str = "--max-prompt-length + --max-response-length",
    *,
    flag: str = "--model",
    instead: str = "choose a dense model",
) -> None:
    """Raise ValueError, from the config alone, if `model`, which `flag` has named, cannot be trained on sequences of so
    many tokens: see `check_context`, a mixture of experts, or rotary embeddings that depend on what else is packed.
    `instead`: what the message proposes in the place of a mixture of experts.
    """
    check_context(model, tokens, flags)
    config = AutoConfig.from_pretrained(model).get_text_config()
    numbers = {name: x for name, x in config.to_dict().items() if type(x) is int}
    if any(name.endswith("experts") and x > 1 for name, x in numbers.items()):
        with torch.device("meta"):  # some that have such a number in their config are dense
            modules = AutoModel.from_config(config).modules()
        if any(re.search(r"(moe|moeblock|experts)$", type(module).__name__, re.IGNORECASE) for module in modules):
            raise ValueError(
                f"{flag} {model}: {config.model_type} is a mixture of experts, which cannot be trained here: vLLM has "
                f"their weights under other names, so they would not reach the engine; {instead}"
            )
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = (rope, *rope.values())  # one for all layers, or one for each type of layer
    if any(isinstance(x, dict) and x.get("rope_type") in ("dynamic", "longrope") for x in ropes):
        limit = rope.get("original_max_position_embeddings") or numbers.get("original_max_position_embeddings")
        limit = limit or numbers.get("max_position_embeddings", math.inf)
        if tokens > limit:
            raise ValueError(
                f"{flag} {model}: {config.model_type} turns positions by another angle once a sequence has more than "
                f"{limit} tokens, also for shorter ones that run with it; {flags} = {tokens}, lower it"
            )


def stop_token_ids(model: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a response: the end-of-sequence ids of the tokenizer, the config and the generation config.

    They often differ: one token ends the turns of an instruction-tuned model, another the documents of its base model.
    """
    found = [tokenizer.eos_token_id, AutoConfig.from_pretrained(model).eos_token_id]
    try:
        found.append(GenerationConfig.from_pretrained(model).eos_token_id)
    except OSError:  # the model comes without one
        pass
    ids = [i for ids in found for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
    return tuple(dict.fromkeys(ids))


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


def no_ground_truth(row: Row) -> bool:
    """Whether the ground truth is an empty text, list or dict, so that no answer can be right."""
    truth = row["reward_model"]["ground_truth"]
    return truth in ([], {}) or isinstance(truth, str) and not truth.strip()


def sampling_of(args: Any, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """How a script samples: --rollout-n responses to a prompt at --temperature, up to --max-response-length tokens."""
    stops = stop_token_ids(args.model, tokenizer)
    return Sampling(
        args.rollout_n, args.temperature, args.top_p, args.top_k, args.min_p, args.max_response_length, stops
    )


def read_rows(path: Paths) -> list[Row]:
    """Read and check RL prompts in verl's schema.

    Args:
        path: a .parquet or .jsonl file, or a list of them, concatenated in that order.

    Returns:
        One dict a row, all columns kept: `prompt` (str, or list of {"role", "content"}), `data_source` (str),
        `reward_model` (dict with "ground_truth", in the type the file has), `extra_info` (dict, {} if absent or null),
        and `row_index`, the row's position in the concatenated data.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is corrupt, empty, not UTF-8, lacks a column, or a row has a bad or null value.
    """
    rows = _read_files(path, _check_rl_row)
    return [{**row, "extra_info": row.get("extra_info") or {}, "row_index": i} for i, row in enumerate(rows)]


def read_sft_rows(path: Paths) -> list[Row]:
    """Read and check demonstrations: `messages`, or `prompt` and `response`.

    Args:
        path: a .parquet or .jsonl file, or a list of them, concatenated in that order.

    Returns:
        One dict a row, all columns kept, with either `messages` (list of {"role", "content"}, an answer of the
        assistant among them) or `prompt` (str or such a list) and `response` (str); and `row_index`.

    Raises:
        FileNotFoundError, ValueError: as `read_rows`.
    """
    return [{**row, "row_index": i} for i, row in enumerate(_read_files(path, _check_sft_row))]


def read_preference_rows(path: Paths) -> list[Row]:
    """Read and check comparisons: `prompt`, and two responses to it, `chosen` and `rejected`.

    Args:
        path: a .parquet or .jsonl file, or a list of them, concatenated in that order.

    Returns:
        One dict a row, all columns kept: `prompt` (str, or list of {"role", "content"}), `chosen` and `rejected` (str,
        different), and `row_index`.

    Raises:
        FileNotFoundError, ValueError: as `read_rows`.
    """
    return [{**row, "row_index": i} for i, row in enumerate(_read_files(path, _check_preference_row))]


def _read_files(path: Paths, check: Check) -> list[Row]:
    files = [Path(path)] if isinstance(path, (str, os.PathLike)) else [Path(p) for p in path]
    if not files:
        raise ValueError("no data file given; name at least one .parquet or .jsonl file")
    return [row for file in files for row in _read_file(file, check)]


def _read_file(file: Path, check: Check) -> list[Row]:
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such data file; check the path, or make it with a script in data/")
    if not file.is_file():
        raise ValueError(f"{file}: is a folder; name its .parquet or .jsonl files")
    rows = _read_jsonl(file) if file.suffix == ".jsonl" else _read_parquet(file)
    if not rows:
        raise ValueError(f"{file}: has no rows")
    return [check(_check_text_only(row, f"{file}: row {i}"), f"{file}: row {i}") for i, row in enumerate(rows)]


def _read_parquet(file: Path) -> list[Row]:
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
            table = parquet.read()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{file}: not a readable parquet file ({error}); it is corrupt or of another format: write it again"
        ) from error
    try:
        table.validate(full=True)
        return table.to_pylist()
    except (pa.ArrowInvalid, ValueError, OverflowError) as error:
        for i in range(table.num_rows):  # Arrow counts nested values, not rows: find the row that it means
            for name, column in zip(table.column_names, table.columns, strict=True):
                try:
                    column[i].as_py()
                except UnicodeDecodeError as bad:
                    raise ValueError(
                        f"{file}: row {i}: column {name!r} is not valid UTF-8 ({bad}); write the file again as UTF-8"
                    ) from bad
                except (ValueError, OverflowError) as bad:  # a time beyond year 9999
                    raise ValueError(
                        f"{file}: row {i}: column {name!r} holds a value that Python cannot ({bad}); leave it out"
                    ) from bad
        raise ValueError(f"{file}: invalid data ({error}); write the file again") from error


def _read_jsonl(file: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file}: row {len(rows)} (line {number}) is not valid UTF-8 ({error}); write the file again as UTF-8"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{file}: row {len(rows)} (line {number}) is not JSON ({error}); write one object a line"
            ) from error
        if type(row) is not dict:
            raise ValueError(f"{file}: row {len(rows)} (line {number}) is {_show(row)}; write one JSON object a line")
        rows.append(row)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Checks: each returns the checked value; `where` is "file: row 3", for the message


def _check_text_only(row: Row, where: str) -> Row:
    """Refuse what only verl would add to the prompt: without it the model would learn to guess."""
    extra_info = row.get("extra_info")
    needed = row | (extra_info if isinstance(extra_info, dict) else {})
    found = [name for name in ("images", "videos", "need_tools_kwargs") if needed.get(name)]
    if found:
        raise ValueError(
            f"{where}: has {', '.join(found)}, but prompts are text only and the policy calls no tools; leave such "
            "rows out, or remove the column if the prompt does without"
        )
    return row


def _check_rl_row(row: Row, where: str) -> Row:
    missing = [name for name in ("prompt", "data_source", "reward_model") if name not in row]
    if missing:
        raise ValueError(f"{where}: no column {', '.join(missing)}; add or rename it (there are {', '.join(row)})")
    if not isinstance(row["data_source"], str) or not row["data_source"]:
        raise ValueError(f"{where}: data_source is {_show(row['data_source'])}; it must name the data set")
    reward_model = row["reward_model"]
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if truth is None or isinstance(truth, bytes):  # bytes would equal no answer, and every reward would be 0
        raise ValueError(
            f"{where}: reward_model is {_show(reward_model)}; it must hold a ground_truth, neither null nor bytes"
        )
    extra_info = row.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise ValueError(f"{where}: extra_info is {_show(extra_info)}; it must be a struct, null or absent")
    return {**row, "prompt": _check_prompt(row["prompt"], f"{where}: prompt")}


def _check_sft_row(row: Row, where: str) -> Row:
    if row.get("messages") is not None:
        messages = _check_messages(row["messages"], f"{where}: messages")
        if messages[0]["role"] == "assistant":
            raise ValueError(f"{where}: messages begin with the assistant; begin with a user or system message")
        if not any(m["role"] == "assistant" and m["content"].strip() for m in messages):
            raise ValueError(f"{where}: messages hold no answer of the assistant, so there is nothing to learn")
        return {**row, "messages": messages}
    if not {"prompt", "response"} <= row.keys():
        raise ValueError(
            f"{where}: no messages, nor prompt and response; add or rename them (there are {', '.join(row)})"
        )
    return {
        **row,
        "prompt": _check_prompt(row["prompt"], f"{where}: prompt"),
        "response": _check_text(row["response"], f"{where}: response"),
    }


def _check_preference_row(row: Row, where: str) -> Row:
    missing = [name for name in ("prompt", "chosen", "rejected") if name not in row]
    if missing:
        raise ValueError(f"{where}: no column {', '.join(missing)}; add or rename it (there are {', '.join(row)})")
    chosen, rejected = (_check_text(row[name], f"{where}: {name}") for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise ValueError(f"{where}: chosen and rejected are both {_show(chosen)}; drop the row, it prefers nothing")
    return {**row, "prompt": _check_prompt(row["prompt"], f"{where}: prompt")}


def _check_prompt(prompt: Any, where: str) -> str | list[dict]:
    return _check_text(prompt, where) if isinstance(prompt, str) else _check_messages(prompt, where)


def _check_text(text: Any, where: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where} is {_show(text)}; it must be a string that is not empty")
    _check_encodable(text, where)
    return text


def _check_messages(messages: Any, where: str) -> list[dict]:
    """Non-empty list of {"role", "content"}; keys that are null, as parquet pads structs, are left out."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f"{where} is {_show(messages)}; it must be a string or a list of {{role, content}}")
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str) or not role:
            raise ValueError(f"{where}[{i}] is {_show(message)}; it must hold a role and a content, both strings")
        _check_encodable(role + content, f"{where}[{i}]")
    if not any(m["content"].strip() for m in messages):
        raise ValueError(f"{where} is {_show(messages)}; it must hold some text")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _check_encodable(text: str, where: str) -> None:
    try:
        text.encode("utf-8")  # JSON can spell a lone surrogate, which no tokenizer takes
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds a lone surrogate, which is not valid UTF-8 ({error})") from error


def _show(value: Any) -> str:
    text = f"{value!r} ({type(value).__name__})"
    return text if len(text) <= 200 else f"{text[:150]}... ({type(value).__name__})"


# ---------------------------------------------------------------------------------------------------------------------
# Prompts


def render_prompt(tokenizer: PreTrainedTokenizerBase, row: Row, *, max_prompt_length: int | None = None) -> list[int]:
    """Token ids of a row's prompt, as the policy sees it before its first token.

    A message list goes through the tokenizer's chat template with the generation prompt; the template's text holds its
    own special tokens, so none are added. A string is tokenised as the tokenizer does by default.

    Args:
        row: a row of `read_rows`.
        max_prompt_length: in tokens; None for no limit.

    Raises:
        ValueError: no chat template, a template that rejects the messages, no token at all, or a prompt over the limit.
    """
    return encode_prompts(tokenizer, [row], max_prompt_length=max_prompt_length)[0]["prompt_ids"]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    *,
    max_prompt_length: int | None,
    filter_overlong_prompts: bool = False,
) -> list[Row]:
    """Rows with `prompt_ids` (list of int) added, tokenised as a batch: `render_prompt` of every row.

    Args:
        rows: rows of `read_rows`; not changed.
        max_prompt_length: in tokens; None for no limit.
        filter_overlong_prompts: drop the rows over the limit instead of raising.

    Raises:
        ValueError: as `render_prompt`; or every prompt is over the limit.
    """
    ids: list[list[int]] = [[] for _ in rows]
    for is_chat in (True, False):
        picked = [i for i, row in enumerate(rows) if isinstance(row["prompt"], list) == is_chat]
        texts = [_chat_text(tokenizer, rows[i], rows[i]["prompt"]) if is_chat else rows[i]["prompt"] for i in picked]
        if texts:
            batch = tokenizer(texts, add_special_tokens=not is_chat)["input_ids"]
            for i, prompt_ids in zip(picked, batch, strict=True):
                ids[i] = prompt_ids
    for row, prompt_ids in zip(rows, ids, strict=True):
        if not prompt_ids:
            raise ValueError(f"{_name(row)}: the prompt {_show(row['prompt'])} has no tokens in this vocabulary")
    encoded = [{**row, "prompt_ids": prompt_ids} for row, prompt_ids in zip(rows, ids, strict=True)]
    if max_prompt_length is None:
        return encoded
    overlong = [row for row in encoded if len(row["prompt_ids"]) > max_prompt_length]
    if overlong and (not filter_overlong_prompts or len(overlong) == len(encoded)):
        longest = max(len(row["prompt_ids"]) for row in overlong)
        fix = "" if len(overlong) == len(encoded) else ", or pass --filter-overlong-prompts in training"
        raise ValueError(
            f"{_name(overlong[0])}: the prompt has {len(overlong[0]['prompt_ids'])} tokens, over --max-prompt-length "
            f"{max_prompt_length} (so have {len(overlong)} of {len(encoded)} rows, up to {longest}); raise it{fix}"
        )
    return [row for row in encoded if len(row["prompt_ids"]) <= max_prompt_length]


def _chat_text(
    tokenizer: PreTrainedTokenizerBase, row: Row, messages: list[dict], *, add_generation_prompt: bool = True
) -> str:
    """The chat template's text for `messages`, which belong to `row`."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{_name(row)}: holds a list of messages, but the tokenizer of {tokenizer.name_or_path!r} has no chat "
            "template; use an instruction-tuned --model, add a chat_template to it, or make the prompt a string"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except jinja2.TemplateError as error:
        raise ValueError(f"{_name(row)}: the chat template rejects the messages {_show(messages)}: {error}") from error


def _name(row: Row) -> str:
    return f"row {row.get('row_index', '?')}"


# ---------------------------------------------------------------------------------------------------------------------
# Order


def permutation(n: int, *, seed: int, epoch: int) -> list[int]:
    """The order of `n` rows in an epoch (from 0): a shuffle of 0..n-1 that is a pure function of its arguments.

    Raises ValueError for a negative seed.
    """
    if seed < 0:
        raise ValueError(f"--seed {seed} is negative; use 0 or more")
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(n).tolist()


def prompts_for_step(
    rows: Sequence[Row], step: int, n: int, seed: int, *, flag: str = "--train-batch-size"
) -> list[Row]:
    """The `n` rows, as `flag` says, that training step `step` (from 0) uses: a pure function of (seed, step).

    An epoch is len(rows) // n steps. It shuffles the rows anew and leaves the last len(rows) % n of them out, as verl's
    drop_last: with 10 rows and n = 4, steps 0 and 1 are epoch 0, steps 2 and 3 epoch 1.

    Raises:
        ValueError: n is less than 1 or more than there are rows.
    """
    if not 1 <= n <= len(rows):
        raise ValueError(f"{flag} {n} must be between 1 and the {len(rows)} rows of the training data")
    epoch, batch = divmod(step, len(rows) // n)
    order = permutation(len(rows), seed=seed, epoch=epoch)
    return [rows[i] for i in order[batch * n : (batch + 1) * n]]


# ---------------------------------------------------------------------------------------------------------------------
# Demonstrations


def encode_sft(
    tokenizer: PreTrainedTokenizerBase, row: Row, *, max_length: int | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of a demonstration, and which of them are learned.

    A row with prompt and response learns the response and the end-of-sequence token after it. A row with messages
    learns what the assistant says, each time with the token that ends its turn, never the role header before nor the
    newline after.

    An answer goes on behind the generation prompt and never merges with it, so its tokens are those that the policy
    would sample there.

    Args:
        row: a row of `read_sft_rows`.
        max_length: in tokens; a longer row is an error (nothing is cut). None: no limit.

    Returns:
        token ids and loss mask (1 = learned), two lists of the same length. The mask goes by position, so a
        padding token equal to the end-of-sequence token changes nothing.

    Raises:
        ValueError: too long; no chat template or no end-of-sequence token; or a template under which the text so far
            is not a prefix of the text with the next message, or that ends an answer without a special token.
    """
    encode = _encode_messages if row.get("messages") is not None else _encode_response
    ids, mask = encode(tokenizer, row)
    if max_length is not None and len(ids) > max_length:
        raise ValueError(
            f"{_name(row)}: has {len(ids)} tokens, over --max-length {max_length}; raise it or add --filter-overlong"
        )
    return ids, mask


def _encode_response(tokenizer: PreTrainedTokenizerBase, row: Row) -> tuple[list[int], list[int]]:
    response_ids, prompt_ids = _response_ids(tokenizer, row, row["response"]), render_prompt(tokenizer, row)
    return prompt_ids + response_ids, [0] * len(prompt_ids) + [1] * len(response_ids)


def _response_ids(tokenizer: PreTrainedTokenizerBase, row: Row, response: str) -> list[int]:
    """Token ids of a response behind a row's prompt, the end-of-sequence token at the end."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no eos_token, so no answer could end; set one"
        )
    prompt = row["prompt"]
    ids = _encode_behind(tokenizer, prompt if isinstance(prompt, str) else _chat_text(tokenizer, row, prompt), response)
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def _encode_messages(tokenizer: PreTrainedTokenizerBase, row: Row) -> tuple[list[int], list[int]]:
    messages = row["messages"]
    ids: list[int] = []
    mask: list[int] = []
    done = ""  # the text that `ids` encodes
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        header = _chat_text(tokenizer, row, messages[:i])
        turn = _chat_text(tokenizer, row, messages[: i + 1], add_generation_prompt=False)
        if not header.startswith(done) or not turn.startswith(header):
            raise ValueError(
                f"{_name(row)}: the chat template rewrites history: the text before message {i} is not a prefix of the "
                "text with it; split the conversation into one row an answer (prompt and response)"
            )
        header_ids = _encode_behind(tokenizer, done, header[len(done) :])
        answer = turn[len(header) :]
        turn_ids = _encode_behind(tokenizer, header, answer)
        learned = len(_encode_behind(tokenizer, header, answer.rstrip()))
        if learned == 0 or turn_ids[learned - 1] not in tokenizer.added_tokens_decoder:
            raise ValueError(
                f"{_name(row)}: the chat template ends message {i} with {answer[-20:]!r}, not with a special token, so "
                "the model could not learn to stop; put the eos_token after the assistant's content in the template"
            )
        ids += header_ids + turn_ids
        mask += [0] * len(header_ids) + [1] * learned + [0] * (len(turn_ids) - learned)
        done = turn
    full = _chat_text(tokenizer, row, messages, add_generation_prompt=False)
    if not full.startswith(done):
        raise ValueError(f"{_name(row)}: the chat template rewrites history after the last answer; end the row there")
    rest = _encode_behind(tokenizer, done, full[len(done) :])
    return ids + rest, mask + [0] * len(rest)


def _encode_behind(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Token ids of `text` where it goes on behind `before`.

    Encoded by itself, the text would get a space of its own in front from a SentencePiece tokenizer (Llama 2).
    """

    def encode(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False)["input_ids"]

    ids = encode(text)
    token = (tokenizer.convert_ids_to_tokens(ids[:1]) or [""])[0]
    if before and (token.startswith("▁") or token.startswith("Ġ") and not text.startswith(" ")):
        for start in (before, "\n"):  # unless `text` merges with what it follows
            head, whole = encode(start), encode(start + text)
            if whole[: len(head)] == head:
                return whole[len(head) :]
    return ids


# ---------------------------------------------------------------------------------------------------------------------
# Answers to be judged


def encode_conversation(tokenizer: PreTrainedTokenizerBase, row: Row, response: str) -> list[int]:
    """Token ids of a row's prompt followed by a whole response, as a reward model reads them.

    A message list goes through the chat template together with the response as the assistant's message, up to whatever
    the template puts at the end. A string is followed by the response and the end-of-sequence token. Text in the
    response that spells a control token stays text: see `_without_control_tokens`.

    Raises:
        ValueError: no chat template, a template that rejects the messages, or no end-of-sequence token for a string.
    """
    if isinstance(row["prompt"], str):
        end = tokenizer.eos_token if response.endswith(tokenizer.eos_token or "\0") else ""  # which stays
        response = _without_control_tokens(tokenizer, response.removesuffix(end)) + end
        return _encode_response(tokenizer, {**row, "response": response})[0]
    response = _without_control_tokens(tokenizer, response)
    messages = [*row["prompt"], {"role": "assistant", "content": response}]
    text = _chat_text(tokenizer, row, messages, add_generation_prompt=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _without_control_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text, with an invisible U+2060 (word joiner) inside all that spells a special token, such as `<|im_end|>`.

    A policy can write such text with ordinary tokens. It could end its turn and add one that praises it.
    """
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and len(token.content) > 1:
            text = text.replace(token.content, f"{token.content[0]}\u2060{token.content[1:]}")
    return text

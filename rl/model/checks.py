"""Whether the folder of a model is whole and fits its purpose, before any weights are loaded: `check_model`."""

import contextlib
import hashlib
import math
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rl.data.template import load_tokenizer
from rl.model.roles import CAUSAL_LM, CausalLM, Learning

PROBE = "Is  1,234.5 = 12345/10?\n\tYes: café, naïve, 你好, 😀; def f(x): return x**2"  # tokenizers differ in this text
LENGTHS = "--max-prompt-length + --max-response-length"  # flags that limit the tokens of a sequence
FEW_BITS = ("F4", "F6", "F8", "I8")  # beginnings of safetensors' names for types of weights
WHOLE = (
    "give the folder of a whole model as save_pretrained of transformers writes it, such as a checkpoint's "
    "global_step_N/huggingface, or an id of the Hugging Face Hub"
)


def read_config(path: str, *, flag: str) -> PreTrainedConfig:
    """The config of the model in `path`, a folder or an id of the Hub, which `flag` has named.

    Raises ValueError naming the flag if there is no config that transformers knows or if a file of the folder has not
    been downloaded. It also raises if the folder holds adapters, for which transformers would load another model.
    """
    may_be_of_the_hub = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path) and not Path(path).is_file()
    if not may_be_of_the_hub and not (path and Path(path).is_dir()):
        raise ValueError(f"{flag} {path}: there is no such folder; {WHOLE}")
    if (Path(path) / "adapter_config.json").is_file():
        raise ValueError(f"{flag} {path}: holds adapters; merge them into their model first, or {WHOLE}")
    for file in sorted(Path(path).glob("*.*")):
        if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(b"version https://git"):
            raise ValueError(f"{flag} {path}: {file.name} is a pointer of Git LFS, so run git lfs pull")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers and the classes of configs raise whatever they meet
        raise ValueError(f"{flag} {path}: no config can be loaded from there ({_in_a_line(error)}); {WHOLE}") from error


def read_model(
    path: str, kind: CausalLM, *, flag: str, reading: Any = None, **options: Any
) -> tuple[PreTrainedModel, set[str]]:
    """The model in `path`, which `flag` has named, and the names of weights that its files lack, see `may_lack` of its
    `kind`. With device_map="meta" only the headers of the files are read.

    Args: reading, a context in which transformers reads. Raises ValueError naming the flag if the model cannot be read,
    or if files and model differ in the names or shapes of weights, or in which weights are the same. In that case what
    is missing would be random, and what is left over would be dropped.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    options |= dict(output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False, **kind.config)
    try:
        with reading or contextlib.nullcontext():
            model, info = kind.class_of(path).from_pretrained(path, **options)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers, safetensors, torch and the classes of models raise whatever they meet
        reason = _broken_file(Path(path)) or _in_a_line(error)
        raise ValueError(f"{flag} {path}: no model can be loaded from there ({reason}); {WHOLE}") from error
    lacks, others, shapes = (set(info[f"{what}_keys"]) for what in ("missing", "unexpected", "mismatched"))
    new = lacks & kind.may_lack
    if kind.may_lack:  # then the files may also have another head
        others = {x for x in others if x.startswith(f"{model.base_model_prefix}.")}
    if shapes:
        name, there, expected = min(shapes)
        problem = f"{name} has the shape {list(there)} in its files and {list(expected)} by its config"
    elif lacks := lacks - new:
        problem = f"its files lack {len(lacks)} of its weights, {min(lacks)} among them"
    elif others:
        problem = f"its files hold {len(others)} weights that {type(model).__name__} lacks, {min(others)} among them"
    elif others := model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys.keys():
        problem = f"its config ties {min(others)} to another one, which differs (or set tie_word_embeddings to false)"
    else:
        return model, new
    raise ValueError(f"{flag} {path}: {problem}; use files that fit its config.json")


def digest_of_files(path: str) -> str:
    """A digest of 4 KiB in 64 places of each weight file of a model, its beginning and its end among them."""
    digest = hashlib.sha256()
    for file in sorted(Path(transformers.utils.cached_file(path, "config.json")).parent.glob("*.safetensors")):
        with file.open("rb") as content:
            for k in range(64):
                content.seek(max(0, file.stat().st_size - 4096) * k // 63)
                digest.update(content.read(4096))
    return digest.hexdigest()


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _broken_file(folder: Path) -> str:
    """Which file with weights cannot be read, and why, or "" if they all can."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            safe_open(file, "pt").__enter__()
        except Exception as error:  # as above
            return f"{file.name}, {file.stat().st_size} bytes: {error}"
    return ""


def check_model(
    path: str,
    kind: CausalLM = CAUSAL_LM,
    *,
    flag: str = "--model",
    longest: int,
    limits: str = LENGTHS,
    is_trained: bool = True,
    learning: Learning | None = None,
    **texts: Any,
) -> PreTrainedTokenizerBase:
    """The tokenizer of the model in `path`, which `flag` has named, if config, tokenizer and the headers of its files
    fit together, and the model can do what it is for. Weights of an id of the Hub are not looked at, since that would
    download them on every machine.

    Args:
        kind: what it is read as.
        longest, limits: tokens of the longest sequence, and the flags that say so.
        is_trained: False if only an engine reads it, which may know weights of fewer bits.
        learning: what of it learns, None if nothing does.
        texts: as for `load_tokenizer`.

    Raises ValueError naming the flag, also as `CausalLM.check`, `check_context`, `check_trainable`, `read_model` and
    `Learning.check_model`.
    """
    config, where = read_config(path, flag=flag), f"{flag} {path}"
    kind.check(config, where)
    check_context(config, where, longest, limits)
    if is_trained:
        check_trainable(config, where, longest, limits)
    tokenizer = load_tokenizer(path, flag=flag, **texts)
    check_tokenizer(tokenizer, config.get_text_config().vocab_size, where)
    if Path(path).is_dir() and not quantization_of(config):
        read_model(path, kind, flag=flag, device_map="meta")
        for file in sorted(Path(path).glob("model*.safetensors")):
            with safe_open(file, "pt") as tensors:
                few = [x for x in tensors.keys() if tensors.get_slice(x).get_dtype().startswith(FEW_BITS)]
            if few:
                raise ValueError(f"{where}: {few[0]} has 8 bits or fewer; give a model with weights of 16 bits or more")
    if learning is not None:
        learning.check_model(path, kind.class_of(path), flag=flag)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, rows: int, where: str) -> None:
    """Raise ValueError, which begins with `where`, if a tokenizer has no tokens, or some that are beyond the `rows` of
    the model's embedding.
    """
    if not tokenizer(PROBE)["input_ids"]:  # transformers makes one without tokens if the folder has none
        raise ValueError(f"{where}: no tokenizer is in there; add its files, such as tokenizer.json")
    added = tokenizer.added_tokens_decoder.keys() - {tokenizer.eos_token_id, tokenizer.bos_token_id}
    needed = max({*tokenizer.get_vocab().values()} - added, default=0) + 1
    if needed > rows:
        problem = f"its tokenizer has {needed} tokens, and its embedding {rows} rows; use its own tokenizer"
        raise ValueError(f"{where}: {problem}")


def check_context(config: PreTrainedConfig, where: str, tokens: int, flags: str = LENGTHS) -> None:
    """Raise ValueError if a model, which `where` names, has fewer positions than `flags` allow a sequence to have."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)  # also if a config says n_positions
    if positions is not None and tokens > positions:
        raise ValueError(f"{flags} = {tokens} tokens, but {where} has {positions} positions; lower it")


def check_heads(model: str, size: int) -> None:
    """Raise ValueError, from the config alone, if an engine cannot divide the model's attention heads among GPUs."""
    heads = AutoConfig.from_pretrained(model).get_text_config().to_dict().get("num_attention_heads")
    if isinstance(heads, int) and heads % size:
        problem = f"does not divide the {heads} attention heads of {model}"
        raise ValueError(f"--tensor-model-parallel-size {size} {problem}; choose a divisor of that number")


def check_trainable(whole: PreTrainedConfig, where: str, tokens: int, flags: str = LENGTHS) -> None:
    """Raise ValueError, which begins with `where`, if a model cannot be trained on this many tokens. That is so if its
    weights are quantized, if weights of its kind cannot be pushed to vLLM, or if its rotary embeddings depend on what
    else is packed.
    """
    config = whole.get_text_config()
    if config.model_type == "gpt_oss":
        problem = "its experts have four bits, and vLLM copies those of a push past its own weight loaders"
        raise ValueError(f"{where}: gpt_oss cannot be trained here: {problem}; choose another model")
    if method := quantization_of(whole):
        raise ValueError(f"{where}: its weights are quantized ({method}); give the model before that, to be trained")
    rope, entry = getattr(config, "rope_parameters", None) or {}, "original_max_position_embeddings"
    ropes = (rope, *rope.values())  # one for all layers, or one for each type of layer
    varies = any(isinstance(x, dict) and x.get("rope_type") in ("dynamic", "longrope") for x in ropes)
    if varies and tokens > (limit := rope.get(entry) or getattr(config, entry, None) or math.inf):
        raise ValueError(
            f"{where}: {config.model_type} turns positions by another angle as soon as a sequence has more than "
            f"{limit} tokens, also for shorter ones that run with it; {flags} = {tokens}, lower it"
        )


def quantization_of(config: PreTrainedConfig) -> str | None:
    """The method by which the weights of a model are quantized, or None if they are not."""
    of_parts = (x.to_dict().get("quantization_config") for x in (config, config.get_text_config()))
    return next((x.get("quant_method", "unknown") for x in of_parts if x), None)

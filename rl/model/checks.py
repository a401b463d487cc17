"""Whether a model fits its purpose, found from its config and tokenizer alone, before any weights are loaded."""

import math

from transformers import AutoConfig, PreTrainedTokenizerBase

from rl.data import images
from rl.data.encode import load_tokenizer

PROBE = "Is  1,234.5 = 12345/10?\n\tYes: café, naïve, 你好, 😀; def f(x): return x**2"  # tokenizers differ in this text
REFUSED = {  # model_type -> why
    "gpt_oss": "its files hold experts of four bits, and vLLM copies the experts of a push past its own weight loaders"
}
LENGTHS = "--max-prompt-length + --max-response-length"  # flags that limit the tokens of a sequence


def check_same_tokenizer(tokenizer: PreTrainedTokenizerBase, path: str, *, flag: str, model: str) -> None:
    """Raise ValueError if the model in `path`, which `flag` has named, could not read what the policy `model` samples:
    its tokens have other ids than in the policy's `tokenizer`, or it has no weights for some of them.
    """
    vocabulary = tokenizer.get_vocab()
    if load_tokenizer(path, flag=flag).get_vocab() != vocabulary:
        problem = f"its tokenizer is not that of --model {model}, so it would misread every token"
        raise ValueError(f"{flag} {path}: {problem}; choose a model of the same family")
    if images.in_use() and len({AutoConfig.from_pretrained(x).model_type for x in (path, model)}) > 1:
        problem = f"the data has images, which it may not read as --model {model} does"
        raise ValueError(f"{flag} {path}: {problem}; choose a model of the same family")
    rows, own_rows = (AutoConfig.from_pretrained(x).get_text_config().vocab_size for x in (path, model))
    if rows < (needed := min(max(vocabulary.values()) + 1, own_rows)):
        problem = f"it knows {rows} tokens, and --model {model} may sample {needed}"
        raise ValueError(f"{flag} {path}: {problem}; choose a model with an embedding for each of them")


def check_context(model: str, tokens: int, flags: str = LENGTHS) -> None:
    """Raise ValueError if the model has fewer positions than the tokens that `flags` allow a sequence to have."""
    config = AutoConfig.from_pretrained(model).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)  # also where a config calls it n_positions
    if positions is not None and tokens > positions:
        raise ValueError(f"{flags} = {tokens} tokens, but {model} has {positions} positions; lower it")


def check_heads(model: str, size: int) -> None:
    """Raise ValueError, from the config alone, if an engine cannot divide the model's attention heads among GPUs."""
    heads = AutoConfig.from_pretrained(model).get_text_config().to_dict().get("num_attention_heads")
    if isinstance(heads, int) and heads % size:
        problem = f"does not divide the {heads} attention heads of {model}"
        raise ValueError(f"--tensor-model-parallel-size {size} {problem}; choose a divisor of that number")


def check_trainable(
    model: str, tokens: int, flags: str = LENGTHS, *, flag: str = "--model", instead: str = "choose another model"
) -> None:
    """Raise ValueError, from the config alone, if `model`, which `flag` has named, cannot be trained on so many tokens:
    `check_context` fails, its family is in `REFUSED` (the message proposes `instead`), or its rotary embeddings depend
    on what else is packed.
    """
    check_context(model, tokens, flags)
    config = AutoConfig.from_pretrained(model).get_text_config()
    if (reason := REFUSED.get(config.model_type)) is not None:
        raise ValueError(f"{flag} {model}: {config.model_type} cannot be trained here: {reason}; {instead}")
    numbers = {name: x for name, x in config.to_dict().items() if type(x) is int}
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

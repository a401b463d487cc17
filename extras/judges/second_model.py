"""A second model that reads what the policy samples: the critic, the reward model of PRIME, or the teacher."""

from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from extras import images
from rl.model.checks import check_model


def check(flag: str, path: str, tokenizer: PreTrainedTokenizerBase, *, policy: str, **options: Any) -> None:
    """Raise ValueError, which names the `flag`, as `check_model`, which gets the `options`, and as `check_same_tokens`.

    Args: path, of the second model; tokenizer and policy, that of the policy and the path of its model.
    """
    check_same_tokens(path, check_model(path, flag=flag, **options), tokenizer, policy=policy, flag=flag)


def check_same_tokens(
    path: str, other: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase, *, policy: str, flag: str
) -> None:
    """Raise ValueError if the model in `path`, which `flag` has named, could not read what the `policy` samples. That
    is so if tokens have other ids in its tokenizer, `other`, than in the policy's `tokenizer`, or if it has no weights
    for some. It is also so if the data has images, which the model may read in another way.
    """
    vocabulary = tokenizer.get_vocab()
    if other.get_vocab() != vocabulary:
        problem = f"its tokenizer is not that of --model {policy}, so it would misread every token"
        raise ValueError(f"{flag} {path}: {problem}; choose a model of the same family")
    config, config_of_policy = (AutoConfig.from_pretrained(x) for x in (path, policy))
    if images.in_use() and config.model_type != config_of_policy.model_type:
        problem = f"the data has images, which it may not read as --model {policy} does"
        raise ValueError(f"{flag} {path}: {problem}; choose a model of the same family")
    rows, rows_of_policy = (x.get_text_config().vocab_size for x in (config, config_of_policy))
    if rows < (needed := min(max(vocabulary.values()) + 1, rows_of_policy)):
        problem = f"it knows {rows} tokens, and --model {policy} may sample {needed}"
        raise ValueError(f"{flag} {path}: {problem}; choose a model with an embedding for each of them")

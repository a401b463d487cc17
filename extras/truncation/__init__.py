"""Sampling from a part of the vocabulary: --top-k, --top-p and --min-p.

The policy is the distribution that the engine has sampled from. vLLM knows which tokens it leaves out. logits.py leaves
the same ones out for the trainer and the plain engine, as DeepSeek-V3.2, arXiv 2512.02556, does. min-p is from arXiv
2407.01082.
"""

import functools
from collections.abc import Callable
from typing import Any


@functools.cache  # one object for equal settings, or torch would compile the LM head for each call
def truncation_of(sampling: Any) -> Callable | None:
    """What leaves those tokens out of logits that `sampling` never draws, see `logits.truncated`. None if it draws from
    the whole vocabulary.
    """
    if not sampling.is_truncated:
        return None
    from extras.truncation.logits import truncated

    return functools.partial(truncated, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)

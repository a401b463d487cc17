"""Choices of tokens in train_grpo_variants.py: which to learn from, and which a loss treats differently.

The rules and their paper stand in token_selection.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl.flags import NotNegative, PositiveShare

RULES = ("clip_cov", "kl_cov")  # the losses that treat chosen tokens differently


@dataclass(frozen=True)
class TokenSelection:
    """token selection: which tokens to learn from, and which the loss treats differently"""

    top_entropy_quantile: PositiveShare = 1.0  # learn from the share of tokens with the largest entropy, such as 0.2
    clip_cov_ratio: PositiveShare = 0.0002  # of clip_cov: share of a mini-batch's tokens that is left out
    clip_cov_lb: float = 1.0  # of clip_cov: they are drawn among those with a covariance above this
    clip_cov_ub: float = 5.0  # of clip_cov: and with one below this
    kl_cov_ratio: PositiveShare = 0.0002  # of kl_cov: share of a mini-batch's tokens, those of the largest covariance
    ppo_kl_coef: NotNegative = 1.0  # of kl_cov: weight of the KL term that the chosen tokens get


def choose_tokens(
    flags: TokenSelection,
    loss_mode: str,
    batch: Any,
    updates: Sequence[Any],
    entropies: Callable,
    *,
    seed: int,
    ranks: Any,
) -> Any:
    """The batch with advantages only where the policy learns, and with `chosen`: see `token_selection.choose`. All data
    ranks must enter.
    """
    from extras.variants import token_selection

    return token_selection.choose(flags, loss_mode, batch, updates, entropies, seed=seed, ranks=ranks)

"""What some algorithms look at besides tokens and scores: train_grpo_variants.py, train_dapo.py and train_reinforce.py.

Token selection says which tokens to learn from, and which a loss treats differently: token_selection.py has the rules.
Collisions say how concentrated the distribution of a token is: collisions.py computes them.
The score of a response has parts with names, the components: those that a reward function returns beside the score, the
scores of several functions, and those of judges.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rl.flags import NotNegative, PositiveShare

RULES = ("clip_cov", "kl_cov")  # the losses that treat chosen tokens differently


@dataclass(frozen=True)
class TokenSelection:
    """These flags decide which tokens to learn from, and which ones the loss treats differently."""

    # Learn only from this share of the tokens, those with the largest entropy. A usual share is 0.2.
    top_entropy_quantile: PositiveShare = 1.0
    clip_cov_ratio: PositiveShare = 0.0002  # clip_cov only: this share of a mini-batch's tokens is left out.
    clip_cov_lb: float = 1.0  # clip_cov only: they are drawn among tokens with a covariance above this.
    clip_cov_ub: float = 5.0  # clip_cov only: they are drawn among tokens with a covariance below this.
    # kl_cov only: this share of a mini-batch's tokens, those with the largest covariance, gets a KL term.
    kl_cov_ratio: PositiveShare = 0.0002
    ppo_kl_coef: NotNegative = 1.0  # kl_cov only: that KL term has this weight.
    # ECHO: the policy also learns to predict what tools and users say in a conversation. Each of these tokens has this
    # weight. A usual one is 0.1.
    echo_coef: NotNegative = 0.0


def shuffled(num_rows: int, seed: int) -> list[int]:
    """The rows 0 ... num_rows - 1 in a random order, which is a pure function of the arguments."""
    import numpy as np

    return np.random.default_rng(seed).permutation(num_rows).tolist()


def choose_tokens(
    flags: TokenSelection,
    loss_mode: str,
    policy: Any,
    batch: Any,
    updates: Sequence[Any],
    *,
    sampling: Any,
    seed: int,
    ranks: Any,
) -> Any:
    """The batch with advantages only where the policy learns, and with the columns `chosen`, `told` and `num_told`,
    if flags ask for them. See `token_selection.choose`. All ranks must enter.
    """
    from extras.variants import token_selection

    entropies = functools.partial(token_selection.fixed_entropies, policy, sampling=sampling)
    return token_selection.choose(flags, loss_mode, batch, updates, entropies, seed=seed, ranks=ranks)


def fixed_collisions(model: Any, batch: Any, updates: Sequence[Any], *, sampling: Any) -> Any:
    """The chance that two draws of a token agree, for every token that was sampled: see `collisions.collisions`. All
    ranks must enter.
    """
    from extras.variants.collisions import collisions

    return collisions(model, batch, updates, sampling=sampling)


def require_components(scorer: Any, names: Iterable[str], *, flag: str) -> None:
    """Raise ValueError naming `flag` if scores have no components of these names, as far as the first rows show. The
    name "score" stands for the score itself.
    """
    of_judges = {judge.component for judge in scorer.judges}
    for source, of_functions in (scorer.components or {"": set()}).items():
        components = of_functions | of_judges
        if missing := sorted(set(names) - components - {"score"}):
            scorer.close()
            raise ValueError(
                f"{flag} {' '.join(missing)}: scores of the first rows{source and f' of {source}'} have "
                f"{', '.join(sorted(components)) or 'none'}; a reward function's dict has components, or give several "
                "functions"
            )


def components_of(responses: Sequence[Any], names: Sequence[str]) -> Any:
    """Components of the score of each response, or "score" itself: a tensor (K, B) float32 for K names, with NaN for a
    response without a score or without that component.
    """
    import torch

    scores = [r.score for r in responses]
    scored = [{} if x.value is None else x.components | {"score": x.value} for x in scores]
    values = [[components.get(name, math.nan) for components in scored] for name in names]
    return torch.tensor(values).view(len(names), len(responses))

"""Turns of a conversation: what was earned from each of them on, and what the tokens of a turn get.

P prompts, G responses to each, B = P * G sequences, K turns, T tokens. A mask is 1 (or True) on tokens that the policy
sampled. Every function is pure, keeps the floating dtype it is given, and asserts the shapes it expects.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rl.formulas.shared import check_shapes


def turn_returns(rewards: Tensor) -> Tensor:
    """What was earned from a turn on. The same turn of the responses to a prompt is a group by itself.

    R_ik = sum_{l >= k} r_il. An estimator of rl/formulas/advantages.py compares turn k of response i with those of its
    group that have a turn k, as `grpo`: A_ik = (R_ik - mean_k) / (std_k + eps). A turn that no other response has is
    compared with nothing.
    Example: rewards [[[1, 0], [0, 3]]] -> [[1, 3], [0, 3]], of which `rloo` makes [[-2, 2], [-3, 3]].

    Args: rewards (P, G, K), of K turns, NaN where a response has no such turn, and everywhere if it is not scored.
    Returns: (P * K, G), with turns 1 to K of the first prompt, then those of the second, and so on. NaN stays NaN.
    Source: Group Turn Policy Optimization, arXiv 2511.14846, here without discount. MT-GRPO, arXiv 2505.11821, compares
    the rewards r_ik of each turn with those of the group, and adds up the results from turn k on.
    """
    check_shapes(rewards, dims=3)
    to_go = rewards.nan_to_num().flip(-1).cumsum(-1).flip(-1)
    return torch.where(rewards.isnan(), torch.nan, to_go).mT.flatten(0, 1)


def at_turns(values: Tensor, mask: Tensor) -> Tensor:
    """Each token gets the value of its turn: turns are the runs of mask 1.

    Example: values [[5, 7]], mask [[0, 1, 1, 0, 1]] -> [[0, 5, 5, 0, 7]].

    Args: values (B, K), of turns; mask (B, T). Returns: (B, T) of the mask's dtype, 0 where mask is 0.
    """
    assert values.dim() == mask.dim() == 2 and len(values) == len(mask), (
        f"unexpected shapes: {tuple(values.shape)}, {tuple(mask.shape)}"
    )
    is_first = (mask > 0) & (F.pad(mask, (1, -1)) == 0)
    turn = (is_first.cumsum(1) - 1).clamp(0, values.shape[1] - 1)
    return torch.where(mask > 0, values.gather(1, turn), 0.0).to(mask.dtype)


def at_turn_ends(values: Tensor, mask: Tensor) -> Tensor:
    """The last token of each turn gets the value of its turn, all others 0. Args, Returns: as for `at_turns`."""
    return torch.where(F.pad(mask, (-1, 1)) == 0, at_turns(values, mask), 0.0)

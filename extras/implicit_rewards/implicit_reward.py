"""What train_prime.py does not compute in its own lines: the comparison of token rewards within a group.

P prompts, G responses to each, T tokens. q_t = log pi_prm(y_t) - log pi_ref(y_t) is the log-ratio of the process reward
model to its reference at token t. NaN marks a response without a score, which leaves the statistics of its group.

Source: Process Reinforcement through Implicit Rewards (PRIME), arXiv 2502.01456, as verl's recipe/prime has it. Every
function is pure.
"""

import torch
from torch import Tensor


def leave_one_out(means: Tensor) -> tuple[Tensor, Tensor]:
    """The two numbers that compare the token rewards r of a response with its group: r * factor - baseline.

    factor = n / (n - 1), baseline = (sum of the group's means) / (n - 1), for n scored responses in the group, or 1 and
    0 if n is 1. Averaged over the tokens of a response, r * factor - baseline is its own mean minus that of the others.

    Args: means (P, G), of the token rewards of each response, NaN = not scored. Returns: factors and baselines (P, G),
    0 where not scored.
    Source: verl, recipe/prime; PRIME, eq. 5, arXiv 2502.01456, subtracts the mean of the others from each r as it is;
    RLOO, arXiv 2402.14740.
    """
    scored = ~means.isnan()
    n = scored.sum(1, keepdim=True)
    others = (n - 1).clamp(min=1)
    factor = n / others  # 1 of a lone one
    baseline = torch.where(n > 1, means.nansum(1, keepdim=True) / others, 0.0)
    return torch.where(scored, factor, 0.0), torch.where(scored, baseline, 0.0)

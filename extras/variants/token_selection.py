"""Rules that choose tokens of a step, over all ranks: those to learn from, or those that a loss treats differently.

Two rules of "The Entropy Mechanism of Reinforcement Learning" look at the covariance of a token,

    cov_t = (old_logp_t - mean of old_logp) * (A_t - mean of A),    means over the tokens of its mini-batch

It is large for likely tokens with a large advantage, and for unlikely ones with a low advantage. Learning from them
makes a policy sure of itself and ends its exploring. `losses.clip_cov` leaves some of them out, and `losses.kl_cov`
holds them back. A third rule learns only from the tokens at which the policy was most undecided.

A choice is a pure function of the step's responses and of (seed, step), whatever the ranks and micro-batches are.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from extras.variants import RULES, TokenSelection
from rl.data.batching import Update
from rl.data.order import derive_seed
from rl.data.types import Batch, Sampling
from rl.model.logprobs import over_micro_batches, response_logprobs
from rl.ranks import Ranks


def covariance(logp: Tensor, advantages: Tensor, *, mean_logp: float, mean_advantage: float) -> Tensor:
    """What a token adds to the covariance of log-prob and advantage: (logp - mean of logp) * (A - mean of A).

    Args: logp, advantages (B, T); the means over the tokens that are compared, on all ranks. Returns: (B, T).
    Source: The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv 2505.22617.
    """
    assert logp.shape == advantages.shape, f"unexpected shapes: {tuple(logp.shape)}, {tuple(advantages.shape)}"
    return (logp - mean_logp) * (advantages - mean_advantage)


def choose(
    flags: TokenSelection,
    loss_mode: str,
    batch: Batch,
    updates: Sequence[Update],
    entropies: Callable[[Batch, Sequence[Update]], Tensor],
    *,
    seed: int,
    ranks: Ranks,
) -> Batch:
    """The batch after the choices that the flags ask for. Without such flags it stays as it is.

    --top-entropy-quantile q: of the n tokens of the step, the int(q * n) with the largest entropy keep their
    advantages. Those of the others become 0 (Beyond the 80/20 Rule, arXiv 2506.01939). A loss of RULES: of the n tokens
    of each mini-batch, max(1, int(share * n)) are marked in the column `chosen`. clip_cov draws them among those with a
    covariance between its bounds, and kl_cov takes those with the largest covariance. --echo-coef: the columns `told`,
    see `what_was_told`, and `num_told` (b,), how many told tokens the response that a row belongs to has in all rows.

    Args: loss_mode, one of RULES or any other; batch with advantages and, for one of RULES, old_logp; entropies,
    (batch, updates) -> (B, T); seed, of the run and the step. All ranks must enter.
    """
    mask, rows = batch.response_mask, batch.rows
    if flags.top_entropy_quantile < 1 or loss_mode in RULES:
        chance = uniform(rows.tolist(), mask.shape[1], seed=seed)
    if flags.top_entropy_quantile < 1:
        num_kept = int(flags.top_entropy_quantile * sum(update.num_tokens for update in updates))
        undecided = largest(entropies(batch, updates), mask.bool(), num_kept, ranks, ties=chance)
        batch = replace(batch, advantages=batch.advantages * undecided)
    if loss_mode in RULES:
        chosen = torch.zeros_like(mask, dtype=torch.bool)
        for update in updates:
            in_update = mask * torch.isin(rows, rows.new_tensor(update.rows))[:, None]
            means = [ranks.mean(x, in_update) for x in (batch.old_logp, batch.advantages)]
            cov = covariance(batch.old_logp, batch.advantages, mean_logp=means[0], mean_advantage=means[1])
            if loss_mode == "clip_cov":
                among = in_update.bool() & (cov > flags.clip_cov_lb) & (cov < flags.clip_cov_ub)
                decides, share = chance, flags.clip_cov_ratio
            else:
                decides, among, share = cov, in_update.bool(), flags.kl_cov_ratio
            chosen |= largest(decides, among, max(1, int(share * update.num_tokens)), ranks, ties=chance)
        batch = replace(batch, columns={**batch.columns, "chosen": chosen})
    if flags.echo_coef:
        told = what_was_told(batch)
        most = sum(len(update.rows) for update in updates)  # There are no more responses than rows.
        num_told = ranks.all_rows(told.sum(1), batch.responses, most)[batch.responses]
        batch = replace(batch, columns={**batch.columns, "told": told, "num_told": num_told})
    return batch


def what_was_told(batch: Batch) -> Tensor:
    """What tools and users said in the responses from which the policy learns: (b, T), 1 for these tokens and else 0.
    They are the tokens that the policy did not sample, after the first one that it did. So what an environment says
    before the first turn, which no action has caused, does not count. A response without a score has none.

    Source: ECHO, arXiv 2605.24517, which learns to predict them. Its paper is about what terminals return.
    """
    mask = batch.response_mask
    is_real = torch.arange(mask.shape[1], device=mask.device) < batch.lengths[:, None]
    return ((mask.cumsum(1) > 0) & (mask == 0) & is_real).to(mask.dtype)


def fixed_entropies(model: nn.Module, batch: Batch, updates: Sequence[Update], *, sampling: Sampling) -> Tensor:
    """As `logprobs.fixed_logprobs`, the entropy of the distribution that every token was drawn from."""
    return over_micro_batches(model, batch, updates, response_logprobs, sampling, False)[1]


def largest(x: Tensor, among: Tensor, k: int, ranks: Ranks, *, ties: Tensor) -> Tensor:
    """The k largest entries of x on all ranks, which must enter, or all that there are, if there are fewer.

    Many tokens have equal covariances, since the policy is certain of them: those with the largest `ties` are taken.
    Args: x (b, T); among (b, T) bool, which entries count; ties (b, T), all different. Returns: (b, T) bool.
    """
    pairs = torch.complex(x.double(), ties.double()).numpy()  # in numpy x decides their order, then the ties
    best = np.sort(pairs[among.numpy()])[::-1][:k]
    # The k best of all ranks are among the k best of each rank. Ranks that train on the same rows have the same ones.
    every = np.sort(np.concatenate(ranks.all_gather([best])[:: ranks.sequence_size]))[::-1][:k]
    return among & torch.from_numpy(pairs >= every[-1]) if len(every) else torch.zeros_like(among)


def uniform(rows: Sequence[int], width: int, *, seed: int) -> Tensor:
    """Random numbers within 0 and 1, (b, width) float64. They depend on the seed, the row's number and the position
    alone, not on the rank that has the row.
    """
    result = torch.empty(len(rows), width, dtype=torch.float64)
    for numbers, row in zip(result, rows, strict=True):
        numbers.uniform_(generator=torch.Generator().manual_seed(derive_seed(seed, row)))
    return result

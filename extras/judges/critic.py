"""The value model of PPO: V_t, the return that is expected before token t is sampled.

A critic is a transformer with a scalar head, as a reward model is, but read off before every response token rather than
at the last one. A new head is zero, so that V = 0 everywhere until the first update.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from extras.judges.scalar_models import ScalarModel, score_head
from rl.data.batching import Update
from rl.data.types import Batch
from rl.model.logprobs import over_micro_batches, run_on_responses
from rl.ranks import Ranks

FLAG = "--critic-model"
KIND = ScalarModel(nn.init.zeros_)  # what a critic is read as: a model without a score head gets one of zeros


def token_values(model: nn.Module, batch: Batch) -> Tensor:
    """V_t = head(hidden state of token t-1) for every token with response_mask 1, with gradients: (b, T), zero where
    response_mask is zero, float32 (float64 for a float64 model).

    Source: InstructGPT, arXiv 2203.02155, for the scalar head.
    """
    return run_on_responses(model, batch, score_head)[0]


def fixed_values(model: nn.Module, batch: Batch, updates: Sequence[Update]) -> Tensor:
    """`token_values` without gradients of all rows of a batch: (B, T) on the host. All ranks must enter."""
    return over_micro_batches(model, batch, updates, score_head)[0]


def explained_variance(batch: Batch, ranks: Ranks) -> float:
    """The share of the returns' variance that the values explain, over the tokens of all ranks:
    1 - var(returns - values) / var(returns), and 0 for equal returns. All data ranks must enter.

    Source: critic/vf_explained_var of verl.
    """
    _, spread = ranks.moments(batch.returns, batch.response_mask)
    _, rest = ranks.moments(batch.returns - batch.values, batch.response_mask)
    return 1 - rest / spread if spread > 1e-8 else 0.0  # equal returns differ by rounding

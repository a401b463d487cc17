"""The value model of PPO: V_t, the return that is expected before token t is sampled.

A critic is a transformer with a scalar head, as a reward model is, but read off before every response token rather than
at the last one. A new head is zero, so that V = 0 everywhere until the first update.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from extras.judges.scalar_models import ScalarModel, score_head
from rl.data.batching import Update
from rl.data.types import Batch
from rl.model.checks import check_model
from rl.model.load import load_model
from rl.model.logprobs import over_micro_batches, run_on_responses
from rl.model.roles import Learning
from rl.model.sharding import Memory
from rl.ranks import Ranks

FLAG = "--critic-model"


KIND = ScalarModel(nn.init.zeros_)


def check_critic(
    path: str | None, tokenizer: PreTrainedTokenizerBase, learning: Learning, *, policy: str, longest: int
) -> None:
    """Raise ValueError naming the flag if the model in `path` cannot be the critic: see `checks.check_model`, which has
    the arguments. No path stands for the model of the policy, which is checked elsewhere.
    """
    if path is not None:
        check_model(path, KIND, flag=FLAG, longest=longest, learning=learning, policy=policy, tokenizer=tokenizer)


def load_critic(path: str, ranks: Ranks, learning: Learning, memory: Memory, *, longest: int, seed: int) -> nn.Module:
    """A critic from a causal LM or a reward model, to be trained. A model without a score head gets one of zeros; a
    reward model keeps its own. All ranks must enter. Raises ValueError as `load.load_model`.
    """
    return load_model(path, ranks, learning, memory, kind=KIND, longest=longest, seed=seed, flag=FLAG)


def token_values(model: nn.Module, batch: Batch) -> Tensor:
    """V_t = head(hidden state of token t-1) for every token with response_mask 1, with gradients: (b, T), zero where
    response_mask is zero, float32 (float64 for a float64 model).
    """
    return run_on_responses(model, batch, score_head)[0]


def fixed_values(model: nn.Module, batch: Batch, updates: Sequence[Update]) -> Tensor:
    """`token_values` without gradients of all rows of a batch: (B, T) on the host. All ranks must enter."""
    return over_micro_batches(model, batch, updates, score_head)[0]


def explained_variance(batch: Batch, ranks: Ranks) -> float:
    """The share of the returns' variance that the values explain, over the tokens of all ranks:
    1 - var(returns - values) / var(returns), and 0 for equal returns. All data ranks must enter.
    """
    _, spread = ranks.moments(batch.returns, batch.response_mask)
    _, rest = ranks.moments(batch.returns - batch.values, batch.response_mask)
    return 1 - rest / spread if spread > 1e-8 else 0.0  # equal returns differ by rounding

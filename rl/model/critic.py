"""The value model of PPO: V_t, the return that is expected before token t is sampled.

A critic is a transformer with a scalar head, as a reward model is, but read off before every response token rather than
at the last one. A new head is zero, so that V = 0 everywhere until the first update.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from rl.data.batching import Update
from rl.data.types import Batch
from rl.model.load import check_second_model
from rl.model.logprobs import over_micro_batches, run_on_responses
from rl.model.lora import LoRA
from rl.model.reward_model import check_reward_model, load_trained
from rl.model.sharding import Memory
from rl.ranks import Ranks

FLAG = "--critic-model"


def check_critic(path: str, tokenizer: PreTrainedTokenizerBase, lora: LoRA, *, policy: str, longest: int) -> None:
    """Raise ValueError naming the flag if the model in `path` cannot be the critic: its head gives more than one
    number, or as `check_second_model`, which has the arguments (`policy`: `model`).
    """
    kept = dict(longest=longest, flag=FLAG, model=policy)
    check_second_model(path, tokenizer, lora, AutoModelForSequenceClassification, **kept)
    check_reward_model(path, flag=FLAG, new_head=True)


def load_critic(path: str, ranks: Ranks, lora: LoRA, memory: Memory, *, longest: int, seed: int) -> nn.Module:
    """A critic from a causal LM or a reward model, to be trained. A model without a score head gets one of zeros; a
    reward model keeps its own. All ranks must enter. Raises ValueError as `reward_model.load_trained`.
    """
    return load_trained(path, ranks, lora, memory, new_head=nn.init.zeros_, longest=longest, seed=seed, flag=FLAG)


def token_values(model: nn.Module, batch: Batch) -> Tensor:
    """V_t = head(hidden state of token t-1) for every token with response_mask 1, with gradients.

    Returns: (b, T), zero where response_mask is zero. Values and the head's product are float32 (float64 for a float64
    model): bfloat16 would round values above 4 to multiples of 1/32.
    """
    [values] = run_on_responses(model, batch, _response_values)
    return values


def fixed_values(model: nn.Module, batch: Batch, updates: Sequence[Update]) -> Tensor:
    """`token_values` without gradients of all rows of a batch: (B, T) on the host. All ranks must enter."""
    return over_micro_batches(model, batch, updates, _response_values)[0]


def _response_values(model, hidden, targets):
    """hidden (R, H) -> values (R,), which know nothing of the targets that follow."""
    weight = model.score.weight
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return (hidden.to(dtype) @ weight[0].to(dtype),)

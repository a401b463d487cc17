"""The value model of PPO: V_t, the return that is expected before token t is sampled.

A critic is a transformer with a scalar head, as a reward model is, but read off before every response token rather than
at the last one. It is a model of its own, or a second head on the policy's backbone. New heads are zero, so that V = 0
everywhere until the first update.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from rl.data.batching import Update
from rl.data.types import Batch, Sampling
from rl.model.checks import check_same_tokenizer, check_trainable
from rl.model.load import check_lora
from rl.model.logprobs import over_micro_batches, response_logprobs, run_on_responses
from rl.model.reward_model import check_reward_model, load_trained
from rl.ranks import Ranks


def check_critic(args: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if --critic-model cannot be the critic: its head gives more than one number, it has no
    tokenizer, too few positions, no layers for the adapters of --lora-rank, or reads tokens otherwise.

    `tokenizer` is the policy's: the critic gets its token ids, so both must give a token the same id.
    """
    if (path := args.critic_model) is None:
        return
    check_same_tokenizer(tokenizer, path, flag="--critic-model", model=args.model)
    check_reward_model(path, flag="--critic-model", new_head=True)
    check_lora(args, path, AutoModelForSequenceClassification, flag="--critic-model")
    check_trainable(path, args.max_prompt_length + args.max_response_length, flag="--critic-model")


def load_critic(args: Any, ranks: Ranks) -> nn.Module:
    """The critic of --critic-model, by default of --model, sharded as the memory flags say, to be trained.

    A model without a score head gets one of zeros; a reward model, such as one of train_reward.py, keeps its own. All
    ranks must enter. Raises: ValueError as `reward_model.load_trained`.
    """
    return load_trained(args, args.critic_model or args.model, ranks, flag="--critic-model", new_head=nn.init.zeros_)


def token_values(model: nn.Module, batch: Batch) -> torch.Tensor:
    """V_t = head(hidden state of token t-1) for every token with response_mask 1, with gradients.

    Args: model, a critic or a policy with a value head, sharded or through `logprobs.add_packed_forward`; batch (b, T).
    Returns: (b, T), float32 (float64 for a float64 model), zero where response_mask is zero. The head runs in that
    precision too: bfloat16 would round values above 4 to multiples of 1/32.
    """
    [values] = run_on_responses(model, batch, _response_values)
    return values


def token_logprobs_and_values(
    policy: nn.Module, batch: Batch, *, sampling: Sampling, entropy_grad: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`token_logprobs` and `token_values` of a policy with a value head, from one pass.

    Args: batch (b, T); sampling and entropy_grad as there. Returns: logp, entropy and values, (b, T) each.
    """
    return run_on_responses(policy, batch, _response_logprobs_and_values, sampling, entropy_grad)


def fixed_values(model: nn.Module, batch: Batch, updates: Sequence[Update]) -> torch.Tensor:
    """`token_values` without gradients of all rows of a batch: (B, T) on the host. All ranks must enter."""
    return over_micro_batches(model, batch, updates, lambda micro: token_values(model, micro))


def _response_values(model, hidden, targets):
    """hidden (R, H) -> values (R,), which know nothing of the targets that follow."""
    weight = (model.value_head if hasattr(model, "value_head") else model.score).weight
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return (hidden.to(dtype) @ weight[0].to(dtype),)


def _response_logprobs_and_values(model, hidden, targets, sampling, entropy_grad):
    """hidden (R, H), targets (R,) -> log-probs, entropies and values (R,)."""
    return (
        *response_logprobs(model, hidden, targets, sampling, entropy_grad),
        *_response_values(model, hidden, targets),
    )

"""Models with a scalar head, which give a number instead of a next token.

A reward model (reward_model.py) judges whole responses: --reward-model names one, and its score joins those of the
reward functions. train_reward.py trains one. The critic of train_ppo.py (critic.py) predicts at every token what the
response will score. scalar_models.py loads models of both kinds. second_model.py checks whether a model can read the
tokens of the policy, as a critic, the reward model of train_prime.py and the teacher of train_distill.py have to.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from rl.flags import AtLeast1, Needs


@dataclass(frozen=True)
class RewardModelFlags:
    """A reward model scores responses."""

    # A model that train_reward.py has trained, given by id or folder, also scores. Its score joins the sum. By default
    # only functions score.
    reward_model: str | None = None
    reward_model_coef: Annotated[float, Needs("reward_model")] = 1.0  # This is the weight of that score.
    # Prompt and response have at most this many tokens in the reward model's own template. Longer ones are truncated on
    # the left.
    reward_model_max_length: Annotated[AtLeast1, Needs("reward_model")] = 4096

    @property
    def units(self) -> dict[str, int]:
        """Tokens of what a pass of the reward model never divides, by what it is. It is empty without one."""
        what = "one conversation of --reward-model-max-length"
        return {what: self.reward_model_max_length} if self.reward_model else {}

    def check(self, flags: Mapping[str, Any]) -> None:
        """Raise ValueError for a reward model that would have to read what an agent has said."""
        if self.reward_model and flags.get("agent"):
            raise ValueError("--reward-model does not read the conversations of --agent; leave one of them out")

    @property
    def text_only(self) -> str | None:
        """What cannot see images."""
        return "--reward-model" if self.reward_model else None


def open_judges(flags: RewardModelFlags, rows: Sequence[Any], tokenizer: Any, *, are_alone: bool) -> list[Any]:
    """The judges that the flags ask for, which are not loaded yet, see `reward_model.open_reward_model`."""
    if flags.reward_model is None:
        return []
    from extras.judges.reward_model import open_reward_model

    return [open_reward_model(flags, rows, tokenizer, is_alone=are_alone)]


def model_to_score(seed: int) -> Any:
    """What train_reward.py reads its model as: a model without a score head gets a random one, a function of the seed.
    See `scalar_models.ScalarModel`.
    """
    from extras.judges import scalar_models

    return scalar_models.ScalarModel(partial(scalar_models.random_head, seed=seed))


def load_reward_model(path: str, ranks: Any, learning: Any, memory: Any, *, longest: int, seed: int) -> Any:
    """A reward model, to be trained, see `model_to_score`. All ranks must enter. Raises ValueError as `load_model`."""
    from rl.model.load import load_model

    return load_model(path, ranks, learning, memory, kind=model_to_score(seed), longest=longest, seed=seed)


def sequence_scores(model: Any, batch: Any) -> Any:
    """The score (b,) of every sequence of a batch (b, T), from the hidden state of its last token, with gradients."""
    from extras.judges import scalar_models

    return scalar_models.sequence_scores(model, batch)


def fixed_scores(model: Any, batch: Any, micro_batches: Iterable[list[int]]) -> Any:
    """`sequence_scores` without gradients of the rows in micro-batches: (B,) float32 on the host, zero in others."""
    from extras.judges import scalar_models

    return scalar_models.fixed_scores(model, batch, micro_batches)


def check_second_model(
    flag: str, path: str | None, tokenizer: Any, learning: Any = None, *, policy: str, longest: int, **options: Any
) -> None:
    """Raise ValueError naming the `flag` if the model in `path` cannot read what the `policy` samples: see
    `second_model.check`, which gets the `options`. No path stands for the policy's own model, checked elsewhere.
    """
    from extras.judges import second_model

    if path is not None:
        second_model.check(flag, path, tokenizer, policy=policy, longest=longest, learning=learning, **options)


def check_critic(path: str | None, tokenizer: Any, learning: Any, *, policy: str, longest: int) -> None:
    """Raise ValueError naming --critic-model if the model in `path` cannot be the critic, see `check_second_model`."""
    from extras.judges.critic import FLAG, KIND

    check_second_model(FLAG, path, tokenizer, learning, policy=policy, longest=longest, kind=KIND)


def load_critic(path: str, ranks: Any, learning: Any, memory: Any, *, longest: int, seed: int) -> Any:
    """A critic from a causal LM or a reward model, which keeps its own head, to be trained. All ranks must enter.
    Raises ValueError as `load_model`.
    """
    from extras.judges.critic import FLAG, KIND
    from rl.model.load import load_model

    return load_model(path, ranks, learning, memory, kind=KIND, longest=longest, seed=seed, flag=FLAG)


def token_values(model: Any, batch: Any) -> Any:
    """V_t for every token with response_mask 1, with gradients: (b, T), zero where response_mask is zero."""
    from extras.judges import critic

    return critic.token_values(model, batch)


def fixed_values(model: Any, batch: Any, updates: Sequence[Any]) -> Any:
    """`token_values` without gradients of all rows of a batch: (B, T) on the host. All ranks must enter."""
    from extras.judges import critic

    return critic.fixed_values(model, batch, updates)


def explained_variance(batch: Any, ranks: Any) -> float:
    """The share of the returns' variance that the critic's values explain. All data ranks must enter."""
    from extras.judges import critic

    return critic.explained_variance(batch, ranks)

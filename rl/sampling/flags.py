"""The flags of how responses are sampled, while training and in evaluations."""

from dataclasses import dataclass, replace
from typing import Annotated

from rl.data.types import Sampling
from rl.flags import Count, Every, Few, Free, Needs, PositiveShare, Share, Temperature, TemperatureOr0, TopK


@dataclass(frozen=True)
class Decoding:
    """These flags decide how responses are sampled while training."""

    # Responses are sampled at this temperature, and the trainer divides its logits by it too.
    temperature: Temperature = 1.0
    # Sample among the fewest most likely tokens that together have this probability (nucleus sampling), and train on
    # the same truncated distribution.
    top_p: PositiveShare = 1.0
    top_k: TopK = -1  # Sample among this many of the most likely tokens. -1 means all.
    min_p: Share = 0.0  # Leave out tokens whose probability is less than this share of that of the most likely token.


@dataclass(frozen=True)
class Validation:
    """These flags are about the evaluation on held-out prompts."""

    # Evaluate at this interval, in steps, and at the end. -1 means only before the first step.
    test_freq: Free[Every] = 10
    val_before_train: Free[bool] = True  # Evaluate the untrained policy first, as step 0.
    val_n: Free[Few] = 1  # Each held-out prompt gets this many responses. More than one need --val-temperature.
    # Responses to held-out prompts are sampled at this temperature. 0 is greedy.
    val_temperature: Free[TemperatureOr0] = 0.0
    # This is --top-p for responses to held-out prompts.
    val_top_p: Free[Annotated[PositiveShare, Needs("val_temperature")]] = 1.0
    # This is --top-k for responses to held-out prompts.
    val_top_k: Free[Annotated[TopK, Needs("val_temperature")]] = -1
    # This is --min-p for responses to held-out prompts.
    val_min_p: Free[Annotated[Share, Needs("val_temperature")]] = 0.0
    log_val_generations: Free[Count] = 8  # Each evaluation records the responses to this many held-out prompts.

    @property
    def is_on(self) -> bool:
        """Whether a run evaluates at all."""
        return self.val_before_train or self.test_freq > 0

    def settings(self, sampling: Sampling) -> Sampling:
        """How held-out prompts are answered. `sampling`, as in training, has lengths and what ends a response."""
        way = replace(sampling, n=self.val_n, temperature=self.val_temperature)
        return replace(way, top_p=self.val_top_p, top_k=self.val_top_k, min_p=self.val_min_p)

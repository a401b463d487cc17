"""The flags of how responses are sampled, while training and in evaluations."""

from dataclasses import dataclass, replace
from typing import Annotated

from rl.data.types import Sampling
from rl.flags import Count, Every, Few, Free, Needs, PositiveShare, Share, Temperature, TemperatureOr0, TopK


@dataclass(frozen=True)
class Decoding:
    """decoding: how responses are sampled while training"""

    temperature: Temperature = 1.0  # the trainer divides its logits by it too
    # nucleus sampling: sample among the fewest most likely tokens that together have this probability, and train on
    # the same truncated distribution
    top_p: PositiveShare = 1.0
    top_k: TopK = -1  # sample among the k most likely tokens; -1 all
    min_p: Share = 0.0  # leave out tokens whose probability is less than this share of the most likely token's


@dataclass(frozen=True)
class Validation:
    """evaluation on held-out prompts"""

    test_freq: Free[Every] = 10  # evaluate every this many steps and at the end; -1: only before the first step
    val_before_train: Free[bool] = True  # evaluate the untrained policy first (step 0)
    val_n: Free[Few] = 1  # responses to each held-out prompt; more than one need --val-temperature
    val_temperature: Free[TemperatureOr0] = 0.0  # of these responses; 0 is greedy
    val_top_p: Free[Annotated[PositiveShare, Needs("val_temperature")]] = 1.0  # of these responses, like --top-p
    val_top_k: Free[Annotated[TopK, Needs("val_temperature")]] = -1  # of these responses, like --top-k
    val_min_p: Free[Annotated[Share, Needs("val_temperature")]] = 0.0  # of these responses, like --min-p
    log_val_generations: Free[Count] = 8  # held-out prompts whose responses are recorded at each evaluation

    @property
    def is_on(self) -> bool:
        """Whether a run evaluates at all."""
        return self.val_before_train or self.test_freq > 0

    def settings(self, sampling: Sampling) -> Sampling:
        """How held-out prompts are answered; `sampling`, as in training, has lengths and what ends a response."""
        way = replace(sampling, n=self.val_n, temperature=self.val_temperature)
        return replace(way, top_p=self.val_top_p, top_k=self.val_top_k, min_p=self.val_min_p)

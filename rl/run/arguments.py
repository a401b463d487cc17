"""The groups of flags of scripts that sample responses.

@dataclass(frozen=True)
class Args(RL):
    lr: NotNegative = 1e-6
    logging: LoggingRL = LoggingRL(experiment_name="my_run")  # another default of a flag in a group
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from extras.agents import EnvironmentFlags
from extras.correction import Correction
from extras.engines import check_together
from extras.judges import RewardModelFlags
from extras.lora import LoRA
from extras.offload import OffloadFlags
from extras.partial import PartialRollouts
from rl.data.flags import Data
from rl.flags import AtLeast1, Auto, Free, Share
from rl.model.sharding import Memory
from rl.run.command_line import parse as parse  # scripts have it from here
from rl.run.run_folder import Checkpoints
from rl.run.tracking import LoggingRL
from rl.run.training import TrainingArgs
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.flags import Decoding, Validation
from rl.scoring.flags import BY_DATA_SOURCE, Scoring


@dataclass(frozen=True)
class MemoryRL(OffloadFlags, Memory):
    """These flags change memory and speed. The numbers stay the same, up to rounding."""

    # A micro-batch has at most this many tokens. A prompt that responses share counts once.
    ppo_max_token_len_per_gpu: Free[Auto[AtLeast1]] = "auto"


@dataclass(frozen=True)
class DecodingRL(PartialRollouts, Decoding):
    """These flags decide how responses are sampled while training."""


@dataclass(frozen=True)
class RewardFunctions:
    """These functions score a response."""

    # These functions, file.py[:function[:weight]] ..., score responses, and their scores are summed. Their signature is
    # verl's (data_source, solution_str, ground_truth, extra_info). The default is rewards/by_data_source.py, or no
    # function if there is a --reward-model.
    custom_reward_function: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Rewards(RewardModelFlags, RewardFunctions):
    """These flags decide what scores a response."""

    # Stop the run if the reward raises or times out for a larger share than this of a step's responses.
    reward_max_error_frac: Free[Share] = 0.05

    @property
    def functions(self) -> tuple[str, ...]:
        """The reward functions that a run calls."""
        return self.custom_reward_function or (() if self.reward_model else (BY_DATA_SOURCE,))


@dataclass(frozen=True)
class RLBase(TrainingArgs):
    """The groups of every script that samples responses."""

    data: Data = Data()
    decoding: DecodingRL = DecodingRL()
    rewards: Rewards = Rewards()
    scoring: Scoring = Scoring()
    rollout: EngineFlags = EngineFlags()
    envs: EnvironmentFlags = EnvironmentFlags()
    lora: LoRA = LoRA()
    memory: MemoryRL = MemoryRL()
    validation: Validation = Validation()
    checkpoints: Checkpoints = Checkpoints()
    logging: LoggingRL = LoggingRL()

    def check(self, flags: Mapping[str, Any]) -> None:
        """Raise ValueError if flags of different groups contradict each other. `flags` has all of them by name."""
        rollout = self.rollout
        check_together(rollout, self.decoding)
        if rollout.is_quantized:
            flag = f"--rollout-quantization {rollout.rollout_quantization}"
            if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
                raise ValueError(f"{flag} needs a GPU that computes in FP8, such as an H100 or L40S; leave it out")
        if (n := self.validation.val_n) > 1 and self.validation.val_temperature == 0:
            raise ValueError(f"--val-n {n} repeats one greedy response; add a positive --val-temperature")
        if (n := flags.get("ppo_mini_batch_size") or 0) > (rows := flags["train_batch_size"]):
            raise ValueError(
                f"--ppo-mini-batch-size {n} is more than --train-batch-size {rows}; both count prompts, lower it"
            )


@dataclass(frozen=True)
class RL(RLBase):
    """The groups of every script with a policy loss: those above, and the correction of that loss."""

    correction: Correction = Correction()

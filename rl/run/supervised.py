"""The groups of flags of scripts that learn from given responses: sft.py and train_reward.py."""

from dataclasses import dataclass

from extras.lora import LoRA
from extras.offload import OffloadFlags
from rl.flags import AtLeast1, Auto, Free
from rl.model.sharding import Memory
from rl.run.command_line import parse as parse  # scripts have it from here
from rl.run.run_folder import Checkpoints
from rl.run.tracking import LoggingSupervised
from rl.run.training import TrainingArgs
from rl.run.training import check as check  # and this too


@dataclass(frozen=True)
class MemorySupervised(OffloadFlags, Memory):
    """These flags change memory and speed. The numbers stay the same, up to rounding."""

    max_token_len_per_gpu: Free[Auto[AtLeast1]] = "auto"  # A micro-batch has at most this many tokens.


@dataclass(frozen=True)
class Supervised(TrainingArgs):
    """The groups of every script that learns from given responses."""

    length_flags = ("max_length",)
    lora: LoRA = LoRA()
    memory: MemorySupervised = MemorySupervised()
    checkpoints: Checkpoints = Checkpoints()
    logging: LoggingSupervised = LoggingSupervised()

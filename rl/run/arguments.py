"""The groups of flags that scripts share, and the check of a script's Args before anything is loaded.

@dataclass(frozen=True)
class Args(RL):
    lr: NotNegative = 1e-6
    logging: LoggingRL = LoggingRL(experiment_name="my_run")  # another default of a flag in a group
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from extras.agents import EnvironmentFlags
from extras.correction import Correction
from extras.families import check_routed
from extras.judges import RewardModelFlags, model_to_score
from extras.lora import LoRA
from extras.plan import Hardware, Planned, Settled, budget_of, hardware, settle
from rl.data.flags import Data
from rl.flags import AtLeast1, Auto, Free, Share, check_limits, flat, settled, spelled
from rl.model.checks import LENGTHS, check_model
from rl.model.roles import CAUSAL_LM
from rl.model.sharding import UNPLANNED, Memory
from rl.run.alarms import parse_alarm
from rl.run.command_line import parse as parse  # scripts have it from here
from rl.run.run_folder import Checkpoints, first_day, folder_of
from rl.run.tracking import LoggingRL, LoggingSupervised
from rl.sampling.engines import check_engine_flags
from rl.sampling.engines.flags import Rollout
from rl.sampling.flags import Decoding, Validation
from rl.scoring.flags import BY_DATA_SOURCE, Scoring

USUAL_TOKENS = 16384  # of a micro-batch


@dataclass(frozen=True)
class MemoryRL(Memory):
    """memory and speed: the numbers stay the same, up to rounding"""

    # tokens of a micro-batch, where a prompt that responses share counts once
    ppo_max_token_len_per_gpu: Free[Auto[AtLeast1]] = "auto"


@dataclass(frozen=True)
class MemorySupervised(Memory):
    """memory and speed: the numbers stay the same, up to rounding"""

    max_token_len_per_gpu: Free[Auto[AtLeast1]] = "auto"  # tokens in one micro-batch


@dataclass(frozen=True)
class RewardFunctions:
    """functions that score a response"""

    # file.py[:function[:weight]] ..., summed; verl's signature (data_source, solution_str, ground_truth, extra_info).
    # Default: rewards/by_data_source.py; no function if there is a --reward-model
    custom_reward_function: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Rewards(RewardModelFlags, RewardFunctions):
    """reward: what scores a response"""

    reward_max_error_frac: Free[Share] = 0.05  # stop the run if more of a step's responses raise or time out

    @property
    def functions(self) -> tuple[str, ...]:
        """The reward functions that a run calls."""
        return self.custom_reward_function or (() if self.reward_model else (BY_DATA_SOURCE,))


@dataclass(frozen=True)
class RLBase(Planned):
    """The groups of every script that samples responses."""

    rows_per_unit = 1  # rows that a micro-batch never separates
    data: Data = Data()
    decoding: Decoding = Decoding()
    rewards: Rewards = Rewards()
    scoring: Scoring = Scoring()
    rollout: Rollout = Rollout()
    envs: EnvironmentFlags = EnvironmentFlags()
    lora: LoRA = LoRA()
    memory: MemoryRL = MemoryRL()
    validation: Validation = Validation()
    checkpoints: Checkpoints = Checkpoints()
    logging: LoggingRL = LoggingRL()


@dataclass(frozen=True)
class RL(RLBase):
    """The groups of every script with a policy loss: those above, and the correction of that loss."""

    correction: Correction = Correction()


@dataclass(frozen=True)
class Supervised(Planned):
    """The groups of every script that learns from given responses."""

    rows_per_unit = 1  # rows that a micro-batch never separates
    lora: LoRA = LoRA()
    memory: MemorySupervised = MemorySupervised()
    checkpoints: Checkpoints = Checkpoints()
    logging: LoggingSupervised = LoggingSupervised()


def check(args: Any, *, scores: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of --model, if nothing is wrong that can be known before data and models are loaded.

    Args: scores, whether --model becomes a reward model, whose head may be new. Raises ValueError, naming the flag, its
    value and the fix: for numbers beyond the limits of their flags, flags that contradict each other, and a model that
    is broken, cannot be trained on sequences of the given length, or does not fit into the memory of this machine.
    """
    check_limits(args)
    for alarm in args.logging.alarms:
        parse_alarm(alarm)
    flag, tokens = budget_of(args.memory)
    for unit, length in units(args).items():
        if tokens != "auto" and tokens < length:
            raise ValueError(f"{spelled(flag)} {tokens} cannot hold {unit} = {length} tokens; raise it to that")
    if is_rl := isinstance(args, RLBase):
        _check_rl(args)
    for group in vars(args).values():
        if hasattr(group, "check"):  # a group of an extra knows what contradicts its flags
            group.check(flat(args))
    root = folder_of(args.checkpoints, args.logging.project_name, args.logging.experiment_name)
    tokenizer = check_model(
        args.model,
        model_to_score(args.seed) if scores else CAUSAL_LM,
        longest=max_length_of(args),
        limits=LENGTHS if is_rl else "--max-length",
        texts=args.data,
        day=first_day(args.checkpoints, root),
    )
    if coef := args.lora.router_aux_loss_coef:
        check_routed(args.model, f"--router-aux-loss-coef {coef}")
    if is_rl:
        check_engine_flags(args.rollout, args.model)
    settled_memory(args, [hardware()])
    return tokenizer


def units(args: Any) -> dict[str, int]:
    """Tokens of what a micro-batch never divides, by what it is: a micro-batch holds at least one of each."""
    unit = "one sequence of" if args.rows_per_unit == 1 else "one pair of 2 x"
    flags = "(--max-prompt-length + --max-response-length)" if isinstance(args, RLBase) else "--max-length"
    lengths = {f"{unit} {flags}": args.rows_per_unit * max_length_of(args)}
    return lengths | (args.rewards.units if isinstance(args, RLBase) else {})


def max_length_of(args: Any) -> int:
    """Tokens of the longest sequence."""
    return args.max_prompt_length + args.max_response_length if isinstance(args, RLBase) else args.max_length


def settled_memory(args: Any, of_ranks: Sequence[Hardware | None], then: dict[str, Any] | None = None) -> Settled:
    """The memory flags with what `auto` stands for: on GPUs, what is the cheapest and fits them. With --param-offload,
    --optimizer-offload says nothing. For the arguments and for what raises see `extras.plan.settle`.
    """
    least, (flag, _) = max(units(args).values()), budget_of(args.memory)
    if None not in of_ranks:
        return settle(args, least, of_ranks, then)
    memory = settled(args.memory, **UNPLANNED | {flag: max(USUAL_TOKENS, least)})
    return Settled(replace(memory, optimizer_offload=memory.optimizer_offload and not memory.param_offload), [], {}, "")


def _check_partial(args: Any, values: dict[str, Any], flag: str) -> None:
    others = {
        "--offline": values.get("offline"),
        "--adv-estimator remax": values.get("adv_estimator") == "remax",
        "--router-replay": values["router_replay"],
    }
    if other := next((name for name, is_set in others.items() if is_set), None):
        raise ValueError(f"{flag} and {other} exclude each other; leave one of them out")


def _check_rl(args: Any) -> None:
    values, rollout, validation = flat(args), args.rollout, args.validation
    if rollout.is_quantized:
        flag = f"--rollout-quantization {rollout.rollout_quantization}"
        if rollout.engine != "vllm":
            raise ValueError(f"{flag} needs --engine vllm; --engine {rollout.engine} has no quantization")
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
            raise ValueError(f"{flag} needs a GPU that computes in FP8, such as an H100 or L40S; leave it out")
    if share := args.decoding.partial_rollouts:
        _check_partial(args, values, f"--partial-rollouts {share:g}")
    if (values.get("ppo_mini_batch_size") or 0) > args.train_batch_size:
        raise ValueError(
            f"--ppo-mini-batch-size {args.ppo_mini_batch_size} is more than --train-batch-size "
            f"{args.train_batch_size}; both count prompts, lower it"
        )
    if validation.val_n > 1 and validation.val_temperature == 0:
        raise ValueError(f"--val-n {validation.val_n} repeats one greedy response; add a positive --val-temperature")

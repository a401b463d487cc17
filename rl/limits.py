"""The values that flags may have, by name: a flag means the same in every script."""

import math
from dataclasses import fields
from typing import Any

AT_LEAST_1 = """
    train_batch_size ppo_mini_batch_size ppo_epochs gen_batch_size max_num_gen_batches rollout_n max_samples
    total_epochs total_training_steps max_prompt_length max_response_length max_length reward_model_max_length
    max_num_seqs tensor_model_parallel_size max_ckpt_to_keep reward_workers kl_horizon
""".split()
POSITIVE = """
    grad_clip reward_timeout kl_target rollout_is_threshold loss_scale_factor max_logprob_gap gpu_memory_utilization
    max_hours stall_timeout
""".split()
NOT_NEGATIVE = """
    lr critic_lr weight_decay lr_warmup_steps critic_warmup clip_ratio_low clip_ratio_high cliprange_value
    overlong_penalty_factor reward_memory_mb
""".split()
FINITE = ["stall_timeout"]
WITHIN_0_AND_1 = "reward_max_error_frac gamma lam beta2 gpu_memory_utilization".split()


def check_limits(args: Any) -> None:
    """Raise ValueError, naming the flag and its value, if one of a script's numbers is none or beyond its limits.

    Only what holds for a flag alone; None is not looked at.
    """
    for flag, value in ((x.name, getattr(args, x.name)) for x in fields(args)):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        problems = {
            "a number": math.isnan(value),
            "at least 1": flag in AT_LEAST_1 and value < 1,
            "positive": flag in POSITIVE and value <= 0,
            "at least 0": flag in NOT_NEGATIVE and value < 0,
            "finite": flag in FINITE and math.isinf(value),
            "within 0 and 1": flag in WITHIN_0_AND_1 and not 0 <= value <= 1,
        }
        for needed, is_missed in problems.items():
            if is_missed:
                raise ValueError(f"--{flag.replace('_', '-')} {value} must be {needed}")

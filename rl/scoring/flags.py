"""The flags of the processes that score responses, and the reward function that is called by default."""

from dataclasses import dataclass

from rl.flags import Count, Free, Processes, Seconds

BY_DATA_SOURCE = "rewards/by_data_source.py"


@dataclass(frozen=True)
class Scoring:
    """processes that score"""

    # processes of a rank that score; default: the machine's cores over its ranks, at most 16
    reward_workers: Free[Processes | None] = None
    # CPU seconds to score a response, and four times as many by the clock; then the response has no score
    reward_timeout: Free[Seconds] = 10.0
    reward_memory_mb: Free[Count] = 4096  # MiB of private memory of such a process; 0 for no limit
    allow_unsafe_code_execution: Free[bool] = False  # let code rewards run model-written code without a full sandbox

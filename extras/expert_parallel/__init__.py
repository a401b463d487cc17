"""Expert parallelism: E neighboring ranks divide the experts of a mixture, and tokens travel to them.

dispatch.py has the exchange of tokens. docs/sequence_parallel.md says when to use it.
"""

from typing import Any

from rl.flags import flat


def check(args: Any, num_ranks: int) -> None:
    """Raise ValueError, from the config of --model alone, if --expert-parallel-size of a script's Args does not fit
    this many ranks, the model, or other flags.
    """
    if (size := args.memory.expert_parallel_size) > 1:
        from extras.families import check_routed, shape_of

        check_routed(args.model, flag := f"--expert-parallel-size {size}")
        for other in [name for name in ("fsdp_size", "lora_experts") if flat(args)[name]]:
            raise ValueError(f"{flag} and --{other.replace('_', '-')} exclude each other; leave one of them out")
        if num_ranks % size:
            raise ValueError(f"{flag} does not divide the {num_ranks} rank(s); choose a divisor")
        if (n := shape_of(args.model)[2]) % num_ranks:
            raise ValueError(f"{flag}: {num_ranks} ranks do not divide the {n} experts of {args.model}; leave it out")


def divide_experts(units: Any, ranks: Any, size: int, mesh: Any, wrap: Any) -> None:
    """Let `size` neighboring ranks divide the experts of each of a model's units, see `dispatch.divide`."""
    if size > 1:
        from extras.expert_parallel import dispatch

        dispatch.divide(units, ranks, size, mesh, wrap)

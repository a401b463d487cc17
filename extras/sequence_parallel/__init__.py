"""Sequence parallelism (Ulysses): N neighboring ranks train on the same rows, and each has a slice of their tokens.

Every rank goes on to sample prompts of its own. slices.py cuts a packed row into slices and has the exchange around the
attention. groups.py forms the groups of ranks, and refuses the models that cannot be sliced.
"""

from typing import Any


def share_rows(ranks: Any, args: Any) -> Any:
    """The ranks as --sequence-parallel-size of a script's Args divides them. All ranks must enter.

    Raises ValueError, before a model is loaded, if it does not divide their number, or if one of the models that flags
    name cannot be sliced: see `groups.check_model`.
    """
    if args.memory.sequence_parallel_size == 1:
        return ranks
    from extras.sequence_parallel import groups

    return groups.share_rows(ranks, args)


def check(args: Any, num_ranks: int) -> None:
    """Raise ValueError as `share_rows` does, for this many ranks, from the configs alone."""
    if args.memory.sequence_parallel_size > 1:
        from extras.sequence_parallel import groups

        groups.check(args, num_ranks)


def slice_tokens(model: Any, ranks: Any) -> None:
    """Let a sharded model run on slices of its packed rows from now on, if several ranks train on the same rows."""
    if ranks.sequence_size > 1:
        from extras.sequence_parallel import slices

        slices.slice_tokens(model, ranks.sequence_group)


def per_rank(units: dict[str, int], size: int) -> dict[str, int]:
    """Tokens of what a micro-batch never divides, by what it is: those of them that each of `size` ranks has."""
    if size == 1:
        return units
    return {f"{unit} / --sequence-parallel-size {size}": -(-n // size) for unit, n in units.items()}

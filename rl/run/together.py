"""Work that all ranks do together. What fails on one of them fails on all, so that nobody waits forever."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from rl.run import watchdog

T = TypeVar("T")


class Failed(ValueError):
    """Something failed on one rank or more. Every rank raises it, with the same text."""


def gather(x: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """`x` of every rank of a group, by default of all. All of them must enter."""
    results: list[T] = [x] * dist.get_world_size(group)
    dist.all_gather_object(results, x, group=group)
    return results


def together(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `work` on every rank and return all results. If it failed on some, raise Failed on all. All must enter."""
    result, error, cause = None, None, None
    try:
        result = work()
    except Exception as e:  # a full disk or memory has many names, and the other ranks wait
        cause, error = e, str(e) if isinstance(e, ValueError) else f"rank {dist.get_rank()}: {type(e).__name__}: {e}"
    outcomes: list[tuple[Any, str | None]] = gather((result, error), group)
    watchdog.beat()  # the main thread may be waiting for nothing else
    if errors := [error for _, error in outcomes if error is not None]:
        raise Failed(errors[0]) from cause
    return [result for result, _ in outcomes]

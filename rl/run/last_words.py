"""Say, last of all, which rank has ended a run: the others only know, at length, that a connection was closed.

When a rank ends, those that are left end too: by an exception in whatever waits for it, or by SIGTERM from torchrun.
On their way out they look which ranks of this machine have ended. The lowest rank that is left waits a moment for the
others, so that its sentence comes last.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from rl.console import say
from rl.ranks import Ranks

PATIENCE_S = 3.0  # for a rank to be gone whose connections are closed, and then for the others to follow
WHO, FOLLOWED = "which rank has ended the run", "because another one has"  # in the store of the process group
AFTER = "What others say of closed connections follows from that. The same command continues the run."
PF_EXITING = 4  # of a process that is on its way out, which takes long if a GPU's memory is to be given back

_own = 0  # this rank
_peers: dict[int, int] = {}  # rank -> process, of this machine
_lock = threading.Lock()
_said = False  # whether a rank has ended, and this one has done what it has to
_hook_before: Callable[..., object] | None = None


def start(ranks: Ranks) -> None:
    """From now on this rank knows the others, and `say_who_ended` follows an exception in a collective that ends it.
    All ranks must enter.
    """
    global _own, _peers, _said, _hook_before
    stop()
    machine, everyone = (socket.gethostname(), os.readlink("/proc/self/ns/pid")), [None] * ranks.size
    dist.all_gather_object(everyone, (machine, os.getpid()), group=ranks.group)
    _peers = {rank: pid for rank, (where, pid) in enumerate(everyone) if where == machine and rank != ranks.rank}
    _own, _said, _hook_before, sys.excepthook = ranks.rank, False, sys.excepthook, _print_error


def stop() -> None:
    """What other ranks do no longer matters."""
    global _peers, _hook_before
    if _hook_before is not None:
        _peers, sys.excepthook, _hook_before = {}, _hook_before, None


def note(phase: str) -> None:
    """Let the other ranks know that this one has ended a phase."""
    if _peers:
        _write(f"phase of rank {_own}", phase)


def say_who_ended(wait_s: float = 0.0, own: str = "") -> bool:
    """Whether another rank has ended, or does so within `wait_s` seconds; if so, one rank of each machine says which.

    Args: own, what this rank does now, for the others to tell if it is the first.
    """
    global _said
    with _lock:  # the main thread may have an exception while another one has a signal
        deadline = time.monotonic() + wait_s
        while not (ended := [rank for rank in _peers if _has_ended(rank)]) and not (elsewhere := _read(WHO)):
            if time.monotonic() >= deadline:
                _write(f"end of rank {_own}", own)
                return False
            time.sleep(0.02)
        left = [rank for rank in _peers if rank not in ended]
        if _own > min(left, default=_own):
            _write(f"end of rank {_own}", FOLLOWED)
        elif not _said:
            deadline = time.monotonic() + PATIENCE_S
            while not all(map(_has_ended, left)) and time.monotonic() < deadline:
                time.sleep(0.02)
            first = [rank for rank in ended if _read(f"end of rank {rank}") != FOLLOWED]
            text = "\n".join(map(_sentence, first or ended)) if ended else elsewhere
            _write(WHO, text)
            say(f"{text}\n{AFTER}", sys.__stderr__)
        _said = True
        return True


def _sentence(rank: int) -> str:
    how = _read(f"end of rank {rank}") or "was killed or has exited"
    phase = _read(f"phase of rank {rank}") or "start"
    return f"RANK {rank} (process {_peers[rank]}) {how}; the last phase that it had ended was {phase!r}."


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The last of this rank's main thread: its traceback, and who is to blame if that comes from a collective."""
    _hook_before(kind, error, trace)
    own = f"has ended with {kind.__name__}: {' '.join(str(error).split())[:300]}"
    if _peers and any("torch/distributed" in call.filename for call in traceback.extract_tb(trace)):
        say_who_ended(PATIENCE_S, own)
    else:
        _write(f"end of rank {_own}", own)


def _has_ended(rank: int) -> bool:
    try:
        state, _, _, _, _, _, flags, *_ = Path(f"/proc/{_peers[rank]}/stat").read_text().rpartition(")")[2].split()
        return state in "ZX" or bool(int(flags) & PF_EXITING)
    except (FileNotFoundError, ProcessLookupError):
        return True


def _write(key: str, value: str) -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # who holds the store has ended, or this rank has left
        dist.distributed_c10d._get_default_store().set(key, value)


def _read(key: str) -> str:
    """What some rank has written; "" if none has, or if the process that holds the store has ended."""
    with contextlib.suppress(RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        return store.get(key).decode() if store.check([key]) else ""
    return ""

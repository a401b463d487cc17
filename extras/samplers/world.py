"""A sampler of several GPUs: a small world of ranks that share one engine.

Rank 0 is the process that was started. It talks to the run, and starts the other ranks on its machine. These know no
prompts. They make the same calls of the engine and of its `Loop` as rank 0, in the same order, and end with it. If one
of them ends first, rank 0 ends too, and the run hands its prompts out again.
"""

import os
import socket
import subprocess
import sys
import threading

from extras.samplers import protocol
from extras.systems import LOOPBACK
from rl import children
from rl.console import say
from rl.ranks import Ranks, init_ranks


def lead(size: int, follow: str) -> Ranks:
    """Start the other ranks of a sampler, on this machine. Returns its world, in which this process is rank 0.

    Args: size, of the world; follow, the function that they call, named with its module.
    """
    if size == 1:
        return init_ranks()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= dict(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), RANK="0", LOCAL_RANK="0")
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    followers = []
    for rank in range(1, size):
        env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), protocol.PARENT: str(os.getpid())}
        followers.append(children.start(follow, env=env))
    for rank, process in enumerate(followers, 1):
        threading.Thread(target=_end_with, args=(rank, process), daemon=True).start()
    return init_ranks()


def _end_with(rank: int, process: subprocess.Popen) -> None:
    """End this process, which may wait for the other one in a call of the GPU, as soon as that has ended."""
    code = process.wait()
    say(f"rank {rank} of this sampler has ended with {code}, so the sampler ends", sys.stderr)
    os._exit(1)

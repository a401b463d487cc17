"""A worker, as the pool sees it. worker.py is what runs in it."""

import json
import signal
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

from rl import children

START_SECONDS = 120  # to import the reward functions
# A response may take this many times its CPU seconds by the clock, since it may wait, or the machine may be busy.
WALL_FACTOR = 4
# A wait for a reply is divided into this many parts. If the job is suspended, that uses up at most one of them.
LOOKS = 10
MESSAGE_SECONDS = 60  # the longest pause in the middle of a message. After it, the message counts as lost.
MAX_REPLY = 64 << 20  # bytes that a worker may send for one task
TASKS_PER_WORKER = 1000  # then a fresh process takes over, whatever the functions have leaked


class Worker:
    """A process that calls reward functions, and is replaced when it has ended. Args: what `worker.Rewards.load` gets.

    Replies are dicts: the worker's, or {"problem": text, "status": "error" or "timeout"} if it has sent none.
    """

    def __init__(self, *setup: Any):
        self.setup = setup
        self.loaded = self._start()  # the reply of `worker.Rewards.load`

    def _start(self) -> dict[str, Any]:
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # beyond it BlockingIOError is raised
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", MESSAGE_SECONDS, 0))
        try:
            self.process = children.start_worker("rl.scoring.worker.main", theirs)
        except OSError as error:
            return {"problem": f"no more processes can be started ({error}); lower --reward-workers", "status": "error"}
        self.connection, self.num_tasks = Connection(ours.detach()), 0
        return self._ask(START_SECONDS, "load", *self.setup)

    def score(self, calls: list[tuple], timeout_s: float, *, twice: bool) -> dict[str, Any]:
        """The reply to a task, see `worker.Rewards.score`."""
        if self.num_tasks == TASKS_PER_WORKER or self.process.poll() is not None:
            self.kill()
            if "problem" in (reply := self._start()):
                return reply
        self.num_tasks += 1
        return self._ask(WALL_FACTOR * timeout_s * len(calls) * (1 + twice), "score", calls, twice)

    def _ask(self, seconds: float, *request: Any) -> dict[str, Any]:
        """Send a request, and wait for the reply, JSON. Kills a worker that is late or sends other things."""
        try:
            self.connection.send(request)
            if not any(self.connection.poll(seconds / LOOKS) for _ in range(LOOKS)):
                raise TimeoutError
            reply = json.loads(self.connection.recv_bytes(MAX_REPLY))
            if reply.get("is_last"):
                self.kill()
            return reply
        except (TimeoutError, BlockingIOError):
            status, problem = "timeout", f"no score after {seconds:.0f} s; the worker was killed"
        except (EOFError, ConnectionError):
            self.process.send_signal(signal.SIGCONT)  # a reward function may have stopped the guard
            code = self.process.wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            status, problem = "error", f"the worker process died ({how})"
            if code == -signal.SIGXCPU:
                status, problem = "timeout", "no score within --reward-timeout; the worker was killed"
        except (OSError, ValueError, AttributeError, RecursionError) as error:  # a function writes to our socket
            status, problem = "error", f"the worker sent something else: {error}"
        self.kill()
        return {"problem": problem, "status": status}

    def kill(self) -> None:
        """End the process and all that it started."""
        children.end_worker(self.process)
        self.connection.close()

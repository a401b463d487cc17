"""A worker, as the pool sees it. What runs in it: worker.py."""

import contextlib
import json
import signal
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

from rl import children

START_SECONDS = 120  # to import the reward functions
WALL_FACTOR = 4  # a response may take this many times its CPU seconds by the clock: it waits, or the machine is busy
LOOKS = 10  # waits for a reply: of the time in which a job is suspended at most one of them counts
MAX_REPLY = 64 << 20  # bytes that a worker may send for one task
TASKS_PER_WORKER = 1000  # then a fresh process takes over, whatever the functions have leaked


class Worker:
    """A process that calls reward functions, and is replaced when it has ended. Args: what `worker.Rewards.load` gets.

    Replies are dicts: the worker's, or {"problem": text, "is_late": whether its time was over} if it has sent none.
    """

    def __init__(self, *setup: Any):
        self.setup = setup
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # for half a message
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", START_SECONDS, 0))
        self.process = children.start_worker("rl.scoring.worker.main", theirs)
        self.connection, self.num_tasks = Connection(ours.detach()), 0
        self._send("load", *self.setup)

    def load(self) -> dict[str, Any]:
        """The reply of a new process, see `worker.Rewards.load`."""
        return self._reply(START_SECONDS)

    def score(self, calls: list[tuple], timeout_s: float, *, twice: bool) -> dict[str, Any]:
        """The reply to a task, see `worker.Rewards.score`."""
        if self.num_tasks == TASKS_PER_WORKER or self.process.poll() is not None:
            self.kill()
            self._start()
            if "problem" in (reply := self.load()):
                self.kill()
                return reply
        self.num_tasks += 1
        self._send("score", calls, twice)
        return self._reply(WALL_FACTOR * timeout_s * len(calls) * (1 + twice))

    def _send(self, method: str, *arguments: Any) -> None:
        with contextlib.suppress(OSError):  # `_reply` says why it takes nothing
            self.connection.send((method, *arguments))

    def _reply(self, seconds: float) -> dict[str, Any]:
        """Wait for the reply, JSON. Kills a worker that is late or sends other things."""
        try:
            if not any(self.connection.poll(seconds / LOOKS) for _ in range(LOOKS)):
                return self._give_up(f"no score after {seconds:.0f} s; the worker was killed", is_late=True)
            reply = json.loads(self.connection.recv_bytes(MAX_REPLY))
            if reply.get("is_last"):
                self.kill()
            return reply
        except (EOFError, ConnectionError):
            self.process.send_signal(signal.SIGCONT)  # a reward function may have stopped the guard
            code = self.process.wait()
        except (OSError, ValueError, AttributeError, RecursionError) as error:  # a function writes to our socket
            return self._give_up(f"the worker sent something else: {error}")
        if code == -signal.SIGXCPU:
            return self._give_up("no score within --reward-timeout; the worker was killed", is_late=True)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return self._give_up(f"the worker process died ({how})")

    def _give_up(self, problem: str, *, is_late: bool = False) -> dict[str, Any]:
        self.kill()
        return {"problem": problem, "is_late": is_late}

    def kill(self) -> None:
        """End the process and all that it started."""
        children.end_worker(self.process)
        self.connection.close()

"""A worker process, as the pool sees it. What runs in it: worker.py."""

import json
import pickle
import signal
import socket
import time
from typing import Any

from rl import children

START_SECONDS = 120  # to import the reward functions
WALL_FACTOR = 4  # a response may take this many times its CPU seconds by the clock: it waits, or the machine is busy
MAX_REPLY = 64 << 20  # bytes that a worker may send for one task


class Worker:
    """One process and a socket to it. `hello` is its first message: {"batched": ...} or {"problem": ...}."""

    def __init__(self, setup: bytes):
        self.socket, theirs = socket.socketpair()
        self.process = children.start_worker("rl.scoring.worker.main", theirs)
        self.num_tasks = 0
        self.hello = self._exchange(setup, START_SECONDS)

    def score(self, calls: list[tuple], timeout_s: float, *, twice: bool) -> dict[str, Any]:
        """{"scored": [(score, components)], "same": ...} or {"problem": text, "status": "error" or "timeout"}."""
        if "problem" in self.hello:
            return {"problem": self.hello["problem"], "status": "error"}
        self.num_tasks += 1
        return self._exchange(pickle.dumps((calls, twice)), WALL_FACTOR * timeout_s * len(calls) * (1 + twice))

    def _exchange(self, message: bytes, seconds: float) -> dict[str, Any]:
        """Send a message and wait for the reply, a line of JSON. Kills a worker that is late or sends other things."""
        tick, waited, last_look = min(seconds / 10, 0.5), 0.0, time.monotonic()
        self.socket.settimeout(tick)
        outgoing, incoming = memoryview(message), bytearray()
        while not incoming.endswith(b"\n"):
            now = time.monotonic()  # a job that was suspended for hours is not late: of such a gap two ticks count
            waited, last_look = waited + min(now - last_look, 2 * tick), now
            if waited > seconds:
                return self._give_up("timeout", f"no score after {seconds:.0f} s; the worker was killed")
            try:
                if outgoing:
                    outgoing = outgoing[self.socket.send(outgoing) :]
                    continue
                data = self.socket.recv(1 << 16)
            except TimeoutError:
                continue
            except ConnectionError:
                data = b""
            if not data:
                return self._death()
            incoming += data
            if len(incoming) > MAX_REPLY:  # a reward function writes to our socket
                return self._give_up("error", f"the worker sent {len(incoming)} bytes")
        try:
            reply = json.loads(incoming)
            if reply.get("last"):
                self.kill()
        except (ValueError, AttributeError, RecursionError) as error:
            return self._give_up("error", f"the worker sent something else: {error}")
        return reply

    def _death(self) -> dict[str, Any]:
        self.process.send_signal(signal.SIGCONT)  # a reward function may have stopped the guard
        code = self.process.wait()
        if code == -signal.SIGXCPU:
            return self._give_up("timeout", "no score within --reward-timeout; the worker was killed")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return self._give_up("error", f"the worker process died ({how})")

    def _give_up(self, status: str, problem: str) -> dict[str, Any]:
        self.kill()
        return {"status": status, "problem": problem}

    def kill(self) -> None:
        """End the process and all that it started."""
        children.end_worker(self.process)
        self.socket.close()

"""The process that the sandbox's processes are forked from: a fresh interpreter with the standard library loaded.

judge.py starts one for each process that judges. It holds nothing secret, never sees a program or a test, and
ends with the process that started it.
"""

import asyncio
import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from _collections_abc import Callable
from marshal import dumps, loads

from rewards.sandbox import candidate, examiner

PRELOADED = """bisect calendar contextlib copy dataclasses enum functools heapq itertools json math numbers operator
random re statistics string textwrap typing unittest"""  # what programs often import, loaded once for all of them


class _Loop(asyncio.BaseEventLoop):
    """An event loop with timers, tasks and threads, and without sockets, which the sandbox does not have."""

    def __init__(self):
        super().__init__()
        self._selector, self._awake = self, threading.Event()

    def select(self, timeout: float | None = None) -> list:
        self._awake.wait(timeout)
        self._awake.clear()
        return []

    def _process_events(self, events: list) -> None:
        pass

    def _write_to_self(self) -> None:
        self._awake.set()


def _fork(main: Callable[..., None], keep: list[int], close: list[int], plan: dict[str, object]) -> int:
    """Start a process that closes what it is not to keep, locks itself up by the plan and runs `main`; its number.

    `main` gets the file descriptors that the process keeps, and what went wrong in locking it up, if so.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for fd in set(close) - set(keep):
            os.close(fd)
        problem = ""
        try:
            candidate.lock_up(plan | {"parent": parent})
        except OSError as error:
            problem = str(error)
        main(*keep, problem)
    finally:
        os._exit(1)


def _end(pid: int, grace_s: float) -> tuple[int, float, bool]:
    """Kill a process, unless it ends by itself within that time.

    Returns its exit code or minus its signal, its CPU seconds, and whether it was killed here.
    """
    last = time.monotonic() + grace_s
    while not (end := os.wait4(pid, os.WNOHANG))[0] and time.monotonic() < last:
        time.sleep(0.001)
    found, status, usage = end
    if not found:
        os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, not found


def serve(fd: int) -> None:
    """Answer ("start", plans of the candidate's and the test process) and ("end", [(process, grace)]) until the end."""
    for name in PRELOADED.split():
        importlib.import_module(name)
    limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))  # the worker may have a lower one, for itself
    sys.set_int_max_str_digits(0)  # Python's own limit is not part of any task, and the limits of CPU time hold
    asyncio.DefaultEventLoopPolicy._loop_factory = _Loop
    examiner.count_checks()
    control = socket.socket(fileno=fd)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    parent = os.getppid()
    gc.collect()
    gc.freeze()  # so that a collection in a forked process copies no memory
    while True:
        if not poll.poll(1000):
            if os.getppid() != parent:  # it died, and somebody else holds its end of the socket
                os._exit(0)
            continue
        message, fds, _, _ = socket.recv_fds(control, 1 << 16, 3)
        if not message:
            os._exit(0)
        command, *arguments = loads(message)
        try:
            if command == "start":
                reports, asks, answers = fds
                rest = [fd, *fds]
                first = _fork(candidate.serve, [answers], rest, arguments[0])
                try:
                    reply = (first, _fork(examiner.serve, [reports, asks], rest, arguments[1]))
                except OSError:
                    _end(first, 0)
                    raise
            else:
                reply = [_end(*entry) for entry in arguments[0]]
        except OSError as error:
            reply = f"could not start a process: {error}"
        for x in fds:
            os.close(x)
        control.send(dumps(reply))

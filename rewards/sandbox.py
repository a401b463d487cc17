"""Run model-written Python against assert statements, so that only right answers pass; docs/sandbox.md has the design.

Two processes. The judge is the process that calls `run_tests`: it evaluates the asserts, and knows the expected values.
The candidate's code runs in a locked-up child that only answers calls: it gets arguments, and sends back plain data.
What it returns that is not plain data stays there, and reaches the judge as a `Handle`, which equals only itself.

    >>> run_tests("def add(a, b): return a + b", ["assert add(1, 2) == 3"])
    Verdict(status='pass', passed=1, total=1, detail='')

The tests and their setup code are run as they are: they come from the data set, and are trusted as it is. Needs Linux
5.13 or later with Landlock, on x86-64; no privileges, no namespaces, and nothing outside the standard library.
"""

import ast
import builtins
import ctypes
import functools
import importlib
import marshal
import math
import os
import platform
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from rewards import sandbox_child

UNSAFE = "GLASSRL_ALLOW_UNSAFE_CODE_EXECUTION"
NOBODY = 65534
MAX_TRAFFIC = 32 << 20  # bytes that the candidate may send in one evaluation
MAX_TIMEOUTS = 2  # in one evaluation; the tests after that many are not run
MAX_CODE = 1 << 18  # characters
WALL_FACTOR = 4  # wall time allowed, over the CPU time allowed
POLL_S = 0.1

Status = Literal["pass", "fail", "error", "timeout", "memory", "crash", "sandbox_error"]


@dataclass(frozen=True)
class Verdict:
    """What became of one candidate.

    Attributes:
        status: pass: every test held. Otherwise what happened at the first that did not: fail (wrong answer or
            exception), timeout, memory (MemoryError), crash (the process ended or broke the protocol). error: the code
            did not compile, or raised while it was loaded. sandbox_error: says nothing about the code; try again, or do
            not score it.
        passed: tests that held, whatever the status. After a timeout or crash the other tests run in a new process.
        total: all tests.
        detail: for people, not for rewards: the candidate chooses part of the text.
    """

    status: Status
    passed: int
    total: int
    detail: str = ""


class SandboxUnavailable(RuntimeError):
    """This machine lacks a layer of protection."""


class _Stopped(BaseException):
    """The child is of no further use. Not an Exception, so that no `except Exception` in a test can catch it."""

    def __init__(self, status: Status, detail: str):
        self.status, self.detail = status, detail


class _CandidateError(Exception):
    """The candidate's code raised."""

    def __init__(self, status: Status, detail: str):
        super().__init__(detail)
        self.status = status


class _BadTest(BaseException):
    """The tests or their setup are wrong, whatever the code is: a mistake in the data."""


# === the layers ===

# All that computing in CPython needs. Everything else fails with EPERM.
_ALLOWED = """0 read, 1 write, 2 open, 3 close, 4 stat, 5 fstat, 6 lstat, 7 poll, 8 lseek, 9 mmap, 10 mprotect,
11 munmap, 12 brk, 13 rt_sigaction, 14 rt_sigprocmask, 15 rt_sigreturn, 17 pread64, 19 readv, 20 writev, 21 access,
23 select, 24 sched_yield, 25 mremap, 28 madvise, 32 dup, 33 dup2, 34 pause, 35 nanosleep, 36 getitimer, 37 alarm,
38 setitimer, 39 getpid, 60 exit, 63 uname, 79 getcwd, 89 readlink, 96 gettimeofday, 97 getrlimit, 98 getrusage,
99 sysinfo, 100 times, 102 getuid, 104 getgid, 107 geteuid, 108 getegid, 110 getppid, 111 getpgrp, 115 getgroups,
118 getresuid, 120 getresgid, 131 sigaltstack, 186 gettid, 201 time, 202 futex, 204 sched_getaffinity,
217 getdents64, 218 set_tid_address, 219 restart_syscall, 228 clock_gettime, 229 clock_getres, 230 clock_nanosleep,
231 exit_group, 257 openat, 262 newfstatat, 267 readlinkat, 269 faccessat, 270 pselect6, 271 ppoll,
273 set_robust_list, 292 dup3, 318 getrandom, 332 statx, 334 rseq, 439 faccessat2"""
_IOCTL, _CLONE, _FCNTL, _PRLIMIT64, _CLONE3 = 16, 56, 72, 302, 435
_TCGETS = 0x5401  # isatty
_FCNTL_COMMANDS = (0, 1, 2, 3, 1030)  # F_DUPFD, GETFD, SETFD, GETFL, DUPFD_CLOEXEC; not F_SETOWN, which sends signals
_CLONE_THREAD = 0x10000


def _seccomp_program() -> bytes:
    """The system-call filter, as an array of struct sock_filter (seccomp(2)); x86-64 numbers."""
    load, jump_equal, jump_set, give_back = 0x20, 0x15, 0x45, 0x06
    allow, kill = 0x7FFF0000, 0x80000000
    denied, unknown = 0x00050000 | 1, 0x00050000 | 38  # EPERM, ENOSYS
    number, arch, argument = 0, 4, lambda i: 16 + 8 * i  # offsets in struct seccomp_data; the low half of an argument

    def op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, k)

    def when(system_call: int, body: list[bytes]) -> list[bytes]:
        return [op(jump_equal, system_call, 0, len(body)), *body]

    def returns(value: int) -> bytes:
        return op(give_back, value)

    def one_of(values: Iterable[int]) -> list[bytes]:
        return [part for value in values for part in (op(jump_equal, value, 0, 1), returns(allow))] + [returns(denied)]

    program = [op(load, arch), op(jump_equal, 0xC000003E, 1, 0), returns(kill), op(load, number)]
    # Threads may be made, processes may not. glibc falls back to clone when clone3 is unknown.
    program += when(_CLONE3, [returns(unknown)])
    program += when(_CLONE, [op(load, argument(0)), op(jump_set, _CLONE_THREAD, 0, 1), returns(allow), returns(denied)])
    program += when(_IOCTL, [op(load, argument(1)), *one_of([_TCGETS])])
    program += when(_FCNTL, [op(load, argument(1)), *one_of(_FCNTL_COMMANDS)])
    # Own limits may be read: process 0, and no new limits, of which both halves of the pointer must be 0.
    zero = (argument(0), argument(2), argument(2) + 4)
    reads = [part for offset in zero for part in (op(load, offset), op(jump_equal, 0, 1, 0), returns(denied))]
    program += when(_PRLIMIT64, [*reads, returns(allow)])
    program += one_of(int(entry.split()[0]) for entry in _ALLOWED.split(","))
    return b"".join(program)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _seccomp_available() -> bool:
    """Whether the kernel filters system calls, and the table above is for this machine."""
    action = struct.pack("I", 0x00050000)
    return platform.machine() == "x86_64" and _libc().syscall(317, 2, 0, action) == 0  # SECCOMP_GET_ACTION_AVAIL


def _landlock_abi() -> int:
    """The kernel's Landlock version; 0: none."""
    if platform.machine() != "x86_64":
        return 0
    return max(0, _libc().syscall(444, None, ctypes.c_size_t(0), 1))  # LANDLOCK_CREATE_RULESET_VERSION


def _readable_folders() -> list[str]:
    """What the interpreter in the sandbox needs to read: its standard library and shared libraries."""
    library = os.path.dirname(os.__file__)
    prefix = [os.path.join(sys.base_prefix, name) for name in ("lib", "lib64")]
    return [path for path in (library, *prefix, "/usr/lib", "/usr/lib64", "/lib", "/lib64") if os.path.isdir(path)]


def _landlock_ruleset(abi: int) -> int:
    """File descriptor of a ruleset that allows reading the folders above and nothing else.

    Args:
        abi: the kernel's Landlock version, at least 1.
    """
    libc = _libc()
    read_file, read_dir = 1 << 2, 1 << 3
    rights = dict.fromkeys(_readable_folders(), read_file | read_dir)
    if os.path.exists("/etc/ld.so.cache"):
        rights["/etc/ld.so.cache"] = read_file
    files = (1 << 13) - 1 | (abi >= 2) << 13 | (abi >= 3) << 14 | (abi >= 5) << 15
    network = 0b11 if abi >= 4 else 0
    scopes = 0b11 if abi >= 6 else 0  # abstract sockets and signals
    attributes = struct.pack("QQQ", files, network, scopes)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = libc.syscall(444, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        raise SandboxUnavailable(f"landlock_create_ruleset: {os.strerror(ctypes.get_errno())}")
    os.set_inheritable(ruleset, False)
    for path, right in rights.items():
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if libc.syscall(445, ruleset, 1, struct.pack("=Qi", right, fd), 0) != 0:
                raise SandboxUnavailable(f"landlock_add_rule {path}: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(fd)
    return ruleset


def _sandbox_uid() -> int | None:
    """The user to become: nobody, if this process is root and its user namespace knows nobody."""
    if os.geteuid() != 0:
        return None
    maps = [[int(x) for x in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return NOBODY if any(first <= NOBODY < first + count for first, _, count in maps) else None


@dataclass(frozen=True)
class _Layers:
    """What every child of this process is started with."""

    program: bytes
    """seccomp filter; empty: none"""
    ruleset: int
    """Landlock file descriptor; -1: none"""
    uid: int | None
    home: int
    """file descriptor of the interpreter's prefix"""
    code: bytes
    """sandbox_child.py, compiled"""


@functools.cache
def _layers() -> _Layers:
    """The layers that this machine has. Two file descriptors stay open for the life of the process."""
    abi = _landlock_abi()
    child = Path(sandbox_child.__file__)
    return _Layers(
        program=_seccomp_program() if _seccomp_available() else b"",
        ruleset=_landlock_ruleset(abi) if abi else -1,
        uid=_sandbox_uid(),
        home=os.open(sys.base_prefix, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC),
        code=marshal.dumps(compile(child.read_text(), child.name, "exec")),
    )


def _limits(cpu_s: float, memory_mb: int) -> dict[int, int]:
    """{resource: value}, none above the hard limit that this process has itself."""
    wanted = {
        resource.RLIMIT_CPU: math.ceil(cpu_s),  # the judge is stricter; this is for a child that has lost its judge
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_STACK: 8 << 20,
    }
    ceilings = {name: resource.getrlimit(name)[1] for name in wanted}
    return {name: value if ceilings[name] < 0 else min(value, ceilings[name]) for name, value in wanted.items()}


# === the child ===

_BOOT = """
import marshal, os
def read(n):
    data = b""
    while len(data) < n: data += os.read({fd}, n - len(data)) or os._exit(0)
    return data
space = {{"__name__": "sandbox_child"}}
exec(marshal.loads(read(int.from_bytes(read(4), "big"))), space)
space["serve"]({fd})
"""


class Handle:
    """An object that stays in the sandbox: a function, a class, an instance of one.

    Calls, attributes, items, iteration, length, truth and str() are answered there. In all else it is like a plain
    object() of this process: it equals only itself and has no order. `in` iterates there, and compares here.
    """

    def __init__(self, child: "_Child", number: int):
        object.__setattr__(self, "_child", child)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._child.request("call", self, list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._child.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._child.request("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._child.request("getitem", self, key)

    def __iter__(self) -> Any:
        return _iterate(self._child.request("iter", self))

    def __len__(self) -> int:
        try:
            length = self._child.request("len", self)
        except _CandidateError as error:
            raise TypeError(str(error)) from error  # list() asks every iterable, and takes a TypeError for "unknown"
        if length > sandbox_child.MAX_ANSWER_VALUES:
            raise TypeError("too long")  # list() reserves that much memory
        return length

    def __bool__(self) -> bool:
        return self._child.request("bool", self)

    def __str__(self) -> str:
        return self._child.request("str", self)


def _iterate(iterator: Any) -> Iterable[Any]:
    """The items of an iterator in the sandbox, one request each."""
    while True:
        try:
            item = iterator._child.request("next", iterator)
        except _CandidateError as error:
            if str(error).startswith("StopIteration:"):
                return
            raise
        yield item


class _Child:
    """One sandboxed process, from its start to its end. `allow` renews its allowance of time, `close` ends it."""

    def __init__(self, *, timeout_s: float, total_s: float, memory_mb: int):
        """Start a process and lock it up.

        Args:
            timeout_s: CPU seconds that each allowance is worth.
            total_s: CPU seconds after which the kernel ends it, whatever the judge does.
            memory_mb: its address space, MiB.

        Raises:
            _Stopped: with status sandbox_error.
        """
        layers = _layers()
        limits = _limits(total_s, memory_mb)
        self.timeout_s = timeout_s
        self.cpu_used, self.cpu_end = 0.0, limits[resource.RLIMIT_CPU]
        self.waited = self.cpu_start = self.delay_start = 0.0
        self.traffic = 0
        self.handles: dict[int, Handle] = {}
        self.socket, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            try:
                self.process = subprocess.Popen(
                    # No site-packages, no user site, no file of the current folder, nothing written.
                    [sys._base_executable, "-P", "-s", "-S", "-B", "-c", _BOOT.format(fd=fd)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=_environment(layers.home),
                    pass_fds=[x for x in (fd, layers.home, layers.ruleset) if x >= 0],
                    start_new_session=True,
                )
            except OSError as error:
                self.socket.close()
                raise _Stopped("sandbox_error", f"could not start {sys._base_executable}: {error}") from error
        self.socket.setblocking(False)
        self.poll = select.poll()
        try:
            self.allow()
            self._send(layers.code)
            plan = {
                "judge": os.getpid(),
                "limits": limits,
                "uid": layers.uid,
                "ruleset": layers.ruleset,
                "program": layers.program,
            }
            self.ask(plan)
        except (_Stopped, _CandidateError) as error:  # nothing of the candidate's has run yet
            self.close()
            raise _Stopped("sandbox_error", f"could not lock the child up: {error!r}") from error
        except BaseException:
            self.close()
            raise

    def allow(self) -> None:
        """From now on, `timeout_s` of CPU time, and WALL_FACTOR times that of wall time, less what it has slept."""
        cpu, delay = self._cpu(), _run_delay(self.process.pid)
        self.waited = max(0.0, self.waited - (cpu - self.cpu_start) - (delay - self.delay_start))
        self.cpu_start, self.delay_start = cpu, delay

    def ask(self, message: Any) -> Any:
        """Send a message, return the value of the answer.

        Raises:
            ValueError: the message is too long or too deep.
            _BadTest: it holds something that is neither plain data nor a handle of this child.
            _CandidateError: the answer is an exception.
            _Stopped: there is no answer, or not a well-formed one.
        """
        limit = sandbox_child.MAX_REQUEST
        self._send(sandbox_child.encode(message, self._to_number, limit, limit))
        size = int.from_bytes(self._receive(4), "big")
        if size > sandbox_child.MAX_ANSWER:
            raise _Stopped("crash", f"the answer has {size} bytes")
        try:
            answer = sandbox_child.decode(self._receive(size), self._from_number, sandbox_child.MAX_ANSWER_VALUES)
        except ValueError as error:
            raise _Stopped("crash", "the answer is malformed") from error
        match answer:
            case ("value", value):
                return value
            case ("error" | "memory" as kind, str(text)):
                raise _CandidateError("memory" if kind == "memory" else "fail", text[:300])
        raise _Stopped("crash", "the answer is malformed")

    def request(self, operation: str, *arguments: Any) -> Any:
        """One of sandbox_child's operations on one of its objects; see `ask`."""
        return self.ask([operation, *arguments])

    def close(self) -> None:
        """End the process and everything it may have started; any number of times."""
        self.socket.close()
        if self.process.poll() is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)  # its own session, so its own group
            except ProcessLookupError:
                pass
        self.process.wait()

    def _to_number(self, value: Any) -> int:
        if type(value) is Handle and value._child is self:
            return value._number
        raise _BadTest(
            f"a test hands the candidate an object of type {type(value).__name__}: only plain data can cross"
        )

    def _from_number(self, number: int) -> Handle:
        return self.handles.setdefault(number, Handle(self, number))

    def _send(self, message: bytes) -> None:
        data = memoryview(struct.pack(">I", len(message)) + message)
        while data:
            try:
                data = data[self.socket.send(data, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)
            except OSError:
                raise self._ended() from None

    def _receive(self, size: int) -> bytes:
        self.traffic += size
        if self.traffic > MAX_TRAFFIC:
            raise _Stopped("crash", f"more than {MAX_TRAFFIC} bytes of answers")
        data = bytearray()
        while len(data) < size:
            try:
                chunk = self.socket.recv(size - len(data))
            except BlockingIOError:
                self._wait(select.POLLIN)
                continue
            except OSError:
                chunk = b""
            if not chunk:
                raise self._ended()
            data += chunk
        return bytes(data)

    def _wait(self, event: int) -> None:
        """Until the socket is ready.

        Raises:
            _Stopped: the allowance is used up: timeout, or sandbox_error if the machine had no time for the child.
        """
        self.poll.register(self.socket, event)
        while True:
            cpu_left = self.cpu_start + self.timeout_s - self._cpu()
            if cpu_left <= 0:
                raise _Stopped("timeout", f"used {self.timeout_s:g} s of CPU time")
            if self.waited >= WALL_FACTOR * self.timeout_s:
                delay = _run_delay(self.process.pid) - self.delay_start
                if delay > self.waited / 2:
                    raise _Stopped("sandbox_error", f"waited {delay:.1f} of {self.waited:.1f} s for a core")
                raise _Stopped("timeout", f"did not answer in {self.waited:.1f} s")
            pause = min(POLL_S, max(cpu_left, 0.005))
            start = time.monotonic()
            ready = self.poll.poll(pause * 1000)
            # Time that this process itself lost, stopped or waiting for a core, does not count against the child.
            self.waited += min(time.monotonic() - start, pause)
            if ready:
                return

    def _cpu(self) -> float:
        """CPU seconds used by the child's threads: the clock that clock_getcpuclockid(3) names."""
        try:
            self.cpu_used = time.clock_gettime((~self.process.pid << 3) | 2)
        except OSError:
            pass  # it is gone; the socket will say so
        return self.cpu_used

    def _ended(self) -> _Stopped:
        """What to say of a child that closed its end."""
        try:
            code = self.process.wait(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            return _Stopped("crash", "the process closed its connection")
        if code == -signal.SIGKILL and self.cpu_used >= self.cpu_end - 1:
            return _Stopped("timeout", f"used {self.cpu_end} s of CPU time in all")
        if code == -signal.SIGKILL:  # which it cannot send to itself
            return _Stopped("sandbox_error", "the process was killed from outside")
        return _Stopped("crash", f"the process ended with {'signal ' if code < 0 else 'exit code '}{abs(code)}")


def _environment(home: int) -> dict[str, str]:
    """All that the candidate's code finds in os.environ.

    PYTHONHOME names the interpreter's prefix by an open file descriptor: so the standard library can be read after the
    change of user even if the path to it cannot, as under /root.
    """
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": "/",
        "PYTHONHOME": f"/proc/self/fd/{home}",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
    }


def _run_delay(pid: int) -> float:
    """Seconds that the process's threads were ready to run and had no core; 0 where the kernel does not say."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[1])
        except (OSError, IndexError):
            continue  # the thread has ended
    return total / 1e9


# === the judge ===


@dataclass(frozen=True)
class _Program:
    """The tests and their setup, compiled, with the names that they take from elsewhere."""

    setup: CodeType
    tests: list[CodeType]
    names: list[str]
    """what the candidate is asked for"""
    modules: list[str]
    """standard modules that a test uses without importing them"""
    setup_uses_candidate: bool


_PARSING = threading.Lock()  # in Python 3.11, ast.parse in two threads at once can end in a SystemError


def _parse(source: str, what: str) -> ast.Module:
    try:
        with _PARSING:
            return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{what} is not Python: {error}: {source[:200]!r}; mend the data") from error


def _names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Names that a piece of code reads but does not bind anywhere, and names that it binds."""
    read, bound = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return read - bound, bound


def _program(tests: list[str], setup: str) -> _Program:
    """Compile the tests, and decide whose each of their names is.

    A name is the setup's if that binds it; else Python's if it is a builtin; else a standard module's if it is one and
    only its attributes are used; else the candidate's. So a candidate cannot replace `set` or `math` in
    `assert set(f(x)) == {1, 2}` or `assert math.isclose(f(x), 3)`. If this leaves the candidate nothing, and the tests
    call one builtin only, as in `assert sum(1, 2) == 3`, that name is the candidate's.
    """
    setup_tree = _parse(setup, "setup code")
    trees = [_parse(test, f"test {i}") for i, test in enumerate(tests)]
    for i, tree in enumerate(trees):
        if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
            raise ValueError(f"test {i} has no assert statement: {tests[i][:200]!r}; mend the data")
    setup_read, setup_bound = _names(setup_tree)
    free = set().union(*(_names(tree)[0] for tree in trees)) - setup_bound
    nodes = [node for tree in (setup_tree, *trees) for node in ast.walk(tree)]
    bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    bare = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in bases}
    modules = {name for name in free | setup_read if name in sys.stdlib_module_names and name not in bare}
    names = (free | setup_read) - modules - set(dir(builtins))
    if not names:
        names = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        if len(names) != 1:
            raise ValueError(f"the tests name no function of the candidate's: {tests[0][:200]!r}; mend the data")
    return _Program(
        setup=compile(setup_tree, "setup", "exec", optimize=0),  # asserts stay under python -O, too
        tests=[compile(tree, f"test {i}", "exec", optimize=0) for i, tree in enumerate(trees)],
        names=sorted(names),
        modules=sorted(modules),
        setup_uses_candidate=bool(setup_read & names),
    )


def _load(child: _Child, code: str, program: _Program) -> dict[str, Any]:
    """Load the candidate's code and run the setup; returns the globals that each test starts from.

    Raises:
        _BadTest: the setup raises, and not by the candidate's doing.
        _CandidateError, _Stopped: the code does not load.
    """
    try:
        found = child.ask([code, program.names])
    except _CandidateError as error:
        raise _CandidateError("memory" if error.status == "memory" else "error", str(error)) from error
    if type(found) is not dict or not found.keys() <= set(program.names):
        raise _Stopped("crash", "the answer is malformed")
    space = {name: importlib.import_module(name) for name in program.modules} | found
    try:
        exec(program.setup, space)
    except _CandidateError:
        raise
    except Exception as error:
        if not program.setup_uses_candidate:
            raise _BadTest(f"setup code raises {error!r}") from error
        raise _CandidateError("fail", f"setup: {error!r}") from error
    return space


def _judge(code: str, program: _Program, timeout_s: float, memory_mb: int) -> Verdict:
    """See `run_tests`."""
    total = len(program.tests)
    outcomes: list[tuple[Status, str]] = []
    total_s = (total + 2) * timeout_s + 1
    child, space = None, None
    try:
        for test in program.tests:
            if sum(status == "timeout" for status, _ in outcomes) >= MAX_TIMEOUTS:
                break
            try:
                if child is None:
                    child = _Child(timeout_s=timeout_s, total_s=total_s, memory_mb=memory_mb)
                    try:
                        space = _load(child, code, program)
                    except _CandidateError as error:
                        return Verdict(error.status, sum(s == "pass" for s, _ in outcomes), total, str(error))
                child.allow()
                exec(test, dict(space))
                outcomes.append(("pass", ""))
            except _CandidateError as error:
                outcomes.append((error.status, str(error)))
            except Exception as error:  # AssertionError: wrong answer; others: one that the test cannot use
                outcomes.append(
                    ("fail", type(error).__name__)
                )  # its text may hold a Handle, and str() of that is a call
            except _BadTest as error:
                raise ValueError(f"{error}; mend the data") from error.__cause__
            except _Stopped as stop:
                if stop.status == "sandbox_error":
                    return Verdict("sandbox_error", 0, total, stop.detail)
                outcomes.append((stop.status, stop.detail))
                child.close()
                child = None
                if space is None:
                    break  # the code does not even load
    finally:
        if child is not None:
            child.close()
    passed = sum(status == "pass" for status, _ in outcomes)
    status, detail = next((outcome for outcome in outcomes if outcome[0] != "pass"), ("pass", ""))
    return Verdict(status, passed, total, detail)


def run_tests(
    code: str,
    tests: list[str],
    *,
    setup: str = "",
    timeout_s: float = 3.0,
    memory_mb: int = 512,
) -> Verdict:
    """Run model-written code and say which tests hold.

    The code is loaded once, as a module that is not __main__, then each test in turn calls it. Arguments cross as
    copies: a test cannot see that the code changed one. Numbers compare as in Python, so 3.0 may stand for 3.

    Args:
        code: Python source, from anybody.
        tests: Python with an assert statement each, such as `assert f(1) == 2`, trusted.
        setup: code that the tests need: imports, constants; trusted. It runs here, not in the sandbox: the candidate's
            code does not see its names. It may use the candidate's.
        timeout_s: CPU seconds for loading the code, and for each test. Each also ends after 4 times as much wall
            time; what the code sleeps counts for all tests together. After two timeouts no further test is run.
        memory_mb: address space of the sandboxed process in MiB; an interpreter alone takes about 20.

    Raises:
        ValueError: the tests, the setup or a limit are unusable, whatever the code is.
        SandboxUnavailable: a layer of protection is missing; see `self_test`.
    """
    if not tests:
        raise ValueError("tests is empty: there is nothing to judge the code by; mend the data")
    if timeout_s <= 0 or memory_mb < 64:
        raise ValueError(f"timeout_s {timeout_s} must be positive and memory_mb {memory_mb} at least 64")
    program = _program(tests, setup)
    self_test()
    if len(code) > MAX_CODE:
        return Verdict("error", 0, len(tests), f"the code has {len(code)} characters")
    return _judge(code, program, timeout_s, memory_mb)


# === the self-test ===

_PROBE = """
import os, _socket, resource

def blocked(action, *args):
    try:
        action(*args)
    except OSError as error:
        return error.errno
    return 0

def fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()

def probe():
    return {
        "socket": blocked(_socket.socket),
        "fork": blocked(fork),
        "kill": blocked(os.kill, os.getppid(), 0),
        "list": blocked(os.listdir, "/"),
        "write": blocked(os.open, "/dev/null", os.O_WRONLY),
        "proc": blocked(os.open, "/proc/self/status", os.O_RDONLY),
        "limits": {n: resource.getrlimit(n) for n in NAMES},
        "users": set(os.getresuid() + os.getresgid()),
        "variables": set(os.environ),
    }
"""


def self_test(allow_unsafe: bool | None = None) -> dict[str, bool]:
    """Start a sandbox, try from inside what each layer must stop, say which layers hold; 30 ms, once a process.

    Args:
        allow_unsafe: run code even if a layer is missing. None: if the environment variable
            GLASSRL_ALLOW_UNSAFE_CODE_EXECUTION is 1.

    Returns:
        {layer: it holds} for seccomp, landlock, limits, user, environment.

    Raises:
        SandboxUnavailable: a layer is missing and allow_unsafe is not set, or no sandbox can be started.
    """
    layers = _probe()
    missing = [name for name, holds in layers.items() if not holds]
    if allow_unsafe is None:
        allow_unsafe = os.environ.get(UNSAFE) == "1"
    if missing and not allow_unsafe:
        raise SandboxUnavailable(
            f"model-written code will not be run: on this machine ({platform.system()} {platform.release()} "
            f"{platform.machine()}) the sandbox lacks {', '.join(missing)}. It needs x86-64, Linux 5.13 or later with "
            f"Landlock, and a container that allows seccomp and landlock_*. Where nothing can be lost, set {UNSAFE}=1."
        )
    if missing:
        print(f"warning: model-written code runs without {', '.join(missing)} ({UNSAFE}=1)", file=sys.stderr)
    return dict(layers)


@functools.cache
def _probe() -> dict[str, bool]:
    """See `self_test`."""
    eperm, eacces = 1, 13
    expected = _limits(10, 512)
    try:
        child = _Child(timeout_s=10, total_s=10, memory_mb=512)
        try:
            seen = child.ask([_PROBE.replace("NAMES", str(list(expected))), ["probe"]])["probe"]()
        finally:
            child.close()
    except (_Stopped, _CandidateError) as error:
        raise SandboxUnavailable(f"the sandbox does not start: {error!r} {error}") from error
    layers = _layers()
    return {
        "seccomp": bool(layers.program) and seen["socket"] == seen["fork"] == seen["kill"] == eperm,
        "landlock": layers.ruleset >= 0 and seen["list"] == seen["write"] == seen["proc"] == eacces,
        "limits": seen["limits"] == {name: (value, value) for name, value in expected.items()},
        "user": layers.uid is None or seen["users"] == {layers.uid},
        "environment": seen["variables"] <= _environment(0).keys(),
    }

"""The worker's side of the sandbox: the layers of protection, the compiled tests, and the processes of an evaluation.

The worker, which calls `run_tests`, only reads verdicts, clocks and exit codes. The test process runs the asserts and
knows the expected values; the candidate's process runs the code.
"""

import ast
import builtins
import contextlib
import ctypes
import functools
import marshal
import os
import platform
import resource
import signal
import socket
import struct
import subprocess
import symtable
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from rewards.sandbox import wire

UNSAFE = "GLASSRL_ALLOW_UNSAFE_CODE_EXECUTION"
USERS = (0x70000000, 1 << 22)  # the first and the number of user ids that root's processes become, each its own
NOBODY = (65534, 1)  # where there are none of these
MAX_TIMEOUTS = 2  # in one evaluation; the tests after that many are not run
MAX_CODE = 1 << 18  # characters
MAX_THREADS = 64  # of the candidate's process
WALL_FACTOR = 4  # what an evaluation may sleep, over the CPU time of one test
LOOP_S = 0.003  # CPU seconds of the loop in `_slowness` on a fast machine
MAX_SLOWNESS = 3.0
WALL_S = 36.0  # wall time of an evaluation, below the 40 s that a response has by default
EXAMINER = 1024, 256  # MiB of address space, and threads, of the test process
POLL_S = 0.1
RETRY_S = (0.1, 0.5)  # pauses before an evaluation goes on whose processes ended by no fault of the candidate's

Status = Literal["pass", "fail", "error", "timeout", "memory", "crash", "overload", "sandbox_error"]


@dataclass(frozen=True)
class Verdict:
    """What became of one candidate.

    Attributes:
        status: pass: every test held. Otherwise what happened at the first that did not: fail (wrong answer or
            exception), timeout, memory (MemoryError), crash (the process ended or broke the protocol). error: the code
            did not compile, or raised while it was loaded. overload: what a test did with an answer used up the test
            process's time or memory. sandbox_error: says nothing about the code; do not score it.
        passed: tests that held, whatever the status; 0 after an overload. After a timeout or crash the other tests run
            in new processes.
        total: all tests.
        detail: for people, not for rewards: the candidate chooses part of the text.
    """

    status: Status
    passed: int
    total: int
    detail: str = ""

    def as_score(self) -> dict[str, float] | None:
        """What a reward function returns for it: the score with its parts, or None where there is none.

        score: passed / total. acc (all tests held), loaded (the code compiled and did not raise at import) and timeout
        (the first test that failed did so by running out of time): 1.0 or 0.0 each. None after a sandbox_error, which
        says nothing about the code.
        """
        if self.status == "sandbox_error":
            return None
        flags = {"acc": self.status == "pass", "loaded": self.status != "error", "timeout": self.status == "timeout"}
        return {"score": self.passed / self.total} | {name: float(flag) for name, flag in flags.items()}


class SandboxUnavailable(RuntimeError):
    """This machine lacks a layer of protection."""

    needs_no_traceback = True  # in what the worker says that calls reward functions


class _Unavailable(Exception):
    """No process could be started, or one ended for reasons that are not the candidate's."""


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
    """The kernel's Landlock version, which LANDLOCK_CREATE_RULESET_VERSION asks for; 0: none."""
    return max(0, _libc().syscall(444, None, ctypes.c_size_t(0), 1)) if platform.machine() == "x86_64" else 0


def _landlock_ruleset(abi: int) -> int:
    """File descriptor of a ruleset, for that Landlock version, which allows reading what an interpreter needs."""
    libc = _libc()
    read_file, read_dir = 1 << 2, 1 << 3
    library = [os.path.dirname(os.__file__), f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"]
    system = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo"]
    rights = {path: read_file | read_dir for path in (*library, *system) if os.path.isdir(path)}
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


def _users() -> tuple[int, int] | None:
    """The first and the number of user ids to become, if this process is root and its user namespace knows them.

    A process of the sandbox that has an id to itself cannot use up the threads that the kernel gives to others.
    """
    if os.geteuid() != 0:
        return None
    texts = [Path(f"/proc/self/{kind}_map").read_text() for kind in ("uid", "gid")]
    maps = [[tuple(map(int, line.split())) for line in text.splitlines()] for text in texts]
    for first, count in (USERS, NOBODY):
        if all(any(a <= first and first + count <= a + n for a, _, n in each) for each in maps):
            return first, count
    return None


@dataclass(frozen=True)
class _Layers:
    """What every child of this process is started with."""

    program: bytes  # seccomp filter; empty: none
    ruleset: int  # Landlock file descriptor; -1: none
    users: tuple[int, int] | None
    home: int  # file descriptor of the interpreter's prefix


@functools.cache
def _layers() -> _Layers:
    """The layers that this machine has. Two file descriptors stay open for the life of the process."""
    abi = _landlock_abi()
    program = _seccomp_program() if _seccomp_available() else b""
    home = os.open(sys.base_prefix, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return _Layers(program, _landlock_ruleset(abi) if abi else -1, _users(), home)


def _limits(cpu_s: float, memory_mb: int, threads: int, users: tuple[int, int] | None) -> dict[int, int]:
    """{resource: value}, none above the hard limit that this process has itself."""
    wanted = dict.fromkeys((resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK), 0)
    wanted |= {resource.RLIMIT_AS: memory_mb << 20, resource.RLIMIT_STACK: 8 << 20, resource.RLIMIT_NOFILE: 32}
    wanted[resource.RLIMIT_CPU] = int(cpu_s) + 1  # the worker is stricter; this is for a process that has lost it
    if users == USERS:
        wanted[resource.RLIMIT_NPROC] = threads  # else the worker counts them, ten times per second
    ceilings = {name: resource.getrlimit(name)[1] for name in wanted}
    return {name: value if ceilings[name] < 0 else min(value, ceilings[name]) for name, value in wanted.items()}


# === the processes ===

# All that the candidate's code finds in os.environ. PYTHONHOME names the interpreter's prefix by an open file
# descriptor: so the standard library can be read after the change of user even if the path cannot, as under /root.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
_ENVIRONMENT |= {"PYTHONHOME": "/proc/self/fd/{home}"}
# What a fresh interpreter does; it forgets what lies beside its files before anybody else's code runs.
_BOOT = """
import sys; sys.path.append({root!r})
from rewards.sandbox import server
sys.path.remove({root!r})
for path in [*sys.path_importer_cache]: path.startswith({root!r}) and sys.path_importer_cache.pop(path)
server.serve({fd})
"""


class _Server:
    """A clean interpreter, from which the processes of each evaluation are forked; see server.py."""

    def __init__(self):
        layers = _layers()
        self.lock = threading.Lock()
        self.socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            fd, root = theirs.fileno(), str(Path(__file__).resolve().parent.parent.parent)
            try:
                self.process = subprocess.Popen(
                    # No site-packages, no user site, no file of the current folder, nothing written.
                    [sys._base_executable, "-P", "-s", "-S", "-B", "-c", _BOOT.format(root=root, fd=fd)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env={name: value.format(home=layers.home) for name, value in _ENVIRONMENT.items()},
                    pass_fds=[x for x in (fd, layers.home, layers.ruleset) if x >= 0],
                    start_new_session=True,
                )
            except OSError as error:
                self.socket.close()
                raise _Unavailable(f"could not start {sys._base_executable}: {error}") from error

    def request(self, command: str, *arguments: Any, fds: Iterable[int] = ()) -> Any:
        """Send a command, return the reply. Raises _Unavailable if there is none, or if it is a problem in words."""
        with self.lock:
            try:
                socket.send_fds(self.socket, [marshal.dumps((command, *arguments))], list(fds))
                reply = self.socket.recv(1 << 16)
            except OSError:
                reply = b""
        if not reply:
            _server.cache_clear()  # the next evaluation starts another
            self.socket.close()
            self.process.kill()
            self.process.wait()
            raise _Unavailable("the process that starts the others ended")
        reply = marshal.loads(reply)
        if isinstance(reply, str):
            raise _Unavailable(reply)
        return reply


@functools.lru_cache(maxsize=1)
def _server(process: int) -> _Server:
    """The server of this process; `process` is its number, since a fork of it needs one of its own."""
    return _Server()


_STARTING = threading.RLock()  # of the server and the self-test, which threads may ask for at the same time


# === the tests ===

_PARSING = threading.Lock()  # in Python 3.11, ast.parse in two threads at once can end in a SystemError


def _parse(source: str, what: str) -> tuple[ast.Module, set[str], set[str]]:
    """A piece of code, the global names that it reads but does not bind, and those that it binds."""
    try:
        with _PARSING:
            tree = ast.parse(source)
            tables = [symtable.symtable(source, what, "exec")]
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{what} is not Python: {error}: {source[:200]!r}; fix the data") from error
    read, bound = set(), set()
    for table in tables:  # of each scope; grows
        tables += table.get_children()
        for name in table.get_symbols():
            if table is tables[0] or name.is_global():
                changes = name.is_assigned() or name.is_imported() or name.is_namespace()
                (bound if changes else read).add(name.get_name())
    return tree, read - bound, bound


def _is_assert(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) or isinstance(node, ast.Attribute) and node.attr.startswith("assert")


def _must_fail(node: ast.AST) -> bool:
    """Whether it is `assert False`, `raise AssertionError` or unittest's `self.fail`."""
    if isinstance(node, ast.Assert):
        return isinstance(node.test, ast.Constant) and not node.test.value
    if isinstance(node, ast.Raise):
        return node.exc is not None and ast.unparse(node.exc).startswith("AssertionError")
    return isinstance(node, ast.Attribute) and node.attr == "fail"


def _asserts(nodes: Iterable[ast.AST]) -> list[ast.AST]:
    return [part for node in nodes for part in ast.walk(node) if _is_assert(part) or _must_fail(part)]


# Builtin exceptions that no failed assert is.
_NARROW = {name for name, x in vars(builtins).items() if isinstance(x, type) and issubclass(x, BaseException)}
_NARROW -= {"BaseException", "Exception", "AssertionError"}


class _Marks(ast.NodeTransformer):
    """Adds calls by which the test process knows that an assert held, and that none was swallowed or skipped."""

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        self.generic_visit(node)
        return [node, self._call("__assert_held__")]

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        """A handler for everything, or for what may be a class of the candidate's, must not swallow a failed assert.

        One for StopIteration also gets that of calls.
        """
        self.generic_visit(node)
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type] if node.type else []
        names = {ast.unparse(kind) for kind in kinds}
        if "StopIteration" in names:
            node.type = ast.Tuple([*kinds, ast.Name("__ended__", ast.Load())], ast.Load())
        if "AssertionError" not in names and not (names and names <= _NARROW):
            node.body.insert(0, self._call("__caught__"))
        return node

    def visit_Try(self, node: ast.Try) -> ast.Try:
        """`try: f(-1); assert False` holds where a handler is reached, if nothing else is asserted there."""
        asserts = _asserts(node.body + node.orelse)
        self.generic_visit(node)
        if asserts and all(map(_must_fail, asserts)):
            for handler in node.handlers:
                if handler.type is None or "AssertionError" not in ast.unparse(handler.type):
                    handler.body.insert(0, self._call("__assert_held__"))
        return node

    def visit_With(self, node: ast.With) -> ast.With:
        """A manager of the candidate's must not end an exception that skips an assert."""
        self.generic_visit(node)
        skippable = [i for i, part in enumerate(node.body) if any(map(_is_assert, ast.walk(part)))]
        if skippable:
            body, rest = node.body[: skippable[-1] + 1], node.body[skippable[-1] + 1 :]
            handler = ast.ExceptHandler(None, None, [self._call("__skips__"), ast.Raise()])
            node.body = [ast.Try(body, [handler], [], []), *rest]
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """Whether two stand-ins are the same is whether they stand for the same object."""
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        constant = any(isinstance(side, ast.Constant) for side in sides)
        if constant or len(sides) > 2 or not isinstance(node.ops[0], ast.Is | ast.IsNot):
            return node
        same = ast.Call(ast.Name("__same__", ast.Load()), sides, [])
        return same if isinstance(node.ops[0], ast.Is) else ast.UnaryOp(ast.Not(), same)

    @staticmethod
    def _call(name: str) -> ast.stmt:
        return ast.Expr(ast.Call(ast.Name(name, ast.Load()), [], []))


def _compile(tree: ast.Module, name: str) -> CodeType:
    tree = ast.fix_missing_locations(_Marks().visit(tree))
    return compile(tree, name, "exec", optimize=0)  # asserts stay under python -O, too


@functools.lru_cache(maxsize=8)  # the responses to one prompt have the same tests
def _program(tests: tuple[str, ...], setup: str) -> dict[str, Any]:
    """Compile the tests and their setup, and decide whose each of their names is.

    A name is the setup's if that binds it; else Python's if it is a builtin; else a standard module's if it is one and
    only its attributes are used; else the candidate's. So a candidate cannot replace `set` or `math` in
    `assert set(f(x)) == {1, 2}` or `assert math.isclose(f(x), 3)`. If this leaves the candidate nothing, and the tests
    call one builtin only, as in `assert sum(1, 2) == 3`, that name is the candidate's.
    """
    setup_tree, setup_read, setup_bound = _parse(setup, "setup code")
    parsed = [_parse(test, f"test {i}") for i, test in enumerate(tests)]
    trees = [tree for tree, _, _ in parsed]
    in_setup = _asserts([setup_tree])  # as in HumanEval's check(candidate)
    for i, tree in enumerate(trees):
        if not in_setup and not _asserts([tree]):
            raise ValueError(f"test {i} has no assert statement: {tests[i][:200]!r}; fix the data")
    free = set().union(*(read for _, read, _ in parsed)) - setup_bound
    nodes = [node for tree in (setup_tree, *trees) for node in ast.walk(tree)]
    bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    bare = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in bases}
    modules = {name for name in free | setup_read if name in sys.stdlib_module_names and name not in bare}
    used = {node.func for node in nodes if isinstance(node, ast.Call)} | {x for x in nodes if id(x) in bases}
    used = {node.id for node in used if isinstance(node, ast.Name)}  # called, or asked for an attribute
    names = (free | setup_read) - modules - set(dir(builtins)) - {"__name__", "__file__", "__refuse__"}
    if not names:
        names = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        if len(names) != 1:
            raise ValueError(f"the tests name no function of the candidate's: {tests[0][:200]!r}; fix the data")
    return {
        "setup": _compile(setup_tree, "setup"),
        "tests": [_compile(tree, f"test {i}") for i, tree in enumerate(trees)],
        "names": sorted(names),  # what the candidate is asked for
        "modules": sorted(modules),
        "setup_uses_candidate": bool(setup_read & names),
        # Classes of the candidate's, as Vector, LRUCache or V: their operators are part of the task. A name without a
        # small letter may also be a constant's, which nobody calls.
        "classes": [x for x in names if x[0].isupper() and x.isalnum() and (x in used or not x.isupper())],
        "capture": any("stdout" in text for text in (setup, *tests)),  # the tests look at what is printed
    }


# === the worker ===


@functools.cache
def _slowness() -> float:
    """How many times longer than on a fast machine programs run here: at least 1, at most 3; measured once per process.

    Limits are in seconds of a fast machine: what a right answer earns must not depend on where it is judged.
    """
    taken = []
    for _ in range(5):
        start, x = time.process_time(), 0
        for i in range(50_000):
            x = (31 * x + i) % 1_000_003
        taken.append(time.process_time() - start)
    return min(max(1.0, min(taken) / LOOP_S), MAX_SLOWNESS)


@dataclass
class _Spent:
    """What an evaluation has used so far, and may use, over all its processes."""

    timeout_s: float  # CPU seconds of one test
    total_s: float  # CPU seconds of all
    sleep_s: float  # seconds asleep, in all
    cpu: float = 0.0
    delay: float = 0.0
    waited: float = 0.0  # wall time; what the worker itself lost, stopped or waiting for a core, is not in it
    idle: float = 0.0  # of it neither used nor spent in a queue for a core
    asleep: float = 0.0  # of that, what passed while both processes were seen to sleep


class _Stop(Exception):
    """An evaluation's processes are of no further use: the status of the test that they are at, and why."""

    def __init__(self, status: Status, detail: str, last: bool = False):
        super().__init__(status, detail)
        self.status, self.detail, self.last = status, detail, last  # last: no other test is run


class _Pair:
    """The candidate's process and the test process of an evaluation, or of the rest of it after a crash; stops both."""

    def __init__(self, memory_mb: int, spent: _Spent):
        """Start both and lock them up. Raises _Unavailable."""
        layers = _layers()
        limits = [_limits(spent.total_s + 1, *size, layers.users) for size in ((memory_mb, MAX_THREADS), EXAMINER)]
        plans = [vars(layers) | {"limits": each} for each in limits]
        with _STARTING:
            self.server = _server(os.getpid())
        self.reports, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)  # no half of a message can arrive
        asks, answers = socket.socketpair()
        try:
            with theirs, asks, answers:
                fds = [theirs.fileno(), asks.fileno(), answers.fileno()]
                self.pids = self.server.request("start", *plans, fds=fds)  # of the candidate's and the test process
        except _Unavailable:
            self.reports.close()
            raise
        self.spent, self.before = spent, (spent.cpu, spent.delay)
        self.started = [0.0, 0.0]  # CPU seconds of both when the current test began
        self.ends: list[tuple[int, float, bool]] = []

    def cpu(self) -> list[float]:
        """CPU seconds that the threads of each have used: the clocks that clock_getcpuclockid(3) names."""
        used = [0.0, 0.0]
        for i, pid in enumerate(self.pids):
            with contextlib.suppress(OSError):  # it is gone
                used[i] = time.clock_gettime((~pid << 3) | 2)
        return used

    def send(self, job: bytes) -> None:
        """Hand the job to the test process, in packets, the last of them empty."""
        self.reports.settimeout(WALL_S)
        with contextlib.suppress(OSError):  # it ended; `report` finds out
            for start in range(0, len(job) + wire.MAX_PACKET, wire.MAX_PACKET):
                self.reports.send(job[start : start + wire.MAX_PACKET])
        self.reports.settimeout(POLL_S)

    def report(self) -> tuple[str, str]:
        """The next report of the test process. Raises _Stop, and _Unavailable if the processes ended by no fault."""
        while True:
            start = time.monotonic()
            try:
                message = self.reports.recv(wire.MAX_PACKET)
            except OSError as error:
                message = None if isinstance(error, TimeoutError) else b""
            self.spent.waited += min(time.monotonic() - start, POLL_S)
            if message is None:
                self._check()
                continue
            if not message:
                raise self.gone()
            self.started = self.cpu()
            try:
                kind, why = wire.decode(message, str, 3)
            except (ValueError, TypeError) as error:
                raise _Stop("overload", "the test process sent nonsense", last=True) from error
            return str(kind), str(why)

    def _check(self) -> None:
        """Raise _Stop if the processes have used what they may."""
        spent = self.spent
        candidate, examiner = self.cpu()
        # Seconds that the main threads were ready to run and had no core. Other threads do not count: a hundred that
        # wait for each other's core are not a sign of a busy machine.
        waits = [_proc(pid, "schedstat") for pid in self.pids]
        spent.cpu = self.before[0] + candidate + examiner
        spent.delay = self.before[1] + sum(int(each[1]) / 1e9 for each in waits if each)
        state = _proc(self.pids[0], "stat")
        if state and int(state[17]) > MAX_THREADS:
            raise _Stop("crash", f"more than {MAX_THREADS} threads", last=True)
        # A process can be idle and not sleep: the machine under this one took the core away, or it waits for a disk.
        idle, spent.idle = spent.idle, spent.waited - spent.cpu - spent.delay
        if all(map(_sleeps, self.pids)):
            spent.asleep += max(0.0, spent.idle - idle)
        if candidate - self.started[0] >= spent.timeout_s:
            raise _Stop("timeout", f"used {spent.timeout_s:g} s of CPU time")
        if examiner - self.started[1] >= spent.timeout_s:
            raise _Stop("overload", f"the test used {spent.timeout_s:g} s of CPU time on an answer", last=True)
        if spent.cpu >= spent.total_s:
            raise _Stop("timeout", f"used {spent.total_s:g} s of CPU time in all", last=True)
        if spent.asleep >= spent.sleep_s:
            raise _Stop("timeout", f"slept {spent.sleep_s:g} s in all", last=True)
        if spent.waited >= WALL_S:
            if spent.delay > spent.waited / 2:
                raise _Stop("sandbox_error", f"waited {spent.delay:.1f} of {spent.waited:.1f} s for a core", last=True)
            raise _Stop("timeout", f"did not answer in {spent.waited:.1f} s", last=True)

    def gone(self, why: str | None = None) -> _Stop:
        """End both processes; what to say if one of them ended before, or the test process gave the other up.

        Args:
            why: the candidate's process is of no further use, says the test process, and why if that is not its end.

        Raises _Unavailable if a process was killed from outside.
        """
        code, cpu, killed = self.end(POLL_S)[0]
        how = [f"{'signal ' if end < 0 else 'exit code '}{abs(end)}" for end, _, _ in self.ends]
        if why is None:
            return _Stop("overload", f"an answer ended the test process ({how[1]})", last=True)
        if why:
            return _Stop("crash", why)
        if code != -signal.SIGKILL:
            return _Stop("crash", f"the process ended with {how[0]}")
        if killed:
            return _Stop("crash", "the process closed its connection")
        if cpu >= self.spent.total_s:
            return _Stop("timeout", f"used {self.spent.total_s:g} s of CPU time in all", last=True)
        raise _Unavailable("the candidate's process was killed from outside")  # it cannot send itself that signal

    def end(self, grace_s: float = 0.0) -> list[tuple[int, float, bool]]:
        """Kill both, unless they end within `grace_s`. Returns what server's `_end` says of each."""
        if self.reports.fileno() >= 0:  # once
            self.reports.close()
            self.ends = self.server.request("end", [(pid, grace_s) for pid in self.pids])
            self.spent.cpu = self.before[0] + sum(cpu for _, cpu, _ in self.ends)
        return self.ends


def _proc(pid: int, name: str) -> list[str]:
    """The numbers in a file of a process's; none if it has ended, or the kernel has no such file."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _sleeps(pid: int) -> bool:
    """Whether all threads of a process sleep or have ended: none runs, is ready to run, or waits for a disk."""
    with contextlib.suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
        return all(_proc(pid, f"task/{thread}/stat")[:1] in ([], ["S"], ["Z"]) for thread in threads)
    return True


def _attend(job: dict[str, Any], memory_mb: int, spent: _Spent, outcomes: list[tuple[Status, str]]) -> None:
    """Run the tests that have no outcome yet in a new pair of processes, and add the outcomes.

    Raises _Stop if it ends before the last test, _Unavailable, and ValueError if the tests are unusable.
    """
    pair = _Pair(memory_mb, spent)
    loaded = False
    try:
        pair.send(marshal.dumps(job | {"tests": job["tests"][len(outcomes) :]}))
        while len(outcomes) < len(job["tests"]):
            kind, why = pair.report()
            if kind == "broken":
                raise _Unavailable(why)
            if kind == "bad":
                raise ValueError(f"{why}; fix the data")
            if kind == "gone":
                raise pair.gone(why)
            if loaded:
                outcomes.append((kind if kind in ("pass", "memory") else "fail", why))
            elif kind != "loaded":
                raise _Stop(kind if kind in ("error", "memory") else "fail", why)
            loaded = True
    except _Stop as stop:
        stop.last = stop.last or not loaded
        raise
    finally:
        pair.end()


def _judge(job: dict[str, Any], memory_mb: int, spent: _Spent) -> Verdict:
    """See `run_tests`."""
    total = len(job["tests"])
    outcomes: list[tuple[Status, str]] = []
    pauses = iter(RETRY_S)
    while len(outcomes) < total and sum(status == "timeout" for status, _ in outcomes) < MAX_TIMEOUTS:
        try:
            _attend(job, memory_mb, spent, outcomes)
        except _Unavailable as error:
            pause = next(pauses, None)
            if pause is None:
                return Verdict("sandbox_error", 0, total, str(error))
            time.sleep(pause)
        except _Stop as stop:
            if stop.status in ("sandbox_error", "overload"):
                return Verdict(stop.status, 0, total, stop.detail)
            outcomes.append((stop.status, stop.detail))
            if stop.last:
                break
    passed = sum(status == "pass" for status, _ in outcomes)
    status, detail = next((outcome for outcome in outcomes if outcome[0] != "pass"), ("pass", ""))
    return Verdict(status, passed, total, detail)


def run_tests(
    code: str,
    tests: list[str],
    *,
    setup: str = "",
    timeout_s: float = 3.0,
    total_s: float | None = None,
    memory_mb: int = 512,
    own_eq: bool = False,
    in_place: bool = False,
) -> Verdict:
    """Run model-written code and say which tests hold.

    The code is loaded once, as a module that is not __main__, then each test in turn calls it. A test holds if at least
    one of its asserts, or of the setup's, was reached and all that were reached held. Numbers compare as in Python, so
    3.0 may stand for 3.

    Args:
        code: Python source, from anybody.
        tests: Python with an assert statement each, such as `assert f(1) == 2`, trusted. If the setup has some, as in
            `def check(candidate): ...`, a test may be `check(f)`.
        setup: code that the tests need: imports, constants; trusted. It runs in the test process, anew for each test,
            with the standard library: the candidate's code does not see its names. It may use the candidate's.
        timeout_s: CPU seconds for loading the code, and for each test, on a fast machine; see `_slowness`. What the
            processes sleep is counted over all tests, up to 4 times this. After two timeouts no further test is run.
        total_s: the same for the whole evaluation, however often the code crashes; default: 4 times timeout_s.
        memory_mb: address space of the candidate's process in MiB; an interpreter alone takes about 40.
        own_eq: let ==, hash() and all operators of the candidate's own classes decide. Then a class that is equal to
            everything passes `assert f(2) == Point(4, 6)`; use it only for tests of a class with an own __eq__.
        in_place: a test sees how every call changed its arguments; else only if the call returned None. With it,
            `assert f(x) == sorted(x)` holds for code that empties x and returns [].

    Raises:
        ValueError: the tests, the setup or a limit are unusable, whatever the code is.
        SandboxUnavailable: a layer of protection is missing; see `self_test`.
    """
    if not tests:
        raise ValueError("tests is empty: there is nothing to judge the code by; fix the data")
    total_s = WALL_FACTOR * timeout_s if total_s is None else total_s
    if timeout_s <= 0 or total_s < timeout_s or memory_mb < 64:
        raise ValueError(
            f"timeout_s {timeout_s} must be positive, total_s {total_s} no less, and memory_mb {memory_mb} at least 64"
        )
    program = _program(tuple(tests), setup)
    self_test()
    if len(code) > MAX_CODE:
        return Verdict("error", 0, len(tests), f"the code has {len(code)} characters")
    job = program | {"code": code.removeprefix("\ufeff"), "own_eq": own_eq, "in_place": in_place}
    limits = [min(seconds * _slowness(), WALL_S) for seconds in (timeout_s, total_s)]
    verdict = _judge(job, memory_mb, _Spent(*limits, WALL_FACTOR * timeout_s))
    if verdict.status == "sandbox_error":
        print(f"sandbox: a program was not judged: {verdict.detail}", file=sys.stderr)
    return verdict


# === the self-test ===

_PROBE = """
import os, _socket, resource
def blocked(action, *args):
    try: action(*args)
    except OSError as error: return error.errno
    return 0
def fork():
    if os.fork() == 0: os._exit(0)
    os.wait()
def probe(): return {
    "socket": blocked(_socket.socket), "fork": blocked(fork), "kill": blocked(os.kill, os.getppid(), 0),
    "list": blocked(os.listdir, "/"), "write": blocked(os.open, "/dev/null", os.O_WRONLY),
    "proc": blocked(os.open, "/proc/self/status", os.O_RDONLY), "limits": {n: resource.getrlimit(n) for n in LIMITS},
    "process": os.getpid(), "users": sorted(set(os.getresuid() + os.getresgid())), "variables": sorted(os.environ)}
"""


def self_test(allow_unsafe: bool | None = None) -> dict[str, bool]:
    """Start a sandbox, try from inside what each layer must stop, say which layers hold; once per process.

    Args:
        allow_unsafe: run code even if a layer is missing. None: if the environment variable
            GLASSRL_ALLOW_UNSAFE_CODE_EXECUTION is 1.

    Returns:
        {layer: it holds, in both processes} for seccomp, landlock, limits, user, environment.

    Raises:
        SandboxUnavailable: a layer is missing and allow_unsafe is not set, or no sandbox can be started. None can be
            started on a system other than Linux.
    """
    if platform.system() != "Linux":
        raise SandboxUnavailable(
            f"model-written code will not be run: the sandbox needs Linux, and this machine runs {platform.system()}. "
            "Train on a Linux machine, or choose a task whose responses are not programs."
        )
    with _STARTING:
        layers = _probe()
    missing = [name for name, holds in layers.items() if not holds]
    if missing and not (os.environ.get(UNSAFE) == "1" if allow_unsafe is None else allow_unsafe):
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
    layers = _layers()
    first, count = layers.users or (0, 1)
    limits = [_limits(11, *size, layers.users) for size in ((512, MAX_THREADS), EXAMINER)]
    probe = _PROBE.replace("LIMITS", str(list(limits[0])))
    job = _program(("assert False, repr((candidate(), probe()))",), probe)
    job = job | {"code": probe + "candidate = probe", "own_eq": False, "in_place": False}
    verdict = _judge(job, 512, _Spent(10.0, 10.0, 10.0))
    try:
        seen = ast.literal_eval(verdict.detail.removeprefix("AssertionError: "))
    except (ValueError, SyntaxError) as error:
        raise SandboxUnavailable(f"the sandbox does not start: {verdict.detail}") from error
    return {
        "seccomp": bool(layers.program) and all(x["socket"] == x["fork"] == x["kill"] == eperm for x in seen),
        "landlock": layers.ruleset >= 0 and all(x["list"] == x["write"] == x["proc"] == eacces for x in seen),
        "limits": [x["limits"] for x in seen] == [{n: (v, v) for n, v in own.items()} for own in limits],
        "user": not layers.users or all(x["users"] == [first + x["process"] % count] for x in seen),
        "environment": all(set(x["variables"]) <= _ENVIRONMENT.keys() for x in seen),
    }

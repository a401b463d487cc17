"""Run model-written Python against assert statements, so that only right answers pass; README.md has the design.

    >>> run_tests("def add(a, b): return a + b", ["assert add(1, 2) == 3"])
    Verdict(status='pass', passed=1, total=1, detail='')

`judge` is the worker's side. It starts `server`, from which the process of the tests (`examiner`) and that of the code
(`candidate`) are forked; `wire` has what crosses between them. Uses nothing outside the standard library.
"""

from rewards.sandbox.judge import MAX_TIMEOUTS, UNSAFE, SandboxUnavailable, Verdict, run_tests, self_test

__all__ = ["MAX_TIMEOUTS", "UNSAFE", "SandboxUnavailable", "Verdict", "run_tests", "self_test"]

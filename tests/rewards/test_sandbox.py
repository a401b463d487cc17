"""The sandbox against 150 programs, as this user and as nobody; its layers, limits, leaks, wire format."""
# ruff: noqa: E501

import ast
import dataclasses
import functools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import launch
import pytest
from hostile import answers
from hostile.run import read_cases
from launch import ROOT, TESTS, children, until

from rewards.sandbox import Verdict, run_tests, wire
from rewards.sandbox import judge as sandbox

if not (sandbox._seccomp_available() and sandbox._landlock_abi()):
    pytest.skip("this kernel or container has no seccomp or no Landlock", allow_module_level=True)

CASES = read_cases()
FEW = [name for i, (name, case) in enumerate(CASES.items()) if case.stopped_by or i % 12 == 0]  # also as nobody
VERDICTS = [(name, user) for name in CASES for user in ("self", "nobody")]
SOME = [x if x[1] == "self" or x[0] in FEW else pytest.param(*x, marks=pytest.mark.thorough) for x in VERDICTS]
RUN = TESTS / "rewards" / "hostile" / "run.py"
NOBODY = 65534
ADD = ["assert f(1, 2) == 3", "assert f(0, 0) == 0", "assert f(-5, 2) == -3"]


# === the programs of tests/rewards/hostile ===


def lower_limits():
    """An ordinary user cannot raise a hard limit: the sandbox must do with lower ones."""
    resource.setrlimit(resource.RLIMIT_STACK, (4 << 20, 4 << 20))
    resource.setrlimit(resource.RLIMIT_CPU, (300, 300))


def start(command, **options):
    command = [str(part) for part in command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}, **options)


@functools.cache
def interpreter_of_nobody() -> str | None:
    """An interpreter that user nobody can run."""
    for python in (sys._base_executable, "/usr/bin/python3"):
        probe = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(probe, user=NOBODY, group=NOBODY, cwd="/", capture_output=True).returncode == 0:
                return python
        except OSError:
            continue
    return None


@pytest.fixture(scope="module")
def passes(tmp_path_factory, request):
    """{user: process}: programs are judged by both users at the same time, as nobody a few or in `make thorough` all."""
    processes = {"self": start([sys.executable, RUN, ROOT])}
    copy = tmp_path_factory.mktemp("copy")
    if os.geteuid() == 0 and interpreter_of_nobody():
        shutil.copytree(ROOT / "rewards", copy / "rewards", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(TESTS / "rewards" / "hostile", copy / "hostile")
        command = [interpreter_of_nobody(), "-B", copy / "hostile" / "run.py", copy, "--uid", NOBODY]
        command += ["--only", *FEW] if request.config.option.markexpr == "not thorough" else []
        for folder in (copy, *copy.parents[:-2]):
            folder.chmod(0o755)
        processes["nobody"] = start(command, cwd="/", preexec_fn=lower_limits)
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()


@functools.cache
def results(process) -> dict:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return json.loads(output)


def of(passes, user) -> dict:
    if user not in passes:
        pytest.skip("needs root, and an interpreter of version 3.11 or later that user nobody can run")
    return results(passes[user])


@pytest.mark.parametrize("name, user", SOME)
def test_verdict(passes, name, user):
    case, verdict = CASES[name], of(passes, user)["verdicts"][name]
    assert verdict["status"] in case.expected, verdict
    expected = verdict["total"] if verdict["status"] == "pass" else case.passed or 0
    assert (verdict["passed"], verdict["total"]) == (expected, len(case.tests)), verdict


@pytest.mark.parametrize("user", ["self", pytest.param("nobody", marks=pytest.mark.thorough)])
def test_no_hostile_answer_earns_anything(passes, user):
    """Objects that equal everything, bombs, forged messages, exceptions: each test fails, and the worker lives."""
    result, programs = of(passes, user), answers.cases()
    assert len(programs) >= 110 and result["answers"].keys() == programs.keys()
    earned = {
        name: verdict
        for name, verdict in result["answers"].items()
        if verdict["status"] in ("pass", "sandbox_error") or verdict["passed"] > len(programs[name][2])
    }
    assert earned == {}
    assert result["peak MiB"] < 150


@pytest.mark.parametrize("user", ["self", "nobody"])
def test_nothing_is_left(passes, user):
    result = of(passes, user)
    assert result["left"] == []
    assert result["layers"] == dict.fromkeys(["seccomp", "landlock", "limits", "user", "environment"], True)


@pytest.mark.parametrize("layer", ["seccomp", "landlock"])
def test_without_the_layer_the_attack_works(layer):
    """Otherwise the verdicts above could come from mistakes in the attacks."""
    process = start([sys.executable, RUN, ROOT, "--without", layer])
    verdicts = results(process)["verdicts"]
    assert len(verdicts) >= 7
    assert {name: verdict["status"] for name, verdict in verdicts.items()} == dict.fromkeys(verdicts, "pass")


def test_enough_programs():
    assert sum(case.expected == ["pass"] for case in CASES.values()) >= 15
    assert sum(case.expected != ["pass"] for case in CASES.values()) >= 100


# === verdicts ===


def test_a_verdict_in_full():
    assert run_tests("def f(a, b): return a + b", ADD) == Verdict("pass", 3, 3)
    assert run_tests("def f(a, b): return 3", ADD) == Verdict("fail", 1, 3, "AssertionError")
    assert run_tests("def f(a, b): return 1 / a", ADD) == Verdict("fail", 0, 3, "AssertionError")
    assert run_tests("def f(a, b): return a / b", ["assert f(1, 0)"]).detail == "ZeroDivisionError: division by zero"
    assert run_tests("def f(:", ADD).detail.startswith("SyntaxError: invalid syntax")


def test_status_is_that_of_the_first_test_that_does_not_hold():
    code = "import os\ndef f(x):\n    if x == 1: raise MemoryError\n    if x == 2: os._exit(0)\n    return x"
    tests = [f"assert f({x}) == {x}" for x in (0, 1, 2, 3)]
    assert run_tests(code, tests) == Verdict("memory", 2, 4, "MemoryError: ")
    assert run_tests(code, tests[::-1]) == Verdict("crash", 2, 4, "the process ended with exit code 0")
    assert run_tests(code, ["assert f(0) == 5", *tests[1:]]) == Verdict("fail", 1, 4, "AssertionError")


def test_loading_code_that_ends_the_process_only_the_second_time_changes_nothing_before():
    code = "import os\ndef f(x): return x if x != 1 else os._exit(0)"
    assert run_tests(code, ["assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2"]).passed == 2


def test_a_setup_that_the_candidate_breaks_is_the_candidates_fault():
    verdict = run_tests("def f(n): return 1", ["assert f(root) == 1"], setup="root = Node(1)")
    assert (verdict.status, verdict.passed) == ("fail", 0)


def test_memory_limit():
    code = "def f(): return len(bytearray(150 << 20))"
    assert run_tests(code, [f"assert f() == {150 << 20}"], memory_mb=300).status == "pass"
    assert run_tests(code, [f"assert f() == {150 << 20}"], memory_mb=150).status == "memory"


def test_large_arguments_cross():
    assert run_tests("def f(x): return sum(x)", ["assert f(list(range(200_000))) == 19999900000"]).status == "pass"


@pytest.mark.parametrize(
    "tests, setup, message",
    [
        ([], "", "tests is empty"),
        (["f(1) == 2"], "", "test 0 has no assert statement"),
        (["assert f(1) == 1", "assert f(1"], "", "test 1 is not Python"),
        (["assert f(1) == 1"], "import no_such_module", "setup code raises ModuleNotFoundError"),
        (["assert f(1) == 1"], "K = (", "setup code is not Python"),
        (["assert f(lambda x: x) == 1"], "", "an object of type function: only plain data can cross"),
        (["assert 1 == 1"], "", "the tests name no function of the candidate's"),
        (["assert max(len(x)) == min(x)"], "x = [1]", "the tests name no function of the candidate's"),
    ],
)
def test_unusable_tests_are_an_error_and_not_a_verdict(tests, setup, message):
    with pytest.raises(ValueError, match=message):
        run_tests("def f(x): return x", tests, setup=setup)


@pytest.mark.parametrize("limits", [{"timeout_s": 0}, {"memory_mb": 10}])
def test_unusable_limits(limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        run_tests("def f(a, b): return a + b", ADD, **limits)


def test_candidates_in_parallel_do_not_mix():
    codes = [f"def f(): return {i}" for i in range(16)]
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda code: run_tests(code, ["assert f() == 7"]), codes))
    assert [verdict.status for verdict in verdicts] == ["fail"] * 7 + ["pass"] + ["fail"] * 8


# === time ===


@pytest.fixture
def hogs():
    """Twelve stopped processes on the one core that this process may use; awake, each takes an equal share of it."""
    cores = os.sched_getaffinity(0)
    own = (0, sandbox._server(os.getpid()).process.pid)
    for pid in own:
        os.sched_setaffinity(pid, {min(cores)})
    processes = []
    for _ in range(12):  # of sessions of their own, as the sandbox is: some kernels share time between sessions
        processes.append(subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], start_new_session=True))
        processes[-1].send_signal(signal.SIGSTOP)
    yield [process.pid for process in processes]
    for pid in own:
        os.sched_setaffinity(pid, cores)
    for process in processes:
        process.kill()
        process.wait()


def wake(pids):
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "body, status",
    [
        ("while True: pass", "sandbox_error"),
        pytest.param("import time; time.sleep(99)", "timeout", marks=pytest.mark.thorough),
    ],
)
def test_a_starved_program_is_not_judged_but_a_sleeping_one_is(hogs, monkeypatch, capfd, body, status):
    """Twelve others leave a program that needs 0.4 s of the core less than that in 3 s."""
    monkeypatch.setattr(sandbox, "WALL_S", 3.0)
    wake(hogs)
    verdict = run_tests(f"def f():\n    {body}", ["assert f() == 1"], timeout_s=0.4)
    assert verdict.status == status, verdict
    said = "sandbox: a program was not judged: waited" in capfd.readouterr().err
    assert said == (status == "sandbox_error")


def test_waiting_for_a_core_is_no_time_of_the_programs(hogs):
    """Four times the limit by the clock, which ended programs before: what counts is what they used and slept."""
    code = "import time\ndef f():\n    end = time.process_time() + 0.25\n    while time.process_time() < end: pass"
    wake(hogs[:6])
    start = time.monotonic()
    assert run_tests(code, ["assert f() is None"], timeout_s=0.35).status == "pass"
    assert time.monotonic() - start > 1.4


def test_idle_time_that_no_counter_explains_is_no_sleep(hogs, monkeypatch):
    """The machine under this one may take the core away, which no queue counts: simulated by queues that say nothing.

    The program is ready to run all the time, so that it does not sleep, and waits much longer than it might sleep.
    """
    proc = sandbox._proc
    monkeypatch.setattr(sandbox, "_proc", lambda pid, name: [] if name == "schedstat" else proc(pid, name))
    code = "import time\ndef f():\n    end = time.process_time() + 0.2\n    while time.process_time() < end: pass"
    wake(hogs[:6])
    start = time.monotonic()
    verdict = run_tests(code, ["assert f() is None"], timeout_s=0.25)
    assert verdict.status == "pass", verdict
    assert time.monotonic() - start > 1.2  # what it might sleep is 1.0 s


def test_a_process_sleeps_only_if_all_its_threads_do():
    def sleeps(program: str) -> list[bool]:
        process = subprocess.Popen([sys.executable, "-S", "-c", program])
        try:
            time.sleep(1)
            return [sandbox._sleeps(process.pid) for _ in range(5) if not time.sleep(0.01)]
        finally:
            process.kill()
            process.wait()

    assert sleeps("import time; time.sleep(60)") == [True] * 5
    assert sleeps("while True: pass") == [False] * 5
    thread = (
        "import _thread, time\ndef spin():\n    while True: pass\n_thread.start_new_thread(spin, ())\ntime.sleep(60)"
    )
    assert sleeps(thread) == [False] * 5
    assert sandbox._sleeps(1 << 22) is True  # there is no such process


@pytest.mark.thorough
def test_a_busy_core_does_not_change_the_verdict(hogs):
    """A third of a second of CPU time takes twice that here; the limit is 0.5 s of CPU time."""
    code = "import time\ndef f():\n    end = time.process_time() + 0.33\n    while time.process_time() < end: pass"
    wake(hogs[:1])
    verdict = run_tests(code, ["assert f() is None"], timeout_s=0.5)
    assert verdict.status == "pass", verdict


def forked_cpu() -> float:
    """CPU seconds of the processes of all evaluations so far."""
    stat = Path(f"/proc/{sandbox._server(os.getpid()).process.pid}/stat").read_text()
    return sum(map(int, stat.rpartition(")")[2].split()[13:15])) / os.sysconf("SC_CLK_TCK")


def test_time_is_bounded():
    """Of eight tests that would run for ever two are run, each to its limit of 0.2 s."""
    code = "def f(x):\n    while x: pass\n    return x"
    run_tests(code, ["assert f(0) == 0"])
    before = forked_cpu()
    verdict = run_tests(code, [f"assert f({i}) == {i}" for i in range(9)], timeout_s=0.2)
    assert (verdict.status, verdict.passed) == ("timeout", 1)
    assert 0.35 < (forked_cpu() - before) / sandbox._slowness() < 1.2


@pytest.mark.parametrize("slowness, status", [(1.0, "timeout"), (2.5, "pass")])
def test_limits_are_in_seconds_of_a_fast_machine(monkeypatch, slowness, status):
    assert 1 <= sandbox._slowness() <= sandbox.MAX_SLOWNESS
    monkeypatch.setattr(sandbox, "_slowness", lambda: slowness)
    works = "import time\ndef f():\n    while time.process_time() < 0.5: pass"
    assert run_tests(works, ["assert f() is None"], timeout_s=0.3).status == status


def test_time_is_bounded_over_all_processes():
    """Each test takes 0.15 s and then ends the process: 0.8 s are enough for five or six of thirty."""
    code = (
        "import os, time\ndef f():\n    end = time.process_time() + 0.15\n"
        "    while time.process_time() < end: pass\n    os._exit(0)"
    )
    run_tests("f = 1", ["assert f"])
    before = forked_cpu()
    assert run_tests(code, ["assert f() == 1"] * 30, timeout_s=0.2, total_s=0.8).status == "crash"
    assert 0.7 < (forked_cpu() - before) / sandbox._slowness() < 3


@pytest.mark.parametrize("end, passed", [("return x", 2), ("os._exit(0)", 0)])
def test_sleep_is_bounded_over_all_tests_and_processes(end, passed, monkeypatch):
    """1.2 s of it: the third call of 0.5 s is cut off, and no other is made. A slow machine would get more time."""
    monkeypatch.setattr(sandbox, "_slowness", lambda: 1.0)
    code = f"import os, time\ndef f(x):\n    time.sleep(0.5)\n    {end}"
    start = time.monotonic()
    verdict = run_tests(code, [f"assert f({i}) == {i}" for i in range(200)], timeout_s=0.3)  # 100 s in all
    assert (verdict.status, verdict.passed) == ("timeout" if passed else "crash", passed)
    assert time.monotonic() - start < 60


# === what tests do with answers ===

BOMBS = {  # an answer, and a test whose work on it has no end
    "the sum of a range": ("range(10**12)", "assert sum(f()) == 3"),
    "a set of a range": ("range(10**9)", "assert set(f()) == {3}"),
    "a regex on a prepared text": ("'a' * 40 + 'b'", "import re\nassert re.match('(a+)+$', f())"),
    "numbers of one hash": ("[i * (2**61 - 1) for i in range(30_000)]", "assert set(f()) == {3}"),
    "a power": ("10**9", "assert 3 ** f() == 3"),
    "a deep comparison that crashes the interpreter": ("1", "import ctypes\nassert ctypes.string_at(f()) == b''"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_an_answer_that_uses_up_the_test_process_earns_nothing(name):
    answer, test = BOMBS[name]
    code = f"def f(): return {answer}\ndef g(): return 1"
    verdict = run_tests(code, ["assert g() == 1", test, "assert g() == 1"], timeout_s=0.2)
    assert (verdict.status, verdict.passed) == ("overload", 0), verdict


def test_memory_of_the_test_process_is_limited():
    assert run_tests("def f(): return 10**10", ["assert bytearray(f()) == 3"]) == Verdict("fail", 0, 1, "MemoryError")


RUNS_TEXT = {  # tests that run text of the candidate's
    "eval": ("return TEXT", "assert eval(f()) or True"),
    "pickle": (
        "import pickle\n    class A: __reduce__ = lambda s: (eval, (TEXT,))\n    return pickle.dumps(A())",
        "import pickle\nassert pickle.loads(f()) or True",
    ),
    "annotations": ("pass\nf.__annotations__ = {'x': TEXT}", "import typing\nassert typing.get_type_hints(f) or True"),
    "annotations of a class": (
        "pass\nclass f:\n    __annotations__ = {'x': TEXT}",
        "import typing\nassert typing.get_type_hints(f) or True",
    ),
}


@pytest.mark.parametrize("name", RUNS_TEXT)
def test_text_of_the_candidate_never_runs_outside_the_sandbox(name, tmp_path):
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents[:-2]:
        folder.chmod(0o755)
    body, test = RUNS_TEXT[name]
    text = f"open({str(tmp_path / 'written')!r}, 'w').write('x')"
    run_tests(f"TEXT = {text!r}\ndef f():\n    {body}", [test])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["__annotations__", "__wrapped__", "__array_interface__", "__globals__"])
def test_special_attributes_are_not_asked_for(name):
    code = "class A:\n    def __getattr__(self, name): return {}\ndef f(): return A()\nf.__wrapped__ = f"
    for x in ("f()", "f"):
        verdict = run_tests(code, [f"assert {x}.{name} is not None"])
        assert (verdict.status, verdict.detail) == ("fail", f"AttributeError: {name}")


@pytest.mark.parametrize(
    "test, status",
    [
        ("try:\n    assert f(1) == 3\nexcept:\n    pass", "fail"),
        ("try:\n    assert f(1) == 3\nexcept Exception as error:\n    pass\nassert f(1) == 2", "fail"),
        ("try:\n    assert f(1) == 3\nexcept AssertionError:\n    assert f(1) == 2", "pass"),  # it says so
        ("try:\n    f(0)\n    assert False\nexcept Exception:\n    assert True", "pass"),
        ("try:\n    f(1)\n    assert False\nexcept Exception:\n    assert True", "fail"),
        ("try:\n    f(2)\nexcept BaseException:\n    assert True", "crash"),
        ("def check(g):\n    assert g(1) == 3", "fail"),  # never called
        ("for x in []:\n    assert f(x) == 3", "fail"),
        ("try:\n    f(0)\n    assert False\nexcept AssertionError:\n    pass", "fail"),  # it catches its own
        ("try:\n    f(0)\n    assert False\nexcept (KeyError, TypeError):\n    pass", "fail"),
        ("try:\n    f('')\n    assert False\nexcept KeyError:\n    pass", "pass"),
        ("try:\n    f('')\nexcept KeyError:\n    pass\nelse:\n    raise AssertionError('no error')", "pass"),
        ("try:\n    f('')\n    assert False\nexcept Exception:\n    pass", "pass"),
        ("try:\n    f(1)\n    assert False\nexcept KeyError:\n    pass", "fail"),
        ("try:\n    assert f('') == 3\nexcept KeyError:\n    pass", "fail"),  # not reached
        ("import unittest\nunittest.TestCase().assertEqual(f(1), 2)", "pass"),
        ("import unittest\nfor x in []: unittest.TestCase().assertEqual(f(x), 2)", "fail"),
    ],
)
def test_asserts_that_a_test_swallows_or_never_reaches(test, status):
    code = (
        "import os\ndef f(x):\n    if x == '': raise KeyError\n    if x == 2: os._exit(0)\n    assert x\n    return 2"
    )
    assert run_tests(code, [test]).status == status


MANAGER = "class A:\n    __enter__ = lambda s: s\n    __exit__ = lambda s, *a: True\n    def f(s): raise ValueError\n"
NUMBER = "class L:\n    __sub__ = __rsub__ = __mod__ = lambda s, o: 0\n    __lt__ = __gt__ = lambda s, o: True\n"


@pytest.mark.parametrize(
    "code, test, status",
    [
        ("def f(n): raise StopIteration", "assert all(map(f, [2, 3]))", "fail"),
        ("def f(n): return iter([])", "assert all(map(next, map(f, [2])))", "pass"),  # an empty iterator has no first item
        ("class A:\n    def __bool__(s): raise StopIteration\ndef f(): return A()", "assert [*filter(None, [f()])] == []", "fail"),
        *[(f"Mine = {kind}\ndef f(): pass", f"try:\n    f()\n    assert False\nexcept {catch}:\n    pass", "fail") for kind in ("Exception", "AssertionError", "BaseException", "int") for catch in ("Mine", "(KeyError, Mine)")],
        ("class Mine(AssertionError): pass\ndef f(): raise Mine", "try:\n    f()\n    assert False\nexcept Mine:\n    pass", "pass"),
        ("Mine = ValueError\ndef f(): raise Mine", "try:\n    f()\n    assert False\nexcept Mine:\n    pass", "pass"),
        ("def f(): raise StopIteration(5)", "try:\n    f()\nexcept (KeyError, StopIteration) as e:\n    assert e.value == 5", "pass"),
        (MANAGER, "assert A()\nwith A() as a:\n    a.f()\n    assert a is None", "fail"),  # skips an assert
        (MANAGER, "with A() as a:\n    assert a\n    a.f()\nassert a", "pass"),
        (NUMBER + "class Box:\n    area = lambda s: L()", "assert abs(Box().area() - 3) < 1e-6", "fail"),
        (NUMBER + "class Box:\n    area = lambda s: L()", "assert 3 > Box().area() and Box().area() > 3", "fail"),
        (NUMBER + "class Box:\n    area = lambda s: L()", "assert Box().area() % 2 == 0", "fail"),
        ("class A(list):\n    def sort(s, key): pass\ndef f(): return A()", "r = f()\nr.sort(key=len)\nassert r == [1]", "fail"),
        ("class A:\n    def __call__(s, x): pass\ndef f(): return A()", "assert f()(len) is None", "fail"),
    ],
)  # fmt: skip
def test_what_an_answer_does_to_a_test(code, test, status):
    assert run_tests(code, [test]).status == status


def test_check_as_humaneval_has_it():
    setup = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 3"
    for code, status in (("def f(x): return x + 1", "pass"), ("def f(x): return 2", "fail"), ("f = 3", "fail")):
        assert run_tests(code, ["check(f)"], setup=setup).status == status


def test_an_answer_cannot_make_the_tests_look_wrong():
    """What a test compares with an answer may be unable to cross; a candidate must not gain "no score" from that."""
    code = "class A:\n    def __contains__(s, x): return True\n    __eq__ = lambda s, o: True\ndef f(): return A()"
    for test in ("assert f() == print", "assert print in f()"):
        assert run_tests(code, [test], own_eq=True).status == "fail"


@pytest.mark.parametrize("start", ["_thread.start_new_thread(sleep, (9,))", "Thread(target=sleep, args=(9,)).start()"])
def test_threads_are_limited(start):
    code = (
        "import _thread\nfrom threading import Thread\nfrom time import sleep\n_ = _thread.stack_size(65536)\n"
        f"def f():\n    for _ in range(5000): {start}\n    sleep(9)"
    )
    verdict = run_tests(code, ["assert f() is None"] * 3)
    assert (verdict.status, verdict.passed) in (("crash", 0), ("fail", 0))
    assert "more than 64 threads" in verdict.detail or "can't start new thread" in verdict.detail  # which comes first


def test_threads_of_one_evaluation_take_none_from_another():
    flood = "import _thread, time\n_ = _thread.stack_size(65536)\ndef f():\n    while True:\n        try: _thread.start_new_thread(time.sleep, (9,))\n        except RuntimeError: pass"
    honest = "from concurrent.futures import ThreadPoolExecutor\ndef f(n):\n    with ThreadPoolExecutor(8) as pool: return sum(pool.map(abs, range(-n, n)))"
    with ThreadPoolExecutor(5) as pool:
        floods = [pool.submit(run_tests, flood, ["assert f()"], timeout_s=0.7) for _ in range(4)]
        verdicts = [run_tests(honest, ["assert f(9) == 81"]).status for _ in range(12)]
        assert verdicts == ["pass"] * 12
        assert {future.result().status for future in floods} <= {"timeout", "crash", "memory"}


def test_sleeping_threads_are_no_sign_of_a_busy_machine():
    """The time that threads wait for each other's core was counted as the machine's: no verdict, in place of 0."""
    code = (
        "import threading, time\n_ = threading.stack_size(65536)\n"
        "def g():\n    while True: time.sleep(0.0001)\n"
        "for _ in range(50): threading.Thread(target=g, daemon=True).start()\n"
        "def f(): time.sleep(99)"
    )
    assert run_tests(code, ["assert f() == 1"], timeout_s=0.3).status == "timeout"


# === nothing is left ===


def count() -> tuple[list[str], int, int]:
    fds = sorted(os.listdir("/proc/self/fd"))
    return fds, len(launch.descendants(os.getpid())), threading.active_count()


def test_100_evaluations_leave_nothing():
    codes = [
        "def f(a, b): return a + b",
        "def f(a, b): return 0",
        "import os\nos._exit(0)",
        "def f(",
        "f = bytearray(1 << 40)",
    ]
    expected = ["pass", "fail", "crash", "error", "memory"]
    run_tests(codes[0], ADD)
    before = count()
    assert [run_tests(codes[i % 5], ADD).status for i in range(100)] == expected * 20
    assert count() == before


def test_a_killed_worker_takes_its_processes_with_it():
    code = "def f():\n    while True: pass"
    program = f"from rewards.sandbox import run_tests; run_tests({code!r}, ['assert f() == 1'], timeout_s=60)"
    worker = launch.start("-c", program)
    try:
        (server,) = until(lambda: children(worker.pid))
        pair = until(lambda: working_pair(server))  # an earlier pair may have ended at once
        until(lambda: all(cpu(pid) > 0.0003 for pid in pair))
    finally:
        worker.kill()
        worker.wait()
    until(lambda: not any(map(exists, (server, *pair))))


def exists(pid: int) -> bool:
    """Zombies do."""
    return os.path.exists(f"/proc/{pid}")


def cpu(pid: int) -> float:
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0  # it has ended


def working_pair(server: int) -> list[int]:
    """A candidate's process, which is started first, and its examiner, once the candidate's program is at work."""
    found = sorted(children(server))
    return found if found[1:] and cpu(found[0]) > 0.05 else []


def kill_candidates(times: int) -> None:
    """Kill the candidate's process of the next evaluations from outside, once its program is at work."""
    server = sandbox._server(os.getpid()).process.pid
    for _ in range(times):
        pair = until(lambda: working_pair(server))
        os.kill(pair[0], signal.SIGKILL)  # it is started first
        until(lambda pair=pair: not any(map(exists, pair)))


@pytest.mark.parametrize("kills, status", [(1, "pass"), (3, "sandbox_error")])
def test_a_program_killed_from_outside_is_run_again(capfd, kills, status):
    run_tests("f = 1", ["assert f"])
    thread = threading.Thread(target=kill_candidates, args=(kills,))
    thread.start()
    works = "import time\ndef f():\n    while time.process_time() < 0.8: pass"
    verdict = run_tests(works, ["assert f() is None"])
    thread.join()
    assert verdict.status == status
    said = "sandbox: a program was not judged: the candidate's process was killed from outside"
    assert (said in capfd.readouterr().err) == (kills == 3)


def test_a_killed_server_is_replaced():
    run_tests("f = 1", ["assert f"])
    os.kill(sandbox._server(os.getpid()).process.pid, signal.SIGKILL)
    assert run_tests("def f(a, b): return a + b", ADD).status == "pass"


# === the layers ===


def without(monkeypatch, **layers):
    changed = dataclasses.replace(sandbox._layers(), **layers)
    monkeypatch.setattr(sandbox, "_layers", lambda: changed)
    sandbox._probe.cache_clear()
    monkeypatch.delenv(sandbox.UNSAFE, raising=False)


@pytest.fixture
def fresh_probe():
    yield
    sandbox._probe.cache_clear()


@pytest.mark.parametrize("layer, missing", [("seccomp", {"program": b""}), ("landlock", {"ruleset": -1})])
def test_a_missing_layer_stops_everything(monkeypatch, fresh_probe, layer, missing):
    without(monkeypatch, **missing)
    for attempt in (sandbox.self_test, lambda: run_tests("def f(a, b): return a + b", ADD)):
        with pytest.raises(sandbox.SandboxUnavailable, match=f"the sandbox lacks {layer}.*set {sandbox.UNSAFE}=1"):
            attempt()
    assert sandbox.self_test(allow_unsafe=True)[layer] is False
    monkeypatch.setenv(sandbox.UNSAFE, "1")
    assert sum(sandbox.self_test().values()) == 4
    assert run_tests("def f(a, b): return a + b", ADD).status == "pass"


def test_another_machine_has_no_layers(monkeypatch, fresh_probe):
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "aarch64")
    assert not sandbox._seccomp_available() and sandbox._landlock_abi() == 0
    without(monkeypatch, program=b"", ruleset=-1)
    with pytest.raises(sandbox.SandboxUnavailable, match="aarch64.*lacks seccomp, landlock.*needs x86-64"):
        sandbox.self_test()


def test_a_step_of_locking_up_that_fails_means_no_sandbox(monkeypatch, fresh_probe):
    without(monkeypatch, ruleset=0)  # standard input is not a ruleset
    with pytest.raises(sandbox.SandboxUnavailable, match="does not start.*landlock_restrict_self"):
        sandbox.self_test()


def test_the_self_test_is_cheap():
    sandbox.self_test()
    tried = sandbox._probe.cache_info().misses
    for _ in range(3):
        sandbox.self_test()
    assert sandbox._probe.cache_info().misses == tried  # once per process, then remembered


def simulate(program: bytes, number: int, *arguments: int, arch: int = 0xC000003E) -> int:
    """What the filter returns for a system call: the few operations of classic BPF that it uses, executed here."""
    data = number.to_bytes(4, "little") + arch.to_bytes(4, "little") + bytes(8)
    data += b"".join(x.to_bytes(8, "little") for x in [*arguments, 0, 0, 0, 0, 0, 0][:6])
    at, accumulator = 0, 0
    while True:
        code, yes, no = int.from_bytes(program[at : at + 2], "little"), program[at + 2], program[at + 3]
        k = int.from_bytes(program[at + 4 : at + 8], "little")
        at += 8
        if code == 0x20:  # load a word
            accumulator = int.from_bytes(data[k : k + 4], "little")
        elif code == 0x15:  # jump if equal
            at += 8 * (yes if accumulator == k else no)
        elif code == 0x45:  # jump if any bit is set
            at += 8 * (yes if accumulator & k else no)
        else:
            assert code == 0x06  # return
            return k


def test_the_filter_lets_nothing_through_that_it_does_not_name():
    program = sandbox._seccomp_program()
    allow, eperm, enosys, kill = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
    # connect, sendmsg, fork, execve, kill, ptrace, prctl, tgkill, execveat, memfd_create, io_uring_setup, landlock
    assert {simulate(program, n) for n in (42, 46, 57, 59, 62, 101, 157, 234, 322, 319, 425, 446)} == {eperm}
    assert {simulate(program, n) for n in (0, 1, 9, 231, 257)} == {allow}
    allowed = {n for n in range(1024) if simulate(program, n) == allow}
    assert allowed == {int(entry.split()[0]) for entry in sandbox._ALLOWED.split(",")} | {72, 302}
    assert {simulate(program, 0x40000000 + n) for n in range(600)} == {eperm}  # x32
    assert simulate(program, 0, arch=0x40000003) == kill  # 32-bit
    assert simulate(program, 435) == enosys  # clone3
    assert simulate(program, 56, 0x3D0F00) == allow  # clone, as pthread_create calls it
    assert simulate(program, 56, 0x1200011) == eperm  # clone, as fork calls it
    assert simulate(program, 16, 1, 0x5401) == allow and simulate(program, 16, 1, 0x5412) == eperm  # TCGETS, TIOCSTI
    assert simulate(program, 72, 0, 1) == allow and simulate(program, 72, 0, 8) == eperm  # F_GETFD, F_SETOWN
    assert simulate(program, 302, 0, 9, 0, 1) == allow  # own limits, read
    assert simulate(program, 302, 0, 9, 1 << 40, 0) == simulate(program, 302, 77, 9, 0, 1) == eperm


# === the folder ===


def test_the_folder_imports_nothing_but_itself_and_the_standard_library():
    """So that it can be read, moved and used on its own; imports inside functions and of the boot text count, too."""
    files = sorted((ROOT / "rewards" / "sandbox").glob("*.py"))
    assert [path.name for path in files] == "__init__.py candidate.py examiner.py judge.py server.py wire.py".split()
    for path in files:
        text = path.read_text()
        imported = set(re.findall(r"^\s*from ([\w.]+) import|^\s*import ([\w.]+)", text, re.MULTILINE))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported |= {(name.name, "") for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                imported.add((node.module, ""))
        for name in {"".join(pair) for pair in imported}:
            allowed = name.split(".")[0] in sys.stdlib_module_names or name.startswith("rewards.sandbox")
            assert allowed, f"{path.name} imports {name}"


# === the wire format ===


def no_objects(*values):
    raise LookupError(values)


def encode(value):
    return wire.encode(value, no_objects, 10_000, 100)


def decode(message):
    return wire.decode(message, no_objects, 100)


@pytest.mark.parametrize(
    "value, message",
    [
        (None, b"N\0\0\0\0"),
        (True, b"B\0\0\0\1\1"),
        (-1, b"i\0\0\0\1\xff"),
        (128, b"i\0\0\0\2\0\x80"),
        (1.5, b"f\0\0\0\x08\x3f\xf8\0\0\0\0\0\0"),
        ("\u20ac", b"u\0\0\0\3\xe2\x82\xac"),
        ((1, []), b"t\0\0\0\2i\0\0\0\1\1l\0\0\0\0"),
        ({"a": b"b"}, b"d\0\0\0\1u\0\0\0\1ab\0\0\0\1b"),
        (int, b"y\0\0\0\3int"),
    ],
)
def test_wire_format(value, message):
    assert encode(value) == message
    assert decode(message) == value and type(decode(message)) is type(value)


def test_round_trip_of_odd_values():
    for value in (
        0,
        -128,
        2**64,
        -(2**63),
        1e-320,
        -math.inf,
        1 - 2j,
        "\ud800\0",
        {(), frozenset({1})},
        range(5, 0, -2),
    ):
        assert decode(encode(value)) == value
    assert math.isnan(decode(encode(math.nan)))
    assert math.copysign(1, decode(encode(-0.0))) == -1


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"N",
        b"N\0\0\0\0N\0\0\0\0",  # two values
        b"N\0\0\0\1x",
        b"B\0\0\0\1\2",
        b"f\0\0\0\4\0\0\0\0",
        b"u\0\0\0\1\xff",
        b"u\0\0\0\5abc",
        b"i\xff\xff\xff\xff1",
        b"l\xff\xff\xff\xff" + b"N\0\0\0\0" * 200,  # too many
        b"l\0\0\0\1" * 210 + b"N\0\0\0\0",  # too deep
        b"s\0\0\0\1l\0\0\0\0",  # a list in a set
        b"d\0\0\0\1l\0\0\0\0N\0\0\0\0",
        b"r\0\0\0\3" + b"u\0\0\0\1a" * 3,
        b"y\0\0\0\4eval",
        b"h\0\0\0\1i\0\0\0\1\1",  # an unknown object
        b"I\0\0\0\7\0\0\0\0\0\0\0",
        b"I\0\0\x10\0" + b"\0" * 4096,  # too many
        b"o\0\0\0\1u\0\0\0\4eval",
        b"o\0\0\0\3u\0\0\0\x08Fractioni\0\0\0\1\1i\0\0\0\1\0",  # 1/0
        b"o\0\0\0\2u\0\0\0\x09bytearrayi\0\0\0\1\1",
        b"?\0\0\0\0",
    ],
)
def test_malformed_messages(message):
    with pytest.raises(ValueError):
        decode(message)


def test_random_messages_give_plain_data_or_a_value_error():
    rng = random.Random(0)
    good = encode([None, True, 7, 1.5, "text", b"b", (1, 2), {1: {2}}, range(3), int, 1j])
    decoded = 0
    for _ in range(5_000):
        message = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            message[rng.randrange(len(message))] = rng.choice(b"NBifcubltszdryh\0\1\2\3\4\x08\xff")
        try:
            value = decode(bytes(message))
        except ValueError:
            continue
        decoded += 1
        assert type(value) in (list, tuple, set, frozenset, range)
    assert decoded > 250


@pytest.mark.parametrize("value", [[0] * 101, "x" * 10_000, functools.reduce(lambda x, _: [x], range(210), 1)])
def test_what_is_too_long_or_too_deep_is_not_sent(value):
    with pytest.raises(ValueError, match="too long to cross|nested deeper than 200"):
        encode(value)


@pytest.mark.parametrize("kind", [int, str, list, dict, tuple, float])
def test_a_subclass_is_not_data(kind):
    class Sub(kind):
        pass

    assert wire.encode(Sub(), lambda value: (5,), 100, 100) == b"h\0\0\0\1i\0\0\0\1\5"

"""Judge the programs of snippets.txt as some user, and say what became of each and what was left behind.

    python tests/rewards/hostile/run.py REPOSITORY [--uid 65534] [--without seccomp|landlock] [--only NAME ...]

A script of its own, on the standard library alone, so that any interpreter and user can run it. Prints JSON:
{"verdicts": {name: verdict and seconds}, "left": [what should not be there], "layers": what self_test() returned}.
"""

import argparse
import dataclasses
import functools
import json
import os
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from answers import cases  # noqa: E402

SECRET = "canary-4711"
ADD = ["assert f(1, 2) == 3", "assert f(0, 0) == 0", "assert f(-5, 2) == -3"]
TIMEOUT_S = 0.3


@dataclasses.dataclass
class Case:
    expected: list[str]
    code: str
    tests: list[str]
    setup: str = ""
    passed: int | None = None
    stopped_by: str = ""


def read_cases() -> dict[str, Case]:
    """All cases: those of snippets.txt, and a few that are made here because no editor could show them."""
    right = "def f(a, b): return a + b\n"
    cases = {
        "NUL byte": Case(["error"], right + "\0", ADD),
        "lone surrogate": Case(["error"], "x = '\ud800'\n" + right, ADD),
        "100,000 minus signs": Case(["error", "crash"], right + "x = " + "-" * 100_000 + "1", ADD),
        "100,000 brackets": Case(["error", "crash"], right + "x = " + "[" * 100_000 + "]" * 100_000, ADD),
        "code of 1 MB": Case(["error"], right + "#" * 2**20, ADD),
        "code of 200 kB": Case(["pass"], right + "#" * 200_000, ADD),
    }
    text = (Path(__file__).parent / "snippets.txt").read_text()
    for part in text.split("\n==== ")[2:]:  # before: the explanation, and its own example
        head, _, body = part.partition("\n")
        body = body.split("\n######## ")[0]
        body, _, setup = body.partition("---- setup\n")
        code, _, tests = body.partition("---- tests\n")
        name, expected, *options = head.split(" | ")
        case = Case(expected.split("|"), code, tests.strip().splitlines() or ADD, setup)
        for option in options:
            key, _, value = option.partition("=")
            setattr(case, key, int(value) if key == "passed" else value)
        assert name not in cases, name
        cases[name] = case
    return cases


def children() -> list[str]:
    """The state of every process below this one, except the server that the sandbox forks from."""
    processes = {}
    for stat in (Path("/proc", name, "stat") for name in os.listdir("/proc") if name.isdigit()):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        processes[int(stat.parent.name)] = (int(rest.split()[1]), name + ") " + rest[:20])
    below = {os.getpid()}
    while more := {pid for pid, (parent, _) in processes.items() if parent in below} - below:
        below |= more
    return [processes[pid][1] for pid in below - {os.getpid(), sandbox_server()}]


def sandbox_server() -> int:
    from rewards.sandbox import judge as sandbox

    return sandbox._server(os.getpid()).process.pid


def judge_answers(sandbox) -> dict[str, dict]:
    """The verdicts on the programs of answers.py; two at a time, since the work is in the sandboxes."""
    programs = cases()
    sandbox._program.cache_clear()

    def judge(program: tuple) -> dict:
        return dataclasses.asdict(sandbox.run_tests(*program[:2], timeout_s=0.2))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(programs, pool.map(judge, programs.values()), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("repository")
    parser.add_argument("--uid", type=int)
    parser.add_argument("--without", choices=["seccomp", "landlock"])
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    sys.path.insert(0, args.repository)
    from rewards.sandbox import judge as sandbox

    if args.uid is not None:
        os.setgroups([])
        os.setresgid(args.uid, args.uid, args.uid)
        os.setresuid(args.uid, args.uid, args.uid)
    os.environ["WANDB_API_KEY"] = SECRET
    prctl = sandbox._libc().prctl
    assert prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    cases = read_cases()
    if args.without is not None:
        os.environ[sandbox.UNSAFE] = "1"
        nothing = {"seccomp": {"program": b""}, "landlock": {"ruleset": -1}}[args.without]
        without = dataclasses.replace(sandbox._layers(), users=None, **nothing)
        sandbox._layers = functools.cache(lambda: without)
        cases = {name: case for name, case in cases.items() if case.stopped_by == args.without}
    if args.only:
        cases = {name: cases[name] for name in args.only}

    verdicts, left, answers = {}, [], {}
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(folder, 0o777)
        secret = Path(folder) / "secret"
        secret.write_text(SECRET)
        secret.chmod(0o644)
        layers = sandbox.self_test()
        port = str(server.getsockname()[1])
        fds = sorted(os.listdir("/proc/self/fd"))
        for name, case in cases.items():
            code = case.code.replace("{secret}", str(secret)).replace("{folder}", folder).replace("{port}", port)
            start = time.monotonic()
            verdict = sandbox.run_tests(code, case.tests, setup=case.setup, timeout_s=TIMEOUT_S)
            verdicts[name] = dataclasses.asdict(verdict) | {"seconds": time.monotonic() - start}
            now = sorted(os.listdir("/proc/self/fd"))
            left += [f"{name}: process {child}" for child in children()]
            left += [f"{name}: file descriptors {fds} -> {now}"] if now != fds else []
        if not args.only and args.without is None:
            answers = judge_answers(sandbox)
            left += [f"after the answers: process {child}" for child in children()]
        left += [f"file {file}" for file in os.listdir(folder) if file != "secret"]
        left += [] if secret.read_text() == SECRET else ["the secret was changed"]
        left += [f"mode {secret.stat().st_mode:o}"] if secret.stat().st_mode & 0o777 != 0o644 else []
    status = Path("/proc/self/status").read_text()  # getrusage also knows what the process was before exec
    peak = int(status.partition("VmHWM:")[2].split()[0]) >> 10
    print(json.dumps({"verdicts": verdicts, "answers": answers, "left": left, "layers": layers, "peak MiB": peak}))


if __name__ == "__main__":
    main()

"""Speed and leaks of the sandbox: evaluations per second of MBPP's reference solutions, and what many of them leave.

    python benchmarks/sandbox.py --source <mbpp.jsonl>

Quiet the machine first. Other processes change the CPU time per evaluation less than the evaluations per second.
"""

import json
import multiprocessing
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
from rewards.sandbox import run_tests, self_test  # noqa: E402

ENDS = {  # what candidates also do, in turn with the reference solutions
    "import os\nos._exit(0)": "crash",
    "def f(": "error",
    "x = bytearray(1 << 40)": "memory",
    "import ctypes\nctypes.string_at(0)": "crash",
}


@dataclass(frozen=True)
class Args:
    source: Path
    """This jsonl file has MBPP's 974 problems."""
    workers: int = 2
    """This many processes judge, one per core."""
    timed: int = 2000
    """The time of this many evaluations of reference solutions is taken."""
    evaluations: int = 10_000
    """The leak check makes this many evaluations. In one of five the candidate ends badly."""


def state() -> dict[str, int]:
    """Open file descriptors, threads, child processes and resident MiB of this process."""
    parents = [path.read_text().rpartition(")")[2].split()[1] for path in Path("/proc").glob("[0-9]*/stat")]
    return {
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": parents.count(str(os.getpid())),
        "MiB": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20,
    }


def judge(problems: list[dict], indices: range, bad: bool, barrier, results) -> None:
    """Evaluate problems by index. Puts (seconds, CPU seconds, state before, state after)."""
    self_test()
    run_tests("def f(): return 1", ["assert f() == 1"])
    ends = list(ENDS.items())
    before = state()
    barrier.wait()
    start, cpu = time.monotonic(), time.process_time() + children_cpu()
    for i in indices:
        problem = problems[i % len(problems)]
        code, expected = ends[i // 5 % len(ends)] if bad and i % 5 == 0 else (problem["code"], "pass")
        verdict = run_tests(code, problem["test_list"], setup=problem["test_setup_code"], timeout_s=5)
        assert verdict.status == expected, (problem["task_id"], verdict)
    results.put((time.monotonic() - start, time.process_time() + children_cpu() - cpu, before, state()))


def children_cpu() -> float:
    """CPU seconds of this process's children and theirs: those that have ended, and the server that forks them."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = [Path(f"/proc/{pid}/stat") for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    ticks = sum(int(tick) for path in alive for tick in path.read_text().rpartition(")")[2].split()[11:15])
    return usage.ru_utime + usage.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def run(args: Args, problems: list[dict], count: int, bad: bool) -> list[tuple]:
    """The results of all workers, each with its share of `count` evaluations."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(args.workers), context.Queue()
    processes = [
        context.Process(target=judge, args=(problems, range(i, count, args.workers), bad, barrier, results))
        for i in range(args.workers)
    ]
    for process in processes:
        process.start()
    collected = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return collected


def main(args: Args) -> None:
    problems = [json.loads(line) for line in args.source.read_text().splitlines()]
    print(f"layers {self_test()}; load {os.getloadavg()[0]:.1f} before, {os.cpu_count()} cores")
    timed = run(args, problems, args.timed, bad=False)
    seconds, cpu = max(x[0] for x in timed), sum(x[1] for x in timed)
    print(
        f"{args.timed} reference solutions, {args.workers} workers: {args.timed / seconds:.1f} evaluations per second, "
        f"{1000 * cpu / args.timed:.1f} ms of CPU time each"
    )
    for _, _, before, after in run(args, problems, args.evaluations, bad=True):
        print(f"a worker's share of {args.evaluations} evaluations: before {before}, after {after}")
        flat = [name for name in before if name != "MiB" and before[name] != after[name]]
        assert not flat, f"leaks: {flat}"


if __name__ == "__main__":
    main(tyro.cli(Args))

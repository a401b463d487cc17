"""Memory, descriptors and threads of a run of train_async.py and its samplers while it trains: a line every two seconds.

    python watch.py OUT.jsonl python train_async.py ...
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def look(pid: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    parts = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    private = sum(int(parts[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
    found = {"rss_mb": int(status["VmRSS"].split()[0]) // 1024, "private_mb": private // 1024}
    return found | {"threads": int(status["Threads"]), "files": len(os.listdir(f"/proc/{pid}/fd"))}


def children(pid: int) -> list[int]:
    return [int(x) for task in Path(f"/proc/{pid}/task").iterdir() for x in (task / "children").read_text().split()]


def is_sampler(pid: int) -> bool:
    return "rl.sampler" in Path(f"/proc/{pid}/cmdline").read_text()


out, command = Path(sys.argv[1]), sys.argv[2:]
metrics = Path(command[command.index("--default-local-dir") + 1], "metrics.jsonl")
run = subprocess.Popen(command)
with out.open("w") as file:
    while run.poll() is None:
        step = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        try:
            samplers = sorted(pid for pid in children(run.pid) if is_sampler(pid))
            line = {"lines": step, "trainer": look(run.pid), "samplers": [look(pid) for pid in samplers]}
            print(json.dumps(line), file=file, flush=True)
        except (FileNotFoundError, ProcessLookupError, KeyError):
            pass  # a process has ended
        time.sleep(2)
sys.exit(run.returncode)

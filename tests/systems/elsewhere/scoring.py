"""Scores responses with functions that hang, die and leave processes behind; prints what came of it as JSON.

With the argument `wait` it prints the number of a process that a function has left behind, and waits to be killed.
"""

import json
import os
import sys
import time
from pathlib import Path

from rl.scoring.flags import Scoring
from rl.scoring.pool import Scorer
from rl.scoring.trial import _sample

FUNCTIONS = """
import os, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if "spin" in solution_str:
        while True:
            pass
    if "die" in solution_str:
        os._exit(3)
    if "leave" in solution_str:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return float(child.pid)
    if "sleep" in solution_str:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(ground_truth, "w").write(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    return 1.0
"""


class Letters:
    """A tokenizer whose tokens are characters."""

    is_fast = False

    def __call__(self, text, **_):
        return {"input_ids": list(map(ord, text))}

    def batch_decode(self, responses, **_):
        return ["".join(map(chr, ids)) for ids in responses]


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "functions.py").write_text(FUNCTIONS)
    scorer = Scorer((str(folder / "functions.py"),), Letters(), Scoring(reward_workers=2, reward_timeout=1.0))
    truth = {"ground_truth": str(folder / "pids")}
    row = {"data_source": "x", "reward_model": truth, "extra_info": {}, "row_index": 0}
    if sys.argv[2:] == ["wait"]:
        scorer.submit(row, [_sample("sleep", Letters(), None)])
        time.sleep(600)
    samples = [_sample(text, Letters(), None) for text in ("fine", "spin", "die", "leave", "fine")]
    for sample in samples:
        scorer.submit(row, [sample])
    scores = [sample.score for sample in scorer.collect(samples)]
    guards = [worker.process.pid for worker in scorer.idle]
    scorer.close()
    print(json.dumps({"scores": [[s.value, s.status] for s in scores], "guards": guards, "pid": os.getpid()}))


if __name__ == "__main__":
    main()

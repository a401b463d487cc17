"""Print what runs.json has of each run: accuracy of every evaluation, and a few metrics of every step with four digits."""

import json
import sys
from pathlib import Path

KEYS = {
    "score": "critic/score/mean",
    "right": "reward_model/dpo_acc",
    "raw": "reward_model/raw_reward",
    "process_std": "parts/process_std",
    "outcome_std": "parts/outcome_std",
    "tokens_equal": "parts/tokens_equal",
    "squares_equal": "parts/squares_equal",
}
runs = []
for path in sorted(Path(sys.argv[1]).glob("*/seed_*/metrics.jsonl")):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    run = {"name": path.parts[-3], "seed": int(path.parts[-2].removeprefix("seed_"))}
    run["accuracy"] = [line["val/accuracy"] for line in lines if "val/accuracy" in line]
    for name, key in KEYS.items():
        if values := [float(f"{line[key]:.4g}") for line in lines if key in line]:
            run[name] = values
    runs.append(run)
print('{"runs": [\n' + ",\n".join(json.dumps(run) for run in runs) + "\n]}")

"""Send what the files of a run hold to a tracker:

    python -m extras.trackers wandb runs/glassrl/grpo my-project my-experiment
"""

import itertools
import json
import pathlib
import sys
from typing import Any

from extras.trackers import connect, hand_on


def send(name: str, run_dir: str, project: str, experiment: str) -> None:
    """Send what the files of a run hold to a tracker, step by step: of each first the metrics."""
    folder, groups = pathlib.Path(run_dir), []
    sink = connect(name, run_dir, project, experiment, json.loads((folder / "config.json").read_text()))
    for file in (folder / "metrics.jsonl", folder / "generations.jsonl"):
        records = map(_parsed, file.read_text().splitlines() if file.exists() else ())
        by_kind = itertools.groupby(filter(None, records), key=lambda x: (x["step"], x.get("kind", x.get("time"))))
        groups += [list(group) for _, group in by_kind]
    for group in sorted(groups, key=lambda group: group[0]["step"]):
        hand_on(sink, group)
    sink.close()


def _parsed(line: str) -> dict[str, Any] | None:
    """A record; None if its line is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


if __name__ == "__main__":
    send(*sys.argv[1:])

"""Send what the files of a run hold to a tracker.

    python -m extras.trackers wandb runs/glassrl/grpo my-project my-experiment

The words are the tracker, the folder of the run, the project, and the name of the experiment.
"""

import itertools
import json
import pathlib
import sys

from extras.trackers import connect, hand_on, parse_record


def send(name: str, run_dir: str, project: str, experiment: str) -> None:
    """Send what the files of a run hold to a tracker, step by step: of each first the metrics."""
    folder, groups = pathlib.Path(run_dir), []
    sink = connect(name, run_dir, project, experiment, json.loads((folder / "config.json").read_text()))
    for file in (folder / "metrics.jsonl", folder / "generations.jsonl"):
        records = map(parse_record, file.read_text().splitlines() if file.exists() else ())
        by_kind = itertools.groupby(filter(None, records), key=lambda x: (x["step"], x.get("kind", x.get("time"))))
        groups += [list(group) for _, group in by_kind]
    for group in sorted(groups, key=lambda group: group[0]["step"]):
        hand_on([sink], group)
    sink.close()


if __name__ == "__main__":
    send(*sys.argv[1:])

"""Prepare HumanEval (164 Python functions to complete, Chen et al. 2021), or a file of that form, for evaluation.

    python data/human_eval.py --output-dir data/human_eval        # from the Hugging Face hub
    python data/human_eval.py --source <HumanEval.jsonl>          # from disk, no network; .jsonl.gz too

Writes test.parquet in verl's RL schema. A row's fields are task_id, prompt, entry_point, canonical_solution and test,
which defines `check(candidate)`. Class-level sets fit too: prompt is then the skeleton of a class, entry_point its
name, and test has unittest.TestCase classes. own_eq and in_place, if a row has them, go into the ground truth.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import tyro

sys.path.append(str(Path(__file__).parent.parent))  # run as a script, only this folder is on the path

from data import files  # noqa: E402

INSTRUCTION = (
    "Write it in Python, with the standard library only. Put the whole code into one block that starts with ```python "
    "and ends with ```."
)
FIELDS = {"task_id", "prompt", "entry_point", "canonical_solution", "test"}


@dataclasses.dataclass
class Args:
    source: str = "openai/openai_humaneval"
    """This is a jsonl file, or a data set on the Hugging Face hub."""
    output_dir: Path = Path("data/human_eval")
    """The files are written to this folder."""


def read_rows(source: str) -> list[dict[str, Any]]:
    """All rows of a jsonl file, or of a data set on the hub.

    Raises:
        FileNotFoundError: neither a file nor of the form owner/name, or the hub's data set has no such files.
    """
    path = files.locate(source, "*/*.parquet")
    found = [path] if path.is_file() else sorted(path.glob("*/test-*.parquet"))
    if not found:
        raise FileNotFoundError(f"--source {source}: the data set has no */test-*.parquet")
    return files.read(*found)


def to_row(row: dict[str, Any], index: int) -> dict[str, Any]:
    """One source row in verl's RL schema.

    Raises:
        ValueError: fields are missing, or the tests do not define what the reward needs.
    """
    if not FIELDS <= row.keys():
        raise ValueError(f"row {index}: has {sorted(row)}, not {sorted(FIELDS)}; fix the source")
    if not re.search(r"^def check\(|TestCase", row["test"], re.MULTILINE):
        raise ValueError(f"row {index}, {row['task_id']}: test has no check(candidate) and no TestCase; fix the source")
    prompt = row["prompt"].strip("\n")
    options = {name: True for name in ("own_eq", "in_place") if row.get(name)}
    truth = {name: row[name] for name in ("test", "entry_point", "prompt")} | options
    solution = row["canonical_solution"]
    whole = re.search(rf"^(async def|def|class) {re.escape(row['entry_point'])}\b", solution, re.MULTILINE)
    answer = (solution if whole else f"{row['prompt'].rstrip()}\n{solution}").strip("\n")
    return {
        "data_source": "openai/openai_humaneval",
        "prompt": [{"role": "user", "content": f"Complete this code:\n\n```python\n{prompt}\n```\n\n{INSTRUCTION}"}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
        "extra_info": {
            "split": "test",
            "index": index,
            "task_id": str(row["task_id"]),
            "answer": f"```python\n{answer}\n```",
        },
    }


def main(args: Args) -> int:
    """Write test.parquet. Returns the number of its rows."""
    rows = [to_row(row, i) for i, row in enumerate(read_rows(args.source))]
    if not rows:
        raise ValueError(f"--source {args.source}: has no rows")
    return files.write(args.output_dir, {"test": rows})["test"]


if __name__ == "__main__":
    main(tyro.cli(Args))

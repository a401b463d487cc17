"""Prepare DAPO-Math-17k (Yu et al. 2025) for training, and AIME 2024 for evaluation.

    python data/dapo_math.py --output-dir data/dapo_math                          # both from the Hugging Face hub
    python data/dapo_math.py --source train.parquet --aime-source aime.parquet    # from disk, no network

The published files are in verl's RL schema already, but repeat their problems: 1,791,700 rows hold about 17 thousand
problems, and 960 rows hold 30. Here each problem stands once, at its first place. Problems with two different ground
truths are left out. The prompts ask for a last line `Answer: ...`, which rewards/math_dapo.py grades.

Writes train.parquet (data_source math_dapo) and aime_2024.parquet (data_source aime_2024).
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import tyro

sys.path.append(str(Path(__file__).parent.parent))  # run as a script, only this folder is on the path

from data import files  # noqa: E402


@dataclasses.dataclass
class Args:
    source: str = "BytedTsinghua-SIA/DAPO-Math-17k"
    """This is a parquet or jsonl file in verl's schema, a folder of parquet files, or a data set on the Hugging Face
    hub."""
    aime_source: str = "BytedTsinghua-SIA/AIME-2024"
    """This is the same for the evaluation problems."""
    output_dir: Path = Path("data/dapo_math")
    """The files are written to this folder."""


def locate(source: str, flag: str) -> list[Path]:
    """The files of `source`, downloaded if it is a data set on the hub. `flag` names it in the error.

    Raises:
        FileNotFoundError: neither on disk nor of the form owner/name, or without parquet files.
    """
    path = files.locate(source, "*.parquet", flag=flag)
    if path.is_file():
        return [path]
    found = sorted(path.rglob("*.parquet"))
    if not found:
        raise FileNotFoundError(f"{flag} {source}: no parquet files in {path}")
    return found


def read_rows(paths: list[Path]) -> Iterator[dict[str, Any]]:
    """Rows of parquet or jsonl files, one after the other: 1.8 million at once would take many GB."""
    for path in paths:
        if path.suffix == ".jsonl":
            yield from files.read(path)
        else:
            batches = pq.ParquetFile(path, page_checksum_verification=True).iter_batches(batch_size=10_000)
            yield from (row for batch in batches for row in batch.to_pylist())


def to_row(source_row: dict[str, Any], data_source: str, split: str, where: str) -> dict:
    """One row in verl's RL schema. `where` names it in the error. extra_info.id is the source's extra_info.index.

    Raises:
        ValueError: prompt or ground truth is missing.
    """
    prompt = source_row.get("prompt")
    truth = (source_row.get("reward_model") or {}).get("ground_truth")
    if not isinstance(prompt, list) or not prompt or not isinstance(truth, str) or not truth.strip():
        raise ValueError(f"{where}: prompt must be messages and reward_model.ground_truth a text; check the source")
    messages = [{"role": message["role"], "content": message["content"]} for message in prompt]
    identity = str((source_row.get("extra_info") or {}).get("index", ""))
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth.strip()},
        "extra_info": {"split": split, "id": identity},
    }


def distinct(rows: Iterator[dict[str, Any]], data_source: str, split: str, flag: str) -> list[dict]:
    """Each prompt once, in the order of first appearance, without prompts that have two ground truths. Prints counts.

    Raises:
        ValueError: a row is unfit.
    """
    first: dict[str, dict] = {}
    contradicted = set()
    count = 0
    for count, source_row in enumerate(rows, 1):
        row = to_row(source_row, data_source, split, f"{flag} row {count - 1}")
        key = json.dumps(row["prompt"])
        known = first.setdefault(key, row)
        if known["reward_model"] != row["reward_model"]:
            contradicted.add(key)
    kept = [row for key, row in first.items() if key not in contradicted]
    print(f"{flag}: {count} rows, {len(first)} problems, {len(contradicted)} of them with two ground truths left out")
    return [{**row, "extra_info": {**row["extra_info"], "index": i}} for i, row in enumerate(kept)]


def main(args: Args) -> dict[str, int]:
    """Write both files. Returns the number of rows of each.

    Raises:
        FileNotFoundError: there is no such source.
        ValueError: a row is unfit.
    """
    sources = {
        "train": ("--source", args.source, "math_dapo"),
        "aime_2024": ("--aime-source", args.aime_source, "aime_2024"),
    }
    tables = {
        name: distinct(read_rows(locate(source, flag)), data_source, name, flag)
        for name, (flag, source, data_source) in sources.items()
    }
    return files.write(args.output_dir, tables)


if __name__ == "__main__":
    main(tyro.cli(Args))

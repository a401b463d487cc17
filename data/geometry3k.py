r"""Prepare Geometry3K (plane geometry with drawings, Lu et al. 2021) for training a model that sees images.

    python data/geometry3k.py --output-dir data/geometry3k          # from the Hugging Face hub
    python data/geometry3k.py --source <folder>                     # from disk, no network

Writes train.parquet (2,101 problems) and test.parquet (601) in verl's RL schema with its column `images`, by verl's
prompt. The ground truth is the answer. A box at the end is compared with it.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import tyro

sys.path.append(str(Path(__file__).parent.parent))  # run as a script, only this folder is on the path

from data import files  # noqa: E402

INSTRUCTION = (
    r"You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    r"The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \boxed{}."
)
SPLITS = ("train", "test")


@dataclasses.dataclass
class Args:
    source: str = "hiyouga/geometry3k"
    """This is a folder with data/train-*.parquet and data/test-*.parquet (columns images, problem, answer), or a data
    set on the Hugging Face hub."""
    output_dir: Path = Path("data/geometry3k")
    """The files are written to this folder."""


def read_split(source: Path, split: str) -> list[dict[str, Any]]:
    """Rows of a split.

    Raises:
        FileNotFoundError: the folder has no data/<split>-*.parquet.
    """
    shards = sorted(source.glob(f"data/{split}-*.parquet"))
    if not shards:
        raise FileNotFoundError(f"{source}: has no data/{split}-*.parquet; check --source")
    return files.read(*shards)


def to_row(source_row: dict[str, Any], split: str, index: int) -> dict:
    """One row in verl's RL schema: `<image>` in the problem is the place of its drawing.

    Raises:
        ValueError: a column is missing, or there are more or fewer images than places.
    """
    if not {"images", "problem", "answer"} <= source_row.keys():
        raise ValueError(
            f"{split} row {index}: has {sorted(source_row)}, not images, problem and answer; check --source"
        )
    problem, pictures = source_row["problem"], source_row["images"]
    if len(pictures) != problem.count("<image>"):
        raise ValueError(
            f"{split} row {index}: has {len(pictures)} image(s), and the problem {problem.count('<image>')} place(s) "
            "<image>; fix the source"
        )
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"{problem} {INSTRUCTION}"}],
        "images": pictures,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": source_row["answer"]},
        "extra_info": {"split": split, "index": index, "answer": source_row["answer"], "question": problem},
    }


def main(args: Args) -> dict[str, int]:
    """Write both files. Returns the number of rows of each."""
    source = files.locate(args.source, "data/*.parquet")
    tables = {split: [to_row(row, split, i) for i, row in enumerate(read_split(source, split))] for split in SPLITS}
    return files.write(args.output_dir, tables)


if __name__ == "__main__":
    main(tyro.cli(Args))

r"""Prepare MATH (competition mathematics, Hendrycks et al. 2021), or MATH-500, its usual evaluation set.

    python data/math_dataset.py                                    # from the hub: 7,498 training, 5,000 test problems
    python data/math_dataset.py --split 7000/500                   # the training problems only, 500 of them held out
    python data/math_dataset.py --split math500                    # 500 of the 5,000 test problems: math500.parquet
    python data/math_dataset.py --split math500 --source x.jsonl   # from disk, no network

Writes train.parquet and test.parquet, or math500.parquet, in verl's RL schema. The ground truth is the content of the
last box of the reference solution. Problems whose last box is empty are left out and counted: of MATH's 7,500 training
problems the two that were published as number_theory/7115 and 7117.

7000/500 is the split of GRAIL: the problems subject by subject (see SUBJECTS), and of each subject a share of the 500
is drawn with random.Random(42). Its test.parquet never touches the 5,000 test problems. The two problems without an
answer take part in the draw, so that the split is GRAIL's, and are then left out: 7,498 rows in both files together.
"""

import dataclasses
import random
import re
import sys
from pathlib import Path
from typing import Any, Literal

import tyro

sys.path.append(str(Path(__file__).parent.parent))  # run as a script, only this folder is on the path

from data import files  # noqa: E402
from rewards.math_reward import last_boxed  # noqa: E402

INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."
# As verl names them, whichever copy of MATH was read: the reward is found by this name.
DATA_SOURCES = {"math": "DigitalLearningGmbH/MATH-lighteval", "math500": "HuggingFaceH4/MATH-500"}
HUB_FILES = ("*.jsonl", "*.parquet")
HUB = {"math": "EleutherAI/hendrycks_math", "math500": "HuggingFaceH4/MATH-500"}  # this copy of MATH is by subject
SUBJECTS = "algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra precalculus".split()


@dataclasses.dataclass
class Args:
    split: Literal["7500/5000", "7000/500", "math500"] = "7500/5000"
    """These are the numbers of training / test problems, including the two that are left out. 7500/5000 is as
    published, and 7000/500 is GRAIL's cut of the training problems. math500 writes an evaluation file."""
    source: str | None = None
    """This is a folder with train.jsonl and test.jsonl or the hub's parquet files, a jsonl file (math500), or a data
    set on the Hugging Face hub. Its fields are problem, solution, level, and subject or type. The default is
    EleutherAI/hendrycks_math, and HuggingFaceH4/MATH-500 for math500."""
    output_dir: Path = Path("data/math")
    """The files are written to this folder."""


def read_split(source: Path, split: str) -> list[dict[str, Any]]:
    """Rows of a split: of the jsonl file itself, <split>.jsonl, data/<split>-*.parquet or <subject>/<split>-*.parquet.

    Raises:
        FileNotFoundError: the folder has none of these.
    """
    jsonl = source if source.is_file() else source / f"{split}.jsonl"
    if jsonl.exists():
        return files.read(jsonl)
    shards = sorted(source.glob(f"data/{split}-*.parquet"))
    shards = shards or [shard for name in SUBJECTS for shard in sorted(source.glob(f"{name}/{split}-*.parquet"))]
    if not shards:
        raise FileNotFoundError(
            f"{source}: has neither {split}.jsonl, data/{split}-*.parquet nor {SUBJECTS[0]}/{split}-*.parquet; "
            "check --source"
        )
    return files.read(*shards)


def to_row(source_row: dict[str, Any], data_source: str, split: str, index: int) -> dict | None:
    """One row in verl's RL schema, or None if the last box of the solution is empty. Level is 1 to 5, or 0 if unknown.

    Raises:
        ValueError: problem or solution is missing, or the solution has no box.
    """
    if not {"problem", "solution"} <= source_row.keys():
        raise ValueError(f"{split} row {index}: has {sorted(source_row)}, not problem and solution; check --source")
    problem, solution = source_row["problem"], source_row["solution"]
    answer = last_boxed(solution)
    if answer is None:
        raise ValueError(f"{split} row {index}: the solution has no \\boxed{{}} answer: {solution[-80:]!r}")
    if not answer:
        return None
    level = re.search("[0-9]+", str(source_row.get("level")))
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": f"{problem} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": split,
            "index": index,
            "subject": subject(source_row),
            "level": int(level[0]) if level else 0,
            "question": problem,
            "answer": solution,
        },
    }


def without_empty(rows: list[dict | None], split: str) -> list[dict]:
    """The rows that are not None: those with an answer. Says which were left out, if any."""
    empty = [i for i, row in enumerate(rows) if row is None]
    if empty:
        numbers = ", ".join(map(str, empty[:10]))
        print(f"{split}: {len(empty)} of {len(rows)} problems left out, since their last box is empty: rows {numbers}")
    return [row for row in rows if row is not None]


def subject(source_row: dict[str, Any]) -> str:
    """`Counting & Probability` -> counting_and_probability, or empty if the row has neither subject nor type."""
    name = source_row.get("subject") or source_row.get("type") or ""
    return name.lower().replace(" & ", "_and_").replace(" ", "_")


def hold_out(rows: list[dict[str, Any]], num: int, seed: int = 42) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """GRAIL's split: (training rows, `num` held-out rows), both subject by subject and otherwise in their order.

    Each subject gives its share of `num`, rounded. The last gives what is left. One generator shuffles the positions
    of every subject in turn, and the first ones are held out.

    Raises:
        ValueError: a row has no known subject.
    """
    unknown = [i for i, row in enumerate(rows) if subject(row) not in SUBJECTS]
    if unknown:
        name = subject(rows[unknown[0]])
        raise ValueError(f"train row {unknown[0]}: subject or type is {name!r}, not one of {', '.join(SUBJECTS)}")
    rng = random.Random(seed)
    kept, held_out = [], []
    for name in SUBJECTS:
        of_subject = [row for row in rows if subject(row) == name]
        quota = num - len(held_out) if name == SUBJECTS[-1] else round(num * len(of_subject) / len(rows))
        order = list(range(len(of_subject)))
        rng.shuffle(order)
        chosen = set(order[:quota])
        held_out += [row for i, row in enumerate(of_subject) if i in chosen]
        kept += [row for i, row in enumerate(of_subject) if i not in chosen]
    return kept, held_out


def main(args: Args) -> dict[str, int]:
    """Write the files. Returns the number of rows of each.

    Raises:
        ValueError: the source has other numbers of problems than the split says, or a row is unfit.
        FileNotFoundError: there is no such source.
    """
    name = "math500" if args.split == "math500" else "math"
    folder = files.locate(args.source or HUB[name], *HUB_FILES)
    if name == "math500":
        splits = {"math500": read_split(folder, "test")}
    elif args.split == "7500/5000":
        splits = {split: read_split(folder, split) for split in ("train", "test")}
    else:
        splits = dict(zip(("train", "test"), hold_out(read_split(folder, "train"), 500), strict=True))
    expected = [500] if name == "math500" else [int(n) for n in args.split.split("/")]
    found = [len(rows) for rows in splits.values()]
    if found != expected:
        raise ValueError(f"--split {args.split}: {folder} gives {found} problems, not {expected}; check --source")
    tables = {
        split: without_empty([to_row(row, DATA_SOURCES[name], split, i) for i, row in enumerate(rows)], split)
        for split, rows in splits.items()
    }
    return files.write(args.output_dir, tables)


if __name__ == "__main__":
    main(tyro.cli(Args))

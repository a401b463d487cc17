"""Prepare MBPP (basic Python problems, Austin et al. 2021) for training: 374 training and 90 or 500 held-out problems.

    python data/mbpp.py --output-dir data/mbpp                      # from the Hugging Face hub; evaluates on validation
    python data/mbpp.py --eval-split test --output-dir data/mbpp    # evaluates on the 500 test problems
    python data/mbpp.py --source <mbpp.jsonl>                       # from disk, no network

Writes train.parquet and test.parquet in verl's RL schema, by task id. The splits are the data set's own: train 601-974,
validation 511-600, test 11-510. 1-10 are few-shot prompts and not used. The ground truth is the asserts, as JSON text.
"""

import ast
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Literal

import tyro

sys.path.append(str(Path(__file__).parent.parent))  # run as a script, only this folder is on the path

from data import files  # noqa: E402

INSTRUCTION = (
    "Write it in Python, with the standard library only. Put the whole code into one block that starts with ```python "
    "and ends with ```."
)
SPLITS = {"train": range(601, 975), "validation": range(511, 601), "test": range(11, 511)}
FIELDS = {"task_id", "text", "code", "test_list", "test_setup_code"}


@dataclasses.dataclass
class Args:
    source: str = "google-research-datasets/mbpp"
    """This is a jsonl file (fields task_id, text, code, test_list, test_setup_code), or a data set on the Hugging Face
    hub."""
    output_dir: Path = Path("data/mbpp")
    """The files are written to this folder."""
    eval_split: Literal["validation", "test"] = "validation"
    """The file test.parquet holds the 90 validation problems or the 500 test problems. Keep test for the end."""
    show_tests: bool = False
    """Put the asserts into the prompt. The reward runs these asserts, so a policy can then hard-code their answers."""


def read_rows(source: str) -> list[dict[str, Any]]:
    """All rows of a jsonl file, or of the config full of a data set on the hub.

    Raises:
        FileNotFoundError: neither a file nor of the form owner/name, or the hub's data set has no such files.
    """
    path = files.locate(source, "full/*.parquet")
    found = [path] if path.is_file() else sorted(path.glob("full/*.parquet"))
    if not found:
        raise FileNotFoundError(f"--source {source}: the data set has no full/*.parquet")
    return files.read(*found)


def stub(code: str, tests: str) -> str:
    """What the tests call, without what it does: `def f(a, b):` and `pass`, and a class down to its constructor.

    Args:
        code: the reference solution.
        tests: the asserts and their setup, as one text.

    Raises:
        ValueError: the tests use no function or class of the code.
    """
    used = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    parts = []
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef) and node.name in used:
            node.body = [ast.Pass()]
            parts.append(ast.unparse(node))
        elif isinstance(node, ast.ClassDef) and node.name in used:
            node.body = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
            parts.append(ast.unparse(node))
    if not parts:
        raise ValueError(f"the tests use nothing that the code defines: {tests[:200]!r}")
    return "\n\n".join(parts)


def to_row(source_row: dict[str, Any], split: str, index: int, show_tests: bool = False) -> dict:
    """One row in verl's RL schema.

    The prompt names the function, by its first line in the reference solution. Nobody can guess that the tests call
    `is_woodall`. It does not show the tests unless `show_tests`.

    Raises:
        ValueError: a field is missing, or the tests and the code do not fit each other.
    """
    if not source_row.keys() >= FIELDS:
        raise ValueError(f"{split} row {index}: has {sorted(source_row)}, not {sorted(FIELDS)}; check --source")
    tests, setup = list(source_row["test_list"]), source_row["test_setup_code"]
    try:
        signature = stub(source_row["code"], "\n".join([setup, *tests]))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{split} row {index}, task {source_row['task_id']}: {error}; fix the source") from error
    shown = "It must satisfy these tests:\n\n```python\n" + "\n".join(tests) + "\n```\n\n" if show_tests else ""
    prompt = f"{source_row['text']} Complete this code:\n\n```python\n{signature}\n```\n\n{shown}{INSTRUCTION}"
    truth = {"test_list": tests, "test_setup_code": setup, "test_imports": list(source_row.get("test_imports") or [])}
    return {
        "data_source": "google-research-datasets/mbpp",
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
        "extra_info": {
            "split": split,
            "index": index,
            "task_id": source_row["task_id"],
            "question": source_row["text"],
            "answer": "```python\n" + source_row["code"].replace("\r\n", "\n") + "\n```",
        },
    }


def main(args: Args) -> dict[str, int]:
    """Write both files. Returns the number of rows of each."""
    by_id = {row.get("task_id"): row for row in read_rows(args.source)}
    tables = {}
    for name, split in {"train": "train", "test": args.eval_split}.items():
        missing = [task for task in SPLITS[split] if task not in by_id]
        if missing:
            raise ValueError(
                f"--source {args.source}: lacks {len(missing)} tasks of {split}, the first is {missing[0]}"
            )
        tables[name] = [to_row(by_id[task], split, i, args.show_tests) for i, task in enumerate(SPLITS[split])]
    return files.write(args.output_dir, tables)


if __name__ == "__main__":
    main(tyro.cli(Args))

"""Prepare GSM8K (grade-school maths, Cobbe et al. 2021) for training: 7,473 training and 1,319 test problems.

    python data/gsm8k.py --output-dir data/gsm8k                            # from the Hugging Face hub
    python data/gsm8k.py --source <folder with train.jsonl and test.jsonl>  # from disk, no network

Writes train.parquet and test.parquet in verl's RL schema, in the order of the source. The ground truth is the number
after `####` in the reference answer, without commas. sft.parquet has the training problems with their reference answers
for sft.py, without the `<<48/2=24>>` notes for a calculator.
"""

import dataclasses
import hashlib
import json
import re
from pathlib import Path

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import tyro

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


@dataclasses.dataclass
class Args:
    source: str = "openai/gsm8k"
    """folder with train.jsonl and test.jsonl (fields question, answer), or a data set on the Hugging Face hub"""
    output_dir: Path = Path("data/gsm8k")
    """folder to write to"""


def locate(source: str) -> Path:
    """The folder `source`, or the folder that the hub's data set `source` was downloaded to.

    Raises:
        FileNotFoundError: neither a folder nor of the form owner/name.
    """
    if Path(source).is_dir():
        return Path(source)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        raise FileNotFoundError(f"--source {source}: no such folder; give one, or a data set id such as openai/gsm8k")
    return Path(huggingface_hub.snapshot_download(source, repo_type="dataset", allow_patterns="main/*.parquet"))


def read_split(folder: Path, split: str) -> list[dict[str, str]]:
    """Rows {question, answer} of a split: <split>.jsonl, or the hub's layout main/<split>-*.parquet.

    Raises:
        FileNotFoundError: the folder has neither.
    """
    jsonl = folder / f"{split}.jsonl"
    if jsonl.exists():
        return [json.loads(line) for line in jsonl.read_bytes().splitlines() if line.strip()]
    shards = sorted(folder.glob(f"main/{split}-*.parquet"))
    if not shards:
        raise FileNotFoundError(f"{folder}: has neither {split}.jsonl nor main/{split}-*.parquet; check --source")
    return [
        row for shard in shards for row in pq.ParquetFile(shard, page_checksum_verification=True).read().to_pylist()
    ]


def final_number(answer: str, where: str) -> str:
    """The number after the last `####`, without commas; `where` names the row in the error."""
    match = re.search(r"####\s*(-?[0-9][0-9.,]*)\s*$", answer)
    if match is None:
        raise ValueError(f"{where}: the answer {answer[-80:]!r} does not end with #### and a number; mend the source")
    return match[1].replace(",", "")


def to_row(source_row: dict[str, str], split: str, index: int) -> dict:
    """One row in verl's RL schema.

    Raises:
        ValueError: question or answer is missing, or the answer has no final number.
    """
    if not {"question", "answer"} <= source_row.keys():
        raise ValueError(f"{split} row {index}: has {sorted(source_row)}, not question and answer; check --source")
    question, answer = source_row["question"], source_row["answer"]
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_number(answer, f"{split} row {index}")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def sft_row(row: dict) -> dict:
    """The same problem as a demonstration."""
    return {"prompt": row["prompt"], "response": re.sub(r"<<[^<>]*>>", "", row["extra_info"]["answer"])}


def main(args: Args) -> dict[str, int]:
    """Write the files; returns the number of rows of each."""
    folder = locate(args.source)
    tables = {
        split: [to_row(row, split, i) for i, row in enumerate(read_split(folder, split))] for split in ("train", "test")
    }
    tables["sft"] = [sft_row(row) for row in tables["train"]]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        path = args.output_dir / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd", write_page_checksum=True)
        print(f"{path}: {len(rows)} rows, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return {name: len(rows) for name, rows in tables.items()}


if __name__ == "__main__":
    main(tyro.cli(Args))

"""Prepare GSM8K (grade-school maths, Cobbe et al. 2021) for training: 7,473 training and 1,319 test problems.

    python data/gsm8k.py --output-dir data/gsm8k                            # from the Hugging Face hub
    python data/gsm8k.py --source <folder with train.jsonl and test.jsonl>  # from disk, no network
    python data/gsm8k.py --calculator                                       # demonstrations call a calculator

Writes train.parquet and test.parquet in verl's RL schema, in the order of the source. The ground truth is the number
after `####` in the reference answer, without commas. sft.parquet has the training problems with their reference answers
for sft.py, without the `<<48/2=24>>` notes for a calculator. With --calculator it has conversations, in which each note
is a call of `calculate` of environments/calculator.py:

    She sold 48/2 = <tool_call>{"name": "calculate", "arguments": {"expression": "48/2"}}</tool_call>      the policy
    24                                                                                                     the tool
    24 clips in May. ...                                                                                   the policy

The prompts of train.parquet and test.parquet are the same in both cases, so the same rows serve runs with
`--tools environments/calculator.py` and without it. SmolLM2's own chat template knows no tools:
`data/smollm2.py --tools` writes one that does.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).parent.parent))  # run as a script, only this folder is on the path

from data import files  # noqa: E402
from environments.calculator import calculate  # noqa: E402

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
HUB_FILES = "main/*.parquet"
NOTE = r"<<[^<>]*>>"  # for a calculator, such as <<48/2=24>>


@dataclasses.dataclass
class Args:
    source: str = "openai/gsm8k"
    """This is a folder with train.jsonl and test.jsonl (fields question, answer), or a data set on the Hugging Face
    hub."""
    output_dir: Path = Path("data/gsm8k")
    """The files are written to this folder."""
    calculator: bool = False
    """The demonstrations of sft.parquet call a calculator where the reference answers have a note for one."""


def read_split(folder: Path, split: str) -> list[dict[str, str]]:
    """Rows {question, answer} of a split: <split>.jsonl, or the hub's layout main/<split>-*.parquet.

    Raises:
        FileNotFoundError: the folder has neither.
    """
    jsonl = folder / f"{split}.jsonl"
    if jsonl.exists():
        return files.read(jsonl)
    shards = sorted(folder.glob(f"main/{split}-*.parquet"))
    if not shards:
        raise FileNotFoundError(f"{folder}: has neither {split}.jsonl nor main/{split}-*.parquet; check --source")
    return files.read(*shards)


def final_number(answer: str, where: str) -> str:
    """The number after the last `####`, without commas. `where` names the row in the error."""
    match = re.search(r"####\s*(-?[0-9][0-9.,]*)\s*$", answer)
    if match is None:
        raise ValueError(f"{where}: the answer {answer[-80:]!r} does not end with #### and a number; fix the source")
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
    return {"prompt": row["prompt"], "response": re.sub(NOTE, "", row["extra_info"]["answer"])}


def calculator_rows(rows: list[dict]) -> list[dict]:
    """The same problems as demonstrations in which the notes are calls. Prints how many notes are, and are not."""
    from transformers.utils import get_json_schema  # only here, since the other files need none of what this imports

    found, refused = zip(*map(calculator_messages, rows), strict=True)
    calls = sum("tool_calls" in x for messages in found for x in messages)
    print(f"sft: {calls:,} notes are calls; the calculator refuses {sum(refused):,} others, which are left out")
    tools = json.dumps([get_json_schema(calculate)])
    return [{"messages": messages, "tools": tools} for messages in found]


def calculator_messages(row: dict) -> tuple[list[dict], int]:
    """The messages of a problem whose notes are calls, and how many notes are not.

    A note is `<<expression=result>>`. It is left out, as by `sft_row`, if the calculator refuses its expression. What
    the tool says is what the calculator makes of it, which may have more digits than the result of the note.
    """
    from data.calculator import call

    messages, said, refused = list(row["prompt"]), "", 0
    for piece in re.split(f"({NOTE})", row["extra_info"]["answer"]):
        if not piece.startswith("<<"):
            said += piece
            continue
        expression = piece[2:-2].rpartition("=")[0].strip()
        try:
            result = calculate(expression)
        except (ValueError, ArithmeticError):
            refused += 1
            continue
        messages.append(call(expression, "calculate") | {"content": said.strip()})
        messages.append({"role": "tool", "name": "calculate", "content": result})
        said = ""
    messages.append({"role": "assistant", "content": said.strip()})
    return messages, refused


def main(args: Args) -> dict[str, int]:
    """Write the files. Returns the number of rows of each."""
    folder = files.locate(args.source, HUB_FILES)
    tables = {
        split: [to_row(row, split, i) for i, row in enumerate(read_split(folder, split))] for split in ("train", "test")
    }
    tables["sft"] = calculator_rows(tables["train"]) if args.calculator else [sft_row(row) for row in tables["train"]]
    return files.write(args.output_dir, tables)


if __name__ == "__main__":
    main(tyro.cli(Args))

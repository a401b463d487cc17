"""Prepare preference pairs, a chosen and a rejected response to the same prompt, for training a reward model.

    python data/preferences.py --source HuggingFaceH4/ultrafeedback_binarized --output-dir data/ultrafeedback
    python data/preferences.py --source Anthropic/hh-rlhf --output-dir data/hh
    python data/preferences.py --source pairs.jsonl --test-fraction 0.05     # from disk, no network

Writes train.parquet and test.parquet with the columns prompt (messages, as in RL rows), chosen (str) and rejected
(str), in the order of the source. A source row has one of these forms:

    dialogues    chosen, rejected: `\\n\\nHuman: ...\\n\\nAssistant: ...` (Anthropic/hh-rlhf)
    messages     chosen, rejected: lists of {role, content} that end in the response; prompt may be there or not
                 (HuggingFaceH4/ultrafeedback_binarized)
    plain        prompt: str or messages; chosen, rejected: str

A pair that teaches nothing is dropped and counted: equal sides, an empty side, sides that answer different prompts, a
dialogue whose turns do not alternate. A row of another form is an error.
"""

import dataclasses
import gzip
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).parent.parent))  # run as a script, only this folder is on the path

from data import files  # noqa: E402

Messages = list[dict[str, str]]
# Where a split's files lie in a folder. The first pattern that any file matches is taken.
LAYOUTS = ["{split}_prefs-*.parquet", "{split}-*.parquet", "{split}.parquet", "{split}.jsonl", "{split}.jsonl.gz"]


@dataclasses.dataclass
class Args:
    source: str = "HuggingFaceH4/ultrafeedback_binarized"
    """This is a file (.parquet, .jsonl, .jsonl.gz), a folder with files train* and test*, or a data set on the Hugging
    Face hub."""
    output_dir: Path = Path("data/preferences")
    """The files are written to this folder."""
    test_fraction: float = 0.0
    """This share of the training prompts is held out as test.parquet. With 0, test.parquet has the source's own test
    files."""
    seed: int = 0
    """The seed decides which prompts are held out."""


def split_files(path: Path, split: str) -> list[Path]:
    """The files of a split in a folder and its subfolders, or [] if there are none. A file is its own train split."""
    if path.is_file():
        return [path] if split == "train" else []
    found = (sorted(path.rglob(layout.format(split=split))) for layout in LAYOUTS)
    return next((paths for paths in found if paths), [])


def read_file(path: Path) -> list[dict]:
    """The rows of a parquet, jsonl or gzipped jsonl file.

    Raises:
        ValueError: another kind of file, or a line that is not a JSON object.
    """
    if path.suffix == ".parquet":
        return files.read(path)
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"--source {path}: give a .parquet, .jsonl or .jsonl.gz file")
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = []
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"{path} line {number}: not a JSON object; fix the source")
            rows.append(row)
    return rows


def split_dialogue(text: str) -> tuple[str, str]:
    """Everything before the last `\\n\\nAssistant:`, and the last response without white space around it."""
    context, _, response = text.rpartition("\n\nAssistant:")
    return context, response.strip()


def dialogue_messages(context: str) -> Messages | None:
    """Messages of `\\n\\nHuman: a\\n\\nAssistant: b\\n\\nHuman: c`, or None if turns do not alternate or are empty."""
    start, *pieces = re.split(r"\n\n(Human|Assistant):", context)
    speakers, texts = pieces[::2], [text.strip() for text in pieces[1::2]]
    expected = ["Assistant" if i % 2 else "Human" for i in range(len(speakers))]
    if start.strip() or len(speakers) % 2 == 0 or speakers != expected or not all(texts):
        return None
    roles = ("user" if speaker == "Human" else "assistant" for speaker in speakers)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


def is_messages(value: object) -> bool:
    """Whether this is a list, not empty, of {role: str, content: str}."""
    return (
        isinstance(value, list)
        and value != []
        and all(isinstance(m, dict) and {type(m.get("role")), type(m.get("content"))} == {str} for m in value)
    )


def to_pair(row: dict, where: str) -> dict | str:
    """{prompt, chosen, rejected}, or why the pair is dropped.

    Raises:
        ValueError: the row has none of the three forms; `where` names it.
    """
    prompt, chosen, rejected = row.get("prompt"), row.get("chosen"), row.get("rejected")
    texts = isinstance(chosen, str) and isinstance(rejected, str)
    if is_messages(chosen) and is_messages(rejected):
        if {chosen[-1]["role"], rejected[-1]["role"]} != {"assistant"}:
            raise ValueError(f"{where}: chosen and rejected must end in a message of the assistant")
        same, context = chosen[:-1] == rejected[:-1], chosen[:-1]
        if is_messages(prompt):
            context = prompt + context
        elif isinstance(prompt, str) and not context:
            context = [{"role": "user", "content": prompt}]
        messages = [{"role": message["role"], "content": message["content"]} for message in context]
        sides = [chosen[-1]["content"], rejected[-1]["content"]]
    elif texts and prompt is None and "\n\nAssistant:" in chosen:
        contexts, sides = zip(split_dialogue(chosen), split_dialogue(rejected), strict=True)
        same, messages = contexts[0] == contexts[1], dialogue_messages(contexts[0])
    elif texts and (isinstance(prompt, str) or is_messages(prompt)):
        same, sides = True, [chosen, rejected]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    else:
        kinds = {name: type(row.get(name)).__name__ for name in ("prompt", "chosen", "rejected")}
        raise ValueError(f"{where}: {kinds} is none of the forms that data/preferences.py lists; check --source")
    if not same:
        return "sides that answer different prompts"
    if not messages or (prompt is None and texts and any("\n\nHuman:" in side for side in sides)):
        return "dialogues whose turns do not alternate"
    if not all(side.strip() for side in sides):
        return "an empty side"
    if sides[0] == sides[1]:
        return "equal sides"
    return {"prompt": messages, "chosen": sides[0], "rejected": sides[1]}


def hold_out(pairs: list[dict], fraction: float, seed: int) -> tuple[list[dict], list[dict]]:
    """(train, test): all pairs of one prompt go to the same side, `fraction` of the prompts to the second."""
    keys = [json.dumps(pair["prompt"]) for pair in pairs]
    prompts = list(dict.fromkeys(keys))
    held_out = set(random.Random(seed).sample(prompts, round(fraction * len(prompts))))
    train = [pair for pair, key in zip(pairs, keys, strict=True) if key not in held_out]
    return train, [pair for pair, key in zip(pairs, keys, strict=True) if key in held_out]


def main(args: Args) -> dict[str, int]:
    """Write both files. Returns the number of pairs of each split."""
    if not 0 <= args.test_fraction < 1:
        raise ValueError(f"--test-fraction {args.test_fraction}: give a share from 0 to below 1")
    patterns = [f"*{layout.format(split=split)}" for layout in LAYOUTS for split in ("train", "test")]
    path = files.locate(args.source, *patterns)
    tables: dict[str, list[dict]] = {}
    for split in ("train",) if args.test_fraction else ("train", "test"):
        found = split_files(path, split)
        if not found:
            raise FileNotFoundError(
                f"--source {path}: has no {split} file; give a folder with {split}.parquet or {split}.jsonl"
                + (", or --test-fraction 0.05" if split == "test" else "")
            )
        pairs = [to_pair(row, f"{file} row {i}") for file in found for i, row in enumerate(read_file(file))]
        for reason, count in Counter(pair for pair in pairs if isinstance(pair, str)).items():
            print(f"{split}: dropped {count} of {len(pairs)} pairs: {reason}")
        tables[split] = [pair for pair in pairs if not isinstance(pair, str)]
    if args.test_fraction:
        tables["train"], tables["test"] = hold_out(tables["train"], args.test_fraction, args.seed)
    for split, pairs in tables.items():
        if not pairs:
            raise ValueError(f"--source {path}: no {split} pair is left; check the rows and --test-fraction")
    return files.write(args.output_dir, tables)


if __name__ == "__main__":
    main(tyro.cli(Args))

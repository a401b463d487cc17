"""Prepare GSM8K, MATH or MBPP for GRAIL's rewards (rewards/grail.py): a system prompt asks for tagged answers.

    python data/grail.py --task gsm8k                        # 7,473 training and 1,319 test problems
    python data/grail.py --task math                         # 7,000 and 500 of MATH's training problems, less two
    python data/grail.py --task mbpp --source <mbpp.jsonl>   # 374 and 90: MBPP's training and validation problems

Writes train.parquet and test.parquet in verl's RL schema. The prompt is the system message SYSTEM_PROMPT and the bare
problem. MBPP's adds the function's first line, for its name could not be guessed. The ground truth is GSM8K's whole
reference answer, the content of the last box of MATH's solution (GRAIL: the first), and MBPP's tests as JSON text.
`extra_info["answer"]` is the reference as a tagged response. Two of MATH's 7,500 problems have an empty box. They take
part in the draw and are then left out.

GRAIL's documentation gives 374 MBPP problems for training. Its code takes 774, 400 of them from the test set. These are
the 374, so the 500 test problems stay unseen.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import tyro

sys.path.append(str(Path(__file__).parent.parent))  # run as a script, only this folder is on the path

from data import files, gsm8k, math_dataset, mbpp  # noqa: E402

SYSTEM_PROMPT = """You are given a problem. Think step by step.
Place your reasoning between <start_working_out> and </end_working_out>.
You may write and reason about code during your thinking.
After thinking, you MUST provide your final solution wrapped in <SOLUTION> and </SOLUTION> tags.
Any code outside <SOLUTION> tags will be ignored. Your answer will score 0 without these tags."""
# Plain ChatML, which GRAIL gives to every model. Qwen's own template renders these prompts the same.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclasses.dataclass
class Args:
    task: Literal["gsm8k", "math", "mbpp"]
    """These problems are written: GSM8K, MATH or MBPP."""
    source: str | None = None
    """This is as for data/gsm8k.py, data/math_dataset.py or data/mbpp.py. The default is on the Hugging Face hub."""
    output_dir: Path | None = None
    """The files are written to this folder. The default is data/grail_<task>."""
    chat_template_file: Path | None = None
    """The ChatML template is written to this file, too. For a model without a template, give <model
    folder>/chat_template.jinja."""


def gsm8k_rows(source: str) -> tuple[list[dict], list[dict]]:
    """(training, test) rows."""
    folder = files.locate(source, gsm8k.HUB_FILES)

    def row(source_row: dict[str, str], split: str, index: int) -> dict:
        gsm8k.to_row(source_row, split, index)  # raises if the row is unfit
        rationale, _, number = source_row["answer"].rpartition("####")
        response = tagged(rationale.strip(), number.strip())
        return to_row("gsm8k", source_row["question"], source_row["answer"], response, split, index)

    return make(row, gsm8k.read_split(folder, "train"), gsm8k.read_split(folder, "test"))


def math_rows(source: str) -> tuple[list[dict], list[dict]]:
    """(training, held-out) rows of MATH's training problems."""
    problems = math_dataset.read_split(files.locate(source, *math_dataset.HUB_FILES), "train")
    if len(problems) != 7500:
        raise ValueError(f"--source {source}: has {len(problems)} training problems, not 7500; the split would differ")

    def row(source_row: dict[str, Any], split: str, index: int) -> dict | None:
        plain = math_dataset.to_row(source_row, "", split, index)
        if plain is None:
            return None
        truth = plain["reward_model"]["ground_truth"]
        response = tagged(source_row["solution"], truth)
        return to_row("math", source_row["problem"], truth, response, split, index)

    return make(row, *math_dataset.hold_out(problems, 500))


def mbpp_rows(source: str) -> tuple[list[dict], list[dict]]:
    """(training, validation) rows."""
    by_id = {row.get("task_id"): row for row in mbpp.read_rows(source)}
    missing = [task for split in ("train", "validation") for task in mbpp.SPLITS[split] if task not in by_id]
    if missing:
        raise ValueError(f"--source {source}: lacks {len(missing)} tasks of 511 to 974, the first is {missing[0]}")

    def row(source_row: dict[str, Any], split: str, index: int) -> dict:
        truth = mbpp.to_row(source_row, split, index)["reward_model"]["ground_truth"]
        stub = mbpp.stub(source_row["code"], "\n".join([source_row["test_setup_code"], *source_row["test_list"]]))
        response = tagged("Here's the implementation:", source_row["code"])
        return to_row("mbpp", f"{source_row['text']}\n\n{stub}", truth, response, split, index)

    return make(row, *([by_id[task] for task in mbpp.SPLITS[split]] for split in ("train", "validation")))


def tagged(reasoning: str, answer: str) -> str:
    """A response of the form that the system prompt asks for."""
    return f"<start_working_out>{reasoning}</end_working_out><SOLUTION>{answer}</SOLUTION>"


def make(row: Callable[[Any, str, int], dict | None], train: list, evaluation: list) -> tuple[list[dict], list[dict]]:
    """Both splits, by `row(source row, "train" or "eval", number)`. A problem for which that gives None is left out."""
    splits = {"train": train, "eval": evaluation}
    made = {split: [row(problem, split, i) for i, problem in enumerate(rows)] for split, rows in splits.items()}
    return tuple(math_dataset.without_empty(rows, split) for split, rows in made.items())


def to_row(task: str, problem: str, truth: str, response: str, split: str, index: int) -> dict:
    """One row in verl's RL schema."""
    return {
        "data_source": f"grail_{task}",
        "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": problem}],
        "ability": "code" if task == "mbpp" else "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "dataset": task, "answer": response, "question": problem},
    }


TASKS = {
    "gsm8k": (gsm8k_rows, gsm8k.Args.source),
    "math": (math_rows, math_dataset.HUB["math"]),
    "mbpp": (mbpp_rows, mbpp.Args.source),
}


def main(args: Args) -> dict[str, int]:
    """Write the files. Returns the number of rows of each split."""
    read, default_source = TASKS[args.task]
    tables = dict(zip(("train", "test"), read(args.source or default_source), strict=True))
    output_dir = args.output_dir or Path(f"data/grail_{args.task}")
    sizes = files.write(output_dir, tables)
    if args.chat_template_file:
        args.chat_template_file.write_text(CHAT_TEMPLATE)
    return sizes


if __name__ == "__main__":
    main(tyro.cli(Args))

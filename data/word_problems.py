"""Make word problems: somebody's things become more and fewer, and a question asks how many are left.

    python data/word_problems.py --output-dir data/word_problems

    Lena has 14 shells. Lena buys 3 bags with 6 shells each. Lena gives 9 shells to Omar. How many shells does Lena
    have?

    Lena buys 3*6=18 shells, so now Lena has 14+18=32 shells.
    Now Lena has 32-9=23 shells.
    #### 23

A problem has 2 to 5 such steps of six kinds, and every count is a whole number from 1 to 999. No two problems are the
same, so those of the test file are in neither of the others. Answers end as GSM8K's do, and the same rule grades them.

Writes sft.parquet (prompt, response), train.parquet and test.parquet (verl's RL schema). The problems of sft.parquet
are not in train.parquet. With --hinted-share there is test_hinted.parquet as well, the problems of test.parquet with
their solutions in the prompt. eval.py measures with it whether a model can use a hint.
"""

import dataclasses
import random
import sys
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).parent.parent))  # run as a script, only this folder is on the path

from data import files  # noqa: E402
from data.gsm8k import INSTRUCTION  # noqa: E402
from extras.self_distillation import TEMPLATE  # noqa: E402

NAMES = "Ada Ben Chen Dina Emil Fatima Goran Hana Ivan Juno Kofi Lena Mika Nora Omar Priya Ravi Sara Tomas Uma".split()
THINGS = "apples books cards coins eggs marbles pens shells stamps stickers".split()
MOST = 999  # largest count


@dataclasses.dataclass
class Args:
    output_dir: Path = Path("data/word_problems")
    """The files are written to this folder."""
    num_sft: int = 1000
    """There are this many demonstrations."""
    num_train: int = 6400
    """There are this many RL prompts."""
    num_test: int = 1000
    """There are this many held-out problems."""
    hinted_share: float = 0.0
    """In this share of the demonstrations the prompt has the solution, by the default of --hint-template of
    train_self_distill.py. A model that learns from them can read a hint, as the teacher of that script has to."""
    seed: int = 0
    """The seed decides the problems, and which demonstrations have hints."""


def take_step(count: int, name: str, things: str, rng: random.Random) -> tuple[int, str, str] | None:
    """One thing that happens to a count: the new count, the sentence, and the line that works it out.

    It is None if the kind that was drawn does not fit the count. Then another one is drawn.
    """
    friend = rng.choice([other for other in NAMES if other != name])
    kind = rng.randrange(6)
    if kind == 0:
        more = rng.randint(2, 90)
        new, work = count + more, f"{count}+{more}"
        sentence = f"{name} finds {more} more {things}."
    elif kind == 1:
        fewer = rng.randint(1, min(90, count))
        new, work = count - fewer, f"{count}-{fewer}"
        sentence = f"{name} gives {fewer} {things} to {friend}."
    elif kind == 2:
        bags, each = rng.randint(2, 9), rng.randint(2, 12)
        new = count + bags * each
        sentence = f"{name} buys {bags} bags with {each} {things} each."
        line = (
            f"{name} buys {bags}*{each}={bags * each} {things}, so now {name} has {count}+{bags * each}={new} {things}."
        )
        return (new, sentence, line) if new <= MOST else None
    elif kind == 3:
        times = rng.randint(2, 4)
        new, work = count * times, f"{count}*{times}"
        sentence = f"A month later {name} has {times} times as many {things}."
    elif kind == 4:
        parts = rng.randint(2, 5)
        if count % parts:
            return None
        new, work = count // parts, f"{count}/{parts}"
        sentence = f"{name} puts the {things} into {parts} equal piles and keeps one pile."
    else:
        friends, each = rng.randint(2, 6), rng.randint(2, 9)
        new = count - friends * each
        sentence = f"{name} gives {each} {things} to each of {friends} friends."
        line = (
            f"{name} gives away {friends}*{each}={friends * each} {things}, so now {name} has "
            f"{count}-{friends * each}={new} {things}."
        )
        return (new, sentence, line) if new >= 1 else None
    return (new, sentence, f"Now {name} has {work}={new} {things}.") if 1 <= new <= MOST else None


def problem(rng: random.Random) -> tuple[str, str, int]:
    """A question, its solution, and the answer."""
    name, things, count = rng.choice(NAMES), rng.choice(THINGS), rng.randint(5, 60)
    sentences, lines = [f"{name} has {count} {things}."], []
    num_steps = rng.randint(2, 5)
    while len(lines) < num_steps:
        if (found := take_step(count, name, things, rng)) is not None:
            count, sentence, line = found
            sentences.append(sentence)
            lines.append(line)
    question = " ".join([*sentences, f"How many {things} does {name} have?"])
    return question, "\n".join([*lines, f"#### {count}"]), count


def prompt(question: str, hint: str | None = None) -> list[dict[str, str]]:
    """The user's turn, with a solution as a hint or without. extras.self_distillation.hints makes the same
    of a row, and needs torch.
    """
    text = f"{question} {INSTRUCTION}"
    if hint is not None:
        text = TEMPLATE.replace(r"\n", "\n").format(prompt=text, hint=hint)
    return [{"role": "user", "content": text}]


def rl_row(found: tuple[str, str, int], split: str, index: int, is_hinted: bool = False) -> dict:
    """One row in verl's RL schema."""
    question, solution, answer = found
    return {
        "data_source": "word_problems",
        "prompt": prompt(question, solution if is_hinted else None),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "extra_info": {"split": split, "index": index, "answer": solution, "question": question},
    }


def main(args: Args) -> dict[str, int]:
    """Write the files. Returns the number of rows of each."""
    sizes = {"test": args.num_test, "train": args.num_train, "sft": args.num_sft}
    if min(sizes.values()) < 1:
        raise ValueError(
            f"--num-sft {args.num_sft}, --num-train {args.num_train}, --num-test {args.num_test}: must be at least 1"
        )
    if not 0 <= args.hinted_share <= 1:
        raise ValueError(f"--hinted-share {args.hinted_share} must be within 0 and 1")
    rng, found = random.Random(args.seed), {}
    while len(found) < sum(sizes.values()):
        question, *rest = problem(rng)
        found.setdefault(question, (question, *rest))
    problems = iter(found.values())
    tables = {name: [next(problems) for _ in range(size)] for name, size in sizes.items()}
    rows = {name: [rl_row(x, name, i) for i, x in enumerate(tables[name])] for name in ("train", "test")}
    rng_hints = random.Random(f"{args.seed} hints")  # of its own, so that the problems stay what they are
    rows["sft"] = [
        {"prompt": prompt(question, solution if rng_hints.random() < args.hinted_share else None), "response": solution}
        for question, solution, _ in tables["sft"]
    ]
    if args.hinted_share > 0:
        rows["test_hinted"] = [rl_row(x, "test", i, is_hinted=True) for i, x in enumerate(tables["test"])]
    return files.write(args.output_dir, rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

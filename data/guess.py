"""Make the rows of the game of environments/guess.py, and a tiny untrained model that learns it on a CPU.

    python data/guess.py --output-dir data/guess
    torchrun train_grpo.py --environment environments/guess.py:Guess \\
        --custom-reward-function rewards/environment.py ...

A prompt says where the number is, such as `10-24`: always among 15 numbers, so that four guesses are enough if each
halves what is left, and the first is `17`. One demonstration in three does so. The others count up from the lowest
number, and find 4 of 15: reinforcement learning has to find out what pays.

Writes sft.parquet (messages), train.parquet and test.parquet (verl's RL schema), and model/: the model of
data/arithmetic.py, whose tokenizer also has words for this. A game is a range and a number. No test game is in the
other files.
"""

import dataclasses
import random
import sys
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).parent.parent))  # run as a script, only this folder is on the path

from data import arithmetic, files  # noqa: E402
from environments.guess import GUESSES  # noqa: E402

SIZE = 15  # numbers of a range


@dataclasses.dataclass
class Args:
    output_dir: Path = Path("data/guess")
    """The files are written to this folder."""
    num_sft: int = 25_600
    """This many SFT conversations are drawn, with repetition. The default is 200 steps of 128."""
    num_test: int = 60
    """There are this many held-out games. The other games are the RL prompts."""
    num_ranges: int = 20
    """There are this many ranges, which begin with 10, 11, and so on. At most 76 are possible, so that all numbers have
    two digits."""
    seed: int = 0
    """The seed decides the games, the samples and the model's weights."""


def sft_messages(low: int, secret: int, rng: random.Random) -> list[dict]:
    """A game by one of two players, see above."""
    messages = [{"role": "user", "content": f"{low}-{low + SIZE - 1}"}]
    left, halves = range(low, low + SIZE), rng.random() < 1 / 3
    for turn in range(GUESSES):
        guess = left[len(left) // 2] if halves else left[0]
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret or turn == GUESSES - 1:
            break
        is_higher = guess < secret
        messages.append({"role": "user", "content": "higher" if is_higher else "lower"})
        left = [x for x in left if (x > guess if is_higher else x < guess)]
    return messages


def rl_row(low: int, secret: int, split: str, index: int) -> dict:
    """One row in verl's RL schema."""
    return {
        "data_source": "guess",
        "prompt": [{"role": "user", "content": f"{low}-{low + SIZE - 1}"}],
        "ability": "game",
        "reward_model": {"style": "rule", "ground_truth": str(secret)},
        "extra_info": {"split": split, "index": index},
    }


def main(args: Args) -> dict[str, int]:
    """Write the data set and the model. Returns the number of rows of each file."""
    if not 1 <= args.num_ranges <= 76 or args.num_sft < 1 or not 1 <= args.num_test < args.num_ranges * SIZE:
        raise ValueError(
            f"--num-ranges {args.num_ranges} must be within 1 and 76, --num-sft {args.num_sft} at least 1, and "
            f"--num-test {args.num_test} at least 1 and below the number of games, {SIZE} a range"
        )
    rng = random.Random(args.seed)
    games = [(10 + i, 10 + i + j) for i in range(args.num_ranges) for j in range(SIZE)]
    rng.shuffle(games)
    test, seen = games[: args.num_test], games[args.num_test :]
    tables = {
        "sft": [{"messages": sft_messages(*rng.choice(seen), rng)} for _ in range(args.num_sft)],
        "train": [rl_row(*game, "train", i) for i, game in enumerate(seen)],
        "test": [rl_row(*game, "test", i) for i, game in enumerate(test)],
    }
    sizes = files.write(args.output_dir, tables)
    arithmetic.save_model(args.output_dir / "model", args.seed, words=("higher", "lower") + arithmetic.ROLES)
    print(f"{args.output_dir / 'model'}: untrained Qwen2 and its tokenizer")
    return sizes


if __name__ == "__main__":
    main(tyro.cli(Args))

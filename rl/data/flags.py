"""The flags of the data, and of how its rows become tokens."""

from dataclasses import dataclass

from rl.flags import AtLeast1, Free


@dataclass(frozen=True)
class Texts:
    """These flags decide how the rows of the data become tokens."""

    # This JSON object has more arguments for the chat template, such as '{"enable_thinking": false}'.
    apply_chat_template_kwargs: str = "{}"
    # Take rows with text that is not among their tokens, such as earlier thoughts, which some templates drop.
    allow_dropped_text: Free[bool] = False


@dataclass(frozen=True)
class Files(Texts):
    """These flags choose the data and the length of the run."""

    # These are parquet or jsonl files. docs/rewards.md has verl's schema for RL, and the pages of sft.py and
    # train_reward.py have theirs.
    train_files: Free[tuple[str, ...]] = ("data/gsm8k/train.parquet",)
    # These files are held out. Their schema is the same. Without a file there is no evaluation.
    val_files: Free[tuple[str, ...]] = ("data/gsm8k/test.parquet",)
    total_epochs: Free[AtLeast1] = 1  # The run passes over the training files this many times.
    # The run makes this many steps, whatever --total-epochs says. By default --total-epochs decides.
    total_training_steps: Free[AtLeast1 | None] = None

    def count_steps(self, num_rows: int, batch_size: int, *, flag: str = "--train-batch-size") -> int:
        """Training steps of a run: --total-training-steps, or the whole batches of --total-epochs passes over the rows.
        Raises ValueError naming `flag` if a batch is larger than the data.
        """
        if not 1 <= batch_size <= num_rows:
            raise ValueError(f"{flag} {batch_size} must be between 1 and the {num_rows} rows of the training data")
        return self.total_training_steps or self.total_epochs * (num_rows // batch_size)


@dataclass(frozen=True)
class Data(Files):
    """These flags choose the data and the length of the run."""

    filter_overlong_prompts: bool = False  # Drop prompts that are longer than --max-prompt-length.

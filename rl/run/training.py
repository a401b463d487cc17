"""What the Args of all scripts that train have in common, and their check before anything is loaded."""

from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from extras.judges import model_to_score
from extras.plan import Planned, budget_of, hardware, settle
from extras.sequence_parallel import per_rank
from rl.flags import check_limits, flat, spelled
from rl.model.checks import check_model
from rl.model.roles import CAUSAL_LM
from rl.run.alarms import parse_alarm
from rl.run.resume import first_day
from rl.run.run_folder import folder_of


@dataclass(frozen=True)
class TrainingArgs(Planned):
    """The base of the Args of every script that trains."""

    rows_per_unit = 1  # rows that a micro-batch never separates
    # The values of these flags add up to the most tokens that a sequence may have.
    length_flags: ClassVar[tuple[str, ...]] = ("max_prompt_length", "max_response_length")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return sum(getattr(self, name) for name in self.length_flags)

    @property
    def units(self) -> dict[str, int]:
        """Tokens of what a micro-batch never divides, by what it is. A micro-batch holds at least one of each. Ranks
        that train on the same rows hold it together, each of them a share.
        """
        unit = "one sequence of" if self.rows_per_unit == 1 else "one pair of 2 x"
        flags = " + ".join(map(spelled, self.length_flags))
        flags = f"({flags})" if " " in flags else flags
        units = {f"{unit} {flags}": self.rows_per_unit * self.longest}
        for group in vars(self).values():
            units |= getattr(group, "units", {})
        return per_rank(units, flat(self)["sequence_parallel_size"])


def check(args: Any, *, scores: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of --model, if nothing is wrong that can be known before data and models are loaded.

    Args: args, the `TrainingArgs` of a script; scores, whether --model becomes a reward model, whose head may be new.
    Raises ValueError, naming the flag, its value and the fix, for numbers beyond the limits of their flags and for
    flags that contradict each other. It also raises for a model that is broken, or does not fit into the memory of this
    machine. And it raises for one that cannot be trained on sequences of the given length, or in the way that the flags
    say.
    """
    check_limits(args)
    for alarm in args.logging.alarms:
        parse_alarm(alarm)
    flag, tokens = budget_of(args.memory)
    for unit, length in args.units.items():
        if tokens != "auto" and tokens < length:
            raise ValueError(f"{spelled(flag)} {tokens} cannot hold {unit} = {length} tokens; raise it to that")
    for group in (args, *vars(args).values()):
        if hasattr(group, "check"):  # a group knows what contradicts its flags
            group.check(flat(args))
    root = folder_of(args.checkpoints, args.logging.project_name, args.logging.experiment_name)
    tokenizer = check_model(
        args.model,
        model_to_score(args.seed) if scores else CAUSAL_LM,
        longest=args.longest,
        limits=" + ".join(map(spelled, args.length_flags)),
        learning=args.lora,
        texts=args.data,
        day=first_day(args.checkpoints, root),
    )
    args.lora.check_policy(args.model)
    settle(args, [hardware()])
    return tokenizer

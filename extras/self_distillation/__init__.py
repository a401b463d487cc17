"""The teacher of train_self_distill.py, which is the policy itself after it has read a hint that the student does not
see.

hints.py puts the hint into the prompt, and places the responses behind it. student.py computes the teacher's hidden
states, and the student's distance to its distributions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TEMPLATE = (
    r"{prompt}\n\nHere is a reference solution to this problem:\n{hint}\n\nNow solve the problem yourself, "
    r"in your own words and in the same form."
)


@dataclass(frozen=True)
class Hints:
    """The hint is what the teacher reads in its prompt and the student does not."""

    text_only = "a teacher with a hint"  # see rl/flags.py

    # The hint of a row is in this column, or under this name in a column of dicts. It must be a reference solution.
    hint_key: str = "extra_info.answer"
    # The teacher's prompt has this text in the place of the user's last message, or of a prompt that is a text. It must
    # have {prompt}, which stands for that message, and {hint}. A line break is written \n.
    hint_template: str = TEMPLATE

    def check(self, flags: Mapping[str, Any]) -> None:
        """Raise ValueError if the template lacks a part, or a prompt with a hint may be shorter than one without."""
        for part in ("{prompt}", "{hint}"):
            if self.hint_template.count(part) != 1:
                raise ValueError(f"--hint-template {self.hint_template!r} must have {part} once; add or remove it")
        if (x := flags["max_hinted_prompt_length"]) < (least := flags["max_prompt_length"]):
            raise ValueError(
                f"--max-hinted-prompt-length {x} is less than --max-prompt-length {least}; a prompt with a hint is "
                "longer than the prompt, so raise it"
            )


def add_hints(flags: Hints, rows: Any, tokenizer: Any, *, max_length: int, drops_overlong: bool, partner: Any) -> Any:
    """Rows with `hinted_ids` added, the tokens of the prompt with its hint, see `hints.add_hints`."""
    from extras.self_distillation import hints

    text_of = partner.prompt_text if partner else None
    return hints.add_hints(flags, rows, tokenizer, max_length, drops_overlong, text_of)


def hints_of_rows(responses: Sequence[Any], rows: Sequence[dict]) -> list[list[int]]:
    """For each response the `hinted_ids` of its row."""
    from extras.self_distillation import hints

    return hints.of_rows(responses, rows)


def hints_of_groups(flags: Hints, sampler: Any, *, right_score: float, max_length: int) -> list[list[int] | None]:
    """For each response of all ranks the ids of its prompt with a right answer of its group as the hint, or None, see
    `hints.of_groups`. All ranks must enter.
    """
    from extras.self_distillation import hints

    task = sampler.task
    text_of = task.partner.prompt_text if task.partner else None
    how = dict(size=task.sampling.n, right_score=right_score, max_length=max_length, text_of=text_of)
    own = hints.of_groups(flags, sampler.own_samples, sampler.rows, task.tokenizer, **how)
    return sampler.ranks.all_gather(own)


def with_hints(batch: Any, responses: Sequence[Any], hinted_ids: Sequence[Any]) -> Any:
    """The batch of the same responses behind prompts with hints, see `hints.with_hints`."""
    from extras.self_distillation import hints

    return hints.with_hints(batch, responses, hinted_ids)


def room_beside_hints(max_tokens: int, responses: Sequence[Any], hinted_ids: Sequence[Any]) -> int:
    """Tokens of micro-batches that with hints have at most `max_tokens`, see `hints.room_beside_hints`."""
    from extras.self_distillation import hints

    return hints.room_beside_hints(max_tokens, responses, hinted_ids)


def teacher_states(policy: Any, hinted: Any) -> Any:
    """The last hidden states (R, H) with which the policy predicts R response tokens after it has read their hints,
    without gradients. See `student.teacher_states`.
    """
    from extras.self_distillation import student

    return student.teacher_states(policy, hinted)


def states_and_head(teacher: Any, hinted: Any) -> Any:
    """The same states of a teacher that is another model, and the weight of its head, see `student.states_and_head`."""
    from extras.self_distillation import student

    return student.states_and_head(teacher, hinted)


def move_towards(teacher: Any, policy: Any, rate: float) -> None:
    """teacher = (1 - rate) teacher + rate policy, see `student.move_towards`."""
    from extras.self_distillation import student

    student.move_towards(teacher, policy, rate)


def token_divergences(policy: Any, batch: Any, states: Any, divergence: Callable, **how: Any) -> Any:
    """Of every sampled token the student's log-prob, its entropy, its distance to the teacher, and the teacher's
    log-prob, all (b, T), see `student.token_divergences`.
    """
    from extras.self_distillation import student

    return student.token_divergences(policy, batch, states, divergence, **how)

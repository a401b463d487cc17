"""The teacher of train_distill.py, which says how likely each token of a response is, and the student's distance to it.

A teacher is a model on the ranks (teacher.py), or one behind a vLLM server (server.py). The distance is computed in
student.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rl.flags import Free, Limit, Needs, Seconds

Url = Annotated[str, Limit("an address that begins with http:// or https://", re.compile("https?://[^/]").match, str)]


@dataclass(frozen=True)
class Teacher:
    """The teacher is a model on these GPUs, or one behind a server."""

    # This is the id or folder of the teacher, or its name at --teacher-url.
    teacher_model: str = "Qwen/Qwen2.5-7B-Instruct"
    # The teacher is behind vLLM's OpenAI-compatible server at this address. By default it is loaded and sharded over
    # these ranks.
    teacher_url: Free[Url | None] = None
    # One try of a request to that server may take this many seconds, from connecting to the last byte. There are up to
    # five tries. After twice as many seconds the run ends.
    teacher_timeout: Free[Annotated[Seconds, Needs("teacher_url")]] = 600.0
    teacher_offload: Free[bool] = False  # Keep the weights of a loaded teacher in host memory while it is not asked.

    @property
    def text_only(self) -> str | None:
        """What cannot see images."""
        return "the server of --teacher-url" if self.teacher_url else None

    def check(self, flags: Mapping[str, Any]) -> None:
        """Raise ValueError if a server cannot do what these flags ask for, or others, which are in `flags` by name."""
        if self.teacher_url is None:
            return
        if self.teacher_offload:
            where = f"--teacher-url {self.teacher_url}"
            raise ValueError(f"--teacher-offload moves a loaded teacher, and {where} is not loaded; drop one of them")
        if (x := flags["temperature"]) != 1:
            raise ValueError(f"--temperature {x}: a server gives log-probs at temperature 1 only; leave it at 1")
        if flags["loss_mode"] != "sampled" and (k := flags["distill_top_k"]) < 1:
            raise ValueError(f"--distill-top-k {k}: a server gives the most likely tokens only; give their number")


def check_teacher(flags: Teacher, tokenizer: Any, *, student: str, longest: int, top_k: int) -> None:
    """Raise ValueError if the teacher cannot score what the student samples, see `teacher.check_teacher`."""
    from extras.distillation import teacher

    teacher.check_teacher(flags, tokenizer, student=student, longest=longest, top_k=top_k)


def load_teacher(flags: Teacher, ranks: Any, memory: Any, *, student: str, longest: int) -> Any:
    """The teacher, frozen, or an empty model in the place of a server, see `teacher.load_teacher`. All ranks must
    enter.
    """
    from extras.distillation import teacher

    return teacher.load_teacher(flags, ranks, memory, student=student, longest=longest)


def add_teacher(
    flags: Teacher, model: Any, batch: Any, updates: Sequence[Any], *, top_k: int, temperature: float
) -> Any:
    """The batch with the teacher's log-probs of its sampled tokens, `ref_logp` (B, T), and if top_k is not 0, of the
    most likely tokens, the columns `top_ids` and `top_logp` (B, T, K), see `teacher.add_teacher`. All ranks must enter.
    """
    from extras.distillation import teacher

    return teacher.add_teacher(flags, model, batch, updates, top_k=top_k, temperature=temperature)


def token_distances(policy: Any, batch: Any, distance: Callable | None, *, beta: float, sampling: Any) -> Any:
    """`token_logprobs` of a policy, and its distance to the teacher at every sampled token, from one pass: log-probs,
    entropy and distance, all (b, T), and metrics. See `student.token_distances`.
    """
    from extras.distillation import student

    return student.token_distances(policy, batch, distance, beta=beta, sampling=sampling)

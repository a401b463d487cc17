"""What flows through a training step: Row -> Request -> Completion -> Sample -> Batch.

A row is a prompt of the data. A request asks an engine for one response to it, and a completion is the engine's answer.
A sample is the finished response with its score. In a conversation it has the tokens of several completions. A batch
has the samples that one rank trains on, as tensors.

Axes: P prompts of a step, G responses per prompt, B = P * G sequences of the step, b of them on this rank, T tokens
(prompt + response, right-padded), V vocabulary. Every per-token tensor of a Batch is (b, T) and aligned. Position t
describes token t given the tokens before it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

Row = dict[str, Any]  # a row of the data, by column. `rl.data.rows.read_rows` lists the columns.


@dataclass(frozen=True)
class Sampling:
    """How an engine samples. `temperature=0` is greedy. `top_k=-1`, `top_p=1` and `min_p=0` switch truncation off."""

    n: int = 1  # responses to each prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0  # tokens less than this times as likely as the most likely one are not sampled
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()  # a response ends with the first of these ids, beside the model's own

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class Request(NamedTuple):
    """One response that an engine is asked for."""

    key: Any  # names the response among those of one rank, and comes back with it. It can be hashed.
    prompt_ids: Sequence[int]  # token ids. Ids beyond the vocabulary are places of what is not text.
    sampling: Sampling  # for this response. `max_tokens` and stop tokens are its own, and `n` is ignored.
    seed: int | None = None  # of this response alone. With None it is drawn from the global generators.


# Data about tokens, beside ids and log-probs. A column is an integer array (n, ...) with an entry for each token of
# prompt and response. The largest number of its dtype means "unknown". Engines may add columns, and so may families,
# which are kinds of unusual models (rl/model/family.py). All code that passes samples on passes their columns on too.
# Every sample has the column "versions" (int32), which says how often weights had been pushed to the engine when the
# token was sampled. It is unknown for tokens that were not sampled.
Columns = Mapping[str, np.ndarray]


def unknown(column: np.ndarray) -> int:
    """What a column says of a token of which nothing is known."""
    return np.iinfo(column.dtype).max


@dataclass
class Completion:
    """What an engine has sampled for one request. The engine appends to it with every token until it is complete."""

    request: Request
    rank: int = 0  # that asked for it
    token_ids: list[int] = field(default_factory=list)  # with the stop token
    logprobs: list[float] = field(default_factory=list)  # one for each of them
    finish_reason: str = "abort"  # or "stop" or "length", once it is complete
    # Columns in parts, one after the other. A column may end before the last token.
    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)
    is_cut: bool = False  # nobody waits for it any more, see `Engine.cut`


class Outcome(NamedTuple):
    """What the policy's partner reports about a complete response, as JSON. The partner is whatever answers the policy
    in the middle of a response, such as an environment or tools. See `rl.sampling.loop.Partner`.
    """

    facts: dict[str, Any]  # what every rank gets, for metrics and advantages
    reward: float  # by the partner. It is added to the score of reward functions.
    text: str  # what reward functions get as the response
    extra_info: dict[str, Any]  # what they are told besides
    record: dict[str, Any]  # what generations.jsonl says besides


class Score(NamedTuple):
    """What is known about one response. `value` is None unless `status` is "ok"."""

    text: str  # the response without special tokens, as the reward function saw it, or "" on the other ranks
    value: float | None
    components: dict[str, float]
    # "none" means that the function could not tell, or that it was not asked, because the partner failed or the run
    # stops
    status: Literal["ok", "none", "error", "timeout"]
    seconds: float

    @property
    def accuracy(self) -> float:
        """The component `acc` if the reward has it, else the score, or 0 without either."""
        return self.components.get("acc", self.value or 0.0)


@dataclass(frozen=True, eq=False)
class Sample:
    """One response, with what is known about it. Arrays are numpy's. Lists are converted.

    Only the rank that sampled it has the tokens, until another one trains on it. On other ranks `response_ids`,
    `response_mask` and `rollout_logprobs` are None, and there are no columns. `score` is None until it is known. The
    types leave these cases out, since code that reads tokens or scores runs where they are.
    """

    prompt_ids: np.ndarray  # int32. Every rank has them, from the data.
    response_ids: np.ndarray  # int32
    response_mask: np.ndarray  # int8: 1 on tokens that the policy sampled, 0 on what it was told in between
    rollout_logprobs: np.ndarray  # float32
    finish_reason: str  # as in Completion, or "error" if the policy's partner, such as an environment, has failed
    row_index: int
    outcome: Outcome | None = None  # what the policy's partner says of the response, if there is a partner
    columns: Columns = field(default_factory=dict)
    score: Score = None  # pyrefly: ignore[bad-assignment]  # see above; without the text after `gather_responses`
    data_source: str = ""  # of its row
    num_response_tokens: int = 0  # with what a partner said. --max-response-length limits these.
    num_sampled: int = 0  # those of them that the policy sampled. Metrics and rewards call this response_length.
    rank: int = 0  # the rank that sampled it, and has its tokens
    number: int = 0  # its place among the samples of that rank
    # How many tokens, counted from the start of the prompt, it has in common with the sample before it, if that answers
    # the same row, and otherwise 0.
    shared: int = 0
    # The rows of tokens of a response that has several conversations, as that of an agent. It has no tokens of its own.
    # Its rows have no prompt apart from their response. Statistics count the response, and batches have its rows.
    rows: tuple["Sample", ...] = ()

    def __post_init__(self):
        dtypes = dict(prompt_ids="int32", response_ids="int32", response_mask="int8", rollout_logprobs="float32")
        for name, dtype in dtypes.items():
            if (x := getattr(self, name)) is not None:
                object.__setattr__(self, name, np.asarray(x, dtype))
        if self.rows:
            for name in ("num_response_tokens", "num_sampled"):
                object.__setattr__(self, name, sum(getattr(row, name) for row in self.rows))
        elif self.response_ids is not None:
            object.__setattr__(self, "num_response_tokens", len(self.response_ids))
            object.__setattr__(self, "num_sampled", int(self.response_mask.sum()))

    def tokens(self) -> dict[str, Any]:
        """The fields that only a rank with the tokens of this response has, by name."""
        return {x: getattr(self, x) for x in ("response_ids", "response_mask", "rollout_logprobs", "columns")}

    @property
    def as_rows(self) -> tuple["Sample", ...]:
        """The rows of a batch that the response makes up: its own, or itself."""
        return self.rows or (self,)

    @property
    def num_tokens(self) -> int:
        """Prompt plus response tokens."""
        return len(self.prompt_ids) + self.num_response_tokens

    @property
    def record(self) -> dict[str, Any]:
        """What generations.jsonl says of a response with a score."""
        record = {"response": self.score.text, "score": self.score.value, "components": self.score.components}
        return record | (self.outcome.record if self.outcome else {})

    def without_tokens(self) -> "Sample":
        """The sample as the ranks know it that do not have its tokens. The fields of `tokens` are empty."""
        rows = tuple(row.without_tokens() for row in self.rows)
        return replace(self, **dict.fromkeys(self.tokens()) | {"columns": {}, "rows": rows})

    def without_texts(self) -> "Sample":
        """The sample with its score, without the texts that only scoring and logs need."""
        outcome = self.outcome and self.outcome._replace(text="", extra_info={}, record={})
        return replace(self, score=self.score._replace(text=""), outcome=outcome)


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences. Only the first `lengths[i]` positions of row i are real. The pad id itself means nothing.

    A rank has those rows of a step that it trains on. response_mask is 1 for tokens that the policy sampled and learns
    from, EOS included. It is 0 everywhere in a response without a score. rollout_logp is 0 for tokens that were not
    sampled. Other per-token tensors are 0 where the mask is 0. Optional tensors are None until a phase adds them.
    """

    input_ids: torch.Tensor  # (b, T) int64
    lengths: torch.Tensor  # (b,) int64, prompt + response
    response_mask: torch.Tensor  # (b, T) float32
    rollout_logp: torch.Tensor  # (b, T) float32, by the engine that sampled
    old_logp: torch.Tensor | None = None  # (b, T) by the policy as it was when the step began
    ref_logp: torch.Tensor | None = None  # (b, T) by the frozen reference, or the teacher
    advantages: torch.Tensor | None = None  # (b, T)
    values: torch.Tensor | None = None  # (b, T) by a critic, if the script has one
    returns: torch.Tensor | None = None  # (b, T) what the critic learns to predict
    # (b,) int64, ascending. It says which of the step's rows each row is. None means 0..b-1. These are the numbers of
    # the responses, unless a response has several rows, see `Sample.rows`.
    rows: torch.Tensor | None = None
    responses: torch.Tensor | None = None  # (b,) int64, ascending, which of the step's responses each row belongs to
    # (b,) float32, how many tokens of the response that a row belongs to are learned from, all its rows together
    num_learned: torch.Tensor | None = None
    share: torch.Tensor | None = None  # (b,) float32, tokens of a row / tokens of its update, on all ranks
    # (B, T, ...) by name, see `Columns`. In the place of "versions" a batch has "ages", int32. These are the pushes of
    # weights since a token was sampled, and -1 for a token that was not sampled. Phases of a step may add columns of
    # any dtype.
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors that the batch has by name, those of the columns too."""
        return {name: x for name, x in {**vars(self), **self.columns}.items() if isinstance(x, torch.Tensor)}

    def map(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> "Batch":
        """The batch with change(name, x) in the place of every tensor x that it has, those of the columns too."""
        changed = {name: change(name, x) for name, x in self.tensors().items()}
        columns = {name: changed.pop(name) for name in self.columns}
        return replace(self, **changed, columns=columns)


def take_rows(batch: Batch, rows: Sequence[int], device: torch.device | str | None = None) -> Batch:
    """Rows of a batch, cut to their longest sequence and moved to `device`: (b, T') tensors.

    Args: rows, by their numbers in `batch.rows`, in any order. No rows give one empty row of two tokens with a zero
    mask. A rank that has run out of work uses it to take part in the collectives of the forward and backward pass.
    """
    if not len(rows):
        empty = batch.map(lambda _, x: x.new_zeros((1, 2, *x.shape[2:])[: x.ndim]).to(device))
        return replace(empty, lengths=empty.lengths + 2)
    index = places(batch, rows)
    width = int(batch.lengths[index].max())
    return batch.map(lambda _, x: (x[index] if x.ndim == 1 else x[index, :width]).to(device))


def places(batch: Batch, rows: Sequence[int]) -> torch.Tensor:
    """The positions in a batch of the rows that have these numbers in `batch.rows`: (b,) int64."""
    numbers = torch.as_tensor(rows, dtype=torch.long)
    if batch.rows is None:
        return numbers
    index = torch.searchsorted(batch.rows, numbers)
    assert torch.equal(batch.rows[index.clamp(max=len(batch.rows) - 1)], numbers), f"rows {rows} of {batch.rows}"
    return index


# Metrics of an evaluation, and {prompt, response, score, components} of the responses to show.
Evaluation = tuple[dict[str, float], list[dict[str, Any]]]

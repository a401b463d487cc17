"""The data that flows through a training step: Request -> Completion -> Sample -> Response -> Batch.

Axes: P prompts of a step, G responses per prompt, B = P * G sequences, T tokens (prompt + response, right-padded), V
vocabulary. Every per-token tensor is (B, T) and aligned: position t describes token t given the tokens before it.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch


@dataclass(frozen=True)
class Sampling:
    """How an engine samples. `temperature=0` is greedy; `top_k=-1`, `top_p=1` and `min_p=0` switch truncation off."""

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

    key: Hashable  # names the response among those of one rank; comes back with it
    prompt_ids: Sequence[int]  # an image's tokens have ids beyond the vocabulary: see images.py
    sampling: Sampling  # of this response alone: its own `max_tokens` and stops; `n` is not looked at
    seed: int | None = None  # of this response alone; None: it is drawn from the global generators


# Which weights sampled a response: (pushes of weights, tokens in a row that were sampled after so many), ascending
Versions = tuple[tuple[int, int], ...]


class Completion(NamedTuple):
    """What an engine returns for one request: ids including the stop token, one log-prob per id, and why it ended."""

    key: Hashable
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop", "length", or "abort" for what an aborted request had so far
    policy_versions: Versions = ()
    routed_experts: np.ndarray | None = None  # (n, layers, k): of prompt and response but for the last token


@dataclass(frozen=True, eq=False)
class Sample:
    """One trajectory, as numpy arrays; lists given are converted.

    `response_mask` is 1 on tokens the policy sampled, 0 on what it was told in between, such as the output of a tool.
    """

    prompt_ids: np.ndarray  # int32
    response_ids: np.ndarray  # int32
    response_mask: np.ndarray  # int8
    rollout_logprobs: np.ndarray  # float32
    finish_reason: str
    row_index: int
    policy_versions: Versions = ()  # of the tokens that the policy sampled; () where it sampled none, or nobody knows
    turns: int = 1  # how often the policy was asked to go on
    messages: Sequence[dict] = ()  # of a conversation with an environment: all behind the prompt, for the reward
    report: dict | None = None  # what its environment says at the end
    turn_rewards: tuple[float, ...] = ()  # of its turns, by the environment, if it gives any; part of the score
    # (tokens of prompt and response, layers, k) uint8 or int16: the experts that the engine used for a token as input;
    # see `extras.families.unknown_expert`. None without --router-replay
    routed_experts: np.ndarray | None = None

    def __post_init__(self):
        dtypes = dict(prompt_ids="int32", response_ids="int32", response_mask="int8", rollout_logprobs="float32")
        for name, dtype in dtypes.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))

    @property
    def num_tokens(self) -> int:
        """Prompt plus response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_sampled(self) -> int:
        """Response tokens that the policy sampled."""
        return int(self.response_mask.sum())

    @property
    def token_versions(self) -> np.ndarray:
        """Pushes of weights before each token of the response was sampled, (n,) int32; -1 if it was not sampled. Raises
        RuntimeError if the mask does not mark as many tokens as were sampled.
        """
        if self.num_sampled != (count := sum(count for _, count in self.policy_versions)):
            raise RuntimeError(
                f"a response to row {self.row_index} has {self.num_sampled} tokens of mask 1, and the engine sampled "
                f"{count}: the response mask has tokens that it did not sample, as of a tool, or lacks some"
            )
        versions = np.full(len(self.response_ids), -1, np.int32)
        versions[self.response_mask > 0] = [v for v, count in self.policy_versions for _ in range(count)]
        return versions

    @property
    def conversation(self) -> dict[str, Any]:
        """What generations.jsonl says of a conversation with an environment; nothing of another response."""
        if self.report is None:
            return {}
        given = {"turn_rewards": list(self.turn_rewards)} if self.turn_rewards else {}
        return {"turns": self.turns, "messages": list(self.messages), "environment": self.numbers} | given

    @property
    def numbers(self) -> dict[str, float]:
        """Those of the environment's report; no NaN, and nothing like 10**400."""
        report = {name: x for name, x in (self.report or {}).items() if isinstance(x, (int, float))}
        return {name: float(x) for name, x in report.items() if abs(x) <= 1e30}

    @property
    def turn_lengths(self) -> tuple[int, ...]:
        """How many tokens the policy sampled in each turn: the lengths of the runs of mask 1."""
        edges = np.flatnonzero(np.diff(self.response_mask, prepend=0, append=0))
        return tuple((edges[1::2] - edges[::2]).tolist())


def sample_of(saved: dict[str, Any]) -> Sample:
    """The sample whose `vars` a checkpoint has held: JSON makes lists of tuples."""
    versions, rewards = tuple(map(tuple, saved["policy_versions"])), tuple(saved["turn_rewards"])
    return Sample(**saved | {"policy_versions": versions, "turn_rewards": rewards})


class Score(NamedTuple):
    """What is known about one response. `value` is None unless `status` is "ok"."""

    text: str  # the response without special tokens, as the reward function saw it; "" on the other ranks
    value: float | None
    components: dict[str, float]
    status: Literal["ok", "none", "error", "timeout"]  # none: the function said that it cannot tell
    seconds: float

    @property
    def value_or_nan(self) -> float:
        """`value`, and NaN where it is None: for tensors."""
        return math.nan if self.value is None else self.value

    @property
    def accuracy(self) -> float:
        """The component `acc` if the reward has it, else the score; 0 without either."""
        return self.components.get("acc", self.value or 0.0)


@dataclass(frozen=True, eq=False)
class Response:
    """What every rank knows about a response. Its tokens stay on the rank that sampled them until one trains on it."""

    row_index: int
    score: Score  # without the text
    response_length: int  # tokens
    num_sampled: int  # those of them that the policy sampled
    shared: int  # tokens at the start of prompt and response that the one before it on its rank has too
    finish_reason: str
    policy_versions: Versions
    turns: int
    rank: int  # which has the tokens
    number: int  # among those that its rank sampled at a time
    prompt_ids: np.ndarray | None = None  # int32; every rank has them, from the data
    sample: Sample | None = None  # the tokens, on `rank` only
    numbers: dict[str, float] | None = None  # of the environment's report
    turn_rewards: tuple[float, ...] = ()  # see Sample
    turn_lengths: tuple[int, ...] = ()
    routed: tuple[int, int, str] | None = None  # layers, k and dtype of the sample's routed_experts

    @classmethod
    def of(cls, s: Sample, score: Score, *, shared: int, rank: int, number: int) -> "Response":
        """What other ranks have to know of a sample."""
        known = len(s.response_ids), s.num_sampled, shared, s.finish_reason, s.policy_versions, s.turns
        routed = None if s.routed_experts is None else (*s.routed_experts.shape[1:], s.routed_experts.dtype.str)
        own = dict(numbers=s.numbers, turn_rewards=s.turn_rewards, turn_lengths=s.turn_lengths, routed=routed)
        return cls(s.row_index, score._replace(text=""), *known, rank, number, **own)

    @property
    def num_tokens(self) -> int:
        """Prompt plus response tokens."""
        return len(self.prompt_ids) + self.response_length


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences. Only the first `lengths[i]` positions of row i are real; the pad id itself means nothing.

    A rank has those rows of a step that it trains on. response_mask is 1 for tokens that the policy sampled and learns
    from, EOS included, and 0 for a response without a score. rollout_logp is 0 for tokens that were not sampled, other
    per-token tensors where the mask is 0. Optional tensors are None until a phase of the step makes a Batch with them.
    """

    input_ids: torch.Tensor  # (B, T) int64
    lengths: torch.Tensor  # (B,) int64, prompt + response
    response_mask: torch.Tensor  # (B, T) float32
    rollout_logp: torch.Tensor  # (B, T) float32, by the engine that sampled
    old_logp: torch.Tensor | None = None  # (B, T) by the policy that starts the step
    ref_logp: torch.Tensor | None = None  # (B, T) by the frozen reference, or the teacher
    top_ids: torch.Tensor | None = None  # (B, T, K) int32, the teacher's most likely tokens
    top_logp: torch.Tensor | None = None  # (B, T, K) and their log-probs
    routed_experts: torch.Tensor | None = None  # (B, T, layers, k) uint8 or int16, see Sample
    advantages: torch.Tensor | None = None  # (B, T)
    ages: torch.Tensor | None = None  # (B, T) float32, pushes of weights since a token was sampled
    values: torch.Tensor | None = None  # (B, T)
    returns: torch.Tensor | None = None  # (B, T)
    chosen: torch.Tensor | None = None  # (B, T) bool, of `extras.variants`: the loss treats these differently
    rows: torch.Tensor | None = None  # (B,) int64, ascending: places among the step's responses; None: all of them
    share: torch.Tensor | None = None  # (B,) float32, the tokens of a row over those of its update on all ranks


def join_versions(first: Versions, second: Versions) -> Versions:
    """The versions of a response that goes on: ((3, 5),) and ((3, 1), (4, 2)) -> ((3, 6), (4, 2))."""
    if first and second and first[-1][0] == second[0][0]:
        return (*first[:-1], (second[0][0], first[-1][1] + second[0][1]), *second[1:])
    return first + second


def take_rows(batch: Batch, rows: Sequence[int], device: torch.device | str | None = None) -> Batch:
    """Rows of a batch, cut to their longest sequence and moved to `device`: (b, T') tensors.

    Args: rows, as `batch.rows` names them, in any order. No rows give one empty row of two tokens with a zero mask: a
    rank that has run out of work uses it to take part in the collectives of the forward and backward pass.
    """
    tensors = {name: x for name, x in vars(batch).items() if x is not None}
    if len(rows):
        index = places(batch, rows)
        width = int(batch.lengths[index].max())
        found = {name: x[index] if x.ndim == 1 else x[index, :width] for name, x in tensors.items()}
    else:
        found = {name: x.new_zeros((1, 2, *x.shape[2:])[: x.ndim]) for name, x in tensors.items()}
        found["lengths"] = torch.tensor([2])
    return Batch(**{name: x.to(device) for name, x in found.items()})


def places(batch: Batch, rows: Sequence[int]) -> torch.Tensor:
    """Where a batch has the rows that are called so in `batch.rows`: (b,) int64."""
    wanted = torch.as_tensor(rows, dtype=torch.long)
    if batch.rows is None:
        return wanted
    index = torch.searchsorted(batch.rows, wanted)
    assert torch.equal(batch.rows[index.clamp(max=len(batch.rows) - 1)], wanted), f"rows {rows} of {batch.rows}"
    return index

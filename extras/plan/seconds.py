"""How long the phases of a step take, by arithmetic: what is computed, read and sent, over how fast a card does that.

Every constant here is a share of what a data sheet promises, or a time of the host, as runs of this repository have
shown them; docs/plan.md says which runs they were fitted to, and how far off they are for others.
"""

import math
from typing import NamedTuple

import numpy as np

from extras.plan.cards import Card

# Decoding
READ_WEIGHTS = 0.80  # share of the memory's bandwidth at which weights are read
READ_CACHE = 0.70  # and keys and values
DECODE_PRODUCTS = 0.60  # share of the peak at which many sequences are multiplied with the weights
DRAW_BYTES = 46  # of logits and log-probs that are moved per entry of the vocabulary and token
LAYER_S = 20e-6  # of small kernels, per layer
STEP_S = 0.5e-3  # between two steps of the GPU
HOST_S, HOST_SEQUENCE_S = 2.75e-3, 7.3e-6  # of the host per step, and per sequence in it
SHARED_HOST_S = 0.8e-3  # more, where GPUs share an engine
REDUCE_S = 12e-6  # of one sum over GPUs that share an engine, of which a layer has two

# Training
PRODUCTS = 0.55  # share of the peak at which products and attention run, forward and backward
HIDDEN_PASSES = 50  # times that a layer's hidden state moves through memory, forward and backward
INNER_PASSES = 13  # times that its widest results move
LOGIT_BYTES = 28  # moved per logit, forward and backward
LINK = 0.65  # share of the bandwidth between GPUs that FSDP reaches
HIDDEN_BEHIND = 0.6  # share of that communication that goes on behind computation
BUS = 0.7  # share of the bandwidth to the host
HOST_ADAMW = 5e8  # parameters that AdamW steps per second on the host of one GPU


class Model(NamedTuple):
    """What of a model costs time."""

    parameters: float
    layers: int
    hidden: int
    inner: float  # widest results of a layer that a token has: gate and up of its MLP, of all its experts
    active: float  # weights that multiply a token, without those of the LM head; of experts those that a token gets
    experts: float  # weights of all experts; 0 in a dense model
    expert_share: float  # share of a layer's experts that a token gets
    head: float  # weights of the LM head
    vocabulary: int
    attention: float  # width of attention, summed over the layers that have it
    cache_bytes: float  # of keys and values of a token
    state_bytes: float = 0.0  # of the recurrent states of a sequence
    adapters: float = 0.0  # parameters of LoRA; 0: all weights learn

    @property
    def learned(self) -> float:
        return self.adapters or self.parameters


# --- decoding


def decode_s(model: Model, card: Card, n: float, context: float, *, shared_by: int = 1, fp8: bool = False) -> float:
    """Seconds in which an engine adds a token to each of n sequences, which have `context` tokens on average."""
    bandwidth, peak = card.memory_gb_s * 1e9 * shared_by, card.tflops * 1e12 * shared_by
    width = 1 if fp8 else 2
    dense = model.active - model.experts * model.expert_share
    touched = 1 - (1 - model.expert_share) ** n  # share of the experts that some sequence needs
    weights = width * (dense + model.experts * touched) + 2 * model.head
    products = 2 * (model.active + model.head) * n / (DECODE_PRODUCTS * peak * (1.4 if fp8 else 1))
    moved = n * (context * model.cache_bytes + 2 * model.state_bytes) / (READ_CACHE * bandwidth)
    drawn = n * model.vocabulary * DRAW_BYTES / (card.memory_gb_s * 1e9)
    layers = model.layers * (LAYER_S + (2 * REDUCE_S if shared_by > 1 else 0))
    on_gpu = max(weights / (READ_WEIGHTS * bandwidth), products) + moved + drawn + layers + STEP_S
    return max(on_gpu, HOST_S + HOST_SEQUENCE_S * n + (SHARED_HOST_S if shared_by > 1 else 0))


class Lengths(NamedTuple):
    """Tokens of prompts and responses. Responses are geometric with a cut, or all as long as the limit."""

    prompt: float
    response: float  # on average, with the cut
    limit: int  # of a response

    def open(self, at: np.ndarray) -> np.ndarray:
        """Share of responses that have more than so many tokens."""
        if self.response >= self.limit * 0.999:
            return (at < self.limit).astype(float)
        return np.where(at < self.limit, np.exp(-at / self._uncut()), 0.0)

    def _uncut(self) -> float:
        """Mean of the geometric lengths before the cut, whose mean with the cut is `response`: by bisection."""
        low, high = self.response, 1e3 * self.limit
        for _ in range(60):
            middle = (low * high) ** 0.5
            cut = middle * (1 - math.exp(-self.limit / middle))
            low, high = (middle, high) if cut < self.response else (low, middle)
        return low

    def squares(self) -> float:
        """Mean of the squared length of prompt and response."""
        at = np.arange(self.limit)
        return self.prompt**2 + float((2 * (self.prompt + at) + 1) @ self.open(at))


def generate_s(
    model: Model, card: Card, lengths: Lengths, n: int, *, slots: int, prompts: float, shared_by: int = 1, fp8=False
) -> float:
    """Seconds in which an engine answers: n responses to `prompts` prompts, at most `slots` at a time.

    While more are waiting, all slots are full. Then they become empty as responses end; the last ones decide how long
    that takes.
    """
    at = np.linspace(0, lengths.limit, 65)
    middle, width = (at[1:] + at[:-1]) / 2, lengths.limit / 64
    last = min(n, slots)
    share = lengths.open(middle)
    alive = 1 - (1 - share) ** last  # chance that any is open
    number = np.maximum(share * last, alive)
    cost = lambda count, has: decode_s(model, card, count, lengths.prompt + has, shared_by=shared_by, fp8=fp8)  # noqa: E731
    seconds = sum(width * a * cost(x / max(a, 1e-9), has) for a, x, has in zip(alive, number, middle, strict=True))
    if n > slots:
        mean = float((share * middle).sum() / max(share.sum(), 1e-9))
        seconds += (n - slots) * lengths.response / slots * cost(slots, mean)
    return seconds + prefill_s(model, card, prompts * lengths.prompt, shared_by)


def prefill_s(model: Model, card: Card, tokens: float, shared_by: int = 1) -> float:
    """Seconds in which an engine reads so many tokens."""
    return 2 * model.active * tokens / (PRODUCTS * card.tflops * 1e12 * shared_by)


# --- passes of the trainer


class Pass(NamedTuple):
    """What a rank's passes of a phase compute."""

    tokens: float  # through the layers
    head_tokens: float  # through the LM head
    squares: float  # sum of the squared lengths of sequences
    micro_batches: int


def pass_s(
    model: Model,
    card: Card,
    work: Pass,
    *,
    backward: bool,
    recompute: str = "none",
    shards: int = 1,
    link_gb_s: float | None = None,
    on_host: bool = False,
) -> float:
    """Seconds of forward passes, or with `backward` of both, of one rank.

    Args: recompute, as --activation-checkpointing; shards, GPUs that share a copy of the weights; on_host, whether the
    weights come over the bus.
    """
    frozen = model.adapters > 0
    factor = 2.0
    if backward:
        factor = (4 if frozen else 6) + (2 if recompute == "full" else 0)
    flops = factor * (model.active * work.tokens)
    flops += (2 if not backward else 4 if frozen else 6) * model.head * work.head_tokens
    flops += (6 if backward else 2) * model.adapters * work.tokens
    flops += (6 + (2 if recompute == "full" else 0) if backward else 2) * model.attention * work.squares
    passes = 1.0 if backward else 0.35
    extra = {"none": 0.0, "selective": 0.4, "full": 0.4}[recompute] if backward else 0.0
    per_token = model.layers * 2 * (HIDDEN_PASSES * model.hidden + INNER_PASSES * model.inner) * (passes + extra)
    moved = per_token * work.tokens + LOGIT_BYTES * model.vocabulary * work.head_tokens * passes
    compute = flops / (PRODUCTS * card.tflops * 1e12) + moved / (READ_WEIGHTS * card.memory_gb_s * 1e9)
    weights, others = 2 * model.parameters, (shards - 1) / shards
    gathers = (2 if backward else 1) * weights
    summed = 4 * model.learned if backward else 0
    sent = 0.0
    if on_host:
        sent = work.micro_batches * (gathers / shards + summed / shards) / (BUS * card.bus_gb_s * 1e9)
    if shards > 1:
        over = (link_gb_s or card.link_gb_s) * 1e9 * LINK
        exposed = work.micro_batches * (gathers + summed) * others / over
        sent += max((1 - HIDDEN_BEHIND) * exposed, exposed - compute)
    return compute + sent


def step_s(model: Model, card: Card, *, shards: int = 1, moments_on_host: bool = False, on_host: bool = False) -> float:
    """Seconds of one step of AdamW on a rank."""
    own = model.learned / shards
    if on_host:
        return own / HOST_ADAMW
    moments = 8 * own / (BUS * card.bus_gb_s * 1e9) if moments_on_host else 0.0
    return moments + 28 * own / (READ_WEIGHTS * card.memory_gb_s * 1e9)


# --- the rest of a step


def push_s(model: Model, *, sleeps: bool) -> float:
    """Seconds in which an engine wakes and gets the policy's weights."""
    return 0.05 + (0.1 if sleeps else 0.0) + 2 * model.parameters / 40e9


def other_s(responses: int) -> float:
    """Seconds of rewards, batches, advantages, and the check of the engine."""
    return 0.3 + 1.5e-4 * responses

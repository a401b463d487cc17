"""How long the phases of a step take, by arithmetic: what is computed, read and sent, over how fast a card does that.

Every constant here is a share of what a data sheet promises, or a time of the host, as runs of this repository have
shown them. docs/plan.md says which runs they were fitted to, and how far off they are for others.
"""

import math
from typing import NamedTuple

import numpy as np

from extras.plan.cards import Card
from extras.plan.memory import Engine, Load, Model, Way
from extras.plan.sizes import Sizes

# Decoding
READ_WEIGHTS = 0.84  # share of the memory's bandwidth at which weights are read
READ_CACHE = 0.79  # and keys and values
DECODE_PRODUCTS = 0.54  # share of the peak at which many sequences are multiplied with the weights
DRAW_BYTES = 45  # of logits and log-probs that are moved per entry of the vocabulary and token
LAYER_S = 21e-6  # of small kernels, per layer
STEP_S = 1.2e-3  # between two steps of the GPU
HOST_S, HOST_SEQUENCE_S = 3.0e-3, 9.8e-6  # of the host per step, and per sequence in it
SHARED_HOST_S = 0.5e-3  # more, where GPUs share an engine
REDUCE_S = 8.5e-6  # of one sum over GPUs that share an engine, of which a layer has two
ROUTED = 0.5  # tokens that would choose as many different experts at random as one token does in a real batch

# Training
PRODUCTS = 0.62  # share of the peak at which products run, forward and backward
ATTENTION = 0.33  # and attention, with flash-attn 2
EXPERTS = 0.29  # of that, what products of experts reach
HIDDEN_PASSES = 40  # times that a layer's hidden state moves through memory, forward and backward
INNER_PASSES = 14  # times that its widest results move
LOGIT_BYTES = 20  # moved per logit, forward and backward
FORWARD = 0.35  # share of these that a forward pass alone has
UNCOMPILED = 7.2  # times as many with --no-compile
RECURRENT_S = 4.5e-12  # per token and entry of a recurrent state, on an H100
LINK = 0.67  # share of the bandwidth between GPUs that FSDP reaches
HIDDEN_BEHIND = 0.63  # share of that communication that goes on behind computation
BUS = 0.66  # share of the bandwidth to the host
LAYER_PASS_S = 6.5e-3  # of the host, for forward and backward of a layer, however few tokens are in a micro-batch
DATA_S = 0.05  # of a step that samples nothing, for its rows
HOST_ADAMW = 1e9  # parameters per second whose gradients 16 cores of the host clip, and that their AdamW steps


# --- decoding


def decode_s(engine: Engine, card: Card, n: float, context: float) -> float:
    """Seconds in which an engine adds a token to each of n sequences, which have `context` tokens on average."""
    model, gpus = engine.sizes, engine.shared_by
    bandwidth, peak = card.memory_gb_s * 1e9 * gpus, card.tflops * 1e12 * gpus
    width = 1 if engine.is_fp8 else 2
    dense = model.active - model.experts * model.expert_share
    touched = 1 - (1 - model.expert_share) ** (ROUTED * n)  # share of the experts that some sequence needs
    weights = width * (dense + model.experts * touched) + 2 * model.head
    products = 2 * (model.active + model.head) * n / (DECODE_PRODUCTS * peak * (1.4 if engine.is_fp8 else 1))
    moved = n * (2 * model.cached(context) + 2 * 4 * model.state) / (READ_CACHE * bandwidth)
    drawn = n * model.vocabulary * DRAW_BYTES / (card.memory_gb_s * 1e9)
    layers = len(model.layers) * (LAYER_S + (2 * REDUCE_S if gpus > 1 else 0))
    on_gpu = max(weights / (READ_WEIGHTS * bandwidth), products) + moved + drawn + layers + STEP_S
    return max(on_gpu, HOST_S + HOST_SEQUENCE_S * n + (SHARED_HOST_S if gpus > 1 else 0))


class Lengths(NamedTuple):
    """Tokens of prompts and responses. Responses are geometric with a cut, or all as long as the limit."""

    prompt: float
    response: float  # on average, with the cut
    limit: int  # of a response

    def open(self, at: np.ndarray) -> np.ndarray:
        """Share of responses that have more than this many tokens."""
        return np.where(at < self.limit, np.exp(-at / self.uncut), 0.0)

    @property
    def uncut(self) -> float:
        """Mean of the geometric lengths before the cut, whose mean with the cut is `response`: by bisection."""
        if self.response >= self.limit * 0.999:
            return math.inf
        low, high = self.response, 1e3 * self.limit
        for _ in range(60):
            middle = (low * high) ** 0.5
            cut = middle * (1 - math.exp(-self.limit / middle))
            low, high = (middle, high) if cut < self.response else (low, middle)
        return low

    def squares(self) -> float:
        """Mean of the squared length of prompt and response."""
        at = np.arange(self.limit) + 0.5
        return self.prompt**2 + float(2 * (self.prompt + at) @ self.open(at))


def generate_s(engine: Engine, card: Card, lengths: Lengths, n: int, *, slots: int, prompts: float) -> float:
    """Seconds in which an engine answers: n responses to `prompts` prompts, at most `slots` at a time.

    While more are waiting, all slots are full. Then they become empty as responses end. The last ones decide how long
    that takes.
    """
    at = np.linspace(0, lengths.limit, 65)
    middle, width = (at[1:] + at[:-1]) / 2, lengths.limit / 64
    last = min(n, slots)
    share = lengths.open(middle)
    alive = 1 - (1 - share) ** last  # chance that any is open
    number = np.maximum(share * last, alive)
    cost = lambda count, has: decode_s(engine, card, count, lengths.prompt + has)  # noqa: E731
    seconds = sum(width * a * cost(x / max(a, 1e-9), has) for a, x, has in zip(alive, number, middle, strict=True))
    if n > slots:
        mean = float((share * middle).sum() / max(share.sum(), 1e-9))
        seconds += (n - slots) * lengths.response / slots * cost(slots, mean)
    return seconds + prefill_s(engine, card, prompts * lengths.prompt)


def prefill_s(engine: Engine, card: Card, tokens: float) -> float:
    """Seconds in which an engine reads this many tokens."""
    return 2 * engine.sizes.active * tokens / (PRODUCTS * card.tflops * 1e12 * engine.shared_by)


# --- passes of the trainer


class Pass(NamedTuple):
    """What a rank's passes of a phase compute."""

    tokens: float  # through the layers
    head_tokens: float  # through the LM head
    squares: float  # sum of the squared lengths of sequences
    micro_batches: int


def pass_s(model: Model, load: Load, way: Way, card: Card, work: Pass, *, learns: bool) -> float:
    """Seconds of forward passes, or if the model `learns` of both, of one rank."""
    sizes, shards, adapters = model.sizes, load.shards, sum(model.sizes.adapters(model.rank))
    frozen, again = adapters > 0, 2 if way.checkpointing == "full" else 0
    weights = (4 if frozen else 6) + again if learns else 2
    others = 6 + again if learns else 2
    experts = sizes.experts * sizes.expert_share
    flops = weights * (sizes.active - experts + experts / EXPERTS) * work.tokens
    flops += (2 if not learns else 4 if frozen else 6) * sizes.head * work.head_tokens
    flops += others * adapters * work.tokens
    attended = (others + 1 if learns else 2) * sizes.attended(work.tokens, work.squares)  # scores are computed again
    passes = 1.0 if learns else FORWARD
    more = {"none": 0.0, "selective": 0.3, "full": 0.4}[way.checkpointing] if learns else 0.0
    of_layers = 2 * (HIDDEN_PASSES * sizes.hidden * len(sizes.layers) + 2 * INNER_PASSES * sizes.inner)
    moved = of_layers * (passes + more) * (1 if load.compiles else UNCOMPILED) * work.tokens
    moved += LOGIT_BYTES * sizes.vocabulary * work.head_tokens * passes
    moved += work.micro_batches * _weights_moved(model, shards, learns=learns)
    compute = (flops / PRODUCTS + attended / ATTENTION) / (card.tflops * 1e12)
    compute += moved / (READ_WEIGHTS * card.memory_gb_s * 1e9)
    compute += sizes.state * work.tokens * RECURRENT_S * passes
    if learns:
        compute = max(compute, work.micro_batches * len(sizes.layers) * LAYER_PASS_S)
    gathers = 2 * sizes.total * (2 if learns else 1)
    summed = 4 * sum(model.learned) if learns else 0
    sent = 0.0
    if way.param_offload:
        # Weights go over the bus as they are kept. Gradients go to the host, and from the second micro-batch on those
        # that are there come to the GPU first, where they are added up.
        both_ways = _kept(model) / 2 * gathers * work.micro_batches + summed * (2 * work.micro_batches - 1)
        sent = both_ways / shards / (BUS * card.bus_gb_s * 1e9)
    if shards > 1:
        over = (card.link_gb_s if shards <= load.local else card.network_gb_s) * 1e9 * LINK
        exposed = work.micro_batches * (gathers + summed) * (shards - 1) / shards / over
        sent += max((1 - HIDDEN_BEHIND) * exposed, exposed - compute)
    if load.sliced > 1:
        over = (card.link_gb_s if load.sliced <= load.local else card.network_gb_s) * 1e9 * LINK
        times = 1 if not learns else 2 if way.checkpointing == "none" else 3
        sent += times * work.tokens * exchanged_in_pass(sizes, load.sliced) / over
    return compute + sent


def exchanged_in_pass(sizes: Sizes, size: int) -> float:
    """Bytes per token that a rank sends in a forward pass to the others that have slices of the same rows: queries,
    keys, values, and what attention gives, 16 bits each, of all layers.
    """
    return 2 * (size - 1) / size * sum(2 * queries + keys for queries, keys in sizes.exchanged(size))


def _weights_moved(model: Model, shards: int, *, learns: bool) -> float:
    """Bytes of weights and gradients that a micro-batch moves through a GPU's memory, however few tokens it has.

    FSDP2 reads a rank's part of the weights, in fp32 if they learn, and writes the whole in bf16, which products read:
    once in a forward pass, and again in a backward pass. That writes gradients in bf16, and reads them, writes them in
    fp32, and adds a rank's part of them to those of other micro-batches.
    """
    learned = sum(model.learned)
    gathered = model.sizes.total * (_kept(model) / shards + 2 + 2)
    return 2 * gathered + learned * (2 + 2 + 4 + 12 / shards) if learns else gathered


def _kept(model: Model) -> int:
    """Bytes in which each weight is kept: float32 if all learn, or 16 bits."""
    return 2 if model.rank or not sum(model.learned) else 4


def step_s(model: Model, load: Load, way: Way, card: Card) -> float:
    """Seconds of one step of AdamW on a rank."""
    parameters = sum(model.learned) / load.shards
    if way.param_offload:
        return parameters / HOST_ADAMW
    moments = 8 * parameters / (BUS * card.bus_gb_s * 1e9) if way.optimizer_offload else 0.0
    return moments + 28 * parameters / (READ_WEIGHTS * card.memory_gb_s * 1e9)


# --- the rest of a step


def push_s(policy: Sizes, *, sleeps: bool, to_others: bool = False) -> float:
    """Seconds in which engines wake and get the policy's weights. `to_others`, whether these are other processes."""
    return 0.05 + (0.1 if sleeps else 0.0) + 2 * policy.total / (2e9 if to_others else 40e9)


def other_s(responses: int) -> float:
    """Seconds of rewards, batches, advantages, and the check of the engine."""
    return 0.25 + 1.5e-4 * responses


def start_s(policy: Sizes, *, samples: bool) -> float:
    """Seconds from the command to the first step."""
    return 35 + 4 * policy.total / 1e9 + (40 if samples else 0)

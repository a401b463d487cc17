"""The memory of a run, by arithmetic: bytes on each GPU by phase, and on the host. Pure functions of sizes and flags.

P parameters of a model, a of them adapters, N ranks that share a copy of it, V tokens of the vocabulary, H the width of
hidden states. In bytes, on each rank:

    weights      4 P / N                  with LoRA (2 P + 4 a) / N; of a model that does not learn 2 P / N
    AdamW        8 P / N                  with LoRA 8 a / N. Offloaded, only those of one parameter in a step
    gradients    4 P / N                  with LoRA 4 a / N
    gathered     2 P on one GPU (LoRA: 2 a), else 2 (root + 2 layers)
    activations  2 (H + R) per token and layer, where R are the widths of the results that "selective" keeps: those of
                 linear layers but the last, and of attention; with LoRA also those of adapters, of their first matrix
                 alone with --compile, where a layer's sum is kept in the place of its parts. "full" keeps 2 H. "none"
                 keeps 2 (R + I + 3 H), I the intermediate size, and 2 V per token for logits
    one layer    4 R per token (without --compile 8 R) while it is computed again and has its gradients, and with
                 several ranks the gradients of its weights in bfloat16 and float32 and this rank's part of their sum,
                 6 + 4 / N per parameter
    logits       10 V (without --compile 18 V) for 2,048 tokens
    engine       2 P / T and its keys and values, T GPUs that share it; at most --gpu-memory-utilization of the GPU

With --param-offload the first three are on the host. Besides, a save in the background has on the host

    copy         12 P / N of what learns and AdamW (LoRA: 12 a / N), and a buffer
    export       on rank 0, 2 P; with LoRA or experts 4 P, of weights as they are trained and as files have them
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from extras.plan.sizes import Sizes

GIB = 2**30
ALONE, TOGETHER = 2.5 * GIB, 3.5 * GIB  # what CUDA, compiled code and graphs take, and with NCCL
WITHOUT_ENGINE = 1.5 * GIB  # of these, if there is no engine
CONTEXT = 1 * GIB  # of these, what is there when the engine starts
ENGINE = 1 * GIB  # of vLLM besides weights and KV cache
STAGING = 2**27  # bytes of the buffer that a save copies through, see rl/run/checkpoint_tensors.py
HEAD_CHUNK = 2048  # tokens whose logits exist at a time, see rl/model/logprobs.py
BLOCK = 16  # tokens of a block of vLLM's KV cache
PROCESS = 5 * GIB  # host memory of a rank with torch, CUDA and vLLM


@dataclass(frozen=True)
class Model:
    """A model that a run holds on each rank, spread over those that share a copy."""

    sizes: Sizes
    rank: int = 0  # of adapters. 0 means that all weights learn
    is_frozen: bool = False
    is_away: bool = False  # on the host while the engine samples. A frozen one also while the policy learns.
    tower_learns: bool = False
    fixed_bytes: int = 2  # of a parameter that does not learn

    @property
    def learned(self) -> tuple[int, ...]:
        """Entries of each parameter that learns. A score head beside adapters is left out."""
        if self.is_frozen:
            return ()
        if self.rank:
            return self.sizes.adapters(self.rank)
        return self.sizes.tensors

    @property
    def count(self) -> int:
        """Parameters that learn."""
        frozen_tower = 0 if self.tower_learns or self.rank or self.is_frozen else self.sizes.tower
        return sum(self.learned) - frozen_tower

    @property
    def fixed(self) -> int:
        """Parameters that do not learn, mostly in 16 bits."""
        return self.sizes.total if self.rank or self.is_frozen else self.sizes.total - self.count


@dataclass(frozen=True)
class Engine:
    """A sampler beside the trainer, or in its place."""

    sizes: Sizes
    length: int  # tokens of a sequence
    sequences: int  # --max-num-seqs
    share: float  # --gpu-memory-utilization
    shared_by: int = 1  # --tensor-model-parallel-size
    is_fp8: bool = False
    gives_back: bool = True  # --free-cache-engine


@dataclass(frozen=True)
class Load:
    """What a run holds. Of `models` the first one is the policy."""

    models: tuple[Model, ...]
    engine: Engine | None
    longest: int  # tokens that a micro-batch must hold
    ranks: int  # that train
    local: int  # of them on one machine
    shards: int  # ranks that share a copy of a model
    saves: bool = True
    compiles: bool = True
    scores: tuple[Sizes, ...] = ()  # reward models, which are on the host unless they score
    sliced: int = 1  # --sequence-parallel-size


class Way(NamedTuple):
    """What the program may choose."""

    checkpointing: str  # "none", "selective" or "full"
    tokens: int  # of a micro-batch
    optimizer_offload: bool = False
    param_offload: bool = False


class Needed(NamedTuple):
    """Bytes."""

    phases: dict[str, float]  # on each GPU
    engine: float  # that the engine takes while it samples, of `phases`
    start: float  # on each GPU when the engine starts: the policy is there, and vLLM wants its whole share to be free
    host: float  # on a machine with rank 0
    parts: dict[str, float]  # of the GPU while it learns

    @property
    def most(self) -> float:
        """Bytes on a GPU in the phase that needs most."""
        return max(self.phases.values())


def needed(load: Load, way: Way, total: float) -> Needed:
    """What a run takes on GPUs with `total` bytes each, if it goes this way."""
    n, away = load.shards, way.param_offload
    others = (ALONE if load.ranks == 1 else TOGETHER) - (0 if load.engine else WITHOUT_ENGINE)
    engine = engine_bytes(load.engine, total) if load.engine else 0.0
    visiting = [x for x in load.models if x.is_frozen and x.is_away]
    staying = [x for x in load.models if not (x.is_frozen and x.is_away)]

    def weights(x: Model) -> float:
        return 0.0 if away else (4 * x.count + x.fixed_bytes * x.fixed) / n

    def moments(x: Model) -> float:
        return 0.0 if away or way.optimizer_offload else 8 * x.count / n

    there, gradients = sum(map(weights, staying)), sum(0.0 if away else 4 * x.count / n for x in staying)
    stepping = sum(map(moments, staying))
    resting = there + stepping + others
    if way.optimizer_offload and not away:
        stepping = max((8 * entries / n for x in staying for entries in x.learned), default=0.0)
    gone = sum(weights(x) + moments(x) for x in staying if x.is_away)
    asleep = 0.0 if load.engine is None or load.engine.gives_back else engine
    micro = max(pass_bytes(x, load, way, learns=not x.is_frozen) for x in staying)
    phases = {"updating": resting + asleep + gradients + micro, "optimizer step": there + others + gradients + stepping}
    phases["optimizer step"] += asleep
    if load.engine:
        phases["sampling"] = resting - gone + engine
    guests = [(weights(x), pass_bytes(x, load, way, learns=False)) for x in visiting]
    guests += [(2 * x.total / n, 2 * x.total * (n == 1)) for x in load.scores]
    if guests:
        phases["scoring"] = resting + asleep + max(map(sum, guests))
    parts = {"weights": there, "gradients": gradients, "AdamW": stepping, "a micro-batch": micro, "others": others}
    start = weights(load.models[0]) + CONTEXT + load.engine.share * total if load.engine else 0.0
    return Needed(phases, engine, start, host_bytes(load, way), parts)


def engine_bytes(x: Engine, total: float) -> float:
    """What the engine takes when it samples: its weights and keys and values, at most its share of the GPU."""
    return min(x.share * total, engine_weights(x) + ENGINE + (x.sequences + 1) * sequence_bytes(x))


def least_engine(x: Engine) -> float:
    """Bytes that an engine needs to sample one sequence at a time. Its share of the GPU must be as much."""
    return engine_weights(x) + ENGINE + 2 * sequence_bytes(x)


def engine_weights(x: Engine) -> float:
    """Bytes of weights on each of the GPUs that share an engine. FP8 has one byte for those of layers."""
    layers = x.sizes.total - x.sizes.root
    return ((1 if x.is_fp8 else 2) * layers + 2 * x.sizes.root) / x.shared_by


def sequence_bytes(x: Engine) -> float:
    """Bytes of keys and values, 16 bits each, of the longest sequence. GPUs that share an engine divide the heads."""
    entries = x.sizes.cached(math.ceil(x.length / BLOCK) * BLOCK) + x.sizes.state
    return 2 * entries / min(x.shared_by, max(1, x.sizes.key_heads))


def pass_bytes(model: Model, load: Load, way: Way, *, learns: bool) -> float:
    """What a pass over a micro-batch needs besides weights and gradients."""
    s, n, a = model.sizes, load.shards, sum(model.sizes.adapters(model.rank))
    tokens = max(way.tokens, load.longest)
    layer, count = s.largest, len(s.layers)
    results = sum(x.results + x.attention for x in s.layers)
    if a and learns:
        both = way.checkpointing == "selective" and not load.compiles
        results += sum(model.rank + both * out for x in s.layers for _, out in x.adapted)
    per_layer = results / count
    alone = n == 1 and not way.param_offload
    gathered = 2.0 * (s.root + 2 * layer.parameters)
    if alone:
        gathered = 2.0 * (a if a and learns else s.total)
    of_logits, of_layer = (10, 4) if load.compiles else (18, 8)  # bytes
    logits = of_logits * s.vocabulary * min(tokens, HEAD_CHUNK) if s.head else 0
    if not learns:
        return gathered + max(tokens * (2 * per_layer + exchanged_bytes(s, load.sliced)), logits)
    per_token = {
        "full": 2 * s.hidden * count,
        "selective": 2 * (s.hidden * count + results),
        "none": 2 * (3 * s.hidden * count + results + s.inner),
    }[way.checkpointing]
    if way.checkpointing == "none" and s.head:
        per_token += (2 if load.compiles else 8) * s.vocabulary
    per_token += exchanged_bytes(s, load.sliced)
    parts = 6 + 4 / n
    in_layer, in_root = (a / count, 0) if a else (layer.parameters, s.root)
    summed = 0.0 if alone else parts * in_layer + 2 * min(s.head, in_root)
    at_the_end = 0.0 if alone else parts * max(in_root, in_layer)
    return gathered + max(tokens * per_token + max(of_layer * tokens * per_layer + summed, logits), at_the_end)


def exchanged_bytes(s: Sizes, size: int) -> float:
    """Bytes per token of the copies of a layer's queries, keys and values, 16 bits each, that ranks which have slices
    of the same rows exchange. Each rank sends and gets as much.
    """
    return 0.0 if size == 1 else 2 * 2 * max(queries + keys for queries, keys in s.exchanged(size))


def host_bytes(load: Load, way: Way) -> float:
    """Host memory of the machine that has rank 0: of all its ranks together."""
    n, local = load.shards, load.local
    learned = sum(x.count for x in load.models)
    each = float(PROCESS)
    if way.optimizer_offload or way.param_offload:
        each += 8 * learned / n
    for x in load.models:
        if way.param_offload:
            each += (8 * x.count + x.fixed_bytes * x.fixed) / n  # weights, and gradients
        elif x.is_away:
            each += (2 * x.fixed + (4 if way.optimizer_offload else 12) * x.count) / n
    each += sum(2 * x.total / n for x in load.scores)
    once = 0.0
    if load.saves:  # of several copies of a model one is saved
        each += STAGING
        once = 12 * learned / n * min(n, local)
        once += sum(2 * x.sizes.total * (2 if x.rank or x.sizes.experts else 1) for x in load.models if not x.is_frozen)
    return local * each + once

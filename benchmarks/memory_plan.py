"""Which flags make a model fit a card? The memory of a GPU by phase, by arithmetic alone, as docs/memory.md has it.

    python benchmarks/memory_plan.py
    python benchmarks/memory_plan.py --gpus 8 --tokens 16384 --sequences 256

Sizes are those of Qwen2.5 and Qwen3-30B-A3B; `plan` has the formulas. A run on a GPU prints a plan of its own at the
start, in which the micro-batch is measured.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.make_model import QWEN3, SHAPES  # noqa: E402
from rl.flags import AtLeast1, check_limits

VOCABULARY = 151936
GIB = 2**30
OTHERS = 1.5 * GIB  # CUDA, NCCL and what compiled code needs
ENGINE = 2 * GIB  # of vLLM besides weights and KV cache: activations and CUDA graphs
STAGING = 2**27  # bytes of the buffer that a save copies through, see rl/run/checkpoint_tensors.py
HEAD_CHUNK = 2048  # tokens whose logits exist at a time, see rl/model/logprobs.py
USABLE = 0.93  # of a card: some of it the driver has, and torch's allocator leaves gaps
CARDS = (24, 48, 80, 141)  # GiB
SHOWN = ("1.5B", "7B", "14B", "32B", "30B-A3B")


class Size(NamedTuple):
    """Parameters of a model, and widths of one of its layers."""

    layer: int  # parameters of a decoder layer
    layers: int
    root: int  # parameters of embedding, last norm and LM head
    hidden: int
    outputs: tuple[int, ...]  # widths of what its products give: q k v, o, gate, up, down
    inputs: tuple[int, ...]  # and of what they take
    attention: int  # width of what attention gives
    kv: int  # width of keys, and of values
    tensors: tuple[int, ...]  # entries of every parameter of the model
    experts: int = 0  # widths of what the products of a token's experts give, together

    @property
    def total(self) -> int:
        return self.layer * self.layers + self.root

    def adapters(self, rank: int) -> int:
        """Parameters of adapters on all linear layers, not on experts: r (in + out) each."""
        return rank * (sum(self.inputs) + sum(self.outputs)) * self.layers


def size_of(shape: str) -> Size:
    """A Qwen2.5, with biases on q, k and v, or a Qwen3 with norms of q and k, and experts that learn as two tensors."""
    if shape in QWEN3:
        hidden, layers, heads, kv_heads, width, count, top_k = QWEN3[shape]
        kv, attention = 128 * kv_heads, 128 * heads
        inputs, outputs = (hidden,) * 3 + (attention,), (attention, kv, kv, hidden)
        experts = (2 * count * hidden * width, count * hidden * width, count * hidden)  # and the router
        of_layer = (*(a * b for a, b in zip(inputs, outputs, strict=True)), *experts, hidden, hidden, 128, 128)
        tables = (VOCABULARY * hidden,) * 2
        tensors, given = (*tables, hidden, *of_layer * layers), top_k * (2 * width + hidden)
        return Size(sum(of_layer), layers, sum(tables) + hidden, hidden, outputs, inputs, attention, kv, tensors, given)
    hidden, layers, heads, kv_heads, intermediate, tied = SHAPES[shape]
    kv = hidden // heads * kv_heads
    inputs, outputs = (hidden,) * 6 + (intermediate,), (hidden, kv, kv, hidden, intermediate, intermediate, hidden)
    products = sum(a * b for a, b in zip(inputs, outputs, strict=True))
    layer = products + hidden + 2 * kv + 2 * hidden  # biases, norms
    tables = (VOCABULARY * hidden,) * (1 if tied else 2)
    of_layer = (*(a * b for a, b in zip(inputs, outputs, strict=True)), hidden, kv, kv, hidden, hidden)
    tensors = (*tables, hidden, *of_layer * layers)
    return Size(layer, layers, sum(tables) + hidden, hidden, outputs, inputs, hidden, kv, tensors)


@dataclass(frozen=True)
class Flags:
    """Flags that decide what memory a run needs."""

    lora_rank: int = 0
    optimizer_offload: bool = False
    param_offload: bool = False
    full_checkpointing: bool = False
    fp8: bool = False

    def __str__(self) -> str:
        words = [
            f"--lora-rank {self.lora_rank}" if self.lora_rank else "",
            "--optimizer-offload" if self.optimizer_offload else "",
            "--param-offload" if self.param_offload else "",
            "--activation-checkpointing full" if self.full_checkpointing else "",
            "--rollout-quantization fp8" if self.fp8 else "",
        ]
        return " ".join(filter(None, words)) or "defaults"


class Plan(NamedTuple):
    """Bytes on each GPU by phase, and on the host of each."""

    sampling: float
    update: float  # a forward and backward pass
    step: float  # of the optimizer
    host: float  # of the first one; the others have no copy for the export
    engine: float  # of `sampling`, what vLLM takes

    @property
    def most(self) -> float:
        return max(self.sampling, self.update, self.step)


def plan(size: Size, flags: Flags, *, gpus: int, tokens: int, sequences: int, length: int) -> Plan:
    """What a run needs on each of its GPUs.

    P parameters, a of them adapters, N GPUs, bytes:
        weights     4 P / N                  LoRA: (2 P + 4 a) / N
        AdamW       8 P / N                  LoRA: 8 a / N           on the host with an offload, but for those of one
                    parameter in a step: the embedding has 8 V H / N
        gradients   4 P / N                  LoRA: 4 a / N
        gathered    2 P on one GPU (LoRA: 2 a), else 2 (root + 2 layers); and with --param-offload the gradients of the
                    root and of a layer, 6 + 4 / N bytes each: in bf16, in float32, and this rank's part of their sum
        activations 2 H a token and layer; "selective" also the results of all products, with LoRA those of A and B too
        logits      10 V for 2,048 tokens
        reduced     several GPUs, when activations and logits are gone: the same gradients, 6 + 4 / N bytes each
        engine      2 P / N (FP8: 1 for weights of layers), and 4 KV a token and layer of keys and values
    With --param-offload weights, gradients and AdamW are on the host. torch pins each weight and each gradient for
    itself there, in the next power of two. Besides, a save in the background has there
        copy        12 P / N of what learns and AdamW (LoRA: 12 a / N), and a buffer
        export      on rank 0, 2 P; with LoRA or experts 4 P, of weights as they are trained and as files have them
    """
    p, a = size.total, size.adapters(flags.lora_rank)
    learned = a or p
    weights, moments, gradients = (2 * p + 4 * a if a else 4 * p) / gpus, 8 * learned / gpus, 4 * learned / gpus
    units, summed = size.root + 2 * size.layer, (6 + 4 / gpus) * (a / size.layers if a else size.root + size.layer)
    gathered = 2 * units if gpus > 1 or flags.param_offload else 2 * learned
    if flags.param_offload:
        gathered += summed
    results = sum(size.outputs) + size.attention + size.experts
    if a:
        results += sum(size.outputs) + len(size.outputs) * flags.lora_rank
    kept = 2 * size.hidden + (0 if flags.full_checkpointing else 2 * results)
    activations = tokens * (kept * size.layers + 3 * 2 * results)  # and those of the layer that is computed again
    logits = 10 * VOCABULARY * min(tokens, HEAD_CHUNK)
    engine = ((1 if flags.fp8 else 2) * size.layer * size.layers + 2 * size.root) / gpus + ENGINE
    engine += sequences * length * 4 * size.kv * size.layers
    passing = activations + logits
    if gpus > 1 and not flags.param_offload:
        passing = max(passing, summed)
    there = 0 if flags.param_offload else weights
    resting = 0 if flags.param_offload or flags.optimizer_offload else moments
    stepping = 0 if flags.param_offload else moments
    if flags.optimizer_offload:
        stepping = min(stepping, 8 * max(size.tensors) / gpus)
    reduced = 0 if flags.param_offload else gradients
    host = moments if flags.param_offload or flags.optimizer_offload else 0
    if flags.param_offload:
        adapters = [flags.lora_rank * width for width in (*size.inputs, *size.outputs)] * size.layers if a else []
        host += pinned(size.tensors, 2 if a else 4, gpus) + pinned(adapters, 4, gpus)
        host += pinned(adapters or size.tensors, 4, gpus)
    export = 2 * p * (2 if a or size.experts else 1)
    host += 12 * learned / gpus + STAGING + export
    return Plan(
        sampling=there + resting + engine + OTHERS,
        update=there + resting + reduced + gathered + passing + OTHERS,
        step=there + stepping + reduced + OTHERS,
        host=host,
        engine=engine,
    )


def pinned(entries: Iterable[int], width: int, gpus: int) -> int:
    """Bytes of host memory for a rank's part of tensors with so many entries of `width` bytes."""
    return sum(1 << (-(-n // gpus) * width - 1).bit_length() for n in entries)


CHOICES = {  # what is tried, the fastest first
    "all weights": [
        Flags(),
        Flags(optimizer_offload=True),
        Flags(optimizer_offload=True, full_checkpointing=True),
        Flags(param_offload=True, full_checkpointing=True),
        Flags(param_offload=True, full_checkpointing=True, fp8=True),
    ],
    "`--lora-rank 32`": [
        Flags(lora_rank=32),
        Flags(lora_rank=32, full_checkpointing=True),
        Flags(lora_rank=32, param_offload=True, full_checkpointing=True),
        Flags(lora_rank=32, param_offload=True, full_checkpointing=True, fp8=True),
    ],
}


@dataclass(frozen=True)
class Args:
    gpus: AtLeast1 = 1  # that share a copy of the model, and an engine
    tokens: AtLeast1 = 4096  # --ppo-max-token-len-per-gpu
    sequences: AtLeast1 = 32  # that the engine decodes at a time
    length: AtLeast1 = 2048  # tokens of a sequence


def tables(args: Args) -> str:
    """Two tables in Markdown: the first choice that fits each card, and GiB by phase of the choices in the first table.

    Raises ValueError if a number is not positive.
    """
    check_limits(args)
    work = dict(gpus=args.gpus, tokens=args.tokens, sequences=args.sequences, length=args.length)
    fits = [f"| model | trained | {' | '.join(f'{card} GB' for card in CARDS)} |", f"|---|---|{'---|' * len(CARDS)}"]
    phases = [
        "| model | flags | sampling | of that vLLM | updating | host |",
        "|---|---|---|---|---|---|",
    ]
    for shape in SHOWN:
        size = size_of(shape)
        for trained, choices in CHOICES.items():
            plans = {flags: plan(size, flags, **work) for flags in choices}
            fastest = [
                next((flags for flags, x in plans.items() if x.most <= USABLE * card * GIB), None) for card in CARDS
            ]
            others = [flags and replace(flags, lora_rank=Flags.lora_rank) for flags in fastest]  # beside the row's
            cells = ["no" if flags is None else "defaults" if flags == Flags() else f"`{flags}`" for flags in others]
            fits.append(f"| {shape} | {trained} | {' | '.join(cells)} |")
            for flags in (flags for flags in choices if flags in fastest):
                x, name = plans[flags], "defaults" if flags == Flags() else f"`{flags}`"
                numbers = (x.sampling, x.engine, max(x.update, x.step), x.host)
                phases.append(f"| {shape} | {name} | {' | '.join(f'{n / GIB:.1f}' for n in numbers)} |")
    return "\n".join([*fits, "", *phases])


if __name__ == "__main__":
    print(tables(tyro.cli(Args, description=__doc__)))

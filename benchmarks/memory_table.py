"""Which memory flags the program chooses for a model and a card, and how much memory that takes, as tables in Markdown.

    python benchmarks/memory_table.py
    python benchmarks/memory_table.py --gpus 8 --gpu-memory-utilization 0.8
    python benchmarks/memory_table.py --long      # long sequences and large models on H100s, as --plan sees them

Nothing is measured: this is what a run of train_grpo.py with its defaults would choose, given enough host memory. For
another script or another model ask it with --plan.

With --long, each cell has the tokens per second and GPU that --plan expects, for sequences of that many tokens, of
which 1,024 are the prompt. Of all --sequence-parallel-size and --tensor-model-parallel-size of up to 16, the table
takes those that leave the most on the GPU, and of these the smallest that are within 3 % of the fastest. "xN" is a
sequence parallel size of N, "tpN" an engine of N GPUs, "moments" and "all" are what is in host memory, and "no" means
that nothing fits.
"""

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_grpo  # noqa: E402
from benchmarks.make_model import config_of  # noqa: E402
from extras.plan import Hardware, cards  # noqa: E402
from extras.plan.memory import GIB  # noqa: E402
from extras.plan.report import plan_of  # noqa: E402
from extras.plan.ways import Choice, DoesNotFit, choose, load_of  # noqa: E402
from rl.flags import AtLeast1, PositiveShare, build, check_limits  # noqa: E402

CARDS = ("24gb", "48gb", "80gb", "141gb")
SHOWN = ("0.5B", "1.5B", "7B", "14B", "32B", "30B-A3B")
TRAINED = {"all weights": 0, "`--lora-rank 32`": 32}
ENOUGH = 2**50  # bytes of host memory
LONG = ("7B", "32B", "72B", "30B-A3B", "235B-A22B")
LENGTHS = (8 * 1024, 32 * 1024, 128 * 1024)  # tokens of a sequence
PROMPT = 1024  # of these
SPREAD = (1, 2, 4, 8, 16)  # ranks that share a sequence or an engine


@dataclass(frozen=True)
class Args:
    gpus: AtLeast1 = 1  # This many GPUs train, all of them in one machine.
    gpu_memory_utilization: PositiveShare = 0.5  # This is as in train_grpo.py.
    max_prompt_length: AtLeast1 = 512  # A prompt has at most this many tokens.
    max_response_length: AtLeast1 = 1024  # A response has at most this many tokens.
    long: bool = False  # Print the table of long sequences, for which the other flags mean nothing.


def tables(args: Args) -> str:
    """Two tables in Markdown: what is chosen for each card, and GiB by phase. Raises ValueError as `check_limits`."""
    check_limits(args)
    lengths = dict(max_prompt_length=args.max_prompt_length, max_response_length=args.max_response_length)
    names = [f"{card.removesuffix('gb')} GB" for card in CARDS]
    first = [f"| model | trained | {' | '.join(names)} |", f"|---|---|{'---|' * len(CARDS)}"]
    second = [
        "| model | trained | card | updating | sampling | of that vLLM | host |",
        "|---|---|---|---|---|---|---|",
    ]
    for shape in SHOWN:
        with tempfile.TemporaryDirectory() as folder:
            config_of(shape).save_pretrained(folder)
            for trained, rank in TRAINED.items():
                share = args.gpu_memory_utilization
                flags = build(train_grpo.Args, model=folder, lora_rank=rank, gpu_memory_utilization=share, **lengths)
                found = [choice(flags, card, args.gpus) for card in CARDS]
                first.append(f"| {shape} | {trained} | {' | '.join(map(cell, found))} |")
                for name, x in zip(names, found, strict=True):
                    if x is not None:
                        phases = x.needed.phases
                        sizes = (phases["updating"], phases["sampling"], x.needed.engine, x.needed.host)
                        numbers = " | ".join(f"{size / GIB:.1f}" for size in sizes)
                        second.append(f"| {shape} | {trained} | {name} | {numbers} |")
    return "\n".join([*first, "", *second])


def choice(flags: train_grpo.Args, card: str, gpus: int) -> Choice | None:
    """What is chosen for cards of this name, or None if nothing fits."""
    hardware = Hardware(int(cards.named(card).card.gib * GIB), ENOUGH, gpus, gpus)
    try:
        return choose(load_of(flags, hardware), flags.memory, hardware)
    except DoesNotFit:
        return None


def cell(x: Choice | None) -> str:
    """A choice in few words."""
    if x is None:
        return "no"
    words = [f"{x.way.checkpointing}, {x.way.tokens}"]
    words += ["moments on the host"] if x.way.optimizer_offload else []
    words += ["all on the host"] if x.way.param_offload else []
    return ", ".join(words)


def long_table(shapes: Sequence[str] = LONG, counts: Sequence[int] = (8, 16, 32, 64)) -> str:
    """The table of long sequences in Markdown, see above."""
    columns = [f"{length // 1024}k, {trained}" for trained in TRAINED for length in LENGTHS]
    lines = [f"| model | H100s | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            config_of(shape, max_position_embeddings=2 * max(LENGTHS)).save_pretrained(folder)
            for gpus in counts:
                cells = [long_cell(folder, gpus, length, rank) for rank in TRAINED.values() for length in LENGTHS]
                lines.append(f"| {shape} | {gpus} | {' | '.join(cells)} |")
    return "\n".join(lines)


def long_cell(model: str, gpus: int, length: int, rank: int) -> str:
    """What --plan expects of the best way to train on sequences of a length, in few words."""
    ways, machine = [], cards.named(f"h100x{gpus}")
    for size, shared_by in itertools.product(SPREAD, SPREAD):
        with contextlib.suppress(ValueError):  # it does not fit, or does not divide something
            flags = build(train_grpo.Args, model=model, lora_rank=rank, tensor_model_parallel_size=shared_by,
                          sequence_parallel_size=size, max_prompt_length=PROMPT,
                          max_response_length=length - PROMPT)  # fmt: skip
            plan = plan_of(flags, machine)
            away = ["all"] * plan.choice.way.param_offload + ["moments"] * plan.choice.way.optimizer_offload
            ways.append((away, plan.step, [f"x{size}"] * (size > 1) + [f"tp{shared_by}"] * (shared_by > 1)))
    if not ways:
        return "no"
    least = next(x for x in ([], ["moments"], ["all"]) if any(x == away for away, _, _ in ways))
    ways = [x for x in ways if x[0] == least]
    fastest = min(step.seconds for _, step, _ in ways)
    _, step, spread = next(x for x in ways if x[1].seconds <= 1.03 * fastest)
    return " ".join([f"{step.tokens / step.seconds / gpus:,.0f}", *spread, *least])


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    print(long_table() if args.long else tables(args))

"""Which memory flags the program chooses for a model and a card, and how much memory that takes, as tables in Markdown.

    python benchmarks/memory_table.py
    python benchmarks/memory_table.py --gpus 8 --gpu-memory-utilization 0.8

Nothing is measured: this is what a run of train_grpo.py with its defaults would choose, given enough host memory. For
another script or another model ask it with --plan.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_grpo  # noqa: E402
from benchmarks.make_model import config_of  # noqa: E402
from extras.plan import Hardware, cards  # noqa: E402
from extras.plan.memory import GIB  # noqa: E402
from extras.plan.ways import Choice, DoesNotFit, choose, load_of  # noqa: E402
from rl.flags import AtLeast1, PositiveShare, build, check_limits  # noqa: E402

CARDS = ("24gb", "48gb", "80gb", "141gb")
SHOWN = ("0.5B", "1.5B", "7B", "14B", "32B", "30B-A3B")
TRAINED = {"all weights": 0, "`--lora-rank 32`": 32}
ENOUGH = 2**50  # bytes of host memory


@dataclass(frozen=True)
class Args:
    gpus: AtLeast1 = 1  # This many GPUs train, all of them in one machine.
    gpu_memory_utilization: PositiveShare = 0.5  # This is as in train_grpo.py.
    max_prompt_length: AtLeast1 = 512  # A prompt has at most this many tokens.
    max_response_length: AtLeast1 = 1024  # A response has at most this many tokens.


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


if __name__ == "__main__":
    print(tables(tyro.cli(Args, description=__doc__)))

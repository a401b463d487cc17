"""Kinds of GPUs that --plan knows, and machines that are named by them, such as h100x8.

Figures are those of the vendor's data sheets: dense bfloat16 with accumulation in float32, never with sparsity.
"""

import os
import re
import subprocess
from typing import NamedTuple

from extras.plan.host import host_memory

GIB = 2**30
VISIBLE = 0.98  # of a card's memory by name, what CUDA shows: a card of 24 GB has 23.5 GiB


class Card(NamedTuple):
    """One GPU, and what is usually around it."""

    name: str
    gib: float  # of memory that CUDA shows, in GiB
    tflops: float = 0  # dense bfloat16, in 1e12 operations per second. 0 means unknown, as all below but the host
    memory_gb_s: float = 0  # to the card's memory
    link_gb_s: float = 0  # to another GPU of the same host, in one direction
    bus_gb_s: float = 0  # to the host, in one direction
    network_gb_s: float = 0  # to a GPU of another host
    host_gib: float = 64  # of host memory per GPU of a usual machine


KINDS = {
    "b200": Card("B200 180 GB", 178.4, 2250, 7700, 900, 64, 50, 256),
    "h200": Card("H200 141 GB", 139.8, 989, 4800, 450, 64, 50, 256),
    "h100": Card("H100 80 GB", 79.2, 989, 3350, 450, 64, 50, 256),
    "h800": Card("H800 80 GB", 79.2, 989, 3350, 200, 64, 50, 256),
    "a100": Card("A100 80 GB", 79.2, 312, 2039, 300, 32, 25, 256),
    "a100-40gb": Card("A100 40 GB", 39.4, 312, 1555, 300, 32, 25, 128),
    "l40s": Card("L40S 48 GB", 44.4, 362, 864, 25, 32, 12, 96),
    "l4": Card("L4 24 GB", 22.0, 121, 300, 25, 32, 12, 48),
    "a10": Card("A10 24 GB", 22.0, 125, 600, 25, 32, 12, 64),
    "rtxa6000": Card("RTX A6000 48 GB", 47.4, 155, 768, 25, 32, 1, 64),
    "rtx5090": Card("RTX 5090 32 GB", 31.4, 209, 1792, 30, 64, 1, 64),
    "rtx4090": Card("RTX 4090 24 GB", 23.5, 165, 1008, 12, 32, 1, 64),
    "rtx3090": Card("RTX 3090 24 GB", 23.6, 71, 936, 12, 32, 1, 64),
}
SOURCES = {  # of these figures
    "b200": "https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet",
    "h200": "https://www.nvidia.com/en-us/data-center/h200/",
    "h100": "https://www.nvidia.com/en-us/data-center/h100/ (SXM)",
    "h800": "https://arxiv.org/abs/2505.09343: an H100 with NVLink of 400 instead of 900 GB/s in both directions",
    "a100": "https://www.nvidia.com/en-us/data-center/a100/ (SXM)",
    "a100-40gb": "https://www.nvidia.com/en-us/data-center/a100/ (SXM)",
    "l40s": "https://www.nvidia.com/en-us/data-center/l40s/",
    "l4": "https://www.nvidia.com/en-us/data-center/l4/",
    "a10": "https://www.nvidia.com/en-us/data-center/products/a10-gpu/",
    "rtxa6000": "https://www.nvidia.com/en-us/design-visualization/rtx-a6000/",
    "rtx5090": "NVIDIA RTX Blackwell GPU Architecture, appendix",
    "rtx4090": "NVIDIA Ada GPU Architecture, appendix; its cards talk through the host",
    "rtx3090": "NVIDIA Ampere GA102 GPU Architecture, appendix",
}
PER_HOST = 8  # GPUs of one host at most


class Machine(NamedTuple):
    """GPUs of one kind, in hosts of at most 8."""

    card: Card
    gpus: int
    host_gib: float  # of memory in one host

    @property
    def hosts(self) -> int:
        """How many machines that takes."""
        return -(-self.gpus // PER_HOST)

    def __str__(self) -> str:
        of = f" in {self.hosts} hosts" if self.hosts > 1 else ""
        return f"{self.gpus} x {self.card.name}{of}, {self.host_gib:.0f} GiB of host memory{' each' if of else ''}"


def named(text: str, host_gib: float | None = None) -> Machine:
    """A machine by its name: KIND, KINDxCOUNT, KIND-40gbxCOUNT for a card with this much memory, or 24gbxCOUNT for a
    card about which nothing else is known. "here" is this machine.

    Args: host_gib, of memory in one host; by default that of a usual machine with such cards. Raises ValueError for a
    name that says nothing.
    """
    if text == "here":
        return of_this_machine(host_gib)
    word = text.lower().replace("_", "-")
    kind, count = (word, "1") if _card(word) else re.fullmatch(r"(.*?)(?:x(\d+))?", word).groups("1")
    if (card := _card(kind)) is None or not 1 <= int(count) <= 65536:
        raise ValueError(
            f"--plan {text}: no such machine; give a kind of GPU and how many there are, such as h100x8. The kinds are "
            f"{', '.join(KINDS)}. 24gbx2 is two cards with 24 GB about which nothing else is known, and h100-40gbx2 is "
            "two H100s with 40 GB"
        )
    each = min(int(count), PER_HOST)
    return Machine(card, int(count), each * card.host_gib if host_gib is None else host_gib)


def _card(kind: str) -> Card | None:
    if kind in KINDS:
        return KINDS[kind]
    parts = re.fullmatch(r"(?:(\w+)-)?(\d{1,4})gb", kind)
    if parts is None or (parts[1] is not None and parts[1] not in KINDS) or int(parts[2]) == 0:
        return None
    gib = VISIBLE * int(parts[2])
    if parts[1] is None:
        return Card(f"{parts[2]} GB", gib)
    of_kind = KINDS[parts[1]]
    return of_kind._replace(name=f"{of_kind.name.rsplit(' ', 2)[0]} {parts[2]} GB", gib=min(gib, of_kind.gib))


def of_this_machine(host_gib: float | None = None) -> Machine:
    """The GPUs of this machine, by nvidia-smi, which makes no CUDA context. Raises ValueError if there is none."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        lines = []
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        lines = lines[: len(visible.split(",")) if visible else 0]
    if not lines:
        raise ValueError(
            "--plan: this machine has no GPU that nvidia-smi can see; name the GPUs, such as --plan h100x8"
        )
    return machine_of("\n".join(lines), host_memory() / GIB if host_gib is None else host_gib)


def machine_of(listing: str, host_gib: float) -> Machine:
    """A machine from the lines "name, MiB" of nvidia-smi. All cards count as the smallest one."""
    cards = [line.rsplit(",", 1) for line in listing.strip().splitlines()]
    name, mib = min(cards, key=lambda x: int(x[1]))
    squeezed, gib = re.sub(r"[^a-z0-9]", "", name.lower()), int(mib) / 1024
    near = [card for kind, card in KINDS.items() if kind.split("-")[0] in squeezed]
    card = min(near, key=lambda x: abs(x.gib - gib), default=Card(name.strip(), gib))
    return Machine(card._replace(gib=min(card.gib, gib)) if abs(card.gib - gib) > 2 else card, len(cards), host_gib)

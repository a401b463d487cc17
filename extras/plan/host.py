"""The memory of this machine."""

import os
from pathlib import Path

import torch

from extras.plan import Hardware


def host_memory(root: Path = Path("/")) -> int:
    """Bytes that the processes of this container may have on the host: what the machine has, or the smallest limit of
    the control groups that this process is in. Below `root` are proc and sys.
    """
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    limits = [int(fields["MemTotal"].split()[0]) * 1024]
    groups = (root / "proc/self/cgroup").read_text().splitlines() if (root / "proc/self/cgroup").exists() else []
    for number, controllers, path in (line.split(":", 2) for line in groups):
        if number == "0":  # the second version of control groups
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [x for x in path.split("/") if x and x != ".."]
        for depth in range(len(parts) + 1):
            file = base.joinpath(*parts[:depth], name)
            text = file.read_text().strip() if file.exists() else "max"
            limits += [int(text)] if text.isdigit() else []
    return min(limits)


def hardware() -> Hardware:
    """What this rank sees, if it has a GPU."""
    ranks, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if local > (there := torch.cuda.device_count()):
        raise ValueError(f"torchrun --nproc_per_node {local}: this machine has {there} GPU(s); start one rank for each")
    gpu = torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")))[1]
    return Hardware(gpu, host_memory(), ranks, local)

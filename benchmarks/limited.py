"""Run a program as if its GPU were smaller: what is beyond a given number of GiB is taken before it begins.

    python benchmarks/limited.py 24 train_grpo.py --model models/qwen-1.5b-random ...
    torchrun --nproc_per_node 2 benchmarks/limited.py 80 benchmarks/step_time.py --shape 14B --tokenizer T

The program sees a GPU with the given number of GiB, since torch says so to whoever asks how much memory there is and
how much of it is free. So --gpu-memory-utilization is a share of these, and memory flags are chosen for them.
memory_gb/* in the metrics leave out what is taken, too. The largest use of memory, which is read five times per second,
is printed at the end.
"""

import os
import runpy
import sys
import threading
from pathlib import Path

import torch


def watch(most: list[float], stop: threading.Event, device: torch.device) -> None:
    """Keep the most GiB of a GPU that were ever in use, by anybody, in `most`."""
    while not stop.wait(0.2):
        free, total = torch.cuda.mem_get_info(device)
        most[0] = max(most[0], (total - free) / 2**30)


def shrink(total: int) -> None:
    """Let torch say that a GPU has `total` bytes. How much is free stays as it is."""
    free_and_all, of_accelerator = torch.cuda.mem_get_info, torch.accelerator.get_memory_info
    torch.cuda.mem_get_info = lambda device=None: (free_and_all(device)[0], total)
    torch.accelerator.get_memory_info = lambda device=None: (of_accelerator(device)[0], total)


def main(gib: float, file: str) -> None:
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    sys.path.insert(0, str(Path(file).parent))
    if not torch.cuda.is_available():
        print("there is no GPU that could be made smaller", flush=True)
        runpy.run_path(file, run_name="__main__")
        return
    torch.cuda.set_device(device)
    # torch's own limit would count what a sleeping engine has given back.
    taken = torch.cuda.mem_get_info(device)[1] - int(gib * 2**30)
    torch.cuda.caching_allocator_alloc(taken, device)
    print(f"{device}: {taken / 2**30:.1f} GiB are taken, {gib:g} are left", flush=True)
    shrink(int(gib * 2**30))
    most, stop = [0.0], threading.Event()
    threading.Thread(target=watch, args=(most, stop, device), daemon=True).start()
    try:
        runpy.run_path(file, run_name="__main__")
    finally:
        stop.set()
        print(f"{device}: at most {most[0]:.1f} GiB were in use of the {gib:g} that were left", flush=True)


if __name__ == "__main__":
    limit, script = float(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    main(limit, script)

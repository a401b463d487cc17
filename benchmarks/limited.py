"""Run a program as if its GPU were smaller: torch may take so many GiB of it, and what is beyond ends the program.

    python benchmarks/limited.py 24 benchmarks/step_time.py --shape 7B --lora-rank 32 --param-offload \\
        --gpu-memory-utilization 0.15

vLLM takes memory that sleeps and wakes from the driver, which no limit of torch's covers: give it its share of the
whole GPU, such as 22 of 141 GiB. What was in use at most, by both, is printed at the end.
"""

import runpy
import sys
import threading
from pathlib import Path

import torch


def watch(most: list[float], stop: threading.Event) -> None:
    """Keep the most GiB of this GPU that were ever in use, by anybody, in `most`."""
    while not stop.wait(0.2):
        free, total = torch.cuda.mem_get_info()
        most[0] = max(most[0], (total - free) / 2**30)


def main(gib: float, file: str) -> None:
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    torch.cuda.set_per_process_memory_fraction(min(gib / total, 1.0))
    most, stop = [0.0], threading.Event()
    threading.Thread(target=watch, args=(most, stop), daemon=True).start()
    sys.path.insert(0, str(Path(file).parent))
    try:
        runpy.run_path(file, run_name="__main__")
    finally:
        stop.set()
        print(f"most GPU memory in use: {most[0]:.1f} GiB of the {gib:g} that were allowed", flush=True)


if __name__ == "__main__":
    limit, script = float(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    main(limit, script)

"""Seconds and memory of the phases of a step."""

import time

import torch

from rl.ranks import Ranks
from rl.run import watchdog


class Clock:
    """With `clock = Clock(ranks)`, `clock("gen")` closes a phase. It notes its seconds and, on CUDA, the memory in use.

    Memory is the device's own count at the end of the phase, with torch's cached blocks and vLLM's pool. (torch's
    counters also count what vLLM has given back while asleep.) The cache only grows within a phase, so this is close to
    the phase's peak.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, float] = {}
        self.start = self.last = self._now()
        watchdog.beat()

    def _now(self) -> float:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)
        return time.perf_counter()

    def __call__(self, phase: str) -> None:
        """Close a phase. For the watchdog (--stall-timeout) this is a sign of life."""
        now = self._now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        if self.ranks.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.ranks.device)
            self.memory[phase] = (total - free) / 2**30
        self.last = now
        watchdog.beat()

    def metrics(self, *, num_tokens: int, num_generated: int | None = None) -> dict[str, float]:
        """timing_s/<phase> and timing_s/step in seconds, memory_gb/<phase> in GiB, and tokens per second.

        perf/throughput is defined as in verl, as the step's tokens, prompts included, divided by its seconds and the
        number of ranks. With `num_generated`, tokens that were sampled, there are perf/gen_tokens_per_s, while
        generating, and perf/total_num_tokens too.
        """
        step = self._now() - self.start
        numbers = {f"timing_s/{k}": v for k, v in self.seconds.items()} | {"timing_s/step": step}
        numbers |= {f"memory_gb/{k}": v for k, v in self.memory.items()}
        numbers["perf/throughput"] = num_tokens / (step * self.ranks.size)
        if num_generated is not None:
            numbers |= {"perf/total_num_tokens": float(num_tokens), "perf/time_per_step": step}
            if "gen" in self.seconds:
                numbers["perf/gen_tokens_per_s"] = num_generated / self.seconds["gen"]
        return numbers

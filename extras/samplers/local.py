"""The samplers that a run starts on its first machine, and starts again when they end."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from extras.samplers import SamplerFlags, protocol
from extras.systems import without_ranks
from rl import children
from rl.ranks import Ranks

MAX_RESTARTS = 3  # of a sampler, in a row in which it finishes no group


@dataclass
class LocalSampler:
    """A sampler that this run starts."""

    device: str | None  # its GPUs, as CUDA_VISIBLE_DEVICES has them. None: no GPU
    process: subprocess.Popen | None = None
    starts: int = 0  # since it has finished a group
    name: str = ""  # how it calls itself

    @property
    def is_given_up(self) -> bool:
        """Whether it has ended too often to be started again."""
        return self.starts > MAX_RESTARTS


class LocalSamplers:
    """Args: devices, the GPUs of each sampler, or None without GPUs; address and token, of the run."""

    def __init__(self, devices: Sequence[str | None], address: str, token: str):
        self.samplers = [LocalSampler(device) for device in devices]
        self.address, self.token = address.replace("0.0.0.0", "127.0.0.1"), token

    def start_missing(self) -> None:
        """Start those that do not run, and that are not given up."""
        for local in self.samplers:
            if local.process is None and not local.is_given_up:
                local.starts += 1
                local.process = self._start(local.device)
                local.name = protocol.name_of(local.process.pid)

    def ended(self) -> Iterator[tuple[LocalSampler, int]]:
        """Each whose process has ended since the last call, with its exit code."""
        for local in self.samplers:
            if local.process is not None and (exit_code := local.process.poll()) is not None:
                local.process = None
                yield local, exit_code

    def has_finished(self, name: str) -> None:
        """The sampler of this name has finished a group."""
        for local in self.samplers:
            local.starts = 1 if local.name == name else local.starts

    def forgive(self) -> None:
        """A prompt was dropped, since it ends samplers: that was not their fault."""
        for local in self.samplers:
            local.starts = min(local.starts, 1)

    def close(self) -> None:
        """Wait until all have ended, but not for long."""
        for process in filter(None, (local.process for local in self.samplers)):
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, device: str | None) -> subprocess.Popen:
        env = without_ranks(os.environ) | {protocol.TOKEN: self.token, protocol.PARENT: str(os.getpid())}
        env |= {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        return children.start("extras.samplers.sampler.run", "--connect", self.address, env=env)


def devices_of(flags: SamplerFlags, size: int, ranks: Ranks) -> list[str | None]:
    """`size` GPUs for each sampler that the run starts, as "0,1", or None on a machine without. Raises ValueError,
    naming the flag, if there are too few GPUs without a trainer, or if another number of them is named.
    """
    named, needed = flags.sampler_devices, flags.samplers * size
    each = "" if size == 1 else f" with {size} GPUs each (--tensor-model-parallel-size)"
    if named is not None and len(named) != needed:
        need = f"as --samplers {flags.samplers}{each} needs them"
        raise ValueError(f"--sampler-devices {named} must name {needed} GPU(s), {need}")
    if ranks.device.type == "cpu":
        return [None] * flags.samplers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    devices = list(named or visible[int(os.environ.get("LOCAL_WORLD_SIZE", "1")) :])
    if len(devices) < needed:
        raise ValueError(
            f"--samplers {flags.samplers}{each}: {len(devices)} of this machine's {len(visible)} GPUs have no trainer; "
            "start fewer trainers with torchrun --nproc_per_node, or name GPUs with --sampler-devices"
        )
    return [",".join(devices[i : i + size]) for i in range(0, needed, size)]

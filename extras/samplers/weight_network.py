"""Weights for samplers over the network, by gloo (TCP) or by NCCL between GPUs.

    run:      outbox.offer(name, manifest)  what the sampler is told; a thread waits for it, and sends
    sampler:  Receiving(offer, host)        a thread that receives into the host's memory while sampling goes on

Each transfer has a process group of its own with two ranks, 0 sends and 1 receives, which is gone afterwards. So a
side that dies, hangs or is cut off costs the other this transfer, after a time without progress, and nothing else.

What is told travels encrypted by the run's token (protocol.py), and has 64 random bytes each way: the sampler sends
`key` before it gets anything, and takes nothing that does not begin with `mark`. The weights are not encrypted.
"""

import contextlib
import datetime
import itertools
import os
import secrets
import socket
import sys
import threading
import urllib.parse
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from extras.samplers.weight_files import ALIGNMENT, open_weights, tensors_in
from rl.console import say

CHUNK = 64 * 2**20  # bytes
# Set while a group is made. Then no thread of torch's watches it, which would end this process with the other side.
NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
environment_lock = threading.Lock()


class Transfer(threading.Thread):
    """One side of a transfer. `error` says what has ended it too early."""

    def __init__(self, offer: dict[str, Any], device: torch.device):
        super().__init__(name=f"weights {offer['version']}", daemon=True)
        os.environ.setdefault(NO_WATCHDOG, "0")  # changing it later does not move the environment, which others read
        self.offer, self.device, self.error = offer, device, None
        self.patience = datetime.timedelta(seconds=offer["patience_s"])

    def run(self) -> None:
        """Make the transfer."""
        try:
            self.transfer()
        except Exception as error:  # there are many kinds. All of them mean that it has failed.
            # The error itself would hold on to the group. torch's have a hundred lines.
            self.error = f"{type(error).__name__}: {error}".partition("\n")[0]

    def make_group(self, store: dist.Store, rank: int, address: str) -> Any:
        """Join the group. Args: address, of this machine, at which the other side reaches it."""
        if self.offer["transfer"] == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.patience
            with environment_lock:
                before, os.environ[NO_WATCHDOG] = os.environ[NO_WATCHDOG], "1"
                try:
                    return dist.ProcessGroupNCCL(store, rank, 2, options)
                finally:
                    os.environ[NO_WATCHDOG] = before
        options = dist.ProcessGroupGloo._Options()
        options._timeout = self.patience
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        return dist.ProcessGroupGloo(store, rank, 2, options)

    def move(self, group: Any, memory: Tensor, *, sends: bool) -> None:
        """Send or receive bytes on the host, two chunks at a time. Raises RuntimeError if one takes too long."""
        pending: deque[tuple[Any, Tensor, Tensor]] = deque()
        with self._buffers() as buffers:
            for chunk, buffer in zip(memory.split(self.offer["chunk"]), itertools.cycle(buffers), strict=False):
                if len(pending) == len(buffers):
                    self._finish(*pending.popleft(), sends)
                x = chunk if buffer is None else buffer[: len(chunk)]
                if sends:
                    x.copy_(chunk)
                start = group.send if sends else group.recv
                pending.append((start([x], 1 - group.rank(), 0), x, chunk))
            while pending:
                self._finish(*pending.popleft(), sends)

    def _finish(self, work: Any, x: Tensor, chunk: Tensor, sends: bool) -> None:
        work.wait(self.patience)
        if not sends:
            chunk.copy_(x)

    @contextlib.contextmanager
    def _buffers(self) -> Iterator[list[Tensor | None]]:
        """Memory of the GPU, and a stream that no step of training or sampling waits for. A CPU needs neither."""
        if self.device.type == "cpu":
            yield [None, None]
            return
        torch.cuda.set_device(self.device)  # of this thread
        buffers = [torch.empty(self.offer["chunk"], dtype=torch.uint8, device=self.device) for _ in range(2)]
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())  # on which others have used this memory
        with torch.cuda.stream(stream):
            yield buffers
            stream.synchronize()


class Sending(Transfer):
    """The run's side."""

    def __init__(self, offer: dict[str, Any], host: str, device: torch.device, memory: Tensor):
        self.listener = socket.create_server((host, 0))
        self.port = self.listener.getsockname()[1]
        super().__init__(offer | {"port": self.port}, device)
        self.host, self.memory = host.replace("0.0.0.0", "127.0.0.1"), memory

    def run(self) -> None:
        """Send, and let the weights go."""
        super().run()
        self.memory = None
        if self.error is not None:
            say(f"{self.name} have not reached a sampler: {self.error}", sys.stderr)

    def transfer(self) -> None:
        """Wait for the sampler, and send."""
        where = dict(host_name=self.host, port=self.port, is_master=True, master_listen_fd=self.listener.detach())
        store = dist.TCPStore(**where, wait_for_workers=False, timeout=self.patience)
        group = self.make_group(store, 0, store.get("address").decode())
        try:
            key = torch.empty(len(self.offer["key"]), dtype=torch.uint8)
            self.move(group, key, sends=False)
            if not secrets.compare_digest(key.numpy().tobytes(), self.offer["key"]):
                raise PermissionError("who asks for the weights does not know what only samplers of the run are told")
            self.move(group, self.memory, sends=True)
            store.get("has received")
        finally:
            group.abort()


class Receiving(Transfer):
    """The sampler's side. Args: offer, what the run has told; host, of the run, as this machine reaches it."""

    def __init__(self, offer: dict[str, Any], host: str):
        on_gpu = offer["transfer"] == "nccl"
        super().__init__(offer, torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))
        self.host, self.memory = host, None

    def transfer(self) -> None:
        """Ask for the weights, and receive."""
        with socket.create_connection((self.host, self.offer["port"]), self.patience.total_seconds()) as probe:
            here, address = probe.getsockname()[0], probe.getpeername()[0]  # refused if the run has given up
        store = dist.TCPStore(address, self.offer["port"], is_master=False, timeout=self.patience)
        store.set("address", address)
        group = self.make_group(store, 1, here)
        try:
            self.move(group, torch.frombuffer(bytearray(self.offer["key"]), dtype=torch.uint8), sends=True)
            memory = torch.empty(self.offer["bytes"], dtype=torch.uint8)
            self.move(group, memory, sends=False)
            if memory[:ALIGNMENT].numpy().tobytes() != self.offer["mark"]:
                raise PermissionError("what has come is not from the run")
            self.memory = memory
            store.set("has received", "")
        finally:
            group.abort()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) pairs on the host. Raises ConnectionError if they have not come."""
        if self.memory is None:
            raise ConnectionError(f"{self.offer['transfer']}, {self.host}: {self.error}")
        return tensors_in(self.memory.numpy(), self.offer)


class Outbox:
    """The run's transfers. Args: transfer, "gloo" or "nccl"; address, at which the run listens; device, of rank 0;
    patience_s, seconds without progress after which a transfer has failed.

    Raises ValueError, naming the flag, if this machine has no GPU, or samplers do not come by TCP.
    """

    def __init__(self, transfer: str, address: str, device: torch.device, patience_s: float):
        if transfer == "nccl" and device.type != "cuda":
            raise ValueError("--weights-transfer nccl: this machine has no GPU; give gloo")
        if (where := urllib.parse.urlparse(address)).scheme != "tcp":
            raise ValueError(f"--weights-transfer {transfer}: --sampler-address {address} must begin with tcp://")
        self.host, self.device = where.hostname, device if transfer == "nccl" else torch.device("cpu")
        os.environ.setdefault(NO_WATCHDOG, "0")  # before there are other threads
        self.terms = {"transfer": transfer, "patience_s": patience_s, "chunk": CHUNK}
        self.sending: dict[str, Sending] = {}

    def offer(self, name: str, manifest: dict[str, Any]) -> dict[str, Any] | None:
        """What to tell a sampler of newer weights: those on their way to it, or else the newest. None: ask again.

        Args: manifest, of the newest weights, which `WeightWriter` gave.
        """
        one = self.sending.get(name)
        is_there = one is not None and one.error is None and one.offer["version"] == manifest["version"]
        if one is None or not (one.is_alive() or is_there):
            try:
                memory = torch.frombuffer(open_weights(manifest), dtype=torch.uint8)
            except FileNotFoundError:  # newer ones are just taking their place
                return None
            terms = self.terms | {"key": secrets.token_bytes(ALIGNMENT)}
            self.sending[name] = one = Sending(manifest | terms, self.host, self.device, memory)
            one.start()
        return one.offer

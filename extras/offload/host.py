"""Host memory for what belongs to a model: weights and gradients for good, moments between steps, all for a while."""

import mmap
import os
import weakref

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from rl.model.sharding import own_part, with_part


class HostMemory:
    """The home of a model of --param-offload, see `rl.model.sharding.Memory`."""

    policy = CPUOffloadPolicy(pin_memory=False)

    def empty_like(self, like: Tensor, device: torch.device) -> Tensor:
        """Room for a weight: FSDP2 would pin twice as much as a weight takes."""
        return _pinned(like, device)


def offload(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Move a sharded model, and its optimizer's state, to the host, when no graph waits for its backward pass."""
    onload(model, torch.device("cpu"), optimizer)
    torch.cuda.empty_cache()


def onload(model: nn.Module, device: torch.device, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Undo `offload`, bit by bit. Neither does anything to a model whose home is the host."""
    if getattr(model, "stays_on_host", False):
        return
    model.to(device)
    for state in optimizer.state.values() if optimizer else ():
        for kind, x in state.items():
            if kind != "step":  # a number. AdamW wants it on the device if fused, on the host if not.
                state[kind] = x.to(device)


def keep_moments_on_host(optimizer: torch.optim.AdamW, device: torch.device) -> None:
    """From now on the moments of an optimizer are in host memory, pinned if `device` is a GPU. That changes no bit.

    A step goes from parameter to parameter: its moments come to the device, AdamW steps it, and its moments go back.
    """
    own_step = optimizer.step
    homes: dict[tuple[Tensor, str], Tensor] = {}  # by parameter and kind of moment

    def move(x: Tensor, *, home: bool) -> None:
        for kind, moment in optimizer.state.get(x, {}).items():
            if kind == "step":  # a number
                continue
            part = own_part(moment)
            if (x, kind) not in homes:
                homes[x, kind] = _pinned(part, device)
            part = homes[x, kind].copy_(part) if home else part.to(device, copy=True)
            optimizer.state[x][kind] = with_part(moment, part)

    def step() -> None:
        grads = {x: x.grad for group in optimizer.param_groups for x in group["params"] if x.grad is not None}
        for x in grads:
            x.grad = None
        for x, grad in grads.items():
            move(x, home=False)
            x.grad = grad
            own_step()
            x.grad = None
            move(x, home=True)
        for x, grad in grads.items():
            x.grad = grad

    for x in optimizer.state:
        move(x, home=True)
    optimizer.step = step


def step_on_all_cores(optimizer: torch.optim.AdamW) -> None:
    """From now on an optimizer on the host steps with all cores of this rank: those that the process may use, divided
    by the ranks of the machine. That changes no bit, since AdamW computes each element by itself.

    Otherwise one core would do all of it. With several ranks, torchrun sets OMP_NUM_THREADS to 1. With a GPU, vLLM's
    worker sets the number of torch's threads in this process to 1.
    """
    own_step = optimizer.step
    cores = max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"]))

    def step() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(cores)
        own_step()
        torch.set_num_threads(before)

    optimizer.step = step


def _pinned(like: Tensor, device: torch.device) -> Tensor:
    """Host memory for a tensor, pinned if `device` is a GPU: torch's own pinned memory comes in powers of two."""
    pages = np.frombuffer(mmap.mmap(-1, max(1, like.nbytes), mmap.MAP_PRIVATE), np.uint8)
    if device.type == "cuda":
        cudart, address = torch.cuda.cudart(), pages.ctypes.data
        torch.cuda.check_error(cudart.cudaHostRegister(address, pages.nbytes, 0))
        # Before it is freed: memory that is still registered can neither be used by others nor registered again.
        weakref.finalize(pages, cudart.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(pages)[: like.nbytes].view(like.dtype).view(like.shape)

"""Host memory for what belongs to a model: weights and gradients for good, moments between steps, all for a while."""

import contextlib
import functools
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from rl.model.sharding import own_part, with_part

CHUNK = 2**24  # numbers of a gradient that come back to the device at a time, where another micro-batch's are added
# What `keep_gradients` has to find in FSDP2: attributes of its groups of parameters, and of each parameter.
OF_GROUPS = "post_backward", "fsdp_params", "device_handle"
OF_PARAMETERS = "sharded_param", "offload_to_cpu", "to_sharded_dtensor", "grad_offload_event"


class HostMemory:
    """The home of a model of --param-offload, see `rl.model.sharding.Memory`."""

    policy = CPUOffloadPolicy(pin_memory=False)

    def move_in(self, model: nn.Module) -> Callable[..., Tensor]:
        """Give a place on the host to each gradient of a model that FSDP2 shards. They are clipped by all cores.
        Returns a function of (tensor, device) that makes room for a weight, since FSDP2 would pin twice as much as a
        weight takes.
        """
        model.clip_gradients = clip_on_all_cores
        for module in model.modules():
            for group in groups_of(module):
                keep_gradients(group)
        return _pinned


def groups_of(unit: Any) -> list[Any]:
    """FSDP2's groups of parameters of a unit, or none if it has no attribute where a version that is known has them."""
    state = getattr(unit, "_get_fsdp_state", lambda: None)()
    # torch 2.13 and newer have a list, and older versions one group or none.
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def keep_gradients(group: Any) -> None:
    """From now on each gradient of a group has one place in host memory, pinned if there is a GPU. That changes no bit.

    FSDP2 would copy the gradients of every micro-batch to new memory, which the kernel has to find and to clear, and it
    would wait for each copy. Here the gradients of several micro-batches are added up on the device. This does nothing
    to a group of a version of FSDP2 that has other attributes.
    """
    known = {OF_GROUPS: [group], OF_PARAMETERS: getattr(group, "fsdp_params", [])}
    if not all(hasattr(x, name) for names, xs in known.items() for x in xs for name in names):
        return
    own_post_backward = group.post_backward
    places: dict[Any, Tensor] = {}  # by parameter

    def take(x: Any, before: Tensor | None, grad: Tensor) -> Tensor:
        """Takes the place of `to_sharded_dtensor`, which FSDP2 calls in the stream that has reduced a gradient. FSDP2
        waits for the event before a backward pass ends.
        """
        if before is not None:
            for new, old in zip(grad.view(-1).split(CHUNK), own_part(before).reshape(-1).split(CHUNK), strict=True):
                new += old.to(new.device, non_blocking=True)
        if x not in places:
            places[x] = _pinned(grad, grad.device)
        places[x].copy_(grad, non_blocking=True)
        x.grad_offload_event = group.device_handle.current_stream().record_event()
        return type(x).to_sharded_dtensor(x, places[x])

    def post_backward(*unused: Any) -> None:
        # To gradients that it finds, FSDP2 would add on the host. It may not copy new ones there either.
        before = {x: x.sharded_param.grad for x in group.fsdp_params}
        for x, grad in before.items():
            x.sharded_param.grad, x.offload_to_cpu = None, False
            x.to_sharded_dtensor = functools.partial(take, x, grad)
        try:
            own_post_backward(*unused)
        finally:
            for x, grad in before.items():
                x.offload_to_cpu = True
                del x.to_sharded_dtensor
                if x.sharded_param.grad is None:  # this micro-batch had none for it
                    x.sharded_param.grad = grad

    group.post_backward = post_backward


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
    """From now on an optimizer on the host steps with all cores of this rank. That changes no bit, since AdamW computes
    each element by itself.

    Otherwise one core would do all of it. With several ranks, torchrun sets OMP_NUM_THREADS to 1. With a GPU, vLLM's
    worker sets the number of torch's threads in this process to 1.
    """
    own_step = optimizer.step

    def step() -> None:
        with threads(cores()):
            own_step()

    optimizer.step = step


def clip_on_all_cores(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """What `torch.nn.utils.clip_grad_norm_` does, by all cores of this rank. That changes no bit.

    torch computes the norm of a tensor on the host by one core. So here each core has a gradient of its own. One number
    stands for each gradient when the total is computed, since the norm of a number is its size.
    """
    parameters = [x for x in parameters if x.grad is not None]

    def norm(x: nn.Parameter) -> Tensor:
        return with_part(x.grad, torch.linalg.vector_norm(own_part(x.grad)).reshape(1))

    with threads(1), ThreadPoolExecutor(cores()) as pool:
        total = nn.utils.get_total_norm(list(pool.map(norm, parameters)))
        total = total.full_tensor() if isinstance(total, DTensor) else total
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        list(pool.map(lambda x: own_part(x.grad).mul_(factor), parameters))
    return total


def cores() -> int:
    """How many cores this rank has: those that the process may use, divided by the ranks of the machine."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"]))


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Let torch use this many threads for a while, for each operation on the host."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _pinned(like: Tensor, device: torch.device) -> Tensor:
    """Host memory for a tensor, pinned if `device` is a GPU: torch's own pinned memory comes in powers of two."""
    memory = mmap.mmap(-1, max(1, like.nbytes), mmap.MAP_PRIVATE)
    if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1":  # as torch's own memory on the host, see `rl.ranks.init_ranks`
        with contextlib.suppress(OSError):  # a kernel that has no large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(memory, np.uint8)
    if device.type == "cuda":
        cudart, address = torch.cuda.cudart(), pages.ctypes.data
        torch.cuda.check_error(cudart.cudaHostRegister(address, pages.nbytes, 0))
        # Before it is freed: memory that is still registered can neither be used by others nor registered again.
        weakref.finalize(pages, cudart.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(pages)[: like.nbytes].view(like.dtype).view(like.shape)

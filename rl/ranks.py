"""This process among its peers, and how they talk. Every collective names the group that must enter it."""

import datetime
import os
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from extras.systems import LOOPBACK, die_with_parent

T = TypeVar("T")
Precision = Literal["auto", "bfloat16", "float16"]  # of --dtype
PATIENCE = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Ranks:
    """This process among its peers.

    `rank` and `size` count the processes, as torchrun does. Each of them samples responses to prompts of its own.
    `data_rank` and `data_size` count those that train on different rows. By default all of them do. With
    --sequence-parallel-size N, N neighbors have one `data_rank`. They train on the same rows, and each of them has a
    slice of the tokens, see extras/sequence_parallel.
    """

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype  # compute precision, see `compute_dtype`
    data_rank: int
    data_size: int
    group: dist.ProcessGroup  # of all ranks
    data_group: dist.ProcessGroup  # of those that train on different rows, one for each data rank
    sequence_group: dist.ProcessGroup | None = None  # of those that train on the same rows. None if this rank is alone.
    # Most models compute a prompt that neighboring rows share once (rl/model/logprobs.py). Models that do not do so are
    # added here when they are loaded. If there are any, rl/data/batching.py counts a shared prompt for every row.
    not_sharing: weakref.WeakSet = field(default_factory=weakref.WeakSet, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    @property
    def sequence_size(self) -> int:
        """How many ranks train on the same rows."""
        return self.size // self.data_size

    def own_slice(self, items: Sequence[T]) -> list[T]:
        """This rank's contiguous share of a list. Shares differ by at most one item. `all_gather` restores the list."""
        return [items[i] for i in self.slice_of(len(items), self.rank)]

    def slice_of(self, n: int, rank: int) -> range:
        """Which of `n` items `own_slice` gives to a rank."""
        return range(n * rank // self.size, n * (rank + 1) // self.size)

    def all_gather(self, items: Iterable[T]) -> list[T]:
        """Every rank's list, of any length, put together in rank order. All ranks must enter."""
        return [item for part in _gather(list(items), self.group, self.size) for item in part]

    def of_same_rows(self, items: list[T]) -> list[list[T]]:
        """The lists of the ranks that train on the same rows as this one, in their order. All of them must enter."""
        return _gather(items, self.sequence_group, self.sequence_size)

    def all_reduce_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over data ranks, as a new tensor. All data ranks must enter."""
        total = x.clone()
        dist.all_reduce(total, group=self.data_group)
        return total

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over data ranks, as a new tensor. All data ranks must enter."""
        largest = x.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.data_group)
        return largest

    def all_rows(self, own: torch.Tensor, rows: torch.Tensor, size: int) -> torch.Tensor:
        """A tensor with one number for each row of a step, put together from what each rank has for its own rows.

        Args: own (b,), the numbers of this rank's rows; rows (b,) int64, which of the step's `size` rows these are, as
        in `Batch.rows`, or which of its responses, as in `Batch.responses`. A response gets the sum over its rows.
        Returns: (size,), the same on all ranks. All data ranks must enter.
        """
        return self.all_reduce_sum(own.new_zeros(size).index_add(0, rows, own))

    def mean(self, x: torch.Tensor, mask: torch.Tensor) -> float:
        """Mean of the entries of x with mask 1 on all data ranks, which must enter, or 0 if there are none.

        Sums are taken in float64, so equal float32 values have exactly their value as mean.
        """
        total, count = self.all_reduce_sum(torch.stack([x[mask > 0].double().sum(), (mask > 0).sum()])).tolist()
        return total / max(count, 1)

    def moments(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[float, float]:
        """`mean`, and the unbiased variance, which is exactly 0 of equal float32 values. All data ranks must enter."""
        mean = self.mean(x, mask)
        own = torch.stack([(x[mask > 0].double() - mean).square().sum(), (mask > 0).sum()])
        squares, count = self.all_reduce_sum(own).tolist()
        return mean, squares / max(count - 1, 1)

    def send(self, parcels: Sequence[bytes]) -> list[bytes]:
        """Give each rank its parcel. Returns what this rank gets from each. All ranks must enter.

        Args: parcels, one for each rank.
        """
        if self.size == 1:
            return list(parcels)
        outgoing, incoming = torch.tensor([len(x) for x in parcels]), torch.empty(self.size, dtype=torch.int64)
        dist.all_to_all_single(incoming, outgoing, group=self.group)  # how many bytes are about to come
        received = torch.empty(int(incoming.sum()), dtype=torch.uint8)
        # One byte too many, since frombuffer takes no empty buffer.
        sent = torch.frombuffer(bytearray(b"".join([*parcels, b"\0"])), dtype=torch.uint8)[:-1]
        dist.all_to_all_single(received, sent, incoming.tolist(), outgoing.tolist(), group=self.group)
        return [part.numpy().tobytes() for part in received.split(incoming.tolist())]


def _gather(items: list[T], group: dist.ProcessGroup | None, size: int) -> list[list[T]]:
    """The lists of all ranks of a group of this size."""
    if size == 1:
        return [items]
    parts: list[list[T]] = [[] for _ in range(size)]
    dist.all_gather_object(parts, items, group=group)
    return parts


def die_with_launcher() -> None:
    """Under torchrun, end this process when it ends, since a rank left behind would hold the GPU's memory forever."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def compute_dtype(precision: Precision, *, on_gpu: bool, has_bfloat16: bool = True) -> torch.dtype:
    """The compute precision of --dtype, on a CPU or on a GPU, which may have no bfloat16. Raises ValueError if it has
    none and this is what the flag wants.
    """
    if precision == "bfloat16" and not has_bfloat16:
        raise ValueError("--dtype bfloat16: this GPU does not compute in bfloat16; leave it out, which gives float16")
    usual = ("bfloat16" if has_bfloat16 else "float16") if on_gpu else "float32"
    return getattr(torch, usual if precision == "auto" else precision)


def init_ranks(precision: Precision = "auto") -> Ranks:
    """Join the process group, with gloo on a CPU, and with nccl on CUDA, plus gloo for what is on the host. Without
    torchrun it is a world of one. Under torchrun, this process dies with it from here on.

    Args: precision, in which models compute. Raises ValueError as `compute_dtype`.
    """
    die_with_launcher()
    if "RANK" not in os.environ:
        os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # for code that joins the world without `Ranks`
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # else gloo listens where the machine's name leads
    # torch gets host memory for large tensors in pages of 2 MiB. With --param-offload, moments and gradients are there.
    # In pages of 4 KiB the kernel hands that memory out more slowly than a GPU sends what goes there.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    use_cuda = torch.cuda.is_available()
    where = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(where)
    has_bfloat16 = not use_cuda or torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = compute_dtype(precision, on_gpu=use_cuda, has_bfloat16=has_bfloat16)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        store = dist.HashStore() if size == 1 else None  # torch's own would listen on all of the machine's networks
        dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo", store=store, rank=rank, world_size=size)
    assert (everyone := dist.group.WORLD) is not None, "there is no process group"
    wait_without_end(everyone)
    return Ranks(rank, size, where, dtype, data_rank=rank, data_size=size, group=everyone, data_group=everyone)


def wait_without_end(group: dist.ProcessGroup) -> None:
    """Let the ranks of a group wait for each other as long as it takes. torch's limits count the time in which a job
    is suspended, and would end it when it goes on. A run that hangs is ended by rl/run/watchdog.py.
    """
    group.set_timeout(PATIENCE)


def memory_in_use(ranks: Ranks) -> int:
    """Bytes in use on this rank's GPU, by any process, and not only cached by torch, or 0 on a CPU."""
    if ranks.device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(ranks.device)
    return total - free


def final_barrier() -> None:
    """Wait for every rank before the process group is taken down."""
    dist.barrier(group=dist.group.WORLD)
    # gloo's worker thread needs the GIL to free its last work. At the interpreter's exit it would abort.
    time.sleep(0.1 if dist.get_world_size() > 1 else 0.01)


def shutdown_ranks() -> None:
    """Leave the process group, if an engine has not ended it already. `init_ranks` may be called again."""
    if dist.is_initialized():
        final_barrier()
        dist.destroy_process_group()

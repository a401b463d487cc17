"""Processes, parameters and gradients over ranks: torch.distributed and FSDP2, applied to the model from outside."""

import ctypes
import datetime
import functools
import itertools
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch._dynamo
import torch._inductor
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM

from rl.attention import choose_attention
from rl.logprobs import add_packed_forward, add_response_logprobs

T = TypeVar("T")
PR_SET_PDEATHSIG = 1
GATHERED_ELEMENTS = 2**27  # of weights, at a time: 256 MB in bfloat16

# torch guards one fusion by its size: a micro-batch below 4,096 tokens would be compiled for itself, ten seconds in the
# middle of a run. Only versions of torch that have the fusion know the option.
UNGUARDED_FUSION = "triton.mix_order_reduction_non_strict_mode"
COMPILE_OPTIONS = {UNGUARDED_FUSION: True} if UNGUARDED_FUSION in torch._inductor.list_options() else {}


@dataclass(frozen=True)
class Dist:
    """This process among its peers."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype  # compute precision: bfloat16 on CUDA, float32 on CPU

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0


if "TORCHELASTIC_RUN_ID" in os.environ:
    # Under torchrun the process dies with it, however that ends: a rank that outlives its launcher would hold the GPU's
    # memory for ever. At the import, since reading data and starting rewards takes a while.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def init_distributed(stall_timeout: float | None = None) -> Dist:
    """Join the process group: gloo on CPU, nccl (plus gloo for Python objects) on CUDA. Without torchrun it is a world
    of one.

    Ranks wait for each other a little longer than `stall_timeout` seconds, so that rl/watchdog.py comes first and says
    where they stand; by default as long as torch sees fit.
    """
    if "RANK" not in os.environ:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    use_cuda = torch.cuda.is_available()
    where = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(where)
    if not dist.is_initialized():
        timeout = None if stall_timeout is None else datetime.timedelta(seconds=1.2 * stall_timeout + 60)
        dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo", timeout=timeout)
    return Dist(dist.get_rank(), dist.get_world_size(), where, torch.bfloat16 if use_cuda else torch.float32)


def memory_in_use(d: Dist) -> int:
    """Bytes in use on this rank's GPU, by any process, and not only cached by torch; 0 on a CPU."""
    if d.device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(d.device)
    return total - free


def check_size(fsdp_size: int | None, d: Dist) -> None:
    """Raise ValueError if `shard` cannot make copies of the model that span so many ranks."""
    if fsdp_size is not None and (fsdp_size < 1 or d.world_size % fsdp_size):
        raise ValueError(
            f"--fsdp-size {fsdp_size} does not divide the {d.world_size} rank(s) of this run; choose a divisor"
        )


def final_barrier() -> None:
    """Wait for every rank before the process group is taken down."""
    dist.barrier()
    time.sleep(0.1)  # gloo's worker thread needs the GIL to free its last work; at interpreter exit it would abort


def shutdown_distributed() -> None:
    """Leave the process group, if an engine has not ended it already; `init_distributed` may be called again."""
    if dist.is_initialized():
        final_barrier()
        dist.destroy_process_group()


def load_policy(path: str, d: Dist, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A causal LM with master weights in `dtype` on the host.

    Rank 0 reads the files; other ranks get storage that `shard` fills. Raises ValueError if the files lack weights.
    """
    model, missing = load_pretrained(AutoModelForCausalLM, path, d, dtype=dtype)
    check_whole(path, missing)
    return add_response_logprobs(model)


def check_whole(path: str, missing: set[str], *, flag: str = "--model") -> None:
    """Raise ValueError naming `flag` if the files of the model in `path` lack weights, which would be random."""
    if missing:
        raise ValueError(
            f"{flag} {path}: its files lack {len(missing)} of its weights, {min(missing)} among them; use a whole one"
        )


def load_pretrained(
    auto_class: Any, path: str, d: Dist, *, dtype: torch.dtype, **config_changes: Any
) -> tuple[nn.Module, set[str]]:
    """A model of a transformers auto class on the host, and the names of its weights that the files do not hold.

    Rank 0 reads the files; other ranks get storage that `shard` fills, and no names. `config_changes`: entries of the
    config to replace, such as num_labels.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # flash-attn warns about fp32 masters, though it computes in bf16
    options = dict(dtype=dtype, attn_implementation=choose_attention(d.device, d.dtype))
    missing: set[str] = set()
    if d.is_main:
        model, info = auto_class.from_pretrained(path, **options, **config_changes, output_loading_info=True)
        missing = set(info["missing_keys"])
    else:
        config = AutoConfig.from_pretrained(path, **config_changes)
        with torch.device("meta"):
            model = auto_class.from_config(config, **options)
        model.to_empty(device="cpu")
        model.tie_weights()  # to_empty unties, which would halve the embedding's gradient
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.attention_dropout = 0.0
    return model, missing


def shard(
    model: nn.Module,
    d: Dist,
    *,
    activation_checkpointing: Literal["none", "selective", "full"] = "none",
    compile: bool = False,
    fsdp_size: int | None = None,
) -> nn.Module:
    """Shard parameters, gradients and optimizer state over all ranks with FSDP2.

    fsdp_size: shard over so many neighbouring ranks only, such as those of a machine, and keep copies on the others:
    the traffic between machines is then one all-reduce of gradients an update (`last_micro_batch`). It must divide the
    number of ranks.

    Compute runs in `d.dtype`; master weights and gradient reduction keep the parameters' own dtype. Gradients are
    SUMMED over ranks (divide factor 1), so that a loss divided by a global denominator needs no `* world_size`. Each
    decoder layer is a unit; embedding, final norm and LM head share the root unit, so tied weights stay one parameter.
    Every rank ends up with rank 0's values, buffers included.

    activation_checkpointing: what the backward pass computes again. full: all of a layer but its input. selective: all
    but the results of matrix products and attention (Korthikanti et al. 2022, arXiv 2205.05198). compile: torch.compile
    each layer, and the LM head of `token_logprobs`, once for all lengths.
    """
    master = next(model.parameters()).dtype
    compute = d.dtype if master == torch.float32 else master
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=master)
    check_size(fsdp_size, d)
    size = fsdp_size or d.world_size
    mesh = init_device_mesh(d.device.type, (d.world_size // size, size), mesh_dim_names=("copy", "shard"))
    mesh = mesh["shard"] if size == d.world_size else mesh
    units = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    for unit in units:
        if activation_checkpointing == "full":
            unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
        elif activation_checkpointing == "selective":
            contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
            unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False, context_fn=contexts)
        if compile:
            unit.forward = _compile_for_all_lengths(unit.forward)
    for module in [*units, model]:
        module.to(d.device)
        if d.world_size > 1:
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                if not isinstance(tensor, DTensor):
                    dist.broadcast(tensor.data, src=0)
        # A shard of one is the whole: freed after the forward pass, the bf16 weights would only be made again.
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=None if size > 1 else False)
    for module in model.modules():
        if isinstance(module, FSDPModule) and d.world_size > 1:  # alone, FSDP2 would spend a pass on dividing by 1
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.is_whole = size == 1  # every rank has all of it; see last_micro_batch
    model.train()
    keep_logits = compile and activation_checkpointing == "none"  # without compile they would be kept in float32
    return add_packed_forward(model, compile=compile, keep_logits=keep_logits)


def _compile_for_all_lengths(forward: Callable) -> Callable:
    """A layer's forward compiled once for any number of tokens.

    What varies is marked: in every tensor the dimension of tokens or sequences, which is the second or the only one.
    `dynamic=True` would take the width of a head for variable too, and the rotary embedding several times as long.
    """
    compiled = torch.compile(forward, options=COMPILE_OPTIONS)

    def run(*args: Any, **kwargs: Any) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(x, min(1, x.ndim - 1))
        return compiled(*args, **kwargs)

    return run


def _keep_products(context, op, *args, **kwargs) -> CheckpointPolicy:
    kept = str(op).startswith(("aten.mm", "aten.addmm", "aten._scaled_dot_product", "torch_attn.", "flash_attn."))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def offload(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Move a sharded model, and its optimizer's state, to the host, and give their memory on the device back.

    `onload` undoes it, bit by bit. Call it when no graph waits for its backward pass.
    """
    _move(model, optimizer, torch.device("cpu"))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def onload(model: nn.Module, device: torch.device, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Move a sharded model, and its optimizer's state, back from where `offload` put them to the device of sharding."""
    _move(model, optimizer, device)


def _move(model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    model.to(device)
    for state in optimizer.state.values() if optimizer else ():
        for name, x in state.items():
            if name != "step":  # a number; AdamW wants it on the device if fused, on the host if not
                state[name] = x.to(device)


def known_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The named parameters that engines and transformers know, tied ones once: not `critic.add_value_head`'s head."""
    return ((name, x) for name, x in model.named_parameters() if not name.startswith("value_head."))


def full_tensors(
    model: nn.Module, dtype: torch.dtype | None = None, *, value_head: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) for all `known_parameters`, cast to `dtype` before gathering. All ranks must iterate.

    Many are gathered by one call, since for each alone Python would take half a millisecond. value_head: yield the head
    of `critic.add_value_head` too.
    """
    named = list(model.named_parameters() if value_head else known_parameters(model))
    ends = itertools.accumulate(x.numel() for _, x in named)
    for _, batch in itertools.groupby(zip(named, ends, strict=True), key=lambda item: item[1] // GATHERED_ELEMENTS):
        names, parameters = zip(*(pair for pair, _ in batch), strict=True)
        yield from zip(names, _whole([x.detach() for x in parameters], dtype or parameters[0].dtype), strict=True)


def _whole(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors whose rows `shard` spread over ranks as one rank alone would have them, in `dtype`."""
    if not isinstance(tensors[0], DTensor):
        return [x.to(dtype) for x in tensors]
    mesh, local = tensors[0].device_mesh, [x.to_local() for x in tensors]
    size = mesh.size(mesh.ndim - 1)
    if size == 1:
        return [x.to(dtype) for x in local]
    counts = [math.ceil(len(x) / size) * x.shape[1:].numel() for x in tensors]  # the last ranks may have fewer
    own = torch.zeros(sum(counts), dtype=dtype, device=local[0].device)
    places = [place[: x.numel()] for place, x in zip(own.split(counts), local, strict=True)]
    torch._foreach_copy_(places, [x.flatten() for x in local])
    every = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(every, own, mesh.get_group(mesh.ndim - 1))
    parts = zip(*(gathered.split(counts) for gathered in every), strict=True)  # of each tensor, those of all ranks
    return [torch.cat(part)[: x.numel()].view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def last_micro_batch(model: nn.Module, is_last: bool) -> None:
    """Say before a backward pass whether it is the last one of an update. Copies of the model, if `shard` made several,
    add up their gradients then, once an update instead of once a micro-batch.
    """
    if model.is_whole:
        model.set_requires_gradient_sync(is_last)  # nothing at all, until the last
    else:
        model.set_requires_all_reduce(is_last)  # shards of a copy are summed every time, or they would not fit


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale gradients to a global L2 norm of at most `max_norm`; returns the norm before clipping.

    All ranks must enter.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def all_reduce_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, as a new tensor. All ranks must enter."""
    total = x.clone()
    dist.all_reduce(total)
    return total


def all_gather(items: Iterable[T], d: Dist) -> list[T]:
    """Concatenate every rank's list, in rank order, on every rank. Lists may differ in length. All ranks must enter."""
    if d.world_size == 1:
        return list(items)
    parts: list[list[T]] = [[] for _ in range(d.world_size)]
    dist.all_gather_object(parts, list(items))
    return [item for part in parts for item in part]


def own_slice(items: list[T], d: Dist) -> list[T]:
    """This rank's contiguous share of a list, sizes differing by at most one; `all_gather` of the shares restores the
    list.
    """
    return items[len(items) * d.rank // d.world_size : len(items) * (d.rank + 1) // d.world_size]

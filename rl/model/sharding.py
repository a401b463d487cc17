"""Parameters and gradients over ranks: FSDP2, applied to a model from outside."""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch._dynamo
import torch._inductor
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from extras.expert_parallel import divide_experts
from extras.loss_scale import LossScale, factor_of
from rl.flags import AtLeast1, Free, Switch, settled
from rl.model.family import is_added
from rl.model.logprobs import head_on_chunk
from rl.ranks import Precision, Ranks, wait_without_end

# By default torch compiles micro-batches below 4,096 tokens once more, ten seconds in the middle of a run, because it
# guards one fusion by its size. Only versions of torch that have the fusion know the option.
UNGUARDED_FUSION = "triton.mix_order_reduction_non_strict_mode"
COMPILE_OPTIONS: dict[str, Any] = {UNGUARDED_FUSION: True} if UNGUARDED_FUSION in torch._inductor.list_options() else {}
# Checkpointed layers of all models are one function to torch. There is a graph for each kind of layer, with gradients
# and without, trained or frozen. After eight graphs it would run whatever is new uncompiled.
torch._dynamo.config.recompile_limit = 64

# Beginnings of the names of operations whose results "selective" keeps. They are matrix products and attention. A
# family of models with such an operation of its own adds that.
PRODUCTS = {"aten.mm", "aten.addmm", "aten._grouped_mm", "transformers.grouped_mm"}
KEPT_OPERATIONS = PRODUCTS | {"aten._scaled_dot_product", "torch_attn.", "flash_attn."}
CODE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # the environment variable that says where torch keeps what it has compiled


@dataclass(frozen=True)
class Memory:
    """These flags change memory and speed. The numbers stay the same, up to rounding."""

    # auto takes the first of the following that fits. The backward pass recomputes nothing (none), all of a layer
    # except for matrix products and attention (selective), or all of a layer (full).
    activation_checkpointing: Free[Literal["auto", "none", "selective", "full"]] = "auto"
    # This many ranks share one copy of the model, such as the GPUs of a machine. By default all ranks do.
    fsdp_size: Free[AtLeast1 | None] = None
    # This many neighboring ranks train on the same sequences, and each computes a slice of the tokens (Ulysses). This
    # is for sequences that are too long for one GPU.
    sequence_parallel_size: Free[AtLeast1] = 1
    # This many neighboring ranks divide the experts of a mixture. Tokens travel to the ranks that have their experts.
    expert_parallel_size: Free[AtLeast1] = 1
    # Compile the layers and the head with torch.compile on a GPU. auto does it if the run is long enough to pay.
    compile: Free[Switch] = "auto"
    # Compute with numbers of this type. auto is float32 on a CPU. On a GPU it is bfloat16, or float16 if the GPU has no
    # bfloat16. float16 rounds eight times less, and its numbers end at 65,504.
    dtype: Precision = "auto"

    # Where weights and gradients live if that is not the device. It has a `policy` for FSDP2, and a method
    # `move_in(model)` that returns a function of (tensor, device), which makes room for a weight. It may also give the
    # model a `clip_gradients` to be used instead of torch's clip_grad_norm_. See extras/offload.
    home = None


# What "auto" means where nobody has computed what fits, such as on a CPU.
UNPLANNED = {"activation_checkpointing": "selective"}
BARE = Memory(activation_checkpointing="none", compile=False)  # FSDP2 and nothing else


def shard(model: PreTrainedModel, ranks: Ranks, memory: Memory = BARE) -> PreTrainedModel:
    """Shard parameters, gradients and optimizer state over all ranks with FSDP2, as the memory flags say.

    What learns gets master weights in float32 (those of a float64 model stay as they are), and gradients are reduced in
    it. What does not learn keeps its dtype. Compute runs in `ranks.dtype`, of a float64 model in float64. Each decoder
    layer is a unit. Embedding, final norm and LM head share the root unit, so tied weights stay one parameter. The
    model is left in evaluation mode, which stops no gradient. There is no dropout or noise of any kind, so that
    log-probs are a function of weights and tokens. Sources: ZeRO, arXiv 1910.02054. FSDP, arXiv 2304.11277.

    activation_checkpointing "selective" keeps the results of matrix products and attention (Korthikanti et al. 2022,
    arXiv 2205.05198), "full" only those of whole layers (Chen et al. 2016, arXiv 1604.06174). fsdp_size: shard over so
    many neighboring ranks, such as a machine's, and keep copies on the others. Between machines only one all-reduce of
    the gradients is left per update (`backward`).
    """
    memory = settled(memory, **UNPLANNED)
    units = outermost(model, model._no_split_modules or ())
    recompute(units, memory.activation_checkpointing)
    if memory.compile:
        compile_units(model, units)
    is_whole = (memory.fsdp_size or ranks.size) == 1 and memory.home is None
    apply_fsdp(model, units, ranks, memory, is_whole=is_whole)
    if ranks.size > 1:  # alone, FSDP2 would spend a pass on dividing by 1
        sum_gradients(model)
    model.stays_on_host = memory.home is not None
    learns = any(x.requires_grad for x in model.parameters())
    model.loss_scale = LossScale() if learns and ranks.dtype == torch.float16 else None
    model.eval()
    fsdp.register_fsdp_forward_method(model, "packed_forward")
    keep_logits = bool(memory.compile) and memory.activation_checkpointing == "none"  # uncompiled, they are in float32
    chunk = head_on_chunk(compile=bool(memory.compile), keep_logits=keep_logits)
    model.packed = replace(model.packed, head_chunk=chunk, device=ranks.device, is_whole=is_whole)
    return model


def recompute(units: Sequence[nn.Module], level: str) -> None:
    """Let the backward pass recompute what --activation-checkpointing says of each unit."""
    for unit in units if level != "none" else ():
        contexts: Any = functools.partial(create_selective_checkpoint_contexts, _keep_products)
        contexts.cache_hash = str(sorted(KEPT_OPERATIONS))  # or torch would trace layers again at every start
        options = {"context_fn": contexts} if level == "selective" else {}
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False, **options)


def compile_units(model: PreTrainedModel, units: Sequence[nn.Module]) -> None:
    """Let units run compiled, unless a family of the model objects."""
    for unit in units:
        if all(family.may_compile(unit) for family in model.packed.families):
            unit.forward = _compile_for_all_lengths(unit.forward)


def apply_fsdp(model: nn.Module, units: Sequence[nn.Module], ranks: Ranks, memory: Memory, *, is_whole: bool) -> None:
    """Shard units and root, and bring this rank's rows of every weight from the host to where they live. What learns
    is in float32 at least. Every rank has read the files, so that no rank waits for weights of another one.

    Frozen weights beside others that learn are not sharded where a shard would be the whole: FSDP2 would hold a second
    copy of them. Args: is_whole, whether every rank has all of the model on its device.
    """
    size = memory.fsdp_size or ranks.size
    mesh = init_device_mesh(ranks.device.type, (ranks.size // size, size), mesh_dim_names=("copy", "shard"))
    mesh = mesh["shard"] if size == ranks.size else mesh
    for group in mesh.get_all_groups():
        wait_without_end(group)
    learning = [x.dtype for x in model.parameters() if x.requires_grad]
    master = torch.promote_types(learning[0], torch.float32) if learning else next(model.parameters()).dtype
    compute = ranks.dtype if master == torch.float32 else master
    unsharded = {x for x in model.parameters() if not x.requires_grad} if is_whole and learning else set()
    for x in itertools.chain(model.buffers(), unsharded):
        x.data = x.data.to(ranks.device)
    # FSDP2 shards weights without values, since it would first have all of a unit on the device.
    on_host: dict[str, nn.Parameter] = {}
    for name, x in model.named_parameters():
        if x not in unsharded:
            dtype = torch.promote_types(x.dtype, torch.float32) if x.requires_grad else x.dtype
            on_host[name] = nn.Parameter(torch.empty_like(x, dtype=dtype, device="meta"), x.requires_grad)
            torch.utils.swap_tensors(x, on_host[name])
    offload = memory.home.policy if memory.home else fsdp.OffloadPolicy()
    # A shard of one is the whole. Freed after the forward pass, the bf16 weights would only be made again.
    reshard = False if is_whole else None
    # Layers get what the model itself gives them, such as angles in float32, which FSDP2 would round. Only the root
    # casts its inputs, which are the pixels of images. (See also `logprobs.run_packed`.)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=master, cast_forward_inputs=False)
    options = dict(offload_policy=offload, reshard_after_forward=reshard, ignored_params=unsharded)
    wrap: Callable = functools.partial(fsdp.fully_shard, mesh=mesh, mp_policy=policy, **options)
    divide_experts(units, ranks, memory.expert_parallel_size, mesh, wrap)
    for unit in units:
        wrap(unit)
    wrap(model, mp_policy=replace(policy, cast_forward_inputs=True))
    make = memory.home.move_in(model) if memory.home else torch.empty_like
    for name, x in model.named_parameters():
        if name in on_host:
            part = make(own_part(x), device=ranks.device)
            part.copy_(rows_of_rank(on_host.pop(name).data, ranks.rank, size).to(part.device))
            torch.utils.swap_tensors(x, nn.Parameter(with_part(x, part), x.requires_grad))


def rows_of_rank(x: Tensor, rank: int, size: int) -> Tensor:
    """The rows of a whole tensor that FSDP2 gives to a rank, if `size` neighboring ranks share it."""
    rows = -(-len(x) // size)  # as torch.chunk divides them, so the last ranks may have fewer
    return x[rank % size * rows :][:rows]


def sum_gradients(model: nn.Module) -> None:
    """Let FSDP2 add gradients up over ranks instead of taking their mean, so that a loss divided by a global
    denominator needs no `* world_size`.
    """
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def outermost(model: nn.Module, class_names: Iterable[str]) -> list[nn.Module]:
    """The submodules of these classes, but those that are part of another one."""
    units: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # what contains comes before what is contained
        if type(module).__name__ in class_names and not any(name.startswith(f"{outer}.") for outer in units):
            units[name] = module
    return list(units.values())


def _compile_for_all_lengths(forward: Callable) -> Callable:
    """A layer's forward compiled once for any number of tokens or borders, the second or only dimension of a tensor.
    `dynamic=True` would take the width of a head for variable too, and the rotary embedding would be slow.

    Compiled code is kept in the home folder for the next start, since torch's own folder is in /tmp, which a reboot
    empties.
    """
    home, chosen = os.path.expanduser("~"), os.environ.get(CODE_FOLDER)
    if chosen in (None, default_cache_dir()) and os.access(home, os.W_OK):  # not chosen by the user
        with contextlib.suppress(OSError):  # torch keeps its own folder if this one cannot be made
            os.makedirs(folder := f"{home}/.cache/glassrl/compiled", exist_ok=True)
            os.environ[CODE_FOLDER] = folder if os.access(folder, os.W_OK) else default_cache_dir()
    compiled = torch.compile(forward, options=COMPILE_OPTIONS)

    def run(*args: Any, **kwargs: Any) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                torch._dynamo.maybe_mark_dynamic(x, min(1, x.ndim - 1))
        return compiled(*args, **kwargs)

    return run


def _keep_products(context, op, *args, **kwargs) -> CheckpointPolicy:
    is_kept = str(op).startswith(tuple(KEPT_OPERATIONS))
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def own_part(x: Tensor) -> Tensor:
    """What this rank has of a tensor. Of one that is not sharded it has all."""
    return x.to_local() if isinstance(x, DTensor) else x


def with_part(like: Tensor, part: Tensor) -> Tensor:
    """A tensor sharded as `like` is, whose part on this rank is `part`, which may be on the host."""
    # DTensor.from_local would move a part on the host to the device.
    return DTensor(part, like._spec, requires_grad=False) if isinstance(like, DTensor) else part


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the parameters of `source`, in its own precision: two models of one kind, sharded alike."""
    for x, y in zip(source.parameters(), target.parameters(), strict=True):
        own_part(y).copy_(own_part(x))


def full_tensors(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) on the device for all parameters, tied ones once, in `dtype`. What families have added
    keeps its own. All ranks must iterate.
    """
    for name, x in model.named_parameters():
        whole_dtype = x.dtype if dtype is None or is_added(model, name) else dtype
        # It is cast on the device, where that is fast, and before it is gathered, so that fewer bytes are sent.
        part = own_part(x.detach()).to(model.packed.device, non_blocking=True).to(whole_dtype)
        is_whole = not isinstance(x, DTensor) or x.device_mesh.size(x.device_mesh.ndim - 1) == 1
        # pyrefly: ignore[missing-attribute]  # what is not a whole tensor is a DTensor
        yield name, part if is_whole else with_part(x, part).full_tensor()


def backward(model: PreTrainedModel, loss: Tensor, *, is_last: bool) -> None:
    """Add a micro-batch's gradient to the model's, a sum over ranks. Over copies of the model (--fsdp-size) it is
    summed only when it `is_last` of an update. In float16 it is multiplied with the loss scale. All ranks must enter.
    """
    if model.packed.is_whole:
        model.set_requires_gradient_sync(is_last)  # ranks exchange nothing before the last micro-batch
    else:
        model.set_requires_all_reduce(is_last)  # Within a copy they are summed every time, since whole ones do not fit.
    (loss * factor_of(model)).backward()


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale gradients to a global L2 norm of at most `max_norm`. Returns the norm before. All ranks must enter.

    In float16 they are divided by the loss scale first. If that was too large for them, there are no gradients
    afterwards, so that an optimizer step changes nothing, and the norm is 0.
    """
    scale: Any = getattr(model, "loss_scale", None)
    for grad in [x.grad for x in model.parameters() if scale and x.grad is not None]:
        grad.div_(scale.scale)
    # A `home` may have a way of its own, see `Memory`.
    total = getattr(model, "clip_gradients", nn.utils.clip_grad_norm_)(model.parameters(), max_norm)
    norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
    if scale and scale.overflowed(norm):
        model.zero_grad(set_to_none=True)
        return 0.0
    return norm

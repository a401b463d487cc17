"""Models of transformers: read, sharded over the ranks and tested, and their weights as engines and files know them.

Every model is tested when it is loaded. Do packed sequences give what its own forward gives for each of them alone?
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from extras.sequence_parallel import slice_tokens
from rl.console import started
from rl.model.attention import choose_attention, use_attention
from rl.model.checks import digest_of_files, read_config, read_model
from rl.model.logprobs import add_packed_forward
from rl.model.roles import ALL_WEIGHTS, CAUSAL_LM, CausalLM, Learning
from rl.model.self_test import choose_forward
from rl.model.sharding import Memory, full_tensors, rows_of_rank, shard
from rl.ranks import Ranks

DEFAULT_MEMORY = Memory()


def load_model(
    path: str,
    ranks: Ranks,
    learning: Learning | None = ALL_WEIGHTS,
    memory: Memory = DEFAULT_MEMORY,
    *,
    kind: CausalLM = CAUSAL_LM,
    longest: int | None = None,
    seed: int = 0,
    flag: str = "--model",
) -> PreTrainedModel:
    """A model by Hugging Face id or folder, sharded over the ranks and tested: a policy, reference, teacher, critic or
    reward model.

    What learns is in float32, and frozen weights have the compute precision. All ranks must enter.

    Args: learning, what of the model learns, None for nothing; kind, what it is read as; longest, tokens of the longest
    sequence; seed, of new weights; flag, the flag that names the model, or else its role, for error messages. Raises
    ValueError as `load_pretrained`, `Learning.check_model`, `choose_forward` or `Family.tested`.
    """
    if learning is not None:
        learning.check_model(path, kind.class_of(path), flag=flag)
    dtype = ranks.dtype if learning is None or learning.keeps_weights else None
    # What does not learn beside adapters is hashed on rank 0, which needs all of it.
    shards = 1 if dtype and learning and ranks.is_main else memory.fsdp_size or ranks.size
    model = load_pretrained(path, ranks, kind, dtype=dtype, shards=shards, flag=flag)
    if learning is None:
        model.requires_grad_(False)
    else:
        learning.apply(model, path=path, seed=seed, ranks=ranks)
    model = shard(model, ranks, replace(memory, compile=memory.compile and ranks.device.type == "cuda"))
    slice_tokens(model, ranks)
    started(f"{flag} on the device")
    with contextlib.ExitStack() as tests:
        for x in model.packed.families:
            tests.enter_context(x.tested(flag))
        choose_forward(model, ranks, longest=longest, flag=flag)
    started(f"{flag} tested")
    return model


def load_reference(
    path: str, ranks: Ranks, policy: PreTrainedModel, memory: Memory = DEFAULT_MEMORY, *, longest: int | None = None
) -> PreTrainedModel:
    """The policy before training. It is a second, frozen model, unless a family of the policy knows how to do without.
    All ranks must enter, before training. Raises ValueError as `load_model`.
    """
    references = filter(None, (family.reference() for family in policy.packed.families))
    return next(references, None) or load_model(path, ranks, None, memory, longest=longest, flag="the reference")


def exported(model: PreTrainedModel, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model as engines and files know them, from (name, whole tensor) pairs of the trainer. Families
    change theirs, such as to add up an adapter and its weight, and then all are `published`.
    """
    for family in model.packed.families:
        named_tensors = family.exported(named_tensors)
    return published(model, named_tensors)


def published(model: PreTrainedModel, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same weights, under the names in the files that the model's authors published, since transformers renames
    some.
    """
    for name, x in named_tensors:
        yield from revert_weight_conversion(model, {name: x}).items()


def weights_for_engine(policy: PreTrainedModel, ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) for `update_weights` of an engine. All ranks must iterate.

    Parameters are in the compute precision. Buffers, and what families have added, keep their own.
    """
    return exported(policy, itertools.chain(full_tensors(policy, ranks.dtype), buffers_in_files(policy)))


def buffers_in_files(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the buffers in a model's files, such as an activation's constants. Nothing trains them."""
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return ((name, x) for name, x in model.state_dict().items() if name not in weights)


def load_pretrained(
    path: str,
    ranks: Ranks,
    kind: CausalLM = CAUSAL_LM,
    *,
    dtype: torch.dtype | None = torch.float32,
    shards: int = 1,
    flag: str = "--model",
) -> PreTrainedModel:
    """A model on the host, with weights in `dtype`, that can run packed. Every rank reads the files. All must enter.

    Without a dtype, parameters keep the precision of the files, most often bfloat16, until `shard` casts those that
    learn to float32. The numbers are the same. Weights are views of the mapped files, from which `shard` reads the rows
    of this rank, so they need no memory. If they have to be cast or put together from several, which needs memory, only
    a rank's rows of one that `shards` ranks share are there.

    Raises ValueError on all ranks as `read_model` or `CausalLM.check`, or if the ranks read other files than each
    other.
    """
    kind.check(read_config(path, flag=flag), f"{flag} {path}")
    keep = functools.partial(rows_of_rank, rank=ranks.rank, size=shards) if shards > 1 else None
    model, new = read_model(path, kind, flag=flag, reading=_reading(dtype, keep), dtype=dtype or torch.float32)
    if len({*ranks.all_gather([digest_of_files(path)])}) > 1:
        raise ValueError(f"{flag} {path}: its files differ between machines; give all of them the same ones")
    started(f"{flag} read")
    name_weights(model, path)
    use_attention(model, choose_attention(ranks.device, ranks.dtype))
    kind.finish(model, new, f"{flag} {path}")
    return add_packed_forward(model)


@contextlib.contextmanager
def _reading(dtype: torch.dtype | None, keep: Callable[[Tensor], Tensor] | None) -> Iterator[None]:
    """Around transformers reading weights. They are views of mapped files, unless they are cast or put together.

    Args: dtype, None to leave weights in the precision of their files, where buffers are in float32; keep, what stays
    of a weight that is not such a view. The rest of it is zero, which takes no memory.
    """
    read, place, casts = core_model_loading._materialize_copy, core_model_loading.set_param_for_module, {}

    def noted(x: Tensor, device: object = None, to: torch.dtype | None = None) -> Tensor:
        casts[(x := read(x, device)).data_ptr()] = to
        return x

    def placed(model: PreTrainedModel, name: str, x: Tensor, *args: object) -> None:
        is_weight = isinstance(model.get_parameter_or_buffer(name), nn.Parameter)
        to = x.dtype if is_weight and not dtype else casts.get(x.data_ptr()) or dtype or x.dtype
        if keep and is_weight and (x.dtype != to or x.data_ptr() not in casts):
            whole, x = x, torch.from_numpy(np.zeros((*x.shape, to.itemsize), np.uint8)).view(to)[..., 0]
            keep(x).copy_(keep(whole))
        place(model, name, x.to(to), *args)

    core_model_loading._materialize_copy, core_model_loading.set_param_for_module = noted, placed
    try:
        yield
    finally:
        core_model_loading._materialize_copy, core_model_loading.set_param_for_module = read, place


def name_weights(model: PreTrainedModel, path: str) -> None:
    """Let `exported` give published names, whatever those of the files in `path` are, which may be older or newer. What
    is only the text part of a larger model keeps the names within that, whose config becomes `model.whole`.
    """
    config = AutoConfig.from_pretrained(path)
    model.whole = None if isinstance(model.config, type(config)) else config
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [x for x in conversions if model.whole or not isinstance(x, PrefixChange)]

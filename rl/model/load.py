"""Models of transformers: read, sharded over the ranks and tested, and their weights as engines and files know them.

Every model is tested when it is loaded. Do packed sequences give what its own forward gives for each of them alone?
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from rl.console import started
from rl.model.attention import choose_attention, use_attention
from rl.model.checks import read_config, read_model
from rl.model.logprobs import add_packed_forward
from rl.model.roles import ALL_WEIGHTS, CAUSAL_LM, CausalLM, Learning
from rl.model.self_test import choose_forward
from rl.model.sharding import Memory, full_tensors, shard
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
    model = load_pretrained(path, ranks, kind, dtype=dtype, flag=flag)
    if learning is None:
        model.requires_grad_(False)
    else:
        learning.apply(model, path=path, seed=seed, ranks=ranks)
    model = shard(model, ranks, replace(memory, compile=memory.compile and ranks.device.type == "cuda"))
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
    for family in policy.packed.families:
        if (reference := family.reference()) is not None:
            return reference
    return load_model(path, ranks, None, memory, longest=longest, flag="the reference")


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
    flag: str = "--model",
) -> PreTrainedModel:
    """A model on the host, with weights in `dtype`, that can run packed. Rank 0 reads the files. Other ranks get
    storage that `shard` fills. All ranks must enter.

    Without a dtype, rank 0 leaves parameters in the precision of the files, most often bfloat16, until `shard` casts
    those that learn to float32. The numbers are the same, and they need no memory except for that of the mapped files.

    Raises ValueError on all ranks as `read_model` or `CausalLM.check`, or if weights that the config ties differ in the
    files, so that ranks would have different models.
    """
    kind.check(read_config(path, flag=flag), f"{flag} {path}")
    as_in_files, dtype, problems = dtype is None, dtype or torch.float32, []
    try:
        if ranks.is_main:
            model, new = read_model(path, kind, flag=flag, as_in_files=as_in_files, dtype=dtype)
            # `shard` casts only what learns, so buffers get the dtype here that they have on the other ranks.
            for x in model.buffers() if as_in_files else ():
                x.data = x.data.to(torch.promote_types(x.dtype, dtype) if x.is_floating_point() else x.dtype)
            ties = model.get_expanded_tied_weights_keys(all_submodels=True).keys()
            if untied := ties - model.all_tied_weights_keys.keys():
                differ = f"its config ties {min(untied)} to another weight, and its files have two that differ"
                raise ValueError(f"{flag} {path}: {differ}; set tie_word_embeddings to false in its config.json")
        else:
            model, new = read_model(path, kind, flag=flag, dtype=dtype, device_map="meta")
            model.to_empty(device="cpu")
            model.tie_weights()  # to_empty unties, which would halve the embedding's gradient
    except ValueError as error:
        problems = [str(error)]
    if problems := ranks.all_gather(problems):  # otherwise the other ranks would wait for this one forever
        raise ValueError(problems[0])
    started(f"{flag} read")
    name_weights(model, path)  # pyrefly: ignore[unbound-name]  # else there is a problem
    use_attention(model, choose_attention(ranks.device, ranks.dtype))
    kind.finish(model, new, f"{flag} {path}")  # pyrefly: ignore[unbound-name]  # as above
    return add_packed_forward(model)


def name_weights(model: PreTrainedModel, path: str) -> None:
    """Let `exported` give published names, whatever those of the files in `path` are, which may be older or newer. What
    is only the text part of a larger model keeps the names within that, whose config becomes `model.whole`.
    """
    config = AutoConfig.from_pretrained(path)
    model.whole = None if isinstance(model.config, type(config)) else config
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [x for x in conversions if model.whole or not isinstance(x, PrefixChange)]

"""Models of transformers on the host, made ready for this package, and their weights as engines and files know them."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rl.attention import choose_attention
from rl.logprobs import add_response_logprobs
from rl.ranks import Ranks
from rl.sharding import full_tensors, shard

VALUE_HEAD = "value_head"  # of a policy that is its own critic


def load_policy(args: Any, ranks: Ranks, *, frozen: bool = False, value_head: bool = False) -> nn.Module:
    """The model of --model, sharded over the ranks as the memory flags say: the one that is trained, or a reference.

    A policy that is trained has master weights in float32. A frozen one has them in the compute precision, and never
    gets gradients. value_head: give it a second head for values, see `add_value_head`. All ranks must enter. Raises
    ValueError if the files of the model lack weights, or if it has more than plain attention.
    """
    model = load_causal_lm(args.model, ranks, dtype=ranks.dtype if frozen else torch.float32)
    if value_head:
        add_value_head(model)
    return shard_as(args, model.requires_grad_(not frozen), ranks)


def shard_as(args: Any, model: nn.Module, ranks: Ranks) -> nn.Module:
    """`sharding.shard` a model as the memory flags say."""
    return shard(
        model,
        ranks,
        activation_checkpointing=args.activation_checkpointing,
        compile=args.compile and ranks.device.type == "cuda",
        fsdp_size=args.fsdp_size,
    )


def add_value_head(policy: nn.Module) -> None:
    """Give a causal LM on the host, not sharded yet, a scalar head `value_head` of zeros in the master precision.

    `shard` makes it part of the root unit, and `exported` leaves it out of what engines and files get.
    """
    lm_head = policy.get_output_embeddings()
    policy.value_head = nn.Linear(lm_head.in_features, 1, bias=False, dtype=lm_head.weight.dtype)
    nn.init.zeros_(policy.value_head.weight)


def exported(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model as engines and transformers know them, from (name, whole tensor) as the trainer has them.

    The push to the engine and the files of a checkpoint both go through here, so that they cannot differ. A value head
    is left out.
    """
    return ((name, x) for name, x in named_tensors if not name.startswith(f"{VALUE_HEAD}."))


def weights_for_engine(policy: nn.Module, ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) in the compute precision, for `update_weights` of an engine. All ranks must iterate."""
    return exported(full_tensors(policy, ranks.dtype))


def load_causal_lm(path: str, ranks: Ranks, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A causal LM with master weights in `dtype` on the host.

    Rank 0 reads the files; other ranks get storage that `shard` fills. Raises ValueError if the files lack weights.
    """
    model, missing = load_pretrained(AutoModelForCausalLM, path, ranks, dtype=dtype)
    check_whole(path, missing)
    return add_response_logprobs(model)


def check_whole(path: str, missing: set[str], *, flag: str = "--model") -> None:
    """Raise ValueError naming `flag` if the files of the model in `path` lack weights, which would be random."""
    if missing:
        raise ValueError(
            f"{flag} {path}: its files lack {len(missing)} of its weights, {min(missing)} among them; use a whole one"
        )


def load_pretrained(
    auto_class: Any, path: str, ranks: Ranks, *, dtype: torch.dtype, **config_changes: Any
) -> tuple[nn.Module, set[str]]:
    """A model of a transformers auto class on the host, and the names of its weights that the files do not hold.

    Rank 0 reads the files; other ranks get storage that `shard` fills, and no names. `config_changes`: entries of the
    config to replace, such as num_labels.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # flash-attn warns about fp32 masters, though it computes in bf16
    options = dict(dtype=dtype, attn_implementation=choose_attention(ranks.device, ranks.dtype))
    missing: set[str] = set()
    if ranks.is_main:
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

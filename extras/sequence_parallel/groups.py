"""Which ranks train on the same rows, and which models can be sliced."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface, AutoConfig

from extras import families
from rl.flags import flat, spelled
from rl.model.attention import refuse_options, use_attention
from rl.ranks import Ranks, wait_without_end

MODELS = ("model", "critic_model", "prm_model", "teacher_model", "reward_model")  # flags that name a model


def share_rows(ranks: Ranks, args: Any) -> Ranks:
    """See `extras.sequence_parallel.share_rows`."""
    check(args, ranks.size)
    return with_groups(ranks, args.memory.sequence_parallel_size)


def check(args: Any, num_ranks: int) -> None:
    """See `extras.sequence_parallel.check`."""
    size, flags = args.memory.sequence_parallel_size, flat(args)
    if num_ranks % size:
        raise ValueError(f"--sequence-parallel-size {size} does not divide the {num_ranks} rank(s); choose a divisor")
    if coef := flags["router_aux_loss_coef"]:
        problem = f"--router-aux-loss-coef {coef} needs all tokens of a row on one rank"
        raise ValueError(f"{problem}, and --sequence-parallel-size {size} divides them; leave one of them out")
    for name in MODELS:
        is_behind_server = name == "teacher_model" and flags.get("teacher_url")
        if (path := flags.get(name)) and not is_behind_server:
            check_model(path, size, flag=spelled(name))


def with_groups(ranks: Ranks, size: int) -> Ranks:
    """The ranks, of which this many neighbors train on the same rows. All ranks must enter."""
    neighbors = [list(range(first, first + size)) for first in range(0, ranks.size, size)]
    across = [list(same_place) for same_place in zip(*neighbors, strict=True)]
    sequence_group, data_group = (dist.new_subgroups_by_enumeration(x)[0] for x in (neighbors, across))
    for group in (sequence_group, data_group):
        wait_without_end(group)
    return replace(
        ranks,
        data_rank=ranks.rank // size,
        data_size=ranks.size // size,
        data_group=data_group,
        sequence_group=sequence_group,
    )


class _Seen(Exception):
    """A decoder has come to its first attention."""


def check_model(path: str, size: int, *, flag: str) -> None:
    """Raise ValueError, from its config alone, if the model in `path`, which `flag` has named, cannot be sliced.

    That is so if its heads cannot be divided, if it sees images, or if it does not run packed: it has recurrent layers,
    or an attention that rl/model/attention.py does not compute. What else may be wrong with packed rows, the test of
    the loaded model finds, see `rl.model.self_test`.
    """
    problem = ""
    with torch.device("meta"):
        model = families.auto_class(path).from_config(AutoConfig.from_pretrained(path))
        ids = torch.zeros(1, 2, dtype=torch.long)

    def first_attention(module, query, key, value, attention_mask, packing=None, **options):
        refuse_options(options)
        if packing is None:
            raise ValueError("its attention is not told where sequences begin")
        check_heads(query.shape[1], key.shape[1], size)
        raise _Seen

    if families.tower_of(model):
        problem = "it sees images"
    elif not all(x.runs_packed for x in families.families_of(model)):
        problem = "its layers carry a state from token to token"
    else:
        AttentionInterface.register("first_attention", first_attention)
        use_attention(model, "first_attention")
        try:
            model.base_model(input_ids=ids, position_ids=ids, packing=ids, use_cache=False)
            problem = "it has an attention of its own"
        except _Seen:
            pass
        except ValueError as error:
            problem = str(error)
    if problem:
        raise ValueError(
            f"{flag} {path} cannot be sliced by --sequence-parallel-size {size}: {problem}; choose another size, or "
            "leave the flag out"
        )


def check_heads(heads: int, key_heads: int, size: int) -> None:
    """Raise ValueError if heads of queries, or those of keys and values, cannot be divided among `size` ranks."""
    if heads % size:
        raise ValueError(f"{size} does not divide its {heads} attention heads")
    if max(size, key_heads) % min(size, key_heads):
        raise ValueError(f"{size} neither divides its {key_heads} heads of keys nor is a multiple of that number")

"""Experts on E neighboring ranks: each of them computes with its share of the experts of a layer, for all E of them.

A token has k experts. A rank sends k copies of each of its tokens to the ranks that have these experts, gets what they
made of them, and adds it up with the gates. transformers has the same algorithm (`EpDispatchExpertsParallel`).

At rest nothing changes: rank r of N has the rth part of the experts, as FSDP2 divides rows. So checkpoints, norms and
whole tensors are what they are without this, and a run may be resumed at another E. While a layer computes, FSDP2
gathers its experts only from every Eth rank. So the experts of a rank are not neighbors, and get other numbers:

    N = 4, E = 2, eight experts:     at rest   rank 0: 0 1    rank 1: 2 3    rank 2: 4 5    rank 3: 6 7
                                     gathered  rank 0, 2: 0 1 4 5            rank 1, 3: 2 3 6 7

The gradients that FSDP2 adds up over these ranks come from the tokens of all N, so the loss needs no factor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from extras.families import replace_forward
from rl.ranks import Ranks, wait_without_end


def divide(units: Sequence[nn.Module], ranks: Ranks, size: int, mesh: DeviceMesh, wrap: Callable) -> None:
    """Let `size` neighbors divide the experts of units, whose weights have no values yet. All ranks must enter. A model
    beside --model may have a number of experts that the ranks do not divide, and then each rank has all of them.

    Args: mesh, of all ranks; wrap, that shards a module as FSDP2 shards units.
    """
    groups = init_device_mesh(ranks.device.type, (ranks.size // size, size), mesh_dim_names=("shard", "expert"))
    list(map(wait_without_end, groups.get_all_groups()))
    modules: list[Any] = [x for unit in units for x in unit.modules() if hasattr(x, "_apply_gate")]
    for experts in [x for x in modules if x.num_experts % ranks.size == 0]:
        by_rank = torch.arange(experts.num_experts, device=ranks.device).view(ranks.size // size, size, -1)
        experts.numbers, experts.group = by_rank.transpose(0, 1).flatten().argsort(), groups.get_group("expert")
        experts.num_experts //= size
        at_rest = [distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None) for x in experts.parameters()]
        for x in experts.parameters():
            x.data = x.data[: experts.num_experts]
        replace_forward(experts, dispatch)
        wrap(experts, mesh=groups["shard"])
        for x, whole in zip(experts._get_fsdp_state()._fsdp_param_group.fsdp_params, at_rest, strict=True):
            x._sharding_spec = whole._spec  # which the gradient has too
            torch.utils.swap_tensors(x.sharded_param, nn.Parameter(whole, x.sharded_param.requires_grad))


@torch.compiler.disable
def dispatch(experts: Any, own_forward: Callable, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of a layer's experts: hidden (N, H), experts and gates (N, k) -> (N, H)."""
    group, n, k = experts.group, experts.num_experts, top_k_index.shape[-1]
    ids = experts.numbers[top_k_index.flatten()]
    order = ids.argsort()
    counts = ids.new_zeros(len(experts.numbers)).scatter_add_(0, ids, torch.ones_like(ids)).view(-1, n)
    arriving = all_to_all_single_autograd(counts, [1] * len(counts), [1] * len(counts), group)
    sent, got = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()  # waits for the GPU
    # The gradient of index_copy is a gather. That of an index, which would do the same, adds up and is slow.
    copies = hidden.new_empty(len(ids), hidden.shape[1]).index_copy(0, order.argsort(), hidden.repeat_interleave(k, 0))
    x = all_to_all_single_autograd(copies, got, sent, group)
    own = torch.arange(n, device=x.device).repeat(len(counts)).repeat_interleave(arriving.flatten(), output_size=len(x))
    if not sum(got):  # a row of zeros, so that the backward pass of this rank has the same collectives
        x, own = x.sum(0, keepdim=True), own.new_zeros(1)
    y = own_forward(x, own[:, None], torch.ones_like(own, dtype=x.dtype)[:, None])
    y = all_to_all_single_autograd(y[: sum(got)], sent, got, group)
    each = torch.empty_like(y).index_copy(0, order, y).view(*top_k_index.shape, -1)
    return (each * top_k_weights[..., None]).sum(1).to(hidden.dtype)

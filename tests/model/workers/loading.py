"""Run by torchrun: what each rank holds of models that were loaded in several ways.

torchrun --nproc_per_node N tests/model/workers/loading.py FLOAT32 BFLOAT16 OUT      writes OUT/rank{rank}.pt
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from extras.lora import LoRA
from extras.offload import OffloadFlags
from rl.model.load import load_model
from rl.model.roles import ALL_WEIGHTS
from rl.model.sharding import BARE, Memory, full_tensors, own_part
from rl.ranks import init_ranks, shutdown_ranks


@dataclass(frozen=True)
class WithOffload(OffloadFlags, Memory):
    """The flags about memory of a script that can offload."""


def main(in_float32: str, in_bfloat16: str, out: str) -> None:
    ranks, results = init_ranks(), {}
    half = replace(ranks, dtype=torch.bfloat16)
    on_host = WithOffload(activation_checkpointing="none", compile=False, param_offload=True, optimizer_offload=False)
    ways = {
        "learning": (in_bfloat16, ranks, ALL_WEIGHTS, BARE),
        "copies": (in_bfloat16, ranks, ALL_WEIGHTS, replace(BARE, fsdp_size=2)),
        "on the host": (in_bfloat16, ranks, ALL_WEIGHTS, on_host),
        "frozen": (in_float32, half, None, BARE),
        "beside adapters": (in_float32, half, LoRA(lora_rank=8), BARE),
    }
    for name, (path, among, learning, memory) in ways.items():
        model = load_model(path, among, learning, memory, longest=64)
        rows = {key: own_part(x.detach()).clone() for key, x in model.named_parameters()}
        sha256 = [x.base_sha256 for x in model.packed.families if hasattr(x, "base_sha256")]
        results[name] = {key: x.clone() for key, x in full_tensors(model)}, rows, sha256
    try:
        load_model(in_float32 if ranks.rank < 3 else in_bfloat16, ranks, None, longest=64)
    except ValueError as error:
        results["refused"] = str(error)
    torch.save(results, Path(out) / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""How far off is the plan of a micro-batch? Its memory as planned and as a GPU has it, and its seconds.

    python benchmarks/memory_peaks.py --model models/qwen-1.5b-random
    python benchmarks/memory_peaks.py --model ... --ways selective,16384 full,4096 --lora-rank 32
    torchrun --nproc_per_node 2 benchmarks/memory_peaks.py --model ... --ways full,16384,param_offload

A way is what is recomputed, tokens, and perhaps param_offload. Prints a line of JSON for each: planned, GiB by
extras/plan/memory.py; peak, GiB beside weights and gradients; fixed, GiB on the GPU without any micro-batch; seconds of
the last of three passes. At the end the rehearsal is told that the GPU is smaller than it is, to see what it takes.
"""

import gc
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from extras.lora import LoRA  # noqa: E402
from extras.plan import rehearse  # noqa: E402
from extras.plan.memory import GIB, Load, Model, Way, pass_bytes  # noqa: E402
from extras.plan.rehearsal import _peak  # noqa: E402
from extras.plan.sizes import sizes_of  # noqa: E402
from rl.flags import FewOr0  # noqa: E402
from rl.model.load import load_model  # noqa: E402
from rl.ranks import Ranks, init_ranks, shutdown_ranks  # noqa: E402
from rl.run.arguments import MemoryRL  # noqa: E402


@dataclass(frozen=True)
class Args:
    model: str  # The model is loaded from this Hugging Face id or folder.
    # Each way is --activation-checkpointing, the tokens of a micro-batch, and what is offloaded.
    ways: tuple[str, ...] = ("selective,16384", "selective,4096", "none,16384", "full,16384", "full,4096,param_offload")
    lora_rank: FewOr0 = 0  # This is as in train_grpo.py.
    length: int = 1536
    """A sequence has this many tokens."""
    compile: bool = True  # This is as in train_grpo.py.
    smaller: bool = False
    """Rehearse the first way also on a GPU that is said to hold half of its micro-batch, and then a quarter of it."""


def main(args: Args) -> None:
    ranks, lora = init_ranks(), LoRA(lora_rank=args.lora_rank)
    load = Load(
        (Model(sizes_of(args.model, lora=lora), rank=args.lora_rank),),
        engine=None,
        longest=args.length,
        ranks=ranks.size,
        local=ranks.size,
        shards=ranks.size,
        compiles=args.compile,
    )
    policy, now = None, None
    for text in args.ways:
        level, tokens, *more = text.split(",")
        memory = MemoryRL(
            activation_checkpointing=level,
            ppo_max_token_len_per_gpu=int(tokens),
            param_offload=bool(more),
            optimizer_offload=False,
            compile=args.compile,
        )
        if now != (level, more):
            policy = None
            gc.collect()
            torch.cuda.empty_cache()
            policy, now = load_model(args.model, ranks, lora, memory, longest=args.length), (level, more)
        fixed, planned = torch.cuda.memory_allocated(), pass_bytes(load.models[0], load, way_of(memory), learns=True)
        line = dict(model=args.model, way=text, lora_rank=args.lora_rank, fixed=fixed / GIB, planned=planned / GIB)
        for _ in range(3):
            torch.cuda.synchronize()
            begin = time.time()
            line["peak"] = _peak(policy, int(tokens), max_length=args.length, ranks=ranks) / GIB
            torch.cuda.synchronize()
            line["seconds"] = time.time() - begin
        if ranks.is_main:
            print(json.dumps(line), flush=True)
        if args.smaller and text == args.ways[0]:
            rehearse_smaller(policy, memory, line["peak"] * GIB, args.length, ranks)
            policy, now = None, None  # it recomputes all of its layers from here on
    shutdown_ranks()


def way_of(memory: MemoryRL) -> Way:
    tokens = memory.ppo_max_token_len_per_gpu
    return Way(memory.activation_checkpointing, tokens, memory.optimizer_offload, memory.param_offload)


def rehearse_smaller(policy: torch.nn.Module, memory: MemoryRL, peak: float, length: int, ranks: Ranks) -> None:
    """Print what the rehearsal takes if a GPU is said to be smaller than what was planned for."""
    levels, counts = ("selective", "full"), (16384, 8192, 4096)
    ways = [
        replace(memory, activation_checkpointing=level, optimizer_offload=moved, ppo_max_token_len_per_gpu=n)
        for level in levels
        for moved in (False, True)
        for n in counts
    ]
    trained = {"actor": (policy, torch.optim.AdamW(policy.parameters(), fused=True))}
    true = torch.cuda.mem_get_info
    learned = sum(x.nbytes for x in policy.parameters())
    for share in (0.6, 0.25):
        torch.cuda.empty_cache()
        free, total = true()
        less = int(total - free + 3 * learned + share * peak)
        torch.cuda.mem_get_info = lambda device=None, less=less, total=total: (less - (total - true(device)[0]), less)
        taken, text = rehearse(trained, ways, max_length=length, engine_memory=0, ranks=ranks)
        torch.cuda.mem_get_info = true
        if ranks.is_main:
            print(json.dumps({"smaller": share, "taken": str(way_of(taken)), "text": text}), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""Run by torchrun: benchmarks/slices.py with layers that are compiled on a CPU, where a run would not compile them.

torchrun --nproc_per_node N tests/sequence_parallel/measured.py FLAGS
"""

import sys
from dataclasses import replace

import torch
import tyro

from benchmarks import slices
from rl.model import load

if __name__ == "__main__":
    torch_compile, shard = torch.compile, load.shard
    torch.compile = lambda function, options=None, **rest: torch_compile(function, backend="aot_eager", **rest)
    load.shard = lambda model, ranks, memory: shard(model, ranks, replace(memory, compile=True))
    slices.main(tyro.cli(slices.Args, args=sys.argv[1:], config=(tyro.conf.OmitArgPrefixes,)))

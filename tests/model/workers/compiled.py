"""Compiled layers and LM head against the plain ones, on batches of several lengths: `compiled.py MODEL OUT [BACKEND]`.

The default backend traces forward and backward and runs the graphs as they are. "inductor", what a GPU runs, also
generates code: minutes on a CPU.
"""

import json
import sys
from pathlib import Path

import torch
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters

from rl.data.batching import collate
from rl.data.types import Batch, Sample, Sampling
from rl.model.load import load_pretrained
from rl.model.logprobs import token_logprobs
from rl.model.sharding import Memory, shard
from rl.ranks import init_ranks, shutdown_ranks

LENGTHS = ([5, 9], [20, 3, 7], [2, 2, 2, 2, 2], [31, 17])


def make_batch(lengths: list[int], seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    responses = [torch.randint(3, 70, (n,), generator=generator).tolist() for n in lengths]
    return collate([Sample([1, 2, 3], r, [1] * len(r), [0.0] * len(r), "stop", 0) for r in responses], pad_id=0)


def run(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(log-probs and entropies, gradients, graphs compiled so far after each batch)."""
    values, graphs = [], []
    for seed, lengths in enumerate(LENGTHS):
        logp, entropy = token_logprobs(model, make_batch(lengths, seed), sampling=Sampling(temperature=0.7))
        logp.square().sum().backward()
        values += [logp.detach().flatten(), entropy.detach().flatten()]
        graphs.append(counters["stats"]["unique_graphs"])
    gradients = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    return torch.cat(values), gradients, graphs


def main(path: str, out: str, backend: str = "aot_eager") -> None:
    torch_compile, variable = torch.compile, []

    def recording_backend(graph, inputs):
        variable.append(sorted({x.node.hint for x in inputs if isinstance(x, torch.SymInt)}))
        return lookup_backend(backend)(graph, inputs)

    def compile_with_backend(*args, options=None, **kwargs):  # options are for inductor, and about speed
        return torch_compile(*args, backend=recording_backend, **kwargs)

    torch.compile = compile_with_backend
    ranks = init_ranks()
    values, gradients, graphs = run(shard(load_pretrained(path, ranks), ranks))
    assert graphs == [0, 0, 0, 0], graphs
    compiled = shard(load_pretrained(path, ranks), ranks, Memory())
    compiled_values, compiled_gradients, graphs = run(compiled)
    results = {
        "values": (compiled_values - values).abs().max().item(),
        "gradients": ((compiled_gradients - gradients).norm() / gradients.norm()).item(),
        "graphs": graphs,
        "variable": variable,  # for each graph, the sizes in the first batch of what may have other sizes in the next
        "graph_breaks": sum(counters["graph_break"].values()),
    }
    Path(out).write_text(json.dumps(results))
    shutdown_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])

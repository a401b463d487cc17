"""A hybrid of eleven layers, plain and compiled, with its delta rule as one operation and in plain torch.

Prints how many graphs checkpointed layers of twelve kinds get. Then it prints what differs, how many graphs
torch.compile has made after each of three batches of longer and longer sequences, and how many of torch's convolutions
are in them.
"""

import copy
import functools
import inspect
import json
import sys

import helpers_families as families
import torch
import transformers
from torch.utils.checkpoint import checkpoint

from extras.families import delta_rule, recurrent
from extras.families.ways import family, use_way
from rl.data.batching import collate
from rl.data.types import Batch, Sample, Sampling
from rl.model.logprobs import add_packed_forward, token_logprobs
from rl.model.sharding import Memory, _compile_for_all_lengths, shard
from rl.ranks import init_ranks, shutdown_ranks


def batch_of(lengths: range) -> Batch:
    """Random sequences of these lengths."""
    ids = torch.randint(3, 80, (len(lengths), lengths[-1]), generator=torch.Generator().manual_seed(0)).tolist()
    pairs = zip(ids, lengths, strict=True)
    return collate([Sample(x[:4], x[4:n], [1] * (n - 4), [0.0] * (n - 4), "stop", 0) for x, n in pairs])


class Scaled(torch.nn.Module):
    """A layer of a kind for each factor."""

    def __init__(self, factor: int):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def main() -> None:
    graphs, torch_compile = [], torch.compile

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compile_counted(function, options=None, **rest):  # options are for another backend
        return torch_compile(function, backend=counting, **rest)

    torch.compile = compile_counted
    for factor in range(12):
        forward = functools.partial(checkpoint, Scaled(factor).forward, use_reentrant=False)
        assert _compile_for_all_lengths(forward)(torch.ones(1, 2)).tolist() == [[factor, factor]]
    sys.stdout.write(json.dumps({"kinds": len(graphs)}) + "\n")
    torch._dynamo.reset()
    ranks = init_ranks()
    kind, options, _ = families.FAMILIES["delta nets"]
    kinds = ["linear_attention"] * 10 + ["full_attention"]
    config = getattr(transformers, kind)(**options | dict(num_hidden_layers=11, layer_types=kinds))
    model = transformers.AutoModelForCausalLM.from_config(config)
    batches = [batch_of(range(20, 29)), batch_of(range(150, 159)), batch_of(range(220, 229))]
    space = vars(sys.modules[type(model).__module__])
    own = inspect.unwrap(space[recurrent.DELTA_RULE])

    def kernel(*states, borders):
        q, k, v, g, beta = states
        return own(q, k, v, g=g, beta=beta)[0]

    delta_rule.kernel = kernel  # torch's in the place of flash-linear-attention's, which run on GPUs only
    space[recurrent.DELTA_RULE] = delta_rule.as_operation(own)
    for rule in ("operation", "plain"):
        if rule == "plain":
            space[recurrent.DELTA_RULE] = own
        found, counts = [], []
        for compiled in (False, True):
            memory = Memory(activation_checkpointing="none", compile=compiled)
            one = shard(add_packed_forward(copy.deepcopy(model)), ranks, memory)
            assert recurrent.know_borders(family(one, "recurrent").mixers, ranks.device)  # no kernels
            use_way(one, "packed but in recurrent layers")
            graphs.clear()
            for batch in batches:
                with torch.no_grad():
                    found.append(token_logprobs(one, batch, sampling=Sampling())[0])
                counts.append(len(graphs))
        nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
        convolutions = sum("conv1d" in str(node.target) for node in nodes)
        difference = max((x - y).abs().max().item() for x, y in zip(found[:3], found[3:], strict=True))
        line = {"difference": difference, "rule": rule, "largest": found[0].abs().max().item(), "graphs": counts}
        line |= {"convolutions": convolutions}
        sys.stdout.write(json.dumps(line) + "\n")
    shutdown_ranks()


if __name__ == "__main__":
    main()

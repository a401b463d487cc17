"""Updates with --sequence-parallel-size on several GPUs: the numbers, the seconds, the memory, and the exchanges.

    torchrun --nproc_per_node 4 benchmarks/slices.py --measure agreement --shape 1.5B --lengths 4096 --rows 8
    torchrun --nproc_per_node 4 benchmarks/slices.py --measure step share graphs --degrees 1 4 --lengths 8192 32768
    torchrun --nproc_per_node 4 benchmarks/slices.py --measure step share --degrees 4 --lengths 131072 --rows 2
    torchrun --nproc_per_node 2 benchmarks/slices.py --shape tiny --degrees 1 2 --lengths 64         # on two CPU cores

Whether an update gains from --expert-parallel-size E is told by this line for each E:

    torchrun --nproc_per_node 4 benchmarks/slices.py --measure step share --shape 30B-A3B --layers 8 --degrees 1 \\
        --lengths 4096 --rows 8 --ppo-max-token-len-per-gpu 4096 --expert-parallel-size E

A degree is a value of --sequence-parallel-size. Nothing is sampled. Models have random weights, which are made on the
GPU, and rows have random tokens. Flags about memory are those of train_grpo.py. What is `auto` among them is what the
plan of a run without an engine chooses. Each line of JSON is printed, and added to --out:

- agreement: mean and maximum of |difference of log-probs|, and the relative difference of all gradients together, of
  each degree and precision. They stand beside degree 1 in float32, and beside degree 1 in the same precision. Degree 1
  also runs with its rows in another order, in larger micro-batches. That and the distance between the precisions say
  how large rounding is.
- step: seconds of the updates after the first one, tokens per second, and the most GiB of any GPU beside those planned.
  "allocated" is what torch has allocated, which is planned without what the plan calls others. "used" is what the
  process has on the GPU, without what torch only caches. The communicators of degrees that were measured before count
  there too. The plan expects gradients from the start, so an update needs two micro-batches to have what is planned.
- share: seconds that a rank's GPU spends on each kind of collective in an update, on average over ranks, and the share
  of all-to-all in the seconds of that update. They include waiting for other ranks. On a CPU they are those of threads.
- graphs: how many graphs a rank has compiled at most after each of several updates, whose rows have other lengths and
  numbers.
"""

import gc
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo
import tyro
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import make_model  # noqa: E402
from benchmarks.step_time import now  # noqa: E402
from extras.offload.host import keep_moments_on_host  # noqa: E402
from extras.plan import Hardware, cards, hardware, with_values  # noqa: E402
from extras.plan.memory import GIB, Load, Model, Needed, needed  # noqa: E402
from extras.plan.rehearsal import largest_micro_batch  # noqa: E402
from extras.plan.seconds import Pass, pass_s, step_s  # noqa: E402
from extras.plan.sizes import sizes_of  # noqa: E402
from extras.plan.ways import Choice, choose, flags_of_way  # noqa: E402
from extras.sequence_parallel import groups, slice_tokens  # noqa: E402
from rl.data.batching import plan_update  # noqa: E402
from rl.data.types import Batch, take_rows  # noqa: E402
from rl.flags import AtLeast1, settled  # noqa: E402
from rl.model.attention import use_attention  # noqa: E402
from rl.model.load import load_model  # noqa: E402
from rl.model.logprobs import token_logprobs  # noqa: E402
from rl.model.roles import CausalLM  # noqa: E402
from rl.model.sharding import backward, clip_grad_norm, own_part  # noqa: E402
from rl.ranks import Ranks, init_ranks, shutdown_ranks  # noqa: E402
from rl.run.arguments import MemoryRL  # noqa: E402

TINY = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, vocab_size=512)
TINY_EXPERTS = dict(head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
TINY_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # a shape of make_model.py, and what differs in the config
    "tiny": ("7B", TINY | dict(intermediate_size=128)),
    "tiny-experts": ("30B-A3B", TINY | TINY_EXPERTS),
}
COLLECTIVES = {  # kind -> parts of the names of NCCL's kernels, and of gloo's operations
    "all-to-all": ("sendrecv", "alltoall", "all_to_all"),
    "all-gather": ("allgather", "all_gather"),
    "reduce-scatter": ("reducescatter", "reduce_scatter"),
    "all-reduce": ("allreduce", "all_reduce"),
}


@dataclass(frozen=True)
class Args:
    measure: tuple[Literal["agreement", "step", "share", "graphs"], ...] = ("agreement", "step", "share", "graphs")
    """These lines are written."""
    shape: Literal["tiny", "tiny-experts"] | make_model.Shape = "7B"
    """benchmarks/make_model.py has the shapes. Those that are tiny are for the CPU."""
    layers: int | None = None
    """The model has only this many layers. Those that are tiny have two."""
    model: str | None = None
    """This folder holds the model, whose weights are read, in the place of a shape."""
    degrees: tuple[AtLeast1, ...] = (1, 2, 4)
    """Each of these is measured."""
    lengths: tuple[AtLeast1, ...] = (8192,)
    """Each of these is measured. Rows have this many tokens, or up to this many for the agreement and for graphs."""
    rows: AtLeast1 | None = None
    """An update has this many rows on all ranks together. By default it has one for each group of ranks."""
    steps: AtLeast1 = 2
    """This many updates are timed, after one that warms up."""
    card: str = "h100"
    """The plan is for this kind of GPU, as in --plan. How much memory it has is what the GPU says."""
    memory: MemoryRL = MemoryRL()
    out: Path = Path("runs/slices.jsonl")
    """Lines are added to this file."""


class Rounded(make_model.Random):
    """Random weights that bfloat16 can hold, as those of most files are, and a larger LM head, so that tokens are as
    unequally likely as to a trained model.
    """

    @staticmethod
    def from_pretrained(path: str, **options: Any) -> tuple[PreTrainedModel, dict]:
        model, info = make_model.Random.from_pretrained(path, **options)
        model.lm_head.weight.data *= 3
        for x in model.parameters():
            x.data.copy_(x.data.bfloat16())
        return model, info


class RandomModel(CausalLM):
    """What a model without files is read as."""

    def class_of(self, path: str) -> type:
        """See above."""
        return Rounded


class Bench:
    """Ranks that measure, a model, and where lines go."""

    def __init__(self, args: Args, ranks: Ranks, model: str):
        self.args, self.ranks, self.model = args, ranks, model
        self.kind = CausalLM() if args.model else RandomModel()
        on_gpu = ranks.device.type == "cuda"
        self.flags = settled(args.memory, compile=on_gpu)
        self.card = cards.named(args.card).card
        self.hardware = hardware() if on_gpu else Hardware(int(self.card.gib * GIB), 2**40, ranks.size, ranks.size)

    def write(self, measure: str, **line: Any) -> None:
        """Print a line on rank 0, and add it to the file."""
        a = self.args
        what = {"measure": measure, "model": a.model or a.shape, "layers": a.layers, "ranks": self.ranks.size}
        text = json.dumps({**what, **line}, default=str)
        if self.ranks.is_main:
            print(text, flush=True)
            a.out.parent.mkdir(parents=True, exist_ok=True)
            with a.out.open("a") as file:
                file.write(text + "\n")

    def at_degree(self, degree: int) -> Ranks:
        """The ranks, of which this many neighbors train on the same rows. All ranks must enter."""
        return groups.with_groups(self.ranks, degree) if degree > 1 else self.ranks

    def rows(self, ranks: Ranks) -> int:
        """Rows of an update."""
        return self.args.rows or ranks.data_size

    def load(self, ranks: Ranks, memory: MemoryRL) -> PreTrainedModel:
        """The policy, as a script loads it."""
        gc.collect()
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        return load_model(self.model, ranks, memory=memory, kind=self.kind)

    def plan(self, degree: int, length: int) -> tuple[Load, Choice, MemoryRL]:
        """What the plan says of a run without an engine, and its memory flags without `auto`."""
        size, memory = self.ranks.size, replace(self.flags, sequence_parallel_size=degree)
        load = Load(
            models=(Model(sizes_of(self.model)),),
            engine=None,
            longest=-(-length // degree),
            ranks=size,
            local=size,
            shards=memory.fsdp_size or size,
            saves=False,
            compiles=bool(memory.compile),
            sliced=degree,
        )
        choice = choose(load, memory, self.hardware)
        names = flags_of_way("ppo_max_token_len_per_gpu")
        return load, choice, with_values(memory, dict(zip(names, choice.way, strict=True)))

    def batch(self, lengths: Sequence[int]) -> Batch:
        """Rows of random tokens with these lengths, all but the first of each sampled, with random advantages."""
        vocabulary = sizes_of(self.model).vocabulary
        batch = largest_micro_batch(len(lengths) * max(lengths), max(lengths), vocabulary)
        sampled = batch.response_mask * (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])
        advantages = torch.randn(len(lengths), 1, generator=torch.Generator().manual_seed(1)) * sampled
        return replace(batch, lengths=torch.tensor(lengths), response_mask=sampled, advantages=advantages)


# --- an update


def learn(policy: nn.Module, batch: Batch, ranks: Ranks, max_tokens: int) -> Iterator[tuple[list[int], Tensor]]:
    """Add up the gradients of an update, as train_grpo.py does: yields rows and log-probs of each micro-batch."""
    lengths = batch.lengths.tolist()
    update = plan_update(lengths, max_tokens=max_tokens, ranks=ranks)
    num_tokens = batch.response_mask.sum().item()
    for rows in update.micro_batches:
        micro = take_rows(batch, rows, ranks.device)
        logp, _ = token_logprobs(policy, micro)
        ratio = (logp - logp.detach()).clamp(-20, 20).exp()
        loss = (-micro.advantages * ratio * micro.response_mask).sum() / num_tokens
        backward(policy, loss, is_last=rows is update.micro_batches[-1])
        yield rows, logp.detach()


class Most:
    """The largest of what a GPU has in use when it is asked, in bytes. On a CPU it stays 0."""

    def __init__(self, device: torch.device):
        self.is_on_gpu, self.allocated, self.reserved, self.used = device.type == "cuda", 0, 0, 0

    def look(self) -> None:
        """See above. torch's peaks begin anew."""
        if self.is_on_gpu:
            free, total = torch.cuda.mem_get_info()
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
            self.allocated, self.reserved = max(self.allocated, allocated), max(self.reserved, reserved)
            self.used = max(self.used, total - free - reserved + allocated)
            torch.cuda.reset_peak_memory_stats()


def step(
    policy: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, ranks: Ranks, max_tokens: int, most: Most
) -> float:
    """An optimizer step. Returns its seconds."""
    begin = now(ranks.device)
    for _ in learn(policy, batch, ranks, max_tokens):
        pass
    clip_grad_norm(policy, 1.0)
    most.look()
    optimizer.step()
    most.look()
    optimizer.zero_grad(set_to_none=True)
    return now(ranks.device) - begin


# --- agreement


def numbers(policy: nn.Module, batch: Batch, ranks: Ranks, max_tokens: int) -> tuple[Tensor, list[Tensor]]:
    """Log-probs (B, T) of all rows and this rank's part of all gradients, on the host."""
    logp = torch.zeros(batch.response_mask.shape)
    for rows, x in learn(policy, batch, ranks, max_tokens):
        if rows:
            logp[rows, : x.shape[1]] = x.cpu()
    gradients = [own_part(x.grad).cpu() for x in policy.parameters()]
    policy.zero_grad(set_to_none=True)
    return ranks.all_reduce_sum(logp), gradients


def distance(found: tuple, expected: tuple, batch: Batch, ranks: Ranks) -> dict[str, float]:
    """How far log-probs and gradients are from others. `ranks` are those among which nothing is shared."""
    gaps = (found[0] - expected[0]).abs()[batch.response_mask > 0]
    pairs = zip(found[1], expected[1], strict=True)
    squares = torch.tensor([[(x - y).double().square().sum(), y.double().square().sum()] for x, y in pairs]).sum(0)
    difference, whole = ranks.all_reduce_sum(squares).sqrt().tolist()
    return {"logp_mean": gaps.mean().item(), "logp_max": gaps.max().item(), "gradients": difference / whole}


def agreement(bench: Bench, length: int) -> None:
    """Lines of how far degrees and precisions are from each other."""
    ranks, degrees = bench.ranks, sorted({1, *bench.args.degrees})
    rows = bench.args.rows or 2 * ranks.size
    batch = bench.batch([length - i * (length // 2) // rows for i in range(rows)])
    backwards = take_rows(batch, range(rows - 1, -1, -1))
    memory = with_values(replace(bench.flags, compile=False), {"activation_checkpointing": "full"})
    reference = None
    for precision in (torch.float32, torch.bfloat16):
        here, alone = replace(ranks, dtype=precision), None
        policy = bench.load(here, replace(memory, param_offload=False, optimizer_offload=False))
        whole = policy.packed
        for degree in degrees:
            sliced = replace(bench.at_degree(degree), dtype=precision)
            policy.packed = whole
            slice_tokens(policy, sliced)
            use_attention(policy, policy.packed.attention)
            found = {"as given": numbers(policy, batch, sliced, length)}
            if degree == 1:
                alone, reference = found["as given"], reference or found["as given"]
                logp, gradients = numbers(policy, backwards, sliced, max(degrees) * length)
                found["backwards"] = logp.flip(0), gradients
            for order, x in found.items():
                bench.write(
                    "agreement",
                    precision=str(precision).removeprefix("torch."),
                    degree=degree,
                    length=length,
                    rows=rows,
                    order=order,
                    attention=whole.attention,
                    beside_float32=distance(x, reference, batch, ranks),
                    beside_degree_1=distance(x, alone, batch, ranks),
                )
        del policy


# --- updates


def updates(bench: Bench, degree: int, length: int) -> None:
    """Lines of the seconds, memory, collectives or graphs of updates."""
    ranks = bench.at_degree(degree)
    load, choice, memory = bench.plan(degree, length)
    torch._dynamo.reset()
    counters.clear()
    policy = bench.load(ranks, memory)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.01, fused=True)
    if memory.optimizer_offload:
        keep_moments_on_host(optimizer, ranks.device)
    rows, tokens, most = bench.rows(ranks), memory.ppo_max_token_len_per_gpu, Most(ranks.device)
    batch = bench.batch([length] * rows)
    what = dict(degree=degree, length=length, rows=rows, way=choice.way._asdict(), compiles=bool(memory.compile))
    what["expert_parallel_size"] = memory.expert_parallel_size

    def once(batch: Batch, most: Most) -> float:
        return step(policy, optimizer, batch, ranks, tokens, most)

    first = once(batch, Most(ranks.device))  # which also resets torch's peaks
    graphs = [("the same", graphs_so_far(ranks))]
    if "step" in bench.args.measure:
        times = [once(batch, most) for _ in range(bench.args.steps)]
        seconds, work = statistics.median(times), work_of(batch, ranks, tokens)
        planned = planned_for(bench, load, choice, work.tokens / work.micro_batches)
        bench.write("step", **what, **timed(bench, load, choice, work, seconds), **measured(bench, planned, most),
                    first_seconds=first, all_seconds=times)  # fmt: skip
    if "share" in bench.args.measure:
        bench.write("share", **what, **shares(bench, ranks, lambda: once(batch, Most(ranks.device))))
    if "graphs" in bench.args.measure:
        others = {
            "the same again": [length] * rows,
            "shorter": [length - 1 - i % 3 for i in range(rows)],
            "more rows": [length * 3 // 4 + i % 5 for i in range(rows + ranks.data_size)],
            "few": [max(2, length // 8)] * ranks.data_size,
        }
        others |= {"an empty micro-batch": [length // 2]} if ranks.data_size > 1 else {}
        for name, lengths in others.items():
            once(bench.batch(lengths), Most(ranks.device))
            graphs.append((name, graphs_so_far(ranks)))
        bench.write("graphs", **what, **{key: {name: x[key] for name, x in graphs} for key in graphs[0][1]})


def graphs_so_far(ranks: Ranks) -> dict[str, int]:
    """What has been compiled on the rank that has compiled most. All ranks must enter."""
    found = counters["stats"]["unique_graphs"], counters["frames"]["ok"], sum(counters["graph_break"].values())
    return dict(
        zip(("graphs", "frames", "breaks"), map(max, zip(*ranks.all_gather([found]), strict=True)), strict=True)
    )


def work_of(batch: Batch, ranks: Ranks, max_tokens: int) -> Pass:
    """What each rank computes in an update with rows that are equally long."""
    lengths = batch.lengths.tolist()
    micro_batches = len(plan_update(lengths, max_tokens=max_tokens, ranks=ranks).micro_batches)
    tokens = sum(lengths) / ranks.size
    return Pass(tokens, tokens, sum(n**2 for n in lengths) / ranks.size, micro_batches)


def timed(bench: Bench, load: Load, choice: Choice, work: Pass, seconds: float) -> dict[str, Any]:
    """Seconds and tokens per second, and the seconds that the plan expects."""
    model, way, card, size = load.models[0], choice.way, bench.card, bench.ranks.size
    planned = pass_s(model, load, way, card, work, learns=True) + step_s(model, load, way, card)
    rates = {"tokens_per_s": size * work.tokens / seconds, "tokens_per_s_per_gpu": work.tokens / seconds}
    counts = {"tokens": round(size * work.tokens), "micro_batches": work.micro_batches}
    return counts | {"seconds": seconds, **rates, "planned_seconds": planned}


def planned_for(bench: Bench, load: Load, choice: Choice, tokens: float) -> Needed:
    """What the plan expects of micro-batches with this many tokens on each rank, be they fewer than it allows."""
    return needed(load, choice.way._replace(tokens=math.ceil(tokens)), bench.hardware.gpu)


def measured(bench: Bench, plan: Needed, most: Most) -> dict[str, Any]:
    """GiB of the GPU that has most in use, those planned, and how much more was planned than used, in percent."""
    planned, others = plan.most / GIB, plan.parts["others"] / GIB
    found = bench.ranks.all_gather([(most.allocated / GIB, most.reserved / GIB, most.used / GIB)])
    allocated, reserved, used = map(max, zip(*found, strict=True))
    sizes = {"planned_gib": planned, "used_gib": used, "allocated_gib": allocated, "reserved_gib": reserved}
    sizes["planned_parts_gib"] = {name: x / GIB for name, x in plan.parts.items()}
    if used:
        errors = {"used": planned / used - 1, "allocated": (planned - others) / allocated - 1}
        sizes["planned_too_much_percent"] = {name: 100 * x for name, x in errors.items()}
    return sizes


def shares(bench: Bench, ranks: Ranks, once: Any) -> dict[str, Any]:
    """Seconds and calls of each kind of collective in an update, by torch's profiler."""
    on_gpu = ranks.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        seconds = once()
    spent, calls, names = dict.fromkeys(COLLECTIVES, 0.0), dict.fromkeys(COLLECTIVES, 0), {}
    for event in profiled.key_averages():
        name = event.key.lower()
        # "nccl:..." are spans around NCCL's kernels, and "c10d::..." the calls.
        if not name.startswith("nccl" if on_gpu else "gloo:") or name.startswith("nccl:"):
            continue
        taken = (event.self_device_time_total if on_gpu else event.cpu_time_total) / 1e6
        names[event.key] = (event.count, taken)
        for kind, parts in COLLECTIVES.items():
            if any(part in name for part in parts):
                spent[kind], calls[kind] = spent[kind] + taken, calls[kind] + event.count
    every = bench.ranks.all_gather([(seconds, spent)])
    means = {kind: statistics.mean(x[kind] for _, x in every) for kind in COLLECTIVES}
    share = statistics.mean(x["all-to-all"] / whole for whole, x in every)
    least = min(x["all-to-all"] / whole for whole, x in every)  # of the rank that the others wait for
    of_rank_0 = {name: {"calls": count, "seconds": taken} for name, (count, taken) in names.items()}
    return {"seconds": seconds, "all_to_all_share": share, "least_share": least, "seconds_of": means, "calls": calls,
            "kernels": of_rank_0}  # fmt: skip


def config_of(args: Args, folder: str) -> str:
    """The folder of a model, which holds its config only if `args` give a shape."""
    if args.model:
        return args.model
    shape, options = TINY_SHAPES.get(args.shape, (args.shape, {}))
    layers = args.layers or (2 if options else None)
    make_model.config_of(shape, layers, **options | dict(max_position_embeddings=max(args.lengths))).save_pretrained(
        folder
    )
    return folder


def main(args: Args) -> None:
    """Measure."""
    ranks = init_ranks()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, ranks, config_of(args, folder))
        for degree in args.degrees:
            if ranks.size % degree:
                raise ValueError(f"--degrees {degree} does not divide the {ranks.size} rank(s); choose a divisor")
            groups.check_model(bench.model, degree, flag="--model")
        for length in args.lengths:
            if "agreement" in args.measure:
                agreement(bench, length)
            for degree in args.degrees if {*args.measure} - {"agreement"} else ():
                updates(bench, degree, length)
    shutdown_ranks()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, config=(tyro.conf.OmitArgPrefixes,)))

"""The seconds of a step by phase: what work.py says is to be done, as fast as seconds.py knows, on a machine's GPUs."""

import dataclasses
import functools
import math
import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple

from extras.lora import LoRA
from extras.plan import seconds, simulation
from extras.plan.cards import GIB, PER_HOST, Machine
from extras.plan.memory import ENGINE, Engine, Way, engine_weights, sequence_bytes
from extras.plan.seconds import Costs, Lengths, Pass
from extras.plan.sizes import Sizes, sizes_of
from extras.plan.work import Phase, Work
from rl.flags import flat
from rl.model.checks import check_heads

FILLED = 0.95  # of --ppo-max-token-len-per-gpu, what a micro-batch has on average
SIMULATED = 18  # steps of a simulation, of which the first third is left out


class Step(NamedTuple):
    """Seconds of one step."""

    phases: dict[str, float]  # as timing_s/ in the metrics has them
    seconds: float  # of the whole step
    tokens: float  # that it learns from, prompts included
    notes: tuple[str, ...] = ()


@functools.cache
def cached_sizes(path: str, lora: LoRA | None = None, has_score: bool = False) -> Sizes:
    """See `sizes_of`."""
    return sizes_of(path, lora=lora, has_score=has_score)


def costs_of(path: str, lora: LoRA | None = None, has_score: bool = False) -> Costs:
    """What the model in `path` costs, from its config.json alone, with adapters if `lora` has a rank."""
    lora = lora if lora is not None and lora.lora_rank else None
    return seconds.costs_of(cached_sizes(path, lora, has_score), lora.lora_rank if lora else 0)


def trainers_of(args: Any, machine: Machine) -> int:
    """GPUs that train. Raises ValueError if the flags do not fit the number of GPUs."""
    v = flat(args)
    samplers, shared_by = v.get("samplers", 0), v.get("tensor_model_parallel_size", 1)
    ranks = machine.gpus - samplers
    if ranks < 1:
        raise ValueError(
            f"--samplers {samplers} leaves no GPU of {machine.gpus} to train on; start fewer, or name more GPUs"
        )
    if ranks % shared_by:
        raise ValueError(
            f"--tensor-model-parallel-size {shared_by} does not divide the {ranks} GPUs; name a multiple of it"
        )
    if (size := v["fsdp_size"]) is not None and (size < 1 or ranks % size):
        raise ValueError(f"--fsdp-size {size} does not divide the {ranks} GPUs that train; choose a divisor")
    check_heads(args.model, shared_by)
    return ranks


def engine_of(v: dict[str, Any], length: float) -> Engine:
    """The engine of a run, from flags by name, for sequences of so many tokens."""
    return Engine(
        sizes=cached_sizes(v["model"]),
        length=math.ceil(length),
        sequences=v["max_num_seqs"],
        share=v["gpu_memory_utilization"],
        shared_by=v["tensor_model_parallel_size"],
        is_fp8=v["rollout_quantization"] == "fp8",
    )


@dataclass(frozen=True)
class Setting:
    """A run on a machine, with its way to use memory. --compile is settled in Args."""

    args: Any
    machine: Machine
    way: Way

    @functools.cached_property
    def flags(self) -> dict[str, Any]:
        """All flags by name."""
        return flat(self.args)

    @property
    def ranks(self) -> int:
        """GPUs that train."""
        return self.machine.gpus - self.samplers

    @property
    def samplers(self) -> int:
        """GPUs that only sample."""
        return self.flags.get("samplers", 0)

    @property
    def shards(self) -> int:
        """GPUs that share one copy of a model's weights."""
        return self.flags["fsdp_size"] or self.ranks

    @property
    def policy(self) -> Costs:
        """What the model of --model costs."""
        return costs_of(self.args.model, self.args.lora)

    @property
    def engine(self) -> dict[str, Any]:
        """How engines compute, as arguments of the functions in seconds.py."""
        return dict(
            shared_by=self.flags.get("tensor_model_parallel_size", 1),
            fp8=self.flags.get("rollout_quantization", "none") != "none",
        )

    @property
    def engines(self) -> int:
        """How many there are."""
        return max(1, (self.samplers or self.ranks) // self.engine["shared_by"])

    def slots(self, lengths: Lengths) -> int:
        """Sequences that an engine decodes at a time: --max-num-seqs, or as many as its KV cache holds on average."""
        engine = engine_of(self.flags, lengths.prompt + 0.75 * lengths.response)
        cache = engine.share * self.machine.card.gib * GIB - engine_weights(engine) - ENGINE
        return max(1, min(engine.sequences, int(cache / max(1.0, sequence_bytes(engine)))))


def step_of(run: Setting, work: Work) -> Step:
    """Seconds of a step by phase."""
    phases: dict[str, float] = {}
    if work.prompts:
        sleeps = run.flags["free_cache_engine"] and not run.samplers
        phases["update_weights"] = seconds.push_s(run.policy, sleeps=sleeps, to_others=run.samplers > 0)
        phases["gen"] = generate_s(run, work)
    for phase in work.phases:
        phases[phase.name] = phases.get(phase.name, 0.0) + phase_s(run, work, phase)
    phases["others"] = seconds.other_s(work.rows) if work.prompts else seconds.DATA_S
    tokens = work.rows * (work.lengths.prompt + work.lengths.response)
    if not run.samplers:
        return Step(phases, sum(phases.values()), tokens)
    trained = sum(phases.values()) - phases["gen"]
    whole, sampled = in_pools_s(run, work, trained)
    waiting = "trainers wait for samplers" if sampled > trained else "samplers wait for trainers"
    enough = max(1, math.ceil(run.samplers * sampled / trained))
    note = (
        f"{run.samplers} sampler(s) need {sampled:.1f} s for the responses that {run.ranks} trainer(s) learn from in "
        f"{trained:.1f} s: {waiting}, and {enough} sampler(s) would be enough"
    )
    return Step(phases | {"gen": whole - trained}, whole, tokens, (note,))


def generate_s(run: Setting, work: Work) -> float:
    """Seconds in which all engines answer the prompts of a step."""
    n, slots = math.ceil(work.prompts * work.answers / run.engines), run.slots(work.lengths)
    prompts = work.prompts / run.engines
    if share := run.flags.get("partial_rollouts"):
        args = simulated(run, work, min(slots, math.ceil(n * (1 + share))))
        steps = simulation.steady(dataclasses.replace(args, prompts=math.ceil(prompts)), share)
        return statistics.mean(step.generate_s for step in steps)
    card = run.machine.card
    return seconds.generate_s(run.policy, card, work.lengths, n, slots=slots, prompts=prompts, **run.engine)


def in_pools_s(run: Setting, work: Work, trained: float) -> tuple[float, float]:
    """Seconds of a step of train_async.py, whose trainers need `trained` seconds, by simulation; and those in which
    samplers that never wait make as many tokens.
    """
    staleness, responses = run.flags["max_staleness"], work.prompts * work.answers
    in_flight = min(run.slots(work.lengths), math.ceil(responses * (1 + staleness) / run.samplers))
    args, tokens = simulated(run, work, in_flight), responses * work.lengths.response
    sampled = tokens / run.samplers * (args.base_ms / in_flight + args.sequence_ms) / 1000
    args = dataclasses.replace(args, update_ms=0.0, fixed_s=trained)
    rate = simulation.pools(args, staleness, run.samplers, trainers=1, batch=work.prompts)
    return max(trained, tokens / rate), sampled


def simulated(run: Setting, work: Work, in_flight: int) -> simulation.Args:
    """A simulation of steps whose engines have so many responses in flight. A decoding step takes as long as that of
    seconds.py with one response and with all of them, and for numbers in between a straight line.
    """
    lengths, card = work.lengths, run.machine.card
    context = lengths.prompt + lengths.response / 2
    one, every = (seconds.decode_s(run.policy, card, n, context, **run.engine) for n in (1, in_flight))
    sequence = (every - one) / max(1, in_flight - 1)
    return simulation.Args(
        rollout_n=work.answers,
        prompt_length=round(lengths.prompt),
        max_length=lengths.limit,
        mean_length=min(lengths.uncut, 1e12),
        base_ms=1000 * (one - sequence),
        sequence_ms=1000 * sequence,
        read_ms=1000 * seconds.prefill_s(run.policy, card, 1000, run.engine["shared_by"]),
        steps=SIMULATED,
    )


def phase_s(run: Setting, work: Work, phase: Phase) -> float:
    """Seconds of a phase's passes on each rank, and of its optimizer steps."""
    card, lengths, rows = run.machine.card, work.lengths, work.rows / run.ranks
    model = costs_of(phase.path, run.args.lora if phase.has_adapters else None, not phase.has_head)
    tokens = rows * (lengths.prompt / work.same_prompt + lengths.response)
    parts = phase.updates / phase.times if phase.learns else 1  # of the rows, in a pass over them
    micro_batches = math.ceil(parts * max(1, math.ceil(tokens / parts / (FILLED * run.way.tokens))))
    in_one_host = run.machine.hosts == 1 or run.shards <= PER_HOST
    one = seconds.pass_s(
        model,
        card,
        Pass(tokens, rows * lengths.response * phase.has_head, rows * lengths.squares(), micro_batches),
        backward=phase.learns,
        recompute=run.way.checkpointing,
        compiled=run.flags["compile"],
        shards=run.shards,
        link_gb_s=card.link_gb_s if in_one_host else card.network_gb_s,
        on_host=run.way.param_offload,
    )
    if not phase.learns:
        return phase.times * one
    offloads = dict(moments_on_host=run.way.optimizer_offload, on_host=run.way.param_offload)
    return phase.times * one + phase.updates * seconds.step_s(model, card, shards=run.shards, **offloads)

"""The seconds of a step by phase: what work.py says is to be done, as fast as seconds.py knows, on a machine's GPUs."""

import dataclasses
import math
import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple

from extras.plan import seconds, simulation
from extras.plan.cards import GIB, Card
from extras.plan.memory import ENGINE, Engine, Load, Way, engine_weights, sequence_bytes
from extras.plan.seconds import Lengths, Pass
from extras.plan.work import Phase, Work

FILLED = 0.95  # of --ppo-max-token-len-per-gpu, what a micro-batch has on average
SIMULATED = 18  # steps of a simulation, of which the first third is left out


class Step(NamedTuple):
    """Seconds of one step."""

    phases: dict[str, float]  # as timing_s/ in the metrics has them
    seconds: float  # of the whole step
    tokens: float  # that it learns from, prompts included
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """A run on GPUs, with its way to use memory."""

    flags: dict[str, Any]  # all flags by name
    card: Card
    load: Load
    way: Way
    engine: Engine | None  # that samples on these GPUs, or on those of samplers

    @property
    def samplers(self) -> int:
        """Samplers, each with GPUs of its own, which share its engine."""
        return self.flags.get("samplers", 0)

    @property
    def engines(self) -> int:
        """How many there are."""
        return self.samplers or max(1, self.load.ranks // self.engine.shared_by)

    def slots(self, lengths: Lengths) -> int:
        """Sequences that an engine decodes at a time: --max-num-seqs, or as many as its KV cache holds on average."""
        engine = dataclasses.replace(self.engine, length=math.ceil(lengths.prompt + 0.75 * lengths.response))
        cache = engine.share * self.card.gib * GIB - engine_weights(engine) - ENGINE
        return max(1, min(engine.sequences, int(cache / max(1.0, sequence_bytes(engine)))))


def step_of(run: Setting, work: Work) -> Step:
    """Seconds of a step by phase."""
    phases: dict[str, float] = {}
    if work.prompts:
        sleeps = run.flags["free_cache_engine"] and not run.samplers
        phases["update_weights"] = seconds.push_s(run.engine.sizes, sleeps=sleeps, to_others=run.samplers > 0)
        phases["gen"] = sampling_s(run, work)
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
        f"{run.samplers} sampler(s) need {sampled:.1f} s for the responses that {run.load.ranks} trainer(s) learn from "
        f"in {trained:.1f} s: {waiting}, and {enough} sampler(s) would be enough"
    )
    return Step(phases | {"gen": whole - trained}, whole, tokens, (note,))


def sampling_s(run: Setting, work: Work) -> float:
    """Seconds in which all engines answer the prompts of a step."""
    n, slots = math.ceil(work.prompts * work.answers / run.engines), run.slots(work.lengths)
    prompts = work.prompts / run.engines
    if share := run.flags.get("partial_rollouts"):
        args = simulated(run, work, min(slots, math.ceil(n * (1 + share))))
        steps = simulation.steady(dataclasses.replace(args, prompts=math.ceil(prompts)), share)
        return statistics.mean(step.generate_s for step in steps)
    return seconds.generate_s(run.engine, run.card, work.lengths, n, slots=slots, prompts=prompts)


def in_pools_s(run: Setting, work: Work, trained: float) -> tuple[float, float]:
    """Seconds of a step of train_async.py, whose trainers need `trained` seconds, by simulation, and those in which
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
    """A simulation of steps whose engines have this many responses in flight. A decoding step takes as long as that of
    seconds.py with one response and with all of them, and for numbers in between a straight line.
    """
    lengths = work.lengths
    context = lengths.prompt + lengths.response / 2
    one, every = (seconds.decode_s(run.engine, run.card, n, context) for n in (1, in_flight))
    sequence = (every - one) / max(1, in_flight - 1)
    return simulation.Args(
        rollout_n=work.answers,
        prompt_length=round(lengths.prompt),
        max_length=lengths.limit,
        mean_length=min(lengths.uncut, 1e12),
        base_ms=1000 * (one - sequence),
        sequence_ms=1000 * sequence,
        read_ms=1000 * seconds.prefill_s(run.engine, run.card, 1000),
        steps=SIMULATED,
    )


def phase_s(run: Setting, work: Work, phase: Phase) -> float:
    """Seconds of a phase's passes on each rank, and of its optimizer steps."""
    lengths, rows, where = work.lengths, work.rows / run.load.ranks, (run.load, run.way, run.card)
    lengths = lengths if phase.prompt is None else lengths._replace(prompt=phase.prompt)
    tokens = rows * (lengths.prompt / work.same_prompt + lengths.response)
    parts = phase.updates / phase.times if phase.learns else 1  # of the rows, in a pass over them
    micro_batches = math.ceil(parts * max(1, math.ceil(tokens / parts / (FILLED * run.way.tokens))))
    scored = rows * lengths.response if phase.model.sizes.head else 0
    passes = Pass(tokens, scored, rows * lengths.squares(), micro_batches)
    took = phase.times * seconds.pass_s(phase.model, *where, passes, learns=phase.learns)
    return took + phase.updates * seconds.step_s(phase.model, *where) if phase.learns else took

"""What --plan prints: the memory, the seconds and the cost of a run on a machine."""

import dataclasses
import functools
import math
import statistics
from typing import Any, NamedTuple

from extras.plan import seconds, simulation
from extras.plan.cards import Machine, named
from extras.plan.sizes import sizes_of
from extras.plan.work import Phase, Work, script_of, work_of
from rl.flags import flat
from rl.model.lora import LoRA


class Step(NamedTuple):
    """Seconds of one step."""

    phases: dict[str, float]  # as timing_s/ in the metrics has them
    seconds: float  # of the whole step, which is less than their sum where phases overlap
    tokens: float  # that it learns from, prompts included
    notes: tuple[str, ...]


@functools.cache
def costs_of(path: str, lora: LoRA | None = None, has_score: bool = False) -> seconds.Costs:
    """What the model in `path` costs, from its config.json alone."""
    sizes = sizes_of(path, lora=lora, has_score=has_score)
    return seconds.costs_of(sizes, lora.lora_rank if lora else 0)


def policy_of(args: Any) -> seconds.Costs:
    """What the model costs that --model names, with its adapters."""
    return costs_of(args.model, args.lora if args.lora.lora_rank else None)


def step_of(args: Any, work: Work, machine: Machine) -> Step:
    """Seconds of a step by phase."""
    v, card = flat(args), machine.card
    samplers = v.get("samplers", 0)
    ranks = machine.gpus - samplers
    if ranks < 1:
        raise ValueError(
            f"--samplers {samplers} leaves no GPU of {machine.gpus} to train on; start fewer, or name more GPUs"
        )
    on_host, moments_on_host = v["param_offload"] is True, v["optimizer_offload"] is True
    recompute = "selective" if v["activation_checkpointing"] == "auto" else v["activation_checkpointing"]
    budget = next(x for name, x in v.items() if name.endswith("max_token_len_per_gpu"))
    shards = v["fsdp_size"] or ranks
    link = card.link_gb_s if machine.hosts == 1 or shards <= 8 else card.network_gb_s
    policy, phases = policy_of(args), {}
    lengths = work.lengths
    if work.prompts:
        sleeps = v["free_cache_engine"] and not samplers
        phases["update_weights"] = seconds.push_s(policy, sleeps=sleeps, to_others=samplers > 0)
        phases["gen"] = sampling_s(v, policy, work, machine, samplers or ranks)
    for phase in work.phases:
        lora = args.lora if phase.has_adapters and args.lora.lora_rank else None
        limit = 16384 if budget == "auto" else budget
        phases[phase.name] = phases.get(phase.name, 0.0) + phase_s(
            costs_of(phase.path, lora, not phase.has_head),
            machine,
            phase,
            work,
            ranks=ranks,
            limit=limit,
            recompute=recompute,
            compiled=v["compile"],
            shards=shards,
            link=link,
            on_host=on_host,
            moments_on_host=moments_on_host,
        )
    phases["others"] = seconds.other_s(work.rows if work.prompts else 0) if work.prompts else 0.05
    whole, notes = sum(phases.values()), ()
    if samplers:
        trained = whole - phases["gen"]
        whole, sampled = in_pools_s(v, policy, work, machine, samplers, trained)
        phases["gen"] = whole - trained
        waiting = "trainers wait for samplers" if sampled > trained else "samplers wait for trainers"
        balanced = max(1, math.ceil(samplers * sampled / trained))
        notes = (
            f"{samplers} sampler(s) need {sampled:.1f} s for the responses that {ranks} trainer(s) learn from in "
            f"{trained:.1f} s: {waiting}, and {balanced} sampler(s) would be enough",
        )
    return Step(phases, whole, work.rows * (lengths.prompt + lengths.response), notes)


def in_pools_s(
    v: dict[str, Any], policy: seconds.Costs, work: Work, machine: Machine, samplers: int, trained: float
) -> tuple[float, float]:
    """Seconds of a step of train_async.py, whose trainers need `trained` seconds, by simulation; and those in which
    samplers that never wait make as many tokens.
    """
    staleness, per_step = v["max_staleness"], work.prompts * work.answers
    in_flight = min(v["max_num_seqs"], math.ceil(per_step * (1 + staleness) / samplers))
    args = simulated(v, policy, work, machine, in_flight)
    tokens = per_step * work.lengths.response
    sampled = tokens / samplers * (args.base_ms / in_flight + args.sequence_ms) / 1000
    args = dataclasses.replace(args, update_ms=0.0, fixed_s=trained, steps=18)
    rate = simulation.pools(args, staleness, samplers, trainers=1, batch=work.prompts)
    return max(trained, tokens / rate), sampled


def simulated(
    v: dict[str, Any], policy: seconds.Costs, work: Work, machine: Machine, in_flight: int
) -> simulation.Args:
    """The speeds of an engine with so many responses in flight, for the simulation of a step."""
    lengths = work.lengths
    shared_by, fp8 = v.get("tensor_model_parallel_size", 1), v.get("rollout_quantization", "none") != "none"
    context = lengths.prompt + lengths.response / 2
    one, all_of_them = (
        seconds.decode_s(policy, machine.card, n, context, shared_by=shared_by, fp8=fp8) for n in (1, in_flight)
    )
    sequence = (all_of_them - one) / max(1, in_flight - 1)
    return simulation.Args(
        rollout_n=work.answers,
        prompt_length=round(lengths.prompt),
        max_length=lengths.limit,
        mean_length=min(lengths.uncut, 1e12),
        base_ms=1000 * (one - sequence),
        sequence_ms=1000 * sequence,
        read_ms=1000 * seconds.prefill_s(policy, machine.card, 1000, shared_by),
    )


def sampling_s(v: dict[str, Any], policy: seconds.Costs, work: Work, machine: Machine, gpus: int) -> float:
    """Seconds in which all engines answer the prompts of a step."""
    shared_by = v.get("tensor_model_parallel_size", 1)
    engines = max(1, gpus // shared_by)
    n = math.ceil(work.prompts * work.answers / engines)
    if share := v.get("partial_rollouts"):
        args = simulated(v, policy, work, machine, min(v["max_num_seqs"], math.ceil(n * (1 + share))))
        args = dataclasses.replace(args, prompts=math.ceil(work.prompts / engines), steps=18)
        return statistics.mean(step.generate_s for step in simulation.steady(args, share))
    return seconds.generate_s(
        policy,
        machine.card,
        work.lengths,
        n,
        slots=v["max_num_seqs"],
        prompts=work.prompts / engines,
        shared_by=shared_by,
        fp8=v.get("rollout_quantization", "none") != "none",
    )


def phase_s(
    model: seconds.Costs,
    machine: Machine,
    phase: Phase,
    work: Work,
    *,
    ranks: int,
    limit: int,
    recompute: str,
    compiled: bool,
    shards: int,
    link: float,
    on_host: bool,
    moments_on_host: bool,
) -> float:
    """Seconds of a phase's passes on each rank, and of its optimizer steps."""
    lengths, rows = work.lengths, work.rows / ranks
    tokens = rows * (lengths.prompt / work.same_prompt + lengths.response)
    count = phase.updates / phase.times if phase.learns else 1
    micro = count * max(1, math.ceil(tokens / count / (0.95 * limit)))
    passes = seconds.Pass(tokens, rows * lengths.response * phase.has_head, rows * lengths.squares(), math.ceil(micro))
    took = phase.times * seconds.pass_s(
        model,
        machine.card,
        passes,
        backward=phase.learns,
        recompute=recompute,
        compiled=compiled,
        shards=shards,
        link_gb_s=link,
        on_host=on_host,
    )
    if phase.learns:
        moved = dict(moments_on_host=moments_on_host, on_host=on_host)
        took += phase.updates * seconds.step_s(model, machine.card, shards=shards, **moved)
    return took


def start_s(policy: seconds.Costs, samples: bool) -> float:
    """Seconds from the command to the first step."""
    return 35 + 4 * policy.parameters / 1e9 + (40 if samples else 0)


class Plan(NamedTuple):
    """What a run takes on a machine."""

    script: str
    machine: Machine
    work: Work
    policy: seconds.Costs
    step: Step
    start_s: float  # from the command to the first step
    evaluation_s: float  # of each evaluation

    @property
    def hours(self) -> float | None:
        """From the command to the end; None if it is not known how many steps there are."""
        if self.work.steps is None:
            return None
        return (
            self.start_s + self.work.steps * self.step.seconds + self.work.evaluations * self.evaluation_s
        ) / 3600


def plan_of(args: Any, machine: Machine, response_length: float | None = None) -> Plan:
    """The plan of a run. Raises ValueError for flags that cannot be planned."""
    work, policy = work_of(args, response_length), policy_of(args)
    evaluation = 0.0
    if work.evaluations:
        v = flat(args)
        asked = work._replace(prompts=work.questions, answers=1)
        evaluation = sampling_s(v, policy, asked, machine, v.get("samplers") or machine.gpus)
    start = start_s(policy, work.prompts > 0)
    return Plan(script_of(args), machine, work, policy, step_of(args, work, machine), start, evaluation)


def text_of(plan: Plan, path: str) -> str:
    """A plan as it is printed."""
    policy = plan.policy
    lines = [f"{plan.script}.py on {plan.machine}"]
    lines.append(f"model: {path}, {policy.parameters / 1e9:.2f}e9 parameters, {policy.learned / 1e9:.3f}e9 learn")
    if plan.machine.card.tflops:
        step = plan.step
        shown = ", ".join(f"{name} {x:.1f}" for name, x in step.phases.items() if x >= 0.05)
        lines.append(f"seconds per step: {step.seconds:.1f} ({shown})")
        lines += step.notes
        rate = step.tokens / step.seconds
        lines.append(f"tokens per second: {rate:,.0f}, {rate / plan.machine.gpus:,.0f} per GPU, with prompts")
        lines.append(f"start: {plan.start_s:.0f} s before the first step")
        if plan.work.evaluations:
            lines.append(f"evaluations: {plan.work.evaluations} of {plan.evaluation_s:.0f} s")
        if plan.hours is not None:
            cost = f"{plan.hours:.2f} hours, {plan.hours * plan.machine.gpus:.1f} GPU hours"
            lines.append(f"{plan.work.steps} steps: {cost}")
    else:
        lines.append("seconds: not known, since nothing is known about this card but its memory")
    lines += [f"assumed: {text}" for text in plan.work.assumed]
    return "\n".join(lines)


def report(args: Any, machines: tuple[str, ...], response_length: float | None, host_gib: float | None) -> str:
    """The plans of a run on machines that are named as in cards.py, one after the other."""
    plans = [plan_of(args, named(name, host_gib), response_length) for name in machines or ("here",)]
    return "\n\n".join(text_of(plan, args.model) for plan in plans)

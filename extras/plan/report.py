"""What --plan prints: the memory, the seconds and the cost of a run on a machine."""

import dataclasses
import functools
import math
import os
import statistics
import sys
from typing import Any, NamedTuple, NoReturn

from extras.plan import Hardware, PlanFlags, seconds, simulation
from extras.plan.cards import GIB, PER_HOST, Machine, named
from extras.plan.memory import ENGINE, Engine, engine_bytes, engine_weights, least_engine, sequence_bytes
from extras.plan.sizes import Sizes, sizes_of
from extras.plan.ways import Choice, DoesNotFit, choose, load_of, spell
from extras.plan.work import Phase, Work, longest, script_of, work_of
from rl.flags import check_limits, flat, spelled
from rl.model.checks import check_heads, read_config
from rl.model.lora import LoRA


class Step(NamedTuple):
    """Seconds of one step."""

    phases: dict[str, float]  # as timing_s/ in the metrics has them
    seconds: float  # of the whole step, which is less than their sum where phases overlap
    tokens: float  # that it learns from, prompts included
    notes: tuple[str, ...]


@functools.cache
def cached_sizes(path: str, lora: LoRA | None = None, has_score: bool = False) -> Sizes:
    """See `sizes_of`."""
    return sizes_of(path, lora=lora, has_score=has_score)


def costs_of(path: str, lora: LoRA | None = None, has_score: bool = False) -> seconds.Costs:
    """What the model in `path` costs, from its config.json alone."""
    return seconds.costs_of(cached_sizes(path, lora, has_score), lora.lora_rank if lora else 0)


def policy_of(args: Any) -> seconds.Costs:
    """What the model costs that --model names, with its adapters."""
    return costs_of(args.model, args.lora if args.lora.lora_rank else None)


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


def choice_of(args: Any, machine: Machine, ranks: int) -> Choice:
    """The memory flags that the program would choose, and the memory that the run takes. Raises DoesNotFit."""
    gpu, host = machine.card.gib * GIB, machine.host_gib * GIB
    hardware, least, v = Hardware(int(gpu), int(host), ranks, min(ranks, PER_HOST)), longest(args), flat(args)
    choice = choose(load_of(args, hardware, least), args.memory, hardware)
    if "samplers" not in v:
        return choice
    sampler = engine_of(v, v["max_prompt_length"] + v["max_response_length"])
    if (least := least_engine(sampler)) > sampler.share * gpu:
        raise DoesNotFit(
            f"a sampler needs {least / GIB:.1f} GiB for the weights and one sequence, and --gpu-memory-utilization "
            f"{sampler.share:g} leaves it {sampler.share * gpu / GIB:.1f} of {gpu / GIB:.1f}; raise that, or use GPUs "
            "with more memory"
        )
    phases = choice.needed.phases | {"sampling, on the GPUs of samplers": engine_bytes(sampler, gpu)}
    return choice._replace(needed=choice.needed._replace(phases=phases))


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


def slots_of(v: dict[str, Any], lengths: seconds.Lengths, machine: Machine) -> int:
    """Sequences that an engine decodes at a time: --max-num-seqs, or as many as its KV cache holds on average."""
    engine = engine_of(v, lengths.prompt + 0.75 * lengths.response)
    cache = engine.share * machine.card.gib * GIB - engine_weights(engine) - ENGINE
    return max(1, min(engine.sequences, int(cache / max(1.0, sequence_bytes(engine)))))


def step_of(args: Any, work: Work, machine: Machine, choice: Choice) -> Step:
    """Seconds of a step by phase."""
    v, card, way = flat(args), machine.card, choice.way
    ranks = trainers_of(args, machine)
    samplers = machine.gpus - ranks
    shards = v["fsdp_size"] or ranks
    link = card.link_gb_s if machine.hosts == 1 or shards <= PER_HOST else card.network_gb_s
    policy, phases = policy_of(args), {}
    lengths = work.lengths
    if work.prompts:
        sleeps = v["free_cache_engine"] and not samplers
        phases["update_weights"] = seconds.push_s(policy, sleeps=sleeps, to_others=samplers > 0)
        phases["gen"] = sampling_s(v, policy, work, machine, samplers or ranks)
    for phase in work.phases:
        lora = args.lora if phase.has_adapters and args.lora.lora_rank else None
        phases[phase.name] = phases.get(phase.name, 0.0) + phase_s(
            costs_of(phase.path, lora, not phase.has_head),
            machine,
            phase,
            work,
            ranks=ranks,
            limit=way.tokens,
            recompute=way.checkpointing,
            compiled=v["compile"],
            shards=shards,
            link=link,
            on_host=way.param_offload,
            moments_on_host=way.optimizer_offload,
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
    in_flight = min(slots_of(v, work.lengths, machine), math.ceil(per_step * (1 + staleness) / samplers))
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
    n, slots = math.ceil(work.prompts * work.answers / engines), slots_of(v, work.lengths, machine)
    if share := v.get("partial_rollouts"):
        args = simulated(v, policy, work, machine, min(slots, math.ceil(n * (1 + share))))
        args = dataclasses.replace(args, prompts=math.ceil(work.prompts / engines), steps=18)
        return statistics.mean(step.generate_s for step in simulation.steady(args, share))
    return seconds.generate_s(
        policy,
        machine.card,
        work.lengths,
        n,
        slots=slots,
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
    choice: Choice
    step: Step | None  # None if nothing is known about the speed of the GPUs
    start_s: float  # from the command to the first step
    evaluation_s: float  # of each evaluation

    @property
    def hours(self) -> float | None:
        """From the command to the end; None if it is not known how many steps there are."""
        if self.work.steps is None or self.step is None:
            return None
        total = self.start_s + self.work.steps * self.step.seconds + self.work.evaluations * self.evaluation_s
        return total / 3600


def plan_of(args: Any, machine: Machine, response_length: float | None = None) -> Plan:
    """The plan of a run. Raises ValueError if it does not fit, and for flags that cannot be planned."""
    for flag in ("model", "critic_model", "prm_model", "teacher_model", "reward_model"):
        path = flat(args).get(flag)
        if path and not (flag == "teacher_model" and args.teacher.teacher_url):
            read_config(path, flag=spelled(flag))
    ranks = trainers_of(args, machine)
    choice, work, policy = choice_of(args, machine, ranks), work_of(args, response_length), policy_of(args)
    evaluation = 0.0
    knows_speed = machine.card.tflops > 0
    if work.evaluations and knows_speed:
        v = flat(args)
        asked = work._replace(prompts=work.questions, answers=1)
        evaluation = sampling_s(v, policy, asked, machine, v.get("samplers") or machine.gpus)
    step = step_of(args, work, machine, choice) if knows_speed else None
    return Plan(script_of(args), machine, work, policy, choice, step, start_s(policy, work.prompts > 0), evaluation)


def text_of(plan: Plan, args: Any) -> str:
    """A plan as it is printed."""
    policy, needed, card = plan.policy, plan.choice.needed, plan.machine.card
    flag = next(name for name in vars(args.memory) if name.endswith("max_token_len_per_gpu"))
    by_phase = ", ".join(f"{name} {x / GIB:.1f}" for name, x in needed.phases.items())
    lines = [
        f"{plan.script}.py on {plan.machine}",
        f"model: {args.model}, {policy.parameters / 1e9:.2f}e9 parameters, of which {policy.learned / 1e9:.3g}e9 learn",
        f"flags: {spell(plan.choice.way, flag)}",
        f"GiB of each GPU, which has {card.gib:.1f}: {by_phase}",
        f"GiB of host memory, of which each machine has {plan.machine.host_gib:.0f}: {needed.host / GIB:.0f}",
    ]
    if plan.step is None:
        lines.append("seconds: not known, since nothing is known about this card but its memory")
    else:
        step, gpus = plan.step, plan.machine.gpus
        by_phase = ", ".join(f"{name} {x:.1f}" for name, x in step.phases.items() if x >= 0.05)
        lines.append(f"seconds per step: {step.seconds:.1f} ({by_phase})")
        lines += step.notes
        rate = step.tokens / step.seconds
        lines.append(f"tokens per second: {rate:,.0f}, {rate / gpus:,.0f} per GPU, prompts included")
        lines.append(f"start: {plan.start_s:.0f} s before the first step")
        if plan.work.evaluations:
            lines.append(f"evaluations: {plan.work.evaluations} of {plan.evaluation_s:.0f} s")
        if plan.hours is not None:
            lines.append(f"{plan.work.steps} steps: {plan.hours:.2f} hours, {plan.hours * gpus:.1f} GPU hours")
    lines += [f"assumed: {text}" for text in plan.work.assumed]
    return "\n".join(lines)


def report(args: Any, flags: PlanFlags) -> tuple[list[str], list[str]]:
    """The plans of a run on the machines that --plan names, as cards.py has them, and a sentence for each on which it
    does not fit. Raises ValueError for flags that mean nothing.
    """
    check_limits(args)
    plans, refused = [], []
    for name in flags.plan or ("here",):
        machine = named(name, flags.plan_host_memory)
        if not flags.plan and "WORLD_SIZE" in os.environ:  # torchrun says how many of these GPUs train
            gpus = int(os.environ["WORLD_SIZE"]) + flat(args).get("samplers", 0)
            machine = machine._replace(gpus=gpus)
        try:
            plans.append(text_of(plan_of(args, machine, flags.plan_response_length), args))
        except DoesNotFit as error:
            refused.append(f"{args.model} on {machine}: {error}")
    return plans, refused


def print_and_exit(args: Any, flags: PlanFlags) -> NoReturn:
    """Print the plans on rank 0, and end this process. The exit code is 1 if the run does not fit on every machine."""
    if os.environ.get("RANK", "0") != "0":
        sys.exit()
    try:
        plans, refused = report(args, flags)
    except ValueError as error:
        plans, refused = [], [str(error)]
    print("\n\n".join(plans), end="\n" if plans else "", flush=True)
    sys.exit("\n".join(refused) or None)

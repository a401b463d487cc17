"""What --plan prints: the memory, the seconds and the cost of a run on a machine."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from extras import expert_parallel, sequence_parallel
from extras.plan import Hardware, PlanFlags, budget_of, compiling_pays, seconds
from extras.plan.cards import GIB, PER_HOST, Machine, named
from extras.plan.memory import Model, engine_bytes
from extras.plan.step import Setting, Step, sampling_s, step_of
from extras.plan.ways import AUTO, Choice, DoesNotFit, check_share, choose, engine_of, gib_by_phase, load_of, spell
from extras.plan.work import Work, work_of
from rl.flags import change, check_limits, flat
from rl.model.checks import check_heads


def gpus_of_samplers(flags: dict[str, Any]) -> int:
    """GPUs that only sample, from flags by name."""
    return flags.get("samplers", 0) * flags.get("tensor_model_parallel_size", 1)


def trainers_of(args: Any, machine: Machine) -> int:
    """GPUs that train. Raises ValueError if the flags do not fit the number of GPUs."""
    v = flat(args)
    shared_by, ranks = v.get("tensor_model_parallel_size", 1), machine.gpus - gpus_of_samplers(v)
    if ranks < 1:
        each = "" if shared_by == 1 else f" with {shared_by} GPUs each"
        raise ValueError(
            f"--samplers {v['samplers']}{each} leaves no GPU of {machine.gpus} to train on; start fewer, or name more "
            "GPUs"
        )
    if ranks % shared_by and "samplers" not in v:
        raise ValueError(
            f"--tensor-model-parallel-size {shared_by} does not divide the {ranks} GPUs; name a multiple of it"
        )
    if (size := v["fsdp_size"]) is not None and (size < 1 or ranks % size):
        raise ValueError(f"--fsdp-size {size} does not divide the {ranks} GPUs that train; choose a divisor")
    check_heads(args.model, shared_by)
    sequence_parallel.check(args, ranks)
    expert_parallel.check(args, ranks)
    return ranks


class Plan(NamedTuple):
    """What a run takes on a machine."""

    script: str
    machine: Machine
    work: Work
    policy: Model
    choice: Choice
    compiles: bool
    step: Step | None  # None if nothing is known about the speed of the GPUs
    start_s: float  # from the command to the first step
    evaluation_s: float  # of each evaluation

    @property
    def hours(self) -> float | None:
        """From the command to the end, or None if it is not known how many steps there are."""
        if self.work.steps is None or self.step is None:
            return None
        total = self.start_s + self.work.steps * self.step.seconds + self.work.evaluations * self.evaluation_s
        return total / 3600


def plan_of(args: Any, machine: Machine, response_length: float | None = None) -> Plan:
    """The plan of a run. Raises ValueError if it does not fit, and for flags that cannot be planned."""
    work = work_of(args, response_length)
    ranks, card, v = trainers_of(args, machine), machine.card, flat(args)
    if args.memory.compile == AUTO:  # a run whose steps are not known is taken for a long one
        args = change(args, compile=work.steps is None or compiling_pays(args, work.steps, ranks))
    hardware = Hardware(int(card.gib * GIB), int(machine.host_gib * GIB), ranks, min(ranks, PER_HOST))
    load = load_of(args, hardware)
    choice, policy = choose(load, args.memory, hardware), load.models[0]
    engine = engine_of(v, policy.sizes, args.longest) if work.prompts else None
    if "samplers" in v:
        check_share(engine, hardware.gpu)
        on_samplers = {"sampling, on the GPUs of samplers": engine_bytes(engine, card.gib * GIB)}
        choice = choice._replace(needed=choice.needed._replace(phases=choice.needed.phases | on_samplers))
    step, evaluation = None, 0.0
    if card.tflops > 0:
        run = Setting(v, card, load, choice.way, engine)
        step = step_of(run, work)
        if work.evaluations:
            evaluation = sampling_s(run, work._replace(prompts=work.questions, answers=1))
    start = seconds.start_s(policy.sizes, samples=work.prompts > 0)
    script = Path(sys.modules[type(args).__module__].__file__).stem
    return Plan(script, machine, work, policy, choice, args.memory.compile, step, start, evaluation)


def text_of(plan: Plan, args: Any) -> str:
    """A plan as it is printed."""
    parameters, learned = plan.policy.sizes.total / 1e9, sum(plan.policy.learned) / 1e9
    needed = plan.choice.needed
    lines = [
        f"{plan.script}.py fits on {plan.machine}",
        f"model: {args.model}, {parameters:.2f}e9 parameters, of which {learned:.3g}e9 learn",
        f"flags: {spell(plan.choice.way, budget_of(args.memory)[0])} --compile {plan.compiles}",
        f"GiB of each GPU, which has {plan.machine.card.gib:.1f}: {gib_by_phase(needed)}",
        f"GiB of host memory, of which each machine has {plan.machine.host_gib:.0f}: {needed.host / GIB:.0f}",
    ]
    if plan.step is None:
        lines.append("seconds: not known, since nothing is known about this card but its memory")
    else:
        step, gpus = plan.step, plan.machine.gpus
        parts = ", ".join(f"{name} {x:.1f}" for name, x in step.phases.items() if x >= 0.05)
        lines.append(f"seconds per step: {step.seconds:.1f} ({parts})")
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
            gpus = int(os.environ["WORLD_SIZE"]) + gpus_of_samplers(flat(args))
            machine = machine._replace(gpus=gpus)
        try:
            plans.append(text_of(plan_of(args, machine, flags.plan_response_length), args))
        except DoesNotFit as error:
            refused.append(f"{args.model} on {machine}: {error}{_if_sliced(args, machine)}")
    return plans, refused


def _if_sliced(args: Any, machine: Machine) -> str:
    """What --sequence-parallel-size makes a run fit that does not fit without it, as the end of a sentence."""
    if args.memory.sequence_parallel_size == 1:
        for size in (2, 4, 8, 16):
            with contextlib.suppress(ValueError):  # it does not fit either, or the model cannot be sliced so
                plan_of(change(args, sequence_parallel_size=size), machine)
                return f"; or give --sequence-parallel-size {size}, with which it fits"
    return ""


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

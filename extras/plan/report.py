"""What --plan prints: the memory, the seconds and the cost of a run on a machine."""

import os
import sys
from typing import Any, NamedTuple, NoReturn

from extras.plan import Hardware, PlanFlags, budget_of, compiling_pays, seconds
from extras.plan.cards import GIB, PER_HOST, Machine, named
from extras.plan.memory import engine_bytes, least_engine
from extras.plan.seconds import Costs
from extras.plan.step import Setting, Step, costs_of, engine_of, generate_s, step_of, trainers_of
from extras.plan.ways import AUTO, Choice, DoesNotFit, choose, load_of, spell
from extras.plan.work import Work, longest, script_of, work_of
from rl.flags import change, check_limits, flat, spelled
from rl.model.checks import read_config


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


class Plan(NamedTuple):
    """What a run takes on a machine."""

    script: str
    machine: Machine
    work: Work
    policy: Costs
    choice: Choice
    compiles: bool
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
    ranks, work = trainers_of(args, machine), work_of(args, response_length)
    if args.memory.compile == AUTO:  # a run whose steps are not known is taken for a long one
        args = change(args, compile=work.steps is None or compiling_pays(args, work.steps, ranks))
    choice = choice_of(args, machine, ranks)
    run, policy = Setting(args, machine, choice.way), costs_of(args.model, args.lora)
    step, evaluation = None, 0.0
    if machine.card.tflops > 0:
        step = step_of(run, work)
        if work.evaluations:
            evaluation = generate_s(run, work._replace(prompts=work.questions, answers=1))
    start = seconds.start_s(policy, samples=work.prompts > 0)
    return Plan(script_of(args), machine, work, policy, choice, args.memory.compile, step, start, evaluation)


def text_of(plan: Plan, args: Any) -> str:
    """A plan as it is printed."""
    policy, needed, card = plan.policy, plan.choice.needed, plan.machine.card
    by_phase = ", ".join(f"{name} {x / GIB:.1f}" for name, x in needed.phases.items())
    lines = [
        f"{plan.script}.py fits on {plan.machine}",
        f"model: {args.model}, {policy.parameters / 1e9:.2f}e9 parameters, of which {policy.learned / 1e9:.3g}e9 learn",
        f"flags: {spell(plan.choice.way, budget_of(args.memory)[0])} --compile {plan.compiles}",
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

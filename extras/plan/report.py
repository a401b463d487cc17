"""What --plan prints: the memory, the seconds and the cost of a run on a machine."""

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig

from extras.plan import seconds
from extras.plan.cards import Machine, named
from extras.plan.flops import weights_used
from extras.plan.work import Phase, Work, script_of, work_of
from rl.flags import flat
from rl.model import vision


class Step(NamedTuple):
    """Seconds of one step."""

    phases: dict[str, float]  # as timing_s/ in the metrics has them
    seconds: float  # of the whole step, which is less than their sum where phases overlap
    tokens: float  # that it learns from, prompts included
    notes: tuple[str, ...]


def model_of(path: str, *, adapters_rank: int = 0) -> seconds.Model:
    """What of the model in `path` costs time, from its config.json alone."""
    full_config = AutoConfig.from_pretrained(path)
    config = full_config.get_text_config()
    with torch.device("meta"):
        model = vision.auto_class(path).from_config(full_config)
    head, tower = model.get_output_embeddings(), vision.tower_of(model)
    sees = set(tower[1].modules()) if tower else set()  # a text token passes through none of it
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
    inside = [x for x in model.modules() if x is not head and x not in sees and not isinstance(x, nn.Embedding)]
    share = config.num_experts_per_tok / count if count else 0.0
    experts = sum(x.numel() for x in model.parameters() if count and x.ndim == 3 and len(x) == count)
    layers, heads = config.num_hidden_layers, getattr(config, "num_attention_heads", 0)
    width = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    attending = sum(kind not in ("linear_attention", "conv") for kind in kinds)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = 2 * getattr(config, "intermediate_size", 4 * config.hidden_size)
    if count:
        inner = 2 * config.num_experts_per_tok * (getattr(config, "moe_intermediate_size", None) or inner // 2)
    states = 0
    if hasattr(config, "linear_num_value_heads"):
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        states = 4 * state * kinds.count("linear_attention")
    linear = [x for x in inside if isinstance(x, nn.Linear)]
    return seconds.Model(
        parameters=sum(x.numel() for x in model.parameters()),
        layers=layers,
        hidden=config.hidden_size,
        inner=inner,
        active=sum(weights_used(x, model) for x in inside),
        experts=experts,
        expert_share=share,
        head=head.weight.numel(),
        vocabulary=config.vocab_size,
        attention=attending * heads * width,
        cache_bytes=4 * attending * key_heads * width,
        state_bytes=states,
        adapters=adapters_rank * sum(x.in_features + x.out_features for x in linear),
    )


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
    policy, phases = model_of(v["model"], adapters_rank=v["lora_rank"]), {}
    lengths = work.lengths
    if work.prompts:
        phases["update_weights"] = seconds.push_s(policy, sleeps=v["free_cache_engine"] and not samplers)
        phases["gen"] = sampling_s(v, policy, work, machine, samplers or ranks)
    models: dict[tuple[str, bool], seconds.Model] = {}
    for phase in work.phases:
        key = phase.path, phase.has_adapters
        if key not in models:
            models[key] = model_of(phase.path, adapters_rank=v["lora_rank"] if phase.has_adapters else 0)
        limit = 16384 if budget == "auto" else budget
        phases[phase.name] = phases.get(phase.name, 0.0) + phase_s(
            models[key],
            machine,
            phase,
            work,
            ranks=ranks,
            limit=limit,
            recompute=recompute,
            shards=shards,
            link=link,
            on_host=on_host,
            moments_on_host=moments_on_host,
        )
    phases["others"] = seconds.other_s(work.rows if work.prompts else 0) if work.prompts else 0.05
    whole, notes = sum(phases.values()), ()
    if samplers:
        trained = whole - phases["gen"]
        sampled = phases["gen"]
        whole = trained + sampled if v["max_staleness"] == 0 else max(trained, sampled)
        balanced = max(1, math.ceil(samplers * sampled / trained))
        waiting = "trainers wait for samplers" if sampled > trained else "samplers wait for trainers"
        notes = (
            f"{samplers} sampler(s) answer in {sampled:.1f} s what {ranks} trainer(s) learn from in {trained:.1f} s: "
            f"{waiting}, and {balanced} sampler(s) would balance that",
        )
        phases["gen"] = max(0.0, whole - trained)
    return Step(phases, whole, work.rows * (lengths.prompt + lengths.response), notes)


def sampling_s(v: dict[str, Any], policy: seconds.Model, work: Work, machine: Machine, gpus: int) -> float:
    """Seconds in which all engines answer the prompts of a step."""
    shared_by = v.get("tensor_model_parallel_size", 1)
    engines = max(1, gpus // shared_by)
    n = math.ceil(work.prompts * work.answers / engines)
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
    model: seconds.Model,
    machine: Machine,
    phase: Phase,
    work: Work,
    *,
    ranks: int,
    limit: int,
    recompute: str,
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
        shards=shards,
        link_gb_s=link,
        on_host=on_host,
    )
    if phase.learns:
        moved = dict(moments_on_host=moments_on_host, on_host=on_host)
        took += phase.updates * seconds.step_s(model, machine.card, shards=shards, **moved)
    return took


def start_s(policy: seconds.Model, samples: bool) -> float:
    """Seconds from the command to the first step."""
    return 35 + 4 * policy.parameters / 1e9 + (40 if samples else 0)


def text_of(args: Any, machine: Machine, response_length: float | None) -> str:
    """The plan of a run on a machine. Raises ValueError if it does not fit."""
    v = flat(args)
    work = work_of(args, response_length)
    policy = model_of(v["model"], adapters_rank=v["lora_rank"])
    lines = [f"{script_of(args)}.py on {machine}"]
    lines.append(f"model: {v['model']}, {policy.parameters / 1e9:.2f}e9 parameters, {policy.learned / 1e9:.3f}e9 learn")
    if machine.card.tflops:
        step = step_of(args, work, machine)
        shown = ", ".join(f"{name} {x:.1f}" for name, x in step.phases.items() if x >= 0.05)
        lines.append(f"seconds per step: {step.seconds:.1f} ({shown})")
        lines += step.notes
        per_second = step.tokens / step.seconds
        lines.append(f"tokens per second: {per_second:,.0f}, {per_second / machine.gpus:,.0f} per GPU, with prompts")
        start = start_s(policy, work.prompts > 0)
        lines.append(f"start: {start:.0f} s before the first step")
        if work.steps:
            evaluation = 0.0
            if work.evaluations:
                asked = work._replace(prompts=work.questions, answers=1)
                evaluation = sampling_s(v, policy, asked, machine, v.get("samplers") or machine.gpus)
                lines.append(f"evaluations: {work.evaluations} of {evaluation:.0f} s")
            total = start + work.steps * step.seconds + work.evaluations * evaluation
            hours = total / 3600
            lines.append(f"{work.steps} steps: {hours:.2f} hours, {hours * machine.gpus:.1f} GPU hours")
    else:
        lines.append("seconds: not known, since nothing is known about this card but its memory")
    lines += [f"assumed: {text}" for text in work.assumed]
    return "\n".join(lines)


def report(args: Any, machines: tuple[str, ...], response_length: float | None, host_gib: float | None) -> str:
    """The plans of a run on machines that are named as in cards.py, one after the other."""
    return "\n\n".join(text_of(args, named(name, host_gib), response_length) for name in machines or ("here",))


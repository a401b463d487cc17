"""Which memory flags a run uses where they are `auto`: the cheapest way that fits. A pure function of its arguments."""

from dataclasses import replace
from typing import Any, NamedTuple

from extras.plan import Hardware, Settled, budget_of, with_values
from extras.plan.memory import GIB, Engine, Load, Model, Needed, Way, least_engine, needed
from extras.plan.sizes import Sizes, sizes_of
from rl.flags import flat, spelled

USABLE = 0.95  # of a GPU: torch's allocator leaves gaps, and what is not counted takes some
HOST_USABLE = 0.95  # of the host
TOKENS = (16384, 8192, 4096)  # of a micro-batch. With fewer, a GPU computes at a fraction of its speed.
FEW = (2048, 1024, 512)
AUTO = "auto"


class Choice(NamedTuple):
    """A way, and what it takes."""

    way: Way
    needed: Needed


class DoesNotFit(ValueError):
    """Nothing fits: the message is a sentence with the arithmetic."""


def load_of(args: Any, hardware: Hardware) -> Load:
    """What a run of a script's Args holds. Of the models only the configs are read."""
    v, ranks, models = flat(args), hardware.ranks, models_of(args)
    policy, judge = models["policy"], models.pop("judge", None)
    if policy.rank:
        models.pop("reference", None)  # is the policy without its adapters
    engine = None
    if "max_response_length" in v and "samplers" not in v and v["engine"] == "vllm":
        engine = engine_of(v, policy.sizes, args.longest)
    return Load(
        models=tuple(models.values()),
        engine=engine,
        longest=max(args.units.values()),
        ranks=ranks,
        local=hardware.local,
        shards=v["fsdp_size"] or ranks,
        saves=v["save_freq"] != 0,
        compiles=v["compile"] is not False,
        scores=(judge.sizes,) if judge else (),
        sliced=v["sequence_parallel_size"],
    )


def engine_of(v: dict[str, Any], policy: Sizes, length: int) -> Engine:
    """An engine that samples from the policy, from flags by name, for sequences of this many tokens."""
    return Engine(
        sizes=policy,
        length=length,
        sequences=v["max_num_seqs"],
        share=v["gpu_memory_utilization"],
        shared_by=v["tensor_model_parallel_size"],
        is_fp8=v["rollout_quantization"] == "fp8",
        gives_back=v["free_cache_engine"],
    )


def models_of(args: Any) -> dict[str, Model]:
    """The models of a run by role. The policy comes first. In train_reward.py that is the reward model."""
    v, lora = flat(args), args.lora
    sizes = sizes_of(v["model"], lora=lora, has_score=is_of_rewards(args))
    policy = Model(sizes, rank=lora.lora_rank, tower_learns=not lora.freeze_vision_tower)
    models = {"policy": policy}
    for role in ("critic", "prm"):
        if f"{role}_lr" in v:
            named = v[f"{role}_model"]
            flag = f"--{role}-model" if named else "--model"
            sizes = sizes_of(named or v["model"], lora=lora, has_score=role == "critic", flag=flag)
            models[role] = replace(policy, sizes=sizes, is_away=v[f"{role}_offload"])
    if "prm" in models:
        models["reference"] = Model(models["prm"].sizes, is_frozen=True)
    elif v.get("use_kl_loss") or v.get("use_kl_in_reward") or "pairs" in v:
        models["reference"] = Model(policy.sizes, is_frozen=True)
    if "teacher_model" in v and not v["teacher_url"]:
        sizes = sizes_of(v["teacher_model"], flag="--teacher-model")
        models["teacher"] = Model(sizes, is_frozen=True, is_away=v["teacher_offload"])
    if v.get("teacher") == "ema" or (v.get("teacher") == "first" and not lora.lora_rank):
        # A moving average of all weights is in float32. One of adapters stands beside weights in 16 bits.
        width = 4 if v["teacher"] == "ema" and not lora.lora_rank else 2
        models["teacher"] = Model(policy.sizes, is_frozen=True, fixed_bytes=width)
    if v.get("reward_model"):
        sizes = sizes_of(v["reward_model"], has_score=True, flag="--reward-model")
        models["judge"] = Model(sizes, is_frozen=True)
    return models


def is_of_rewards(args: Any) -> bool:
    """Whether a script learns a reward model, from pairs of rows."""
    return args.rows_per_unit == 2 and "ppo_epochs" not in flat(args)


def ways(memory: Any, least: int, *, has_adapters: bool) -> list[Way]:
    """All ways that the flags of a memory group leave open, the cheapest first. docs/scaling.md has the order.

    Args: least, the tokens that a micro-batch must hold; has_adapters, whether adapters learn, whose moments are so
    small that it does not help to move them.
    """
    _, budget = budget_of(memory)
    counts = [n for n in (*TOKENS, *FEW) if n > least] + [least] if budget == AUTO else [budget]
    large = [n for n in counts if n >= min(TOKENS)] or counts[:1]
    small = [n for n in counts if n not in large]
    levels = _either(memory.activation_checkpointing, ["selective", "full"])
    moments = _either(memory.optimizer_offload, [False] if has_adapters else [False, True])
    weights = _either(memory.param_offload, [False, True])
    here = [Way(level, n, moment) for some in (large, small) for level in levels for moment in moments for n in some]
    away = [Way(level, n, param_offload=True) for n in counts for level in levels]
    return (here if False in weights else []) + (away if True in weights else [])


def _either(value: Any, options: list[Any]) -> list[Any]:
    """What a flag leaves open."""
    return options if value == AUTO else [value]


def choose(load: Load, memory: Any, hardware: Hardware) -> Choice:
    """The cheapest way that fits the smallest GPU and the smallest host, with some room to spare. Raises DoesNotFit."""
    open_ways = ways(memory, load.longest, has_adapters=bool(load.models[0].rank))
    choices = [Choice(way, needed(load, way, hardware.gpu)) for way in open_ways]
    fits_host = [x for x in choices if x.needed.host <= HOST_USABLE * hardware.host]
    if load.engine:
        check_share(load.engine, hardware.gpu)
    if fitting := [x for x in fits_host if _fits(x.needed, hardware)]:
        return fitting[0]
    raise DoesNotFit(_why_not(choices, fits_host, load, hardware, budget_of(memory)[0]))


def check_share(engine: Engine, gpu: float) -> None:
    """Raise DoesNotFit if an engine's share of a GPU does not hold its weights and a sequence."""
    if (least := least_engine(engine)) > engine.share * gpu:
        raise DoesNotFit(
            f"vLLM needs {_gib(least)} GiB of each GPU for its weights and one sequence, and --gpu-memory-utilization "
            f"{engine.share:g} leaves it {_gib(engine.share * gpu)} of {_gib(gpu)}; raise that, or "
            "--tensor-model-parallel-size, or use more GPUs"
        )


def _fits(x: Needed, hardware: Hardware) -> bool:
    """Whether a way fits a GPU."""
    return x.most <= USABLE * hardware.gpu and x.start <= hardware.gpu


def _why_not(choices: list[Choice], fits_host: list[Choice], load: Load, hardware: Hardware, flag: str) -> str:
    """Why no way fits, in a sentence."""
    least = min(choices, key=lambda x: x.needed.most)
    if _fits(least.needed, hardware):  # and so not into the host
        fix = "use more GPUs, machines with more memory, or --lora-rank"
        fix += ", or --save-freq 0, since a save copies the state to the host" if load.saves else ""
        return (
            f"the run fits into GPUs of {_gib(hardware.gpu)} GiB only with {spell(least.way, flag)}, and then a "
            f"machine needs {_gib(least.needed.host)} GiB of host memory and has {_gib(hardware.host)}; {fix}"
        )
    least = min(fits_host or choices, key=lambda x: x.needed.most)
    if least.needed.most <= USABLE * hardware.gpu:
        share = f"--gpu-memory-utilization {load.engine.share:g}"
        return (
            f"vLLM cannot start: {share} is {_gib(load.engine.share * hardware.gpu)} GiB of each GPU, and with the "
            f"policy and CUDA that is {_gib(least.needed.start)} of {_gib(hardware.gpu)}, even with "
            f"{spell(least.way, flag)}; lower {share}, or use more GPUs or --lora-rank"
        )
    phase = max(least.needed.phases, key=least.needed.phases.get)
    parts, fix = f"of which vLLM takes {_gib(least.needed.engine)}", "--gpu-memory-utilization or --max-num-seqs"
    if phase != "sampling":
        parts, fix = ", ".join(f"{name} {_gib(x)}" for name, x in least.needed.parts.items()), "the longest sequence"
    return (
        f"the run does not fit: with {spell(least.way, flag)}, which needs least, {phase} takes "
        f"{_gib(least.needed.phases[phase])} GiB of each GPU ({parts}), and of its {_gib(hardware.gpu)} GiB at most "
        f"{_gib(USABLE * hardware.gpu)} can be used; use more GPUs or --lora-rank, or lower {fix}"
    )


def spell(way: Way, flag: str) -> str:
    """A way as flags of the command line."""
    words = [f"--activation-checkpointing {way.checkpointing}", f"{spelled(flag)} {way.tokens}"]
    words += ["--optimizer-offload"] if way.optimizer_offload else []
    words += ["--param-offload"] if way.param_offload else []
    return " ".join(words)


def _gib(x: float) -> str:
    return f"{x / GIB:.1f}"


def settle(args: Any, hardware: Hardware, then: dict[str, Any] | None) -> Settled:
    """See `extras.plan.settle`."""
    memory, load = args.memory, load_of(args, hardware)
    flag, _ = budget_of(memory)
    again, why = _again(then, load, memory, hardware) if then else (None, "")
    chosen = again or choose(load, memory, hardware)
    every = ways(memory, load.longest, has_adapters=bool(load.models[0].rank))
    rest = every[every.index(chosen.way) + 1 :]
    # What the rehearsal may take in its place has to fit the host too, which the rehearsal does not look at.
    rest = [way for way in rest if needed(load, way, hardware.gpu).host <= HOST_USABLE * hardware.host]
    lines = [why] if why else []
    lines.append(f"memory: {'as before, ' if again else ''}{spell(chosen.way, flag)}")
    lines.append(
        f"planned for a GPU with {_gib(hardware.gpu)} GiB: {gib_by_phase(chosen.needed)}; host "
        f"{_gib(chosen.needed.host)} of {_gib(hardware.host)} GiB"
    )
    names = flags_of_way(flag)
    groups = [with_values(memory, dict(zip(names, way, strict=True))) for way in (chosen.way, *rest)]
    return Settled(groups[0], groups[1:], {"gpu": hardware.gpu, "ranks": hardware.ranks}, "\n".join(lines))


def flags_of_way(flag: str) -> tuple[str, ...]:
    """The names of the flags that the fields of a `Way` are for. `flag` is that of the tokens."""
    return "activation_checkpointing", flag, "optimizer_offload", "param_offload"


def gib_by_phase(x: Needed) -> str:
    """GiB of a GPU by phase."""
    return ", ".join(f"{name} {_gib(size)}" for name, size in x.phases.items())


def _again(then: dict[str, Any], load: Load, memory: Any, hardware: Hardware) -> tuple[Choice | None, str]:
    """The recorded way of a run that is resumed, or why it is not used again."""
    if not {"gpu", "ranks"} <= then.keys():
        return None, ""
    flag, _ = budget_of(memory)
    way = Way(*(then.get(name) for name in flags_of_way(flag)))
    unused = f"the checkpoint's {spell(way, flag)} is not used again, since"
    if then["ranks"] != hardware.ranks:
        return None, f"{unused} there were {then['ranks']} ranks, and there are {hardware.ranks} now"
    if round(then["gpu"] / GIB) != round(hardware.gpu / GIB):
        return None, f"{unused} a GPU had {_gib(then['gpu'])} GiB, and has {_gib(hardware.gpu)} now"
    if way not in ways(memory, load.longest, has_adapters=bool(load.models[0].rank)):
        return None, f"{unused} flags or lengths have changed"
    takes = needed(load, way, hardware.gpu)
    if max(takes.most, takes.start) > hardware.gpu or takes.host > hardware.host:
        return None, (
            f"{unused} it does not fit any more: it takes {_gib(takes.most)} of {_gib(hardware.gpu)} GiB of a GPU, and "
            f"{_gib(takes.host)} of {_gib(hardware.host)} on the host"
        )
    return Choice(way, takes), ""

"""Which memory flags a run uses where they are `auto`: the cheapest way that fits. A pure function of its arguments."""

from dataclasses import replace
from typing import Any, NamedTuple

from extras.lora import LoRA
from extras.plan import Hardware, Settled, budget_of, with_values
from extras.plan.memory import GIB, Engine, Load, Model, Needed, Way, least_engine, needed
from extras.plan.sizes import sizes_of
from rl.flags import flat, spelled

USABLE = 0.95  # of a GPU: torch's allocator leaves gaps, and what is not counted takes some
HOST_USABLE = 0.95  # of the host
TOKENS = (16384, 8192, 4096)  # of a micro-batch; with fewer, a GPU computes at a fraction of its speed
FEW = (2048, 1024, 512)
AUTO = "auto"


class Choice(NamedTuple):
    """A way, and what it takes."""

    way: Way
    needed: Needed


class DoesNotFit(ValueError):
    """Nothing fits: the message is a sentence with the arithmetic."""


def load_of(args: Any, hardware: Hardware, least: int) -> Load:
    """What a run of a script's Args holds. `least`: the tokens that a micro-batch must hold.

    Of the models only the configs are read, where flags name several each of them.
    """
    v, ranks = flat(args), hardware.ranks
    models = models_of(v, args.lora, has_score="max_length" in v and args.rows_per_unit == 2)
    engine = None
    if "max_response_length" in v and "samplers" not in v and v["engine"] == "vllm":
        engine = Engine(
            sizes=models[0].sizes,
            length=v["max_prompt_length"] + v["max_response_length"],
            sequences=v["max_num_seqs"],
            share=v["gpu_memory_utilization"],
            shared_by=v["tensor_model_parallel_size"],
            is_fp8=v["rollout_quantization"] == "fp8",
            gives_back=v["free_cache_engine"],
        )
    judge = v.get("reward_model")
    return Load(
        models=models,
        engine=engine,
        longest=least,
        ranks=ranks,
        local=hardware.local,
        shards=v["fsdp_size"] or ranks,
        saves=v["save_freq"] != 0,
        compiles=v["compile"] is not False,
        scores=(sizes_of(judge, has_score=True, flag="--reward-model"),) if judge else (),
    )


def models_of(v: dict[str, Any], lora: LoRA, *, has_score: bool) -> tuple[Model, ...]:
    """The models on each rank, from flags by name. The policy comes first, or a reward model that is trained, which
    `has_score`.
    """
    policy = Model(
        sizes_of(v["model"], lora=lora, has_score=has_score),
        rank=lora.lora_rank,
        tower_learns=not lora.freeze_vision_tower,
    )
    models = [policy]
    if "critic_lr" in v:
        flag = "--critic-model" if v["critic_model"] else "--model"
        sizes = sizes_of(v["critic_model"] or v["model"], lora=lora, has_score=True, flag=flag)
        models.append(replace(policy, sizes=sizes, is_away=v["critic_offload"]))
    if "prm_lr" in v:
        flag = "--prm-model" if v["prm_model"] else "--model"
        sizes = sizes_of(v["prm_model"] or v["model"], lora=lora, flag=flag)
        models.append(replace(policy, sizes=sizes, is_away=v["prm_offload"]))
        models += [] if lora.lora_rank else [Model(sizes, is_frozen=True)]
    if not lora.lora_rank and (v.get("use_kl_loss") or v.get("use_kl_in_reward") or "pairs" in v):
        models.append(Model(policy.sizes, is_frozen=True))
    if "teacher_model" in v and not v["teacher_url"]:
        models.append(
            Model(sizes_of(v["teacher_model"], flag="--teacher-model"), is_frozen=True, is_away=v["teacher_offload"])
        )
    return tuple(models)


def ways(memory: Any, least: int, *, has_adapters: bool) -> list[Way]:
    """All ways that the flags of a memory group leave open, the cheapest first. docs/memory.md has the order.

    Args: least, the tokens that a micro-batch must hold; has_adapters, whether adapters learn, whose moments are so
    small that it does not help to move them.
    """
    _, budget = budget_of(memory)
    few = [n for n in (*TOKENS, *FEW) if n > least] + [least]
    large = [n for n in few if n >= min(TOKENS)] or few[:1]
    small = [n for n in few if n not in large]
    if budget != AUTO:
        large, small = [budget], []
    if not large:
        large, small = [least], []
    levels = ["selective", "full"] if memory.activation_checkpointing == AUTO else [memory.activation_checkpointing]
    moments = [False, True] if memory.optimizer_offload == AUTO else [memory.optimizer_offload]
    if has_adapters and memory.optimizer_offload == AUTO:
        moments = [False]
    weights = [False, True] if memory.param_offload == AUTO else [memory.param_offload]
    found = []
    if False in weights:
        for counts in (large, small):
            found += [Way(level, n, moment) for level in levels for moment in moments for n in counts]
    if True in weights:
        found += [Way(level, n, param_offload=True) for n in large + small for level in levels]
    return found


def choose(load: Load, memory: Any, hardware: Hardware) -> Choice:
    """The cheapest way that fits the smallest GPU and the smallest host, with some room to spare. Raises DoesNotFit."""
    open_ways = ways(memory, load.longest, has_adapters=bool(load.models[0].rank))
    found = [Choice(way, needed(load, way, hardware.gpu)) for way in open_ways]
    fits_host = [x for x in found if x.needed.host <= HOST_USABLE * hardware.host]
    if load.engine and least_engine(load.engine) > load.engine.share * hardware.gpu:
        raise DoesNotFit(
            f"vLLM needs {_gib(least_engine(load.engine))} GiB of each GPU for its weights and one sequence, and "
            f"--gpu-memory-utilization {load.engine.share:g} leaves it {_gib(load.engine.share * hardware.gpu)} of "
            f"{_gib(hardware.gpu)}; raise that, or --tensor-model-parallel-size, or use more GPUs"
        )
    if fitting := [x for x in fits_host if _fits(x.needed, hardware)]:
        return fitting[0]
    raise DoesNotFit(_why_not(found, fits_host, load, hardware, budget_of(memory)[0]))


def _fits(x: Needed, hardware: Hardware) -> bool:
    """Whether a way fits a GPU."""
    return x.most <= USABLE * hardware.gpu and x.start <= hardware.gpu


def _why_not(found: list[Choice], fits_host: list[Choice], load: Load, hardware: Hardware, flag: str) -> str:
    """Why no way fits, in a sentence."""
    least = min(found, key=lambda x: x.needed.most)
    if _fits(least.needed, hardware):  # and so not into the host
        fix = "use more GPUs, machines with more memory, or --lora-rank"
        fix += ", or --save-freq 0, since a save copies the state to the host" if load.saves else ""
        return (
            f"the run fits into GPUs of {_gib(hardware.gpu)} GiB only with {spell(least.way, flag)}, and then a "
            f"machine needs {_gib(least.needed.host)} GiB of host memory and has {_gib(hardware.host)}; {fix}"
        )
    least = min(fits_host or found, key=lambda x: x.needed.most)
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


def settle(args: Any, least: int, hardware: Hardware, then: dict[str, Any] | None) -> Settled:
    """See `extras.plan.settle`."""
    memory, load = args.memory, load_of(args, hardware, least)
    flag, _ = budget_of(memory)
    found, why = None, ""
    if then:
        found, why = _again(then, load, memory, hardware)
    chosen = found or choose(load, memory, hardware)
    every = ways(memory, least, has_adapters=bool(load.models[0].rank))
    rest = every[every.index(chosen.way) + 1 :] if chosen.way in every else []
    # What the rehearsal may take in its place has to fit the host too, which the rehearsal does not look at.
    rest = [way for way in rest if needed(load, way, hardware.gpu).host <= HOST_USABLE * hardware.host]
    record = {"gpu": hardware.gpu, "ranks": hardware.ranks}
    on_gpu = ", ".join(f"{name} {_gib(x)}" for name, x in chosen.needed.phases.items())
    lines = [why] if why else []
    lines.append(f"memory: {'as before, ' if found else ''}{spell(chosen.way, flag)}")
    lines.append(
        f"planned for a GPU with {_gib(hardware.gpu)} GiB: {on_gpu}; host {_gib(chosen.needed.host)} of "
        f"{_gib(hardware.host)} GiB"
    )
    groups = [_group(memory, way, flag) for way in (chosen.way, *rest)]
    return Settled(groups[0], groups[1:], record, "\n".join(lines))


def _group(memory: Any, way: Way, flag: str) -> Any:
    """The group of flags with a way in the place of `auto`."""
    offloads = dict(optimizer_offload=way.optimizer_offload, param_offload=way.param_offload)
    return with_values(memory, activation_checkpointing=way.checkpointing, **{flag: way.tokens}, **offloads)


def _again(then: dict[str, Any], load: Load, memory: Any, hardware: Hardware) -> tuple[Choice | None, str]:
    """The recorded way of a run that is resumed, or why it is not used again."""
    if not {"gpu", "ranks"} <= then.keys():
        return None, ""
    flag, _ = budget_of(memory)
    names = ("activation_checkpointing", flag, "optimizer_offload", "param_offload")
    way = Way(*(then.get(name) for name in names))
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

"""The flags that decide where, how often and how fast, but not what is learned; and what values any flag may have.

A script's Args inherits them and adds its own, each with its limit in its type:

    @dataclass(frozen=True)
    class Args(flags.RL):
        lr: NotNegative = 1e-6        # decides what is learned: a resumed run must keep it
        my_bound: Free[AtLeast1] = 10   # does not: a resumed run may change it, as all flags of this file

A script may give an inherited flag another default. `check` looks at the limits, and `parse` reads the command line.
Flags that a script inherits from other files, such as rl/model/lora.py, decide what is learned as its own do.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import torch
import tyro

from rl.console import outlive_output
from rl.ranks import die_with_launcher

T = TypeVar("T")
# Other defaults of flags in a run whose engine rounds more than the trainer.
QUANTIZED = {"rollout_is": "token", "max_logprob_gap": 0.3}
Backend = Literal["console", "wandb", "swanlab", "tensorboard"]


class Limit(NamedTuple):
    """What a number given to a flag must be."""

    text: str
    holds: Callable[[float], bool]


FREE = "a resumed run may change it"
Free = Annotated[T, FREE]
AtLeast1 = Annotated[int, Limit("at least 1", lambda x: x >= 1)]
Positive = Annotated[float, Limit("positive", lambda x: x > 0)]
PositiveFinite = Annotated[float, Limit("positive and finite", lambda x: 0 < x < math.inf)]
NotNegative = Annotated[float, Limit("at least 0", lambda x: x >= 0)]
Count = Annotated[int, Limit("at least 0", lambda x: x >= 0)]
Share = Annotated[float, Limit("within 0 and 1", lambda x: 0 <= x <= 1)]
PositiveShare = Annotated[float, Limit("positive and at most 1", lambda x: 0 < x <= 1)]
TopK = Annotated[int, Limit("at least 1, or -1 for all tokens", lambda x: x >= 1 or x == -1)]
Above1 = Annotated[float, Limit("above 1", lambda x: x > 1)]
Port = Annotated[int, Limit("within 1 and 65535", lambda x: 1 <= x <= 65535)]


@dataclass(frozen=True)
class Data:
    """data and length of the run"""

    # parquet or jsonl: for RL in verl's schema, with data_source, prompt, reward_model.ground_truth, extra_info
    train_files: tuple[str, ...] = ("data/gsm8k/train.parquet",)
    val_files: tuple[str, ...] = ("data/gsm8k/test.parquet",)  # held-out files, same schema
    total_epochs: AtLeast1 = 1  # passes over the training files
    total_training_steps: AtLeast1 | None = None  # overrides --total-epochs


@dataclass(frozen=True)
class Scoring:
    """processes that score"""

    reward_workers: AtLeast1 | None = None  # processes a rank that score; default: the cores over the ranks, at most 16
    # CPU seconds to score a response, and four times as many by the clock; then no score
    reward_timeout: PositiveFinite = 10.0
    reward_memory_mb: Count = 4096  # MiB of private memory of such a process; 0 for no limit
    allow_unsafe_code_execution: bool = False  # let code rewards run model-written code without a complete sandbox


@dataclass(frozen=True)
class Engine:
    """rollout engine"""

    # GPUs that share one vLLM engine: for a large model, or a few long responses
    tensor_model_parallel_size: AtLeast1 = 1
    gpu_memory_utilization: PositiveShare = 0.5  # share of GPU memory that vLLM may take while it generates
    max_num_seqs: AtLeast1 = 1024  # sequences an engine decodes at a time; lower it if the KV cache is small


@dataclass(frozen=True)
class Memory:
    """memory and speed: the numbers stay the same, up to rounding"""

    # what the backward pass recomputes: all of a layer, or all but matrix products and attention, or nothing
    activation_checkpointing: Literal["none", "selective", "full"] = "selective"
    fsdp_size: int | None = None  # ranks that share one copy of the model, e.g. the GPUs of a machine; default: all
    compile: bool = True  # torch.compile the layers and the head on a GPU: faster after a minute of warm-up
    # keep AdamW's moments in host memory; in its step they pass through the GPU, a few hundred MB at a time
    optimizer_offload: bool = False
    # keep weights, gradients and moments in host memory: layers come to the GPU to compute, AdamW steps on the host
    param_offload: bool = False


@dataclass(frozen=True)
class Checkpoints:
    """checkpoints, stopping and resuming"""

    default_local_dir: str = "runs/{project_name}/{experiment_name}"  # checkpoints and metrics.jsonl go here
    save_freq: int = -1  # save every this many steps and at the end; -1 only at the end; 0 never
    max_ckpt_to_keep: AtLeast1 | None = None  # delete older checkpoints beyond this many
    resume_mode: str = "auto"  # auto: from the newest intact checkpoint, if any; disable; or a global_step_N folder
    force_resume: bool = False  # resume although settings or data that decide what is learned have changed
    max_hours: Positive | None = None  # save and leave after so many hours, as after SIGTERM or Ctrl-C
    # seconds without the end of a phase after which the run ends, with all its stacks
    stall_timeout: PositiveFinite = 3600.0


@dataclass(frozen=True)
class Logging:
    """evaluation and logging"""

    test_freq: int = 10  # evaluate every this many steps and at the end; -1 never
    alarms: tuple[str, ...] = ()  # metrics and limits; a step beyond one prints a line that begins with ALARM
    logger: tuple[Backend, ...] = ("console",)  # trackers besides metrics.jsonl, which is always written
    prometheus_port: Port | None = None  # rank 0 serves the metrics, and vLLM's own, to Prometheus on this port
    project_name: str = "glassrl"  # project in the trackers, and part of the folder
    experiment_name: str = "run"  # run in the trackers, and part of the folder


@dataclass(frozen=True)
class Rewards(Scoring):
    """processes that score"""

    reward_max_error_frac: Share = 0.05  # stop the run if more of a step's responses raise or time out


@dataclass(frozen=True)
class Rollouts(Engine):
    """rollout engine"""

    free_cache_engine: bool = True  # give vLLM's memory back while training (sleep level 2)
    # stop if engine and trainer log-probs differ by more than this on average after a push; default 1e-4 (bf16: 0.06)
    max_logprob_gap: Positive | None = None
    # weights of vLLM in eight bits, which makes --rollout-is token and --max-logprob-gap 0.3 the defaults; a GPU that
    # computes with them, such as an H100
    rollout_quantization: Literal["none", "fp8"] = "none"


@dataclass(frozen=True)
class MemoryRL(Memory):
    """memory and speed: the numbers stay the same, up to rounding"""

    # tokens of a micro-batch, a shared prompt once; lower it on out-of-memory
    ppo_max_token_len_per_gpu: AtLeast1 = 16384


@dataclass(frozen=True)
class MemorySupervised(Memory):
    """memory and speed: the numbers stay the same, up to rounding"""

    max_token_len_per_gpu: AtLeast1 = 16384  # tokens in one micro-batch; lower it on out-of-memory


@dataclass(frozen=True)
class LoggingRL(Logging):
    """evaluation and logging"""

    val_before_train: bool = True  # evaluate the untrained policy first (step 0)
    val_n: AtLeast1 = 1  # responses to each held-out prompt; more than one need --val-temperature
    val_temperature: NotNegative = 0.0  # of these responses; 0 is greedy
    val_top_p: PositiveShare = 1.0  # of these responses, like --top-p
    val_top_k: TopK = -1  # of these responses, like --top-k
    val_min_p: Share = 0.0  # of these responses, like --min-p
    log_val_generations: Count = 8  # held-out prompts whose responses are recorded at each evaluation
    # print a prompt and its response, and record up to four in generations.jsonl, every this many steps; 0 never
    log_samples_freq: Count = 10


@dataclass(frozen=True)
class LoggingSupervised(Logging):
    """evaluation and logging"""

    log_freq: Count = 10  # print a line every this many steps; 0 only at the end


@dataclass(frozen=True)
class Supervised(LoggingSupervised, Checkpoints, MemorySupervised, Data):
    """What scripts inherit that train on given responses."""


@dataclass(frozen=True)
class RL(LoggingRL, Checkpoints, MemoryRL, Rollouts, Rewards, Data):
    """What scripts inherit that train on responses which the policy samples."""


def parse(cls: type[T], description: str | None) -> T:
    """The Args of a script from its command line. Under torchrun, this process dies with it from here on.

    What a script that saves leaves behind is its folder, so a closed or full stdout does not change its exit code.
    --help shows the script's own flags first, then the others in groups.
    """
    die_with_launcher()
    if {"-h", "--help"} & set(sys.argv[1:]):
        _show_help(cls, description)
    if issubclass(cls, Checkpoints):
        outlive_output()
    args = tyro.cli(cls, description=description)
    if getattr(args, "rollout_quantization", "none") != "none":  # read the same again, with these defaults
        other = {name: value for name, value in QUANTIZED.items() if getattr(cls, name, value) in (None, "none")}
        args = tyro.cli(cls, description=description, default=dataclasses.replace(cls(), **other))
    return args


def _show_help(cls: type, description: str | None) -> None:
    """Print the flags in boxes, and exit: the script's own first, then those of rl/ by the groups they stand in.

    A box is a class for tyro that hides all other flags. What a script says of an inherited flag replaces what is here.
    """
    boxes: dict[str, tuple[str | None, set[str]]] = {"algorithm": ("what is learned", set())}  # title -> words, flags
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("rl.") and base.__annotations__:
            group = base.__mro__[-2]
            boxes.setdefault(group.__name__.lower(), (group.__doc__, set()))[1].update(base.__annotations__)
    hints = get_type_hints(cls)
    boxes["algorithm"][1].update(hints.keys() - set().union(*(names for _, names in boxes.values())))
    shown = {}
    for title, (words, names) in boxes.items():
        hidden = [x for x in dataclasses.fields(cls) if x.name not in names]
        body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": words}
        body["__annotations__"] = {x.name: tyro.conf.Suppress[hints[x.name]] for x in hidden}
        defaults = {x.name: dataclasses.field(default=x.default, default_factory=x.default_factory) for x in hidden}
        shown[title] = dataclasses.dataclass(frozen=True)(type(title, (cls,), body | defaults))()
    everything = dataclasses.make_dataclass("Flags", [(name, type(value)) for name, value in shown.items()])
    tyro.cli(everything, description=description, default=everything(**shown), config=(tyro.conf.OmitArgPrefixes,))


def free(cls: type) -> set[str]:
    """Names of the flags that a resumed run may change: those of this file, and those of a script that are `Free`."""
    own = {name for name, hint in get_type_hints(cls, include_extras=True).items() if FREE in _notes(hint)}
    return own | {name for base in cls.__mro__ if base.__module__ == __name__ for name in base.__annotations__}


def check(args: Any) -> None:
    """Raise ValueError, naming the flag and its value, if a number is none or beyond the limit of its type, or if flags
    that several scripts have contradict each other.
    """
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        limits = [Limit("a number", lambda x: not math.isnan(x)), *_limits(hint)]
        values = getattr(args, name)
        for value in values if isinstance(values, tuple) else (values,):
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                for limit in limits:
                    if not limit.holds(value):
                        raise ValueError(f"--{name.replace('_', '-')} {value} must be {limit.text}")
    ends = {"_lower": "", "_lb": "_ub", "_lower_bound": "_upper_bound"}
    bounds = [(name, name.removesuffix(x) + y) for x, y in ends.items() for name in vars(args) if name.endswith(x)]
    for lower, upper in bounds:
        if (low := getattr(args, lower)) > (high := getattr(args, upper)):
            names = [f"--{name.replace('_', '-')}" for name in (lower, upper)]
            raise ValueError(f"{names[0]} {low} is above {names[1]} {high}; lower it")
    for alarm in vars(args).get("alarms", ()):
        parse_alarm(alarm)
    if vars(args).get("engine") == "hf" and args.tensor_model_parallel_size != 1:
        size = args.tensor_model_parallel_size
        raise ValueError(f"--tensor-model-parallel-size {size} needs --engine vllm; --engine hf runs on one device")
    if isinstance(args, RL):
        _check_rl(args)


def _check_rl(args: Any) -> None:
    if args.rollout_quantization != "none":
        flag = f"--rollout-quantization {args.rollout_quantization}"
        if args.engine != "vllm":
            raise ValueError(f"{flag} needs --engine vllm; --engine {args.engine} has no quantization")
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
            raise ValueError(f"{flag} needs a GPU that computes in FP8, such as an H100 or L40S; leave it out")
    if (args.ppo_mini_batch_size or 0) > args.train_batch_size:
        raise ValueError(
            f"--ppo-mini-batch-size {args.ppo_mini_batch_size} is more than --train-batch-size "
            f"{args.train_batch_size}; both count prompts, lower it"
        )
    if vars(args).get("ref_update_steps") and vars(args).get("lora_rank"):
        raise ValueError(
            f"--ref-update-steps {args.ref_update_steps}: with --lora-rank {args.lora_rank} the reference is the "
            "policy without its adapters, which stays as it is; leave one of them out"
        )
    kl_terms = [vars(args)[name] for name in ("use_kl_loss", "use_kl_in_reward") if name in vars(args)]
    if vars(args).get("ref_update_steps") and kl_terms and not any(kl_terms):
        raise ValueError(f"--ref-update-steps {args.ref_update_steps} needs --use-kl-loss or --use-kl-in-reward")
    if args.val_n > 1 and args.val_temperature == 0:
        raise ValueError(f"--val-n {args.val_n} repeats one greedy response; add a positive --val-temperature")
    if args.ppo_max_token_len_per_gpu < (longest := args.max_prompt_length + args.max_response_length):
        raise ValueError(
            f"--ppo-max-token-len-per-gpu {args.ppo_max_token_len_per_gpu} cannot hold one sequence of "
            f"--max-prompt-length + --max-response-length = {longest} tokens; raise it to at least that"
        )
    if args.reward_model and args.ppo_max_token_len_per_gpu < args.reward_model_max_length:
        raise ValueError(
            f"--ppo-max-token-len-per-gpu {args.ppo_max_token_len_per_gpu} cannot hold one conversation of "
            f"--reward-model-max-length {args.reward_model_max_length} tokens; change one of them"
        )


def parse_alarm(text: str) -> tuple[str, str, float]:
    """`metric>number` or `metric<number` -> (metric, sign, number); spaces around each are allowed.

    Raises ValueError for anything else.
    """
    metric, sign, number = map(str.strip, text.partition("<") if "<" in text else text.partition(">"))
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if not metric or ">" in metric or not math.isfinite(limit):
        raise ValueError(f"--alarms {text!r} must be metric>number or metric<number, e.g. 'actor/entropy<0.01'")
    return metric, sign, limit


def _notes(hint: Any) -> Iterator[Any]:
    """What Annotated says about a type, at any depth: of the type itself, or of the members of a union."""
    yield from getattr(hint, "__metadata__", ())
    for inner in get_args(hint):
        yield from _notes(inner)


def _limits(hint: Any) -> list[Limit]:
    return [note for note in _notes(hint) if isinstance(note, Limit)]

"""Rollout engines: `vllm` is the fast one, `hf` needs nothing but transformers; both do what base.py says."""

from dataclasses import dataclass
from typing import Literal

from rl.flags import AtLeast1, Free, Positive, PositiveShare
from rl.model.checks import check_heads
from rl.ranks import Ranks, memory_in_use
from rl.sampling.engines import hf, vllm
from rl.sampling.engines.base import Engine


@dataclass(frozen=True)
class EngineFlags:
    """rollout engine"""

    engine: Literal["vllm", "hf"] = "vllm"  # vllm in this process, or the slow and simple sampler of transformers
    # GPUs that share one vLLM engine: for a large model, or a few long responses
    tensor_model_parallel_size: Free[AtLeast1] = 1
    gpu_memory_utilization: Free[PositiveShare] = 0.5  # share of GPU memory that vLLM may take while it generates
    max_num_seqs: Free[AtLeast1] = 1024  # sequences an engine decodes at a time; lower it if the KV cache is small


@dataclass(frozen=True)
class Rollout(EngineFlags):
    """rollout engine"""

    free_cache_engine: Free[bool] = True  # give vLLM's memory back while training (sleep level 2)
    # stop if engine and trainer log-probs differ by more than this on average after a push of weights; default 1e-4 in
    # float32, 0.06 in bfloat16, 0.3 with --rollout-quantization
    max_logprob_gap: Free[Positive | None] = None
    # vLLM's weights in eight bits, on a GPU that computes with them, such as an H100; needs --rollout-is
    rollout_quantization: Free[Literal["none", "fp8"]] = "none"
    log_stats: Free[bool] = False  # vLLM keeps its own metrics, which --prometheus-port serves beside the run's

    @property
    def is_quantized(self) -> bool:
        """Whether the engine rounds its weights to fewer bits than the trainer."""
        return self.rollout_quantization != "none"


DEFAULT = Rollout()


def check_engine_flags(flags: EngineFlags, model: str) -> None:
    """Raise ValueError, from the config alone, if --tensor-model-parallel-size does not fit the engine or the model."""
    if flags.engine == "hf" and (size := flags.tensor_model_parallel_size) != 1:
        raise ValueError(f"--tensor-model-parallel-size {size} needs --engine vllm; --engine hf runs on one device")
    check_heads(model, flags.tensor_model_parallel_size)


def make_engine(
    model: str,
    ranks: Ranks,
    flags: EngineFlags = DEFAULT,
    *,
    longest: int,
    seed: int = 0,
    load_weights: bool = False,
) -> Engine:
    """The engine that --engine names, asleep, for a model and sequences of at most `longest` tokens.

    Its weights are dummies until the first `update_weights`. With load_weights it has those of the model's files, and
    stays awake. Raises ValueError if the parallelism does not fit the ranks, or the files lack weights.
    """
    limits = dict(max_model_len=longest, max_num_seqs=flags.max_num_seqs)
    if flags.engine == "hf":
        return hf.Engine(model, ranks, ranks.dtype, **limits)  # this engine never sleeps
    engine = vllm.Engine(
        model,
        ranks,
        ranks.dtype,
        **limits,
        gpu_memory_utilization=flags.gpu_memory_utilization,
        tensor_parallel_size=flags.tensor_model_parallel_size,
        free_cache_engine=not load_weights and flags.free_cache_engine,
        seed=seed,
        load_weights=load_weights,
        quantization=flags.rollout_quantization if isinstance(flags, Rollout) else "none",
        log_stats=ranks.is_main and isinstance(flags, Rollout) and flags.log_stats,
    )
    if not load_weights:
        awake = memory_in_use(ranks)
        engine.sleep()
        engine.memory = awake - memory_in_use(ranks)
    return engine

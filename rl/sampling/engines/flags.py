"""The flags of engines. Importing them loads no engine."""

from dataclasses import dataclass
from typing import Literal

from rl.flags import Few, Free, Positive, PositiveShare


@dataclass(frozen=True)
class EngineSizes:
    """rollout engine"""

    engine: Literal["vllm", "hf"] = "vllm"  # vllm in this process, or the slow and simple sampler of transformers
    # GPUs that share one vLLM engine: for a large model, or a few long responses
    tensor_model_parallel_size: Free[Few] = 1
    gpu_memory_utilization: Free[PositiveShare] = 0.5  # share of GPU memory that vLLM may take while it generates
    max_num_seqs: Free[Few] = 1024  # sequences that an engine decodes at a time; lower it if the KV cache is small


@dataclass(frozen=True)
class EngineFlags(EngineSizes):
    """rollout engine"""

    free_cache_engine: Free[bool] = True  # give vLLM's memory back while training (sleep level 2)
    # stop if engine and trainer log-probs differ by more than this on average after a push of weights; default 1e-4 in
    # float32, 0.06 in bfloat16, 0.3 with --rollout-quantization
    max_logprob_gap: Free[Positive | None] = None
    # vLLM's weights in eight bits, on a GPU that computes with them, such as an H100; needs --rollout-is
    rollout_quantization: Free[Literal["none", "fp8"]] = "none"
    # mixtures of experts: the trainer uses the experts that the engine chose for each token, with its own weights for
    # them (R3, arXiv 2510.11370)
    router_replay: Free[bool] = False
    log_stats: Free[bool] = False  # vLLM keeps its own metrics, which --prometheus-port serves beside the run's

    @property
    def is_quantized(self) -> bool:
        """Whether the engine rounds its weights to fewer bits than the trainer."""
        return self.rollout_quantization != "none"

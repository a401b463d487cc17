"""The flags of engines. Importing them loads no engine."""

from dataclasses import dataclass
from typing import Literal

from extras.engines import DEFAULT, reads_text_only
from rl.flags import Few, Free, Positive, PositiveShare


@dataclass(frozen=True)
class EngineSizes:
    """These flags are about the engine, which samples responses."""

    # vllm runs vLLM in this process. hf is the slow and simple sampler of transformers, and the default
    # where vLLM is not installed. sglang runs SGLang in a process of its own.
    engine: Literal["vllm", "hf", "sglang"] = DEFAULT
    # This many GPUs share one engine, vLLM or SGLang, which helps with a large model or with a few long responses.
    tensor_model_parallel_size: Free[Few] = 1
    # The engine may take this share of the GPU's memory while it generates. For SGLang it is a share of what is free.
    gpu_memory_utilization: Free[PositiveShare] = 0.5
    # An engine decodes at most this many sequences at a time. Lower it if the KV cache is small.
    max_num_seqs: Free[Few] = 1024


@dataclass(frozen=True)
class EngineFlags(EngineSizes):
    """These flags are about the engine, which samples responses."""

    free_cache_engine: Free[bool] = True  # Give the engine's memory back while the trainer trains.
    # Stop the run if the log-probs of engine and trainer differ by more than this on average after a push of weights.
    # The default is 1e-4 in float32, 0.01 in float16, 0.06 in bfloat16, and 0.3 with --rollout-quantization.
    max_logprob_gap: Free[Positive | None] = None
    # vLLM's weights stay as they are (none), or have eight bits (fp8), on a GPU that computes with such numbers, such
    # as an H100. fp8 needs --rollout-is.
    rollout_quantization: Free[Literal["none", "fp8"]] = "none"
    # In a mixture of experts, the trainer uses the experts that the engine chose for each token (R3, arXiv 2510.11370).
    # It weighs them itself.
    router_replay: Free[bool] = False
    # Let vLLM keep its own metrics, which --prometheus-port serves beside those of the run.
    log_stats: Free[bool] = False

    @property
    def is_quantized(self) -> bool:
        """Whether the engine rounds its weights to fewer bits than the trainer."""
        return self.rollout_quantization != "none"

    @property
    def text_only(self) -> str | None:
        """The flag because of which rows may not have images, or None."""
        return reads_text_only(self.engine)

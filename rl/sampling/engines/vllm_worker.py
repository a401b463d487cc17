"""vLLM's GPU worker, with a KV cache no larger than its sequences can fill. vllm.py names it to vLLM."""

from typing import Any

from vllm.v1.worker import gpu_worker


class Worker(gpu_worker.Worker):
    """In place of vLLM's own, which takes all memory that it is allowed, and time to get it at every `wake`."""

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache, as many as vLLM finds room for, but no more than it can use."""
        # vLLM would capture CUDA graphs here only to measure their memory, and capture them again later. That takes
        # about ten seconds. It also skips the measurement for users who set the size of the KV cache themselves, so
        # nothing later depends on it. vLLM subtracts this 1 GiB from the memory for the KV cache instead.
        self.model_runner.profile_cudagraph_memory = lambda: 1 << 30
        return min(super().determine_available_memory(), most_cache(self.get_kv_cache_spec(), self.vllm_config))


def most_cache(layers: dict[str, Any], config: Any) -> int:
    """Bytes of KV cache that `max_num_seqs` sequences of `max_model_len` tokens fill, and one sequence more as slack,
    since vLLM keeps a block for itself. What else it could cache is of little use, since every push of weights drops
    it.

    Args: layers, vLLM's KVCacheSpec of each by its name; config, a VllmConfig.
    """
    sequence = sum(layer.max_memory_usage_bytes(config) for layer in layers.values())
    return (config.scheduler_config.max_num_seqs + 1) * sequence

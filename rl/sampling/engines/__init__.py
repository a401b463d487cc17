"""Rollout engines: `vllm` is the fast one, `hf` needs nothing but transformers. base.py says what they have alike."""

from typing import Any

from rl.ranks import Ranks, memory_in_use
from rl.sampling.engines import hf, vllm
from rl.sampling.engines.base import Engine


def make_engine(args: Any, ranks: Ranks, *, load_weights: bool = False) -> Engine:
    """The engine that --engine names, asleep, for the model and the lengths of a script's Args.

    Its weights are dummies until the first `update_weights`. With load_weights it has those of the model's files, and
    stays awake. Raises ValueError if the parallelism does not fit the ranks, or the files lack weights.
    """
    limits = dict(max_model_len=args.max_prompt_length + args.max_response_length, max_num_seqs=args.max_num_seqs)
    if args.engine == "hf":
        return hf.Engine(args.model, ranks, ranks.dtype, **limits)  # which never sleeps
    engine = vllm.Engine(
        args.model,
        ranks,
        ranks.dtype,
        **limits,
        gpu_memory_utilization=args.gpu_memory_utilization,
        tensor_parallel_size=args.tensor_model_parallel_size,
        free_cache_engine=not load_weights and args.free_cache_engine,
        seed=args.seed,
        load_weights=load_weights,
        quantization=getattr(args, "rollout_quantization", "none"),  # which eval.py does not have
        log_stats=ranks.is_main and getattr(args, "prometheus_port", None) is not None,
    )
    if not load_weights:
        awake = memory_in_use(ranks)
        engine.sleep()
        engine.memory = awake - memory_in_use(ranks)
    return engine

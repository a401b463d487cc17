"""Rollout engines: `vllm` is the fast one, `hf` needs nothing but transformers. Both do what base.py says."""

from extras.engines import check_installed, make_hf
from extras.families import check_routed
from rl.console import started
from rl.model.checks import check_heads
from rl.ranks import Ranks, memory_in_use
from rl.sampling.engines.base import Engine
from rl.sampling.engines.flags import EngineFlags, EngineSizes


def check_engine_flags(flags: EngineSizes, model: str) -> None:
    """Raise ValueError, from the config alone, if --tensor-model-parallel-size does not fit the engine or the model, or
    if the engine is not installed.
    """
    check_installed(flags.engine)
    if flags.engine == "hf" and (size := flags.tensor_model_parallel_size) != 1:
        raise ValueError(f"--tensor-model-parallel-size {size} needs --engine vllm; --engine hf runs on one device")
    check_heads(model, flags.tensor_model_parallel_size)
    if isinstance(flags, EngineFlags) and flags.router_replay:
        check_routed(model, "--router-replay")


def make_engine(
    model: str, ranks: Ranks, flags: EngineFlags, *, longest: int, seed: int = 0, load_weights: bool = False
) -> Engine:
    """The engine that --engine names, asleep, for a model and sequences of at most `longest` tokens.

    Its weights are dummies until the first `update_weights`. With load_weights it has those of the model's files, and
    stays awake. Raises ValueError if the parallelism does not fit the ranks, or the files lack weights.
    """
    if flags.engine == "hf":
        engine = make_hf(model, ranks, flags, longest=longest)
    else:
        from rl.sampling.engines import vllm

        engine = vllm.Engine(model, ranks, flags, longest=longest, seed=seed, load_weights=load_weights)
    if not load_weights:
        awake = memory_in_use(ranks)
        engine.sleep()
        engine.memory = awake - memory_in_use(ranks)
    started("engine")
    return engine

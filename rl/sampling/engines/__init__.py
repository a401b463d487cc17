"""Rollout engines, which all do what base.py says. `vllm` is here, and others are in extras/engines."""

from extras.engines import check_choice, make_other
from extras.families import check_routed
from rl.console import started
from rl.model.checks import check_heads
from rl.ranks import Ranks, memory_in_use
from rl.sampling.engines.base import Engine
from rl.sampling.engines.flags import EngineFlags, EngineSizes


def check_engine_flags(flags: EngineSizes, model: str) -> None:
    """Raise ValueError, from the config alone, if --tensor-model-parallel-size does not fit the engine or the model, or
    if the engine is not installed or cannot do what the flags ask for.
    """
    check_choice(flags)
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
    if ranks.size % (size := flags.tensor_model_parallel_size):
        raise ValueError(
            f"--tensor-model-parallel-size {size} does not divide the {ranks.size} rank(s) of this run; start a "
            "multiple of it with torchrun --nproc_per_node"
        )
    make = make_other
    if flags.engine == "vllm":
        from rl.sampling.engines.vllm import Engine as make
    engine = make(model, ranks, flags, longest=longest, seed=seed, load_weights=load_weights)
    if not load_weights:
        awake = memory_in_use(ranks)
        engine.sleep()
        engine.memory = awake - memory_in_use(ranks)
    started("engine")
    return engine

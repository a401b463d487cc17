"""Pushes of weights into the model of a vLLM engine in this process."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def push_weights(llm: Any, named_tensors: NamedTensors, *, is_processed: bool) -> None:
    """Load (name, whole tensor) pairs with Hugging Face names, lazily.

    Args: llm, a vllm.LLM; is_processed, whether vLLM keeps weights in another form than files do, as on a CPU and if it
    quantizes them. Raises RuntimeError naming weights that no pushed tensor reached.
    """

    def push(model: Any) -> set[str]:
        expected, pushed = {name for name, _ in model.named_parameters()}, set()

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in named_tensors:
                pushed.add(name)
                yield name, tensor

        if is_processed:
            loaded, of_files = _load_and_process(model, stream(), llm.llm_engine.vllm_config)
            expected &= of_files  # without what vLLM makes of weights, such as scales
        else:
            loaded = model.load_weights(stream())
        # Of its own buffers, such as scales of a cache, vLLM says nothing. Those that we push have to arrive.
        expected |= pushed & {name for name, _ in model.named_buffers()}
        # vLLM before 0.32 leaves out a module of experts where it says what was loaded.
        missing = {name.replace(".routed_experts.", ".") for name in expected}
        missing -= {name.replace(".routed_experts.", ".") for name in loaded}
        return missing | _missing_parts(model, loaded, pushed)

    (missing,) = llm.apply_model(push)
    if missing:
        raise RuntimeError(f"weight push left {len(missing)} parameters of vLLM untouched: {sorted(missing)[:5]}")


def _missing_parts(model: torch.nn.Module, loaded: set[str], pushed: set[str]) -> set[str]:
    """Names that were not pushed of tensors that vLLM fuses with others that were. It counts q as all of qkv."""
    fused = getattr(model, "packed_modules_mapping", {})
    missing = set()
    for name in loaded:
        *prefix, module, leaf = name.split(".")
        parts = {".".join([*prefix, part, leaf]) for part in fused.get(module, ())}
        if parts & pushed:
            missing |= parts - pushed
    return missing


def _load_and_process(model: Any, named_tensors: NamedTensors, config: Any) -> tuple[set[str], set[str]]:
    """Load weights that vLLM keeps in another form than files do. Each layer gets its parameters back as files have
    them, loads them, and makes of them again what it computes with, in the memory that it has.

    The CPU kernels keep packed copies. Quantized layers keep numbers of eight bits and scales. A tied LM head packs a
    copy of the embedding that this reload forgets on a CPU, so it is packed again by hand, and so would experts be.
    Returns: names that were loaded, and names of all parameters as files have them.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    is_cpu = config.device_config.device_type == "cpu"
    for module in model.modules() if is_cpu else ():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None  # or vLLM does not pack the experts again, because of CUDA graphs
    with set_current_vllm_config(config):
        initialize_layerwise_reload(model)
        of_files = {name for name, _ in model.named_parameters()}
        loaded = model.load_weights(iter(named_tensors))
        finalize_layerwise_reload(model, config.model_config)
    for module in model.modules() if is_cpu else ():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
    return loaded, of_files

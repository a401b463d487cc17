"""What this project uses of vLLM, transformers and torch that they do not promise to keep.

Each entry names a thing, the file here that uses it, and what it is used for. After an upgrade of a library this test
fails first, and says in a sentence what is gone. The last test finds uses in rl/ that nobody has entered here.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from launch import ROOT


class Borrowed(NamedTuple):
    """`name` is a dotted path; behind a colon stand names that the source of that object mentions, such as fields that
    objects get when they are made. Of names with | between them, one is enough: versions differ.
    """

    name: str
    file: str  # in rl/, or in extras/ if it begins with that
    purpose: str


BORROWED = [
    # vLLM: its core, read directly.
    Borrowed("vllm.LLM.apply_model", "sampling/engines/vllm_weights.py", "reaches the engine's model, to push weights"),
    Borrowed("vllm.LLM.reset_prefix_cache", "sampling/engines/vllm.py", "drops what old weights have computed"),
    Borrowed("vllm.LLM.reset_mm_cache", "extras/families/vision_in_vllm.py", "drops features of images after a push"),
    Borrowed("vllm.v1.engine.llm_engine.LLMEngine.is_sleeping", "sampling/engines/vllm.py", "says what has to wake up"),
    Borrowed("vllm.LLM:llm_engine", "sampling/engines/vllm.py", "leads to the core, its scheduler and its settings"),
    Borrowed(
        "vllm.v1.engine.llm_engine.LLMEngine:engine_core input_processor logger_manager",
        "sampling/engines/vllm.py",
        "are the parts of an engine that requests are made by, tokens are read from, and steps are logged by",
    ),
    Borrowed("vllm.v1.engine.llm_engine.LLMEngine:vllm_config", "sampling/engines/vllm_weights.py", "has all settings"),
    Borrowed(
        "vllm.v1.engine.llm_engine.LLMEngine.get_supported_tasks",
        "sampling/engines/vllm.py",
        "names tasks of which one is to sample",
    ),
    Borrowed("vllm.SamplingParams.clone", "sampling/engines/vllm.py", "copies parameters that are made once"),
    Borrowed(
        "vllm.v1.engine.input_processor.InputProcessor.process_inputs",
        "sampling/engines/vllm.py",
        "makes a request of token ids, or of ids and images",
    ),
    Borrowed("vllm.v1.engine.core_client.InprocClient.add_request", "sampling/engines/vllm.py", "begins a response"),
    Borrowed("vllm.v1.engine.core_client.InprocClient.get_output", "sampling/engines/vllm.py", "runs one step"),
    Borrowed("vllm.v1.engine.core_client.InprocClient.abort_requests", "sampling/engines/vllm.py", "ends responses"),
    Borrowed(
        "vllm.v1.engine.core_client.InprocClient.reset_encoder_cache",
        "extras/families/vision_in_vllm.py",
        "drops images",
    ),
    Borrowed("vllm.v1.engine.core_client.InprocClient.shutdown", "sampling/engines/vllm.py", "ends the core"),
    Borrowed("vllm.v1.engine.core_client.InprocClient:engine_core", "sampling/engines/vllm.py", "has the scheduler"),
    Borrowed("vllm.v1.engine.core.EngineCore:scheduler", "sampling/engines/vllm.py", "knows all requests"),
    Borrowed(
        "vllm.v1.core.sched.scheduler.Scheduler:requests has_requests",
        "sampling/engines/vllm.py",
        "tell how vLLM reads a prompt, and whether it has lost a request",
    ),
    Borrowed(
        "vllm.v1.engine.EngineCoreOutput:request_id new_token_ids new_logprobs routed_experts finish_reason",
        "sampling/engines/vllm.py",
        "are the fields of what the core returns",
    ),
    Borrowed(
        "vllm.distributed.aux_output_connector.connector.AuxOutputSchedulerConnector.take_output",
        "extras/families/experts.py",
        "hands experts on, and is to go on without them on later ranks of an engine",
    ),
    Borrowed(
        "vllm.distributed.parallel_state.get_tp_group",
        "extras/families/experts.py",
        "tells the first rank from later ones",
    ),
    Borrowed(
        "vllm.engine.arg_utils.EngineArgs", "extras/families/vision_in_vllm.py", "tells whether vLLM normalizes images"
    ),
    Borrowed("vllm.SamplingParams.all_stop_token_ids", "sampling/engines/vllm_scheduler.py", "ends a response"),
    Borrowed(
        "vllm.model_executor.models.registry._run_in_subprocess",
        "sampling/engines/vllm.py",
        "starts a process to look at the class of a model, which takes ten seconds and more",
    ),
    # vLLM: weights that it keeps in another form than files.
    Borrowed(
        "vllm.model_executor.model_loader.reload.initialize_layerwise_reload",
        "sampling/engines/vllm_weights.py",
        "begins a push on a CPU or of weights that are quantized",
    ),
    Borrowed(
        "vllm.model_executor.model_loader.reload.finalize_layerwise_reload",
        "sampling/engines/vllm_weights.py",
        "ends a push on a CPU or of weights that are quantized",
    ),
    Borrowed("vllm.config.set_current_vllm_config", "sampling/engines/vllm_weights.py", "surrounds such a push"),
    Borrowed(
        "vllm.model_executor.layers.vocab_parallel_embedding.ParallelLMHead:quant_method",
        "sampling/engines/vllm_weights.py",
        "packs a tied LM head once more after a push on a CPU",
    ),
    Borrowed("vllm.distributed.parallel_state.get_tp_group", "sampling/engines/vllm.py", "has the ranks of an engine"),
    Borrowed(
        "vllm.v1.worker.gpu_worker:determine_available_memory get_kv_cache_spec",
        "sampling/engines/vllm_worker.py",
        "are the methods of the worker whose KV cache is limited",
    ),
    Borrowed(
        "vllm.v1.worker.gpu_worker:model_runner profile_cudagraph_memory",
        "sampling/engines/vllm_worker.py",
        "are what the worker asks for the memory of CUDA graphs, which is not measured",
    ),
    # vLLM: the scheduler's shortcuts, in TESTED versions only.
    Borrowed(
        "vllm.v1.core.sched.scheduler.Scheduler:schedule update_from_output requests running kv_cache_config "
        "scheduler_config max_num_scheduled_tokens max_num_running_reqs prev_step_scheduled_req_ids",
        "sampling/engines/vllm_scheduler.py",
        "are what the shortcuts around the scheduler replace, read and write",
    ),
    Borrowed(
        "vllm.v1.request.Request:_all_token_ids _output_token_ids num_computed_tokens num_prompt_tokens max_tokens "
        "num_output_placeholders num_in_flight_tokens num_preemptions is_prefill_chunk",
        "sampling/engines/vllm_scheduler.py",
        "are what the shortcuts read and write of a request",
    ),
    Borrowed(
        "vllm.v1.core.sched.output.CachedRequestData:req_ids new_block_ids num_computed_tokens num_output_tokens",
        "sampling/engines/vllm_scheduler.py",
        "are what the shortcuts say of a sequence that gets one token longer",
    ),
    Borrowed(
        "vllm.v1.core.sched.output.SchedulerOutput:num_scheduled_tokens total_num_scheduled_tokens "
        "scheduled_cached_reqs",
        "sampling/engines/vllm_scheduler.py",
        "are what the shortcuts add to a step",
    ),
    # transformers: loading and saving.
    Borrowed(
        "transformers.core_model_loading._materialize_copy",
        "model/load.py",
        "is replaced while weights stay in the precision of their files",
    ),
    Borrowed(
        "transformers.core_model_loading.set_param_for_module",
        "model/load.py",
        "is replaced while a rank keeps its rows of a weight",
    ),
    Borrowed(
        "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS",
        "extras/sequence_parallel/slices.py",
        "has the attention function of a model, around which slices are exchanged",
    ),
    Borrowed("transformers.PreTrainedModel.get_parameter_or_buffer", "model/load.py", "tells weights from buffers"),
    Borrowed("transformers.pytorch_utils.Conv1D", "extras/plan/sizes.py", "tells the sizes of the layers of GPT-2"),
    Borrowed("transformers.core_model_loading.PrefixChange", "model/load.py", "renames the text part of a model"),
    Borrowed("transformers.core_model_loading.revert_weight_conversion", "model/load.py", "gives published names"),
    Borrowed(
        "transformers.core_model_loading.revert_weight_conversion",
        "extras/families/text_part.py",
        "gives published names",
    ),
    Borrowed("transformers.conversion_mapping.get_model_conversion_mapping", "model/load.py", "knows published names"),
    Borrowed(
        "transformers.PreTrainedModel:all_tied_weights_keys get_expanded_tied_weights_keys",
        "model/checks.py",
        "tell the tied weights of a model",
    ),
    Borrowed("transformers.PreTrainedModel:_no_split_modules", "model/sharding.py", "names the layers of a model"),
    Borrowed("transformers.core_model_loading:_weight_conversions", "model/load.py", "has the names of files"),
    Borrowed(
        "transformers.PreTrainedModel.get_correct_attn_implementation",
        "extras/families/ways.py",
        "is its own attention",
    ),
    Borrowed("transformers.PreTrainedConfig:_attn_implementation", "model/attention.py", "chooses the attention"),
    Borrowed("transformers.AttentionInterface.register", "model/attention.py", "makes the packed attention known"),
    Borrowed("transformers.integrations.moe._grouped_linear", "extras/lora/experts.py", "multiplies by all experts"),
    Borrowed(
        "transformers.modeling_outputs.BaseModelOutputWithPastAndCrossAttentions",
        "extras/families/ways.py",
        "stands for what a decoder returns",
    ),
    Borrowed("transformers.activations.ACT2FN", "extras/families/recurrent.py", "has activations of convolutions"),
    # transformers: which models there are, and processors of images.
    *(
        Borrowed(f"transformers.models.auto.{module}.{mapping}", file, "tells which models are of a kind")
        for module, mapping, file in (
            ("modeling_auto", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "extras/judges/scalar_models.py"),
            ("modeling_auto", "MODEL_FOR_CAUSAL_LM_MAPPING", "extras/families/vision.py"),
            ("modeling_auto", "MODEL_FOR_MASKED_LM_MAPPING", "model/roles.py"),
            ("processing_auto", "PROCESSOR_MAPPING", "extras/images/images.py"),
        )
    ),
    Borrowed(
        "transformers.ProcessorMixin._get_arguments_from_pretrained",
        "extras/images/images.py",
        "leaves out video parts",
    ),
    Borrowed(
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLModel.get_placeholder_mask",
        "extras/families/vision.py",
        "finds where the features of images belong",
    ),
    Borrowed(
        "transformers.models.smolvlm.modeling_smolvlm.SmolVLMModel:inputs_merger|get_placeholder_mask",
        "extras/families/vision.py",
        "puts the features of images where they belong",
    ),
    Borrowed(
        "transformers.models.qwen3_5.modeling_qwen3_5:causal_conv1d_fn torch_chunk_gated_delta_rule",
        "extras/families/recurrent.py",
        "are replaced, so that recurrent layers know the borders of packed sequences",
    ),
    Borrowed("transformers.utils.get_json_schema", "extras/agents/tools.py", "reads a tool's schema"),
    Borrowed("transformers.utils.is_flash_attn_2_available", "model/attention.py", "says if flash-attn is installed"),
    Borrowed("transformers.utils.cached_file", "extras/images/__init__.py", "finds the files of a model of the Hub"),
    Borrowed("transformers.utils.cached_file", "extras/families/text_part.py", "finds the files of a model of the Hub"),
    Borrowed("transformers.utils.SAFE_WEIGHTS_NAME", "extras/families/text_part.py", "names the file of weights"),
    Borrowed(
        "transformers.utils.SAFE_WEIGHTS_INDEX_NAME", "extras/families/text_part.py", "names the index of weights"
    ),
    # torch.
    Borrowed("torch.distributed.tensor.DTensor:_spec", "model/sharding.py", "makes a tensor of its parts"),
    Borrowed(
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
        "extras/expert_parallel/dispatch.py",
        "leads to how the experts of a layer are sharded",
    ),
    Borrowed(
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState:_fsdp_param_group",
        "extras/expert_parallel/dispatch.py",
        "has the weights that are gathered together",
    ),
    Borrowed(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup:fsdp_params",
        "extras/expert_parallel/dispatch.py",
        "has them one by one",
    ),
    Borrowed(
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam:sharded_param _sharding_spec",
        "extras/expert_parallel/dispatch.py",
        "spreads experts over all ranks while it gathers them from some",
    ),
    Borrowed(
        "torch.distributed._functional_collectives.all_to_all_single_autograd",
        "extras/expert_parallel/dispatch.py",
        "sends tokens to experts, and gradients back",
    ),
    Borrowed(
        "transformers.integrations.moe.use_experts_implementation:_apply_gate",
        "extras/expert_parallel/dispatch.py",
        "tells the experts of a layer from other modules",
    ),
    Borrowed("torch._foreach_copy_", "run/checkpoint_tensors.py", "copies many tensors in one call"),
    Borrowed("torch._dynamo.maybe_mark_dynamic", "model/sharding.py", "compiles once for all lengths"),
    Borrowed("torch._dynamo.maybe_mark_dynamic", "extras/families/experts.py", "compiles once for all lengths"),
    Borrowed("torch._dynamo.maybe_mark_dynamic", "extras/families/recurrent.py", "compiles once for all lengths"),
    Borrowed("torch._dynamo.config.recompile_limit", "model/sharding.py", "allows as many versions as a layer needs"),
    Borrowed("torch._dynamo.config.disable", "sampling/engines/vllm.py", "compiles nothing on a CPU"),
    Borrowed(
        "torch._inductor.runtime.cache_dir_utils.default_cache_dir",
        "model/sharding.py",
        "tells whether a user has chosen where compiled code is kept",
    ),
    Borrowed("torch._inductor.list_options", "model/sharding.py", "tells which options the compiler has"),
    Borrowed("torch.distributed.distributed_c10d._get_default_store", "stop.py", "tells other ranks to stop"),
    Borrowed("torch.distributed.ProcessGroupGloo._Options", "extras/samplers/weight_network.py", "names an address"),
    Borrowed("torch._C._ForceDispatchKeyGuard", "extras/families/delta_rule.py", "has gradients inside"),
    Borrowed("torch._C._dispatch_tls_local_include_set", "extras/families/delta_rule.py", "is put back"),
    Borrowed("torch._C._dispatch_tls_local_exclude_set", "extras/families/delta_rule.py", "is put back"),
    Borrowed("torch._C.DispatchKeySet", "extras/families/delta_rule.py", "names what is put back"),
    Borrowed("torch._C.DispatchKey", "extras/families/delta_rule.py", "names what is put back"),
]


def resolved(path: str) -> object:
    """The object of a dotted path: the longest module, and attributes of it."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for name in parts[n:]:
            value = getattr(value, name)
        return value
    raise ModuleNotFoundError(path)


def what_is_gone(name: str) -> list[str]:
    """Of an entry's `name`, the parts that the installed library does not have."""
    path, _, mentioned = name.partition(":")
    try:
        value = resolved(path)
    except (AttributeError, ModuleNotFoundError):
        return [path]
    if not (missing := [x for x in mentioned.split() if not any(hasattr(value, name) for name in x.split("|"))]):
        return []
    library = path.split(".")[0]
    kinds = [x for x in value.__mro__ if x.__module__.startswith(library)] if isinstance(value, type) else [value]
    words = set(re.findall(r"\w+", "\n".join(map(inspect.getsource, kinds))))
    return [f"{path}, {x}" for x in missing if words.isdisjoint(x.split("|"))]


@pytest.mark.parametrize("entry", BORROWED, ids=lambda x: f"{x.name.partition(':')[0]}-{x.file}")
def test_a_library_still_has_what_is_borrowed_from_it(entry):
    library = importlib.import_module(entry.name.split(".")[0])
    version = f"{library.__name__} {library.__version__}"
    gone = what_is_gone(entry.name)
    assert not gone, f"{version} lacks {'; '.join(gone)}, by which {entry.file} {entry.purpose}"


def test_what_is_gone_is_found():
    assert what_is_gone("torch.nn.Module.forwards") == ["torch.nn.Module.forwards"]
    assert what_is_gone("torch.no_module.x") == ["torch.no_module.x"]
    assert what_is_gone("torch.nn.Module:training no_such_field") == ["torch.nn.Module, no_such_field"]
    assert what_is_gone("torch.nn.Module:older_name|forward neither|nor") == ["torch.nn.Module, neither|nor"]


def place(file: str) -> Path:
    return ROOT / file if file.startswith("extras/") else ROOT / "rl" / file


FILES = [str(x.relative_to(ROOT / "rl")) for x in (ROOT / "rl").rglob("*.py")]
FILES += [str(x.relative_to(ROOT)) for x in (ROOT / "extras").rglob("*.py")]


LIBRARIES = ("vllm", "transformers", "torch")


def borrowed_in(path: Path) -> set[str]:
    """Names that a file uses and that their library does not show as its own. These begin with _ in a dotted path that
    begins with a library's name, or they are imported from inside transformers or vLLM.
    """
    names, tree = set(), ast.parse(path.read_text())
    short = {"dist": "torch.distributed", "core_model_loading": "transformers.core_model_loading"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            is_inside = node.module.count(".") > 0 and not node.module.startswith("torch.")
            names |= {f"{node.module}.{x.name}" for x in node.names if is_inside or re.match("_[^_]", x.name)}
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            first, *rest = dotted.split(".")
            first = short.get(first, first)
            if first.split(".")[0] in LIBRARIES and any(re.match("_[^_]", x) for x in rest):
                names.add(".".join([first, *rest]))
    return names


@pytest.mark.parametrize("entry", BORROWED, ids=lambda x: f"{x.name.partition(':')[0]}-{x.file}")
def test_what_is_entered_is_in_use(entry):
    text = place(entry.file).read_text()
    path, _, mentioned = entry.name.partition(":")
    unused = [x for x in mentioned.split() or [path.split(".")[-1]] if not re.search(rf"\b({x})\b", text)]
    assert not unused, f"{entry.file} no longer uses {unused}; leave it out here"


@pytest.mark.parametrize("file", sorted(FILES))
def test_everything_that_is_borrowed_is_entered(file):
    entered = [x.name.partition(":")[0] for x in BORROWED if x.file == file]
    missing = {
        name
        for name in borrowed_in(place(file))
        if not any(name == x or x.startswith(f"{name}.") or name.startswith(f"{x}.") for x in entered)
    }
    assert not missing, f"enter these in BORROWED, with what {file} does by them: {sorted(missing)}"

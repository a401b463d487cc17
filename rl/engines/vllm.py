"""vLLM inside the training process: no server, no RPC, weights pushed by one call. Tested with vLLM 0.26 and 0.28.

Every rank builds its own engine on torchrun's process group ("external_launcher"). With tensor_parallel_size N, N
neighbouring ranks form one engine: they exchange their prompts, generate the same completions together, and each keeps
its own prompts' share.
"""

import itertools
import math
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from rl import stop
from rl.fsdp import Dist, final_barrier, memory_in_use
from rl.types import Completion, OnGroup, Sampling

STOP_EVERY = 16  # decoding steps between two looks at whether the run was asked to stop


@dataclass
class Tokens:
    """Where tokens go that do not pass through all of vLLM, see `_take_shortcuts`."""

    completions: dict[str, Completion] = field(default_factory=dict)  # by vLLM's name of the request
    ends: set[int] = field(default_factory=set)  # ids that end a completion


class Engine(NamedTuple):
    llm: Any  # vllm.LLM
    d: Dist
    tp_group: dist.ProcessGroup | None  # CPU group of the ranks that form this engine; None for a group of one
    can_sleep: bool
    memory: int  # bytes on the device while awake
    scheduler: Any  # vLLM's, with shortcuts
    tokens: Tokens


def make_engine(
    model: str,
    *,
    d: Dist,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int = 256,
    gpu_memory_utilization: float = 0.5,
    tensor_parallel_size: int = 1,
    seed: int = 0,
    free_cache_engine: bool = True,
    load_weights: bool = False,
) -> Engine:
    """Start vLLM on this rank's device. Unless `load_weights`, weights are dummies until the first `update_weights`."""
    if d.world_size % tensor_parallel_size:
        raise ValueError(
            f"--tensor-model-parallel-size {tensor_parallel_size} does not divide the {d.world_size} rank(s) of "
            "this run; start a multiple of it with torchrun --nproc_per_node"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    on_cpu = d.device.type == "cpu"
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # torch trains on the same cores
        torch._dynamo.config.disable = True  # or the sampler is compiled: seconds of warm-up, and a C++ compiler needed
    from vllm import LLM
    from vllm.distributed import parallel_state

    before = memory_in_use(d)
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=tensor_parallel_size,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(8192, max_model_len),
        gpu_memory_utilization=gpu_memory_utilization,
        worker_cls="auto" if on_cpu else "rl.engines.vllm_worker.Worker",
        load_format="auto" if load_weights else "dummy",
        logprobs_mode="processed_logprobs",  # of the distribution sampled from: after temperature, top-k and top-p
        enable_prefix_caching=True,
        enable_sleep_mode=free_cache_engine and not on_cpu,
        enforce_eager=on_cpu,
        compilation_config={} if on_cpu else {"max_cudagraph_capture_size": max_num_seqs},  # vLLM stops at 512
        generation_config="vllm",  # sampling is what the caller says, never what the model's folder suggests
        disable_log_stats=True,
        use_tqdm_on_load=False,
        seed=seed,
    )
    tp_group = parallel_state.get_tp_group().cpu_group if tensor_parallel_size > 1 else None
    memory = memory_in_use(d) - before
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return Engine(llm, d, tp_group, free_cache_engine and not on_cpu, memory, scheduler, _take_shortcuts(scheduler))


def _take_shortcuts(scheduler: Any) -> Tokens:
    """Keep sequences to which nothing happens in a decoding step out of vLLM's scheduler, whose Python takes longer for
    every one of them than the GPU.

    Something happens when a sequence begins or ends, or begins or fills a block of the cache, and whatever may happen
    to one that was preempted. In 15 of 16 steps a sequence just gets one token longer, and that is written down here.

    Returns where these tokens go.
    """
    schedule, update_from_output, requests = scheduler.schedule, scheduler.update_from_output, scheduler.requests
    block_size = math.gcd(*(group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups))
    ahead = int(scheduler.scheduler_config.async_scheduling)  # whether steps are scheduled before the last one ends
    tokens = Tokens()

    def schedule_what_happens(*args: Any) -> Any:
        plain, others = [], []
        for request in scheduler.running:
            # in_flight: tokens that are being sampled and not known yet, none unless steps are scheduled ahead
            position, in_flight = request.num_computed_tokens, request.num_output_placeholders
            is_plain = (
                0 < position % block_size < block_size - 1 + ahead  # ahead, a full block is noted when the next begins
                and position + 1 == len(request._all_token_ids) + in_flight  # one token to compute, which is sampled
                and position + 2 - in_flight < request.num_prompt_tokens + request.max_tokens  # and not the last one
                and not request.is_prefill_chunk
                and not request.num_preemptions
            )
            (plain if is_plain else others).append(request)

        scheduler.running = others  # vLLM sees these only, and that much less room for new ones
        scheduler.max_num_running_reqs -= len(plain)
        scheduler.max_num_scheduled_tokens -= len(plain)
        scheduled = schedule(*args)
        scheduler.running = plain + scheduler.running
        scheduler.max_num_running_reqs += len(plain)
        scheduler.max_num_scheduled_tokens += len(plain)

        names, cached = [request.request_id for request in plain], scheduled.scheduled_cached_reqs
        cached.req_ids += names
        cached.new_block_ids += [None] * len(plain)
        cached.num_computed_tokens += [request.num_computed_tokens for request in plain]
        cached.num_output_tokens += [len(r._output_token_ids) + r.num_output_placeholders for r in plain]
        scheduled.num_scheduled_tokens |= dict.fromkeys(names, 1)
        scheduled.total_num_scheduled_tokens += len(plain)
        scheduler.prev_step_scheduled_req_ids.update(names)
        for request in plain:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += ahead
        return scheduled

    def update_what_happens(scheduled: Any, output: Any) -> Any:
        if output.logprobs is not None:  # (sequences, 1): of the sampled tokens
            output.logprobs = _Logprobs(output.logprobs.logprobs[:, 0].tolist())
        others = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            others[name] = count
            request, completion = requests.get(name), tokens.completions.get(name)
            if request is None or request.num_preemptions or completion is None or not completion.token_ids:
                continue
            index, length = output.req_id_to_index[name], len(request._all_token_ids) + 1
            if (
                length % block_size
                and length < request.num_prompt_tokens + request.max_tokens
                and (token_id := output.sampled_token_ids[index][0]) not in tokens.ends
            ):
                request._all_token_ids.append(token_id)
                request._output_token_ids.append(token_id)
                request.num_in_flight_tokens -= 1
                request.num_output_placeholders -= ahead
                completion.token_ids.append(token_id)
                completion.logprobs.append(output.logprobs.of_sampled[index])
                del others[name]
        scheduled.num_scheduled_tokens = others
        return update_from_output(scheduled, output)

    scheduler.schedule, scheduler.update_from_output = schedule_what_happens, update_what_happens
    return tokens


def drop_shortcuts(engine: Engine) -> None:
    """Give vLLM its own methods back, for measuring it alone. `generate` of this module must not be called any more."""
    del engine.scheduler.schedule, engine.scheduler.update_from_output


class _Logprobs(NamedTuple):
    """In place of vLLM's LogprobsLists, which makes three arrays for every token; here `new_logprobs` is the number."""

    of_sampled: list[float]

    def slice_request(self, sequence: int, num_tokens: int) -> float:
        """The log-prob of the one token that a sequence has got in this step."""
        return self.of_sampled[sequence]


def generate(
    engine: Engine, prompts: list[list[int]], sampling: Sampling, *, seed: int, on_group: OnGroup | None = None
) -> list[list[Completion]]:
    """Sample `sampling.n` completions for each of this rank's prompts (token ids).

    `on_group(i, completions)` is called as soon as all completions of prompt i are there, while others are sampled.
    Returns [] if the run was asked to stop meanwhile. Raises ValueError if a sequence could outgrow `max_model_len`.

    The same seed, prompts and weights give the same completions. vLLM draws from the global generators of torch and,
    for the seeds of its newer GPU sampler, numpy: both are seeded here and restored afterwards. (Per-request seeds
    would cost the older sampler one kernel launch a sequence a token.)
    """
    from vllm import SamplingParams

    mine = range(len(prompts))
    if engine.tp_group is not None:
        parts: list[Any] = [None] * dist.get_world_size(engine.tp_group)
        dist.all_gather_object(parts, (seed, prompts), group=engine.tp_group)
        start = sum(len(theirs) for _, theirs in parts[: dist.get_rank(engine.tp_group)])
        mine = range(start, start + len(prompts))
        seed, prompts = parts[0][0], [prompt for _, theirs in parts for prompt in theirs]
    if not prompts:
        return []
    most, limit = max(map(len, prompts)) + sampling.max_tokens, engine.llm.llm_engine.model_config.max_model_len
    if most > limit:
        raise ValueError(f"a prompt and its response may have {most} tokens, but the engine was made for {limit}")
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=0,  # the sampled token's only
        detokenize=False,
    )
    groups = [[Completion([], [], "") for _ in range(sampling.n)] for _ in prompts]
    waiting = [sampling.n] * len(prompts)  # responses that are not complete
    watched = engine.d.is_main and sys.stderr.isatty()
    with (
        torch.random.fork_rng(devices=[engine.d.device] if engine.d.device.type == "cuda" else []),
        tqdm(total=len(prompts), desc="generate", delay=5, leave=False, disable=not watched) as bar,
    ):
        torch.manual_seed(seed)
        numpy_state = np.random.get_state()
        np.random.seed(seed)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(sampling.n)]
        names = engine.llm.enqueue(requests, params, use_tqdm=False)
        place = {name: divmod(k, sampling.n) for k, name in enumerate(names)}  # prompt and response
        # vLLM's own loop over its outputs takes a tenth of the time of generation: its core is read here instead. What
        # is aborted is that loop's interest in the requests; the core goes on with them.
        engine.llm.llm_engine.output_processor.abort_requests(names, internal=True)
        core = engine.llm.llm_engine.engine_core
        engine.tokens.completions = {name: groups[i][j] for name, (i, j) in place.items()}
        engine.tokens.ends = engine.scheduler.requests[names[0]].sampling_params.all_stop_token_ids
        steps = itertools.count()
        while any(waiting):
            if next(steps) % STOP_EVERY == 0 and stop.requested(engine.tp_group):  # ranks of an engine leave together
                return []
            outputs = core.get_output().outputs
            if not outputs and not engine.scheduler.has_requests():
                raise RuntimeError(f"vLLM has dropped {sum(waiting)} of {len(names)} responses")
            for output in outputs:
                i, j = place[output.request_id]
                completion = groups[i][j]
                if output.new_token_ids:
                    [token_id] = output.new_token_ids
                    completion.token_ids.append(token_id)
                    completion.logprobs.append(output.new_logprobs)  # a number, see _Logprobs
                if output.finish_reason is None:
                    continue
                reason = str(output.finish_reason)
                if reason not in ("stop", "length"):
                    raise RuntimeError(f"vLLM gave up on a response to prompt {i}: {reason}")
                groups[i][j] = completion._replace(finish_reason=reason)
                waiting[i] -= 1
                if waiting[i] == 0:
                    bar.update()
                    if on_group is not None and i in mine:
                        on_group(i - mine.start, groups[i])
        np.random.set_state(numpy_state)
    return groups[mine.start : mine.stop]


def update_weights(engine: Engine, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load (name, whole tensor) pairs with Hugging Face names, lazily, and drop every cached prefix.

    All ranks must enter. Raises RuntimeError naming the engine's parameters that no pushed tensor reached.
    """
    model_config = engine.llm.llm_engine.model_config

    def push(model: torch.nn.Module) -> set[str]:
        expected, pushed = {name for name, _ in model.named_parameters()}, set()

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in named_tensors:
                pushed.add(name)
                yield name, tensor

        if engine.d.device.type == "cpu":
            loaded = _load_on_cpu(model, stream(), model_config)
        else:
            loaded = model.load_weights(stream())
        return (expected - set(loaded)) | _missing_parts(model, loaded, pushed)

    (missing,) = engine.llm.apply_model(push)
    if missing:
        raise RuntimeError(f"weight push left {len(missing)} parameters of vLLM untouched: {sorted(missing)[:5]}")
    assert engine.llm.reset_prefix_cache(), "vLLM kept a stale prefix cache after a weight push"


def _missing_parts(model: torch.nn.Module, loaded: set[str], pushed: set[str]) -> set[str]:
    """Names that were not pushed of tensors that vLLM fuses with others that were: it counts q as all of qkv."""
    fused = getattr(model, "packed_modules_mapping", {})
    missing = set()
    for name in loaded:
        *prefix, module, leaf = name.split(".")
        parts = {".".join([*prefix, part, leaf]) for part in fused.get(module, ())}
        if parts & pushed:
            missing |= parts - pushed
    return missing


def _load_on_cpu(
    model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]], model_config: Any
) -> set[str]:
    """vLLM's CPU kernels keep packed copies of the weights, so layers are unpacked, loaded and packed again.

    A tied LM head packs a copy of the embedding that this reload forgets, so it is packed again by hand.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    loaded = model.load_weights(iter(named_tensors))
    finalize_layerwise_reload(model, model_config)
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
    return loaded


def sleep(engine: Engine) -> None:
    """Free vLLM's weights and KV cache (level 2: nothing is kept, `update_weights` must follow `wake`)."""
    if engine.can_sleep:
        engine.llm.sleep(level=2)


def wake(engine: Engine) -> None:
    """Allocate weights and KV cache again. Contents are undefined until `update_weights`."""
    if engine.can_sleep:
        torch.cuda.empty_cache()  # hand torch's cached blocks of the training phase back before vLLM allocates
        engine.llm.wake_up()


def close(engine: Engine) -> None:
    """Shut the engine down once every rank is done with it. vLLM ends the process group with it."""
    final_barrier()
    engine.llm.llm_engine.engine_core.shutdown()

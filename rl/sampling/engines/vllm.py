"""vLLM inside the training process: no server, no RPC, weights pushed by one call. Tested with 0.26, 0.28 and 0.32.

Every rank builds its own engine on torchrun's process group ("external_launcher"). With tensor_parallel_size N, N
neighbouring ranks form one engine: each adds its own requests, all of them sample all responses together, and each gets
its own.
"""

import contextlib
import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModel

from rl.console import say
from rl.data.types import Completion, Request, Sampling
from rl.ranks import Ranks, final_barrier
from rl.sampling.engines.base import StopTexts, check_request
from rl.sampling.engines.vllm_requests import Requests, connect

# vLLM's own quantization of weights while it loads them, by our name. FP8: a scale for every row of a weight, and for
# every token that is multiplied with it.
QUANTIZATIONS = {"none": None, "fp8": "fp8_per_channel"}


class InFlight(NamedTuple):
    """A response that is being sampled."""

    rank: int  # that asked for it
    key: Hashable
    stop: tuple[str, ...]
    version: int  # of the weights when it began


class Engine:
    """See `base.Engine`. vLLM on this rank's device, or over `tensor_parallel_size` neighbouring ranks.

    Unless `load_weights`, weights are dummies until the first `update_weights`. With `log_stats` vLLM keeps its own
    metrics, in prometheus_client's registry of this process. Raises ValueError if the ranks cannot be shared out to
    engines of that size.
    """

    def __init__(
        self,
        model: str,
        ranks: Ranks,
        dtype: torch.dtype,
        *,
        max_model_len: int,
        max_num_seqs: int = 256,
        gpu_memory_utilization: float = 0.5,
        tensor_parallel_size: int = 1,
        seed: int = 0,
        free_cache_engine: bool = True,
        load_weights: bool = False,
        quantization: str = "none",
        log_stats: bool = False,
    ):
        if ranks.size % tensor_parallel_size:
            raise ValueError(
                f"--tensor-model-parallel-size {tensor_parallel_size} does not divide the {ranks.size} rank(s) of "
                "this run; start a multiple of it with torchrun --nproc_per_node"
            )
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        on_cpu = ranks.device.type == "cpu"
        if on_cpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # torch trains on the same cores
            torch._dynamo.config.disable = True  # or the sampler is compiled: seconds of warm-up, and a C++ compiler
        import vllm
        from vllm.distributed import parallel_state

        with _transformers_as_it_is(model):
            self.llm = vllm.LLM(
                model,
                skip_tokenizer_init=True,
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=tensor_parallel_size,
                dtype=str(dtype).removeprefix("torch."),
                quantization=QUANTIZATIONS[quantization],
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max(8192, max_model_len),
                gpu_memory_utilization=gpu_memory_utilization,
                worker_cls="auto" if on_cpu else "rl.sampling.engines.vllm_worker.Worker",
                load_format="auto" if load_weights else "dummy",
                logprobs_mode="processed_logprobs",  # of the distribution sampled from, after temperature and top-p
                enable_prefix_caching=True,
                enable_sleep_mode=free_cache_engine and not on_cpu,
                enforce_eager=on_cpu,
                compilation_config={} if on_cpu else {"max_cudagraph_capture_size": max_num_seqs},  # vLLM stops at 512
                generation_config="vllm",  # sampling is what the caller says, never what the model's folder suggests
                disable_log_stats=not log_stats,
                use_tqdm_on_load=False,
                seed=seed,
            )
        self.memory = self.policy_version = 0
        self.device, self.rank, self.is_quantized = ranks.device, ranks.rank, quantization != "none"
        self.first_rank = ranks.rank - ranks.rank % tensor_parallel_size
        self.group = parallel_state.get_tp_group().cpu_group if tensor_parallel_size > 1 else None
        self.can_sleep, self.max_model_len = free_cache_engine and not on_cpu, max_model_len
        self.stop_texts = StopTexts(model)
        self.core = connect(self.llm, vllm.__version__)
        if type(self.core) is Requests and ranks.is_main:
            say(f"vLLM {vllm.__version__} was not tested with our shortcuts: generation takes about a third longer")
        self.in_flight: dict[str, InFlight] = {}  # by vLLM's name of the request, of all ranks that share this engine
        self.watched: set[str] = set()  # those of them whose text may end them
        self.new: list[Request] = []  # that vLLM does not know yet
        self.may_be_new = True  # whether ranks that share this engine have to ask each other for new requests

    def add(self, requests: Sequence[Request]) -> None:
        """See `base.Engine`. Ranks that share an engine take each other's new requests when a response has ended."""
        taken = {x.key for x in self.in_flight.values() if x.rank == self.rank} | {x.key for x in self.new}
        for request in requests:
            check_request(request, taken, self.max_model_len)
            taken.add(request.key)
        self.new += requests

    def has_requests(self) -> bool:
        """See `base.Engine`."""
        self._take_new()
        return bool(self.in_flight)

    def _take_new(self) -> None:
        """Hand new requests to vLLM: the same ones in the same order on all ranks that share this engine."""
        if self.group is None:
            every, self.new = [(self.rank, request) for request in self.new], []
        elif self.may_be_new or not self.in_flight:
            parts: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(parts, (self.rank, self.new), group=self.group)
            every, self.new = [(rank, request) for rank, requests in parts for request in requests], []
        else:
            return
        self.may_be_new = False
        if every:
            params = {way: _params(way) for way in {request.sampling for _, request in every}}
            names = self.core.add([x.prompt_ids for _, x in every], [params[x.sampling] for _, x in every])
            for name, (rank, x) in zip(names, every, strict=True):
                self.in_flight[name] = InFlight(rank, x.key, x.sampling.stop, self.policy_version)
                if x.sampling.stop:
                    self.watched.add(name)

    def step(self) -> list[Completion]:
        """See `base.Engine`. Raises RuntimeError if vLLM gives up on a response or forgets one."""
        self._take_new()
        if not self.core.has_requests():
            lost = list(self.in_flight)
            self.core.abort(lost)
            self._complete(dict.fromkeys(lost, "abort"))
            raise RuntimeError(f"vLLM has dropped {len(lost)} responses")
        ended: dict[str, str] = {}
        for name, reason in self.core.step():
            if reason not in (None, "stop", "length"):
                raise RuntimeError(f"vLLM gave up on the response {self.in_flight[name].key}: {reason}")
            if reason is not None:
                ended[name] = reason
        cut = [name for name in self.watched if ended.get(name) != "stop" and self._is_cut(name)]
        if going_on := [name for name in cut if name not in ended]:
            self.core.abort(going_on)
        return self._complete(ended | dict.fromkeys(cut, "stop"))

    def _is_cut(self, name: str) -> bool:
        return self.stop_texts.complete(self.core.growing[name].token_ids, self.in_flight[name].stop)

    def _complete(self, ended: dict[str, str]) -> list[Completion]:
        """Forget requests, by name with their reasons; returns the completions of this rank."""
        self.may_be_new = self.may_be_new or bool(ended)
        self.watched -= ended.keys()
        done = []
        for name, reason in ended.items():
            x, growing = self.in_flight.pop(name), self.core.growing.pop(name)
            if x.rank == self.rank:
                versions = x.version, self.policy_version
                done.append(Completion(x.key, growing.token_ids, growing.logprobs, reason, versions))
        return done

    def abort(self, keys: Iterable[Hashable] | None = None) -> list[Completion]:
        """See `base.Engine`."""
        self.may_be_new = True
        self._take_new()
        own = [x.key for x in self.in_flight.values() if x.rank == self.rank]
        wanted = {(self.rank, key) for key in (own if keys is None else keys)}
        if self.group is not None:
            parts: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(parts, wanted, group=self.group)
            wanted = set().union(*parts)
        names = [name for name, x in self.in_flight.items() if (x.rank, x.key) in wanted]
        self.core.abort(names)
        return self._complete(dict.fromkeys(names, "abort"))

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `base.Engine`. Drops every cached prefix. Quantizes the weights again, if they are quantized."""
        config = self.llm.llm_engine.vllm_config

        def push(model: torch.nn.Module) -> set[str]:
            expected, pushed = {name for name, _ in model.named_parameters()}, set()

            def stream() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in named_tensors:
                    pushed.add(name)
                    yield name, tensor

            if self.device.type == "cpu" or self.is_quantized:
                loaded, of_files = _load_and_process(model, stream(), config)
                expected &= of_files  # without what vLLM makes of weights, such as scales
            else:
                loaded = model.load_weights(stream())
            # Of its own buffers, such as scales of a cache, vLLM says nothing; those that we push have to arrive.
            expected |= pushed & {name for name, _ in model.named_buffers()}
            return (expected - set(loaded)) | _missing_parts(model, loaded, pushed)

        (missing,) = self.llm.apply_model(push)
        if missing:
            raise RuntimeError(f"weight push left {len(missing)} parameters of vLLM untouched: {sorted(missing)[:5]}")
        reset = self.llm.reset_prefix_cache(reset_running_requests=bool(self.in_flight))
        assert reset, "vLLM kept a stale prefix cache after a weight push"
        self.policy_version += 1
        for name in self.in_flight.keys() - self.core.begun():
            self.in_flight[name] = self.in_flight[name]._replace(version=self.policy_version)

    def sleep(self) -> None:
        """Free vLLM's weights and KV cache (level 2: nothing is kept, `update_weights` must follow `wake`)."""
        if self.can_sleep:
            self.llm.sleep(level=2)

    def wake(self) -> None:
        """Allocate weights and KV cache again. Contents are undefined until `update_weights`."""
        if self.can_sleep:
            torch.cuda.empty_cache()  # hand torch's cached blocks of the training phase back before vLLM allocates
            self.llm.wake_up()

    def close(self) -> None:
        """Shut the engine down once every rank is done with it. vLLM ends the process group with it."""
        final_barrier()
        self.llm.llm_engine.engine_core.shutdown()


@contextlib.contextmanager
def _transformers_as_it_is(model: str) -> Iterator[None]:
    """Around the start of vLLM: models of transformers that this process makes stay as they are.

    vLLM runs a model that it has no code for by transformers' own class, and patches that class: each new object, our
    policy too, would look for a configuration of vLLM and be compiled by it. What vLLM itself has made stays compiled.
    """
    with torch.device("meta"):
        decoder = type(AutoModel.from_config(AutoConfig.from_pretrained(model)).get_decoder())
    init = decoder.__init__
    yield
    if decoder.__init__ is not init:
        decoder.__init__, decoder.do_not_compile = init, True


def _params(sampling: Sampling) -> Any:
    """vLLM's SamplingParams for one response."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=0,  # the sampled token's only
        detokenize=False,
    )


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


def _load_and_process(
    model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]], config: Any
) -> tuple[set[str], set[str]]:
    """Load weights that vLLM keeps in another form than files do: each layer gets its parameters back as files have
    them, loads them, and makes of them again what it computes with, in the memory that it has.

    The CPU kernels keep packed copies; quantized layers keep numbers of eight bits and scales. A tied LM head packs a
    copy of the embedding that this reload forgets on a CPU, so it is packed again by hand.
    Returns: names that were loaded, and names of all parameters as files have them.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with set_current_vllm_config(config):
        initialize_layerwise_reload(model)
        of_files = {name for name, _ in model.named_parameters()}
        loaded = model.load_weights(iter(named_tensors))
        finalize_layerwise_reload(model, config.model_config)
    for module in model.modules() if config.device_config.device_type == "cpu" else ():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
    return loaded, of_files

"""vLLM inside the training process: no server, no RPC, weights pushed by one call. Tested with 0.26, 0.28, 0.32, 0.33.

Every rank builds its own engine on torchrun's process group ("external_launcher"). With tensor_parallel_size N, N
neighboring ranks form one engine. All of them sample all responses together.
"""

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

import rl.sampling.engines.base as base
from extras import families
from rl.console import say, started
from rl.data.types import Completion, Sampling
from rl.ranks import Ranks, final_barrier
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.engines.vllm_scheduler import TESTED, take_shortcuts
from rl.sampling.engines.vllm_weights import push_weights

PREFILL = 8192  # tokens of prompts that vLLM reads in one pass
# Steps after which new requests are handed to vLLM. A step that only decodes is one CUDA graph. A step that also reads
# prompts is not, and takes longer. Conversations begin turns all the time. This way several of them begin together.
TAKE_EVERY = 8

# vLLM's own quantization of weights while it loads them, by our name. FP8 has a scale for every row of a weight, and
# for every token that is multiplied with it.
QUANTIZATIONS = {"none": None, "fp8": "fp8_per_channel"}


class Prompts:
    """How vLLM reads prompts. Some models need another way, see `extras.families.prompts_for_vllm`."""

    arguments: Mapping[str, Any] = {"skip_tokenizer_init": True}  # of vllm.LLM, beside those of the engine
    may_be_cut = True  # whether vLLM may read a prompt in parts

    def of(self, ids: Sequence[int]) -> dict[str, Any]:
        """vLLM's prompt, of token ids. Its type says that there is nothing to tokenize or to render."""
        return {"type": "token", "prompt_token_ids": list(ids)}

    def check(self, ids: Sequence[int], read: list[int]) -> None:
        """Raise RuntimeError if vLLM has `read` other tokens than a model of the trainer would read."""

    def forget(self, llm: Any) -> None:
        """Drop what vLLM has computed of prompts by weights that were replaced, except for its cached prefixes."""


class Engine(base.Engine):
    """See `base.Engine`. vLLM on this rank's device, or over --tensor-model-parallel-size neighboring ranks.

    Unless `load_weights`, weights are dummies until the first `update_weights`. Tokens are read from vLLM's core. See
    vllm_scheduler.py for the reason.
    """

    def __init__(
        self, model: str, ranks: Ranks, flags: EngineFlags, *, longest: int, seed: int = 0, load_weights: bool = False
    ):
        super().__init__(ranks, longest)
        size, on_cpu = flags.tensor_model_parallel_size, ranks.device.type == "cpu"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        of_device = _prepared_for_cpu() if on_cpu else _of_gpu(flags)
        import vllm
        from vllm.distributed import parallel_state
        from vllm.model_executor.models import registry

        # vLLM would start a process to look at the model's class, so as not to touch the GPU. That takes ten seconds
        # and more.
        registry._run_in_subprocess = lambda look: look()
        started("imports of vLLM")

        self.routing = families.routing_in_vllm(model, ranks) if flags.router_replay else None
        self.prompts = families.prompts_for_vllm(model) or Prompts()
        may_be_cut = self.prompts.may_be_cut and not on_cpu
        self.can_sleep = flags.free_cache_engine and not load_weights and not on_cpu
        self.has_processed_weights = on_cpu or flags.is_quantized
        with _trainer_as_it_is(model):
            self.llm = vllm.LLM(
                model,
                dtype=str(ranks.dtype).removeprefix("torch."),
                quantization=QUANTIZATIONS[flags.rollout_quantization],
                load_format="auto" if load_weights else "dummy",
                seed=seed,
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=size,
                max_model_len=longest,
                max_num_seqs=flags.max_num_seqs,
                # vLLM reserves memory for a pass over this many tokens, and reads longer prompts in parts. If prompts
                # may not be cut, there is room for a whole one.
                max_num_batched_tokens=max(PREFILL, flags.max_num_seqs, 0 if may_be_cut else longest),
                gpu_memory_utilization=flags.gpu_memory_utilization,
                enable_prefix_caching=True,
                enable_sleep_mode=self.can_sleep,
                generation_config="vllm",  # sampling is what the caller says, never what the model's folder suggests
                logprobs_mode="processed_logprobs",  # of the distribution sampled from, after temperature and top-p
                disable_log_stats=not (flags.log_stats and ranks.is_main),
                use_tqdm_on_load=False,
                **of_device,
                **self.prompts.arguments,
                **({} if self.routing is None else {"enable_return_routed_experts": True}),
            )
        self.first_rank = ranks.rank - ranks.rank % size
        self.group = parallel_state.get_tp_group().cpu_group if size > 1 else None
        self.core = self.llm.llm_engine.engine_core
        self.scheduler = self.core.engine_core.scheduler
        # `count` is how many requests were handed to vLLM so far, and `steps` how many steps were made since the last
        # of them. Parameters are made and checked once for requests that differ in length and seed only.
        self.count, self.steps, self.has_started, self.params = 0, 0, False, functools.cache(_params)
        if self.routing is None:  # otherwise vLLM's own scheduler must see every token, to collect its experts
            if vllm.__version__.startswith(TESTED):
                take_shortcuts(self.scheduler, self.in_flight)
            elif ranks.is_main:
                say(f"vLLM {vllm.__version__} was not tested with our shortcuts: generation takes about a third longer")

    def _take_new(self, *, at_once: bool = False) -> None:
        """Hand new requests to vLLM, and let it drop those that were cut. Ranks that share this engine hand over each
        other's too, so all of them hand over the same ones in the same order. That is done every TAKE_EVERY steps, or
        if nothing is being sampled.
        """
        if self.in_flight and self.steps % TAKE_EVERY and not at_once:
            return
        cut = [name for name, x in self.in_flight.items() if x.is_cut]
        of_ranks, self.new = self.of_group((self.new, cut)), []
        every, cut = ([x for part in parts for x in part] for parts in zip(*of_ranks, strict=True))
        if cut:
            self.core.abort_requests(cut)
            self._forget(cut)
        make, tasks = self.llm.llm_engine.input_processor.process_inputs, self.llm.llm_engine.get_supported_tasks()
        for x in every:  # past vLLM's own output loop, since we read tokens from its core
            self.count, self.steps = self.count + 1, 0
            params = self.params(replace(x.request.sampling, max_tokens=1)).clone()
            params.max_tokens, params.seed = x.request.sampling.max_tokens, x.request.seed
            request = make(str(self.count), self.prompts.of(x.request.prompt_ids), params, tasks)
            self.prompts.check(x.request.prompt_ids, request.prompt_token_ids)
            self.core.add_request(request)
            self.in_flight[request.request_id] = x

    def step(self) -> list[Completion]:
        """See `base.Engine`. Raises RuntimeError if vLLM gives up on a response."""
        self._take_new()
        self.steps += 1
        if not self.scheduler.has_requests():
            self.in_flight.clear()  # vLLM has dropped them, which `Loop.is_open` notices
        if not self.in_flight:
            return []
        outputs, ended = self.core.get_output(), []
        self.has_started = self.has_started or started("first tokens")
        if (stats := self.llm.llm_engine.logger_manager) is not None and outputs.scheduler_stats is not None:
            stats.record(outputs.scheduler_stats, None)
        for output in outputs.outputs:  # of the responses that vLLM's scheduler has looked at
            if (x := self.in_flight.get(output.request_id)) is None:
                continue  # it was aborted, and this token was on its way already
            if output.new_token_ids:
                new = output.new_logprobs  # with `take_shortcuts` a number, else vLLM's arrays
                x.token_ids.extend(output.new_token_ids)
                x.logprobs.append(new if isinstance(new, float) else float(new.logprobs[0, 0]))
                if output.routed_experts is not None:  # of all tokens but the last one, which the model has not read
                    parts = x.columns.setdefault("routed_experts", [])
                    fresh = len(x.request.prompt_ids) + len(x.token_ids) - 1 - sum(map(len, parts))
                    parts.append(output.routed_experts[-fresh:].astype(self.routing))
            if output.finish_reason is not None:
                ended.append(output.request_id)
                x.finish_reason = str(output.finish_reason)
                if x.finish_reason not in ("stop", "length"):
                    raise RuntimeError(f"vLLM gave up on the response {x.request.key}: {x.finish_reason}")
        return self._forget(ended)

    def abort(self) -> list[Completion]:
        """See `base.Engine`."""
        self._take_new(at_once=True)
        self.core.abort_requests(list(self.in_flight))
        return self._forget(list(self.in_flight))

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `base.Engine`. Drops every cached prefix. Quantizes the weights again, if they are quantized."""
        push_weights(self.llm, named_tensors, is_processed=self.has_processed_weights)
        reset = self.llm.reset_prefix_cache()
        assert reset, "vLLM kept a stale prefix cache after a weight push"
        self.prompts.forget(self.llm)
        self.policy_version += 1

    def sleep(self) -> None:
        """See `base.Engine`. Frees vLLM's weights and KV cache (level 2: nothing is kept). It does nothing on a CPU,
        with --no-free-cache-engine, or if the engine has loaded weights of its own.
        """
        if self.can_sleep:
            self.llm.sleep(level=2)

    def wake(self) -> None:
        """See `base.Engine`."""
        if self.can_sleep:
            torch.cuda.empty_cache()  # hand torch's cached blocks of the training phase back before vLLM allocates
            self.llm.wake_up()

    def close(self) -> None:
        """See `base.Engine`. vLLM ends the process group too."""
        final_barrier()
        torch.cuda.empty_cache()
        # vLLM frees its memory as if it were awake, and prints "CUDA Error: invalid argument" where it is asleep. If
        # there is no room for it to wake up, that line is all that happens.
        if self.llm.llm_engine.is_sleeping() and torch.cuda.mem_get_info()[0] > self.memory:
            self.wake()
        self.llm.llm_engine.engine_core.shutdown()


@contextlib.contextmanager
def _trainer_as_it_is(model: str) -> Iterator[None]:
    """Around the start of vLLM. What it changes in this process for itself is put back for the trainer.

    vLLM runs a model that it has no code for by transformers' own class, and patches that class. So each new object,
    even our policy, would look for a configuration of vLLM and be compiled by it. What vLLM itself has made stays
    compiled. vLLM also moves compiled code to a folder that depends on all of its own settings. The trainer's layers
    would be compiled again after each change of a flag of the engine.
    """
    folders = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    with torch.device("meta"):
        decoder = type(AutoModel.from_config(AutoConfig.from_pretrained(model)).get_decoder())
    init = decoder.__init__
    yield
    for name, folder in folders.items():
        os.environ.pop(name, None)
        os.environ |= {name: folder} if folder else {}
    if decoder.__init__ is not init:
        decoder.__init__, decoder.do_not_compile = init, True


def _prepared_for_cpu() -> dict[str, Any]:
    """vLLM's arguments for a CPU, of which its environment learns before vLLM is imported."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # torch trains on the same cores
    torch._dynamo.config.disable = True  # else the sampler is compiled, which takes seconds and a C++ compiler
    # No prompt is cut, since vLLM would wind the generator of a request with a seed back, which only those of GPUs
    # allow.
    return {"enforce_eager": True, "enable_chunked_prefill": False}


def _of_gpu(flags: EngineFlags) -> dict[str, Any]:
    """vLLM's arguments for a GPU."""
    return {
        "worker_cls": "rl.sampling.engines.vllm_worker.Worker",
        "enable_chunked_prefill": True,
        "compilation_config": {"cudagraph_capture_sizes": graph_sizes(flags.max_num_seqs)},
        # Some kernels of experts reorder their weights, which a push would not do again. This one does not.
        "moe_backend": "auto" if flags.is_quantized else "triton",
        # On Hopper GPUs vLLM would take FlashInfer's gated delta rule, installed or not.
        "additional_config": {"gdn_prefill_backend": "triton"},
    }


def graph_sizes(most: int) -> list[int]:
    """Numbers of sequences for which vLLM captures CUDA graphs, up to `most`. Other numbers run the next larger graph.

    vLLM's own list has 83 numbers up to 1,024, for each of which it captures several graphs. Below about 300 sequences
    a decoding step takes as long as reading the weights, so padding should cost nothing. Above, at most a quarter is
    added to the rows of a step.
    """
    sizes = (1, 2, 4, 8, 16, *range(32, 257, 32), *range(320, 513, 64), *range(640, most, 128))
    return [*(x for x in sizes if x < most), most]


def _params(sampling: Sampling) -> Any:
    """vLLM's SamplingParams, which have our names. A clone of them is a shallow copy. A deep one would take longer than
    all else that is done with a request.
    """
    from vllm import SamplingParams

    ours = vars(sampling) | {"n": 1, "stop_token_ids": list(sampling.stop_token_ids)}
    # logprobs=0 asks for that of the sampled token only
    return SamplingParams(**ours, logprobs=0, detokenize=False, skip_clone=True)

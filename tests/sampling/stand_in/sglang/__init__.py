"""Stands in for SGLang where that is not installed. It has what extras/engines/sglang/child.py calls, and samples with
transformers, one token of every request at a time. Like SGLang 0.5.23 it

- returns the log-probs of tokens after the temperature and before top-k,
- aborts all requests whose names begin with the given one,
- samples for max_running_requests at a time, in the order in which they came,
- refuses weights outside of a push, and a push or sleep while anything is sampled,
- drops requests that are longer than its context.
"""

import asyncio
import pickle
import signal
import sys
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.multiprocessing  # so that tensors can be pickled as shared ones
from transformers import AutoModelForCausalLM

MODULES = ("srt", "srt.entrypoints", "srt.entrypoints.engine", "srt.managers", "srt.managers.io_struct", "srt.utils",
           "srt.weight_sync", "srt.weight_sync.tensor_bucket")  # fmt: skip
sys.modules |= {f"sglang.{name}": sys.modules["sglang"] for name in MODULES}


class UpdateWeightsFromTensorReqInput(SimpleNamespace):
    pass


BeginWeightUpdateReqInput = EndWeightUpdateReqInput = UpdateWeightsFromTensorReqInput
ReleaseMemoryOccupationReqInput = ResumeMemoryOccupationReqInput = UpdateWeightsFromTensorReqInput


class MultiprocessingSerializer:
    @staticmethod
    def serialize(x):
        return bytes(ForkingPickler.dumps(x))


class FlattenedTensorMetadata:
    def __init__(self, name, shape, dtype, start_idx, end_idx, numel):
        self.name, self.shape, self.dtype, self.start, self.end = name, shape, dtype, start_idx, end_idx
        assert numel == end_idx - start_idx


def tensors_of(flattened_tensor, metadata):
    """The tensors of a bucket, by name."""
    return {x.name: flattened_tensor[x.start : x.end].view(x.dtype).view(x.shape) for x in metadata}


class Manager:
    """What SGLang calls its TokenizerManager."""

    def __init__(self, engine):
        self.engine, self.in_push, self.asleep = engine, False, set()

    def abort_request(self, rid, abort_all=False):
        assert abort_all or rid
        for name, x in self.engine.requests.items():
            if abort_all or name.startswith(rid):
                x["aborted"] = True

    def is_idle(self):
        return not self.engine.requests

    async def begin_weight_update(self, _, __):
        if self.in_push or not self.is_idle():
            return False, "a push is open, or requests are in flight"
        self.in_push = True
        return True, "Success"

    async def end_weight_update(self, _, __):
        self.in_push, found = False, self.in_push
        return found, "no push is open"

    async def update_weights_from_tensor(self, request, _):
        if not self.in_push:
            return False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        assert len(request.serialized_named_tensors) == self.engine.size and request.flush_cache is False
        assert request.load_format == "flattened_bucket"
        given = [tensors_of(**pickle.loads(x)) for x in request.serialized_named_tensors]
        own = self.engine.model.state_dict()
        for name, x in given[0].items():
            assert all((part[name] == x).all() for part in given), f"ranks have pushed different {name}"
            own[name].copy_(x)
        return True, "Success"

    async def release_memory_occupation(self, request, _):
        assert self.is_idle() and not self.asleep
        self.asleep = {*request.tags}
        for x in self.engine.model.parameters():
            x.data.zero_()  # nothing is kept

    async def resume_memory_occupation(self, request, _):
        self.asleep -= {*request.tags}

    async def flush_cache(self):
        return SimpleNamespace(success=self.is_idle())


# Settings of SGLang's ServerArgs that make no difference here.
OTHERS = {"skip_tokenizer_init", "max_total_tokens", "mem_fraction_static", "sleep_on_idle",
          "enable_memory_saver", "log_level", "cuda_graph_max_bs_decode", "disable_prefill_cuda_graph", "device",
          "attention_backend", "sampling_backend", "disable_cuda_graph", "disable_overlap_schedule"}  # fmt: skip


class Engine:
    def __init__(self, *, model_path, dtype, load_format, random_seed, tp_size, context_length,
                 max_running_requests, **others):  # fmt: skip
        assert {*others} <= OTHERS, {*others} - OTHERS
        room = {"max_total_num_tokens": others["max_total_tokens"]}
        self._scheduler_init_result = SimpleNamespace(scheduler_infos=[room])
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).eval()
        if load_format == "dummy":
            for x in self.model.parameters():
                x.data.fill_(0.01)
        torch.manual_seed(random_seed)
        self.size, self.longest, self.at_a_time = tp_size, context_length, max_running_requests
        self.requests, self.loop, self.tokenizer_manager = {}, asyncio.new_event_loop(), Manager(self)
        eos = self.model.generation_config.eos_token_id
        self.eos = {*eos} if isinstance(eos, list) else {eos}
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)

    def shutdown(self):
        print("the stand-in of SGLang has been shut down", flush=True)

    async def async_generate(self, *, input_ids, sampling_params, return_logprob, rid):
        limit = sampling_params["max_new_tokens"]
        if len(input_ids) + limit > self.longest - 2:
            raise ValueError("longer than the context")
        assert return_logprob and rid not in self.requests and not self.tokenizer_manager.asleep
        x = self.requests[rid] = {"aborted": False}
        stops, ids, logprobs, reason = self.eos | {*sampling_params["stop_token_ids"]}, [], [], "length"
        temperature = sampling_params["temperature"]
        while len(ids) < limit:
            await asyncio.sleep(0.001)
            if x["aborted"]:
                reason = "abort"
                break
            if rid not in [*self.requests][: self.at_a_time]:
                continue
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([[*input_ids, *ids]])).logits[0, -1].float()
            logp = (logits / (temperature or 1.0)).log_softmax(-1)
            ids.append(int(logp.exp().multinomial(1) if temperature else logp.argmax()))
            logprobs.append((logp[ids[-1]].item(), ids[-1], None))
            if ids[-1] in stops:
                reason = "stop"
                break
        del self.requests[rid]
        meta = {"id": rid, "finish_reason": {"type": reason}, "output_token_logprobs": logprobs}
        return {"output_ids": ids, "meta_info": meta}

"""The process that holds SGLang. engine.py starts it with SGLang's own Python, which may lack all of this project:

    python child.py FD

FD is the number of a socket to the training process. Messages are tuples of a name and what belongs to it, pickled.
They hold what any Python with torch can unpickle, so the two Pythons may differ. The training process sends

    ("start", settings)               of sglang.Engine, first of all
    ("add", [(name, prompt_ids, sampling parameters), ...])
    ("abort", [name, ...])            what they have so far comes back as any other response
    ("begin",), ("weights", tensors, parts), ("end",)     a push of weights: all of them in parts, see `load`
    ("sleep",), ("wake",)

and hears of responses and of what it has asked for:

    ("ended", (name, token ids, log-probs, reason))     if the reason is not one of SGLang's, it is an error message
    ("done", None or what went wrong)                   after each message

If the training process ends or closes the socket, this process ends, and so does everything that SGLang has started.
"""

import asyncio
import ctypes
import os
import sys
from importlib import import_module
from multiprocessing.connection import Connection

MEMORY = ["kv_cache", "weights"]  # what SGLang gives back while it sleeps. It keeps its CUDA graphs.
CALLS = {  # what is asked for -> a method of SGLang's manager, the class of its argument, and what is in that
    "begin": ("begin_weight_update", "BeginWeightUpdateReqInput", {}),
    "weights": ("update_weights_from_tensor", "UpdateWeightsFromTensorReqInput", {"flush_cache": False}),
    "end": ("end_weight_update", "EndWeightUpdateReqInput", {}),
    "sleep": ("release_memory_occupation", "ReleaseMemoryOccupationReqInput", {"tags": MEMORY}),
    "wake": ("resume_memory_occupation", "ResumeMemoryOccupationReqInput", {"tags": MEMORY}),
}


class Shared:
    """A tensor in the memory of another process. SGLang's processes unpickle it as a tensor that they share."""

    def __init__(self, arguments):
        self.arguments = arguments  # of `rebuild_cuda_tensor`, with the GPU's UUID in the place of its number

    def __reduce__(self):
        return import_module("torch.multiprocessing.reductions").rebuild_cuda_tensor, self.arguments


def load(tensors, parts):
    """What SGLang calls a flattened bucket, as its processes unpickle it.

    Args: tensors, name, shape, dtype, first and last byte of each tensor in a buffer; parts, that buffer as every GPU
    has it: the arguments of `Shared`, or bytes on a CPU.
    """
    import torch
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    about = [
        FlattenedTensorMetadata(name, torch.Size(shape), getattr(torch, dtype), start, end, end - start)
        for name, shape, dtype, start, end in tensors
    ]
    buffers = [torch.frombuffer(bytearray(x), dtype=torch.uint8) if isinstance(x, bytes) else Shared(x) for x in parts]
    given = [MultiprocessingSerializer.serialize({"flattened_tensor": x, "metadata": about}) for x in buffers]
    return {"serialized_named_tensors": given, "load_format": "flattened_bucket"}


class Child:
    """SGLang, and the requests that it samples."""

    def __init__(self, connection, engine):
        self.connection, self.engine, self.tasks = connection, engine, {}
        self.manager, self.loop = engine.tokenizer_manager, engine.loop

    async def sample(self, name, prompt_ids, parameters):
        """One response."""
        try:
            found = await self.engine.async_generate(
                input_ids=prompt_ids, sampling_params=parameters, return_logprob=True, rid=name
            )
            about = found["meta_info"]
            logprobs, reason = [x[0] for x in about["output_token_logprobs"]], about["finish_reason"]["type"]
            self.connection.send(("ended", (name, list(found["output_ids"]), logprobs, reason)))
        except Exception as error:
            self.connection.send(("ended", (name, [], [], f"{type(error).__name__}: {error}")))
        del self.tasks[name]

    async def add(self, requests):
        """Begin to sample."""
        for name, *request in requests:
            self.tasks[name] = self.loop.create_task(self.sample(name, *request))

    async def abort(self, names):
        """Stop sampling, and wait until what there is was sent."""
        await asyncio.sleep(0)  # requests that have just come are handed to SGLang first
        while unfinished := {name: self.tasks[name] for name in names if name in self.tasks}:
            is_all = len(unfinished) == len(self.tasks)  # in one message, which is cheaper than one for each
            for name in [""] if is_all else unfinished:
                self.manager.abort_request(name, abort_all=is_all)
            await asyncio.wait(unfinished.values(), timeout=0.2)  # some may have been on their way to SGLang

    async def call(self, what, *arguments):
        """Let SGLang do what CALLS has. After a push it also forgets the keys and values of earlier prompts."""
        method, kind, fields = CALLS[what]
        request = getattr(import_module("sglang.srt.managers.io_struct"), kind)
        fields = fields | (load(*arguments) if what == "weights" else {})
        success, message = await getattr(self.manager, method)(request(**fields), None) or (True, "")
        if what == "end" and success and not (await self.manager.flush_cache()).success:
            success, message = False, "it kept a stale prefix cache after a push of weights"
        if not success:
            raise RuntimeError(message)

    async def do(self, what, *arguments):
        """Do what was asked for, and say so."""
        try:
            await (self.call(what, *arguments) if what in CALLS else getattr(self, what)(*arguments))
        except Exception as error:
            self.connection.send(("done", f"{type(error).__name__}: {error}"))
        else:
            self.connection.send(("done", None))

    def listen(self):
        """Take messages until the other end is closed."""
        try:
            while True:
                asyncio.run_coroutine_threadsafe(self.do(*self.connection.recv()), self.loop)
        except (EOFError, OSError):
            self.loop.call_soon_threadsafe(self.loop.stop)


def let_loader_find(library):
    """Let processes that are started from now on find a library that this one has loaded, by LD_LIBRARY_PATH."""
    with open("/proc/self/maps") as lines:
        folders = sorted({x[x.index("/") :].rpartition("/")[0] for x in lines if f"/{library}." in x})
    os.environ["LD_LIBRARY_PATH"] = ":".join([os.environ.get("LD_LIBRARY_PATH", ""), *folders]).strip(":")


def main():
    """Start SGLang, and serve it until the other end is closed."""
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG and SIGKILL: the training process may end while SGLang starts
    connection = Connection(int(sys.argv[1]))
    most = (settings := connection.recv()[1])["context_length"]
    from sglang.srt.entrypoints.engine import Engine

    # For sleeping, SGLang's processes preload a library that needs this one. pip puts it where no loader looks.
    let_loader_find("libcudart.so")
    engine = Engine(**settings)
    child, room = Child(connection, engine), engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]
    # SGLang would cut responses that do not fit, and only warn.
    problem = f"there is memory for {room} tokens, and a sequence may have {most}; raise --gpu-memory-utilization"
    connection.send(("done", problem if room < most else None))
    child.loop.run_in_executor(None, child.listen)
    child.loop.run_forever()
    child.engine.shutdown()
    os._exit(0)


if __name__ == "__main__":  # SGLang starts processes that import this file again
    main()

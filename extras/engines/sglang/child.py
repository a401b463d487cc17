"""The process that holds SGLang. engine.py starts it with SGLang's own Python, which may lack all of this project:

    python child.py FD

FD is the number of a socket to the training process. Messages are tuples of a name and what belongs to it, pickled.
They hold plain numbers, texts and bytes, so the two Pythons may differ. The training process sends

    ("start", settings)               of sglang.Engine, first of all
    ("add", [(name, prompt_ids, sampling parameters), ...])
    ("abort", [name, ...])            what they have so far comes back as any other response
    ("begin",), ("weights", tensors, parts), ("end",)     a push of weights: all of them in parts, see `load`
    ("sleep",), ("wake",)

and hears of responses and of what it has asked for:

    ("ended", [(name, token ids, log-probs, reason), ...])
    ("done", None or what went wrong)           after each of the others, but not after "add"
    ("failed", what went wrong)                 if a request was refused

A socket that is closed ends this process, and so ends everything that SGLang has started.
"""

import asyncio
import os
import sys
import threading
from multiprocessing.connection import Connection

MEMORY = ["kv_cache", "weights", "cuda_graph"]  # what SGLang gives back while it sleeps


def check(success, message):
    """Raise RuntimeError unless SGLang has done what it was asked for."""
    if not success:
        raise RuntimeError(message)


class Shared:
    """A tensor in the memory of another process. SGLang's processes unpickle it as a tensor that they share."""

    def __init__(self, arguments):
        self.arguments = arguments  # of `rebuild_cuda_tensor`, with the GPU's UUID in the place of its number

    def __reduce__(self):
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        return rebuild_cuda_tensor, self.arguments


class Child:
    """SGLang, and the requests that it samples."""

    def __init__(self, connection, engine):
        self.connection, self.engine, self.tasks, self.ended = connection, engine, {}, []
        self.manager, self.loop = engine.tokenizer_manager, engine.loop

    def send_ended(self):
        """Send all responses that have ended since the last time."""
        if self.ended:
            self.connection.send(("ended", self.ended))
            self.ended = []

    async def sample(self, name, prompt_ids, parameters):
        """One response."""
        try:
            found = await self.engine.async_generate(
                input_ids=prompt_ids, sampling_params=parameters, return_logprob=True, rid=name
            )
        except Exception as error:
            self.connection.send(("failed", f"{type(error).__name__}: {error}"))
            return
        logprobs = [x[0] for x in found["meta_info"]["output_token_logprobs"]]
        self.ended.append((name, list(found["output_ids"]), logprobs, found["meta_info"]["finish_reason"]["type"]))
        if len(self.ended) == 1:
            self.loop.call_soon(self.send_ended)
        del self.tasks[name]

    def add(self, requests):
        """Begin to sample."""
        for name, *request in requests:
            self.tasks[name] = self.loop.create_task(self.sample(name, *request))

    async def abort(self, names):
        """Stop sampling, and wait until what there is was sent."""
        tasks = [self.tasks[name] for name in names if name in self.tasks]
        await asyncio.sleep(0)  # requests that have just come are handed to SGLang first
        while unfinished := [name for name in names if name in self.tasks]:
            for name in unfinished:
                self.manager.abort_request(name)
            await asyncio.wait(tasks, timeout=0.2)  # one that was on its way to SGLang is aborted again
        self.send_ended()

    async def load(self, tensors, parts):
        """Load weights. `tensors` has name, shape, dtype, first and last byte of each in a buffer. `parts` has that
        buffer as every GPU has it: the arguments of `Shared`, or bytes on a CPU.
        """
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

        about = [
            FlattenedTensorMetadata(name, torch.Size(shape), getattr(torch, dtype), start, end, end - start)
            for name, shape, dtype, start, end in tensors
        ]
        if isinstance(parts[0], bytes):
            buffer = torch.frombuffer(bytearray(parts[0]), dtype=torch.uint8)
            given, form = FlattenedTensorBucket(flattened_tensor=buffer, metadata=about).reconstruct_tensors(), None
            parts = [given] * len(parts)
        else:
            form = "flattened_bucket"
            parts = [{"flattened_tensor": Shared(x), "metadata": about} for x in parts]
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(x) for x in parts],
            load_format=form,
            flush_cache=False,
        )
        check(*await self.manager.update_weights_from_tensor(request, None))

    async def begin(self):
        """Begin a push of weights."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        check(*await self.manager.begin_weight_update(BeginWeightUpdateReqInput(), None))

    async def end(self):
        """End a push of weights, and forget the keys and values of earlier prompts."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        check(*await self.manager.end_weight_update(EndWeightUpdateReqInput(), None))
        check((await self.manager.flush_cache()).success, "it kept a stale prefix cache after a push of weights")

    async def sleep(self):
        """Give the memory of the GPU back."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=MEMORY), None)

    async def wake(self):
        """Take it again."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=MEMORY), None)

    async def do(self, what, *arguments):
        """Do what was asked for, and say so."""
        try:
            await getattr(self, {"weights": "load"}.get(what, what))(*arguments)
        except Exception as error:
            self.connection.send(("done", f"{type(error).__name__}: {error}"))
        else:
            self.connection.send(("done", None))

    def take(self, message):
        """Begin to do what a message says."""
        if message[0] == "add":
            self.add(message[1])
        else:
            self.loop.create_task(self.do(*message))

    def listen(self):
        """Take messages until the other end is closed."""
        try:
            while True:
                message = self.connection.recv()
                self.loop.call_soon_threadsafe(self.take, message)
        except (EOFError, OSError):
            self.loop.call_soon_threadsafe(self.loop.stop)


def main():
    connection = Connection(int(sys.argv[1]))
    what, settings = connection.recv()
    assert what == "start"
    from sglang.srt.entrypoints.engine import Engine

    child = Child(connection, Engine(**settings))
    connection.send(("done", None))
    threading.Thread(target=child.listen, daemon=True).start()
    child.loop.run_forever()
    child.engine.shutdown()
    os._exit(0)


if __name__ == "__main__":  # SGLang starts processes that import this file again
    main()

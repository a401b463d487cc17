"""SGLang in a process of its own, which gets requests and weights from this one.

Weights are flattened into buckets. On a GPU only the handle of a bucket travels (CUDA IPC), and SGLang's processes read
it in the memory of this process. What differs from vLLM is in docs/engines.md.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

import rl.sampling.engines.base as base
from extras import families
from extras.engines import python_of_sglang
from extras.systems import without_ranks
from rl.data.types import Completion, Request, Sampling
from rl.ranks import Ranks, final_barrier, wait_without_end
from rl.sampling.engines.flags import EngineFlags

BUCKET = 512 << 20  # bytes of weights that are pushed at a time. A larger tensor has a bucket of its own.
WAIT_S = 0.05  # how long a step waits for a response to end
ROOM = 8  # tokens that SGLang wants beyond those of a sequence
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}  # what this process has set for its own memory
OF_CPU = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch",
          "disable_cuda_graph": True, "disable_overlap_schedule": True}  # fmt: skip


class Child:
    """The process with SGLang, see child.py. Every method raises RuntimeError if it has ended."""

    def __init__(self, settings: dict[str, Any], gpus: str):
        self.connection, theirs = Pipe()
        python, program = python_of_sglang() or sys.executable, Path(__file__).with_name("child.py")
        # The other Python must not import the packages of this one.
        left_out = ALLOCATOR | ({"PYTHONPATH"} if python != sys.executable else set())
        environment = {k: v for k, v in without_ranks(os.environ).items() if k not in left_out}
        environment |= {"CUDA_VISIBLE_DEVICES": gpus, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # for ROOM
        # SGLang compiles kernels when it first needs them, with the ninja beside its Python.
        environment |= {"TQDM_DISABLE": "1", "PATH": f"{Path(python).parent}:{os.environ.get('PATH', '')}"}
        with theirs:  # in a session of its own, so that Ctrl-C reaches the run alone, which stops in order
            command = [python, str(program), str(fd := theirs.fileno())]
            self.process = subprocess.Popen(command, env=environment, pass_fds=[fd], start_new_session=True)
        self.ended: list[tuple[str, list[int], list[float], str]] = []  # which nobody has asked for yet
        self.ask("start", settings)

    def give_up(self) -> NoReturn:
        """Raise RuntimeError, since the process has ended."""
        self.close()
        x = self.process
        raise RuntimeError(f"SGLang's process {x.pid} has ended (status {x.returncode}); what it printed is above")

    def hear(self) -> bool:
        """Take a message. Returns whether it says that what was asked for is done. Raises RuntimeError with the message
        if something went wrong.
        """
        try:
            name, content = self.connection.recv()
        except (EOFError, OSError):
            self.give_up()
        if name == "ended":
            self.ended.append(content)
        elif content is not None:
            raise RuntimeError(f"SGLang: {content}")
        return name == "done"

    def ask(self, *message: Any) -> None:
        """Send a message, and wait until it is done."""
        try:
            self.connection.send(message)
        except OSError:
            self.give_up()
        while not self.hear():
            pass

    def close(self) -> None:
        """End the process, and wait until it has ended."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(90)  # SGLang itself waits for its processes for 60 s
        self.process.kill()
        self.process.wait()


class Engine(base.Engine):
    """See `base.Engine`. Of the ranks that share it, the first one has the process.

    A `step` waits until responses are complete. Before that, nothing is known of their tokens. Raises ValueError if the
    model has images, and RuntimeError if SGLang does not start.
    """

    def __init__(
        self, model: str, ranks: Ranks, flags: EngineFlags, *, longest: int, seed: int = 0, load_weights: bool = False
    ):
        super().__init__(ranks, longest)
        size, on_cpu = flags.tensor_model_parallel_size, ranks.device.type == "cpu"
        if families.prompts_for_vllm(model) is not None:
            raise ValueError("--engine sglang reads nothing but text; use --engine vllm or hf for a model with images")
        self.first_rank = ranks.rank - ranks.rank % size
        if size > 1:
            self.group, _ = dist.new_subgroups(size, backend="gloo")
            wait_without_end(self.group)
        self.can_sleep = flags.free_cache_engine and not load_weights and not on_cpu
        self.count = 0  # of requests that were handed over
        # Of responses that were complete when they were aborted: prompt and response, and why it is complete, by key.
        self.complete: dict[Any, tuple[list[int], str]] = {}
        settings = {
            "model_path": model,
            "skip_tokenizer_init": True,
            "dtype": str(ranks.dtype).removeprefix("torch."),
            "load_format": "auto" if load_weights else "dummy",
            "random_seed": seed + self.first_rank,
            "tp_size": size,
            "context_length": longest + ROOM,
            "max_running_requests": flags.max_num_seqs,
            "max_total_tokens": (flags.max_num_seqs + 1) * (longest + ROOM),
            "mem_fraction_static": flags.gpu_memory_utilization,
            "enable_memory_saver": self.can_sleep,
            "sleep_on_idle": True,
            "log_level": "error",
        } | (OF_CPU if on_cpu else {"cuda_graph_max_bs_decode": flags.max_num_seqs, "disable_prefill_cuda_graph": True})
        gpus = "" if on_cpu else gpus_of(ranks.device.index or 0, size)
        self.child = Child(settings, gpus) if ranks.rank == self.first_rank else None
        self.of_group(None)  # so that the others wait for it

    def _ask(self, *message: Any) -> None:
        """Let the process do something when all ranks of the engine have entered. They leave when it is done."""
        self.of_group(None)
        if self.child is not None:
            self.child.ask(*message)
        self.of_group(None)

    def add(self, requests: Sequence[Request]) -> None:
        """See `base.Engine`. A request that goes on after a response which is complete is complete at once."""
        super().add(requests)
        for x in self.new[len(self.new) - len(requests) :]:
            ids, reason = self.complete.pop(x.request.key, ([], "abort"))
            if ids == list(x.request.prompt_ids):
                x.finish_reason = reason

    def _hand_over(self) -> None:
        """Give the process the new requests of all ranks, and let it drop those that were cut."""
        cut = [name for name, x in self.in_flight.items() if x.is_cut]
        of_ranks, self.new, new = self.of_group((self.new, cut)), [], []
        every, cut = ([x for part in parts for x in part] for parts in zip(*of_ranks, strict=True))
        for x in every:
            self.count += 1
            name = f"{self.count:015d}"  # SGLang aborts every name that begins with the given one
            self.in_flight[name] = x
            if x.finish_reason == "abort":
                new.append((name, list(x.request.prompt_ids), _parameters(x.request.sampling)))
            elif self.child is not None:
                self.child.ended.append((name, [], [], x.finish_reason))
        if new:
            self._ask("add", new)
        if cut:
            self._ask("abort", cut)
        self._forget(cut)

    def _take_ended(self) -> list[Completion]:
        """What the process has told of this rank's requests."""
        told, ended = [], []
        if self.child is not None:
            told, self.child.ended = self.child.ended, []
        for name, ids, logprobs, reason in chain(*self.of_group(told)):
            if (x := self.in_flight.get(name)) is not None:  # it was not cut
                x.token_ids, x.logprobs, x.finish_reason = ids, logprobs, reason
                ended.append(name)
        return self._forget(ended)

    def step(self) -> list[Completion]:
        """See `base.Engine`. Waits until a response is complete, for 0.05 s at most. Raises RuntimeError if SGLang has
        given up on one.
        """
        self._hand_over()
        if not self.in_flight:
            return []
        while self.child is not None and self.child.connection.poll(0.0 if self.child.ended else WAIT_S):
            self.child.hear()
        ended = self._take_ended()
        if lost := [x for x in ended if x.finish_reason not in ("stop", "length")]:
            raise RuntimeError(f"SGLang gave up on the response {lost[0].request.key}: {lost[0].finish_reason}")
        return ended

    def abort(self) -> list[Completion]:
        """See `base.Engine`. Some responses have become complete meanwhile. They come back all the same, and are
        complete as soon as `add` lets them go on.
        """
        self._hand_over()
        self._ask("abort", [*self.in_flight])
        ended = self._take_ended()
        assert not self.in_flight, "SGLang has kept requests that were aborted"
        for x in ended:
            asked, ids = x.request, x.token_ids
            is_stopped = bool(ids) and ids[-1] in asked.sampling.stop_token_ids
            if is_stopped or len(ids) == asked.sampling.max_tokens:  # SGLang may have said "abort" of it
                self.complete[asked.key] = [*asked.prompt_ids, *ids], "stop" if is_stopped else "length"
            x.finish_reason = "abort"
        return ended

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `base.Engine`. SGLang does not say which weights it has loaded. `check_engine` finds what is missing."""
        self._ask("begin")
        for bucket in buckets_of(named_tensors):
            bucket = [(name, x.detach().to(self.device).contiguous()) for name, x in bucket]
            flat = torch.cat([x.view(-1).view(torch.uint8) for _, x in bucket])
            end, tensors = 0, []
            for name, x in bucket:
                start, end = end, end + x.nbytes
                tensors.append((name, tuple(x.shape), str(x.dtype).removeprefix("torch."), start, end))
            self._ask("weights", tensors, self.of_group(_shared(flat)))
        self._ask("end")
        self.policy_version += 1

    def sleep(self) -> None:
        """See `base.Engine`. It does nothing on a CPU, with --no-free-cache-engine, or with weights of its own."""
        if self.can_sleep:
            self._ask("sleep")

    def wake(self) -> None:
        """See `base.Engine`."""
        if self.can_sleep:
            torch.cuda.empty_cache()  # hand torch's cached blocks of the training phase back before SGLang allocates
            self._ask("wake")

    def close(self) -> None:
        """See `base.Engine`."""
        final_barrier()
        if self.child is not None:
            self.child.close()


def gpus_of(first: int, size: int) -> str:
    """The GPUs of an engine, as the environment names them: `size` of those that this process sees, from `first`."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(first + size)))
    return ",".join(seen.split(",")[first : first + size])


def buckets_of(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors in lists of one dtype, since SGLang needs them aligned, and of at most BUCKET bytes or one tensor."""
    bucket, size = [], 0
    for name, x in named_tensors:
        if bucket and (size + x.nbytes > BUCKET or x.dtype != bucket[0][1].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, x))
        size += x.nbytes
    if bucket:
        yield bucket


def _parameters(sampling: Sampling) -> dict[str, Any]:
    """SGLang's names for how to sample."""
    ours = vars(sampling) | {"n": 1, "stop_token_ids": list(sampling.stop_token_ids)}
    return ours | {"max_new_tokens": ours.pop("max_tokens")}


def _shared(flat: torch.Tensor) -> Any:
    """What another process needs to read a tensor: the arguments of `rebuild_cuda_tensor`, or its bytes on a CPU.

    The two processes may number GPUs differently, so the UUID of the GPU stands in the place of its number.
    """
    if flat.device.type == "cpu":
        return flat.numpy().tobytes()
    torch.cuda.current_stream().synchronize()
    arguments = list(reductions.reduce_tensor(flat)[1])
    arguments[6] = str(torch.cuda.get_device_properties(flat.device).uuid)
    return tuple(arguments)

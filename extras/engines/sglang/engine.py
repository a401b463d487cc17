"""SGLang in a process of its own, which gets requests and weights from this one.

Weights are flattened into buckets. On a GPU only the handle of a bucket travels (CUDA IPC), and SGLang's processes read
it in the memory of this process. What differs from vLLM is in docs/engines.md.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

import rl.sampling.engines.base as base
from extras.engines.sglang import ROOT, python_of_sglang
from rl.console import started
from rl.data.types import Completion, Sampling
from rl.ranks import Ranks, final_barrier
from rl.sampling.engines.flags import EngineFlags

BUCKET = 512 << 20  # bytes of weights that are pushed at a time. A larger tensor has a bucket of its own.
WAIT_S = 0.05  # how long a step waits for a response to end
# Of torchrun and of the training process. SGLang has its own.
NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
NamedTensors = Iterable[tuple[str, torch.Tensor]]


class Child:
    """The process with SGLang, see child.py."""

    def __init__(self, settings: dict[str, Any], gpus: str | None):
        ours, theirs = socketpair()
        python, program = python_of_sglang(), Path(__file__).with_name("child.py")
        assert python is not None, "check_engine has not been called"
        environment = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED and "TORCHELASTIC" not in k}
        if python != sys.executable:  # packages of this Python are none of its own
            environment.pop("PYTHONPATH", None)
        # SGLang wants room for a few tokens more than a sequence has, also if the model knows no longer ones.
        environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        with theirs:
            command = [python, str(program), str(theirs.fileno())]
            # in a session of its own, so that Ctrl-C reaches the run alone, which stops in order
            self.process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True, cwd=ROOT
            )
        self.connection = Connection(ours.detach())
        self.ended: list[tuple[str, list[int], list[float], str]] = []  # what was heard of and nobody has asked for
        self.ask("start", settings)

    def send(self, *message: Any) -> None:
        """Send a message. Raises RuntimeError if the process has ended."""
        try:
            self.connection.send(message)
        except OSError:
            self.give_up()

    def hear(self, wait_s: float | None) -> str | None:
        """Take messages until there is one that is no response, for `wait_s` seconds at most. None waits forever.

        Returns what it is called, or None. Raises RuntimeError with what went wrong.
        """
        begin = time.monotonic()
        try:
            while self.connection.poll(None if wait_s is None else max(0, begin + wait_s - time.monotonic())):
                name, content = self.connection.recv()
                if name != "ended":
                    if content is not None:
                        raise RuntimeError(f"SGLang: {content}")
                    return name
                self.ended += content
                wait_s = 0 if wait_s is not None else None
        except (EOFError, OSError):
            self.give_up()
        return None

    def ask(self, *message: Any) -> None:
        """Send a message, and wait until it is done. Raises RuntimeError if it could not be done."""
        self.send(*message)
        self.hear(None)

    def give_up(self) -> None:
        """Raise RuntimeError, since the process has ended."""
        raise RuntimeError(
            f"SGLang's process {self.process.pid} has ended (status {self.process.wait()}); what it printed is above. "
            "Start the same command again: the run goes on after its last checkpoint"
        )

    def close(self) -> None:
        """End the process, and wait until it has ended."""
        self.connection.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Engine(base.Engine):
    """See `base.Engine`. Of the ranks that share it, the first one has the process.

    A `step` waits until responses are complete. Before that, nothing is known of their tokens. Raises ValueError if the
    ranks cannot be divided into engines of --tensor-model-parallel-size, and RuntimeError if SGLang does not start.
    """

    def __init__(
        self, model: str, ranks: Ranks, flags: EngineFlags, *, longest: int, seed: int = 0, load_weights: bool = False
    ):
        super().__init__(ranks, longest)
        size, on_cpu = flags.tensor_model_parallel_size, ranks.device.type == "cpu"
        if ranks.size % size:
            raise ValueError(
                f"--tensor-model-parallel-size {size} does not divide the {ranks.size} rank(s) of this run; start a "
                "multiple of it with torchrun --nproc_per_node"
            )
        self.first_rank = ranks.rank - ranks.rank % size
        if size > 1:
            groups = [[*range(first, first + size)] for first in range(0, ranks.size, size)]
            self.group, _ = dist.new_subgroups_by_enumeration(groups, backend="gloo")
        self.can_sleep = flags.free_cache_engine and not load_weights and not on_cpu
        self.count, self.has_started, self.child = 0, False, None
        if ranks.rank == self.first_rank:
            settings = {
                "model_path": model,
                "skip_tokenizer_init": True,
                "dtype": str(ranks.dtype).removeprefix("torch."),
                "load_format": "auto" if load_weights else "dummy",
                "random_seed": seed + self.first_rank,
                "tp_size": size,
                "context_length": longest + 8,
                "max_running_requests": flags.max_num_seqs,
                "mem_fraction_static": flags.gpu_memory_utilization,
                "max_total_tokens": (flags.max_num_seqs + 1) * (longest + 8),
                "enable_memory_saver": self.can_sleep,
                "log_level": "error",
                **(OF_CPU if on_cpu else {"cuda_graph_max_bs": flags.max_num_seqs}),
            }
            self.child = Child(settings, None if on_cpu else _gpus(ranks.device.index or 0, size))
        self.of_group(None)

    def _hand_over(self) -> None:
        """Give the process new requests, and let it drop those that were cut."""
        cut = [name for name, x in self.in_flight.items() if x.is_cut]
        of_ranks, self.new = self.of_group((self.new, cut)), []
        every, cut = ([x for part in parts for x in part] for parts in zip(*of_ranks, strict=True))
        for x in every:
            self.count += 1
            self.in_flight[f"{self.count:015d}"] = x  # SGLang aborts every name that begins with the given one
        if self.child is not None:
            if every:
                new = [*self.in_flight.items()][-len(every) :]
                self.child.send("add", [(k, [*x.request.prompt_ids], _parameters(x.request.sampling)) for k, x in new])
            if cut:
                self.child.ask("abort", cut)
        self._forget(cut)

    def _take_ended(self) -> list[Completion]:
        """What the process has told of this rank's requests."""
        told = None
        if self.child is not None:
            told, self.child.ended = self.child.ended, []
        ended = []
        for name, ids, logprobs, reason in chain.from_iterable(x or () for x in self.of_group(told)):
            if (x := self.in_flight.get(name)) is None:
                continue  # it was cut
            x.token_ids, x.logprobs, x.finish_reason = ids, logprobs, reason
            ended.append(name)
        return self._forget(ended)

    def step(self) -> list[Completion]:
        """See `base.Engine`. Waits until a response is complete, for 0.05 s at most."""
        self._hand_over()
        if not self.in_flight:
            return []
        if self.child is not None:
            self.child.hear(WAIT_S)
        ended = self._take_ended()
        self.has_started = self.has_started or (bool(ended) and started("first responses"))
        for x in ended:
            if x.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"SGLang gave up on the response {x.request.key}: {x.finish_reason}")
        return ended

    def abort(self) -> list[Completion]:
        """See `base.Engine`."""
        self._hand_over()
        self._ask("abort", [*self.in_flight])
        ended = self._take_ended()
        assert not self.in_flight, "SGLang has kept requests that were aborted"
        return ended

    def update_weights(self, named_tensors: NamedTensors) -> None:
        """See `base.Engine`. SGLang does not say which weights it has loaded. `check_engine` finds what is missing."""
        self._ask("begin")
        for bucket in _buckets(named_tensors):
            flat = torch.cat([x.detach().contiguous().view(-1).view(torch.uint8) for _, x in bucket])
            end, tensors = 0, []
            for name, x in bucket:
                start, end = end, end + x.numel() * x.element_size()
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

    def _ask(self, *message: Any) -> None:
        """Let the process do something. All ranks of the engine enter, and leave when it is done."""
        if self.child is not None:
            self.child.ask(*message)
        self.of_group(None)

    def close(self) -> None:
        """See `base.Engine`."""
        final_barrier()
        if self.child is not None:
            self.child.close()


OF_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
}


def _gpus(first: int, size: int) -> str:
    """The GPUs of an engine, as the environment names them: `size` of those that this process sees, from `first`."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = names.split(",") if names else [str(i) for i in range(first + size)]
    return ",".join(seen[first : first + size])


def _parameters(sampling: Sampling) -> dict[str, Any]:
    """SGLang's names for how to sample."""
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": [*sampling.stop_token_ids],
    }


def _buckets(named_tensors: NamedTensors) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors in lists of at most BUCKET bytes, or of one larger tensor."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, x in named_tensors:
        if bucket and size + x.numel() * x.element_size() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, x))
        size += x.numel() * x.element_size()
    if bucket:
        yield bucket


def _shared(flat: torch.Tensor) -> Any:
    """What another process needs to read a tensor: the arguments of `rebuild_cuda_tensor`, or its bytes on a CPU.

    The two processes may number GPUs differently, so the UUID of the GPU stands in the place of its number.
    """
    if flat.device.type == "cpu":
        return flat.numpy().tobytes()
    torch.cuda.current_stream().synchronize()
    _, arguments = reductions.reduce_tensor(flat)
    device = 6  # the place of the number
    return (*arguments[:device], str(torch.cuda.get_device_properties(flat.device).uuid), *arguments[device + 1 :])

"""The samplers of train_async.py: processes of their own, which sample while the trainers train.

pool.py is the pool of samplers as the trainers see it. dispatcher.py is a thread of rank 0 that hands prompts out to
samplers and takes their responses in. prompts.py says what the number of a prompt stands for, ledger.py knows which
number is where, and local.py starts the samplers of this machine. sampler.py is the process that samples, and
connection.py is its connection to the run. protocol.py has what the two sides say to each other. Weights travel by
weight_files.py or weight_network.py, and a sampler reads them through inbox.py.

`python -m extras.samplers --connect ADDRESS` starts a sampler by hand.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from rl.flags import FewOr0, Free, Limit, Needs

SILENT_S = 5.0  # a sampler that has said nothing for this long gets no prompt, and nobody waits for its probe
WHERE = "an address such as tcp://127.0.0.1:* for any port, or tcp://0.0.0.0:5555"
IS_ADDRESS = re.compile(r"ipc://.|tcp://.+:(\*|[0-5]?\d{1,4}|6[0-4]\d{3}|65[0-4]\d\d)\Z").match
Address = Annotated[str, Limit(WHERE, IS_ADDRESS, str)]
ProcessesOr0 = Annotated[int, Limit("at least 0 and at most 1024", lambda x: 0 <= x <= 1024)]


@dataclass(frozen=True)
class SamplerFlags:
    """Samplers are processes of their own, which sample while the trainers train."""

    # The run starts this many samplers on its first machine. Others may join at any time.
    samplers: Free[ProcessesOr0] = 1
    # These are the GPUs of these samplers, as CUDA_VISIBLE_DEVICES names them. The default is those that no trainer
    # uses. Each sampler gets --tensor-model-parallel-size of them, one after the other.
    sampler_devices: Free[Annotated[tuple[str, ...] | None, Needs("samplers")]] = None
    max_staleness: FewOr0 = 1  # A token may be this many versions older than the weights that train on it (S).
    # Rank 0 listens at this address. tcp://0.0.0.0:5555 lets other machines in.
    sampler_address: Free[Address] = "tcp://127.0.0.1:*"
    # A sampler that says nothing for this many seconds is lost. A run without any sampler for as long ends.
    sampler_timeout: Free[Annotated[float, Limit("at least 5 and at most 1e9", lambda x: SILENT_S <= x <= 1e9)]] = 60.0
    # Samplers get weights from a file on the host, over the network by gloo (TCP), or by NCCL if each has a GPU of its
    # own.
    weights_transfer: Free[Literal["host", "gloo", "nccl"]] = "host"
    # The file of weights is in this folder, which all machines see. The default is shared memory, for samplers on the
    # first machine.
    weights_dir: Free[str | None] = None

    def check(self, flags: Mapping[str, Any]) -> None:
        """Raise ValueError if these flags contradict each other, or others of the run, which are in `flags` by name."""
        from extras.systems import need_linux

        need_linux("train_async.py, whose samplers read weights from shared memory,", "train with train_grpo.py")
        if share := flags["partial_rollouts"]:
            other = f"--partial-rollouts {share:g}"
            raise ValueError(f"{other} and --max-staleness exclude each other; leave the first out")
        if self.weights_dir is not None and self.weights_transfer != "host":
            other = f"--weights-transfer {self.weights_transfer}"
            raise ValueError(f"--weights-dir {self.weights_dir} and {other} exclude each other; leave one of them out")
        if (size := flags["tensor_model_parallel_size"]) != 1 and self.weights_transfer != "host":
            other = f"--weights-transfer {self.weights_transfer}"
            raise ValueError(f"{other}: the {size} GPUs of a sampler read weights from the host; leave it out")


class Work(NamedTuple):
    """What the samplers of a run work on, and how."""

    tokenizer: Any  # of the policy
    rows: Sequence[dict[str, Any]]  # that the run trains on, with the tokens of their prompts
    sampling: Any  # how training prompts are answered, a `rl.data.types.Sampling`
    rollout: Any  # flags of an engine, which every sampler has
    environment: Any  # flags of what answers the policy
    batch_size: int  # prompts of a step (P)
    total_steps: int  # of the run
    longest: int  # tokens of a prompt and its response
    seed: int  # of the run


def open_pool(flags: SamplerFlags, task: Any, environment: Any, ranks: Any, folder: Path, state: dict[str, Any]) -> Any:
    """The samplers of a run, see `pool.SamplerPool`, which describes the arguments and what raises."""
    from extras.samplers.pool import SamplerPool

    work = Work(
        tokenizer=task.tokenizer,
        rows=task.train_rows,
        sampling=task.sampling,
        rollout=task.rollout,
        environment=environment,
        batch_size=task.batch_size,
        total_steps=task.total_steps,
        longest=task.longest,
        seed=task.seed,
    )
    return SamplerPool(flags, work, task, ranks, folder, state)

"""The samplers of a run, as its trainers see them: processes that sample while the trainers train.

    samplers = Samplers(...)                            rank 0 listens, and starts those of this machine
    for step ...:
        samplers.push(step, named_tensors)              weights of `step` steps; those who join later get them too
        rows, own_samples, tickets = samplers.take()    waits for the groups that the step trains on
        samplers.verify(policy, ...)                    before weights change: do the samplers hold these?

A thread of rank 0 talks to the samplers while the main thread trains. It holds `lock` for bookkeeping, never to wait.
Which prompt is where, and how old tokens may be: ledger.py. What is said: protocol.py. The other side: sampler.py.
"""

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq
from torch import Tensor, nn

from rl import stop
from rl.console import say
from rl.data.order import derive_seed, prompts_for_step
from rl.data.rows import Row
from rl.data.types import Sample, Sampling
from rl.flags import Count, Free, Seconds
from rl.ranks import Ranks
from rl.sampling.engines.base import Rollout
from rl.sampling.environments import EnvironmentFlags
from rl.sampling.evaluation import Evaluation, Validation, summarize
from rl.sampling.ledger import Leases, Ledger
from rl.sampling.protocol import (
    PROTOCOL,
    End,
    Join,
    Lease,
    Orders,
    PackedSample,
    Probe,
    Report,
    Setup,
    ToRun,
    listen,
    row_of,
    unpack,
)
from rl.sampling.rollout import check_engine
from rl.sampling.sampler import PARENT, TOKEN
from rl.sampling.weight_files import WeightWriter
from rl.scoring.pool import Scorer, Ticket

REPOSITORY = Path(__file__).resolve().parents[2]
POLL_MS = 20
LEASE_AGAIN_S = 3.0  # a lease that its sampler does not know was lost on the way
SILENT_S = 5.0  # nobody waits for the probe of a sampler that has said nothing for so long
START_S = 900.0  # for the first sampler to be there
MAX_RESTARTS = 3  # of a sampler on this machine
NUM_PROBES, PROBE_TOKENS = 4, 16


@dataclass(frozen=True)
class SamplerFlags:
    """samplers: processes of their own, which sample while the trainers train"""

    samplers: Free[Count] = 1  # that this run starts on its first machine; others may join at any time
    # GPUs of these samplers, as CUDA_VISIBLE_DEVICES names them; default: those that no trainer uses
    sampler_devices: Free[tuple[str, ...] | None] = None
    max_staleness: Count = 1  # versions of weights that a token may be older than those that train on it (S)
    sampler_address: Free[str] = "tcp://127.0.0.1:*"  # where rank 0 listens; tcp://0.0.0.0:5555 lets other machines in
    sampler_timeout: Free[Seconds] = (
        60.0  # seconds without a word after which a sampler is lost; a run without any ends
    )
    # folder that all machines see, for the weights; default: shared memory, for samplers on the first machine
    weights_dir: Free[str | None] = None


@dataclass
class Member:
    """A sampler that has reported."""

    name: str
    seen_at: float  # when it last said something
    room: int = 1  # responses at a time
    version: int = -1  # of its weights
    probe: Probe | None = None
    sent_at: dict[int, float] = field(default_factory=dict)  # leases that it has, and when they were last sent
    busy_s: float = 0.0
    total_s: float = 0.0


@dataclass
class Local:
    """A sampler that this run has started."""

    device: str | None  # None: no GPU
    process: subprocess.Popen | None = None
    starts: int = 0


Group = tuple[Row, list[Sample], Ticket]


class Samplers:
    """See above. All ranks make all calls; only rank 0 has samplers, and the tokens that they send.

    Args: setup, of `describe_run`; rows, that are trained on, `batch_size` a step and `sampling.n` responses to each;
    state, that `state` gave to the checkpoint that is resumed. Raises ValueError if flags do not fit the machine.
    """

    def __init__(
        self,
        flags: SamplerFlags,
        setup: Setup,
        ranks: Ranks,
        scorer: Scorer,
        rows: Sequence[Row],
        sampling: Sampling,
        *,
        batch_size: int,
        total_steps: int,
        folder: Path,
        state: dict[str, Any],
    ):
        self.flags, self.setup, self.ranks, self.scorer, self.sampling = flags, setup, ranks, scorer, sampling
        self.policy_version, self.memory = 0, 0  # as an engine has them: version of the weights; bytes on this GPU
        self.ledger: Ledger[Group] = Ledger(batch_size, flags.max_staleness, total_steps)
        self.evaluation: Leases[Group] = Leases()
        self.held_out: list[Row] = []
        self.held_out_sampling = sampling
        whole = functools.lru_cache(2)(lambda step: prompts_for_step(rows, step, batch_size, setup.seed))
        self.row: Callable[[int], Row] = lambda number: whole(number // batch_size)[number % batch_size]
        self.members: dict[str, Member] = {}
        self.locals: list[Local] = []
        self.weights: dict[str, Any] | None = None
        self.lost, self.failure = 0, None
        self.alone_since = time.monotonic() + START_S - flags.sampler_timeout
        self.waited_s, self.measured_at, self.measured = 0.0, time.monotonic(), (0.0, 0.0)
        self.lock, self.closing = threading.Condition(), False
        if ranks.is_main:
            self.writer = WeightWriter(flags.weights_dir)
            self.locals = [Local(device) for device in _devices(flags, ranks)]
            self._load(state)
            self.encoder, self.decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToRun)
            self.socket, self.address, self.token = listen(flags.sampler_address, zmq.Context())
            _write_private(folder / "sampler_token", self.token)
            command = f"python -m rl.sampler --connect {self.address} --token $(cat {folder}/sampler_token)"
            say(f"samplers may join by: {command}")
            self.thread = threading.Thread(target=self._serve, name="samplers", daemon=True)
            self.thread.start()

    # -----------------------------------------------------------------------------------------------------------------
    # What the script calls

    def push(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Give the samplers the weights that `version` steps have made, and hand out the prompts that they may sample.

        Returns when the weights are written; samplers load them between two decoding steps. All ranks must enter.
        Raises RuntimeError if there is no room for the weights.
        """
        if self.ranks.is_main:
            try:
                weights = self.writer.write(version, named_tensors)
            except OSError as error:
                where = self.flags.weights_dir or "the memory of this machine"
                raise RuntimeError(
                    f"weights of step {version} could not be written to {where} (--weights-dir): {error}"
                ) from error
            with self.lock:
                self.weights = weights
                self.ledger.draw(version)
        else:
            for _ in named_tensors:
                pass
        self.policy_version = version

    def take(self) -> tuple[list[Row], list[Sample], list[Ticket]]:
        """Wait for the groups that the next step trains on. Returns the P rows, on all ranks, and, on rank 0, the
        samples in their order and the tickets of their scores. All are empty if the run was asked to stop.
        """
        groups: dict[int, Group] = {}
        if self.ranks.is_main and self._wait(lambda: self.ledger.has_batch):
            with self.lock:
                groups = self.ledger.take()
        samples = [sample for _, group, _ in groups.values() for sample in group]
        numbers = self.ranks.all_gather(groups)
        return [self.row(n) for n in numbers], samples, [ticket for _, _, ticket in groups.values()]

    def start_evaluation(self, rows: Sequence[Row], validation: Validation) -> None:
        """Let the samplers answer held-out prompts, before others, with the weights of the last push."""
        with self.lock:
            self.held_out, self.held_out_sampling = list(rows), validation.settings(self.sampling)
            self.evaluation = Leases(range(-len(rows), 0) if self.ranks.is_main else ())

    def evaluate(self, validation: Validation) -> Evaluation:
        """Wait for the answers to held-out prompts, which no push may come before. All ranks must enter. Empty if the
        run was asked to stop.
        """
        leases, own = self.evaluation, []
        if self.ranks.is_main and self._wait(lambda: len(leases.ready) == len(self.held_out)):
            own = [leases.ready[-1 - i] for i in range(len(self.held_out))]
        samples = [sample for _, group, _ in own for sample in group]
        scores = self.scorer.collect([ticket for _, _, ticket in own])
        if stop.requested(self.ranks.group):
            return Evaluation({}, [])
        shown = {row["row_index"] for row in self.held_out[: validation.log_val_generations]}
        return summarize([row for row, _, _ in own], samples, scores, self.scorer, self.ranks, shown=shown)

    def verify(self, policy: nn.Module, rollout: Rollout) -> None:
        """Compare what each sampler has sampled right after the last push with the policy, which must not have changed.

        Raises RuntimeError, naming the sampler, if it does not hold the policy's weights. All ranks must enter.
        """
        own: list[tuple[str, list[Sample]]] = []
        if self.ranks.is_main and self._wait(lambda: not self._owing()):
            with self.lock:
                probes = [(member.name, member.probe) for member in self.members.values() if member.probe]
            probes = [(name, probe) for name, probe in probes if probe.version == self.policy_version]
            own = [(name, self._unpacked(probe.samples, self.setup.probes)) for name, probe in probes]
        for i, name in enumerate(self.ranks.all_gather([name for name, _ in own])):
            samples = own[i][1] if self.ranks.is_main else []
            try:
                check_engine(policy, samples, self.sampling, rollout, self.ranks)
            except RuntimeError as error:
                raise RuntimeError(f"sampler {name}, weights of step {self.policy_version}: {error}") from error

    def state(self) -> dict[str, Any]:
        """For `Run.save_and_begin`: which prompts are trained, and the groups that are ready."""
        if not self.ranks.is_main:
            return {}
        with self.lock:
            groups = [[n, [vars(s) for s in samples]] for n, (_, samples, _) in self.ledger.ready.items()]
            return {"ledger": self.ledger.state(), "groups": groups}

    def metrics(self) -> dict[str, float]:
        """How the two pools have done since the last call; {} on other ranks than 0.

        samplers/count, lost, dropped       samplers now; lost ones and dropped prompts since the start
        samplers/ready, waiting             prompts whose groups are ready, and that no sampler has begun
        rollouter/idle_ratio                share of the samplers' time in which they have not sampled
        trainer/idle_ratio                  share of the trainers' time in which they have waited for samplers
        """
        if not self.ranks.is_main:
            return {}
        with self.lock:
            busy, total = (sum(getattr(m, name) for m in self.members.values()) for name in ("busy_s", "total_s"))
            found = {
                "samplers/count": float(len(self.members)),
                "samplers/lost": float(self.lost),
                "samplers/dropped": float(self.ledger.num_dropped),
                "samplers/ready": float(len(self.ledger.ready)),
                "samplers/waiting": float(len(self.ledger.waiting)),
            }
        now, (old_busy, old_total) = time.monotonic(), self.measured
        if total > old_total:  # not if one was lost meanwhile
            found["rollouter/idle_ratio"] = min(max(1 - (busy - old_busy) / (total - old_total), 0.0), 1.0)
        found["trainer/idle_ratio"] = min(self.waited_s / (now - self.measured_at), 1.0)
        self.waited_s, self.measured_at, self.measured = 0.0, now, (busy, total)
        return found

    def close(self) -> None:
        """Send the samplers home, and end those of this machine."""
        self.closing = True
        if self.ranks.is_main:
            self.thread.join()
            self.writer.close()

    # -----------------------------------------------------------------------------------------------------------------
    # Waiting, in the main thread

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition on what the thread changes. False if the run was asked to stop, or has no sampler."""
        start = time.monotonic()
        with self.lock:
            while not (holds := condition()) and not stop.requested():
                if self.failure is not None:
                    raise RuntimeError(f"samplers: {self.failure}") from self.failure
                if not self.members and time.monotonic() - self.alone_since > self.flags.sampler_timeout:
                    say(
                        f"no sampler for {self.flags.sampler_timeout:.0f} s (--sampler-timeout): the run saves and ends"
                    )
                    stop.ask(exit_code=1)
                self.lock.wait(0.2)
        self.waited_s += time.monotonic() - start
        return holds

    def _owing(self) -> list[str]:
        """Samplers that will send the probe of the newest weights, and have not yet."""
        now = time.monotonic()
        members = [m for m in self.members.values() if now - m.seen_at < SILENT_S]
        return [m.name for m in members if m.probe is None or m.probe.version != self.policy_version]

    def _unpacked(self, packed: Sequence[PackedSample], rows: Sequence[Row]) -> list[Sample]:
        return [unpack(x, row) for x, row in zip(packed, rows, strict=True)]

    def _load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; groups that no longer fit, as after --force-resume, are sampled again."""
        if not state:
            return
        ready: dict[int, Group] = {}
        for number, saved in state["groups"]:
            row = self.row(number)
            spans = [tuple(map(tuple, x["policy_versions"])) for x in saved]
            samples = [Sample(**x | {"policy_versions": span}) for x, span in zip(saved, spans, strict=True)]
            fits = all(list(s.prompt_ids) == list(row["prompt_ids"]) for s in samples)
            if fits and len(samples) == self.sampling.n:
                ready[number] = row, samples, self.scorer.submit(row, samples)
        self.ledger.load(state["ledger"], ready)

    # -----------------------------------------------------------------------------------------------------------------
    # The thread

    def _serve(self) -> None:
        try:
            last = time.monotonic()
            while not self.closing:
                messages = []
                while self.socket.poll(0 if messages else POLL_MS):
                    messages.append(self.socket.recv_multipart())
                with self.lock:
                    now = time.monotonic()
                    if (gap := now - last) > SILENT_S:  # this process was suspended: its samplers are not late
                        for member in self.members.values():
                            member.seen_at += gap
                    last = now
                    for identity, message in messages:
                        self._hear(identity.hex(), self.decoder.decode(message))
                    self._look_after()
                    self._assign()
                    self.lock.notify_all()
        except Exception as error:  # the main thread raises it
            self.failure = error
        for identity in self.members:
            self._send(identity, End("the run is complete" if self.failure is None else "the run has failed"))
        for local in self.locals:
            try:
                local.process.wait(5)
            except (subprocess.TimeoutExpired, AttributeError):
                if local.process is not None:
                    local.process.kill()
        self.socket.close(linger=1000)

    def _send(self, identity: str, message: Setup | Orders | End) -> None:
        self.socket.send_multipart([bytes.fromhex(identity), self.encoder.encode(message)])

    def _hear(self, identity: str, message: Join | Report) -> None:
        now = time.monotonic()
        if isinstance(message, Join):
            fits = message.protocol == PROTOCOL
            self._send(identity, self.setup if fits else End(f"it speaks protocol {message.protocol}, not {PROTOCOL}"))
            self.alone_since = max(self.alone_since, now)
            return
        if identity not in self.members:
            say(f"sampler {message.name} has joined")
        member = self.members.setdefault(identity, Member(message.name, now))
        member.seen_at, member.room, member.version, member.probe = now, message.room, message.version, message.probe
        member.busy_s, member.total_s = message.busy_s, message.total_s
        if message.problem:
            self._lose(identity, message.problem)
            return
        for group in message.groups:
            self._finish(identity, group.number, group.samples)
        held = [*self.evaluation.held_by(identity), *self.ledger.held_by(identity)]
        unknown = [n for n in held if n not in message.holding and now - member.sent_at[n] > LEASE_AGAIN_S]
        member.sent_at = {n: now if n in unknown else member.sent_at[n] for n in held}
        newer = self.weights if self.weights and self.weights["version"] > message.version else None
        forget = sorted(set(message.holding) - set(held))
        self._send(identity, Orders([self._lease(n) for n in unknown], forget, newer))

    def _finish(self, identity: str, number: int, packed: list[PackedSample]) -> None:
        """A group has come. It may be nobody's, or come twice: then nothing happens."""
        leases = self._leases_of(number)
        if leases.leased.get(number) == identity:
            row = self._row_of(number)
            samples = [unpack(x, row) for x in packed]
            leases.finish(number, identity, (row, samples, self.scorer.submit(row, samples)))

    def _leases_of(self, number: int) -> Leases[Group]:
        return self.ledger if number >= 0 else self.evaluation

    def _row_of(self, number: int) -> Row:
        return self.row(number) if number >= 0 else self.held_out[-1 - number]

    def _lease(self, number: int) -> Lease:
        """A number of the training prompts, or -1 - i for the held-out prompt i, as a sampler gets it."""
        sampling = self.sampling if number >= 0 else self.held_out_sampling
        row = row_of(
            self._row_of(number), whole=bool(self.setup.environment["environment"] or self.setup.environment["tools"])
        )
        return Lease(number, row, vars(sampling), derive_seed(self.setup.seed, number), self.ledger.version)

    def _assign(self) -> None:
        """Hand out what waits, to those who have the most room left."""
        new: dict[str, list[int]] = {}
        for leases, n in ((self.evaluation, self.held_out_sampling.n), (self.ledger, self.sampling.n)):
            while leases.waiting and self.members:
                held = {x: len(member.sent_at) / max(member.room // n, 1) for x, member in self.members.items()}
                identity = min(held, key=held.get)
                if held[identity] >= 1:
                    break
                number = leases.lease(identity)
                self.members[identity].sent_at[number] = time.monotonic()
                new.setdefault(identity, []).append(number)
        for identity, numbers in new.items():
            member = self.members[identity]
            newer = self.weights if self.weights and self.weights["version"] > member.version else None
            self._send(identity, Orders([self._lease(n) for n in numbers], [], newer))

    def _look_after(self) -> None:
        """Lose samplers that are silent or dead, and start those of this machine."""
        now = time.monotonic()
        for identity, member in list(self.members.items()):
            if now - member.seen_at > self.flags.sampler_timeout:
                self._lose(identity, f"it has said nothing for {now - member.seen_at:.0f} s (--sampler-timeout)")
        for local in self.locals:
            if local.process is not None and local.process.poll() is None:
                continue
            if local.process is not None:
                ended = [x for x, m in self.members.items() if m.name.endswith(f":{local.process.pid}")]
                for identity in ended:
                    self._lose(identity, f"its process has ended with {local.process.returncode}")
                if not ended and local.starts <= MAX_RESTARTS:
                    say(f"a sampler has ended with {local.process.returncode} before it was ready")
            if local.starts <= MAX_RESTARTS:
                local.starts += 1
                local.process = self._start(local.device)

    def _lose(self, identity: str, why: str) -> None:
        member, held = self.members.pop(identity), len(self.ledger.held_by(identity))
        self.lost += 1
        dropped = self.ledger.give_back(identity)
        failed = self.evaluation.give_back(identity)
        say(f"sampler {member.name} is lost: {why}; {held} prompts are handed out again", sys.stderr)
        if dropped:
            say(f"prompts {dropped} are dropped: their samplers were lost each time", sys.stderr)
        if failed:
            raise RuntimeError(f"held-out prompts {[-1 - n for n in failed]}: their samplers were lost each time")
        if not self.members:
            self.alone_since = time.monotonic()

    def _start(self, device: str | None) -> subprocess.Popen:
        """Start a sampler on this machine."""
        kept = {name: x for name, x in os.environ.items() if name not in RANK and not name.startswith("TORCHELASTIC")}
        own = {TOKEN: self.token, PARENT: str(os.getpid())} | (
            {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        )
        code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from rl.sampler import run; run()"
        command = [sys.executable, "-c", code, "--connect", self.address.replace("0.0.0.0", "127.0.0.1")]
        options = dict(stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
        return subprocess.Popen(command, env=kept | own, **options)


RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def describe_run(
    model: str,
    rollout: Rollout,
    environment: EnvironmentFlags,
    rows: Sequence[Row],
    sampling: Sampling,
    *,
    longest: int,
    seed: int,
) -> Setup:
    """What samplers have to know of a run; rows, that it trains on. Raises ValueError for flags that they do not have."""
    if (size := rollout.tensor_model_parallel_size) != 1:
        raise ValueError(
            f"--tensor-model-parallel-size {size}: a sampler has one GPU; leave it out, and start more samplers"
        )
    probes = [row_of(row, whole=False) for row in rows[:NUM_PROBES]]
    probe_sampling = vars(replace(sampling, n=1, max_tokens=min(PROBE_TOKENS, sampling.max_tokens)))
    flags = vars(replace(rollout, free_cache_engine=False))
    return Setup(model, flags, vars(environment), longest, [*sampling.stop_token_ids], probes, probe_sampling, seed)


def _devices(flags: SamplerFlags, ranks: Ranks) -> list[str | None]:
    """A GPU for each sampler that the run starts, None on a machine without."""
    if ranks.device.type == "cpu":
        return [None] * flags.samplers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    trainers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    devices = list(flags.sampler_devices or visible[trainers:])
    if len(devices) < flags.samplers:
        raise ValueError(
            f"--samplers {flags.samplers}: {len(devices)} of this machine's {len(visible)} GPUs have no trainer; start "
            "fewer trainers with torchrun --nproc_per_node, or name GPUs with --sampler-devices"
        )
    return devices[: flags.samplers]


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)

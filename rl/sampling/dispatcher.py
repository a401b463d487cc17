"""Hands prompts out to samplers and takes their groups in: a thread of rank 0, which works while others train.

It holds `lock` for bookkeeping, never to wait. Which prompt is where, and how old tokens may be: ledger.py. What is
said: protocol.py. The other side: sampler.py.
"""

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch
import zmq

from rl import children
from rl.console import say
from rl.data.order import derive_seed
from rl.data.rows import Row
from rl.data.types import Sample, Sampling
from rl.flags import Count, Free, Seconds
from rl.sampling.ledger import Leases, Ledger
from rl.sampling.protocol import (
    PARENT,
    PROTOCOL,
    TOKEN,
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
    name_of,
    row_of,
    unpack,
)
from rl.sampling.weight_network import Outbox
from rl.scoring.pool import Ticket

POLL_MS = 20
LEASE_AGAIN_S = 3.0  # a lease that its sampler does not know was lost on the way
SILENT_S = 5.0  # nobody waits for the probe of a sampler that has said nothing for so long
START_S = 900.0  # in which a sampler builds its engine
MAX_RESTARTS = 3  # of a sampler on this machine
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class SamplerFlags:
    """samplers: processes of their own, which sample while the trainers train"""

    samplers: Free[Count] = 1  # that this run starts on its first machine; others may join at any time
    # GPUs of these samplers, as CUDA_VISIBLE_DEVICES names them; default: those that no trainer uses
    sampler_devices: Free[tuple[str, ...] | None] = None
    max_staleness: Count = 1  # versions of weights that a token may be older than those that train on it (S)
    sampler_address: Free[str] = "tcp://127.0.0.1:*"  # where rank 0 listens; tcp://0.0.0.0:5555 lets other machines in
    # seconds without a word after which a sampler is lost; a run without any for so long ends
    sampler_timeout: Free[Seconds] = 60.0
    # how samplers get weights: from a file; over the network by gloo (TCP), or by NCCL if each has a GPU of its own
    weights_transfer: Free[Literal["host", "gloo", "nccl"]] = "host"
    # folder for that file, which all machines see; default: shared memory, for samplers on the first machine
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


class Dispatcher:
    """See above; `start` it. Args: row, gives the training prompt of a number; sampling, of these; submit, takes a row
    and its samples when they are complete; devices, a GPU for each sampler to start here, or None; device, of rank 0.

    Others read and change its ledger, evaluation, weights and members under `lock`, which also wakes who waits for a
    change. `failure` is what has ended the thread.
    """

    def __init__(
        self,
        flags: SamplerFlags,
        setup: Setup,
        ledger: Ledger[Group],
        row: Callable[[int], Row],
        sampling: Sampling,
        submit: Callable[[Row, list[Sample]], Ticket],
        devices: Sequence[str | None],
        device: torch.device,
    ):
        self.flags, self.setup, self.ledger, self.row, self.submit = flags, setup, ledger, row, submit
        self.sampling = sampling
        self.whole_rows = bool(setup.environment["environment"] or setup.environment["tools"])
        self.evaluation: Leases[Group] = Leases()
        self.held_out: Sequence[Row] = ()
        self.held_out_sampling = sampling
        self.weights: dict[str, Any] | None = None  # the newest: see weight_files.py
        self.members: dict[str, Member] = {}  # by the hexadecimal name of their connection
        self.locals = [Local(device) for device in devices]
        self.lost = 0
        self.alone_since = time.monotonic() + START_S - flags.sampler_timeout
        self.lock, self.closing = threading.Condition(), False
        self.failure: Exception | None = None
        self.encoder, self.decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToRun)
        self.token = os.environ.get(TOKEN) or secrets.token_hex(16)
        self.socket, self.address = listen(flags.sampler_address, self.token, zmq.Context())
        self.outbox: Outbox | None = None
        if flags.weights_transfer != "host":
            self.outbox = Outbox(flags.weights_transfer, self.address, device, flags.sampler_timeout)
        self.thread = threading.Thread(target=self._serve, name="samplers", daemon=True)

    def evaluate(self, rows: Sequence[Row], sampling: Sampling) -> None:
        """Let samplers answer held-out prompts, before others. Their numbers are below 0, and new for each version, so
        that no answer of an earlier one is taken for theirs.
        """
        with self.lock:
            self.held_out, self.held_out_sampling = rows, sampling
            first = -len(rows) * (self.ledger.version + 1)
            self.evaluation = Leases(range(first, first + len(rows)))

    def close(self) -> None:
        """Send the samplers home, and end those of this machine."""
        self.closing = True
        self.thread.join()

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
                        self.alone_since += gap
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
        for process in filter(None, (local.process for local in self.locals)):
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
        self.socket.close(linger=1000)

    def _send(self, identity: str, message: Setup | Orders | End) -> None:
        self.socket.send_multipart([bytes.fromhex(identity), self.encoder.encode(message)])

    def _hear(self, identity: str, message: Join | Report) -> None:
        now = time.monotonic()
        if isinstance(message, Join):
            fits = message.protocol == PROTOCOL
            self._send(identity, self.setup if fits else End(f"it speaks protocol {message.protocol}, not {PROTOCOL}"))
            self.alone_since = now + START_S - self.flags.sampler_timeout  # it builds its engine now
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
        self._order(identity, unknown, forget=sorted(set(message.holding) - set(held)))

    def _order(self, identity: str, numbers: list[int], *, forget: Sequence[int] = ()) -> None:
        """Send leases and what to forget, and tell of weights that are newer than the sampler's."""
        newer = self.weights if self.weights and self.weights["version"] > self.members[identity].version else None
        if newer is not None and self.outbox is not None:
            newer = self.outbox.offer(identity, newer)
        self._send(identity, Orders([self._lease(n) for n in numbers], list(forget), newer))

    def _finish(self, identity: str, number: int, packed: list[PackedSample]) -> None:
        """A group has come. It may be nobody's, or come twice: then nothing happens."""
        leases = self.ledger if number >= 0 else self.evaluation
        if leases.leased.get(number) == identity:
            row = self._row_of(number)
            samples = [unpack(x, row) for x in packed]
            leases.finish(number, identity, (row, samples, self.submit(row, samples)))

    def _row_of(self, number: int) -> Row:
        return self.row(number) if number >= 0 else self.held_out[number % len(self.held_out)]

    def _lease(self, number: int) -> Lease:
        """The prompt of a number as a sampler gets it."""
        sampling = self.sampling if number >= 0 else self.held_out_sampling
        row = row_of(self._row_of(number), whole=self.whole_rows)
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
            self._order(identity, numbers)

    def _look_after(self) -> None:
        """Lose samplers that are silent or dead, and start those of this machine."""
        now = time.monotonic()
        for identity, member in list(self.members.items()):
            if now - member.seen_at > self.flags.sampler_timeout:
                self._lose(identity, f"it has said nothing for {now - member.seen_at:.0f} s (--sampler-timeout)")
        for local in self.locals:
            if (process := local.process) is not None:
                if process.poll() is None:
                    continue
                name, local.process = name_of(process.pid), None
                why = f"its process has ended with {process.returncode}"
                known = [identity for identity, member in self.members.items() if member.name == name]
                for identity in known:
                    self._lose(identity, why)
                if not known:
                    say(f"sampler {name}: {why}", sys.stderr)
                if local.starts > MAX_RESTARTS and not self.members:
                    self.alone_since = min(self.alone_since, now)  # nobody builds an engine any more
            if local.starts <= MAX_RESTARTS:
                local.starts += 1
                local.process = self._start(local.device)

    def _lose(self, identity: str, why: str) -> None:
        member, held = self.members.pop(identity), len(self.ledger.held_by(identity))
        self.lost += 1
        if self.outbox is not None:
            self.outbox.sending.pop(identity, None)
        dropped = self.ledger.give_back(identity)
        failed = self.evaluation.give_back(identity)
        say(f"sampler {member.name} is lost: {why}; {held} prompts are handed out again", sys.stderr)
        if dropped:
            say(f"prompts {dropped} are dropped: their samplers were lost each time", sys.stderr)
        if failed:
            rows = [self._row_of(number)["row_index"] for number in failed]
            raise RuntimeError(f"held-out rows {rows}: their samplers were lost each time")
        if not self.members:
            self.alone_since = time.monotonic()

    def _start(self, device: str | None) -> subprocess.Popen:
        """Start a sampler on this machine."""
        of_a_rank = {name for name in os.environ if name in OF_A_RANK or name.startswith("TORCHELASTIC")}
        kept = {name: x for name, x in os.environ.items() if name not in of_a_rank}
        own = {TOKEN: self.token, PARENT: str(os.getpid())}
        if device is not None:
            own["CUDA_VISIBLE_DEVICES"] = device
        here = self.address.replace("0.0.0.0", "127.0.0.1")
        return children.start("rl.sampler.run", "--connect", here, env=kept | own)

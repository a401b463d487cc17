"""Hands prompts out to samplers and takes their groups in: a thread of rank 0, which works while others train.

It holds `lock` for bookkeeping, never to wait. Which prompt is where, and how old tokens may be: ledger.py. What is
said: protocol.py. The other side: sampler.py.
"""

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import zmq

from extras.samplers import SILENT_S, SamplerFlags, protocol
from extras.samplers.ledger import Leases, Ledger, assign
from extras.samplers.weight_network import Outbox
from rl import children
from rl.console import say
from rl.data.order import derive_seed
from rl.data.rows import Row
from rl.data.types import Sample, Sampling
from rl.scoring.pool import Ticket

POLL_MS = 20
START_S = 900.0  # in which a sampler builds its engine
MAX_RESTARTS = 3  # of a sampler on this machine, in a row in which it finishes no group
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Member:
    """A sampler that has reported."""

    name: str
    seen_at: float  # when it last said something
    busy_s: float  # see `Report`
    total_s: float
    room: int = 1  # responses at a time
    version: int = -1  # of its weights
    probe: tuple[int, list[Sample]] = (-1, [])  # version and samples of `protocol.Probe`
    holding: set[int] = field(default_factory=set)  # leases that it knew when it last said something


@dataclass
class Local:
    """A sampler that this run starts, and starts again."""

    device: str | None  # None: no GPU
    process: subprocess.Popen | None = None
    starts: int = 0  # since it has finished a group
    name: str = ""  # how it calls itself


Group = tuple[Row, list[Sample], Ticket]
Groups = dict[int, list[Sample]]


class Dispatcher:
    """See above; `start` it. Args: row, gives the training prompt of a number; sampling, of these; submit, takes a row
    and its samples when they are complete; devices, a GPU for each sampler to start here, or None; device, of rank 0;
    vocabulary, how many tokens the model knows.

    Others read and change its ledger, evaluation, weights and members under `lock`, which also wakes who waits for a
    change. `failure` is what has ended the thread.
    """

    def __init__(
        self,
        flags: SamplerFlags,
        setup: protocol.Setup,
        ledger: Ledger[Group],
        row: Callable[[int], Row],
        sampling: Sampling,
        submit: Callable[[Row, list[Sample]], Ticket],
        devices: Sequence[str | None],
        device: torch.device,
        vocabulary: int,
    ):
        self.flags, self.setup, self.ledger, self.row, self.submit = flags, setup, ledger, row, submit
        self.sampling, self.vocabulary = sampling, vocabulary
        self.whole_rows = bool(setup.environment.environment or setup.environment.tools)
        self.evaluation: Leases[Group] = Leases()
        self.held_out: Sequence[Row] = ()
        self.dropped: set[int] = set()  # places of held-out rows that lost their sampler while it had nothing else
        self.held_out_sampling = sampling
        self.weights: dict[str, Any] | None = None  # the newest: see weight_files.py
        self.members: dict[str, Member] = {}  # by the hexadecimal name of their connection
        self.locals = [Local(device) for device in devices]
        self.refused: set[str] = set()  # connections that nobody listens to any more
        self.lost, self.busy_s, self.total_s = 0, 0.0, 0.0  # times of all samplers, also of those that are gone
        self.alone_since = time.monotonic() + START_S - flags.sampler_timeout
        self.lock, self.closing = threading.Condition(), False
        self.failure: Exception | None = None
        self.encoder, self.decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(protocol.ToRun)
        self.token = os.environ.get(protocol.TOKEN) or secrets.token_hex(16)
        self.socket, self.address = protocol.listen(flags.sampler_address, self.token, zmq.Context())
        way, patience_s = flags.weights_transfer, flags.sampler_timeout
        self.outbox = None if way == "host" else Outbox(way, self.address, device, patience_s)
        self.thread = threading.Thread(target=self._serve, name="samplers", daemon=True)

    def evaluate(self, rows: Sequence[Row], sampling: Sampling) -> None:
        """Let samplers answer held-out prompts, before others. Their numbers are below 0, and new for each version, so
        that no answer of an earlier one is taken for theirs.
        """
        with self.lock:
            self.held_out, self.held_out_sampling = rows, sampling
            first = -len(rows) * (self.ledger.version + 1)
            self.evaluation = Leases(first + i for i in range(len(rows)) if i not in self.dropped)

    def heard(self) -> dict[str, Member]:
        """The samplers that have lately said something; others may be dead."""
        now = time.monotonic()
        return {identity: member for identity, member in self.members.items() if now - member.seen_at < SILENT_S}

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
                    messages.append(self.socket.recv_multipart(copy=False))
                with self.lock:
                    now = time.monotonic()
                    if (gap := now - last) > SILENT_S:  # this process was suspended: its samplers are not late
                        self.alone_since += gap
                        for member in self.members.values():
                            member.seen_at += gap
                    last = now
                    for identity, *frames in messages:
                        self._hear(identity.bytes.hex(), frames)
                    self._look_after()
                    self._assign()
                    self.lock.notify_all()
        except Exception as error:  # the main thread lets the run save and end
            self.failure = error
        for identity in self.members:
            self._send(identity, protocol.End("the run is complete" if self.failure is None else "the run has failed"))
        for process in filter(None, (local.process for local in self.locals)):
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
        self.socket.close(linger=1000)

    def _send(self, identity: str, message: protocol.Setup | protocol.Orders | protocol.End) -> None:
        self.socket.send_multipart([bytes.fromhex(identity), self.encoder.encode(message)])

    def _hear(self, identity: str, frames: list[zmq.Frame]) -> None:
        """Take a message. Whoever sends what no sampler of this run would say is sent home and not heard any more."""
        if identity in self.refused:
            return
        try:
            if len(frames) != 1:
                raise ValueError(f"it has {len(frames)} parts")
            message = self.decoder.decode(frames[0].buffer)
            if isinstance(message, protocol.Join):
                if message.protocol != protocol.PROTOCOL:
                    raise ValueError(f"it speaks protocol {message.protocol}, not {protocol.PROTOCOL}")
                self._send(identity, self.setup)
                self.alone_since = time.monotonic() + START_S - self.flags.sampler_timeout  # it builds its engine now
                return
            groups, probe = self._samples_of(identity, message)
        except (ValueError, msgspec.DecodeError) as error:
            self.refused.add(identity)
            self._send(identity, protocol.End(str(error)))
            if identity in self.members:
                self._lose(identity, f"its message is wrong: {error}")
            else:
                address = frames[0].get("Peer-Address") if frames else "an unknown address"
                say(f"a connection from {address} is refused: {error}", sys.stderr)
            return
        self._note(identity, message, groups, probe)

    def _samples_of(self, identity: str, report: protocol.Report) -> tuple[Groups, list[Sample]]:
        """The groups of a report that are leased to its sampler, and its probe. A group may also be nobody's, or come
        twice: then nothing happens. Raises ValueError if a number cannot be right.
        """
        if report.run != self.setup.run:
            raise ValueError("it has joined another run, or an earlier process of this one")
        newest = self.ledger.version if self.weights else -1
        if not -1 <= report.version <= newest:
            raise ValueError(f"it has weights of version {report.version}, and the newest are those of {newest}")
        groups: Groups = {}
        for number, samples in ((group.number, group.samples) for group in report.groups):
            leases, sampling = self._pool(number)
            if leases.leased.get(number) == identity:
                oldest = max(self.ledger.oldest(number), 0) if number >= 0 else newest
                rows, versions = [self._row_of(number)] * sampling.n, range(oldest, newest + 1)
                groups[number] = self._unpack(samples, rows, sampling, versions)
        if report.probe is None:
            return groups, []
        if not 0 <= (version := report.probe.version) <= newest:
            raise ValueError(f"it has sampled with weights of version {version}, and the newest are those of {newest}")
        rows, sampling, versions = self.setup.probes, self.setup.probe_sampling, range(version, version + 1)
        return groups, self._unpack(report.probe.samples, rows, sampling, versions)

    def _unpack(
        self, packed: list[protocol.PackedSample], rows: Sequence[Row], sampling: Sampling, versions: range
    ) -> list[Sample]:
        if len(packed) != len(rows):
            raise ValueError(f"{len(packed)} responses have come, where {len(rows)} are due")
        return [protocol.unpack(x, rows[i], sampling, self.vocabulary, versions) for i, x in enumerate(packed)]

    def _pool(self, number: int) -> tuple[Leases[Group], Sampling]:
        """Where a number belongs, and how its prompt is answered."""
        return (self.ledger, self.sampling) if number >= 0 else (self.evaluation, self.held_out_sampling)

    def _note(self, identity: str, report: protocol.Report, groups: Groups, probe: list[Sample]) -> None:
        """Take what a sampler says of itself, and answer it."""
        now = time.monotonic()
        if identity not in self.members:
            say(f"sampler {report.name} has joined")
            for leases in (self.evaluation, self.ledger):
                leases.forgive(identity)
        member = self.members.setdefault(identity, Member(report.name, now, report.busy_s, report.total_s))
        self.busy_s += report.busy_s - member.busy_s
        self.total_s += report.total_s - member.total_s
        member.seen_at, member.room, member.version = now, report.room, report.version
        member.busy_s, member.total_s, member.holding = report.busy_s, report.total_s, set(report.holding)
        if report.probe is not None:
            member.probe = report.probe.version, probe
        for number, samples in groups.items():
            row = self._row_of(number)
            self._pool(number)[0].finish(number, identity, (row, samples, self.submit(row, samples)))
            for local in self.locals:
                local.starts = 1 if local.name == member.name else local.starts
        for leases in (self.evaluation, self.ledger):
            leases.confirm(identity, report.begun)
        if report.problem:
            self._lose(identity, report.problem, blame=not report.was_asked)
        else:
            self._order(identity)

    def _order(self, identity: str) -> None:
        """Send a sampler the leases that it does not know, what to begin and what to forget, and newer weights."""
        member, pools = self.members[identity], (self.evaluation, self.ledger)
        held = [number for leases in pools for number in leases.held_by(identity)]
        begin = [number for leases in pools for number in leases.confirmed.intersection(held)]
        newer = self.weights if self.weights and self.weights["version"] > member.version else None
        if newer is not None and self.outbox is not None:
            newer = self.outbox.offer(identity, newer)
        new, old = [self._lease(n) for n in held if n not in member.holding], member.holding.difference(held)
        self._send(identity, protocol.Orders(new, begin, sorted(old), newer))

    def _row_of(self, number: int) -> Row:
        return self.row(number) if number >= 0 else self.held_out[number % len(self.held_out)]

    def _lease(self, number: int) -> protocol.Lease:
        """The prompt of a number as a sampler gets it."""
        row = json.dumps(protocol.row_of(self._row_of(number), whole=self.whole_rows), default=str)  # such as dates
        seed = derive_seed(self.setup.seed, number)
        return protocol.Lease(number, row, self._pool(number)[1], seed, self.ledger.version)

    def _assign(self) -> None:
        """Lease what waits to samplers."""
        members = self.heard()
        rooms = {identity: member.room for identity, member in members.items()}
        idle = {identity for identity, member in members.items() if not member.holding}
        pools = (self.evaluation, self.held_out_sampling.n), (self.ledger, self.sampling.n)
        for identity in {identity for identity, _ in assign(pools, rooms, idle)}:
            self._order(identity)

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
                local.process, why = None, f"its process has ended with {process.returncode}"
                known = [identity for identity, member in self.members.items() if member.name == local.name]
                for identity in known:
                    self._lose(identity, why, blame=process.returncode != 0)  # 0: it was asked to end
                if not known:
                    say(f"sampler {local.name}: {why}", sys.stderr)
                if local.starts > MAX_RESTARTS and not self.members:
                    self.alone_since = min(self.alone_since, now)  # nobody builds an engine any more
            if local.starts <= MAX_RESTARTS:
                local.starts += 1
                local.process = self._start(local.device)
                local.name = protocol.name_of(local.process.pid)

    def _lose(self, identity: str, why: str, *, blame: bool = True) -> None:
        """Forget a sampler, and hand its prompts out again. Args: blame, whether one of them may be the reason."""
        member = self.members.pop(identity)
        self.lost += 1
        if self.outbox is not None:
            self.outbox.sending.pop(identity, None)
        if not self.members:
            self.alone_since = time.monotonic()
        pools = (self.evaluation, self.ledger)
        held = sum(len(leases.held_by(identity)) for leases in pools)
        dropped = [number for leases in pools for number in leases.give_back(identity, blame=blame)]
        say(f"sampler {member.name} is lost: {why}; {held - len(dropped)} prompts are handed out again", sys.stderr)
        for number in dropped:
            row = self._row_of(number)["row_index"]
            what = f"prompt {number}, row {row} of --train-files," if number >= 0 else f"row {row} of --val-files"
            say(f"{what} is dropped: its samplers were lost each time, the last one had nothing else", sys.stderr)
            for local in self.locals:  # that was not their fault
                local.starts = min(local.starts, 1)
        self.dropped |= {number % len(self.held_out) for number in dropped if number < 0}

    def _start(self, device: str | None) -> subprocess.Popen:
        """Start a sampler on this machine."""
        env = {x: os.environ[x] for x in os.environ if x not in OF_A_RANK and not x.startswith("TORCHELASTIC")}
        env |= {protocol.TOKEN: self.token, protocol.PARENT: str(os.getpid())}
        env |= {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        here = self.address.replace("0.0.0.0", "127.0.0.1")
        return children.start("extras.samplers.sampler.run", "--connect", here, env=env)

"""Hands prompts out to samplers and takes their groups in: a thread of rank 0, which works while others train.

It holds `lock` for bookkeeping, never to wait or to read files. ledger.py knows which prompt is where, and how old
tokens may be. protocol.py has what is said, and sampler.py is the other side.
"""

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import zmq

from extras import families, images
from extras.samplers import SILENT_S, SamplerFlags, protocol
from extras.samplers.ledger import assign
from extras.samplers.local import LocalSamplers, devices_of
from extras.samplers.prompts import Prompts
from extras.samplers.weight_network import Outbox
from rl.console import say
from rl.data.order import derive_seed
from rl.data.rows import Row
from rl.data.types import Sample, Sampling
from rl.ranks import Ranks

POLL_MS = 20
START_S = 900.0  # in which a sampler builds its engine


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
    images: set[int] = field(default_factory=set)  # numbers of the images that it has, those of earlier leases too


Groups = dict[int, list[Sample]]  # by number


class Dispatcher:
    """See above. `start` its thread. Args: setup, which samplers get; prompts, that they answer; submit, takes a row
    and its samples when they are complete; ranks, of this process.

    Others read and change its prompts, weights and members under `lock`, which also wakes who waits for a change.
    `failure` is what has ended the thread. Raises ValueError, naming the flag, if a flag does not fit the machine.
    """

    def __init__(
        self,
        flags: SamplerFlags,
        setup: protocol.Setup,
        prompts: Prompts,
        submit: Callable[[Row, list[Sample]], None],
        ranks: Ranks,
    ):
        self.flags, self.setup, self.prompts, self.submit = flags, setup, prompts, submit
        self.sends_whole_rows = any((setup.environment.environment, setup.environment.tools, setup.environment.agent))
        self.experts = families.shape_of(setup.model) if setup.rollout.router_replay else None
        self.weights: dict[str, Any] | None = None  # the newest, see weight_files.py
        self.members: dict[str, Member] = {}  # by the hexadecimal name of their connection
        self.refused: set[str] = set()  # connections that nobody listens to any more
        self.num_lost = 0
        self.busy_s, self.total_s = 0.0, 0.0  # of all samplers, also of those that are gone
        self.give_up_at = time.monotonic() + START_S  # the run ends then if there is no sampler
        self.lock, self.closing = threading.Condition(), False
        self.listened_at = time.monotonic()  # when the thread last took messages
        self.orders: list[tuple[str, protocol.Orders]] = []  # that the thread sends when it has released the lock
        self.failure: Exception | None = None
        self.encoder, self.decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(protocol.ToRun)
        self.token = os.environ.get(protocol.TOKEN) or secrets.token_hex(16)
        devices = devices_of(flags, setup.rollout.tensor_model_parallel_size, ranks)
        self.socket, self.address = protocol.listen(flags.sampler_address, self.token, zmq.Context())
        self.locals = LocalSamplers(devices, self.address, self.token)
        self.outbox: Outbox | None = None
        if flags.weights_transfer != "host":
            self.outbox = Outbox(flags.weights_transfer, self.address, ranks.device, flags.sampler_timeout)
        self.thread = threading.Thread(target=self._serve, name="samplers", daemon=True)

    def heard(self) -> dict[str, Member]:
        """The samplers that had lately said something when the thread last listened. Others may be dead."""
        return {name: member for name, member in self.members.items() if self.listened_at - member.seen_at < SILENT_S}

    def close(self) -> None:
        """Send the samplers home, and end those of this machine."""
        self.closing = True
        self.thread.join()

    def _serve(self) -> None:
        try:
            while not self.closing:
                messages = []
                while self.socket.poll(0 if messages else POLL_MS):
                    messages.append(self.socket.recv_multipart(copy=False))
                with self.lock:
                    now = time.monotonic()
                    # If this process was suspended, or a disk was slow, the samplers are not late.
                    if (gap := now - self.listened_at) > SILENT_S:
                        self.give_up_at += gap
                        for member in self.members.values():
                            member.seen_at += gap
                    self.listened_at = now
                    for identity, *frames in messages:
                        self._hear(identity.bytes.hex(), frames)
                    self._look_after()
                    self._assign()
                    orders, self.orders = self.orders, []
                    self.lock.notify_all()
                for identity, order in orders:
                    for lease in order.leases:
                        lease.images = images.of_process().encoded(lease.images) if lease.images else {}
                    self._send(identity, order)
        except Exception as error:  # the main thread lets the run save and end
            self.failure = error
        for identity in self.members:
            self._send(identity, protocol.End("the run is complete" if self.failure is None else "the run has failed"))
        self.locals.close()
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
                self.give_up_at = time.monotonic() + START_S  # it builds its engine now
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
        twice. Then nothing happens. Raises ValueError if a number cannot be right.
        """
        if report.run != self.setup.run:
            raise ValueError("it has joined another run, or an earlier process of this one")
        newest = self.prompts.ledger.version if self.weights else -1
        if not -1 <= report.version <= newest:
            raise ValueError(f"it has weights of version {report.version}, and the newest are those of {newest}")
        groups: Groups = {}
        for number, samples in ((group.number, group.samples) for group in report.groups):
            if self.prompts.leases(number).leased.get(number) == identity:
                oldest = max(self.prompts.ledger.oldest(number), 0) if number >= 0 else newest
                sampling = self.prompts.sampling(number)
                rows = [self.prompts.row(number)] * sampling.n
                groups[number] = self._unpack(samples, rows, sampling, range(oldest, newest + 1))
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
        vocabulary = self.prompts.vocabulary
        samples = [protocol.unpack(x, rows[i], sampling, vocabulary, versions) for i, x in enumerate(packed)]

        def with_experts(sample: Sample, x: protocol.PackedSample) -> Sample:
            rows = tuple(map(with_experts, sample.rows, x.rows))
            return replace(protocol.with_experts(sample, x.experts, self.experts), rows=rows)

        return list(map(with_experts, samples, packed))

    def _note(self, identity: str, report: protocol.Report, groups: Groups, probe: list[Sample]) -> None:
        """Take what a sampler says of itself, and answer it."""
        now = time.monotonic()
        if identity not in self.members:
            say(f"sampler {report.name} has joined")
            for leases in self.prompts.both:
                leases.forgive(identity)
        member = self.members.setdefault(identity, Member(report.name, now, report.busy_s, report.total_s))
        self.busy_s += report.busy_s - member.busy_s
        self.total_s += report.total_s - member.total_s
        member.seen_at, member.room, member.version = now, report.room, report.version
        member.busy_s, member.total_s, member.holding = report.busy_s, report.total_s, set(report.holding)
        if report.probe is not None:
            member.probe = report.probe.version, probe
        for number, samples in groups.items():
            row = self.prompts.row(number)
            self.submit(row, samples)
            self.prompts.leases(number).finish(number, identity, (row, samples))
            self.locals.has_finished(member.name)
        for leases in self.prompts.both:
            leases.confirm(identity, report.begun)
        if report.problem:
            self._lose(identity, report.problem, blame=not report.was_asked)
        else:
            self._order(identity)

    def _order(self, identity: str) -> None:
        """Note what to send to a sampler: leases that it does not know, what to begin and to forget, newer weights."""
        member, held = self.members[identity], self.prompts.held_by(identity)
        begin = [number for leases in self.prompts.both for number in leases.confirmed.intersection(held)]
        newer = self.weights if self.weights and self.weights["version"] > member.version else None
        if newer is not None and self.outbox is not None:
            newer = self.outbox.offer(identity, newer)
        for number in member.holding.intersection(held):
            member.images.update(self.prompts.row(number).get("images") or ())
        new = [self._lease(number, member) for number in held if number not in member.holding]
        forget = sorted(member.holding.difference(held))
        self.orders.append((identity, protocol.Orders(new, begin, forget, newer)))

    def _lease(self, number: int, member: Member) -> protocol.Lease:
        """The prompt of a number as a sampler gets it, with the numbers of the images that it does not have. What their
        files hold is read when the lease is sent.
        """
        row = self.prompts.row(number)
        unknown = dict.fromkeys(set(row.get("images") or ()) - member.images, b"")
        text = json.dumps(protocol.row_of(row, whole=self.sends_whole_rows), default=str)  # str: such as dates
        seed, version = derive_seed(self.setup.seed, number), self.prompts.ledger.version
        return protocol.Lease(number, text, self.prompts.sampling(number), seed, version, unknown)

    def _assign(self) -> None:
        """Lease what waits to samplers."""
        members = self.heard()
        rooms = {identity: member.room for identity, member in members.items()}
        idle = {identity for identity, member in members.items() if not member.holding}
        prompts = self.prompts
        sizes = (prompts.evaluation, prompts.held_out_sampling.n), (prompts.ledger, prompts.work.sampling.n)
        for identity in {identity for identity, _ in assign(sizes, rooms, idle)}:
            self._order(identity)

    def _look_after(self) -> None:
        """Lose samplers that are silent or dead, and start those of this machine."""
        now = time.monotonic()
        for identity, member in list(self.members.items()):
            if now - member.seen_at > self.flags.sampler_timeout:
                self._lose(identity, f"it has said nothing for {now - member.seen_at:.0f} s (--sampler-timeout)")
        for local, exit_code in self.locals.ended():
            why = f"its process has ended with {exit_code}"
            known = [identity for identity, member in self.members.items() if member.name == local.name]
            for identity in known:
                self._lose(identity, why, blame=exit_code != 0)  # 0: it was asked to end
            if not known:
                say(f"sampler {local.name}: {why}", sys.stderr)
            if local.is_given_up and not self.members:  # nobody builds an engine any more
                self.give_up_at = min(self.give_up_at, now + self.flags.sampler_timeout)
        self.locals.start_missing()

    def _lose(self, identity: str, why: str, *, blame: bool = True) -> None:
        """Forget a sampler, and hand its prompts out again. Args: blame, whether one of them may be the reason."""
        member = self.members.pop(identity)
        self.num_lost += 1
        if self.outbox is not None:
            self.outbox.sending.pop(identity, None)
        if not self.members:
            self.give_up_at = time.monotonic() + self.flags.sampler_timeout
        num_held = len(self.prompts.held_by(identity))
        dropped = self.prompts.give_back(identity, blame=blame)
        say(f"sampler {member.name} is lost: {why}; {num_held - len(dropped)} prompts are handed out again", sys.stderr)
        for number in dropped:
            what = self.prompts.describe(number)
            say(f"{what} is dropped: its samplers were lost each time, the last one had nothing else", sys.stderr)
            self.locals.forgive()

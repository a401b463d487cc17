"""A sampler: a process of its own that answers prompts for train_async.py, with one engine.

    GLASSRL_SAMPLER_TOKEN=TOKEN python -m extras.samplers --connect tcp://HOST:PORT

The run says which model and which flags. Between two decoding steps the sampler takes new weights, if there are any.
Responses in flight go on with them after the tokens that they have. It ends when the run ends or cannot be reached.
"""

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

from extras import images
from extras.agents import open_partner
from extras.samplers import protocol, world
from extras.samplers.connection import Connection, Gone
from extras.samplers.inbox import Inbox
from extras.systems import die_with_parent
from rl.console import say
from rl.data.order import derive_seed
from rl.data.template import Rendering, load_tokenizer
from rl.flags import Seconds
from rl.ranks import Ranks, init_ranks
from rl.sampling.engines import Engine, make_engine
from rl.sampling.loop import Loop, Partner

REPORT_EVERY_S = 1.0
SEND_AGAIN_S = 5.0  # what the run has not said that it has
IDLE_WAIT_S = 0.05
GROUPS_OF_A_REPORT = 16  # so that a message does not become too large
EXPERTS_OF_A_REPORT = protocol.LARGEST // 8  # bytes, for the same reason, unless one group has more


@dataclass(frozen=True)
class Args:
    """Samples for a run of train_async.py, which says where, and with which token, when it starts."""

    connect: str = "tcp://127.0.0.1:5555"  # This is the address of the run.
    # This is the content of `sampler_token` in the run's folder. The default is $GLASSRL_SAMPLER_TOKEN, which other
    # users do not see.
    token: str = ""
    patience: Seconds = 600.0  # Wait this many seconds for a run that does not answer yet.


class Sampler:
    """Leases in, groups out. Without a connection this is another rank than 0 of a sampler of several GPUs, which only
    takes part in the calls of the engine, see world.py.
    """

    def __init__(self, connection: Connection | None, setup: protocol.Setup, engine: Engine, partner: Partner | None):
        self.connection, self.setup, self.engine = connection, setup, engine
        self.loop = Loop(engine, partner)
        self.own_seeds = setup.rollout.engine == "hf"  # they cost vLLM time, see `groups.seeded`
        self.room = setup.rollout.max_num_seqs
        self.leases: dict[int, protocol.Lease] = {}  # that are not finished
        self.may_begin: set[int] = set()  # those of them that the run has let begin
        self.begun: set[int] = set()  # those of these that are being sampled
        # Groups that the run may not have yet, and when they were sent.
        self.done: dict[int, tuple[protocol.Group, float]] = {}
        # Of weights, and the version of the engine's.
        self.inbox, self.version = Inbox(connection.host if connection else None), -1
        # Of that version. A report is lost at times, so it is sent again until there is another one.
        self.probe: protocol.Probe | None = None
        self.probe_sent_at = 0.0
        self.pictures: dict[int, bytes] = {}  # images of new leases, by number
        self.busy_s, self.began_at, self.reported_at = 0.0, time.monotonic(), 0.0
        self.reported: protocol.Report | None = None

    def run(self) -> None:
        """Sample until the run ends, which raises Gone."""
        sys.excepthook = sys.__excepthook__  # what fails from here on shows its traceback
        is_open = False
        while True:
            if self._must_abandon(0.0 if is_open else IDLE_WAIT_S):
                self.loop.abandon()
            if (weights := self._weights()) is not None:
                self._load(*weights)
            self._begin()
            if is_open := self.loop.is_open():
                self._step()
            if self.connection is not None:
                self._report(self.connection)

    def _must_abandon(self, wait_s: float) -> bool:
        """Hear what the run says, waiting this long, and tell the ranks that share the engine. Returns whether all that
        is being sampled is given up.
        """
        gives_up = self.connection is not None and self._obey(self.connection.receive(wait_s))
        heard = gives_up, self.inbox.newest, self.pictures
        gives_up, self.inbox.newest, pictures = self.engine.of_group(heard)[0]  # what rank 0 has heard
        if pictures:
            images.of_process().learn(pictures)
        self.pictures = {}
        return gives_up

    def _weights(self) -> tuple[int, Iterator[tuple[str, Tensor]]] | None:
        """New weights, if all ranks that share the engine can read them. If not, the run will tell of newer ones."""
        if self.inbox.newest is None:
            return None
        weights = self.inbox.take()
        return weights if all(self.engine.of_group(weights is not None)) else None

    def _obey(self, messages: list[protocol.Setup | protocol.Orders]) -> bool:
        """Note what the run has said. Returns whether all that is being sampled is given up."""
        gives_up = False
        for orders in messages:
            if isinstance(orders, protocol.Setup):
                continue  # the answer to a second `Join`
            for number in orders.forget:
                self.done.pop(number, None)
            if any(number in self.leases for number in orders.forget):
                gives_up = True  # it happens after a pause: most of what there is belongs to others by now
                self.leases = {n: lease for n, lease in self.leases.items() if n not in orders.forget}
                self.begun = set()
            new = {lease.number: lease for lease in orders.leases if lease.number not in self.done}
            self.leases = new | self.leases
            self.pictures |= {k: x for lease in orders.leases for k, x in lease.images.items()}
            self.may_begin = self.leases.keys() & self.may_begin.union(orders.begin)
            if orders.weights is not None and orders.weights["version"] > self.version:
                self.inbox.tell(orders.weights)
        return gives_up

    def _load(self, version: int, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Take new weights, and sample a few tokens with them, which the run compares with its own."""
        self.loop.interrupt()
        self.engine.policy_version = version - 1  # `update_weights` counts on
        self.engine.update_weights(named_tensors)
        self.version = version
        probes = Loop(self.engine)
        for i, row in enumerate(self.setup.probes):
            probes.start(i, row, self.setup.probe_sampling, derive_seed(self.setup.seed, version, i))
        samples = dict(probes.run())
        packed = [protocol.pack(sample) for i in range(len(samples)) for sample in samples[i]]
        self.probe, self.probe_sent_at, self.reported_at = protocol.Probe(version, packed), 0.0, 0.0
        self.loop.resume()

    def _can_begin(self) -> set[int]:
        """The leases whose weights are here."""
        return {number for number, lease in self.leases.items() if lease.version <= self.version}

    def _begin(self) -> None:
        """Begin what can begin and what the run knows of: any of it may be the reason if this process dies."""
        for number in sorted(self._can_begin() & self.may_begin - self.begun):
            lease = self.leases[number]
            seed = lease.seed if self.own_seeds or self.loop.partner is not None else None
            self.loop.start(number, json.loads(lease.row), lease.sampling, seed)
            self.begun.add(number)

    def _step(self) -> None:
        start = time.monotonic()
        for number, samples in self.loop.step():
            del self.leases[number]
            self.begun.remove(number)
            self.done[number] = protocol.Group(number, [protocol.pack(s, learns=number >= 0) for s in samples]), 0.0
        self.busy_s += time.monotonic() - start

    def _report(self, connection: Connection) -> None:
        """Report every second, and at once if there are groups, or other leases than in the last report."""
        now = time.monotonic()
        due = _first_of([group for group, sent_at in self.done.values() if now - sent_at > SEND_AGAIN_S])
        probe = self.probe if now - self.probe_sent_at > SEND_AGAIN_S else None
        report, last = self.report(connection.name, due, probe), self.reported
        has_changed = last is None or (report.holding, report.begun) != (last.holding, last.begun)
        if due or has_changed or now - self.reported_at > REPORT_EVERY_S:
            connection.send(report)
            self.reported, self.reported_at = report, now
            self.done |= {group.number: (group, now) for group in due}
            self.probe_sent_at = self.probe_sent_at if probe is None else now

    def report(
        self, name: str, groups: list[protocol.Group], probe: protocol.Probe | None = None, **ending: Any
    ) -> protocol.Report:
        """How the sampler of this name is. Args: ending, `problem` and `was_asked` of the last report."""
        return protocol.Report(
            name=name,
            run=self.setup.run,
            version=self.version,
            room=self.room,
            holding=sorted([*self.leases, *self.done]),
            begun=sorted(self._can_begin()),
            groups=groups,
            probe=probe,
            busy_s=self.busy_s,
            total_s=time.monotonic() - self.began_at,
            **ending,
        )


def _first_of(groups: list[protocol.Group]) -> list[protocol.Group]:
    """Those groups, from the first on, that go into one report."""
    groups = groups[:GROUPS_OF_A_REPORT]
    sizes = itertools.accumulate(sum(len(x.experts) for s in group.samples for x in (s, *s.rows)) for group in groups)
    return [group for group, size in zip(groups, sizes, strict=True) if size <= EXPERTS_OF_A_REPORT] or groups[:1]


def run() -> None:
    """Sample as the command line says."""
    main(tyro.cli(Args))


def main(flags: Args) -> None:
    """Join a run, and sample for it until it ends. Raises ValueError if it refuses the token."""
    if protocol.PARENT in os.environ:
        _die_with(int(os.environ[protocol.PARENT]))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: KeyboardInterrupt
    name, token = protocol.name_of(os.getpid()), flags.token or os.environ.get(protocol.TOKEN, "")
    connection = Connection(flags.connect, token, name, flags.patience)
    try:
        sampler = make_sampler(connection)
        try:
            sampler.run()
        except KeyboardInterrupt:
            connection.leave(sampler.report(name, [], problem="it was asked to end", was_asked=True))
            raise
        except Exception as error:  # whatever it is, the run is told
            if not isinstance(error, Gone):
                connection.leave(sampler.report(name, [], problem=f"{type(error).__name__}: {error}"))
            raise
    except (Gone, KeyboardInterrupt) as end:
        say(f"sampler {name} ends: {end if isinstance(end, Gone) else 'it was asked to'}", sys.stderr)
        os._exit(0)  # engines and workers end with it. Taking them down one by one could hang.


def make_sampler(connection: Connection) -> Sampler:
    """Join a run, and make the engine that it wants, on as many GPUs."""
    setup = connection.join()
    seed = derive_seed(setup.seed, *connection.name.encode())  # another one for each sampler
    tokenizer = load_tokenizer(setup.model)
    tokenizer.rendering = Rendering(**setup.template)
    partner = open_partner(setup.environment, tokenizer, setup.stop_token_ids)  # forks, which an engine would not like
    ranks = world.lead(setup.rollout.tensor_model_parallel_size, "extras.samplers.sampler.follow")
    ranks.all_gather([(setup, seed)])
    return Sampler(connection, setup, _engine_of(setup, ranks, seed), partner)


def follow() -> None:
    """Sample as another rank than 0 of a sampler, until rank 0 ends."""
    _die_with(int(os.environ[protocol.PARENT]))
    ranks = init_ranks()
    [(setup, seed)] = ranks.all_gather([])  # what rank 0 knows
    Sampler(None, setup, _engine_of(setup, ranks, seed), None).run()


def _engine_of(setup: protocol.Setup, ranks: Ranks, seed: int) -> Engine:
    """The engine that a run wants. All ranks of a sampler make it together, with one seed."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    if (x := setup.images) is not None:
        images.of_process().expect(x.count, x.most_in_row)
        images.of_process().load_processor(setup.model, load_tokenizer(setup.model), "the data of the run")
        images.of_process().learn(x.of_probes)
    ranks = replace(ranks, dtype=getattr(torch, setup.dtype))
    return make_engine(setup.model, ranks, setup.rollout, longest=setup.longest, seed=seed)


def _die_with(parent: int) -> None:
    """End this process when the one that has started it ends, or now if that has ended."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)

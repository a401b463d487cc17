"""The loop over an engine's steps, as an object. It holds groups of responses, which may have several turns, and which
may be interrupted while the engine gets new weights.

    loop = Loop(engine)
    for name, row in enumerate(rows):
        loop.start(name, row, sampling)           at any time, also while others are sampled
    for name, samples in loop.run(): ...          each group as soon as it is complete

A partner may answer the policy. Then a response consists of several turns. After each turn the partner is asked, while
the engine samples the other responses. What it answers is appended with mask 0, and the policy goes on after it:

    response   = turn 1 + answer + turn 2 + ...
    mask       =   1    +   0    +   1    + ...             log-probs of answers are 0
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from rl import stop
from rl.data.order import derive_seed
from rl.data.rows import Row
from rl.data.types import Completion, Outcome, Request, Sample, Sampling, unknown
from rl.sampling.engines.base import Engine

# Of a response, which is the name of its group and its number in the group. A row of a response has another number too.
Key = tuple[Any, ...]

STOP_EVERY = 16  # ranks that share an engine ask each other after this many decoding steps whether to stop
IDLE_WAIT_S = 0.05  # how long to wait for the partner when the engine has nothing to sample


class Trajectory:
    """One response in the making, with what the policy sampled, and what it was told in between."""

    def __init__(self, key: Key, row: Row, sampling: Sampling, seed: int | None, response: "Trajectory | None" = None):
        self.key, self.row, self.sampling, self.seed = key, row, sampling, seed
        self.response = response  # whose row this is, if a partner makes several rows of one response
        self.rows: tuple[Sample, ...] = ()  # of this response, if a partner has made such rows
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.turns, self.finish_reason = 0, "abort"  # `turns` is how often the policy has come to an end
        # As far as the engine has told. Every sample has versions, also one that ended before anything was sampled.
        self.columns: dict[str, np.ndarray] = {"versions": np.empty(0, np.int32)}

    def request(self) -> Request:
        """What the engine is to sample next. Its seed depends on the turn and on how many tokens the response has so
        far, and not on what else the engine samples at that time.
        """
        seed = None if self.seed is None else derive_seed(self.seed, self.turns, len(self.ids))
        rest = replace(self.sampling, max_tokens=self.sampling.max_tokens - len(self.ids))
        return Request(self.key, [*self.row["prompt_ids"], *self.ids], rest, seed)

    def take(self, completion: Completion, version: int) -> None:
        """Append the tokens of a completion, which weights of this version have sampled. Raises RuntimeError if a token
        has no finite log-prob.
        """
        ids, logprobs = completion.token_ids, np.asarray(completion.logprobs, np.float32)
        if len(ids) != len(logprobs) or not np.isfinite(logprobs).all():
            raise RuntimeError(
                f"the engine returned {len(ids)} tokens and {len(logprobs)} log-probs for a response to row "
                f"{self.row['row_index']}, or log-probs that are not finite: {logprobs[:5].tolist()} ..."
            )
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logprobs += completion.logprobs
        self.finish_reason = completion.finish_reason
        before, num_tokens = self.columns["versions"], len(self.row["prompt_ids"]) + len(self.ids)
        versions = np.repeat(np.array([unknown(before), version], np.int32), [num_tokens - len(ids), len(ids)])
        for name, parts in {**completion.columns, "versions": [versions]}.items():
            column, row = np.concatenate(parts), self.row["row_index"]
            assert len(column) <= num_tokens, f"{len(column)} {name} for the {num_tokens} tokens of row {row}"
            # The engine reads earlier tokens again. What the column says of them stays as it was when they were
            # sampled. What it did not say then of tokens up to the last one of older weights stays unknown.
            earlier = self.columns.get(name, column[:0])
            column[len(earlier) : 1 + np.flatnonzero(before < version).max(initial=-1)] = unknown(column)
            self.columns[name] = np.concatenate([earlier, column[len(earlier) :]])

    def tell(self, ids: list[int]) -> None:
        """Append what the policy did not sample."""
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def sample(self, outcome: Outcome | None = None) -> Sample:
        """The response as it is now, with what the partner says of it."""
        prompt, ids, mask, logprobs = map(np.asarray, (self.row["prompt_ids"], self.ids, self.mask, self.logprobs))
        num_tokens, columns = len(prompt) + len(ids), {}
        for name, x in self.columns.items():  # a column may lack the last sampled token and answers after it
            columns[name] = np.full((num_tokens, *x.shape[1:]), unknown(x), x.dtype)
            columns[name][: len(x)] = x
        index, reason = self.row["row_index"], self.finish_reason
        return Sample(prompt, ids, mask, logprobs, reason, index, outcome, columns, rows=self.rows)


class Partner(Protocol):
    """What answers the policy in the middle of a response. extras/agents has one, for environments and tools.

    It may keep what it likes for each response from `begin` to `end`, and set `finish_reason` of one that it ends.
    """

    # The text of a row's prompt as the partner wants the policy to read it, see `rl.data.encode.encode_prompts`.
    prompt_text: Callable[..., str]

    def begin(self, x: Trajectory, seed: int) -> None:
        """Begin a response of which nothing was sampled. `answers` says after what it goes on. The seed is that of its
        group, whose responses begin alike.
        """

    def after(self, x: Trajectory) -> bool:
        """Take notice of a turn of the policy that is complete. Returns whether `answers` will say how the response
        goes on. If not, that was its last turn.
        """

    def enough(self, completions: Iterable[Completion]) -> Collection[Key]:
        """The keys of those that need not be sampled any further. `after` gets them as they are. By default there are
        none.
        """
        return ()

    def answers(self, wait_s: float) -> list[tuple[Trajectory, list[int] | None]]:
        """The responses that go on or end now, each with the ids that are appended, or with None if it has ended. Waits
        for the first of them for this many seconds at most.

        A partner may keep a response waiting, and return trajectories of its own instead, each of which becomes a row
        of that response. Whenever the policy has come to an end, `after` gets the trajectory, and the loop forgets it
        until `answers` returns it again. Before the response ends, the partner sets its `rows`.
        """

    def set_aside(self) -> bool:
        """Keep all responses as they are until `take_up`, while another loop may use the partner. Returns whether that
        can be done. By default it cannot, and the loop waits for `answers` to all that the policy has said.
        """
        return False

    def take_up(self) -> None:
        """Go on with the responses that were set aside, if there are any."""

    def end(self, x: Trajectory) -> Outcome:
        """Forget a response, which is complete or given up. Returns what there is to say of it."""

    def outcome_of(self, text: str) -> Outcome:
        """What `end` would return if the policy said only this text. Reward functions are tried on it."""


class Loop:
    """Groups of responses in flight over one engine. Ranks that share it make all calls together.

    Args: partner, which answers the policy, if anything does; seed, which with a partner decides what every turn
    samples, whenever it begins; without one the engine draws from the global generators.
    """

    def __init__(self, engine: Engine, partner: Partner | None = None, *, seed: int = 0):
        self.engine, self.partner, self.seed = engine, partner, seed
        self.trajectories: dict[Key, Trajectory] = {}  # responses that are not complete
        # The responses that are complete, by number, of groups that are not. Nothing is kept of other groups.
        self.complete: dict[Hashable, dict[int, Sample]] = {}
        self.waiting: set[Key] = set()  # trajectories that wait for an answer of the partner
        self.pending: list[Key] = []  # trajectories that the next `is_open` hands to the engine

    def start(self, name: Hashable, row: Row, sampling: Sampling, seed: int | None = None) -> None:
        """Begin `sampling.n` responses to a row. `name` comes back with the group. With a seed of their own they depend
        on that, and not on `self.seed` or the global generators. Raises ValueError if a group in flight is called so.
        """
        if name in self.complete or (name, 0) in self.trajectories:
            raise ValueError(f"a group with the name {name!r} is in flight already; names must differ")
        origin = (self.seed, row["row_index"]) if seed is None else (seed,)
        has_seed = self.partner is not None or seed is not None
        for j in range(sampling.n):
            x = Trajectory((name, j), row, sampling, derive_seed(*origin, j) if has_seed else None)
            self.trajectories[x.key] = x
            if self.partner is None:
                self.pending.append(x.key)
            else:
                self.partner.begin(x, derive_seed(*origin))
                self.waiting.add(x.key)

    def is_open(self) -> bool:
        """Hand pending requests to the engine, and return whether any response is in flight, of this rank or of one
        that shares the engine. Ranks that share it must enter together. Raises RuntimeError, naming a row, if the
        engine has nothing left to sample and a response has not come.
        """
        if self.pending:
            self.engine.add([self.trajectories[key].request() for key in self.pending])
            self.pending = []
        is_open = self.engine.has_requests(waiting=bool(self.waiting))
        if self.trajectories and not is_open:
            row, lost = next(iter(self.trajectories.values())).row["row_index"], len(self.trajectories)
            raise RuntimeError(f"the engine lost {lost} response(s), one to row {row} among them")
        return is_open

    def step(self) -> list[tuple[Hashable, list[Sample]]]:
        """Sample about one more token of each response. Returns the groups that are complete now."""
        done = []
        completions = self.engine.step()
        if self.partner is not None and (keys := self.partner.enough(self.engine.own_requests)):
            completions += self.engine.cut(keys)
        for completion in completions:
            if (x := self.trajectories.get(completion.request.key)) is None or x.key in self.waiting:
                name, j, *_ = completion.request.key
                raise RuntimeError(f"the engine returned response {j} to prompt {name} again, or was not asked for it")
            x.take(completion, self.engine.policy_version)
            x.turns += 1
            goes_on = self.partner is not None and self.partner.after(x)
            if x.response is not None:
                del self.trajectories[x.key]
            elif goes_on:
                self.waiting.add(x.key)
            else:
                done += self._finish(x)
        # Wait for the partner only if the engine has nothing to sample meanwhile.
        for x, ids in self.partner.answers(IDLE_WAIT_S * self.engine.is_idle) if self.partner else ():
            self.waiting.discard(x.key)
            if ids is None:
                done += self._finish(x)
            else:
                self.trajectories[x.key] = x  # it may be a new row of a response
                x.tell(ids)
                self.pending.append(x.key)
        return done

    def run(self, enough: Callable[[], bool] | None = None) -> Iterator[tuple[Hashable, list[Sample]]]:
        """`step` until nothing is in flight, the run is asked to stop, or all ranks of the engine have `enough`."""
        num_steps = 0
        while self.is_open():
            # Ranks that share an engine must leave together, so they ask each other. That takes time, so they do
            # not ask at every step. A rank that has the engine alone only looks at its own flag.
            if self.engine.group is None or num_steps % STOP_EVERY == 0:
                has_enough = enough is not None and all(self.engine.of_group(enough()))
                if has_enough or stop.requested(self.engine.group):
                    return
            num_steps += 1
            yield from self.step()

    def interrupt(self) -> None:
        """Take what is in flight out of the engine, which may sleep then, or get new weights, see `resume`."""
        for completion in self.engine.abort():
            self.trajectories[completion.request.key].take(completion, self.engine.policy_version)

    def resume(self) -> None:
        """Let the next `is_open` hand all interrupted or restored responses to the engine, which continues each of them
        after the tokens that it has.
        """
        self.pending = [key for key in self.trajectories if key not in self.waiting]

    def abandon(self) -> None:
        """Give up all responses in flight."""
        self.engine.abort()
        if self.partner is not None:
            for x in self.trajectories.values():
                self.partner.end(x)
        self.trajectories, self.complete, self.waiting, self.pending = {}, {}, set(), []

    def _finish(self, x: Trajectory) -> list[tuple[Hashable, list[Sample]]]:
        """Note that a response is complete. Returns its group if the whole group is now complete, else nothing."""
        name, j = x.key
        samples = self.complete.setdefault(name, {})
        samples[j] = x.sample(self.partner.end(x) if self.partner else None)
        del self.trajectories[x.key]
        if len(samples) < x.sampling.n:
            return []
        del self.complete[name]
        return [(name, [samples[j] for j in range(x.sampling.n)])]

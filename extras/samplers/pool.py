"""The pool of samplers of a run, as its trainers see it.

    samplers = open_pool(...)                           rank 0 listens, and starts the samplers of this machine
    for step ...:
        samplers.push(step, named_tensors)              weights of `step` steps; those who join later get them too
        responses = samplers.sample(end_phase)          waits for the groups that the step trains on, and their scores
        samplers.verify(policy, ...)                    before weights change: do the samplers hold these?

A thread of rank 0 talks to the samplers meanwhile, see dispatcher.py.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import AutoConfig

from extras import families, images
from extras.partial import sample_of, saved_sample
from extras.samplers import SamplerFlags, Work
from extras.samplers.dispatcher import Dispatcher
from extras.samplers.prompts import Group, Prompts
from extras.samplers.protocol import LARGEST, OfImages, Setup, row_of
from extras.samplers.weight_files import WeightWriter
from rl import console, stop
from rl.console import say
from rl.data.rows import Row
from rl.data.template import rendering_of
from rl.data.types import Evaluation, Sample
from rl.ranks import Ranks
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.evaluation import summarize
from rl.sampling.responses import gather_responses
from rl.sampling.sampler import Task
from rl.sampling.verify import check_engine
from rl.scoring.pool import raise_if_failing

AVERAGED_STEPS = 8  # whose times are averaged: with staleness, short and long steps may alternate
NUM_PROBES, PROBE_TOKENS = 4, 16  # responses to compare after a push of weights, and tokens of each
SHOWN = {  # in the line of a step, see `SamplerPool.metrics`
    "trainer/idle_ratio": "trainers wait {:.0%} and samplers {m[rollouter/idle_ratio]:.0%} of the time, "
    "{m[samplers/balanced_count]:.1f} samplers would balance it",
}


def setup_of(work: Work, dtype: str) -> Setup:
    """What a sampler has to know of a run."""
    rendering, sampling, probes, of_images = rendering_of(work.tokenizer), work.sampling, work.rows[:NUM_PROBES], None
    if images.in_use():
        known, numbers = images.of_process(), [k for row in probes for k in row.get("images") or ()]
        of_images = OfImages(len(known.known), known.most_in_row, known.encoded(numbers))
    return Setup(
        model=work.tokenizer.name_or_path,
        template={"arguments": rendering.arguments, "day": rendering.day},
        rollout=replace(work.rollout, free_cache_engine=False),
        environment=work.environment,
        longest=work.longest,
        stop_token_ids=[*sampling.stop_token_ids],
        probes=[row_of(row, whole=False) for row in probes],
        probe_sampling=replace(sampling, n=1, max_tokens=min(PROBE_TOKENS, sampling.max_tokens)),
        seed=work.seed,
        images=of_images,
        dtype=dtype,
    )


class SamplerPool:
    """See above. All ranks make all calls. Rank 0 has the connections, and the tokens that come.

    Args: flags, of the samplers; work, that they are to do; task, of the run, whose scorer gets every group when it is
    complete; folder, of the run; state, that `state` gave to the checkpoint that is resumed. Raises ValueError, naming
    the flag, if the flags do not fit the machine.
    """

    def __init__(self, flags: SamplerFlags, work: Work, task: Task, ranks: Ranks, folder: Path, state: dict[str, Any]):
        self.flags, self.task, self.ranks, self.engine = flags, task, ranks, self
        self.sampling, self.scorer = task.sampling, task.scorer
        # Of the last call of `sample`: what this rank has of the step.
        self.own_samples: Sequence[Sample] = ()
        # As an engine has them: version of the weights, bytes on this GPU, type of the experts' numbers.
        self.policy_version, self.memory, self.routing = 0, 0, _routing_of(work)
        vocabulary = AutoConfig.from_pretrained(work.tokenizer.name_or_path).get_text_config().vocab_size
        self.prompts = Prompts(work, flags.max_staleness, vocabulary)
        self.waited_s, self.measured_at, self.num_taken = 0.0, time.monotonic(), 0
        # After each step: the clock, and seconds in which trainers waited, samplers sampled, and samplers were there.
        self.marks: deque[tuple[float, ...]] = deque(maxlen=AVERAGED_STEPS + 1)
        console.SHOWN |= SHOWN
        if ranks.is_main:
            self._load(state)
            self.writer = WeightWriter(flags.weights_dir, folder)
            setup = setup_of(work, str(ranks.dtype).removeprefix("torch."))
            self.dispatcher = Dispatcher(flags, setup, self.prompts, self.scorer.submit, ranks)
            _write_private(folder / "sampler_token", self.dispatcher.token)
            say(f"samplers: {self.dispatcher.address}, with the token in {folder / 'sampler_token'}")
            self.dispatcher.thread.start()

    def push(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Give the samplers the weights that `version` steps have made, and the prompts that these may sample.

        Returns when the weights are written. Samplers load them between two decoding steps. All ranks must enter.
        Without room for the weights the run saves and ends, see `_give_up`.
        """
        named_tensors = iter(named_tensors)
        if self.ranks.is_main:
            try:
                weights = self.writer.write(version, named_tensors)
            except OSError as error:
                where = self.flags.weights_dir or "the memory of this machine"
                self._give_up(f"weights could not be written to {where} (--weights-dir): {error}")
            else:
                with self.dispatcher.lock:
                    self.dispatcher.weights = weights
                    self.prompts.ledger.draw(version)
        for _ in named_tensors:  # of other ranks, or what is left after an error. They gather the tensors together.
            pass
        self.policy_version = version

    def sample(self, end_phase: Callable[[str], None]) -> list[Sample]:
        """Wait for the groups that the next step trains on, and for their scores. All ranks get the scores and
        lengths of all responses, and rank 0 has their tokens. Args: end_phase, as for `rl.sampling.sampler.Sampler`.
        """
        rows, samples = self.take()
        end_phase("gen")
        self.own_samples = self.scorer.collect(samples)
        end_phase("reward")
        responses = gather_responses(self.own_samples, rows, self.ranks)
        raise_if_failing(responses, self.task.max_error_frac)
        return responses

    def take(self) -> tuple[list[Row], list[Sample]]:
        """Wait for the groups that the next step trains on. Returns the P rows, on all ranks, and, on rank 0, the
        samples in their order. Both are empty if the run was asked to stop.
        """
        groups: dict[int, Group] = {}
        if self.ranks.is_main and self._wait(lambda: self.prompts.ledger.has_batch):
            with self.dispatcher.lock:
                groups = self.prompts.ledger.take()
        samples = [sample for _, group in groups.values() for sample in group]
        self.num_taken += sum(s.num_sampled for s in samples)
        rows = [self.prompts.row(number) for number in self.ranks.all_gather(groups)]
        return rows, samples

    def start_evaluation(self) -> None:
        """Let the samplers answer held-out prompts, before others, with the weights of the last push."""
        if self.ranks.is_main:
            with self.dispatcher.lock:
                self.prompts.evaluate(self.task.val_rows, self.task.validation.settings(self.sampling))

    def evaluate(self) -> Evaluation:
        """Wait for the answers to held-out prompts, before another push. All ranks must enter. Empty if the run was
        asked to stop.
        """
        groups: list[Group] = []
        if self.ranks.is_main:
            leases = self.prompts.evaluation
            if self._wait(lambda: not leases.waiting and not leases.leased):
                groups = [leases.ready[number] for number in sorted(leases.ready)]
        samples = self.scorer.collect([sample for _, group in groups for sample in group])
        shown = self.task.val_rows[: self.task.validation.log_val_generations]
        return summarize([row for row, _ in groups], samples, self.task.tokenizer, self.ranks, shown=shown)

    def verify(self, policy: nn.Module, rollout: EngineFlags) -> None:
        """Compare what each sampler has sampled right after the last push with the policy, which must not have changed.

        Raises RuntimeError, naming the sampler, if it does not hold the policy's weights. All ranks must enter.
        """
        probes: list[tuple[str, list[Sample]]] = []  # of each sampler by its name
        if self.ranks.is_main and self._wait(self._has_probes):
            with self.dispatcher.lock:
                newest = [(x.name, *x.probe) for x in self.dispatcher.members.values()]
                probes = [(name, samples) for name, version, samples in newest if version == self.policy_version]
        for i, name in enumerate(self.ranks.all_gather([name for name, _ in probes])):
            samples = probes[i][1] if self.ranks.is_main else []
            try:
                check_engine(policy, samples, self.sampling, rollout, self.ranks)
            except RuntimeError as error:
                raise RuntimeError(f"sampler {name}, weights of step {self.policy_version}: {error}") from error

    def state(self) -> dict[str, Any]:
        """For `Run.steps`: which prompts are trained, and the groups that are ready."""
        if not self.ranks.is_main:
            return {}
        ledger = self.prompts.ledger
        with self.dispatcher.lock:
            groups = [[number, [saved_sample(s) for s in samples]] for number, (_, samples) in ledger.ready.items()]
            return {"ledger": ledger.state(), "groups": groups}

    def metrics(self) -> dict[str, float]:
        """How the two pools do, or {} on other ranks than 0.

        samplers/count, lost, dropped       samplers now; lost ones and dropped prompts since the start
        samplers/ready, waiting             prompts whose groups are ready, and that no sampler has begun
        perf/gen_tokens_per_s               sampled tokens taken per second since the last call

        Over the last steps, eight at most, and not before there are two of them after the first step, in which samplers
        start. Of t seconds, trainers waited for samplers in w. Samplers were there for n seconds, all added up, and
        were busy in b of them. They sampled, or waited for environments.

        trainer/idle_ratio                  w / t
        rollouter/idle_ratio                1 - b / n: samplers had no prompt that --max-staleness allows, or no weights
        samplers/balanced_count             b / (t - w): with this many samplers, all trainers and samplers are busy,
                                            if many samplers sample as many times as fast as one
        """
        if not self.ranks.is_main:
            return {}
        now, ledger = time.monotonic(), self.prompts.ledger
        with self.dispatcher.lock:
            metrics = {
                "samplers/count": float(len(self.dispatcher.members)),
                "samplers/lost": float(self.dispatcher.num_lost),
                "samplers/dropped": float(self.prompts.num_dropped),
                "samplers/ready": float(len(ledger.ready)),
                "samplers/waiting": float(len(ledger.waiting)),
                "perf/gen_tokens_per_s": self.num_taken / (now - self.measured_at),
            }
            self.marks.append((now, self.waited_s, self.dispatcher.busy_s, self.dispatcher.total_s))
        self.measured_at, self.num_taken = now, 0
        t, w, b, n = (new - old for old, new in zip(self.marks[0], self.marks[-1], strict=True))
        if len(self.marks) > 2 and n > 0:
            metrics["trainer/idle_ratio"] = w / t
            metrics["rollouter/idle_ratio"] = max(1 - b / n, 0.0)
            metrics["samplers/balanced_count"] = b / (t - w)
        return metrics

    def close(self) -> None:
        """Send the samplers home, and end those of this machine."""
        if self.ranks.is_main:
            self.dispatcher.close()
            self.writer.close()

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition on what the thread changes. False if the run was asked to stop. Without a sampler, or if
        the thread has failed, it is asked to, see `_give_up`.
        """
        start, timeout = time.monotonic(), self.flags.sampler_timeout
        with self.dispatcher.lock:
            while not (holds := condition()) and not stop.requested():
                if self.dispatcher.failure is not None:
                    self._give_up(f"samplers: {self.dispatcher.failure!r}")
                    break
                if not self.dispatcher.members and time.monotonic() > self.dispatcher.give_up_at:
                    self._give_up(f"there has been no sampler for {timeout:.0f} s (--sampler-timeout)")
                    break
                self.dispatcher.lock.wait(0.2)
        self.waited_s += time.monotonic() - start
        return holds

    def _give_up(self, why: str) -> None:
        """Ask the run to save and end with exit code 1. A step that has begun to change weights is finished first."""
        stop.ask(exit_code=1)
        say(f"{why}: the run saves and ends; the same command goes on", sys.stderr)

    def _has_probes(self) -> bool:
        """Whether all samplers that can be heard have sent the probe of the newest weights."""
        return all(member.probe[0] == self.policy_version for member in self.dispatcher.heard().values())

    def _load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint. Groups that no longer fit, as after --force-resume, are sampled again."""
        ledger = self.prompts.ledger
        if state.get("ledger", {}).get("batch_size") != ledger.batch_size:
            return  # also of another script's checkpoint, which --force-resume allows
        ready: dict[int, Group] = {}
        for number, saved in state["groups"]:
            row, samples = self.prompts.row(number), [sample_of(x) for x in saved]
            fits = all(list(s.prompt_ids) == list(row["prompt_ids"]) for s in samples)
            if fits and len(samples) == self.sampling.n:
                ready[number] = row, samples
                self.scorer.submit(row, samples)
        ledger.load(state["ledger"], ready)


def _routing_of(work: Work) -> np.dtype | None:
    """The type of the experts' numbers, or None if no experts are replayed. Raises ValueError, naming --router-replay,
    if those of a group could be too many for a message.
    """
    if not work.rollout.router_replay:
        return None
    layers, each, count = families.shape_of(work.tokenizer.name_or_path)
    routing = families.unknown_expert(count).dtype
    if (size := work.sampling.n * work.longest * layers * each * routing.itemsize) > LARGEST:
        what = f"--router-replay: the experts of {work.sampling.n} responses (--rollout-n) may have {size:,} bytes"
        raise ValueError(f"{what}, above {LARGEST:,}; lower --rollout-n or --max-response-length, or leave it out")
    return routing


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)

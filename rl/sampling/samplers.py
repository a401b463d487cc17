"""The samplers of a run, as its trainers see them: processes that sample while the trainers train.

    samplers = Samplers(...)                            rank 0 listens, and starts those of this machine
    for step ...:
        samplers.push(step, named_tensors)              weights of `step` steps; those who join later get them too
        rows, own_samples, tickets = samplers.take()    waits for the groups that the step trains on
        samplers.verify(policy, ...)                    before weights change: do the samplers hold these?

A thread of rank 0 talks to the samplers meanwhile: dispatcher.py.
"""

import functools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from rl import stop
from rl.console import say
from rl.data.order import prompts_for_step
from rl.data.rows import Row
from rl.data.text import rendering_of
from rl.data.types import Sample, Sampling, sample_of
from rl.ranks import Ranks
from rl.sampling.dispatcher import Dispatcher, Group, SamplerFlags
from rl.sampling.engines.base import Rollout
from rl.sampling.environments import EnvironmentFlags
from rl.sampling.evaluation import Evaluation, Validation, summarize
from rl.sampling.ledger import Ledger
from rl.sampling.protocol import Setup, row_of
from rl.sampling.rollout import check_engine
from rl.sampling.weight_files import WeightWriter
from rl.scoring.pool import Scorer, Ticket

AVERAGED_STEPS = 8  # whose times are averaged: with staleness, short and long steps may alternate
NUM_PROBES, PROBE_TOKENS = 4, 16  # responses to compare after a push of weights, and tokens of each


def describe_run(
    tokenizer: PreTrainedTokenizerBase,
    rollout: Rollout,
    environment: EnvironmentFlags,
    rows: Sequence[Row],
    sampling: Sampling,
    *,
    longest: int,
    seed: int,
) -> Setup:
    """What samplers have to know of a run. Args: tokenizer, of the model; rows, that it trains on; longest, tokens of
    prompt and response.

    Raises ValueError for flags that samplers do not have.
    """
    if (size := rollout.tensor_model_parallel_size) != 1:
        raise ValueError(
            f"--tensor-model-parallel-size {size}: a sampler has one GPU; leave it out, start more samplers"
        )
    if rollout.router_replay:
        raise ValueError("--router-replay: samplers do not send the experts that they used; leave it out")
    probes = [row_of(row, whole=False) for row in rows[:NUM_PROBES]]
    probe_sampling = replace(sampling, n=1, max_tokens=min(PROBE_TOKENS, sampling.max_tokens))
    rollout = replace(rollout, free_cache_engine=False)
    rendering, stops = rendering_of(tokenizer), [*sampling.stop_token_ids]
    template = {"arguments": rendering.arguments, "day": rendering.day}
    model = tokenizer.name_or_path
    return Setup(model, template, rollout, environment, longest, stops, probes, probe_sampling, seed)


class Samplers:
    """See above. All ranks make all calls; rank 0 has the connections, and the tokens that come.

    Args: setup, of `describe_run`; rows, that are trained on, `batch_size` a step, with `sampling.n` responses to each;
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
        if flags.weights_dir is not None and flags.weights_transfer != "host":
            other = f"--weights-transfer {flags.weights_transfer}"
            raise ValueError(f"--weights-dir {flags.weights_dir} and {other} exclude each other; leave one of them out")
        self.flags, self.setup, self.ranks, self.scorer, self.sampling = flags, setup, ranks, scorer, sampling
        # As an engine has them: version of the weights, bytes on this GPU, type of the experts' numbers.
        self.policy_version, self.memory, self.routing = 0, 0, None
        cached = functools.lru_cache(flags.max_staleness + 2)
        of_step = cached(lambda step: prompts_for_step(rows, step, batch_size, setup.seed))
        self.row: Callable[[int], Row] = lambda number: of_step(number // batch_size)[number % batch_size]
        self.ledger: Ledger[Group] = Ledger(batch_size, flags.max_staleness, total_steps)
        self.held_out: Sequence[Row] = []
        self.waited_s, self.measured_at, self.num_taken = 0.0, time.monotonic(), 0
        # After each step: the clock, and seconds in which trainers waited, samplers sampled, and samplers were there.
        self.marks: deque[tuple[float, ...]] = deque(maxlen=AVERAGED_STEPS + 1)
        if ranks.is_main:
            self._load(state)
            self.writer = WeightWriter(flags.weights_dir, folder)
            devices = _devices(flags, ranks)
            vocabulary = AutoConfig.from_pretrained(setup.model).get_text_config().vocab_size
            answers = (self.ledger, self.row, sampling, scorer.submit)
            self.desk = Dispatcher(flags, setup, *answers, devices, ranks.device, vocabulary)
            _write_private(folder / "sampler_token", self.desk.token)
            say(f"samplers: {self.desk.address}, with the token in {folder / 'sampler_token'}")
            self.desk.thread.start()

    def push(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Give the samplers the weights that `version` steps have made, and the prompts that these may sample.

        Returns when the weights are written; samplers load them between two decoding steps. All ranks must enter.
        Without room for the weights the run saves and ends: see `_give_up`.
        """
        named_tensors = iter(named_tensors)
        if self.ranks.is_main:
            try:
                weights = self.writer.write(version, named_tensors)
            except OSError as error:
                where = self.flags.weights_dir or "the memory of this machine"
                self._give_up(f"weights could not be written to {where} (--weights-dir): {error}")
            else:
                with self.desk.lock:
                    self.desk.weights = weights
                    self.ledger.draw(version)
        for _ in named_tensors:  # of other ranks, or what is left after an error: they gather the tensors together
            pass
        self.policy_version = version

    def take(self) -> tuple[list[Row], list[Sample], list[Ticket]]:
        """Wait for the groups that the next step trains on. Returns the P rows, on all ranks, and, on rank 0, the
        samples in their order and the tickets of their scores. All are empty if the run was asked to stop.
        """
        groups: dict[int, Group] = {}
        if self.ranks.is_main and self._wait(lambda: self.ledger.has_batch):
            with self.desk.lock:
                groups = self.ledger.take()
        samples = [sample for _, group, _ in groups.values() for sample in group]
        self.num_taken += sum(s.num_sampled for s in samples)
        return [self.row(n) for n in self.ranks.all_gather(groups)], samples, [x for _, _, x in groups.values()]

    def start_evaluation(self, rows: Sequence[Row], validation: Validation) -> None:
        """Let the samplers answer held-out prompts, before others, with the weights of the last push."""
        self.held_out = rows
        if self.ranks.is_main:
            self.desk.evaluate(self.held_out, validation.settings(self.sampling))

    def evaluate(self, validation: Validation) -> Evaluation:
        """Wait for the answers to held-out prompts, before another push. All ranks must enter. Empty if the run was
        asked to stop.
        """
        own: list[Group] = []
        if self.ranks.is_main:
            leases = self.desk.evaluation
            if self._wait(lambda: not leases.waiting and not leases.leased):
                own = [leases.ready[number] for number in sorted(leases.ready)]
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
        if self.ranks.is_main and self._wait(self._has_probes):
            with self.desk.lock:
                probes = [(x.name, *x.probe) for x in self.desk.members.values()]
                own = [(name, samples) for name, version, samples in probes if version == self.policy_version]
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
        with self.desk.lock:
            groups = [[n, [vars(s) for s in samples]] for n, (_, samples, _) in self.ledger.ready.items()]
            return {"ledger": self.ledger.state(), "groups": groups}

    def metrics(self) -> dict[str, float]:
        """How the two pools do; {} on other ranks than 0.

        samplers/count, lost, dropped       samplers now; lost ones and dropped prompts since the start
        samplers/ready, waiting             prompts whose groups are ready, and that no sampler has begun
        perf/gen_tokens_per_s               sampled tokens taken per second since the last call

        Over the last steps, eight at most, and not before there are two of them after the first step, in which samplers
        start. Of t seconds, trainers waited for samplers in w; samplers were there for n seconds, all added up, and
        were busy in b of them: they sampled, or waited for environments.

        trainer/idle_ratio                  w / t
        rollouter/idle_ratio                1 - b / n: samplers had no prompt that --max-staleness allows, or no weights
        samplers/balanced_count             b / (t - w): with so many samplers, all trainers and samplers would be busy,
                                            if many samplers sample as many times as fast as one
        """
        if not self.ranks.is_main:
            return {}
        now = time.monotonic()
        with self.desk.lock:
            found = {
                "samplers/count": float(len(self.desk.members)),
                "samplers/lost": float(self.desk.lost),
                "samplers/dropped": float(self.ledger.num_dropped + len(self.desk.dropped)),
                "samplers/ready": float(len(self.ledger.ready)),
                "samplers/waiting": float(len(self.ledger.waiting)),
                "perf/gen_tokens_per_s": self.num_taken / (now - self.measured_at),
            }
            self.marks.append((now, self.waited_s, self.desk.busy_s, self.desk.total_s))
        self.measured_at, self.num_taken = now, 0
        t, w, b, n = (new - old for old, new in zip(self.marks[0], self.marks[-1], strict=True))
        if len(self.marks) > 2 and n > 0:
            of_time = {"trainer/idle_ratio": w / t, "rollouter/idle_ratio": max(1 - b / n, 0.0)}
            found |= of_time | {"samplers/balanced_count": b / (t - w)}
        return found

    def close(self) -> None:
        """Send the samplers home, and end those of this machine."""
        if self.ranks.is_main:
            self.desk.close()
            self.writer.close()

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition on what the thread changes. False if the run was asked to stop. Without a sampler, or if
        the thread has failed, it is asked to: see `_give_up`.
        """
        start, patience = time.monotonic(), self.flags.sampler_timeout
        with self.desk.lock:
            while not (holds := condition()) and not stop.requested():
                if self.desk.failure is not None:
                    self._give_up(f"samplers: {self.desk.failure!r}")
                    break
                if not self.desk.members and time.monotonic() - self.desk.alone_since > patience:
                    self._give_up(f"there has been no sampler for {patience:.0f} s (--sampler-timeout)")
                    break
                self.desk.lock.wait(0.2)
        self.waited_s += time.monotonic() - start
        return holds

    def _give_up(self, why: str) -> None:
        """Ask the run to save and end with exit code 1. A step that has begun to change weights is finished first."""
        stop.ask(exit_code=1)
        say(f"{why}: the run saves and ends; the same command goes on", sys.stderr)

    def _has_probes(self) -> bool:
        """Whether all samplers that can be heard have sent the probe of the newest weights."""
        return all(member.probe[0] == self.policy_version for member in self.desk.heard().values())

    def _load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; groups that no longer fit, as after --force-resume, are sampled again."""
        if state.get("ledger", {}).get("batch_size") != self.ledger.batch_size:
            return  # also of another script's checkpoint, which --force-resume allows
        ready: dict[int, Group] = {}
        for number, saved in state["groups"]:
            row, samples = self.row(number), [sample_of(x) for x in saved]
            fits = all(list(s.prompt_ids) == list(row["prompt_ids"]) for s in samples)
            if fits and len(samples) == self.sampling.n:
                ready[number] = row, samples, self.scorer.submit(row, samples)
        self.ledger.load(state["ledger"], ready)


def _devices(flags: SamplerFlags, ranks: Ranks) -> list[str | None]:
    """A GPU for each sampler that the run starts, None on a machine without."""
    named = flags.sampler_devices
    if named is not None and len(named) != flags.samplers:
        raise ValueError(f"--sampler-devices {named} must name as many GPUs as --samplers, which is {flags.samplers}")
    if ranks.device.type == "cpu":
        return [None] * flags.samplers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    devices = list(named or visible[int(os.environ.get("LOCAL_WORLD_SIZE", "1")) :])
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

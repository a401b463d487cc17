"""One training run, from its folder to its last save: the object that the scripts hold."""

import difflib
import gc
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from rl import stop
from rl.console import progress_line, say, show_sample
from rl.data.types import Batch, Sample, Score
from rl.flags import parse_alarm
from rl.model.sharding import check_size, copy_weights, keep_moments_on_host, offload, onload
from rl.ranks import init_ranks, shutdown_ranks
from rl.run import checkpoint, last_words, loop_state, samples, watchdog
from rl.run.checkpoint_tensors import Trained
from rl.run.clock import Clock
from rl.run.memory import rehearse
from rl.run.prometheus import Exporter
from rl.run.tracking import Tracker, evaluation_is_due
from rl.sampling.engines.base import Engine

MAX_USELESS_UPDATES = 3  # in a row; then the run stops


class Run:
    """What a script holds to stay alive, be stopped and continue.

        run = Run(args, tokenizer, total_steps)            takes the folder, finds the checkpoint to resume from
        run.resume({"actor": (policy, optimizer)}, ...)    loads it
        for step in range(run.start, total_steps + 1):
            clock = run.begin(step, state={...})           saves what the steps so far have made, if that is due
            ...                                            `clock(phase)`, `leave_if_asked`: where a run may leave
            run.log_step(step + 1, {...}, ...)
        run.close(scorer, engine)

    All ranks must make all calls. A run that is asked to stop saves the state of the step's beginning, until the first
    optimizer step changes that; after it, the step is completed first. The same command continues the run.

    Raises ValueError, on every rank, if the folder cannot be written or belongs to a running process, if the port of
    --prometheus-port is in use, if there is no intact checkpoint among those there are, or if the checkpoint comes from
    other settings or data.
    """

    def __init__(self, args: Any, tokenizer: PreTrainedTokenizerBase, total_steps: int):
        self.args, self.tokenizer, self.total_steps = args, tokenizer, total_steps
        self.ranks = init_ranks(patient=True)
        check_size(args.fsdp_size, self.ranks)
        last_words.start(self.ranks)
        watchdog.start(args.stall_timeout, self.ranks.rank)
        stop.start(args.max_hours)
        self.exporter = Exporter(args, self.ranks)
        self.folder = checkpoint.open_folder(args, tokenizer, total_steps, self.ranks)
        self.states = checkpoint.load_states(self.folder.resume_from)
        self.start, self.useless_updates = 0, 0
        self.batch: Batch | None = None  # of the step, once there was an update
        self.unheard = [x for x in args.alarms if x not in type(args).alarms]  # whose metrics are not known to exist

    @property
    def state(self) -> dict[str, Any]:
        """What rank 0's loop gave to `begin` before the checkpoint that is resumed; {} in a new run."""
        return self.states[0] if self.states else {}

    def resume(
        self,
        trained: Trained,
        *,
        about: str,
        engine: Engine | None = None,
        offloaded: Sequence[str] = (),
        visiting: nn.Module | None = None,
    ) -> None:
        """Load the checkpoint, if there is one, into what is trained; plan the memory; say what will run.

        Args: trained, models with their optimizers by name, None for a reference that `refresh` changes; about, a line
        for the console; engine, asleep; offloaded, names in `trained` of what `offload` moves while the engine
        generates; visiting, a teacher on the host that comes to the device to score. With an engine the memory plan is
        made, and raises RuntimeError with the flags to change if something will not fit: everything else that stays on
        the device has to be there by now.
        """
        self.trained, resume_from = trained, self.folder.resume_from
        self.offloaded = () if self.args.param_offload else offloaded  # on the host already
        on_host = self.args.optimizer_offload and not self.args.param_offload
        self.start = checkpoint.load(resume_from, trained, moments_on_host=on_host) if resume_from else 0
        for optimizer in filter(None, (x for _, x in trained.values())):
            optimizer.register_step_pre_hook(lambda *_: stop.hold())  # the state of the step's beginning is gone
            if on_host:
                keep_moments_on_host(optimizer, self.ranks.device)
        self.tracker = Tracker(self.folder.root, self.args, self.start, self.total_steps, enabled=self.ranks.is_main)
        plan = ""
        if engine is not None:
            engine.policy_version = self.start  # with one push a step, that of an unbroken run
            plan = rehearse(
                trained,
                max_tokens=self.args.ppo_max_token_len_per_gpu,
                max_length=self.args.max_prompt_length + self.args.max_response_length,
                engine_memory=engine.memory,
                ranks=self.ranks,
                offloaded=self.offloaded,
                visiting=visiting,
                optimizer_offload=self.args.optimizer_offload,
                param_offload=self.args.param_offload,
            )
        how = f"resumed from {resume_from}" if resume_from else "new run"
        steps = f"steps {self.start + 1}-{self.total_steps}" if self.start < self.total_steps else "no steps left"
        self.tracker.print(f"{self.folder.root}: {how}, {steps}, {self.ranks.size} rank(s), {about}\n{plan}".rstrip())
        gc.freeze()  # garbage collections need not walk through what stays alive: nearly half a second each

    def begin(self, step: int, state: dict[str, Any]) -> Clock:
        """Begin the step after `step` made ones: save those if that is due, and be ready to stop here.

        Args: state, what the loop carries from step to step and does not follow from the step's number: numbers,
        strings, lists, dicts and numpy arrays, each rank's own. `Run.states` has it after a resume.
        Returns: the clock of the step.
        """
        encoded, freq = loop_state.encode(state), self.args.save_freq
        last = step == self.total_steps
        if step > self.start and freq != 0 and (last or (freq > 0 and step % freq == 0)):
            checkpoint.save(self.folder, step, self.trained, encoded)  # goes on in the background
        stop.arm(checkpoint.leaving(self.folder, step, self.trained, encoded), partial(self.tracker.close, 5.0))
        self.step, self.clock = step, Clock(self.ranks)
        return self.clock

    def evaluation_is_due(self, step: int) -> bool:
        """Whether held-out data is evaluated when `step` steps have been made."""
        return evaluation_is_due(self.args, step, self.total_steps)

    def log_evaluation(self, step: int, found: dict[str, float], shown: Sequence[dict] = ()) -> dict[str, float]:
        """Record the metrics of an evaluation, and responses to show; returns the metrics."""
        self.tracker.log_generations(step, "val", list(shown))
        parts = [f"{name} {found[f'val/{name}']:.4f}" for name in ("loss", "accuracy") if f"val/{name}" in found]
        self.exporter.update(step, found)
        self.tracker.log(step, found, f"step {step} | held out: {', '.join(parts)}")
        self._raise_alarms(step, found, lambda name: name.startswith("val"))
        return found

    def leave_if_asked(self) -> None:
        """End this process in good order if any rank was asked to stop, unless the step has begun to change weights."""
        stop.check(self.ranks)

    def offload(self) -> None:
        """Move what `resume` was told is `offloaded`, models and their optimizers, to the host."""
        for name in self.offloaded:
            checkpoint.wait_until_copied(self.folder)
            model, optimizer = self.trained[name]
            offload(model, None if self.args.optimizer_offload else optimizer)

    def refresh(self, reference: nn.Module, policy: nn.Module) -> None:
        """Give a reference the policy's weights. It has to be in what `resume` got, so that checkpoints have it."""
        checkpoint.wait_until_copied(self.folder)
        copy_weights(policy, reference)

    def onload(self) -> None:
        """Move it back to the device."""
        for name in self.offloaded:
            model, optimizer = self.trained[name]
            onload(model, self.ranks.device, None if self.args.optimizer_offload else optimizer)

    def is_usable(self, norms: dict[str, float], num_tokens: float, batch: Batch) -> bool:
        """Whether an update may be made: its gradient norms are finite, and there were tokens to learn from.

        Raises RuntimeError at the third in a row that may not, and writes the batch to the run's folder.
        """
        self.batch = batch
        usable = all(map(math.isfinite, norms.values())) and num_tokens > 0
        self.useless_updates = 0 if usable else self.useless_updates + 1
        if self.useless_updates == MAX_USELESS_UPDATES:
            raise RuntimeError(
                f"step {self.step + 1}: three updates in a row were useless, the last one with gradient norms {norms} "
                f"over {num_tokens:.0f} tokens that are learned from; if a norm is not finite lower the learning rate, "
                "if there are no tokens mend the reward, or raise --max-response-length where --overlong-filtering "
                f"leaves none; the step's batch is in {checkpoint.save_batch(self.folder, self.step + 1, batch)}"
            )
        return usable

    def log_step(
        self, step: int, metrics: dict[str, float], *, tokens: int, generated: int | None = None, shown: bool = True
    ) -> dict[str, float]:
        """Record a step's metrics with its times; returns all of them.

        Args: tokens, of the step; generated, those of them that were sampled; shown, whether a line is printed.
        """
        metrics |= self.clock.metrics(num_tokens=tokens, num_generated=generated)
        metrics["checkpoint/failed"] = float(self.folder.failures)
        self.exporter.update(step, metrics)
        self.tracker.log(step, metrics, progress_line(step, self.total_steps, metrics) if shown else "")
        self._raise_alarms(step, metrics, lambda name: not name.startswith("val"))
        return metrics

    def _raise_alarms(self, step: int, metrics: dict[str, float], belongs: Callable[[str], bool]) -> None:
        """Print the alarms of these metrics, with every kind of logger; and once, which of --alarms name none of them.

        Args: belongs, whether a metric of this name would be among them: those of evaluations come apart from others.
        """
        if not self.ranks.is_main:
            return
        stream = sys.stdout if "console" in self.args.logger else sys.stderr
        for alarm in alarms(metrics, self.args.alarms):
            say(f"ALARM at step {step}: {alarm}", stream)
        for condition in set(self.unheard):
            name = parse_alarm(condition)[0]
            if belongs(name):
                self.unheard.remove(condition)
                if name not in metrics:
                    near = difflib.get_close_matches(name, metrics, n=1)
                    say(
                        f"--alarms {condition}: step {step} has no metric {name!r}, so it raises no alarm"
                        + (f"; did you mean {near[0]}?" if near else ""),
                        stream,
                    )

    def show_sample(self, own_samples: Sequence[Sample], own_scores: Sequence[Score]) -> None:
        """Print rank 0's first response every --log-samples-freq steps, and record it and others to the same prompt in
        generations.jsonl, token by token: see `samples.describe`.
        """
        if self.args.log_samples_freq and self.step % self.args.log_samples_freq == 0 and own_samples:
            if self.ranks.is_main:
                shown = samples.describe(self.tokenizer, own_samples, own_scores, self.batch)
                self.tracker.log_generations(self.step + 1, "train", shown)
                self.tracker.print(show_sample(shown[0]["prompt"], shown[0]["response"], shown[0]["score"]))
        self.batch = None

    def close(self, *others: Any) -> None:
        """End a run that is complete, when its last save is on disk; then close the others, and leave the ranks.

        Raises RuntimeError, on all ranks, if the last save failed: the run is then without its result.
        """
        gc.unfreeze()
        checkpoint.close(self.folder)
        stop.end()
        self.tracker.close()
        self.exporter.close()
        for other in others:
            other.close()
        last_words.stop()
        shutdown_ranks()
        watchdog.stop()


def alarms(metrics: dict[str, float], conditions: Sequence[str]) -> list[str]:
    """A sentence for every condition (see `flags.parse_alarm`) that is true of the metrics, or whose metric is NaN.

    A metric that is absent raises no alarm.
    """
    found = []
    for metric, sign, limit in map(parse_alarm, conditions):
        value = metrics.get(metric, limit)
        if math.isnan(value) or (value > limit if sign == ">" else value < limit):
            found.append(f"{metric} is {value:.4g}, beyond the limit of --alarms {metric}{sign}{limit:g}")
    return found

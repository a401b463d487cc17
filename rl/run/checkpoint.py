"""Save and resume. A run owns the folder it writes to; in it, `global_step_N/` holds

    state/              parameters that learn (fp32) and moments, one safetensors file a rank: loads at any world size
    loop/               what the loop carries besides, such as a KL coefficient: JSON and safetensors of every rank
    huggingface/        config, tokenizer, safetensors in the compute dtype: transformers, vLLM and eval.py load it
    adapter/            with LoRA: the adapters alone, as PEFT saves them; huggingface/ has the sum of both
    huggingface_NAME/   the same of every other module that has an optimizer, such as a critic, and adapter_NAME/
    trainer_state.json  step, arguments, hashes of data, tokenizer and what adapters stand beside, versions
    MANIFEST.json       size and sha256 of every other file; written last

A thread copies the state to the host and writes the copy while training goes on; only the next optimizer step waits
for the copy. A checkpoint is written to a temporary folder, forced to disk and renamed: what has the final name was
complete, and the manifest tells whether it still is. Order of data and sampling seeds are functions of the step. What
is loaded is tensors and JSON, never code. docs/reliability.md lists what can go wrong.
"""

import contextlib
import copy
import inspect
import json
import math
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import IO, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedTokenizerBase

from rl.console import say
from rl.data.types import Batch
from rl.flags import AtLeast1, Free, Positive, PositiveFinite, flat, free
from rl.model import load as models
from rl.model import lora
from rl.model.sharding import full_tensors
from rl.ranks import PATIENCE, Ranks
from rl.run import checkpoint_files as files
from rl.run import checkpoint_tensors as tensors
from rl.run import loop_state, watchdog
from rl.run.checkpoint_files import list_steps
from rl.run.checkpoint_tensors import Trained
from rl.run.loop_state import LoopState
from rl.run.tracking import redact, secrets

T = TypeVar("T")

NORMAL_INTERVAL = sys.getswitchinterval()  # seconds after which a thread must hand on Python's lock
SAVING_INTERVAL = 0.0005  # the same while a save is written: 0.005 at every wait of the main thread would be felt
MAX_FAILURES = 3  # saves in a row that may fail before the run stops
PROBE = "Is  1,234.5 = 12345/10?\n\tYes: café, naïve, 你好, 😀; def f(x): return x**2"  # text of many kinds
EXPORT_FILE = 5 * 10**9  # bytes of a file in huggingface/, at most
FREE_SPACE = 1.2  # times the size of a checkpoint that must be free before one is written


@dataclass(frozen=True)
class Checkpoints:
    """checkpoints, stopping and resuming"""

    # checkpoints and metrics.jsonl go here
    default_local_dir: Free[str] = "runs/{project_name}/{experiment_name}"
    save_freq: Free[int] = -1  # save every this many steps and at the end; -1 only at the end; 0 never
    max_ckpt_to_keep: Free[AtLeast1 | None] = None  # delete older checkpoints beyond this many
    # auto: from the newest intact checkpoint, if any; disable; or a global_step_N folder
    resume_mode: Free[str] = "auto"
    force_resume: Free[bool] = False  # resume although settings or data that decide what is learned have changed
    max_hours: Free[Positive | None] = None  # save and leave after so many hours, as after SIGTERM or Ctrl-C
    # seconds without the end of a phase after which the run ends, with all its stacks
    stall_timeout: Free[PositiveFinite] = 3600.0


class Export(NamedTuple):
    """What a save has to know of a module, taken before the main thread goes on."""

    module: nn.Module
    keys: list[str]  # of what it trains
    size: int  # how many weights it has, trained or not
    buffers: dict[str, torch.Tensor]


Exports = dict[str, Export]  # by the name of the module


class Failed(ValueError):
    """Something failed on one rank or more. Every rank raises it, with the same text."""


@dataclass
class Folder:
    """A run folder that these ranks have for themselves. Made by `open_folder`, ended by `close` or by `leaving`."""

    root: pathlib.Path
    ranks: Ranks
    keep: int | None  # checkpoints to keep; None for all
    total_steps: int
    group: dist.ProcessGroup  # of the writing threads: the main threads use the default group at the same time
    host: tensors.Host | None = None  # what was saved last; the next save reuses the memory
    weights: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # on rank 0, of `host`: memory to reuse
    frozen: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # on rank 0, of each module: as exported
    resume_from: pathlib.Path | None = None  # the intact checkpoint to continue from
    saved: int = 0  # step of the newest checkpoint, as known so far; 0 for none
    failures: int = 0  # saves in a row that failed, as known so far: the same number on all ranks
    record: dict[str, Any] | None = None  # arguments and hashes, of rank 0
    tokenizer_files: dict[str, bytes] | None = None  # on rank 0; made once: that holds Python's lock for up to 0.2 s
    lock: IO[str] | None = None  # held open on rank 0
    pending: tuple[int, Future] | None = None  # the save that is being written, and its step
    copied: Event | None = None  # set when the newest save is on the host
    hooks: list[RemovableHandle] = field(default_factory=list)  # they make the optimizers wait for `copied`
    writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))


def open_folder(args: Any, tokenizer: PreTrainedTokenizerBase, total_steps: int, ranks: Ranks) -> Folder:
    """Take the run folder of a script's arguments and choose the checkpoint to resume from. All ranks must enter.

    Raises ValueError, on every rank and before anything is loaded, if the folder cannot be written or belongs to a
    running process, if ranks have other data than rank 0, if `find` refuses, or if the arguments or the data are not
    those of the checkpoint.
    """
    flags, mode = args.checkpoints, args.checkpoints.resume_mode
    names = {name: getattr(args.logging, name) for name in ("project_name", "experiment_name")}
    root = pathlib.Path(files.run_dir(flags.default_local_dir, names))
    if mode not in ("auto", "disable") and not (pathlib.Path(mode) / "MANIFEST.json").is_file():
        raise _no_checkpoint(mode, "no MANIFEST.json")
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    run = Folder(root, ranks, flags.max_ckpt_to_keep, total_steps, group)

    def claim() -> None:
        if ranks.is_main:
            run.lock = files.lock(root)
            files.sweep(root)
            run.tokenizer_files = _files_of(tokenizer)

    _together(claim)
    records = _together(lambda: _describe(args, tokenizer, total_steps))  # each rank has read files of its own machine
    run.record = records[0]
    for what, flag in (("data_sha256", "--train-files"), ("tokenizer_sha256", "the tokenizer of --model")):
        if odd := [rank for rank, record in enumerate(records) if record[what] != run.record[what]]:
            raise ValueError(
                f"{flag}: rank {odd[0]} has other contents than rank 0 (sha256 {records[odd[0]][what]} and "
                f"{run.record[what]}); copy the same files to every machine"
            )
    run.resume_from = find(mode, root, ranks)
    if run.resume_from:
        ours = (run.record, _defaults(args), free(args), flags.force_resume)
        _together(lambda: _compare(run.resume_from, *ours) if ranks.is_main else None)
        step = _step_of(run.resume_from)
        if run.resume_from.resolve().parent == root.resolve():
            run.saved = step
        if step >= total_steps and ranks.is_main:
            say(
                f"{run.resume_from}: all {total_steps} steps are done. To learn more raise --total-training-steps or "
                "--total-epochs; to begin another run give it an --experiment-name of its own"
            )
    _status(run, "running", run.saved)
    return run


def save(run: Folder, step: int, trained: Trained, state: LoopState) -> None:
    """Begin to write `global_step_<step>` as everything is now. All ranks must enter.

    Returns while a thread still reads the tensors. The next step of each optimizer waits for that; before they are
    changed or moved in any other way, call `wait_until_copied`. Waits for the save before. Modules may be on any
    device. `state` is what each rank's loop carries from step to step and does not follow from the step's number.

    Older checkpoints beyond the number to keep are deleted afterwards. After a failure, such as a full disk, nothing is
    left of the new checkpoint and older ones are as they were. The `save`, `leave` or `close` after it counts it in
    `run.failures`, and raises RuntimeError on all ranks at the third in a row.
    """
    _settle(run)
    # All of this is taken here: while FSDP computes, a module holds other parameters than its own.
    exports = {
        name: Export(
            module,
            list(tensors.learning(module)),
            sum(x.numel() for x in module.parameters()),
            {key: x.to("cpu", copy=True) for key, x in models.buffers_in_files(module)},
        )
        for name, (module, optimizer) in trained.items()
        if optimizer
    }
    for name, export in exports.items():
        if name not in run.frozen:
            run.frozen[name] = _frozen_weights(export.module, run.ranks)
    own = tensors.own_tensors(trained)
    stream = torch.cuda.Stream() if run.ranks.device.type == "cuda" else None  # the copy runs beside the next rollout
    if stream:
        stream.wait_stream(torch.cuda.current_stream())
    run.copied = Event()
    for hook in run.hooks:
        hook.remove()
    run.hooks = [x.register_step_pre_hook(lambda *_: wait_until_copied(run)) for _, x in trained.values() if x]
    run.pending = step, run.writer.submit(_save, run, step, exports, own, stream, state)


def wait_until_copied(run: Folder) -> None:
    """Return when the tensors of the newest save may be changed, or moved, or their memory used for something else."""
    if run.copied:
        run.copied.wait()


def leaving(run: Folder, step: int, trained: Trained, state: LoopState) -> Callable[[], None]:
    """What ends a run that is asked to stop after `step`: a call that saves that, unless it is on disk or 0, and waits.

    All ranks must make the call; it raises RuntimeError as `close`. The same command continues the run.
    """

    def leave() -> None:
        _settle(run)
        if step != run.saved:
            save(run, step, trained, state)
            _settle(run)
        _end(run, "stopped", step)

    return leave


def close(run: Folder) -> None:
    """End a run that is complete, when its last save is on disk, and give its folder free. All ranks must enter.

    Call it before the process group is taken down. Raises RuntimeError, on all ranks, if the last save failed: the run
    is then without its result.
    """
    _settle(run)
    _end(run, "completed", run.total_steps)


def save_batch(run: Folder, step: int, batch: Batch) -> str:
    """Write the tensors of every rank's rows to `bad_batch_step_<step>_rank_<rank>.safetensors`; returns what the files
    are called.

    It is for finding out why a step went wrong: if it fails, that is printed only.
    """
    path = run.root / f"bad_batch_step_{step}_rank_{run.ranks.rank}.safetensors"
    on_host = {name: x.to("cpu", copy=True).contiguous() for name, x in vars(batch).items() if x is not None}
    try:
        save_file(on_host, path)
    except (OSError, SafetensorError) as error:
        say(f"{path} could not be written: {error}")
    return str(path).replace(f"_rank_{run.ranks.rank}.", "_rank_*.")


def _settle(run: Folder) -> None:
    """Wait for the save that is being written, if any, and take note of its outcome: the same one on all ranks."""
    if run.pending is None:
        return
    (step, outcome), run.pending = run.pending, None
    try:
        outcome.result()
    except Failed as error:
        run.failures += 1
        if run.failures == MAX_FAILURES:
            expected = isinstance(error.__cause__, (OSError, SafetensorError))  # where it was raised tells nothing
            raise RuntimeError(
                f"{run.failures} checkpoints in a row could not be written to {run.root}; the last reason: {error}"
            ) from (None if expected else error)
    else:
        run.failures, run.saved = 0, step


def _end(run: Folder, state: str, step: int) -> None:
    """Give the folder free, with a last word in STATUS.json if all went well."""
    if not run.failures:
        _status(run, state, step)
    if run.lock:
        run.lock.close()
    run.writer.shutdown()
    if run.failures:
        raise RuntimeError(
            f"the last checkpoint could not be written to {run.root}, for the reason above; mend that, then run the "
            "same command again to continue from the newest one"
        )


def _status(run: Folder, state: str, step: int) -> None:
    if run.ranks.is_main:
        try:
            files.write_status(run.root, state=state, step=step, total_steps=run.total_steps)
        except OSError as error:  # no reason to lose the run
            say(f"{run.root / 'STATUS.json'} could not be written: {error}")


def _save(
    run: Folder, step: int, exports: Exports, own: tensors.Own, stream: torch.cuda.Stream | None, state: LoopState
) -> None:
    """What the writing threads of all ranks do for a save. Raises Failed on all of them, with nothing left of it."""
    sys.setswitchinterval(SAVING_INTERVAL)
    try:
        _together(lambda: _copy(run, own, stream), run.group)  # memory may be too small on one rank
        _together(lambda: files.check_size_limit(_large_files(run, exports, own.places, state)), run.group)
        _write(run, step, exports, own.places, state)
    except Failed as error:
        if run.ranks.is_main:
            with contextlib.suppress(OSError):
                files.sweep(run.root)
            say(f"CHECKPOINT OF STEP {step} NOT WRITTEN ({run.failures + 1} in a row): {error}")
        raise
    finally:
        sys.setswitchinterval(NORMAL_INTERVAL)
    if run.ranks.is_main:
        try:
            files.delete_older(run.root, step, run.keep)
        except OSError as error:  # no reason to lose the run
            say(f"older checkpoints in {run.root} could not be removed: {error}")
        _status(run, "running", step)


def _copy(run: Folder, own: tensors.Own, stream: torch.cuda.Stream | None) -> None:
    """Copy `own` to `run.host`, and let go of the tensors."""
    try:
        if stream:
            torch.cuda.set_device(run.ranks.device)  # a thread begins with the first device of the machine
        # Moments come with the first optimizer step, which may be after the first save.
        if run.host is None or run.host.tensors.keys() != own.tensors.keys():
            run.host = None
            run.host = tensors.make_host(own.tensors, pinned=stream is not None)
        tensors.copy(own, run.host, stream)
    finally:
        own.tensors.clear()  # the main thread may now free what it holds on the device
        own.pieces.clear()
        run.copied.set()


def _large_files(run: Folder, exports: Exports, places: dict[str, tensors.Place], state: LoopState) -> dict[str, int]:
    """Bytes of the largest files that this rank will write, by name."""
    rank, sizes = f"rank_{run.ranks.rank}.safetensors", {}
    sizes[f"state/{rank}"] = sum(x.nbytes for x in run.host.tensors.values())
    sizes[f"loop/{rank}"] = sum(x.nbytes for x in state.arrays.values())
    for name, export in exports.items() if run.ranks.is_main else ():
        sizes[f"a file of the weights of {name}"] = min(export.size * run.ranks.dtype.itemsize, EXPORT_FILE)
    return sizes


def _write(run: Folder, step: int, exports: Exports, places: dict[str, tensors.Place], state: LoopState) -> None:
    """Write a checkpoint and give it its name. All ranks must enter; raises Failed on all of them."""
    ranks, group, host = run.ranks, run.group, run.host.tensors
    temporary = _gather(files.spare(run.root, "tmp", step), group)[0]

    def prepare() -> None:
        if ranks.is_main:
            size = {name: math.prod(place.shape) for name, place in places.items()}
            needed = sum(n * host[name].element_size() for name, n in size.items())
            needed += sum(export.size * ranks.dtype.itemsize for export in exports.values())
            needed *= FREE_SPACE
            run.root.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(run.root).free) < needed:
                raise OSError(f"{needed / 1e9:.3f} GB are needed in {run.root}, {free / 1e9:.3f} GB are free")
            (temporary / "state").mkdir(parents=True)
            (temporary / "loop").mkdir()

    def write() -> None:
        tensors.write(temporary / "state", ranks.rank, host, places)
        loop_state.write(temporary / "loop", ranks.rank, state)

    def export() -> list[str]:
        if ranks.is_main:
            bases = {}
            for i, (name, (module, keys, _, buffers)) in enumerate(exports.items()):
                suffix, own = f"_{name}" if i else "", _whole_weights(run, name, keys, places, temporary / "state")
                weights = models.exported(module, (run.frozen[name] | own | buffers).items())
                weights = {key: _alone(x) for key, x in weights}
                export_hf(temporary / f"huggingface{suffix}", module, weights, run.tokenizer_files, ranks.dtype)
                if hasattr(module, "lora"):
                    lora.write(temporary / f"adapter{suffix}", module, own)
                    bases[name] = {"base": module.lora.base, "base_sha256": module.lora.base_sha256}
            written = {"step": step, "world_size": ranks.size, "torch": torch.__version__, "lora": bases, **run.record}
            (temporary / "trainer_state.json").write_text(json.dumps(written, indent=2))
            return sorted(str(p.relative_to(temporary)) for p in temporary.rglob("*") if p.is_file())
        return []

    def force_to_disk() -> dict[str, dict]:
        return {name: files.size_and_hash(temporary / name, sync=True) for name in names[ranks.rank :: ranks.size]}

    def commit() -> None:
        if ranks.is_main:
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            manifest = {"step": step, "world_size": ranks.size, "versions": versions}
            manifest["files"] = {name: entry for part in parts for name, entry in part.items()}
            files.commit(temporary, run.root / f"global_step_{step}", manifest)

    _together(prepare, group)
    _together(write, group)
    names = _together(export, group)[0]
    parts = _together(force_to_disk, group)
    _together(commit, group)


def _alone(x: torch.Tensor) -> torch.Tensor:
    """A tensor with memory of its own: safetensors refuses parts of another one."""
    return x if x.nbytes == x.untyped_storage().nbytes() else x.clone()


def _frozen_weights(module: nn.Module, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The weights of a module that nothing trains, whole, on the host of rank 0. All ranks must enter."""
    names = {key for key, x in module.named_parameters() if not x.requires_grad}
    if not names:
        return {}
    found = {}
    for key, x in full_tensors(module, ranks.dtype):
        if ranks.is_main and key in names:
            found[key] = x.to("cpu", copy=True)
    return found


def _whole_weights(
    run: Folder, name: str, keys: list[str], places: dict[str, tensors.Place], written: pathlib.Path
) -> dict[str, torch.Tensor]:
    """What the module `name` trains, in the compute dtype but for adapters, until the next save.

    One rank has all of them on the host; of several, each has its own rows there, and the files have those of all.
    """
    paths = {key: f"{name}/model/{key}" for key in keys}
    if name not in run.weights:
        run.weights[name] = {
            key: torch.empty(
                places[path].shape,
                dtype=run.host.tensors[path].dtype if lora.is_adapter(key) else run.ranks.dtype,
            )
            for key, path in paths.items()
        }
    weights = run.weights[name]
    if run.ranks.size == 1:
        torch._foreach_copy_(list(weights.values()), [run.host.tensors[paths[key]] for key in weights])
    else:
        saved = tensors.read(written, run.ranks.size, set(paths.values()))
        for key, whole in weights.items():
            tensors.fill(whole, saved[paths[key]])
    return dict(weights)


def load(path: pathlib.Path, trained: Trained, *, moments_on_host: bool = False) -> int:
    """Restore a folder that `find` returned, in place, at any world size; returns its step. All ranks must enter.

    moments_on_host: leave AdamW's moments on the host. `sharding.keep_moments_on_host` is to take them from there.
    Raises ValueError if it holds anything but the tensors of these modules and optimizers, or its adapters stood beside
    other weights than theirs.
    """
    _together(lambda: _check_bases(path, trained))
    saved = tensors.read(path / "state", _trainer_state(path)["world_size"])
    tensors.load(saved, trained, moments_on_host=moments_on_host)
    return _step_of(path)


def _check_bases(path: pathlib.Path, trained: Trained) -> None:
    bases = _trainer_state(path).get("lora", {})
    for name, (module, _) in trained.items():
        if name in bases and (now := getattr(module, "lora", None)) and now.base_sha256:  # rank 0 knows the hash
            then = bases[name]["base_sha256"]
            if now.base_sha256 != then:
                raise ValueError(
                    f"the adapters in {path} were trained beside other weights than those of {now.base} (sha256 was "
                    f"{then}, is {now.base_sha256}): restore these, or choose another --experiment-name to start anew"
                )


def load_states(path: pathlib.Path | None) -> list[dict[str, Any]]:
    """What each rank's loop carried when the checkpoint was saved, in the order of the ranks; [] without a checkpoint.

    Arrays are arrays again, tuples are lists, and keys of dicts are strings.
    """
    return [] if path is None else loop_state.read(path / "loop", _trainer_state(path)["world_size"])


def find(resume_mode: str, root: str | pathlib.Path, ranks: Ranks) -> pathlib.Path | None:
    """The checkpoint to resume, every byte of it compared with its manifest. All ranks must enter.

    `auto`: the newest intact one under `root`, or None if there is none at all. `disable`: None. Otherwise a
    global_step_N folder. Says which ones it passes over, and why. Raises ValueError if all are damaged, if the folder
    is not a complete checkpoint, or if `disable` or the folder would mix a new run into another one under `root`.
    """
    steps = _gather(list_steps(root) if ranks.is_main else [])[0]
    if resume_mode == "disable":
        if steps:
            raise ValueError(
                f"--resume-mode disable, but {root} holds checkpoints up to step {steps[-1]}; choose another "
                "--experiment-name or --default-local-dir, or remove the folder"
            )
        return None
    if resume_mode != "auto":
        path = pathlib.Path(resume_mode)
        if problem := _problem(path, ranks):
            raise _no_checkpoint(resume_mode, problem)
        inside = path.resolve().parent == pathlib.Path(root).resolve()
        if steps and not (inside and steps[-1] <= _step_of(path)):
            raise ValueError(
                f"--resume-mode {resume_mode}, but {root} holds checkpoints of a run that went on from there, or of "
                f"another one, up to step {steps[-1]}; give auto to continue from the newest, or another "
                "--experiment-name to go on from the named one, or remove them"
            )
        return path
    rejected: list[str] = []
    for path in (pathlib.Path(root) / f"global_step_{step}" for step in reversed(steps)):
        problem = _problem(path, ranks)
        if not problem:
            return path
        rejected.append(f"{path}: {problem}")
        if ranks.is_main:
            say(f"checkpoint passed over: {rejected[-1]}")
    if rejected:
        raise ValueError(
            f"none of the checkpoints under {root} is intact, so there is nothing to resume from; restore one, or "
            "remove them or choose another --experiment-name to start anew:\n" + "\n".join(rejected)
        )
    return None


def export_hf(
    path: pathlib.Path,
    module: nn.Module,
    weights: dict[str, torch.Tensor],
    tokenizer_files: dict[str, bytes],
    dtype: torch.dtype,
) -> None:
    """Write what transformers and vLLM load: safetensors in `dtype`, config, generation config, tokenizer."""
    path.mkdir(parents=True)
    config = copy.deepcopy(module.config)
    config.dtype = dtype
    config.architectures = [type(module).__name__.removeprefix("FSDP")]
    config.save_pretrained(path)
    if module.can_generate():
        module.generation_config.to_json_file(path / "generation_config.json")  # save_pretrained refuses many a model's
    save_torch_state_dict(weights, path, max_shard_size=EXPORT_FILE, metadata={"format": "pt"})
    for name, content in tokenizer_files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


def _gather(x: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """`x` of every rank of a group, by default of all. All of them must enter."""
    results: list[T] = [x] * dist.get_world_size(group)
    dist.all_gather_object(results, x, group=group)
    return results


def _together(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `work` on every rank and return all results; if it failed on some, raise Failed on all. All must enter."""
    result, error, cause = None, None, None
    try:
        result = work()
    except Exception as e:  # a full disk or memory has many names, and the other ranks wait
        cause, error = e, str(e) if isinstance(e, ValueError) else f"rank {dist.get_rank()}: {type(e).__name__}: {e}"
    outcomes = _gather((result, error), group)
    watchdog.beat()  # the main thread may be waiting for nothing else
    errors = [error for _, error in outcomes if error is not None]
    if errors:
        raise Failed(errors[0]) from cause
    return [result for result, _ in outcomes]


def _problem(path: pathlib.Path, ranks: Ranks) -> str:
    """Why a folder is not an intact checkpoint, "" if it is. Every rank reads its share. All ranks must enter."""
    try:
        return next(filter(None, _together(lambda: files.problem(path, ranks.rank, ranks.size))), "")
    except Failed as error:
        return str(error)


def _no_checkpoint(resume_mode: str, problem: str) -> ValueError:
    return ValueError(
        f"--resume-mode {resume_mode}: not a complete checkpoint ({problem}); give auto, disable or a "
        "global_step_N folder"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Contents


def _files_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """What `save_pretrained` writes, by name."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = [p for p in pathlib.Path(folder).rglob("*") if p.is_file()]  # further chat templates have a folder
        return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


def _step_of(path: pathlib.Path) -> int:
    return _trainer_state(path)["step"]


def _trainer_state(path: pathlib.Path) -> dict[str, Any]:
    return json.loads((path / "trainer_state.json").read_text())


def _describe(args: Any, tokenizer: PreTrainedTokenizerBase, total_steps: int) -> dict[str, Any]:
    """What must be the same when a run is resumed, as JSON has it."""
    probe = tokenizer(PROBE)["input_ids"]  # merges, normalizer and post-processor show in it
    return {
        "script": pathlib.Path(inspect.getfile(type(args))).stem,
        "args": redact(json.loads(json.dumps(flat(args), default=str)), secrets()),
        "total_steps": total_steps,
        "data_sha256": [files.size_and_hash(pathlib.Path(file))["sha256"] for file in flat(args)["train_files"]],
        "tokenizer_sha256": files.hash_of(
            [tokenizer.get_vocab(), tokenizer.chat_template, tokenizer.special_tokens_map, probe]
        ),
    }


def _defaults(args: Any) -> dict[str, Any]:
    return json.loads(json.dumps(flat(type(args)()), default=str))


def _compare(path: pathlib.Path, now: dict[str, Any], defaults: dict[str, Any], free: set[str], force: bool) -> None:
    """Raise ValueError if a run described by `now` would not be the continuation of the checkpoint in `path`.

    Flags that are `free` may have changed, and a flag that the script did not have then may be there at its default.
    """
    then = _trainer_state(path)
    new = {flag: defaults[flag] for flag in now["args"].keys() - then["args"].keys() if flag in defaults}
    before = new | then["args"]
    if then["step"] > now["total_steps"]:
        raise ValueError(
            f"{path} is beyond the {now['total_steps']} steps of this run; raise --total-training-steps (or "
            "--total-epochs) to train on, choose another --experiment-name to start anew, or use eval.py to evaluate it"
        )
    changed = [
        f"--{flag.replace('_', '-')}: was {before.get(flag, 'unknown')}, is {now['args'].get(flag, 'unknown')}"
        for flag in sorted((before.keys() | now["args"].keys()) - free)
        if flag not in before or flag not in now["args"] or before[flag] != now["args"][flag]
    ]
    if then.get("script", now["script"]) != now["script"]:
        changed.insert(0, f"script: was {then['script']}.py, is {now['script']}.py")
    if then["data_sha256"] != now["data_sha256"]:
        changed.append(f"contents of --train-files: sha256 was {then['data_sha256']}, is {now['data_sha256']}")
    if then["tokenizer_sha256"] != now["tokenizer_sha256"]:
        changed.append(f"tokenizer: sha256 was {then['tokenizer_sha256']}, is {now['tokenizer_sha256']}")
    if now["args"]["lr_scheduler_type"] != "constant" and then["total_steps"] != now["total_steps"]:
        changed.append(f"steps that shape the learning rate: were {then['total_steps']}, are {now['total_steps']}")
    if changed and not force:
        raise ValueError(
            f"{path} comes from a run with other settings; go back to them, choose another --experiment-name, or add "
            "--force-resume to continue with the new ones:\n" + "\n".join(changed)
        )
    if changed:
        say(f"--force-resume: {path} is continued with other settings:\n" + "\n".join(changed))

"""Save and resume. A run owns the folder it writes to; in it, `global_step_N/` holds

    state/              parameters (fp32) and optimizer state, torch DCP: loads at any world size
    huggingface/        config, tokenizer, safetensors in the compute dtype: transformers, vLLM and eval.py load it
    trainer_state.json  step, arguments, hashes of data and tokenizer, versions
    MANIFEST.json       size and sha256 of every other file; written last

A checkpoint is written to a temporary folder, forced to disk and renamed: what has the final name was complete, and the
manifest tells whether it still is. Order of data and sampling seeds are functions of the step, so the step is all the
loop state there is. What is loaded is tensors and JSON, never code. docs/reliability.md lists what can go wrong.
"""

import copy
import fcntl
import hashlib
import json
import os
import pathlib
import pickle
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import PreTrainedTokenizerBase

from rl import fsdp
from rl.fsdp import Dist, full_tensors

T = TypeVar("T")

MAX_FAILURES = 3  # saves in a row that may fail before the run stops
FREE_SPACE = 1.2  # times the size of a checkpoint that must be free before one is written

# Flags that may change on resume: they decide where, how often and how fast, not what is learned. Data files are
# compared by content, and the number of steps where the learning rate depends on it. Any other flag must stay.
FREE_TO_CHANGE = set(
    """
    train_files val_files total_epochs total_training_steps
    reward_workers reward_timeout reward_memory_mb reward_max_error_frac allow_unsafe_code_execution
    tensor_model_parallel_size gpu_memory_utilization max_num_seqs free_cache_engine max_logprob_gap
    ppo_max_token_len_per_gpu max_token_len_per_gpu activation_checkpointing fsdp_size compile
    val_before_train test_freq log_val_generations log_samples_freq log_freq logger project_name experiment_name
    default_local_dir save_freq max_ckpt_to_keep resume_mode force_resume stall_timeout
    """.split()
)

# All that torch puts into the pickle that describes a DCP checkpoint of tensors, besides dtypes. BytesStorageMetadata
# is not among them: it stands for an entry that is a pickle itself.
METADATA_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in "Metadata MetadataIndex StorageMeta TensorStorageMetadata TensorProperties ChunkStorageMetadata "
        "_MEM_FORMAT_ENCODING".split()
    ),
}


class Failed(ValueError):
    """Something failed on one rank or more. Every rank raises it, with the same text."""


@dataclass
class Run:
    """A run folder that these ranks have for themselves. Made by `open_run`, ended by `close`."""

    root: pathlib.Path
    d: Dist
    tokenizer: PreTrainedTokenizerBase
    keep: int | None  # checkpoints to keep; None for all
    resume_from: pathlib.Path | None = None  # the intact checkpoint to continue from
    failures: int = 0  # saves in a row that failed
    record: dict[str, Any] | None = None  # arguments and hashes, on rank 0
    lock: IO[str] | None = None  # held open on rank 0


def run_dir(args: Any) -> str:
    """--default-local-dir with its placeholders filled in.

    Raises ValueError for an unknown placeholder, and for a project or experiment name that is not a plain file name.
    """
    names = {name: vars(args)[name] for name in ("project_name", "experiment_name")}
    for name, value in names.items():
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", value):
            raise ValueError(
                f"--{name.replace('_', '-')} {value!r} must be 1 to 100 letters, digits, '.', '_' or '-', and not "
                "start with '.': it names a folder"
            )
    try:
        folder = args.default_local_dir.format(**names)
    except (KeyError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--default-local-dir {args.default_local_dir!r}: the placeholders are {{project_name}} and "
            f"{{experiment_name}}, not {error}"
        ) from error
    if not folder or not folder.isprintable():
        raise ValueError(f"--default-local-dir {folder!r} is empty or holds control characters; choose another folder")
    return folder


def open_run(args: Any, tokenizer: PreTrainedTokenizerBase, total_steps: int, d: Dist) -> Run:
    """Take the run folder of a script's arguments and choose the checkpoint to resume from. All ranks must enter.

    Raises ValueError, on every rank and before anything is loaded, if the folder cannot be written or belongs to a
    running process, if `find` refuses, or if the arguments or the data are not those of the checkpoint.
    """
    run = Run(pathlib.Path(run_dir(args)), d, tokenizer, args.max_ckpt_to_keep)
    if args.resume_mode not in ("auto", "disable") and not (pathlib.Path(args.resume_mode) / "MANIFEST.json").is_file():
        raise _no_checkpoint(args.resume_mode, "no MANIFEST.json")

    def claim() -> None:
        if d.is_main:
            run.lock = _lock(run.root)
            _sweep(run.root)
            run.record = _describe(args, tokenizer, total_steps)

    _together(claim, d)
    run.resume_from = find(args.resume_mode, run.root, d)
    if run.resume_from:
        _together(lambda: _compare(run.resume_from, run.record, args.force_resume) if d.is_main else None, d)
    return run


def close(run: Run) -> None:
    """Give the run folder free. Raises RuntimeError if the last save failed: the run is then without its result."""
    if run.lock:
        run.lock.close()
    if run.failures:
        raise RuntimeError(
            f"the last checkpoint could not be written to {run.root}; free some space, then run the same command again "
            "to continue from the newest one"
        )


def save(
    run: Run,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    extra: dict[str, float] | None = None,
) -> pathlib.Path | None:
    """Write `global_step_<step>` and return it, or None if that failed. All ranks must enter.

    `extra` are numbers of the loop that do not follow from the step. Older checkpoints beyond the number to keep are
    deleted afterwards. After a failure, such as a full disk, nothing is left of the new checkpoint and older ones are
    as they were; raises RuntimeError at the third failure in a row.
    """
    try:
        _write(run, step, model, optimizer, extra or {})
    except Failed as error:
        run.failures += 1
        if run.d.is_main:
            _sweep(run.root)
            print(f"CHECKPOINT OF STEP {step} NOT WRITTEN ({run.failures} in a row): {error}", flush=True)
        if run.failures == MAX_FAILURES:
            raise RuntimeError(
                f"{run.failures} checkpoints in a row could not be written to {run.root}; the last reason: {error}"
            ) from error
        return None
    run.failures = 0
    if run.d.is_main:
        try:
            _delete_older(run.root, step, run.keep)
            _sweep(run.root)
        except OSError as error:  # no reason to lose the run
            print(f"older checkpoints in {run.root} could not be removed: {error}", flush=True)
    dist.barrier()
    return run.root / f"global_step_{step}"


def _write(run: Run, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, float]) -> None:
    """Write a checkpoint and give it its name. All ranks must enter; raises Failed on all of them."""
    d = run.d
    [temporary] = fsdp.all_gather([_spare(run.root, "tmp", step)] if d.is_main else [], d)
    state, _ = _tensors(model, optimizer)
    tensors = [
        *state["model"].values(),
        *(x for values in state["optimizer"]["state"].values() for x in values.values()),
    ]
    exported = sum(parameter.numel() for parameter in model.parameters()) * d.dtype.itemsize
    needed = FREE_SPACE * (sum(x.numel() * x.element_size() for x in tensors) + exported)

    def prepare() -> None:
        if d.is_main:
            run.root.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(run.root).free) < needed:
                raise OSError(f"{needed / 1e9:.3f} GB are needed in {run.root}, {free / 1e9:.3f} GB are free")
            temporary.mkdir()

    def write() -> None:
        dcp.save(state, checkpoint_id=temporary / "state")
        export_hf(temporary / "huggingface", model, run.tokenizer, d)
        if d.is_main:
            written = {"step": step, "world_size": d.world_size, "torch": torch.__version__, **run.record}
            (temporary / "trainer_state.json").write_text(json.dumps(written | {"extra": extra}, indent=2))

    def force_to_disk() -> dict[str, dict]:
        return {name: _size_and_hash(temporary / name, sync=True) for name in names[d.rank :: d.world_size]}

    def commit() -> None:
        if d.is_main:
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            manifest = {"step": step, "world_size": d.world_size, "versions": versions}
            manifest["files"] = {name: entry for part in parts for name, entry in part.items()}
            text = json.dumps(manifest | {"sha256": _hash_of(manifest)}, indent=2, sort_keys=True)
            (temporary / "MANIFEST.json").write_text(text)
            for path in (temporary / "MANIFEST.json", *(p for p in temporary.rglob("*/")), temporary):
                _sync(path)
            final = run.root / f"global_step_{step}"
            if final.exists():  # damaged, or of a run that went another way from an older step
                final.rename(_spare(run.root, "old", step))
            temporary.rename(final)
            _sync(run.root)

    _together(prepare, d)
    _together(write, d)
    names = sorted(str(p.relative_to(temporary)) for p in temporary.rglob("*") if p.is_file()) if d.is_main else []
    names = fsdp.all_gather(names, d)
    parts = _together(force_to_disk, d)
    _together(commit, d)


def load(path: pathlib.Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore a folder that `find` returned, in place, at any world size; returns its step. All ranks must enter.

    Raises ValueError if it holds anything but the tensors of this model and this optimizer.
    """
    state, param_groups = _tensors(model, optimizer)
    _check_tensors(path / "state" / ".metadata", state)
    dcp.load(state, checkpoint_id=path / "state")
    optimizer_state = {"state": state["optimizer"]["state"], "param_groups": param_groups}
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state)
    return json.loads((path / "trainer_state.json").read_text())["step"]


def extra(path: pathlib.Path | None) -> dict[str, float]:
    """What `save` got as `extra`; {} without a checkpoint."""
    return {} if path is None else json.loads((path / "trainer_state.json").read_text())["extra"]


def list_steps(root: str | pathlib.Path) -> list[int]:
    """Steps of the checkpoints under `root`, intact or not, ascending."""
    matches = (re.fullmatch(r"global_step_(\d+)", p.name) for p in pathlib.Path(root).glob("global_step_*/"))
    return sorted(int(m[1]) for m in matches if m)


def find(resume_mode: str, root: str | pathlib.Path, d: Dist) -> pathlib.Path | None:
    """The checkpoint to resume, every byte of it compared with its manifest. All ranks must enter.

    `auto`: the newest intact one under `root`, or None if there is none at all. `disable`: None. Otherwise a
    global_step_N folder. Says which ones it passes over, and why. Raises ValueError if all are damaged, if the folder
    is not a complete checkpoint, or if `disable` would mix a new run into an old one.
    """
    steps = fsdp.all_gather(list_steps(root) if d.is_main else [], d)
    if resume_mode == "disable":
        if steps:
            raise ValueError(
                f"--resume-mode disable, but {root} holds checkpoints up to step {steps[-1]}; choose another "
                "--experiment-name or --default-local-dir, or remove the folder"
            )
        return None
    if resume_mode != "auto":
        if problem := _problem(pathlib.Path(resume_mode), d):
            raise _no_checkpoint(resume_mode, problem)
        return pathlib.Path(resume_mode)
    rejected = []
    for path in (pathlib.Path(root) / f"global_step_{step}" for step in reversed(steps)):
        problem = _problem(path, d)
        if not problem:
            return path
        rejected.append(f"{path}: {problem}")
        if d.is_main:
            print(f"checkpoint passed over: {rejected[-1]}", flush=True)
    if rejected:
        raise ValueError(
            f"none of the checkpoints under {root} is intact, so there is nothing to resume from; restore one, or "
            "remove them or choose another --experiment-name to start anew:\n" + "\n".join(rejected)
        )
    return None


def export_hf(path: pathlib.Path, model: nn.Module, tokenizer: PreTrainedTokenizerBase, d: Dist) -> None:
    """Write what transformers and vLLM load: safetensors in the compute dtype, config, generation config, tokenizer.

    All ranks must enter.
    """
    tensors = {}
    for name, tensor in full_tensors(model, d.dtype):  # tied weights come once, as safetensors wants them
        if d.is_main:
            tensors[name] = tensor.cpu()
    if d.is_main:
        path.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(model.config)
        config.dtype = d.dtype
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(path)
        if model.can_generate():
            model.generation_config.save_pretrained(path)
        save_torch_state_dict(tensors, path, metadata={"format": "pt"})
        tokenizer.save_pretrained(path)


def _together(work: Callable[[], T], d: Dist) -> list[T]:
    """Run `work` on every rank and return all results; if it failed on some, raise Failed on all. All must enter."""
    result, error = None, None
    try:
        result = work()
    except ValueError as e:
        error = str(e)
    except CheckpointException as e:  # of DCP, on all ranks: it knows which one failed
        error = "; ".join(f"rank {rank}: {type(x).__name__}: {x}" for rank, (x, _) in e.failures.items())
    except (OSError, RuntimeError, SafetensorError) as e:  # a full disk is any of these
        error = f"rank {d.rank}: {type(e).__name__}: {e}"
    outcomes = fsdp.all_gather([(result, error)], d)
    errors = [error for _, error in outcomes if error is not None]
    if errors:
        raise Failed(errors[0])
    return [result for result, _ in outcomes]


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _lock(root: pathlib.Path) -> IO[str]:
    """Hold run.lock until the file is closed or the process dies. Raises ValueError if another process holds it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / "run.lock", "a+")
    except OSError as error:
        raise ValueError(f"--default-local-dir: {root} cannot be written ({error}); choose another folder") from error
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        lock.seek(0)
        raise ValueError(
            f"{root} is in use by another run ({lock.read().strip()}); let it end, or choose another "
            "--experiment-name or --default-local-dir"
        ) from error
    except OSError as error:  # some network file systems
        print(f"{root / 'run.lock'} cannot be locked ({error}): make sure that no other run writes there", flush=True)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    lock.flush()
    return lock


def _spare(root: pathlib.Path, kind: str, step: int) -> pathlib.Path:
    """A fresh name: "tmp" for what may be thrown away, "old" for what must not until its successor is in place."""
    return root / f".{kind}-global_step_{step}-{secrets.token_hex(4)}"


def _sweep(root: pathlib.Path) -> None:
    """Remove what an interrupted save has left. Only for the process that holds the lock."""
    for old in root.glob(".old-global_step_*"):
        final = root / old.name.removeprefix(".old-").rsplit("-", 1)[0]
        if not final.exists():  # it was stopped between the two renames
            old.rename(final)
    for leftover in (*root.glob(".tmp-global_step_*"), *root.glob(".old-global_step_*")):
        shutil.rmtree(leftover, ignore_errors=True)


def _delete_older(root: pathlib.Path, step: int, keep: int | None) -> None:
    """Hand checkpoints beyond the newest `keep` up to `step` to `_sweep`. Folders without a manifest are not ours."""
    ours = [s for s in list_steps(root) if s <= step and (root / f"global_step_{s}" / "MANIFEST.json").is_file()]
    for old in ours[:-keep] if keep else []:
        if not (root / f"global_step_{old}").is_symlink():
            (root / f"global_step_{old}").rename(_spare(root, "tmp", old))


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size_and_hash(file: pathlib.Path, *, sync: bool = False) -> dict[str, int | str]:
    with open(file, "rb") as f:
        if sync:
            os.fsync(f.fileno())
        return {"size": os.fstat(f.fileno()).st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}


def _hash_of(value: Any) -> str:
    """sha256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _problem(path: pathlib.Path, d: Dist) -> str:
    """Why a folder is not an intact checkpoint, "" if it is. Every rank reads its share. All ranks must enter."""

    def check() -> str:
        if not (path / "MANIFEST.json").is_file():
            return "no MANIFEST.json"
        try:
            manifest = json.loads((path / "MANIFEST.json").read_text())
        except ValueError:
            manifest = None
        if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _hash_of(manifest):
            return "MANIFEST.json is damaged"
        for name, expected in sorted(manifest["files"].items())[d.rank :: d.world_size]:
            if not (path / name).is_file():
                return f"{name} is missing"
            if (size := (path / name).stat().st_size) != expected["size"]:
                return f"{name} has {size} bytes instead of {expected['size']}"
            if _size_and_hash(path / name)["sha256"] != expected["sha256"]:
                return f"{name} is damaged: its sha256 is not that of the manifest"
        return ""

    try:
        return next(filter(None, _together(check, d)), "")
    except Failed as error:
        return str(error)


def _no_checkpoint(resume_mode: str, problem: str) -> ValueError:
    return ValueError(
        f"--resume-mode {resume_mode}: not a complete checkpoint ({problem}); give auto, disable or a "
        "global_step_N folder"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Contents


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[dict]]:
    """What is saved, tensors only, and the optimizer's hyperparameters, which are flags. All ranks must enter."""
    parameters, optimizer_state = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": {"state": optimizer_state["state"]}}, optimizer_state["param_groups"]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The class or function that a pickle names, if it is on the list."""
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and (module, name) not in METADATA_CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of ours does")
        return super().find_class(module, name)


def _check_tensors(metadata_file: pathlib.Path, state: dict[str, Any]) -> None:
    """Refuse a DCP checkpoint that could run code when loaded, or whose tensors are not exactly those of `state`.

    DCP unpickles .metadata and every entry that is not a tensor, and passes over names nobody asks for.
    """
    try:
        with open(metadata_file, "rb") as f:
            saved = _MetadataUnpickler(f).load().state_dict_metadata
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{metadata_file} is not loaded: {error}") from error
    expected = {f"model.{name}": x for name, x in state["model"].items()}
    for name, values in state["optimizer"]["state"].items():
        expected |= {f"optimizer.state.{name}.{key}": x for key, x in values.items()}
    problems = [f"{name} is missing" for name in expected.keys() - saved.keys()]
    problems += [f"{name} is not part of the model or the optimizer" for name in saved.keys() - expected.keys()]
    for name in expected.keys() & saved.keys():
        there = (tuple(saved[name].size), saved[name].properties.dtype)
        if there != (here := (tuple(expected[name].shape), expected[name].dtype)):
            problems.append(f"{name} is {there[0]} {there[1]}, the model wants {here[0]} {here[1]}")
    if problems:
        shown = "\n".join(sorted(problems)[:10])
        raise ValueError(f"{metadata_file.parent} is of another model: {len(problems)} tensors differ\n{shown}")


def _describe(args: Any, tokenizer: PreTrainedTokenizerBase, total_steps: int) -> dict[str, Any]:
    """What must be the same when a run is resumed, as JSON has it."""
    return {
        "args": json.loads(json.dumps(vars(args), default=str)),
        "total_steps": total_steps,
        "data_sha256": [_size_and_hash(pathlib.Path(file))["sha256"] for file in args.train_files],
        "tokenizer_sha256": _hash_of([tokenizer.get_vocab(), tokenizer.chat_template, tokenizer.special_tokens_map]),
    }


def _compare(path: pathlib.Path, now: dict[str, Any], force: bool) -> None:
    """Raise ValueError if a run described by `now` would not be the continuation of the checkpoint in `path`."""
    then = json.loads((path / "trainer_state.json").read_text())
    if then["step"] > now["total_steps"]:
        raise ValueError(
            f"{path} is beyond the {now['total_steps']} steps of this run; raise --total-training-steps (or "
            "--total-epochs) to train on, choose another --experiment-name to start anew, or use eval.py to evaluate it"
        )
    changed = [
        f"--{flag.replace('_', '-')}: was {value}, is {now['args'][flag]}"
        for flag, value in then["args"].items()
        if flag in now["args"].keys() - FREE_TO_CHANGE and now["args"][flag] != value
    ]
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
        print(f"--force-resume: {path} is continued with other settings:\n" + "\n".join(changed), flush=True)

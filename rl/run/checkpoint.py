"""Save and load. A checkpoint is a folder `global_step_N/` in the folder of its run. In it are

    state/              parameters that learn (fp32) and moments, a safetensors file per rank: loads at any world size
    loop/               what the loop carries besides, such as a KL coefficient: JSON and safetensors of every rank
    huggingface/        config, tokenizer, safetensors in the compute dtype: transformers, vLLM and eval.py load it
    adapter/            with LoRA: the adapters alone, as PEFT saves them; huggingface/ has the sum of both
    huggingface_NAME/   the same of every other module that has an optimizer, such as a critic, and adapter_NAME/
    trainer_state.json  step, arguments, hashes of data, tokenizer and what adapters stand beside
    MANIFEST.json       versions of torch and transformers, size and sha256 of every other file; written last

A thread copies the state to the host and writes the copy while training goes on. Only the next optimizer step waits
for the copy. A checkpoint is written to a temporary folder, forced to disk and renamed. What has the final name was
complete, and the manifest tells whether it still is. Order of data and sampling seeds are functions of the step. What
is loaded is tensors and JSON, never code. docs/reliability.md lists what can go wrong.
"""

import contextlib
import json
import math
import pathlib
import shutil
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError
from torch.cuda import Stream
from transformers import PreTrainedTokenizerBase

from rl.console import say
from rl.ranks import PATIENCE
from rl.run import checkpoint_files as files
from rl.run import checkpoint_tensors as tensors
from rl.run import loop_state
from rl.run.checkpoint_tensors import Place, ToSave, Trained
from rl.run.export import Exporter, Exports
from rl.run.loop_state import LoopState
from rl.run.resume import trainer_state
from rl.run.run_folder import RunFolder
from rl.run.together import Failed, gather, together

NORMAL_INTERVAL = sys.getswitchinterval()  # seconds after which a thread must hand on Python's lock
SAVING_INTERVAL = 0.0005  # the same while a save is written, since 0.005 at every wait of the main thread would be felt
MAX_FAILURES = 3  # saves in a row that may fail before the run stops
FREE_SPACE = 1.2  # times the size of a checkpoint that must be free before one is written


class Saver:
    """Saves the checkpoints of a run. All ranks must make all calls.

    Args: record, `resume.record_of` the run; keep, how many checkpoints stay, None for all; resume_from, the one that
    the run continues from, if any.

    Fields: failures, saves in a row that failed, as known so far: the same number on all ranks; saved, the step of the
    newest checkpoint in the folder, as known so far, 0 for none.
    """

    def __init__(
        self,
        folder: RunFolder,
        record: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        *,
        keep: int | None,
        resume_from: pathlib.Path | None,
    ):
        self.folder, self.ranks, self.record, self.keep, self.failures = folder, folder.ranks, record, keep, 0
        inside = resume_from is not None and resume_from.resolve().parent == folder.root.resolve()
        self.saved = trainer_state(resume_from)["step"] if inside else 0
        self.exporter = Exporter(tokenizer, folder.ranks)
        self.host = tensors.NO_HOST  # what was saved last. The next save reuses the memory.
        self.pending: tuple[int, Future] | None = None  # step and outcome of the save that is being written
        self.is_copied = threading.Event()  # whether the newest save needs its tensors no more
        self.is_copied.set()
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        # Of the writing threads, since the main threads use the default group at the same time.
        # pyrefly: ignore[bad-assignment]  # this rank is in the group and so gets it
        self.group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=PATIENCE)
        folder.write_status("running", self.saved)

    def save(self, step: int, trained: Trained, state: LoopState) -> None:
        """Begin to write `global_step_<step>` as everything is now. Waits for the save before.

        Returns while a thread still reads the tensors. Before these are changed or moved, call `wait_until_copied`.
        Modules may be on any device. `state` is what each rank's loop carries from step to step.

        Older checkpoints beyond the number to keep are deleted afterwards. After a failure, such as a full disk,
        nothing is left of the new checkpoint, and older ones are as they were. The next call of `save`, `leave` or
        `close` counts it, and raises RuntimeError on all ranks at the third in a row.
        """
        self.settle()
        # All of this is taken here, since while FSDP computes, a module holds other parameters than its own.
        exports, to_save = self.exporter.prepare(trained), tensors.tensors_to_save(trained)
        stream = Stream() if self.ranks.device.type == "cuda" else None  # beside the next rollout
        if stream:
            stream.wait_stream(torch.cuda.current_stream())
        sys.setswitchinterval(SAVING_INTERVAL)
        self.is_copied.clear()
        self.pending = step, self.writer.submit(self._save, step, exports, to_save, stream, state)

    def wait_until_copied(self) -> None:
        """Return when the tensors of the newest save may be changed, or moved, or their memory used again."""
        self.is_copied.wait()

    def settle(self) -> None:
        """Wait for the save that is being written, if any, and take note of its outcome, which is the same on all
        ranks.
        """
        if self.pending is None:
            return
        (step, outcome), self.pending = self.pending, None
        try:
            outcome.result()
        except Failed as error:
            self.failures += 1
            if self.failures == MAX_FAILURES:
                expected = isinstance(error.__cause__, (OSError, SafetensorError))  # where it was raised tells nothing
                raise RuntimeError(
                    f"{self.failures} checkpoints in a row could not be written to {self.folder.root}; the last "
                    f"reason: {error}"
                ) from (None if expected else error)
        else:
            self.failures, self.saved = 0, step

    def leave(self, step: int, trained: Trained, state: LoopState) -> None:
        """End a run that is asked to stop after `step`. Save that step, unless it is on disk or 0, and wait for it.

        The same command continues the run. Raises RuntimeError as `close`.
        """
        self.settle()
        if step != self.saved:
            self.save(step, trained, state)
        self.close("stopped", step)

    def close(self, status: str, step: int) -> None:
        """Wait until the last save is on disk, write STATUS.json, and let another run have the folder.

        Raises RuntimeError, on all ranks, if the last save failed, since the run is then without its result.
        """
        self.settle()
        if not self.failures:
            self.folder.write_status(status, step)
        self.folder.release()
        self.writer.shutdown()
        if self.failures:
            raise RuntimeError(
                f"the last checkpoint could not be written to {self.folder.root}, for the reason above; fix that, "
                "then run the same command again to continue from the newest one"
            )

    # What the threads do

    def _copy(self, to_save: ToSave, stream: Stream | None) -> None:
        """Copy `to_save` to the host, and let go of the tensors. The main thread may then free them."""
        try:
            if stream:
                torch.cuda.set_device(self.ranks.device)  # a thread begins with the first device of the machine
            # Moments come with the first optimizer step, which may be after the first save.
            if self.host.tensors.keys() != to_save.tensors.keys():
                self.host = tensors.NO_HOST  # frees the memory before it is taken again
                self.host = tensors.make_host(to_save.tensors, pinned=stream is not None)
            tensors.copy(to_save, self.host, stream)
        finally:
            to_save.tensors.clear()
            to_save.pieces.clear()
            self.is_copied.set()

    def _save(self, step: int, exports: Exports, to_save: ToSave, stream: Stream | None, state: LoopState) -> None:
        """Write a checkpoint. Raises Failed on all ranks, with nothing left of it."""
        root, is_main = self.folder.root, self.ranks.is_main
        try:
            together(lambda: self._copy(to_save, stream), self.group)  # memory may be too small on one rank
            self._write(step, exports, to_save.places, state)
        except Failed as error:
            if is_main:
                with contextlib.suppress(OSError, RuntimeError):
                    self.folder.check()
                    files.sweep(root)
                say(f"CHECKPOINT OF STEP {step} NOT WRITTEN ({self.failures + 1} in a row): {error}")
            raise
        finally:
            sys.setswitchinterval(NORMAL_INTERVAL)
        if is_main:
            try:
                files.delete_older(root, step, self.keep)
            except OSError as error:  # no reason to lose the run
                say(f"older checkpoints in {root} could not be removed: {error}")
            self.folder.write_status("running", step)

    def _write(self, step: int, exports: Exports, places: dict[str, Place], state: LoopState) -> None:
        """Write a checkpoint and give it its name. All ranks must enter. Raises Failed on all of them."""
        root, ranks, group, host = self.folder.root, self.ranks, self.group, self.host.tensors
        temporary = gather(files.spare(root, "tmp", step), group)[0]
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        origin = {"step": step, "world_size": ranks.size}

        def prepare() -> None:
            if ranks.is_main:
                self.folder.check()
                needed = sum(math.prod(place.shape) * host[name].element_size() for name, place in places.items())
                needed += sum(export.num_weights * ranks.dtype.itemsize for export in exports.values())
                needed *= FREE_SPACE
                root.mkdir(parents=True, exist_ok=True)
                if (free := shutil.disk_usage(root).free) < needed:
                    raise OSError(f"{needed / 1e9:.3f} GB are needed in {root}, {free / 1e9:.3f} GB are free")
                (temporary / "state").mkdir(parents=True)
                (temporary / "loop").mkdir()

        def write() -> None:
            tensors.write(temporary / "state", ranks.rank, host, places)
            loop_state.write(temporary / "loop", ranks.rank, state)

        def export() -> list[str]:
            written = origin | {"lora": self.exporter.write(temporary, exports)} | self.record
            (temporary / "trainer_state.json").write_text(json.dumps(written, indent=2))
            return sorted(str(p.relative_to(temporary)) for p in temporary.rglob("*") if p.is_file())

        def force_to_disk() -> dict[str, dict]:
            return {name: files.size_and_hash(temporary / name, sync=True) for name in names[ranks.rank :: ranks.size]}

        def commit() -> None:
            if ranks.is_main:
                self.folder.check()
                hashes = {name: entry for part in parts for name, entry in part.items()}
                files.commit(temporary, root / f"global_step_{step}", origin | {"versions": versions, "files": hashes})

        together(prepare, group)
        together(write, group)
        names = together(lambda: export() if ranks.is_main else [], group)[0]
        parts = together(force_to_disk, group)
        together(commit, group)


def load(path: pathlib.Path, trained: Trained, *, moments_on_host: bool = False) -> None:
    """Load a checkpoint into what is trained, at any world size. All ranks must enter.

    With moments_on_host, AdamW's moments stay on the host, from where `extras.offload` takes them. Raises ValueError if
    it holds anything but the tensors of these modules and optimizers, or as `Family.check_saved`.
    """
    then = trainer_state(path)
    together(lambda: _check_families(path, then.get("lora", {}), trained))
    tensors.load(tensors.read(path / "state", then["world_size"]), trained, moments_on_host=moments_on_host)


def _check_families(path: pathlib.Path, records: dict[str, dict[str, str]], trained: Trained) -> None:
    for name, (module, _) in trained.items():
        for family in module.packed.families if name in records else ():
            family.check_saved(records[name], path)


def load_states(path: pathlib.Path | None) -> list[dict[str, Any]]:
    """What each rank's loop carried when the checkpoint was saved, in the order of the ranks, or [] without a
    checkpoint.

    Arrays are arrays again, tuples are lists, and keys of dicts are strings.
    """
    return [] if path is None else loop_state.read(path / "loop", trainer_state(path)["world_size"])

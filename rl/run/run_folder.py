"""The folder of a run: what it is called, which process has it, and STATUS.json, which says how the run stands."""

import fcntl
import json
import os
import pathlib
import re
import socket
import time
from dataclasses import dataclass
from typing import IO

from safetensors import SafetensorError
from safetensors.torch import save_file

from rl.console import say
from rl.data.types import Batch
from rl.flags import AtLeast1, Every, Free, Positive, Seconds, spelled
from rl.ranks import Ranks
from rl.run import checkpoint_files
from rl.run.together import together


@dataclass(frozen=True)
class Checkpoints:
    """These flags are about checkpoints, stopping and resuming."""

    # Checkpoints and metrics.jsonl go to this folder.
    default_local_dir: Free[str] = "runs/{project_name}/{experiment_name}"
    # Save at this interval, in steps, and at the end. -1 saves only at the end, and 0 never.
    save_freq: Free[Every] = -1
    # Keep this many of the newest checkpoints, and delete older ones. By default all are kept.
    max_ckpt_to_keep: Free[AtLeast1 | None] = None
    # auto resumes from the newest intact checkpoint, if there is one. disable starts anew. A global_step_N folder is
    # resumed from.
    resume_mode: Free[str] = "auto"
    force_resume: Free[bool] = False  # Resume although settings or data that decide what is learned have changed.
    # Save and stop after this many hours, as after SIGTERM or Ctrl-C. By default there is no such limit.
    max_hours: Free[Positive | None] = None
    # If no phase ends for this many seconds, print the stacks of all threads and end the run.
    stall_timeout: Free[Seconds] = 3600.0


def folder_of(flags: Checkpoints, project_name: str, experiment_name: str) -> pathlib.Path:
    """--default-local-dir with the names in the places of its placeholders.

    Raises ValueError for another placeholder, and for a name that is not a plain file name.
    """
    template, names = flags.default_local_dir, {"project_name": project_name, "experiment_name": experiment_name}
    for name, value in names.items():
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", value):
            raise ValueError(
                f"{spelled(name)} {value!r} must be 1 to 100 letters, digits, '.', '_' or '-', and not "
                "start with '.': it names a folder"
            )
    try:
        folder = template.format(**names)
    except (KeyError, IndexError, AttributeError, ValueError) as error:
        known = " and ".join(f"{{{name}}}" for name in names)
        raise ValueError(f"--default-local-dir {template!r}: the placeholders are {known}, not {error}") from error
    if not folder or not folder.isprintable():
        raise ValueError(f"--default-local-dir {folder!r} is empty or holds control characters; choose another folder")
    return pathlib.Path(folder)


class RunFolder:
    """A folder that this run has for itself, until `release` or until rank 0 dies. All ranks must enter.

    If somebody deletes or replaces it meanwhile, the run writes nothing more there, and `check` ends it. Raises
    ValueError, on every rank, if it cannot be written or belongs to a running process.
    """

    def __init__(self, root: str | pathlib.Path, ranks: Ranks, total_steps: int):
        self.root, self.ranks, self.total_steps = pathlib.Path(root), ranks, total_steps
        self.lock: IO[str] | None = None
        together(self._take if ranks.is_main else lambda: None)

    def _take(self) -> None:
        self.lock = lock(self.root)
        checkpoint_files.sweep(self.root)

    @property
    def is_own(self) -> bool:
        """Whether the run.lock that this run holds is still the one in the folder. True on ranks that hold none."""
        try:
            return self.lock is None or os.path.samestat(os.fstat(self.lock.fileno()), os.stat(self.root / "run.lock"))
        except FileNotFoundError:
            return False

    def check(self) -> None:
        """Raise RuntimeError, on rank 0, unless the folder `is_own`. To be called before anything is written there."""
        if not self.is_own:
            raise RuntimeError(
                f"{self.root} was deleted or replaced while this run used it, perhaps by another run; this one ends, "
                "and writes nothing there. Start it again with another --experiment-name or --default-local-dir"
            )

    def write_status(self, state: str, step: int) -> None:
        """Replace STATUS.json, which people and schedulers read, and no program of ours. On rank 0."""
        if self.ranks.is_main and self.is_own:
            temporary = self.root / "STATUS.json.tmp"
            status = {"state": state, "step": step, "total_steps": self.total_steps}
            try:
                temporary.write_text(json.dumps(status | {"time": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n")
                temporary.replace(self.root / "STATUS.json")
            except OSError as error:  # no reason to lose the run
                say(f"{self.root / 'STATUS.json'} could not be written: {error}")

    def save_batch(self, step: int, batch: Batch) -> str:
        """Write this rank's rows to `bad_batch_step_<step>_rank_<rank>.safetensors`, for finding out why a step went
        wrong. Returns what the files of all ranks are called. A failure is only printed.
        """
        path = self.root / f"bad_batch_step_{step}_rank_{self.ranks.rank}.safetensors"
        on_host = {name: x.to("cpu", copy=True).contiguous() for name, x in batch.tensors().items()}
        try:
            save_file(on_host, path)
        except (OSError, SafetensorError) as error:
            say(f"{path} could not be written: {error}")
        return str(path).replace(f"_rank_{self.ranks.rank}.", "_rank_*.")

    def release(self) -> None:
        """Let another run have the folder."""
        if self.lock:
            self.lock.close()
        self.lock = None


def lock(root: pathlib.Path) -> IO[str]:
    """Hold run.lock until the file is closed or the process dies. Raises ValueError if another process holds it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        if (root / "run.lock").is_symlink() or ((root / "run.lock").exists() and not (root / "run.lock").is_file()):
            raise OSError("run.lock is not an ordinary file")  # A link's target is not ours, and a pipe would wait.
        file = open(root / "run.lock", "a+")
    except OSError as error:
        raise ValueError(f"--default-local-dir: {root} cannot be written ({error}); choose another folder") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        raise ValueError(
            f"{root} is in use by another run ({file.read().strip()}); let it end, or choose another "
            "--experiment-name or --default-local-dir"
        ) from error
    except OSError as error:  # some network file systems
        say(f"{root / 'run.lock'} cannot be locked ({error}): make sure that no other run writes there")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file

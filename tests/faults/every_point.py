"""A worker of test_checkpoint_faults.py: `every_point.py TASK_FOLDER RUN_FOLDER` stops the world at every point.

It saves step 1, step 2 with only one checkpoint to keep, and step 2 again over the first one. At every file operation
of the last two, as Python's audit events report them, it copies the run folder: that is what a kill -9 at this point
would leave. It opens each copy as a resumed run would, and prints as JSON what was found there, in order.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

import train_grpo
from rl.flags import build
from rl.model import load as models
from rl.model.sharding import shard
from rl.ranks import init_ranks
from rl.run import checkpoint, loop_state, resume, run_folder

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree")


def digest(folder: Path) -> str:
    """One hash for the names and bytes of all files under a folder."""
    total = hashlib.sha256()
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        total.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()


def main(task: Path, root: Path) -> None:
    tokenizer, ranks = AutoTokenizer.from_pretrained(task / "model"), init_ranks()
    policy = shard(models.load_pretrained(str(task / "model"), ranks), ranks)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    complete, found, busy = [], [], True

    def open_run(root: Path) -> tuple[checkpoint.Saver, Path | None]:
        args = build(train_grpo.Args, model=str(task / "model"), train_files=(str(task / "train.parquet"),))
        folder = run_folder.RunFolder(root, ranks, 10)
        resume_from, _, record = resume.choose_checkpoint(args, tokenizer, folder)
        return checkpoint.Saver(folder, record, tokenizer, keep=1, resume_from=resume_from), resume_from

    def look(event: str, arguments: tuple) -> None:
        nonlocal busy
        if busy or event not in EVENTS or not str(arguments[0]).startswith(str(root)):
            return
        busy = True
        copy = root.with_name("copy")
        shutil.copytree(root, copy)
        json.loads((copy / "STATUS.json").read_text())  # whole, whenever somebody reads it
        opened, resume_from = open_run(copy)
        names = sorted(p.name for p in copy.iterdir())
        found.append([event, resume_from and digest(resume_from), names])
        opened.close("completed", 10)
        shutil.rmtree(copy)
        busy = False

    def save(step: int) -> None:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1.0)
        state = loop_state.encode({"step": step, "array": torch.arange(3).numpy()})
        saver.save(step, {"actor": (policy, optimizer)}, state)
        saver.settle()  # the writing thread has looked around, at each of its file operations
        complete.append(digest(root / f"global_step_{step}"))

    sys.addaudithook(look)
    saver, _ = open_run(root)
    save(1)
    busy = False
    save(2)
    save(2)
    busy = True
    print(json.dumps({"complete": complete, "found": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

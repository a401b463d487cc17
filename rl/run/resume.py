"""Which checkpoint a run continues from, and whether settings and data are still those of its first part."""

import contextlib
import inspect
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from extras.families import check_shape, shape_of
from rl.console import say
from rl.data.template import rendering_of, variables
from rl.flags import FREE, flat, marked, spelled
from rl.model.checks import PROBE
from rl.ranks import Ranks
from rl.run import checkpoint_files as files
from rl.run.run_folder import Checkpoints, RunFolder
from rl.run.together import Failed, gather, together
from rl.run.tracking import without_secrets

NEWER = ("script", "experts", "lora", "day", "memory")  # fields of trainer_state.json that older checkpoints lack


def _is_count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**53


def _is_texts(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(y, str) for y in x)


def _has_bases(x: Any) -> bool:
    """Whether x is a dict of modules that each say on which base they stand."""
    modules = x.values() if isinstance(x, dict) else [None]
    return all(isinstance(y, dict) and _is_texts([y.get("base"), y.get("base_sha256")]) for y in modules)


FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {  # of trainer_state.json -> what they must be
    "step": ("a whole number, at least 0", _is_count),
    "world_size": ("a whole number, at least 1", lambda x: _is_count(x) and x > 0),
    "total_steps": ("a whole number, at least 0", _is_count),
    "args": ("a flag's value by its name", lambda x: isinstance(x, dict)),
    "data_sha256": ("a list of texts", _is_texts),
    "tokenizer_sha256": ("a text", lambda x: isinstance(x, str)),
    "day": ("a date such as 2026-01-31", lambda x: isinstance(x, str) and bool(re.fullmatch(r"\d{4}-\d\d-\d\d", x))),
    "script": ("a text", lambda x: isinstance(x, str)),
    "experts": ("three whole numbers", lambda x: isinstance(x, list) and len(x) == 3 and all(map(_is_count, x))),
    "memory": (
        "flags by their names, and two whole numbers, gpu and ranks, if these were planned",
        lambda x: isinstance(x, dict) and all(_is_count(x.get(name, 0)) for name in ("gpu", "ranks")),
    ),
    "lora": ("base and base_sha256 of each module", _has_bases),
}


def choose_checkpoint(
    args: Any, tokenizer: PreTrainedTokenizerBase, folder: RunFolder
) -> tuple[pathlib.Path | None, dict[str, Any], dict[str, Any]]:
    """The checkpoint that a run continues from and its `trainer_state`, None and {} for a new run, and the `record_of`
    rank 0. All ranks must enter.

    Raises ValueError, on every rank, if ranks have read other data than rank 0, or if `find_checkpoint` refuses. It
    also does so if the checkpoint is beyond the run's last step, if its model has another shape, or if there are
    `differences` and no --force-resume.
    """
    records = together(lambda: record_of(args, tokenizer, folder.total_steps))  # each reads files of its own machine
    of_all = {"data_sha256": "--train-files", "tokenizer_sha256": "the tokenizer of --model"}
    if "strftime_now" in variables(tokenizer):
        of_all["day"] = "the date for the chat template"
    for what, flag in of_all.items():
        if odd := [rank for rank, record in enumerate(records) if record[what] != records[0][what]]:
            raise ValueError(
                f"{flag}: rank {odd[0]} has other contents than rank 0 ({what} {records[odd[0]][what]} and "
                f"{records[0][what]}); copy the same files to every machine, or set its clock, and start again"
            )
    path = find_checkpoint(args.checkpoints.resume_mode, folder.root, folder.ranks)
    if path is None:
        return None, {}, records[0]
    then, last = trainer_state(path), folder.total_steps
    if then["step"] > last:
        raise ValueError(
            f"{path} is beyond the {last} steps of this run; raise --total-training-steps (or --total-epochs) to train "
            "on, choose another --experiment-name to start anew, or use eval.py to evaluate it"
        )
    check_shape(str(path), then.get("experts"), records[0]["experts"])
    changes = "\n".join(differences(then, records[0], without_secrets(type(args)()), marked(args, FREE)))
    if changes and not args.checkpoints.force_resume:
        raise ValueError(
            f"{path} comes from a run with other settings; go back to them, choose another --experiment-name, or add "
            f"--force-resume to continue with the new ones:\n{changes}"
        )
    if changes and folder.ranks.is_main:
        say(f"--force-resume: {path} is continued with other settings:\n{changes}")
    if then["step"] == last and folder.ranks.is_main:
        more = "raise --total-training-steps or --total-epochs to learn more"
        say(f"{path}: all {last} steps are done; {more}. Another run needs an --experiment-name of its own")
    return path, then, records[0]


def check_mode(resume_mode: str, ranks: Ranks) -> None:
    """Raise ValueError, before the run's folder is made, if --resume-mode names a folder that is not an intact
    checkpoint. All ranks must enter.
    """
    if resume_mode not in ("auto", "disable") and (problem := _problem(pathlib.Path(resume_mode), ranks)):
        raise ValueError(
            f"--resume-mode {resume_mode}: not a complete checkpoint ({problem}); give auto, disable or a "
            "global_step_N folder"
        )


def find_checkpoint(resume_mode: str, root: pathlib.Path, ranks: Ranks) -> pathlib.Path | None:
    """The checkpoint to resume from. All ranks must enter.

    With `auto` it is the newest one under `root` of which every byte is as its manifest says, or None if there is none
    at all. With `disable` it is None. Otherwise it is a global_step_N folder that `check_mode` has let pass. Prints
    which ones it passes over, and why. Raises ValueError if all are damaged, or if `disable` or the folder would mix a
    new run into another one under `root`.
    """
    steps = gather(files.list_steps(root) if ranks.is_main else [])[0]
    if resume_mode != "auto":
        path = None if resume_mode == "disable" else pathlib.Path(resume_mode)
        is_inside = path is not None and path.resolve().parent == root.resolve()
        if steps and not (is_inside and steps[-1] <= trainer_state(path)["step"]):
            raise ValueError(
                f"--resume-mode {resume_mode}, but {root} holds checkpoints up to step {steps[-1]}, of another run or "
                "of one that went on from there; give auto to continue from the newest, choose another "
                "--experiment-name or --default-local-dir, or remove them"
            )
        return path
    rejected: list[str] = []
    for path in (root / f"global_step_{step}" for step in reversed(steps)):
        if not (problem := _problem(path, ranks)):
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


def _problem(path: pathlib.Path, ranks: Ranks) -> str:
    """Why a folder is not an intact checkpoint, "" if it is. Every rank reads its share. All ranks must enter."""

    def own_problem() -> str:
        if problem := files.problem(path, ranks.rank, ranks.size):
            return problem
        state, name = trainer_state(path), re.fullmatch(r"global_step_(\d+)", path.name)
        if name and int(name[1]) != state["step"]:
            return f"trainer_state.json: the field step is {state['step']}, and the folder is called {path.name}"
        if (count := len([*(path / "loop").glob("rank_*.json")])) not in (0, state["world_size"]):
            return f"trainer_state.json: the field world_size is {state['world_size']}, and loop/ is of {count} rank(s)"
        return ""

    try:
        return next(filter(None, together(own_problem)), "")
    except Failed as error:
        return str(error)


def trainer_state(path: pathlib.Path) -> dict[str, Any]:
    """What a checkpoint says about itself, which is its step, its world size, and `record_of` the run. Raises
    ValueError, naming the file and the field, if that is not what `Saver` writes.
    """
    file = path / "trainer_state.json"
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not loaded: {error!r}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{file} holds a {type(state).__name__} instead of fields")
    for field, (requirement, holds) in FIELDS.items():
        if (field in state or field not in NEWER) and not holds(state.get(field)):
            raise ValueError(f"{file}: the field {field} is {state.get(field)!r:.60}, and must be {requirement}")
    return state


def first_day(flags: Checkpoints, root: pathlib.Path) -> str | None:
    """The date (ISO format) on which the run began that --resume-mode continues, or None for a new run.

    Args: root, the run's folder. A damaged checkpoint is passed over here, and named later.
    """
    steps = [root / f"global_step_{step}" for step in reversed(files.list_steps(root))]
    for path in steps if flags.resume_mode == "auto" else [pathlib.Path(flags.resume_mode)]:
        with contextlib.suppress(ValueError):
            return trainer_state(path).get("day")
    return None


def record_of(args: Any, tokenizer: PreTrainedTokenizerBase, total_steps: int) -> dict[str, Any]:
    """What must stay the same when a run is resumed, as JSON has it."""
    probe = tokenizer(PROBE)["input_ids"]  # merges, normalizer and post-processor show in it
    return {
        "script": pathlib.Path(inspect.getfile(type(args))).stem,
        "args": without_secrets(args),
        "total_steps": total_steps,
        "experts": list(shape_of(args.model)),
        "day": rendering_of(tokenizer).day,
        "data_sha256": [files.size_and_hash(pathlib.Path(file))["sha256"] for file in flat(args)["train_files"]],
        "tokenizer_sha256": files.hash_of(
            [tokenizer.get_vocab(), tokenizer.chat_template, tokenizer.special_tokens_map, probe]
        ),
    }


def differences(then: dict[str, Any], now: dict[str, Any], defaults: dict[str, Any], free: set[str]) -> list[str]:
    """What a run described by `now` would change in the one that saved `then`, a sentence each.

    Flags that are `free` may differ. A flag that the script did not have then counts as given with its default.
    """
    changed = []
    if then.get("script", now["script"]) != now["script"]:
        changed.append(f"script: was {then['script']}.py, is {now['script']}.py")
    for flag in sorted(now["args"].keys() - free):
        before, after = then["args"].get(flag, defaults[flag]), now["args"][flag]
        if before != after:
            changed.append(f"{spelled(flag)}: was {before}, is {after}")
    if gone := sorted(then["args"].keys() - now["args"].keys()):
        named = ", ".join(f"{spelled(flag)} {then['args'][flag]}" for flag in gone)
        changed.append(f"{now['script']}.py does not have these flags; --force-resume continues without them: {named}")
    for what, key in (("contents of --train-files", "data_sha256"), ("tokenizer", "tokenizer_sha256")):
        if then[key] != now[key]:
            changed.append(f"{what}: sha256 was {then[key]}, is {now[key]}")
    if now["args"]["lr_scheduler_type"] != "constant" and then["total_steps"] != now["total_steps"]:
        changed.append(f"steps that shape the learning rate: were {then['total_steps']}, are {now['total_steps']}")
    return changed

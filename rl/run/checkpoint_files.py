"""The checkpoints on a disk: their names, and whether every byte of them is there."""

import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
from typing import Any


def list_steps(root: str | pathlib.Path) -> list[int]:
    """Steps of the checkpoints under `root`, intact or not, ascending."""
    matches = (re.fullmatch(r"global_step_(\d+)", p.name) for p in pathlib.Path(root).glob("global_step_*/"))
    return sorted(int(m[1]) for m in matches if m)


def spare(root: pathlib.Path, kind: str, step: int) -> pathlib.Path:
    """A fresh name: "tmp" for what may be thrown away, "old" for what must not until its successor is in place."""
    return root / f".{kind}-global_step_{step}-{secrets.token_hex(4)}"


def sweep(root: pathlib.Path) -> None:
    """Remove what an interrupted save has left. Only for the process that holds the lock."""
    for old in root.glob(".old-global_step_*"):
        final = root / old.name.removeprefix(".old-").rsplit("-", 1)[0]
        if not final.exists():  # it was stopped between the two renames
            old.rename(final)
    for leftover in (*root.glob(".tmp-global_step_*"), *root.glob(".old-global_step_*")):
        shutil.rmtree(leftover, ignore_errors=True)


def delete_older(root: pathlib.Path, step: int, keep: int | None) -> None:
    """Remove checkpoints beyond the newest `keep` up to `step`. Folders without a manifest are not ours."""
    ours = [s for s in list_steps(root) if s <= step and (root / f"global_step_{s}" / "MANIFEST.json").is_file()]
    for old in ours[:-keep] if keep else []:
        if not (root / f"global_step_{old}").is_symlink():
            (root / f"global_step_{old}").rename(spare(root, "tmp", old))
    sweep(root)


def commit(temporary: pathlib.Path, final: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Give a written folder its manifest, force both to disk and rename it. `final` is complete from its first moment.

    `manifest["files"]`: {name: `size_and_hash`} of every file, each of them on disk already.
    """
    text = json.dumps(manifest | {"sha256": hash_of(manifest)}, indent=2, sort_keys=True)
    (temporary / "MANIFEST.json").write_text(text)
    for path in (temporary / "MANIFEST.json", *(p for p in temporary.rglob("*/")), temporary):
        _sync(path)
    if final.exists():  # damaged, or of a run that went another way from an older step
        final.rename(spare(final.parent, "old", manifest["step"]))
    temporary.rename(final)
    _sync(final.parent)


def problem(path: pathlib.Path, rank: int, world_size: int) -> str:
    """Why a folder is not an intact checkpoint, as far as this rank's share of its files tells, or "" if nothing is
    wrong.

    Raises OSError if a file cannot be read.
    """
    if not (path / "MANIFEST.json").is_file():
        return "no MANIFEST.json"
    try:
        manifest = json.loads((path / "MANIFEST.json").read_text())
        is_whole = manifest.pop("sha256") == hash_of(manifest) and "trainer_state.json" in manifest["files"]
        listed = [(name, x["size"], x["sha256"]) for name, x in sorted(manifest["files"].items())]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        is_whole, listed = False, []
    if not is_whole:
        return "MANIFEST.json is damaged"
    for name, expected_size, sha256 in listed[rank::world_size]:
        if not (path / name).is_file():
            return f"{name} is missing"
        if (size := (path / name).stat().st_size) != expected_size:
            return f"{name} has {size} bytes instead of {expected_size}"
        if size_and_hash(path / name)["sha256"] != sha256:
            return f"{name} is damaged: its sha256 is not that of the manifest"
    return ""


def size_and_hash(file: pathlib.Path, *, sync: bool = False) -> dict[str, int | str]:
    """Size and sha256 of a file, forced to disk first if asked."""
    digest = hashlib.sha256()
    with open(file, "rb", buffering=0) as f:
        if sync:
            os.fsync(f.fileno())
        size = os.fstat(f.fileno()).st_size
        buffer = memoryview(bytearray(min(size, 2**28)))  # large, since every read waits for Python's lock
        while n := f.readinto(buffer):
            digest.update(buffer[:n])
        return {"size": size, "sha256": digest.hexdigest()}


def hash_of(value: Any) -> str:
    """sha256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Weights for samplers by way of the host: anonymous shared memory on one machine, or files that all machines see.

The newest weights are kept, so that a sampler that joins later gets them. A reader that has begun may finish, whatever
becomes of the file. Shared memory is freed when the run dies, whatever kills it, and needs no /dev/shm, which in many
containers has 64 MB.
"""

import atexit
import contextlib
import hashlib
import mmap
import os
import pathlib
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, also the length of the mark at the beginning of a file
CHUNK = 64 * 2**20  # bytes that come from the GPU at a time


class WeightWriter:
    """Keeps the newest weights for readers. Args: folder, that all machines see; None: the memory of this machine;
    run, the folder of the run: weights that an earlier process of it has left behind are removed.

    Raises ValueError, naming --weights-dir, if nothing can be written to the folder.
    """

    def __init__(self, folder: str | None, run: pathlib.Path):
        self.folder, self.file, self.pinned = None, None, None
        self.thread = ThreadPoolExecutor(1, "memory for weights")
        self.spare: Future | None = None  # memory for the next weights
        if folder is not None:
            name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8]
            self.folder = pathlib.Path(folder) / f"{run.name}_{name}"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.folder) as file:
                    file.write(b"a file system may take a file and none of its bytes")
            except OSError as error:
                raise ValueError(f"--weights-dir {folder} cannot be written: {error}; choose another one") from error
            for left in self.folder.glob("weights_*"):
                left.unlink(missing_ok=True)
            atexit.register(self.close)

    def write(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Write (name, whole tensor) pairs. Returns their manifest, which `read_weights` needs, as a message has it.

        Raises OSError if there is no room. Then the weights before are still there.
        """
        if self.folder is None:
            file, self.spare = self.spare.result() if self.spare else shared_memory(0), None
            path = pathlib.Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"weights_{version}_{os.getpid()}"
            file = open(path, "wb")
        mark = secrets.token_bytes(ALIGNMENT)
        tensors, end = [], ALIGNMENT
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._remove, file)
            file.write(mark)
            for name, x in named_tensors:
                tensors.append([name, str(x.dtype).removeprefix("torch."), list(x.shape), end])
                for chunk in x.detach().contiguous().flatten().view(torch.uint8).split(CHUNK):
                    end += file.write(self._on_host(chunk).numpy())
                end += file.write(bytes(-end % ALIGNMENT))
            file.flush()
            on_failure.pop_all()
        old, self.file = self.file, file
        self._remove(old)
        if self.folder is None:  # while training goes on: a new page costs more than the bytes on it
            self.spare = self.thread.submit(shared_memory, end)
        return {"version": version, "path": str(path), "mark": mark, "bytes": end, "tensors": tensors}

    def _on_host(self, chunk: Tensor) -> Tensor:
        """The same bytes on the host, until the next call. A GPU copies fastest into pinned memory."""
        if chunk.is_cpu:
            return chunk
        if self.pinned is None:
            self.pinned = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True)
        return self.pinned[: len(chunk)].copy_(chunk)

    def _remove(self, file: Any) -> None:
        if file is not None:
            if self.folder is not None:
                pathlib.Path(file.name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # what is left in its buffer finds no room either
                file.close()

    def close(self) -> None:
        """Remove what is kept."""
        self._remove(self.file)
        self._remove(self.spare.result() if self.spare else None)
        self.file = self.spare = None
        if self.folder is not None:
            with contextlib.suppress(OSError):  # it is gone already
                self.folder.rmdir()


def shared_memory(size: int) -> Any:
    """A file in memory, without a name, that has taken this many bytes if there is room for them."""
    file = open(os.memfd_create("weights"), "wb")
    if size:
        with contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, size)
    return file


def read_weights(manifest: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs on the host, which are valid until the iterator ends. Raises as `open_weights`."""
    return tensors_in(open_weights(manifest), manifest)


def open_weights(manifest: dict[str, Any]) -> mmap.mmap:
    """The bytes of weights, which stay while they are used.

    Raises FileNotFoundError if newer weights have replaced these. The name may then be that of another file.
    """
    with open(manifest["path"], "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != manifest["bytes"] or file.read(ALIGNMENT) != manifest["mark"]:
            path, version = manifest["path"], manifest["version"]
            raise FileNotFoundError(f"{path} does not hold weights of version {version} any more")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def tensors_in(memory: Any, manifest: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs in a buffer with the bytes of weights."""
    for name, dtype, shape, start in manifest["tensors"]:
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        x = torch.frombuffer(memory, dtype=kind, count=count, offset=start) if count else torch.empty(0, dtype=kind)
        yield name, x.view(shape)

"""The tensors of a checkpoint: from the device to the host, to a safetensors file per rank, and back to any ranks.

`rank_R.safetensors` holds what rank R has of all parameters that learn and their moments, as `actor/model/NAME` and
`actor/optimizer/NAME/KIND`. FSDP2 shards rows, so the file's metadata says under "shards" which ones these are:
{name: [first row, shape of the whole tensor]}. Ranks of a later run find their own rows in whichever files have them.

Saving goes on in a thread beside training. Whenever that thread calls torch, it lets go of Python's lock and then waits
for the main thread to give it back. This costs both of them time, so calls are few, with many tensors in each.
"""

import itertools
import json
import math
import operator
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rl.model.sharding import own_part, with_part

# By name. The first one is what the run is about. A reference that the run changes has no optimizer.
Trained = dict[str, tuple[PreTrainedModel, torch.optim.Optimizer | None]]

STAGING = 2**27  # bytes copied from the device at a time. What a decoding step brings to the host may wait for them


class Place(NamedTuple):
    """Where in a whole tensor the rows of a rank belong."""

    start: int  # the first of these rows
    shape: tuple[int, ...]  # of the whole tensor


class ToSave(NamedTuple):
    """What a rank has to save."""

    tensors: dict[str, torch.Tensor]
    pieces: list[torch.Tensor]  # of `tensors`
    places: dict[str, Place]


class Host(NamedTuple):
    """Memory for a copy of a rank's tensors."""

    tensors: dict[str, torch.Tensor]
    pieces: list[torch.Tensor]  # of `tensors`
    staging: torch.Tensor  # bytes, pinned for copies from a GPU


NO_HOST = Host({}, [], torch.empty(0))


class Saved(NamedTuple):
    """A tensor in the files of a folder. Its parts are views of the files, so nothing is read before it is used."""

    shape: tuple[int, ...]
    parts: list[tuple[int, torch.Tensor]]  # first row, and the rows

    @property
    def dtype(self) -> torch.dtype:
        """Of all parts."""
        return self.parts[0][1].dtype


def learning(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that learn, by name. With LoRA only the adapters do. A reference has none that learn,
    and then these are all of its parameters, which `Run.refresh` changes.
    """
    every = dict(module.named_parameters())
    return {key: x for key, x in every.items() if x.requires_grad} or every


def tensors_to_save(trained: Trained) -> ToSave:
    """What this rank has to save of all parameters that learn, and of their moments.

    If several ranks have the same part, as with copies of the model (--fsdp-size), the first of them saves it.
    """
    every: dict[str, torch.Tensor] = {}
    for name, (module, optimizer) in trained.items():
        for key, parameter in learning(module).items():
            every[f"{name}/model/{key}"] = parameter
            state = optimizer.state.get(parameter, {}) if optimizer else {}
            every |= {f"{name}/optimizer/{key}/{kind}": x for kind, x in state.items()}
    of_rank, places = {}, {}
    for name, x in every.items():
        local, start, is_first = _local(x)
        if is_first:
            of_rank[name], places[name] = local, Place(start, tuple(x.shape))
    return ToSave(of_rank, _pieces(of_rank), places)


def make_host(like: dict[str, torch.Tensor], *, pinned: bool) -> Host:
    """Memory for a copy of tensors like these. `pinned` says whether copies pass through memory that a GPU can write
    to.

    The rest is not pinned, since that takes the driver ten seconds for 20 GB and holds up what the main thread does on
    the device.
    """
    empty = {name: torch.empty_like(x, device="cpu", memory_format=torch.contiguous_format) for name, x in like.items()}
    return Host(empty, _pieces(empty), torch.empty(STAGING, dtype=torch.uint8, pin_memory=pinned))


def copy(to_save: ToSave, host: Host, stream: torch.cuda.Stream | None) -> None:
    """Copy a rank's tensors to the host, on a stream of their own. They are there when this returns."""
    with torch.cuda.stream(stream):
        for batch in _batches(to_save.pieces, host.pieces):
            there, here = map(list, zip(*batch, strict=True))
            sizes = [len(x) for x in there]
            staged = host.staging[: sum(sizes)].split(sizes)
            torch._foreach_copy_(staged, there, non_blocking=True)
            if stream:
                stream.synchronize()
            torch._foreach_copy_(here, staged)


def write(folder: pathlib.Path, rank: int, tensors: dict[str, torch.Tensor], places: dict[str, Place]) -> None:
    """Write a rank's file, if it has anything to save. Raises SafetensorError or OSError, such as for a full disk."""
    if tensors:
        save_file(tensors, folder / f"rank_{rank}.safetensors", metadata={"shards": json.dumps(places)})


def read(folder: pathlib.Path, ranks: int) -> dict[str, Saved]:
    """The tensors in the files that this many ranks have written to a folder. Other files do not count.

    Raises ValueError if a file is damaged or anything is missing.
    """
    saved: dict[str, Saved] = {}
    for path in filter(pathlib.Path.is_file, (folder / f"rank_{rank}.safetensors" for rank in range(ranks))):
        try:
            with safe_open(path, "pt") as file:
                for name, (start, shape) in json.loads(file.metadata()["shards"]).items():
                    entry = saved.setdefault(name, Saved(tuple(map(operator.index, shape)), []))
                    entry.parts.append((operator.index(start), file.get_tensor(name)))
        except (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not loaded: {error!r}") from error
    for name, x in saved.items():
        x.parts.sort(key=lambda part: part[0])
        rows = [len(part) if part.ndim else 1 for _, part in x.parts]
        *starts, end = itertools.accumulate(rows, initial=0)
        if (
            starts != [start for start, _ in x.parts]
            or end != (x.shape[0] if x.shape else 1)
            or any(tuple(part.shape[1:]) != x.shape[1:] or part.dtype != x.dtype for _, part in x.parts)
        ):
            raise ValueError(f"{folder}: {name} is not there as a whole, which has the shape {x.shape}")
    return saved


def load(saved: dict[str, Saved], trained: Trained, *, moments_on_host: bool = False) -> None:
    """Give modules and optimizers what `read` found. Raises ValueError if that is not exactly of such modules.

    With moments_on_host, AdamW's moments stay on the host, since the device may have no room for them.
    """
    moments = _check(saved, trained)
    for name, (module, optimizer) in trained.items():
        for key, parameter in learning(module).items():
            fill(parameter, saved[f"{name}/model/{key}"])
        if optimizer is None:
            continue
        optimizer.state.clear()
        for key, parameter in learning(module).items():
            for kind, x in moments.get((name, key), {}).items():
                if x.shape:
                    part = own_part(parameter)
                    empty = torch.empty_like(part, device="cpu" if moments_on_host else part.device)
                    optimizer.state[parameter][kind] = fill(with_part(parameter, empty), x)
                else:  # the number of steps. AdamW wants it on the device if fused, on the host if not.
                    where = parameter.device if optimizer.defaults["fused"] else "cpu"
                    optimizer.state[parameter][kind] = x.parts[0][1].to(where, copy=True)


def fill(x: torch.Tensor, saved: Saved) -> torch.Tensor:
    """Give a tensor, or what this rank has of it, the values in the files."""
    local, start, _ = _local(x)
    for first, part in saved.parts:
        low, high = max(start, first), min(start + len(local), first + len(part))
        if low < high:
            local[low - start : high - start] = part[low - first : high - first]
    return x


def _local(x: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
    """What this rank has of `x`, the first row of that, and whether no rank before this one has the same."""
    if not isinstance(x, DTensor):
        return x.detach(), 0, torch.distributed.get_rank() == 0
    start, is_first = 0, True
    mesh = x.device_mesh
    # pyrefly: ignore[bad-argument-type]  # this rank is in the mesh and so has coordinates
    for placement, rank, ranks in zip(x.placements, mesh.get_coordinate(), mesh.shape, strict=True):
        if placement.is_shard(0):
            rows_of_each = -(-x.shape[0] // ranks)  # as torch.chunk divides them, so the last ones may have fewer
            start = min(rank * rows_of_each, x.shape[0])
        else:
            is_first = is_first and rank == 0
    with torch.no_grad():
        return x.to_local().detach(), start, is_first


def _pieces(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of all tensors, in pieces of STAGING at most. They are views if the tensors are contiguous."""
    return [piece for x in tensors.values() for piece in x.flatten().view(torch.uint8).split(STAGING)]


def _batches(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> Iterator[list[tuple]]:
    """Pairs of pieces, as many at a time as STAGING has room for."""
    batch, used = [], 0
    for source, target in zip(sources, targets, strict=True):
        if used + len(source) > STAGING:
            yield batch
            batch, used = [], 0
        batch.append((source, target))
        used += len(source)
    if batch:
        yield batch


def _check(saved: dict[str, Saved], trained: Trained) -> dict[tuple[str, str], dict[str, Saved]]:
    """The moments among what was saved, by module and parameter. Raises ValueError if that is of another model."""
    moments: dict[tuple[str, str], dict[str, Saved]] = {}
    parameters = {(name, key): x for name, (module, _) in trained.items() for key, x in learning(module).items()}
    expected = {f"{name}/model/{key}": (tuple(x.shape), x.dtype) for (name, key), x in parameters.items()}
    problems = [f"{path} is missing" for path in expected.keys() - saved.keys()]
    for path, x in saved.items():
        match path.split("/"):
            case [name, "optimizer", key, kind] if (name, key) in parameters:
                moments.setdefault((name, key), {})[kind] = x
                expected[path] = expected[f"{name}/model/{key}"] if x.shape else ((), torch.float32)
        if path not in expected:
            problems.append(f"{path} is not part of the model or the optimizer")
        elif (x.shape, x.dtype) != expected[path]:
            shape, dtype = expected[path]
            problems.append(f"{path} is {x.shape} {x.dtype}, the model wants {shape} {dtype}")
        elif not x.shape and not 0 <= x.parts[0][1] < math.inf:
            problems.append(f"{path} is {x.parts[0][1]}, and counts steps")
    if problems:
        shown = "\n".join(sorted(problems)[:10])
        raise ValueError(f"the checkpoint is of another model: {len(problems)} tensors differ\n{shown}")
    return moments

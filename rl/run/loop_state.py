"""What a loop carries from step to step, as files: JSON for its structure, safetensors for its arrays. Never code."""

import json
import pathlib
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

ARRAY = "__array__"  # {ARRAY: number} stands for an array in the JSON
DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()


class LoopState(NamedTuple):
    """A state as it was when it was encoded, whatever the loop changes in it afterwards."""

    text: str
    arrays: dict[str, np.ndarray]


def encode(state: dict[str, Any]) -> LoopState:
    """The state as JSON text, and its arrays by the numbers that stand for them in the text.

    Raises TypeError if the state holds anything but numbers, strings, None, lists, tuples, dicts, tensors (which become
    lists), and arrays of numbers.
    """
    arrays: dict[str, np.ndarray] = {}

    def plain(x: Any) -> Any:
        if type(x) is np.ndarray and x.dtype.name in DTYPES:
            arrays[str(len(arrays))] = np.array(x, x.dtype.newbyteorder("="), order="C")
            return {ARRAY: str(len(arrays) - 1)}
        if hasattr(x, "tolist") and not isinstance(x, np.ndarray):  # tensors, numpy's numbers
            return x.tolist()
        kind = type(x).__name__ + (f" of {x.dtype}" if isinstance(x, np.ndarray) else "")
        raise TypeError(
            f"the state of the loop has a {kind} in it, which a checkpoint cannot hold; make it of "
            "numbers, strings, lists, dicts and numpy arrays of numbers"
        )

    text = json.dumps(state, default=plain)
    if text.count(f'"{ARRAY}": ') > len(arrays):
        raise TypeError(f"the state of the loop has a dict with the key {ARRAY!r} in it; give it another name")
    return LoopState(text, arrays)


def write(folder: pathlib.Path, rank: int, state: LoopState) -> None:
    """Write the state of a rank."""
    (folder / f"rank_{rank}.json").write_text(state.text)
    if state.arrays:
        save_file(state.arrays, folder / f"rank_{rank}.safetensors")


def read(folder: pathlib.Path, ranks: int) -> list[dict[str, Any]]:
    """The states of this many ranks, in their order. Raises ValueError if one is missing or damaged."""
    states = []
    for file in (folder / f"rank_{rank}.json" for rank in range(ranks)):
        if not file.is_file():
            raise ValueError(
                f"{folder.parent} does not hold the state of the loop ({file.name}): an older version has written it; "
                "continue it with that, or choose another --experiment-name to start anew"
            )
        try:
            tensors = file.with_suffix(".safetensors")
            arrays = load_file(tensors) if tensors.is_file() else {}
            states.append(json.loads(file.read_text(), object_hook=lambda x, arrays=arrays: _decoded(x, arrays)))
            if not isinstance(states[-1], dict):
                raise TypeError(f"it holds a {type(states[-1]).__name__} instead of fields")
        except (OSError, SafetensorError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not loaded: {error!r}") from error
    return states


def _decoded(x: dict[str, Any], arrays: dict[str, np.ndarray]) -> Any:
    return arrays[x[ARRAY]] if x.keys() == {ARRAY} else x

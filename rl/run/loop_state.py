"""What a loop carries from step to step, as files: JSON for its structure, safetensors for its arrays. Never code."""

import json
import pathlib
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

ARRAY = "__array__"  # {ARRAY: number} stands for an array in the JSON


class LoopState(NamedTuple):
    """A state as it was when it was encoded, whatever the loop changes in it afterwards; arrays are shared with it."""

    text: str
    arrays: dict[str, np.ndarray]


def encode(state: dict[str, Any]) -> LoopState:
    """Raises TypeError if the state holds anything but numbers, strings, None, lists, tuples, dicts, and arrays."""
    arrays: dict[str, np.ndarray] = {}

    def plain(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            arrays[str(len(arrays))] = x
            return {ARRAY: str(len(arrays) - 1)}
        if hasattr(x, "tolist"):  # tensors, numpy's numbers
            return x.tolist()
        raise TypeError(
            f"the state of the loop has a {type(x).__name__} in it, which a checkpoint cannot hold; make it of "
            "numbers, strings, lists, dicts and numpy arrays"
        )

    return LoopState(json.dumps(state, default=plain), arrays)


def write(folder: pathlib.Path, rank: int, state: LoopState) -> None:
    """Write the state of a rank."""
    (folder / f"rank_{rank}.json").write_text(state.text)
    if state.arrays:
        contiguous = {name: np.ascontiguousarray(x) for name, x in state.arrays.items()}
        save_file(contiguous, folder / f"rank_{rank}.safetensors")


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The states of all ranks, in their order. Raises ValueError if there are none."""
    states = []
    while (file := folder / f"rank_{len(states)}.json").is_file():
        arrays = load_file(file.with_suffix(".safetensors")) if file.with_suffix(".safetensors").is_file() else {}
        states.append(
            json.loads(
                file.read_text(), object_hook=lambda x, arrays=arrays: arrays[x[ARRAY]] if x.keys() == {ARRAY} else x
            )
        )
    if not states:
        raise ValueError(f"{folder.parent} does not hold the state of the loop; it comes from an older version")
    return states

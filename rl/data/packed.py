"""Sequences whose items are made when they are asked for: a million rows as Python objects would take several GB.

packed = Packed()                               items that are compressed in memory
packed.append(row)
rows = packed.items()                           a sequence of them: len(rows), rows[i], rows[:9], for row in rows
samples = derive(rows, make, "tokenize")        what `make` makes of the rows, without those that it leaves out
"""

import pickle
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import pyarrow as pa

from rl.console import progress
from rl.data.types import Row

T = TypeVar("T")

BLOCK_BYTES = 2**14  # items that are compressed together have at least so many bytes
TRIM_BLOCKS = 2**12  # after so many, what was freed meanwhile is given back to the system
CHUNK_ROWS = 16  # rows that `derive` works on at a time


class Packed(Generic[T]):
    """Items that are appended and read by number. Each call of `get` makes a new object."""

    def __init__(self):
        self.blocks: list[tuple[int, bytes]] = []  # size before compression, and what it became
        self.firsts = array("q", [0])  # number of the first item of each block, and of `last`
        self.last: list[bytes] = []  # items that are not compressed yet
        self.last_bytes = 0
        self.unpacked: tuple[int, list[bytes]] = (-1, [])  # the block that was read last: rows are read in order

    def __len__(self) -> int:
        return self.firsts[-1] + len(self.last)

    def append(self, item: T) -> None:
        """Add an item, which must be picklable. Raises RecursionError if it is nested too deeply."""
        self.last.append(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
        self.last_bytes += len(self.last[-1])
        if self.last_bytes >= BLOCK_BYTES:
            block = pickle.dumps(self.last, pickle.HIGHEST_PROTOCOL)
            self.blocks.append((len(block), pa.compress(block, codec="zstd", asbytes=True)))
            self.firsts.append(len(self))
            self.last, self.last_bytes = [], 0
            if len(self.blocks) % TRIM_BLOCKS == 0:
                pa.system_memory_pool().release_unused()  # trims the heap, where blocks lie between what was freed

    def get(self, number: int) -> T:
        """Item `number`, from 0."""
        place = bisect_right(self.firsts, number) - 1
        block, items = self.unpacked if place < len(self.blocks) else (place, self.last)
        if block != place:
            size, content = self.blocks[place]
            items = pickle.loads(pa.decompress(content, decompressed_size=size, codec="zstd"))
            self.unpacked = place, items  # in one assignment, since threads read rows too
        return pickle.loads(items[number - self.firsts[place]])

    def items(self) -> "Lazy[T]":
        """All items that were appended until now."""
        return Lazy(range(len(self)), self.get)


class Lazy(Sequence[T]):
    """The items get(place), for each of some places."""

    def __init__(self, places: Sequence[int], get: Callable[[int], T]):
        self.places, self.get = places, get

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int | slice) -> Any:  # an item, or Lazy of several
        return Lazy(self.places[i], self.get) if isinstance(i, slice) else self.get(self.places[i])

    def __add__(self, other: Sequence[T]) -> "Lazy[T]":
        n = len(self)
        return Lazy(range(n + len(other)), lambda i: self[i] if i < n else other[i - n])


Reader = Callable[[Any], Lazy[Row]]  # files -> their checked rows


def derive(rows: Sequence[Row], make: Callable[[list[Row]], Iterable[T | None]], name: str) -> Lazy[T]:
    """What `make` makes of rows, in their order, without the rows for which it gives None. `places` of the result are
    numbers of `rows`.

    Args: make, which gets several rows and gives as many results; name, of the progress bar.
    """
    made: Packed[Any] = Packed()  # also None, so that the numbers are those of the rows
    places = array("q")
    for start in progress(name, range(0, len(rows), CHUNK_ROWS)):
        for result in make(list(rows[start : start + CHUNK_ROWS])):
            if result is not None:
                places.append(len(made))
            made.append(result)
    return Lazy(places, made.get)

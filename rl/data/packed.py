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

T = TypeVar("T")
Row = dict[str, Any]

BLOCK_BYTES = 2**14  # items that are compressed together have at least so many bytes
CHUNK_ROWS, CHUNK_CHARACTERS = 256, 2**20  # `derive` works on rows until they are so many, or have so many characters
TRIM_BYTES = 2**26  # of items, after which what was freed meanwhile is given back to the system
KEPT_BYTES = 2**28  # what `derive` keeps in any case of what it made, compressed


class Packed(Generic[T]):
    """Items that are appended and read by number. Each call of `get` makes a new object."""

    def __init__(self):
        self.blocks: list[tuple[int, bytes]] = []  # size before compression, and what it became
        self.firsts = array("q", [0])  # number of the first item of each block, and of `last`
        self.last: list[bytes] = []  # items that are not compressed yet
        self.last_bytes = self.num_bytes = self.saved_bytes = 0  # of `last`, of blocks, and what compression has saved
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
            if (self.num_bytes + self.saved_bytes) % TRIM_BYTES + len(block) >= TRIM_BYTES:
                pa.system_memory_pool().release_unused()  # trims the heap, where blocks lie between what was freed
            self.num_bytes += len(self.blocks[-1][1])
            self.saved_bytes += len(block) - len(self.blocks[-1][1])
            self.firsts.append(len(self))
            self.last, self.last_bytes = [], 0

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
        return Lazy(range(len(self)), self.get, self.saved_bytes)


class Lazy(Sequence[T]):
    """The items get(place), for each of some places. Args: kept_bytes, that `derive` may keep of what it makes of the
    items.
    """

    def __init__(self, places: Sequence[int], get: Callable[[int], T], kept_bytes: int = 0):
        self.places, self.get, self.kept_bytes = places, get, max(kept_bytes, KEPT_BYTES)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int | slice) -> "T | Lazy[T]":
        return Lazy(self.places[i], self.get, self.kept_bytes) if isinstance(i, slice) else self.get(self.places[i])

    def __add__(self, other: Sequence[T]) -> "Lazy[T]":
        n = len(self)
        return Lazy(range(n + len(other)), lambda i: self[i] if i < n else other[i - n])

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Sequence) and len(self) == len(other)
        return same and all(x == other[i] for i, x in enumerate(self))


Reader = Callable[[Any], Lazy[Row]]  # files -> their checked rows


def derive(rows: Sequence[Row], make: Callable[[list[Row]], Iterable[T | None]], name: str) -> Lazy[T]:
    """What `make` makes of rows, in their order, without the rows for which it gives None. `places` of the result are
    numbers of `rows`.

    `make` gets several rows and gives as many results. They are kept, compressed, as long as they take no more bytes
    than compression has saved on the rows, or than KEPT_BYTES. The others are made again whenever they are asked for.

    Args: name, of the progress bar.
    """
    made: Packed[T | None] = Packed()
    places, chunk, size, limit = array("q"), [], 0, getattr(rows, "kept_bytes", KEPT_BYTES)
    for count, row in enumerate(progress(name, rows), start=1):
        chunk.append(row)
        size += len(repr(row))
        if len(chunk) < CHUNK_ROWS and size < CHUNK_CHARACTERS and count < len(rows):
            continue
        for number, value in enumerate(make(chunk), start=count - len(chunk)):
            if value is not None:
                places.append(number)
            if len(made) == number and made.num_bytes < limit:
                made.append(value)
        chunk, size = [], 0
    return Lazy(places, lambda i: made.get(i) if i < len(made) else next(iter(make([rows[i]]))))

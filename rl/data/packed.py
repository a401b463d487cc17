"""Sequences whose items are made when they are asked for, since a million rows as Python objects would take several GB.

packed = Packed()                               items that are compressed in memory
packed.append(row)
rows = Lazy(range(len(packed)), packed.get)     a sequence of them: len(rows), rows[i], rows[:9], for row in rows
samples = derive(rows, make, "tokenize")        what `make` makes of the rows, without those that it leaves out
"""

import pickle
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from rl.console import progress
from rl.data.types import Row

T = TypeVar("T")

CHUNK_ROWS = 16  # rows that `derive` works on at a time


class Packed(Generic[T]):
    """Items that are appended and read by number. Each call of `get` makes a new object. (What rl/model calls packed is
    something else, namely sequences of tokens without padding.)
    """

    def __init__(self):
        self.first = b""  # the first item, pickled. All are compressed with it as a dictionary, since they are alike
        self.compressed: list[bytes] = []

    def __len__(self) -> int:
        return len(self.compressed)

    def append(self, item: T) -> None:
        """Add an item, which must be picklable. Raises RecursionError if it is nested too deeply."""
        pickled = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
        self.first = self.first or pickled
        compressor = zlib.compressobj(level=1, zdict=self.first)
        self.compressed.append(compressor.compress(pickled) + compressor.flush())

    def get(self, number: int) -> T:
        """Item `number`, from 0."""
        return pickle.loads(zlib.decompressobj(zdict=self.first).decompress(self.compressed[number]))


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
    results = (x for i in range(0, len(rows), CHUNK_ROWS) for x in make(list(rows[i : i + CHUNK_ROWS])))
    for result in progress(name, results, total=len(rows)):
        if result is not None:
            places.append(len(made))
        made.append(result)
    return Lazy(places, made.get)

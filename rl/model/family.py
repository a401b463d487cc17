"""The protocol of families, which says what a kind of models does otherwise than a dense decoder of text.

A model has the families that fit it, mostly none. They are classes in extras/, such as extras/families/vision.py. Other
files of rl/ call only the methods below.
"""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from rl.data.types import Batch
from rl.ranks import Ranks


class Pass(NamedTuple):
    """One pass of the decoder over tokens of a batch (b, T)."""

    inputs: dict[str, Any]  # its arguments, such as input_ids (1, N) if packed or (rows, width) if padded
    take: Callable[[Tensor], Tensor]  # picks the tokens of this pass, in order: (b, T, ...) -> (N, ...)
    ids: Tensor  # (rows, width) token ids of the batch rows that this pass reads, right-padded
    real: Tensor  # (rows, width) bool, False on padding, with `ids` for what has to be computed row by row


class Family:
    """What a kind of models may do otherwise. Here every method does nothing. A family overrides some of them."""

    shares_beginnings = True  # whether rows may share the tokens that they begin with
    one_pass = False  # whether padded rows have to be in one pass, since modules remember something of it
    runs_packed = True  # whether the model can run packed as a dense one does

    def begin_run(self, learning: Any, engine: Any) -> None:
        """Note what the passes of a run have to do, by its flags about what learns, see `rl.model.roles.Learning`, and
        by the engine that samples for it, which is None if none does.
        """

    def as_reference(self) -> "Family":
        """The family as it is for the same modules in the role of a reference, which replays nothing."""
        return self

    def widen(self, batch: Batch, wanted: Tensor) -> tuple[Batch, Tensor]:
        """The batch, perhaps with more rows, and `wanted` (b, T) for it. A family adds a row if its modules must run on
        every rank although the batch has nothing for them, or else the collectives of the ranks would not match.
        """
        return batch, wanted

    def begin(self, batch: Batch | None, passes: list[Pass]) -> None:
        """Prepare the model's modules for these passes over `batch`, and add to `passes[i].inputs` what they need.
        `batch` is None while an engine samples.
        """

    def watched(self) -> contextlib.AbstractContextManager[Any]:
        """Context around passes that record something. What it yields goes to `metrics`."""
        return contextlib.nullcontext({})

    def metrics(self, seen: Any, ranks: Ranks) -> dict[str, float]:
        """Metrics of what `watched` has seen. All ranks must enter. Raises RuntimeError if that cannot be right."""
        return {}

    def may_compile(self, layer: nn.Module) -> bool:
        """Whether a layer may run compiled, since nothing about its inputs varies but the number of tokens."""
        return True

    def is_added(self, name: str) -> bool:
        """Whether a parameter of this name is in none of the model's files, since the family has added it."""
        return False

    def reference(self) -> PreTrainedModel | None:
        """The model as it was before training, if that needs no second copy of its weights."""
        return None

    # These methods say what leaves the process, which are weights for engines and files, and what a checkpoint has
    # besides.

    def exported(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """(name, whole tensor) pairs as engines and files know them, from those that the trainer has."""
        return named_tensors

    def save(self, folder: Path, suffix: str, weights: dict[str, Tensor]) -> dict[str, str]:
        """Write files of the family, whose names end in `suffix`, into a checkpoint's folder on rank 0, from all that
        learns, whole and on the host. Returns what `check_saved` has to know, or {} for nothing.
        """
        return {}

    def check_saved(self, record: dict[str, str], path: Path) -> None:
        """Raise ValueError if what learned in the checkpoint `path` does not fit the model. `record` is from `save`."""

    # For the test of a model when it is loaded, see `self_test`.

    def tested(self, flag: str) -> contextlib.AbstractContextManager[None]:
        """Context around `self_test.choose_forward` when a model is loaded. On leaving it, it raises ValueError, which
        names `flag`, if the model cannot be trained.
        """
        return contextlib.nullcontext()

    def test_rows(self, ids: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Token ids (b, T) and lengths (b,) of random sequences, with what the family adds to them."""
        return ids, lengths

    def own_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the model's own forward is given for one sequence, whose `input_ids` (1, n) are in `inputs`."""
        return inputs


def is_added(model: PreTrainedModel, name: str) -> bool:
    """Whether a parameter of a model is in none of its files, since a family has added it."""
    return any(x.is_added(name) for x in model.packed.families)

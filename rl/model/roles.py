"""The role of a model in a run: which class of transformers reads it, and which of its weights learn.

A policy, a reference and a teacher are read as causal language models, a critic and a reward model with another head.
All of a policy learns, unless its flags say otherwise, and nothing of a reference.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

from extras import families
from rl.ranks import Ranks


class CausalLM:
    """A model that predicts the next token. An extra whose models have another head, as critics do, has a subclass."""

    may_lack: frozenset[str] = frozenset()  # weights of a new head, which the files may lack, or have for another head
    config: Mapping[str, Any] = {}  # what the config has to say

    def class_of(self, path: str) -> Any:
        """The class of transformers that reads the model in `path`."""
        return families.auto_class(path)

    def check(self, config: PreTrainedConfig, where: str) -> None:
        """Raise ValueError, which begins with `where`, if a model with this config cannot be read so."""
        is_bidirectional = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
        if is_bidirectional or getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{where}: a {config.model_type} is not a causal language model; choose another model")

    def finish(self, model: nn.Module, new: set[str], where: str) -> None:
        """Make a model ready that was just read. `new` are the names of weights that its files lack."""
        families.prepare(model)


class Learning:
    """What of a model learns, which is all of it. A group of flags that says otherwise has the same methods."""

    keeps_weights = False  # whether the weights of the files stay as they are, and others are added, which learn

    def check_model(self, path: str, auto_class: Any = None, *, flag: str = "--model") -> None:
        """Raise ValueError, from its config alone, if the model in `path`, which `flag` has named, cannot learn so."""

    def apply(self, model: nn.Module, *, path: str, seed: int, ranks: Ranks) -> None:
        """Freeze what does not learn of a model that was loaded from `path`, and add what is added. `seed` is that of
        new weights.
        """


CAUSAL_LM, ALL_WEIGHTS = CausalLM(), Learning()

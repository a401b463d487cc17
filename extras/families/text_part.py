"""Models of which only the text part is trained, such as a published Qwen3.5 if the data has no images."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from rl.model.family import is_added

# For `cached_file`: a file that is not there is none.
CALM = dict(_raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)


def weights_beside(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What the files of the larger model hold and the module has not, as it is there: its vision tower. A layer that
    the module has is all its own, whatever tensors hold it: experts may be published as one or one by one.
    """
    shapes = {key: x.shape for key, x in module.named_parameters() if not is_added(module, key)}
    published = revert_weight_conversion(module, {key: torch.empty(x, device="meta") for key, x in shapes.items()})
    layers, path = {_layer_of(key) for key in published}, module.whole.name_or_path
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **CALM)
    files = set(json.loads(Path(index).read_text())["weight_map"].values()) if index else {SAFE_WEIGHTS_NAME}
    for name in sorted(files):
        with safe_open(cached_file(path, name), "pt") as file:
            yield from ((key, file.get_tensor(key)) for key in file.keys() if _layer_of(key) not in layers)


def _layer_of(key: str) -> str:
    """A weight's name up to the first number, or all of it."""
    return match[0] if (match := re.match(r".*?\.\d+\.", key)) else key

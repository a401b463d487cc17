"""Models that see images: their vision tower, the inputs of images, and positions in three dimensions.

In a batch an image is a run of one id (see data/images.py). Right before a pass these become the tokens that the model
knows, and the features of the images go exactly there: not to placeholders that the policy has sampled, which are text.

Under FSDP2 the tower's layers are collectives. So if the data has images, every pass of every rank has one: a rank
without any runs a small blank one as a row of its own, whose hidden states nobody reads.
"""

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rl.data import images
from rl.data.types import Batch
from rl.model.family import Family, Pass

TOWERS = ("visual", "vision_tower", "vision_model")  # names of the tower in a model's decoder


def class_of(config: PreTrainedConfig) -> Any:
    """The class that loads a policy that can see: with its vision tower if the data has images, or if there is no class
    without.
    """
    is_text = not images.in_use() and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def is_text_part(config: PreTrainedConfig) -> bool:
    """Whether `class_of` loads only the text part of a model, which has a class of its own."""
    if class_of(config) is not AutoModelForCausalLM:
        return False
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].config_class is not type(config)


def tower_of(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The vision tower of a model and its name; None if it has none."""
    for name in TOWERS:
        if isinstance(getattr(decoder := model.base_model, name, None), nn.Module):
            return next((full, x) for full, x in model.named_modules() if x is getattr(decoder, name))
    return None


class Vision(Family):
    """A model that sees images."""

    one_pass = True

    def __init__(self, model: nn.Module):
        self.model = model

    def widen(self, batch: Batch, wanted: Tensor) -> tuple[Batch, Tensor]:
        """See `with_image`."""
        rows, batch = len(wanted), with_image(batch)
        return batch, F.pad(wanted, (0, batch.input_ids.shape[1] - wanted.shape[1], 0, len(batch.lengths) - rows))

    def begin(self, batch: Batch | None, passes: list[Pass]) -> None:
        """Complete the inputs by images and their positions."""
        for x in passes:
            x.inputs.update(inputs_of(self.model, x.inputs["input_ids"]))
            positions = positions_of(self.model, x.ids, x.real)  # (b, T) or (3, b, T)
            if "packing" in x.inputs:
                positions = x.take(positions) if positions.ndim == 2 else torch.stack([x.take(y) for y in positions])
                positions = positions.unsqueeze(-2)
            x.inputs["position_ids"] = positions

    def own_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """See `own_inputs` below."""
        return own_inputs(self.model, inputs["input_ids"])

    def test_rows(self, ids: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """A blank image stands in the first row and in two that begin alike, if there is room."""
        if 30 + (width := len(images.tokens(0).ids)) > longest:
            return ids, lengths
        ids, lengths = F.pad(ids, (0, width)), lengths + torch.tensor([1, 0, 0, 1, 1, 0]) * width
        for row, start in ((0, 4), (3, 7), (4, 7)):
            ids[row, start + width :] = ids[row, start:-width].clone()
            ids[row, start : start + width] = images.FIRST
        return ids, lengths


def make(model: nn.Module) -> Vision | None:
    """The family of a model that was loaded with its tower, if the data has images."""
    return Vision(model) if images.in_use() else None


def prepare(model: nn.Module) -> None:
    """Let the model put features where `inputs_of` says."""
    decoder = model.base_model
    for name in ("get_placeholder_mask", "inputs_merger"):  # of transformers; SmolVLM has the other name
        if hasattr(decoder, name):
            setattr(decoder, name, functools.partial(_at_places, decoder, getattr(decoder, name)))


def _at_places(decoder: nn.Module, own: Any, input_ids: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """What the decoder's `own` function finds for token ids that are placeholders exactly where features belong."""
    return own(vars(decoder).pop("marked_ids", input_ids), *args, **kwargs)


def with_image(batch: Batch) -> Batch:
    """The batch, with a row that is a blank image if it has none."""
    if (batch.input_ids >= images.FIRST).any():
        return batch
    blank = len(images.tokens(0).ids)
    width = max(blank, batch.input_ids.shape[1])

    def longer(name: str, x: Tensor) -> Tensor:
        rows = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, width - x.shape[1], 0, 1) if x.ndim > 1 else (0, 1))
        if name == "input_ids":
            rows[-1, :blank] = images.FIRST
        elif name == "lengths":
            rows[-1] = blank
        return rows

    return batch.map(longer)


def positions_of(model: nn.Module, ids: Tensor, real: Tensor) -> Tensor:
    """Positions of token ids (b, T), of which some are `real`, one after the other: (b, T), or (3, b, T) for models
    that count the rows and columns of an image; 0 for what is not real.
    """
    plain = (real.cumsum(-1) - 1).clamp(min=0) * real
    if not images.in_use() or not hasattr(model.base_model, "get_rope_index") or not (ids >= images.FIRST).any():
        return plain
    found, known = plain.expand(3, *plain.shape).clone(), {}
    host, kept = ids.cpu(), real.cpu()
    for i in (host >= images.FIRST).any(-1).nonzero()[:, 0].tolist():
        row = host[i, kept[i]]
        end = int((row >= images.FIRST).nonzero()[-1]) + 1  # behind the last image positions just go on
        key = tuple(row[:end].tolist())
        if key not in known:
            known[key] = _rope(model, row[:end])
        head = known[key]
        tail = torch.arange(len(row) - end) + head.max() + 1
        found[:, i, real[i]] = torch.cat([head, tail.expand(3, -1)], 1).to(ids.device)
    return found


def _rope(model: nn.Module, row: Tensor) -> Tensor:
    """Positions (3, n) of token ids (n,) on the host."""
    tokens, features, numbers = images.expanded(row)
    grids = torch.cat([images.inputs(k)["image_grid_thw"] for k in numbers])
    function = model.base_model.get_rope_index
    given = dict(input_ids=tokens[None], mm_token_type_ids=features[None].int(), image_grid_thw=grids)
    known = inspect.signature(function).parameters
    return function(**{name: x for name, x in given.items() if name in known})[0][:, 0]


def inputs_of(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """The model's arguments for token ids (b, T) with images: `input_ids`, `pixel_values` and the like."""
    if not images.in_use():
        return {"input_ids": ids}
    tokens, features, numbers = images.expanded(ids)
    found = {"input_ids": tokens}
    if not numbers:
        return found
    # The next pass puts features here; -1 is no placeholder of any kind.
    model.base_model.marked_ids = torch.where(features, images.processor().feature_token_id, -1)
    parts = [images.inputs(k) for k in numbers]
    for name in parts[0]:
        is_tiles = parts[0][name].ndim == (5 if name == "pixel_values" else 4)  # (1, tiles, ...)
        joined = torch.cat([x[name] for x in parts], int(is_tiles))
        found[name] = joined.to(ids.device)
    if "token_type_ids" in inspect.signature(model.base_model.forward).parameters:  # attention within an image
        found["token_type_ids"] = features.long()
    return found


def own_inputs(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """As `inputs_of`, what the model's own forward is given for one sequence (1, n), as by its processor: it finds
    places and positions itself.
    """
    found = inputs_of(model, ids)
    if vars(model.base_model).pop("marked_ids", None) is not None:
        found["mm_token_type_ids"] = (found["input_ids"] == images.processor().feature_token_id).long()
        if "token_type_ids" in found:
            del found["mm_token_type_ids"]
    known = inspect.signature(type(model).forward).parameters
    return {name: x for name, x in found.items() if name in known}

"""Models that see images: their vision tower, the inputs of images, and positions in three dimensions.

In a batch an image is a run of one id (see extras/images). Right before a pass these become the tokens that the model
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

from extras import images
from rl.data.types import Batch
from rl.model.family import Family, Pass

TOWERS = ("visual", "vision_tower", "vision_model")  # names of the tower in a model's decoder


def class_of(config: PreTrainedConfig) -> Any:
    """The class that loads a policy that can see: with its vision tower if the data has images, or if there is no class
    without.
    """
    is_text = not images.in_use() and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def prompts_for_vllm(path: str, config: PreTrainedConfig) -> Any:
    """How vLLM reads prompts for the model in `path`, or None if that is as for a model of text."""
    from extras.families import vision_in_vllm

    if class_of(config) is AutoModelForImageTextToText:
        return vision_in_vllm.ImagePrompts(path)
    is_whole = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].config_class is type(config)
    return None if is_whole else vision_in_vllm.TextPart()


def tower_of(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The vision tower of a model and its name, or None if it has none."""
    for name in TOWERS:
        if isinstance(getattr(decoder := model.base_model, name, None), nn.Module):
            return next((full, x) for full, x in model.named_modules() if x is getattr(decoder, name))
    return None


class Vision(Family):
    """A model that sees the images of this process."""

    one_pass = True

    def __init__(self, model: nn.Module):
        self.model, self.images = model, images.of_process()

    def may_compile(self, layer: nn.Module) -> bool:
        """Not those of the tower: images have other dimensions that vary."""
        named_tower = tower_of(self.model)
        return named_tower is None or all(layer is not x for x in named_tower[1].modules())

    def widen(self, batch: Batch, wanted: Tensor) -> tuple[Batch, Tensor]:
        """See `with_image`."""
        rows, batch = len(wanted), self.with_image(batch)
        return batch, F.pad(wanted, (0, batch.input_ids.shape[1] - wanted.shape[1], 0, len(batch.lengths) - rows))

    def with_image(self, batch: Batch) -> Batch:
        """The batch, with a row that is a blank image if it has none."""
        if (batch.input_ids >= images.FIRST).any():
            return batch
        blank = len(self.images.tokens(0).ids)
        width = max(blank, batch.input_ids.shape[1])

        def longer(name: str, x: Tensor) -> Tensor:
            rows = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, width - x.shape[1], 0, 1) if x.ndim > 1 else (0, 1))
            if name == "input_ids":
                rows[-1, :blank] = images.FIRST
            elif name == "lengths":
                rows[-1] = blank
            return rows

        return batch.map(longer)

    def begin(self, batch: Batch | None, passes: list[Pass]) -> None:
        """Complete the inputs by images and their positions."""
        for x in passes:
            x.inputs.update(self.inputs_of(x.inputs["input_ids"]))
            positions = self.positions_of(x.ids, x.real)  # (b, T) or (3, b, T)
            if "packing" in x.inputs:
                positions = x.take(positions) if positions.ndim == 2 else torch.stack([x.take(y) for y in positions])
                positions = positions.unsqueeze(-2)
            x.inputs["position_ids"] = positions

    def positions_of(self, ids: Tensor, real: Tensor) -> Tensor:
        """Positions of token ids (b, T). Those that are `real` are numbered one after the other, and the others have 0.
        They are (b, T), or (3, b, T) for models that count the rows and columns of an image.
        """
        plain = (real.cumsum(-1) - 1).clamp(min=0) * real
        is_image = ids >= images.FIRST
        if not hasattr(self.model.base_model, "get_rope_index") or not is_image.any():
            return plain
        positions, of_heads = plain.expand(3, *plain.shape).clone(), {}
        ids_on_host, real_on_host = ids.cpu(), real.cpu()
        for i in is_image.any(-1).nonzero()[:, 0].tolist():
            row = ids_on_host[i, real_on_host[i]]
            end = int((row >= images.FIRST).nonzero()[-1]) + 1  # after the last image positions just go on
            key = tuple(row[:end].tolist())
            if key not in of_heads:
                of_heads[key] = self._rope(row[:end])
            head = of_heads[key]
            tail = torch.arange(len(row) - end) + head.max() + 1
            positions[:, i, real[i]] = torch.cat([head, tail.expand(3, -1)], 1).to(ids.device)
        return positions

    def _rope(self, row: Tensor) -> Tensor:
        """Positions (3, n) of token ids (n,) on the host."""
        tokens, features, numbers = self.images.expanded(row)
        grids = torch.cat([self.images.inputs(k)["image_grid_thw"] for k in numbers])
        arguments = dict(input_ids=tokens[None], mm_token_type_ids=features[None].int(), image_grid_thw=grids)
        function = self.model.base_model.get_rope_index
        return function(**_of(function, arguments))[0][:, 0]

    def inputs_of(self, ids: Tensor) -> dict[str, Any]:
        """The model's arguments for token ids (b, T) with images: `input_ids`, `pixel_values` and the like."""
        tokens, features, numbers = self.images.expanded(ids)
        inputs = {"input_ids": tokens}
        if not numbers:
            return inputs
        # The next pass puts features here. -1 is not a placeholder of any kind.
        self.model.base_model.marked_ids = torch.where(features, self.images.processor.feature_token_id, -1)
        parts = [self.images.inputs(k) for k in numbers]
        for name in parts[0]:
            is_tiles = parts[0][name].ndim == (5 if name == "pixel_values" else 4)  # (1, tiles, ...)
            inputs[name] = torch.cat([x[name] for x in parts], int(is_tiles)).to(ids.device)
        if "token_type_ids" in inspect.signature(self.model.base_model.forward).parameters:
            inputs["token_type_ids"] = features.long()  # for attention to both sides within an image
        return inputs

    def own_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As `inputs_of`, what the model's own forward is given for one sequence (1, n), as by its processor. It finds
        places and positions itself.
        """
        inputs = self.inputs_of(inputs["input_ids"])
        if vars(self.model.base_model).pop("marked_ids", None) is not None and "token_type_ids" not in inputs:
            is_feature = inputs["input_ids"] == self.images.processor.feature_token_id
            inputs["mm_token_type_ids"] = is_feature.long()
        return _of(type(self.model).forward, inputs)

    def test_rows(self, ids: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """A blank image stands in the first row and in two that begin alike, if there is room."""
        if 30 + (width := len(self.images.tokens(0).ids)) > longest:
            return ids, lengths
        ids, lengths = F.pad(ids, (0, width)), lengths + torch.tensor([1, 0, 0, 1, 1, 0]) * width
        for row, start in ((0, 4), (3, 7), (4, 7)):
            ids[row, start + width :] = ids[row, start:-width].clone()
            ids[row, start : start + width] = images.FIRST
        return ids, lengths


def _of(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that a function takes."""
    parameters = inspect.signature(function).parameters
    return {name: x for name, x in arguments.items() if name in parameters}


def make(model: nn.Module) -> Vision | None:
    """The family of a model that was loaded with its tower, if the data has images."""
    return Vision(model) if images.in_use() else None


def prepare(model: nn.Module) -> None:
    """Let the model put features where `Vision.inputs_of` says."""
    decoder = model.base_model
    for name in ("get_placeholder_mask", "inputs_merger"):  # of transformers. SmolVLM has the other name.
        if hasattr(decoder, name):
            setattr(decoder, name, functools.partial(_at_places, decoder, getattr(decoder, name)))


def _at_places(decoder: nn.Module, own: Any, input_ids: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """What the decoder's `own` function finds for token ids that are placeholders exactly where features belong."""
    return own(vars(decoder).pop("marked_ids", input_ids), *args, **kwargs)

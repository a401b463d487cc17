"""How vLLM reads prompts with images, and a model of which it runs the text part alone."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from extras import images
from rl.sampling.engines.vllm import Prompts


class TextPart(Prompts):
    """Prompts of the text part of a model that also sees images."""

    arguments = {"skip_tokenizer_init": False, "language_model_only": True}


class ImagePrompts(Prompts):
    """Prompts with the images of this process. Raises ValueError if the model's processor puts text around an image."""

    may_be_cut = False  # an image is never cut

    def __init__(self, model: str):
        self.model, self.images = model, images.of_process()
        if self.images and self.images.tokens(0).before:
            raise ValueError(
                f"--engine vllm: the processor of {model} puts text around an image (Gemma 3: line breaks), which vLLM "
                "adds once more; use --engine hf for such a model"
            )
        limits = {"image": self.images.most_in_row, "video": 0}
        self.arguments = {"skip_tokenizer_init": False, "limit_mm_per_prompt": limits} | _no_constants()

    def of(self, ids: Sequence[int]) -> dict[str, Any]:
        """One token for an image, which vLLM makes as many as its features, and the image itself."""
        collapsed, numbers = self.images.collapsed(ids)
        if not numbers:
            return {"type": "token", "prompt_token_ids": collapsed}
        pictures = {"image": [self.images.picture(k) for k in numbers]}
        names = {"image": [f"image-{k}" for k in numbers]}  # instead of hashes of the pixels
        return {"prompt_token_ids": collapsed, "multi_modal_data": pictures, "multi_modal_uuids": names}

    def check(self, ids: Sequence[int], read: list[int]) -> None:
        """See `Prompts`."""
        expanded = self.images.expanded(torch.tensor(ids))[0].tolist()
        if expanded != read:
            raise RuntimeError(
                f"vLLM reads a prompt with images as {len(read)} tokens, and the processor of {self.model} as "
                f"{len(expanded)}, or as others: such a model cannot be trained here"
            )

    def forget(self, llm: Any) -> None:
        """Drop the features of images, which are those of the old weights."""
        llm.reset_mm_cache()
        llm.llm_engine.engine_core.reset_encoder_cache()


def _no_constants() -> dict[str, bool]:
    """vLLM's normalization of images on the device, in newer versions, has constants that dummy weights overwrite."""
    from vllm.engine.arg_utils import EngineArgs

    return {x.name: False for x in dataclasses.fields(EngineArgs) if x.name == "mm_device_do_normalize"}

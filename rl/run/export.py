"""What other programs load from a checkpoint: huggingface/ has a whole model, and families may write more, as LoRA."""

import copy
import pathlib
import tempfile
from typing import Any, NamedTuple

import torch
from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from extras import families, images
from rl.model import load as models
from rl.model.family import is_added
from rl.model.sharding import full_tensors
from rl.ranks import Ranks
from rl.run import checkpoint_tensors as tensors
from rl.run.checkpoint_tensors import Trained

FILE_BYTES = 5 * 10**9  # of a file in huggingface/, at most


class ToExport(NamedTuple):
    """What has to be known of a module when it is written, while training goes on."""

    module: PreTrainedModel
    keys: list[str]  # of the weights that it trains
    others: dict[str, torch.Tensor]  # on rank 0, other weights, whole, and buffers
    beside: dict[str, torch.Tensor]  # on rank 0, the weights of the rest, if the module is part of a larger model
    num_weights: int  # trained or not


Exports = dict[str, ToExport]  # by the names of modules


class Exporter:
    """Writes the modules that a run trains, on rank 0. `frozen` has the weights that nothing trains, which are read
    once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ranks: Ranks):
        self.ranks, self.frozen, self.beside = ranks, {}, {}
        self.tokenizer_files = _files_of(tokenizer)  # made once, since that holds Python's lock for up to 0.2 s

    def prepare(self, trained: Trained) -> Exports:
        """What `write` has to know of the modules that learn, taken before they change. All ranks must enter."""
        exports = {}
        for name, (module, optimizer) in trained.items():
            if optimizer is None:  # a reference
                continue
            if name not in self.frozen:
                self.frozen[name] = frozen_weights(module, self.ranks)
                self.beside[name] = families.weights_beside(module) if self.ranks.is_main else {}
            buffers = {key: x.to("cpu", copy=True) for key, x in models.buffers_in_files(module)}
            size = sum(x.numel() for x in module.parameters())
            others = self.frozen[name] | buffers
            exports[name] = ToExport(module, list(tensors.learning(module)), others, self.beside[name], size)
        return exports

    def write(self, folder: pathlib.Path, exports: Exports) -> dict[str, Any]:
        """Write huggingface/, and what families of the modules write, beside the state in `folder`, which is complete.
        All names but the first end in `_NAME`. Returns what families have to know of each module when it is loaded.
        """
        records, saved = {}, tensors.read(folder / "state", self.ranks.size)
        for i, (name, (module, keys, others, beside, _)) in enumerate(exports.items()):
            suffix = f"_{name}" if i else ""
            learned = {key: self._weight(module, key, saved[f"{name}/model/{key}"]) for key in keys}
            weights = {key: _alone(x) for key, x in models.exported(module, (others | learned).items())}
            self.write_huggingface(folder / f"huggingface{suffix}", module, weights | beside)
            for family in module.packed.families:
                if record := family.save(folder, suffix, learned):
                    records[name] = record
        return records

    def write_huggingface(self, path: pathlib.Path, module: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
        """Write what transformers and vLLM load. These are safetensors, config with the compute dtype, generation
        config and tokenizer.
        """
        path.mkdir(parents=True)
        whole = getattr(module, "whole", None)  # of a larger model, see `load.name_weights`
        config = copy.deepcopy(whole or module.config)
        config.dtype = config.get_text_config().dtype = self.ranks.dtype
        if whole is None:
            config.architectures = [type(module).__name__.removeprefix("FSDP")]
        config.save_pretrained(path)
        if module.can_generate():  # save_pretrained refuses many a model's
            module.generation_config.to_json_file(path / "generation_config.json")
        save_torch_state_dict(weights, path, max_shard_size=FILE_BYTES, metadata={"format": "pt"})
        for name, content in self.tokenizer_files.items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(content)

    def _weight(self, module: PreTrainedModel, key: str, saved: tensors.Saved) -> torch.Tensor:
        """A whole weight in the compute dtype, or in its own if a family has added it."""
        dtype = saved.dtype if is_added(module, key) else self.ranks.dtype
        return tensors.fill(torch.empty(saved.shape, dtype=dtype), saved)


def frozen_weights(module: PreTrainedModel, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The weights of a module that nothing trains, whole, on the host of rank 0. All ranks must enter."""
    names = {key for key, x in module.named_parameters() if not x.requires_grad}
    if not names:
        return {}
    weights = full_tensors(module, ranks.dtype)
    return {key: x.to("cpu", copy=True) for key, x in weights if ranks.is_main and key in names}


def _alone(x: torch.Tensor) -> torch.Tensor:
    """A tensor with memory of its own, since safetensors refuses parts of another one."""
    return x if x.nbytes == x.untyped_storage().nbytes() else x.clone()


def _files_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """What `save_pretrained` writes, by name, and the files by which the model reads what rows hold beside text."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = [p for p in pathlib.Path(folder).rglob("*") if p.is_file()]  # further chat templates have a folder
        written = {str(p.relative_to(folder)): p for p in paths}
        files = images.processor_files(tokenizer.name_or_path) | written
        return {name: p.read_bytes() for name, p in files.items()}

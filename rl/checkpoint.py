"""Save and resume. `<dir>/global_step_N/` holds

    state/              parameters (fp32) and optimizer state, torch DCP: loads at any world size
    huggingface/        config, tokenizer, safetensors in the compute dtype: transformers, vLLM and eval.py load it
    trainer_state.json  step, arguments, versions; written last

A checkpoint is written to a temporary folder and renamed, so a folder with the final name is complete. Order of data
and sampling seeds are functions of the step, so the step is all the loop state there is.
"""

import copy
import json
import pathlib
import re
import shutil
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import PreTrainedTokenizerBase

from rl.fsdp import Dist, full_tensors


def save(
    root: str | pathlib.Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokenizer: PreTrainedTokenizerBase,
    d: Dist,
    args: Any,
    *,
    keep: int | None = None,
    extra: dict[str, float] | None = None,
) -> pathlib.Path:
    """Write `root/global_step_<step>` and return it. All ranks must enter.

    Older checkpoints beyond `keep` are deleted afterwards. `args` is the script's dataclass, kept for the record;
    `extra` are numbers of the loop that do not follow from the step.
    """
    final = pathlib.Path(root) / f"global_step_{step}"
    temporary = final.with_name(f".tmp_global_step_{step}")
    if d.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    parameters, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": optimizer_state}, checkpoint_id=temporary / "state")
    export_hf(temporary / "huggingface", model, tokenizer, d)
    if d.is_main:
        state = {"step": step, "args": vars(args), "world_size": d.world_size, "torch": torch.__version__}
        state["extra"] = extra or {}
        (temporary / "trainer_state.json").write_text(json.dumps(state, indent=2, default=str))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        older = [s for s in list_steps(root) if s <= step]
        for old in older[:-keep] if keep else []:
            shutil.rmtree(pathlib.Path(root) / f"global_step_{old}")
    dist.barrier()
    return final


def load(path: pathlib.Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore a folder that `find` returned, in place, at any world size; returns its step. All ranks must enter."""
    parameters, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path / "state")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return json.loads((path / "trainer_state.json").read_text())["step"]


def extra(path: pathlib.Path | None) -> dict[str, float]:
    """What `save` got as `extra`; {} without a checkpoint."""
    return {} if path is None else json.loads((path / "trainer_state.json").read_text()).get("extra", {})


def list_steps(root: str | pathlib.Path) -> list[int]:
    """Steps of the complete checkpoints under `root`, ascending."""
    matches = (
        re.fullmatch(r"global_step_(\d+)", p.name)
        for p in pathlib.Path(root).glob("global_step_*/")
        if (p / "trainer_state.json").is_file()
    )
    return sorted(int(m[1]) for m in matches if m)


def find(resume_mode: str, root: str | pathlib.Path) -> pathlib.Path | None:
    """The checkpoint to resume, checked before anything is loaded.

    `auto`: the newest complete one under `root`, or None. `disable`: None. Otherwise a global_step_N folder.
    Raises ValueError if the folder is not a complete checkpoint, or if `disable` would mix a new run into an old one.
    """
    steps = list_steps(root)
    if resume_mode == "disable":
        if steps:
            raise ValueError(
                f"--resume-mode disable, but {root} holds checkpoints up to step {steps[-1]}; choose another "
                "--experiment-name or --default-local-dir, or remove the folder"
            )
        return None
    if resume_mode == "auto":
        return pathlib.Path(root) / f"global_step_{steps[-1]}" if steps else None
    if not (pathlib.Path(resume_mode) / "trainer_state.json").is_file():
        raise ValueError(
            f"--resume-mode {resume_mode}: not a complete checkpoint (no trainer_state.json); give auto, disable or a "
            "global_step_N folder"
        )
    return pathlib.Path(resume_mode)


def export_hf(path: pathlib.Path, model: nn.Module, tokenizer: PreTrainedTokenizerBase, d: Dist) -> None:
    """Write what transformers and vLLM load: safetensors in the compute dtype, config, generation config, tokenizer.

    All ranks must enter.
    """
    tensors = {}
    for name, tensor in full_tensors(model, d.dtype):  # tied weights come once, as safetensors wants them
        if d.is_main:
            tensors[name] = tensor.cpu()
    if d.is_main:
        path.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(model.config)
        config.dtype = d.dtype
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(path)
        if model.can_generate():
            model.generation_config.save_pretrained(path)
        save_torch_state_dict(tensors, path, metadata={"format": "pt"})
        tokenizer.save_pretrained(path)

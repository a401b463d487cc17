"""Transformers with a scalar head, which are loaded here, and their score of a sequence, read off at its last token.

Such a model is any decoder that transformers knows as a ...ForSequenceClassification with one label. It runs packed.
The last token of a sequence is found by its length. (The forward of transformers looks for the last id that is not the
padding's, and would stop early where padding has the end-of-sequence id.)
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from rl.data.types import Batch, take_rows
from rl.model import lora as adapters
from rl.model.checks import read_config
from rl.model.load import check_lora, load_pretrained, shard_as
from rl.model.logprobs import run_packed
from rl.model.lora import LoRA
from rl.model.sharding import Memory
from rl.ranks import Ranks


def check_score_head(path: str, *, flag: str, new_head: bool = False) -> None:
    """Raise ValueError naming `flag`, from the config alone, if `path` is no reward model. With `new_head` it may also
    be a model without a score head, which is to be trained.
    """
    config = read_config(path, flag=flag)
    name = (config.architectures or ["unnamed"])[0]
    if name.endswith("ForSequenceClassification"):
        if config.num_labels != 1:
            problem = f"its head gives {config.num_labels} labels, it has to give 1"
            raise ValueError(f"{flag} {path}: {problem}; choose another model")
    elif not new_head:
        raise ValueError(
            f"{flag} {path}: a {name}, which has no score head; give a ...ForSequenceClassification with one label, "
            "such as the huggingface/ folder of a checkpoint of train_reward.py"
        )
    elif type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"{flag} {path}: transformers has no {config.model_type} with a score head; choose another model"
        )


def load_scalar_model(
    path: str,
    ranks: Ranks,
    *,
    flag: str = "--reward-model",
    dtype: torch.dtype = torch.float32,
    new_head: Callable[[Tensor], object] | None = None,
    as_in_files: bool = False,
) -> nn.Module:
    """A model with a scalar head, its weights in `dtype` on the host. `new_head` fills the head's weight (1, H) of a
    model that comes without one. Raises ValueError as `check_score_head` or `load_pretrained`, which has as_in_files.
    """
    check_score_head(path, flag=flag, new_head=new_head is not None)
    options = dict(dtype=dtype, flag=flag, new_head=new_head is not None, as_in_files=as_in_files, num_labels=1)
    model, missing = load_pretrained(AutoModelForSequenceClassification, path, ranks, **options)
    head = dict(model.named_children()).get("score")
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(f"{flag} {path}: a {type(model).__name__} has no linear `score` head, only such are supported")
    if missing:
        new_head(head.weight)
    return model


def load_trained(
    path: str,
    ranks: Ranks,
    lora: LoRA,
    memory: Memory,
    *,
    new_head: Callable[[Tensor], object],
    longest: int,
    seed: int,
    flag: str = "--model",
) -> nn.Module:
    """`load_scalar_model` to be trained, sharded: all of it, or with --lora-rank adapters and the head. All ranks must
    enter. Raises ValueError as `load_scalar_model`, `lora.layers_of` or `load.choose_forward`.
    """
    adapt = check_lora(lora, path, AutoModelForSequenceClassification, flag=flag)
    dtype = ranks.dtype if adapt else torch.float32
    model = load_scalar_model(path, ranks, flag=flag, dtype=dtype, new_head=new_head, as_in_files=not adapt)
    if adapt:
        adapters.add(model, lora, path=path, seed=seed, hashed=ranks.is_main)
        model.score.to(torch.promote_types(dtype, torch.float32)).requires_grad_(True)
    return shard_as(memory, model, ranks, longest=longest, flag=flag)


def random_head(weight: Tensor, *, seed: int) -> None:
    """Fill a head's weight (1, H) from a normal distribution with standard deviation 1 / sqrt(H + 1), so that first
    scores are of order 1 (Stiennon et al. 2020, arXiv 2009.01325).
    """
    generator = torch.Generator().manual_seed(seed)
    nn.init.normal_(weight, std=(weight.shape[1] + 1) ** -0.5, generator=generator)


def sequence_scores(model: nn.Module, batch: Batch) -> Tensor:
    """The score (b,) of every sequence of a batch (b, T), from the hidden state of its last token, with gradients."""
    last = torch.arange(batch.input_ids.shape[1], device=batch.lengths.device) == batch.lengths[:, None] - 1  # (b, T)
    return run_packed(model, batch, last, score_head)[0]


def score_head(model: nn.Module, hidden: Tensor, *_: Tensor) -> tuple[Tensor]:
    """hidden (R, H) -> scores (R,), in float32 at least: bfloat16 would round scores above 4 to multiples of 1/32."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return (hidden.to(dtype) @ model.score.weight[0].to(dtype),)


@torch.no_grad()
def fixed_scores(model: nn.Module, batch: Batch, micro_batches: Iterable[list[int]]) -> Tensor:
    """`sequence_scores` without gradients of the rows in micro-batches: (B,) float32 on the host, zero in others."""
    scores = torch.zeros(len(batch.lengths))
    for rows in micro_batches:
        of_rows = sequence_scores(model, take_rows(batch, rows, model.packed.device))
        if rows:
            scores[rows] = of_rows.cpu().to(scores.dtype)
    return scores

"""Transformers with a scalar head, which are loaded here, and their score of a sequence, read off at its last token.

Such a model is any decoder that transformers knows as a ...ForSequenceClassification with one label. It runs packed.
The last token of a sequence is found by its length. (The forward of transformers looks for the last id that is not the
padding's, and would stop early where padding has the end-of-sequence id.)
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from rl.data.types import Batch, take_rows
from rl.model.logprobs import run_packed
from rl.model.roles import CausalLM


class ScalarModel(CausalLM):
    """What a reward model and a critic are read as: a ...ForSequenceClassification with one label.

    Args: new_head fills the head's weight (1, H) of a model that comes without a score head; None: it must have one.
    """

    config = {"num_labels": 1}

    def __init__(self, new_head: Callable[[Tensor], object] | None = None):
        self.new_head, self.may_lack = new_head, frozenset({"score.weight"} if new_head else ())

    def class_of(self, path: str) -> type:
        """See `CausalLM`."""
        return AutoModelForSequenceClassification

    def check(self, config: PreTrainedConfig, where: str) -> None:
        """Raise ValueError if that is not a reward model, and cannot become one where a head may be new."""
        name = (config.architectures or ["unnamed"])[0]
        if name.endswith("ForSequenceClassification"):
            if config.num_labels != 1:
                problem = f"its head gives {config.num_labels} labels, it has to give 1"
                raise ValueError(f"{where}: {problem}; choose another model")
        elif self.new_head is None:
            raise ValueError(
                f"{where}: a {name}, which has no score head; give a ...ForSequenceClassification with one "
                "label, such as the huggingface/ folder of a checkpoint of train_reward.py"
            )
        elif type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise ValueError(
                f"{where}: transformers has no {config.model_type} with a score head; choose another model"
            )

    def finish(self, model: nn.Module, new: set[str], where: str) -> None:
        """Fill a new head."""
        head = dict(model.named_children()).get("score")
        if not isinstance(head, nn.Linear) or head.bias is not None:
            kind = type(model).__name__
            raise ValueError(f"{where}: a {kind} has no linear `score` head, only such are supported")
        if new:
            self.new_head(head.weight)


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

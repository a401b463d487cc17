"""Learned rewards: a transformer with a scalar head, read off at the last token of prompt and response.

A reward model is any decoder that transformers knows as a ...ForSequenceClassification with one label. It runs packed.
The last token of a sequence is found by its length. (The forward of transformers looks for the last id that is not the
padding's, and would stop early where padding has the end-of-sequence id.)
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from rl.console import say
from rl.data.batching import collate, plan_micro_batches
from rl.data.encode import encode_conversation
from rl.data.rows import Row
from rl.data.text import prepare_like, shape_of
from rl.data.types import Batch, Sample, Score, take_rows
from rl.model import lora as adapters
from rl.model.checks import check_context, open_model, read_config
from rl.model.load import check_lora, load_pretrained, shard_as
from rl.model.logprobs import run_packed
from rl.model.lora import LoRA
from rl.model.sharding import Memory, offload, onload
from rl.ranks import Ranks


class RewardModel(NamedTuple):
    """A learned reward that joins those of functions, see `add_scores`."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase  # its own, whose chat template renders prompt and response
    coef: float  # weight of its score
    max_length: int  # tokens; a longer conversation loses its beginning, never the end of the response that is judged
    max_tokens_per_gpu: int  # of a forward pass
    ranks: Ranks


def check_reward_model(path: str, *, flag: str = "--reward-model", new_head: bool = False) -> None:
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


def open_reward_model(
    path: str, rows: Sequence[Row], max_length: int, policy: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase:
    """The tokenizer of a reward model. Raises ValueError, before its weights are loaded, if it has no score head, fewer
    than `max_length` positions, no tokenizer, no chat template for the prompts, or if its files lack weights.

    Of all `rows` whose messages have the same roles and fields, the first is tried. The template gets the same date and
    arguments as that of the `policy`, as far as it reads them.
    """
    check_reward_model(path)
    tokenizer = prepare_like(open_model(path, AutoModelForSequenceClassification, flag="--reward-model"), policy)
    check_context(path, max_length, "--reward-model-max-length")
    try:
        for row in {shape_of(row): row for row in reversed(rows)}.values():
            encode_conversation(tokenizer, row, "a response")
    except ValueError as error:
        raise ValueError(f"--reward-model {path} cannot read the training prompts: {error}") from error
    return tokenizer


def load_reward_model(
    path: str,
    ranks: Ranks,
    *,
    flag: str = "--reward-model",
    dtype: torch.dtype = torch.float32,
    new_head: Callable[[Tensor], object] | None = None,
    as_in_files: bool = False,
) -> nn.Module:
    """A model with a scalar head, its weights in `dtype` on the host. `new_head` fills the head's weight (1, H) of a
    model that comes without one. Raises ValueError as `check_reward_model` or `load_pretrained`, which has as_in_files.
    """
    check_reward_model(path, flag=flag, new_head=new_head is not None)
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
    """`load_reward_model` to be trained, sharded: all of it, or with --lora-rank adapters and the head. All ranks must
    enter. Raises ValueError as `load_reward_model`, `lora.layers_of` or `load.choose_forward`.
    """
    adapt = check_lora(lora, path, AutoModelForSequenceClassification, flag=flag)
    dtype = ranks.dtype if adapt else torch.float32
    model = load_reward_model(path, ranks, flag=flag, dtype=dtype, new_head=new_head, as_in_files=not adapt)
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


def add_scores(
    judge: RewardModel, rows: Sequence[dict], samples: Sequence[Sample], scores: Sequence[Score], *, alone: bool
) -> list[Score]:
    """Add the model's score, times its weight, to this rank's scores, and name it as the component `reward_model`.

    `rows` hold the prompts of the samples. The model comes from the host to the device for it. A response without a
    score gets none here either, and one for which the model gives NaN or infinity loses its own. Unless the model is
    `alone`, the accuracy of an evaluation stays that of the functions: the component `acc`. All ranks must enter.
    """
    by_index = {row["row_index"]: row for row in rows}
    prompts = {index: row["prompt"] for index, row in by_index.items()}
    onload(judge.model, judge.ranks.device)
    asked = [prompts[s.row_index] for s in samples]
    asked = [[*prompt, *s.messages[:-1]] if s.messages else prompt for s, prompt in zip(samples, asked, strict=True)]
    tools = [by_index[s.row_index].get("tools") for s in samples]
    learned = score_conversations(judge, asked, [score.text for score in scores], tools)
    offload(judge.model)
    result = []
    if failed := sum(not math.isfinite(x) for x in learned):
        say(f"reward: the reward model gave NaN or infinity for {failed} of {len(learned)} responses", sys.stderr)
    for score, x in zip(scores, learned, strict=True):
        if not math.isfinite(x):
            score = score._replace(value=None, status="error")
        if score.value is not None:
            components = ({} if alone else {"acc": score.value}) | score.components | {"reward_model": x}
            score = score._replace(value=score.value + judge.coef * x, components=components)
        result.append(score)
    return result


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
        found = sequence_scores(model, take_rows(batch, rows, model.packed.device))
        if rows:
            scores[rows] = found.cpu().to(scores.dtype)
    return scores


def score_conversations(
    judge: RewardModel,
    prompts: Sequence[str | list[dict]],
    responses: Sequence[str],
    tools: Sequence[list[dict] | None] | None = None,
) -> list[float]:
    """The model's scores of this rank's responses to prompts (text or messages), in their order. How many were too long
    is printed. All ranks must enter, with any number of responses each.

    Args: tools, of the prompts' rows, by default none.
    """
    ranks = judge.ranks
    rows = [{"prompt": x, "tools": y} for x, y in zip(prompts, tools or [None] * len(prompts), strict=True)]
    ids = [encode_conversation(judge.tokenizer, row, x) for row, x in zip(rows, responses, strict=True)]
    if overlong := sum(len(x) > judge.max_length for x in ids):
        found = f"{overlong} of {len(ids)} conversations have more than {judge.max_length} tokens for the reward model"
        say(f"rank {ranks.rank}: {found}; their beginning was cut off", sys.stderr)
    ids = [x[-judge.max_length :] for x in ids]
    lengths = [len(x) for x in ids]
    [micros] = plan_micro_batches(lengths, range(len(ids)), world_size=1, max_tokens=judge.max_tokens_per_gpu)
    most = max(ranks.all_gather([len(micros)]))  # a pass is a collective: ranks with less to score run empty ones
    batch = collate([Sample(x, [], [], [], "stop", i) for i, x in enumerate(ids or [[0, 0]])], pad_id=0)
    return fixed_scores(judge.model, batch, micros + [[]] * (most - len(micros)))[: len(ids)].tolist()

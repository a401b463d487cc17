"""A teacher on the ranks. It also stands for one behind a server, which it asks.

Once per step, before the updates, a teacher gives the log-prob of every sampled token, and at its place the K most
likely tokens with their log-probs.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from extras.distillation import Teacher, server
from extras.images import FIRST
from extras.judges import check_second_model
from extras.offload import offload, onload
from rl.data.batching import Update
from rl.data.types import Batch
from rl.model import logprobs
from rl.model.checks import PROBE
from rl.model.load import load_model
from rl.model.sharding import Memory
from rl.ranks import Ranks


def check_teacher(
    flags: Teacher, tokenizer: PreTrainedTokenizerBase, *, student: str, longest: int, top_k: int
) -> None:
    """Raise ValueError if the teacher cannot score what the `student` (id or folder) samples. That is so if it has
    another tokenizer or too few positions for `longest` tokens, if its files lack weights, or if its server refuses so
    large a `top_k`.
    RuntimeError if a server fails.
    """
    if flags.teacher_url is None:
        try:
            check_second_model("--teacher-model", flags.teacher_model, tokenizer, policy=student, longest=longest)
        except ValueError as error:
            raise ValueError(f"{error}; or let vllm serve it, and give --teacher-url") from error
        return
    server.check(flags, tokenizer, student=student, longest=longest)
    server.score(flags, _vocabulary(student), top_k, [tokenizer(PROBE, add_special_tokens=False)["input_ids"]])


def _vocabulary(*paths: str) -> int:
    """How many tokens all models at `paths` know."""
    return min(AutoConfig.from_pretrained(path).get_text_config().vocab_size for path in paths)


def load_teacher(flags: Teacher, ranks: Ranks, memory: Memory, *, student: str, longest: int) -> nn.Module:
    """The model of --teacher-model, frozen, or an empty one if it is behind --teacher-url. Its `vocabulary` is how many
    tokens it and the student both know. All ranks must enter.
    """
    if flags.teacher_url:
        model, paths = nn.Module(), [student]
    else:
        paths = [student, flags.teacher_model]
        model = load_model(paths[1], ranks, None, memory, longest=longest, flag="--teacher-model")
    model.vocabulary = _vocabulary(*paths)
    if flags.teacher_offload:
        offload(model)
    return model


def add_teacher(
    flags: Teacher, model: nn.Module, batch: Batch, updates: Sequence[Update], *, top_k: int, temperature: float
) -> Batch:
    """The batch with the teacher's log-probs of its sampled tokens, `ref_logp` (B, T). If top_k is not 0, the columns
    `top_ids` and `top_logp` (B, T, K) have the most likely tokens and their log-probs. All are 0 where the mask is 0.

    A loaded teacher's probabilities of the tokens that it and the student both know add up to 1. top_k is K. -1 means
    all these tokens, not with a server. All ranks must enter. Raises ValueError if a server refuses a request,
    RuntimeError if it fails, or if the student has sampled a token that a loaded teacher does not have.
    """
    if flags.teacher_url:
        logp, ids, logps = server.ask(flags, batch, model.vocabulary, top_k)
    else:
        texts = batch.input_ids[batch.input_ids < FIRST]  # without images
        if len(texts) and (unknown := int(texts.max())) >= model.vocabulary:
            raise RuntimeError(
                f"--teacher-model {flags.teacher_model}: it has no token {unknown}, which the student has sampled from "
                "the padding of its vocabulary; train the student by sft.py first, or take a teacher with as large a "
                "vocabulary"
            )
        if flags.teacher_offload:
            onload(model, model.packed.device)
        k = min(top_k, model.vocabulary) if top_k >= 0 else model.vocabulary
        logp, ids, logps = logprobs.over_micro_batches(model, batch, updates, _teacher_head, temperature, k)
        if flags.teacher_offload:
            offload(model)
    top = {"top_ids": ids, "top_logp": logps} if top_k else {}
    return replace(batch, ref_logp=logp, columns={**batch.columns, **top})


def _teacher_head(model: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, k: int) -> tuple[Tensor, ...]:
    """hidden (R, H), targets (R,) -> log-probs (R,), the ids (R, K) of the most likely tokens and their log-probs."""

    source = logprobs.source_of_logits(model)

    def chunk(h: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        logps = logprobs.logits_of(source, h, temperature)[:, : model.vocabulary].log_softmax(-1)
        top = logps.topk(k, -1)
        return logps.gather(-1, y[:, None])[:, 0], top.indices.int(), top.values

    return logprobs.in_chunks(chunk, hidden, targets)

"""Teachers of train_distill.py: a model on the ranks, or one behind a vLLM server; and the student's distance to it.

Once a step, before the updates, a teacher gives the log-prob of every sampled token, and at its place the K most likely
tokens with their log-probs.
"""

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, PreTrainedTokenizerBase

from rl import client
from rl.data.batching import Update
from rl.data.images import FIRST
from rl.data.types import Batch, Sampling
from rl.flags import Free, Needs, Seconds, Url
from rl.formulas.distillation import with_rest
from rl.model import logprobs
from rl.model.checks import PROBE, check_same_tokenizer, check_trainable, open_model
from rl.model.load import load_policy
from rl.model.sharding import Memory, offload, onload
from rl.ranks import Ranks

REQUESTS = 32  # that a rank has open at a time
ENTRY_BYTES = 512  # for a token in a server's answer, more than vLLM needs on average


@dataclass(frozen=True)
class Teacher:
    """the teacher: a model on these GPUs, or one behind a server"""

    teacher_model: str = "Qwen/Qwen2.5-7B-Instruct"  # id or folder of the teacher, or its name at --teacher-url
    # vLLM's OpenAI-compatible server of the teacher; default: it is loaded and sharded over these ranks
    teacher_url: Free[Url | None] = None
    # seconds for one try of a request to that server, from connecting to the last byte. There are up to five; after
    # twice as many seconds the run ends
    teacher_timeout: Free[Annotated[Seconds, Needs("teacher_url")]] = 600.0
    teacher_offload: Free[bool] = False  # keep a loaded teacher's weights in host memory while it is not asked


def check_teacher(
    flags: Teacher, tokenizer: PreTrainedTokenizerBase, *, student: str, longest: int, top_k: int
) -> None:
    """Raise ValueError if the teacher cannot score what the `student` (id or folder) samples: it has another tokenizer,
    too few positions for `longest` tokens, or its server refuses so large a `top_k`; or if flags contradict each other.
    RuntimeError if a server fails. ValueError too if the teacher's files lack weights.
    """
    if flags.teacher_url is None:
        own = open_model(flags.teacher_model, flag="--teacher-model")
        check_same_tokenizer(tokenizer, own, flags.teacher_model, flag="--teacher-model", model=student)
        instead = "let vllm serve it, and give --teacher-url"
        check_trainable(flags.teacher_model, longest, flag="--teacher-model", instead=instead)
        return
    where = f"--teacher-url {flags.teacher_url}"
    if flags.teacher_offload:
        raise ValueError(f"--teacher-offload moves a loaded teacher, and {where} is not loaded; drop one of them")
    ids = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    [(found, limit)] = _ask(flags, "/tokenize", [{"prompt": PROBE, "add_special_tokens": False}], _read_tokens)
    if found != ids:
        problem = f"its tokenizer is not that of --model {student}, so it would misread every token"
        raise ValueError(f"{where}: {problem}; choose a teacher of the same family")
    if limit <= longest:  # the server has to sample one token after them
        raise ValueError(
            f"{where}: it takes {limit} tokens, one more than --max-prompt-length + --max-response-length = {longest} "
            "are needed; lower these, or start it with a larger --max-model-len"
        )
    _score_prompts(flags, _vocabulary(student), top_k, [ids])


def _vocabulary(*paths: str) -> int:
    """How many tokens all models at `paths` know."""
    return min(AutoConfig.from_pretrained(path).get_text_config().vocab_size for path in paths)


def load_teacher(flags: Teacher, ranks: Ranks, memory: Memory, *, student: str, longest: int) -> nn.Module:
    """The model of --teacher-model, frozen; an empty one if it is behind --teacher-url. Its `vocabulary` is how many
    tokens it and the student both know. All ranks must enter.
    """
    if flags.teacher_url:
        model, known = nn.Module(), [student]
    else:
        known = [student, flags.teacher_model]
        model = load_policy(known[1], ranks, memory=memory, longest=longest, frozen=True, flag="--teacher-model")
    model.vocabulary = _vocabulary(*known)
    if flags.teacher_offload:
        offload(model)
    return model


def add_teacher(
    flags: Teacher, model: nn.Module, batch: Batch, updates: Sequence[Update], *, top_k: int, temperature: float
) -> Batch:
    """The batch with the teacher's log-probs of its sampled tokens, `ref_logp` (B, T), and if top_k is not 0, of the
    most likely tokens, `top_ids` and `top_logp` (B, T, K); all 0 where the mask is 0.

    A loaded teacher's probabilities of the tokens that it and the student both know add up to 1. top_k is K; -1: all
    these tokens, not with a server. All ranks must enter. Raises ValueError if a server refuses a request, RuntimeError
    if it fails, or if the student has sampled a token that a loaded teacher does not have.
    """
    if flags.teacher_url:
        logp, ids, logps = _ask_server(flags, batch, model.vocabulary, top_k)
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
    return replace(batch, ref_logp=logp, **(dict(top_ids=ids, top_logp=logps) if top_k else {}))


def _teacher_head(model: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, k: int) -> tuple[Tensor, ...]:
    """hidden (R, H), targets (R,) -> log-probs (R,), the ids (R, K) of the most likely tokens and their log-probs."""

    def chunk(h: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        logps = logprobs.logits_of(model, h, temperature)[:, : model.vocabulary].log_softmax(-1)
        top = logps.topk(k, -1)
        return logps.gather(-1, y[:, None])[:, 0], top.indices.int(), top.values

    return logprobs.in_chunks(chunk, hidden, targets)


# ---------------------------------------------------------------------------------------------------------------------
# The student


def token_distances(
    policy: nn.Module, batch: Batch, distance: Callable | None, *, beta: float, sampling: Sampling = logprobs.FULL
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """`token_logprobs` of a policy, and its distance to the teacher at every sampled token, from one pass.

    Args: batch (b, T), from `add_teacher`; distance, a formula (student, teacher, beta) -> (R,). None: the estimate
    log p_S - log p_T by the sampled token, a constant, since its gradient is not that of the distance. Returns: logp,
    entropy (without gradient) and distance, all (b, T); and as metrics, the probability that both give to the K tokens.
    """
    if distance is None:
        logp, entropy = logprobs.token_logprobs(policy, batch, sampling=sampling)
        return logp, entropy, (logp - batch.ref_logp).detach(), {}
    scored = logprobs.sampled_positions(batch)
    top, distance = (batch.top_ids[scored].long(), batch.top_logp[scored]), functools.partial(distance, beta=beta)
    args = (*top, sampling.temperature, distance)
    logp, entropy, gap, student = logprobs.run_on_responses(policy, batch, _student_head, *args)
    teacher = batch.top_logp.exp().sum(-1)
    return logp, entropy, gap, {"distillation/student_mass": student, "distillation/teacher_mass": teacher}


def _student_head(model, hidden, targets, ids, teacher, temperature, distance):
    """hidden (R, H), targets (R,), ids and teacher's log-probs (R, K) -> four tensors (R,), see `token_distances`."""

    def chunk(h: Tensor, y: Tensor, ids: Tensor, teacher: Tensor) -> tuple[Tensor, ...]:
        logps = logprobs.logits_of(model, h, temperature).log_softmax(-1)  # (C, V)
        student, is_all = logps.gather(-1, ids), ids.shape[-1] == logps.shape[-1]
        entropy = -(logps.detach().exp() * logps.detach()).sum(-1)
        both = (student, teacher.to(student.dtype))
        gap = distance(*(both if is_all else map(with_rest, both)))
        return logps.gather(-1, y[:, None])[:, 0], entropy, gap, student.detach().exp().sum(-1)

    return logprobs.in_chunks(functools.partial(checkpoint, chunk, use_reentrant=False), hidden, targets, ids, teacher)


# ---------------------------------------------------------------------------------------------------------------------
# A server


def _ask_server(flags: Teacher, batch: Batch, vocabulary: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`add_teacher` by a server of vLLM: completions of the OpenAI protocol, with vLLM's `prompt_logprobs`."""
    logp, mask = torch.zeros_like(batch.rollout_logp), batch.response_mask.bool()
    ids, logps = (torch.zeros(*logp.shape, top_k, dtype=x) for x in (torch.int32, logp.dtype))
    rows = [row[:n].tolist() for row, n in zip(batch.input_ids, batch.lengths.tolist(), strict=True)]
    for i, found in enumerate(_score_prompts(flags, vocabulary, top_k, rows)):
        places = i, slice(1, len(rows[i]))
        logp[places], ids[places], logps[places] = found
    return logp * mask, ids * mask[..., None], logps * mask[..., None]


def _score_prompts(flags: Teacher, vocabulary: int, top_k: int, prompts: list[list[int]]) -> list[tuple[Tensor, ...]]:
    """For all tokens of each prompt but the first, see `_read_scores`."""
    fixed = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k, "add_special_tokens": False}
    read = functools.partial(_read_scores, vocabulary)
    return _ask(flags, "/v1/completions", [{"prompt": ids} | fixed for ids in prompts], read)


def _read_scores(vocabulary: int, body: dict[str, Any], answer: bytes) -> tuple[Tensor, Tensor, Tensor]:
    """Of n tokens the log-probs (n,), and the ids and log-probs (n, K) of the most likely ones at their places. Raises
    ValueError if the answer is none, or its numbers cannot be log-probs of tokens below `vocabulary`.
    """
    tokens, k = body["prompt"][1:], body["prompt_logprobs"]
    try:  # at each place {id: {"logprob": ...}} of the K most likely tokens, and of the prompt's if it is none of them
        entries = json.loads(answer)["choices"][0]["prompt_logprobs"][1:]
        found = [{int(token): x["logprob"] for token, x in entry.items()} for entry in entries]
        own = [entry[token] for token, entry in zip(tokens, found, strict=True)]
        if any(len(entry) < k for entry in found):
            raise LookupError
    except client.MALFORMED:
        raise ValueError("no prompt_logprobs of all tokens") from None
    for token, logp in (pair for entry in found for pair in entry.items()):  # rounding may leave one a little above 0
        if not (0 <= token < vocabulary and type(logp) in (int, float) and -1e30 < logp <= 1e-5):
            rule = f"--model has {vocabulary} tokens, and a log-prob is finite and at most 0"
            raise ValueError(f"token {token!r:.30} has log-prob {logp!r:.50}; {rule}")
    ranked = [sorted(((logp, token) for token, logp in entry.items()), reverse=True)[:k] for entry in found]
    logps, ids = torch.tensor(ranked, dtype=torch.float64).view(len(tokens), k, 2).unbind(-1)
    if (logps.exp().sum(-1) > 1.001).any():
        raise ValueError("probabilities that add up to more than 1")
    return torch.tensor(own).clamp(max=0), ids, logps.clamp(max=0)


def _read_tokens(body: dict[str, Any], answer: bytes) -> tuple[list[int], int]:
    """The tokens of a text, and how many the server takes. Raises ValueError if the answer does not say it."""
    try:
        found = json.loads(answer)
        return [int(x) for x in found["tokens"]], int(found.get("max_model_len") or sys.maxsize)
    except client.MALFORMED:
        raise ValueError("no tokens of a text") from None


def _ask(flags: Teacher, path: str, bodies: list[dict[str, Any]], read: client.Read[client.T]) -> list[client.T]:
    """The server's answers. Raises ValueError if it refuses a request, RuntimeError if it fails."""
    where, seconds = f"--teacher-url {flags.teacher_url}: {path}", flags.teacher_timeout
    entries = max((len(x["prompt"]) * (1 + x.get("prompt_logprobs", 0)) for x in bodies), default=0)
    url = f"{flags.teacher_url.rstrip('/').removesuffix('/v1')}{path}"
    server = client.Server(url, seconds, (1 << 20) + ENTRY_BYTES * entries)
    try:
        return server.post([{"model": flags.teacher_model} | x for x in bodies], read, at_once=REQUESTS)
    except client.Failed as error:
        if error.said is not None:
            raise ValueError(f"{where} was refused with {error}: {error.said}") from None
        hint = f"is vLLM running there, and --teacher-timeout {seconds:g} long enough?"
        raise RuntimeError(f"{where} failed: {error}; {hint}") from None

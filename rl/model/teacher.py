"""Teachers of train_distill.py: a model on the ranks, or one behind a vLLM server; and the student's distance to it.

Once a step, before the updates, a teacher gives the log-prob of every sampled token, and at its place the K most likely
tokens with their log-probs.
"""

import concurrent.futures
import functools
import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, PreTrainedTokenizerBase

from rl.data.batching import Update
from rl.data.types import Batch, Sampling
from rl.flags import Free, Seconds
from rl.formulas.distillation import with_rest
from rl.model import logprobs
from rl.model.checks import PROBE, check_same_tokenizer, check_trainable
from rl.model.load import load_policy
from rl.model.sharding import Memory, offload, onload
from rl.ranks import Ranks

ATTEMPTS = 3  # of a request that fails
REQUESTS = 32  # that a rank has open at a time


@dataclass(frozen=True)
class Teacher:
    """the teacher: a model on these GPUs, or one behind a server"""

    teacher_model: str = "Qwen/Qwen2.5-7B-Instruct"  # id or folder of the teacher, or its name at --teacher-url
    # vLLM's OpenAI-compatible server of the teacher; default: it is loaded and sharded over these ranks
    teacher_url: Free[str | None] = None
    teacher_timeout: Free[Seconds] = 600.0  # seconds for one request to that server
    teacher_offload: Free[bool] = False  # keep a loaded teacher's weights in host memory while it is not asked


def check_teacher(
    flags: Teacher, tokenizer: PreTrainedTokenizerBase, *, student: str, longest: int, top_k: int
) -> None:
    """Raise ValueError if the teacher cannot score what the `student` (id or folder) samples: it has another tokenizer,
    too few positions for `longest` tokens, or its server refuses so large a `top_k`. RuntimeError if a server fails.
    """
    if flags.teacher_url is None:
        check_same_tokenizer(tokenizer, flags.teacher_model, flag="--teacher-model", model=student)
        instead = "let vllm serve it, and give --teacher-url"
        check_trainable(flags.teacher_model, longest, flag="--teacher-model", instead=instead)
        return
    ids = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    where = f"--teacher-url {flags.teacher_url}"
    found = _ask(flags, "/tokenize", {"prompt": PROBE, "add_special_tokens": False})
    if found.get("tokens") != ids:
        problem = f"its tokenizer is not that of --model {student}, so it would misread every token"
        raise ValueError(f"{where}: {problem}; choose a teacher of the same family")
    if (limit := found.get("max_model_len", math.inf)) <= longest:  # the server has to sample one token after them
        raise ValueError(
            f"{where}: it takes {limit} tokens, one more than --max-prompt-length + --max-response-length = {longest} "
            "are needed; lower these, or start it with a larger --max-model-len"
        )
    _score_prompt(flags, top_k, ids)


def load_teacher(flags: Teacher, ranks: Ranks, memory: Memory, *, student: str, longest: int) -> nn.Module | None:
    """The model of --teacher-model, frozen; None if it is behind --teacher-url. Its `vocabulary` is how many tokens it
    and the student both know. All ranks must enter.
    """
    if flags.teacher_url:
        return None
    model = load_policy(flags.teacher_model, ranks, memory=memory, longest=longest, frozen=True, flag="--teacher-model")
    configs = (AutoConfig.from_pretrained(path).get_text_config() for path in (student, flags.teacher_model))
    model.vocabulary = min(config.vocab_size for config in configs)
    if flags.teacher_offload:
        offload(model)
    return model


def add_teacher(
    flags: Teacher, model: nn.Module | None, batch: Batch, updates: Sequence[Update], *, top_k: int, temperature: float
) -> Batch:
    """The batch with the teacher's log-probs of its sampled tokens, `ref_logp` (B, T), and if top_k is not 0, of the
    most likely tokens, `top_ids` and `top_logp` (B, T, K); all 0 where the mask is 0.

    A loaded teacher's probabilities of the tokens that it and the student both know add up to 1. top_k is K; -1: all
    these tokens, not with a server. All ranks must enter. Raises ValueError if a server refuses a request, RuntimeError
    if it fails, or if the student has sampled a token that a loaded teacher does not have.
    """
    if model is None:
        logp, ids, logps = _ask_server(flags, batch, top_k)
    else:
        if len(batch.lengths) and (unknown := int(batch.input_ids.max())) >= model.vocabulary:
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


def _ask_server(flags: Teacher, batch: Batch, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`add_teacher` by a server of vLLM: completions of the OpenAI protocol, with vLLM's `prompt_logprobs`."""
    logp = torch.zeros_like(batch.rollout_logp)
    ids, logps = (torch.zeros(*logp.shape, top_k, dtype=x) for x in (torch.int32, logp.dtype))
    wanted = [row[:n].tolist() for row, n in zip(batch.input_ids, batch.lengths.tolist(), strict=True)]
    ask = functools.partial(_score_prompt, flags, top_k)
    with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
        for i, (prompt, found) in enumerate(zip(wanted, pool.map(ask, wanted), strict=True)):
            for t in batch.response_mask[i].nonzero()[:, 0].tolist():
                ranked = sorted(((x["logprob"], int(token)) for token, x in found[t].items()), reverse=True)
                logp[i, t] = found[t][str(prompt[t])]["logprob"]
                if top_k:  # vLLM adds the sampled token where it is not among the most likely
                    best = torch.tensor(ranked[:top_k], dtype=torch.float64)
                    logps[i, t], ids[i, t] = best[:, 0].to(logps.dtype), best[:, 1].int()
    return logp, ids, logps


def _score_prompt(flags: Teacher, top_k: int, ids: list[int]) -> list[dict[str, dict] | None]:
    """For every token of a sequence but the first, {token id: {"logprob": ...}} of it and of the most likely ones."""
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k, "add_special_tokens": False}
    found = _ask(flags, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
    pairs = zip(ids[1:], found[1:], strict=False)
    if len(found) != len(ids) or any(str(token) not in x or len(x) < top_k for token, x in pairs):
        raise RuntimeError(f"--teacher-url {flags.teacher_url}: its answer does not have the log-probs of all tokens")
    return found


def _ask(flags: Teacher, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The server's answer to a request. Raises ValueError if it refuses, RuntimeError if ATTEMPTS have failed."""
    where = f"--teacher-url {flags.teacher_url}"
    url = f"{flags.teacher_url.rstrip('/').removesuffix('/v1')}{path}"
    data = json.dumps({"model": flags.teacher_model} | body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with urllib.request.urlopen(request, timeout=flags.teacher_timeout) as response:
                return json.load(response)
        except (OSError, http.client.HTTPException, ValueError) as error:  # HTTPError and time-outs are OSErrors
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                said = error.read(500).decode(errors="replace")
                raise ValueError(f"{where}: {path} was refused with {error.code}: {said}") from error
            problem = error
        if attempt < ATTEMPTS:
            time.sleep(attempt)
    raise RuntimeError(f"{where}: {path} failed {ATTEMPTS} times: {problem}; is the server of the teacher running?")

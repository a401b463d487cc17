"""A teacher behind vLLM's server, which speaks the OpenAI protocol."""

import functools
import json
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from extras.distillation import Teacher
from extras.servers import MALFORMED, Failed, Read, Server, T
from rl.data.types import Batch
from rl.model.checks import PROBE

REQUESTS = 32  # that a rank has open at a time
ENTRY_BYTES = 512  # for a token in a server's answer, more than vLLM needs on average


def check(flags: Teacher, tokenizer: PreTrainedTokenizerBase, *, student: str, longest: int) -> None:
    """Raise ValueError if the server has another tokenizer than the student, or takes too few tokens. RuntimeError if
    it fails.
    """
    where, ids = f"--teacher-url {flags.teacher_url}", tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    [(tokens, limit)] = _ask(flags, "/tokenize", [{"prompt": PROBE, "add_special_tokens": False}], _read_tokens)
    if tokens != ids:
        problem = f"its tokenizer is not that of --model {student}, so it would misread every token"
        raise ValueError(f"{where}: {problem}; choose a teacher of the same family")
    if limit <= longest:  # the server has to sample one token after them
        raise ValueError(
            f"{where}: it takes {limit} tokens, one more than --max-prompt-length + --max-response-length = {longest} "
            "are needed; lower these, or start it with a larger --max-model-len"
        )


def ask(flags: Teacher, batch: Batch, vocabulary: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`add_teacher` by a server: completions of the OpenAI protocol, with vLLM's `prompt_logprobs`."""
    logp, mask = torch.zeros_like(batch.rollout_logp), batch.response_mask.bool()
    ids, logps = (torch.zeros(*logp.shape, top_k, dtype=x) for x in (torch.int32, logp.dtype))
    rows = [row[:n].tolist() for row, n in zip(batch.input_ids, batch.lengths.tolist(), strict=True)]
    for i, scores in enumerate(score(flags, vocabulary, top_k, rows)):
        places = i, slice(1, len(rows[i]))
        logp[places], ids[places], logps[places] = scores
    return logp * mask, ids * mask[..., None], logps * mask[..., None]


def score(flags: Teacher, vocabulary: int, top_k: int, prompts: list[list[int]]) -> list[tuple[Tensor, ...]]:
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
        by_place = [{int(token): x["logprob"] for token, x in entry.items()} for entry in entries]
        of_prompt = [at_place[token] for token, at_place in zip(tokens, by_place, strict=True)]
        if any(len(at_place) < k for at_place in by_place):
            raise LookupError
    except MALFORMED:
        raise ValueError("no prompt_logprobs of all tokens") from None
    for token, logp in (
        pair for at_place in by_place for pair in at_place.items()
    ):  # rounding may leave one a little above 0
        if not (0 <= token < vocabulary and type(logp) in (int, float) and -1e30 < logp <= 1e-5):
            rule = f"--model has {vocabulary} tokens, and a log-prob is finite and at most 0"
            raise ValueError(f"token {token!r:.30} has log-prob {logp!r:.50}; {rule}")
    ranked = [sorted(((logp, token) for token, logp in at_place.items()), reverse=True)[:k] for at_place in by_place]
    logps, ids = torch.tensor(ranked, dtype=torch.float64).view(len(tokens), k, 2).unbind(-1)
    if (logps.exp().sum(-1) > 1.001).any():
        raise ValueError("probabilities that add up to more than 1")
    return torch.tensor(of_prompt).clamp(max=0), ids, logps.clamp(max=0)


def _read_tokens(body: dict[str, Any], answer: bytes) -> tuple[list[int], int]:
    """The tokens of a text, and how many the server takes. Raises ValueError if the answer does not say it."""
    try:
        said = json.loads(answer)
        return [int(x) for x in said["tokens"]], int(said.get("max_model_len") or sys.maxsize)
    except MALFORMED:
        raise ValueError("no tokens of a text") from None


def _ask(flags: Teacher, path: str, bodies: list[dict[str, Any]], read: Read[T]) -> list[T]:
    """The server's answers. Raises ValueError if it refuses a request, RuntimeError if it fails."""
    where, seconds = f"--teacher-url {flags.teacher_url}: {path}", flags.teacher_timeout
    entries = max((len(x["prompt"]) * (1 + x.get("prompt_logprobs", 0)) for x in bodies), default=0)
    url = f"{flags.teacher_url.rstrip('/').removesuffix('/v1')}{path}"
    server = Server(url, seconds, (1 << 20) + ENTRY_BYTES * entries)
    try:
        return server.post([{"model": flags.teacher_model} | x for x in bodies], read, at_once=REQUESTS)
    except Failed as error:
        if error.said is not None:
            raise ValueError(f"{where} was refused with {error}: {error.said}") from None
        hint = f"is vLLM running there, and --teacher-timeout {seconds:g} long enough?"
        raise RuntimeError(f"{where} failed: {error}; {hint}") from None

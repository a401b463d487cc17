"""The plain engine: a replica of the policy in transformers and a sampling loop with a KV cache.

Slow, dependency-free, easy to trust. Requests are sampled in batches of `max_num_seqs`; those that come later wait for
the end of the batch.
"""

import itertools
import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence

import torch
from transformers import AutoModelForCausalLM

from rl.data.types import Completion, Request, Sampling
from rl.model.load import buffers_in_files, check_whole, exported
from rl.ranks import Ranks
from rl.sampling.engines.base import StopTexts, check_request


class Growing:
    """A response that is being sampled."""

    def __init__(self, request: Request, version: int):
        self.request, self.version = request, version
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []


class Engine:
    """See `base.Engine`. A second copy of the model on this rank's device.

    Raises ValueError if the model's files lack weights.
    """

    def __init__(self, model: str, ranks: Ranks, dtype: torch.dtype, *, max_model_len: int, max_num_seqs: int = 256):
        replica, info = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, output_loading_info=True)
        check_whole(model, set(info["missing_keys"]))
        self.model = replica.to(ranks.device).eval().requires_grad_(False)
        self.device, self.first_rank, self.group = ranks.device, ranks.rank, None
        self.memory = self.policy_version = 0
        self.max_model_len, self.max_num_seqs = max_model_len, max_num_seqs
        eos = self.model.generation_config.eos_token_id
        eos = self.model.config.eos_token_id if eos is None else eos
        self.eos_token_ids = tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))
        self.stop_texts = StopTexts(model)
        self.waiting: deque[Growing] = deque()
        self.batch: list[Growing | None] = []  # None: this one has ended
        self.ids = self.attention_mask = self.cache = None  # (b, t) of the batch, prompts padded on the left

    def add(self, requests: Sequence[Request]) -> None:
        """See `base.Engine`."""
        taken = {x.request.key for x in [*self.waiting, *filter(None, self.batch)]}
        for request in requests:
            check_request(request, taken, self.max_model_len)
            taken.add(request.key)
        self.waiting += [Growing(request, self.policy_version) for request in requests]

    def has_requests(self) -> bool:
        """See `base.Engine`."""
        return bool(self.waiting) or any(self.batch)

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """See `base.Engine`."""
        if not any(self.batch):
            self._begin_batch()
        positions = (self.attention_mask.cumsum(-1) - 1).clamp(min=0)
        new = self.ids.shape[1] if self.cache is None else 1  # tokens whose keys and values the cache lacks
        out = self.model(
            input_ids=self.ids[:, -new:],
            attention_mask=self.attention_mask,
            position_ids=positions[:, -new:],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.cache = out.past_key_values
        tokens, logprobs = self._sample(out.logits[:, -1].float())
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=1)
        self.attention_mask = torch.cat([self.attention_mask, torch.ones_like(tokens)[:, None]], dim=1)
        done = []
        for i, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
            if (growing := self.batch[i]) is not None:
                growing.token_ids.append(token)
                growing.logprobs.append(logprob)
                if reason := self._reason_to_end(growing):
                    done.append(self._complete(growing, reason))
                    self.batch[i] = None
        return done

    def _begin_batch(self) -> None:
        self.batch = [self.waiting.popleft() for _ in range(min(self.max_num_seqs, len(self.waiting)))]
        prompts = [list(x.request.prompt_ids) for x in self.batch]
        width = max(map(len, prompts))
        self.ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.device)
        self.attention_mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        self.cache = None

    def _sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits (b, V) -> the next token of every sequence and its log-prob, both (b,)."""
        ways = [x.request.sampling if x else None for x in self.batch]
        logp = torch.zeros_like(logits)
        for way in dict.fromkeys(filter(None, ways)):
            rows = [i for i, other in enumerate(ways) if other in (way, None)]
            logp[rows] = processed_logprobs(logits[rows], way)
        greedy = torch.tensor([way is not None and way.temperature == 0 for way in ways], device=self.device)
        tokens = logp.argmax(-1)
        if not greedy.all():
            tokens = torch.where(greedy, tokens, torch.multinomial(logp.exp(), 1)[:, 0])
        return tokens, logp.gather(-1, tokens[:, None])[:, 0]

    def _reason_to_end(self, growing: Growing) -> str:
        sampling, ids = growing.request.sampling, growing.token_ids
        if ids[-1] in self.eos_token_ids or ids[-1] in sampling.stop_token_ids:
            return "stop"
        if self.stop_texts.complete(ids, sampling.stop):
            return "stop"
        return "length" if len(ids) == sampling.max_tokens else ""

    def _complete(self, growing: Growing, reason: str) -> Completion:
        versions = growing.version, self.policy_version
        return Completion(growing.request.key, growing.token_ids, growing.logprobs, reason, versions)

    def abort(self, keys: Iterable[Hashable] | None = None) -> list[Completion]:
        """See `base.Engine`."""
        in_flight = [*filter(None, self.batch), *self.waiting]
        keys = {x.request.key for x in in_flight} if keys is None else set(keys)
        self.waiting = deque(x for x in self.waiting if x.request.key not in keys)
        self.batch = [None if x is None or x.request.key in keys else x for x in self.batch]
        return [self._complete(x, "abort") for x in in_flight if x.request.key in keys]

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `base.Engine`."""
        own = dict(itertools.chain(self.model.named_parameters(), buffers_in_files(self.model)))
        own = {name: x for (name, _), x in zip(exported(self.model, own.items()), own.values(), strict=True)}
        missing = set(own)
        for name, tensor in named_tensors:
            own[name].data.copy_(tensor)
            missing.discard(name)
        if missing:
            raise RuntimeError(
                f"weight push left {len(missing)} of the engine's parameters untouched: {sorted(missing)[:5]}"
            )
        self.cache = None  # keys and values of the old weights
        self.policy_version += 1
        for growing in self.waiting:
            growing.version = self.policy_version

    def sleep(self) -> None:
        """Nothing to free: the replica stays where it is."""

    def wake(self) -> None:
        """Nothing to allocate."""

    def close(self) -> None:
        """Nothing to stop."""


def processed_logprobs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """log-probs (B, V) of the distribution sampled from: temperature, then min-p, top-k, top-p, renormalised.

    Temperature 0 counts as 1.
    """
    logits = logits / (sampling.temperature or 1.0)
    if sampling.min_p > 0:
        likeliest = logits.max(-1, keepdim=True).values
        logits = logits.masked_fill(logits < likeliest + math.log(sampling.min_p), -torch.inf)
    if sampling.top_k > 0:
        kth = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, index = logits.sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # mass of the tokens ahead of each one
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before >= sampling.top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits.log_softmax(-1)

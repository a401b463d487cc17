"""The plain engine: a replica of the policy in transformers and a sampling loop with a KV cache.

Slow, dependency-free, easy to trust. Requests are sampled in batches of `max_num_seqs`; those that come later wait for
the end of the batch.
"""

import itertools
import math
from collections.abc import Hashable, Iterable

import torch
from transformers import AutoModelForCausalLM

from rl.data.types import Completion, Sampling
from rl.model.load import buffers_in_files, check_whole, exported
from rl.ranks import Ranks
from rl.sampling.engines.base import DEFAULT, InFlight, Rollout
from rl.sampling.engines.base import Engine as Base


class Engine(Base):
    """See `base.Engine`. A second copy of the model on this rank's device, which never sleeps.

    Raises ValueError if the model's files lack weights.
    """

    def __init__(self, model: str, ranks: Ranks, flags: Rollout = DEFAULT, *, longest: int):
        super().__init__(model, ranks, longest)
        replica, info = AutoModelForCausalLM.from_pretrained(model, dtype=ranks.dtype, output_loading_info=True)
        check_whole(model, set(info["missing_keys"]))
        self.model = replica.to(ranks.device).eval().requires_grad_(False)
        self.max_num_seqs = flags.max_num_seqs
        eos = self.model.generation_config.eos_token_id
        eos = self.model.config.eos_token_id if eos is None else eos
        self.eos_token_ids = tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))
        self.batch: list[InFlight | None] = []  # None: this one has ended
        self.ids = self.attention_mask = self.cache = None  # (b, t) of the batch, prompts padded on the left
        self.generators: dict[int, torch.Generator] = {}  # of those with a seed of their own

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """See `base.Engine`."""
        if self.is_idle:
            return []
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
            if (x := self.batch[i]) is not None:
                x.token_ids.append(token)
                x.logprobs.append(logprob)
                if reason := self._reason_to_end(x):
                    done.append(self._complete(x, reason))
                    self.batch[i] = None
        return done

    def _begin_batch(self) -> None:
        begin, self.new = self.new[: self.max_num_seqs], self.new[self.max_num_seqs :]
        ends = [{*self.eos_token_ids, *request.sampling.stop_token_ids} for request in begin]
        self.generators = {
            i: torch.Generator(self.device).manual_seed(x.seed) for i, x in enumerate(begin) if x.seed is not None
        }
        version = self.policy_version
        self.batch = [InFlight(x, self.rank, [(version, 0)], end) for x, end in zip(begin, ends, strict=True)]
        width = max(len(request.prompt_ids) for request in begin)
        padding = [[0] * (width - len(request.prompt_ids)) for request in begin]
        ids = [[*pad, *request.prompt_ids] for pad, request in zip(padding, begin, strict=True)]
        mask = [pad + [1] * (width - len(pad)) for pad in padding]
        self.ids, self.attention_mask = (torch.tensor(x, device=self.device) for x in (ids, mask))
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
            drawn = torch.multinomial(logp.exp(), 1)[:, 0]
            for i, generator in self.generators.items():
                drawn[i] = torch.multinomial(logp[i].exp(), 1, generator=generator)[0]
            tokens = torch.where(greedy, tokens, drawn)
        return tokens, logp.gather(-1, tokens[:, None])[:, 0]

    def _reason_to_end(self, x: InFlight) -> str:
        if x.token_ids[-1] in x.ends or self._has_stop_text(x):
            return "stop"
        return "length" if len(x.token_ids) == x.request.sampling.max_tokens else ""

    def abort(self, keys: Iterable[Hashable] | None = None) -> list[Completion]:
        """See `base.Engine`."""
        wanted = set(self.keys if keys is None else keys)
        gone = [x for x in self.batch if x is not None and x.request.key in wanted]
        gone += [InFlight(request, self.rank, []) for request in self.new if request.key in wanted]
        self.batch = [None if x is None or x.request.key in wanted else x for x in self.batch]
        self.new = [request for request in self.new if request.key not in wanted]
        return [self._complete(x, "abort") for x in gone]

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
        self._count_push(filter(None, self.batch))


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

"""The plain engine: a replica of the policy in transformers and a sampling loop with a KV cache.

Slow, dependency-free, easy to trust. Requests are sampled in batches of `max_num_seqs`. Those that come later wait for
the end of the batch.
"""

import contextlib
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

import rl.sampling.engines.base as base
from extras import families
from extras.truncation import truncation_of
from rl.data.types import Completion, Sampling
from rl.model.checks import read_model
from rl.model.family import Pass
from rl.model.load import buffers_in_files, name_weights, published
from rl.model.roles import CAUSAL_LM
from rl.ranks import Ranks
from rl.sampling.engines.flags import EngineFlags

DEFAULT = EngineFlags()


class Engine(base.Engine):
    """See `base.Engine`. A second copy of the model on this rank's device, which never sleeps.

    Raises ValueError if the model's files lack weights.
    """

    def __init__(self, model: str, ranks: Ranks, flags: EngineFlags = DEFAULT, *, longest: int):
        super().__init__(ranks, longest)
        replica, _ = read_model(model, CAUSAL_LM, flag="--model", dtype=ranks.dtype)
        name_weights(replica, model)
        families.prepare(replica)
        self.model = replica.to(ranks.device).eval().requires_grad_(False)
        self.families = families.families_of(replica)
        if flags.router_replay:
            self.routing = families.unknown_expert(families.shape_of(model)[2]).dtype
        self.places = dict(self._places())
        self.max_num_seqs = flags.max_num_seqs
        eos = self.model.generation_config.eos_token_id
        eos = self.model.config.get_text_config().eos_token_id if eos is None else eos
        self.eos_token_ids = tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))
        # (b, t) of a batch, prompts padded on the left. Positions may be (3, b, t). Its rows name requests in flight.
        self.ids = self.attention_mask = self.positions = self.cache = None
        self.generators: dict[int, random.Random] = {}  # of those with a seed of their own

    def _places(self) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor | None]]]:
        """For each published name the tensor of the replica that holds it, and which entries, if not all: files have
        the weights of experts one by one.
        """
        for name, x in itertools.chain(self.model.named_parameters(), buffers_in_files(self.model)):
            names = [name_in_files for name_in_files, _ in published(self.model, [(name, x.data)])]
            if len(names) == 1:
                yield names[0], (x.data, None)
                continue
            numbers = torch.arange(x.numel(), device=x.device).view(x.shape)
            for name_in_files, entries in published(self.model, [(name, numbers)]):
                yield name_in_files, (x.data, entries.flatten())

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """See `base.Engine`."""
        self._forget([i for i, x in self.in_flight.items() if x.is_cut])
        if self.is_idle:
            return []
        if not self.in_flight:
            self._begin_batch()
        new = self.ids.shape[1] if self.cache is None else 1  # tokens whose keys and values the cache lacks
        inputs = {"input_ids": self.ids[:, -new:]}
        if self.cache is None:
            inputs["position_ids"] = (self.attention_mask.cumsum(-1) - 1).clamp(min=0) * self.attention_mask
            for x in self.families:
                x.begin(None, [Pass(inputs, lambda x: x, self.ids, self.attention_mask.bool())])
            self.positions = inputs["position_ids"]
        inputs["position_ids"] = self.positions[..., -new:]
        with contextlib.ExitStack() as stack:
            seen = [stack.enter_context(x.watched()) for x in self.families if self.routing is not None]
            way = dict(past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            out = self.model(**inputs, attention_mask=self.attention_mask, **way)
        for choices in filter(None, seen):
            self._note_experts(choices, new)
        self.cache = out.past_key_values
        tokens, logprobs = self._sample(out.logits[:, -1].float())
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=1)
        self.attention_mask = torch.cat([self.attention_mask, torch.ones_like(tokens)[:, None]], dim=1)
        last = self.positions.amax(-1, keepdim=True)  # (b, 1), or (3, b, 1) of images: the next is after the largest
        last = last if last.ndim == 2 else last.amax(0, keepdim=True).expand_as(last)
        self.positions = torch.cat([self.positions, last + 1], dim=-1)
        tokens, logprobs = tokens.tolist(), logprobs.tolist()
        for i, x in self.in_flight.items():
            x.token_ids.append(tokens[i])
            x.logprobs.append(logprobs[i])
            if tokens[i] in (*self.eos_token_ids, *x.request.sampling.stop_token_ids):
                x.finish_reason = "stop"
            elif len(x.token_ids) == x.request.sampling.max_tokens:
                x.finish_reason = "length"
        return self._forget([i for i, x in self.in_flight.items() if x.finish_reason != "abort"])

    def _note_experts(self, seen: dict[int, list[Any]], new: int) -> None:
        """Keep, for each response of the batch, which experts its last `new` tokens had."""
        layers = self.model.config.get_text_config().num_hidden_layers
        b, k = len(self.ids), next(iter(seen.values()))[0].chosen.shape[-1]
        routed = np.zeros((b, new, layers, k), self.routing)  # zeros where a layer has no experts
        for layer, [choice] in seen.items():
            routed[:, :, layer] = choice.chosen.view(b, new, k).cpu().numpy()
        masks = self.attention_mask.bool().cpu().numpy()
        for i, x in self.in_flight.items():
            x.columns.setdefault("routed_experts", []).append(routed[i][masks[i][-new:]])

    def _begin_batch(self) -> None:
        begin, self.new = self.new[: self.max_num_seqs], self.new[self.max_num_seqs :]
        self.in_flight, seeds = dict(enumerate(begin)), [x.request.seed for x in begin]
        self.generators = {i: random.Random(seed) for i, seed in enumerate(seeds) if seed is not None}
        width = max(len(x.request.prompt_ids) for x in begin)
        padding = [[0] * (width - len(x.request.prompt_ids)) for x in begin]
        ids = [[*pad, *x.request.prompt_ids] for pad, x in zip(padding, begin, strict=True)]
        mask = [pad + [1] * (width - len(pad)) for pad in padding]
        self.ids, self.attention_mask = (torch.tensor(x, device=self.device) for x in (ids, mask))
        self.cache = None

    def _sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits (b, V) -> the next token of every sequence and its log-prob, both (b,)."""
        ways = [self.in_flight[i].request.sampling if i in self.in_flight else None for i in range(len(logits))]
        logp = torch.zeros_like(logits)
        for way in dict.fromkeys(filter(None, ways)):
            rows = [i for i, other in enumerate(ways) if other in (way, None)]
            logp[rows] = processed_logprobs(logits[rows], way)
        greedy = torch.tensor([way is not None and way.temperature == 0 for way in ways], device=self.device)
        tokens = logp.argmax(-1)
        if not greedy.all():
            drawn = torch.multinomial(logp.exp(), 1)[:, 0]
            if own := [i for i in self.generators if i in self.in_flight]:
                # The first token whose cumulative probability is above a random number. This is one call of torch for
                # all rows.
                below = logp[own].double().exp().cumsum(-1)
                numbers = torch.tensor([[self.generators[i].random()] for i in own], dtype=torch.float64)
                drawn[own] = torch.searchsorted(below, numbers.to(below) * below[:, -1:], right=True)[:, 0]
            tokens = torch.where(greedy, tokens, drawn)
        return tokens, logp.gather(-1, tokens[:, None])[:, 0]

    def abort(self) -> list[Completion]:
        """See `base.Engine`."""
        waiting, self.new = self.new, []
        return self._forget(list(self.in_flight)) + waiting

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `base.Engine`."""
        missing = set(self.places)
        for name, tensor in named_tensors:
            own, entries = self.places[name]
            if entries is None:
                own.copy_(tensor)
            else:
                own.view(-1)[entries] = tensor.flatten().to(own)
            missing.discard(name)
        if missing:
            raise RuntimeError(
                f"weight push left {len(missing)} of the engine's parameters untouched: {sorted(missing)[:5]}"
            )
        self.policy_version += 1


def processed_logprobs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """log-probs (B, V) of the distribution that is sampled from: temperature, then `truncation_of`, renormalized.

    Temperature 0 counts as 1.
    """
    logits, truncate = logits / (sampling.temperature or 1.0), truncation_of(sampling)
    return (truncate(logits) if truncate else logits).log_softmax(-1)

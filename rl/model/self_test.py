"""The test of a model when it is loaded. Does it give, packed, what its own forward gives for each sequence alone?

A model that does not is run in another way, which extras/families finds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, tree_flatten_with_path
from transformers import PreTrainedConfig, PreTrainedModel

from extras import families
from rl.data.types import Batch, take_rows
from rl.model.attention import use_attention
from rl.model.family import Family
from rl.model.logprobs import run_packed, token_logprobs
from rl.ranks import Ranks

LONGEST = 2**13  # tokens of a sequence that is tried out


@torch.no_grad()
def choose_forward(model: PreTrainedModel, ranks: Ranks, *, longest: int | None = None, flag: str = "--model") -> str:
    """Let a sharded model run packed if that gives what its own forward gives for one sequence alone, else in the
    fastest of the ways of `extras.families` that does.

    Args: longest, tokens of the longest sequence (default: the model's positions). Returns: the way, "packed" or
    another. Raises ValueError as `Trial`, or if no way is right. All ranks must enter.
    """
    with torch.compiler.set_stance("force_eager"):  # a few odd lengths are not worth compiling for
        trial = Trial(model, ranks, longest, flag)
        model.packed = replace(model.packed, way="packed", layout=None, own_logits=None)
        use_attention(model, model.packed.attention)
        if problem := trial.problem_of_packed():
            families.choose_way(trial, problem)
    torch.cuda.empty_cache()  # an engine measures what is free
    return model.packed.way


class Trial:
    """Random sequences, and what the own forward of a sharded model gives for each of them. These `expected` values are
    log-probs (n - 1,), or hidden states (n, H) of a model without LM head.

    Most sequences are short, two begin alike, and one is longer than the attention windows in the config, up to
    `longest` tokens. How far other outputs may be from these is the `limit` of the root mean square of the difference,
    in the worst sequence. It is 1e-4 in float32. In 16 bits it is three times what padding, or another rounding in the
    attention, changes in the own forward, up to 0.2.

    Raises ValueError, which names `flag`, if the outputs are not finite, or if they depend on the tokens to be
    predicted.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks, longest: int | None, flag: str):
        self.model, self.ranks, self.flag = model, ranks, flag
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LONGEST
        self.batch = random_batch(model.config, longest or positions, ranks.device, model.packed.families)
        self.kind = "log-probs" if model.can_generate() else "hidden states"
        use_attention(model, model.get_correct_attn_implementation(None))
        self.expected = self._own_outputs()
        if not all(x.isfinite().all() for x in self.expected):
            narrow = "leave out --dtype float16, whose numbers end at 65,504, or " * (ranks.dtype == torch.float16)
            reason = f"its {self.kind} are not finite; {narrow}use undamaged weights"
            raise ValueError(f"{flag} {model.name_or_path}: {reason}")
        self.limit = 1e-4 if ranks.dtype == torch.float32 else self._rounding()
        # Sequences 3 and 4 have the first 20 tokens in common. A causal model gives the first 19 predictions alike.
        if _distance(self.expected[3][:19], self.expected[4][:19]) > max(self.limit, 0.02):
            raise ValueError(f"{flag} {model.name_or_path}: it sees the tokens that it predicts; choose a causal LM")

    def _own_outputs(self, *, padded: bool = False) -> list[Tensor]:
        """What `outputs` should be, by the model's own forward of one sequence at a time, perhaps `padded`."""
        outputs, model, width = [], self.model, self.batch.input_ids.shape[1]
        vocab_size = model.config.get_text_config().vocab_size  # ids beyond it are not tokens, and have no log-probs
        for row, n in zip(self.batch.input_ids, self.batch.lengths.tolist(), strict=True):
            inputs = {"input_ids": row[None, : width if padded else n]}
            for x in model.packed.families:
                inputs = x.own_inputs(inputs)
            if padded:
                inputs["attention_mask"] = (torch.arange(width, device=row.device) < n).long()[None]
            if model.can_generate():
                logp = model(**inputs, use_cache=False).logits[0, : n - 1].float().log_softmax(-1)
                outputs.append(logp.gather(-1, inputs["input_ids"][0, 1:n, None])[:, 0] * (row[1:n] < vocab_size))
            else:
                every = torch.arange(n, device=row.device)
                outputs.append(model.packed_forward(lambda _, hidden: hidden.float(), [inputs], every))
        return outputs

    def _rounding(self) -> float:
        """The limit in bfloat16 and float16."""
        own, _ = self.difference(lambda: self._own_outputs(padded=True))
        use_attention(self.model, "eager")
        eager, _ = self.difference(lambda: self._own_outputs(padded=True))
        return min(0.2, 3 * max(x for x in (own, eager, 2e-3) if x < math.inf))

    def problem_of_packed(self) -> str:
        """Why the model does not run packed with an LM head that is one matrix, or "" if it does."""
        if not all(x.runs_packed for x in self.model.packed.families):
            return "its layers carry a state from token to token"
        if not self.has_plain_head:
            return "its LM head is more than one matrix"
        error, reason = self.difference(self.outputs)
        return reason if error > self.limit else ""

    @property
    def has_plain_head(self) -> bool:
        """Whether logits are the product of a hidden state and one matrix, if there are any."""
        head = self.model.get_output_embeddings()
        return head is None or (isinstance(head, nn.Linear) and head.bias is None)

    def outputs(self) -> list[Tensor]:
        """For every sequence its log-probs (n - 1,) or hidden states (n, H), as the model runs now."""
        batch, lengths = self.batch, self.batch.lengths.tolist()
        if self.model.can_generate():
            logp, _ = token_logprobs(self.model, batch)
            return [row[1:n] for row, n in zip(logp, lengths, strict=True)]
        real = torch.arange(batch.input_ids.shape[1], device=batch.lengths.device) < batch.lengths[:, None]
        return list(run_packed(self.model, batch, real, lambda _, hidden: (hidden.float(),))[0].split(lengths))

    def difference(self, outputs: Callable[[], list[Tensor]]) -> tuple[float, str]:
        """How far outputs are from those expected, the same number on all ranks, and that in words."""
        reason = ""
        try:
            errors = [_distance(x, y) for x, y in zip(outputs(), self.expected, strict=True)]
            error = torch.stack(errors).max().nan_to_num(math.inf)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # a model may fail in any way at arguments that it was not made for
            error, reason = torch.tensor(math.inf, device=self.ranks.device), f"{type(problem).__name__}: {problem}"
        largest = max(self.ranks.all_gather([error.float().item()]))
        return largest, reason.splitlines()[0][:200] if reason else f"its {self.kind} would differ by {largest:.1g}"


def _distance(x: Tensor, y: Tensor) -> Tensor:
    """Root mean square of a difference of log-probs (n,), or of hidden states (n, H), relative to that of y."""
    return (x - y).square().mean().sqrt() / (y.square().mean().sqrt() if y.ndim > 1 else 1.0)


def random_batch(config: PreTrainedConfig, longest: int, device: torch.device, added: Sequence[Family] = ()) -> Batch:
    """Six sequences for a `Trial`, without ids to which the config gives a meaning, and with what the model's families
    add, whose ids are beyond the vocabulary.
    """
    leaves, _ = tree_flatten_with_path(config.to_dict())  # whole numbers in the config and the configs in it, by name
    entries = [([str(k.key) for k in path if isinstance(k, MappingKey)][-1], n) for path, n in leaves if type(n) is int]
    windows = [n for name, n in entries if ("window" in name or "chunk" in name) and n < longest]
    length = min(longest, LONGEST, max([24, *(n + 24 for n in windows)]))
    lengths = torch.tensor([min(n, longest) for n in (9, 24, 3, 40, 40, length)])
    special = [n for name, n in entries if name.endswith(("token_id", "token_index"))]
    allowed = torch.ones(config.get_text_config().vocab_size, dtype=torch.bool)
    allowed[[n for n in special if 0 <= n < len(allowed)]] = False
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(int(allowed.sum()), (len(lengths), int(lengths.max())), generator=generator)
    ids = allowed.nonzero()[:, 0][drawn]
    for x in added:
        ids, lengths = x.test_rows(ids, lengths, min(longest, LONGEST))
    ids[4, :20] = ids[3, :20]  # neighbors with the same beginning
    position = torch.arange(ids.shape[1])
    sampled = ((position > 0) & (position < lengths[:, None]) & (ids < len(allowed))).float()
    batch = Batch(ids, lengths, response_mask=sampled, rollout_logp=torch.zeros_like(sampled))
    return take_rows(batch, range(len(lengths)), device)

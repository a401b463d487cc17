"""The plain engine: a replica of the policy in transformers and a sampling loop with a KV cache.

Slow, dependency-free, easy to trust.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rl import stop
from rl.fsdp import Dist, check_whole, memory_in_use
from rl.types import Completion, OnGroup, Sampling


class Engine(NamedTuple):
    model: nn.Module
    d: Dist
    memory: int  # bytes on the device
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]


def make_engine(
    model: str,
    *,
    d: Dist,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int = 256,
    gpu_memory_utilization: float = 0.5,
    tensor_parallel_size: int = 1,
    seed: int = 0,
    free_cache_engine: bool = True,
    load_weights: bool = False,
) -> Engine:
    """A second copy of the model on this rank's device. Arguments about vLLM's memory are accepted and unused.

    Raises ValueError for tensor_parallel_size > 1, or if the model's files lack weights.
    """
    if tensor_parallel_size != 1:
        raise ValueError(
            f"--tensor-model-parallel-size {tensor_parallel_size} needs --engine vllm; --engine hf runs on one device"
        )
    before = memory_in_use(d)
    replica, info = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, output_loading_info=True)
    check_whole(model, set(info["missing_keys"]))
    replica = replica.to(d.device).eval().requires_grad_(False)
    eos = replica.generation_config.eos_token_id
    eos = replica.config.eos_token_id if eos is None else eos
    stops = tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))
    return Engine(replica, d, memory_in_use(d) - before, max_num_seqs, stops)


@torch.no_grad()
def generate(
    engine: Engine, prompts: list[list[int]], sampling: Sampling, *, seed: int, on_group: OnGroup | None = None
) -> list[list[Completion]]:
    """Sample `sampling.n` completions for each prompt, `max_num_seqs` sequences at a time.

    Same seed and weights, same completions. `on_group(i, completions)` is called when those of prompt i are there.
    Completions end early if the run was asked to stop.
    """
    generator = torch.Generator(engine.d.device).manual_seed(seed)
    repeated = [p for p in prompts for _ in range(sampling.n)]
    done: list[Completion] = []
    groups: list[list[Completion]] = []
    for start in range(0, len(repeated), engine.max_num_seqs):
        done += _generate_batch(engine, repeated[start : start + engine.max_num_seqs], sampling, generator)
        while len(done) >= (len(groups) + 1) * sampling.n:
            groups.append(done[len(groups) * sampling.n :][: sampling.n])
            if on_group is not None:
                on_group(len(groups) - 1, groups[-1])
    return groups


def _generate_batch(
    engine: Engine, prompts: list[list[int]], sampling: Sampling, generator: torch.Generator
) -> list[Completion]:
    device, width = engine.d.device, max(map(len, prompts))
    stops = torch.tensor([*engine.eos_token_ids, *sampling.stop_token_ids], device=device, dtype=torch.long)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)  # left-padded
    attention_mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    cache, finished = None, torch.zeros(len(prompts), dtype=torch.bool, device=device)
    tokens, logprobs, alive = [], [], []
    for _ in range(sampling.max_tokens):
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = engine.model(
            input_ids=ids,
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        logp = processed_logprobs(out.logits[:, -1].float(), sampling)
        greedy = sampling.temperature == 0
        token = logp.argmax(-1) if greedy else torch.multinomial(logp.exp(), 1, generator=generator)[:, 0]
        tokens.append(token)
        logprobs.append(logp.gather(-1, token[:, None])[:, 0])
        alive.append(~finished)
        finished = finished | torch.isin(token, stops)
        if finished.all() or stop.requested():
            break
        ids = token[:, None]
        attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(prompts), 1)], dim=1)
    lengths = torch.stack(alive).sum(0).tolist()
    token_rows, logp_rows = torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist()
    reasons = ["stop" if f else "length" for f in finished.tolist()]
    return [Completion(t[:n], lp[:n], r) for t, lp, n, r in zip(token_rows, logp_rows, lengths, reasons, strict=True)]


def processed_logprobs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """log-probs (B, V) of the distribution sampled from: temperature, then top-k, then top-p, renormalised.

    Temperature 0 counts as 1.
    """
    logits = logits / (sampling.temperature or 1.0)
    if sampling.top_k > 0:
        kth = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, index = logits.sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # mass of the tokens ahead of each one
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before >= sampling.top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits.log_softmax(-1)


def update_weights(engine: Engine, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy (name, whole tensor) pairs into the replica. All ranks must enter.

    Raises RuntimeError naming what was not reached.
    """
    parameters = dict(engine.model.named_parameters())
    missing = set(parameters)
    for name, tensor in named_tensors:
        parameters[name].data.copy_(tensor)
        missing.discard(name)
    if missing:
        raise RuntimeError(
            f"weight push left {len(missing)} of the engine's parameters untouched: {sorted(missing)[:5]}"
        )


def sleep(engine: Engine) -> None:
    """Nothing to free: the replica stays where it is."""


def wake(engine: Engine) -> None:
    """Nothing to allocate."""


def close(engine: Engine) -> None:
    """Nothing to stop."""

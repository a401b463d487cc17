"""What the tests of engines share: prompts, pushes, and what a policy makes of the responses that an engine sampled."""

import fcntl
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rl.data.batching import collate
from rl.data.types import Sample, Sampling
from rl.model.logprobs import token_logprobs
from rl.model.sharding import full_tensors
from rl.sampling.engines import vllm, vllm_scheduler
from rl.sampling.groups import sample_groups

TEMPERATURE = 0.7
PROMPTS = [[5], [7, 9, 11, 30], list(range(3, 40)), [8] * 9, [60, 61]]
ROWS = [{"prompt_ids": prompt, "row_index": 10 + i} for i, prompt in enumerate(PROMPTS)]


def samples_from(engine, rows=ROWS, *, seed=0, on_group=lambda row, samples: None, **sampling):
    options = Sampling(**{"n": 2, "temperature": TEMPERATURE, "max_tokens": 12} | sampling)
    return sample_groups(engine, rows, options, seed=seed, on_group=on_group)


def weights(policy):
    return {name: tensor.clone() for name, tensor in full_tensors(policy)}


def push(engine, policy):
    engine.update_weights(full_tensors(policy, torch.float32))


def change(policy, *, scale, seed=0):
    """Add noise to every parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.to_local().add_(scale * torch.randn(parameter.shape, generator=generator))


def plain(policy):
    """The policy's weights in a model that transformers runs its own way."""
    folder = policy.config._name_or_path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(weights(policy), strict=False)
    model.tie_weights()
    return model


@torch.no_grad()
def logits_of(model, prompt_ids, response_ids):
    """(len(response_ids), V) logits that predict each response token."""
    logits = model(input_ids=torch.tensor([[*prompt_ids, *response_ids]])).logits[0]
    return logits[len(prompt_ids) - 1 : -1]


@torch.no_grad()
def trainer_gap(policy, samples):
    """Largest difference between the engine's log-probs and the trainer's."""
    batch = collate(samples, pad_id=0)
    logp, _ = token_logprobs(policy, batch, sampling=Sampling(temperature=TEMPERATURE))
    return float((logp - batch.rollout_logp).abs().max())


def softmax(logits, temperature):
    """Probabilities, by the definition."""
    weights = [math.exp(logit / temperature) for logit in logits]
    return [w / sum(weights) for w in weights]


def truncated(logits, *, temperature, top_k, top_p, min_p=0.0):
    """token -> probability, by the definition: those at least min_p times as likely as the likeliest, then the k
    likeliest, then the fewest of those whose share reaches p.
    """
    weight = {token: math.exp(logit / temperature) for token, logit in enumerate(logits)}
    weight = {token: w for token, w in weight.items() if w >= min_p * max(weight.values())}
    for limit in ("k", "p"):
        ranked = sorted(weight, key=weight.get, reverse=True)
        if limit == "k":
            keep = ranked[:top_k] if top_k > 0 else ranked
        else:
            total, mass, keep = sum(weight.values()), 0.0, []
            for token in ranked:
                if mass >= top_p * total:
                    break
                keep.append(token)
                mass += weight[token]
        weight = {token: weight[token] for token in keep}
    total = sum(weight.values())
    return {token: w / total for token, w in weight.items()}


@torch.no_grad()
def logp_of(policy, prompt_ids, response_ids, temperature=TEMPERATURE):
    """The trainer's log-probs of a response, (L,)."""
    size = len(response_ids)
    batch = collate([Sample(prompt_ids, response_ids, [1] * size, [0.0] * size, "stop", 0)], pad_id=0)
    return token_logprobs(policy, batch, sampling=Sampling(temperature=temperature))[0][0, len(prompt_ids) :]


def drop_shortcuts(scheduler) -> None:
    """Give vLLM its own methods back, if `take_shortcuts` has replaced them."""
    vars(scheduler).pop("schedule", None)
    vars(scheduler).pop("update_from_output", None)


@contextmanager
def without_shortcuts(engine: vllm.Engine) -> Iterator[None]:
    """All tokens of the engine pass through vLLM's scheduler meanwhile."""
    had = "schedule" in vars(engine.scheduler)  # not on a version that is not in TESTED
    drop_shortcuts(engine.scheduler)
    try:
        yield
    finally:
        if had:
            vllm_scheduler.take_shortcuts(engine.scheduler, engine.in_flight)


@contextmanager
def the_only_shared_engine() -> Iterator[None]:
    """vLLM on the CPU has one name on a machine for the memory that the ranks of an engine share.

    Two such runs at a time would read each other's numbers, so the tests of another checkout wait here. And vLLM
    refuses to start while there is memory of that name, which a fork or a killed run leaves behind.
    """

    def sweep() -> None:
        for leftover in Path("/dev/shm").glob("-tp:*cpushm_*"):
            leftover.unlink(missing_ok=True)

    with open("/dev/shm/glassrl-tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep()
        try:
            yield
        finally:
            sweep()

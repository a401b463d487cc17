"""The prompt of a group computed once or for every response: are the numbers the same, and what does it gain?

    python benchmarks/shared_prompt.py --shape 1.5B --tokenizer path/to/qwen2_tokenizer         # two minutes on an H200
    python benchmarks/shared_prompt.py --shape tiny                                 # on a CPU, to see that it works

Random weights and tokens. First log-probs and gradients of a few groups, in the precision of training and in float32,
where one response is empty and one occurs twice. Then the time of forward and backward passes with everything compiled,
without the optimizer, in tokens per second that count every prompt as often as it has responses. The two ways differ in
`shared_prefix` only, so the slower one also gathers the keys it has in order already.
"""

import random
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
import tyro
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.step_time import model_folder, now  # noqa: E402
from rl.data.batching import collate, plan_update, shared_prefix  # noqa: E402
from rl.data.types import Batch, Sample, take_rows  # noqa: E402
from rl.model import logprobs  # noqa: E402
from rl.model.attention import choose_attention  # noqa: E402
from rl.model.load import load_pretrained  # noqa: E402
from rl.model.sharding import Memory, shard  # noqa: E402
from rl.ranks import Ranks, init_ranks, shutdown_ranks  # noqa: E402

LENGTHS = {"tiny": [(16, 32), (8, 8)]}  # tokens of prompt and response
OTHER_LENGTHS = [(128, 1024), (100, 200), (512, 1024)]


@dataclass(frozen=True)
class Args:
    shape: Literal["tiny", "0.5B", "1.5B", "7B"] = "1.5B"
    """benchmarks/make_model.py makes a Qwen2.5 of this shape. tiny is for the CPU."""
    tokenizer: str | None = None
    """This is the folder or Hugging Face id of a Qwen2 tokenizer. tiny brings its own."""
    cache: Path = Path("runs/benchmark_models")
    """Models are kept in this folder for the next time."""
    prompts: int = 32
    """An update takes this many prompts."""
    rollout_n: int = 8
    """Each prompt gets this many responses."""
    max_tokens: int = 16384
    """A micro-batch has at most this many tokens."""
    activation_checkpointing: Literal["none", "selective", "full"] = "selective"
    """This is as in train_grpo.py."""


def make_batch(prompts: int, rollout_n: int, prompt_length: int, lengths: list[int]) -> Batch:
    """Random ids: `rollout_n` responses to each prompt, response i of `lengths[i]` tokens."""
    draw = random.Random(0)
    samples = []
    for row in range(prompts):
        prompt = draw.choices(range(10, 60), k=prompt_length)
        for n in lengths[:rollout_n]:
            samples.append(Sample(prompt, draw.choices(range(10, 60), k=n), [1] * n, [0.0] * n, "length", row))
    return collate(samples, pad_id=0)


def unshared() -> AbstractContextManager:
    """Within it every row computes all of its tokens."""
    return mock.patch.object(logprobs, "shared_prefix", lambda batch: torch.zeros_like(batch.lengths))


def backward(model: nn.Module, batch: Batch, rows: list[int], device: torch.device) -> torch.Tensor:
    """Forward and backward pass of one micro-batch. Returns log-probs (b, t) on the device."""
    micro = take_rows(batch, rows, device)
    logp, _ = logprobs.token_logprobs(model, micro)
    (logp * torch.linspace(-1, 1, len(rows), device=device)[:, None]).mean().backward()
    return logp.detach()


def numbers(model: nn.Module, batch: Batch, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and gradients of one micro-batch, each as one vector."""
    logp = backward(model, batch, list(range(len(batch.lengths))), ranks.device)
    gradients = torch.cat([p.grad.full_tensor().flatten().cpu() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return logp.flatten().cpu(), gradients


def compare(folder: Path, ranks: Ranks) -> None:
    """Print how far the two ways are from unshared float32. In the precision of training, equally far is as it should
    be.
    """
    batch = make_batch(3, 5, 70, [90, 130, 0, 1, 60])
    repeated = [0, 0, *range(1, len(batch.lengths))]
    batch = take_rows(batch, repeated)
    print(
        f"{'precision':12}{'attention':16}{'computed':12}{'log-probs: largest gap':>24}{'gradients: relative gap':>26}"
    )
    reference = None
    for precision in dict.fromkeys((torch.float32, ranks.dtype)):
        here = replace(ranks, dtype=precision)
        attention = choose_attention(here.device, precision)
        model = shard(load_pretrained(str(folder), here), here)
        with unshared():
            alone = numbers(model, batch, here)
        together = numbers(model, batch, here)
        reference = reference or alone
        for way, found in (("unshared", alone), ("shared", together)):
            if found is not reference:
                gap = (found[0] - reference[0]).abs().max().item()
                relative = ((found[1] - reference[1]).norm() / reference[1].norm()).item()
                name = str(precision).removeprefix("torch.")
                print(f"{name:12}{attention:16}{way:12}{gap:24.1e}{relative:26.1e}")
        del model


def measure(model: nn.Module, batch: Batch, args: Args, ranks: Ranks, *, share: bool) -> tuple[float, float, int]:
    """Tokens a second, share of them computed, and micro-batches of one update."""
    lengths = batch.lengths.tolist()
    shared = shared_prefix(batch).tolist() if share else None
    micros = plan_update(lengths, max_tokens=args.max_tokens, shared=shared).micro_batches
    computed = sum(lengths[i] - (shared[i] if share and i - 1 in micro else 0) for micro in micros for i in micro)
    with nullcontext() if share else unshared():
        for micro in (micros[0], micros[-1]):
            backward(model, batch, micro, ranks.device)
        start = now(ranks.device)
        for micro in micros:
            backward(model, batch, micro, ranks.device)
        seconds = now(ranks.device) - start
    model.zero_grad(set_to_none=True)
    return sum(lengths) / seconds, computed / sum(lengths), len(micros)


def main(args: Args) -> None:
    ranks = init_ranks()
    folder = model_folder(args.shape, args.tokenizer, args.cache, "fixed", 0.0)
    compare(folder, ranks)
    memory = Memory(args.activation_checkpointing, compile=ranks.device.type == "cuda")
    model = shard(load_pretrained(str(folder), ranks), ranks, memory)
    print(f"\n{'tokens':14}{'computed':12}{'of the tokens':>14}{'micro-batches':>16}{'tokens/s':>12}{'speed-up':>10}")
    for prompt_length, response_length in LENGTHS.get(args.shape, OTHER_LENGTHS):
        batch = make_batch(args.prompts, args.rollout_n, prompt_length, [response_length] * args.rollout_n)
        found = {share: measure(model, batch, args, ranks, share=share) for share in (True, False)}
        for share, way in ((False, "unshared"), (True, "shared")):
            rate, computed, micros = found[share]
            speed_up = f"{rate / found[False][0]:10.2f}"
            name = f"{prompt_length} + {response_length}"
            print(f"{name:14}{way:12}{computed:14.1%}{micros:16}{rate:12,.0f}{speed_up}", flush=True)
    shutdown_ranks()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""How far FP8 rollouts are from the trainer, without a GPU: linear layers that round as vLLM's do in FP8.

    python benchmarks/fp8_gap.py --model MODEL --prompts test.parquet --num-prompts 32

vLLM's `fp8_per_channel`, which --rollout-quantization fp8 selects, keeps a weight W in e4m3 with a scale for each row.
It rounds what is multiplied with W with a scale for each token:

    y = (a e4m3(x / a)) (b e4m3(W / b))^T    a = max |x| / 448 of a token, b = max |W| / 448 of a row

The LM head stays as it is. All else is in float32 here.

This samples one response to each prompt at temperature 1 by the engine `hf`, with linear layers in bfloat16 and in FP8.
It prints what a run would log of it, for which the trainer, in float32, computes the log-probs of the same tokens.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from extras.engines import hf
from rl.data.batching import collate
from rl.data.encode import encode_prompts
from rl.data.rows import read_rows
from rl.data.template import load_tokenizer, stop_token_ids
from rl.data.types import Sampling, take_rows
from rl.model.load import load_pretrained
from rl.model.logprobs import token_logprobs
from rl.ranks import init_ranks
from rl.run.metrics import Means
from rl.sampling.groups import sample_groups

E4M3_MAX = 448.0
PRINTED = ("rollout/logprob_gap_mean", "rollout/logprob_gap_max", "rollout_corr/kl", "rollout_corr/rollout_is_mean")


@dataclass(frozen=True)
class Args:
    model: str
    """The model is loaded from this Hugging Face id or folder."""
    prompts: Path
    """These prompts are in verl's schema, as for --val-files."""
    num_prompts: int = 32
    """This many prompts from the start of the file get one response each."""
    max_response_length: int = 100
    """A response has at most this many tokens."""
    seed: int = 0
    """The seed decides the samples."""


def in_e4m3(x: torch.Tensor) -> torch.Tensor:
    """x rounded to e4m3 with a scale for each row (last dimension): max |x| becomes 448, the largest number."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


class Rounded(torch.nn.Module):
    """A linear layer with weights and products in bfloat16, or of numbers in e4m3."""

    def __init__(self, linear: torch.nn.Linear, fp8: bool) -> None:
        super().__init__()
        weight = linear.weight.data.bfloat16().float()
        self.fp8, self.weight, self.bias = fp8, in_e4m3(weight) if fp8 else weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16().float()
        y = torch.nn.functional.linear(in_e4m3(x) if self.fp8 else x, self.weight, self.bias)
        return y.bfloat16().float()


def round_layers(model: torch.nn.Module, fp8: bool) -> None:
    """Put `Rounded` in the place of every linear layer but the LM head."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and child is not model.get_output_embeddings():
                setattr(module, name, Rounded(child, fp8))


@torch.no_grad()
def main(args: Args) -> dict[str, dict[str, float]]:
    """Returns the metrics of "bf16" and "fp8" by the names of docs/metrics.md, of which it prints some."""
    ranks, tokenizer = init_ranks(), load_tokenizer(args.model)
    rows = encode_prompts(tokenizer, read_rows(args.prompts)[: args.num_prompts])
    stops = stop_token_ids(args.model, tokenizer)
    sampling = Sampling(n=1, temperature=1.0, max_tokens=args.max_response_length, stop_token_ids=stops)
    longest = max(len(row["prompt_ids"]) for row in rows) + args.max_response_length
    trainer, found = load_pretrained(args.model, ranks).eval(), {}
    for name in ("bf16", "fp8"):
        engine = hf.Engine(args.model, replace(ranks, dtype=torch.float32), longest=longest)
        round_layers(engine.model, fp8=name == "fp8")
        samples = sample_groups(engine, rows, sampling, seed=args.seed)
        batch = take_rows(collate(samples, pad_id=0), range(len(samples)), ranks.device)
        logp, entropy = token_logprobs(trainer, batch, sampling=sampling)
        means = Means(ranks)
        means.over_tokens(batch.response_mask, {"actor/entropy": entropy})
        means.between_policies(batch, logp, logp)
        found[name] = means.reduce()
        numbers = " ".join(f"{key} {found[name][key]:.4g}" for key in ("actor/entropy", *PRINTED))
        print(f"{name} tokens {int(batch.response_mask.sum())} {numbers}", flush=True)
    return found


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""How far FP8 rollouts are from the trainer, without a GPU: linear layers that round as vLLM's do in FP8.

    python benchmarks/fp8_gap.py --model MODEL --prompts test.parquet --num-prompts 32

vLLM's `fp8_per_channel`, which --rollout-quantization fp8 selects, keeps a weight W in e4m3 with a scale for each row,
and rounds what is multiplied with it with a scale for each token: y = (a e4m3(x / a)) (b e4m3(W / b))^T with
a = max |x| / 448 of a token and b = max |W| / 448 of a row. The LM head stays as it is. All else is in float32 here.

Prints, for linear layers in bfloat16 and in FP8, the mean and the largest |log p_engine - log p_trainer| in nats over
the tokens that this engine sampled at temperature 1, and the mean of p_trainer / p_engine, which is 1 but for chance.
The trainer is float32.
"""

from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

E4M3_MAX = 448.0


@dataclass(frozen=True)
class Args:
    model: str
    """Hugging Face folder or name."""
    prompts: Path
    """Parquet file with the column `prompt`, messages."""
    num_prompts: int = 32
    """Prompts from the start of the file, one response to each."""
    max_response_length: int = 100
    """Tokens."""
    seed: int = 0
    """Of the samples."""


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


def engine(model: str, fp8: bool) -> torch.nn.Module:
    """The model with every linear layer but the LM head rounded."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    head = loaded.get_output_embeddings()
    for module in list(loaded.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and child is not head:
                setattr(module, name, Rounded(child, fp8))
    return loaded


@torch.no_grad()
def main(args: Args) -> dict[str, dict[str, float]]:
    """Returns what it prints: gap_mean, gap_max, ratio_mean, entropy and tokens of "bf16" and "fp8"."""
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    trainer = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    rows = pq.read_table(args.prompts, columns=["prompt"]).slice(0, args.num_prompts).to_pylist()
    texts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
    prompts = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    found = {}
    for name in ("bf16", "fp8"):
        sampler = engine(args.model, name == "fp8")
        torch.manual_seed(args.seed)
        sampling = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=args.max_response_length)
        ids = sampler.generate(**prompts, **sampling, pad_token_id=tokenizer.pad_token_id)  # (P, T)
        responses = ids[:, prompts.input_ids.shape[1] :]
        ended = responses.eq(tokenizer.eos_token_id).long()
        mask = ended.cumsum(1) - ended == 0  # up to the first end, with it
        attended = torch.cat([prompts.attention_mask, mask.long()], 1)
        inputs = dict(input_ids=ids, attention_mask=attended, position_ids=(attended.cumsum(1) - 1).clamp(min=0))
        theirs, ours = (m(**inputs).logits[:, -responses.shape[1] - 1 : -1].log_softmax(-1) for m in (sampler, trainer))
        difference = (ours - theirs).gather(-1, responses[..., None])[..., 0][mask]
        found[name] = {
            "gap_mean": difference.abs().mean().item(),
            "gap_max": difference.abs().max().item(),
            "ratio_mean": difference.exp().mean().item(),
            "entropy": -(ours.exp() * ours).sum(-1)[mask].mean().item(),
            "tokens": int(mask.sum()),
        }
        print(name, " ".join(f"{key} {value:.4g}" for key, value in found[name].items()), flush=True)
    return found


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

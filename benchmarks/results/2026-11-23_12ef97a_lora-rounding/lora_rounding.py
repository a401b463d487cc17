"""What rounding to bfloat16 does to an adapter, in the engine's sum of weights and in the trainer's layers.

    python lora_rounding.py BASE RUN RESPONSES           from the repository's root; RUN/adapter is one of rl/lora.py

Mean |difference| of log-probs, in nats, over the tokens of the first 16 responses. "before" is the code until db22eff:
sums rounded to the nearest, and layers that add the adapter's part to their rounded product.
"""

import json
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, ".")
from rl import lora  # noqa: E402

base, run, responses = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(base)
config = json.load(open(f"{run}/adapter/adapter_config.json"))
rows = [json.loads(line) for line in open(responses)][:16]


def with_adapters(dtype):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    lora.add(model, lora.LoRA(lora_rank=config["r"]), path=base, seed=0)
    own = dict(model.named_parameters())
    for name, x in load_file(f"{run}/adapter/adapter_model.safetensors").items():
        own[name.removeprefix("base_model.model.")].data.copy_(x)
    return model.to(dtype)


def engine(round_to):
    """A bfloat16 model with the sum of weights and adapters, taken in float32."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    own = dict(model.named_parameters())
    for name, x in lora.merged(whole, whole.named_parameters()):
        own[name].data.copy_(round_to(x.detach()) if x.dim() == 2 else x)
    return model


@torch.no_grad()
def logprobs(model):
    found = []
    for row in rows:
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([prompt + tokenizer(row["response"], add_special_tokens=False)["input_ids"]])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0])
    return torch.cat(found)


def forward_before(self, x):
    y = torch.nn.functional.linear(x, self.weight, self.bias)
    return y + self.lora_B(self.lora_A(x)) * self.scaling


def gap(a, b):
    return f"{(a - b).abs().mean():.4f}"


whole, trainer = with_adapters(torch.float32), with_adapters(torch.bfloat16)
exact, after = logprobs(whole), logprobs(trainer)
with lora.switched_off(whole), lora.switched_off(trainer):
    start, start_bf16 = logprobs(whole), logprobs(trainer)
lora.Adapted.forward = forward_before
before = logprobs(trainer)
nearest, spread = engine(torch.Tensor.bfloat16), engine(lora.rounded)
engine_before, engine_after = logprobs(nearest), logprobs(spread)
adapted = {name.replace(".lora_A", "") for name, _ in whole.named_parameters() if ".lora_A." in name}
changes, lost = [], []
for name, x in lora.merged(whole, ((name, x.detach()) for name, x in whole.named_parameters())):
    if name in adapted:
        weight = whole.get_parameter(name).detach()
        changes.append((x - weight).flatten())
        lost.append((x.bfloat16() == weight.bfloat16()).flatten())
rms, share = torch.cat(changes).square().mean().sqrt(), torch.cat(lost).float().mean()
print(f"a weight changes by {rms:.1e} (root mean square); rounded to the nearest {share:.2f} of them do not change")
print(f"rank {config['r']}: moved {gap(exact, start)}, base in bfloat16 {gap(start_bf16, start)}")
sums = gap(logprobs(nearest.float()), exact), gap(logprobs(spread.float()), exact)
print(f"rounding of the sum alone, before {sums[0]}, after {sums[1]}")
print(f"trainer and exact, before {gap(before, exact)}, after {gap(after, exact)}")
print(f"engine and trainer, before {gap(engine_before, before)}, after {gap(engine_after, after)}")

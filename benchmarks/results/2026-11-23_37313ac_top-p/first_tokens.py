"""How likely are the first tokens of a response? `first_tokens.py MODEL TEST_FILE`, in the root of the repository."""

import sys
from collections import Counter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.data import encode_prompts, read_rows

path, file = sys.argv[1:]
tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
first, second, kinds = [], [], Counter()
for row in encode_prompts(tokenizer, read_rows(file), max_prompt_length=32):
    with torch.no_grad():
        top = model(torch.tensor([row["prompt_ids"]])).logits[0, -1].softmax(-1).topk(2)
    first.append(top.values[0].item())
    second.append(top.values[1].item())
    kinds[" then ".join("answer" if x == "#" else "calculation" for x in map(tokenizer.decode, top.indices))] += 1
print(f"{len(first)} prompts; likeliest first token {min(first):.3f} to {max(first):.3f}, ", end="")
both = min(x + y for x, y in zip(first, second, strict=True))
print(f"next one {min(second):.3f} to {max(second):.3f}, both together at least {both:.3f}")
print(dict(kinds))

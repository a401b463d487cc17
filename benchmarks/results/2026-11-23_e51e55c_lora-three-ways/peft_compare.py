"""The same greedy responses by a run's engine, by eval.py on its export, and by PEFT on base and adapter, in float32.

python peft_compare.py FOLDER      # of run.sh
"""

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from rl.rollout import sample_groups
from transformers import AutoModelForCausalLM

import eval as evaluation
from rl import engines
from rl.data import encode_prompts, load_tokenizer, read_rows, sampling_of
from rl.ranks import init_ranks


def of_response(model, ids, own):
    """Logits of the places of a response, and the log-probs of its tokens."""
    logits = model(ids).logits[0, -len(own) - 1 : -1]
    return logits, logits.log_softmax(-1).gather(1, own[:, None])[:, 0]


folder = Path(sys.argv[1])
step = folder / "grpo/global_step_2"
files = (str(folder / "test100.parquet"),)
args = evaluation.Args(model=str(step / "huggingface"), val_files=files, max_prompt_length=288, max_response_length=128)
tokenizer, ranks = load_tokenizer(args.model), init_ranks()
rows = encode_prompts(tokenizer, read_rows(files), max_prompt_length=288)
engine = engines.make(args, ranks, load_weights=True)
samples, _ = sample_groups(engine, rows, sampling_of(args, tokenizer), seed=0, on_group=lambda *_: None)
base = AutoModelForCausalLM.from_pretrained(folder / "sft/global_step_60/huggingface", dtype=torch.float32).eval()
merged = AutoModelForCausalLM.from_pretrained(step / "huggingface", dtype=torch.float32).eval()
adapted = PeftModel.from_pretrained(base, step / "adapter").eval()
gaps = {"engine, PEFT": 0.0, "export, PEFT": 0.0, "without the adapter, PEFT": 0.0}
same = tokens = 0
with torch.no_grad():
    for s in samples:
        ids, n = torch.tensor([[*s.prompt_ids, *s.response_ids]]), len(s.response_ids)
        own = ids[0, -n:]
        found, logp = of_response(adapted, ids, own)
        same += int((found.argmax(-1) == own).sum())
        tokens += n
        others = {"engine, PEFT": torch.tensor(s.rollout_logprobs), "export, PEFT": of_response(merged, ids, own)[1]}
        with adapted.disable_adapter():
            others["without the adapter, PEFT"] = of_response(adapted, ids, own)[1]
        for name, x in others.items():
            gaps[name] = max(gaps[name], (x - logp).abs().max().item())
metrics = [json.loads(x) for x in open(folder / "grpo/metrics.jsonl")]
print("accuracy by the run's engine at its end:", [x["val/accuracy"] for x in metrics if "val/accuracy" in x][-1])
print("accuracy by eval.py on the export: see eval.log")
print(f"{len(samples)} greedy responses, {tokens} tokens, of which PEFT's base and adapter choose {same} too")
for name, gap in gaps.items():
    print(f"largest difference of log-probs, {name}: {gap:.2e}")
engine.close()

"""Gap of vLLM after pushes into a tiny hybrid; run in the root of the repository: python FOLDER/push.py qwen3_5"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, ".")
from benchmarks import models as b
from data import arithmetic
from rl.data.types import Sampling
from rl.model import load as models
from rl.model.sharding import Memory
from rl.ranks import init_ranks
from rl.sampling.engines import Rollout, vllm
from rl.sampling.rollout import check_engine, sample_groups

if __name__ == "__main__":
    family = sys.argv[1]
    o = b.FAMILIES[family].get("text_config", b.FAMILIES[family])
    o |= dict(linear_key_head_dim=128, linear_value_head_dim=128)
    folder = Path(tempfile.mkdtemp())
    arithmetic.main(arithmetic.Args(output_dir=folder, num_sft=64, num_train=8, num_test=8))
    b.make(family, folder / "model")
    ranks = replace(init_ranks(), dtype=torch.bfloat16)
    path = str(folder / "model")
    rows = [dict(row_index=i, prompt_ids=[5 + i, 6, 7, 40 - i]) for i in range(8)]
    sampling = Sampling(n=4, temperature=1.0, max_tokens=40)
    with torch.no_grad():
        policy = models.load_policy(path, ranks, memory=Memory(compile=False), longest=64)
        engine = vllm.Engine(path, ranks, Rollout(max_num_seqs=8), longest=64)

        def gap():
            samples, _ = sample_groups(engine, rows, sampling, seed=1)
            return check_engine(policy, samples, sampling, Rollout(max_logprob_gap=1e9), ranks, num_probe=32)

        engine.update_weights(models.weights_for_engine(policy, ranks))
        a = gap()
        for x in policy.parameters():
            x.mul_(1.2)
        c = gap()
        engine.update_weights(models.weights_for_engine(policy, ranks))
        print(f"gap_same {a}\ngap_changed {c}\ngap_pushed {gap()}", flush=True)

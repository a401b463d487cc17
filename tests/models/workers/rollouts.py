"""Run by torchrun: vLLM on every rank, or one engine over all of them, fed by a sharded policy.

torchrun --nproc_per_node N tests/models/workers/rollouts.py MODEL BATCH OUT TP     writes OUT/rank{rank}.pt
"""

import sys
from pathlib import Path

import torch
from objectives import TEMPERATURE, packed_backward

from rl.engines import vllm
from rl.fsdp import full_tensors, init_distributed, load_policy, own_slice, shard, shutdown_distributed
from rl.rollout import fold, sample_groups, verify_engine
from rl.types import Sampling

PROMPTS = [[5], [7, 9, 11, 30], list(range(3, 40)), [8] * 9, [60, 61]]
ROWS = [{"prompt_ids": prompt, "row_index": i} for i, prompt in enumerate(PROMPTS)]


def main(path: str, batch_file: str, out: str, tensor_parallel_size: str) -> None:
    d = init_distributed()
    engine = vllm.make_engine(
        path,
        d=d,
        dtype=d.dtype,
        max_model_len=64,
        max_num_seqs=8,
        tensor_parallel_size=int(tensor_parallel_size),
    )
    policy = shard(load_policy(path, d), d)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    batch = torch.load(batch_file, weights_only=False)
    results = {"tied": policy.config.tie_word_embeddings}

    def roll_out(name: str, rows: list[dict], *, pushed: bool = True) -> None:
        if pushed:
            vllm.update_weights(engine, full_tensors(policy, d.dtype))
        sampling = Sampling(n=2, temperature=TEMPERATURE, max_tokens=10)
        own_rows, handed = own_slice(rows, d), {}
        samples = sample_groups(
            vllm,
            engine,
            own_rows,
            sampling,
            seed=fold(0, len(results), d.rank),
            on_group=lambda row, group: handed.update({row["row_index"]: group}),
        )
        assert [s for row in own_rows for s in handed.pop(row["row_index"])] == samples and not handed
        limit = 1e-4 if pushed else 100.0
        results[name] = samples
        results[f"{name} gap"] = verify_engine(policy, samples, temperature=TEMPERATURE, limit=limit, d=d, num_probe=9)

    roll_out("first push", ROWS)
    packed_backward(
        policy, batch, range(8), ("ppo_clip", "token-mean"), max_tokens=40, rank=d.rank, world_size=d.world_size
    )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    results["trained"] = {name: tensor.clone() for name, tensor in full_tensors(policy)}
    roll_out("old weights", ROWS, pushed=False)
    roll_out("second push", ROWS)
    roll_out("rank 0 without prompts", ROWS[:1])

    torch.save(results, Path(out) / f"rank{d.rank}.pt")
    vllm.close(engine)
    shutdown_distributed()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Run by torchrun: vLLM on every rank, or one engine over all of them, fed by a sharded policy.

torchrun --nproc_per_node N tests/model/workers/rollouts.py MODEL BATCH OUT TP     writes OUT/rank{rank}.pt
"""

import sys
from pathlib import Path

import torch
from helpers_families import load_with_adapters, make_them_count
from objectives import TEMPERATURE, packed_backward

from rl.data.order import derive_seed
from rl.data.types import Completion, Request, Sampling
from rl.model.load import load_pretrained, weights_for_engine
from rl.model.sharding import full_tensors, shard
from rl.ranks import Ranks, init_ranks, shutdown_ranks
from rl.sampling.engines import vllm
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.groups import sample_groups, seeded
from rl.sampling.verify import check_engine

PROMPTS = [[5], [7, 9, 11, 30], list(range(3, 40)), [8] * 9, [60, 61]]
ROWS = [{"prompt_ids": prompt, "row_index": i} for i, prompt in enumerate(PROMPTS)]


OWN = {0: [("a", 1, 12), ("b", 2, 3)], 1: [("a", 3, 12)]}  # rank: key, prompt and limit of what is there at first
LATE = {0: [], 1: [("late", 4, 3), ("gone", 0, 10)]}  # of what is added before the third step


def in_flight(engine: vllm.Engine, ranks: Ranks) -> list[tuple[list[int], Completion]]:
    """One rank adds requests while others are sampled, and what is left, "gone", is aborted before step 12, counted
    from 0. Returns (prompt, completion) of all that has come back to this rank.
    """

    def requests(plan: list[tuple]) -> list[Request]:
        return [Request(key, PROMPTS[i], Sampling(temperature=TEMPERATURE, max_tokens=n)) for key, i, n in plan]

    done, step = [], 0
    with seeded(derive_seed(11, engine.first_rank), engine.device):
        engine.add(requests(OWN[ranks.rank]))
        while engine.has_requests():
            if step == 2:
                engine.add(requests(LATE[ranks.rank]))
            if step == 12:
                done += engine.abort()
            done += engine.step()
            step += 1
    return [(c.request.prompt_ids, c) for c in done]


def main(path: str, batch_file: str, out: str, tensor_parallel_size: str) -> None:
    ranks = init_ranks()
    flags = EngineFlags(max_num_seqs=8, tensor_model_parallel_size=int(tensor_parallel_size))
    engine = vllm.Engine(path, ranks, flags, longest=64)
    policy = shard(load_pretrained(path, ranks), ranks)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    batch = torch.load(batch_file, weights_only=False)
    results = {"tied": policy.config.tie_word_embeddings}

    def roll_out(name: str, rows: list[dict], *, pushed: bool = True, model: torch.nn.Module = policy) -> None:
        if pushed:
            engine.update_weights(weights_for_engine(model, ranks))
        sampling = Sampling(n=2, temperature=TEMPERATURE, max_tokens=10)
        own_rows, seed = ranks.own_slice(rows), derive_seed(0, len(results), engine.first_rank)
        handed = {}
        on_group = lambda row, group: handed.update({row["row_index"]: group})  # noqa: E731
        samples = sample_groups(engine, own_rows, sampling, seed=seed, on_group=on_group)
        assert [s for row in own_rows for s in handed.pop(row["row_index"])] == samples and not handed
        limit = 1e-4 if pushed else 100.0
        results[name] = samples
        results[f"{name} gap"] = check_engine(
            model, samples, Sampling(temperature=TEMPERATURE), EngineFlags(max_logprob_gap=limit), ranks, num_probe=9
        )

    roll_out("first push", ROWS)
    packed_backward(
        policy, batch, range(8), ("ppo_clip", "token-mean"), max_tokens=40, rank=ranks.rank, world_size=ranks.size
    )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    results["trained"] = {name: tensor.clone() for name, tensor in full_tensors(policy)}
    roll_out("old weights", ROWS, pushed=False)
    roll_out("second push", ROWS)
    roll_out("rank 0 without prompts", ROWS[:1])
    results["version"] = engine.policy_version
    results["in flight"] = in_flight(engine, ranks)
    adapted = make_them_count(load_with_adapters(path, ranks))
    roll_out("adapters", ROWS, model=adapted)
    results["merged"] = {name: x.clone() for name, x in weights_for_engine(adapted, ranks)}

    torch.save(results, Path(out) / f"rank{ranks.rank}.pt")
    engine.close()
    shutdown_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])

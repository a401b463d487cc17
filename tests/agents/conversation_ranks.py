"""Run by torchrun: conversations on several ranks, with an engine per rank, or one over all of them; then steps of
single responses that outlive them.

torchrun --nproc_per_node N tests/agents/conversation_ranks.py MODEL GAME OUT ENGINE TP    writes OUT/rank{rank}.pt
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from extras.agents import EnvironmentFlags, open_partner
from extras.partial.in_flight import InFlight
from rl import stop
from rl.data.types import Sampling
from rl.model.load import load_pretrained
from rl.model.sharding import full_tensors, shard
from rl.ranks import init_ranks, shutdown_ranks
from rl.sampling.engines import make_engine
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.loop import Loop
from rl.sampling.verify import check_engine

TEMPERATURE, STOPS, LIMIT = 0.7, (0, 2, *range(20, 32)), 300


def make_rows(tokenizer) -> list[dict]:
    """Conversations of one to eight turns, with vLLM one that never ends a turn, and some whose environment is slow."""
    ids = tokenizer("<|im_start|>user\n1+1<|im_end|>\n")["input_ids"]
    about = [{"turns": turns, "latency": 0.1 * (turns % 3 == 0)} for turns in (1, 2, 3, 4, 5, 6, 7, 8, 1, 1)]
    return [dict(prompt_ids=[*ids, 5 + i], row_index=i, extra_info=x, prompt=[]) for i, x in enumerate(about)]


def partial_conversations(engine, partner, ranks, rows) -> list[int]:
    """How many turns the conversations of three steps have, on ranks that wait for their environments at other times.
    After these comes a step that is asked to stop while one rank has its groups and the other has not.
    """
    rows = [row | {"extra_info": {"turns": 1 + 2 * (i % 2), "latency": 0.2 * (i % 2)}} for i, row in enumerate(rows)]
    halves = [rows[i] for half in (0, 1) for i in range(half, 10, 2)]  # the first rank's environments answer at once
    rows = [row | {"row_index": i} for i, row in enumerate(halves)]
    way, found = Sampling(1, TEMPERATURE, max_tokens=200, stop_token_ids=STOPS), []
    flight = InFlight(0.5, rows, 2, ranks, [], 3)
    for step in range(3):
        new = [rows[3 * rank + i] for rank in range(2) for i in range(1 + (step == 0))][: 3 if step == 0 else 2]
        _, own = flight.sample(engine, new, way, lambda row, group: None, partner, step=step)
        found += [s.outcome.facts["turns"] for s in own]
    stop.ask(0)
    flight.sample(engine, [rows[0], rows[5]], way, lambda row, group: None, partner, step=3)
    stop.end()
    return found


def partial_steps(engine, policy, rollout, ranks) -> list[dict]:
    """Four steps of four groups, with four more in flight, and other weights in each."""
    rows = [dict(prompt_ids=[1, 35, 33 + i], row_index=i, extra_info={}) for i in range(20)]
    way, found = Sampling(2, TEMPERATURE, max_tokens=80, stop_token_ids=(2, 20)), []
    flight = InFlight(1.0, rows, 4, ranks, [], 3)
    for step in range(4):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.05)
        engine.update_weights(full_tensors(policy))
        new = rows[:8] if step == 0 else rows[4 * step + 4 : 4 * step + 8]
        taken, own = flight.sample(engine, new, way, lambda row, group: None, step=step)
        options = dict(num_probe=100, version=engine.policy_version)
        gap = check_engine(policy, own, Sampling(temperature=TEMPERATURE), rollout, ranks, **options)
        state = [group["row_index"] for group in flight.state()["in_flight"]]
        found.append({"rows": [row["row_index"] for row in taken], "samples": own, "gap": gap, "left": state})
    return found


def main(model: str, game: str, out: str, engine_name: str, tensor_parallel_size: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    flags = EnvironmentFlags(environment=game, max_turns=8)
    partner = open_partner(flags, tokenizer, STOPS)
    ranks = init_ranks()
    rollout = EngineFlags(
        engine=engine_name, max_num_seqs=8, max_logprob_gap=1e-4, tensor_model_parallel_size=int(tensor_parallel_size)
    )
    engine = make_engine(model, ranks, rollout, longest=LIMIT + 20)
    policy = shard(load_pretrained(model, ranks), ranks)
    engine.update_weights(full_tensors(policy))

    rows = make_rows(tokenizer)
    loop, samples, unread = Loop(engine, partner, seed=5), [], {}
    for row in ranks.own_slice(rows):
        is_long = row["row_index"] == len(rows) - 1 and engine_name == "vllm"
        stops = () if is_long else STOPS
        loop.start(row["row_index"], row, Sampling(2, TEMPERATURE, max_tokens=LIMIT, stop_token_ids=stops))
    slowest = 0
    while loop.is_open():
        for _, group in loop.step():
            samples += group
        unread = {x.request.key: unread.get(x.request.key, 0) + 1 for x in engine.new}  # turns that are to begin
        slowest = max(slowest, *unread.values(), 0)
    assert not loop.trajectories
    gap = check_engine(policy, samples, Sampling(temperature=TEMPERATURE), rollout, ranks, num_probe=100)
    learnt = [replace(s, response_mask=np.ones_like(s.response_mask)) for s in samples]  # what it was told, too
    try:
        check_engine(policy, learnt, Sampling(temperature=TEMPERATURE), rollout, ranks)
        message = ""
    except RuntimeError as error:
        message = str(error)
    results = {"samples": samples, "gap": gap, "steps waited": slowest, "message": message}
    results["partial"] = partial_steps(engine, policy, rollout, ranks)
    results["turns"] = partial_conversations(engine, partner, ranks, rows)
    torch.save(results, Path(out) / f"rank{ranks.rank}.pt")
    partner.close()
    engine.close()
    shutdown_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])

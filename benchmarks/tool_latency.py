"""What slow tools cost: generation of the same conversations, by the same seed, without and with a latency.

    python benchmarks/tool_latency.py --engine vllm --out latency.jsonl
    python benchmarks/tool_latency.py --shape 1.5B --tokenizer T --num-prompts 64 --max-num-seqs 256   # on a GPU

A model that is not trained speaks `turns` times, and a tool answers after each turn, after so many seconds: that of
data/arithmetic.py, with 14 tokens that end a turn, or a Qwen2.5 shape whose turns have geometric lengths. Prints a line
for each latency: seconds of generation, the longest that one conversation has waited for its own chain of calls, and
by how much of that generation has grown.
"""

import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import step_time
from data import arithmetic
from rl.data.encode import load_tokenizer, stop_token_ids
from rl.data.types import Sampling
from rl.model.load import load_causal_lm
from rl.ranks import init_ranks
from rl.sampling.engines import Rollout, make_engine
from rl.sampling.environments import EnvironmentFlags, make_environments
from rl.sampling.rollout import sample_groups

STOPS = (0, 2, *range(20, 32))
GAME = """
import time
class Environment:
    def step(self, reply):
        about = self.about
        time.sleep(about["latency"])
        return None if reply.turn == about["turns"] else [{"role": "user", "content": "1"}]
    def reset(self, row, seed):
        self.about = row["extra_info"]
        return ()
"""


@dataclass(frozen=True)
class Args:
    engine: str = "vllm"
    """vllm or hf."""
    shape: str = "arithmetic"
    """Or a Qwen2.5, by benchmarks/make_model.py."""
    tokenizer: str | None = None
    """For such a shape: folder or Hugging Face id of a Qwen2 tokenizer."""
    cache: Path = Path("runs/benchmark_models")
    """Folder in which such models are kept for the next time."""
    mean_length: float = 150.0
    """Mean tokens of a turn of such a model."""
    max_tokens: int = 450
    """Longest conversation, in tokens behind the prompt."""
    num_prompts: int = 16
    """Prompts."""
    rollout_n: int = 8
    """Conversations of each prompt."""
    turns: int = 3
    """Of the policy; each is answered by a tool."""
    latencies: tuple[float, ...] = (0.0, 0.5)
    """Seconds that a tool takes; the first one is what the others are compared with."""
    max_num_seqs: int = 128
    """Conversations that are decoded at a time."""
    repeats: int = 5
    """The fastest one counts: other programs on the machine make some slower."""
    out: Path | None = None
    """Append the lines to this file."""


def model_of(args: Args, folder: Path) -> tuple[Path, tuple[int, ...]]:
    """The model's folder, and the tokens that end a turn."""
    if args.shape != "arithmetic":
        model = step_time.model_folder(args.shape, args.tokenizer, args.cache, "geometric", args.mean_length)
        return model, tuple(stop_token_ids(str(model), load_tokenizer(str(model))))
    model = folder / "model"
    arithmetic.save_model(model, seed=0)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 512}
    (model / "config.json").write_text(json.dumps(config))
    return model, STOPS


def main(args: Args) -> list[dict]:
    """Measure; returns the lines."""
    with tempfile.TemporaryDirectory() as folder:
        model, stops = model_of(args, Path(folder))
        game = Path(folder) / "game.py"
        game.write_text(GAME)
        tokenizer = load_tokenizer(str(model))
        flags = EnvironmentFlags(environment=str(game), max_turns=args.turns + 1)
        environments = make_environments(flags, tokenizer, stops)
        ranks = init_ranks()
        rollout = Rollout(engine=args.engine, max_num_seqs=args.max_num_seqs, free_cache_engine=False)
        engine = make_engine(str(model), ranks, rollout, longest=args.max_tokens + 50)
        policy = load_causal_lm(str(model), ranks)
        engine.update_weights(policy.named_parameters())

    ids = tokenizer("<|im_start|>user\n1+1<|im_end|>\n")["input_ids"]
    way = Sampling(args.rollout_n, max_tokens=args.max_tokens, stop_token_ids=stops)

    def measure(latency: float) -> tuple[float, float, list]:
        about = {"latency": latency, "turns": args.turns}
        rows = [dict(prompt_ids=[*ids, 5 + i % 70], row_index=i, extra_info=about) for i in range(args.num_prompts)]
        start = time.perf_counter()
        samples, _ = sample_groups(engine, rows, way, environments=environments, seed=0)
        seconds = time.perf_counter() - start
        return seconds, max(s.report["seconds"] for s in samples), [s.response_ids.tolist() for s in samples]

    measure(0.0)  # a warm-up
    found = [[measure(latency) for latency in args.latencies] for _ in range(args.repeats)]
    lines, tokens = [], found[0][0][2]
    for latency, runs in zip(args.latencies, zip(*found, strict=True), strict=True):
        chain = args.turns * latency
        seconds = [run[0] for run in runs]
        pairs = [pair for run in runs for pair in zip(run[2], tokens, strict=True)]
        equal = statistics.mean(mine == first for mine, first in pairs)
        # With a GPU's kernels a token's last bits depend on what is decoded beside it, so a few responses differ.
        assert equal == 1 or args.shape != "arithmetic", "latency has changed what was sampled"
        rates = [sum(map(len, run[2])) / run[0] for run in runs]
        grown = min(seconds) - (lines[0]["generation_s"] if lines else min(seconds))
        lines.append(
            dict(
                engine=args.engine,
                conversations=args.num_prompts * args.rollout_n,
                max_num_seqs=args.max_num_seqs,
                turns=args.turns,
                tokens=sum(map(len, tokens)),
                equal=round(equal, 3),
                tokens_per_s=round(max(rates)),
                latency_s=latency,
                generation_s=round(min(seconds), 3),
                median_s=round(statistics.median(seconds), 3),
                slowest_s=round(max(seconds), 3),
                chain_s=chain,
                longest_wait_s=round(statistics.median(run[1] for run in runs), 3),
                grown_s=round(grown, 3),
                grown_chains=round(grown / chain, 3) if chain else None,
            )
        )
        print(json.dumps(lines[-1]))
    if args.out:
        with open(args.out, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    environments.close()
    engine.close()
    return lines


if __name__ == "__main__":
    main(tyro.cli(Args))

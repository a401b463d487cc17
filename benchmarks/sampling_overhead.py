"""What sampling a token costs the CPU: vLLM's own `generate` against rl/sampling/engines/vllm.py, in one engine.

    python benchmarks/sampling_overhead.py

A tiny model on the CPU, 64 prompts x 8 responses of 100 tokens with log-probs, in CPU time of the one thread that all
runs in. The model's own time is in both; what differs is Python. On a GPU the model runs beside Python, which decides
the speed there as soon as it takes longer than the model: some 10 microseconds a token with 512 sequences.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import step_time  # noqa: E402
from rl.data.types import Sampling  # noqa: E402
from rl.ranks import init_ranks  # noqa: E402
from rl.sampling.engines import vllm, vllm_scheduler  # noqa: E402
from rl.sampling.rollout import sample_groups  # noqa: E402

GROUP, ROUNDS = 8, 2


@dataclass(frozen=True)
class Args:
    prompts: int = 64
    """Prompts, with 8 responses each."""
    tokens: int = 100
    """Tokens of each response."""


def microseconds_a_token(sample: Callable[[int], Any], parts: dict[str, tuple[Any, str]]) -> dict[str, float]:
    """The round with the least CPU time of ROUNDS, after one that warms up: of all, and of methods (owner, name)."""
    spent: dict[str, float] = {}
    originals = {label: getattr(owner, name) for label, (owner, name) in parts.items()}

    def timed(label: str) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            result = originals[label](*args, **options)
            spent[label] += time.thread_time() - start
            return result

        return call

    for label, (owner, name) in parts.items():
        setattr(owner, name, timed(label))
    rounds = []
    for seed in range(ROUNDS + 1):
        spent.update(dict.fromkeys(parts, 0.0))
        start = time.thread_time()
        tokens = sample(seed)
        rounds.append({label: 1e6 * s / tokens for label, s in (spent | {"all": time.thread_time() - start}).items()})
    for label, (owner, name) in parts.items():
        setattr(owner, name, originals[label])
    return min(rounds[1:], key=lambda x: x["all"])


def main(args: Args) -> dict[str, dict[str, float]]:
    """Print and return both rows."""
    torch.set_num_threads(1)
    ranks = init_ranks()
    with tempfile.TemporaryDirectory() as folder:
        model = step_time.model_folder("tiny", None, Path(folder), "fixed", 400)
        engine = vllm.Engine(
            str(model), ranks, ranks.dtype, max_model_len=256, max_num_seqs=args.prompts * GROUP, load_weights=True
        )
        from vllm import SamplingParams  # only after the engine has set vLLM's environment

        prompts = [[5 + i] * 20 for i in range(args.prompts)]
        scheduler = engine.core.scheduler
        parts = {"schedule": (scheduler, "schedule"), "update": (scheduler, "update_from_output")}

        def ours(seed: int) -> int:
            rows = [{"prompt_ids": prompt, "row_index": i} for i, prompt in enumerate(prompts)]
            samples, _ = sample_groups(engine, rows, Sampling(GROUP, 1.0, max_tokens=args.tokens), seed=seed)
            return sum(len(sample.response_ids) for sample in samples)

        def plain(seed: int) -> int:
            torch.manual_seed(seed)
            sampling = SamplingParams(
                n=GROUP, temperature=1.0, max_tokens=args.tokens, logprobs=0, flat_logprobs=True, detokenize=False
            )
            requests = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = engine.llm.generate(requests, sampling, use_tqdm=False)
            return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

        rows = {"rl/sampling/engines/vllm.py": microseconds_a_token(ours, parts)}
        vllm_scheduler.drop_shortcuts(scheduler)
        rows["vLLM's generate"] = microseconds_a_token(plain, parts)
        engine.close()
    print(f"\n{'CPU microseconds a token':26}{'all':>8}{'schedule':>10}{'update':>8}")
    for name, row in rows.items():
        print(f"{name:26}{row['all']:8.1f}{row['schedule']:10.1f}{row['update']:8.1f}")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

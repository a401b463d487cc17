r"""Measure accuracy, pass@k and majority vote of any checkpoint, with any engine, on any parquet that has a reward.

    torchrun eval.py --model runs/glassrl/grpo/global_step_58/huggingface --val-files data/gsm8k/test.parquet
    torchrun eval.py --model Qwen/Qwen2.5-1.5B-Instruct --rollout-n 16 --temperature 0.8 --k 1 4 16

Each prompt gets G = --rollout-n responses. Accuracy is their mean score. A response is right if its score is at least
--correct-at. pass@k is the probability that at least one of k responses is right. If c of G responses are right, the
unbiased estimate is 1 - C(G - c, k) / C(G, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1). The majority vote scores the
first response that gives the most frequent answer (Wang et al. 2022, arXiv 2203.11171). An answer is what the last
\boxed{} holds, or else the last number.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from extras.agents import EnvironmentFlags, check_rows, open_partner
from extras.voting import elected
from rl.data.encode import encode_prompts
from rl.data.flags import Texts
from rl.data.order import derive_seed
from rl.data.rows import read_rows
from rl.flags import AtLeast1, Count, Few, PositiveShare, Share, TemperatureOr0, TopK, check_limits
from rl.model.checks import check_model
from rl.ranks import Precision, init_ranks, shutdown_ranks
from rl.run.command_line import parse
from rl.sampling.engines import check_engine_flags, make_engine
from rl.sampling.engines.flags import EngineFlags, EngineSizes
from rl.sampling.evaluation import of_scoring
from rl.sampling.flags import Decoding
from rl.sampling.groups import sample_groups, sampling_settings
from rl.scoring.flags import Scoring
from rl.scoring.pool import Scorer, need_truth


@dataclass(frozen=True)
class Args:
    # The model is loaded from this Hugging Face id or folder. A checkpoint's huggingface/ is such a folder.
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"
    val_files: tuple[str, ...] = ("data/gsm8k/test.parquet",)  # These are parquet or jsonl files in verl's schema.
    # Evaluate only the first prompts, of which there are this many. By default all are evaluated.
    max_samples: AtLeast1 | None = None
    max_prompt_length: AtLeast1 = 512  # A prompt has at most this many tokens. A longer one is an error.
    max_response_length: AtLeast1 = 1024  # A response has at most this many tokens. A longer one is cut.
    # These functions, file.py[:function[:weight]] ..., score the responses, and their scores are summed. Their
    # signature is verl's (data_source, solution_str, ground_truth, extra_info).
    custom_reward_function: tuple[str, ...] = ("rewards/by_data_source.py",)
    rollout_n: Few = 1  # Each prompt gets this many responses (G).
    # Responses are sampled at this temperature. 0 is greedy. With --rollout-n above 1 it must be positive.
    temperature: TemperatureOr0 = 0.0
    # Sample among the fewest most likely tokens that together have this probability (nucleus sampling).
    top_p: PositiveShare = 1.0
    top_k: TopK = -1  # Sample among this many of the most likely tokens. -1 means all.
    min_p: Share = 0.0  # Leave out tokens whose probability is less than this share of that of the most likely token.
    k: tuple[int, ...] = ()  # Report pass@k for these k. The default is 1, 2, 4, ... up to --rollout-n.
    correct_at: float = 1.0  # For pass@k, a response counts as right from this score on.
    # The engine computes with numbers of this type. auto is float32 on a CPU. On a GPU it is bfloat16, or float16 if
    # the GPU has no bfloat16.
    dtype: Precision = "auto"
    seed: Count = 0  # The seed decides the samples.
    output: str | None = None  # Write every response with its score to this jsonl file. By default none is written.
    texts: Texts = Texts()
    scoring: Scoring = Scoring()
    rollout: EngineSizes = EngineSizes(gpu_memory_utilization=0.9)
    envs: EnvironmentFlags = EnvironmentFlags()


def main(args: Args) -> dict[str, float]:
    """Generate, score and report. Returns {metric: value}."""
    # Flags, data and rewards are checked here, before a model is loaded.
    check_limits(args)
    if args.rollout_n > 1 and args.temperature <= 0:
        raise ValueError(f"--rollout-n {args.rollout_n} repeats one greedy response; add a positive --temperature")
    if bad := [k for k in args.k if not 1 <= k <= args.rollout_n]:
        raise ValueError(f"--k {bad[0]} needs at least as many responses per prompt; --rollout-n is {args.rollout_n}")
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        open(args.output, "a").close()  # A file that cannot be written is noticed before anything is sampled.
    longest = args.max_prompt_length + args.max_response_length
    tokenizer = check_model(args.model, longest=longest, is_trained=False, texts=args.texts)
    check_engine_flags(args.rollout, args.model)
    rewards, limit = args.custom_reward_function, args.max_response_length
    decoding = Decoding(args.temperature, args.top_p, args.top_k, args.min_p)
    sampling = sampling_settings(decoding, args.model, tokenizer, n=args.rollout_n, max_tokens=limit)
    partner = open_partner(args.envs, tokenizer, sampling.stop_token_ids)  # what answers the policy, if anything does
    text_of = partner.prompt_text if partner else None
    rows = read_rows(args.val_files, needs_truth=need_truth(rewards), has_partner=bool(partner))[: args.max_samples]
    check_rows(args.envs, rows)
    rows = encode_prompts(tokenizer, rows, max_prompt_length=args.max_prompt_length, text_of=text_of)
    scorer = Scorer(rewards, tokenizer, args.scoring, rows=rows, partner=partner, max_response_length=limit)

    # Sample and score this rank's prompts. Then every rank gets all samples and scores, in the order of the rows.
    ranks = init_ranks(args.dtype)
    rollout = EngineFlags(**vars(args.rollout))
    engine = make_engine(args.model, ranks, rollout, longest=longest, seed=args.seed, load_weights=True)
    seed = derive_seed(args.seed, engine.first_rank)
    own_samples = sample_groups(engine, ranks.own_slice(rows), sampling, scorer.submit, partner, seed=seed)
    samples = ranks.all_gather(scorer.collect(own_samples))
    scores = [s.score for s in samples]

    # A group is the G responses to a prompt. A response that could not be scored counts as wrong, and a metric says how
    # many there were.
    rows_by_index = {row["row_index"]: row for row in rows}
    groups = [scores[i : i + args.rollout_n] for i in range(0, len(scores), args.rollout_n)]
    metrics = {
        "num_prompts": float(len(rows)),
        "accuracy": sum(s.accuracy for s in scores) / len(scores),
        "reward/mean": sum(s.value or 0.0 for s in scores) / len(scores),
        **of_scoring(scores, [rows_by_index[s.row_index]["data_source"] for s in samples]),
        "response_length/mean": sum(s.num_sampled for s in samples) / len(samples),
        "response_length/clip_ratio": sum(s.finish_reason == "length" for s in samples) / len(samples),
    }
    if args.rollout_n > 1 or args.k:
        correct = [sum(s.accuracy >= args.correct_at for s in group) for group in groups]
        for k in args.k or [2**i for i in range(args.rollout_n.bit_length())]:  # by default powers of two up to G
            metrics[f"pass@{k}"] = sum(pass_at_k(args.rollout_n, c, k) for c in correct) / len(groups)
        winners = [elected(group) for group in groups]
        metrics[f"maj@{args.rollout_n}"] = sum(winner.accuracy for winner in winners if winner) / len(groups)

    if ranks.is_main:
        if args.output:  # This comes before anything is printed, since a stdout that takes nothing is an error.
            with open(args.output, "w") as f:
                for s, x in zip(samples, scores, strict=True):
                    line = {"row_index": s.row_index, "response": x.text, "score": x.value, **x.components}
                    line["ground_truth"] = rows_by_index[s.row_index]["reward_model"]["ground_truth"]
                    f.write(json.dumps(line, default=str) + "\n")
        files = ", ".join(args.val_files)
        print(f"{args.model} on {files}: {len(rows)} prompts x {args.rollout_n}, temperature {args.temperature}")
        print(scorer.report)
        for name, value in metrics.items():
            print(f"  {name:28} {value:.4f}")
    scorer.close()
    engine.close()
    shutdown_ranks()
    return metrics


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that at least one of k draws is right: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021, arXiv 2107.03374, eq. 1. Raises ValueError if k > n. Example: n = 4, c = 1, k = 2 -> 0.5.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= n = {num_samples} samples per prompt")
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


if __name__ == "__main__":
    main(parse(Args, __doc__))

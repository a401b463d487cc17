"""DAPO: GRPO that samples until every group of the batch has something to teach, and is careful with long responses.

    torchrun train_dapo.py --model Qwen/Qwen2.5-1.5B-Instruct --overlong-penalty-factor 0.5    # one GPU, GSM8K
    torchrun --nproc_per_node 8 train_dapo.py --model Qwen/Qwen2.5-7B-Instruct --tensor-model-parallel-size 2

Decoupled Clip and Dynamic sAmpling Policy Optimization (DAPO, arXiv 2503.14476) changes GRPO in four places:
  clip-higher          the ratio may rise further than it may fall: --clip-ratio-low, --clip-ratio-high
  dynamic sampling     groups whose responses all earn the same are replaced by fresh ones: --filter-groups
  token-level loss     a mean over all tokens of a mini-batch, not of sequence means: --loss-agg-mode
  overlong responses   a soft punishment near the limit, or no loss for those that were cut: --overlong-buffer-len,
                       --overlong-filtering
and drops the KL term. Deviations from the paper: 1. groups sampled beyond the batch wait for the next step instead of
being thrown away, and --rollout-is corrects for the older policy that sampled them;  2. the standard deviation is
unbiased (ddof 1);  3. dual clip: the loss of a negative advantage is bounded (--clip-ratio-c; arXiv 1912.09729).

Shapes: P prompts of a step, G responses per prompt, B = P * G sequences, T tokens, (b, t) one micro-batch of them.
Every per-token tensor is (B, T), and position t describes token t given the tokens before it. See docs/train_dapo.md.
"""

import gc
import math
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import tyro

from rl import advantages, checkpoint, fsdp, losses, reward_model, schedule, stop, watchdog
from rl.batching import collate, plan_updates, shared_prefix
from rl.data import encode_prompts, load_tokenizer, prompts_for_step, read_rows
from rl.engines import hf, vllm
from rl.limits import check_limits
from rl.logprobs import fixed_logprobs, token_logprobs
from rl.memory import rehearse
from rl.metrics import (
    Sums,
    Timer,
    alarms,
    describe,
    evaluation_metrics,
    gap_sums,
    parse_alarm,
    reward_metrics,
    rollout_metrics,
    scoring_metrics,
    throughput,
)
from rl.rollout import check_context, fold, sample_groups, stop_token_ids, verify_engine
from rl.scoring import Score, Scorer, stop_if_failing
from rl.tracking import Backend, Tracker, evaluation_is_due, progress, progress_line, show_sample
from rl.types import Sample, Sampling, select

ENGINES = {"vllm": vllm, "hf": hf}


@dataclass(frozen=True)
class Args:
    # --- model and data
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # Hugging Face id or folder of the policy, and of the reference for KL
    # parquet or jsonl in verl's schema: data_source, prompt, reward_model.ground_truth, extra_info
    train_files: tuple[str, ...] = ("data/gsm8k/train.parquet",)
    val_files: tuple[str, ...] = ("data/gsm8k/test.parquet",)  # held-out files, same schema
    train_batch_size: int = 128  # prompts a step (P); responses a step are train_batch_size * rollout_n
    gen_batch_size: int | None = None  # prompts sampled at a time until the step has its P; default --train-batch-size
    max_prompt_length: int = 512  # tokens; a longer prompt is an error unless --filter-overlong-prompts
    max_response_length: int = 1024  # tokens; longer responses are cut and counted in response_length/clip_ratio
    filter_overlong_prompts: bool = False  # drop prompts longer than --max-prompt-length

    # --- reward

    # file.py[:function[:weight]] ..., summed; verl's signature (data_source, solution_str, ground_truth, extra_info).
    # Default: rewards/by_data_source.py; no function if there is a --reward-model
    custom_reward_function: tuple[str, ...] | None = None
    reward_workers: int | None = None  # processes a rank that score; default: the cores over the ranks, at most 16
    reward_timeout: float = 10.0  # CPU seconds to score a response, and four times as many by the clock; then no score
    reward_memory_mb: int = 4096  # MiB of private memory of such a process; 0 for no limit
    allow_unsafe_code_execution: bool = False  # let code rewards run model-written code without a complete sandbox
    reward_max_error_frac: float = 0.05  # stop the run if more of a step's responses raise or time out
    reward_model: str | None = None  # a model of train_reward.py, by id or folder; its score joins the sum
    reward_model_coef: float = 1.0  # weight of that score
    reward_model_max_length: int = 4096  # tokens of prompt and response in its own template; longer ones lose the start
    # the last so many tokens before --max-response-length cost more and more; default a fifth of it, 0: no punishment
    overlong_buffer_len: int | None = None
    overlong_penalty_factor: float = 1.0  # subtracted from the reward of a response that reaches the limit

    # --- rollout
    engine: Literal["vllm", "hf"] = "vllm"  # vllm in this process, or the slow and simple sampler of transformers
    rollout_n: int = 8  # responses per prompt (G); their mean is the baseline, so at least 2 for most estimators
    temperature: float = 1.0  # of sampling; the trainer divides its logits by it too
    tensor_model_parallel_size: int = 1  # GPUs that share one vLLM engine: for a large model, or a few long responses
    gpu_memory_utilization: float = 0.5  # share of GPU memory that vLLM may take while it generates
    max_num_seqs: int = 1024  # sequences an engine decodes at a time; lower it if the KV cache is small
    free_cache_engine: bool = True  # give vLLM's memory back while training (sleep level 2)
    # stop if engine and trainer log-probs differ by more than this on average after a push; default 1e-4 (bf16: 0.1)
    max_logprob_gap: float | None = None

    # --- algorithm

    filter_groups: bool = True  # dynamic sampling: replace groups whose responses all have the same score
    max_num_gen_batches: int = 10  # rounds of sampling in a step after which the run gives up filling its batch
    overlong_filtering: bool = False  # leave responses that were cut at the limit out of the loss
    # how token losses become one number; Dr. GRPO: seq-mean-token-sum-norm, the GRPO paper: seq-mean-token-mean
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    loss_scale_factor: float | None = None  # divisor of seq-mean-token-sum-norm; default --max-response-length
    clip_ratio_low: float = 0.2  # ratio >= 1 - this
    clip_ratio_high: float = 0.28  # ratio <= 1 + this; 0.2 switches clip-higher off
    clip_ratio_c: float = 10.0  # dual clip: a negative advantage's loss is at most this many times its size
    ppo_mini_batch_size: int | None = None  # prompts per optimizer step; default: a quarter of --train-batch-size
    ppo_epochs: int = 1  # passes over a step's responses
    entropy_coeff: float = 0.0  # weight of an entropy bonus; 0 computes the entropy for the log only
    # truncated weights for the gap between the policy that sampled, in an engine and perhaps a step ago, and this one
    rollout_is: Literal["none", "token", "sequence"] = "token"
    rollout_is_threshold: float = 2.0  # cap of those weights

    # --- optimizer
    lr: float = 1e-6  # AdamW's learning rate after warm-up
    lr_warmup_steps: int = 10  # steps of linear warm-up
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"  # shape of the learning rate after warm-up
    weight_decay: float = 0.1  # AdamW's decoupled weight decay
    grad_clip: float = 1.0  # largest global gradient norm
    total_epochs: int = 1  # passes over the training prompts
    total_training_steps: int | None = None  # overrides --total-epochs

    # --- memory: never changes the numbers
    ppo_max_token_len_per_gpu: int = 16384  # tokens of a micro-batch, a shared prompt once; lower it on out-of-memory
    # what the backward pass recomputes: all of a layer, or all but matrix products and attention, or nothing
    activation_checkpointing: Literal["none", "selective", "full"] = "selective"
    fsdp_size: int | None = None  # ranks that share one copy of the model, e.g. the GPUs of a machine; default: all
    compile: bool = True  # torch.compile the layers and the head on a GPU: faster after a minute of warm-up

    # --- evaluation, checkpoints, logging
    val_before_train: bool = True  # evaluate the untrained policy first (step 0)
    test_freq: int = 10  # evaluate, greedily, every this many steps and at the end; -1 never
    log_val_generations: int = 8  # held-out completions to record at each evaluation
    default_local_dir: str = "runs/{project_name}/{experiment_name}"  # checkpoints and metrics.jsonl go here
    save_freq: int = -1  # save every this many steps and at the end; -1 only at the end; 0 never
    max_ckpt_to_keep: int | None = None  # delete older checkpoints beyond this many
    resume_mode: str = "auto"  # auto: from the newest intact checkpoint, if any; disable; or a global_step_N folder
    force_resume: bool = False  # resume although settings or data that decide what is learned have changed
    max_hours: float | None = None  # save and leave after so many hours, as after SIGTERM or Ctrl-C
    stall_timeout: float = 3600.0  # seconds without the end of a phase after which the run ends, with all its stacks
    # metrics and limits; a step beyond one prints a line that begins with ALARM
    alarms: tuple[str, ...] = (
        "rollout/logprob_gap_mean>0.05",
        "train/num_gen_batches>5",
        "response_length/clip_ratio>0.5",
        "actor/entropy<0.01",
    )
    logger: tuple[Backend, ...] = ("console",)  # trackers besides metrics.jsonl, which is always written
    project_name: str = "glassrl"  # project in the trackers, and part of the folder
    experiment_name: str = "dapo"  # run in the trackers, and part of the folder
    log_samples_freq: int = 10  # print one prompt and response every this many steps; 0 never
    seed: int = 0  # decides data order and sampling, together with the step


def validate(args: Args) -> None:
    """Refuse settings that contradict each other, naming the flag, the value and the fix."""
    check_limits(args)
    if (args.ppo_mini_batch_size or 0) > args.train_batch_size:
        raise ValueError(
            f"--ppo-mini-batch-size {args.ppo_mini_batch_size} is more than --train-batch-size "
            f"{args.train_batch_size}; both count prompts, lower it"
        )
    if args.ppo_max_token_len_per_gpu < (longest := args.max_prompt_length + args.max_response_length):
        raise ValueError(
            f"--ppo-max-token-len-per-gpu {args.ppo_max_token_len_per_gpu} cannot hold one sequence of "
            f"--max-prompt-length + --max-response-length = {longest} tokens; raise it to at least that"
        )
    if args.reward_model and args.ppo_max_token_len_per_gpu < args.reward_model_max_length:
        raise ValueError(
            f"--ppo-max-token-len-per-gpu {args.ppo_max_token_len_per_gpu} cannot hold one conversation of "
            f"--reward-model-max-length {args.reward_model_max_length} tokens; change one of them"
        )
    for alarm in args.alarms:
        parse_alarm(alarm)
    if not args.temperature > 0:
        raise ValueError(f"--temperature {args.temperature} must be positive: greedy samples teach nothing")
    if args.engine == "hf" and args.tensor_model_parallel_size != 1:
        size = args.tensor_model_parallel_size
        raise ValueError(f"--tensor-model-parallel-size {size} needs --engine vllm; --engine hf runs on one device")
    if args.clip_ratio_c <= 1:
        raise ValueError(f"--clip-ratio-c {args.clip_ratio_c} must be above 1")
    if not 0 <= (args.overlong_buffer_len or 0) <= args.max_response_length:
        raise ValueError(
            f"--overlong-buffer-len {args.overlong_buffer_len} must be within 0 (no punishment) and "
            f"--max-response-length {args.max_response_length}"
        )
    if args.filter_groups and args.rollout_n < 2:
        raise ValueError("--rollout-n 1 leaves no group with a spread; raise it, or set --no-filter-groups")


def group_scores(groups: list[list[tuple[Sample, Score]]]) -> torch.Tensor:
    """The scores of groups of G pairs (sample, score): (P, G), NaN where there is none."""
    return torch.tensor([[math.nan if score.value is None else score.value for _, score in group] for group in groups])


def loop_state(drawn: int, surplus: list[list[tuple[Sample, Score]]]) -> dict:
    """What does not follow from the step, as JSON: rounds of sampling so far, and the groups that wait."""
    return {"drawn": drawn, "surplus": [[(vars(sample), score) for sample, score in group] for group in surplus]}


def evaluate(args, backend, engine, sampling, rows, tokenizer, submit, collect, tracker, step, d) -> dict[str, float]:
    """Score one greedy response to every held-out prompt with the current weights. All ranks must enter."""
    sampling = replace(sampling, n=1, temperature=0.0)
    samples = sample_groups(backend, engine, fsdp.own_slice(rows, d), sampling, seed=args.seed, on_group=submit)
    stop.check(d)
    scored = fsdp.all_gather(zip(samples, collect(samples, rows), strict=True), d)
    samples, scores = zip(*scored, strict=True)  # one each for every row, in order
    metrics = evaluation_metrics(scores, [row["data_source"] for row in rows])
    metrics["val/response_length"] = sum(len(s.response_ids) for s in samples) / len(samples)
    shown = list(zip(samples, scores, strict=True))[: args.log_val_generations]
    tracker.log_generations(
        step,
        "val",
        [{"prompt": tokenizer.decode(s.prompt_ids), "response": x.text, "score": x.value} for s, x in shown],
    )
    tracker.log(step, metrics, f"step {step} | held out: accuracy {metrics['val/accuracy']:.3f} on {len(rows)} prompts")
    return metrics


def main(args: Args) -> dict[str, float]:
    """Train with DAPO; returns the metrics of the last step and of the last evaluation."""
    # Everything a user can get wrong is checked before a model is loaded.
    validate(args)
    tokenizer = load_tokenizer(args.model)
    limits = dict(max_prompt_length=args.max_prompt_length, filter_overlong_prompts=args.filter_overlong_prompts)
    train_rows = encode_prompts(tokenizer, read_rows(args.train_files), **limits)
    evaluates = args.val_before_train or args.test_freq > 0
    val_rows = encode_prompts(tokenizer, read_rows(args.val_files), **limits) if evaluates else []
    gen_batch_size = args.gen_batch_size or args.train_batch_size
    overlong_buffer_len = args.overlong_buffer_len
    if overlong_buffer_len is None:
        overlong_buffer_len = args.max_response_length // 5
    prompts_for_step(train_rows, 0, args.train_batch_size, args.seed)  # refuses a batch larger than the data
    if gen_batch_size > len(train_rows):
        raise ValueError(
            f"--gen-batch-size {gen_batch_size} is more than the {len(train_rows)} rows of the training data; lower it"
        )
    check_context(args.model, args.max_prompt_length + args.max_response_length)
    if args.allow_unsafe_code_execution:
        os.environ["GLASSRL_ALLOW_UNSAFE_CODE_EXECUTION"] = "1"  # read by rewards/sandbox.py, in the workers
    if args.reward_model:
        judge_tokenizer = reward_model.open_reward_model(args.reward_model, train_rows[0], args.reward_model_max_length)
    functions = args.custom_reward_function or (() if args.reward_model else ("rewards/by_data_source.py",))
    scorer = Scorer(
        functions,
        tokenizer,
        workers=args.reward_workers,
        timeout_s=args.reward_timeout,
        memory_mb=args.reward_memory_mb,
        extra_info={"max_response_length": args.max_response_length},
    )
    reward_check = scorer.check(train_rows + val_rows)
    stops = stop_token_ids(args.model, tokenizer)
    sampling = Sampling(args.rollout_n, args.temperature, max_tokens=args.max_response_length, stop_token_ids=stops)
    total_steps = args.total_training_steps or args.total_epochs * (len(train_rows) // args.train_batch_size)
    mini_batch_size = args.ppo_mini_batch_size or math.ceil(args.train_batch_size / 4)
    updates_per_step = args.ppo_epochs * math.ceil(args.train_batch_size / mini_batch_size)
    on_policy = updates_per_step == 1  # the policy that sampled is the one being updated: old_logp costs no extra pass
    d = fsdp.init_distributed(args.stall_timeout)
    fsdp.check_size(args.fsdp_size, d)
    watchdog.start(args.stall_timeout, d.rank)
    stop.start(args.max_hours)
    run = checkpoint.open_run(args, tokenizer, total_steps, d)
    run_dir, resume_from = run.root, run.resume_from

    max_logprob_gap = args.max_logprob_gap or (1e-4 if d.dtype == torch.float32 else 0.1)
    backend = ENGINES[args.engine]
    engine = backend.make_engine(
        args.model,
        d=d,
        dtype=d.dtype,
        max_model_len=args.max_prompt_length + args.max_response_length,
        max_num_seqs=args.max_num_seqs,
        gpu_memory_utilization=args.gpu_memory_utilization,
        tensor_parallel_size=args.tensor_model_parallel_size,
        free_cache_engine=args.free_cache_engine,
        seed=args.seed,
    )
    backend.sleep(engine)
    sharding = dict(
        activation_checkpointing=args.activation_checkpointing,
        compile=args.compile and d.device.type == "cuda",
        fsdp_size=args.fsdp_size,
    )
    policy = fsdp.shard(fsdp.load_policy(args.model, d), d, **sharding)
    judge = None
    if args.reward_model:
        judge = reward_model.load_reward_model(args.reward_model, d, dtype=d.dtype).requires_grad_(False)
        fsdp.offload(fsdp.shard(judge, d, fsdp_size=args.fsdp_size))

    def collect(samples: list[Sample], rows: list[dict]) -> list[Score]:
        """The finished scores of this rank's samples of `rows`, plus the reward model's. All ranks must enter."""
        scores = scorer.collect(samples)
        stop.check(d)
        if judge is None:
            return scores
        limits = dict(max_length=args.reward_model_max_length, max_tokens_per_gpu=args.ppo_max_token_len_per_gpu)
        weights = dict(coef=args.reward_model_coef, alone=not functions)
        return reward_model.add_scores(judge, judge_tokenizer, rows, samples, scores, d=d, **weights, **limits)

    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    trained = {"actor": (policy, optimizer)}
    start = checkpoint.load(resume_from, trained) if resume_from else 0
    tracker = Tracker(run_dir, args, start, total_steps, enabled=d.is_main)
    memory_plan = rehearse(
        trained,
        max_tokens=args.ppo_max_token_len_per_gpu,
        max_length=args.max_prompt_length + args.max_response_length,
        engine_memory=engine.memory,
        d=d,
    )
    tracker.print(
        f"{run_dir}: {f'resumed from {resume_from}' if resume_from else 'new run'}, steps {start + 1}-{total_steps}, "
        f"{args.train_batch_size} prompts x {args.rollout_n} = {args.train_batch_size * args.rollout_n} responses and "
        f"{updates_per_step} update(s) a step, {d.world_size} rank(s), {len(train_rows)} prompts to draw from\n"
        f"{reward_check}\n{memory_plan}".rstrip()
    )
    saved = checkpoint.extra(resume_from)
    drawn = saved.get("drawn", 0)  # rounds of sampling since the run began: the next one takes the next prompts
    surplus = [[(Sample(**s), Score(*x)) for s, x in group] for group in saved.get("surplus", [])]  # groups that wait
    sources = {row["row_index"]: row["data_source"] for row in train_rows}
    prompts = {row["row_index"]: row["prompt_ids"] for row in train_rows}
    # With --force-resume, those of another size, or whose prompt stands there no more, wait no longer.
    surplus = [
        g for g in surplus if len(g) == args.rollout_n and g[0][0].prompt_ids.tolist() == prompts.get(g[0][0].row_index)
    ]
    metrics, val_metrics, bad_updates_in_a_row = {}, {}, 0
    gc.freeze()  # garbage collections need not walk through what stays alive: nearly half a second each

    for step in range(start, total_steps + 1):  # the last round only evaluates
        clock = Timer(d.device)
        # Asked to stop, the run leaves at the next `stop.check` before this step's first update, and calls these two.
        stop.arm(checkpoint.leaving(run, step, trained, extra=loop_state(drawn, surplus)), partial(tracker.close, 5.0))

        # The engine gets this step's policy, and keeps it until the batch is full.
        backend.wake(engine)
        backend.update_weights(engine, fsdp.full_tensors(policy, d.dtype))
        clock("update_weights")
        due = evaluation_is_due(args.test_freq, step, total_steps)
        if args.val_before_train if step == 0 else due:
            val_metrics = evaluate(
                args, backend, engine, sampling, val_rows, tokenizer, scorer.submit, collect, tracker, step, d
            )
            clock("testing")
        if step == total_steps:
            break
        # Phases 1 to 3 repeat until P groups have a spread: one whose responses all earn the same has advantage zero.
        groups, sampled, own_samples = surplus, [], []  # a group is G pairs (sample, score)
        for num_gen_batches in range(args.max_num_gen_batches + 1):
            if len(groups) >= args.train_batch_size:
                break
            if num_gen_batches == args.max_num_gen_batches:
                raise RuntimeError(
                    f"step {step + 1}: {len(sampled)} groups were sampled in --max-num-gen-batches {num_gen_batches} "
                    f"rounds, and {len(groups)} have a spread, fewer than --train-batch-size {args.train_batch_size}; "
                    "the data is too easy or too hard, or the bound too low"
                )

            # 1. Prompts: a pure function of (seed, round), so that a resumed run sees what the unbroken one would.
            rows = prompts_for_step(train_rows, drawn, gen_batch_size, args.seed)

            # 2. Rollouts: sample G responses per prompt.
            seed = fold(args.seed, drawn, d.rank)
            own_samples = sample_groups(
                backend, engine, fsdp.own_slice(rows, d), sampling, seed=seed, on_group=scorer.submit
            )
            stop.check(d)
            clock("gen")

            # 3. Rewards: other processes have been scoring since the first responses were complete.
            own_scores = collect(own_samples, rows)
            # From here on every rank holds the whole step, and the text reads as if there were one rank.
            scored = fsdp.all_gather(zip(own_samples, own_scores, strict=True), d)
            stop_if_failing([score for _, score in scored], args.reward_max_error_frac)
            fresh = [scored[i : i + args.rollout_n] for i in range(0, len(scored), args.rollout_n)]
            spread = advantages.informative_groups(group_scores(fresh)).tolist()
            groups = groups + [x for x, keep in zip(fresh, spread, strict=True) if keep or not args.filter_groups]
            sampled, drawn = sampled + fresh, drawn + 1
            clock("reward")
        groups, surplus = groups[: args.train_batch_size], groups[args.train_batch_size :]
        clock("gen")  # where groups that waited fill a step, it samples nothing
        backend.sleep(engine)
        verify_engine(policy, own_samples, temperature=args.temperature, limit=max_logprob_gap, d=d)
        clock("verify")
        samples, scores = zip(*(pair for group in groups for pair in group), strict=True)  # B each
        scores_PG = group_scores(groups)
        lengths = torch.tensor([float(s.response_mask.sum()) for s in samples]).view(-1, args.rollout_n)  # (P, G)

        # 4. Batch: one row per response, planned into optimizer steps and this rank's memory-sized micro-batches.
        batch = collate(samples, pad_id=tokenizer.pad_token_id or 0)  # (B, T)
        taught = batch.response_mask * scores_PG.isfinite().view(-1, 1)  # a response without a score teaches nothing
        if args.overlong_filtering:  # neither does one that was cut: nobody knows what it would have been
            taught = taught * torch.tensor([float(s.finish_reason != "length") for s in samples]).view(-1, 1)
        batch = replace(batch, response_mask=taught)
        updates = plan_updates(
            batch.lengths.tolist(),
            shared=shared_prefix(batch).tolist(),
            mini_batch_size=mini_batch_size * args.rollout_n,
            max_tokens=args.ppo_max_token_len_per_gpu,
            rank=d.rank,
            world_size=d.world_size,
        )
        clock("batch")

        # 5. Fixed log-probs: of the policy that starts this step, for the ratio.
        # Every rank has those of its own rows, and zeros in the others.
        if not on_policy:
            own_micros = [micro_rows for _, micros in updates for micro_rows in micros]
            old_logp = fixed_logprobs(policy, batch, own_micros, temperature=args.temperature, device=d.device)
            batch = replace(batch, old_logp=old_logp)
            clock("old_log_prob")

        # === algorithm ================================================================================================
        # 6. Advantages: how much better than its siblings was each response, once long ones have paid?
        rewards = scores_PG  # (P, G)
        if overlong_buffer_len:
            rewards = scores_PG + advantages.overlong_penalty(
                lengths,
                max_length=args.max_response_length,
                buffer=overlong_buffer_len,
                factor=args.overlong_penalty_factor,
            )
        advantages_PG = advantages.grpo(rewards, lengths)  # (P, G)
        batch = replace(batch, advantages=advantages_PG.view(-1, 1) * batch.response_mask)  # (B, T)
        clock("adv")

        # 7. Update: a mini-batch is one optimizer step; its micro-batches only bound the memory.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, total_steps)
        optimizer.param_groups[0]["lr"] = lr
        clip_ratios = {name: vars(args)[name] for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
        sums, grad_norms = Sums(d.device), []
        for mini, micros in updates * args.ppo_epochs:
            mini_mask = batch.response_mask[mini.start : mini.stop]
            denominators = dict(  # of the whole mini-batch, on all ranks: gradients of micro-batches and ranks add up
                num_tokens=mini_mask.sum().item(),
                num_seqs=mini_mask.any(1).sum().item(),
                scale=args.loss_scale_factor or args.max_response_length,
            )
            for micro_rows in progress("update", micros):
                if not grad_norms:
                    stop.check(d)
                micro = select(batch, micro_rows, d.device)  # (b, t)
                mask = micro.response_mask
                logp, entropy = token_logprobs(
                    policy, micro, temperature=args.temperature, entropy_grad=args.entropy_coeff != 0
                )
                old_logp = logp.detach() if on_policy else micro.old_logp
                pg_loss, clipped = losses.ppo_clip(logp, old_logp, micro.advantages, mask, **clip_ratios)
                if args.rollout_is != "none":  # what sampled is not quite the trainer's policy
                    pg_loss = pg_loss * losses.importance_weights(
                        old_logp, micro.rollout_logp, mask, level=args.rollout_is, cap=args.rollout_is_threshold
                    )
                objective = pg_loss - args.entropy_coeff * entropy
                loss = losses.aggregate(objective, mask, args.loss_agg_mode, **denominators)
                fsdp.last_micro_batch(policy, micro_rows is micros[-1])  # when copies of the model add up
                loss.backward()  # adds to the gradients, and sums them over ranks
                sums.add(
                    loss=loss,
                    pg_loss=losses.aggregate(pg_loss, mask, args.loss_agg_mode, **denominators),
                    tokens=mask.sum(),
                    entropy=losses.masked_sum(entropy, mask),
                    pg_clipfrac=losses.masked_sum(clipped, mask),
                    ppo_kl=losses.masked_sum(old_logp - logp, mask),
                    **gap_sums(micro.rollout_logp, old_logp, mask),
                )
                sums.add_max(gap_max=((micro.rollout_logp - old_logp).abs() * mask).max())
            grad_norms.append(fsdp.clip_grad_norm(policy, args.grad_clip))
            usable = math.isfinite(grad_norms[-1]) and denominators["num_tokens"] > 0  # some response has a score
            bad_updates_in_a_row = 0 if usable else bad_updates_in_a_row + 1
            if usable:
                optimizer.step()
            elif bad_updates_in_a_row == 3:
                raise RuntimeError(
                    f"step {step + 1}: three updates in a row were useless, the last one with gradient norm "
                    f"{grad_norms[-1]} over {denominators['num_tokens']:.0f} tokens that are learned from; if the norm "
                    "is not finite lower --lr, if there are no tokens mend the reward, or raise --max-response-length "
                    "where --overlong-filtering leaves none; the step's batch is in "
                    f"{checkpoint.save_batch(run, step + 1, batch)}"
                )
            optimizer.zero_grad(set_to_none=True)
        clock("update_actor")
        # === end ======================================================================================================

        # 8. Report: losses are means over mini-batches, diagnostics means over all tokens of all ranks.
        judged = [pair for group in sampled or groups for pair in group]  # kept or not
        s, times = sums.reduce(), clock.metrics()
        tokens = max(s["tokens"], 1.0)
        metrics = {
            **reward_metrics(group_scores(sampled or groups)),
            **scoring_metrics([x for _, x in judged], [sources[s.row_index] for s, _ in judged]),
            **describe("critic/rewards", rewards),
            "train/num_gen_batches": float(num_gen_batches),
            "train/num_sampled_responses": float(len(sampled) * args.rollout_n),
            "train/surplus_groups": float(len(surplus)),
            **describe("critic/advantages", advantages_PG),
            **rollout_metrics(samples),
            **{f"actor/{name}": s[name] / updates_per_step for name in ("loss", "pg_loss")},
            **{f"actor/{name}": s[name] / tokens for name in ("entropy", "pg_clipfrac", "ppo_kl")},
            "actor/grad_norm": sum(grad_norms) / len(grad_norms),
            "actor/skipped_updates": float(sum(not math.isfinite(norm) for norm in grad_norms)),
            "actor/lr": lr,
            "rollout/logprob_gap_mean": s["gap"] / tokens,
            "rollout/logprob_gap_max": s["gap_max"],
            "rollout_corr/kl": s["rollout_kl"] / tokens,
            "training/rollout_probs_diff_mean": s["probs_diff"] / tokens,
            **times,
            **throughput(samples, times, d),
            "perf/gen_tokens_per_s": sum(len(s.response_ids) for g in sampled for s, _ in g) / times["timing_s/gen"],
            "checkpoint/failed": float(run.failures),
        }
        tracker.log(step + 1, metrics, progress_line(step + 1, total_steps, metrics))
        for alarm in alarms(metrics, args.alarms):
            tracker.print(f"ALARM at step {step + 1}: {alarm}")
        if args.log_samples_freq and step % args.log_samples_freq == 0:
            tracker.print(show_sample(tokenizer.decode(samples[0].prompt_ids), scores[0].text, scores[0].value))

        # 9. Checkpoint: weights, optimizer, the step, and what the sampling loop holds.
        last = step + 1 == total_steps
        if args.save_freq != 0 and (last or (args.save_freq > 0 and (step + 1) % args.save_freq == 0)):
            checkpoint.save(run, step + 1, trained, extra=loop_state(drawn, surplus))  # goes on in the background

    gc.unfreeze()
    checkpoint.close(run)  # waits for the last save
    stop.end()
    watchdog.stop()
    tracker.close()
    scorer.close()
    backend.close(engine)
    fsdp.shutdown_distributed()
    return metrics | val_metrics


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""PPO: a critic learns what reward to expect at every token, and the policy is pushed towards what beats it.

    torchrun train_ppo.py --model Qwen/Qwen2.5-1.5B-Instruct                        # one GPU, GSM8K
    torchrun --nproc_per_node 8 train_ppo.py --model Qwen/Qwen2.5-7B-Instruct --critic-model path/to/reward_model

Proximal Policy Optimization (arXiv 1707.06347) for language models (InstructGPT, arXiv 2203.02155): every token is an
action, the reward comes with the last one, and generalised advantage estimation (arXiv 1506.02438) compares it with
the critic's values. Deviations from the papers, all common practice:
  1. advantages are whitened over all tokens of the step;  2. no KL term unless --use-kl-in-reward or --use-kl-loss;
  3. actor and critic are two models, each with its own optimizer, unless --share-backbone;
  4. dual clip: the loss of a negative advantage is bounded (--clip-ratio-c; arXiv 1912.09729).

Shapes: P prompts of a step, G responses per prompt, B = P * G sequences, T tokens, (b, t) one micro-batch of them.
Every per-token tensor is (B, T), and position t describes token t given the tokens before it. See docs/train_ppo.md.
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
from rl.critic import add_value_head, check_critic, fixed_values, load_critic, token_logprobs_and_values, token_values
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
    rollout_metrics,
    scoring_metrics,
    throughput,
)
from rl.rollout import check_context, fold, sample_groups, stop_token_ids, verify_engine
from rl.scoring import Score, Scorer, stop_if_failing
from rl.tracking import Backend, Tracker, evaluation_is_due, progress, progress_line, show_sample
from rl.types import Sample, Sampling, select

ENGINES = {"vllm": vllm, "hf": hf}

GAPS = {  # between engine and trainer: metric, and its name among the sums
    "rollout/logprob_gap_mean": "gap",
    "rollout_corr/kl": "rollout_kl",
    "training/rollout_probs_diff_mean": "probs_diff",
}


@dataclass(frozen=True)
class Args:
    # --- model and data
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # Hugging Face id or folder of the policy, and of the reference for KL
    # parquet or jsonl in verl's schema: data_source, prompt, reward_model.ground_truth, extra_info
    train_files: tuple[str, ...] = ("data/gsm8k/train.parquet",)
    val_files: tuple[str, ...] = ("data/gsm8k/test.parquet",)  # held-out files, same schema
    train_batch_size: int = 512  # prompts a step (P); responses a step are train_batch_size * rollout_n
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
    use_kl_in_reward: bool = False  # subtract kl_coef * KL(policy, reference) from the reward of every token
    kl_coef: float = 0.001  # weight of that KL; where it starts if --kl-ctrl-type adaptive
    kl_penalty: Literal["k1", "k2", "k3", "low_var_kl", "abs"] = "k1"  # its estimator, per token
    kl_ctrl_type: Literal["fixed", "adaptive"] = "fixed"  # adaptive: steer kl_coef towards --kl-target
    kl_target: float = 0.1  # KL a token that the adaptive controller aims at
    kl_horizon: int = 10_000  # responses over which it corrects a relative error of one

    # --- rollout
    engine: Literal["vllm", "hf"] = "vllm"  # vllm in this process, or the slow and simple sampler of transformers
    rollout_n: int = 1  # responses per prompt (G); the critic is the baseline, so one is enough
    temperature: float = 1.0  # of sampling; the trainer divides its logits by it too
    tensor_model_parallel_size: int = 1  # GPUs that share one vLLM engine: for a large model, or a few long responses
    gpu_memory_utilization: float = 0.5  # share of GPU memory that vLLM may take while it generates
    max_num_seqs: int = 1024  # sequences an engine decodes at a time; lower it if the KV cache is small
    free_cache_engine: bool = True  # give vLLM's memory back while training (sleep level 2)
    # stop if engine and trainer log-probs differ by more than this on average after a push; default 1e-4 (bf16: 0.1)
    max_logprob_gap: float | None = None

    # --- critic
    critic_model: str | None = None  # a reward model or a language model, by id or folder; default --model, a new head
    share_backbone: bool = False  # no critic of its own: a second head on the policy, trained in the same pass
    value_loss_coef: float = 0.1  # weight of the critic's loss with --share-backbone
    critic_lr: float = 1e-5  # AdamW's learning rate of the critic, after the same warm-up
    critic_warmup: int = 0  # first steps in which only the critic learns
    cliprange_value: float = 0.5  # values move at most this far from the old ones before the loss stops following
    gamma: float = 1.0  # discount of a reward that comes one token later
    lam: float = 1.0  # lambda of GAE: 1 trusts the rewards (no bias), 0 the critic (little variance)
    critic_offload: bool = False  # keep the critic and its optimizer on the host while responses are sampled

    # --- algorithm

    # how token losses become one number; Dr. GRPO: seq-mean-token-sum-norm, the GRPO paper: seq-mean-token-mean
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    loss_scale_factor: float | None = None  # divisor of seq-mean-token-sum-norm; default --max-response-length
    clip_ratio_low: float = 0.2  # ratio >= 1 - this
    clip_ratio_high: float = 0.2  # ratio <= 1 + this
    clip_ratio_c: float = 3.0  # dual clip: a negative advantage's loss is at most this many times its size
    ppo_mini_batch_size: int | None = None  # prompts per optimizer step; default: a quarter of --train-batch-size
    ppo_epochs: int = 1  # passes over a step's responses, of the critic and of the policy
    use_kl_loss: bool = False  # add kl_loss_coef * KL(policy, reference) to the loss; loads a frozen reference
    kl_loss_coef: float = 0.001  # weight of that KL term
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+"] = "k3"  # "+": gradient of k2
    entropy_coeff: float = 0.0  # weight of an entropy bonus; 0 computes the entropy for the log only
    rollout_is: Literal["none", "token", "sequence"] = "none"  # truncated weights for the engine/trainer gap (TIS)
    rollout_is_threshold: float = 2.0  # cap of those weights

    # --- optimizer
    lr: float = 1e-6  # AdamW's learning rate after warm-up
    lr_warmup_steps: int = 0  # steps of linear warm-up
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"  # shape of the learning rate after warm-up
    weight_decay: float = 0.01  # AdamW's decoupled weight decay
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
        "critic/vf_explained_var<-1",
        "response_length/clip_ratio>0.5",
        "actor/entropy<0.01",
    )
    logger: tuple[Backend, ...] = ("console",)  # trackers besides metrics.jsonl, which is always written
    project_name: str = "glassrl"  # project in the trackers, and part of the folder
    experiment_name: str = "ppo"  # run in the trackers, and part of the folder
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
    if args.share_backbone and (args.critic_model or args.critic_warmup or args.critic_offload):
        raise ValueError(
            "--share-backbone has no critic of its own, so it goes with none of --critic-model, --critic-warmup and "
            "--critic-offload"
        )


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
    """Train with PPO; returns the metrics of the last step and of the last evaluation."""
    # Everything a user can get wrong is checked before a model is loaded.
    validate(args)
    tokenizer = load_tokenizer(args.model)
    limits = dict(max_prompt_length=args.max_prompt_length, filter_overlong_prompts=args.filter_overlong_prompts)
    train_rows = encode_prompts(tokenizer, read_rows(args.train_files), **limits)
    evaluates = args.val_before_train or args.test_freq > 0
    val_rows = encode_prompts(tokenizer, read_rows(args.val_files), **limits) if evaluates else []
    prompts_for_step(train_rows, 0, args.train_batch_size, args.seed)  # refuses a batch larger than the data
    check_context(args.model, args.max_prompt_length + args.max_response_length)
    if args.critic_model:
        check_critic(args.critic_model, tokenizer)
        check_context(args.critic_model, args.max_prompt_length + args.max_response_length)
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
    policy = fsdp.load_policy(args.model, d)
    if args.share_backbone:
        add_value_head(policy)
    policy = fsdp.shard(policy, d, **sharding)
    critic = (
        policy if args.share_backbone else fsdp.shard(load_critic(args.critic_model or args.model, d), d, **sharding)
    )
    reference = None
    if args.use_kl_loss or args.use_kl_in_reward:
        reference = fsdp.shard(fsdp.load_policy(args.model, d, dtype=d.dtype).requires_grad_(False), d, **sharding)
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
    if not args.share_backbone:
        critic_optimizer = torch.optim.AdamW(
            critic.parameters(), lr=args.critic_lr, weight_decay=args.weight_decay, fused=True
        )
        trained["critic"] = (critic, critic_optimizer)
    start = checkpoint.load(resume_from, trained) if resume_from else 0
    tracker = Tracker(run_dir, args, start, total_steps, enabled=d.is_main)
    memory_plan = rehearse(
        trained,
        max_tokens=args.ppo_max_token_len_per_gpu,
        max_length=args.max_prompt_length + args.max_response_length,
        engine_memory=engine.memory,
        d=d,
        frozen=reference,
        offloaded=("critic",) if args.critic_offload else (),
    )
    tracker.print(
        f"{run_dir}: {f'resumed from {resume_from}' if resume_from else 'new run'}, steps {start + 1}-{total_steps}, "
        f"{args.train_batch_size} prompts x {args.rollout_n} = {args.train_batch_size * args.rollout_n} responses and "
        f"{updates_per_step} update(s) a step, {d.world_size} rank(s), {len(train_rows)} prompts to draw from\n"
        f"{reward_check}\n{memory_plan}".rstrip()
    )
    saved = checkpoint.extra(resume_from)
    kl_coef = saved.get("kl_coef", args.kl_coef) if args.kl_ctrl_type == "adaptive" else args.kl_coef
    bring_back = []  # a critic that is on the host when the run is asked to stop
    if args.critic_offload:
        bring_back = [partial(backend.sleep, engine), partial(fsdp.onload, critic, d.device, critic_optimizer)]
    metrics, val_metrics, bad_updates_in_a_row = {}, {}, 0
    gc.freeze()  # garbage collections need not walk through what stays alive: nearly half a second each

    for step in range(start, total_steps + 1):  # the last round only evaluates
        clock = Timer(d.device)
        # Asked to stop, the run leaves at the next `stop.check` before this step's first update, and calls these.
        stop.arm(
            *bring_back,
            checkpoint.leaving(run, step, trained, extra={"kl_coef": kl_coef}),
            partial(tracker.close, 5.0),
        )

        # 1. Prompts: a pure function of (seed, step), so that a resumed run sees what the unbroken one would have seen.
        rows = prompts_for_step(train_rows, step, args.train_batch_size, args.seed)  # P

        # 2. Rollouts: push the policy into the engine, sample G responses per prompt, prove that both sides agree.
        if args.critic_offload:
            checkpoint.wait_until_copied(run)
            fsdp.offload(critic, critic_optimizer)
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
        seed = fold(args.seed, step, d.rank)
        own_samples = sample_groups(
            backend, engine, fsdp.own_slice(rows, d), sampling, seed=seed, on_group=scorer.submit
        )
        stop.check(d)
        clock("gen")
        backend.sleep(engine)
        if args.critic_offload:
            fsdp.onload(critic, d.device, critic_optimizer)
        verify_engine(policy, own_samples, temperature=args.temperature, limit=max_logprob_gap, d=d)
        clock("verify")

        # 3. Rewards: other processes have been scoring since the first responses were complete.
        own_scores = collect(own_samples, rows)
        # From here on every rank holds the whole step, and the text reads as if there were one rank.
        scored = fsdp.all_gather(zip(own_samples, own_scores, strict=True), d)
        samples, scores = zip(*scored, strict=True)  # B each
        stop_if_failing(scores, args.reward_max_error_frac)
        scores_B = torch.tensor([math.nan if s.value is None else s.value for s in scores])
        clock("reward")

        # 4. Batch: one row per response, planned into optimizer steps and this rank's memory-sized micro-batches.
        batch = collate(samples, pad_id=tokenizer.pad_token_id or 0)  # (B, T)
        taught = batch.response_mask * scores_B.isfinite().view(-1, 1)  # a response without a score teaches nothing
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

        # 5. Fixed values, of the critic that starts this step, and fixed log-probs, of the policy that starts it, for
        # the ratio, and of the reference, for the KL term.
        # Every rank has those of its own rows, and zeros in the others.
        own_micros = [micro_rows for _, micros in updates for micro_rows in micros]
        values = fixed_values(critic, batch, own_micros, device=d.device)  # zero in rows of other ranks
        batch = replace(batch, values=fsdp.all_reduce_sum(values))
        clock("values")
        if not on_policy or args.use_kl_in_reward:
            old_logp = fixed_logprobs(policy, batch, own_micros, temperature=args.temperature, device=d.device)
            batch = replace(batch, old_logp=old_logp)
            clock("old_log_prob")
        if reference is not None:
            ref_logp = fixed_logprobs(reference, batch, own_micros, temperature=args.temperature, device=d.device)
            batch = replace(batch, ref_logp=ref_logp)
            clock("ref")

        # === algorithm ================================================================================================
        # 6. Advantages: the score comes with the last token. How much better did it go, from each token on, than the
        # critic thought?
        is_last = (taught.cumsum(1) == taught.sum(1, keepdim=True)) & taught.bool()  # (B, T)
        rewards, reward_kl_metrics = torch.where(is_last, scores_B.view(-1, 1), 0.0), {}  # (B, T)
        if args.use_kl_in_reward:
            token_kl = losses.kl(batch.old_logp, batch.ref_logp, args.kl_penalty) * taught  # own rows only
            token_kl = fsdp.all_reduce_sum(token_kl)
            rewards = rewards - kl_coef * token_kl
            mean_kl = (token_kl.sum(1) / taught.sum(1).clamp(min=1))[scores_B.isfinite()].mean().nan_to_num().item()
            reward_kl_metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": kl_coef}
            if args.kl_ctrl_type == "adaptive":
                num_responses = int(scores_B.isfinite().sum())
                kl_coef = schedule.adaptive_kl_coef(
                    kl_coef, mean_kl, target=args.kl_target, horizon=args.kl_horizon, num_responses=num_responses
                )
        gae, returns = advantages.gae(rewards, batch.values, taught, gamma=args.gamma, lam=args.lam)  # (B, T)
        batch = replace(batch, advantages=advantages.whiten(gae, taught), returns=returns)
        clock("adv")

        # 7. Update: a mini-batch is one optimizer step; its micro-batches only bound the memory.
        learners = trained if step >= args.critic_warmup else {"critic": trained["critic"]}
        kind, warmup, late = args.lr_scheduler_type, args.lr_warmup_steps, args.critic_warmup
        lrs = {  # the actor's schedule begins when the actor does
            "actor": args.lr * schedule.lr_factor(kind, max(step - late, 0), warmup, total_steps - late),
            "critic": args.critic_lr * schedule.lr_factor(kind, step, warmup, total_steps),
        }
        for name, (_, its_optimizer) in learners.items():
            its_optimizer.param_groups[0]["lr"] = lrs[name]
        clip_ratios = {name: vars(args)[name] for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
        heads = dict(temperature=args.temperature, entropy_grad=args.entropy_coeff != 0)
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
                if args.share_backbone:
                    logp, entropy, values = token_logprobs_and_values(policy, micro, **heads)
                else:
                    values = token_values(critic, micro)
                vf_losses, vf_clipped = losses.value_loss(
                    values, micro.values, micro.returns, mask, cliprange_value=args.cliprange_value
                )
                vf_loss = losses.aggregate(vf_losses, mask, args.loss_agg_mode, **denominators)
                sums.add(vf_loss=vf_loss, vf_clipfrac=losses.masked_sum(vf_clipped, mask), tokens=mask.sum())
                if not args.share_backbone:
                    fsdp.last_micro_batch(critic, micro_rows is micros[-1])  # when copies of the model add up
                    vf_loss.backward()  # adds to the gradients, and sums them over ranks
                    if "actor" not in learners:
                        continue
                    logp, entropy = token_logprobs(policy, micro, **heads)
                old_logp = logp.detach() if on_policy else micro.old_logp
                pg_loss, clipped = losses.ppo_clip(logp, old_logp, micro.advantages, mask, **clip_ratios)
                if args.rollout_is != "none":  # the engine's policy is not quite the trainer's
                    pg_loss = pg_loss * losses.importance_weights(
                        old_logp, micro.rollout_logp, mask, level=args.rollout_is, cap=args.rollout_is_threshold
                    )
                objective = pg_loss - args.entropy_coeff * entropy
                if args.use_kl_loss:
                    kl = losses.kl(logp, micro.ref_logp, args.kl_loss_type)
                    objective = objective + args.kl_loss_coef * kl
                    sums.add(kl_loss=losses.aggregate(kl, mask, args.loss_agg_mode, **denominators))
                loss = losses.aggregate(objective, mask, args.loss_agg_mode, **denominators)
                if args.share_backbone:
                    loss = loss + args.value_loss_coef * vf_loss
                fsdp.last_micro_batch(policy, micro_rows is micros[-1])  # when copies of the model add up
                loss.backward()
                sums.add(
                    loss=loss,
                    pg_loss=losses.aggregate(pg_loss, mask, args.loss_agg_mode, **denominators),
                    entropy=losses.masked_sum(entropy, mask),
                    pg_clipfrac=losses.masked_sum(clipped, mask),
                    ppo_kl=losses.masked_sum(old_logp - logp, mask),
                    **gap_sums(micro.rollout_logp, old_logp, mask),
                )
                sums.add_max(gap_max=((micro.rollout_logp - old_logp).abs() * mask).max())
            norms = {name: fsdp.clip_grad_norm(module, args.grad_clip) for name, (module, _) in learners.items()}
            grad_norms.append(norms)
            usable = all(map(math.isfinite, norms.values())) and denominators["num_tokens"] > 0  # some have a score
            bad_updates_in_a_row = 0 if usable else bad_updates_in_a_row + 1
            if bad_updates_in_a_row == 3:
                raise RuntimeError(
                    f"step {step + 1}: three updates in a row were useless, the last one with gradient norms {norms} "
                    f"over {denominators['num_tokens']:.0f} tokens that have a reward; if a norm is not finite lower "
                    "--lr or --critic-lr, if there are no tokens mend the reward; the step's batch is in "
                    f"{checkpoint.save_batch(run, step + 1, batch)}"
                )
            for _, its_optimizer in learners.values():
                if usable:
                    its_optimizer.step()
                its_optimizer.zero_grad(set_to_none=True)
        clock("update_actor")
        # === end ======================================================================================================

        # 8. Report: losses are means over mini-batches, diagnostics means over all tokens of all ranks.
        s, times = sums.reduce(), clock.metrics()
        tokens = max(s["tokens"], 1.0)
        spread, rest = losses.masked_var(returns, taught), losses.masked_var(returns - batch.values, taught)
        explained_var = 1 - (rest / spread).item() if spread > 1e-8 else 0.0  # equal returns differ by rounding
        metrics = {
            **describe("critic/score", scores_B),
            **scoring_metrics(scores, [row["data_source"] for row in rows for _ in range(args.rollout_n)]),
            **describe("critic/rewards", rewards.sum(1)[scores_B.isfinite()]),
            **reward_kl_metrics,
            **describe("critic/advantages", batch.advantages[taught > 0]),
            **describe("critic/values", batch.values[taught > 0]),
            **describe("critic/returns", returns[taught > 0]),
            "critic/vf_explained_var": explained_var,
            "critic/vf_loss": s["vf_loss"] / updates_per_step,
            "critic/vf_clipfrac": s["vf_clipfrac"] / tokens,
            **rollout_metrics(samples),
            **{f"actor/{name}": s[name] / updates_per_step for name in ("loss", "pg_loss", "kl_loss") if name in s},
            **{f"actor/{name}": s[name] / tokens for name in ("entropy", "pg_clipfrac", "ppo_kl") if name in s},
            **{f"{name}/grad_norm": sum(norms[name] for norms in grad_norms) / len(grad_norms) for name in learners},
            "actor/skipped_updates": float(sum(not all(map(math.isfinite, norms.values())) for norms in grad_norms)),
            **{f"{name}/lr": lrs[name] for name in learners},
            **{name: s[key] / tokens for name, key in GAPS.items() if key in s},  # not in --critic-warmup
            "rollout/logprob_gap_max": s.get("gap_max", 0.0),
            **times,
            **throughput(samples, times, d),
            "checkpoint/failed": float(run.failures),
        }
        tracker.log(step + 1, metrics, progress_line(step + 1, total_steps, metrics))
        for alarm in alarms(metrics, args.alarms):
            tracker.print(f"ALARM at step {step + 1}: {alarm}")
        if args.log_samples_freq and step % args.log_samples_freq == 0:
            tracker.print(show_sample(tokenizer.decode(samples[0].prompt_ids), scores[0].text, scores[0].value))

        # 9. Checkpoint: weights, optimizers and the step; data order and seeds follow from the step.
        last = step + 1 == total_steps
        if args.save_freq != 0 and (last or (args.save_freq > 0 and (step + 1) % args.save_freq == 0)):
            checkpoint.save(run, step + 1, trained, extra={"kl_coef": kl_coef})  # goes on in the background

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

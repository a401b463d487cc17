"""GRPO: sample a group of responses for each prompt, score them, and push up those that beat their siblings.

    torchrun train_grpo.py --model Qwen/Qwen2.5-1.5B-Instruct                       # one GPU, GSM8K
    torchrun --nproc_per_node 8 train_grpo.py --model Qwen/Qwen2.5-7B-Instruct --tensor-model-parallel-size 2
    python train_grpo.py --model data/arithmetic/model --engine hf                  # a laptop, no vLLM

Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300) is PPO without a critic: the advantage of a response is
its reward relative to the other responses to the same prompt. Deviations from the paper, all of them common practice:
  1. token-mean loss over the whole mini-batch instead of a mean of sequence means (--loss-agg-mode; DAPO, arXiv 2503.14476);
  2. no KL term unless --use-kl-loss; 3. the standard deviation is unbiased; 4. dual clip for negative advantages (1912.09729).

Shapes: P prompts of a step, G responses per prompt, B = P * G sequences, T tokens, (b, t) one micro-batch of them.
Every per-token tensor is (B, T), and position t describes token t given the tokens before it. docs/train_grpo.md has the rest.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import tyro
from transformers import AutoTokenizer

from rl import advantages, checkpoint, losses, schedule
from rl.batching import collate, plan_micro_batches
from rl.data import encode_prompts, prompts_for_step, read_rows
from rl.engines import hf, vllm
from rl.fsdp import Dist, all_gather, clip_grad_norm, full_tensors, init_distributed, load_policy, own_slice, shard, shutdown_distributed
from rl.logprobs import fixed_logprobs, token_logprobs
from rl.metrics import Sums, Timer, describe, reward_metrics, rollout_metrics, throughput
from rl.rollout import fold, sample_groups, verify_engine
from rl.scoring import load_reward_function, score_samples
from rl.tracking import Backend, Tracker, progress_line, show_sample
from rl.types import Sampling, select

ENGINES = {"vllm": vllm, "hf": hf}
ADVANTAGES = {  # (rewards (P, G), lengths (P, G)) -> advantages (P, G)
    "grpo": advantages.grpo,
    "dr_grpo": lambda rewards, lengths: advantages.grpo(rewards, lengths, norm_by_std=False),
    "rloo": advantages.rloo,
    "opo": advantages.opo,
    "gpg": advantages.gpg,
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline,
}
LOSSES = {  # (logp, old_logp, advantages, mask, clip ratios) -> loss (b, t), clipped (b, t)
    "ppo_clip": losses.ppo_clip,
    "gspo": losses.gspo,
    "cispo": losses.cispo,
    "sapo": losses.sapo,
    "gmpo": losses.gmpo,
    "policy_gradient": losses.policy_gradient,
}


@dataclass(frozen=True)
class Args:
    # --- model
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"
    """Hugging Face id or folder of the policy to train; also the frozen reference if a KL term needs one."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you have read it."""

    # --- data
    train_files: tuple[str, ...] = ("data/gsm8k/train.parquet",)
    """Parquet or jsonl files in verl's schema: data_source, prompt, reward_model.ground_truth, extra_info."""
    val_files: tuple[str, ...] = ("data/gsm8k/test.parquet",)
    """Held-out files, same schema; used by --val-before-train and --test-freq."""
    train_batch_size: int = 128
    """Prompts a step (P). Responses a step are train_batch_size * rollout_n."""
    max_prompt_length: int = 512
    """Tokens. A longer prompt is an error unless --filter-overlong-prompts."""
    max_response_length: int = 1024
    """Tokens a response may have; longer ones are cut and counted in response_length/clip_ratio."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than --max-prompt-length, and say how many."""
    custom_reward_function: str = "rewards/gsm8k.py:compute_score"
    """path.py:function with verl's signature (data_source, solution_str, ground_truth, extra_info) -> float or dict with "score"."""

    # --- rollout
    engine: Literal["vllm", "hf"] = "vllm"
    """vllm in this process, or the slow and simple sampler of transformers."""
    rollout_n: int = 8
    """Responses per prompt (G). The group's mean is the baseline, so it must be at least 2 for most estimators."""
    temperature: float = 1.0
    """Sampling temperature; the trainer's log-probs are divided by it too."""
    tensor_model_parallel_size: int = 1
    """GPUs that share one vLLM engine. Raise it when the model does not fit on one."""
    gpu_memory_utilization: float = 0.5
    """Share of GPU memory vLLM may use for weights and KV cache while it generates."""
    max_num_seqs: int = 512
    """Sequences an engine decodes at a time. Lower it if the KV cache is small."""
    free_cache_engine: bool = True
    """Give vLLM's memory back during training (sleep level 2)."""
    enforce_eager: bool = False
    """Run vLLM without CUDA graphs: slower, starts faster."""
    max_logprob_gap: float | None = None
    """Stop if engine and trainer log-probs differ by more than this on average after a push. Default 1e-4 in fp32, 0.1 in bf16."""

    # --- algorithm
    adv_estimator: Literal["grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"] = "grpo"
    """How a response is compared with its group. dr_grpo is grpo without the division by the standard deviation."""
    loss_mode: Literal["ppo_clip", "gspo", "cispo", "sapo", "gmpo", "policy_gradient"] = "ppo_clip"
    """The surrogate. They differ only once a step makes several updates, except in clipping and weighting."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    """How token losses become one number. Dr. GRPO uses seq-mean-token-sum-norm, the GRPO paper seq-mean-token-mean."""
    loss_scale_factor: float | None = None
    """Divisor of seq-mean-token-sum-norm; default --max-response-length, a constant."""
    clip_ratio_low: float = 0.2
    """Lower clip: ratio >= 1 - this. GSPO wants about 3e-4."""
    clip_ratio_high: float = 0.2
    """Upper clip: ratio <= 1 + this. DAPO's clip-higher is 0.28; GSPO wants about 4e-4."""
    clip_ratio_c: float = 3.0
    """Dual clip: for negative advantages the loss is at most this many times the advantage."""
    ppo_mini_batch_size: int = 128
    """Prompts per optimizer step. Equal to --train-batch-size means strictly on policy: one update a step."""
    ppo_epochs: int = 1
    """Passes over a step's responses."""
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL(policy, reference) to the loss; loads a frozen reference."""
    kl_loss_coef: float = 0.001
    """Weight of the KL term."""
    kl_loss_type: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = "k3"
    """Estimator (Schulman 2020); k3 is verl's low_var_kl; a + takes the gradient of k2."""
    entropy_coeff: float = 0.0
    """Weight of an entropy bonus; 0 computes the entropy for the log only."""
    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Truncated importance weights for the gap between engine and trainer, per token or per sequence."""
    rollout_is_threshold: float = 2.0
    """Cap of those weights."""

    # --- optimizer
    lr: float = 1e-6
    """AdamW's learning rate after warm-up."""
    lr_warmup_steps: int = 0
    """Steps of linear warm-up."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """Shape of the learning rate after warm-up."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    total_epochs: int = 1
    """Passes over the training prompts; --total-training-steps overrides it."""
    total_training_steps: int | None = None
    """Steps to train; default from --total-epochs."""

    # --- memory (never changes the numbers)
    ppo_max_token_len_per_gpu: int = 16384
    """Tokens (prompt + response) in one micro-batch. Lower it if the update runs out of memory."""
    activation_checkpointing: Literal["none", "full"] = "full"
    """Recompute activations in the backward pass: about a quarter slower, several times less memory."""

    # --- evaluation
    val_before_train: bool = True
    """Evaluate the untrained policy first (step 0)."""
    test_freq: int = 10
    """Evaluate every this many steps and at the end; -1 never."""
    val_n: int = 1
    """Responses per held-out prompt."""
    val_temperature: float = 0.0
    """0 is greedy."""
    log_val_generations: int = 8
    """Held-out completions to record at each evaluation: generations.jsonl and the trackers."""

    # --- checkpoint
    default_local_dir: str = "runs/{project_name}/{experiment_name}"
    """Folder of checkpoints, metrics.jsonl and generations.jsonl."""
    save_freq: int = -1
    """Save every this many steps and at the end; -1 only at the end; 0 never."""
    max_ckpt_to_keep: int | None = None
    """Delete older checkpoints beyond this many."""
    resume_mode: str = "auto"
    """auto continues from the newest checkpoint in the folder; disable starts over; or a global_step_N folder."""

    # --- logging
    logger: tuple[Backend, ...] = ("console",)
    """Any of console, wandb, swanlab, tensorboard. metrics.jsonl is always written."""
    project_name: str = "glassrl"
    """Project in the trackers, and part of the folder."""
    experiment_name: str = "grpo"
    """Run in the trackers, and part of the folder."""
    log_samples_freq: int = 10
    """Print one prompt and response every this many steps; 0 never."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to train; auto takes CUDA if there is any."""
    seed: int = 0
    """Decides data order and sampling, together with the step."""


def validate(args: Args) -> None:
    """Refuse settings that contradict each other, naming the flag, the value and the fix."""
    for flag in ("train_batch_size", "ppo_mini_batch_size", "ppo_epochs", "rollout_n", "max_prompt_length", "max_response_length"):
        if vars(args)[flag] < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {vars(args)[flag]} must be at least 1")
    if args.ppo_mini_batch_size > args.train_batch_size:
        raise ValueError(f"--ppo-mini-batch-size {args.ppo_mini_batch_size} is larger than --train-batch-size {args.train_batch_size}")
    if args.ppo_max_token_len_per_gpu < args.max_prompt_length + args.max_response_length:
        raise ValueError(
            f"--ppo-max-token-len-per-gpu {args.ppo_max_token_len_per_gpu} cannot hold one sequence of --max-prompt-length "
            f"{args.max_prompt_length} + --max-response-length {args.max_response_length} tokens; raise it to their sum"
        )
    if args.temperature <= 0:
        raise ValueError(f"--temperature {args.temperature} must be positive: a greedy policy has no log-probs to train on")
    if args.loss_mode in ("gspo", "gmpo") and args.loss_agg_mode != "seq-mean-token-mean":
        raise ValueError(f"--loss-mode {args.loss_mode} is a mean over sequences; add --loss-agg-mode seq-mean-token-mean")


def evaluate(args: Args, backend, engine, rows: list[dict], tokenizer, compute_score, tracker: Tracker, step: int, d: Dist) -> dict[str, float]:
    """Score --val-n responses to every held-out prompt with the current weights. All ranks must enter."""
    sampling = Sampling(n=args.val_n, temperature=args.val_temperature, max_tokens=args.max_response_length)
    samples = sample_groups(backend, engine, own_slice(rows, d), sampling, seed=fold(args.seed, step, d.rank, 1))
    texts = tokenizer.batch_decode([s.response_ids for s in samples], skip_special_tokens=True)
    by_index = {row["row_index"]: row for row in rows}
    graded = all_gather(zip(samples, texts, score_samples(compute_score, samples, texts, by_index)), d)
    source_of = [by_index[sample.row_index]["data_source"] for sample, _, _ in graded]
    metrics = {"val/response_length": sum(len(s.response_ids) for s, _, _ in graded) / len(graded)}
    for source in sorted(set(source_of)):  # a response that could not be scored counts as wrong here
        scores = [score or 0.0 for (_, _, score), s in zip(graded, source_of) if s == source]
        metrics[f"val-core/{source}/reward/mean@{args.val_n}"] = sum(scores) / len(scores)
    metrics["val/accuracy"] = sum(score or 0.0 for _, _, score in graded) / len(graded)
    shown = [{"prompt": tokenizer.decode(s.prompt_ids), "response": t, "score": x} for s, t, x in graded[: args.log_val_generations]]
    tracker.log_generations(step, "val", shown)
    tracker.log(step, metrics, f"step {step} | held out: accuracy {metrics['val/accuracy']:.3f} on {len(rows)} prompts")
    return metrics


def main(args: Args) -> dict[str, float]:
    """Train with GRPO; returns the metrics of the last step and the last evaluation."""
    validate(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    limits = dict(max_prompt_length=args.max_prompt_length, filter_overlong_prompts=args.filter_overlong_prompts)
    train_rows = encode_prompts(tokenizer, read_rows(args.train_files), **limits)
    evaluates = args.val_before_train or args.test_freq > 0
    val_rows = encode_prompts(tokenizer, read_rows(args.val_files), **limits) if evaluates else []
    prompts_for_step(train_rows, 0, args.train_batch_size, args.seed)  # refuses a batch larger than the data
    compute_score = load_reward_function(args.custom_reward_function)
    rows_by_index = {row["row_index"]: row for row in train_rows}
    total_steps = args.total_training_steps or args.total_epochs * (len(train_rows) // args.train_batch_size)
    updates_per_step = args.ppo_epochs * -(-args.train_batch_size // args.ppo_mini_batch_size)
    on_policy = updates_per_step == 1  # then the policy that sampled is the policy being updated, and no pass for old_logp is needed

    d = init_distributed(args.device)
    max_logprob_gap = args.max_logprob_gap or (1e-4 if d.dtype == torch.float32 else 0.1)
    run_dir = args.default_local_dir.format(project_name=args.project_name, experiment_name=args.experiment_name)
    backend = ENGINES[args.engine]
    engine = backend.make_engine(
        args.model,
        d=d,
        dtype=d.dtype,
        max_model_len=args.max_prompt_length + args.max_response_length,
        max_num_seqs=args.max_num_seqs,
        gpu_memory_utilization=args.gpu_memory_utilization,
        tensor_parallel_size=args.tensor_model_parallel_size,
        seed=args.seed,
        free_cache_engine=args.free_cache_engine,
        enforce_eager=args.enforce_eager,
        trust_remote_code=args.trust_remote_code,
    )
    backend.sleep(engine)
    policy = load_policy(args.model, d, trust_remote_code=args.trust_remote_code)
    policy = shard(policy, d, gradient_checkpointing=args.activation_checkpointing == "full")
    reference = shard(load_policy(args.model, d).requires_grad_(False), d) if args.use_kl_loss else None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, betas=(0.9, 0.999), weight_decay=args.weight_decay, fused=True)
    resume_from = checkpoint.find(args.resume_mode, run_dir)
    start = checkpoint.load(resume_from, policy, optimizer) if resume_from else 0
    tracker = Tracker(run_dir, args, start, args.logger, args.project_name, args.experiment_name, enabled=d.is_main)
    tracker.print(
        f"{args.train_batch_size} prompts x {args.rollout_n} = {args.train_batch_size * args.rollout_n} responses a step, {updates_per_step} "
        f"update(s) a step, {d.world_size} rank(s), steps {start + 1}..{total_steps}, {len(train_rows)} prompts, {run_dir}"
    )
    metrics, val_metrics, skipped_in_a_row = {}, {}, 0

    for step in range(start, total_steps + 1):
        clock = Timer(d.device)

        # 1. Prompts: a pure function of (seed, step), so that a resumed run sees what the unbroken one would have seen.
        rows = prompts_for_step(train_rows, step, args.train_batch_size, args.seed)  # P

        # 2. Rollouts: push the policy into the engine, sample G responses per prompt, prove that both agree.
        backend.wake(engine)
        backend.update_weights(engine, full_tensors(policy, d.dtype))
        clock("update_weights")
        if (step == 0 and args.val_before_train) or (args.test_freq > 0 and step > 0 and (step % args.test_freq == 0 or step == total_steps)):
            val_metrics = evaluate(args, backend, engine, val_rows, tokenizer, compute_score, tracker, step, d)
            clock("testing")
        if step == total_steps:
            break  # this last round only evaluates
        sampling = Sampling(n=args.rollout_n, temperature=args.temperature, max_tokens=args.max_response_length)
        own_samples = sample_groups(backend, engine, own_slice(rows, d), sampling, seed=fold(args.seed, step, d.rank))
        backend.sleep(engine)
        clock("gen")
        verify_engine(policy, own_samples, temperature=args.temperature, limit=max_logprob_gap, d=d)
        clock("verify")

        # 3. Rewards. Every rank then holds the whole step, so the rest is written as if there were one.
        texts = tokenizer.batch_decode([s.response_ids for s in own_samples], skip_special_tokens=True)
        scores = score_samples(compute_score, own_samples, texts, rows_by_index)
        samples, texts, scores = zip(*all_gather(zip(own_samples, texts, scores), d))  # B each
        group_shape = (args.train_batch_size, args.rollout_n)
        rewards = torch.tensor([float("nan") if s is None else s for s in scores]).view(group_shape)  # (P, G); NaN: not scored
        lengths = torch.tensor([float(sum(s.response_mask)) for s in samples]).view(group_shape)  # (P, G)
        clock("reward")

        # 4. Batch: one row per response, planned into optimizer steps (mini) and memory-sized pieces (micro) of this rank.
        batch = collate(samples, pad_id=tokenizer.pad_token_id or 0)  # (B, T)
        batch = replace(batch, response_mask=batch.response_mask * rewards.isfinite().view(-1, 1))  # the unscored leave the loss
        mini_size = args.ppo_mini_batch_size * args.rollout_n
        minis = [range(i, min(i + mini_size, len(samples))) for i in range(0, len(samples), mini_size)]
        plans = [
            plan_micro_batches(batch.lengths.tolist(), mini, world_size=d.world_size, max_tokens=args.ppo_max_token_len_per_gpu)[d.rank]
            for mini in minis
        ]
        own_micros = [micro for plan in plans for micro in plan]

        # 5. Fixed log-probs: of the policy that starts this step, for the ratio, and of the reference, for the KL term.
        if not on_policy:
            batch = replace(batch, old_logp=fixed_logprobs(policy, batch, own_micros, temperature=args.temperature, device=d.device))
            clock("old_log_prob")
        if reference is not None:
            batch = replace(batch, ref_logp=fixed_logprobs(reference, batch, own_micros, temperature=args.temperature, device=d.device))
            clock("ref")

        # === algorithm ===============================================================================================
        # 6. Advantages: how much better than its siblings was each response? One number for all its tokens.
        advantages_PG = ADVANTAGES[args.adv_estimator](rewards, lengths)  # (P, G)
        batch = replace(batch, advantages=advantages_PG.view(-1, 1) * batch.response_mask)  # (B, T)
        clock("adv")

        # 7. Update: a mini-batch is one optimizer step; micro-batches only bound the memory, so its denominators come first.
        factor = schedule.constant_with_warmup(step, warmup_steps=args.lr_warmup_steps)
        if args.lr_scheduler_type == "cosine":
            factor = schedule.cosine_with_warmup(step, warmup_steps=args.lr_warmup_steps, total_steps=total_steps)
        optimizer.param_groups[0]["lr"] = args.lr * factor
        sums, grad_norms = Sums(d.device), []
        for mini, plan in [*zip(minis, plans)] * args.ppo_epochs:
            mask = batch.response_mask[mini.start : mini.stop]
            denominators = dict(
                num_tokens=mask.sum().item(),
                num_seqs=mask.any(1).sum().item(),
                scale=args.loss_scale_factor or args.max_response_length,
            )
            for micro_rows in plan:
                micro = select(batch, micro_rows, d.device)  # (b, t)
                mask = micro.response_mask
                logp, entropy = token_logprobs(policy, micro, temperature=args.temperature, entropy_grad=args.entropy_coeff != 0)
                old_logp = logp.detach() if on_policy else micro.old_logp
                pg_loss, clipped = LOSSES[args.loss_mode](
                    logp,
                    old_logp,
                    micro.advantages,
                    mask,
                    clip_ratio_low=args.clip_ratio_low,
                    clip_ratio_high=args.clip_ratio_high,
                    clip_ratio_c=args.clip_ratio_c,
                )
                if args.rollout_is != "none":
                    weights = losses.importance_weights(
                        old_logp, micro.rollout_logp, mask, level=args.rollout_is, cap=args.rollout_is_threshold
                    )
                    pg_loss = pg_loss * weights
                objective = pg_loss - args.entropy_coeff * entropy
                if reference is not None:
                    kl = losses.kl(logp, micro.ref_logp, args.kl_loss_type)
                    objective = objective + args.kl_loss_coef * kl
                    sums.add(kl_loss=losses.aggregate(kl, mask, args.loss_agg_mode, **denominators))
                loss = losses.aggregate(objective, mask, args.loss_agg_mode, **denominators)
                loss.backward()  # gradients add up over micro-batches and ranks: the denominators are the whole mini-batch's
                gap = (micro.rollout_logp - old_logp).abs() * mask
                sums.add(
                    loss=loss,
                    pg_loss=losses.aggregate(pg_loss, mask, args.loss_agg_mode, **denominators),
                    tokens=mask.sum(),
                    entropy=losses.masked_sum(entropy, mask),
                    pg_clipfrac=losses.masked_sum(clipped, mask),
                    ppo_kl=losses.masked_sum(old_logp - logp, mask),
                    rollout_kl=losses.masked_sum(micro.rollout_logp - old_logp, mask),
                    gap=gap.sum(),
                    probs_diff=((micro.rollout_logp.exp() - old_logp.exp()).abs() * mask).sum(),
                )
                sums.add_max(gap_max=gap.max())
            grad_norms.append(clip_grad_norm(policy, args.grad_clip))
            finite = torch.tensor(grad_norms[-1]).isfinite().item()
            skipped_in_a_row = 0 if finite else skipped_in_a_row + 1
            if finite:
                optimizer.step()
            elif skipped_in_a_row == 3:
                raise RuntimeError(f"step {step + 1}: the gradient norm was not finite three updates in a row; last norm {grad_norms[-1]}")
            optimizer.zero_grad(set_to_none=True)
        clock("update_actor")
        # === end =====================================================================================================

        # 8. Report: loss terms are sums of shares of global means; diagnostics are means over tokens of all ranks.
        s, times = sums.reduce(), clock.metrics()
        metrics = {
            **reward_metrics(rewards),
            **describe("critic/advantages", advantages_PG),
            **rollout_metrics(samples),
            "actor/loss": s["loss"] / updates_per_step,
            "actor/pg_loss": s["pg_loss"] / updates_per_step,
            "actor/entropy": s["entropy"] / s["tokens"],
            "actor/pg_clipfrac": s["pg_clipfrac"] / s["tokens"],
            "actor/ppo_kl": s["ppo_kl"] / s["tokens"],
            "actor/grad_norm": sum(grad_norms) / len(grad_norms),
            "actor/lr": args.lr * factor,
            "rollout/logprob_gap_mean": s["gap"] / s["tokens"],
            "rollout/logprob_gap_max": s["gap_max"],
            "rollout_corr/kl": s["rollout_kl"] / s["tokens"],
            "training/rollout_probs_diff_mean": s["probs_diff"] / s["tokens"],
            **({"actor/kl_loss": s["kl_loss"] / updates_per_step} if reference is not None else {}),
            **times,
            **throughput(samples, times, d),
        }
        tracker.log(step + 1, metrics, progress_line(step + 1, total_steps, metrics))
        if args.log_samples_freq and step % args.log_samples_freq == 0:
            tracker.print(show_sample(tokenizer.decode(samples[0].prompt_ids), texts[0], scores[0]))

        # 9. Checkpoint: weights, optimizer and the step; data order and seeds follow from the step.
        if args.save_freq and ((args.save_freq > 0 and (step + 1) % args.save_freq == 0) or step + 1 == total_steps):
            checkpoint.save(run_dir, step + 1, policy, optimizer, tokenizer, d, config=vars(args), max_to_keep=args.max_ckpt_to_keep)

    tracker.close()
    backend.close(engine)
    shutdown_distributed()
    return metrics | val_metrics


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""PRIME: GRPO's loop with a reward for every token, by a reward model that learns right from wrong beside the policy.

    torchrun train_prime.py --model Qwen/Qwen2.5-1.5B-Instruct                      # one GPU, GSM8K
    torchrun --nproc_per_node 8 train_prime.py --model Qwen/Qwen2.5-7B-Instruct --gen-batch-size 512 --prm-offload

Process Reinforcement through Implicit Rewards (PRIME, arXiv 2502.01456) trains a second language model, the implicit
process reward model (PRM), to tell right from wrong: beta times its log-ratio to a frozen reference, summed over the
tokens of a response, shall be the log-odds that it is right. That of a single token then is its reward, though nobody
has judged a step. The policy learns from these and from the outcome. Too easy and too hard prompts only fill up a step.

Deviations from the paper, those of verl's recipe/prime but for the second:
  1. token rewards and outcomes have weights, and their returns, sums to the end, are whitened over the step's tokens;
  2. token rewards are divided by the largest of their own returns on all ranks, not on one (--prime-norm);
  3. the last token has the outcome instead of a reward of its own;
  4. a token's reward counts n / (n - 1) times, and what is subtracted has the mean of its own response in it;
  5. the reward model learns from a step before it is asked about it (--prime-update).

Shapes: P prompts of a step, G responses to each, B = P * G of them, b of which this rank trains on; T tokens.
Every per-token tensor is (b, T), and position t describes token t given the tokens before it. See docs/train_prime.md.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from rl import flags
from rl.data.batching import Update, make_batch
from rl.data.order import derive_seed, prompts_for_step
from rl.data.prompts import load_prompts, sampling_of
from rl.data.types import Batch, take_rows
from rl.flags import Above1, AtLeast1, Count, Free, NotNegative, Positive, PositiveShare, Share, TopK
from rl.formulas import advantages, correction, implicit_reward, losses, schedule
from rl.model import load as models
from rl.model import sharding
from rl.model.checks import check_same_tokenizer, check_trainable
from rl.model.logprobs import fixed_logprobs, token_logprobs
from rl.model.lora import LoRA
from rl.run import metrics
from rl.run.run import Run
from rl.sampling import engines
from rl.sampling.evaluation import evaluate
from rl.sampling.rollout import accuracies_of, gather_responses, sample_groups, scores_of, verify_engine
from rl.scoring.pool import make_scorer, stop_if_failing


@dataclass(frozen=True)
class Args(flags.RL, correction.Correction, LoRA):
    experiment_name: str = "prime"  # run in the trackers, and part of the folder
    # metrics and limits; a step beyond one prints a line that begins with ALARM
    alarms: tuple[str, ...] = (
        "rollout/logprob_gap_mean>0.05",
        "reward/zero_std_frac>0.95",
        "response_length/clip_ratio>0.5",
        "actor/entropy<0.01",
    )

    # --- model and data
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # Hugging Face id or folder of the policy
    prm_model: str | None = None  # the reward model before training, and its reference; default: that of --model
    prm_offload: Free[bool] = False  # keep the reward model and its AdamW in host memory while the engine generates
    train_batch_size: AtLeast1 = 128  # prompts a step (P); responses a step are train_batch_size * rollout_n
    gen_batch_size: AtLeast1 | None = None  # prompts sampled a step, of which P are learned from; default P
    max_prompt_length: AtLeast1 = 512  # tokens; a longer prompt is an error unless --filter-overlong-prompts
    max_response_length: AtLeast1 = 1024  # tokens; longer ones are cut and counted in response_length/clip_ratio
    filter_overlong_prompts: bool = False  # drop prompts longer than --max-prompt-length
    seed: int = 0  # decides data order and sampling, together with the step

    # --- reward

    # file.py[:function[:weight]] ..., summed; verl's signature (data_source, solution_str, ground_truth, extra_info).
    # Default: rewards/by_data_source.py; no function if there is a --reward-model
    custom_reward_function: tuple[str, ...] | None = None
    reward_model: str | None = None  # a model of train_reward.py, by id or folder; its score joins the sum
    reward_model_coef: float = 1.0  # weight of that score
    reward_model_max_length: AtLeast1 = 4096  # tokens of prompt and response in its own template; longer lose the start

    # --- rollout
    engine: Literal["vllm", "hf"] = "vllm"  # vllm in this process, or the slow and simple sampler of transformers
    rollout_n: AtLeast1 = 8  # responses per prompt (G); the baseline of each is the mean of the others, so at least 2
    temperature: Positive = 1.0  # of sampling; the trainer divides its logits by it too
    top_p: PositiveShare = 1.0  # the fewest likeliest tokens that together have this probability, also in the trainer
    top_k: TopK = -1  # sample among the k likeliest tokens; -1 all
    min_p: Share = 0.0  # leave out tokens less than this times as likely as the likeliest

    # --- algorithm

    accuracy_lower_bound: Share = 0.2  # prompts whose mean accuracy is below are learned from only if others run out
    accuracy_upper_bound: Share = 0.8  # likewise above
    filter_truncate: bool = False  # likewise with a response that was cut
    prime_beta: Positive = 0.05  # how much a nat of log-ratio is worth
    prime_update: Literal["before", "after"] = "before"  # train the reward model before its rewards are used, or after
    prime_norm: Literal["batch_norm", "none"] = "batch_norm"  # divide token rewards by their largest sum to the end
    reward_dpo_coef: NotNegative = 5.0  # weight of the token rewards
    reward_gt_coef: NotNegative = 5.0  # weight of the outcome
    clip_ratio_low: NotNegative = 0.2  # ratio >= 1 - this
    clip_ratio_high: NotNegative = 0.2  # ratio <= 1 + this; DAPO's clip-higher is 0.28
    clip_ratio_c: Above1 = 3.0  # dual clip: a negative advantage's loss is at most this many times its size
    ppo_mini_batch_size: AtLeast1 | None = None  # prompts per optimizer step; default --train-batch-size: on policy
    ppo_epochs: AtLeast1 = 1  # passes over a step's responses
    entropy_coeff: float = 0.001  # weight of an entropy bonus; 0 computes the entropy for the log only

    # --- optimizer
    lr: NotNegative = 1e-6  # AdamW's learning rate after warm-up; LoRA wants about ten times that of full training
    prm_lr: NotNegative = 1e-6  # that of the reward model
    lr_warmup_steps: Count = 0  # steps of linear warm-up
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"  # shape of the learning rate after warm-up
    weight_decay: NotNegative = 0.01  # AdamW's decoupled weight decay
    grad_clip: Positive = 1.0  # largest global gradient norm


def validate(args: Args) -> None:
    """Refuse settings that contradict each other, naming the flag, the value and the fix."""
    flags.check(args)
    if args.rollout_n < 2:
        raise ValueError(f"--rollout-n {args.rollout_n} leaves no other response as a baseline; sample at least 2")
    if args.gen_batch_size is not None and args.gen_batch_size < args.train_batch_size:
        raise ValueError(
            f"--gen-batch-size {args.gen_batch_size} is less than --train-batch-size {args.train_batch_size}; raise it"
        )


def learn_rewards(
    args: Args, run: Run, batch: Batch, updates: list[Update], accuracies_B: torch.Tensor
) -> dict[str, float]:
    """Train the reward model on a step's responses, one optimizer step a mini-batch; returns metrics.

    Args: batch (b, T) with the log-probs of the reference; accuracies_B (B,), of all responses of the step.
    """
    (prm, optimizer), ranks, norms = run.trained["prm"], run.ranks, []
    means = metrics.Means(ranks, num_updates=len(updates))
    for update in updates:
        for micro_rows in update.micro_batches:
            run.leave_if_asked()
            micro = take_rows(batch, micro_rows, ranks.device)  # (b', t)
            logp, _ = token_logprobs(prm, micro)
            log_ratios = (logp - micro.ref_logp).sum(1)[: len(micro_rows)]  # (b',), no empty row of an idle rank
            right = accuracies_B[micro_rows].to(ranks.device)
            learned = right.isfinite()  # those with a score
            loss = implicit_reward.cross_entropy(log_ratios[learned], right[learned], beta=args.prime_beta).sum()
            loss = loss / max(update.num_seqs, 1)
            sharding.last_micro_batch(prm, micro_rows is update.micro_batches[-1])  # the last syncs copies
            loss.backward()  # adds to the gradients, and sums them over ranks
            means.over_updates({"reward_model/dpo_loss": loss})
        norms.append({"reward_model": sharding.clip_grad_norm(prm, args.grad_clip)})
        if run.is_usable(norms[-1], update.num_tokens, batch):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return means.reduce() | {"reward_model/grad_norm": metrics.of_norms(norms)["reward_model/grad_norm"]}


def main(args: Args) -> dict[str, float]:
    """Train with PRIME; returns the metrics of the last step and of the last evaluation."""
    # Everything a user can get wrong is refused here, before a model is loaded.
    validate(args)
    tokenizer, train_rows, val_rows = load_prompts(args)
    prm_path = args.prm_model or args.model
    check_same_tokenizer(tokenizer, prm_path, flag="--prm-model", model=args.model)
    check_trainable(prm_path, args.max_prompt_length + args.max_response_length, flag="--prm-model")
    models.check_lora(args, prm_path, flag="--prm-model" if args.prm_model else "--model")
    scorer = make_scorer(args, tokenizer, train_rows + val_rows)
    sampling = sampling_of(args, tokenizer)
    gen_batch_size = args.gen_batch_size or args.train_batch_size  # prompts
    prompts_for_step(train_rows, 0, gen_batch_size, args.seed, flag="--gen-batch-size")  # refuses more than there are
    total_steps = args.total_training_steps or args.total_epochs * (len(train_rows) // gen_batch_size)
    mini_batch_size = args.ppo_mini_batch_size or args.train_batch_size  # prompts
    updates_per_step = args.ppo_epochs * math.ceil(args.train_batch_size / mini_batch_size)
    on_policy = updates_per_step == 1  # the policy that sampled is the one being updated: old_logp costs no extra pass

    run = Run(args, tokenizer, total_steps)
    ranks = run.ranks
    policy = models.load_policy(args, ranks)
    engine = engines.make_engine(args, ranks)
    prm = models.load_policy(replace(args, model=prm_path), ranks)
    reference = models.load_reference(replace(args, model=prm_path), ranks, prm)
    scorer.add_reward_model(args, ranks)
    adamw = partial(torch.optim.AdamW, lr=args.lr, weight_decay=args.weight_decay, fused=True)
    optimizer, prm_optimizer = adamw(policy.parameters()), adamw(prm.parameters())
    run.resume(
        {"actor": (policy, optimizer), "prm": (prm, prm_optimizer)},
        about=f"{args.train_batch_size} of {gen_batch_size} prompts x {args.rollout_n} responses and "
        f"{updates_per_step} update(s) a step, {len(train_rows)} prompts to draw from\n{scorer.report}",
        engine=engine,
        offloaded=("prm",) if args.prm_offload else (),
    )
    step_metrics, val_metrics = {}, {}

    for step in range(run.start, total_steps + 1):  # the last round only evaluates
        # Saves what `step` steps have made, if a save is due. A run that is asked to stop saves it too and ends, at a
        # call of the clock or of leave_if_asked. Once an optimizer step has been made, it ends after the step.
        clock = run.begin(step, state={})

        # 1. Prompts: a pure function of (seed, step), so that a resumed run sees what the unbroken one would have seen.
        rows = prompts_for_step(train_rows, step, gen_batch_size, args.seed)

        # 2. Rollouts: push the policy into the engine, sample G responses per prompt, prove that both sides agree.
        run.offload()  # the reward model, if --prm-offload
        engine.wake()
        engine.update_weights(models.weights_for_engine(policy, ranks))
        clock("update_weights")
        if run.evaluation_is_due(step):
            val_metrics = run.log_evaluation(step, *evaluate(args, engine, scorer, val_rows, sampling, ranks))
            clock("testing")
        if step == total_steps:
            break
        own_rows, seed = (
            ranks.own_slice(rows),
            derive_seed(args.seed, step, engine.first_rank),
        )
        own_samples, tickets = sample_groups(engine, own_rows, sampling, seed=seed, on_group=scorer.submit)
        clock("gen")
        engine.sleep()
        run.onload()
        verify_engine(policy, own_samples, sampling=sampling, limit=args.max_logprob_gap, ranks=ranks)
        clock("verify")

        # 3. Rewards: other processes have been scoring since the first responses were complete. Then all ranks get the
        # scores and lengths of the whole step; the tokens stay where they are until one rank trains on them.
        own_scores = scorer.collect(tickets)
        sampled = gather_responses(own_samples, own_scores, rows, ranks)
        stop_if_failing(sampled, args.reward_max_error_frac)
        clock("reward")

        # 4. Batch: P of the prompts, those that are neither too easy nor too hard first. Plan optimizer steps and the
        # micro-batches of every rank, and send each rank the tokens of its own.
        groups = [sampled[i : i + args.rollout_n] for i in range(0, len(sampled), args.rollout_n)]
        bounds = dict(low=args.accuracy_lower_bound, high=args.accuracy_upper_bound)
        informative = implicit_reward.informative(accuracies_of(sampled).view(-1, args.rollout_n), **bounds).tolist()
        cut = [args.filter_truncate and any(r.finish_reason == "length" for r in group) for group in groups]
        order = sorted(range(len(groups)), key=lambda p: cut[p] or not informative[p])  # False comes first
        responses = [r for p in order[: args.train_batch_size] for r in groups[p]]  # B
        scores_PG = scores_of(responses).view(-1, args.rollout_n)  # NaN for a response without a score
        accuracies_PG = accuracies_of(responses).view(-1, args.rollout_n)
        batch, updates = make_batch(
            responses,
            learn=scores_PG.isfinite().flatten(),  # a response without a score teaches nothing
            mini_batch_size=mini_batch_size * args.rollout_n,
            max_tokens=args.ppo_max_token_len_per_gpu,
            pad_id=tokenizer.pad_token_id or 0,
            ranks=ranks,
        )  # (b, T)
        clock("batch")

        # 5. Fixed log-probs, without gradients: of the policy that starts this step, for the ratio in phase 7, and of
        # the reward model and its reference. The reward model learns before it is asked, or else after the policy.
        if not on_policy:
            batch = replace(batch, old_logp=fixed_logprobs(policy, batch, updates, sampling=sampling))
            clock("old_log_prob")
        batch = replace(batch, ref_logp=fixed_logprobs(reference, batch, updates))
        clock("ref")
        lr_factor = schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, total_steps)
        optimizer.param_groups[0]["lr"] = args.lr * lr_factor
        prm_optimizer.param_groups[0]["lr"] = args.prm_lr * lr_factor
        if args.prime_update == "before":
            prm_metrics = learn_rewards(args, run, batch, updates, accuracies_PG.flatten())
        prm_logp = fixed_logprobs(prm, batch, updates)  # (b, T)
        clock("prm")

        # === algorithm ================================================================================================
        # 6. Advantages: each token has a reward of its own, and the last one that of the outcome. Both are compared
        # with the other responses to the prompt, and then summed from each token to the end.
        mask = batch.response_mask  # (b, T)
        rewards = implicit_reward.token_rewards(prm_logp, batch.ref_logp, mask, beta=args.prime_beta)  # (b, T)
        if args.prime_norm == "batch_norm":
            rewards = rewards / (ranks.all_reduce_max(implicit_reward.largest_sum(rewards)) + 1e-6)
        own_means = rewards.sum(1) / mask.sum(1).clamp(min=1)  # (b,)
        means_PG = ranks.all_rows(own_means, batch.rows, len(responses)).view(-1, args.rollout_n)
        factor_PG, baseline_PG = implicit_reward.leave_one_out(means_PG.where(scores_PG.isfinite(), math.nan))
        process = rewards * factor_PG.view(-1, 1)[batch.rows] - baseline_PG.view(-1, 1)[batch.rows]  # (b, T)
        outcome_PG = advantages.rloo(scores_PG, scores_PG)
        is_last = (mask.cumsum(1) == mask.sum(1, keepdim=True)) & mask.bool()
        outcome = torch.where(is_last, outcome_PG.view(-1, 1)[batch.rows], 0.0)  # (b, T)
        total = args.reward_dpo_coef * process + args.reward_gt_coef * outcome
        returns = advantages.returns_to_go(total, mask, gamma=1.0)
        mean, var = ranks.moments(returns, mask)  # over all tokens of the step, on all ranks
        batch = replace(batch, advantages=advantages.whiten(returns, mask, mean=mean, var=var))
        clock("adv")

        # 7. Update: a mini-batch is one optimizer step; its micro-batches only bound the memory.
        clips = dict(
            clip_ratio_low=args.clip_ratio_low, clip_ratio_high=args.clip_ratio_high, clip_ratio_c=args.clip_ratio_c
        )
        means, norms = metrics.Means(ranks, num_updates=updates_per_step), []
        for update in updates * args.ppo_epochs:
            # Denominators of the whole mini-batch, on all ranks: gradients of micro-batches and ranks simply add up.
            sizes = dict(num_tokens=update.num_tokens, num_seqs=update.num_seqs)
            aggregate = partial(losses.aggregate, mode="token-mean", **sizes)
            for micro_rows in update.micro_batches:
                run.leave_if_asked()
                micro = take_rows(batch, micro_rows, ranks.device)  # (b', t)
                mask = micro.response_mask
                logp, entropy = token_logprobs(policy, micro, sampling=sampling, entropy_grad=args.entropy_coeff != 0)
                old_logp = logp.detach() if on_policy else micro.old_logp
                pg_loss, clipped = losses.ppo_clip(logp, old_logp, micro.advantages, mask, **clips)
                weights = correction.weights(args, logp, old_logp, micro.rollout_logp, micro.advantages, mask)
                pg_loss = pg_loss * weights  # the policy that sampled is not quite the one that learns
                loss = aggregate(pg_loss - args.entropy_coeff * entropy, mask)
                sharding.last_micro_batch(policy, micro_rows is update.micro_batches[-1])  # the last syncs copies
                loss.backward()  # adds to the gradients, and sums them over ranks
                means.over_updates({"actor/loss": loss, "actor/pg_loss": aggregate(pg_loss, mask)})
                means.over_tokens(mask, {"actor/entropy": entropy, "actor/pg_clipfrac": clipped})
                means.between_policies(mask, logp, old_logp, micro.rollout_logp, weights)
            norms.append({"actor": sharding.clip_grad_norm(policy, args.grad_clip)})
            if run.is_usable(norms[-1], update.num_tokens, batch):  # raises at the third in a row that is not
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        clock("update_actor")
        if args.prime_update == "after":
            prm_metrics = learn_rewards(args, run, batch, updates, accuracies_PG.flatten())
            clock("prm")
        # === end ======================================================================================================

        # 8. Report: losses are means over updates, diagnostics means over all tokens of all ranks.
        log_ratios_B = ranks.all_rows((prm_logp - batch.ref_logp).sum(1), batch.rows, len(responses))
        process_B = ranks.all_rows(rewards.sum(1), batch.rows, len(responses))
        found = {
            **metrics.of_sampled(sampled, rows, args.rollout_n),
            **metrics.describe_tokens("critic/advantages", batch.advantages, batch.response_mask, ranks),
            **metrics.of_norms(norms),
            **prm_metrics,
            **means.reduce(),
            **metrics.of_implicit_rewards(process_B, log_ratios_B, accuracies_PG),
            "train/informative_prompts": float(sum(informative)),
            "actor/lr": args.lr * lr_factor,
            "reward_model/lr": args.prm_lr * lr_factor,
        }
        generated = sum(r.response_length for r in sampled)
        step_metrics = run.log_step(step + 1, found, tokens=sum(r.num_tokens for r in responses), generated=generated)
        run.show_sample(own_samples, own_scores)
        # 9. Checkpoint: weights, optimizer and state are saved by the next round's `begin`.

    run.close(scorer, engine)
    return step_metrics | val_metrics


if __name__ == "__main__":
    main(flags.parse(Args, __doc__))

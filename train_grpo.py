"""GRPO: sample a group of responses to each prompt, score them, and make those likelier that beat their group.

    torchrun train_grpo.py --model Qwen/Qwen2.5-1.5B-Instruct                       # one GPU, GSM8K
    torchrun --nproc_per_node 8 train_grpo.py --model Qwen/Qwen2.5-7B-Instruct --tensor-model-parallel-size 2
    make demo                                                                       # a laptop: see benchmarks/demo.py

Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300) is PPO without a critic, a second model that would
guess how good a response is going to be. Instead, the policy (the model that learns) answers each prompt several times.
These responses are a *group*, and the *advantage* of one is how much better its reward is than those of its group. The
policy is then changed so that responses with a positive advantage become likelier, the others less likely.

Deviations from the paper, all common practice:
  1. token-mean loss over the mini-batch, not a mean of sequence means (--loss-agg-mode; DAPO, arXiv 2503.14476);
  2. no KL term unless --use-kl-loss;  3. the standard deviation is unbiased (ddof 1: divided by the count less one);
  4. dual clip: the loss of a negative advantage is bounded (--clip-ratio-c; arXiv 1912.09729).

Shapes: P prompts of a step, G responses to each, B = P * G of them, b of which this rank trains on; T tokens.
Every per-token tensor is (b, T), and position t describes token t given the tokens before it. See docs/train_grpo.md.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from rl import flags
from rl.data import token_selection
from rl.data.batching import make_batch
from rl.data.order import derive_seed, prompts_for_step
from rl.data.prompts import load_prompts, sampling_of
from rl.data.types import take_rows
from rl.flags import Above1, AtLeast1, Count, NotNegative, Positive, PositiveShare, Share, TopK
from rl.formulas import advantages, correction, losses, schedule
from rl.model import load as models
from rl.model import lora, sharding
from rl.model.logprobs import fixed_entropies, fixed_logprobs, token_logprobs
from rl.run import metrics
from rl.run.run import Run
from rl.sampling import engines
from rl.sampling.evaluation import evaluate
from rl.sampling.rollout import gather_responses, lengths_of, parts_of, sample_groups, scores_of, verify_engine
from rl.scoring.pool import make_scorer, stop_if_failing

ADVANTAGES = {  # (rewards (P, G), lengths (P, G), others by name) -> advantages (P, G)
    "grpo": advantages.grpo,
    "dr_grpo": lambda rewards, lengths, **_: advantages.grpo(rewards, lengths, norm_by_std=False),
    "grpo_batch": advantages.grpo_batch,
    "grpo_passk": advantages.grpo_passk,
    "max_rl": advantages.max_rl,
    "rloo": advantages.rloo,
    "opo": advantages.opo,
    "gpg": advantages.gpg,
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline,
    "gdpo": advantages.gdpo,  # which compares each of the K parts of the rewards instead
}
LOSSES = {  # (logp, old_logp, advantages, mask, others by name) -> loss (b, t), clipped (b, t)
    "ppo_clip": losses.ppo_clip,
    "dppo_tv": losses.dppo_tv,
    "dppo_kl": losses.dppo_kl,
    "gspo": losses.gspo,
    "luspo": losses.gspo,  # with another mean: see AGGREGATIONS
    "cispo": losses.cispo,
    "sapo": losses.sapo,
    "gmpo": losses.gmpo,
    "clip_cov": losses.clip_cov,  # which treats some tokens differently: see the end of phase 6
    "kl_cov": losses.kl_cov,
    "policy_gradient": losses.policy_gradient,
}
AGGREGATIONS = {"gspo": "seq-mean-token-mean", "luspo": "seq-mean-token-sum", "gmpo": "seq-mean-token-mean"}


@dataclass(frozen=True)
class Args(flags.RL, correction.Correction, token_selection.Choice, lora.LoRA):
    experiment_name: str = "grpo"  # run in the trackers, and part of the folder
    # metrics and limits; a step beyond one prints a line that begins with ALARM
    alarms: tuple[str, ...] = (
        "rollout/logprob_gap_mean>0.05",
        "reward/zero_std_frac>0.95",
        "response_length/clip_ratio>0.5",
        "actor/entropy<0.01",
    )

    # --- model and data
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # Hugging Face id or folder of the policy, and of the reference for KL
    train_batch_size: AtLeast1 = 128  # prompts a step (P); responses a step are train_batch_size * rollout_n
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
    rollout_n: AtLeast1 = 8  # responses per prompt (G); their mean is the baseline; with 1 there is none
    temperature: Positive = 1.0  # of sampling; the trainer divides its logits by it too
    top_p: PositiveShare = 1.0  # the fewest likeliest tokens that together have this probability, also in the trainer
    top_k: TopK = -1  # sample among the k likeliest tokens; -1 all
    min_p: Share = 0.0  # leave out tokens less than this times as likely as the likeliest

    # --- algorithm
    adv_estimator: Literal[*ADVANTAGES] = "grpo"  # how a response is compared with its group
    gdpo_reward_keys: tuple[str, ...] = ()  # components of the score that gdpo compares, each by itself
    gdpo_reward_weights: tuple[float, ...] = ()  # their weights; default: 1 each
    loss_mode: Literal[*LOSSES] = "ppo_clip"  # the surrogate
    tau_pos: Positive = 1.0  # of sapo: how fast the gate closes where the advantage is positive
    tau_neg: Positive = 1.05  # the same where it is negative
    # how token losses become one number; Dr. GRPO: seq-mean-token-sum-norm, the GRPO paper: seq-mean-token-mean
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    loss_scale_factor: Positive | None = None  # divisor of seq-mean-token-sum-norm; default --max-response-length
    clip_ratio_low: NotNegative = 0.2  # ratio >= 1 - this; GSPO wants about 3e-4
    clip_ratio_high: NotNegative = 0.2  # ratio <= 1 + this; DAPO's clip-higher is 0.28, GSPO wants about 4e-4
    clip_ratio_c: Above1 = 3.0  # dual clip: a negative advantage's loss is at most this many times its size
    ppo_mini_batch_size: AtLeast1 | None = None  # prompts per optimizer step; default --train-batch-size: on policy
    ppo_epochs: AtLeast1 = 1  # passes over a step's responses
    entropy_coeff: float = 0.0  # weight of an entropy bonus; 0 computes the entropy for the log only

    # --- KL to the reference, which is --model before training
    use_kl_loss: bool = False  # add kl_loss_coef * KL(policy, reference) to the loss; loads a frozen reference
    kl_loss_coef: float = 0.001  # weight of that KL term
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+", "unbiased"] = "k3"  # "+": gradient of k2
    ref_update_steps: AtLeast1 | None = None  # make the policy the new reference every so many steps; default: never
    use_kl_in_reward: bool = False  # subtract kl_coef * KL(policy, reference), summed over the response
    kl_coef: float = 0.001  # weight of that KL; where it starts if --kl-ctrl-type adaptive
    kl_penalty: Literal["k1", "k2", "k3", "low_var_kl", "abs"] = "k1"  # its estimator, per token
    kl_ctrl_type: Literal["fixed", "adaptive"] = "fixed"  # adaptive: steer kl_coef towards --kl-target
    kl_target: Positive = 0.1  # KL a token that the adaptive controller aims at
    kl_horizon: AtLeast1 = 10_000  # responses; the larger, the slower kl_coef moves

    # --- optimizer
    lr: NotNegative = 1e-6  # AdamW's learning rate after warm-up; LoRA wants about ten times that of full training
    lr_warmup_steps: Count = 0  # steps of linear warm-up
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"  # shape of the learning rate after warm-up
    weight_decay: NotNegative = 0.01  # AdamW's decoupled weight decay
    grad_clip: Positive = 1.0  # largest global gradient norm


def validate(args: Args) -> None:
    """Refuse settings that contradict each other, naming the flag, the value and the fix."""
    flags.check(args)
    if args.loss_agg_mode != (mean := AGGREGATIONS.get(args.loss_mode, args.loss_agg_mode)):
        raise ValueError(f"--loss-mode {args.loss_mode} needs --loss-agg-mode {mean}, its paper's mean")
    keys, weights = args.gdpo_reward_keys, args.gdpo_reward_weights
    if (args.adv_estimator == "gdpo") != bool(keys) or len(weights) not in (0, len(keys)):
        raise ValueError(f"--gdpo-reward-keys {keys} are for --adv-estimator gdpo, with a weight for each or for none")
    if keys and args.use_kl_in_reward:
        raise ValueError("--use-kl-in-reward is no part of what gdpo compares; use --use-kl-loss")


def main(args: Args) -> dict[str, float]:
    """Train with GRPO; returns the metrics of the last step and of the last evaluation."""
    # Everything a user can get wrong is refused here, before a model is loaded.
    validate(args)
    tokenizer, train_rows, val_rows = load_prompts(args)
    scorer = make_scorer(args, tokenizer, train_rows + val_rows)
    sampling = sampling_of(args, tokenizer)
    total_steps = args.total_training_steps or args.total_epochs * (len(train_rows) // args.train_batch_size)
    mini_batch_size = args.ppo_mini_batch_size or args.train_batch_size  # prompts
    updates_per_step = args.ppo_epochs * math.ceil(args.train_batch_size / mini_batch_size)
    on_policy = updates_per_step == 1  # the policy that sampled is the one being updated: old_logp costs no extra pass

    run = Run(args, tokenizer, total_steps)
    ranks = run.ranks
    policy = models.load_policy(args, ranks)
    engine = engines.make_engine(args, ranks)
    reference = models.load_reference(args, ranks, policy) if args.use_kl_loss or args.use_kl_in_reward else None
    scorer.add_reward_model(args, ranks)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    refreshed = {"reference": (reference, None)} if args.ref_update_steps else {}  # part of checkpoints, if it changes
    run.resume(
        {"actor": (policy, optimizer), **refreshed},
        about=f"{args.train_batch_size} prompts x {args.rollout_n} responses and {updates_per_step} update(s) a step, "
        f"{len(train_rows)} prompts to draw from\n{scorer.report}",
        engine=engine,
    )
    kl_coef = run.state["kl_coef"] if run.state and args.kl_ctrl_type == "adaptive" else args.kl_coef
    step_metrics, val_metrics = {}, {}

    for step in range(run.start, total_steps + 1):  # the last round only evaluates
        # Saves what `step` steps have made, if a save is due. A run that is asked to stop saves it too and ends, at a
        # call of the clock or of leave_if_asked. Once an optimizer step has been made, it ends after the step.
        clock = run.begin(step, state={"kl_coef": kl_coef})

        # 1. Prompts: a pure function of (seed, step), so that a resumed run sees what the unbroken one would have seen.
        rows = prompts_for_step(train_rows, step, args.train_batch_size, args.seed)  # P

        # 2. Rollouts: push the policy into the engine, sample G responses per prompt, prove that both sides agree.
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
        verify_engine(policy, own_samples, sampling=sampling, limit=args.max_logprob_gap, ranks=ranks)
        clock("verify")

        # 3. Rewards: other processes have been scoring since the first responses were complete. Then all ranks get the
        # scores and lengths of the whole step; the tokens stay where they are until one rank trains on them.
        own_scores = scorer.collect(tickets)
        responses = gather_responses(own_samples, own_scores, rows, ranks)  # B
        stop_if_failing(responses, args.reward_max_error_frac)
        scores_PG = scores_of(responses).view(-1, args.rollout_n)  # NaN for a response without a score
        lengths_PG = lengths_of(responses).view(-1, args.rollout_n)
        clock("reward")

        # 4. Batch: plan optimizer steps and the micro-batches of every rank, and send each rank the tokens of its own.
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
        # the reference, for the KL terms: they measure how far the policy has moved away from it.
        if not on_policy or args.use_kl_in_reward or args.loss_mode in token_selection.RULES:
            batch = replace(batch, old_logp=fixed_logprobs(policy, batch, updates, sampling=sampling))
            clock("old_log_prob")
        if reference is not None:
            if args.ref_update_steps and step > 0 and step % args.ref_update_steps == 0:
                run.refresh(reference, policy)
            batch = replace(batch, ref_logp=fixed_logprobs(reference, batch, updates, sampling=sampling))
            clock("ref")

        # === algorithm ================================================================================================
        # 6. Advantages: how much better than its group was each response? One number for all its tokens.
        rewards, kl_metrics = scores_PG, {}  # (P, G)
        if args.use_kl_in_reward:
            token_kl = losses.kl(batch.old_logp, batch.ref_logp, args.kl_penalty) * batch.response_mask  # (b, T)
            reward_kl = ranks.all_rows(token_kl.sum(1), batch.rows, len(responses)).view(-1, args.rollout_n)  # (P, G)
            rewards = scores_PG - kl_coef * reward_kl
            mean_kl = (reward_kl / lengths_PG.clamp(min=1))[rewards.isfinite()].mean().nan_to_num().item()  # of a token
            kl_metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": kl_coef}
            if args.kl_ctrl_type == "adaptive":
                num_responses = int(rewards.isfinite().sum())
                kl_coef = schedule.adaptive_kl_coef(
                    kl_coef, mean_kl, target=args.kl_target, horizon=args.kl_horizon, num_responses=num_responses
                )
        parts = parts_of(responses, args.gdpo_reward_keys).unflatten(1, scores_PG.shape)  # (K, P, G)
        of_parts = dict(parts=parts, weights=args.gdpo_reward_weights)  # which gdpo alone looks at
        advantages_PG = ADVANTAGES[args.adv_estimator](rewards, lengths_PG, **of_parts)  # (P, G)
        batch = replace(batch, advantages=advantages_PG.view(-1, 1)[batch.rows] * batch.response_mask)  # (b, T)
        # Leave out tokens for --top-entropy-quantile; choose those that clip_cov and kl_cov treat differently.
        entropies = partial(fixed_entropies, policy, sampling=sampling)
        batch = token_selection.choose(
            args, args.loss_mode, batch, updates, entropies, seed=derive_seed(args.seed, step), ranks=ranks
        )
        clock("adv")

        # 7. Update: a mini-batch is one optimizer step; its micro-batches only bound the memory. The loss of a token,
        # the surrogate, is -advantage * ratio; the ratio is the token's probability now over that when the step began.
        # It begins at 1, where its gradient is that of the log-prob. A token whose ratio has left the range that the
        # clip ratios allow is not pushed further. With one update a step, "on policy", nothing is ever clipped.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, total_steps)
        optimizer.param_groups[0]["lr"] = lr
        clips = dict(
            clip_ratio_low=args.clip_ratio_low, clip_ratio_high=args.clip_ratio_high, clip_ratio_c=args.clip_ratio_c
        )
        numbers = dict(**clips, tau_pos=args.tau_pos, tau_neg=args.tau_neg, ppo_kl_coef=args.ppo_kl_coef)
        scale = args.loss_scale_factor or args.max_response_length
        means, norms = metrics.Means(ranks, num_updates=updates_per_step), []
        for update in updates * args.ppo_epochs:
            # Denominators of the whole mini-batch, on all ranks: gradients of micro-batches and ranks simply add up.
            denominators = dict(num_tokens=update.num_tokens, num_seqs=update.num_seqs, scale=scale)
            aggregate = partial(losses.aggregate, mode=args.loss_agg_mode, **denominators)
            for micro_rows in update.micro_batches:
                run.leave_if_asked()
                micro = take_rows(batch, micro_rows, ranks.device)  # (b', t)
                mask = micro.response_mask
                logp, entropy = token_logprobs(policy, micro, sampling=sampling, entropy_grad=args.entropy_coeff != 0)
                old_logp = logp.detach() if on_policy else micro.old_logp
                inputs = logp, old_logp, micro.advantages, mask  # a loss takes what it needs of the others
                pg_loss, clipped = LOSSES[args.loss_mode](*inputs, chosen=micro.chosen, **numbers)
                weights = correction.weights(args, logp, old_logp, micro.rollout_logp, micro.advantages, mask)
                pg_loss = pg_loss * weights  # the policy that sampled is not quite the one that learns
                objective = pg_loss - args.entropy_coeff * entropy
                if args.use_kl_loss:
                    kl = losses.kl(logp, micro.ref_logp, args.kl_loss_type, old_logp=old_logp)
                    objective = objective + args.kl_loss_coef * kl
                    means.over_updates({"actor/kl_loss": aggregate(kl, mask)})
                loss = aggregate(objective, mask)
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
        # === end ======================================================================================================

        # 8. Report: losses are means over updates, diagnostics means over all tokens of all ranks.
        found = {
            **metrics.of_scores(responses, rows),
            **metrics.of_lengths(responses),
            **metrics.of_groups(scores_PG),
            **metrics.describe("critic/rewards", rewards),
            **metrics.describe("critic/advantages", advantages_PG),
            **metrics.of_norms(norms),
            **kl_metrics,
            **means.reduce(),
            "actor/lr": lr,
        }
        step_metrics = run.log_step(step + 1, found, **metrics.count(responses))
        run.show_sample(own_samples, own_scores)
        # 9. Checkpoint: weights, optimizer and state are saved by the next round's `begin`.

    run.close(scorer, engine)
    return step_metrics | val_metrics


if __name__ == "__main__":
    main(flags.parse(Args, __doc__))

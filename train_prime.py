"""PRIME: GRPO's loop with a reward for every token, by a reward model that learns right from wrong beside the policy.

    torchrun train_prime.py --model Qwen/Qwen2.5-1.5B-Instruct                      # one GPU, GSM8K
    torchrun --nproc_per_node 8 train_prime.py --model Qwen/Qwen2.5-7B-Instruct --gen-batch-size 512 --prm-offload

Process Reinforcement through Implicit Rewards (PRIME, arXiv 2502.01456). A second language model, the process reward
model (PRM), learns from whole responses which are right and which are wrong. Its log-probs then give a reward for each
token, although nobody has judged a single token. Let n be the number of scored responses in the group of response i.
q_it is the log-prob of its token t by the PRM, minus that by the PRM before training. a_i is 1 if the response is
right, and s_i is its score.

    PRM's loss     -a_i log sigmoid(beta sum_t q_it) - (1 - a_i) log sigmoid(-beta sum_t q_it), mean over responses
    token reward   r_it = beta q_it, 0 for the last token; divided by the largest |sum of r to the end| of the step
    leave-one-out  p_it = r_it n / (n - 1) - sum_j m_j / (n - 1)         m_j: mean of r over the tokens of response j
    outcome        o_i  = s_i minus the mean of the other scores of its group; it is at the last token
    return         R_it = sum of 5 p + 5 o from token t to the end
    advantage      A_it = (R_it - mean of R) / (standard deviation of R), over all tokens of the step

The PRM's loss and its token rewards are also derived in Free Process Rewards without Process Labels, arXiv 2412.01981.
The policy's loss is that of train_grpo.py.

Where this departs from the paper, as verl's recipe/prime does except for the second point:
  1. r and o have weights, and returns are whitened.
  2. The largest sum is that of all ranks, and not of one.
  3. The last token has no r.
  4. r_it counts n / (n - 1) times, and m_i is subtracted too.
  5. The PRM learns before it is asked.

Shapes are those of train_grpo.py. docs/train_prime.md explains all of this.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from extras.implicit_rewards import accuracies_of, leave_one_out, reward_model_metrics
from extras.judges import check_second_model
from rl.data.batching import make_batch
from rl.data.types import take_rows
from rl.flags import Above1, AtLeast1, Count, Few, Free, NotNegative, Positive, Share
from rl.formulas import advantages, schedule
from rl.model.load import load_model, load_reference
from rl.model.logprobs import fixed_logprobs, token_logprobs
from rl.model.sharding import backward, clip_grad_norm
from rl.run import metrics
from rl.run.arguments import RL, LoggingRL, parse
from rl.run.run import Run
from rl.run.task import load_task, open_sampler
from rl.sampling.responses import scores_of


@dataclass(frozen=True)
class Args(RL):  # with the groups of flags in rl/run/arguments.py, such as args.lora, args.data and args.memory
    text_only = "the reward model of train_prime.py"  # so no row may have images
    # The PRM is loaded from this id or folder, and so is its reference. The default is --model.
    prm_model: str | None = None
    prm_lr: NotNegative = 1e-6  # The PRM's AdamW has this learning rate after warm-up.
    prm_offload: Free[bool] = False  # Keep the PRM and its AdamW in host memory while the engine generates.
    prime_beta: Positive = 0.05  # The log-ratio q is multiplied by this.
    prime_update: Literal["before", "after"] = "before"  # Train the PRM before its rewards are used, or after that.
    # batch_norm divides token rewards by the largest of their sums to the end. none leaves them as they are.
    prime_norm: Literal["batch_norm", "none"] = "batch_norm"
    reward_dpo_coef: NotNegative = 5.0  # This is the weight of the token rewards.
    reward_gt_coef: NotNegative = 5.0  # This is the weight of the outcome.
    # Each step samples responses to this many prompts, and learns from P of them. The default is P.
    gen_batch_size: AtLeast1 | None = None
    accuracy_lower_bound: Share = 0.2  # Prompts with a lower mean accuracy are learned from only if others run out.
    accuracy_upper_bound: Share = 0.8  # Prompts with a higher mean accuracy are learned from only if others run out.
    filter_truncate: bool = False  # Prompts with a response that was cut are learned from only if others run out.

    # --- what follows is as in train_grpo.py
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # The policy is loaded from this Hugging Face id or folder.
    train_batch_size: AtLeast1 = 128  # Each step takes this many prompts (P).
    # Each prompt gets this many responses (G). Each is compared with the others, so it is at least 2.
    rollout_n: Few = 8
    # A prompt has at most this many tokens. A longer one is an error unless --filter-overlong-prompts.
    max_prompt_length: AtLeast1 = 512
    max_response_length: AtLeast1 = 1024  # A response has at most this many tokens. A longer one is cut.
    # Each optimizer step takes the responses to this many prompts. By default it takes all of a step.
    ppo_mini_batch_size: AtLeast1 | None = None
    ppo_epochs: Few = 1  # The policy is updated with each response of a step this many times.
    # Clip the ratio from below at 1 minus this, for tokens that are being pushed down (A < 0).
    clip_ratio_low: NotNegative = 0.2
    # Clip the ratio from above at 1 plus this, for tokens that are being pushed up (A > 0). DAPO uses 0.28.
    clip_ratio_high: NotNegative = 0.2
    clip_ratio_c: Above1 = 3.0  # Where A < 0, the loss of a token is at most this times |A| (dual clip).
    entropy_coeff: float = 0.001  # This is the weight of an entropy bonus. With 0 the entropy is only logged.
    # The policy's AdamW has this learning rate after warm-up. LoRA needs about ten times that of full training.
    lr: NotNegative = 1e-6
    lr_warmup_steps: Count = 0  # The learning rate rises linearly over this many steps.
    # After warm-up, the learning rate stays constant, falls linearly, or falls as a cosine does.
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NotNegative = 0.01  # This is AdamW's decoupled weight decay.
    grad_clip: Positive = 1.0  # A gradient whose global norm is larger than this is scaled down to it.
    seed: Count = 0  # The seed decides, together with the step, the order of the data and what is sampled.
    logging: LoggingRL = LoggingRL(
        experiment_name="prime",
        alarms=(
            "rollout/logprob_gap_mean>0.05",
            "reward/zero_std_frac>0.95",
            "response_length/clip_ratio>0.5",
            "actor/entropy<0.01",
        ),
    )


def main(args: Args) -> dict[str, float]:
    """Train with PRIME, and return the metrics of the last step and of the last evaluation."""
    # Flags, data and rewards are checked here, before a model is loaded.
    if args.envs.agent:
        raise ValueError("--agent: PRIME defines no return over several rows yet; use train_grpo.py")
    if args.rollout_n < 2:
        raise ValueError(f"--rollout-n {args.rollout_n} leaves no other response as a baseline; sample at least 2")
    if args.reward_dpo_coef == args.reward_gt_coef == 0:
        raise ValueError("--reward-dpo-coef 0 --reward-gt-coef 0 leave no reward; make one of them positive")
    num_prompts = args.gen_batch_size or args.train_batch_size  # that are sampled in a step
    if num_prompts < (P := args.train_batch_size):
        raise ValueError(f"--gen-batch-size {num_prompts} is less than --train-batch-size {P}; raise it")
    task = load_task(args, prompts_per_step=num_prompts)
    prm_path, longest = args.prm_model or args.model, task.longest
    check_second_model("--prm-model", args.prm_model, task.tokenizer, args.lora, policy=args.model, longest=longest)

    run = Run(args, task.tokenizer, task.total_steps)
    ranks, sampling = run.ranks, task.sampling
    policy = load_model(args.model, ranks, args.lora, run.memory, longest=longest, seed=args.seed)
    sampler = open_sampler(args, task, run)
    prm = load_model(prm_path, ranks, args.lora, run.memory, longest=longest, seed=args.seed, flag="the PRM")
    reference = load_reference(prm_path, ranks, prm, run.memory, longest=longest)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    prm_optimizer = torch.optim.AdamW(prm.parameters(), lr=args.prm_lr, weight_decay=args.weight_decay, fused=True)
    trained = {"actor": (policy, optimizer), "prm": (prm, prm_optimizer)}
    run.begin(trained, sampler, offloaded=["prm"] if args.prm_offload else [])

    # run.steps() saves a checkpoint before each step if --save-freq says so. A run that is asked to stop saves and
    # exits at the next end of a phase or micro-batch. A step that has changed the weights is finished first.
    for step in run.steps(sampler.state):
        run.evaluate_if_due(sampler.evaluate, policy)

        # 1. Sample. The engine gets the policy's weights, and samples G responses to each prompt. The run ends if the
        # trainer's log-probs of a few of them differ too much from the engine's. All ranks get the scores and lengths
        # of the whole step. Tokens stay on the rank that sampled them until phase 2.
        sampled = sampler.sample(policy, step)

        # 2. Batch. Take P of the prompts, first those that are neither too easy nor too hard. Divide the step into
        # updates and micro-batches, as in train_grpo.py. A response without a score teaches nothing, so its mask is 0.
        groups = [sampled[i : i + args.rollout_n] for i in range(0, len(sampled), args.rollout_n)]
        accuracy = accuracies_of(sampled).view(-1, args.rollout_n).nanmean(1)  # of each prompt, NaN if none is scored
        low, high = args.accuracy_lower_bound - 1e-6, args.accuracy_upper_bound + 1e-6  # Means are rounded.
        is_informative = ((accuracy >= low) & (accuracy <= high)).tolist()
        is_cut = [args.filter_truncate and any(r.finish_reason == "length" for r in group) for group in groups]
        order = sorted(range(len(groups)), key=lambda p: is_cut[p] or not is_informative[p])  # False comes first
        responses = [r for p in order[: args.train_batch_size] for r in groups[p]]  # B
        scores_PG = scores_of(responses).view(-1, args.rollout_n)  # (P, G), NaN for a response without a score
        accuracies_PG = accuracies_of(responses).view(-1, args.rollout_n)  # within 0 and 1, or NaN
        batch, updates = make_batch(
            responses,
            mini_batch_size=(args.ppo_mini_batch_size or args.train_batch_size) * args.rollout_n,
            max_tokens=run.memory.ppo_max_token_len_per_gpu,
            ranks=ranks,
            version=sampler.version,
        )  # (b, T)
        num_updates = len(updates) * args.ppo_epochs  # of the policy
        run.may_stop_after("batch")

        # 3. Log-probs that stay fixed. They are by the reference, and with several updates per step also by the policy
        # that starts it.
        if num_updates > 1:
            batch = replace(batch, old_logp=fixed_logprobs(policy, batch, updates, sampling=sampling))
            run.may_stop_after("old_log_prob")
        batch = replace(batch, ref_logp=fixed_logprobs(reference, batch, updates))
        run.may_stop_after("ref")

        # === algorithm ================================================================================================
        # 4a. The PRM learns which responses are right, in one optimizer step per mini-batch. With --prime-update
        # before, its log-probs are taken when it has learned. With --prime-update after, they are taken first.
        lr_factor = schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, task.total_steps)
        prm_optimizer.param_groups[0]["lr"] = args.prm_lr * lr_factor
        if args.prime_update == "after":
            prm_logp = fixed_logprobs(prm, batch, updates)  # (b, T)
        means, norms, prm_norms = metrics.Means(ranks, num_updates=num_updates), [], []
        for update in updates:
            for micro_rows in run.micro_batches(update):
                micro = take_rows(batch, micro_rows, ranks.device)  # (b', t)
                logp, _ = token_logprobs(prm, micro)
                log_odds = args.prime_beta * (logp - micro.ref_logp).sum(1)[: len(micro_rows)]  # (b',), beta sum_t q
                right = accuracies_PG.flatten()[micro_rows].to(ranks.device)  # (b',), a
                log_odds, right = log_odds[right.isfinite()], right[right.isfinite()]  # of those that have a score
                # Cross entropy: -a log sigmoid(beta sum_t q) - (1 - a) log sigmoid(-beta sum_t q)
                loss = F.binary_cross_entropy_with_logits(log_odds, right, reduction="sum") / max(update.num_seqs, 1)
                backward(prm, loss, is_last=micro_rows is update.micro_batches[-1])
                means.over_updates({"reward_model/dpo_loss": loss * args.ppo_epochs})  # The PRM makes only one pass.
            norm = clip_grad_norm(prm, args.grad_clip)
            if math.isfinite(norm) and update.num_tokens > 0:
                prm_optimizer.step()
            else:
                run.skip_update(norm, update.num_tokens, batch)  # raises an error at the third in a row
            prm_optimizer.zero_grad(set_to_none=True)
            prm_norms.append(norm)
        if args.prime_update == "before":
            prm_logp = fixed_logprobs(prm, batch, updates)  # (b, T)
        run.may_stop_after("prm")

        # 4b. Advantages. Each token has a reward of its own, and the last one has that of the outcome. Both are
        # compared with the other responses to the prompt, and then summed from each token to the end.
        mask = batch.response_mask  # (b, T)
        is_last = mask.bool() & (mask.cumsum(1) == mask.sum(1, keepdim=True))  # (b, T), the last sampled token
        q = prm_logp - batch.ref_logp
        rewards = torch.where(mask.bool() & ~is_last, args.prime_beta * q, 0.0)  # (b, T)
        if args.prime_norm == "batch_norm":
            sums = rewards.flip(1).cumsum(1).abs()  # from each token to the end
            rewards = rewards / (ranks.all_reduce_max(sums.max() if len(sums) else sums.sum()) + 1e-6)
        # Each of the n scored responses in a group is compared with the others (leave-one-out):
        # p = r n / (n - 1) - sum of m / (n - 1). If n is 1, p = r.
        own_means = rewards.sum(1) / mask.sum(1).clamp(min=1)  # (b,), m
        means_PG = ranks.all_rows(own_means, batch.rows, len(responses)).view(-1, args.rollout_n)
        factor_PG, baseline_PG = leave_one_out(means_PG.where(scores_PG.isfinite(), math.nan))
        process = rewards * factor_PG.view(-1, 1)[batch.rows] - baseline_PG.view(-1, 1)[batch.rows]  # (b, T)
        outcome_PG = advantages.rloo(scores_PG, scores_PG)  # score minus the mean of the others
        outcome = torch.where(is_last, outcome_PG.view(-1, 1)[batch.rows], 0.0)  # (b, T)
        total = args.reward_dpo_coef * process + args.reward_gt_coef * outcome
        returns = advantages.returns_to_go(total, mask, gamma=1.0)  # R_t = total_t + R_{t+1}
        mean, var = ranks.moments(returns, mask)  # over all tokens of the step
        # The advantage is (R - mean) / sqrt(var + 1e-8).
        batch = replace(batch, advantages=advantages.whiten(returns, mask, mean=mean, var=var))
        run.may_stop_after("adv")

        # 5. Updates. A mini-batch makes one optimizer step, and its micro-batches only save memory.
        optimizer.param_groups[0]["lr"] = args.lr * lr_factor
        for update in updates * args.ppo_epochs:  # the list of mini-batches, once for each epoch, in the same order
            for micro_rows in run.micro_batches(update):
                micro = take_rows(batch, micro_rows, ranks.device)  # (b', t), as long as the longest of these rows
                A, mask = micro.advantages, micro.response_mask  # mask: 1 for sampled tokens of scored responses
                logp, entropy = token_logprobs(policy, micro, sampling=sampling, entropy_grad=args.entropy_coeff != 0)
                old_logp = logp.detach() if num_updates == 1 else micro.old_logp

                # The gradient of the ratio is the ratio times the gradient of logp. Where a clip decides, it is 0.
                ratio = (logp - old_logp).clamp(-20, 20).exp()
                unclipped = -A * ratio
                clipped = -A * ratio.clamp(1 - args.clip_ratio_low, 1 + args.clip_ratio_high)
                pg_loss = torch.maximum(unclipped, clipped)
                pg_loss = torch.where(A < 0, torch.minimum(pg_loss, -A * args.clip_ratio_c), pg_loss)  # dual clip
                is_clipped = (pg_loss != unclipped).float()
                # The engine's log-probs are not quite the trainer's. If a flag asks for it, weights correct for that.
                # Otherwise they are 1.
                weights = args.correction.weights(logp, old_logp, micro.rollout_logp, A, mask)
                pg_loss = pg_loss * weights
                loss = pg_loss - args.entropy_coeff * entropy
                # num_tokens counts the whole mini-batch on all ranks, so the gradients of micro-batches and ranks add
                # up.
                loss, pg_loss = ((x * mask).sum() / max(update.num_tokens, 1) for x in (loss, pg_loss))
                backward(policy, loss, is_last=micro_rows is update.micro_batches[-1])
                means.over_updates({"actor/loss": loss, "actor/pg_loss": pg_loss})
                means.over_tokens(mask, {"actor/entropy": entropy, "actor/pg_clipfrac": is_clipped})
                means.between_policies(micro, logp, old_logp, weights)
            norm = clip_grad_norm(policy, args.grad_clip)
            if math.isfinite(norm) and update.num_tokens > 0:
                optimizer.step()
            else:
                run.skip_update(norm, update.num_tokens, batch)  # raises an error at the third in a row
            optimizer.zero_grad(set_to_none=True)
            norms.append({"actor": norm})
        run.may_stop_after("update_actor")
        # === end ======================================================================================================

        # 6. Report. Losses are means over updates. Entropy, clipping and the like are means over all tokens. Scores,
        # advantages and lengths have their mean, maximum and minimum over all responses.
        step_metrics = {
            **metrics.of_sampled(sampled, args.rollout_n),
            **metrics.describe_tokens("critic/advantages", batch.advantages, batch.response_mask, ranks),
            **metrics.of_norms(norms),
            **means.reduce(),
            **reward_model_metrics(rewards, q, batch.rows, accuracies_PG, ranks),
            "reward_model/grad_norm": sum(prm_norms) / len(prm_norms),
            "train/informative_prompts": float(sum(is_informative)),
            "actor/lr": args.lr * lr_factor,
            "reward_model/lr": args.prm_lr * lr_factor,
        }
        run.log_step(step_metrics, responses=responses, batch=batch, generated=sum(r.num_sampled for r in sampled))

    run.evaluate_if_due(sampler.evaluate, policy)  # the last policy
    return run.close(sampler)


if __name__ == "__main__":
    main(parse(Args, __doc__))

"""REINFORCE++ and ReMax: make each token more likely in proportion to the reward that follows it, minus a baseline.

    torchrun train_reinforce.py --model Qwen/Qwen2.5-1.5B-Instruct                                    # one GPU, GSM8K
    torchrun train_reinforce.py --model Qwen/Qwen2.5-1.5B-Instruct --adv-estimator remax --experiment-name remax

REINFORCE (Williams 1992) needs neither a critic nor a group of responses to each prompt. The reward r_t of the last
token of a response is the response's score, and that of any other token is 0. From each reward, kl_coef * KL(policy,
reference) is subtracted. Let l_t be the log-probability of token t given the tokens before it, and l_old_t what it was
when the step began:

    return     R_t     = r_t + gamma R_{t+1}
    advantage  A_t     = (R_t - mean) / standard deviation over all tokens      REINFORCE++ (arXiv 2501.03262)
            or A_t     = R_t - score of a greedy response to the prompt         ReMax (arXiv 2310.10505)
            or A_t     = R_t - weighted mean of R_t of the prompt's responses   optimal token baseline (2602.07078)
    ratio      ratio_t = exp(l_t - l_old_t)
    loss       L       = mean over all sampled tokens of max(-A_t ratio_t, -A_t clip(ratio_t, 1 - low, 1 + high))

What is subtracted from R is called a baseline. It reduces the noise of the gradient and hardly changes its mean.

Where this departs from the papers:
  1. The mean is over tokens, as in DAPO.
  2. ReMax has the clip of PPO. It does nothing with one update per step, which is the default.
  3. Where A is negative, the loss is at most 3 |A| (dual clip, arXiv 1912.09729).

Shapes are those of train_grpo.py. docs/train_reinforce.md explains more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from extras.agents import token_rewards
from extras.kl_terms import KLTerms
from extras.variants import fixed_collisions
from rl.data.batching import make_batch
from rl.data.rows import Row
from rl.data.types import Sample, take_rows
from rl.flags import Above1, AtLeast1, Count, Few, NotNegative, Positive, Share
from rl.formulas import advantages, losses, schedule
from rl.model.load import load_model, load_reference
from rl.model.logprobs import fixed_logprobs, token_logprobs
from rl.model.sharding import backward, clip_grad_norm
from rl.run import metrics
from rl.run.arguments import RL, LoggingRL, parse
from rl.run.run import Run
from rl.run.task import load_task, open_sampler
from rl.sampling.responses import scores_of
from rl.sampling.sampler import Sampler


@dataclass(frozen=True)
class Args(RL):  # with the groups of flags in rl/run/arguments.py, such as args.lora, args.data and args.memory
    # Returns are compared with the mean of the step, with a greedy response, or with other responses to the prompt.
    adv_estimator: Literal["reinforce_plus_plus", "remax", "optimal_token_baseline"] = "reinforce_plus_plus"
    # The policy is loaded from this Hugging Face id or folder, and so is the reference for KL terms.
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"
    train_batch_size: AtLeast1 = 512  # Each step takes this many prompts (P).
    rollout_n: Few = 1  # Each prompt gets this many responses (G), besides the greedy one of remax.
    # A prompt has at most this many tokens. A longer one is an error unless --filter-overlong-prompts.
    max_prompt_length: AtLeast1 = 512
    max_response_length: AtLeast1 = 1024  # A response has at most this many tokens. A longer one is cut.
    # Each optimizer step takes the responses to this many prompts. By default it takes all of a step.
    ppo_mini_batch_size: AtLeast1 | None = None
    ppo_epochs: Few = 1  # The updates of a step use each of its responses this many times.
    gamma: Share = 1.0  # A reward that comes one token later is multiplied by this discount.
    # Clip the ratio from below at 1 minus this, for tokens that are being pushed down (A < 0).
    clip_ratio_low: NotNegative = 0.2
    # Clip the ratio from above at 1 plus this, for tokens that are being pushed up (A > 0).
    clip_ratio_high: NotNegative = 0.2
    clip_ratio_c: Above1 = 3.0  # Where A < 0, the loss of a token is at most this times |A| (dual clip).
    # token-mean is the mean over all tokens (DAPO). The others first reduce each response to the sum of its tokens, to
    # their mean (paper of GRPO), or to the sum divided by --loss-scale-factor (Dr. GRPO), and then take the mean over
    # responses.
    loss_agg_mode: Literal[*losses.MEANS] = "token-mean"
    # seq-mean-token-sum-norm divides by this. The default is --max-response-length.
    loss_scale_factor: Positive | None = None
    entropy_coeff: float = 0.0  # This is the weight of an entropy bonus.
    # AdamW has this learning rate after warm-up. LoRA needs about ten times that of full training.
    lr: NotNegative = 1e-6
    lr_warmup_steps: Count = 0  # The learning rate rises linearly over this many steps.
    # After warm-up, the learning rate stays constant, falls linearly, or falls as a cosine does.
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NotNegative = 0.01  # This is AdamW's decoupled weight decay.
    grad_clip: Positive = 1.0  # A gradient whose global norm is larger than this is scaled down to it.
    seed: Count = 0  # The seed decides, together with the step, the order of the data and what is sampled.
    kl: KLTerms = KLTerms(use_kl_in_reward=True)
    logging: LoggingRL = LoggingRL(
        experiment_name="reinforce",
        alarms=(
            "rollout/logprob_gap_mean>0.05",
            "reward/zero_std_frac>0.95",
            "response_length/clip_ratio>0.5",
            "actor/entropy<0.01",
        ),
    )


class WithGreedy(Sampler):
    """Also samples a greedy response to each prompt, at the same time. Only its score is needed."""

    def complete_groups(self, step: int) -> tuple[list[Row], list[Sample]]:
        """The prompts of a step, and this rank's samples. Greedy ones are not among these but in `greedy_samples`."""
        rows, sampling = self.prompts(step), self.task.sampling
        own_rows = self.ranks.own_slice(rows)
        greedy = replace(sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)
        # First come the responses to all prompts, then the greedy ones.
        samples = self.ask(own_rows * 2, [sampling] * len(own_rows) + [greedy] * len(own_rows), step)
        self.greedy_samples = samples[len(own_rows) * sampling.n :]
        return rows, samples[: len(own_rows) * sampling.n]

    def collect(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their scores, which `greedy_samples` get too."""
        scored = super().collect([*samples, *self.greedy_samples])
        self.greedy_samples = scored[len(samples) :]
        return scored[: len(samples)]


def main(args: Args) -> dict[str, float]:
    """Train with REINFORCE++ or ReMax, and return the metrics of the last step and of the last evaluation."""
    # Flags, data and rewards are checked here, before a model is loaded.
    if args.envs.agent:
        raise ValueError("--agent: REINFORCE++ and ReMax define no return over several rows yet; use train_grpo.py")
    if args.adv_estimator == "optimal_token_baseline" and args.rollout_n < 2:
        raise ValueError("--adv-estimator optimal_token_baseline compares responses; --rollout-n must be at least 2")
    task = load_task(args)
    mini_batch_size = args.ppo_mini_batch_size or args.train_batch_size  # prompts
    num_updates = args.ppo_epochs * math.ceil(args.train_batch_size / mini_batch_size)  # optimizer steps in a step

    run = Run(args, task.tokenizer, task.total_steps)
    ranks, longest, sampling = run.ranks, task.longest, task.sampling
    policy = load_model(args.model, ranks, args.lora, run.memory, longest=longest, seed=args.seed)
    sampler = open_sampler(args, task, run, WithGreedy if args.adv_estimator == "remax" else None)
    reference = load_reference(args.model, ranks, policy, run.memory, longest=longest) if args.kl.is_used else None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    saved = {"actor": (policy, optimizer)}
    saved |= {"reference": (reference, None)} if args.kl.ref_update_steps else {}  # It changes without an optimizer.
    run.begin(saved, sampler)
    kl_coef = args.kl.first_coef(run.state)

    def loop_state() -> dict[str, Any]:
        return {"kl_coef": kl_coef} | sampler.state()

    # run.steps() saves a checkpoint before each step if --save-freq says so. A run that is asked to stop saves and
    # exits at the next end of a phase or micro-batch. A step that has changed the weights is finished first.
    for step in run.steps(loop_state):
        run.evaluate_if_due(sampler.evaluate, policy)

        # 1. Sample. The engine gets the policy's weights, and samples G responses to each prompt. The run ends if the
        # trainer's log-probs of a few of them differ too much from the engine's. All ranks get the scores and lengths
        # of the whole step. Tokens stay on the rank that sampled them until phase 2. With remax a greedy response to
        # each prompt is sampled too, at the same time.
        responses = sampler.sample(policy, step)  # B
        greedy_P = torch.zeros(args.train_batch_size)  # (P,)
        if args.adv_estimator == "remax":  # NaN for a greedy response without a score
            greedy_P = torch.tensor(ranks.all_gather(scores_of(sampler.greedy_samples).tolist()))
        scores_PG = scores_of(responses).view(-1, args.rollout_n)  # (P, G), NaN for a response without a score
        # Whether a response has a score (B,). With remax, the greedy response needs one as well.
        is_trainable = (scores_PG - greedy_P.view(-1, 1)).isfinite().flatten()

        # 2. Batch. Divide the step into updates, which are one optimizer step each, and each update into micro-batches.
        # Send each rank the tokens that it trains on. A response without a score teaches nothing, so its mask is 0.
        batch, updates = make_batch(
            responses,
            trainable=is_trainable,
            mini_batch_size=mini_batch_size * args.rollout_n,
            max_tokens=run.memory.ppo_max_token_len_per_gpu,
            ranks=ranks,
            version=sampler.version,
        )  # (b, T)
        run.may_stop_after("batch")

        # 3. Log-probs that stay fixed while the policy changes. They are by the policy that starts the step and by the
        # reference. With one update per step the policy has not changed yet when the loss is computed.
        if num_updates > 1 or args.kl.use_kl_in_reward or args.adv_estimator == "optimal_token_baseline":
            batch = replace(batch, old_logp=fixed_logprobs(policy, batch, updates, sampling=sampling))
            run.may_stop_after("old_log_prob")
        if reference is not None:
            if args.kl.ref_update_steps and step > 0 and step % args.kl.ref_update_steps == 0:
                run.refresh(reference, policy)
            batch = replace(batch, ref_logp=fixed_logprobs(reference, batch, updates, sampling=sampling))
            run.may_stop_after("ref")

        # === algorithm ================================================================================================
        # 4. Advantages. The score is the reward of the last token. With --use-kl-in-reward every token pays for its KL.
        # How much is earned from each token on (the return), and how much more is that than the baseline?
        mask = batch.response_mask  # (b, T): 1 for the tokens that the policy sampled
        rewards, kl_metrics = token_rewards(responses, batch), {}  # (b, T), the score at the last token of a response
        if args.kl.use_kl_in_reward:
            token_kl = losses.kl(batch.old_logp, batch.ref_logp, args.kl.kl_penalty) * mask  # k1 is old_logp - ref_logp
            rewards = rewards - kl_coef * token_kl
            kl_coef, kl_metrics = args.kl.next_coef(kl_coef, token_kl, batch, is_trainable, ranks)  # for the next step
        R = advantages.returns_to_go(rewards, mask, gamma=args.gamma)  # (b, T): R_t = r_t + gamma R_{t+1}
        prompts = batch.rows // args.rollout_n  # (b,): which of the P prompts each row answers
        if args.adv_estimator == "reinforce_plus_plus":
            mean, var = ranks.moments(R, mask)  # over all tokens of the step, on all ranks
            A = (R.double() - mean) / math.sqrt(var + 1e-8)
        elif args.adv_estimator == "remax":
            A = R - greedy_P[prompts].view(-1, 1)
        else:
            # baseline_t = sum_i W_it R_it / sum_i W_it, over the prompt's responses i that have a token t. If there is
            # only one, the baseline is 0. W_it says how large the gradient of the log-probs up to token t is. It is the
            # sum over tokens k up to t of 1 - 2 pi(k) + sum_v pi(v)^2.
            collisions = fixed_collisions(policy, batch, updates, sampling=sampling)  # (b, T): sum_v pi(v)^2
            W = ((1 - 2 * batch.old_logp.exp() + collisions) * mask).cumsum(1)
            sums = ranks.all_reduce_sum(advantages.sums_by_group(R, W, mask, prompts, len(greedy_P)))  # (3, P, T)
            A = R - advantages.token_baselines(sums)[prompts]
        batch = replace(batch, advantages=torch.where(mask > 0, A, 0.0).to(R.dtype), returns=R)
        run.may_stop_after("adv")

        # 5. Updates. A mini-batch makes one optimizer step, and its micro-batches only save memory.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, task.total_steps)
        optimizer.param_groups[0]["lr"] = lr
        means, norms = metrics.Means(ranks, num_updates=num_updates), []  # Both collect metrics for phase 6.
        for update in updates * args.ppo_epochs:  # the list of mini-batches, once for each epoch, in the same order
            # aggregate(x, mask) is the sum of x over the tokens / num_tokens, unless --loss-agg-mode has another mean.
            # The counts are of the whole mini-batch on all ranks, so the gradients of micro-batches and ranks add up.
            scale = args.loss_scale_factor or args.max_response_length
            counts = dict(num_tokens=update.num_tokens, num_seqs=update.num_seqs, scale=scale)
            aggregate = partial(losses.aggregate, mode=args.loss_agg_mode, **counts)
            for micro_rows in run.micro_batches(update):
                micro = take_rows(batch, micro_rows, ranks.device)  # (b', t), as long as the longest of these rows
                A, mask = micro.advantages, micro.response_mask
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
                if args.kl.use_kl_loss:  # by default k3, exp(-d) + d - 1 with d = logp - ref_logp
                    kl = losses.kl(logp, micro.ref_logp, args.kl.kl_loss_type, old_logp=old_logp)
                    loss = loss + args.kl.kl_loss_coef * kl
                    means.over_updates({"actor/kl_loss": aggregate(kl, mask)})
                loss = aggregate(loss, mask)
                backward(policy, loss, is_last=micro_rows is update.micro_batches[-1])
                means.over_updates({"actor/loss": loss, "actor/pg_loss": aggregate(pg_loss, mask)})
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
        rewards_B = ranks.all_rows(rewards.sum(1), batch.rows, len(responses))
        step_metrics = {
            **metrics.of_sampled(responses, args.rollout_n),
            **metrics.describe("critic/rewards", rewards_B[is_trainable]),
            **metrics.describe("critic/baselines", greedy_P),
            **metrics.describe_tokens("critic/returns", batch.returns, batch.response_mask, ranks),
            **metrics.describe_tokens("critic/advantages", batch.advantages, batch.response_mask, ranks),
            **metrics.of_norms(norms),
            **kl_metrics,
            **means.reduce(),
            "actor/lr": lr,
        }
        run.log_step(step_metrics, responses=responses, batch=batch)

    run.evaluate_if_due(sampler.evaluate, policy)  # the last policy
    return run.close(sampler)


if __name__ == "__main__":
    main(parse(Args, __doc__))

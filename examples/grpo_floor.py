"""GRPO with two changes: another baseline, and a bonus that keeps the entropy above a floor.

    diff train_grpo.py examples/grpo_floor.py       # shows what differs

This file is a finished example of a copy of train_grpo.py that was changed to try out an idea. The other lines are
those of train_grpo.py, whose docstring explains the names, and a test checks that they stay equal. The changes are:

    advantage   A_i   = s_i - mean of the other scores of its group
    loss        L     = loss of train_grpo.py - entropy_bonus * mean over all sampled tokens of the policy's entropy

The advantage has the baseline of RLOO (arXiv 2402.14740). It is the mean of the other responses' scores, so that a
response is not compared with itself. There is no division by the standard deviation.

The entropy says how undecided the policy is about the next token. It falls while the policy learns, and a policy with
almost no entropy samples the same response G times and learns nothing more. So `entropy_bonus` grows by
--entropy-bonus-change after each step whose entropy is below --entropy-floor. After any other step it shrinks by as
much, but never below 0. It begins with 0. The run saves it with every checkpoint, so that a resumed run goes on with
it.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from rl.data.batching import make_batch
from rl.data.types import take_rows
from rl.flags import Above1, AtLeast1, Count, Few, NotNegative, Positive
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
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # The policy is loaded from this Hugging Face id or folder.
    train_batch_size: AtLeast1 = 128  # Each step takes this many prompts (P).
    # Each prompt gets this many responses (G). A lone one cannot be compared, so its advantage is its score.
    rollout_n: Few = 8
    # A prompt has at most this many tokens. A longer one is an error unless --filter-overlong-prompts.
    max_prompt_length: AtLeast1 = 512
    max_response_length: AtLeast1 = 1024  # A response has at most this many tokens. A longer one is cut.
    # Each optimizer step takes the responses to this many prompts. By default it takes all of a step.
    ppo_mini_batch_size: AtLeast1 | None = None
    ppo_epochs: Few = 1  # The updates of a step use each of its responses this many times.
    # Clip the ratio from below at 1 minus this, for tokens that are being pushed down (A < 0).
    clip_ratio_low: NotNegative = 0.2
    # Clip the ratio from above at 1 plus this, for tokens that are being pushed up (A > 0). DAPO uses 0.28.
    clip_ratio_high: NotNegative = 0.2
    clip_ratio_c: Above1 = 3.0  # Where A < 0, the loss of a token is at most this times |A| (dual clip).
    # Add kl_loss_coef * KL(policy, reference) to the loss. The reference is the policy before training.
    use_kl_loss: bool = False
    kl_loss_coef: NotNegative = 0.001  # This is the weight of that KL term.
    # AdamW has this learning rate after warm-up. LoRA needs about ten times that of full training.
    lr: NotNegative = 1e-6
    lr_warmup_steps: Count = 0  # The learning rate rises linearly over this many steps.
    # After warm-up, the learning rate stays constant, falls linearly, or falls as a cosine does.
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NotNegative = 0.01  # This is AdamW's decoupled weight decay.
    grad_clip: Positive = 1.0  # A gradient whose global norm is larger than this is scaled down to it.
    # The bonus grows after a step whose entropy, in nats, is below this. After any other step it shrinks.
    entropy_floor: NotNegative = 0.1
    entropy_bonus_change: NotNegative = 1e-3  # The weight of the entropy bonus changes by this after each step.
    seed: Count = 0  # The seed decides, together with the step, the order of the data and what is sampled.
    logging: LoggingRL = LoggingRL(
        experiment_name="floor",
        alarms=(  # A line is printed when one of these is true. The run goes on.
            "rollout/logprob_gap_mean>0.05",  # mean absolute difference of the log-probs of engine and trainer
            "reward/zero_std_frac>0.95",  # share of groups that teach nothing, since their scores are equal
            "response_length/clip_ratio>0.5",  # share of responses that were cut at the limit of their length
            "actor/entropy<0.01",  # Nearly every token is certain, so the responses to a prompt hardly differ.
        ),
    )


def main(args: Args) -> dict[str, float]:
    """Train with GRPO, and return the metrics of the last step and of the last evaluation."""
    # Flags, data and rewards are checked here, before a model is loaded.
    task = load_task(args)
    run = Run(args, task.tokenizer, task.total_steps)  # joins the ranks, and takes the run's folder
    # `ranks` is this process with its peers. `longest` is the limit on the tokens of a prompt with its response.
    # `sampling` says how responses are sampled.
    ranks, longest, sampling = run.ranks, task.longest, task.sampling
    policy = load_model(args.model, ranks, args.lora, run.memory, longest=longest, seed=args.seed)
    sampler = open_sampler(args, task, run)  # starts the engine. Its memory is free while we learn
    reference = load_reference(args.model, ranks, policy, run.memory, longest=longest) if args.use_kl_loss else None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    # Loads a checkpoint if the run has one, tests that the largest micro-batch fits, and starts the trackers.
    run.begin({"actor": (policy, optimizer)}, sampler)
    entropy_bonus = run.state.get("entropy_bonus", 0.0)  # that of the checkpoint, if the run has one

    def loop_state() -> dict:
        """What a checkpoint saves beside weights and optimizer."""
        return sampler.state() | {"entropy_bonus": entropy_bonus}

    # run.steps() saves a checkpoint before each step if --save-freq says so, with what the sampler carries from step to
    # step. run.may_stop_after(phase) marks the end of a phase, and records its seconds. sampler.sample() marks the ends
    # of its own phases in the same way. There, and between two micro-batches, a run that was asked to stop (SIGTERM,
    # Ctrl-C or --max-hours) saves and exits. What it saves is the state with which the step began, so a resumed run
    # repeats the step. The first update of a step changes that state. From then on the run completes the step, begins
    # the next one, and exits there before anything is sampled.
    for step in run.steps(loop_state):
        run.evaluate_if_due(sampler.evaluate, policy)  # answers held-out prompts, every --test-freq steps

        # 1. Sample. The engine gets the policy's weights, and samples G responses to each of the step's P prompts. The
        # prompts depend only on the seed and the step, so a resumed run sees the same ones. The trainer computes the
        # log-probs of a few responses, and the run ends if those of the engine differ too much. Other processes score
        # the responses, by --custom-reward-function or by the function in rewards/ for the data. It is called with
        # data_source, solution_str, ground_truth and extra_info, and returns the score. All ranks get the scores and
        # lengths of all B responses, with those of a group side by side. Tokens stay where they are until phase 2.
        responses = sampler.sample(policy, step)  # B

        # 2. Batch. Divide the step into updates, which are one optimizer step each, and each update into micro-batches.
        # Send each rank the tokens that it trains on. A response whose reward failed has no score, so its mask is 0.
        batch, updates = make_batch(
            responses,
            mini_batch_size=(args.ppo_mini_batch_size or args.train_batch_size) * args.rollout_n,
            max_tokens=run.memory.ppo_max_token_len_per_gpu,
            ranks=ranks,
            version=sampler.version,  # number of the newest weights: --partial-rollouts also has tokens of older ones
        )  # (b, T)
        num_updates = len(updates) * args.ppo_epochs
        run.may_stop_after("batch")

        # 3. Log-probs that stay fixed while the policy changes. The trainer computes l_old itself, since the engine's
        # log-probs differ slightly. With one update per step this pass is left out. The policy has not changed yet when
        # phase 5 computes l, so the same numbers are l_old.
        if num_updates > 1:
            batch = replace(batch, old_logp=fixed_logprobs(policy, batch, updates, sampling=sampling))
            run.may_stop_after("old_log_prob")
        if reference is not None:
            batch = replace(batch, ref_logp=fixed_logprobs(reference, batch, updates, sampling=sampling))
            run.may_stop_after("ref")

        # === algorithm ================================================================================================
        # 4. Advantages: how much better was each response than the others of its group? With n scored responses in a
        # group, the score minus the mean of the other n - 1 is (score - mean of all n) * n / (n - 1). All tokens of a
        # response get its advantage. A lone scored response has mean 0, so its advantage is its score.
        scores_PG = scores_of(responses).view(-1, args.rollout_n)  # (P, G), NaN for a response without a score
        mean, _ = advantages.group_mean_std(scores_PG)  # (P, 1)
        n = scores_PG.isfinite().sum(1, keepdim=True)  # (P, 1)
        advantages_PG = ((scores_PG - mean) * n / (n - 1).clamp(min=1)).nan_to_num()  # (P, G), 0 without a score
        # batch.responses (b,) has, for each of this rank's rows, the number of its response among all B, so indexing
        # with it gives (b, 1). The mask (b, T) then gives every sampled token the advantage of its response.
        batch = replace(batch, advantages=advantages_PG.view(-1, 1)[batch.responses] * batch.response_mask)  # (b, T)
        run.may_stop_after("adv")

        # 5. Updates. There is one optimizer step for each mini-batch. Its gradient is summed over micro-batches, which
        # are as large as memory allows.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, task.total_steps)
        optimizer.param_groups[0]["lr"] = lr
        means, norms = metrics.Means(ranks, num_updates=num_updates), []  # Both collect metrics for phase 6.
        for update in updates * args.ppo_epochs:  # the list of mini-batches, once for each epoch, in the same order
            # All ranks divide by the number of tokens with mask 1 that this mini-batch has on all ranks. So the
            # gradients of micro-batches and ranks only have to be added up.
            num_tokens = max(update.num_tokens, 1)
            for micro_rows in run.micro_batches(update):
                micro = take_rows(batch, micro_rows, ranks.device)  # (b', T'), as long as the longest of these rows
                # The mask is 1 for sampled tokens of scored responses, the token that ends a response included.
                A, mask = micro.advantages, micro.response_mask
                logp, entropy = token_logprobs(policy, micro, sampling=sampling, entropy_grad=True)
                old_logp = logp.detach() if num_updates == 1 else micro.old_logp

                # The gradient of the ratio is the ratio times the gradient of logp. With one update per step, which is
                # the default, the ratio is 1, and the gradient is that of -A * logp. In later updates the policy is no
                # longer the one that sampled. The ratio corrects for that, but reliably only near 1. The clip therefore
                # stops pushing a token that has gone far enough. There pg_loss is constant, without a gradient.
                ratio = (logp - old_logp).clamp(-20, 20).exp()  # The clamp prevents an overflow.
                unclipped = -A * ratio
                clipped = -A * ratio.clamp(1 - args.clip_ratio_low, 1 + args.clip_ratio_high)
                pg_loss = torch.maximum(unclipped, clipped)
                # Dual clip. Where A < 0 and the ratio is large, the maximum takes the unclipped term. That has no upper
                # bound, so without this limit one token could outweigh all others.
                pg_loss = torch.where(A < 0, torch.minimum(pg_loss, -A * args.clip_ratio_c), pg_loss)
                is_clipped = (pg_loss != unclipped).float()  # by any of the three bounds
                # The weights are 1, unless a flag such as --rollout-is corrects for how the engine's log-probs differ.
                weights = args.correction.weights(logp, old_logp, micro.rollout_logp, A, mask)
                pg_loss = pg_loss * weights
                loss = pg_loss - entropy_bonus * entropy
                if reference is not None:
                    x = (micro.ref_logp - logp).clamp(-20, 20)
                    # k3 = e^x - x - 1 is never negative, and its mean over tokens that the policy samples is the
                    # KL(policy, reference), because e^x has the mean 1 there. Values above 10 become 10.
                    kl = (x.expm1() - x).clamp(max=10)
                    loss = loss + args.kl_loss_coef * kl
                    means.over_updates({"actor/kl_loss": (kl * mask).sum() / num_tokens})
                loss = (loss * mask).sum() / num_tokens
                # Adds up the gradients of micro-batches and ranks. If each rank has a whole model, it does so once.
                backward(policy, loss, is_last=micro_rows is update.micro_batches[-1])
                means.over_updates({"actor/loss": loss, "actor/pg_loss": (pg_loss * mask).sum() / num_tokens})
                means.over_tokens(mask, {"actor/entropy": entropy, "actor/pg_clipfrac": is_clipped})
                means.between_policies(micro, logp, old_logp, weights)  # actor/ppo_kl and the like
            norm = clip_grad_norm(policy, args.grad_clip)
            if math.isfinite(norm) and update.num_tokens > 0:
                optimizer.step()
            else:
                run.skip_update(norm, update.num_tokens, batch)  # raises an error if it skips the third in a row
            optimizer.zero_grad(set_to_none=True)
            norms.append({"actor": norm})
        run.may_stop_after("update_actor")
        # === end ======================================================================================================

        # 6. Report. Losses are means over updates. Entropy, clipping and the like are means over all tokens. Scores,
        # advantages and lengths have their mean, maximum and minimum over all responses.
        step_metrics = {
            **metrics.of_sampled(responses, args.rollout_n),
            **metrics.describe("critic/rewards", scores_PG),
            **metrics.describe("critic/advantages", advantages_PG[scores_PG.isfinite()]),
            **metrics.of_norms(norms),
            **means.reduce(),
            "actor/lr": lr,
            "actor/entropy_bonus": entropy_bonus,
        }
        direction = 1 if step_metrics["actor/entropy"] < args.entropy_floor else -1
        entropy_bonus = max(entropy_bonus + direction * args.entropy_bonus_change, 0.0)  # of the next step
        run.log_step(step_metrics, responses=responses, batch=batch)

    run.evaluate_if_due(sampler.evaluate, policy)  # the last policy
    return run.close(sampler)


if __name__ == "__main__":
    main(parse(Args, __doc__, hint="train_grpo_variants.py has the flags of other estimators, losses and KL terms"))

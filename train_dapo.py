"""DAPO: GRPO that samples until every group of the batch has something to teach, and is careful with long responses.

    torchrun train_dapo.py --model Qwen/Qwen2.5-1.5B-Instruct --overlong-penalty-factor 0.5    # one GPU, GSM8K
    torchrun --nproc_per_node 8 train_dapo.py --model Qwen/Qwen2.5-7B-Instruct --tensor-model-parallel-size 2

Decoupled Clip and Dynamic sAmpling Policy Optimization (DAPO, arXiv 2503.14476). Group, advantage, ratio and loss are
those of train_grpo.py, without a KL term. Let s_i be the score and L_i the length of response i. These things change:

    clip-higher         the ratio may rise further than fall: clip(ratio_it, 1 - 0.2, 1 + 0.28)           phase 5
    dynamic sampling    a group with equal scores has advantage 0, so others are sampled until
                        P groups have max s_i > min s_i                                                   phase 1
    token-level loss    the mean is over all tokens of a mini-batch, as in train_grpo.py already          phase 5
    overlong responses  reward r_i = s_i - factor * max(0, (L_i - free) / buffer): the penalty grows in
                        the buffer, the zone before the limit; free + buffer = limit                      phase 4
                        with --overlong-filtering a response cut at the limit is not learned from         phase 4

Where this departs from the paper:
  1. Groups that were sampled beyond the batch wait for the next step, while the paper throws them away. --rollout-is
     corrects for the older policy that sampled them.
  2. The standard deviation divides by G - 1, not by G.
  3. Where A is negative, the loss is at most 10 |A| (dual clip, arXiv 1912.09729).

Shapes are those of train_grpo.py. docs/train_dapo.md explains the four changes and their flags.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from extras.correction import Correction
from extras.partial import loaded_groups, saved_groups
from extras.variants import components_of, require_components
from rl.data.batching import make_batch
from rl.data.types import take_rows
from rl.flags import Above1, AtLeast1, Count, Few, Free, NotNegative, Positive
from rl.formulas import advantages, losses, schedule
from rl.model.load import load_model
from rl.model.logprobs import fixed_logprobs, token_logprobs
from rl.model.sharding import backward, clip_grad_norm
from rl.run import metrics
from rl.run.arguments import RL, LoggingRL, parse
from rl.run.run import Run
from rl.run.task import load_task, open_sampler
from rl.sampling.responses import lengths_of, scores_of


@dataclass(frozen=True)
class Args(RL):  # with the groups of flags in rl/run/arguments.py, such as args.lora, args.data and args.memory
    filter_groups: bool = True  # Replace groups whose responses all have the same score (dynamic sampling).
    # This has to differ within a group. It is the score, or one of its components, such as acc.
    filter_groups_metric: str = "score"
    # Each round samples responses to this many prompts. The default is --train-batch-size.
    gen_batch_size: AtLeast1 | None = None
    # A step has at most this many rounds. If the batch is not full then, the run ends.
    max_num_gen_batches: Free[AtLeast1] = 10
    # This is the length, in tokens, of the zone before --max-response-length in which the penalty grows. The default is
    # a fifth of that limit, and 0 means no penalty.
    overlong_buffer_len: Count | None = None
    # This is subtracted from the score of a response that reaches the limit.
    overlong_penalty_factor: NotNegative = 1.0
    overlong_filtering: bool = False  # Leave responses that were cut at the limit out of the loss.
    # token-mean is the mean over all tokens (DAPO). The others first reduce each response to the sum of its tokens, to
    # their mean (paper of GRPO), or to the sum divided by --loss-scale-factor (Dr. GRPO), and then take the mean over
    # responses.
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    # seq-mean-token-sum-norm divides by this. The default is --max-response-length.
    loss_scale_factor: Positive | None = None
    entropy_coeff: float = 0.0  # This is the weight of an entropy bonus. With 0 the entropy is only logged.
    # Clip the ratio from below at 1 minus this, for tokens that are being pushed down (A < 0).
    clip_ratio_low: NotNegative = 0.2
    # Clip the ratio from above at 1 plus this, for tokens that are being pushed up (A > 0). GRPO has 0.2.
    clip_ratio_high: NotNegative = 0.28
    clip_ratio_c: Above1 = 10.0  # Where A < 0, the loss of a token is at most this times |A| (dual clip).

    # --- The other flags are those of train_grpo.py. These defaults differ: ppo_mini_batch_size, lr_warmup_steps,
    # --- weight_decay, and rollout_is.
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # The policy is loaded from this Hugging Face id or folder.
    train_batch_size: AtLeast1 = 128  # Each step takes this many prompts (P).
    rollout_n: Few = 8  # Each prompt gets this many responses (G). Scores can differ only among two or more.
    # A prompt has at most this many tokens. A longer one is an error unless --filter-overlong-prompts.
    max_prompt_length: AtLeast1 = 512
    max_response_length: AtLeast1 = 1024  # A response has at most this many tokens. A longer one is cut.
    # Each optimizer step takes the responses to this many prompts. The default is a quarter of a step.
    ppo_mini_batch_size: AtLeast1 | None = None
    ppo_epochs: Few = 1  # The updates of a step use each of its responses this many times.
    # AdamW has this learning rate after warm-up. LoRA needs about ten times that of full training.
    lr: NotNegative = 1e-6
    lr_warmup_steps: Count = 10  # The learning rate rises linearly over this many steps.
    # After warm-up, the learning rate stays constant, falls linearly, or falls as a cosine does.
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NotNegative = 0.1  # This is AdamW's decoupled weight decay.
    grad_clip: Positive = 1.0  # A gradient whose global norm is larger than this is scaled down to it.
    seed: Count = 0  # The seed decides, together with the round, the order of the data and what is sampled.
    correction: Correction = Correction(rollout_is="token")  # It corrects for groups that an older policy has sampled.
    logging: LoggingRL = LoggingRL(
        experiment_name="dapo",
        alarms=(
            "rollout/logprob_gap_mean>0.05",
            "train/num_gen_batches>5",
            "response_length/clip_ratio>0.5",
            "actor/entropy<0.01",
        ),
    )


def validate(args: Args) -> None:
    """Raise ValueError for flags of DAPO that contradict each other, naming the flag, its value and the fix."""
    if (args.overlong_buffer_len or 0) > args.max_response_length:
        raise ValueError(
            f"--overlong-buffer-len {args.overlong_buffer_len} must be within 0 (no punishment) and "
            f"--max-response-length {args.max_response_length}"
        )
    if args.filter_groups and args.rollout_n < 2:
        raise ValueError("--rollout-n 1 leaves no group with a spread; raise it, or set --no-filter-groups")
    if (size := args.gen_batch_size) and (rounds := args.max_num_gen_batches) and size * rounds < args.train_batch_size:
        raise ValueError(
            f"--gen-batch-size {size} in --max-num-gen-batches {rounds} rounds cannot fill --train-batch-size "
            f"{args.train_batch_size}; raise one of the first two"
        )


def main(args: Args) -> dict[str, float]:
    """Train with DAPO, and return the metrics of the last step and of the last evaluation."""
    # Flags, data and rewards are checked here, before a model is loaded.
    validate(args)
    task = load_task(args)
    round_size = args.gen_batch_size or args.train_batch_size  # prompts
    if round_size > (n := len(task.train_rows)):
        raise ValueError(f"--gen-batch-size {round_size} is more than the {n} rows of the training data; lower it")
    require_components(task.scorer, [args.filter_groups_metric], flag="--filter-groups-metric")
    task = task._replace(batch_size=round_size)
    buffer = args.max_response_length // 5 if args.overlong_buffer_len is None else args.overlong_buffer_len
    scale = args.loss_scale_factor or args.max_response_length  # for --loss-agg-mode seq-mean-token-sum-norm
    mini_batch_size = args.ppo_mini_batch_size or math.ceil(args.train_batch_size / 4)  # prompts

    run = Run(args, task.tokenizer, task.total_steps)
    ranks, longest, sampling = run.ranks, task.longest, task.sampling
    drawn = run.state.get("drawn", 0)  # rounds of sampling since the run began
    # Surplus groups of earlier steps wait here. A new run has none.
    waiting = loaded_groups([x.get("surplus", []) for x in run.states], task.train_rows, args.rollout_n, ranks)
    policy = load_model(args.model, ranks, args.lora, run.memory, longest=longest, seed=args.seed)
    sampler = open_sampler(args, task, run)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    run.begin({"actor": (policy, optimizer)}, sampler, mini_batch_size=mini_batch_size)

    def loop_state() -> dict[str, Any]:
        return {"drawn": drawn, "surplus": saved_groups(waiting)} | sampler.state()

    # run.steps() saves a checkpoint before each step if --save-freq says so. A run that is asked to stop saves and
    # exits at the next end of a phase or micro-batch. A step that has changed the weights is finished first.
    for step in run.steps(loop_state):
        run.evaluate_if_due(sampler.evaluate, policy)

        # 1. Dynamic sampling. Each sampling round samples G responses to each prompt and waits for their scores. Rounds
        # go on until P groups are kept. The engine keeps the policy's weights until then. The run ends if the trainer's
        # log-probs of a few responses differ too much from the engine's. All ranks get the scores and lengths. Tokens
        # stay on the rank that sampled them until phase 2.
        sampler.wake(policy)
        # A group is a list of G responses. `groups` has those that are kept, and `sampled` all that this step sampled.
        groups, sampled, num_rounds = waiting, [], 0
        while len(groups) < args.train_batch_size:
            if num_rounds == args.max_num_gen_batches:
                raise RuntimeError(
                    f"step {step + 1}: {len(sampled)} groups were sampled in --max-num-gen-batches {num_rounds} "
                    f"rounds, and {len(groups)} are kept, fewer than --train-batch-size {args.train_batch_size}; "
                    "the data is too easy or too hard, or the bound is too low"
                )
            # Which prompts these are depends only on the seed and the number of the round, so a resumed run sees the
            # same ones.
            responses = sampler.sample(policy, drawn, stays_awake=True)
            fresh = [responses[i : i + args.rollout_n] for i in range(0, len(responses), args.rollout_n)]
            # A group carries a signal if the scores in it differ. A response without a score (NaN) does not count.
            values_PG = components_of(responses, [args.filter_groups_metric]).view(-1, args.rollout_n)
            has_spread = [len(values[~values.isnan()].unique()) > 1 for values in values_PG]
            kept = [x for x, differs in zip(fresh, has_spread, strict=True) if differs or not args.filter_groups]
            groups, sampled = groups + kept, sampled + fresh
            drawn, num_rounds = drawn + 1, num_rounds + 1
        groups, waiting = groups[: args.train_batch_size], groups[args.train_batch_size :]
        run.may_stop_after("gen")
        sampler.sleep(policy)

        # 2. Batch. Divide the step into updates, which are one optimizer step each, and each update into micro-batches.
        # Send each rank the tokens that it trains on. A response without a score teaches nothing, so its mask is 0.
        responses = [r for group in groups for r in group]  # B
        scores_PG = scores_of(responses).view(-1, args.rollout_n)  # (P, G), NaN for a response without a score
        trainable = scores_PG.isfinite().flatten()  # (B,)
        if args.overlong_filtering:  # Nor does a response that was cut, since nobody knows how it would have ended.
            trainable &= torch.tensor([r.finish_reason != "length" for r in responses])
        batch, updates = make_batch(
            responses,
            trainable=trainable,
            mini_batch_size=mini_batch_size * args.rollout_n,
            max_tokens=run.memory.ppo_max_token_len_per_gpu,
            ranks=ranks,
            version=sampler.version,
        )  # (b, T)
        num_updates = len(updates) * args.ppo_epochs
        run.may_stop_after("batch")

        # 3. Log-probs, by the policy that starts the step, that stay fixed while the policy changes. With one update
        # per step they are not needed, since the policy has not changed yet when phase 5 computes l.
        if num_updates > 1:
            batch = replace(batch, old_logp=fixed_logprobs(policy, batch, updates, sampling=sampling))
            run.may_stop_after("old_log_prob")

        # === algorithm ================================================================================================
        # 4. Advantages. How much better than its group was each response, after the penalty for length?
        rewards_PG = scores_PG
        if buffer:  # The penalty grows from 0 at `free` tokens to the whole factor at the limit.
            free = args.max_response_length - buffer
            excess_PG = (lengths_of(responses, whole=True).view(-1, args.rollout_n) - free) / buffer
            rewards_PG = scores_PG - (excess_PG * args.overlong_penalty_factor).clamp(min=0)
        # Mean and std (P, 1) are over scored responses. If only one is scored, they are 0 and 1, and its reward is its
        # advantage.
        mean, std = advantages.group_mean_std(rewards_PG)
        advantages_PG = ((rewards_PG - mean) / (std + 1e-6)).nan_to_num()  # (P, G), 0 for a response without a score
        batch = replace(batch, advantages=advantages_PG.view(-1, 1)[batch.responses] * batch.response_mask)  # (b, T)
        run.may_stop_after("adv")

        # 5. Updates. A mini-batch makes one optimizer step, and its micro-batches only save memory.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, task.total_steps)
        optimizer.param_groups[0]["lr"] = lr
        means, norms = metrics.Means(ranks, num_updates=num_updates), []  # Both collect metrics for phase 6.
        for update in updates * args.ppo_epochs:  # the list of mini-batches, once for each epoch, in the same order
            for micro_rows in run.micro_batches(update):
                micro = take_rows(batch, micro_rows, ranks.device)  # (b', t), as long as the longest of these rows
                A, mask = micro.advantages, micro.response_mask  # mask: 1 for sampled tokens of scored responses
                logp, entropy = token_logprobs(policy, micro, sampling=sampling, entropy_grad=args.entropy_coeff != 0)
                old_logp = logp.detach() if num_updates == 1 else micro.old_logp

                # The gradient of the ratio is the ratio times the gradient of logp. Where a clip decides, it is 0.
                ratio = (logp - old_logp).clamp(-20, 20).exp()
                unclipped = -A * ratio
                clipped = -A * ratio.clamp(1 - args.clip_ratio_low, 1 + args.clip_ratio_high)  # clip-higher: high > low
                pg_loss = torch.maximum(unclipped, clipped)
                pg_loss = torch.where(A < 0, torch.minimum(pg_loss, -A * args.clip_ratio_c), pg_loss)  # dual clip
                is_clipped = (pg_loss != unclipped).float()
                # By default weights are exp(old_logp - rollout_logp), at most 2, since an older policy sampled the
                # groups that waited.
                weights = args.correction.weights(logp, old_logp, micro.rollout_logp, A, mask)
                pg_loss = pg_loss * weights
                loss = pg_loss - args.entropy_coeff * entropy

                # This is the token-level loss. Every token of the mini-batch weighs the same, in a short or a long
                # response. num_tokens counts the whole mini-batch on all ranks, so the gradients of micro-batches and
                # ranks add up.
                if args.loss_agg_mode == "token-mean":
                    loss, pg_loss = ((x * mask).sum() / max(update.num_tokens, 1) for x in (loss, pg_loss))
                else:  # means over responses
                    sizes = dict(num_tokens=update.num_tokens, num_seqs=update.num_seqs, scale=scale)
                    sizes["lengths"] = micro.num_learned  # tokens of each whole response, which may have several rows
                    loss, pg_loss = (losses.aggregate(x, mask, args.loss_agg_mode, **sizes) for x in (loss, pg_loss))
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
            **metrics.of_sampled([r for group in sampled or groups for r in group], args.rollout_n),  # kept or not
            **metrics.of_lengths(responses),  # only of those that the step has learned from
            **metrics.describe("critic/rewards", rewards_PG),
            **metrics.describe("critic/advantages", advantages_PG[scores_PG.isfinite()]),
            **metrics.of_norms(norms),
            **means.reduce(),
            "train/num_gen_batches": float(num_rounds),
            "train/num_sampled_responses": float(len(sampled) * args.rollout_n),
            "train/surplus_groups": float(len(waiting)),
            "actor/lr": lr,
        }
        generated = sum(r.num_sampled for group in sampled for r in group)
        run.log_step(step_metrics, responses=responses, batch=batch, generated=generated)

    run.evaluate_if_due(sampler.evaluate, policy)  # the last policy
    return run.close(sampler)


if __name__ == "__main__":
    main(parse(Args, __doc__))

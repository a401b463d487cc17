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
Words such as group, advantage and ratio are explained in train_grpo.py.

Shapes: P prompts of a step, G responses to each, B = P * G of them, b of which this rank trains on; T tokens.
Every per-token tensor is (b, T), and position t describes token t given the tokens before it. See docs/train_dapo.md.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from rl import flags
from rl.data.batching import make_batch
from rl.data.order import derive_seed, prompts_for_step
from rl.data.prompts import load_prompts, sampling_of
from rl.data.types import take_rows
from rl.flags import Above1, AtLeast1, Count, Free, NotNegative, Positive, PositiveShare, Share, TopK
from rl.formulas import advantages, correction, losses, schedule
from rl.model import load as models
from rl.model import lora, sharding
from rl.model.logprobs import fixed_logprobs, token_logprobs
from rl.run import metrics
from rl.run.run import Run
from rl.sampling import engines
from rl.sampling.evaluation import evaluate
from rl.sampling.rollout import (
    gather_responses,
    groups_of_states,
    lengths_of,
    sample_groups,
    scores_of,
    state_of_groups,
    values_of,
    verify_engine,
)
from rl.scoring.pool import make_scorer, stop_if_failing


@dataclass(frozen=True)
class Args(flags.RL, correction.Correction, lora.LoRA):
    experiment_name: str = "dapo"  # run in the trackers, and part of the folder
    # metrics and limits; a step beyond one prints a line that begins with ALARM
    alarms: tuple[str, ...] = (
        "rollout/logprob_gap_mean>0.05",
        "train/num_gen_batches>5",
        "response_length/clip_ratio>0.5",
        "actor/entropy<0.01",
    )

    # --- model and data
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # Hugging Face id or folder of the policy
    train_batch_size: AtLeast1 = 128  # prompts a step (P); responses a step are train_batch_size * rollout_n
    gen_batch_size: AtLeast1 | None = None  # prompts sampled at a time until the step has its P; default P
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
    # the last so many tokens before --max-response-length cost more and more; default a fifth of it, 0: no punishment
    overlong_buffer_len: Count | None = None
    overlong_penalty_factor: NotNegative = 1.0  # subtracted from the reward of a response that reaches the limit

    # --- rollout
    engine: Literal["vllm", "hf"] = "vllm"  # vllm in this process, or the slow and simple sampler of transformers
    rollout_n: AtLeast1 = 8  # responses per prompt (G); their mean is the baseline, so at least 2
    temperature: Positive = 1.0  # of sampling; the trainer divides its logits by it too
    top_p: PositiveShare = 1.0  # the fewest likeliest tokens that together have this probability, also in the trainer
    top_k: TopK = -1  # sample among the k likeliest tokens; -1 all
    min_p: Share = 0.0  # leave out tokens less than this times as likely as the likeliest

    # --- algorithm

    filter_groups: bool = True  # dynamic sampling: replace groups whose responses all have the same score
    filter_groups_metric: str = "score"  # what has to differ in a group: the score, or a component of it, such as acc
    # rounds of sampling in a step after which the run gives up filling its batch
    max_num_gen_batches: Free[AtLeast1] = 10
    overlong_filtering: bool = False  # leave responses that were cut at the limit out of the loss
    # how token losses become one number; Dr. GRPO: seq-mean-token-sum-norm, the GRPO paper: seq-mean-token-mean
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    loss_scale_factor: Positive | None = None  # divisor of seq-mean-token-sum-norm; default --max-response-length
    clip_ratio_low: NotNegative = 0.2  # ratio >= 1 - this
    clip_ratio_high: NotNegative = 0.28  # ratio <= 1 + this; 0.2 switches clip-higher off
    clip_ratio_c: Above1 = 10.0  # dual clip: a negative advantage's loss is at most this many times its size
    ppo_mini_batch_size: AtLeast1 | None = None  # prompts per optimizer step; default: a quarter of --train-batch-size
    ppo_epochs: AtLeast1 = 1  # passes over a step's responses
    entropy_coeff: float = 0.0  # weight of an entropy bonus; 0 computes the entropy for the log only
    # truncated weights for the gap between the policy that sampled, in an engine and perhaps a step ago, and this one
    rollout_is: Literal["none", "token", "sequence"] = "token"

    # --- optimizer
    lr: NotNegative = 1e-6  # AdamW's learning rate after warm-up; LoRA wants about ten times that of full training
    lr_warmup_steps: Count = 10  # steps of linear warm-up
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"  # shape of the learning rate after warm-up
    weight_decay: NotNegative = 0.1  # AdamW's decoupled weight decay
    grad_clip: Positive = 1.0  # largest global gradient norm


def validate(args: Args) -> None:
    """Refuse settings that contradict each other, naming the flag, the value and the fix."""
    flags.check(args)
    if (args.overlong_buffer_len or 0) > args.max_response_length:
        raise ValueError(
            f"--overlong-buffer-len {args.overlong_buffer_len} must be within 0 (no punishment) and "
            f"--max-response-length {args.max_response_length}"
        )
    if args.filter_groups and args.rollout_n < 2:
        raise ValueError("--rollout-n 1 leaves no group with a spread; raise it, or set --no-filter-groups")


def main(args: Args) -> dict[str, float]:
    """Train with DAPO; returns the metrics of the last step and of the last evaluation."""
    # Everything a user can get wrong is refused here, before a model is loaded.
    validate(args)
    tokenizer, train_rows, val_rows = load_prompts(args)
    rows_by_index = {row["row_index"]: row for row in train_rows}
    gen_batch_size = args.gen_batch_size or args.train_batch_size
    if gen_batch_size > len(train_rows):
        raise ValueError(
            f"--gen-batch-size {gen_batch_size} is more than the {len(train_rows)} rows of the training data; lower it"
        )
    buffer = args.max_response_length // 5 if args.overlong_buffer_len is None else args.overlong_buffer_len
    scorer = make_scorer(args, tokenizer, train_rows + val_rows)
    sampling = sampling_of(args, tokenizer)
    total_steps = args.total_training_steps or args.total_epochs * (len(train_rows) // args.train_batch_size)
    mini_batch_size = args.ppo_mini_batch_size or math.ceil(args.train_batch_size / 4)  # prompts
    updates_per_step = args.ppo_epochs * math.ceil(args.train_batch_size / mini_batch_size)
    on_policy = updates_per_step == 1  # the policy that sampled is the one being updated: old_logp costs no extra pass

    run = Run(args, tokenizer, total_steps)
    ranks = run.ranks
    policy = models.load_policy(args, ranks)
    engine = engines.make_engine(args, ranks)
    scorer.add_reward_model(args, ranks)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    run.resume(
        {"actor": (policy, optimizer)},
        about=f"{args.train_batch_size} prompts x {args.rollout_n} responses and {updates_per_step} update(s) a step, "
        f"{len(train_rows)} prompts to draw from\n{scorer.report}",
        engine=engine,
    )
    drawn = run.state.get("drawn", 0)  # rounds of sampling since the run began: the next one takes the next prompts
    surplus = groups_of_states(run.states, rows_by_index, args.rollout_n, ranks)  # groups that wait for a later step
    step_metrics, val_metrics = {}, {}

    for step in range(run.start, total_steps + 1):  # the last round only evaluates
        # Saves what `step` steps have made, if a save is due. A run that is asked to stop saves it too and ends, at a
        # call of the clock or of leave_if_asked. Once an optimizer step has been made, it ends after the step.
        clock = run.begin(step, state={"drawn": drawn, "surplus": state_of_groups(surplus)})

        # The engine gets this step's policy, and keeps it until the batch is full.
        engine.wake()
        engine.update_weights(models.weights_for_engine(policy, ranks))
        clock("update_weights")
        if run.evaluation_is_due(step):
            val_metrics = run.log_evaluation(step, *evaluate(args, engine, scorer, val_rows, sampling, ranks))
            clock("testing")
        if step == total_steps:
            break
        # Phases 1 to 3 repeat until P groups have a spread: one whose responses all earn the same has advantage zero.
        groups, sampled, own_samples, own_scores = surplus, [], [], []  # a group is G responses
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
            own_rows, seed = (
                ranks.own_slice(rows),
                derive_seed(args.seed, drawn, engine.first_rank),
            )
            own_samples, tickets = sample_groups(engine, own_rows, sampling, seed=seed, on_group=scorer.submit)
            clock("gen")

            # 3. Rewards: other processes have been scoring since the first responses were complete. Then all ranks get
            # the scores and lengths of the round; the tokens stay where they are until one rank trains on them.
            own_scores = scorer.collect(tickets)
            responses = gather_responses(own_samples, own_scores, rows, ranks)
            stop_if_failing(responses, args.reward_max_error_frac)
            fresh = [responses[i : i + args.rollout_n] for i in range(0, len(responses), args.rollout_n)]
            values_PG = values_of(responses, args.filter_groups_metric).view(-1, args.rollout_n)
            spread = advantages.informative_groups(values_PG).tolist()
            groups = groups + [x for x, keep in zip(fresh, spread, strict=True) if keep or not args.filter_groups]
            sampled, drawn = sampled + fresh, drawn + 1
            clock("reward")
        groups, surplus = groups[: args.train_batch_size], groups[args.train_batch_size :]
        clock("gen")  # also if groups that waited fill the batch, and nothing was sampled
        engine.sleep()
        verify_engine(policy, own_samples, sampling=sampling, limit=args.max_logprob_gap, ranks=ranks)
        clock("verify")
        responses = [r for group in groups for r in group]  # B
        scores_PG = scores_of(responses).view(-1, args.rollout_n)  # NaN for a response without a score
        lengths_PG = lengths_of(responses).view(-1, args.rollout_n)

        # 4. Batch: plan optimizer steps and the micro-batches of every rank, and send each rank the tokens of its own.
        learn = scores_PG.isfinite().flatten()  # a response without a score teaches nothing
        if args.overlong_filtering:  # neither does one that was cut: nobody knows what it would have been
            learn = learn & torch.tensor([r.finish_reason != "length" for r in responses])
        batch, updates = make_batch(
            responses,
            learn=learn,
            mini_batch_size=mini_batch_size * args.rollout_n,
            max_tokens=args.ppo_max_token_len_per_gpu,
            pad_id=tokenizer.pad_token_id or 0,
            ranks=ranks,
        )  # (b, T)
        clock("batch")

        # 5. Fixed log-probs, without gradients: of the policy that starts this step, for the ratio in phase 7.
        if not on_policy:
            batch = replace(batch, old_logp=fixed_logprobs(policy, batch, updates, sampling=sampling))
            clock("old_log_prob")

        # === algorithm ================================================================================================
        # 6. Advantages: how much better than its group was each response, once long ones have paid?
        rewards = scores_PG  # (P, G)
        if buffer:
            rewards = scores_PG + advantages.overlong_penalty(
                lengths_PG, max_length=args.max_response_length, buffer=buffer, factor=args.overlong_penalty_factor
            )
        advantages_PG = advantages.grpo(rewards, lengths_PG)  # (P, G)
        batch = replace(batch, advantages=advantages_PG.view(-1, 1)[batch.rows] * batch.response_mask)  # (b, T)
        clock("adv")

        # 7. Update: a mini-batch is one optimizer step; its micro-batches only bound the memory.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, total_steps)
        optimizer.param_groups[0]["lr"] = lr
        clips = dict(
            clip_ratio_low=args.clip_ratio_low, clip_ratio_high=args.clip_ratio_high, clip_ratio_c=args.clip_ratio_c
        )
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
                pg_loss, clipped = losses.ppo_clip(logp, old_logp, micro.advantages, mask, **clips)
                weights = correction.weights(args, logp, old_logp, micro.rollout_logp, micro.advantages, mask)
                pg_loss = pg_loss * weights  # the policy that sampled is not quite the one that learns
                objective = pg_loss - args.entropy_coeff * entropy
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
        judged = [r for group in sampled or groups for r in group]  # kept or not
        judged_rows = [rows_by_index[r.row_index] for r in judged]
        found = {
            **metrics.of_scores(judged, judged_rows),
            **metrics.of_lengths(responses),
            **metrics.of_groups(scores_of(judged).view(-1, args.rollout_n)),
            **metrics.describe("critic/rewards", rewards),
            **metrics.describe("critic/advantages", advantages_PG),
            **metrics.of_norms(norms),
            **means.reduce(),
            "train/num_gen_batches": float(num_gen_batches),
            "train/num_sampled_responses": float(len(sampled) * args.rollout_n),
            "train/surplus_groups": float(len(surplus)),
            "actor/lr": lr,
        }
        generated = sum(r.response_length for group in sampled for r in group)
        step_metrics = run.log_step(step + 1, found, tokens=sum(r.num_tokens for r in responses), generated=generated)
        run.show_sample(own_samples, own_scores)
        # 9. Checkpoint: weights, optimizer and state are saved by the next round's `begin`.

    run.close(scorer, engine)
    return step_metrics | val_metrics


if __name__ == "__main__":
    main(flags.parse(Args, __doc__))

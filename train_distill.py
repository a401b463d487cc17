"""On-policy distillation: a small model samples responses, and learns from what a large one says of every token.

    torchrun train_distill.py --model Qwen/Qwen2.5-0.5B-Instruct --teacher-model Qwen/Qwen2.5-7B-Instruct
    torchrun train_distill.py --loss-mode jsd --jsd-beta 0.5 --distill-top-k 32                     # GKD
    torchrun train_distill.py --teacher-url http://gpu7:8000 --teacher-model Qwen/Qwen2.5-72B-Instruct

The small model is the student, which is the policy that is trained. The large one is the teacher. The student learns on
its own responses, so it also sees where its own mistakes lead. Let l_it be its log-probability of token t of response
i, and l_teacher_it that of the teacher:

    advantage   A_it     = l_teacher_it - l_rollout_it     l_rollout: the student's when it sampled, by the engine
    ratio       ratio_it = exp(l_it - l_old_it)         l_old: l when the step began, so the ratio is 1 at first
    loss        L        = mean over all sampled tokens of max(-A_it ratio_it, -A_it clip(ratio_it, 1 - low, 1 + high))

The gradient of L estimates that of KL(student, teacher) from one token ("On-Policy Distillation", Thinking Machines
2025). --loss-mode forward_kl, reverse_kl and jsd compare whole distributions instead (GKD, arXiv 2306.13649). Then L is
the mean over all sampled tokens of a distance, see DISTANCES. --reward-coef adds the advantage of train_grpo.py to A.

Where this departs from the papers:
  1. All responses are the student's (lambda = 1 in GKD), and no gradient flows through the sampling.
  2. A distance looks at the teacher's --distill-top-k most likely tokens, and takes all others as one.
  3. The loss is clipped as in train_grpo.py, which matters only with several updates per step.

Shapes are those of train_grpo.py. docs/train_distill.md explains more.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from extras.distillation import Teacher, add_teacher, check_teacher, load_teacher, token_distances
from rl.data.batching import make_batch
from rl.data.types import take_rows
from rl.flags import Above1, AtLeast1, Count, Few, NotNegative, Positive, Share, TopK
from rl.formulas import advantages, distillation, losses, schedule
from rl.model.load import load_model
from rl.model.logprobs import fixed_logprobs
from rl.model.sharding import backward, clip_grad_norm
from rl.run import metrics
from rl.run.arguments import RL, LoggingRL, parse
from rl.run.run import Run
from rl.run.task import load_task, open_sampler
from rl.sampling.responses import scores_of

# The functions of --loss-mode make a distance (R,) from the log-probs (R, K) of K tokens by student and teacher, and
# from beta. p_S and p_T are the probabilities of these tokens, and KL(p, q) = sum over the K tokens of p (log p - log
# q).
DISTANCES = {
    "sampled": None,  # There is no distance, but the advantage above.
    "forward_kl": distillation.forward_kl,  # KL(p_T, p_S)
    "reverse_kl": distillation.reverse_kl,  # KL(p_S, p_T)
    "jsd": distillation.jsd,  # beta KL(p_T, m) + (1 - beta) KL(p_S, m), with m = beta p_T + (1 - beta) p_S
}


@dataclass(frozen=True)
class Args(RL):  # with the groups of flags in rl/run/arguments.py, such as args.lora, args.data and args.memory
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"  # The student is loaded from this Hugging Face id or folder.
    train_batch_size: AtLeast1 = 128  # Each step takes this many prompts (P).
    rollout_n: Few = 8  # Each prompt gets this many responses (G).
    # A prompt has at most this many tokens. A longer one is an error unless --filter-overlong-prompts.
    max_prompt_length: AtLeast1 = 512
    max_response_length: AtLeast1 = 1024  # A response has at most this many tokens. A longer one is cut.
    # Each optimizer step takes the responses to this many prompts. By default it takes all of a step.
    ppo_mini_batch_size: AtLeast1 | None = None
    ppo_epochs: Few = 1  # The updates of a step use each of its responses this many times.
    # sampled pulls the student to the teacher by the advantage of the sampled token. The others are distances between
    # whole distributions.
    loss_mode: Literal[*DISTANCES] = "sampled"
    distillation_loss_coef: NotNegative = 1.0  # This is the weight of that advantage, or of the distance.
    # A distance looks at this many of the teacher's most likely tokens. -1 means all, if these are few.
    distill_top_k: TopK = 64
    jsd_beta: Share = 0.5  # Near 0, jsd is as forward_kl, and near 1 as reverse_kl. Both ends are excluded.
    reward_coef: NotNegative = 0.0  # This is the weight of the advantage that GRPO computes from the scores.
    # token-mean is the mean over all tokens (DAPO). The others first reduce each response to the sum of its tokens, to
    # their mean (paper of GRPO), or to the sum divided by --loss-scale-factor (Dr. GRPO), and then take the mean over
    # responses.
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    # seq-mean-token-sum-norm divides by this. The default is --max-response-length.
    loss_scale_factor: Positive | None = None
    # Clip the ratio from below at 1 minus this, for tokens that are being pushed down (A < 0).
    clip_ratio_low: NotNegative = 0.2
    # Clip the ratio from above at 1 plus this, for tokens that are being pushed up (A > 0).
    clip_ratio_high: NotNegative = 0.2
    clip_ratio_c: Above1 = 3.0  # Where A < 0, the loss of a token is at most this times |A| (dual clip).
    # AdamW has this learning rate after warm-up. LoRA needs about ten times that of full training.
    lr: NotNegative = 1e-6
    lr_warmup_steps: Count = 0  # The learning rate rises linearly over this many steps.
    # After warm-up, the learning rate stays constant, falls linearly, or falls as a cosine does.
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NotNegative = 0.01  # This is AdamW's decoupled weight decay.
    grad_clip: Positive = 1.0  # A gradient whose global norm is larger than this is scaled down to it.
    seed: Count = 0  # The seed decides, together with the step, the order of the data and what is sampled.
    logging: LoggingRL = LoggingRL(
        experiment_name="distill",
        alarms=("rollout/logprob_gap_mean>0.05", "response_length/clip_ratio>0.5", "actor/entropy<0.01"),
    )
    teacher: Teacher = Teacher()


def validate(args: Args) -> None:
    """Raise ValueError for flags of distillation that contradict each other, naming the flag, its value and the fix."""
    is_truncated = args.decoding.top_p < 1 or args.decoding.top_k > 0 or args.decoding.min_p > 0
    if args.loss_mode == "jsd" and args.jsd_beta in (0, 1):
        raise ValueError(
            f"--jsd-beta {args.jsd_beta} makes no mixture; use --loss-mode forward_kl or reverse_kl instead"
        )
    if args.loss_mode != "sampled" and is_truncated:
        raise ValueError(
            f"--loss-mode {args.loss_mode} compares whole distributions; drop --top-p, --top-k and --min-p"
        )
    if args.distillation_loss_coef == args.reward_coef == 0:
        raise ValueError("--distillation-loss-coef 0 and --reward-coef 0 leave nothing to learn; raise one of them")
    if args.reward_coef and args.rollout_n < 2:
        raise ValueError(
            f"--reward-coef {args.reward_coef} compares responses to a prompt; --rollout-n must be at least 2"
        )


def main(args: Args) -> dict[str, float]:
    """Distill, and return the metrics of the last step and of the last evaluation."""
    # Flags, data and rewards are checked here, before a model is loaded.
    validate(args)
    task = load_task(args)
    distance_of, longest = DISTANCES[args.loss_mode], task.longest
    top_k = 0 if distance_of is None else args.distill_top_k
    check_teacher(args.teacher, task.tokenizer, student=args.model, longest=longest, top_k=top_k)
    mini_batch_size = args.ppo_mini_batch_size or args.train_batch_size  # prompts
    num_updates = args.ppo_epochs * math.ceil(args.train_batch_size / mini_batch_size)  # optimizer steps in a step

    run = Run(args, task.tokenizer, task.total_steps)
    ranks, sampling = run.ranks, task.sampling
    policy = load_model(args.model, ranks, args.lora, run.memory, longest=longest, seed=args.seed)
    sampler = open_sampler(args, task, run)
    teacher = load_teacher(args.teacher, ranks, run.memory, student=args.model, longest=longest)  # empty with a server
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    visiting = teacher if args.teacher.teacher_offload else None  # on the device only while it is asked
    run.begin({"actor": (policy, optimizer)}, sampler, visiting=visiting)

    # run.steps() saves a checkpoint before each step if --save-freq says so. A run that is asked to stop saves and
    # exits at the next end of a phase or micro-batch. A step that has changed the weights is finished first.
    for step in run.steps(sampler.state):
        run.evaluate_if_due(sampler.evaluate, policy)

        # 1. Sample. The engine gets the student's weights, and samples G responses to each prompt. The run ends if the
        # trainer's log-probs of a few of them differ too much from the engine's. All ranks get the scores and lengths
        # of the whole step. Tokens stay on the rank that sampled them until phase 2.
        responses = sampler.sample(policy, step)  # B
        scores_PG = scores_of(responses).view(-1, args.rollout_n)  # (P, G), NaN for a response without a score

        # 2. Batch. Divide the step into updates, which are one optimizer step each, and each update into micro-batches.
        # Send each rank the tokens that it trains on. The teacher also judges responses without a score, except for
        # conversations whose environment has failed.
        batch, updates = make_batch(
            responses,
            trainable=torch.tensor([r.finish_reason != "error" for r in responses]),
            mini_batch_size=mini_batch_size * args.rollout_n,
            max_tokens=run.memory.ppo_max_token_len_per_gpu,
            ranks=ranks,
            version=sampler.version,
        )  # (b, T)
        run.may_stop_after("batch")

        # 3. Log-probs that stay fixed while the student changes. Those by the student that starts the step are needed
        # only with several updates per step, since the student has not changed before the first. Those by the teacher
        # are ref_logp of the sampled tokens. For a distance, top_ids and top_logp (b, T, K) have its most likely
        # tokens.
        if num_updates > 1:
            batch = replace(batch, old_logp=fixed_logprobs(policy, batch, updates, sampling=sampling))
            run.may_stop_after("old_log_prob")
        as_sampled = dict(top_k=top_k, temperature=args.decoding.temperature)
        batch = add_teacher(args.teacher, teacher, batch, updates, **as_sampled)
        run.may_stop_after("ref")

        # === algorithm ================================================================================================
        # 4. Advantages. How much more likely was each token to the teacher than to the student that sampled it? With
        # --reward-coef all tokens of a response also get its advantage of GRPO.
        of_tokens = args.distillation_loss_coef * (batch.ref_logp - batch.rollout_logp)  # (b, T)
        if distance_of is not None:  # Instead, the distance joins the loss in phase 5.
            of_tokens = torch.zeros_like(of_tokens)
        # Mean and std (P, 1) are over scored responses. If only one is scored, they are 0 and 1, and its score is its
        # advantage.
        mean, std = advantages.group_mean_std(scores_PG)
        of_responses_PG = args.reward_coef * ((scores_PG - mean) / (std + 1e-6)).nan_to_num()  # 0 without a score
        both = (of_responses_PG.view(-1, 1)[batch.responses] + of_tokens) * batch.response_mask
        batch = replace(batch, advantages=both)  # (b, T)
        run.may_stop_after("adv")

        # 5. Updates. A mini-batch makes one optimizer step, and its micro-batches only save memory.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, task.total_steps)
        optimizer.param_groups[0]["lr"] = lr
        means, norms = metrics.Means(ranks, num_updates=num_updates), []  # Both collect metrics for phase 6.
        for update in updates * args.ppo_epochs:  # the list of mini-batches, once for each epoch, in the same order
            # These count the whole mini-batch on all ranks, so the gradients of micro-batches and ranks add up.
            scale = args.loss_scale_factor or args.max_response_length
            counts = dict(num_tokens=update.num_tokens, num_seqs=update.num_seqs, scale=scale)
            for micro_rows in run.micro_batches(update):
                micro = take_rows(batch, micro_rows, ranks.device)  # (b', t), as long as the longest of these rows
                A, mask = micro.advantages, micro.response_mask  # mask: 1 for sampled tokens of scored responses
                # aggregate is the sum over all tokens / num_tokens, unless --loss-agg-mode has another mean. A mean
                # over responses divides by the tokens of a whole response, which may have several rows.
                aggregate = partial(losses.aggregate, mode=args.loss_agg_mode, lengths=micro.num_learned, **counts)
                # DISTANCES has the distance (b', t). Without one it is logp - ref_logp, and serves only the log. shares
                # say how much probability student and teacher give to the K tokens.
                logp, entropy, distance, shares = token_distances(
                    policy, micro, distance_of, beta=args.jsd_beta, sampling=sampling
                )
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
                loss = pg_loss
                if distance_of is not None:
                    loss = loss + args.distillation_loss_coef * distance
                loss = aggregate(loss, mask)
                backward(policy, loss, is_last=micro_rows is update.micro_batches[-1])
                means.over_updates({"actor/loss": loss, "actor/pg_loss": aggregate(pg_loss, mask)})
                means.over_updates({"distillation/loss": aggregate(distance, mask)})
                means.over_tokens(mask, {"actor/entropy": entropy, "actor/pg_clipfrac": is_clipped})
                means.over_tokens(mask, {"distillation/kl": micro.rollout_logp - micro.ref_logp, **shares})
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
            **metrics.of_sampled(responses, args.rollout_n),
            **metrics.describe_tokens("critic/advantages", batch.advantages, batch.response_mask, ranks),
            **metrics.of_norms(norms),
            **means.reduce(),
            "actor/lr": lr,
        }
        run.log_step(step_metrics, responses=responses, batch=batch)

    run.evaluate_if_due(sampler.evaluate, policy)  # the last policy
    return run.close(sampler)


if __name__ == "__main__":
    main(parse(Args, __doc__))

"""On-policy distillation: the student samples, and a teacher says of each token how likely it is.

    torchrun train_distill.py --model Qwen/Qwen2.5-0.5B-Instruct --teacher-model Qwen/Qwen2.5-7B-Instruct
    torchrun train_distill.py --loss-mode jsd --jsd-beta 0.5 --distill-top-k 32                     # GKD
    torchrun train_distill.py --teacher-url http://gpu7:8000 --teacher-model Qwen/Qwen2.5-72B-Instruct

Distillation teaches a small model, the student, what a large one knows. Here the student learns on its own responses,
so it also sees the places that its own mistakes lead to. The signal is dense: one number for every token, not one for a
response. By default that number is an advantage, log p_teacher - log p_student of the sampled token, and the update is
a policy gradient: an estimate of the gradient of KL(student || teacher) from one sample ("On-Policy Distillation",
Thinking Machines 2025). --loss-mode forward_kl, reverse_kl and jsd (GKD, arXiv 2306.13649) compare the distributions
instead, on the teacher's likeliest tokens. A reward may join in: --reward-coef.

Deviations from the papers:
  1. all responses are the student's (GKD's lambda = 1), and no gradient flows through the sampling;
  2. the tokens that are not among the teacher's --distill-top-k likeliest are compared as one, "any other";
  3. the sampled form is clipped as in PPO, which matters only with several updates a step.

Shapes: P prompts of a step, G responses to each, B = P * G of them, b of which this rank trains on; T tokens.
Position t of a (b, T) tensor describes token t given the tokens before it. See docs/train_distill.md.
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
from rl.flags import Above1, AtLeast1, Count, Free, NotNegative, Positive, PositiveFinite, PositiveShare, Share, TopK
from rl.formulas import advantages, correction, distillation, losses, schedule
from rl.model import load as models
from rl.model import lora, sharding
from rl.model.logprobs import fixed_logprobs
from rl.model.teacher import add_teacher, check_teacher, load_teacher, token_distances
from rl.run import metrics
from rl.run.run import Run
from rl.sampling import engines
from rl.sampling.evaluation import evaluate
from rl.sampling.rollout import gather_responses, lengths_of, sample_groups, scores_of, verify_engine
from rl.scoring.pool import make_scorer, stop_if_failing

DISTANCES = {  # (student, teacher) log-probs (R, K), beta -> distance (R,); None: the advantage of the sampled token
    "sampled": None,
    "forward_kl": distillation.forward_kl,
    "reverse_kl": distillation.reverse_kl,
    "jsd": distillation.jsd,
}


@dataclass(frozen=True)
class Args(flags.RL, correction.Correction, lora.LoRA):
    experiment_name: str = "distill"  # run in the trackers, and part of the folder
    # metrics and limits; a step beyond one prints a line that begins with ALARM
    alarms: tuple[str, ...] = (
        "rollout/logprob_gap_mean>0.05",
        "response_length/clip_ratio>0.5",
        "actor/entropy<0.01",
    )

    # --- model and data
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"  # Hugging Face id or folder of the student
    teacher_model: str = "Qwen/Qwen2.5-7B-Instruct"  # id or folder of the teacher, or its name at --teacher-url
    # vLLM's OpenAI-compatible server of the teacher; default: it is loaded and sharded over these ranks
    teacher_url: Free[str | None] = None
    teacher_timeout: Free[PositiveFinite] = 600.0  # seconds for one request to that server
    teacher_offload: Free[bool] = False  # keep a loaded teacher's weights in host memory while it is not asked
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
    rollout_n: AtLeast1 = 8  # responses per prompt (G); a reward's baseline is their mean
    temperature: Positive = 1.0  # of sampling; the trainer divides its logits by it too
    top_p: PositiveShare = 1.0  # the fewest likeliest tokens that together have this probability, also in the trainer
    top_k: TopK = -1  # sample among the k likeliest tokens; -1 all
    min_p: Share = 0.0  # leave out tokens less than this times as likely as the likeliest

    # --- algorithm

    # what pulls the student to the teacher: the sampled token's advantage, or a distance of distributions
    loss_mode: Literal[*DISTANCES] = "sampled"
    jsd_beta: Share = 0.5  # of jsd: near 0 as forward_kl, near 1 as reverse_kl; both ends excluded
    distill_top_k: TopK = 64  # the teacher's likeliest tokens that a distance looks at; -1 all, for small vocabularies
    distillation_loss_coef: NotNegative = 1.0  # weight of the distance, or of the sampled token's advantage
    reward_coef: NotNegative = 0.0  # weight of the reward's advantage, which is that of GRPO
    # how token losses become one number; Dr. GRPO: seq-mean-token-sum-norm, the GRPO paper: seq-mean-token-mean
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    loss_scale_factor: Positive | None = None  # divisor of seq-mean-token-sum-norm; default --max-response-length
    clip_ratio_low: NotNegative = 0.2  # ratio >= 1 - this
    clip_ratio_high: NotNegative = 0.2  # ratio <= 1 + this
    clip_ratio_c: Above1 = 3.0  # dual clip: a negative advantage's loss is at most this many times its size
    ppo_mini_batch_size: AtLeast1 | None = None  # prompts per optimizer step; default --train-batch-size: on policy
    ppo_epochs: AtLeast1 = 1  # passes over a step's responses

    # --- optimizer
    lr: NotNegative = 1e-6  # AdamW's learning rate after warm-up; LoRA wants about ten times that of full training
    lr_warmup_steps: Count = 0  # steps of linear warm-up
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"  # shape of the learning rate after warm-up
    weight_decay: NotNegative = 0.01  # AdamW's decoupled weight decay
    grad_clip: Positive = 1.0  # largest global gradient norm


def validate(args: Args) -> None:
    """Refuse settings that contradict each other, naming the flag, the value and the fix."""
    flags.check(args)
    if args.loss_mode == "jsd" and args.jsd_beta in (0, 1):
        raise ValueError(
            f"--jsd-beta {args.jsd_beta} makes no mixture; use --loss-mode forward_kl or reverse_kl instead"
        )
    if args.loss_mode != "sampled" and (args.top_p < 1 or args.top_k > 0 or args.min_p > 0):
        raise ValueError(
            f"--loss-mode {args.loss_mode} compares whole distributions; drop --top-p, --top-k and --min-p"
        )
    if args.distillation_loss_coef == args.reward_coef == 0:
        raise ValueError("--distillation-loss-coef 0 and --reward-coef 0 leave nothing to learn; raise one of them")
    if args.reward_coef and args.rollout_n < 2:
        raise ValueError(
            f"--reward-coef {args.reward_coef} compares responses to a prompt; --rollout-n must be at least 2"
        )
    if args.teacher_url and args.temperature != 1:
        raise ValueError(
            f"--temperature {args.temperature}: a server gives log-probs at temperature 1 only; leave it at 1"
        )
    if args.teacher_url and args.loss_mode != "sampled" and args.distill_top_k < 1:
        raise ValueError(
            f"--distill-top-k {args.distill_top_k}: a server gives the likeliest tokens only; give their number"
        )


def main(args: Args) -> dict[str, float]:
    """Distill; returns the metrics of the last step and of the last evaluation."""
    # Everything a user can get wrong is refused here, before a model is loaded.
    validate(args)
    tokenizer, train_rows, val_rows = load_prompts(args)
    check_teacher(args, tokenizer)
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
    teacher = load_teacher(args, ranks)
    scorer.add_reward_model(args, ranks)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    run.resume(
        {"actor": (policy, optimizer)},
        about=f"{args.train_batch_size} prompts x {args.rollout_n} responses and {updates_per_step} update(s) a step, "
        f"{len(train_rows)} prompts to draw from\n{scorer.report}",
        engine=engine,
        visiting=teacher if args.teacher_offload else None,
    )
    distance_of = DISTANCES[args.loss_mode]
    step_metrics, val_metrics = {}, {}

    for step in range(run.start, total_steps + 1):  # the last round only evaluates
        # Saves what `step` steps have made, if a save is due. A run that is asked to stop saves it too and ends, at a
        # call of the clock or of leave_if_asked. Once an optimizer step has been made, it ends after the step.
        clock = run.begin(step, state={})

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
            learn=torch.ones(len(responses), dtype=torch.bool),  # the teacher judges those without a score too
            mini_batch_size=mini_batch_size * args.rollout_n,
            max_tokens=args.ppo_max_token_len_per_gpu,
            pad_id=tokenizer.pad_token_id or 0,
            ranks=ranks,
        )  # (b, T)
        clock("batch")

        # 5. Fixed log-probs, without gradients: of the policy that starts this step, for the ratio in phase 7, and of
        # the teacher, for the sampled tokens and for those that it finds likeliest in their places.
        if not on_policy:
            batch = replace(batch, old_logp=fixed_logprobs(policy, batch, updates, sampling=sampling))
            clock("old_log_prob")
        top_k = 0 if distance_of is None else args.distill_top_k
        batch = add_teacher(args, teacher, batch, updates, top_k=top_k, ranks=ranks)
        clock("ref")

        # === algorithm ================================================================================================
        # 6. Advantages: of a response, from its reward as in GRPO; of each token, by how much likelier it was to the
        # teacher than to the student, whose log-prob is the one that the engine has reported.
        advantages_PG = args.reward_coef * advantages.grpo(scores_PG, lengths_PG)  # (P, G)
        of_tokens = distillation.sampled_advantage(batch.rollout_logp, batch.ref_logp, batch.response_mask)  # (b, T)
        token_coef = args.distillation_loss_coef if distance_of is None else 0.0
        distance_coef = args.distillation_loss_coef - token_coef  # one of the two is 0
        advantages_bT = advantages_PG.view(-1, 1)[batch.rows] * batch.response_mask + token_coef * of_tokens
        batch = replace(batch, advantages=advantages_bT)
        clock("adv")

        # 7. Update: a mini-batch is one optimizer step; its micro-batches only bound the memory. PPO's surrogate of the
        # advantages, and the distance between student and teacher at every token.
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
                logp, entropy, distance, shares = token_distances(
                    policy, micro, distance_of, beta=args.jsd_beta, sampling=sampling
                )
                old_logp = logp.detach() if on_policy else micro.old_logp
                pg_loss, clipped = losses.ppo_clip(logp, old_logp, micro.advantages, mask, **clips)
                weights = correction.weights(args, logp, old_logp, micro.rollout_logp, micro.advantages, mask)
                pg_loss = pg_loss * weights  # the policy that sampled is not quite the one that learns
                objective = pg_loss + distance_coef * distance
                loss = aggregate(objective, mask)
                sharding.last_micro_batch(policy, micro_rows is update.micro_batches[-1])  # the last syncs copies
                loss.backward()  # adds to the gradients, and sums them over ranks
                means.over_updates({"actor/loss": loss, "actor/pg_loss": aggregate(pg_loss, mask)})
                means.over_updates({"distillation/loss": aggregate(distance, mask)})
                means.over_tokens(mask, {"actor/entropy": entropy, "actor/pg_clipfrac": clipped})
                means.over_tokens(mask, {"distillation/kl": micro.rollout_logp - micro.ref_logp, **shares})
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
            **metrics.describe_tokens("critic/advantages", batch.advantages, batch.response_mask, ranks),
            **metrics.of_norms(norms),
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

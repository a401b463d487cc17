"""PPO: a critic learns what reward to expect at every token, and the policy is pushed towards what beats it.

    torchrun train_ppo.py --model Qwen/Qwen2.5-1.5B-Instruct                        # one GPU, GSM8K
    torchrun --nproc_per_node 8 train_ppo.py --model Qwen/Qwen2.5-7B-Instruct --critic-model path/to/reward_model

Proximal Policy Optimization (arXiv 1707.06347) for language models (InstructGPT, arXiv 2203.02155): every token is an
action of the policy, the model that learns, and the reward comes with the last one. A second model, the critic, guesses
at every token what reward will come: its *value*. The *advantage* of a token is how much better things went from there
on than the critic thought (generalised advantage estimation, arXiv 1506.02438). train_grpo.py explains other words.
Deviations from the papers, all common practice:
  1. advantages are whitened over all tokens of the step;  2. no KL term unless --use-kl-in-reward or --use-kl-loss;
  3. actor and critic are two models, each with its own optimizer, unless --share-backbone;
  4. dual clip: the loss of a negative advantage is bounded (--clip-ratio-c; arXiv 1912.09729).

Shapes: P prompts of a step, G responses to each, B = P * G of them, b of which this rank trains on; T tokens.
Every per-token tensor is (b, T), and position t describes token t given the tokens before it. See docs/train_ppo.md.
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
from rl.model.critic import check_critic, fixed_values, load_critic, token_logprobs_and_values, token_values
from rl.model.logprobs import fixed_logprobs, token_logprobs
from rl.run import metrics
from rl.run.run import Run
from rl.sampling import engines
from rl.sampling.evaluation import evaluate
from rl.sampling.rollout import gather_responses, sample_groups, scores_of, verify_engine
from rl.scoring.pool import make_scorer, stop_if_failing


@dataclass(frozen=True)
class Args(flags.RL, correction.Correction, lora.LoRA):
    experiment_name: str = "ppo"  # run in the trackers, and part of the folder
    # metrics and limits; a step beyond one prints a line that begins with ALARM
    alarms: tuple[str, ...] = (
        "rollout/logprob_gap_mean>0.05",
        "critic/vf_explained_var<-1",
        "response_length/clip_ratio>0.5",
        "actor/entropy<0.01",
    )

    # --- model and data
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # Hugging Face id or folder of the policy, and of the reference for KL
    train_batch_size: AtLeast1 = 512  # prompts a step (P); responses a step are train_batch_size * rollout_n
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
    rollout_n: AtLeast1 = 1  # responses per prompt (G); the critic is the baseline, so one is enough
    temperature: Positive = 1.0  # of sampling; the trainer divides its logits by it too
    top_p: PositiveShare = 1.0  # the fewest likeliest tokens that together have this probability, also in the trainer
    top_k: TopK = -1  # sample among the k likeliest tokens; -1 all
    min_p: Share = 0.0  # leave out tokens less than this times as likely as the likeliest

    # --- critic
    critic_model: str | None = None  # a reward model or a language model, by id or folder; default --model, a new head
    share_backbone: bool = False  # no critic of its own: a second head on the policy, trained in the same pass
    value_loss_coef: float = 0.1  # weight of the critic's loss with --share-backbone
    critic_lr: NotNegative = 1e-5  # AdamW's learning rate of the critic, after the same warm-up
    critic_warmup: Count = 0  # first steps in which only the critic learns
    cliprange_value: NotNegative = 0.5  # values move at most this far from the old ones before the loss stops following
    gamma: Share = 1.0  # discount of a reward that comes one token later
    lam: Share = 1.0  # lambda of GAE: 1 trusts the rewards (no bias), 0 the critic (little variance)
    critic_offload: Free[bool] = False  # keep the critic and its optimizer on the host while responses are sampled

    # --- algorithm

    # how token losses become one number; Dr. GRPO: seq-mean-token-sum-norm, the GRPO paper: seq-mean-token-mean
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    loss_scale_factor: Positive | None = None  # divisor of seq-mean-token-sum-norm; default --max-response-length
    clip_ratio_low: NotNegative = 0.2  # ratio >= 1 - this
    clip_ratio_high: NotNegative = 0.2  # ratio <= 1 + this
    clip_ratio_c: Above1 = 3.0  # dual clip: a negative advantage's loss is at most this many times its size
    ppo_mini_batch_size: AtLeast1 | None = None  # prompts per optimizer step; default: a quarter of --train-batch-size
    ppo_epochs: AtLeast1 = 1  # passes over a step's responses, of the critic and of the policy
    entropy_coeff: float = 0.0  # weight of an entropy bonus; 0 computes the entropy for the log only

    # --- KL to the reference, which is --model before training
    use_kl_loss: bool = False  # add kl_loss_coef * KL(policy, reference) to the loss; loads a frozen reference
    kl_loss_coef: float = 0.001  # weight of that KL term
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+", "unbiased"] = "k3"  # "+": gradient of k2
    ref_update_steps: AtLeast1 | None = None  # make the policy the new reference every so many steps; default: never
    use_kl_in_reward: bool = False  # subtract kl_coef * KL(policy, reference) from the reward of every token
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
    if args.share_backbone and (args.critic_model or args.critic_warmup or args.critic_offload):
        raise ValueError("--share-backbone has no critic for --critic-model, --critic-warmup or --critic-offload")


def main(args: Args) -> dict[str, float]:
    """Train with PPO; returns the metrics of the last step and of the last evaluation."""
    # Everything a user can get wrong is refused here, before a model is loaded.
    validate(args)
    tokenizer, train_rows, val_rows = load_prompts(args)
    check_critic(args, tokenizer)
    scorer = make_scorer(args, tokenizer, train_rows + val_rows)
    sampling = sampling_of(args, tokenizer)
    total_steps = args.total_training_steps or args.total_epochs * (len(train_rows) // args.train_batch_size)
    mini_batch_size = args.ppo_mini_batch_size or math.ceil(args.train_batch_size / 4)  # prompts
    updates_per_step = args.ppo_epochs * math.ceil(args.train_batch_size / mini_batch_size)
    on_policy = updates_per_step == 1  # the policy that sampled is the one being updated: old_logp costs no extra pass

    run = Run(args, tokenizer, total_steps)
    ranks = run.ranks
    policy = models.load_policy(args, ranks, value_head=args.share_backbone)
    engine = engines.make_engine(args, ranks)
    critic = policy if args.share_backbone else load_critic(args, ranks)
    reference = models.load_reference(args, ranks, policy) if args.use_kl_loss or args.use_kl_in_reward else None
    scorer.add_reward_model(args, ranks)
    adamw = partial(torch.optim.AdamW, weight_decay=args.weight_decay, fused=True)
    trained = {"actor": (policy, adamw(policy.parameters()))}
    if not args.share_backbone:
        trained["critic"] = (critic, adamw(critic.parameters()))
    refreshed = {"reference": (reference, None)} if args.ref_update_steps else {}  # part of checkpoints, if it changes
    run.resume(
        {**trained, **refreshed},
        about=f"{args.train_batch_size} prompts x {args.rollout_n} responses and {updates_per_step} update(s) a step, "
        f"{len(train_rows)} prompts to draw from\n{scorer.report}",
        engine=engine,
        offloaded=("critic",) if args.critic_offload else (),
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
        run.offload()  # the critic, if --critic-offload
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
        responses = gather_responses(own_samples, own_scores, rows, ranks)  # B
        stop_if_failing(responses, args.reward_max_error_frac)
        scores_B = scores_of(responses)  # NaN for a response without a score
        clock("reward")

        # 4. Batch: plan optimizer steps and the micro-batches of every rank, and send each rank the tokens of its own.
        batch, updates = make_batch(
            responses,
            learn=scores_B.isfinite(),  # a response without a score teaches nothing
            mini_batch_size=mini_batch_size * args.rollout_n,
            max_tokens=args.ppo_max_token_len_per_gpu,
            pad_id=tokenizer.pad_token_id or 0,
            ranks=ranks,
        )  # (b, T)
        clock("batch")

        # 5. Fixed values, of the critic that starts this step, and fixed log-probs, without gradients: of the policy
        # that starts it, for the ratio in phase 7, and of the reference, for the KL terms.
        batch = replace(batch, values=fixed_values(critic, batch, updates))
        clock("values")
        if not on_policy or args.use_kl_in_reward:
            batch = replace(batch, old_logp=fixed_logprobs(policy, batch, updates, sampling=sampling))
            clock("old_log_prob")
        if reference is not None:
            if args.ref_update_steps and step > 0 and step % args.ref_update_steps == 0:
                run.refresh(reference, policy)
            batch = replace(batch, ref_logp=fixed_logprobs(reference, batch, updates, sampling=sampling))
            clock("ref")

        # === algorithm ================================================================================================
        # 6. Advantages: the score comes with the last token. How much better did it go, from each token on, than the
        # critic thought?
        mask = batch.response_mask  # (b, T)
        is_last = (mask.cumsum(1) == mask.sum(1, keepdim=True)) & mask.bool()
        rewards, kl_metrics = torch.where(is_last, scores_B[batch.rows].view(-1, 1), 0.0), {}  # (b, T)
        if args.use_kl_in_reward:
            token_kl = losses.kl(batch.old_logp, batch.ref_logp, args.kl_penalty) * mask  # (b, T)
            rewards = rewards - kl_coef * token_kl
            own_kl = token_kl.sum(1) / mask.sum(1).clamp(min=1)  # (b,) of a token, on average over its response
            mean_kl = ranks.all_rows(own_kl, batch.rows, len(responses))[scores_B.isfinite()].mean().nan_to_num().item()
            kl_metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": kl_coef}
            if args.kl_ctrl_type == "adaptive":
                num_responses = int(scores_B.isfinite().sum())
                kl_coef = schedule.adaptive_kl_coef(
                    kl_coef, mean_kl, target=args.kl_target, horizon=args.kl_horizon, num_responses=num_responses
                )
        gae, returns = advantages.gae(rewards, batch.values, mask, gamma=args.gamma, lam=args.lam)  # (b, T)
        mean, var = ranks.moments(gae, mask)  # over all tokens of the step, on all ranks
        batch = replace(batch, advantages=advantages.whiten(gae, mask, mean=mean, var=var), returns=returns)
        clock("adv")

        # 7. Update: a mini-batch is one optimizer step; its micro-batches only bound the memory.
        learners = trained if step >= args.critic_warmup else {"critic": trained["critic"]}
        kind, warmup, late = args.lr_scheduler_type, args.lr_warmup_steps, args.critic_warmup
        lrs = {  # the actor's schedule begins when the actor does
            "actor": args.lr * schedule.lr_factor(kind, max(step - late, 0), warmup, total_steps - late),
            "critic": args.critic_lr * schedule.lr_factor(kind, step, warmup, total_steps),
        }
        for name, (_, optimizer) in learners.items():
            optimizer.param_groups[0]["lr"] = lrs[name]
        clips = dict(
            clip_ratio_low=args.clip_ratio_low, clip_ratio_high=args.clip_ratio_high, clip_ratio_c=args.clip_ratio_c
        )
        heads = dict(sampling=sampling, entropy_grad=args.entropy_coeff != 0)
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
                if args.share_backbone:
                    logp, entropy, values = token_logprobs_and_values(policy, micro, **heads)
                else:
                    values = token_values(critic, micro)
                vf_losses, vf_clipped = losses.value_loss(
                    values, micro.values, micro.returns, mask, cliprange_value=args.cliprange_value
                )
                vf_loss = aggregate(vf_losses, mask)
                means.over_updates({"critic/vf_loss": vf_loss})
                means.over_tokens(mask, {"critic/vf_clipfrac": vf_clipped})
                if not args.share_backbone:
                    sharding.last_micro_batch(critic, micro_rows is update.micro_batches[-1])  # the last syncs copies
                    vf_loss.backward()  # adds to the gradients, and sums them over ranks
                    if "actor" not in learners:
                        continue
                    logp, entropy = token_logprobs(policy, micro, **heads)
                old_logp = logp.detach() if on_policy else micro.old_logp
                pg_loss, clipped = losses.ppo_clip(logp, old_logp, micro.advantages, mask, **clips)
                weights = correction.weights(args, logp, old_logp, micro.rollout_logp, micro.advantages, mask)
                pg_loss = pg_loss * weights  # the policy that sampled is not quite the one that learns
                objective = pg_loss - args.entropy_coeff * entropy
                if args.use_kl_loss:
                    kl = losses.kl(logp, micro.ref_logp, args.kl_loss_type, old_logp=old_logp)
                    objective = objective + args.kl_loss_coef * kl
                    means.over_updates({"actor/kl_loss": aggregate(kl, mask)})
                loss = aggregate(objective, mask)
                if args.share_backbone:
                    loss = loss + args.value_loss_coef * vf_loss
                sharding.last_micro_batch(policy, micro_rows is update.micro_batches[-1])  # the last syncs copies
                loss.backward()
                means.over_updates({"actor/loss": loss, "actor/pg_loss": aggregate(pg_loss, mask)})
                means.over_tokens(mask, {"actor/entropy": entropy, "actor/pg_clipfrac": clipped})
                means.between_policies(mask, logp, old_logp, micro.rollout_logp, weights)
            norms.append({x: sharding.clip_grad_norm(model, args.grad_clip) for x, (model, _) in learners.items()})
            usable = run.is_usable(norms[-1], update.num_tokens, batch)  # raises at the third in a row that is not
            for _, optimizer in learners.values():
                if usable:
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        clock("update_actor")
        # === end ======================================================================================================

        # 8. Report: losses are means over updates, diagnostics means over all tokens of all ranks.
        rewards_B = ranks.all_rows(rewards.sum(1), batch.rows, len(responses))
        found = {
            **metrics.of_scores(responses, rows),
            **metrics.of_lengths(responses),
            **metrics.describe("critic/rewards", rewards_B[scores_B.isfinite()]),
            **metrics.of_critic(batch, ranks),
            **metrics.of_norms(norms),
            **kl_metrics,
            **{"rollout/logprob_gap_max": 0.0} | means.reduce(),  # absent in --critic-warmup
            **{f"{name}/lr": lrs[name] for name in learners},
        }
        step_metrics = run.log_step(step + 1, found, **metrics.count(responses))
        run.show_sample(own_samples, own_scores)
        # 9. Checkpoint: weights, optimizers and state are saved by the next round's `begin`.

    run.close(scorer, engine)
    return step_metrics | val_metrics


if __name__ == "__main__":
    main(flags.parse(Args, __doc__))

"""PPO: a critic predicts how a response will score, and tokens that do better than predicted become more likely.

    torchrun train_ppo.py --model Qwen/Qwen2.5-1.5B-Instruct                        # one GPU, GSM8K
    torchrun --nproc_per_node 8 train_ppo.py --model Qwen/Qwen2.5-7B-Instruct --critic-model path/to/reward_model

Proximal Policy Optimization (arXiv 1707.06347) for language models (InstructGPT, arXiv 2203.02155). The actor is the
policy, which is the model that answers. The reward r_t is the score of the response at its last token, and 0 at all
others. The critic is a second model. Before each token t it predicts the sum of the rewards from t on, which is called
the value V_t. Let l_t be the log-probability of token t given the tokens before it. l_old, V_old, A and R are computed
when the step begins:

    TD error      delta_t = r_t + gamma V_{t+1} - V_t       how much better token t was than predicted
    advantage     A_t     = delta_t + gamma lam A_{t+1}     generalized advantage estimation (GAE, arXiv 1506.02438)
    return        R_t     = A_t + V_t                       what the critic should have predicted
    ratio         ratio_t = exp(l_t - l_old_t)
    actor's loss          = mean over all sampled tokens of max(-A_t ratio_t, -A_t clip(ratio_t, 1 - low, 1 + high))
    critic's loss         = mean over them of max((V_t - R_t)^2, (clip(V_t, V_old_t - c, V_old_t + c) - R_t)^2) / 2

Where this departs from the papers, as most implementations do:
  1. Advantages are whitened, which means shifted and scaled to mean 0 and variance 1 over all tokens of a step.
  2. There is no KL term unless --use-kl-in-reward or --use-kl-loss.
  3. Actor and critic are two models.
  4. Where A is negative, the actor's loss is at most 3 |A| (dual clip, arXiv 1912.09729).

Shapes are those of train_grpo.py. docs/train_ppo.md explains more.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from extras.agents import token_rewards
from extras.judges import check_critic, explained_variance, fixed_values, load_critic, token_values
from extras.kl_terms import KLTerms
from rl.data.batching import make_batch
from rl.data.types import take_rows
from rl.flags import Above1, AtLeast1, Count, Few, Free, NotNegative, Positive, Share
from rl.formulas import losses, schedule
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
    text_only = "the critic of train_ppo.py"  # so no row may have images
    # The actor is loaded from this Hugging Face id or folder, and so is the reference for KL terms.
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"
    # The critic is loaded from this id or folder, which holds a reward model or a language model. Its default is that
    # of --model, with a freshly initialized value head.
    critic_model: str | None = None
    # Each step takes this many prompts (P). With one response to each, PPO needs more of them than GRPO.
    train_batch_size: AtLeast1 = 512
    # Each prompt gets this many responses (G). The critic predicts what to expect, so one is enough.
    rollout_n: Few = 1
    # A prompt has at most this many tokens. A longer one is an error unless --filter-overlong-prompts.
    max_prompt_length: AtLeast1 = 512
    max_response_length: AtLeast1 = 1024  # A response has at most this many tokens. A longer one is cut.
    # Each optimizer step takes the responses to this many prompts. The default is a quarter of --train-batch-size.
    ppo_mini_batch_size: AtLeast1 | None = None
    ppo_epochs: Few = 1  # The updates of a step, of critic and actor, use each response this many times.
    gamma: Share = 1.0  # A reward that comes one token later is multiplied by this discount.
    # This is lambda of GAE. With 1 it trusts the rewards (no bias), with 0 the critic (little variance).
    lam: Share = 1.0
    # The critic stops moving a value that has moved this far towards its return in a step (c).
    cliprange_value: NotNegative = 0.5
    # Clip the ratio from below at 1 minus this, for tokens that are being pushed down (A < 0).
    clip_ratio_low: NotNegative = 0.2
    # Clip the ratio from above at 1 plus this, for tokens that are being pushed up (A > 0).
    clip_ratio_high: NotNegative = 0.2
    clip_ratio_c: Above1 = 3.0  # Where A < 0, the loss of a token is at most this times |A| (dual clip).
    # token-mean is the mean of both losses over all tokens (DAPO). The others first reduce each response to the sum of
    # its tokens, to their mean, or to the sum divided by --loss-scale-factor (Dr. GRPO), and then take the mean over
    # responses.
    loss_agg_mode: Literal[*losses.MEANS] = "token-mean"
    # seq-mean-token-sum-norm divides by this. The default is --max-response-length.
    loss_scale_factor: Positive | None = None
    entropy_coeff: float = 0.0  # This is the weight of an entropy bonus.
    # The actor's AdamW has this learning rate after warm-up. LoRA needs about ten times that of full training.
    lr: NotNegative = 1e-6
    critic_lr: NotNegative = 1e-5  # The critic's AdamW has this learning rate after warm-up.
    critic_warmup: Count = 0  # Only the critic learns in the first steps, of which there are this many.
    lr_warmup_steps: Count = 0  # The learning rates of actor and critic rise linearly over this many steps.
    # After warm-up, the learning rates stay constant, fall linearly, or fall as a cosine does.
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NotNegative = 0.01  # This is AdamW's decoupled weight decay.
    grad_clip: Positive = 1.0  # A gradient of either model whose global norm is larger than this is scaled down to it.
    critic_offload: Free[bool] = False  # Keep the critic and its optimizer on the host while responses are sampled.
    seed: Count = 0  # The seed decides, together with the step, the order of the data and what is sampled.
    kl: KLTerms = KLTerms()
    logging: LoggingRL = LoggingRL(
        experiment_name="ppo",
        alarms=(
            "rollout/logprob_gap_mean>0.05",
            "critic/vf_explained_var<-1",
            "response_length/clip_ratio>0.5",
            "actor/entropy<0.01",
        ),
    )


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """The A and R of the docstring above, from r and V. All are (b, T), and 0 where mask is 0. Tokens with mask 0, such
    as the output of a tool, are skipped, so that t + 1 is the next token that the actor sampled. After the last token V
    and A are 0.
    """
    A, is_sampled = torch.zeros_like(values), mask.bool()
    next_A = next_V = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_V - values[:, t]
        next_A = torch.where(is_sampled[:, t], delta + gamma * lam * next_A, next_A)
        next_V = torch.where(is_sampled[:, t], values[:, t], next_V)
        A[:, t] = next_A
    return torch.where(is_sampled, A, 0.0), torch.where(is_sampled, A + values, 0.0)


def main(args: Args) -> dict[str, float]:
    """Train with PPO, and return the metrics of the last step and of the last evaluation."""
    # Flags, data and rewards are checked here, before a model is loaded.
    if args.envs.agent:
        raise ValueError("--agent: PPO defines no value of a response with several rows yet; use train_grpo.py")
    task = load_task(args)
    longest = task.longest
    check_critic(args.critic_model, task.tokenizer, args.lora, policy=args.model, longest=longest)
    mini_batch_size = args.ppo_mini_batch_size or math.ceil(args.train_batch_size / 4)  # prompts

    run = Run(args, task.tokenizer, task.total_steps)
    ranks, sampling, critic_path = run.ranks, task.sampling, args.critic_model or args.model
    actor = load_model(args.model, ranks, args.lora, run.memory, longest=longest, seed=args.seed)
    sampler = open_sampler(args, task, run)
    critic = load_critic(critic_path, ranks, args.lora, run.memory, longest=longest, seed=args.seed)
    reference = load_reference(args.model, ranks, actor, run.memory, longest=longest) if args.kl.is_used else None
    adamw = partial(torch.optim.AdamW, weight_decay=args.weight_decay, fused=True)
    optimizers = {"actor": adamw(actor.parameters()), "critic": adamw(critic.parameters())}
    saved = {"actor": (actor, optimizers["actor"]), "critic": (critic, optimizers["critic"])}
    saved |= {"reference": (reference, None)} if args.kl.ref_update_steps else {}  # It changes without an optimizer.
    offloaded = ("critic",) if args.critic_offload else ()
    run.begin(saved, sampler, offloaded=offloaded, mini_batch_size=mini_batch_size)
    kl_coef = args.kl.first_coef(run.state)

    def loop_state() -> dict[str, Any]:
        return {"kl_coef": kl_coef} | sampler.state()

    # run.steps() saves a checkpoint before each step if --save-freq says so. A run that is asked to stop saves and
    # exits at the next end of a phase or micro-batch. A step that has changed the weights is finished first.
    for step in run.steps(loop_state):
        run.evaluate_if_due(sampler.evaluate, actor)

        # 1. Sample. The engine gets the actor's weights, and samples G responses to each prompt. The run ends if the
        # trainer's log-probs of a few of them differ too much from the engine's. All ranks get the scores and lengths
        # of the whole step. Tokens stay on the rank that sampled them until phase 2.
        responses = sampler.sample(actor, step)  # B
        is_scored = scores_of(responses).isfinite()  # (B,)

        # 2. Batch. Divide the step into updates, which are one optimizer step each, and each update into micro-batches.
        # Send each rank the tokens that it trains on. A response without a score teaches nothing, so its mask is 0.
        batch, updates = make_batch(
            responses,
            mini_batch_size=mini_batch_size * args.rollout_n,
            max_tokens=run.memory.ppo_max_token_len_per_gpu,
            ranks=ranks,
            version=sampler.version,
        )  # (b, T)
        num_updates = len(updates) * args.ppo_epochs
        run.may_stop_after("batch")

        # 3. Values and log-probs that stay fixed while the models change. They are by the critic and the actor that
        # start the step, and by the reference. With one update per step the log-probs of the actor are not needed,
        # since the actor has not changed yet when its loss is computed.
        batch = replace(batch, values=fixed_values(critic, batch, updates))
        run.may_stop_after("values")
        if num_updates > 1 or args.kl.use_kl_in_reward:
            batch = replace(batch, old_logp=fixed_logprobs(actor, batch, updates, sampling=sampling))
            run.may_stop_after("old_log_prob")
        if reference is not None:
            if args.kl.ref_update_steps and step > 0 and step % args.kl.ref_update_steps == 0:
                run.refresh(reference, actor)
            batch = replace(batch, ref_logp=fixed_logprobs(reference, batch, updates, sampling=sampling))
            run.may_stop_after("ref")

        # === algorithm ================================================================================================
        # 4. Advantages. The reward is the score, at the last token of a response. What an environment gave for a turn
        # is at the end of that turn. From each token on, how much better did it go than the critic predicted?
        mask = batch.response_mask  # (b, T): 1 for the tokens that the actor sampled
        rewards, kl_metrics = token_rewards(responses, batch), {}  # (b, T), the score at the last token of a response
        if args.kl.use_kl_in_reward:
            token_kl = losses.kl(batch.old_logp, batch.ref_logp, args.kl.kl_penalty) * mask  # k1 is old_logp - ref_logp
            rewards = rewards - kl_coef * token_kl
            kl_coef, kl_metrics = args.kl.next_coef(kl_coef, token_kl, batch, is_scored, ranks)  # for the next step
        A, R = gae(rewards, batch.values, mask, gamma=args.gamma, lam=args.lam)  # (b, T)
        mean, var = ranks.moments(A, mask)  # over all tokens of the step, on all ranks
        A = ((A.double() - mean) / math.sqrt(var + 1e-8) * mask).to(A.dtype)  # whitened
        batch = replace(batch, advantages=A, returns=R)
        run.may_stop_after("adv")

        # 5. Updates. A mini-batch makes one optimizer step of each model, and its micro-batches only save memory. In
        # the first --critic-warmup steps only the critic learns. The actor's learning-rate schedule begins after them.
        factor = partial(schedule.lr_factor, args.lr_scheduler_type, warmup_steps=args.lr_warmup_steps)
        lrs = {"critic": args.critic_lr * factor(step, total_steps=task.total_steps)}
        if (actor_step := step - args.critic_warmup) >= 0:
            lrs["actor"] = args.lr * factor(actor_step, total_steps=task.total_steps - args.critic_warmup)
        for name, lr in lrs.items():
            optimizers[name].param_groups[0]["lr"] = lr
        means, norms = metrics.Means(ranks, num_updates=num_updates), []  # Both collect metrics for phase 6.
        for update in updates * args.ppo_epochs:  # the list of mini-batches, once for each epoch, in the same order
            # aggregate(x, mask) is the sum of x over the tokens / num_tokens, unless --loss-agg-mode has another mean.
            # The counts are of the whole mini-batch on all ranks, so the gradients of micro-batches and ranks add up.
            scale = args.loss_scale_factor or args.max_response_length
            counts = dict(num_tokens=update.num_tokens, num_seqs=update.num_seqs, scale=scale)
            aggregate = partial(losses.aggregate, mode=args.loss_agg_mode, **counts)
            for micro_rows in run.micro_batches(update):
                micro, is_last = take_rows(batch, micro_rows, ranks.device), micro_rows is update.micro_batches[-1]
                A, R, mask = micro.advantages, micro.returns, micro.response_mask  # (b', t)

                # The critic. Where the clip decides, the gradient is 0.
                V, V_old, c = token_values(critic, micro), micro.values, args.cliprange_value
                error, clipped_error = (V - R).square(), (V.clamp(V_old - c, V_old + c) - R).square()
                vf_loss = aggregate(torch.maximum(error, clipped_error) / 2, mask)
                backward(critic, vf_loss, is_last=is_last)
                means.over_updates({"critic/vf_loss": vf_loss})
                means.over_tokens(mask, {"critic/vf_clipfrac": (clipped_error > error).float()})
                if "actor" not in lrs:
                    continue  # The step is one of the first --critic-warmup steps.

                # The actor. The gradient of the ratio is the ratio times the gradient of logp. Where a clip decides, it
                # is 0.
                logp, entropy = token_logprobs(actor, micro, sampling=sampling, entropy_grad=args.entropy_coeff != 0)
                old_logp = logp.detach() if num_updates == 1 else micro.old_logp
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
                backward(actor, loss, is_last=is_last)
                means.over_updates({"actor/loss": loss, "actor/pg_loss": aggregate(pg_loss, mask)})
                means.over_tokens(mask, {"actor/entropy": entropy, "actor/pg_clipfrac": is_clipped})
                means.between_policies(micro, logp, old_logp, weights)
            norm = {"actor": clip_grad_norm(actor, args.grad_clip)} if "actor" in lrs else {}
            norm["critic"] = clip_grad_norm(critic, args.grad_clip)
            if math.isfinite(sum(norm.values())) and update.num_tokens > 0:
                for name in norm:
                    optimizers[name].step()
            else:
                run.skip_update(sum(norm.values()), update.num_tokens, batch)  # raises an error at the third in a row
            for optimizer in optimizers.values():
                optimizer.zero_grad(set_to_none=True)
            norms.append(norm)
        run.may_stop_after("update_actor")
        # === end ======================================================================================================

        # 6. Report. Losses are means over updates. Entropy, clipping and the like are means over all tokens. Scores,
        # advantages and lengths have their mean, maximum and minimum over all responses.
        step_metrics = {
            **metrics.of_sampled(responses, args.rollout_n),
            **metrics.describe("critic/rewards", ranks.all_rows(rewards.sum(1), batch.rows, len(responses))[is_scored]),
            **metrics.describe_tokens("critic/advantages", batch.advantages, batch.response_mask, ranks),
            **metrics.describe_tokens("critic/values", batch.values, batch.response_mask, ranks),
            **metrics.describe_tokens("critic/returns", batch.returns, batch.response_mask, ranks),
            "critic/vf_explained_var": explained_variance(batch, ranks),
            **metrics.of_norms(norms),
            **kl_metrics,
            **means.reduce(),
            **{f"{name}/lr": lr for name, lr in lrs.items()},
        }
        run.log_step(step_metrics, responses=responses, batch=batch)

    run.evaluate_if_due(sampler.evaluate, actor)  # the last actor
    return run.close(sampler)


if __name__ == "__main__":
    main(parse(Args, __doc__))

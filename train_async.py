"""Asynchronous GRPO: other processes, the samplers, sample while the trainers train.

    torchrun --nproc_per_node 4 train_async.py --model Qwen/Qwen2.5-7B-Instruct --samplers 4    # eight GPUs
    GLASSRL_SAMPLER_TOKEN=TOKEN python -m extras.samplers --connect tcp://HOST:PORT             # one more, anywhere

The algorithm is that of train_grpo.py, and so are the loss and the names. What differs is who samples. The ranks of
torchrun train. Each sampler has an engine; it gets prompts and weights from rank 0, and sends groups of responses. New
weights reach it between two decoding steps, and responses in flight go on with them. So a step may learn from tokens
of older weights: their age, in versions, is at most --max-staleness S. S = 0 is train_grpo.py with more processes.

The policy b that sampled a token is then not the one that the step begins with (AReaL, arXiv 2505.24298):

    ratio       ratio_it = exp(l_it - l_prox_it)       l_prox: by the proximal policy, around which the ratio is clipped
    weight      w_it     = exp(l_prox_it - b_it)       cut to at most --rollout-is-threshold; no gradient
    loss        L        = mean over all sampled tokens of w_it times the clipped loss of train_grpo.py

--proximal-policy says which one that is: the policy that starts the step; the sampler's, so that w = 1 (as in PPO); or
one between the two that costs no forward pass, AReaL's log-linear proxy: l_prox = b + (l - b) a / (a + 1) for a token
of age a. docs/train_async.md explains all of this in more detail.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from extras.correction import Correction
from extras.samplers import SamplerFlags, open_pool
from rl.data.batching import make_batch
from rl.data.types import take_rows
from rl.flags import Above1, AtLeast1, Count, Few, NotNegative, Positive
from rl.formulas import advantages, schedule
from rl.model.load import load_model, load_reference, weights_for_engine
from rl.model.logprobs import fixed_logprobs, token_logprobs
from rl.model.sharding import backward, clip_grad_norm
from rl.run import metrics
from rl.run.arguments import RL, LoggingRL, parse
from rl.run.run import Run
from rl.run.task import load_task
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.responses import scores_of


@dataclass(frozen=True)
class Args(RL):  # and the groups of flags in rl/run/arguments.py: data, rewards, engine, LoRA, memory, checkpoints ...
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # The policy is loaded from this Hugging Face id or folder.
    train_batch_size: AtLeast1 = 128  # Each step takes this many prompts (P).
    # Each prompt gets this many responses (G). With one response there is nothing to compare it with.
    rollout_n: Few = 8
    # A prompt has at most this many tokens. A longer one is an error unless --filter-overlong-prompts.
    max_prompt_length: AtLeast1 = 512
    max_response_length: AtLeast1 = 1024  # A response has at most this many tokens. A longer one is cut.
    # Each optimizer step takes the responses to this many prompts. By default it takes all of a step.
    ppo_mini_batch_size: AtLeast1 | None = None
    ppo_epochs: Few = 1  # The updates of a step pass over its responses this many times.
    # Clip the ratio from below at 1 minus this, for tokens that are being pushed down (A < 0).
    clip_ratio_low: NotNegative = 0.2
    # Clip the ratio from above at 1 plus this, for tokens that are being pushed up (A > 0). DAPO has 0.28.
    clip_ratio_high: NotNegative = 0.2
    clip_ratio_c: Above1 = 3.0  # Dual clip: where A < 0, the loss of a token is at most this times |A|.
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
    # The ratio is clipped around the proximal policy. That is the policy that starts the step, one between it and the
    # policy that sampled the token, or the policy that sampled the token.
    proximal_policy: Literal["recomputed", "loglinear", "sampler"] = "recomputed"
    seed: Count = 0  # The seed decides, together with a prompt's number, the order of the data and what is sampled.
    pool: SamplerFlags = SamplerFlags()
    rollout: EngineFlags = EngineFlags(gpu_memory_utilization=0.9)
    correction: Correction = Correction(rollout_is="token")
    logging: LoggingRL = LoggingRL(
        experiment_name="async",
        alarms=(
            "rollout/logprob_gap_mean>0.05",
            "reward/zero_std_frac>0.95",
            "response_length/clip_ratio>0.5",
            "actor/entropy<0.01",
        ),
    )


def main(args: Args) -> dict[str, float]:
    """Train with GRPO; returns the metrics of the last step and of the last evaluation."""
    # Flags, data and rewards are checked here, before a model is loaded.
    task = load_task(args)
    mini_batch_size = args.ppo_mini_batch_size or args.train_batch_size  # prompts
    num_updates = args.ppo_epochs * math.ceil(args.train_batch_size / mini_batch_size)  # in a step

    run = Run(args, task.tokenizer, task.total_steps)
    ranks, longest, sampling = run.ranks, task.longest, task.sampling
    samplers = open_pool(args.pool, task, args.envs, ranks, run.folder.root, run.state)  # they start meanwhile
    policy = load_model(args.model, ranks, args.lora, run.memory, longest=longest, seed=args.seed)
    reference = load_reference(args.model, ranks, policy, run.memory, longest=longest) if args.use_kl_loss else None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    run.begin({"actor": (policy, optimizer)}, samplers)

    # Saves a checkpoint before each step, if --save-freq says so. A run that is asked to stop saves and exits at the
    # next end of a phase or micro-batch. A step that has changed weights is made to its end first.
    for step in run.steps(samplers.state):
        # 1. Weights and prompts: the samplers get the policy's weights, and as many prompts as staleness allows. A
        # prompt is a pure function of the seed and its number. A step trains on the P next ones, whoever ends first.
        samplers.push(step, weights_for_engine(policy, ranks))
        run.may_stop_after("update_weights")
        if run.evaluation_is_due():
            samplers.start_evaluation()

        # 2. Sample: wait for G responses to each of the P prompts; most were sampled while the last step trained. Other
        # processes have been scoring since a group was complete. Then all ranks get the scores and lengths of the whole
        # step; tokens are on rank 0 until phase 3.
        responses = samplers.sample(run.may_stop_after)  # B
        scores_PG = scores_of(responses).view(-1, args.rollout_n)  # (P, G), NaN for a response without a score

        # 3. Batch: divide the step into updates, one optimizer step each, and these into micro-batches for each rank,
        # and send each rank the tokens that it trains on. A response without a score teaches nothing: its mask is 0.
        batch, updates = make_batch(
            responses,
            mini_batch_size=mini_batch_size * args.rollout_n,
            max_tokens=run.memory.ppo_max_token_len_per_gpu,
            ranks=ranks,
            version=step,
        )  # (b, T); with ages, if a token is older than these weights
        run.may_stop_after("batch")

        # 4. Log-probs that stay fixed while the policy changes. With one update per step, those of the policy that
        # starts it are not needed here: they are l in phase 6.
        if num_updates > 1 and args.proximal_policy == "recomputed":
            batch = replace(batch, old_logp=fixed_logprobs(policy, batch, updates, sampling=sampling))
            run.may_stop_after("old_log_prob")
        if reference is not None:
            batch = replace(batch, ref_logp=fixed_logprobs(reference, batch, updates, sampling=sampling))
            run.may_stop_after("ref")

        # === algorithm ================================================================================================
        # 5. Advantages: how much better than its group was each response? All its tokens get this number. Only scored
        # responses count; a group with only one has mean 0 and standard deviation 1.
        mean, std = advantages.group_mean_std(scores_PG)  # (P, 1)
        advantages_PG = ((scores_PG - mean) / (std + 1e-6)).nan_to_num()  # (P, G), 0 for a response without a score
        # batch.rows (b,): which of the B responses this rank trains on.
        batch = replace(batch, advantages=advantages_PG.view(-1, 1)[batch.rows] * batch.response_mask)  # (b, T)
        run.may_stop_after("adv")

        # 6. Updates: one for each mini-batch; its micro-batches only save memory.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, task.total_steps)
        optimizer.param_groups[0]["lr"] = lr
        means, norms = metrics.Means(ranks, num_updates=num_updates), []  # means: of tokens or updates, on all ranks
        for update in updates * args.ppo_epochs:  # the list of mini-batches, as often as there are epochs
            # The mini-batch's tokens on all ranks: divided by these, gradients of micro-batches and ranks just add up.
            num_tokens = max(update.num_tokens, 1)
            for micro_rows in run.micro_batches(update):
                micro = take_rows(batch, micro_rows, ranks.device)  # (b', T'): cut to their longest row
                # mask: 1 for sampled tokens of scored responses
                A, mask, proximal = micro.advantages, micro.response_mask, args.proximal_policy
                logp, entropy = token_logprobs(policy, micro, sampling=sampling)
                if proximal == "sampler":
                    old_logp = micro.rollout_logp
                elif proximal == "loglinear":
                    ages = micro.columns["ages"].clamp(min=0)  # of tokens that were not sampled they are -1
                    old_logp = torch.lerp(micro.rollout_logp, logp.detach(), ages / (ages + 1))  # a fresh one: rollout
                else:
                    old_logp = logp.detach() if num_updates == 1 else micro.old_logp

                # The gradient of the ratio is ratio * gradient of logp, or 0 where a clip decides. With one update a
                # step and the proximal policy recomputed, as by default, the ratio is 1 and nothing is clipped.
                ratio = (logp - old_logp).clamp(-20, 20).exp()  # clamped against overflow
                unclipped = -A * ratio
                clipped = -A * ratio.clamp(1 - args.clip_ratio_low, 1 + args.clip_ratio_high)
                pg_loss = torch.maximum(unclipped, clipped)
                # Dual clip: where A < 0 nothing else bounds the loss, and one token could outweigh all others.
                pg_loss = torch.where(A < 0, torch.minimum(pg_loss, -A * args.clip_ratio_c), pg_loss)
                is_clipped = (pg_loss != unclipped).float()
                # How much more likely the proximal policy makes a token than the one that sampled it; no gradient.
                weights = args.correction.weights(logp, old_logp, micro.rollout_logp, A, mask)
                pg_loss = pg_loss * weights
                loss = pg_loss
                if reference is not None:
                    x = (micro.ref_logp - logp).clamp(-20, 20)
                    kl = (x.expm1() - x).clamp(max=10)  # k3 = e^x - x - 1, an estimate of KL(policy, reference)
                    loss = loss + args.kl_loss_coef * kl
                    means.over_updates({"actor/kl_loss": (kl * mask).sum() / num_tokens})
                loss = (loss * mask).sum() / num_tokens
                backward(policy, loss, is_last=micro_rows is update.micro_batches[-1])
                means.over_updates({"actor/loss": loss, "actor/pg_loss": (pg_loss * mask).sum() / num_tokens})
                means.over_tokens(mask, {"actor/entropy": entropy, "actor/pg_clipfrac": is_clipped})
                means.between_policies(micro, logp, old_logp, weights, proximal)
            if not norms:  # the last moment in which the policy has the weights that were pushed
                samplers.verify(policy, args.rollout)
                run.may_stop_after("update_actor")
            norm = clip_grad_norm(policy, args.grad_clip)
            if math.isfinite(norm) and update.num_tokens > 0:
                optimizer.step()
            else:
                run.skip_update(norm, update.num_tokens, batch)  # raises at the third in a row
            optimizer.zero_grad(set_to_none=True)
            norms.append({"actor": norm})
        run.may_stop_after("update_actor")
        # === end ======================================================================================================

        # Held-out prompts were answered beside all this, by the weights that the step began with.
        run.evaluate_if_due(samplers.evaluate)

        # 7. Report: losses are means over updates; entropy, clipping and the like are means over all tokens;
        # scores, advantages and lengths are described over all responses.
        step_metrics = {
            **metrics.of_sampled(responses, args.rollout_n),
            **metrics.describe("critic/rewards", scores_PG),
            **metrics.describe("critic/advantages", advantages_PG[scores_PG.isfinite()]),
            **metrics.of_norms(norms),
            **means.reduce(),
            **samplers.metrics(),
            "actor/lr": lr,
        }
        run.log_step(step_metrics, responses=responses, batch=batch)

    samplers.push(task.total_steps, weights_for_engine(policy, ranks))
    if run.evaluation_is_due():  # of the last policy
        samplers.start_evaluation()
        run.evaluate_if_due(samplers.evaluate)
    return run.close(task.scorer, samplers)


if __name__ == "__main__":
    main(parse(Args, __doc__, hint="train_grpo_variants.py has the flags of other estimators, losses and KL terms"))

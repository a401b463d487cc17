"""Asynchronous GRPO: other processes, the samplers, sample while the trainers train.

    torchrun --nproc_per_node 4 train_async.py --model Qwen/Qwen2.5-7B-Instruct --samplers 4    # eight GPUs
    GLASSRL_SAMPLER_TOKEN=TOKEN python -m extras.samplers --connect tcp://HOST:PORT             # one more, anywhere

The algorithm is that of train_grpo.py, and so are the loss, the names and the shapes. What differs is who samples. The
ranks of torchrun train. Each sampler has an engine. It gets prompts and weights from rank 0, and sends groups of
responses. New weights reach it between two decoding steps, and responses in flight go on with them. So a step may learn
from tokens that older weights have sampled. Their age, in versions of weights, is at most --max-staleness S. With S = 0
this is train_grpo.py with more processes.

So the policy that sampled a token may be older than the one with which the step begins (AReaL, arXiv 2505.24298). Let
l_roll be the log-prob of a token by the policy that sampled it. Let l_prox be its log-prob by the proximal policy,
which is the one around which the ratio is clipped:

    ratio       ratio_it = exp(l_it - l_prox_it)
    weight      w_it     = exp(l_prox_it - l_roll_it)  cut to at most --rollout-is-threshold; no gradient
    loss        L        = mean over all sampled tokens of w_it times the clipped loss of train_grpo.py

--proximal-policy chooses the proximal policy among three:
  1. `recomputed` is the policy that starts the step.
  2. `loglinear` is one between this and the policy that sampled the token, and costs no forward pass. It is AReaL's
     log-linear proxy, l_prox = l_roll + (l - l_roll) a / (a + 1) for a token of age a.
  3. `sampler` is the policy that sampled the token, so that w = 1, as in PPO.

docs/train_async.md explains all of this in more detail.
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
    """Train with asynchronous GRPO, and return the metrics of the last step and of the last evaluation."""
    # Flags, data and rewards are checked here, before a model is loaded.
    task = load_task(args)
    mini_batch_size = args.ppo_mini_batch_size or args.train_batch_size  # prompts
    num_updates = args.ppo_epochs * math.ceil(args.train_batch_size / mini_batch_size)  # in a step

    run = Run(args, task.tokenizer, task.total_steps)
    ranks, longest, sampling = run.ranks, task.longest, task.sampling
    samplers = open_pool(args.pool, task, args.envs, ranks, run.folder.root, run.state)  # which start meanwhile
    policy = load_model(args.model, ranks, args.lora, run.memory, longest=longest, seed=args.seed)
    reference = load_reference(args.model, ranks, policy, run.memory, longest=longest) if args.use_kl_loss else None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    run.begin({"actor": (policy, optimizer)}, samplers)

    # run.steps() saves a checkpoint before each step if --save-freq says so. A run that is asked to stop saves and
    # exits at the next end of a phase or micro-batch. A step that has changed the weights is finished first.
    for step in run.steps(samplers.state):
        # 1. Weights and prompts. The samplers get the policy's weights, and as many prompts as --max-staleness allows.
        # Which prompt has which number depends only on the seed. A step trains on the next P numbers, in whatever order
        # their responses come in.
        samplers.push(step, weights_for_engine(policy, ranks))
        run.may_stop_after("update_weights")
        if run.evaluation_is_due():
            samplers.start_evaluation()

        # 2. Sample. Wait for G responses to each of the P prompts. Most were sampled while the last step trained. Other
        # processes score each group as soon as it is complete. Then all ranks get the scores and lengths of the whole
        # step. Tokens are on rank 0 until phase 3.
        responses = samplers.sample(run.may_stop_after)  # B
        scores_PG = scores_of(responses).view(-1, args.rollout_n)  # (P, G), NaN for a response without a score

        # 3. Batch. Divide the step into updates, which are one optimizer step each, and each update into micro-batches.
        # Send each rank the tokens that it trains on. A response without a score teaches nothing, so its mask is 0.
        batch, updates = make_batch(
            responses,
            mini_batch_size=mini_batch_size * args.rollout_n,
            max_tokens=run.memory.ppo_max_token_len_per_gpu,
            ranks=ranks,
            version=step,
        )  # (b, T), with the ages of tokens if one is older than these weights
        run.may_stop_after("batch")

        # 4. Log-probs that stay fixed while the policy changes. With one update per step, those of the policy that
        # starts it are not needed here, since they are the l of phase 6.
        if num_updates > 1 and args.proximal_policy == "recomputed":
            batch = replace(batch, old_logp=fixed_logprobs(policy, batch, updates, sampling=sampling))
            run.may_stop_after("old_log_prob")
        if reference is not None:
            batch = replace(batch, ref_logp=fixed_logprobs(reference, batch, updates, sampling=sampling))
            run.may_stop_after("ref")

        # === algorithm ================================================================================================
        # 5. Advantages. How much better than its group was each response? All its tokens get this number. Only scored
        # responses count. If all scores of a group are equal, its advantages are 0. A lone response gets its score as
        # its advantage, as in verl, since group_mean_std then returns mean 0 and std 1.
        mean, std = advantages.group_mean_std(scores_PG)  # (P, 1)
        advantages_PG = ((scores_PG - mean) / (std + 1e-6)).nan_to_num()  # (P, G), 0 for a response without a score
        # batch.responses (b,) says to which of the B responses each of this rank's rows belongs. Indexing with it
        # gives (b, 1).
        batch = replace(batch, advantages=advantages_PG.view(-1, 1)[batch.responses] * batch.response_mask)  # (b, T)
        run.may_stop_after("adv")

        # 6. Updates. A mini-batch makes one optimizer step, and its micro-batches only save memory.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, task.total_steps)
        optimizer.param_groups[0]["lr"] = lr
        means, norms = metrics.Means(ranks, num_updates=num_updates), []  # Both collect metrics for phase 7.
        for update in updates * args.ppo_epochs:  # the list of mini-batches, once for each epoch, in the same order
            # All ranks divide by the number of tokens with mask 1 in the mini-batch, on all ranks. So the gradients of
            # micro-batches and ranks only have to be added up.
            num_tokens = max(update.num_tokens, 1)
            for micro_rows in run.micro_batches(update):
                micro = take_rows(batch, micro_rows, ranks.device)  # (b', T'), as long as the longest of these rows
                # mask is 1 for sampled tokens of scored responses.
                A, mask, proximal = micro.advantages, micro.response_mask, args.proximal_policy
                logp, entropy = token_logprobs(policy, micro, sampling=sampling)
                if proximal == "sampler":
                    old_logp = micro.rollout_logp
                elif proximal == "loglinear":
                    ages = micro.columns["ages"].clamp(min=0)  # Tokens that were not sampled have age -1.
                    old_logp = torch.lerp(micro.rollout_logp, logp.detach(), ages / (ages + 1))
                else:
                    old_logp = logp.detach() if num_updates == 1 else micro.old_logp

                # The gradient of the ratio is the ratio times the gradient of logp. Where a clip decides, it is 0. With
                # one update per step and the proximal policy `recomputed`, which are the defaults, the ratio is 1 and
                # nothing is clipped.
                ratio = (logp - old_logp).clamp(-20, 20).exp()  # The clamp prevents an overflow.
                unclipped = -A * ratio
                clipped = -A * ratio.clamp(1 - args.clip_ratio_low, 1 + args.clip_ratio_high)
                pg_loss = torch.maximum(unclipped, clipped)
                # Dual clip. Where A < 0 and the ratio is large, the maximum takes the unclipped term. That has no upper
                # bound, so without this limit one token could outweigh all others.
                pg_loss = torch.where(A < 0, torch.minimum(pg_loss, -A * args.clip_ratio_c), pg_loss)
                is_clipped = (pg_loss != unclipped).float()
                # Weights w say how much more likely a token is by the proximal policy than by the one that sampled it.
                # They have no gradient.
                weights = args.correction.weights(logp, old_logp, micro.rollout_logp, A, mask)
                pg_loss = pg_loss * weights
                loss = pg_loss
                if reference is not None:
                    x = (micro.ref_logp - logp).clamp(-20, 20)
                    # k3 = e^x - x - 1 is never negative, and its mean over tokens that the policy samples is the
                    # KL(policy, reference), because e^x has the mean 1 there. Values above 10 become 10.
                    kl = (x.expm1() - x).clamp(max=10)
                    loss = loss + args.kl_loss_coef * kl
                    means.over_updates({"actor/kl_loss": (kl * mask).sum() / num_tokens})
                loss = (loss * mask).sum() / num_tokens
                backward(policy, loss, is_last=micro_rows is update.micro_batches[-1])
                means.over_updates({"actor/loss": loss, "actor/pg_loss": (pg_loss * mask).sum() / num_tokens})
                means.over_tokens(mask, {"actor/entropy": entropy, "actor/pg_clipfrac": is_clipped})
                means.between_policies(micro, logp, old_logp, weights, proximal)
            if not norms:  # This is the first update, and until its optimizer step the policy has the pushed weights.
                samplers.verify(policy, args.rollout)
                run.may_stop_after("update_actor")
            norm = clip_grad_norm(policy, args.grad_clip)
            if math.isfinite(norm) and update.num_tokens > 0:
                optimizer.step()
            else:
                run.skip_update(norm, update.num_tokens, batch)  # raises an error at the third in a row
            optimizer.zero_grad(set_to_none=True)
            norms.append({"actor": norm})
        run.may_stop_after("update_actor")
        # === end ======================================================================================================

        # Held-out prompts were answered in the meantime, by the weights with which the step began.
        run.evaluate_if_due(samplers.evaluate)

        # 7. Report. Losses are means over updates. Entropy, clipping and the like are means over all tokens. Scores,
        # advantages and lengths have their mean, maximum and minimum over all responses.
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

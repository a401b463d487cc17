"""The family of GRPO. Flags choose other advantages, losses, means, KL terms, and tokens to learn from.

    torchrun train_grpo_variants.py --adv-estimator rloo                                                        # RLOO
    torchrun train_grpo_variants.py --adv-estimator dr_grpo --loss-agg-mode seq-mean-token-sum-norm          # Dr. GRPO
    torchrun train_grpo_variants.py --loss-mode gspo --loss-agg-mode seq-mean-token-mean \\
        --clip-ratio-low 3e-4 --clip-ratio-high 4e-4 --ppo-mini-batch-size 32                                    # GSPO

Read train_grpo.py first. The phases and words here are the same, and without flags this script computes the same
numbers. This script is for comparing the members of the family. To build on one of them, copy train_grpo.py and write
the lines of that member there. The members differ in a few functions, which flags choose:

    advantage of a response     --adv-estimator          rl/formulas/advantages.py
    the same for each turn      --advantage-by           extras/agents/turns.py, turn_returns
    loss of a token             --loss-mode              rl/formulas/losses.py
    mean of the losses          --loss-agg-mode          rl/formulas/losses.py, aggregate
    KL term in the loss         --use-kl-loss, --kl-loss-type, --ref-update-steps               losses.py, kl
    KL term in the reward       --use-kl-in-reward, --kl-penalty, --kl-ctrl-type                losses.py, kl
    tokens to learn from        --top-entropy-quantile   extras/variants/
    entropy bonus               --entropy-coeff          one line of phase 5

Each function there has its formula and its paper. Shapes are those of train_grpo.py.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from extras.agents import at_turns, returns_by_turn
from extras.kl_terms import KLTerms
from extras.variants import RULES, TokenSelection, choose_tokens, components_of, require_components, shuffled
from rl.data.batching import make_batch
from rl.data.order import derive_seed
from rl.data.types import take_rows
from rl.flags import Above1, AtLeast1, Count, Few, NotNegative, Positive
from rl.formulas import advantages, losses, schedule
from rl.model.load import load_model, load_reference
from rl.model.logprobs import fixed_logprobs, token_logprobs
from rl.model.sharding import backward, clip_grad_norm
from rl.run import metrics
from rl.run.arguments import RL, LoggingRL, parse
from rl.run.run import Run
from rl.run.task import load_task, open_sampler
from rl.sampling.responses import lengths_of, scores_of

# The functions of --adv-estimator make advantages (P, G) from rewards (P, G) and the lengths of responses (P, G). gdpo
# also reads the components of the score and their weights. The others ignore these (**_).
ADVANTAGES = {
    "grpo": advantages.grpo,
    "dr_grpo": lambda rewards, lengths, **_: advantages.grpo(rewards, lengths, norm_by_std=False),
    "grpo_batch": advantages.grpo_batch,
    "grpo_passk": advantages.grpo_passk,
    "max_rl": advantages.max_rl,
    "rloo": advantages.rloo,
    "opo": advantages.opo,
    "gpg": advantages.gpg,
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline,
    "gdpo": advantages.gdpo,
}
# The functions of --loss-mode make the loss (b, t) of each token, and is_clipped (b, t), from logp, old_logp,
# advantages and mask (b, t). Each reads the values of those flags that it needs, and ignores the others.
LOSSES = {loss.__name__: loss for loss in (
    losses.ppo_clip, losses.dppo_tv, losses.dppo_kl, losses.gspo, losses.cispo, losses.sapo, losses.gmpo, losses.vespo,
    losses.dro, losses.clip_cov, losses.kl_cov, losses.policy_gradient,
)} | {"luspo": losses.gspo}  # The mean of luspo is another one, see AGGREGATIONS.  # fmt: skip
# These losses need the --loss-agg-mode of their paper. The others take any.
AGGREGATIONS = {"gspo": "seq-mean-token-mean", "luspo": "seq-mean-token-sum", "gmpo": "seq-mean-token-mean"}


@dataclass(frozen=True)
class Args(RL):  # with the groups of flags in rl/run/arguments.py, such as args.lora, args.data and args.memory
    # --- the flags of the family

    # This is how a response is compared with its group. docs/variants.md explains each of these.
    adv_estimator: Literal[*ADVANTAGES] = "grpo"
    # trajectory compares whole responses. turn is for conversations. It compares what each turn earned from then on
    # with the same turn in the other responses of the group.
    advantage_by: Literal["trajectory", "turn"] = "trajectory"
    # gdpo compares these components of the score, each on its own. There is no default, so gdpo needs it.
    gdpo_reward_keys: tuple[str, ...] = ()
    # In gdpo these components have these weights. The default is 1 for each.
    gdpo_reward_weights: tuple[float, ...] = ()
    loss_mode: Literal[*LOSSES] = "ppo_clip"  # This is the loss of a token. docs/variants.md explains each of these.
    tau_pos: Positive = 1.0  # In sapo this says how fast the gradient fades where the advantage is positive.
    tau_neg: Positive = 1.05  # In sapo this says the same where the advantage is negative.
    dro_beta: Positive = 0.05  # In dro the distance from the old policy has this weight.
    # token-mean is the mean over all tokens (DAPO). The others first reduce each response to the sum of its tokens, to
    # their mean (paper of GRPO), or to the sum divided by --loss-scale-factor (Dr. GRPO), and then take the mean over
    # responses.
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    # seq-mean-token-sum-norm divides by this. The default is --max-response-length.
    loss_scale_factor: Positive | None = None
    entropy_coeff: float = 0.0  # This is the weight of an entropy bonus. With 0 the entropy is only logged.
    kl: KLTerms = KLTerms()
    selection: TokenSelection = TokenSelection()

    # --- the flags of train_grpo.py
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # The policy is loaded from this Hugging Face id or folder.
    train_batch_size: AtLeast1 = 128  # Each step takes this many prompts (P).
    # Each prompt gets this many responses (G). With one response there is nothing to compare it with.
    rollout_n: Few = 8
    # A prompt has at most this many tokens. A longer one is an error unless --filter-overlong-prompts.
    max_prompt_length: AtLeast1 = 512
    max_response_length: AtLeast1 = 1024  # A response has at most this many tokens. A longer one is cut.
    # Each optimizer step takes the responses to this many prompts. By default it takes all of a step.
    ppo_mini_batch_size: AtLeast1 | None = None
    # Draw the responses of an optimizer step at random from the whole step, as TRL does, and not prompt by prompt.
    shuffle_mini_batches: bool = False
    ppo_epochs: Few = 1  # The updates of a step use each of its responses this many times.
    # Clip the ratio from below at 1 minus this, for tokens that are being pushed down (A < 0).
    clip_ratio_low: NotNegative = 0.2
    # Clip the ratio from above at 1 plus this, for tokens that are being pushed up (A > 0). DAPO uses 0.28.
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
        experiment_name="grpo",
        alarms=(
            "rollout/logprob_gap_mean>0.05",
            "reward/zero_std_frac>0.95",
            "response_length/clip_ratio>0.5",
            "actor/entropy<0.01",
        ),
    )


def validate(args: Args) -> None:
    """Raise ValueError for flags of the family that contradict each other, naming the flag, its value and the fix."""
    mean = AGGREGATIONS.get(args.loss_mode, args.loss_agg_mode)
    if args.loss_agg_mode != mean:
        raise ValueError(f"--loss-mode {args.loss_mode} needs --loss-agg-mode {mean}, its paper's mean")
    keys, weights = args.gdpo_reward_keys, args.gdpo_reward_weights
    if args.adv_estimator == "gdpo" and not keys:
        raise ValueError("--adv-estimator gdpo compares parts of the score; name them in --gdpo-reward-keys")
    if args.adv_estimator != "gdpo" and keys:
        raise ValueError(f"--gdpo-reward-keys {keys} are for --adv-estimator gdpo; add it, or leave them out")
    if len(weights) not in (0, len(keys)):
        raise ValueError(f"--gdpo-reward-weights {weights}: give one for each of --gdpo-reward-keys {keys}, or none")
    if args.adv_estimator in ("gdpo", "max_rl") and args.kl.use_kl_in_reward:
        raise ValueError(f"--use-kl-in-reward does not go with --adv-estimator {args.adv_estimator}; use --use-kl-loss")
    if args.shuffle_mini_batches and (args.ppo_mini_batch_size or args.train_batch_size) >= args.train_batch_size:
        raise ValueError("--shuffle-mini-batches needs several: lower --ppo-mini-batch-size below --train-batch-size")
    if args.advantage_by == "turn" and (keys or args.kl.use_kl_in_reward or args.envs.agent):
        raise ValueError("--advantage-by turn does not go with gdpo, --use-kl-in-reward (use --use-kl-loss) or --agent")


def main(args: Args) -> dict[str, float]:
    """Train with a member of GRPO's family, and return the metrics of the last step and of the last evaluation."""
    # Flags, data and rewards are checked here, before a model is loaded.
    validate(args)
    task = load_task(args)
    require_components(task.scorer, args.gdpo_reward_keys, flag="--gdpo-reward-keys")
    mini_batch_size = args.ppo_mini_batch_size or args.train_batch_size  # prompts
    num_updates = args.ppo_epochs * math.ceil(args.train_batch_size / mini_batch_size)  # optimizer steps in a step

    run = Run(args, task.tokenizer, task.total_steps)
    ranks, longest, sampling = run.ranks, task.longest, task.sampling
    policy = load_model(args.model, ranks, args.lora, run.memory, longest=longest, seed=args.seed)
    sampler = open_sampler(args, task, run)
    reference = load_reference(args.model, ranks, policy, run.memory, longest=longest) if args.kl.is_used else None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    refreshed = {"reference": (reference, None)} if args.kl.ref_update_steps else {}  # it changes, without an optimizer
    run.begin({"actor": (policy, optimizer)} | refreshed, sampler)
    kl_coef = args.kl.first_coef(run.state)

    def loop_state() -> dict[str, Any]:
        return {"kl_coef": kl_coef} | sampler.state()

    # run.steps() saves a checkpoint before each step if --save-freq says so. A run that is asked to stop saves and
    # exits at the next end of a phase or micro-batch. A step that has changed the weights is finished first.
    for step in run.steps(loop_state):
        run.evaluate_if_due(sampler.evaluate, policy)

        # 1. Sample. The engine gets the policy's weights, and samples G responses to each prompt. The run ends if the
        # trainer's log-probs of a few of them differ too much from the engine's. All ranks get the scores and lengths
        # of the whole step. Tokens stay on the rank that sampled them until phase 2.
        responses = sampler.sample(policy, step)  # B
        scores_PG = scores_of(responses).view(-1, args.rollout_n)  # (P, G), NaN for a response without a score
        lengths_PG = lengths_of(responses).view(-1, args.rollout_n)

        # 2. Batch. Divide the step into updates, which are one optimizer step each, and each update into micro-batches.
        # Send each rank the tokens that it trains on. A response without a score teaches nothing, so its mask is 0.
        batch, updates = make_batch(
            responses,
            mini_batch_size=mini_batch_size * args.rollout_n,
            max_tokens=run.memory.ppo_max_token_len_per_gpu,
            ranks=ranks,
            order=shuffled(len(responses), derive_seed(args.seed, step)) if args.shuffle_mini_batches else None,
            version=sampler.version,
        )  # (b, T)
        run.may_stop_after("batch")

        # 3. Log-probs that stay fixed while the policy changes. They are by the policy that starts the step and by the
        # reference. With one update per step, only a KL in the reward, clip_cov and kl_cov need the first of these.
        if num_updates > 1 or args.kl.use_kl_in_reward or args.loss_mode in RULES:
            batch = replace(batch, old_logp=fixed_logprobs(policy, batch, updates, sampling=sampling))
            run.may_stop_after("old_log_prob")
        if reference is not None:
            if args.kl.ref_update_steps and step > 0 and step % args.kl.ref_update_steps == 0:
                run.refresh(reference, policy)
            batch = replace(batch, ref_logp=fixed_logprobs(reference, batch, updates, sampling=sampling))
            run.may_stop_after("ref")

        # === algorithm ================================================================================================
        # 4. Advantages. How much better than its group was each response? All its tokens get this number.
        rewards_PG, kl_metrics = scores_PG, {}
        if args.kl.use_kl_in_reward:  # The reward is the score minus kl_coef * KL(policy, reference) of the response.
            token_kl = losses.kl(batch.old_logp, batch.ref_logp, args.kl.kl_penalty) * batch.response_mask  # (b, T)
            kl_PG = ranks.all_rows(token_kl.sum(1), batch.responses, len(responses)).view(-1, args.rollout_n)
            rewards_PG = scores_PG - kl_coef * kl_PG
            is_scored = rewards_PG.isfinite().flatten()
            kl_coef, kl_metrics = args.kl.next_coef(kl_coef, token_kl, batch, is_scored, ranks)  # for the next step
        parts = components_of(responses, args.gdpo_reward_keys).unflatten(1, scores_PG.shape)  # (K, P, G), gdpo only
        of_gdpo = dict(parts=parts, weights=args.gdpo_reward_weights)
        estimator = partial(ADVANTAGES[args.adv_estimator], **of_gdpo)
        advantages_PG = estimator(rewards_PG, lengths_PG)  # (P, G)
        if args.advantage_by == "turn":  # Each of K turns is compared with the same turn in its group.
            # What was earned from each turn on is (P K, G), so that the estimator takes a turn of a prompt for a
            # prompt.
            returns, lengths = returns_by_turn(responses, args.rollout_n)
            of_turns = estimator(returns, lengths)
            advantages_PG = of_turns.unflatten(0, (len(scores_PG), -1)).mT  # (P, G, K), with a number for each turn
        own_advantages = advantages_PG.reshape(len(responses), -1)[batch.responses]  # (b, K), or (b, 1)
        batch = replace(batch, advantages=at_turns(own_advantages, batch.response_mask))  # (b, T)
        # --top-entropy-quantile sets the advantages of tokens with less entropy to 0. clip_cov leaves out, and kl_cov
        # holds back, tokens with a large covariance of log-prob and advantage. --echo-coef marks what tools and users
        # said. Without such flags nothing happens.
        by_step = dict(sampling=sampling, seed=derive_seed(args.seed, step), ranks=ranks)
        batch = choose_tokens(args.selection, args.loss_mode, policy, batch, updates, **by_step)
        run.may_stop_after("adv")

        # 5. Updates. A mini-batch makes one optimizer step, and its micro-batches only save memory.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, task.total_steps)
        optimizer.param_groups[0]["lr"] = lr
        of_loss = dict(clip_ratio_low=args.clip_ratio_low, clip_ratio_high=args.clip_ratio_high)
        of_loss |= dict(clip_ratio_c=args.clip_ratio_c, dro_beta=args.dro_beta)  # Each loss reads those that it needs.
        of_loss |= dict(tau_pos=args.tau_pos, tau_neg=args.tau_neg, ppo_kl_coef=args.selection.ppo_kl_coef)
        means, norms = metrics.Means(ranks, num_updates=num_updates), []  # Both collect metrics for phase 6.
        for update in updates * args.ppo_epochs:  # the list of mini-batches, once for each epoch, in the same order
            # These count the whole mini-batch on all ranks, so the gradients of micro-batches and ranks add up.
            scale = args.loss_scale_factor or args.max_response_length
            counts = dict(num_tokens=update.num_tokens, num_seqs=update.num_seqs, scale=scale)
            for micro_rows in run.micro_batches(update):
                micro = take_rows(batch, micro_rows, ranks.device)  # (b', t), as long as the longest of these rows
                # mask is 1 for sampled tokens of scored responses. chosen has the tokens that clip_cov and kl_cov treat
                # differently. told is 1 for what tools and users said, with ECHO, which learns to predict it.
                A, mask, chosen = micro.advantages, micro.response_mask, micro.columns.get("chosen")
                # A mean over responses divides by the tokens of a whole response, which may have several rows.
                aggregate = partial(losses.aggregate, mode=args.loss_agg_mode, lengths=micro.num_learned, **counts)
                told = micro.columns.get("told", torch.zeros_like(mask))
                wanted = replace(micro, response_mask=mask + told)
                both, entropy = token_logprobs(policy, wanted, sampling=sampling, entropy_grad=args.entropy_coeff != 0)
                logp = both * mask
                old_logp = logp.detach() if num_updates == 1 else micro.old_logp

                pg_loss, is_clipped = LOSSES[args.loss_mode](logp, old_logp, A, mask, chosen=chosen, **of_loss)
                # The engine's log-probs are not quite the trainer's. If a flag asks for it, weights correct for that.
                # Otherwise they are 1.
                weights = args.correction.weights(logp, old_logp, micro.rollout_logp, A, mask)
                pg_loss = pg_loss * weights
                loss = pg_loss - args.entropy_coeff * entropy
                if args.kl.use_kl_loss:
                    kl = losses.kl(logp, micro.ref_logp, args.kl.kl_loss_type, old_logp=old_logp)
                    loss = loss + args.kl.kl_loss_coef * kl
                    means.over_updates({"actor/kl_loss": aggregate(kl, mask)})
                loss = aggregate(loss, mask)
                if args.selection.echo_coef:
                    echo_loss = -aggregate(both, told, lengths=micro.columns["num_told"])  # the cross-entropy
                    loss = loss + args.selection.echo_coef * echo_loss
                    means.over_updates({"actor/echo_loss": echo_loss})
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
        step_metrics = {
            **metrics.of_sampled(responses, args.rollout_n),
            **metrics.describe("critic/rewards", rewards_PG),
            **metrics.describe("critic/advantages", advantages_PG[scores_PG.isfinite()]),
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

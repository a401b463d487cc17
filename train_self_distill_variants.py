"""The family of on-policy self-distillation. Flags choose other hints, teachers and supports of the distance.

    torchrun train_self_distill_variants.py --hint-from group --rollout-n 8 --teacher ema \\
        --distill-top-k 100 --loss-mode jsd                                                                      # SDPO
    torchrun train_self_distill_variants.py --teacher ema                                                        # SDFT
    torchrun train_self_distill_variants.py --teacher first --loss-mode jsd                                      # OPSD

Read train_self_distill.py first. The phases and words here are nearly the same, and without flags this script computes
the same numbers. To build on one member of the family, copy train_self_distill.py and write the lines of that member
there. The members differ in three places:

    the hint of a response    --hint-from       the solution of the row, or a right answer of the same group
    the teacher               --teacher         the policy as it is, as it was at first, or a moving average of it
    the distance D            --distill-top-k   over all tokens, or over K tokens and one entry for all others

With --hint-from group the data needs no solutions, but the reward has to tell right answers. A response whose group has
no other right answer gets no hint, and nothing is learned from it. distillation/without_hint is the share of these.

Where this departs from SDPO (arXiv 2601.20802):
  1. A hint is a right answer only. Rewards here return numbers, so they have no text of feedback for a hint.
  2. With several updates per step no importance sampling corrects for the policy that sampled.
  3. The loss is the mean over tokens. It has no term of GRPO.

Shapes are those of train_grpo.py. docs/train_self_distill.md explains more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from transformers import PreTrainedModel

from extras.self_distillation import (
    Hints,
    add_hints,
    hints_of_groups,
    hints_of_rows,
    move_towards,
    room_beside_hints,
    states_and_head,
    token_divergences,
    with_hints,
)
from rl.data.batching import make_batch
from rl.data.types import take_rows
from rl.flags import AtLeast1, Count, Few, NotNegative, Positive, PositiveShare, Share, TopK
from rl.formulas import distillation, schedule
from rl.model.load import load_model, load_reference
from rl.model.sharding import backward, clip_grad_norm
from rl.run import metrics
from rl.run.arguments import LoggingRL, RLBase, parse
from rl.run.run import Run
from rl.run.task import load_task, open_sampler
from rl.sampling.responses import scores_of

# The functions of --loss-mode make D (R,) from the log-probs (R, V) of all V tokens by student and teacher, and from
# beta. KL(p, q) = sum over all tokens of p (log p - log q).
DIVERGENCES = {
    "reverse_kl": distillation.reverse_kl,  # KL(p_S, p_T)
    "forward_kl": distillation.forward_kl,  # KL(p_T, p_S)
    "jsd": distillation.jsd,  # beta KL(p_T, m) + (1 - beta) KL(p_S, m), with m = beta p_T + (1 - beta) p_S
}


def over_top_k(divergence: Callable, k: int, student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """D (R,) over the K tokens that the student finds most likely and "any other token" as one entry more.

    Source: SDPO, arXiv 2601.20802. train_distill.py takes the K tokens of the teacher, whose server sends no others.
    """
    top = student.detach().topk(min(k, student.shape[-1])).indices  # (R, K)
    own, other = (distillation.with_rest(x.gather(-1, top)) for x in (student, teacher))  # (R, K + 1)
    return divergence(own, other, beta=beta)


@dataclass(frozen=True)
class Args(RLBase):  # with the groups of flags in rl/run/arguments.py, such as args.lora, args.data and args.memory
    # The teacher's sequences are the longest. They decide what fits into the memory and into the model's context.
    length_flags: ClassVar[tuple[str, ...]] = ("max_hinted_prompt_length", "max_response_length")
    # --- the flags of the family

    # The hint of a response is the solution of its row (see --hint-key), or the first right answer of its group that is
    # not the response itself.
    hint_from: Literal["solution", "group"] = "solution"
    right_score: float = 1.0  # With --hint-from group, an answer with at least this score is right.
    # The teacher is the policy at each update (live), the policy before training (first), or a moving average of the
    # policy's weights (ema). The last one takes 4 more bytes of memory for each weight, and is part of checkpoints.
    teacher: Literal["live", "first", "ema"] = "live"
    teacher_ema_rate: PositiveShare = 0.05  # With --teacher ema, each update moves the teacher by this share.
    # D is over this many tokens, which are the student's most likely ones, and one entry for all others. -1 takes the
    # whole vocabulary.
    distill_top_k: TopK = -1

    # --- the flags of train_self_distill.py
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # The policy is loaded from this Hugging Face id or folder.
    train_batch_size: AtLeast1 = 128  # Each step takes this many prompts (P).
    rollout_n: Few = 1  # Each prompt gets this many responses (G).
    # A prompt has at most this many tokens. A longer one is an error unless --filter-overlong-prompts.
    max_prompt_length: AtLeast1 = 512
    # A prompt with its hint has at most this many tokens. A longer one is an error unless --filter-overlong-prompts.
    max_hinted_prompt_length: AtLeast1 = 1536
    max_response_length: AtLeast1 = 1024  # A response has at most this many tokens. A longer one is cut.
    # Each optimizer step takes the responses to this many prompts. By default it takes all of a step.
    ppo_mini_batch_size: AtLeast1 | None = None
    ppo_epochs: Few = 1  # The updates of a step use each of its responses this many times.
    # This is the distance D of the student to the teacher.
    loss_mode: Literal[*DIVERGENCES] = "reverse_kl"
    # Near 0, jsd is beta times forward_kl, and near 1 it is (1 - beta) times reverse_kl. Both ends are excluded.
    jsd_beta: Share = 0.5
    # AdamW has this learning rate after warm-up. LoRA needs about ten times that of full training.
    lr: NotNegative = 1e-5
    lr_warmup_steps: Count = 0  # The learning rate rises linearly over this many steps.
    # After warm-up, the learning rate stays constant, falls linearly, or falls as a cosine does.
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NotNegative = 0.01  # This is AdamW's decoupled weight decay.
    grad_clip: Positive = 1.0  # A gradient whose global norm is larger than this is scaled down to it.
    seed: Count = 0  # The seed decides, together with the step, the order of the data and what is sampled.
    hints: Hints = Hints()
    logging: LoggingRL = LoggingRL(
        experiment_name="self_distill_variants",
        alarms=("rollout/logprob_gap_mean>0.05", "response_length/clip_ratio>0.5", "actor/entropy<0.01"),
    )


def validate(args: Args) -> None:
    """Raise ValueError for flags of distillation that contradict each other, naming the flag, its value and the fix."""
    if args.envs.agent:
        raise ValueError("--agent: an agent writes its prompts itself, so no hint can join them; use train_grpo.py")
    if args.loss_mode == "jsd" and args.jsd_beta in (0, 1):
        raise ValueError(
            f"--jsd-beta {args.jsd_beta} makes no mixture; use --loss-mode forward_kl or reverse_kl instead"
        )
    if args.decoding.top_p < 1 or args.decoding.top_k > 0 or args.decoding.min_p > 0:
        raise ValueError(f"--loss-mode {args.loss_mode} compares whole distributions; drop --top-p, --top-k, --min-p")
    if args.hint_from == "group" and args.rollout_n < 2:
        raise ValueError(f"--hint-from group: --rollout-n {args.rollout_n} makes no group; sample at least 2")
    if args.hint_from != "group" and args.right_score != 1:
        raise ValueError(f"--right-score {args.right_score} is for --hint-from group; add it, or leave this out")
    if args.teacher != "ema" and args.teacher_ema_rate != 0.05:
        raise ValueError(f"--teacher-ema-rate {args.teacher_ema_rate} is for --teacher ema; add it, or leave this out")


def load_teacher(args: Args, run: Run, policy: PreTrainedModel, longest: int) -> PreTrainedModel:
    """The model that reads the hints, which begins with the weights of the policy. All ranks must enter."""
    if args.teacher == "live":
        return policy
    if policy.packed.own_logits:
        raise ValueError(f"--teacher {args.teacher}: {args.model} runs {policy.packed.way}; use --teacher live")
    if args.teacher == "first":
        return load_reference(args.model, run.ranks, policy, run.memory, longest=longest)
    # It is in float32, as what learns is. A step of the average is too small for the digits of bfloat16.
    of_policy = dict(longest=longest, seed=args.seed, flag="the teacher")
    return load_model(args.model, run.ranks, args.lora, run.memory, **of_policy)


def main(args: Args) -> dict[str, float]:
    """Distill the policy into itself, and return the metrics of the last step and of the last evaluation."""
    # Flags, data and rewards are checked here, before a model is loaded.
    validate(args)
    task = load_task(args)
    if args.hint_from == "solution":
        train_rows = add_hints(  # Each row gets "hinted_ids", the tokens of the prompt with the hint.
            args.hints,
            task.train_rows,
            task.tokenizer,
            max_length=args.max_hinted_prompt_length,
            drops_overlong=args.data.filter_overlong_prompts,
            partner=task.partner,
        )
        total_steps = args.data.count_steps(len(train_rows), args.train_batch_size)  # of the rows that are left
        task = task._replace(train_rows=train_rows, total_steps=total_steps)
    mini_batch_size = args.ppo_mini_batch_size or args.train_batch_size  # prompts
    divergence = DIVERGENCES[args.loss_mode]
    if args.distill_top_k > 0:
        divergence = partial(over_top_k, divergence, args.distill_top_k)

    run = Run(args, task.tokenizer, task.total_steps)
    ranks, sampling = run.ranks, task.sampling
    policy = load_model(args.model, ranks, args.lora, run.memory, longest=task.longest, seed=args.seed)
    sampler = open_sampler(args, task, run)
    teacher = load_teacher(args, run, policy, task.longest)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    average = {"teacher": (teacher, None)} if args.teacher == "ema" else {}  # it changes, without an optimizer
    run.begin({"actor": (policy, optimizer)} | average, sampler)

    # run.steps() saves a checkpoint before each step if --save-freq says so. A run that is asked to stop saves and
    # exits at the next end of a phase or micro-batch. A step that has changed the weights is finished first.
    for step in run.steps(sampler.state):
        run.evaluate_if_due(sampler.evaluate, policy)

        # 1. Sample. The engine gets the student's weights, and samples G responses to each prompt, without hints. The
        # run ends if the trainer's log-probs of a few of them differ too much from the engine's. All ranks get the
        # scores and lengths of the whole step. Tokens stay on the rank that sampled them until phase 2.
        responses = sampler.sample(policy, step)  # B

        # 2. Hints. hinted_ids has, for each response, the tokens of its prompt with its hint, or None. All ranks get
        # all of them, although only the rank that has sampled a group has the texts of its answers.
        if args.hint_from == "solution":
            hinted_ids = hints_of_rows(responses, sampler.rows)
        else:
            hinted_ids = hints_of_groups(
                args.hints, sampler, right_score=args.right_score, max_length=args.max_hinted_prompt_length
            )
        has_hint = torch.tensor([ids is not None for ids in hinted_ids])  # (B,)

        # 3. Batch. Divide the step into updates, which are one optimizer step each, and each update into micro-batches,
        # which have room for the hints too. Send each rank the tokens that it trains on. A response without a hint
        # teaches nothing, so its mask is 0. Responses without a score teach as well, except for conversations whose
        # environment has failed. The teacher's batch has the same responses in the same rows, behind other prompts.
        batch, updates = make_batch(
            responses,
            trainable=has_hint & torch.tensor([r.finish_reason != "error" for r in responses]),
            mini_batch_size=mini_batch_size * args.rollout_n,
            max_tokens=room_beside_hints(run.memory.ppo_max_token_len_per_gpu, responses, hinted_ids),
            ranks=ranks,
            version=sampler.version,
        )  # (b, T)
        updates = [update for update in updates if update.num_tokens > 0]  # A step without a hint makes no update.
        num_updates = len(updates) * args.ppo_epochs  # optimizer steps in the step
        hinted = with_hints(batch, responses, hinted_ids)  # (b, T')
        run.may_stop_after("batch")

        # === algorithm ================================================================================================
        # 4. Updates. A mini-batch makes one optimizer step, and its micro-batches only save memory.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, task.total_steps)
        optimizer.param_groups[0]["lr"] = lr
        means, norms = metrics.Means(ranks, num_updates=num_updates), []  # Both collect metrics for phase 5.
        for update in updates * args.ppo_epochs:  # the list of mini-batches, once for each epoch, in the same order
            for micro_rows in run.micro_batches(update):
                micro = take_rows(batch, micro_rows, ranks.device)  # (b', t), as long as the longest of these rows
                mask = micro.response_mask  # 1 for sampled tokens

                # The teacher. It reads prompt, hint and response. Its R hidden states (R, H), one for each sampled
                # token, and its LM head (V, H) are constants, which together make the teacher's distributions.
                states, head = states_and_head(teacher, take_rows(hinted, micro_rows, ranks.device))

                # The student. The policy reads prompt and response, and divergence_bt (b', t) is D at each sampled
                # token, with the gradient through the student only.
                logp, entropy, divergence_bt, teacher_logp = token_divergences(
                    policy, micro, states, divergence, beta=args.jsd_beta, sampling=sampling, head=head
                )
                # The count is of the whole mini-batch on all ranks, so the gradients of micro-batches and ranks add up.
                loss = (divergence_bt * mask).sum() / max(update.num_tokens, 1.0)
                backward(policy, loss, is_last=micro_rows is update.micro_batches[-1])
                means.over_updates({"actor/loss": loss, "distillation/loss": loss})
                # This estimates KL(p_S, p_T) from the sampled token. The student is the one that has sampled it.
                kl = micro.rollout_logp - teacher_logp
                means.over_tokens(mask, {"actor/entropy": entropy, "distillation/kl": kl})
                if num_updates == 1:  # Else the policy is no longer the one that sampled.
                    means.between_policies(micro, logp, logp.detach())
            norm = clip_grad_norm(policy, args.grad_clip)
            if math.isfinite(norm) and update.num_tokens > 0:
                optimizer.step()
            else:
                run.skip_update(norm, update.num_tokens, batch)  # raises an error at the third in a row
            optimizer.zero_grad(set_to_none=True)
            norms.append({"actor": norm})
            if args.teacher == "ema" and math.isfinite(norm):
                move_towards(teacher, policy, args.teacher_ema_rate)
        if not scores_of(responses).isfinite().any():
            run.skip_update(0.0, 0.0, batch)  # So if no response gets a score three times in a row, the run stops.
        run.may_stop_after("update_actor")
        # === end ======================================================================================================

        # 5. Report. Losses are means over updates, entropies and the KL means over all tokens. Scores and lengths have
        # their mean, maximum and minimum over all responses. No hint is in these lengths.
        step_metrics = {
            **metrics.of_sampled(responses, args.rollout_n),
            **metrics.of_norms(norms),
            **means.reduce(),
            "distillation/without_hint": 1 - has_hint.float().mean().item(),
            "actor/lr": lr,
        }
        run.log_step(step_metrics, responses=responses, batch=batch)

    run.evaluate_if_due(sampler.evaluate, policy)  # the last policy
    return run.close(sampler)


if __name__ == "__main__":
    main(parse(Args, __doc__))

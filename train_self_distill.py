"""On-policy self-distillation: the policy learns from itself after it has read a hint.

    torchrun train_self_distill.py --model Qwen/Qwen2.5-1.5B-Instruct --train-files data/gsm8k/train.parquet
    torchrun train_self_distill.py --loss-mode jsd --jsd-beta 0.5                         # the loss of OPSD's commands
    torchrun train_self_distill.py --hint-key solution --max-hinted-prompt-length 4096    # another column of the data

The policy answers a prompt x with a response y. Then it plays two roles with the same weights:

    student   p_S(v) = p(v | x, y_<t)             reads the prompt alone, and is what is trained
    teacher   p_T(v) = p(v | x, hint, y_<t)       also reads the hint, a reference solution of the row
    loss      L = mean over all sampled tokens t of D(p_S, p_T), over all tokens v of the vocabulary, see DIVERGENCES

The teacher is a constant. Gradients flow through the student only. No second model is needed, and no score: rewards are
computed for the metrics alone. A hint is no part of a response, so no token of it is in the loss. This is OPSD (arXiv
2601.18734) and SDFT (arXiv 2601.19897) with a live teacher: each update asks the policy as it is at that update.

Where this departs from the papers:
  1. The teacher is the live policy. OPSD's recommended commands keep the first policy as the teacher, and SDFT takes a
     moving average of the policy.
  2. The default is reverse_kl, as in SDFT. OPSD's commands have jsd with a beta of 0.5.
  3. OPSD samples with top-p and top-k, which this script refuses, because D compares whole distributions.
  4. With several updates per step no importance sampling corrects for the policy that sampled.

Shapes are those of train_grpo.py. docs/train_self_distill.md explains more.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from extras.self_distillation import (
    Hints,
    add_hints,
    hints_of_rows,
    room_beside_hints,
    teacher_states,
    token_divergences,
    with_hints,
)
from rl.data.batching import make_batch
from rl.data.types import take_rows
from rl.flags import AtLeast1, Count, Few, NotNegative, Positive, Share
from rl.formulas import distillation, schedule
from rl.model.load import load_model
from rl.model.sharding import backward, clip_grad_norm
from rl.run import metrics
from rl.run.arguments import LoggingRL, RLBase, parse
from rl.run.run import Run
from rl.run.task import load_task, open_sampler

# The functions of --loss-mode make D (R,) from the log-probs (R, V) of all V tokens by student and teacher, and from
# beta. KL(p, q) = sum over all tokens of p (log p - log q).
DIVERGENCES = {
    "reverse_kl": distillation.reverse_kl,  # KL(p_S, p_T)
    "forward_kl": distillation.forward_kl,  # KL(p_T, p_S)
    "jsd": distillation.jsd,  # beta KL(p_T, m) + (1 - beta) KL(p_S, m), with m = beta p_T + (1 - beta) p_S
}


@dataclass(frozen=True)
class Args(RLBase):  # with the groups of flags in rl/run/arguments.py, such as args.lora, args.data and args.memory
    # The teacher's sequences are the longest. They decide what fits into the memory and into the model's context.
    length_flags: ClassVar[tuple[str, ...]] = ("max_hinted_prompt_length", "max_response_length")
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
    # This is the distance D of the student to the teacher, over the whole vocabulary.
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
        experiment_name="self_distill",
        alarms=("rollout/logprob_gap_mean>0.05", "response_length/clip_ratio>0.5", "actor/entropy<0.01"),
    )


def validate(args: Args) -> None:
    """Raise ValueError for flags of distillation that contradict each other, naming the flag, its value and the fix."""
    if args.loss_mode == "jsd" and args.jsd_beta in (0, 1):
        raise ValueError(
            f"--jsd-beta {args.jsd_beta} makes no mixture; use --loss-mode forward_kl or reverse_kl instead"
        )
    if args.decoding.top_p < 1 or args.decoding.top_k > 0 or args.decoding.min_p > 0:
        raise ValueError(f"--loss-mode {args.loss_mode} compares whole distributions; drop --top-p, --top-k, --min-p")


def main(args: Args) -> dict[str, float]:
    """Distill the policy into itself, and return the metrics of the last step and of the last evaluation."""
    # Flags, data and rewards are checked here, before a model is loaded.
    if args.envs.agent:
        raise ValueError("--agent: an agent writes its prompts itself, so no hint can join them; use train_grpo.py")
    validate(args)
    task = load_task(args)
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
    num_updates = args.ppo_epochs * math.ceil(args.train_batch_size / mini_batch_size)  # optimizer steps in a step

    run = Run(args, task.tokenizer, task.total_steps)
    ranks, sampling = run.ranks, task.sampling
    policy = load_model(args.model, ranks, args.lora, run.memory, longest=task.longest, seed=args.seed)
    sampler = open_sampler(args, task, run)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    run.begin({"actor": (policy, optimizer)}, sampler)

    # run.steps() saves a checkpoint before each step if --save-freq says so. A run that is asked to stop saves and
    # exits at the next end of a phase or micro-batch. A step that has changed the weights is finished first.
    for step in run.steps(sampler.state):
        run.evaluate_if_due(sampler.evaluate, policy)

        # 1. Sample. The engine gets the student's weights, and samples G responses to each prompt, without hints. The
        # run ends if the trainer's log-probs of a few of them differ too much from the engine's. All ranks get the
        # scores and lengths of the whole step. Tokens stay on the rank that sampled them until phase 2.
        responses = sampler.sample(policy, step)  # B
        hinted_ids = hints_of_rows(responses, sampler.rows)  # of each response, the tokens of its prompt with the hint

        # 2. Batch. Divide the step into updates, which are one optimizer step each, and each update into micro-batches,
        # which have room for the hints too. Send each rank the tokens that it trains on. Responses without a score
        # teach as well, except for conversations whose environment has failed.
        batch, updates = make_batch(
            responses,
            trainable=torch.tensor([r.finish_reason != "error" for r in responses]),
            mini_batch_size=mini_batch_size * args.rollout_n,
            max_tokens=room_beside_hints(run.memory.ppo_max_token_len_per_gpu, responses, hinted_ids),
            ranks=ranks,
            version=sampler.version,
        )  # (b, T)
        run.may_stop_after("batch")

        # 3. Hints. The teacher's batch has the same responses in the same rows, behind the prompts with hints.
        hinted = with_hints(batch, responses, hinted_ids)  # (b, T')

        # === algorithm ================================================================================================
        # 4. Updates. A mini-batch makes one optimizer step, and its micro-batches only save memory.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, task.total_steps)
        optimizer.param_groups[0]["lr"] = lr
        means, norms = metrics.Means(ranks, num_updates=num_updates), []  # Both collect metrics for phase 5.
        for update in updates * args.ppo_epochs:  # the list of mini-batches, once for each epoch, in the same order
            for micro_rows in run.micro_batches(update):
                micro = take_rows(batch, micro_rows, ranks.device)  # (b', t), as long as the longest of these rows
                mask = micro.response_mask  # 1 for sampled tokens

                # The teacher. The policy as it is now reads prompt, hint and response. Its R hidden states (R, H), one
                # for each sampled token, are constants, from which the LM head makes the teacher's distributions.
                states = teacher_states(policy, take_rows(hinted, micro_rows, ranks.device))

                # The student. The same policy reads prompt and response, and divergence (b', t) is D at each sampled
                # token, over the whole vocabulary, with the gradient through the student only.
                logp, entropy, divergence, teacher_logp = token_divergences(
                    policy, micro, states, DIVERGENCES[args.loss_mode], beta=args.jsd_beta, sampling=sampling
                )
                # The count is of the whole mini-batch on all ranks, so the gradients of micro-batches and ranks add up.
                loss = (divergence * mask).sum() / max(update.num_tokens, 1.0)
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
        run.may_stop_after("update_actor")
        # === end ======================================================================================================

        # 5. Report. Losses are means over updates, entropies and the KL means over all tokens. Scores and lengths have
        # their mean, maximum and minimum over all responses. No hint is in these lengths.
        step_metrics = {
            **metrics.of_sampled(responses, args.rollout_n),
            **metrics.of_norms(norms),
            **means.reduce(),
            "actor/lr": lr,
        }
        run.log_step(step_metrics, responses=responses, batch=batch)

    run.evaluate_if_due(sampler.evaluate, policy)  # the last policy
    return run.close(sampler)


if __name__ == "__main__":
    main(parse(Args, __doc__))

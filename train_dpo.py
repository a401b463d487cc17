"""DPO: sample responses, pair better ones with worse ones, and learn from each pair directly.

    torchrun train_dpo.py --model Qwen/Qwen2.5-1.5B-Instruct                                       # one GPU, GSM8K
    torchrun train_dpo.py --pairs solution --ref-update-steps 58 --total-epochs 3                  # SPIN
    torchrun train_dpo.py --offline --train-files data/preferences/train.parquet                   # DPO as published

Direct Preference Optimization (arXiv 2305.18290) needs no advantages and no critic. A pair is two responses to one
prompt, a chosen and a rejected one. The policy is the model that learns, and the reference is the policy before
training. Let l_t be the log-probability that the policy gives to token t of a response, and l_ref_t that of the
reference:

    log-ratio   h = sum over t of (l_t - l_ref_t)          h_w of the chosen response (it wins), h_l of the rejected one
    loss        L = mean over pairs of -log sigmoid(beta (h_w - h_l))

beta h is called the implicit reward of a response. The loss is small if that of the chosen response is much larger than
that of the rejected one. IPO, SPPO, SLiC and KTO have other losses of the same h (--loss-type, `LOSSES` below).
Self-play (SPIN, arXiv 2401.01335, and SPPO) makes the policy the new reference every --ref-update-steps steps.

Where this departs from the papers:
  1. The policy samples the responses, and the reward decides which is better (OAIF, arXiv 2402.04792), unless
     --offline.
  2. SPPO's probability to win is 1 or 0, and not a model's estimate. IPO's log-ratios are means over tokens, as in TRL.
  3. KTO, which can do without pairs, gets pairs too. Its KL is estimated from those of the step.
  4. SPIN's responses come from the policy of today, and not from that of the last iteration, which is the reference.

Shapes are those of train_grpo.py, but there are N pairs, and so 2N rows (chosen, rejected, chosen, ...), of which b are
on this process (rank). docs/train_dpo.md explains more.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from extras.demonstrations import add_given, read_comparisons, with_given
from extras.implicit_rewards import pair_metrics
from rl.data.batching import make_batch
from rl.data.rows import Row
from rl.data.types import Sample, take_rows
from rl.flags import AtLeast1, Count, Few, NotNegative, Positive, Share
from rl.formulas import preference, schedule
from rl.model.load import load_model, load_reference
from rl.model.logprobs import fixed_logprobs, token_logprobs
from rl.model.sharding import backward, clip_grad_norm
from rl.run import metrics
from rl.run.arguments import LoggingRL, RLBase, parse
from rl.run.run import Run
from rl.run.task import load_task, open_sampler
from rl.sampling.responses import scores_of
from rl.sampling.sampler import Sampler

# The loss of each pair, (N,). h_w and h_l (N,) are the log-ratios of the chosen and the rejected response. T_w and T_l
# (N,) are their numbers of tokens. k_w and k_l are the means of h_w and of h_l over all pairs of the step, by the
# policy that begins it. Each loss ignores what it does not need (**_).
LOSSES = {
    # DPO, eq. 7, is minus the log-likelihood (Bradley and Terry) that the chosen response wins. With solutions it is
    # SPIN, eq. 4.7. e is --label-smoothing, see conservative DPO, eq. 3 of ericmitchell.ai/cdpo.pdf.
    "dpo": lambda h_w, h_l, beta, e, **_: (
        -(1 - e) * F.logsigmoid(beta * (h_w - h_l)) - e * F.logsigmoid(beta * (h_l - h_w))
    ),
    # IPO, eq. 17, arXiv 2310.12036: (h_w / T_w - h_l / T_l - 1 / (2 beta))^2 pulls the margin to a finite target. The
    # paper does not divide by T.
    "ipo": lambda h_w, h_l, T_w, T_l, beta, **_: (
        h_w / T_w.clamp(min=1) - h_l / T_l.clamp(min=1) - 1 / (2 * beta)
    ).square(),
    # SPPO, eq. 4.7, arXiv 2405.00675, gives each log-ratio a target, (chance to win - 1/2) / beta. 1 / beta is the
    # paper's eta.
    "sppo": lambda h_w, h_l, beta, **_: (h_w - 0.5 / beta).square() + (h_l + 0.5 / beta).square(),
    # SLiC-HF, eq. 1, arXiv 2305.10425: max(0, 1 - beta (h_w - h_l)). With log-ratios it is RSO's, arXiv 2309.06657.
    "hinge": lambda h_w, h_l, beta, **_: F.relu(1 - beta * (h_w - h_l)),
    # KTO, arXiv 2402.01306, as in TRL 0.8. A gain and a loss are each compared with how far the policy has moved on the
    # other half of the responses: 1 - (sigmoid(beta (h_w - max(k_l, 0))) + sigmoid(beta (max(k_w, 0) - h_l))) / 2
    "kto_pair": lambda h_w, h_l, k_w, k_l, beta, **_: (
        (2 - (beta * (h_w - F.relu(k_l.detach()))).sigmoid() - (beta * (F.relu(k_w.detach()) - h_l)).sigmoid()) / 2
    ),
}
# From scores (P, G) and a margin, each makes the places (N, 2) of chosen and rejected ones among all P * G responses.
PAIRS = {
    "best_worst": preference.best_against_worst,
    "all": preference.all_pairs,
    "solution": preference.first_against_all,
}


@dataclass(frozen=True)
class Args(RLBase):  # with the groups of flags in rl/run/arguments.py, such as args.lora, args.data and args.memory
    rows_per_unit = 2  # a pair is in one micro-batch
    # The policy and the first reference are loaded from this Hugging Face id or folder.
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"
    # Learn from the pairs in --train-files, whose format is that of train_reward.py, and sample nothing.
    offline: bool = False
    train_batch_size: AtLeast1 = 128  # Each step takes this many prompts (P).
    rollout_n: Few = 8  # Each prompt gets this many sampled responses.
    # A prompt has at most this many tokens. A longer one is an error unless --filter-overlong-prompts.
    max_prompt_length: AtLeast1 = 512
    max_response_length: AtLeast1 = 1024  # A response has at most this many tokens. A longer one is cut.
    # best_worst pairs the best response to a prompt with its worst. all makes a pair of every two whose scores differ.
    # solution pairs the reference solution in the data with each response (SPIN).
    pairs: Literal[*PAIRS] = "best_worst"
    # The scores of a pair must differ by more than this. --pairs solution ignores scores.
    pair_margin: NotNegative = 0.0
    solution_key: str = "answer"  # --pairs solution finds the reference solution under this name in extra_info.
    # The loss of a pair is that of DPO, IPO, SPPO, SLiC (hinge), or KTO (kto_pair).
    loss_type: Literal[*LOSSES] = "dpo"
    # The loss multiplies log-ratios by this. A small one lets the policy go far from the reference.
    beta: Positive = 0.1
    # --loss-type dpo assumes that this share of the pairs, below 0.5, is the wrong way round.
    label_smoothing: Share = 0.0
    # Make the policy the new reference at this interval, in steps. The default is never.
    ref_update_steps: AtLeast1 | None = None
    # Each optimizer step takes the pairs of this many prompts. By default it takes all of a step.
    ppo_mini_batch_size: AtLeast1 | None = None
    ppo_epochs: Few = 1  # The updates of a step pass over its pairs this many times.
    # AdamW has this learning rate after warm-up. LoRA needs about ten times that of full training.
    lr: NotNegative = 1e-6
    lr_warmup_steps: Count = 0  # The learning rate rises linearly over this many steps.
    # After warm-up, the learning rate stays constant, falls linearly, or falls as a cosine does.
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NotNegative = 0.01  # This is AdamW's decoupled weight decay.
    grad_clip: Positive = 1.0  # A gradient whose global norm is larger than this is scaled down to it.
    seed: Count = 0  # The seed decides, together with the step, the order of the data and what is sampled.
    logging: LoggingRL = LoggingRL(
        experiment_name="dpo",
        alarms=("train/num_pairs<1", "response_length/clip_ratio>0.5", "actor/entropy<0.01"),
    )


def check_pairs(args: Args) -> None:
    """Refuse settings of pairs that contradict each other, naming the flag, the value and the fix."""
    if args.envs.agent:
        raise ValueError("--agent: a pair compares two rows of tokens, and an agent may have more; use train_grpo.py")
    if args.offline and (args.pairs != "best_worst" or args.pair_margin):
        raise ValueError(
            "--offline has its pairs from --train-files; leave --pairs and --pair-margin at their defaults"
        )
    decoding = args.decoding
    if (args.offline or args.pairs == "solution") and (decoding.top_p < 1 or decoding.top_k > 0 or decoding.min_p > 0):
        raise ValueError("--top-p, --top-k and --min-p leave out tokens that the data's responses may have; drop them")
    if not args.offline and args.pairs != "solution" and args.rollout_n < 2:
        raise ValueError(f"--rollout-n {args.rollout_n} makes no pair; sample at least 2, or add --pairs solution")
    if args.label_smoothing and (args.loss_type != "dpo" or args.label_smoothing >= 0.5):
        raise ValueError(f"--label-smoothing {args.label_smoothing} must be below 0.5, and is of --loss-type dpo")


class Offline(Sampler):
    """Samples nothing, since the data has the responses."""

    def complete_groups(self, step: int) -> tuple[list[Row], list[Sample]]:
        """The prompts of a step, and no samples."""
        return self.prompts(step), []


def main(args: Args) -> dict[str, float]:
    """Train on pairs, and return the metrics of the last step and of the last evaluation."""
    # Flags, data and rewards are checked here, before a model is loaded.
    check_pairs(args)
    read_train = read_comparisons if args.offline else None
    task = load_task(args, read_train=read_train)
    # Each row gets "given", which are the responses that the data has. They are chosen and rejected, or the solution,
    # or none.
    solution = [f"extra_info.{args.solution_key}"] if args.pairs == "solution" else []
    columns = ["chosen", "rejected"] if args.offline else solution
    drops_overlong = args.data.filter_overlong_prompts
    train_rows = add_given(task.train_rows, task.tokenizer, columns, args.max_response_length, drops_overlong)
    total_steps = args.data.count_steps(len(train_rows), args.train_batch_size)  # of the rows that are left
    task = task._replace(train_rows=train_rows, total_steps=total_steps)
    mini_batch_size = args.ppo_mini_batch_size or args.train_batch_size  # prompts
    num_mini_batches = math.ceil(args.train_batch_size / mini_batch_size)  # of a step

    run = Run(args, task.tokenizer, task.total_steps)
    ranks, longest, sampling = run.ranks, task.longest, task.sampling
    policy = load_model(args.model, ranks, args.lora, run.memory, longest=longest, seed=args.seed)
    sampler = open_sampler(args, task, run, Offline if args.offline else None)
    reference = load_reference(args.model, ranks, policy, run.memory, longest=longest)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    saved = {"actor": (policy, optimizer)}
    saved |= {"reference": (reference, None)} if args.ref_update_steps else {}  # It changes without an optimizer.
    run.begin(saved, sampler)

    # run.steps() saves a checkpoint before each step if --save-freq says so. A run that is asked to stop saves and
    # exits at the next end of a phase or micro-batch. A step that has changed the weights is finished first.
    for step in run.steps(sampler.state):
        run.evaluate_if_due(sampler.evaluate, policy)

        # 1. Sample. The engine gets the policy's weights, and samples responses to each prompt, or none with --offline.
        # The run ends if the trainer's log-probs of a few of them differ too much from the engine's. All ranks get the
        # scores and lengths of the whole step. Tokens stay on the rank that sampled them until phase 2.
        sampled = sampler.sample(policy, step)

        # 2. Pairs and batch. The G responses to a prompt begin with those that the data gives, and the sampled ones
        # follow. A given response has the score 1 if it is the chosen one or the solution, and 0 if it is the rejected
        # one. A response may be in several pairs. A step in which the responses to every prompt score the same has no
        # pair, and makes no update. Both rows of a pair are in the same micro-batch.
        responses = with_given(sampler.rows, sampled, ranks)  # P * G
        scores_PG = scores_of(responses).view(len(sampler.rows), -1)  # (P, G), NaN for a response without a score
        pairs = PAIRS[args.pairs](scores_PG, args.pair_margin)  # (N, 2), places in `responses`
        paired = [responses[i] for i in pairs.flatten().tolist()]  # 2N, namely chosen, rejected, chosen, ...
        batch, updates = make_batch(
            paired,
            trainable=torch.ones(len(paired), dtype=torch.bool),
            mini_batch_size=2 * max(math.ceil(len(pairs) / num_mini_batches), 1),
            max_tokens=run.memory.ppo_max_token_len_per_gpu,
            ranks=ranks,
            rows_per_unit=args.rows_per_unit,
        )  # (b, T)
        run.may_stop_after("batch")

        # 3. Log-probs of the reference, which stay fixed. With self-play the policy may become the reference first.
        if args.ref_update_steps and step > 0 and step % args.ref_update_steps == 0:
            run.refresh(reference, policy)
        batch = replace(batch, ref_logp=fixed_logprobs(reference, batch, updates, sampling=sampling))
        run.may_stop_after("ref")

        # === algorithm ================================================================================================
        # 4. k_w and k_l, for KTO alone. They say how far the policy has moved from the reference when the step begins.
        k = torch.zeros(2)
        if args.loss_type == "kto_pair" and len(pairs):
            old_logp = fixed_logprobs(policy, batch, updates, sampling=sampling)
            k = ranks.all_rows((old_logp - batch.ref_logp).sum(1), batch.rows, len(paired)).view(-1, 2).mean(0)
            run.may_stop_after("old_log_prob")
        k_w, k_l = k.to(ranks.device)

        # 5. Updates. A mini-batch makes one optimizer step, and its micro-batches only save memory.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, task.total_steps)
        optimizer.param_groups[0]["lr"] = lr
        means, norms = metrics.Means(ranks, num_updates=len(updates) * args.ppo_epochs), []
        for update in updates * args.ppo_epochs:  # the list of mini-batches, once for each epoch, in the same order
            num_pairs = len(update.rows) / 2  # of the mini-batch on all ranks, so the gradients of ranks add up
            for micro_rows in run.micro_batches(update):
                micro = take_rows(batch, micro_rows, ranks.device)  # (b', t), as long as the longest of these rows
                mask = micro.response_mask  # 1 for the tokens of responses. Elsewhere logp and ref_logp are 0.
                logp, entropy = token_logprobs(policy, micro, sampling=sampling)

                # Sums over tokens (b' / 2, 2), of chosen and of rejected ones. A rank that has run out of pairs (n = 0)
                # runs an empty row through the model, which has no part in the sums.
                n = len(micro_rows)
                logps = logp[:n].sum(1).view(-1, 2)
                log_ratios = (logp - micro.ref_logp)[:n].sum(1).view(-1, 2)
                lengths = mask[:n].sum(1).view(-1, 2)
                (h_w, h_l), (T_w, T_l) = log_ratios.unbind(1), lengths.unbind(1)
                of_pair = dict(h_w=h_w, h_l=h_l, T_w=T_w, T_l=T_l, k_w=k_w, k_l=k_l)
                pair_loss = LOSSES[args.loss_type](**of_pair, beta=args.beta, e=args.label_smoothing)
                loss = pair_loss.sum() / num_pairs
                backward(policy, loss, is_last=micro_rows is update.micro_batches[-1])
                means.over_updates({"actor/loss": loss})
                means.over_tokens(mask, {"actor/entropy": entropy})
                means.over_sequences(pair_metrics(logps, args.beta * log_ratios))
            norm = clip_grad_norm(policy, args.grad_clip)
            if math.isfinite(norm) and update.num_tokens > 0:
                optimizer.step()
            else:
                run.skip_update(norm, update.num_tokens, batch)  # raises an error at the third in a row
            optimizer.zero_grad(set_to_none=True)
            norms.append({"actor": norm})
        if not scores_PG.isfinite().any():
            run.skip_update(0.0, 0.0, batch)  # So if no response gets a score three times in a row, the run stops.
        run.may_stop_after("update_actor")
        # === end ======================================================================================================

        # 6. Report. Losses are means over updates. Other metrics are means over all pairs, or their tokens, of all
        # ranks.
        step_metrics = {
            **metrics.of_sampled(sampled, args.rollout_n),
            **metrics.of_norms(norms),
            **means.reduce(),
            "train/num_pairs": float(len(pairs)),
            "actor/lr": lr,
        }
        generated = sum(r.num_sampled for r in sampled)
        run.log_step(step_metrics, tokens=sum(r.num_tokens for r in paired), generated=generated)

    run.evaluate_if_due(sampler.evaluate, policy)  # the last policy
    return run.close(sampler)


if __name__ == "__main__":
    main(parse(Args, __doc__))

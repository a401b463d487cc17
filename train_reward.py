"""Reward modeling: learn a score from pairs of responses of which a human, or a rule, preferred one.

    torchrun train_reward.py --model Qwen/Qwen2.5-1.5B-Instruct --train-files data/preferences/train.parquet

A reward model is a language model with a scalar head, which reads the last token of prompt and response. Let s_w be the
score of the chosen response of a pair (it wins), and s_l that of the rejected one (it loses):

    loss   L = mean over pairs of -log sigmoid(s_w - s_l)        Bradley and Terry 1952; InstructGPT, arXiv 2203.02155

The mean is over the pairs of the batch on all ranks, so the loss depends neither on packing nor on the number of GPUs.
Model, packing and sharding are those of train_grpo.py, which takes the result as --reward-model. More than one or two
epochs overfit.

A step has B pairs, which are 2B rows (chosen, rejected, chosen, ...). A micro-batch has 2b of these rows. A row has at
most T tokens.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from extras.demonstrations import load_comparisons
from extras.judges import fixed_scores, load_reward_model, sequence_scores
from rl.console import progress
from rl.data.batching import collate, plan_update
from rl.data.flags import Files
from rl.data.order import prompts_for_step
from rl.data.types import Evaluation, take_rows
from rl.flags import AtLeast1, Count, Every, Free, NotNegative, Positive, Share
from rl.formulas import schedule
from rl.model.sharding import backward, clip_grad_norm
from rl.run.means import Means
from rl.run.run import Run
from rl.run.supervised import LoggingSupervised, Supervised, check, parse


@dataclass(frozen=True)
class Args(Supervised):  # with the groups of flags in rl/run/supervised.py, such as args.lora and args.memory
    rows_per_unit = 2  # a pair is in one micro-batch
    data: Files = Files(train_files=("data/preferences/train.parquet",), val_files=())
    # This Hugging Face id or folder holds a causal language model, or a reward model that is to learn more.
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"
    train_batch_size: AtLeast1 = 128  # Each optimizer step takes this many pairs, over all ranks (B).
    # Prompt and response have at most this many tokens. Longer ones are an error unless --filter-overlong.
    max_length: AtLeast1 = 2048
    filter_overlong: bool = False  # Drop pairs with a side longer than --max-length, and say how many.
    # With --val-files, evaluate at this interval, in steps, and at the end. -1 means never.
    test_freq: Free[Every] = 100
    # AdamW has this learning rate after warm-up. LoRA needs about ten times that of full training.
    lr: NotNegative = 1e-5
    beta2: Share = 0.95  # This is AdamW's decay of the second moment.
    lr_warmup_steps: Count = 0  # The learning rate rises linearly over this many steps.
    # After warm-up, the learning rate stays constant, falls linearly, or falls as a cosine does.
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    weight_decay: NotNegative = 0.01  # This is AdamW's decoupled weight decay.
    grad_clip: Positive = 1.0  # A gradient whose global norm is larger than this is scaled down to it.
    # The seed decides, together with the step, the order of the data. It also decides the weights of a new head.
    seed: Count = 0
    logging: LoggingSupervised = LoggingSupervised(experiment_name="reward")


def bradley_terry(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(s_w - s_l) of each pair, from scores (B,). This is minus the log-likelihood that the chosen response
    wins.

    It is log 2 for equal scores. Adding a constant to all scores changes nothing. Source: eq. 1 of InstructGPT.
    """
    return -F.logsigmoid(chosen - rejected)


def main(args: Args) -> dict[str, float]:
    """Train, and return the metrics of the last step and of the last evaluation."""
    # Flags, data and rewards are checked here, before a model is loaded.
    tokenizer = check(args, scores=True)
    load = partial(
        load_comparisons, tokenizer=tokenizer, max_length=args.max_length, filter_overlong=args.filter_overlong
    )
    train = load(args.data.train_files)  # pairs of samples (chosen, rejected)
    val = load(args.data.val_files) if args.data.val_files else []
    total_steps = args.data.count_steps(len(train), args.train_batch_size)

    run = Run(args, tokenizer, total_steps)
    ranks = run.ranks
    model = load_reward_model(args.model, ranks, args.lora, run.memory, longest=args.max_length, seed=args.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, args.beta2), weight_decay=args.weight_decay, fused=True
    )
    run.begin({"reward_model": (model, optimizer)})
    # plan() divides rows into micro-batches of at most max_tokens. Both rows of a pair are in the same one.
    plan = partial(plan_update, max_tokens=run.memory.max_token_len_per_gpu, ranks=ranks, rows_per_unit=2)

    def evaluate() -> Evaluation:
        """The same loss on held-out pairs, without gradients, and how often the chosen response wins."""
        held_out = collate([side for pair in val for side in pair])  # (2B, T)
        update = plan(held_out.lengths.tolist())
        own_scores = fixed_scores(model, held_out, update.micro_batches)  # 0 in rows of other ranks
        chosen, rejected = ranks.all_reduce_sum(own_scores.to(ranks.device)).view(-1, 2).unbind(1)
        val_metrics = {
            "val/loss": bradley_terry(chosen, rejected).mean().item(),
            "val/accuracy": (chosen > rejected).float().mean().item(),
            "val/margin": (chosen - rejected).mean().item(),
        }
        return val_metrics, []

    # run.steps() saves a checkpoint before each step if --save-freq says so. A run that is asked to stop saves and
    # exits at the next end of a phase or micro-batch. A step that has changed the weights is finished first.
    for step in progress("reward", run.steps(), total_steps - run.first_step):
        run.evaluate_if_due(evaluate)

        # 1. Batch. Which pairs these are depends only on the seed and the step. All ranks have all rows, and `update`
        # says which rank trains on which.
        pairs = prompts_for_step(train, step, args.train_batch_size, args.seed)  # B
        batch = collate([side for pair in pairs for side in pair])  # (2B, T), chosen, rejected, chosen, ...
        update = plan(batch.lengths.tolist())
        run.may_stop_after("data")

        # 2. Update. The denominator counts the whole batch, so gradients of micro-batches and ranks add up.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, total_steps)
        optimizer.param_groups[0]["lr"] = lr
        means = Means(ranks)
        for micro_rows in run.micro_batches(update):
            micro = take_rows(batch, micro_rows, ranks.device)  # (2b, t), as long as the longest of these rows
            # A rank that has run out of pairs runs an empty row, whose score counts nothing.
            scores = sequence_scores(model, micro)[: len(micro_rows)]
            chosen, rejected = scores.view(-1, 2).unbind(1)  # (b,) each
            loss = bradley_terry(chosen, rejected).sum() / len(pairs)
            backward(model, loss, is_last=micro_rows is update.micro_batches[-1])
            means.over_updates({"train/loss": loss})
            means.over_sequences({"train/accuracy": chosen > rejected})
            means.over_sequences({"train/score_chosen": chosen, "train/score_rejected": rejected})
        norm = clip_grad_norm(model, args.grad_clip)
        if not math.isfinite(norm):
            raise RuntimeError(
                f"step {step + 1}: gradient norm {norm}; the checkpoints in {run.folder.root} are intact"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.may_stop_after("update")

        # 3. Report.
        total_tokens, step_metrics = batch.lengths.sum().item(), means.reduce()
        step_metrics["train/margin"] = step_metrics["train/score_chosen"] - step_metrics["train/score_rejected"]
        step_metrics |= {"train/grad_norm": norm, "train/lr": lr, "train/global_tokens": float(total_tokens)}
        run.log_step(step_metrics, tokens=total_tokens)

    run.evaluate_if_due(evaluate)  # the last model
    return run.close()


if __name__ == "__main__":
    main(parse(Args, __doc__))

"""SFT: next-token training on demonstrations, packed, with the loss on response or assistant tokens only.

    torchrun sft.py --model Qwen/Qwen2.5-1.5B --train-files my_demonstrations.parquet
    python sft.py --model data/arithmetic/model --train-files data/arithmetic/sft.parquet --max-length 128 --lr 4e-3

Rows have `prompt` and `response`, or `messages`. With logp_t the log-probability of token t given the tokens before it:

    loss   L = sum of -logp_t over the learned tokens of the batch / their number       response or assistant tokens

Both count the batch on all ranks, so the loss depends neither on packing nor on the number of GPUs. A step of SFT is a
policy-gradient step on given responses whose advantages are all one. Model, packing and sharding are those of
train_grpo.py.

A step has B rows, and a micro-batch has b of them. Tensors of tokens are (b, T). They are shifted already, so position
t describes token t given the tokens before it.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from extras.demonstrations import answer_ends, load_demonstrations
from rl.console import progress
from rl.data.batching import collate, plan_update
from rl.data.flags import Files
from rl.data.order import prompts_for_step
from rl.data.types import Batch, Evaluation, take_rows
from rl.flags import AtLeast1, Count, Every, Free, NotNegative, Positive, Share
from rl.formulas import schedule
from rl.model.load import load_model
from rl.model.logprobs import fixed_logprobs, token_logprobs
from rl.model.sharding import backward, clip_grad_norm
from rl.run.means import Means
from rl.run.run import Run
from rl.run.supervised import LoggingSupervised, Supervised, check, parse


@dataclass(frozen=True)
class Args(Supervised):  # with the groups of flags in rl/run/supervised.py, such as args.lora and args.memory
    data: Files = Files(train_files=("data/sft.parquet",), val_files=())
    model: str = "Qwen/Qwen2.5-1.5B"  # The model that is trained is loaded from this Hugging Face id or folder.
    train_batch_size: AtLeast1 = 128  # Each optimizer step takes this many rows, over all ranks (B).
    # A row has at most this many tokens. A longer one is an error unless --filter-overlong.
    max_length: AtLeast1 = 2048
    filter_overlong: bool = False  # Drop rows longer than --max-length, and say how many.
    # With --val-files, compute val/loss at this interval, in steps, and at the end. -1 means never.
    test_freq: Free[Every] = 100
    # AdamW has this learning rate after warm-up. LoRA needs about ten times that of full training.
    lr: NotNegative = 1e-5
    beta2: Share = 0.95  # This is AdamW's decay of the second moment.
    lr_warmup_steps: Count = 0  # The learning rate rises linearly over this many steps.
    # After warm-up, the learning rate stays constant, falls linearly, or falls as a cosine does.
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    weight_decay: NotNegative = 0.01  # This is AdamW's decoupled weight decay.
    grad_clip: Positive = 1.0  # A gradient whose global norm is larger than this is scaled down to it.
    seed: Count = 0  # The seed decides, together with the step, the order of the data.
    logging: LoggingSupervised = LoggingSupervised(experiment_name="sft")


def count_learned(batch: Batch) -> float:
    """How many tokens of a batch (B, T) the loss counts. The first token of a row is left out, whatever its mask is.
    There are no tokens before it, so it has no log-prob.
    """
    return batch.response_mask[:, 1:].sum().item()


def main(args: Args) -> dict[str, float]:
    """Train, and return the metrics of the last step and the last held-out loss."""
    # Flags and data are checked here, before a model is loaded.
    tokenizer = check(args)
    load = partial(
        load_demonstrations, tokenizer=tokenizer, max_length=args.max_length, filter_overlong=args.filter_overlong
    )
    train = load(args.data.train_files)  # samples, whose response mask is 1 for the tokens that are learned
    val = load(args.data.val_files) if args.data.val_files else []
    total_steps = args.data.count_steps(len(train), args.train_batch_size)

    run = Run(args, tokenizer, total_steps)
    ranks = run.ranks
    policy = load_model(args.model, ranks, args.lora, run.memory, longest=args.max_length, seed=args.seed)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.lr, betas=(0.9, args.beta2), weight_decay=args.weight_decay, fused=True
    )
    # What is exported stops where the data ends its answers.
    run.begin({"actor": (policy, optimizer)}, ends=answer_ends(train))
    # plan() divides rows into micro-batches of at most max_tokens. All ranks have equally many of these.
    plan = partial(plan_update, max_tokens=run.memory.max_token_len_per_gpu, ranks=ranks)

    def evaluate() -> Evaluation:
        """The same loss on held-out rows, without gradients."""
        held_out = collate(val)
        update = plan(held_out.lengths.tolist())
        logp = fixed_logprobs(policy, held_out, [update])  # (B, T), 0 in rows of other ranks
        total = ranks.all_reduce_sum(logp.sum().to(ranks.device)).item()
        return {"val/loss": -total / count_learned(held_out)}, []

    # run.steps() saves a checkpoint before each step if --save-freq says so. A run that is asked to stop saves and
    # exits at the next end of a phase or micro-batch. A step that has changed the weights is finished first.
    for step in progress("sft", run.steps(), total_steps - run.first_step):
        run.evaluate_if_due(evaluate)

        # 1. Batch. Which rows these are depends only on the seed and the step. All ranks have all rows, and `update`
        # says which rank trains on which.
        samples = prompts_for_step(train, step, args.train_batch_size, args.seed)  # B
        batch = collate(samples)  # (B, T)
        update = plan(batch.lengths.tolist())
        run.may_stop_after("data")

        # 2. Update. The denominator counts the whole batch, so gradients of micro-batches and ranks add up.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, total_steps)
        optimizer.param_groups[0]["lr"] = lr
        num_tokens, means = count_learned(batch), Means(ranks)
        for micro_rows in run.micro_batches(update):
            micro = take_rows(batch, micro_rows, ranks.device)  # (b, t), as long as the longest of these rows
            logp, _ = token_logprobs(policy, micro)
            loss = (-logp * micro.response_mask).sum() / num_tokens
            backward(policy, loss, is_last=micro_rows is update.micro_batches[-1])
            means.over_updates({"train/loss": loss})
        norm = clip_grad_norm(policy, args.grad_clip)
        if not math.isfinite(norm):
            raise RuntimeError(
                f"step {step + 1}: gradient norm {norm}; the checkpoints in {run.folder.root} are intact"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.may_stop_after("update")

        # 3. Report.
        total_tokens = batch.lengths.sum().item()
        step_metrics = means.reduce() | {
            "train/grad_norm": norm,
            "train/lr": lr,
            "train/global_tokens": float(total_tokens),
        }
        run.log_step(step_metrics, tokens=total_tokens)

    run.evaluate_if_due(evaluate)  # the last policy
    return run.close()


if __name__ == "__main__":
    main(parse(Args, __doc__))

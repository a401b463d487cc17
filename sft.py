"""SFT: next-token training on demonstrations, packed, with the loss on response or assistant tokens only.

    torchrun sft.py --model Qwen/Qwen2.5-1.5B --train-files my_demonstrations.parquet
    python sft.py --model data/arithmetic/model --train-files data/arithmetic/sft.parquet --max-length 128 --lr 4e-3

Rows have `prompt` and `response`, or `messages`. The loss is the mean negative log-likelihood over all response tokens
of the batch, on all ranks, so it depends neither on packing nor on the number of GPUs. An SFT step is a policy-gradient
step on given samples whose advantages are all one, so model code, packing and sharding are those of train_grpo.py.

Shapes: B sequences of a step, T tokens, (b, t) one micro-batch of them.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from rl import flags
from rl.console import progress, say
from rl.data.batching import collate, plan_updates
from rl.data.encode import encode_sft, load_tokenizer
from rl.data.order import prompts_for_step
from rl.data.rows import read_sft_rows
from rl.data.types import Sample, take_rows
from rl.flags import AtLeast1, Count, NotNegative, Positive, Share
from rl.formulas import losses, schedule
from rl.model import load as models
from rl.model import lora, sharding
from rl.model.checks import check_trainable
from rl.model.logprobs import fixed_logprobs, token_logprobs
from rl.run import metrics
from rl.run.run import Run


@dataclass(frozen=True)
class Args(flags.Supervised, lora.LoRA):  # which have the flags that scripts share
    experiment_name: str = "sft"  # run in the trackers, and part of the folder
    # parquet or jsonl with `prompt` (text or messages) and `response`, or with `messages`
    train_files: tuple[str, ...] = ("data/sft.parquet",)
    val_files: tuple[str, ...] = ()  # held-out files, same schema; their loss is val/loss
    test_freq: int = 100  # compute val/loss every this many steps and at the end, if there are --val-files; -1 never

    # --- model and data
    model: str = "Qwen/Qwen2.5-1.5B"  # Hugging Face id or folder of the model to train
    train_batch_size: AtLeast1 = 128  # sequences per optimizer step, over all ranks
    max_length: AtLeast1 = 2048  # tokens; a longer row is an error unless --filter-overlong
    filter_overlong: bool = False  # drop rows longer than --max-length, and say how many
    seed: int = 0  # decides the order of the data, together with the step

    # --- optimizer
    lr: NotNegative = 1e-5  # AdamW's learning rate after warm-up; LoRA wants about ten times that of full training
    beta2: Share = 0.95  # AdamW's second-moment decay
    lr_warmup_steps: Count = 0  # steps of linear warm-up
    lr_scheduler_type: Literal["constant", "cosine"] = "cosine"  # shape of the learning rate after warm-up
    weight_decay: NotNegative = 0.01  # AdamW's decoupled weight decay
    grad_clip: Positive = 1.0  # largest global gradient norm


def encode(tokenizer, rows: list[dict], args: Args) -> list[Sample]:
    """Rows -> samples whose response mask is the loss mask. Raises ValueError naming a row that is too long."""
    samples = []
    for row in rows:
        ids, mask = encode_sft(tokenizer, row, max_length=None if args.filter_overlong else args.max_length)
        samples.append(Sample([], ids, mask, [0.0] * len(ids), "stop", row["row_index"]))
    kept = [s for s in samples if s.num_tokens <= args.max_length]
    if not kept:
        raise ValueError(f"all {len(rows)} rows are longer than --max-length {args.max_length}; raise it")
    if len(kept) < len(samples):
        say(f"dropped {len(samples) - len(kept)} of {len(rows)} rows longer than --max-length {args.max_length}")
    return kept


def main(args: Args) -> dict[str, float]:
    """Train; returns the metrics of the last step and the last held-out loss."""
    flags.check(args)
    if args.max_token_len_per_gpu < args.max_length:
        raise ValueError(
            f"--max-token-len-per-gpu {args.max_token_len_per_gpu} cannot hold one row of "
            f"--max-length {args.max_length} tokens; raise it to at least that"
        )
    tokenizer = load_tokenizer(args.model)
    check_trainable(args.model, args.max_length, "--max-length")
    train = encode(tokenizer, read_sft_rows(args.train_files), args)
    val = encode(tokenizer, read_sft_rows(args.val_files), args) if args.val_files else []
    prompts_for_step(train, 0, args.train_batch_size, args.seed)  # refuses a batch larger than the data
    total_steps = args.total_training_steps or args.total_epochs * (len(train) // args.train_batch_size)

    run = Run(args, tokenizer, total_steps)
    ranks = run.ranks
    policy = models.load_policy(args, ranks)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.lr, betas=(0.9, args.beta2), weight_decay=args.weight_decay, fused=True
    )
    run.resume({"actor": (policy, optimizer)}, about=f"{args.train_batch_size} rows a step of {len(train)}")
    plan = partial(plan_updates, max_tokens=args.max_token_len_per_gpu, ranks=ranks)
    pad_id = tokenizer.pad_token_id or 0
    step_metrics, val_metrics = {}, {}

    for step in progress("sft", range(run.start, total_steps + 1)):  # the last round only evaluates
        clock = run.begin(step, state={})  # saves the `step` steps made so far, if that is due

        # 1. Evaluate: the same loss on held-out rows, without gradients.
        if val and run.evaluation_is_due(step):
            held_out = collate(val, pad_id=pad_id)
            updates = plan(held_out.lengths.tolist(), mini_batch_size=len(val))
            logp = fixed_logprobs(policy, held_out, updates)  # (B, T), zero in rows of other ranks
            total = ranks.all_reduce_sum(logp.sum().to(ranks.device)).item()
            num_tokens = held_out.response_mask[:, 1:].sum().item()
            val_metrics = run.log_evaluation(step, {"val/loss": -total / num_tokens})
            clock("testing")
        if step == total_steps:
            break

        # 2. Batch: a pure function of (seed, step), planned into micro-batches that all ranks run in lockstep.
        samples = prompts_for_step(train, step, args.train_batch_size, args.seed)  # B
        batch = collate(samples, pad_id=pad_id)  # (B, T)
        [update] = plan(batch.lengths.tolist(), mini_batch_size=len(samples))
        clock("data")

        # 3. Update: the denominator is the whole batch's, so gradients of micro-batches and ranks add up.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, total_steps)
        optimizer.param_groups[0]["lr"] = lr
        num_tokens, means = batch.response_mask[:, 1:].sum().item(), metrics.Means(ranks)  # nothing predicts token 0
        for micro_rows in update.micro_batches:
            run.leave_if_asked()
            micro = take_rows(batch, micro_rows, ranks.device)  # (b, t)
            logp, _ = token_logprobs(policy, micro)
            loss = losses.masked_sum(-logp, micro.response_mask) / num_tokens
            sharding.last_micro_batch(policy, micro_rows is update.micro_batches[-1])  # the last syncs copies
            loss.backward()  # adds to the gradients, and sums them over ranks
            means.over_updates({"train/loss": loss})
        grad_norm = sharding.clip_grad_norm(policy, args.grad_clip)
        if not math.isfinite(grad_norm):
            raise RuntimeError(
                f"step {step + 1}: gradient norm {grad_norm}; the checkpoints in {run.folder.root} are intact"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock("update")

        # 4. Report.
        total_tokens = batch.lengths.sum().item()
        found = {"train/grad_norm": grad_norm, "train/lr": lr, "train/global_tokens": float(total_tokens)}
        shown = step + 1 == total_steps or (args.log_freq > 0 and (step + 1) % args.log_freq == 0)
        step_metrics = run.log_step(step + 1, means.reduce() | found, tokens=total_tokens, shown=shown)

    run.close()
    return step_metrics | val_metrics


if __name__ == "__main__":
    main(flags.parse(Args, __doc__))

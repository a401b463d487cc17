"""Reward modelling: learn a score from pairs of responses of which a human, or a rule, preferred one.

    torchrun train_reward.py --model Qwen/Qwen2.5-1.5B-Instruct --train-files data/preferences/train.parquet

A scalar head on a language model reads the last token of prompt and response. The loss of a pair is that of Bradley and
Terry (1952; InstructGPT, arXiv 2203.02155, eq. 1): -log sigmoid(score of chosen - score of rejected), averaged over the
pairs of the batch on all ranks, so it depends neither on packing nor on the number of GPUs. Model code, packing and
sharding are those of train_grpo.py, which takes the result as --reward-model.

Shapes: B pairs of a step, 2 B sequences with chosen and rejected side by side, (2 b, t) one micro-batch of them.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from rl import flags
from rl.console import progress, say
from rl.data.batching import collate, plan_updates
from rl.data.encode import encode_conversation, load_tokenizer
from rl.data.order import prompts_for_step
from rl.data.rows import read_preference_rows
from rl.data.types import Sample, take_rows
from rl.flags import AtLeast1, Count, NotNegative, Positive, Share
from rl.formulas import losses, schedule
from rl.model import lora, reward_model, sharding
from rl.model.checks import check_trainable
from rl.run import metrics
from rl.run.run import Run


@dataclass(frozen=True)
class Args(flags.Supervised, lora.LoRA):
    experiment_name: str = "reward"  # run in the trackers, and part of the folder
    # parquet or jsonl with `prompt` (text or messages), `chosen` and `rejected` (text)
    train_files: tuple[str, ...] = ("data/preferences/train.parquet",)
    val_files: tuple[str, ...] = ()  # held-out files, same schema; they give val/accuracy and val/loss
    test_freq: int = 100  # evaluate every this many steps and at the end, if there are --val-files; -1 never
    total_epochs: AtLeast1 = 1  # passes over the pairs; more than one or two overfit

    # --- model and data
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # Hugging Face id or folder: a causal LM, or a reward model to train on
    train_batch_size: AtLeast1 = 128  # pairs per optimizer step, over all ranks
    max_length: AtLeast1 = 2048  # tokens of prompt and response; a longer one is an error unless --filter-overlong
    filter_overlong: bool = False  # drop pairs with a side longer than --max-length, and say how many
    seed: int = 0  # decides the order of the data, together with the step, and the weights of a new head

    # --- optimizer
    lr: NotNegative = 1e-5  # AdamW's learning rate after warm-up; LoRA wants about ten times that of full training
    beta2: Share = 0.95  # AdamW's second-moment decay
    lr_warmup_steps: Count = 0  # steps of linear warm-up
    lr_scheduler_type: Literal["constant", "cosine"] = "cosine"  # shape of the learning rate after warm-up
    weight_decay: NotNegative = 0.01  # AdamW's decoupled weight decay
    grad_clip: Positive = 1.0  # largest global gradient norm


def encode(tokenizer, rows: list[dict], args: Args) -> list[tuple[Sample, Sample]]:
    """Rows -> pairs (chosen, rejected). Raises ValueError naming a row with a side that is too long."""
    pairs = []
    for row in rows:
        sides = [encode_conversation(tokenizer, row, row[side]) for side in ("chosen", "rejected")]
        longest = max(map(len, sides))
        if longest <= args.max_length:
            pairs.append(tuple(Sample(ids, [], [], [], "stop", row["row_index"]) for ids in sides))
        elif not args.filter_overlong:
            raise ValueError(
                f"row {row['row_index']}: has {longest} tokens, over --max-length {args.max_length}; raise it or add "
                "--filter-overlong"
            )
    if not pairs:
        raise ValueError(f"all {len(rows)} rows are longer than --max-length {args.max_length}; raise it")
    if len(pairs) < len(rows):
        say(f"dropped {len(rows) - len(pairs)} of {len(rows)} rows longer than --max-length {args.max_length}")
    return pairs


def main(args: Args) -> dict[str, float]:
    """Train; returns the metrics of the last step and of the last evaluation."""
    flags.check(args)
    if args.max_token_len_per_gpu < 2 * args.max_length:
        raise ValueError(
            f"--max-token-len-per-gpu {args.max_token_len_per_gpu} cannot hold one pair of 2 x --max-length = "
            f"{2 * args.max_length} tokens; raise it to at least that"
        )
    tokenizer = load_tokenizer(args.model)
    reward_model.check_reward_model(args.model, flag="--model", new_head=True)
    check_trainable(args.model, args.max_length, "--max-length")
    train = encode(tokenizer, read_preference_rows(args.train_files), args)
    val = encode(tokenizer, read_preference_rows(args.val_files), args) if args.val_files else []
    prompts_for_step(train, 0, args.train_batch_size, args.seed)  # refuses a batch larger than the data
    total_steps = args.total_training_steps or args.total_epochs * (len(train) // args.train_batch_size)

    run = Run(args, tokenizer, total_steps)
    ranks = run.ranks
    head = partial(reward_model.random_head, seed=args.seed)
    model = reward_model.load_trained(args, args.model, ranks, flag="--model", new_head=head)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, args.beta2), weight_decay=args.weight_decay, fused=True
    )
    run.resume({"reward_model": (model, optimizer)}, about=f"{args.train_batch_size} pairs a step of {len(train)}")
    # Both rows of a pair are in the same micro-batch.
    plan = partial(plan_updates, max_tokens=args.max_token_len_per_gpu, ranks=ranks, rows_per_unit=2)
    pad_id = tokenizer.pad_token_id or 0
    step_metrics, val_metrics = {}, {}

    for step in progress("reward", range(run.start, total_steps + 1)):  # the last round only evaluates
        clock = run.begin(step, state={})  # saves the `step` steps made so far, if that is due

        # 1. Evaluate: the same loss on held-out pairs, without gradients, and how often the preferred response wins.
        if val and run.evaluation_is_due(step):
            held_out = collate([side for pair in val for side in pair], pad_id=pad_id)  # (2 B, T)
            updates = plan(held_out.lengths.tolist(), mini_batch_size=2 * len(val))
            own_scores = reward_model.fixed_scores(
                model, held_out, updates, device=ranks.device
            )  # zero in others' rows
            chosen, rejected = ranks.all_reduce_sum(own_scores.to(ranks.device)).view(-1, 2).unbind(1)
            found = {
                "val/loss": losses.bradley_terry(chosen, rejected).mean().item(),
                "val/accuracy": (chosen > rejected).float().mean().item(),
                "val/margin": (chosen - rejected).mean().item(),
            }
            val_metrics = run.log_evaluation(step, found)
            clock("testing")
        if step == total_steps:
            break

        # 2. Batch: a pure function of (seed, step), planned into micro-batches that all ranks run in lockstep.
        pairs = prompts_for_step(train, step, args.train_batch_size, args.seed)  # B
        batch = collate([side for pair in pairs for side in pair], pad_id=pad_id)  # (2 B, T): chosen, rejected, ...
        [update] = plan(batch.lengths.tolist(), mini_batch_size=2 * len(pairs))
        clock("data")

        # 3. Update: the denominator is the whole batch's, so gradients of micro-batches and ranks add up.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, total_steps)
        optimizer.param_groups[0]["lr"] = lr
        means = metrics.Means(ranks)
        for micro_rows in update.micro_batches:
            run.leave_if_asked()
            scores = reward_model.sequence_scores(model, take_rows(batch, micro_rows, ranks.device))
            chosen, rejected = scores[: len(micro_rows)].view(-1, 2).unbind(1)  # (b,) each; a rank may be out of pairs
            loss = losses.bradley_terry(chosen, rejected).sum() / len(pairs)
            sharding.last_micro_batch(model, micro_rows is update.micro_batches[-1])  # the last syncs copies
            loss.backward()  # adds to the gradients, and sums them over ranks
            means.over_updates({"train/loss": loss})
            means.over_sequences({"train/accuracy": chosen > rejected})
            means.over_sequences({"train/score_chosen": chosen, "train/score_rejected": rejected})
        grad_norm = sharding.clip_grad_norm(model, args.grad_clip)
        if not math.isfinite(grad_norm):
            raise RuntimeError(
                f"step {step + 1}: gradient norm {grad_norm}; the checkpoints in {run.folder.root} are intact"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock("update")

        # 4. Report.
        total_tokens, found = batch.lengths.sum().item(), means.reduce()
        found["train/margin"] = found["train/score_chosen"] - found["train/score_rejected"]
        found |= {"train/grad_norm": grad_norm, "train/lr": lr, "train/global_tokens": float(total_tokens)}
        shown = step + 1 == total_steps or (args.log_freq > 0 and (step + 1) % args.log_freq == 0)
        step_metrics = run.log_step(step + 1, found, tokens=total_tokens, shown=shown)

    run.close()
    return step_metrics | val_metrics


if __name__ == "__main__":
    main(flags.parse(Args, __doc__))

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
import tyro

from rl import checkpoint, fsdp, losses, reward_model, schedule, stop, watchdog
from rl.batching import collate, plan_updates
from rl.data import encode_conversation, load_tokenizer, prompts_for_step, read_preference_rows
from rl.limits import check_limits
from rl.metrics import Sums, Timer
from rl.rollout import check_context
from rl.tracking import Backend, Tracker, evaluation_is_due, progress
from rl.types import Batch, Sample, select


@dataclass(frozen=True)
class Args:
    # --- model and data
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # Hugging Face id or folder: a causal LM, or a reward model to train on
    # parquet or jsonl with `prompt` (text or messages), `chosen` and `rejected` (text)
    train_files: tuple[str, ...] = ("data/preferences/train.parquet",)
    val_files: tuple[str, ...] = ()  # held-out files, same schema; they give val/accuracy and val/loss
    train_batch_size: int = 128  # pairs per optimizer step, over all ranks
    max_length: int = 2048  # tokens of prompt and response; a longer one is an error unless --filter-overlong
    filter_overlong: bool = False  # drop pairs with a side longer than --max-length, and say how many

    # --- optimizer
    lr: float = 1e-5  # AdamW's learning rate after warm-up
    beta2: float = 0.95  # AdamW's second-moment decay
    lr_warmup_steps: int = 0  # steps of linear warm-up
    lr_scheduler_type: Literal["constant", "cosine"] = "cosine"  # shape of the learning rate after warm-up
    weight_decay: float = 0.01  # AdamW's decoupled weight decay
    grad_clip: float = 1.0  # largest global gradient norm
    total_epochs: int = 1  # passes over the pairs; more than one or two overfit
    total_training_steps: int | None = None  # overrides --total-epochs

    # --- memory: never changes the numbers
    max_token_len_per_gpu: int = 16384  # tokens in one micro-batch, at least one pair; lower it on out-of-memory
    # what the backward pass recomputes: all of a layer, or all but matrix products and attention, or nothing
    activation_checkpointing: Literal["none", "selective", "full"] = "selective"
    fsdp_size: int | None = None  # ranks that share one copy of the model, e.g. the GPUs of a machine; default: all
    compile: bool = True  # torch.compile the layers and the head on a GPU: faster after a minute of warm-up

    # --- evaluation, checkpoints, logging
    test_freq: int = 100  # evaluate every this many steps and at the end, if there are --val-files; -1 never
    default_local_dir: str = "runs/{project_name}/{experiment_name}"  # checkpoints and metrics.jsonl go here
    save_freq: int = -1  # save every this many steps and at the end; -1 only at the end; 0 never
    max_ckpt_to_keep: int | None = None  # delete older checkpoints beyond this many
    resume_mode: str = "auto"  # auto: from the newest intact checkpoint, if any; disable; or a global_step_N folder
    force_resume: bool = False  # resume although settings or data that decide what is learned have changed
    max_hours: float | None = None  # save and leave after so many hours, as after SIGTERM or Ctrl-C
    stall_timeout: float = 3600.0  # seconds without the end of a phase after which the run ends, with all its stacks
    logger: tuple[Backend, ...] = ("console",)  # trackers besides metrics.jsonl, which is always written
    project_name: str = "glassrl"  # project in the trackers, and part of the folder
    experiment_name: str = "reward"  # run in the trackers, and part of the folder
    log_freq: int = 10  # print a line every this many steps; 0 only at the end
    seed: int = 0  # decides the order of the data, together with the step, and the weights of a new head


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
        print(f"dropped {len(rows) - len(pairs)} of {len(rows)} rows longer than --max-length {args.max_length}")
    return pairs


def collate_pairs(tokenizer, pairs: list[tuple[Sample, Sample]], planning: dict) -> tuple[Batch, list[list[int]]]:
    """Pairs -> batch of rows chosen 0, rejected 0, chosen 1, ..., and this rank's micro-batches of its rows, with both
    rows of a pair in the same one.
    """
    batch = collate([side for pair in pairs for side in pair], pad_id=tokenizer.pad_token_id or 0)  # (2 B, T)
    lengths = batch.lengths.view(-1, 2).sum(1).tolist()  # B
    [(_, micros)] = plan_updates(lengths, mini_batch_size=len(pairs), **planning)
    return batch, [[row for pair in micro for row in (2 * pair, 2 * pair + 1)] for micro in micros]


def main(args: Args) -> dict[str, float]:
    """Train; returns the metrics of the last step and of the last evaluation."""
    check_limits(args)
    if args.max_token_len_per_gpu < 2 * args.max_length:
        raise ValueError(
            f"--max-token-len-per-gpu {args.max_token_len_per_gpu} cannot hold one pair of 2 x --max-length = "
            f"{2 * args.max_length} tokens; raise it to at least that"
        )
    tokenizer = load_tokenizer(args.model)
    reward_model.check_reward_model(args.model, flag="--model", new_head=True)
    check_context(args.model, args.max_length, "--max-length")
    train = encode(tokenizer, read_preference_rows(args.train_files), args)
    val = encode(tokenizer, read_preference_rows(args.val_files), args) if args.val_files else []
    prompts_for_step(train, 0, args.train_batch_size, args.seed)  # refuses a batch larger than the data
    total_steps = args.total_training_steps or args.total_epochs * (len(train) // args.train_batch_size)

    d = fsdp.init_distributed(args.stall_timeout)
    fsdp.check_size(args.fsdp_size, d)
    watchdog.start(args.stall_timeout, d.rank)
    stop.start(args.max_hours)
    run = checkpoint.open_run(args, tokenizer, total_steps, d)
    run_dir, resume_from = run.root, run.resume_from

    head = partial(reward_model.random_head, seed=args.seed)
    model = reward_model.load_reward_model(args.model, d, flag="--model", new_head=head)
    model = fsdp.shard(
        model,
        d,
        activation_checkpointing=args.activation_checkpointing,
        compile=args.compile and d.device.type == "cuda",
        fsdp_size=args.fsdp_size,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, args.beta2), weight_decay=args.weight_decay, fused=True
    )
    trained = {"reward_model": (model, optimizer)}
    start = checkpoint.load(resume_from, trained) if resume_from else 0
    tracker = Tracker(run_dir, args, start, total_steps, enabled=d.is_main)
    tracker.print(
        f"{run_dir}: {f'resumed from {resume_from}' if resume_from else 'new run'}, steps {start + 1}-{total_steps}, "
        f"{args.train_batch_size} pairs a step of {len(train)}, {d.world_size} rank(s)"
    )
    planning = dict(rank=d.rank, world_size=d.world_size, max_tokens=args.max_token_len_per_gpu)
    metrics, val_metrics = {}, {}

    for step in progress("reward", range(start, total_steps + 1)):  # the last round only evaluates
        clock = Timer(d.device)
        # Asked to stop, the run leaves at the next `stop.check`, and calls these two.
        stop.arm(checkpoint.leaving(run, step, trained), partial(tracker.close, 5.0))
        stop.check(d)

        # 1. Evaluate: the same loss on held-out pairs, without gradients, and how often the preferred response wins.
        if val and evaluation_is_due(args.test_freq, step, total_steps):
            held_out, micros = collate_pairs(tokenizer, val, planning)
            own_scores = reward_model.fixed_scores(model, held_out, micros, device=d.device)  # zero in others' rows
            chosen, rejected = fsdp.all_reduce_sum(own_scores.to(d.device)).view(-1, 2).unbind(1)
            val_metrics = {
                "val/loss": losses.bradley_terry(chosen, rejected).mean().item(),
                "val/accuracy": (chosen > rejected).float().mean().item(),
                "val/margin": (chosen - rejected).mean().item(),
            }
            line = f"loss {val_metrics['val/loss']:.4f}, accuracy {val_metrics['val/accuracy']:.3f} on {len(val)} pairs"
            tracker.log(step, val_metrics, f"step {step} | held out: {line}")
            clock("testing")
        if step == total_steps:
            break

        # 2. Batch: a pure function of (seed, step), planned into micro-batches that all ranks run in lockstep.
        pairs = prompts_for_step(train, step, args.train_batch_size, args.seed)  # B
        batch, micros = collate_pairs(tokenizer, pairs, planning)  # (2 B, T)
        clock("data")

        # 3. Update: the denominator is the whole batch's, so gradients of micro-batches and ranks add up.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, total_steps)
        optimizer.param_groups[0]["lr"] = lr
        sums = Sums(d.device)
        for micro_rows in micros:
            stop.check(d)
            scores = reward_model.sequence_scores(model, select(batch, micro_rows, d.device))
            chosen, rejected = scores[: len(micro_rows)].view(-1, 2).unbind(1)  # (b,) each; a rank may be out of pairs
            loss = losses.bradley_terry(chosen, rejected).sum() / len(pairs)
            fsdp.last_micro_batch(model, micro_rows is micros[-1])  # when copies of the model add up
            loss.backward()  # adds to the gradients, and sums them over ranks
            sums.add(loss=loss, wins=(chosen > rejected).sum(), chosen=chosen.sum(), rejected=rejected.sum())
        grad_norm = fsdp.clip_grad_norm(model, args.grad_clip)
        if not math.isfinite(grad_norm):
            raise RuntimeError(f"step {step + 1}: gradient norm {grad_norm}; the checkpoints in {run_dir} are intact")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock("update")

        # 4. Report.
        s, times, total_tokens = sums.reduce(), clock.metrics(), batch.lengths.sum().item()
        metrics = {
            "train/loss": s["loss"],
            "train/accuracy": s["wins"] / len(pairs),
            "train/margin": (s["chosen"] - s["rejected"]) / len(pairs),
            "train/score_chosen": s["chosen"] / len(pairs),
            "train/score_rejected": s["rejected"] / len(pairs),
            "train/grad_norm": grad_norm,
            "train/lr": lr,
            "train/global_tokens": float(total_tokens),
            "perf/throughput": total_tokens / (times["timing_s/step"] * d.world_size),
            **times,
        }
        last = step + 1 == total_steps
        line = (
            f"step {step + 1}/{total_steps} | loss {metrics['train/loss']:.4f} | "
            f"accuracy {metrics['train/accuracy']:.3f} | |g| {grad_norm:.2f} | "
            f"{metrics['perf/throughput'] / 1000:.1f}k tok/s/GPU"
        )
        tracker.log(step + 1, metrics, line if last or (args.log_freq and (step + 1) % args.log_freq == 0) else "")

        # 5. Checkpoint: weights, optimizer and the step; the order of the data follows from the step.
        if args.save_freq != 0 and (last or (args.save_freq > 0 and (step + 1) % args.save_freq == 0)):
            checkpoint.save(run, step + 1, trained)  # written while training goes on
            if run.failures:  # of saves before this one
                tracker.log(step + 1, {"checkpoint/failed": float(run.failures)})

    checkpoint.close(run)  # waits for the last save
    stop.end()
    watchdog.stop()
    tracker.close()
    fsdp.shutdown_distributed()
    return metrics | val_metrics


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

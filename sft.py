"""SFT: next-token training on demonstrations, packed, with the loss on response or assistant tokens only.

    torchrun sft.py --model Qwen/Qwen2.5-1.5B --train-files my_demonstrations.parquet
    python sft.py --model data/arithmetic/model --train-files data/arithmetic/sft.parquet --max-length 128 --lr 4e-3

Rows have `prompt` and `response`, or `messages`. The loss is the mean negative log-likelihood over all response tokens
of the batch, on all ranks, so it depends neither on packing nor on the number of GPUs. Model code, packing and sharding
are those of train_grpo.py: an SFT step is a policy-gradient step on given samples whose advantages are all one.

Shapes: B sequences of a step, T tokens, (b, t) one micro-batch of them.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import tyro

from rl import checkpoint, fsdp, losses, schedule, stop, watchdog
from rl.batching import collate, plan_updates
from rl.data import encode_sft, load_tokenizer, prompts_for_step, read_sft_rows
from rl.limits import check_limits
from rl.logprobs import fixed_logprobs, token_logprobs
from rl.metrics import Sums, Timer
from rl.rollout import check_context
from rl.tracking import Backend, Tracker, evaluation_is_due, progress
from rl.types import Sample, select


@dataclass(frozen=True)
class Args:
    # --- model and data
    model: str = "Qwen/Qwen2.5-1.5B"  # Hugging Face id or folder of the model to train
    # parquet or jsonl with `prompt` (text or messages) and `response`, or with `messages`
    train_files: tuple[str, ...] = ("data/sft.parquet",)
    val_files: tuple[str, ...] = ()  # held-out files, same schema; their loss is val/loss
    train_batch_size: int = 128  # sequences per optimizer step, over all ranks
    max_length: int = 2048  # tokens; a longer row is an error unless --filter-overlong
    filter_overlong: bool = False  # drop rows longer than --max-length, and say how many

    # --- optimizer
    lr: float = 1e-5  # AdamW's learning rate after warm-up
    beta2: float = 0.95  # AdamW's second-moment decay
    lr_warmup_steps: int = 0  # steps of linear warm-up
    lr_scheduler_type: Literal["constant", "cosine"] = "cosine"  # shape of the learning rate after warm-up
    weight_decay: float = 0.01  # AdamW's decoupled weight decay
    grad_clip: float = 1.0  # largest global gradient norm
    total_epochs: int = 1  # passes over the rows
    total_training_steps: int | None = None  # overrides --total-epochs

    # --- memory: never changes the numbers
    max_token_len_per_gpu: int = 16384  # tokens in one micro-batch; lower it on out-of-memory
    # what the backward pass recomputes: all of a layer, or all but matrix products and attention, or nothing
    activation_checkpointing: Literal["none", "selective", "full"] = "selective"
    fsdp_size: int | None = None  # ranks that share one copy of the model, e.g. the GPUs of a machine; default: all
    compile: bool = True  # torch.compile the layers and the head on a GPU: faster after a minute of warm-up

    # --- evaluation, checkpoints, logging
    test_freq: int = 100  # compute val/loss every this many steps and at the end, if there are --val-files; -1 never
    default_local_dir: str = "runs/{project_name}/{experiment_name}"  # checkpoints and metrics.jsonl go here
    save_freq: int = -1  # save every this many steps and at the end; -1 only at the end; 0 never
    max_ckpt_to_keep: int | None = None  # delete older checkpoints beyond this many
    resume_mode: str = "auto"  # auto: from the newest intact checkpoint, if any; disable; or a global_step_N folder
    force_resume: bool = False  # resume although settings or data that decide what is learned have changed
    max_hours: float | None = None  # save and leave after so many hours, as after SIGTERM or Ctrl-C
    stall_timeout: float = 3600.0  # seconds without the end of a phase after which the run ends, with all its stacks
    logger: tuple[Backend, ...] = ("console",)  # trackers besides metrics.jsonl, which is always written
    project_name: str = "glassrl"  # project in the trackers, and part of the folder
    experiment_name: str = "sft"  # run in the trackers, and part of the folder
    log_freq: int = 10  # print a line every this many steps; 0 only at the end
    seed: int = 0  # decides the order of the data, together with the step


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
        print(f"dropped {len(samples) - len(kept)} of {len(rows)} rows longer than --max-length {args.max_length}")
    return kept


def main(args: Args) -> dict[str, float]:
    """Train; returns the metrics of the last step and the last held-out loss."""
    check_limits(args)
    if args.max_token_len_per_gpu < args.max_length:
        raise ValueError(
            f"--max-token-len-per-gpu {args.max_token_len_per_gpu} cannot hold one row of "
            f"--max-length {args.max_length} tokens; raise it to at least that"
        )
    tokenizer = load_tokenizer(args.model)
    check_context(args.model, args.max_length, "--max-length")
    train = encode(tokenizer, read_sft_rows(args.train_files), args)
    val = encode(tokenizer, read_sft_rows(args.val_files), args) if args.val_files else []
    prompts_for_step(train, 0, args.train_batch_size, args.seed)  # refuses a batch larger than the data
    total_steps = args.total_training_steps or args.total_epochs * (len(train) // args.train_batch_size)

    d = fsdp.init_distributed(args.stall_timeout)
    fsdp.check_size(args.fsdp_size, d)
    watchdog.start(args.stall_timeout, d.rank)
    stop.start(args.max_hours)
    run = checkpoint.open_run(args, tokenizer, total_steps, d)
    run_dir, resume_from = run.root, run.resume_from

    policy = fsdp.shard(
        fsdp.load_policy(args.model, d),
        d,
        activation_checkpointing=args.activation_checkpointing,
        compile=args.compile and d.device.type == "cuda",
        fsdp_size=args.fsdp_size,
    )
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.lr, betas=(0.9, args.beta2), weight_decay=args.weight_decay, fused=True
    )
    trained = {"actor": (policy, optimizer)}
    start = checkpoint.load(resume_from, trained) if resume_from else 0
    tracker = Tracker(run_dir, args, start, total_steps, enabled=d.is_main)
    tracker.print(
        f"{run_dir}: {f'resumed from {resume_from}' if resume_from else 'new run'}, steps {start + 1}-{total_steps}, "
        f"{args.train_batch_size} rows a step of {len(train)}, {d.world_size} rank(s)"
    )
    planning = dict(rank=d.rank, world_size=d.world_size, max_tokens=args.max_token_len_per_gpu)
    metrics, val_metrics = {}, {}

    for step in progress("sft", range(start, total_steps + 1)):  # the last round only evaluates
        clock = Timer(d.device)
        # Asked to stop, the run leaves at the next `stop.check`, and calls these two.
        stop.arm(checkpoint.leaving(run, step, trained), partial(tracker.close, 5.0))
        stop.check(d)

        # 1. Evaluate: the same loss on held-out rows, without gradients.
        if val and evaluation_is_due(args.test_freq, step, total_steps):
            held_out = collate(val, pad_id=tokenizer.pad_token_id or 0)
            [(_, micros)] = plan_updates(held_out.lengths.tolist(), mini_batch_size=len(val), **planning)
            logp = fixed_logprobs(policy, held_out, micros, temperature=1.0, device=d.device)
            total = fsdp.all_reduce_sum(logp.sum().to(d.device)).item()
            val_metrics = {"val/loss": -total / held_out.response_mask[:, 1:].sum().item()}
            tracker.log(step, val_metrics, f"step {step} | held out: loss {val_metrics['val/loss']:.4f}")
            clock("testing")
        if step == total_steps:
            break

        # 2. Batch: a pure function of (seed, step), planned into micro-batches that all ranks run in lockstep.
        samples = prompts_for_step(train, step, args.train_batch_size, args.seed)  # B
        batch = collate(samples, pad_id=tokenizer.pad_token_id or 0)  # (B, T)
        [(_, micros)] = plan_updates(batch.lengths.tolist(), mini_batch_size=len(samples), **planning)
        clock("data")

        # 3. Update: the denominator is the whole batch's, so gradients of micro-batches and ranks add up.
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, total_steps)
        optimizer.param_groups[0]["lr"] = lr
        num_tokens, sums = batch.response_mask[:, 1:].sum().item(), Sums(d.device)
        for micro_rows in micros:
            stop.check(d)
            micro = select(batch, micro_rows, d.device)  # (b, t)
            logp, _ = token_logprobs(policy, micro)
            loss = losses.masked_sum(-logp, micro.response_mask) / num_tokens
            fsdp.last_micro_batch(policy, micro_rows is micros[-1])  # when copies of the model add up
            loss.backward()  # adds to the gradients, and sums them over ranks
            sums.add(loss=loss)
        grad_norm = fsdp.clip_grad_norm(policy, args.grad_clip)
        if not math.isfinite(grad_norm):
            raise RuntimeError(f"step {step + 1}: gradient norm {grad_norm}; the checkpoints in {run_dir} are intact")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock("update")

        # 4. Report.
        times, total_tokens = clock.metrics(), batch.lengths.sum().item()
        metrics = {
            "train/loss": sums.reduce()["loss"],
            "train/grad_norm": grad_norm,
            "train/lr": lr,
            "train/global_tokens": float(total_tokens),
            "perf/throughput": total_tokens / (times["timing_s/step"] * d.world_size),
            **times,
        }
        last = step + 1 == total_steps
        line = (
            f"step {step + 1}/{total_steps} | loss {metrics['train/loss']:.4f} | |g| {grad_norm:.2f} | "
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

"""SFT: next-token training on demonstrations, packed, with the loss on response or assistant tokens only.

    torchrun sft.py --model Qwen/Qwen2.5-1.5B --train-files data/my_demos.parquet
    python sft.py --model data/arithmetic/model --train-files data/arithmetic/sft.parquet --lr 4e-3

Rows have `prompt` and `response`, or `messages`. The loss is the mean negative log-likelihood over all response tokens of the
batch, on all ranks: it depends neither on packing nor on the number of GPUs. The same model code, packing and FSDP units as
train_grpo.py: an SFT step is a policy-gradient step whose advantages are all one and whose samples are given.

Shapes: B sequences of a step, T tokens, (b, t) one micro-batch of them.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from tqdm import tqdm
from transformers import AutoTokenizer

from rl import checkpoint, losses, schedule
from rl.batching import collate, plan_micro_batches
from rl.data import encode_sft, prompts_for_step, read_sft_rows
from rl.fsdp import clip_grad_norm, init_distributed, load_policy, shard, shutdown_distributed
from rl.logprobs import fixed_logprobs, token_logprobs
from rl.metrics import Sums, Timer
from rl.tracking import Backend, Tracker
from rl.types import Sample, select


@dataclass(frozen=True)
class Args:
    # --- model
    model: str = "Qwen/Qwen2.5-1.5B"
    """Hugging Face id or folder of the model to train."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you have read it."""

    # --- data
    train_files: tuple[str, ...] = ("data/sft.parquet",)
    """Parquet or jsonl files with `prompt` (text or messages) and `response`, or with `messages`."""
    val_files: tuple[str, ...] = ()
    """Held-out files, same schema; their loss is val/loss."""
    train_batch_size: int = 128
    """Sequences per optimizer step, over all ranks."""
    max_length: int = 2048
    """Tokens. A longer row is an error unless --filter-overlong."""
    filter_overlong: bool = False
    """Drop rows longer than --max-length, and say how many."""

    # --- optimizer
    lr: float = 1e-5
    """AdamW's learning rate after warm-up."""
    beta2: float = 0.95
    """AdamW's second-moment decay."""
    lr_warmup_steps: int = 0
    """Steps of linear warm-up."""
    lr_scheduler_type: Literal["constant", "cosine"] = "cosine"
    """Shape of the learning rate after warm-up."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    total_epochs: int = 1
    """Passes over the rows; --total-training-steps overrides it."""
    total_training_steps: int | None = None
    """Steps to train; default from --total-epochs."""

    # --- memory (never changes the numbers)
    max_token_len_per_gpu: int = 16384
    """Tokens in one micro-batch. Lower it if the update runs out of memory."""
    activation_checkpointing: Literal["none", "full"] = "full"
    """Recompute activations in the backward pass: about a quarter slower, several times less memory."""

    # --- evaluation
    test_freq: int = 100
    """Compute val/loss every this many steps and at the end, if there are --val-files; -1 never."""

    # --- checkpoint
    default_local_dir: str = "runs/{project_name}/{experiment_name}"
    """Folder of checkpoints and metrics.jsonl."""
    save_freq: int = -1
    """Save every this many steps and at the end; -1 only at the end; 0 never."""
    max_ckpt_to_keep: int | None = None
    """Delete older checkpoints beyond this many."""
    resume_mode: str = "auto"
    """auto continues from the newest checkpoint in the folder; disable starts over; or a global_step_N folder."""

    # --- logging
    logger: tuple[Backend, ...] = ("console",)
    """Any of console, wandb, swanlab, tensorboard. metrics.jsonl is always written."""
    log_freq: int = 10
    """Print a line every this many steps."""
    project_name: str = "glassrl"
    """Project in the trackers, and part of the folder."""
    experiment_name: str = "sft"
    """Run in the trackers, and part of the folder."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to train; auto takes CUDA if there is any."""
    seed: int = 0
    """Decides the order of the data, together with the step."""


def encode(tokenizer, rows: list[dict], args: Args) -> list[Sample]:
    """Rows -> samples whose response mask is the loss mask. Raises ValueError naming a row that is too long or teaches nothing."""
    samples, dropped = [], 0
    for row in rows:
        ids, mask = encode_sft(tokenizer, row, max_length=None if args.filter_overlong else args.max_length)
        if len(ids) > args.max_length:
            dropped += 1
        else:
            samples.append(Sample([], ids, mask, [0.0] * len(ids), "stop", row["row_index"]))
    if not samples:
        raise ValueError(f"no row is left: all {dropped} are longer than --max-length {args.max_length}")
    if dropped:
        print(f"dropped {dropped} of {len(rows)} rows longer than --max-length {args.max_length}")
    return samples


def main(args: Args) -> dict[str, float]:
    """Train; returns the metrics of the last step and the last held-out loss."""
    if args.max_token_len_per_gpu < args.max_length:
        raise ValueError(f"--max-token-len-per-gpu {args.max_token_len_per_gpu} cannot hold one row of --max-length {args.max_length} tokens")
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    train = encode(tokenizer, read_sft_rows(args.train_files), args)
    val = encode(tokenizer, read_sft_rows(args.val_files), args) if args.val_files else []
    prompts_for_step(train, 0, args.train_batch_size, args.seed)  # refuses a batch larger than the data
    total_steps = args.total_training_steps or args.total_epochs * (len(train) // args.train_batch_size)

    d = init_distributed(args.device)
    run_dir = args.default_local_dir.format(project_name=args.project_name, experiment_name=args.experiment_name)
    policy = load_policy(args.model, d, trust_remote_code=args.trust_remote_code)
    policy = shard(policy, d, gradient_checkpointing=args.activation_checkpointing == "full")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, betas=(0.9, args.beta2), weight_decay=args.weight_decay, fused=True)
    resume_from = checkpoint.find(args.resume_mode, run_dir)
    start = checkpoint.load(resume_from, policy, optimizer) if resume_from else 0
    tracker = Tracker(run_dir, args, start, args.logger, args.project_name, args.experiment_name, enabled=d.is_main)
    tracker.print(f"{len(train)} rows, {args.train_batch_size} a step, {d.world_size} rank(s), steps {start + 1}..{total_steps}, {run_dir}")
    metrics, val_metrics = {}, {}

    for step in tqdm(range(start, total_steps), initial=start, total=total_steps, desc="sft", disable=None if d.is_main else True, leave=False):
        clock = Timer(d.device)

        # 1. Batch: a pure function of (seed, step), planned into micro-batches that every rank runs in lockstep.
        batch = collate(prompts_for_step(train, step, args.train_batch_size, args.seed), pad_id=tokenizer.pad_token_id or 0)  # (B, T)
        plan = plan_micro_batches(
            batch.lengths.tolist(), range(len(batch.lengths)), world_size=d.world_size, max_tokens=args.max_token_len_per_gpu
        )[d.rank]
        clock("data")

        # 2. Update: the denominator is the whole batch's number of response tokens, so gradients of micro-batches and ranks add up.
        factor = schedule.constant_with_warmup(step, warmup_steps=args.lr_warmup_steps)
        if args.lr_scheduler_type == "cosine":
            factor = schedule.cosine_with_warmup(step, warmup_steps=args.lr_warmup_steps, total_steps=total_steps)
        optimizer.param_groups[0]["lr"] = args.lr * factor
        num_tokens, sums = batch.response_mask[:, 1:].sum().item(), Sums(d.device)
        for rows in plan:
            micro = select(batch, rows, d.device)  # (b, t)
            logp, _ = token_logprobs(policy, micro)
            loss = losses.masked_sum(-logp, micro.response_mask) / num_tokens
            loss.backward()
            sums.add(loss=loss)
        grad_norm = clip_grad_norm(policy, args.grad_clip)
        if not torch.tensor(grad_norm).isfinite():
            raise RuntimeError(f"step {step + 1}: gradient norm {grad_norm}; the last checkpoint in {run_dir} is intact, lower --lr")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock("update")

        # 3. Report.
        times = clock.metrics()
        total_tokens = batch.lengths.sum().item()
        metrics = {
            "train/loss": sums.reduce()["loss"],
            "train/grad_norm": grad_norm,
            "train/lr": args.lr * factor,
            "train/global_tokens": float(total_tokens),
            "perf/throughput": total_tokens / (times["timing_s/step"] * d.world_size),
            **times,
        }
        last = step + 1 == total_steps
        line = f"step {step + 1}/{total_steps} | loss {metrics['train/loss']:.4f} | |g| {grad_norm:.2f} | {metrics['perf/throughput'] / 1000:.1f}k tok/s/GPU"
        tracker.log(step + 1, metrics, line if (step + 1) % args.log_freq == 0 or last else "")

        # 4. Evaluate: the same loss on held-out rows, without gradients.
        if val and args.test_freq > 0 and ((step + 1) % args.test_freq == 0 or last):
            held_out = collate(val, pad_id=tokenizer.pad_token_id or 0)
            plan = plan_micro_batches(
                held_out.lengths.tolist(), range(len(val)), world_size=d.world_size, max_tokens=args.max_token_len_per_gpu
            )[d.rank]
            total = fixed_logprobs(policy, held_out, plan, temperature=1.0, device=d.device).sum()
            sums = Sums(d.device)
            sums.add(loss=-total / held_out.response_mask[:, 1:].sum())
            val_metrics = {"val/loss": sums.reduce()["loss"]}
            tracker.log(step + 1, val_metrics, f"step {step + 1} | held out: loss {val_metrics['val/loss']:.4f} on {len(val)} rows")

        # 5. Checkpoint: weights, optimizer and the step; the order of the data follows from the step.
        if args.save_freq and ((args.save_freq > 0 and (step + 1) % args.save_freq == 0) or last):
            checkpoint.save(run_dir, step + 1, policy, optimizer, tokenizer, d, config=vars(args), max_to_keep=args.max_ckpt_to_keep)

    tracker.close()
    shutdown_distributed()
    return metrics | val_metrics


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

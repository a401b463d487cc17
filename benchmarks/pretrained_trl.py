"""TRL's GRPOTrainer with the settings and flags of train_grpo.py in benchmarks/pretrained.py, which starts this.

    pip install trl==1.16.0 datasets liger-kernel
    python benchmarks/pretrained_trl.py --model CHECKPOINT --train-files train.parquet --val-files test.parquet

Equal to train_grpo.py: checkpoint, prompts and their order, responses per prompt, lengths, temperature 1, updates per
step, token-mean loss (TRL's "dapo"), no KL term, AdamW, float32 weights with products in bfloat16, vLLM in-process.
TRL has its fastest settings from benchmarks/compare_trl.py: no activation checkpointing, Liger's kernels, no
detokenizer in vLLM, no correction for the sampler. Not equal: TRL adds 1e-4 to a group's standard deviation,
train_grpo.py 1e-6.

Without a GPU, TRL computes in float32 and samples with transformers, which is what it has for a CPU.

Writes config.json and metrics.jsonl with the names of train_grpo.py. timing_s/step is the time from the begin of a step
to its end, without evaluations. Flags of train_grpo.py that are not listed are ignored.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import for_trl, step_time  # noqa: E402
from rl.data.rows import read_rows


@dataclass(frozen=True)
class Args:
    """Flags of train_grpo.py."""

    model: str
    train_files: tuple[str, ...]
    val_files: tuple[str, ...]
    default_local_dir: Path
    train_batch_size: int = 64
    rollout_n: int = 8
    ppo_mini_batch_size: int | None = None
    max_prompt_length: int = 512
    max_response_length: int = 256
    lr: float = 1e-6
    weight_decay: float = 0.01
    seed: int = 0
    test_freq: int = 10
    total_training_steps: int = 200
    gpu_memory_utilization: float = 0.3
    per_device_train_batch_size: int = 64
    """TRL's micro-batches have this many responses."""


def updates(args: Args) -> int:
    """Updates a step of train_grpo.py."""
    return args.train_batch_size // (args.ppo_mini_batch_size or args.train_batch_size)


def settings(args: Args) -> dict[str, Any]:
    """Arguments of TRL's GRPOConfig, whose step is one update."""
    responses = args.train_batch_size * args.rollout_n
    on_gpu: dict[str, Any] = dict(
        bf16=True,
        use_liger_kernel=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=args.gpu_memory_utilization,
        vllm_max_model_length=args.max_prompt_length + args.max_response_length,
        vllm_importance_sampling_correction=False,
        generation_kwargs=dict(detokenize=False),
    )
    on_cpu: dict[str, Any] = dict(bf16=False, use_vllm=False, use_cpu=True, top_k=0)
    return (
        for_trl.SETTINGS
        | (on_gpu if torch.cuda.is_available() else on_cpu)
        | dict(
            output_dir=str(args.default_local_dir),
            max_steps=args.total_training_steps * updates(args),
            per_device_train_batch_size=args.per_device_train_batch_size,
            gradient_accumulation_steps=responses // updates(args) // args.per_device_train_batch_size,
            steps_per_generation=responses // args.per_device_train_batch_size,
            num_generations=args.rollout_n,
            max_completion_length=args.max_response_length,
            learning_rate=args.lr,
            weight_decay=args.weight_decay,
            seed=args.seed,
            logging_steps=updates(args),
            model_init_kwargs=dict(dtype="float32", attn_implementation="sdpa"),
        )
    )


def main(args: Args) -> None:
    """Train with TRL in this process."""
    os.environ["MASTER_PORT"] = str(step_time.free_port())  # TRL's is always the same: one run a machine
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    args.default_local_dir.mkdir(parents=True, exist_ok=True)
    shown = {"train_batch_size": args.train_batch_size, "rollout_n": args.rollout_n}
    (args.default_local_dir / "config.json").write_text(json.dumps(shown | settings(args), indent=2) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    train_rows, val_rows = read_rows(args.train_files[0]), read_rows(args.val_files[0])
    dataset = for_trl.prompts_in_order(train_rows, args.total_training_steps, args.train_batch_size, args.seed)

    def write(**line: Any) -> None:
        with open(args.default_local_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line | {"time": time.time()}) + "\n")

    class Report(TrainerCallback):
        """Times of steps, TRL's metrics under our names, and greedy held-out accuracy by TRL's own engine."""

        def on_train_begin(self, config, state, control, **others):
            self.evaluate(0)

        def on_step_begin(self, config, state, control, **others):
            if state.global_step % updates(args) == 0:
                self.began = time.perf_counter()

        def on_step_end(self, config, state, control, **others):
            self.seconds = time.perf_counter() - self.began

        def on_log(self, config, state, control, logs, **others):
            step, rest = divmod(state.global_step, updates(args))
            if "reward" not in logs or rest:
                return
            names = {
                "critic/score/mean": "reward",
                "response_length/mean": "completions/mean_length",
                "response_length/clip_ratio": "completions/clipped_ratio",
                "actor/entropy": "entropy",
                "actor/grad_norm": "grad_norm",
            }
            found = {ours: logs[theirs] for ours, theirs in names.items() if theirs in logs}
            write(step=step, **found, **{"timing_s/step": self.seconds})
            print(f"step {step} {found} {self.seconds:.2f} s", flush=True)
            if step % args.test_freq == 0 or step == args.total_training_steps:
                self.evaluate(step)

        def evaluate(self, step):
            texts = [
                tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
                for row in val_rows
            ]
            responses = (by_vllm if torch.cuda.is_available() else by_transformers)(texts)
            accuracy = for_trl.accuracy(val_rows, responses)
            write(step=step, **{"val/accuracy": accuracy})
            print(f"step {step} accuracy {accuracy:.4f}", flush=True)

    def by_vllm(texts: list[str]) -> list[str]:
        from vllm import SamplingParams

        engine = trainer.vllm_generation
        engine.sync_weights()
        prompts = [{"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in texts]
        greedy = SamplingParams(temperature=0, max_tokens=args.max_response_length)
        return [x.outputs[0].text for x in engine.llm.generate(prompts, greedy, use_tqdm=False)]

    def by_transformers(texts: list[str]) -> list[str]:
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        trainer.model.eval()
        output = trainer.model.generate(**inputs, do_sample=False, max_new_tokens=args.max_response_length)
        trainer.model.train()
        return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=for_trl.score,
        args=GRPOConfig(**settings(args)),
        train_dataset=Dataset.from_list(dataset),
        processing_class=tokenizer,
        callbacks=[Report()],
    )
    trainer.train()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, return_unknown_args=True)[0])

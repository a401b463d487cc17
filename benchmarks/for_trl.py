"""What TRL's GRPOTrainer is given to do the same as train_grpo.py: settings, prompts in the same order, the reward.

learning_trl.py and pretrained_trl.py use it.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rewards.by_data_source import compute_score  # noqa: E402
from rl.data.order import prompts_for_step

# Arguments of TRL's GRPOConfig. Two things cannot be set alike: TRL adds 1e-4 to a group's standard deviation,
# train_grpo.py 1e-6. TRL's weight decay spares biases and norms.
SETTINGS = dict(
    num_iterations=1,
    temperature=1.0,
    top_p=1.0,
    shuffle_dataset=False,  # the rows come in the order of train_grpo.py
    lr_scheduler_type="constant",
    warmup_steps=0,
    weight_decay=0.01,
    max_grad_norm=1.0,
    loss_type="dapo",  # TRL's name of token-mean
    scale_rewards="group",
    epsilon=0.2,
    beta=0.0,
    mask_truncated_completions=False,
    gradient_checkpointing=False,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
)


def prompts_in_order(rows: list[dict], steps: int, prompts: int, seed: int) -> list[dict[str, Any]]:
    """The prompts of this many steps of train_grpo.py, each of `prompts` rows. The columns are what `score` gets."""
    in_order = [row for step in range(steps) for row in prompts_for_step(rows, step, prompts, seed)]
    columns = ("prompt", "data_source")
    return [{k: row[k] for k in columns} | {"truth": row["reward_model"]["ground_truth"]} for row in in_order]


def score(completions: list, data_source: list[str], truth: list[str], **others: Any) -> list[float]:
    """The default reward with TRL's signature: each completion is a conversation of one message."""
    return [
        compute_score(source, completion[0]["content"], answer)
        for completion, source, answer in zip(completions, data_source, truth, strict=True)
    ]


def accuracy(rows: list[dict], responses: list[str]) -> float:
    """Mean of the default reward over rows and a response to each."""
    scores = [
        compute_score(row["data_source"], response, row["reward_model"]["ground_truth"])
        for row, response in zip(rows, responses, strict=True)
    ]
    return sum(scores) / len(scores)

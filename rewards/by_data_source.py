"""The default reward: grade every row by the function of its `data_source`, as verl does.

A file is imported when the first row needs it, so a GSM8K run never imports sympy.
"""

import importlib
from typing import Any

# data_source -> file in rewards/ with compute_score
REWARDS = {
    "openai/gsm8k": "gsm8k",
    "arithmetic": "gsm8k",
    "word_problems": "gsm8k",
    "dots": "gsm8k",
    "hiyouga/geometry3k": "geometry3k",
    "DigitalLearningGmbH/MATH-lighteval": "math_reward",
    "lighteval/MATH": "math_reward",
    "EleutherAI/hendrycks_math": "math_reward",
    "HuggingFaceH4/MATH-500": "math_reward",
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "math": "math_dapo",
    "google-research-datasets/mbpp": "mbpp",
    "openai/openai_humaneval": "human_eval",
    "apps": "programs",
    "codecontests": "programs",
    "codeforces": "programs",
    "taco": "programs",
    "grail_gsm8k": "grail",
    "grail_math": "grail",
    "grail_mbpp": "grail",
}
# The same for all names that begin so: aime_2024, numina_cn_k12, searchR1_nq, ...
PREFIXES = {"aime": "math_dapo", "numina_": "math_reward", "searchR1_": "search_qa"}


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float | dict[str, float] | None:
    """The score by the reward of this data_source. Arguments and result are that function's.

    Raises:
        ValueError: no reward is known for the data_source.
    """
    reward = importlib.import_module(f"rewards.{reward_name(data_source)}")
    return reward.compute_score(data_source, solution_str, ground_truth, extra_info)


def reward_name(data_source: str) -> str:
    """`openai/gsm8k` -> `gsm8k`: the file in rewards/ that grades these rows.

    Raises:
        ValueError: no reward is known for the data_source.
    """
    names = [name for prefix, name in PREFIXES.items() if data_source.startswith(prefix)]
    name = REWARDS.get(data_source, names[0] if names else None)
    if name is None:
        known = ", ".join([*REWARDS, *(f"{prefix}*" for prefix in PREFIXES)])
        raise ValueError(
            f"data_source {data_source!r} has no reward; known are {known}. "
            "Give your own with --custom-reward-function path/to/file.py:compute_score"
        )
    return name

"""Prints, as JSON, what the program says about things that need Linux or vLLM. Argument: a folder of the demo."""

import json
import sys

import train_async
import train_grpo
from extras.systems import LOOPBACK
from rewards.sandbox import SandboxUnavailable, run_tests, self_test
from rl.flags import build
from rl.sampling.engines.flags import EngineFlags


def said(call, *arguments) -> str:
    try:
        call(*arguments)
    except (ValueError, SandboxUnavailable) as error:
        return str(error)
    return ""


folder = sys.argv[1]
task = {
    "model": f"{folder}/data/model",
    "train_files": (f"{folder}/data/train.parquet",),
    "val_files": (f"{folder}/data/test.parquet",),
    "max_prompt_length": 32,
    "max_response_length": 40,
    "default_local_dir": f"{folder}/refused",
}


def train(script, **flags) -> None:
    script.main(build(script.Args, **task, **flags))


print(
    json.dumps(
        {
            "engine": EngineFlags().engine,
            "loopback": LOOPBACK,
            "vllm": said(lambda: train(train_grpo, engine="vllm")),
            "tools": said(lambda: train(train_grpo, tools=("environments/calculator.py",))),
            "async": said(lambda: train(train_async)),
            "sandbox": said(self_test),
            "tests": said(run_tests, "x = 1", ("assert x == 1",)),
            "programs": said(lambda: train(train_grpo, custom_reward_function=("rewards/mbpp.py",))),
        }
    )
)

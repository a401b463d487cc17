"""Take a step of the published commands of docs/recipes.md with random weights: do they run here, and do they fit?

    python benchmarks/recipes.py ppo_0.5b grpo_lora_1.5b --tokenizer Qwen/Qwen2.5-0.5B-Instruct --out runs/recipes
    python benchmarks/recipes.py grpo_7b --prompts 64 --tokenizer Qwen/Qwen2.5-0.5B-Instruct --out runs/recipes

A command is named by its --experiment-name. Its flags are those of the page, except that it takes one step on questions
of GSM8K, with rewards of noise, and neither evaluates nor saves. The models have the configs in tests/recipes/ and new
weights, so that most responses run to the limit. grpo_vl_7b is left out, since it needs images. Each command, its
output and its metrics.jsonl go to --out.
"""

import math
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from transformers import AutoConfig, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.make_model import save  # noqa: E402


@dataclass(frozen=True)
class Args:
    names: Annotated[tuple[str, ...], tyro.conf.Positional]
    """These are names of commands, such as ppo_0.5b."""
    tokenizer: str
    """All models have the Qwen2 tokenizer in this folder or with this Hugging Face id."""
    out: Path
    """Logs and metrics are written to this folder."""
    models: Path = Path("runs/recipe_models")
    """The models are in this folder, and are made if they are not there."""
    data: Path = Path("data/gsm8k")
    """This folder has train.parquet and test.parquet."""
    prompts: int | None = None
    """The step takes this many prompts instead of those of the command. Its number of updates stays."""
    limit: float = 600.0
    """A command is interrupted after this many seconds."""
    more: str = ""
    """The commands get these further flags, which are given as one word."""


def published(name: str, page: str) -> list[str]:
    """The words of the page's command with this --experiment-name. Raises ValueError if it cannot be run here."""
    commands = re.findall(r"^torchrun .*$", re.sub(r"\\\n\s*", "", page), re.MULTILINE)
    words = {
        line[line.index("--experiment-name") + 1]: line for line in map(shlex.split, commands) if "--model" in line
    }
    if name not in words:
        raise ValueError(f"{name}: docs/recipes.md has no such command; it has {', '.join(words)}")
    if "--no-freeze-vision-tower" in words[name]:
        raise ValueError(f"{name} needs images and a model that sees, which this benchmark does not make")
    return words[name]


def without(words: list[str], flag: str) -> tuple[list[str], list[str]]:
    """The words without a flag and its values, and these values."""
    if flag not in words:
        return words, []
    at = words.index(flag)
    end = next((i for i in range(at + 1, len(words)) if words[i].startswith("--")), len(words))
    return words[:at] + words[end:], words[at + 1 : end]


def one_step(words: list[str], args: Args) -> list[str]:
    """The command for one step with a model in --models and the questions in --data."""
    words, [model] = without(words, "--model")
    for flag in ("--train-files", "--val-files"):
        words, _ = without(words, flag)
    if args.prompts is not None:
        words, [prompts] = without(words, "--train-batch-size")
        words, mini_batch = without(words, "--ppo-mini-batch-size")
        words += ["--train-batch-size", str(args.prompts)]
        if mini_batch:
            updates = math.ceil(int(prompts) / int(mini_batch[0]))
            words += ["--ppo-mini-batch-size", str(math.ceil(args.prompts / updates))]
    words += ["--model", str(args.models / Path(model).name)]
    words += ["--train-files", str(args.data / "train.parquet"), "--val-files", str(args.data / "test.parquet")]
    words += ["--custom-reward-function", "benchmarks/noise_reward.py", "--total-training-steps", "1"]
    words += ["--test-freq", "-1", "--no-val-before-train", "--save-freq", "0", "--resume-mode", "disable"]
    return words + shlex.split(args.more)


def main(args: Args) -> int:
    """Run the commands one after the other. Returns how many did not end with 0."""
    page, failed = (ROOT / "docs" / "recipes.md").read_text(), 0
    commands = {name: one_step(published(name, page), args) for name in args.names}
    args.out.mkdir(parents=True, exist_ok=True)
    for name, words in commands.items():
        folder, run = Path(words[words.index("--model") + 1]), (args.out / name).resolve()
        if not (folder / "config.json").exists():
            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
            of_model = ROOT / "tests" / "recipes" / folder.name
            config = AutoConfig.from_pretrained(of_model, eos_token_id=tokenizer.eos_token_id)
            print(f"{folder}: {save(config, tokenizer, folder) / 1e9:.2f}B parameters, random", flush=True)
        words = [*words, "--default-local-dir", str(run)]
        (args.out / f"{name}.command").write_text(shlex.join(words) + "\n")
        start = time.monotonic()
        with (args.out / f"{name}.log").open("w") as log:
            program = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
            process = subprocess.Popen(program, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            try:
                code: int | str = process.wait(args.limit)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # torchrun ends its processes
                process.wait(60)
                code = f"interrupted after {args.limit:g} s"
        lines = (args.out / f"{name}.log").read_text().splitlines()
        said = [line for line in lines if line.startswith(("step ", "memory"))] or lines[-5:]
        print(f"{name}: exit {code} after {time.monotonic() - start:.0f} s", *said, sep="\n  ", flush=True)
        failed += code != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))

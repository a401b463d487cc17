"""What the tests of the scripts share: a small task, the scripts run for real, and readers of what they leave behind.

Run by torchrun it is a worker: `helpers_scripts.py RUNS.json` is `run_entries`.
"""

import importlib
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import launch
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from data import arithmetic
from extras.engines import hf
from extras.families.ways import use_way
from extras.lora import adapters as lora
from rl.data.order import derive_seed
from rl.flags import build
from rl.model import load as models
from rl.sampling.groups import seeded
from rl.scoring.pool import Scorer

CLOCKS = (  # differ from run to run
    "timing_s/",
    "perf/time_per_step",
    "perf/throughput",
    "perf/gen_tokens_per_s",
    "reward/seconds_",
)

# Right or wrong by parity, so that an untrained model earns both.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float((sum(map(ord, solution_str)) + int(ground_truth)) % 2)
"""

# The same, and no score where the characters add up to a multiple of three.
SOMETIMES = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    total = sum(map(ord, solution_str))
    return None if total % 3 == 0 else float((total + int(ground_truth)) % 2)
"""


def parity(response: str, ground_truth: str) -> float:
    """The score that REWARD gives."""
    return float((sum(map(ord, response)) + int(ground_truth)) % 2)


def parity_sometimes(response: str, ground_truth: str) -> float | None:
    """The score that SOMETIMES gives."""
    return None if sum(map(ord, response)) % 3 == 0 else parity(response, ground_truth)


class Task(NamedTuple):
    """Files of the arithmetic task, small: 256 demonstrations, 64 prompts, 16 held-out prompts of 30 tokens each."""

    model: str
    sft: str
    train: str
    test: str
    reward: str


def some(cases: Iterable, *kept: object) -> list:
    """Values of one parameter of a test: `make test` runs those that are `kept`, and `make thorough` all."""
    return some_rows([(case,) for case in cases], *((case,) for case in kept))


def some_rows(rows: Iterable[tuple], *kept: tuple) -> list:
    """What `some` is, for values of several parameters."""
    rows = list(rows)
    assert all(row in rows for row in kept), f"{kept} are not among the cases"
    return [pytest.param(*row, marks=() if row in kept else pytest.mark.thorough) for row in rows]


def needs_vllm() -> None:
    """Skip a test where vLLM is not installed. To import it, as pytest.importorskip does, takes three seconds."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed")


def make_task(folder: Path) -> Task:
    arithmetic.main(arithmetic.Args(output_dir=folder, num_sft=256, num_train=64, num_test=16))
    names = ("model", "sft.parquet", "train.parquet", "test.parquet", "reward.py")
    (folder / "reward.py").write_text(REWARD)
    return Task(*(str(folder / name) for name in names))


def make_task_with_stops(folder: Path) -> Task:
    """`make_task` with a model that takes 13 of its 80 tokens for an end: most responses end before 12 tokens."""
    task = make_task(folder)
    add_stops(task)
    return task


def add_stops(task: Task) -> None:
    """Let the task's model take 13 of its 80 tokens for an end."""
    config = GenerationConfig.from_pretrained(task.model)
    config.eos_token_id = [2, *range(20, 32)]
    config.save_pretrained(task.model)


def grpo_settings(task: Task, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a train_grpo.py that takes a fraction of a second: 4 prompts x 4 responses of up to 12 tokens.

    train_grpo_variants.py takes the same.
    """
    return dict(
        model=task.model,
        train_files=(task.train,),
        val_files=(task.test,),
        train_batch_size=4,
        ppo_mini_batch_size=4,
        rollout_n=4,
        max_prompt_length=32,
        max_response_length=12,
        engine="hf",
        custom_reward_function=(task.reward,),
        reward_workers=1,
        default_local_dir=str(run_dir),
        total_training_steps=2,
        lr=1e-3,
        val_before_train=False,
        test_freq=-1,
        log_samples_freq=0,
    ) | changes  # fmt: skip


def ppo_settings(task: Task, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a train_ppo.py that takes a fraction of a second: 8 prompts, one response to each, two updates."""
    own = dict(train_batch_size=8, ppo_mini_batch_size=4, rollout_n=1, critic_lr=1e-2)
    return grpo_settings(task, run_dir) | own | changes


def dapo_settings(task: Task, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a train_dapo.py that takes a fraction of a second: 4 prompts x 4 responses, and groups that wait."""
    own = dict(gen_batch_size=6, lr_warmup_steps=0)
    return grpo_settings(task, run_dir) | own | changes


def reinforce_settings(task: Task, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a train_reinforce.py that takes a fraction of a second: ReMax, 4 prompts x 2 responses."""
    own = dict(adv_estimator="remax", rollout_n=2, kl_coef=0.1)
    return grpo_settings(task, run_dir) | own | changes


def dpo_settings(task: Task, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a train_dpo.py that takes a fraction of a second: 4 prompts x 4 responses, one update."""
    return grpo_settings(task, run_dir) | changes


def distill_settings(task: Task, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a train_distill.py that takes a fraction of a second; the teacher is the student before training."""
    return grpo_settings(task, run_dir) | dict(teacher_model=task.model, distill_top_k=8) | changes


def self_distill_settings(task: Task, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a train_self_distill.py that takes a fraction of a second: 4 prompts x 4 responses, one update."""
    own = dict(hint_template=r"{prompt}\n{hint}", max_hinted_prompt_length=68)
    return grpo_settings(task, run_dir) | own | changes


def prime_settings(task: Task, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a train_prime.py that takes a fraction of a second: 4 prompts x 4 responses, one update."""
    return grpo_settings(task, run_dir) | dict(prm_lr=1e-3) | changes


def sft_settings(task: Task, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of an sft.py that takes a fraction of a second."""
    return dict(
        model=task.model,
        train_files=(task.sft,),
        train_batch_size=16,
        max_length=128,
        default_local_dir=str(run_dir),
        total_training_steps=4,
        lr=4e-3,
    ) | changes  # fmt: skip


def reward_settings(task: Task, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a train_reward.py that takes a fraction of a second: a demonstration is better than the next one."""
    rows, pairs = pq.read_table(task.sft).to_pylist(), Path(task.sft).with_name("preferences.jsonl")
    both = zip(rows, rows[1:] + rows[:1], strict=True)
    lines = [{"prompt": a["prompt"], "chosen": a["response"], "rejected": b["response"] + " "} for a, b in both]
    pairs.write_text("\n".join(map(json.dumps, lines)))
    return sft_settings(task, run_dir) | dict(train_files=(str(pairs),)) | changes


def few_rows(file: str, folder: Path, count: int = 16) -> str:
    """The first rows of a file, in a file of their own in the folder."""
    pq.write_table(pq.read_table(file).slice(0, count), folder / f"first_{count}.parquet")
    return str(folder / f"first_{count}.parquet")


def flags(settings: dict[str, Any]) -> list[str]:
    """Arguments as a user types them: {"rollout_n": 4, "use_kl_loss": True} -> --rollout-n 4 --use-kl-loss"""
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{flag}" if value else f"--no-{flag}"]
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else [value])]
    return words


class Runs:
    """runs(**changes) runs a script in this process and returns its metrics; runs.dir(i) is the folder of the i-th."""

    def __init__(self, script: ModuleType, settings: Callable[..., dict[str, Any]], root: Path):
        self.script, self.settings, self.root, self.count = script, settings, root, 0

    def __call__(self, **changes: Any) -> dict[str, float]:
        self.count += 1
        return self.script.main(build(self.script.Args, **self.settings(self.dir(self.count), **changes)))

    def dir(self, i: int) -> Path:
        return self.root / f"run{i}"

    def weights(self, i: int, step: int, model: str = "huggingface") -> dict[str, torch.Tensor]:
        return weights(self.dir(i) / f"global_step_{step}", model)

    def lines(self, i: int) -> list[dict]:
        return read_jsonl(self.dir(i) / "metrics.jsonl")

    def beside_two_ranks(self, patch: Callable[[object, str, object], None], **changes: Any) -> list[dict]:
        """Run on two ranks, in the folder `two`, and then here. Responses depend on their prompts alone, see
        `step_by_prompt`, so the metrics must agree. Returns those of the two ranks.
        """
        two = self.root / "two"
        two.mkdir(parents=True)
        entry = {"script": self.script.__name__, "settings": self.settings(two, **changes), "comparable": True}
        status, output = launch.run_in_turn(self.root / "runs.json", entry, nproc=2)
        assert status == 0, output
        patch(hf.Engine, "step", step_by_prompt())
        self(**changes)
        lines = timeless(read_jsonl(two / "metrics.jsonl"))
        for line, expected in zip(lines, timeless(self.lines(self.count)), strict=True):
            assert line == pytest.approx(expected, rel=1e-5, abs=1e-6)
        return lines


def leave_distributed() -> None:
    """Undo what a script's main leaves behind when it raises: the process group, and the rank in the environment."""
    if dist.is_initialized():
        dist.destroy_process_group()
    launch.forget_rank()


def read_jsonl(path: str | Path) -> list[dict]:
    """Objects of a jsonl file; NaN and Infinity, which are not JSON, are errors."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{path} holds {constant}")

    return [json.loads(line, parse_constant=refuse) for line in Path(path).read_text().splitlines()]


def timeless(lines: Iterable[dict]) -> list[dict]:
    """Lines of metrics.jsonl without what a clock says."""
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith(CLOCKS)} for line in lines]


def weights(checkpoint: str | Path, folder: str = "huggingface") -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint's huggingface/ folder, or of another one such as huggingface_critic/."""
    return load_file(Path(checkpoint) / folder / "model.safetensors")


def original(task: Task) -> dict[str, torch.Tensor]:
    """The weights that the task starts from, as `weights` gives those of a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(task.model)
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest difference between two sets of weights."""
    assert left.keys() == right.keys() and left, f"{sorted(left.keys() ^ right.keys())}"
    return max((left[name] - right[name]).abs().max().item() for name in left)


def saved_state(checkpoint: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor in a checkpoint's state/ folder by name: the ranks' rows, put together by an independent loop."""
    result: dict[str, torch.Tensor] = {}
    for path in sorted((Path(checkpoint) / "state").iterdir()):
        with safe_open(path, "pt") as file:
            shards = json.loads(file.metadata()["shards"])
            assert sorted(shards) == sorted(file.keys())
            for name, (start, shape) in shards.items():
                part = file.get_tensor(name)
                whole = result.setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))
                if shape:
                    assert whole[start : start + len(part)].isnan().all()  # no row is there twice
                    whole[start : start + len(part)] = part
                else:
                    whole.copy_(part)
    assert result and not any(x.isnan().any() for x in result.values())  # and none is missing
    return result


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    """The same names, and under each the same value, bit by bit."""
    assert left.keys() == right.keys() and left, f"{sorted(left.keys() ^ right.keys())}"
    different = [
        name
        for name, a in left.items()
        if not (torch.equal(a, right[name]) if isinstance(a, torch.Tensor) else a == right[name])
    ]
    assert not different, f"{len(different)} of {len(left)} differ: {different[:5]}"


def step_by_prompt(step: Callable = hf.Engine.step) -> Callable:
    """A `step` of the hf engine that samples all responses to one row of `sample_groups` to their end.

    They depend on the prompt and the weights alone: not on seed, rank or neighbors.
    """

    def whole_group(engine):
        first, waiting = engine.new[0].request, engine.new
        engine.new = [x for x in waiting if x.request.key[0] == first.key[0]]
        completions = []
        with seeded(derive_seed(*first.prompt_ids), engine.device):
            while engine.has_requests():
                completions += step(engine)
        engine.new = [x for x in waiting if x.request.key[0] != first.key[0]]
        return completions

    return whole_group


TRIED: set[tuple] = set()  # models that run packed, see `choose_once`


def choose_once(choose: Callable = models.choose_forward) -> Callable:
    """A `models.choose_forward` that tries a model out the first time only, a tenth of a short run.

    Not one with adapters, which are watched meanwhile. tests/model tries families out.
    """

    def chosen(model, ranks, **options):
        key = (
            type(model).__name__,
            model.config.to_json_string(use_diff=False),
            ranks.dtype,
            ranks.size,
            options.get("longest"),
        )
        if key in TRIED and not any(lora.is_adapter(name) for name, _ in model.named_parameters()):
            use_way(model, "packed")
            return "packed"
        way = choose(model, ranks, **options)
        if way == "packed":
            TRIED.add(key)
        return way

    return chosen


def load_in_double(load: Callable = models.load_pretrained) -> Callable:
    """A `models.load_pretrained` that gives float64, in which what is equal up to rounding stays so through Adam."""
    return lambda *args, **options: load(*args, **options | {"dtype": torch.float64})


def headers_only(auto_class: type) -> tuple[type, str, Callable]:
    """For `monkeypatch.setattr` and `mock.patch.object`: a `from_pretrained` of an auto class that reads the headers of
    files, and fails if weights are read.
    """
    own = auto_class.from_pretrained

    def read(*args: Any, **options: Any) -> Any:
        assert options["device_map"] == "meta", "weights are read"
        return own(*args, **options)

    return auto_class, "from_pretrained", read


def norm_in_double(norm: Qwen2RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """A forward of transformers' norm in the precision of `x`.

    Its own computes in float32. In the backward pass that rounds the gradient of a token that is computed once, or of
    each of its copies, to seven digits, which Adam makes large.
    """
    return rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def record_rounds(rounds: list, patch: Callable[[object, str, object], None]) -> None:
    """From now on every `sample_groups` with the hf engine appends what it samples to `rounds`: a list of
    (prompt ids, completions), one for each row, complete once the function returns.

    Args: patch, such as `monkeypatch.setattr` or `setattr`.
    """
    add, step = hf.Engine.add, hf.Engine.step

    def recording_add(engine, requests):
        add(engine, requests)
        by_row = itertools.groupby(requests, key=lambda request: request.key[0])
        groups = [list(group) for _, group in by_row]
        rounds.append([(list(group[0].prompt_ids), [None] * len(group)) for group in groups])

    def recording_step(engine):
        completions = step(engine)
        for completion in completions:
            i, j = completion.request.key
            rounds[-1][i][1][j] = completion
        return completions

    patch(hf.Engine, "add", recording_add)
    patch(hf.Engine, "step", recording_step)


def make_inexact(patch: Callable[[object, str, object], None]) -> None:
    """From now on the hf engine reports log-probs that are up to 0.05 nats off."""

    def inexact(engine, step=hf.Engine.step):
        return [replace(c, logprobs=[x + 0.05 * math.sin(x) for x in c.logprobs]) for c in step(engine)]

    patch(hf.Engine, "step", inexact)


def weight_by_hand(args: Any, old: torch.Tensor, engine: torch.Tensor) -> torch.Tensor | float:
    """What --rollout-is multiplies the loss of a response's tokens with, from the log-probs of trainer and engine."""
    correction = args.correction
    return (old - engine).exp().clamp(max=correction.rollout_is_threshold) if correction.rollout_is == "token" else 1.0


# ---------------------------------------------------------------------------------------------------------------------
# Algorithms by the book: with transformers' own models, one sequence at a time


def truths(task: Task) -> dict[tuple[int, ...], str]:
    """The ground truth of every training prompt, by its token ids."""
    tokenizer, result = AutoTokenizer.from_pretrained(task.model), {}
    for row in pq.read_table(task.train).to_pylist():
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        result[tuple(tokenizer(text)["input_ids"])] = row["reward_model"]["ground_truth"]
    return result


def hidden_before(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Hidden states (L, H) that predict the L tokens of a response."""
    return model.base_model(input_ids=torch.tensor([prompt + response])).last_hidden_state[0, len(prompt) - 1 : -1]


def logp_of(model: torch.nn.Module, hidden: torch.Tensor, response: list[int], temperature: float) -> torch.Tensor:
    """Log-probs (L,) of the tokens of a response, given `hidden_before` them."""
    return (model.lm_head(hidden) / temperature).log_softmax(-1)[torch.arange(len(response)), response]


def all_logps(model: torch.nn.Module, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """Log-probs (L, V) of all tokens of the vocabulary at the places of a response."""
    return (model.lm_head(hidden_before(model, prompt, response)) / temperature).log_softmax(-1)


def divergence(kind: str, student: Iterable, teacher: Iterable, beta: float) -> torch.Tensor:
    """The distance of two lists of probabilities by its definition, in a plain loop."""
    terms = []
    for p, t in zip(student, teacher, strict=True):
        if kind == "forward_kl":
            terms.append(t * (t.log() - p.log()))
        elif kind == "reverse_kl":
            terms.append(p * (p.log() - t.log()))
        else:
            m = beta * t + (1 - beta) * p
            terms.append(beta * t * (t.log() - m.log()) + (1 - beta) * p * (p.log() - m.log()))
    return sum(terms)


def surrogate(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float, c: float) -> torch.Tensor:
    """PPO's loss of each token by cases: a good one gains up to 1 + high, a bad one pays from 1 - low up to c."""
    good, bad = ratio.clamp(max=1 + high), ratio.clamp(min=1 - low).clamp(max=c)
    return -advantage * torch.where(advantage >= 0, good, bad)


# ---------------------------------------------------------------------------------------------------------------------
# Faults, and several runs in one process


def crash_at(rank: int, n: int, after: str | None = None, *, collect: Callable = Scorer.collect) -> Callable:
    """A `Scorer.collect` that kills this process, if it is that rank, when evaluations and steps collect scores for the
    n-th time, and the folder `after` exists. The check before training does not count.
    """
    calls = 0

    def crashing(scorer, samples):
        nonlocal calls
        calls += sys._getframe(1).f_code.co_name in ("collect", "sample", "evaluate")
        if calls == n and int(os.environ["RANK"]) == rank:
            while after is not None and not os.path.exists(after):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return collect(scorer, samples)

    return crashing


def at_call(owner: Any, name: str, n: int, act: Callable[[], object]) -> None:
    """From now on `act()` is called before the n-th call of owner.name."""
    original, calls = getattr(owner, name), itertools.count(1)

    def counted(*args: Any, **options: Any) -> Any:
        if next(calls) == n:
            act()
        return original(*args, **options)

    setattr(owner, name, counted)


def run_entries(entries: Iterable[dict]) -> None:
    """Run main of a script for each {"script": module, "settings": arguments}, with a process group of its own.

    Its "port" is where the ranks meet. From a "comparable" one on, see `step_by_prompt` and `load_in_double`. With
    "crash_at": arguments of `crash_at`.
    """
    for entry in entries:
        if entry.get("comparable"):
            hf.Engine.step, models.load_pretrained = step_by_prompt(), load_in_double()
            Qwen2RMSNorm.forward = norm_in_double
        if "crash_at" in entry:
            Scorer.collect = crash_at(*entry["crash_at"])
        if entry["port"] is not None:  # None: the process group is the one that torchrun has prepared
            os.environ |= {"MASTER_PORT": str(entry["port"]), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        script = importlib.import_module(entry["script"])
        script.main(
            build(script.Args, **{k: tuple(v) if isinstance(v, list) else v for k, v in entry["settings"].items()})
        )


if __name__ == "__main__":
    run_entries(json.loads(Path(sys.argv[1]).read_text()))

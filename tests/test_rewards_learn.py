"""GRPO learns from every kind of reward: real sandbox, weighted components, learned model; and scoring costs no time.

Tiny models learn by sft.py to answer well and badly; train_grpo.py has to find out what the reward wants.
"""

import json
import random
import re
import statistics
import time
from pathlib import Path

import helpers_scripts as h
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_scoring import alive, descendants, wait_until

import sft
import train_grpo
import train_reward
from data import arithmetic, grail, mbpp
from rewards import sandbox
from rl.engines import hf

SEED = int(__import__("os").environ.get("SEED", "0"))


@pytest.fixture(scope="module", autouse=True)
def code_characters():
    """The arithmetic task's tokenizer, with the characters of tags and of code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "CHARACTERS", arithmetic.CHARACTERS + "()[]{}<>_\"\\`%&|;")
        yield


@pytest.fixture(autouse=True)
def one_thread():
    """Sums in one order everywhere, and no process group left behind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    h.leave_distributed()


def write(path: Path, rows: list[dict]) -> tuple[str]:
    """Rows -> a parquet file; returns the flag's value."""
    pq.write_table(pa.Table.from_pylist(rows), path)
    return (str(path),)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def imitate(folder: Path, demonstrations: list[tuple[str, str]], steps: int) -> str:
    """Folder of a new model to which sft.py showed (prompt, response) pairs, 16 a step."""
    arithmetic.save_model(folder / "untrained", seed=SEED)
    rows = [{"prompt": user(prompt), "response": response} for prompt, response in demonstrations]
    settings = dict(
        model=str(folder / "untrained"),
        train_files=write(folder / "sft.parquet", rows),
        train_batch_size=16,
        max_length=128,
        lr=8e-3,
        lr_warmup_steps=20,
        beta2=0.98,
        total_training_steps=steps,
        activation_checkpointing="none",
        default_local_dir=str(folder / "sft"),
        seed=SEED,
    )
    sft.main(sft.Args(**settings))
    return str(folder / "sft" / f"global_step_{steps}" / "huggingface")


def improve(folder: Path, model: str, rows: list[dict], steps: int, **changes) -> list[dict]:
    """train_grpo.py with 8 prompts x 8 responses a step; returns the lines of metrics.jsonl."""
    settings = dict(
        model=model,
        train_files=write(folder / "train.parquet", rows),
        val_files=write(folder / "val.parquet", rows),
        train_batch_size=8,
        rollout_n=8,
        max_prompt_length=48,
        max_response_length=80,
        engine="hf",
        reward_workers=2,
        lr=float(__import__("os").environ.get("LR", "1e-3")),
        total_training_steps=steps,
        test_freq=steps,
        activation_checkpointing="none",
        default_local_dir=str(folder / "grpo"),
        log_samples_freq=0,
        save_freq=0,
        seed=SEED,
    )
    train_grpo.main(train_grpo.Args(**settings | changes))
    return h.read_jsonl(folder / "grpo" / "metrics.jsonl")


def training(lines: list[dict]) -> list[dict]:
    return [line for line in lines if "actor/loss" in line]


def validation(lines: list[dict]) -> list[dict]:
    return [line for line in lines if "val/accuracy" in line]


def mean(lines: list[dict], name: str) -> float:
    return statistics.mean(line[name] for line in lines)


# ---------------------------------------------------------------------------------------------------------------------
# MBPP: code that runs in the sandbox

# task: the right value of f(a,b), a wrong one, tests of which the wrong one passes the second
TASKS = {
    "sum": ("a+b", "a-b", "f(5, 3) == 8", "f(2, 0) == 2"),
    "difference": ("a-b", "b-a", "f(5, 3) == 2", "f(4, 4) == 0"),
    "product": ("a*b", "a+b", "f(5, 3) == 15", "f(2, 2) == 4"),
    "larger": ("max(a,b)", "min(a,b)", "f(5, 3) == 5", "f(4, 4) == 4"),
    "quotient": ("a//b", "a%b", "f(7, 3) == 2", "f(0, 3) == 0"),
    "both": ("a and b", "a or b", "f(5, 3) == 3", "f(4, 4) == 4"),
    "list": ("[a,b]", "[b,a]", "f(5, 3) == [5, 3]", "f(4, 4) == [4, 4]"),
    "key": ("{a:b}", "{b:a}", "f(5, 3) == {5: 3}", "f(4, 4) == {4: 4}"),
}


def answers(task: str) -> list[str]:
    """50 answers: about half are right, one in 20 to 25 leaves the process, and of two functions as many never end."""
    right, wrong, *_ = TASKS[task]
    favourite_is_right = list(TASKS).index(task) % 2 == 0
    head = "def f(a,b):"
    codes = (
        [f"{head}return {right}"] * (24 if favourite_is_right else 14)
        + [f"{head}return {wrong}"] * (17 if favourite_is_right else 27)
        + [f"{head}return {right}+"] * 4  # does not compile
        + [f"{head}exit(0)"] * 2
        + ["import sys\nsys.exit(0)"] 
        + ["while 1:0"] * 2
    )
    return [f"```python\n{code}\n```" for code in codes]


def mbpp_row(task: str, index: int) -> dict:
    right, _, *tests = TASKS[task]
    source = dict(
        task_id=index,
        text=task,
        code=f"def f(a, b):\n    return {right}",
        test_list=[f"assert {test}" for test in tests],
        test_setup_code="",
    )
    return mbpp.to_row(source, "train", index) | {"prompt": user(task)}


def test_mbpp(tmp_path):
    before = set(descendants(__import__("os").getpid()))
    t0 = time.time()
    demos = [(name, answer) for name in TASKS for answer in answers(name)]
    model = imitate(tmp_path, demos, int(__import__('os').environ.get('STEPS','150')))
    t1 = time.time()
    lines = improve(tmp_path, model, [mbpp_row(name, i) for i, name in enumerate(TASKS)], int(__import__("os").environ.get("G", "24")), val_before_train=True, max_response_length=64, ppo_epochs=int(__import__("os").environ.get("E", "1")))
    t2 = time.time()
    wait_until(lambda: not any(map(alive, set(descendants(__import__("os").getpid())) - before)), "left")
    print("SFT", t1 - t0, "GRPO", t2 - t1, "end", time.time() - t2)
    print("SUMMARY", [round(x["critic/score/mean"],2) for x in training(lines)], "val", [x["val/accuracy"] for x in validation(lines)], "timeouts", [int(x["reward/google-research-datasets/mbpp/timeout"]*64) for x in training(lines)])
    for x in training(lines):
        print({k.rpartition("/")[2] if "mbpp" in k else k: round(v, 3) for k, v in x.items() if "mbpp" in k or k in ("step", "critic/score/mean", "reward/error_frac", "reward/timeout_frac", "reward/seconds_max", "timing_s/gen", "timing_s/reward", "timing_s/step")})
    print([(x["val/accuracy"], {k:v for k,v in x.items() if "val" in k}) for x in validation(lines)])


# ---------------------------------------------------------------------------------------------------------------------
# GRAIL: an answer between tags


NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8}


def tagged_answer(word: str, rng: random.Random) -> str:
    """A response to `four+four`: each part is missing or wrong in some 15 to 50 % of the responses."""
    right = 2 * NUMBERS[word]
    stated = right if rng.random() < 0.5 else right + 1
    thinking = f"<start_working_out>{word}+{word}</end_working_out>" if rng.random() < 0.5 else ""
    answer = f"is {stated}" if rng.random() < 0.4 else f"{stated}"
    if rng.random() < 0.3:
        return thinking + answer
    return f"{thinking}<SOLUTION>{answer}</SOLUTION>{'bye' if rng.random() < 0.4 else ''}"


def test_grail(tmp_path):
    rng = random.Random(SEED)
    demos = [(f"{word}+{word}", tagged_answer(word, rng)) for word in NUMBERS for _ in range(80)]
    t0 = time.time()
    model = imitate(tmp_path, demos, int(__import__('os').environ.get('STEPS','200')))
    t1 = time.time()
    rows = [grail.to_row("gsm8k", f"{w}+{w}", f"#### {2*x}", f"<start_working_out></end_working_out><SOLUTION>{2*x}</SOLUTION>", "train", i) | {"prompt": user(f"{w}+{w}")} for i, (w, x) in enumerate(NUMBERS.items())]
    lines = improve(tmp_path, model, rows, 24, val_before_train=True,lr=float(__import__("os").environ.get("LR", "5e-4")),ppo_epochs=2,temperature=0.8,lr_scheduler_type="cosine")
    print("SFT", t1 - t0, "GRPO", time.time() - t1)
    print("SUMMARY", [round(x["critic/score/mean"],2) for x in training(lines)], "val", [x["val/accuracy"] for x in validation(lines)], [x["val-core/grail_gsm8k/reward/mean@1"] for x in validation(lines)])
    for x in training(lines)[::22]:
        print({k.rpartition("/")[2] if "grail" in k else k: round(v, 3) for k, v in x.items() if "grail" in k or k in ("step", "critic/score/mean", "reward/error_frac", "timing_s/gen", "timing_s/reward", "timing_s/step")})


# ---------------------------------------------------------------------------------------------------------------------
# A learned reward


def preferred(response: str) -> bool:
    """Four steps of work, then an answer that can be graded."""
    return re.fullmatch(r"(\d[+-]\d=\d\n){4}#### \d", response) is not None


def pair(rng: random.Random) -> dict:
    """Two responses to one question with the same answer, of which the chosen one is of the preferred form."""
    totals = arithmetic.chain_totals(rng.randrange(arithmetic.NUM_CHAINS))
    work = arithmetic.worked_steps(totals, totals)
    rejected = rng.choice([f"#### {totals[-1]}", f"{work}Answer: {totals[-1]}", f"{work}So {totals[-1]}"])
    prompt = user(arithmetic.question(totals))
    return {"prompt": prompt, "chosen": f"{work}#### {totals[-1]}", "rejected": rejected}


def test_learned(tmp_path, monkeypatch):
    rng = random.Random(SEED)
    chains = [arithmetic.chain_totals(rng.randrange(arithmetic.NUM_CHAINS)) for _ in range(800)]
    t0 = time.time()
    model = imitate(tmp_path, [(arithmetic.question(c), arithmetic.sft_response(c, rng)) for c in chains], int(__import__('os').environ.get('STEPS','100')))
    t1 = time.time()
    settings = dict(
        model=model,
        train_files=write(tmp_path / "pairs.parquet", [pair(rng) for _ in range(320)]),
        val_files=write(tmp_path / "held_out.parquet", [pair(rng) for _ in range(100)]),
        train_batch_size=16,
        max_length=80,
        lr=2e-3,
        total_training_steps=20,
        test_freq=20,
        activation_checkpointing="none",
        default_local_dir=str(tmp_path / "reward"),
        seed=SEED,
    )
    result = train_reward.main(train_reward.Args(**settings))
    judge = str(tmp_path / "reward" / "global_step_20" / "huggingface")
    t2 = time.time()
    sampled = []

    def generate(*args, original=hf.generate, **kwargs):
        groups = original(*args, **kwargs)
        sampled.append([completion.token_ids for group in groups for completion in group])
        return groups

    monkeypatch.setattr(hf, "generate", generate)
    rows = [arithmetic.rl_row(c, "train", i) for i, c in enumerate(chains[:64])]
    from transformers import AutoTokenizer
    tok = AutoTokenizer.from_pretrained(model)
    for kw in eval(__import__('os').environ.get("V", "[dict(lr=5e-4)]")):
        sampled.clear()
        t2 = time.time()
        import shutil; shutil.rmtree(tmp_path / "grpo", ignore_errors=True)
        lines = improve(tmp_path, model, rows, 12, reward_model=judge, max_response_length=48, reward_model_max_length=128, val_before_train=False, test_freq=-1, **dict(temperature=0.8,lr_scheduler_type="cosine",ppo_epochs=2) | kw)
        t3 = time.time()
        shares = [statistics.mean(map(preferred, tok.batch_decode(ids, skip_special_tokens=True))) for ids in sampled]
        print("SUMMARY", kw, "val", result["val/accuracy"], result["val/margin"], [round(x["critic/score/mean"], 2) for x in lines], [round(x, 2) for x in shares], "SFT", t1 - t0, "GRPO", t3 - t2)
    for ids in sampled[-1][:6]:
        print("SUMMARY", repr(tok.decode(ids)))
    print("SUMMARY", lines[-1]["reward/arithmetic/reward_model"], lines[-1]["critic/score/mean"], [x for x in lines[-1] if "reward" in x])

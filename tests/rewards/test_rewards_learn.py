"""GRPO learns from every kind of reward: tested code, weighted parts, a learned model. And scoring takes no extra time.

Tiny models are shown good and bad answers by sft.py; train_grpo.py then has to find out what the reward wants.
"""

import os
import random
import re
import statistics
from pathlib import Path

import helpers_scripts as h
import launch
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import sft
import train_grpo
import train_reward
from data import arithmetic, grail, mbpp
from extras.engines import hf
from rewards import gsm8k
from rewards.sandbox import judge as sandbox
from rl.data.order import prompts_for_step
from rl.data.types import Sampling
from rl.flags import build
from rl.ranks import Ranks
from rl.sampling.groups import sample_groups

SEED = 0
CHARACTERS = arithmetic.CHARACTERS + '()[]{}<>_"\\`%'  # what code and tags need, too
EOS = 2


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums in one order everywhere, and no process group left behind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    h.leave_distributed()


@pytest.fixture
def sampled(monkeypatch):
    """sampled(): the token ids of all responses of each step, in order."""
    rounds = []
    h.record_rounds(rounds, monkeypatch.setattr)
    return lambda: [[completion.token_ids for _, group in groups for completion in group] for groups in rounds]


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def write(path: Path, rows: list[dict]) -> tuple[str]:
    """Rows -> a parquet file; returns the flag's value."""
    pq.write_table(pa.Table.from_pylist(rows), path)
    return (str(path),)


def imitate(folder: Path, demonstrations: list[tuple[str, str]], steps: int) -> str:
    """Folder of a new model to which sft.py showed (prompt, response) pairs, 16 a step."""
    arithmetic.save_model(folder / "untrained", seed=SEED, characters=CHARACTERS)
    rows = [{"prompt": user(prompt), "response": response} for prompt, response in demonstrations]
    settings = dict(
        model=str(folder / "untrained"),
        train_files=write(folder / "sft.parquet", rows),
        train_batch_size=16,
        max_length=128,
        lr=8e-3,
        beta2=0.98,
        lr_warmup_steps=20,
        total_training_steps=steps,
        activation_checkpointing="none",
        default_local_dir=str(folder / "sft"),
        seed=SEED,
    )
    sft.main(build(sft.Args, **settings))
    return str(folder / "sft" / f"global_step_{steps}" / "huggingface")


def improve(folder: Path, model: str, rows: list[dict], steps: int, **changes) -> list[dict]:
    """Lines of metrics.jsonl of train_grpo.py with 8 prompts x 8 responses per step, evaluated before and after."""
    settings = dict(
        model=model,
        train_files=write(folder / "train.parquet", rows),
        val_files=write(folder / "val.parquet", rows[:8]),
        train_batch_size=8,
        rollout_n=8,
        temperature=0.8,
        max_prompt_length=32,
        max_response_length=80,
        engine="hf",
        reward_workers=2,
        lr=5e-4,
        lr_scheduler_type="cosine",
        ppo_epochs=2,
        total_training_steps=steps,
        test_freq=steps,
        activation_checkpointing="none",
        default_local_dir=str(folder / "grpo"),
        log_samples_freq=0,
        save_freq=0,
        seed=SEED,
    )
    train_grpo.main(build(train_grpo.Args, **settings | changes))
    return h.read_jsonl(folder / "grpo" / "metrics.jsonl")


def split(lines: list[dict]) -> tuple[list[dict], list[dict]]:
    """Lines of training steps, and of evaluations."""
    return [x for x in lines if "actor/loss" in x], [x for x in lines if "val/accuracy" in x]


def mean(lines: list[dict], name: str) -> float:
    return statistics.mean(line[name] for line in lines)


def greedy(folder: Path, step: int) -> list[str]:
    """The responses of an evaluation."""
    return [x["response"] for x in h.read_jsonl(folder / "grpo" / "generations.jsonl") if x["step"] == step]


# ---------------------------------------------------------------------------------------------------------------------
# MBPP: code that runs in the sandbox

# task: f(a,b) as it should be, as it should not, and two tests, of which the wrong one passes the second
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


def block(code: str) -> str:
    return f"```python\n{code}\n```"


def programs(task: str) -> list[str]:
    """50 answers; the most frequent one is right for half of the tasks."""
    right, wrong, *_ = TASKS[task]
    known = list(TASKS).index(task) % 2 == 0
    return [
        *[block(f"def f(a,b):return {right}")] * (24 if known else 14),
        *[block(f"def f(a,b):return {wrong}")] * (18 if known else 28),
        *[block(f"def f(a,b):return {right}+")] * 4,  # does not compile
        *[block("def f(a,b):exit(0)")] * 2,
        *[block("import sys\nsys.exit(0)")] * 2,
    ]


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


def test_code_gets_right_by_running_it_in_the_sandbox(tmp_path):
    if not (sandbox._seccomp_available() and sandbox._landlock_abi()):
        pytest.skip("no sandbox on this machine")
    before = set(launch.descendants(os.getpid()))
    model = imitate(tmp_path, [(task, answer) for task in TASKS for answer in programs(task)], steps=160)
    rows = [mbpp_row(task, i) for i, task in enumerate(TASKS)]
    train, val = split(improve(tmp_path, model, rows, steps=12, lr=1e-3, max_response_length=64))

    part = "reward/google-research-datasets/mbpp/"
    first, last = train[:2], train[-4:]
    assert mean(first, f"{part}acc") < 0.7 and mean(last, f"{part}acc") > 0.8
    assert mean(first, "critic/score/mean") < 0.8 and mean(last, "critic/score/mean") > 0.87
    assert mean(first, f"{part}loaded") < mean(last, f"{part}loaded")
    for x in train:
        assert x["reward/error_frac"] == x["reward/timeout_frac"] == x["reward/none_frac"] == 0
        assert x[f"{part}acc"] <= x["critic/score/mean"] <= x[f"{part}loaded"]
    assert val[0]["val/accuracy"] < val[1]["val/accuracy"] >= 7 / 8
    wanted = [block(f"def f(a,b):return {right}") for right, *_ in TASKS.values()]
    for step, x in zip((0, 12), val, strict=True):  # told from the text instead of by running it
        same = [a == b for a, b in zip(wanted, greedy(tmp_path, step), strict=True)]
        assert x["val/accuracy"] == statistics.mean(same)
        assert x["val/accuracy"] == x["val-aux/google-research-datasets/mbpp/acc/mean@1"]
    launch.until(lambda: not set(launch.descendants(os.getpid())) - before, 60, "a process outlived the run")


# ---------------------------------------------------------------------------------------------------------------------
# GRAIL: points for the answer and for each part of the form

NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8}


def sloppy(word: str, rng: random.Random) -> str:
    """A response to `four+four` in which each part is missing or wrong in 30 to 50 % of all cases."""
    stated = 2 * NUMBERS[word] + (rng.random() < 0.5)
    thinking = f"<start_working_out>{word}+{word}</end_working_out>" if rng.random() < 0.5 else ""
    answer = f"is {stated}" if rng.random() < 0.4 else f"{stated}"
    if rng.random() < 0.3:
        return thinking + answer
    return f"{thinking}<SOLUTION>{answer}</SOLUTION>" + ("bye" if rng.random() < 0.4 else "")


@pytest.mark.thorough
def test_every_part_of_the_grail_reward_is_learned(tmp_path):
    rng = random.Random(SEED)
    model = imitate(tmp_path, [(f"{w}+{w}", sloppy(w, rng)) for w in NUMBERS for _ in range(80)], steps=200)
    ideal = {word: grail.tagged(f"{word}+{word}", str(2 * n)) for word, n in NUMBERS.items()}
    rows = [
        grail.to_row("gsm8k", f"{word}+{word}", f"{n} + {n} = {2 * n}\n#### {2 * n}", ideal[word], "train", n)
        | {"prompt": user(f"{word}+{word}")}
        for word, n in NUMBERS.items()
    ]
    train, val = split(improve(tmp_path, model, rows, steps=20))

    points = dict(correctness=0.6, strict_format=0.15, thinking=0.1, answer_format=0.1, no_trailing=0.05)
    first, last = train[:2], train[-4:]
    assert mean(first, "critic/score/mean") < 0.6 and mean(last, "critic/score/mean") > 0.85
    for x in train:
        assert x["reward/error_frac"] == x["reward/timeout_frac"] == x["reward/none_frac"] == 0
        parts = {name: x[f"reward/grail_gsm8k/{name}"] for name in points}
        assert x["critic/score/mean"] == pytest.approx(sum(parts.values()))
        assert parts["correctness"] == pytest.approx(0.6 * x["reward/grail_gsm8k/acc"])
    for name, most in points.items():
        start, end = mean(first, f"reward/grail_gsm8k/{name}"), mean(last, f"reward/grail_gsm8k/{name}")
        assert start < 0.93 * most and end > start + 0.02 * most and 0.75 * most < end <= most + 1e-9, name
    before, after = (x["val-core/grail_gsm8k/reward/mean@1"] for x in val)
    assert after > 0.9 and after > before + 0.05
    perfect = [sum(a == b for a, b in zip(ideal.values(), greedy(tmp_path, step), strict=True)) for step in (0, 20)]
    assert perfect[0] <= 4 and perfect[1] >= 6


# ---------------------------------------------------------------------------------------------------------------------
# A reward model that was trained on preferences


def preferred(response: str) -> bool:
    """Four steps of work, then an answer that can be graded; right or wrong."""
    return re.fullmatch(r"(\d[+-]\d=\d\n){4}#### \d", response) is not None


def compare(model: str, questions: list[str]) -> list[dict]:
    """Pairs of the model's own responses to each question: one that is preferred, and one that is not."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    alone = Ranks(0, 1, torch.device("cpu"), torch.float32, data_rank=0, data_size=1, group=None, data_group=None)
    engine = hf.Engine(model, alone, longest=128)
    texts = [tokenizer.apply_chat_template(user(q), tokenize=False, add_generation_prompt=True) for q in questions]
    sampling = Sampling(16, 1.0, max_tokens=48, stop_token_ids=(EOS,))
    rows = [{"prompt_ids": tokenizer(text)["input_ids"], "row_index": i} for i, text in enumerate(texts)]
    samples = sample_groups(engine, rows, sampling, seed=SEED)
    groups = [samples[i : i + sampling.n] for i in range(0, len(samples), sampling.n)]
    pairs = []
    for question, group in zip(questions, groups, strict=True):
        responses = tokenizer.batch_decode([s.response_ids for s in group], skip_special_tokens=True)
        good, bad = ([r for r in responses if r and preferred(r) == wanted] for wanted in (True, False))
        pairs += [{"prompt": user(question), "chosen": c, "rejected": r} for c, r in zip(good, bad, strict=False)]
    return pairs


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """(policy, reward model, prompts, metrics of the reward model's training)"""
    folder, rng = tmp_path_factory.mktemp("learned"), random.Random(SEED)
    chains = [arithmetic.chain_totals(rng.randrange(arithmetic.NUM_CHAINS)) for _ in range(800)]
    questions = [arithmetic.question(c) for c in chains]
    policy = imitate(folder, [(arithmetic.question(c), arithmetic.sft_response(c, rng)) for c in chains], steps=150)
    settings = dict(
        model=policy,
        train_files=write(folder / "pairs.parquet", compare(policy, questions[:120])),
        val_files=write(folder / "held_out.parquet", compare(policy, questions[120:150])),
        train_batch_size=16,
        max_length=80,
        lr=2e-3,
        total_training_steps=20,
        test_freq=20,
        activation_checkpointing="none",
        default_local_dir=str(folder / "reward"),
        seed=SEED,
    )
    metrics = train_reward.main(build(train_reward.Args, **settings))
    rows = [arithmetic.rl_row(c, "train", i) for i, c in enumerate(chains[150:214])]
    return policy, str(folder / "reward" / "global_step_20" / "huggingface"), rows, metrics


def judged(folder, learned, steps, **changes):
    """`improve` with the reward model."""
    policy, judge, rows, _ = learned
    settings = dict(reward_model=judge, reward_model_max_length=80, max_response_length=48, val_before_train=False)
    return improve(folder, policy, rows, steps, **settings, test_freq=-1, **changes)


@pytest.mark.thorough  # tests/model/test_reward_model.py has what it learns, the next test what its scores are worth
def test_a_reward_model_passes_on_what_it_was_taught(learned, sampled, tmp_path):
    policy, *_, taught = learned
    assert taught["val/accuracy"] >= 0.95
    lines = judged(tmp_path, learned, steps=12, ppo_epochs=1)

    tokenizer = AutoTokenizer.from_pretrained(policy)
    shares = [statistics.mean(map(preferred, tokenizer.batch_decode(s, skip_special_tokens=True))) for s in sampled()]
    assert len(shares) == 12 and shares[0] < 0.35 and statistics.mean(shares[-3:]) > 0.65
    scores = [x["reward/arithmetic/reward_model"] for x in lines]
    assert [x["critic/score/mean"] for x in lines] == pytest.approx(scores, rel=1e-5)  # there is no other reward
    assert statistics.mean(scores[-3:]) > scores[0] + 3


@pytest.fixture
def unlearned(tmp_path):
    """The same with a policy that knows the form of an answer, and a reward model with a random head."""
    rng = random.Random(SEED)
    chains = [arithmetic.chain_totals(rng.randrange(arithmetic.NUM_CHAINS)) for _ in range(600)]
    policy = imitate(tmp_path, [(arithmetic.question(c), arithmetic.sft_response(c, rng)) for c in chains], steps=40)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    with torch.no_grad():
        model.score.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(4))
    model.save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(policy).save_pretrained(tmp_path / "judge")
    return policy, str(tmp_path / "judge"), [arithmetic.rl_row(c, "train", i) for i, c in enumerate(chains[:64])], {}


def test_rules_and_a_reward_model_add_up(unlearned, sampled, tmp_path):
    policy, judge, rows, _ = unlearned
    functions = ("rewards/gsm8k.py", "rewards/length_penalty.py::0.3")
    lines = judged(tmp_path, unlearned, steps=2, custom_reward_function=functions, reward_model_coef=0.5)
    for x in lines:
        right, short, score = (x[f"reward/arithmetic/{k}"] for k in ("gsm8k", "length_penalty", "reward_model"))
        assert x["critic/score/mean"] == pytest.approx(right + 0.3 * short + 0.5 * score, abs=1e-5)
        assert short == pytest.approx(-x["response_length/mean"] / 48)
    # The first step again: every response by the rule, and by the reward model as transformers runs it.
    tokenizer, model = AutoTokenizer.from_pretrained(policy), AutoModelForSequenceClassification.from_pretrained(judge)
    model.config.pad_token_id = None  # it then scores the last token
    chosen = prompts_for_step(rows, 0, 8, SEED)
    right, learned_scores = [], []
    for row, ids in zip([row for row in chosen for _ in range(8)], sampled()[0], strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        right.append(gsm8k.compute_score("", text, row["reward_model"]["ground_truth"]))
        question = row["prompt"][0]["content"]
        whole = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n"
        with torch.no_grad():
            learned_scores.append(model(**tokenizer(whole, return_tensors="pt")).logits.item())
    assert lines[0]["reward/arithmetic/gsm8k"] == statistics.mean(right) > 0
    assert lines[0]["reward/arithmetic/reward_model"] == pytest.approx(statistics.mean(learned_scores), abs=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Scoring while vLLM generates

SLOW = """
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.05)
    return float(sum(map(ord, solution_str)) % 2)
"""


@pytest.mark.thorough  # tests/rewards/test_rewards_runs.py has the same of the plain engine, without a clock
def test_scoring_hides_behind_generation(tmp_path):
    h.needs_vllm()
    task = h.make_task(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    settings = dict(
        engine="vllm",
        custom_reward_function=(str(tmp_path / "slow.py"),),
        rollout_n=4,
        max_response_length=32,
        total_training_steps=1,
        save_freq=0,
    )
    runs = {
        "hidden": dict(reward_workers=4, max_num_seqs=2),  # half a group at a time
        "behind": dict(reward_workers=1, max_num_seqs=32),  # all responses at the end, then one after the other
    }
    entries = [
        {"script": "train_grpo", "settings": h.grpo_settings(task, tmp_path / name, **settings, **changes)}
        for name, changes in runs.items()
    ]
    status, output = launch.run_in_turn(tmp_path / "runs.json", *entries, nproc=1)
    assert status == 0, output
    serial = 4 * 4 * 0.05
    for name in runs:
        for x in h.read_jsonl(tmp_path / name / "metrics.jsonl"):
            generation, waiting = x["timing_s/gen"], x["timing_s/reward"]
            print(
                f"{name}: {serial:.2f} s of scoring; generation takes {generation:.2f} s, then {waiting:.2f} s are left"
            )
            assert x["reward/seconds_p95"] >= 0.05
            assert waiting < 0.5 * serial if name == "hidden" else waiting > 0.6 * serial

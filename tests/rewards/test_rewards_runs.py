"""Real runs of GRPO with rewards of every kind: what they do to the run, and what its metrics say of them."""

import math
import shutil
import statistics
import textwrap
from pathlib import Path

import helpers_scripts as h
import launch
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_grpo
import train_grpo_variants
from extras.engines import hf
from rewards import gsm8k
from rl.data.order import prompts_for_step
from rl.model import load as models
from rl.run.checkpoint_files import list_steps

pytestmark = pytest.mark.usefixtures("runs_here")

PREAMBLE = """
import os
import subprocess
import sys
import time

calls = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    fine = float((sum(map(ord, solution_str)) + int(ground_truth)) % 2)
"""


@pytest.fixture
def grpo(task, tmp_path):
    """Runs of one step, unless a test says otherwise."""
    return h.Runs(
        train_grpo,
        lambda folder, **changes: h.grpo_settings(task, folder, **{"total_training_steps": 1} | changes),
        tmp_path,
    )


@pytest.fixture
def variants(task, tmp_path):
    """The same of train_grpo_variants.py."""
    return h.Runs(
        train_grpo_variants,
        lambda folder, **changes: h.grpo_settings(task, folder, **{"total_training_steps": 1} | changes),
        tmp_path,
    )


@pytest.fixture
def reward(tmp_path):
    """reward(body) writes a reward function, in whose body `fine` is the usual score; returns the flag's value."""

    def write(body):
        path = tmp_path / "mine.py"
        path.write_text(PREAMBLE + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n")
        return (str(path),)

    return write


@pytest.fixture
def sources(task, tmp_path):
    """Training and held-out files whose rows alternate between the data sources "even" and "odd"."""
    for name in ("train", "test"):
        rows = pq.read_table(f"{Path(task.train).parent}/{name}.parquet").to_pylist()
        for i, row in enumerate(rows):
            row["data_source"] = "odd" if i % 2 else "even"
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    return dict(train_files=(str(tmp_path / "train.parquet"),), val_files=(str(tmp_path / "test.parquet"),))


# ---------------------------------------------------------------------------------------------------------------------
# No score


def test_a_prompt_that_cannot_be_scored_is_as_if_it_had_not_been_sampled(variants, task, reward, monkeypatch):
    """tests/scoring/test_scoring.py has more ways to fail, with the same three ends."""
    # The order of prompts is fixed: the first two of three are the whole batch of a run with two.
    monkeypatch.setattr(models, "load_pretrained", h.load_in_double())
    monkeypatch.setattr(hf.Engine, "step", h.step_by_prompt())
    settings = dict(loss_agg_mode="seq-mean-token-mean", reward_workers=2, reward_timeout=0.5)
    expected = variants(**settings, train_batch_size=2, ppo_mini_batch_size=2)
    rows = pq.read_table(task.train).to_pylist()
    third = prompts_for_step([row["extra_info"]["index"] for row in rows], 0, 3, 0)[2]
    assert third != 0  # the first row is tried at start
    failures = {"error_frac": "raise KeyError('no')", "timeout_frac": "time.sleep(60)", "none_frac": "return None"}
    for number, (share, failure) in enumerate(failures.items(), start=2):
        broken = variants(
            **settings,
            train_batch_size=3,
            ppo_mini_batch_size=3,
            custom_reward_function=reward(f"if extra_info['index'] == {third}:\n    {failure}\nreturn fine"),
            reward_max_error_frac=0.34,
        )
        for name in failures:
            assert expected[f"reward/{name}"] == 0
            assert broken[f"reward/{name}"] == pytest.approx(1 / 3 if name == share else 0), name
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "critic/score/mean", "critic/score/min"):
            assert broken[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name
        assert h.distance(variants.weights(1, 1), variants.weights(number, 1)) < 1e-7
        if share == "timeout_frac":  # four times the limit by the clock
            assert broken["reward/seconds_max"] >= broken["reward/seconds_p95"] > 1.9
    assert expected["actor/grad_norm"] > 0


def test_a_single_failure_is_printed_and_counted_and_the_run_goes_on(grpo, reward, capfd):
    path = reward("if calls == 9:\n    raise RuntimeError('a bug of the user')\nreturn fine")  # 3 calls check, 6 train
    grpo(custom_reward_function=path, total_training_steps=2, rollout_n=6)
    assert [x["reward/error_frac"] for x in grpo.lines(1)] == [1 / 24, 0.0]
    assert all(math.isfinite(x["actor/loss"]) and x["actor/grad_norm"] > 0 for x in grpo.lines(1))
    err = capfd.readouterr().err
    assert err.count("RuntimeError: a bug of the user") == 1
    assert "reward: 1 problem(s), the first: " in err and "train.parquet: row " in err


FAILING = """
if calls > 3 and calls % 8 == 0:
    raise RuntimeError("a bug of the user")
return fine
"""


def test_too_many_failures_stop_the_run_after_the_first_is_printed(grpo, reward, capfd):
    settings = dict(custom_reward_function=reward(FAILING), total_training_steps=2)
    words = "^2 of 16 responses could not be scored, more than --reward-max-error-frac 0.05"
    with pytest.raises(RuntimeError, match=words):
        grpo(**settings)
    first, _, last = capfd.readouterr().err.partition("RuntimeError: a bug of the user")
    assert "reward: 2 problem(s), the first: " in first and "train.parquet: row " in first
    assert "mine.py" in first and "response: " in last
    assert not (grpo.dir(1) / "metrics.jsonl").exists()
    metrics = grpo(**settings, reward_max_error_frac=1.0)
    assert metrics["reward/error_frac"] == 2 / 16


def test_failures_of_one_rank_stop_all(task, reward, tmp_path):
    body = "if calls > 3 and os.environ['RANK'] == '1':\n    raise RuntimeError('a bug of the user')\nreturn fine"
    settings = h.grpo_settings(task, tmp_path / "run", custom_reward_function=reward(body), train_batch_size=5)
    run = launch.fork("train_grpo", settings, tmp_path / "log", ranks=2)
    codes, output = run.ends(), run.log.read_text()
    assert 0 not in codes
    assert output.count("RuntimeError: 12 of 20 responses could not be scored") == 2, output


def test_a_reward_that_always_fails_is_found_before_a_model_is_loaded(grpo, reward, monkeypatch, capfd):
    monkeypatch.setattr(*h.headers_only(AutoModelForCausalLM))
    with pytest.raises(ValueError, match="fails on the first row of data source 'arithmetic'"):
        grpo(custom_reward_function=reward("return fine / 0"))
    assert "ZeroDivisionError" in capfd.readouterr().err and not grpo.dir(1).exists()


def test_without_any_score_nothing_changes_and_the_third_update_stops_the_run(grpo, reward, task):
    settings = dict(custom_reward_function=reward("return None"), weight_decay=0.5, lr=1e-2)
    with pytest.raises(
        RuntimeError, match=r"^step 3: three updates in a row were useless.* over 0 tokens that are learned from"
    ):
        grpo(**settings, total_training_steps=4, save_freq=2)
    for metrics in (lines := grpo.lines(1)):
        assert metrics["reward/none_frac"] == 1.0 and metrics["reward/error_frac"] == 0.0
        assert metrics["actor/grad_norm"] == metrics["actor/loss"] == 0.0
        assert metrics["critic/score/mean"] is metrics["critic/rewards/mean"] is None
    assert len(lines) == 2
    launch.until(lambda: list_steps(grpo.dir(1)) == [2])  # a save goes on in the background when the run has raised
    h.assert_same(grpo.weights(1, 2), h.original(task))  # no weight decay either
    with pytest.raises(RuntimeError, match=r"^step 2: three updates in a row were useless"):
        grpo(**settings, total_training_steps=4, ppo_mini_batch_size=2)


def test_single_responses_without_a_score_leave_their_group(grpo, reward, task):
    metrics = grpo(custom_reward_function=reward("return fine or None"), weight_decay=0.0)
    assert 0 < metrics["reward/none_frac"] < 1 and metrics["reward/none_frac"] * 16 % 1 == 0
    assert metrics["critic/score/mean"] == metrics["critic/score/min"] == 1.0
    assert metrics["reward/zero_std_frac"] == 1.0 and metrics["actor/grad_norm"] == 0.0  # the scored ones are equal
    assert h.distance(grpo.weights(1, 1), h.original(task)) == 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Side effects


@pytest.fixture(scope="module")
def usual(task, tmp_path_factory):
    """A run of two steps with the usual reward."""
    folder = tmp_path_factory.mktemp("usual")
    run = h.Runs(train_grpo, lambda out, **x: h.grpo_settings(task, out, **x), folder)
    run(total_training_steps=2)
    h.leave_distributed()
    return run


def test_what_a_reward_prints_and_starts_stays_out_of_the_way(grpo, usual, reward, tmp_path, capfd):
    path = reward(f"""
        print("from the reward", solution_str, flush=True)
        if calls == 5:
            pid = subprocess.Popen(["sleep", "300"], start_new_session=True).pid
            open({str(tmp_path / "pid")!r}, "w").write(str(pid))
        return fine
    """)
    metrics = grpo(custom_reward_function=path)
    out, err = capfd.readouterr()
    assert "from the reward" not in out and err.count("from the reward") == 3 + 16
    assert metrics["critic/score/mean"] == usual.lines(1)[0]["critic/score/mean"]
    child = int((tmp_path / "pid").read_text())
    launch.until(lambda: not launch.alive(child), otherwise="a process that the reward started outlived the run")


def test_scoring_overlaps_sampling(grpo, reward, monkeypatch, tmp_path):
    """No group is sampled before those before it are scored."""
    scored, batches = tmp_path / "scored", []

    def begin_batch(engine, original=hf.Engine._begin_batch):
        batches.append(3 + 4 * len(batches))  # three calls tried the reward
        launch.until(lambda: len(scored.read_text()) >= batches[-1])
        original(engine)

    monkeypatch.setattr(hf.Engine, "_begin_batch", begin_batch)
    path = reward(f"with open({str(scored)!r}, 'a') as file:\n    file.write('.')\nreturn fine")
    grpo(custom_reward_function=path, max_num_seqs=4)  # a group after the other
    assert batches == [3, 7, 11, 15] and len(scored.read_text()) == 19


# ---------------------------------------------------------------------------------------------------------------------
# What the metrics say


def test_components_are_averaged_by_data_source_and_acc_is_the_accuracy(grpo, reward, sources):
    path = reward("""
        if extra_info["index"] == 9:
            return None
        return {"score": 10 * fine - 1, "acc": fine, "length": extra_info["response_length"], "note": "a text"}
    """)
    metrics = grpo(custom_reward_function=path, **sources, test_freq=1, log_val_generations=16, max_response_length=24)
    # Training: 16 responses, of whose lengths the mean is known.
    rows = prompts_for_step([i % 2 for i in range(64)], 0, 4, 0)
    shares = {"odd": sum(rows) / 4, "even": 1 - sum(rows) / 4}
    assert 0 < shares["odd"] < 1
    mean = sum(share * metrics[f"reward/{source}/length"] for source, share in shares.items())
    assert mean == pytest.approx(metrics["response_length/mean"])
    accuracy = sum(share * metrics[f"reward/{source}/acc"] for source, share in shares.items())
    assert metrics["critic/score/mean"] == pytest.approx(10 * accuracy - 1)
    names = {f"reward/{source}/{name}" for source in ("even", "odd") for name in ("acc", "length")}
    assert {name for name in metrics if name.startswith(("reward/even", "reward/odd"))} == names
    # Evaluation, counted again; row 9 has no score.
    truths = [row["reward_model"]["ground_truth"] for row in pq.read_table(sources["val_files"][0]).to_pylist()]
    generations = h.read_jsonl(grpo.dir(1) / "generations.jsonl")
    fine = [h.parity(g["response"], truth) for g, truth in zip(generations, truths, strict=True)]
    assert 0 < sum(fine) < 16 and generations[9]["score"] is None
    assert metrics["val/accuracy"] == pytest.approx((sum(fine) - fine[9]) / 16)
    for source, start in (("even", 0), ("odd", 1)):
        own = [fine[i] for i in range(start, 16, 2) if i != 9]
        assert metrics[f"val-aux/{source}/acc/mean@1"] == pytest.approx(statistics.mean(own))
        expected = sum(10 * x - 1 for x in own) / 8
        assert metrics[f"val-core/{source}/reward/mean@1"] == pytest.approx(expected)
        assert metrics[f"val-aux/{source}/length/mean@1"] > 0


def test_several_functions_are_summed_with_their_weights(grpo, reward, task):
    flag = (f"{task.reward}::2", "rewards/length_penalty.py:compute_score:0.5")
    metrics = grpo(custom_reward_function=flag)
    right, short = (metrics[f"reward/arithmetic/{label}"] for label in ("reward", "length_penalty"))
    assert short == pytest.approx(-metrics["response_length/mean"] / 12) and 0 < right < 1
    assert metrics["critic/score/mean"] == pytest.approx(2 * right + 0.5 * short)
    assert metrics["critic/score/max"] <= 2 and metrics["critic/score/min"] >= -0.5


def test_a_batched_function_trains_like_a_single_one(grpo, usual, tmp_path):
    (tmp_path / "batched.py").write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos=None):\n"
        "    right = [(sum(map(ord, s)) + int(t)) % 2 for s, t in zip(solution_strs, ground_truths)]\n"
        "    return [{'score': r, 'size': len(solution_strs)} for r in right]\n"
    )
    batched = grpo(total_training_steps=2, custom_reward_function=(str(tmp_path / "batched.py"),))
    assert batched["reward/arithmetic/size"] == 4.0 and 0 < batched["critic/score/mean"] < 1
    h.assert_same(grpo.weights(1, 2), usual.weights(1, 2))


def test_the_default_reward_goes_by_data_source(grpo, sources, task, capfd):
    metrics = grpo(custom_reward_function=None, val_before_train=True, log_val_generations=16)
    assert "rewards: arithmetic: the reference answer scores 1, an empty one 0" in capfd.readouterr().out
    truths = [row["reward_model"]["ground_truth"] for row in pq.read_table(task.test).to_pylist()]
    generations = h.read_jsonl(grpo.dir(1) / "generations.jsonl")
    scores = [gsm8k.compute_score("", g["response"], t) for g, t in zip(generations, truths, strict=True)]
    assert metrics["val/accuracy"] == statistics.mean(scores)
    with pytest.raises(ValueError, match="fails on the first row of data source 'even'"):
        grpo(custom_reward_function=None, **sources)
    assert "data_source 'even' has no reward; known are openai/gsm8k, arithmetic" in capfd.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# KL in the reward

KL = {"k1": lambda d: d, "k3": lambda d: torch.exp(-d) + d - 1}


@pytest.mark.parametrize("kind", h.some(KL, "k3"))
def test_kl_in_reward_is_subtracted_from_the_score_of_the_whole_response(variants, task, monkeypatch, kind):
    sampled = []
    h.record_rounds(sampled, monkeypatch.setattr)
    settings = dict(temperature=0.7, lr=1e-2, total_training_steps=2, save_freq=1)
    variants(use_kl_in_reward=True, kl_coef=0.3, kl_penalty=kind, **settings)
    first, second = variants.lines(1)
    assert abs(first["actor/reward_kl_penalty"]) < 1e-7  # the policy is the reference
    assert first["critic/rewards/mean"] == pytest.approx(first["critic/score/mean"], abs=1e-6)

    tokenizer = AutoTokenizer.from_pretrained(task.model)
    truths = {}
    for row in pq.read_table(task.train).to_pylist():
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        truths[tuple(tokenizer(text)["input_ids"])] = row["reward_model"]["ground_truth"]
    folders = variants.dir(1) / "global_step_1" / "huggingface", task.model
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder).double() for folder in folders)

    @torch.no_grad()
    def logprobs(model, prompt, ids):
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.7
        return logits.log_softmax(-1)[torch.arange(len(ids)), ids]

    rewards, scores, token_means = [], [], []
    for prompt, group in sampled[1]:
        for completion in group:
            ids = completion.token_ids
            token_kl = KL[kind](logprobs(policy, prompt, ids) - logprobs(reference, prompt, ids))
            scores.append(h.parity(tokenizer.decode(ids, skip_special_tokens=True), truths[tuple(prompt)]))
            rewards.append(scores[-1] - 0.3 * token_kl.sum().item())
            token_means.append(token_kl.mean().item())
    assert second["actor/reward_kl_penalty"] == pytest.approx(statistics.mean(token_means), rel=1e-4)
    assert abs(second["actor/reward_kl_penalty"]) > 1e-3 and second["actor/reward_kl_penalty_coeff"] == 0.3
    assert second["critic/score/mean"] == statistics.mean(scores)
    for name, function in (("mean", statistics.mean), ("max", max), ("min", min)):
        assert second[f"critic/rewards/{name}"] == pytest.approx(function(rewards), rel=1e-4)

    plain = variants(**settings)
    variants(use_kl_in_reward=True, kl_coef=0.0, **settings)
    h.assert_same(variants.weights(2, 2), variants.weights(3, 2))
    assert (
        h.distance(variants.weights(1, 2), variants.weights(2, 2)) > 1e-4
    )  # advantages are of the rewards, not of the scores
    assert "actor/reward_kl_penalty" not in plain and plain["critic/rewards/mean"] == plain["critic/score/mean"]


def test_the_adaptive_coefficient_follows_its_formula_and_survives_an_interruption(variants, task):
    settings = dict(
        use_kl_in_reward=True,
        kl_coef=0.5,
        kl_penalty="k3",
        kl_ctrl_type="adaptive",
        kl_target=0.05,
        kl_horizon=40,
        lr=1e-2,
        total_training_steps=3,
        save_freq=1,
    )
    variants(**settings)
    lines = variants.lines(1)
    coefficient = 0.5
    for line in lines:
        assert line["actor/reward_kl_penalty_coeff"] == pytest.approx(coefficient, rel=1e-9)
        error = min(max(line["actor/reward_kl_penalty"] / 0.05 - 1, -0.2), 0.2)
        coefficient *= 1 + error * 16 / 40
    assert len({line["actor/reward_kl_penalty_coeff"] for line in lines}) == 3
    shutil.copytree(variants.dir(1), variants.dir(2))  # as if it had been interrupted in step 3
    shutil.rmtree(variants.dir(2) / "global_step_3")
    variants(**settings)
    assert h.timeless(variants.lines(2)) == h.timeless(lines)
    h.assert_same(variants.weights(2, 3), variants.weights(1, 3))

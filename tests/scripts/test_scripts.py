"""The scripts as a user runs them: from the command line, with every choice they offer, and with every mistake."""

import collections
import itertools
import json
import math
import re
import shutil
import statistics
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import helpers_scripts as h
import launch
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import tyro
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, BertConfig, GenerationConfig

import eval as evaluation
import sft
import train_dapo
import train_distill
import train_dpo
import train_grpo
import train_grpo_variants
import train_ppo
import train_prime
import train_reinforce
import train_reward
import train_self_distill
import train_self_distill_variants
from extras.demonstrations.encode import encode_demonstration
from extras.demonstrations.rows import read_demonstrations
from extras.engines import hf
from extras.judges import check_critic, check_second_model
from extras.lora import LoRA
from extras.variants import token_selection
from rl import flags
from rl.data.flags import Data
from rl.data.order import derive_seed
from rl.data.template import load_tokenizer
from rl.flags import build
from rl.model import load as models
from rl.model.checks import check_model
from rl.ranks import Ranks

pytestmark = pytest.mark.usefixtures("runs_here")

SCRIPTS = {
    "train_grpo": train_grpo,
    "train_grpo_variants": train_grpo_variants,
    "train_ppo": train_ppo,
    "train_dapo": train_dapo,
    "train_reinforce": train_reinforce,
    "train_dpo": train_dpo,
    "train_distill": train_distill,
    "train_self_distill": train_self_distill,
    "train_self_distill_variants": train_self_distill_variants,
    "train_prime": train_prime,
    "sft": sft,
    "train_reward": train_reward,
    "eval": evaluation,
}


@pytest.fixture
def grpo(task, tmp_path):
    return h.Runs(train_grpo, partial(h.grpo_settings, task), tmp_path)


@pytest.fixture
def variants(task, tmp_path):
    return h.Runs(train_grpo_variants, partial(h.grpo_settings, task), tmp_path)


def greedy(folder, file, count):
    """What transformers itself answers to the first prompts of a file, one at a time."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    answers = []
    for row in pq.read_table(file).to_pylist()[:count]:
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        best = model.generate(ids, do_sample=False, max_new_tokens=40)[0, ids.shape[1] :]
        answers.append(tokenizer.decode(best, skip_special_tokens=True))
    return answers


# ---------------------------------------------------------------------------------------------------------------------
# From the command line, end to end


@pytest.fixture(scope="module")
def trained(task, tmp_path_factory):
    """Folder of `python sft.py` for 24 steps: a model that answers, and its metrics."""
    folder = tmp_path_factory.mktemp("sft")
    settings = h.sft_settings(
        task,
        folder,
        total_training_steps=24,
        train_batch_size=32,
        val_files=(h.few_rows(task.sft, folder, 32),),
        test_freq=12,
        log_freq=10,
        save_freq=12,
    )
    output = launch.run_file("sft.py", *h.flags(settings))
    (folder / "output.txt").write_text(output)
    return folder


def test_sft_from_the_command_line(trained, task):
    lines = h.read_jsonl(trained / "metrics.jsonl")
    train, val = [x for x in lines if "train/loss" in x], [x for x in lines if "val/loss" in x]
    assert [x["step"] for x in train] == list(range(1, 25)) and [x["step"] for x in val] == [0, 12, 24]
    assert statistics.mean(x["train/loss"] for x in train[-5:]) < 0.6 * train[0]["train/loss"]
    assert val[2]["val/loss"] < val[1]["val/loss"] < val[0]["val/loss"]
    assert val[0]["val/loss"] == pytest.approx(math.log(80), rel=0.05)  # an untrained model of 80 tokens
    output = (trained / "output.txt").read_text()
    shown = re.findall(r"step (\d+)/24 \| loss (\d\.\d{4})", output)
    assert shown == [(str(x["step"]), f"{x['train/loss']:.4f}") for x in train if x["step"] in (10, 20, 24)]
    assert f"held out: loss {val[2]['val/loss']:.4f}" in output
    since = [float(x) for x in re.findall(r"^start \| .* s \| ([\d.]+) s since the command$", output, re.MULTILINE)]
    assert len(since) == 7 and since == sorted(since) and 0.5 < since[0]  # seconds: imports come first
    assert {p.name for p in trained.iterdir()} >= {"global_step_12", "global_step_24", "config.json", "metrics.jsonl"}
    config = json.loads((trained / "config.json").read_text())
    assert config["train_files"] == [task.sft] and config["lr"] == 4e-3
    # What stands for `auto` is recorded, for people and for a run that is resumed.
    state = json.loads((trained / "global_step_24" / "trainer_state.json").read_text())
    assert state["args"]["activation_checkpointing"] == state["args"]["max_token_len_per_gpu"] == "auto"
    for record in (config, state["memory"]):
        assert record["activation_checkpointing"] == "selective" and record["max_token_len_per_gpu"] == 16384
        assert record["optimizer_offload"] is record["param_offload"] is False
    cosine = [4e-3 * (1 + math.cos(math.pi * k / 24)) / 2 for k in range(24)]
    assert [x["train/lr"] for x in train] == pytest.approx(cosine)


@pytest.mark.parametrize(
    ("script", "settings"),
    h.some_rows([(sft, h.sft_settings), (train_reward, h.reward_settings)], (train_reward, h.reward_settings)),
)
def test_without_log_freq_only_the_last_step_is_printed(script, settings, task, tmp_path, capsys):
    script.main(build(script.Args, **settings(task, tmp_path, total_training_steps=3, log_freq=0)))
    assert re.findall(r"^step (\d)/3 ", capsys.readouterr().out, re.MULTILINE) == ["3"]
    assert [x["step"] for x in h.read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_grpo_runs_where_vllm_cannot_be_imported(task, trained, tmp_path):
    stub = tmp_path / "stub" / "vllm"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text('raise ImportError("there is no vllm here")\n')
    path = f"{stub.parent}:{launch.ROOT}"
    blocked = launch.start("-c", "import vllm", PYTHONPATH=path)
    assert "there is no vllm here" in launch.finish(blocked) and blocked.returncode == 1
    settings = h.grpo_settings(
        task,
        tmp_path / "{project_name}-{experiment_name}",
        model=trained / "global_step_24" / "huggingface",
        max_response_length=40,
        val_before_train=True,
        test_freq=2,
        log_samples_freq=1,
        log_val_generations=16,
        project_name="glass",
        experiment_name="hf",
    )

    output = launch.run("train_grpo.py", *h.flags(settings), PYTHONPATH=path)

    folder = tmp_path / "glass-hf"
    lines = h.read_jsonl(folder / "metrics.jsonl")
    train = [x for x in lines if "actor/loss" in x]
    assert [x["step"] for x in lines] == [0, 1, 2, 2] and [x["step"] for x in train] == [1, 2]
    for x in train:
        assert x["rollout/logprob_gap_max"] < 1e-4 and x["rollout/logprob_gap_mean"] < 1e-5
        assert x["actor/grad_norm"] > 0 and x["actor/lr"] == 1e-3 and x["actor/skipped_updates"] == 0
        assert x["perf/total_num_tokens"] == 4 * 4 * (30 + x["response_length/mean"])
        phases = {k for k in x if k.startswith("timing_s/")} - {"timing_s/step", "timing_s/testing"}
        assert phases == {
            f"timing_s/{k}" for k in "update_weights gen verify reward batch adv update_actor".split()
        }  # neither old_log_prob nor ref
        assert sum(v for k, v in x.items() if k.startswith("timing_s/") and k != "timing_s/step") <= x["timing_s/step"]
    # Held-out accuracy, counted again from what was generated with the final weights.
    generations = [g for g in h.read_jsonl(folder / "generations.jsonl") if (g["kind"], g["step"]) == ("val", 2)]
    assert len(generations) == 16
    truths = [row["reward_model"]["ground_truth"] for row in pq.read_table(task.test).to_pylist()]
    scores = [h.parity(g["response"], truth) for g, truth in zip(generations, truths, strict=True)]
    assert [g["score"] for g in generations] == scores and 0 < sum(scores) < 16
    assert lines[-1]["val/accuracy"] == lines[-1]["val-core/arithmetic/reward/mean@1"] == sum(scores) / 16
    assert f"step 2 | held out: accuracy {sum(scores) / 16:.4f}\n" in output
    untrained = [g["response"] for g in h.read_jsonl(folder / "generations.jsonl") if g["step"] == 0]
    assert untrained[:3] == greedy(settings["model"], task.test, 3)
    # What the console shows.
    assert "new run, steps 1-2, 1 rank(s), 4 prompts x 4 responses and 1 update(s) per step\n" in output
    for k in (1, 2):
        assert re.search(rf"^step {k}/2 \| reward {train[k - 1]['critic/score/mean']:.3f} \| ", output, re.MULTILINE)
    assert output.count("  response: ") == 2 and output.count("<|im_start|>user") == 2
    config = json.loads((folder / "config.json").read_text())
    assert config["engine"] == "hf" and config["max_response_length"] == 40
    assert (folder / "global_step_2" / "huggingface" / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def base(task, tmp_path_factory):
    """A model whose answers differ from prompt to prompt. As base models do, it ends documents with <|endoftext|>,
    while its chat template ends turns with <|im_end|>: the task's, with larger weights and other stops.
    """
    folder = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(task.model, folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    tokenizer.eos_token = "<|endoftext|>"
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lively(task, base, tmp_path_factory):
    """What sft.py exports after a short step on messages: a model that answers as `base` and ends with <|im_end|>."""
    folder = tmp_path_factory.mktemp("lively")
    demonstrations = pq.read_table(task.sft).to_pylist()
    rows = [{"messages": row["prompt"] + [{"role": "assistant", "content": row["response"]}]} for row in demonstrations]
    pq.write_table(pa.Table.from_pylist(rows), folder / "messages.parquet")
    changes = dict(model=base, train_files=(folder / "messages.parquet",), total_training_steps=1, lr=1e-6)
    output = launch.run_file("sft.py", *h.flags(h.sft_settings(task, folder / "run", **changes)))
    assert "\nthe data ends answers with <|im_end|>, so the exported generation config does too\n" in output
    return folder / "run" / "global_step_1" / "huggingface"


GENERATE = dict(max_prompt_length=32, max_response_length=40)


def reward(path):
    """Flags that score with one function in one process."""
    return dict(custom_reward_function=(str(path),), reward_workers=1)


@pytest.mark.parametrize("engine", h.some(["hf", "vllm"], "vllm" if find_spec("vllm") else "hf"))
def test_eval_from_the_command_line(task, base, lively, tmp_path, engine):
    if engine == "vllm":
        h.needs_vllm()
    settings = dict(model=lively, val_files=(task.test,), engine=engine, **reward(task.reward), **GENERATE)
    output = launch.run_file("eval.py", *h.flags(settings | {"output": tmp_path / "sub" / "out.jsonl"}))
    written = h.read_jsonl(tmp_path / "sub" / "out.jsonl")
    rows = pq.read_table(task.test).to_pylist()
    assert [x["row_index"] for x in written] == list(range(16))
    assert [x["ground_truth"] for x in written] == [row["reward_model"]["ground_truth"] for row in rows]
    scores = [h.parity(x["response"], x["ground_truth"]) for x in written]
    assert [x["score"] for x in written] == scores and 0 < sum(scores) < 16
    assert len({x["response"] for x in written}) > 8  # the model answers the question, whatever it answers
    phases = ["imports", "imports of vLLM", "engine", "first tokens"] if engine == "vllm" else ["imports", "engine"]
    assert re.findall(r"^start \| (\D+) [\d.]+ s \|", output, re.MULTILINE) == phases
    assert f"accuracy                     {sum(scores) / 16:.4f}" in output
    assert "pass@" not in output and "maj@" not in output
    assert [x["response"] for x in written[:6]] == greedy(lively, task.test, 6)
    # vLLM and transformers stop at <|im_end|>, which the base model does not know as an end.
    assert GenerationConfig.from_pretrained(lively).eos_token_id == [0, 2]
    endless, [answer] = greedy(base, task.test, 1)[0], greedy(lively, task.test, 1)
    assert answer == written[0]["response"] and endless.startswith(answer) and len(endless) > len(answer)


def test_help_from_the_command_line():
    text = launch.run_file("train_grpo.py", "--help")
    assert "--rollout-n" in text and "GRPO: sample a group of responses" in text and "--adv-estimator" not in text
    assert "--adv-estimator" in launch.run_file("train_grpo_variants.py", "--help")


# ---------------------------------------------------------------------------------------------------------------------
# Algorithms


def test_every_advantage_estimator_trains_and_relates_to_the_others_as_its_formula_says(variants):
    names = [name for name in train_grpo_variants.ADVANTAGES if name != "gdpo"]  # which needs parts
    runs = {
        name: variants(adv_estimator=name, total_training_steps=1, max_response_length=24, save_freq=0)
        for name in names
    }
    assert all(math.isfinite(m["actor/loss"]) and m["actor/grad_norm"] > 0 for m in runs.values())
    norm = {name: m["actor/grad_norm"] for name, m in runs.items()}
    score = runs["grpo"]["critic/score/mean"]  # the same responses for all: seed 0, step 0
    assert all(m["critic/score/mean"] == score for m in runs.values()) and 0 < score < 1
    assert norm["rloo"] == pytest.approx(norm["dr_grpo"] * 4 / 3, rel=1e-4)  # G / (G - 1)
    assert norm["gpg"] == pytest.approx(norm["dr_grpo"] / score, rel=1e-4)  # rewards are 0 or 1
    scores = runs["grpo_batch"]["critic/advantages/max"] / runs["dr_grpo"]["critic/advantages/max"]
    assert norm["grpo_batch"] == pytest.approx(norm["dr_grpo"] * scores, rel=1e-4)
    assert scores == pytest.approx(1 / math.sqrt(score * (1 - score) * 16 / 15), rel=1e-4)  # 16 responses
    for a, b in itertools.combinations(names, 2):
        assert abs(norm[a] - norm[b]) > 1e-3 * norm[a], f"{a} and {b} do the same"


PARTS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    total = sum(map(ord, solution_str)) + int(ground_truth)
    return {"score": total % 2 + 10 * (total % 3), "parity": total % 2, "third": 10 * (total % 3)}
"""


def test_gdpo_compares_the_parts_of_a_score(variants, tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    common = dict(custom_reward_function=(str(tmp_path / "parts.py"),), total_training_steps=1, lr=0.0, save_freq=0)
    both = dict(adv_estimator="gdpo", gdpo_reward_keys=("parity", "third"))
    runs = [variants(**common, **x) for x in (both, both | dict(gdpo_reward_weights=(1.0, 0.0)), both, {})]
    norms = [x["actor/grad_norm"] for x in runs]
    assert norms[0] == norms[2] > 0.05 and len({round(x, 4) for x in norms}) == 3
    only = variants(**common | dict(adv_estimator="gdpo", gdpo_reward_keys=("parity",)))
    assert only["actor/grad_norm"] == pytest.approx(norms[1], rel=1e-6)  # the other part weighs nothing
    h.leave_distributed()
    with pytest.raises(
        ValueError, match="--gdpo-reward-keys style: scores of the first rows of .* have parity, third;"
    ):
        variants(**common | dict(adv_estimator="gdpo", gdpo_reward_keys=("style",)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(adv_estimator="gdpo"), "--adv-estimator gdpo compares parts .* name them in --gdpo-reward-keys"),
        (dict(gdpo_reward_keys=("a",)), r"--gdpo-reward-keys \('a',\) are for --adv-estimator gdpo; add it"),
        (
            dict(adv_estimator="gdpo", gdpo_reward_keys=("a", "b"), gdpo_reward_weights=(1.0,)),
            r"--gdpo-reward-weights \(1.0,\): give one for each of --gdpo-reward-keys \('a', 'b'\)",
        ),
        (dict(adv_estimator="gdpo", gdpo_reward_keys=("a",), use_kl_in_reward=True), "--use-kl-in-reward .* gdpo; use"),
        (dict(adv_estimator="max_rl", use_kl_in_reward=True), "--use-kl-in-reward .* max_rl; use --use-kl-loss"),
        (dict(shuffle_mini_batches=True), "--shuffle-mini-batches needs several: lower --ppo-mini-batch-size"),
        (dict(advantage_by="turn", use_kl_in_reward=True), "--advantage-by turn does not go with gdpo"),
        (dict(ref_update_steps=2), "--ref-update-steps 2 needs --use-kl-loss or --use-kl-in-reward"),
        (dict(loss_mode="luspo"), "--loss-mode luspo needs --loss-agg-mode seq-mean-token-sum"),
        (dict(loss_mode="gspo"), "--loss-mode gspo needs --loss-agg-mode seq-mean-token-mean"),
    ],
)
def test_what_estimators_and_losses_need_is_asked_for(variants, settings, words):
    with pytest.raises(ValueError, match=words):
        variants(**settings)
    assert not variants.dir(1).exists()


def test_only_the_most_uncertain_tokens_teach(variants, monkeypatch):
    """A fifth of the tokens of the step has an advantage, those of the largest entropies, in any micro-batches."""
    seen = []

    def record(batch, *args, take_rows=train_grpo_variants.take_rows):
        seen.append(batch)
        return take_rows(batch, *args)

    monkeypatch.setattr(train_grpo_variants, "take_rows", record)
    entropies = []

    def entropies_of(*args, sampling, fixed=token_selection.fixed_entropies):
        assert sampling.temperature == 0.7  # that of the policy that is trained
        entropies.append(fixed(*args, sampling=sampling))
        return entropies[-1]

    monkeypatch.setattr(token_selection, "fixed_entropies", entropies_of)
    settings = dict(total_training_steps=1, adv_estimator="dr_grpo", temperature=0.7, save_freq=0)
    one = variants(top_entropy_quantile=0.2, **settings)
    few = variants(top_entropy_quantile=0.2, **settings, ppo_max_token_len_per_gpu=44)
    whole = variants(**settings)
    assert few["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-4)
    assert 0 < one["actor/grad_norm"] != pytest.approx(whole["actor/grad_norm"], rel=1e-2)
    batch, entropy, mask = seen[0], entropies[0], seen[0].response_mask.bool()
    left = sorted(entropy[mask].tolist(), reverse=True)[: int(0.2 * mask.sum())]
    expected = (entropy >= left[-1]) & mask & (whole_advantages(seen[-1], batch) != 0)
    assert torch.equal(batch.advantages != 0, expected) and 10 < expected.sum() < 0.3 * mask.sum()


def whole_advantages(other, batch):
    """The advantages of another run on the same responses."""
    assert torch.equal(other.input_ids, batch.input_ids)
    return other.advantages


@pytest.mark.parametrize("mode", h.some(["clip_cov", "kl_cov"], "kl_cov"))
def test_losses_of_chosen_tokens_choose_over_a_mini_batch(variants, monkeypatch, mode):
    """In any micro-batches, with one update per step too, where `kl_cov` is the plain policy gradient."""
    seen = []

    def record(flags, mode, batch, updates, *rest, seed, choose=token_selection.choose, **options):
        assert seed == derive_seed(7, 0)  # of run and step
        options["seed"] = seed
        seen.append((choose(flags, mode, batch, updates, *rest, **options), updates))
        return seen[-1][0]

    monkeypatch.setattr(token_selection, "choose", record)
    rule = dict(
        clip_cov_ratio=0.1,
        clip_cov_lb=0.0,
        kl_cov_ratio=0.1,
        ppo_kl_coef=3.0,
        total_training_steps=1,
        seed=7,
        save_freq=0,
    )
    several = rule | dict(ppo_mini_batch_size=2, loss_mode=mode)
    one, few = variants(**several), variants(**several, ppo_max_token_len_per_gpu=44)
    assert few["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-4)
    assert few["actor/pg_clipfrac"] == one["actor/pg_clipfrac"]
    (batch, updates), (other, _) = seen
    assert torch.equal(batch.columns["chosen"], other.columns["chosen"]) and len(updates) == 2
    for update in updates:
        own = batch.response_mask.bool() & torch.isin(batch.rows, torch.tensor(update.rows))[:, None]
        logp, advantage = batch.old_logp[own].double(), batch.advantages[own].double()
        cov, chosen = (logp - logp.mean()) * (advantage - advantage.mean()), batch.columns["chosen"][own]
        assert chosen.sum() == int(0.1 * own.sum()) > 5
        assert cov[chosen].min() >= (0 if mode == "clip_cov" else cov[~chosen].max()) - 1e-6
    plain = variants(**several | dict(loss_mode="ppo_clip"))
    assert plain["actor/grad_norm"] != pytest.approx(one["actor/grad_norm"], rel=1e-2)
    whole, gradient = (variants(**rule, loss_mode=name)["actor/grad_norm"] for name in (mode, "policy_gradient"))
    assert (whole == pytest.approx(gradient, rel=1e-4)) == (mode == "kl_cov")


def test_a_step_of_grpo_is_what_plain_transformers_computes(grpo, task, monkeypatch, in_double):
    rounds = []
    h.record_rounds(rounds, monkeypatch.setattr)
    settings = dict(temperature=0.7, grad_clip=0.05, weight_decay=0.1, lr=1e-3, total_training_steps=1)
    metrics = grpo(**settings)
    [sampled] = rounds

    truths = {}
    tokenizer, model = AutoTokenizer.from_pretrained(task.model), AutoModelForCausalLM.from_pretrained(task.model)
    model = model.double()
    for row in pq.read_table(task.train).to_pylist():
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        truths[tuple(tokenizer(text)["input_ids"])] = row["reward_model"]["ground_truth"]
    num_tokens = sum(len(c.token_ids) for _, group in sampled for c in group)
    total = 0.0
    for prompt, group in sampled:
        texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in group]
        rewards = [h.parity(text, truths[tuple(prompt)]) for text in texts]
        for c, reward in zip(group, rewards, strict=True):
            advantage = (reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)
            logits = model(torch.tensor([prompt + c.token_ids])).logits[0, len(prompt) - 1 : -1] / 0.7
            logp = logits.log_softmax(-1)[torch.arange(len(c.token_ids)), c.token_ids]
            total = total - advantage * logp.sum() / num_tokens
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
    torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1).step()

    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5) and norm > 0.1
    assert h.distance(grpo.weights(1, 1), dict(model.named_parameters())) < 2e-6
    assert metrics["perf/total_num_tokens"] == num_tokens + 16 * 30


LOSS_MODES = [name for name in train_grpo_variants.LOSSES if name != "luspo"]  # gspo with another mean


@pytest.mark.thorough
def test_on_policy_all_surrogates_have_the_same_gradient(variants):
    runs = [variants(loss_mode=m, loss_agg_mode="seq-mean-token-mean", total_training_steps=1) for m in LOSS_MODES]
    assert all(math.isfinite(m["actor/loss"]) for m in runs)
    assert [m["actor/grad_norm"] for m in runs] == pytest.approx([runs[0]["actor/grad_norm"]] * len(runs), rel=1e-4)
    chosen = {"kl_cov"}  # which chooses the largest covariances, wherever they are
    assert {mode for mode, m in zip(LOSS_MODES, runs, strict=True) if m["actor/pg_clipfrac"] != 0} == chosen
    assert all(m["actor/ppo_kl"] == 0 for m in runs)
    assert runs[0]["actor/grad_norm"] > 0.1


def test_off_policy_every_surrogate_goes_its_own_way(variants):
    tv, kl = (dict(clip_ratio_low=x, clip_ratio_high=x) for x in (0.003, 1e-4))  # tokens have probabilities of 1/80
    chosen = dict(clip_cov_ratio=0.2, clip_cov_lb=-10, kl_cov_ratio=0.2)
    narrow = {"dppo_tv": tv, "dppo_kl": kl, "clip_cov": chosen, "kl_cov": chosen}
    runs = [
        variants(
            loss_mode=mode,
            loss_agg_mode="seq-mean-token-mean",
            total_training_steps=1,
            ppo_epochs=4,
            lr=1e-2,
            adv_estimator="dr_grpo",
            save_freq=0,
            **narrow.get(mode, {}),
        )
        for mode in LOSS_MODES
    ]
    assert all(math.isfinite(m["actor/loss"]) and m["actor/ppo_kl"] != 0 for m in runs)
    clipping = {mode for mode, m in zip(LOSS_MODES, runs, strict=True) if m["actor/pg_clipfrac"] > 0}
    assert clipping == {"ppo_clip", "dppo_tv", "dppo_kl", "gspo", "cispo", "gmpo", "clip_cov", "kl_cov"}
    for (a, left), (b, right) in itertools.combinations(zip(LOSS_MODES, runs, strict=True), 2):
        assert left["actor/grad_norm"] != pytest.approx(right["actor/grad_norm"], rel=1e-4), f"{a} and {b} do the same"


def test_aggregation_modes_weigh_the_same_terms_differently(variants):
    modes = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
    runs = {m: variants(loss_agg_mode=m, total_training_steps=1, max_response_length=24, save_freq=0) for m in modes}
    norm = {mode: m["actor/grad_norm"] for mode, m in runs.items()}
    length = runs["token-mean"]["response_length/mean"]
    assert norm["seq-mean-token-sum"] == pytest.approx(norm["token-mean"] * length, rel=1e-4)
    assert norm["seq-mean-token-sum-norm"] == pytest.approx(norm["seq-mean-token-sum"] / 24, rel=1e-4)
    assert abs(norm["seq-mean-token-mean"] - norm["token-mean"]) > 1e-3
    scaled = variants(
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=6.0,
        total_training_steps=1,
        max_response_length=24,
    )
    assert scaled["actor/grad_norm"] == pytest.approx(norm["seq-mean-token-sum"] / 6, rel=1e-4)


@pytest.mark.thorough
def test_kl_loss_pulls_towards_the_reference_and_is_part_of_the_loss(grpo):
    strong = grpo(use_kl_loss=True, kl_loss_coef=100.0, total_training_steps=3)
    weak = grpo(use_kl_loss=True, kl_loss_coef=0.0, total_training_steps=3)
    without = grpo(total_training_steps=3)
    lines = grpo.lines(1)
    assert abs(lines[0]["actor/kl_loss"]) < 1e-7 < lines[1]["actor/kl_loss"]  # the first step is the reference
    for x in lines:
        assert x["actor/loss"] == pytest.approx(x["actor/pg_loss"] + 100 * x["actor/kl_loss"], abs=1e-5)
        assert "timing_s/ref" in x
    assert strong["actor/kl_loss"] < 0.75 * weak["actor/kl_loss"]
    h.assert_same(grpo.weights(2, 3), grpo.weights(3, 3))
    assert "actor/kl_loss" not in without


@pytest.mark.thorough
def test_kl_estimators(variants):
    kinds = ["k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+"]
    # The second epoch of a first step: the policy has moved, by the same amount for all kinds while the weight is 0.
    runs = {
        kind: variants(use_kl_loss=True, kl_loss_type=kind, kl_loss_coef=0.0, ppo_epochs=2, total_training_steps=1)
        for kind in kinds
    }
    kl = {kind: m["actor/kl_loss"] for kind, m in runs.items()}
    assert kl["k3"] == kl["low_var_kl"] == kl["k3+"] > 0 and kl["k1"] == kl["k1+"]
    assert kl["abs"] > abs(kl["k1"]) and kl["k2"] > 0
    assert len({round(kl[kind], 9) for kind in ("k1", "k2", "k3", "abs")}) == 4
    weighted = {}
    for kind in ("k3", "k3+", "k2"):
        variants(use_kl_loss=True, kl_loss_type=kind, kl_loss_coef=50.0, ppo_epochs=2, total_training_steps=1)
        weighted[kind] = variants.weights(variants.count, 1)
    h.assert_same(weighted["k3+"], weighted["k2"])  # "+": the gradient of k2
    assert h.distance(weighted["k3"], weighted["k2"]) > 1e-6


def test_a_reference_that_follows_is_the_policy_of_the_step(variants):
    """With a refresh at every step the KL is measured from the policy that starts it, 0 before its first update."""
    common = dict(use_kl_loss=True, total_training_steps=3, lr=3e-3)
    variants(**common, ref_update_steps=1)
    variants(**common, ref_update_steps=2)
    variants(**common)
    always, second, never = ([x["actor/kl_loss"] for x in variants.lines(i)] for i in (1, 2, 3))
    assert always == pytest.approx([0, 0, 0], abs=1e-9)
    assert second[:2] == never[:2] and second[1] > 1e-6 and second[2] == pytest.approx(0, abs=1e-9) and never[2] > 1e-6
    saved = [h.saved_state(variants.dir(i) / "global_step_3") for i in (1, 3)]
    assert ["reference/model/model.norm.weight" in state for state in saved] == [True, False]


@pytest.mark.thorough
def test_entropy_bonus(variants):
    runs = {c: variants(entropy_coeff=c, total_training_steps=6, lr=3e-3) for c in (0.0, 0.5, -0.5)}
    first = variants.lines(2)[0]
    assert first["actor/loss"] == pytest.approx(first["actor/pg_loss"] - 0.5 * first["actor/entropy"], rel=1e-5)
    assert variants.lines(1)[0]["actor/loss"] == variants.lines(1)[0]["actor/pg_loss"]
    assert runs[0.5]["actor/entropy"] > runs[0.0]["actor/entropy"] + 0.01
    assert runs[-0.5]["actor/entropy"] < runs[0.0]["actor/entropy"] - 0.01


def test_corrections_of_an_exact_engine_change_nothing_and_tight_ones_leave_nothing(grpo):
    plain = grpo(total_training_steps=1)
    level = dict(total_training_steps=1, rollout_mask="sequence")  # tests/formulas has each level
    masked = grpo(**level)
    assert masked["actor/grad_norm"] == plain["actor/grad_norm"]
    assert masked["rollout_corr/rollout_rs_masked_fraction"] == 0 and masked["rollout_corr/weight_mean"] == 1
    nothing = grpo(**level, rollout_mask_threshold_lower=1.5)  # true ratios are 1
    assert nothing["actor/grad_norm"] == 0 and nothing["rollout_corr/rollout_rs_masked_fraction"] == 1
    moving = dict(total_training_steps=1, ppo_epochs=4, lr=1e-2)
    kept, left_out = (grpo(**moving, off_policy_mask_threshold=x) for x in (100.0, 0.01))
    assert (
        kept["rollout_corr/rollout_rs_masked_fraction"] == 0 < left_out["rollout_corr/rollout_rs_masked_fraction"] < 1
    )


@pytest.mark.parametrize("level", h.some(["token", "sequence"], "token"))
def test_rollout_importance_weights(grpo, level):
    plain = grpo(total_training_steps=1)
    capped = grpo(total_training_steps=1, rollout_is=level, rollout_is_threshold=0.5)  # true weights are 1: all capped
    for name in ("actor/pg_loss", "actor/grad_norm"):
        assert capped[name] == pytest.approx(0.5 * plain[name], rel=1e-5, abs=1e-8)
    free = grpo(total_training_steps=1, rollout_is=level)
    assert free["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-4)


WAYS = [dict(top_p=0.7), dict(temperature=0.7, top_p=0.95, top_k=5), dict(min_p=0.4)]


@pytest.mark.parametrize("way", h.some(WAYS, WAYS[1]), ids=str)
def test_the_trainer_has_the_log_probs_of_the_tokens_that_are_sampled_from(grpo, way):
    """On policy, the ratio of trainer to engine is 1, also after an update, with the entropy of fewer tokens."""
    both = dict(use_kl_loss=True, ppo_mini_batch_size=2, lr=1e-3, total_training_steps=2)
    metrics, whole = grpo(**both, **way, save_freq=0), grpo(**both, save_freq=0)
    for name in ("mean", "min", "max", "eff_sample_size"):
        assert metrics[f"rollout_corr/rollout_is_{name}"] == pytest.approx(1, abs=1e-4)
    assert metrics["rollout/logprob_gap_max"] < 1e-4 and metrics["actor/kl_loss"] > 0
    assert metrics["actor/entropy"] < whole["actor/entropy"] - 0.05


def test_several_responses_to_each_held_out_prompt(grpo):
    """Counted again from what the run has written down."""
    settings = dict(test_freq=1, total_training_steps=1, lr=0.0, log_val_generations=1000)
    metrics = grpo(**settings, val_n=4, val_temperature=1.2, val_top_k=8)
    generations = [x for x in h.read_jsonl(grpo.dir(1) / "generations.jsonl") if x["step"] == 1]
    groups = collections.defaultdict(list)
    for x in generations:
        groups[x["prompt"]].append(x["score"])
    assert len(groups) > 10 and {len(scores) for scores in groups.values()} == {4}
    assert any(len(set(scores)) > 1 for scores in groups.values())
    mean, best = (statistics.mean(f(scores) for scores in groups.values()) for f in (statistics.mean, max))
    assert metrics["val-core/arithmetic/reward/mean@4"] == metrics["val/accuracy"] == pytest.approx(mean)
    assert metrics["val-core/arithmetic/reward/best@4/mean"] == pytest.approx(best) and best > mean
    assert 0 <= metrics["val-core/arithmetic/reward/maj@4/mean"] <= best


@pytest.mark.thorough
def test_an_engine_that_is_too_sure_is_corrected_and_reported(grpo, monkeypatch):
    plain = grpo(total_training_steps=1)

    def step(engine, original=hf.Engine.step):
        return [replace(c, logprobs=[x + math.log(2) for x in c.logprobs]) for c in original(engine)]

    monkeypatch.setattr(hf.Engine, "step", step)
    with pytest.raises(RuntimeError, match=r"log-probs differ by 6\.93e-01 on average"):
        grpo(total_training_steps=1)
    uncorrected = grpo(total_training_steps=1, max_logprob_gap=5.0)
    assert uncorrected["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-6)
    corrected = grpo(total_training_steps=1, max_logprob_gap=5.0, rollout_is="token")
    assert corrected["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"] / 2, rel=1e-5)
    for name in ("rollout/logprob_gap_mean", "rollout/logprob_gap_max", "rollout_corr/kl"):
        assert corrected[name] == pytest.approx(math.log(2), rel=1e-5), name
    for name in ("mean", "min", "max"):
        assert corrected[f"rollout_corr/rollout_is_{name}"] == pytest.approx(0.5, rel=1e-4), name
    assert corrected["training/rollout_probs_diff_mean"] > 1e-3 > plain["training/rollout_probs_diff_mean"]


def test_gradients_are_clipped_to_their_global_norm(grpo, task):
    # Adam divides by |g| + 1e-8: only gradients far below that move a weight by less than the learning rate.
    free = grpo(total_training_steps=1, weight_decay=0.0)
    clipped = grpo(total_training_steps=1, weight_decay=0.0, grad_clip=1e-10)
    assert clipped["actor/grad_norm"] == free["actor/grad_norm"] > 0.1  # reported as it was
    assert h.distance(grpo.weights(1, 1), h.original(task)) == pytest.approx(1e-3, rel=0.01)
    assert 0 < h.distance(grpo.weights(2, 1), h.original(task)) < 1e-5


def test_an_update_that_is_not_finite_is_skipped_and_three_in_a_row_end_the_run(grpo, task, monkeypatch):
    bad = set()
    norms = itertools.count()

    def clip(model, max_norm, original=train_grpo.clip_grad_norm):
        norm = original(model, max_norm)
        return math.inf if next(norms) in bad else norm

    monkeypatch.setattr(train_grpo, "clip_grad_norm", clip)
    bad |= {0}
    short = dict(max_response_length=4)
    metrics = grpo(total_training_steps=1, weight_decay=0.0, **short)
    assert metrics["actor/skipped_updates"] == 1 and h.distance(grpo.weights(1, 1), h.original(task)) == 0
    bad |= {2, 3, 5, 6, 8}  # of updates 1 to 8: never three in a row
    grpo(total_training_steps=4, ppo_epochs=2, save_freq=0, **short)
    assert [x["actor/skipped_updates"] for x in grpo.lines(2)] == [1, 1, 2, 1]
    bad |= {10, 11, 12}
    with pytest.raises(
        RuntimeError,
        match=r"step 4: three updates in a row were useless, .* gradient norm inf over \d+ tokens",
    ):
        grpo(total_training_steps=5, **short)


def test_old_logprobs_are_computed_only_where_they_differ(grpo):
    on = grpo(total_training_steps=1)
    spelled = grpo(total_training_steps=1, ppo_mini_batch_size=None)
    assert "timing_s/old_log_prob" not in on and on["actor/ppo_kl"] == on["actor/pg_clipfrac"] == 0
    h.assert_same(grpo.weights(1, 1), grpo.weights(2, 1))
    assert spelled["actor/loss"] == on["actor/loss"]
    for changes in (dict(ppo_epochs=2), dict(ppo_mini_batch_size=3)):
        off = grpo(total_training_steps=1, **changes)
        assert off["timing_s/old_log_prob"] > 0 and off["actor/ppo_kl"] != 0
        assert h.distance(grpo.weights(1, 1), grpo.weights(grpo.count, 1)) > 1e-4
    # A first epoch is on policy: two epochs with a learning rate of 0 report the loss and the norm of one.
    still = grpo(total_training_steps=1, ppo_epochs=2, lr=0.0)
    assert still["actor/grad_norm"] == pytest.approx(on["actor/grad_norm"], rel=1e-5)
    assert still["actor/loss"] == pytest.approx(on["actor/loss"], abs=1e-6)
    assert still["actor/ppo_kl"] == pytest.approx(0)


@pytest.mark.thorough
def test_denominators_belong_to_the_mini_batch(variants):
    # Nothing moves at a learning rate of 0, and every mini-batch weighs its own tokens only.
    metrics = variants(total_training_steps=1, ppo_mini_batch_size=2, entropy_coeff=1.0, lr=0.0)
    assert metrics["actor/entropy"] > 4
    assert metrics["actor/loss"] == pytest.approx(metrics["actor/pg_loss"] - metrics["actor/entropy"], rel=1e-3)
    by_sequence = variants(
        total_training_steps=1,
        ppo_mini_batch_size=2,
        entropy_coeff=1.0,
        lr=0.0,
        loss_agg_mode="seq-mean-token-mean",
    )
    difference = by_sequence["actor/pg_loss"] - by_sequence["actor/loss"]
    assert difference == pytest.approx(by_sequence["actor/entropy"], rel=1e-2)


def test_memory_flags_do_not_change_the_numbers(variants, in_double, task):
    settings = dict(ppo_epochs=2, ppo_mini_batch_size=3, use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)
    settings |= dict(total_training_steps=1)
    expected = variants(**settings)
    assert h.distance(variants.weights(1, 1), h.original(task)) > 1e-3
    for changes in (dict(activation_checkpointing="none"), dict(ppo_max_token_len_per_gpu=88)):
        metrics = variants(**settings, **changes)
        assert h.distance(variants.weights(1, 1), variants.weights(variants.count, 1)) < 1e-6
        for name in ("actor/loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "actor/pg_clipfrac"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-9), name


def test_the_learning_rate_follows_its_schedule(grpo):
    short = dict(total_training_steps=4, max_response_length=4, rollout_n=2)
    grpo(**short, lr_warmup_steps=2, save_freq=0)
    assert [x["actor/lr"] for x in grpo.lines(1)] == pytest.approx([0.5e-3, 1e-3, 1e-3, 1e-3])
    grpo(**short, lr_scheduler_type="cosine", save_freq=0)
    expected = [1e-3 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
    assert [x["actor/lr"] for x in grpo.lines(2)] == pytest.approx(expected)


def test_epochs_are_counted_in_whole_batches():
    assert Data(total_epochs=2).count_steps(64, 20) == 6  # 3 batches of 20, twice
    assert Data(total_epochs=2, total_training_steps=5).count_steps(64, 20) == 5


def test_uneven_batches_on_two_ranks_give_what_one_rank_gives(task, tmp_path, monkeypatch, in_double):
    # 5 prompts in mini-batches of 2, 2 and 1, on two ranks; responses depend on the prompt alone.
    changes = dict(train_batch_size=5, ppo_mini_batch_size=2, rollout_n=3, lr=1e-4, total_training_steps=1)
    two = {"script": "train_grpo", "settings": h.grpo_settings(task, tmp_path / "two", **changes), "comparable": True}
    status, output = launch.run_in_turn(tmp_path / "runs.json", two, nproc=2)
    assert status == 0, output
    monkeypatch.setattr(hf.Engine, "step", h.step_by_prompt())
    train_grpo.main(build(train_grpo.Args, **h.grpo_settings(task, tmp_path / "one", **changes)))
    lines = {name: h.timeless(h.read_jsonl(tmp_path / name / "metrics.jsonl")) for name in ("one", "two")}
    assert [x["step"] for x in lines["two"]] == [1]
    for one, two in zip(lines["one"], lines["two"], strict=True):
        assert two == pytest.approx(one, rel=1e-5, abs=1e-6)
        assert one["actor/grad_norm"] > 0.1 and one["actor/ppo_kl"] != 0
    final = [h.weights(tmp_path / name / "global_step_1") for name in ("one", "two")]
    assert h.distance(*final) < 1e-6 < h.distance(final[0], h.original(task))


# ---------------------------------------------------------------------------------------------------------------------
# The probe


@pytest.mark.thorough
def test_weights_that_do_not_reach_the_engine_stop_the_run_within_a_step(grpo, monkeypatch):
    pushes = []

    def push(engine, named_tensors, original=hf.Engine.update_weights):
        pushes.append(dict(named_tensors))
        if len(pushes) == 1:
            original(engine, pushes[0].items())

    monkeypatch.setattr(hf.Engine, "update_weights", push)
    with pytest.raises(RuntimeError, match="does not hold the policy's weights") as error:
        grpo(total_training_steps=5, lr=1e-2)
    assert len(pushes) == 2 and [x["step"] for x in grpo.lines(1)] == [1]
    gap, limit = (float(x) for x in re.findall(r"\d\.?\d*e-\d+", str(error.value))[:2])
    assert gap > limit == 1e-4 and "--max-logprob-gap" in str(error.value)
    assert grpo(total_training_steps=1, lr=1e-2)["actor/grad_norm"] > 0  # one push is enough for one step


def test_one_stale_matrix_is_enough_and_the_limit_is_a_flag(grpo, monkeypatch):
    name = "model.layers.1.mlp.down_proj.weight"
    first = {}

    def push(engine, named_tensors, original=hf.Engine.update_weights):
        tensors = dict(named_tensors)
        first.setdefault(name, tensors[name].clone())
        original(engine, (tensors | first).items())

    monkeypatch.setattr(hf.Engine, "update_weights", push)
    with pytest.raises(RuntimeError, match="does not hold the policy's weights"):
        grpo(total_training_steps=5, lr=1e-2)
    assert grpo(total_training_steps=2, lr=1e-2, max_logprob_gap=50.0)["rollout/logprob_gap_mean"] > 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# eval.py


def test_pass_at_k_and_majority_vote_counted_again_by_brute_force(task, trained, tmp_path):
    # A response is right if its last digit is even; half a point, which is not right, for 5 and 7.
    (tmp_path / "digits.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    digits = [c for c in solution_str if c.isdigit()]\n"
        "    return 0.0 if not digits else 0.5 if digits[-1] in '57' else float(int(digits[-1]) % 2 == 0)\n"
    )
    n, file = 5, tmp_path / "out.jsonl"
    settings = dict(
        model=str(trained / "global_step_24" / "huggingface"),
        val_files=(task.test,),
        engine="hf",
        rollout_n=n,
        temperature=1.0,
        output=str(file),
        **reward(tmp_path / "digits.py"),
        **GENERATE,
    )
    metrics = evaluation.main(build(evaluation.Args, **settings, k=(1, 3, 5)))

    groups = collections.defaultdict(list)
    for line in h.read_jsonl(file):
        groups[line["row_index"]].append(line)
    assert [len(group) for group in groups.values()] == [n] * 16
    scores = {i: [x["score"] for x in group] for i, group in groups.items()}
    assert metrics["accuracy"] == pytest.approx(statistics.mean(itertools.chain(*scores.values())))
    assert any(len(set(s)) > 1 for s in scores.values()) and 0.5 in itertools.chain(*scores.values())
    for k in (1, 3, 5):
        draws = [[max(draw) >= 1 for draw in itertools.combinations(s, k)] for s in scores.values()]
        assert metrics[f"pass@{k}"] == pytest.approx(statistics.mean(statistics.mean(d) for d in draws))
    elected = []
    for group in groups.values():
        numbers = [re.findall(r"-?\d+", x["response"].replace(",", "")) for x in group]
        answers = [found[-1] if found else None for found in numbers]
        most = max((answers.count(a) for a in answers if a is not None), default=0)
        winner = next((i for i, a in enumerate(answers) if a is not None and answers.count(a) == most), None)
        elected.append(0.0 if winner is None else group[winner]["score"])
    assert metrics["maj@5"] == pytest.approx(statistics.mean(elected))
    assert metrics["pass@1"] < metrics["pass@3"] < metrics["pass@5"]
    # A lower bar: half a point counts, too. Default k are the powers of two.
    lenient = evaluation.main(build(evaluation.Args, **settings, correct_at=0.5))
    assert {name for name in lenient if name.startswith("pass@")} == {"pass@1", "pass@2", "pass@4"}
    assert lenient["pass@1"] == pytest.approx(statistics.mean(x >= 0.5 for s in scores.values() for x in s))
    assert lenient["accuracy"] == metrics["accuracy"]


def test_eval_counts_what_cannot_be_scored_as_wrong_and_reads_the_first_prompts(task, tmp_path, monkeypatch):
    (tmp_path / "failing.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 1 // (extra_info['index'] != 1), 'length': extra_info['response_length']}\n"
    )
    file = tmp_path / "out.jsonl"
    settings = dict(
        model=task.model, val_files=(task.test,), engine="hf", **reward(tmp_path / "failing.py"), **GENERATE
    )
    metrics = evaluation.main(build(evaluation.Args, **settings, max_samples=5, output=str(file)))
    assert (metrics["num_prompts"], metrics["accuracy"], metrics["reward/error_frac"]) == (5.0, 0.8, 0.2)
    lines = h.read_jsonl(file)
    assert [line["score"] for line in lines] == [1.0, None, 1.0, 1.0, 1.0]
    lengths = [line["length"] for line in lines if line["score"] is not None]  # a component is written by its name
    assert metrics["reward/arithmetic/length"] == pytest.approx(statistics.mean(lengths)) and min(lengths) > 0
    assert metrics["response_length/clip_ratio"] <= 1 and metrics["response_length/mean"] <= 40
    # What is printed is the result: a stdout that is full is an error, after the file is written.
    with pytest.raises(OSError), open("/dev/full", "w", buffering=1) as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        evaluation.main(build(evaluation.Args, **settings, max_samples=5, output=str(tmp_path / "again.jsonl")))
    assert h.read_jsonl(tmp_path / "again.jsonl") == lines


# ---------------------------------------------------------------------------------------------------------------------
# sft.py


def nll(model_folder, conversations):
    """Mean negative log-likelihood of the learned tokens, by transformers alone: [(text before, learned text), ...]."""
    tokenizer, model = AutoTokenizer.from_pretrained(model_folder), AutoModelForCausalLM.from_pretrained(model_folder)
    losses = []
    for pieces in conversations:
        ids, learned = [], []
        for text, is_learned in pieces:
            piece = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids, learned = ids + piece, learned + [is_learned] * len(piece)
        with torch.no_grad():
            logp = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        losses += [-logp[t - 1, ids[t]].item() for t in range(1, len(ids)) if learned[t]]
    return statistics.mean(losses)


DEMONSTRATIONS = [("4+3=?", "4+3=7\n#### 7"), ("1+1+1=?", "#### 3"), ("9-8=?", "So 1"), ("2=?", "2"), ("5+4-9=?", "0")]


def prompt_and_response(prompt, response):
    row = {"prompt": [{"role": "user", "content": prompt}], "response": response}
    before = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return row, [(before, False), (f"{response}<|im_end|>", True)]


def two_turns(prompt, response):
    """Two questions and two answers; both answers are learned, with the token that ends them."""
    turns = [("user", prompt), ("assistant", response), ("user", "and +1?"), ("assistant", f"that is {response}+1")]
    pieces = []
    for role, content in turns:
        pieces += [(f"<|im_start|>{role}\n", False), (f"{content}<|im_end|>", role == "assistant"), ("\n", False)]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}, pieces


@pytest.mark.parametrize("form", h.some([prompt_and_response, two_turns], two_turns))
def test_sft_loss_is_the_mean_over_response_tokens(task, tmp_path, form):
    rows, conversations = zip(*(form(*demonstration) for demonstration in DEMONSTRATIONS), strict=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), tmp_path / "rows.parquet")
    files = (str(tmp_path / "rows.parquet"),)
    settings = h.sft_settings(
        task, tmp_path / "run", train_files=files, val_files=files, train_batch_size=5, total_training_steps=8, lr=1e-2
    )
    metrics = sft.main(build(sft.Args, **settings))
    lines = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [x["step"] for x in lines if "val/loss" in x] == [0, 8]
    before, after = nll(task.model, conversations), nll(tmp_path / "run/global_step_8/huggingface", conversations)
    assert lines[0]["val/loss"] == pytest.approx(before, rel=1e-5)
    assert lines[1]["train/loss"] == pytest.approx(before, rel=1e-5)
    assert metrics["val/loss"] == lines[-1]["val/loss"] == pytest.approx(after, rel=1e-4)
    assert after < before - 0.5
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    texts = ["".join(text for text, _ in pieces) for pieces in conversations]
    assert metrics["train/global_tokens"] == sum(len(tokenizer(text)["input_ids"]) for text in texts)


@pytest.mark.parametrize("lora_rank", h.some([0, 2], 2))
def test_sft_exports_the_tokens_that_end_answers_also_after_a_resume(task, base, tmp_path, capsys, lora_rank):
    model = shutil.copytree(base, tmp_path / "model")
    (model / "generation_config.json").unlink()
    texts, turns = prompt_and_response("1+1=?", "2")[0], two_turns("1+1=?", "2")[0]
    for name, row, stops, line in [("texts", texts, 0, False), ("turns", turns, [0, 2], True)]:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        changes = dict(model=str(model), train_files=(str(tmp_path / f"{name}.jsonl"),), train_batch_size=1)
        settings = h.sft_settings(task, tmp_path / name, lr_scheduler_type="constant", lora_rank=lora_rank, **changes)
        for steps in (1, 2):
            sft.main(build(sft.Args, **settings | dict(total_training_steps=steps)))
            h.leave_distributed()
            exported = tmp_path / name / f"global_step_{steps}" / "huggingface"
            assert GenerationConfig.from_pretrained(exported).eos_token_id == stops
            output = capsys.readouterr().out
            assert ("the data ends answers with <|im_end|>, so" in output) == line and ("resumed" in output) == (
                steps > 1
            )


def test_sft_is_what_plain_transformers_computes(task, tmp_path, in_double):
    rows, conversations = zip(*(prompt_and_response(*demonstration) for demonstration in DEMONSTRATIONS), strict=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), tmp_path / "rows.parquet")
    settings = dict(train_batch_size=5, total_training_steps=4, lr=1e-3, beta2=0.9, grad_clip=0.5, weight_decay=0.1)
    files = (str(tmp_path / "rows.parquet"),)
    sft.main(build(sft.Args, **h.sft_settings(task, tmp_path / "run", train_files=files, **settings)))

    tokenizer, model = AutoTokenizer.from_pretrained(task.model), AutoModelForCausalLM.from_pretrained(task.model)
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.9), weight_decay=0.1)
    norms, losses = [], []
    for step in range(4):
        total, count = 0.0, 0
        for (before, _), (learned, _) in conversations:
            start = len(tokenizer(before)["input_ids"])
            ids = torch.tensor(tokenizer(before + learned)["input_ids"])
            logp = model(ids[None]).logits[0, start - 1 : -1].log_softmax(-1)
            total, count = total - logp.gather(-1, ids[start:, None]).sum(), count + len(ids) - start
        (total / count).backward()
        losses.append((total / count).item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + math.cos(math.pi * step / 4)) / 2
        optimizer.step()
        optimizer.zero_grad()

    lines = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [x["train/loss"] for x in lines] == pytest.approx(losses, rel=1e-9)
    assert [x["train/grad_norm"] for x in lines] == pytest.approx(norms, rel=1e-6)
    assert h.distance(h.weights(tmp_path / "run" / "global_step_4"), dict(model.named_parameters())) < 1e-6


def test_sft_does_not_depend_on_packing_or_checkpointing(task, tmp_path, in_double):
    for name, changes in {
        "base": {},
        "small": dict(max_token_len_per_gpu=90, max_length=90),
        "plain": dict(activation_checkpointing="none"),
    }.items():
        metrics = sft.main(
            build(sft.Args, **h.sft_settings(task, tmp_path / name, **changes | dict(total_training_steps=2)))
        )
        if name == "base":
            expected = metrics
        assert metrics["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-9)
        final = [h.weights(tmp_path / folder / "global_step_2") for folder in ("base", name)]
        assert h.distance(*final) < 1e-6 < h.distance(final[0], h.original(task))


@pytest.mark.thorough
def test_sft_takes_other_rows_in_every_step_and_those_of_the_full_length(task, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    longest = max(len(encode_demonstration(tokenizer, row)[0]) for row in read_demonstrations((task.sft,)))
    settings = dict(max_length=longest, filter_overlong=True, lr=0.0, total_training_steps=3, train_batch_size=64)
    sft.main(build(sft.Args, **h.sft_settings(task, tmp_path / "run", **settings)))
    assert len({x["train/loss"] for x in h.read_jsonl(tmp_path / "run" / "metrics.jsonl")}) == 3
    assert "dropped" not in capsys.readouterr().out


def test_sft_drops_overlong_rows_when_told_to(task, tmp_path, capsys):
    rows = pq.read_table(task.sft).to_pylist()[:20]
    rows[3]["response"] = "1" * 200
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    path = str(tmp_path / "rows.parquet")
    settings = h.sft_settings(task, tmp_path / "run", train_files=(path,), train_batch_size=19)
    with pytest.raises(ValueError, match=r"row 3: .* over --max-length 128; raise it or add --filter-overlong"):
        sft.main(build(sft.Args, **settings))
    metrics = sft.main(build(sft.Args, **settings, filter_overlong=True))
    assert "dropped 1 of 20 rows longer than --max-length 128" in capsys.readouterr().out
    assert math.isfinite(metrics["train/loss"])


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes: refused before a model is loaded, naming the flag or file, the value and the fix


@pytest.fixture
def unread(task, monkeypatch):
    """A model folder in a world where reading its weights is an error of its own."""
    monkeypatch.setattr(*h.headers_only(AutoModelForCausalLM))
    return task.model


@pytest.fixture(scope="module")
def broken(task, tmp_path_factory):
    """Data files with one mistake each, by name."""
    folder = tmp_path_factory.mktemp("broken")
    rows = pq.read_table(task.train).to_pylist()[:6]
    long = [dict(row) for row in rows]
    long[4]["prompt"] = [{"role": "user", "content": "1+" * 30}]
    tables = {
        "empty": pa.Table.from_pylist(rows).slice(0, 0),
        "column": pa.Table.from_pylist([{k: v for k, v in row.items() if k != "reward_model"} for row in rows]),
        "long": pa.Table.from_pylist(long),
        "six": pa.Table.from_pylist(rows),
    }
    for name, table in tables.items():
        pq.write_table(table, folder / f"{name}.parquet")
    (folder / "text.parquet").write_text("not parquet")
    return {name: str(folder / f"{name}.parquet") for name in [*tables, "text", "missing"]}


def files(name):
    return lambda f: dict(train_files=(f[name],))


GRPO_MISTAKES = {
    "long prompt": (files("long"), ["row 4", "--max-prompt-length", "32", "--filter-overlong-prompts"]),
    "long held-out prompt": (lambda f: dict(val_files=(f["long"],), test_freq=1), ["row 4", "--max-prompt-length 32"]),
    "empty": (files("empty"), ["empty.parquet", "no rows"]),
    "column": (files("column"), ["column.parquet", "reward_model", "add or rename"]),
    "not parquet": (files("text"), ["text.parquet", "not a readable parquet file"]),
    "missing": (files("missing"), ["missing.parquet", "no such data file", "check the path"]),
    "batch": (
        lambda f: dict(train_files=(f["six"],), train_batch_size=7),
        ["--train-batch-size 7", "the 6 rows of the training data"],
    ),
    "mini": (
        lambda f: dict(ppo_mini_batch_size=5),
        ["--ppo-mini-batch-size 5", "--train-batch-size 4", "lower it"],
    ),
    "budget": (
        lambda f: dict(ppo_max_token_len_per_gpu=43),
        ["--ppo-max-token-len-per-gpu 43", "(--max-prompt-length + --max-response-length) = 44", "raise it"],
    ),
    "context": (
        lambda f: dict(max_response_length=97),
        ["--max-prompt-length + --max-response-length = 129", "128 positions", "lower"],
    ),
    "temperature": (lambda f: dict(temperature=0.0), ["--temperature 0.0", "within 0.01 and 100"]),
    "top p": (lambda f: dict(top_p=0.0), ["--top-p 0.0", "positive and at most 1"]),
    "top k": (lambda f: dict(top_k=0), ["--top-k 0", "at least 1, or -1 for all tokens"]),
    "held-out responses": (lambda f: dict(val_n=4), ["--val-n 4", "one greedy response", "--val-temperature"]),
    "gspo": (lambda f: dict(loss_mode="gspo"), ["--loss-mode gspo", "--loss-agg-mode seq-mean-token-mean"]),
    "gmpo": (
        lambda f: dict(loss_mode="gmpo", loss_agg_mode="seq-mean-token-sum"),
        ["--loss-mode gmpo", "--loss-agg-mode seq-mean-token-mean"],
    ),
    "dual clip": (lambda f: dict(clip_ratio_c=1.0), ["--clip-ratio-c 1.0", "above 1"]),
    "cap": (lambda f: dict(rollout_is_threshold=0.0), ["--rollout-is-threshold 0.0", "must be positive"]),
    "reward path": (
        lambda f: dict(custom_reward_function=("rewards/none.py:score",)),
        ["--custom-reward-function 'rewards/none.py:score'", "path/to/file.py:function"],
    ),
    "reward name": (
        lambda f: dict(custom_reward_function=("rewards/gsm8k.py:grade",)),
        ["--custom-reward-function", "has no function 'grade'"],
    ),
    "tensor parallel": (
        lambda f: dict(tensor_model_parallel_size=2),
        ["--tensor-model-parallel-size 2", "--engine vllm"],
    ),
    "heads": (
        lambda f: dict(tensor_model_parallel_size=2, engine="vllm"),
        ["--tensor-model-parallel-size 2", "the 3 attention heads of", "choose a divisor"],
    ),
    "resume": (lambda f: dict(resume_mode="/no/such/step"), ["--resume-mode /no/such/step", "global_step_N folder"]),
    "seed": (lambda f: dict(seed=-1), ["--seed -1", "at least 0"]),
    "partial": (lambda f: dict(partial_rollouts=0.5), ["--partial-rollouts 0.5", "add --rollout-is token"]),
    "reward weight": (
        lambda f: dict(custom_reward_function=("rewards/gsm8k.py::half",)),
        ["--custom-reward-function 'rewards/gsm8k.py::half'", "weight 'half' is not a number"],
    ),
    "reward timeout": (lambda f: dict(reward_timeout=0.0), ["--reward-timeout 0.0", "must be positive"]),
    "reward memory": (lambda f: dict(reward_memory_mb=-1), ["--reward-memory-mb -1", "at least 0"]),
    "error share": (lambda f: dict(reward_max_error_frac=5.0), ["--reward-max-error-frac 5.0", "within 0 and 1"]),
    "KL coefficient": (lambda f: dict(use_kl_in_reward=True, kl_coef=-1.0), ["--kl-coef -1.0", "at least 0"]),
    "adaptive KL": (lambda f: dict(kl_ctrl_type="adaptive"), ["--kl-ctrl-type adaptive", "add --use-kl-in-reward"]),
    "infinite": (lambda f: dict(lr=math.inf), ["--lr inf", "at least 0 and at most 1e6"]),
    "KL target": (lambda f: dict(kl_target=0.0), ["--kl-target 0.0", "must be positive"]),
    **{
        name: (lambda f, name=name: {name: 0}, [f"--{name.replace('_', '-')} 0", "at least 1"])
        for name in (
            *("train_batch_size", "ppo_mini_batch_size", "ppo_epochs", "rollout_n", "max_response_length"),
            *("reward_workers", "kl_horizon"),
        )
    },
}


@pytest.mark.parametrize("case", GRPO_MISTAKES)
def test_grpo_refuses(case, task, unread, broken, tmp_path):
    changes, words = GRPO_MISTAKES[case]
    settings = h.grpo_settings(task, tmp_path / "run", model=unread) | changes(broken)
    module = train_grpo if settings.keys() <= flags.flat(train_grpo.Args()).keys() else train_grpo_variants
    with pytest.raises(FileNotFoundError if case == "missing" else ValueError) as error:
        module.main(build(module.Args, **settings))
    for word in words:
        assert word in str(error.value), f"{word!r} is not in {error.value}"
    assert not (tmp_path / "run").exists()


def test_overlong_prompts_are_dropped_when_told_to(grpo, broken):
    settings = dict(train_files=(broken["long"],), filter_overlong_prompts=True, total_training_steps=None)
    grpo(**settings, train_batch_size=5, ppo_mini_batch_size=5)
    assert [x["prompt_length/max"] for x in grpo.lines(1)] == [30.0]  # one epoch of the five that are left
    with pytest.raises(ValueError, match="--train-batch-size 6 must be between 1 and the 5 rows"):
        grpo(**settings, train_batch_size=6, ppo_mini_batch_size=6)


SFT_MISTAKES = {
    "budget": (lambda f: dict(max_token_len_per_gpu=127), ["--max-token-len-per-gpu 127", "--max-length = 128"]),
    "long row": (lambda f: dict(max_length=35), ["row ", "over --max-length 35", "--filter-overlong"]),
    "all long": (lambda f: dict(max_length=10, filter_overlong=True), ["all 256 rows", "--max-length 10", "raise it"]),
    "batch": (lambda f: dict(train_batch_size=257), ["--train-batch-size 257", "256 rows"]),
    "no response": (files("six"), ["six.parquet: row 0", "messages", "prompt and response", "add or rename"]),
    "missing": (files("missing"), ["missing.parquet", "no such data file"]),
    "resume": (lambda f: dict(resume_mode="/no/such/step"), ["--resume-mode /no/such/step", "global_step_N folder"]),
}


@pytest.mark.parametrize("case", SFT_MISTAKES)
def test_sft_refuses(case, task, unread, broken, tmp_path):
    changes, words = SFT_MISTAKES[case]
    settings = h.sft_settings(task, tmp_path / "run", model=unread) | changes(broken)
    with pytest.raises(FileNotFoundError if case == "missing" else ValueError) as error:
        sft.main(build(sft.Args, **settings))
    for word in words:
        assert word in str(error.value), f"{word!r} is not in {error.value}"


EVAL_MISTAKES = {
    "greedy n": (lambda f: dict(rollout_n=4), ["--rollout-n 4", "positive --temperature"]),
    "k": (lambda f: dict(rollout_n=4, temperature=1.0, k=(2, 8)), ["--k 8", "--rollout-n is 4"]),
    "k 0": (lambda f: dict(k=(0,)), ["--k 0"]),
    "long prompt": (lambda f: dict(val_files=(f["long"],)), ["row 4", "--max-prompt-length 32"]),
    "missing": (lambda f: dict(val_files=(f["missing"],)), ["missing.parquet", "no such data file"]),
    "reward name": (lambda f: dict(custom_reward_function=("rewards/gsm8k.py:grade",)), ["has no function 'grade'"]),
    "reward workers": (lambda f: dict(reward_workers=0), ["--reward-workers 0 must be at least 1"]),
    "tensor parallel": (lambda f: dict(tensor_model_parallel_size=2), ["--tensor-model-parallel-size 2"]),
    "heads": (
        lambda f: dict(tensor_model_parallel_size=2, engine="vllm"),
        ["parallel-size 2", "the 3 attention heads"],
    ),
}


@pytest.mark.parametrize("case", EVAL_MISTAKES)
def test_eval_refuses(case, task, unread, broken):
    changes, words = EVAL_MISTAKES[case]
    settings = dict(model=unread, val_files=(task.test,), engine="hf", reward_workers=1, **GENERATE)
    with pytest.raises(FileNotFoundError if case == "missing" else ValueError) as error:
        evaluation.main(build(evaluation.Args, **settings | changes(broken)))
    for word in words:
        assert word in str(error.value), f"{word!r} is not in {error.value}"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train_grpo_variants", ["--loss-mode", "ppo"]),
        ("eval", ["--engine", "tgi"]),
    ],
)
def test_unknown_values_name_the_flag(name, words, capsys):
    with pytest.raises(SystemExit) as end:
        tyro.cli(SCRIPTS[name].Args, args=words, config=(tyro.conf.OmitArgPrefixes,))
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert words[0] in text and words[1] in text


@pytest.mark.parametrize(
    ("module", "settings", "words"),
    [
        (train_grpo, dict(temperature=float("nan")), "--temperature nan"),
        (train_grpo, dict(total_training_steps=0), "--total-training-steps 0 must be at least 1"),
        (train_grpo, dict(max_ckpt_to_keep=-1), "--max-ckpt-to-keep -1 must be at least 1"),
        (sft, dict(max_ckpt_to_keep=0), "--max-ckpt-to-keep 0 must be at least 1"),
        (sft, dict(max_length=400), "--max-length = 400 tokens, but"),
        (train_grpo, dict(grad_clip=0.0), "--grad-clip 0.0 must be positive"),
        (train_grpo, dict(kl_loss_coef=float("nan")), "--kl-loss-coef nan must be at least 0"),
        (train_grpo_variants, dict(loss_scale_factor=0.0), "--loss-scale-factor 0.0 must be positive"),
        (train_grpo, dict(stall_timeout=math.inf), "--stall-timeout inf must be positive and at most 1e9"),
        (sft, dict(lr=-1e-5), "--lr -1e-05 must be at least 0"),
        (sft, dict(beta2=1.5), "--beta2 1.5 must be within 0 and 1"),
        (sft, dict(total_epochs=0), "--total-epochs 0 must be at least 1"),
        (sft, dict(model="runs/no/global_step_5/huggingface"), "--model runs/no/.* there is no such folder"),
    ],
)
def test_impossible_values_are_refused(task, module, settings, words):
    with pytest.raises(ValueError, match=words):
        module.main(build(module.Args, **dict(model=str(task.model), train_files=(str(task.train),)) | settings))


def config_with(**changes):
    """A change of the config in a folder."""

    def change(folder):
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({name: x for name, x in config.items() if x is not ...}))

    return change


def weights_with(change):
    """A change of the weights in a folder: `change` gets them by name."""

    def changed(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors", {"format": "pt"})

    return changed


def file_with(name, change):
    """A change of the bytes of a file in a folder; None removes it."""

    def changed(folder):
        data = change((folder / name).read_bytes() if (folder / name).exists() else b"")
        (folder / name).unlink(missing_ok=True)
        if data is not None:
            (folder / name).write_bytes(data)

    return changed


def in_shards(change):
    """A change of the second of many files with weights, and of their index."""

    def changed(folder):
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="100KB")
        (folder / "model.safetensors").unlink()
        change(sorted(folder.glob("model-*.safetensors"))[1], folder / "model.safetensors.index.json")

    return changed


def rows_of(weights, count):
    """Let the embedding, and the head tied to it, have this many rows."""
    old = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([old, old])[:count]


def of_class(config):
    """Another model, of random weights."""
    return lambda folder: AutoModelForMaskedLM.from_config(config).save_pretrained(folder)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
SMALL = dict(vocab_size=80, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
BROKEN = {  # a change of a model's folder -> what is said of it
    "cut weights": (file_with("model.safetensors", lambda x: x[:5000]), "model.safetensors, 5000 bytes: .*not fully"),
    "no bytes": (file_with("model.safetensors", lambda x: b""), "model.safetensors, 0 bytes: .*header too small"),
    "no weights": (file_with("model.safetensors", lambda x: None), "no model can be loaded .*no file named model.safe"),
    "pointer": (file_with("model.safetensors", lambda x: LFS), "model.safetensors is a pointer of Git LFS, so run git"),
    "pointer for a config": (file_with("config.json", lambda x: LFS), "config.json is a pointer of Git LFS"),
    "pointer for a tokenizer": (file_with("tokenizer.json", lambda x: LFS), "tokenizer.json is a pointer of Git LFS"),
    "no config": (file_with("config.json", lambda x: None), "no config can be loaded from there"),
    "config of nothing": (file_with("config.json", lambda x: b""), "no config can be loaded .*not a valid JSON"),
    "config of null": (file_with("config.json", lambda x: b"null"), "no config can be loaded from there"),
    "config of bytes": (file_with("config.json", lambda x: b"\xff\xfe"), "no config can be loaded from there"),
    "unknown type": (config_with(model_type="qwen99"), "no config can be loaded .*model type `qwen99`"),
    "no type": (config_with(model_type=...), "no config can be loaded from there .*model_type"),
    "a text for a number": (config_with(num_hidden_layers="two"), "no config .*num_hidden_layers.*got str"),
    "no such activation": (config_with(hidden_act="swoosh"), "no model can be loaded from there .*swoosh"),
    "fewer layers": (config_with(num_hidden_layers=1, layer_types=...), "hold 12 weights .*model.layers.1.input_layer"),
    "more layers": (config_with(num_hidden_layers=3, layer_types=...), "lack 12 of its weights, model.layers.2.input"),
    "more rows": (config_with(vocab_size=96), r"has the shape \[80, 96\] in its files and \[96, 96\]"),
    "fewer rows": (
        lambda folder: (config_with(vocab_size=72)(folder), weights_with(lambda x: rows_of(x, 72))(folder)),
        "its tokenizer has 80 tokens, and its embedding 72 rows",
    ),
    "another weight": (weights_with(lambda x: x.update(v_head=torch.ones(2))), "hold 1 weights that Qwen2.*v_head"),
    "eight bits": (
        weights_with(lambda x: x.update({name: y.to(torch.int8) for name, y in x.items()})),
        "model.embed_tokens.weight has 8 bits or fewer; give",
    ),
    "quantized": (config_with(quantization_config=dict(quant_method="gptq", bits=4)), "quantized .gptq.; give"),
    "missing shard": (in_shards(lambda shard, index: shard.unlink()), "no model can be loaded .*model-00002-of-"),
    "cut shard": (in_shards(lambda shard, index: shard.write_bytes(shard.read_bytes()[:-1])), "model-00002-of"),
    "cut index": (in_shards(lambda shard, index: index.write_text("{")), "no model can be loaded from there .*JSON"),
    "index without files": (in_shards(lambda shard, index: index.write_text("{}")), "no model .*weight_map|metadata"),
    "adapters beside it": (file_with("adapter_config.json", lambda x: b"{}"), "holds adapters; merge them into their"),
    "encoder": (of_class(BertConfig(**SMALL)), "a bert is not a causal language model; choose another model"),
    "two halves": (config_with(model_type="t5"), "a t5 is not a causal language model"),
    "code of a stranger": (
        config_with(model_type="mine", auto_map={"AutoConfig": "mine.Mine"}),
        "no config can be loaded from there .*contains custom code",
    ),
    "pickle": (
        lambda folder: (folder / "model.safetensors").replace(folder / "pytorch_model.bin"),
        "no model can be loaded from there",
    ),
    "no tokenizer": (
        lambda folder: [file.unlink() for file in folder.glob("*token*")],
        "no tokenizer is in there; add its files",
    ),
}
WHOLE = {
    "as it is": lambda folder: None,
    "half precision": weights_with(lambda x: x.update({name: y.bfloat16() for name, y in x.items()})),
    "shards": in_shards(lambda shard, index: None),
    "tensors by torch": lambda folder: (
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin"),
        (folder / "model.safetensors").unlink(),
    ),
    "a tied head stored": weights_with(lambda x: x.update({"lm_head.weight": x["model.embed_tokens.weight"].clone()})),
    "padded rows": lambda folder: (
        config_with(vocab_size=96)(folder),
        weights_with(lambda x: rows_of(x, 96))(folder),
    ),
    "other files": file_with("notes.gguf", lambda x: b"GGUF"),
    "old angles": weights_with(lambda x: x.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_is_no_whole_model_is_refused_with_flag_path_and_reason(task, tmp_path, case):
    folder = Path(shutil.copytree(task.model, tmp_path / "model"))
    change, words = BROKEN[case]
    change(folder)
    with pytest.raises(ValueError, match=f"^--critic-model {folder}: .*{words}"):
        check_model(str(folder), flag="--critic-model", longest=8)


@pytest.mark.parametrize("case", WHOLE)
def test_a_folder_that_is_a_whole_model_is_opened(task, tmp_path, case):
    folder = Path(shutil.copytree(task.model, tmp_path / "model"))
    WHOLE[case](folder)
    assert check_model(str(folder), longest=8).get_vocab() == load_tokenizer(task.model).get_vocab()


@pytest.mark.parametrize("path", ["", "a/b/c", "/nowhere", "runs/x/huggingface", __file__])
def test_what_is_no_folder_and_no_name_of_the_hub_is_refused(path):
    with pytest.raises(ValueError, match=f"^--model {path}: there is no such folder; give the folder of a"):
        check_model(path, longest=8)


def test_eval_takes_quantized_weights_for_an_engine(task, tmp_path):
    folder = Path(shutil.copytree(task.model, tmp_path / "model"))
    config_with(quantization_config=dict(quant_method="gptq", bits=4))(folder)
    assert check_model(str(folder), longest=8, is_trained=False).get_vocab() == load_tokenizer(task.model).get_vocab()


def test_a_model_whose_files_lack_weights_is_refused(task, tmp_path):
    model = shutil.copytree(task.model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    ranks = Ranks(0, 1, torch.device("cpu"), torch.float32, data_rank=0, data_size=1, group=None, data_group=None)
    with pytest.raises(ValueError, match="--model .* lack 1 of its weights, model.norm.weight among them"):
        models.load_pretrained(str(model), ranks)
    with pytest.raises(ValueError, match="--model .* lack 1 of its weights, model.norm.weight among them"):
        hf.Engine(str(model), ranks, longest=64)
    tokenizer = load_tokenizer(task.model)
    with pytest.raises(ValueError, match="--prm-model .* lack 1 of its weights, model.norm.weight among them"):
        check_second_model("--prm-model", str(model), tokenizer, policy=task.model, longest=64)
    with pytest.raises(ValueError, match="--critic-model .* lack 1 of its weights, model.norm.weight among them"):
        check_critic(str(model), tokenizer, LoRA(), policy=task.model, longest=64)


def test_eval_sees_before_it_samples_that_its_output_cannot_be_written(task, tmp_path):
    with pytest.raises(IsADirectoryError):
        evaluation.main(build(evaluation.Args, model="no/such/model", output=str(tmp_path)))

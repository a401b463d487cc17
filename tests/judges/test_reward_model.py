"""Learned rewards: packed scores against transformers' own forward, their gradients, and train_reward.py for real."""

import json
import math
import random
import shutil
from dataclasses import replace

import helpers_scripts as h
import launch
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers_data import ranks_without_group
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    Qwen2ForSequenceClassification,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from workers import scores as worker

import train_reward
from data import arithmetic
from extras.demonstrations.encode import encode_conversation
from extras.demonstrations.rows import read_comparisons
from extras.judges import RewardModelFlags, model_to_score, open_judges, reward_model, scalar_models
from extras.offload import host
from rl.data.batching import collate
from rl.data.order import prompts_for_step
from rl.data.types import Sample, Score, take_rows
from rl.flags import build
from rl.model import load as models
from rl.model import sharding
from rl.ranks import init_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

WORKER = launch.TESTS / "judges" / "workers" / "scores.py"
CPU = torch.device("cpu")
PAD, EOS = 0, 2  # the tiny model's pad id is one of its two EOS ids


@pytest.fixture(scope="module")
def judge(tiny_model, tmp_path_factory) -> str:
    """Folder of a reward model: the tiny model with a score head, and its tokenizer."""
    folder = tmp_path_factory.mktemp("judge") / "model"
    shutil.copytree(tiny_model, folder)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    with torch.no_grad():
        model.score.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(4))
    model.save_pretrained(folder)
    return str(folder)


def load_plain(folder, dtype=torch.float64):
    """The model as transformers runs it. Without a pad id it scores the last token of a sequence, whatever it is."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model.config.pad_token_id = None
    return model


def load_packed(folder, dtype=torch.float64, head_seed=None):
    """With `head_seed` as train_reward.py does it."""
    kind = scalar_models.ScalarModel() if head_seed is None else model_to_score(head_seed)
    flag = "--reward-model" if head_seed is None else "--model"
    return models.load_pretrained(str(folder), ranks_without_group(dtype=dtype), kind, dtype=dtype, flag=flag)


@pytest.fixture(scope="module")
def plain(judge):
    return load_plain(judge)


@pytest.fixture(scope="module")
def packed(judge):
    return load_packed(judge)


def make_batch(pad_id=PAD):
    """Four pairs, chosen and rejected side by side: lengths 2 to 22, rows that end in either EOS, and in several."""
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(3, 80, (n,), generator=generator).tolist() for n in (9, 14, 4, 22, 2, 7, 17, 11)]
    ids[1][-1], ids[2][-1], ids[3][-3:], ids[5][-1], ids[6][4] = EOS, PAD, [PAD, PAD, PAD], PAD, EOS
    return collate([Sample(x, [], [], [], "stop", i) for i, x in enumerate(ids)], pad_id=pad_id)


def one_by_one(model, batch):
    """(B,) scores of one unpadded sequence at a time."""
    rows = zip(batch.input_ids, batch.lengths, strict=True)
    return torch.cat([model(input_ids=ids[None, :n]).logits[0] for ids, n in rows])


def plain_step(model, batch, pairs):
    """Loss and gradients of one step, a pair at a time, with the formula spelled out."""
    model.zero_grad()
    scores = one_by_one(model, take_rows(batch, [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]))
    loss = sum(torch.log1p(torch.exp(r - c)) for c, r in zip(scores[0::2], scores[1::2], strict=True)) / len(pairs)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_near(actual, expected, tolerance=1e-9):
    """The same names, and each tensor within `tolerance` of its largest entry."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert (actual[name] - x).abs().max() <= tolerance * x.abs().max(), name


# ---------------------------------------------------------------------------------------------------------------------
# Scores


@pytest.mark.parametrize("pad_id", [PAD, EOS, 79])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@torch.no_grad()
def test_scores_equal_the_plain_forward_one_conversation_at_a_time(judge, dtype, tolerance, pad_id):
    batch = make_batch(pad_id)
    expected = one_by_one(load_plain(judge, dtype), batch)
    actual = scalar_models.sequence_scores(load_packed(judge, dtype), batch)
    assert actual.shape == (8,) and actual.dtype == dtype and expected.std() > 0.5
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@torch.no_grad()
def test_a_last_token_equal_to_the_padding_counts(judge, packed):
    """Transformers takes it for padding, and scores an earlier one."""
    searching = load_plain(judge)
    searching.config.pad_token_id = PAD
    batch = make_batch()
    difference = (one_by_one(searching, batch) - scalar_models.sequence_scores(packed, batch)).abs()
    assert (difference > 1e-2).nonzero()[:, 0].tolist() == [2, 3, 5]


@torch.no_grad()
def test_scores_do_not_depend_on_neighbors_or_padding(packed):
    batch = make_batch()
    together = scalar_models.sequence_scores(packed, batch)
    for i in range(8):
        alone = scalar_models.sequence_scores(packed, take_rows(batch, [i]))
        torch.testing.assert_close(alone[0], together[i], rtol=0, atol=1e-12)
    wide = replace(batch, input_ids=torch.nn.functional.pad(batch.input_ids, (0, 5), value=7))
    assert torch.equal(scalar_models.sequence_scores(packed, wide), together)


@torch.no_grad()
def test_the_head_runs_in_float32_on_bfloat16_states(judge):
    batch = make_batch()
    score = scalar_models.sequence_scores(load_packed(judge, torch.bfloat16), batch)
    assert score.dtype == torch.float32 and not torch.equal(score, score.bfloat16().float())
    expected = one_by_one(load_plain(judge), batch)
    assert (score - expected).abs().max() < 0.1 * expected.std()


def test_fixed_scores_fill_their_own_rows(packed, plain):
    batch = make_batch()
    scores = scalar_models.fixed_scores(packed, batch, [[7, 0], [], [3]])
    expected = one_by_one(plain, batch).detach().float()
    torch.testing.assert_close(scores[[0, 3, 7]], expected[[0, 3, 7]], rtol=0, atol=1e-6)
    assert not scores.requires_grad and not scores[[1, 2, 4, 5, 6]].any()


RENDERED = [  # worker.PROMPTS and RESPONSES as the model must see them
    "1+2=?3<|im_end|>",
    "<|im_start|>user\n4+5=?<|im_end|>\n<|im_start|>assistant\nit is 9, I think<|im_end|>\n",
    "<|im_start|>user\nsay so!<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n",
]


@torch.no_grad()
def rendered_scores(folder, last=1000):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load_plain(folder)
    return [model(torch.tensor([tokenizer(text)["input_ids"][-last:]])).logits.item() for text in RENDERED]


def judge_of(model, tokenizer, ranks, *, max_length, max_tokens, coef=1.0, is_alone=False):
    """The judge of a reward model that is loaded."""
    flags = RewardModelFlags("a folder", reward_model_coef=coef, reward_model_max_length=max_length)
    result = reward_model.RewardModel(flags, tokenizer, is_alone=is_alone)
    result.use(model, ranks, max_tokens)
    return result


@pytest.mark.parametrize("budget", [1, 40, 1000])
def test_conversations_are_rendered_by_the_models_own_template(judge, packed, capsys, budget):
    tokenizer = AutoTokenizer.from_pretrained(judge)
    ranks = ranks_without_group(dtype=torch.float64)
    learned = judge_of(packed, tokenizer, ranks, max_length=100, max_tokens=budget)
    scores = learned.score(worker.PROMPTS, worker.RESPONSES)
    assert scores == pytest.approx(rendered_scores(judge), abs=1e-6) and capsys.readouterr().err == ""
    assert learned.score([], []) == []


def test_a_conversation_that_is_too_long_loses_its_beginning(judge, packed, capsys):
    tokenizer = AutoTokenizer.from_pretrained(judge)
    lengths = [len(tokenizer(text)["input_ids"]) for text in RENDERED]
    assert lengths == [7, 42, 28]
    ranks = ranks_without_group(dtype=torch.float64)
    learned = judge_of(packed, tokenizer, ranks, max_length=28, max_tokens=100)
    scores = learned.score(worker.PROMPTS, worker.RESPONSES)
    assert scores == pytest.approx(rendered_scores(judge, last=28), abs=1e-6)
    assert "1 of 3 conversations have more than 28 tokens" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Gradients and ranks


@pytest.fixture(scope="module")
def measured(judge, tmp_path_factory):
    """World size -> what tests/judges/workers/scores.py found on each of its ranks."""
    folder = tmp_path_factory.mktemp("scores")
    torch.save(make_batch(), folder / "batch.pt")
    launch.run_file(WORKER, judge, folder / "batch.pt", folder, nproc=2)
    alone = worker.measure(judge, make_batch(), init_ranks())
    h.leave_distributed()
    return {1: [alone], 2: [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]}


@pytest.mark.parametrize("max_tokens", [1000, 40, 1])
def test_gradients_do_not_depend_on_micro_batches_padding_or_order(packed, plain, max_tokens):
    batch = make_batch()
    expected_loss, expected = plain_step(plain, batch, range(4))
    order = [4, 5, 0, 1, 6, 7, 2, 3]
    wide = replace(batch, input_ids=torch.nn.functional.pad(batch.input_ids, (0, 13)))
    for version in (batch, wide, take_rows(batch, order)):
        packed.zero_grad()
        loss = worker.backward(packed, version, range(4), max_tokens=max_tokens)
        assert loss == pytest.approx(expected_loss, rel=1e-9) and loss > 0.1
        assert_near({name: p.grad for name, p in packed.named_parameters()}, expected)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("name", "pairs"), [("all", range(4)), ("one", range(1))])
def test_gradients_do_not_depend_on_the_world_size(plain, measured, world_size, name, pairs):
    expected_loss, expected = plain_step(plain, make_batch(), pairs)
    for rank in measured[world_size]:
        loss, gradients = rank[name]
        assert loss == pytest.approx(expected_loss, rel=1e-9)
        assert_near(gradients, expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_activation_checkpointing_changes_no_gradient(measured, world_size):
    for rank in measured[world_size]:
        assert_near(rank["checkpointing"], rank["all"][1])


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_score_what_they_are_given_before_and_after_offloading(judge, measured, world_size):
    first, *others = measured[world_size]
    before, once, twice = first["scores"]
    assert before == pytest.approx(rendered_scores(judge), abs=1e-6)
    assert before == once == twice
    assert [rank["scores"] for rank in others] == [[[], [], []]] * (world_size - 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU machine there is nowhere to offload from")
def test_offloading_frees_the_device(judge, world):
    kind = scalar_models.ScalarModel()
    model = models.load_pretrained(judge, world, kind, dtype=world.dtype).requires_grad_(False)
    before = torch.cuda.memory_allocated()
    model = sharding.shard(model, world)
    batch = take_rows(make_batch(), range(8), world.device)
    with torch.no_grad():
        expected = scalar_models.sequence_scores(model, batch)
        held = torch.cuda.memory_allocated()
        host.offload(model)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert torch.cuda.memory_allocated() - before < 0.1 * (held - before)
        host.onload(model, world.device)
        assert {p.device.type for p in model.parameters()} == {"cuda"}
        assert torch.equal(scalar_models.sequence_scores(model, batch), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Models


def test_a_new_head_is_a_function_of_its_seed(tiny_model):
    heads = [load_packed(tiny_model, head_seed=seed).score.weight.detach() for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].shape == (1, 96) and heads[0].std() == pytest.approx(97**-0.5, rel=0.25)


def test_a_reward_model_keeps_its_head_when_it_is_trained_on(judge):
    written = load_file(f"{judge}/model.safetensors")["score.weight"]
    assert torch.equal(load_packed(judge, torch.float32, head_seed=0).score.weight, written)


@pytest.fixture
def refused(judge, tmp_path):
    """Folders that are no reward models, by what is wrong with them."""
    folders = {name: tmp_path / name for name in ("headless", "two_labels", "incomplete", "bert")}
    for folder in folders.values():
        shutil.copytree(judge, folder)
    AutoModelForSequenceClassification.from_pretrained(
        judge, num_labels=2, ignore_mismatched_sizes=True
    ).save_pretrained(folders["two_labels"])
    model = Qwen2ForSequenceClassification.from_pretrained(judge)
    weights = model.state_dict()
    model.save_pretrained(folders["headless"], state_dict={k: x for k, x in weights.items() if k != "score.weight"})
    model.save_pretrained(folders["incomplete"], state_dict={k: x for k, x in weights.items() if "layers.1" not in k})
    small = BertConfig(vocab_size=80, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_labels=1)
    AutoModelForSequenceClassification.from_config(small).save_pretrained(folders["bert"])
    return folders


def test_models_that_give_no_rewards_are_refused(refused, tiny_model):
    cases = [
        (tiny_model, None, "--reward-model .*: a Qwen2ForCausalLM, which has no score head; .*train_reward.py"),
        (refused["two_labels"], None, "--reward-model .*two_labels: its head gives 2 labels, it has to give 1"),
        (refused["two_labels"], 0, "--model .*two_labels: its head gives 2 labels"),
        (refused["headless"], None, "--reward-model .*headless: its files lack 1 of its weights, score.weight among"),
        (refused["incomplete"], 0, "--model .*incomplete: its files lack 12 of its weights, model.layers.1.input_l"),
        (refused["bert"], 0, "--model .*bert: a BertForSequenceClassification has no linear `score` head"),
    ]
    for folder, head_seed, words in cases:
        with pytest.raises(ValueError, match=words):
            load_packed(folder, head_seed=head_seed)
    with_head, with_new_head = scalar_models.ScalarModel(), model_to_score(0)
    for folder, kind in (
        (tiny_model, with_head),
        (refused["two_labels"], with_head),
        (refused["two_labels"], with_new_head),
    ):
        with pytest.raises(ValueError, match="--somehow"):
            kind.check(AutoConfig.from_pretrained(folder), "--somehow")
    with_new_head.check(AutoConfig.from_pretrained(tiny_model), "--somehow")


def test_a_reward_model_that_cannot_read_the_prompts_is_refused_before_it_is_loaded(judge, refused, tmp_path):
    def opened(path, row, length=64):
        flags = RewardModelFlags(path, reward_model_max_length=length)
        [judge] = open_judges(flags, [row], AutoTokenizer.from_pretrained(judge_folder), are_alone=True)
        return judge.tokenizer

    chat, judge_folder = {"prompt": [{"role": "user", "content": "1+1="}], "row_index": 7}, judge
    tokenizer = opened(judge, chat)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(judge).get_vocab()
    with pytest.raises(ValueError, match="--reward-model-max-length = 5000000 tokens, but .* positions"):
        opened(judge, chat, 5_000_000)
    with pytest.raises(ValueError, match="--reward-model runs/no/huggingface: there is no such folder"):
        opened("runs/no/huggingface", chat)
    with pytest.raises(ValueError, match="--reward-model .*headless: its files lack 1 of its weights, score.weight"):
        opened(str(refused["headless"]), chat)
    shutil.copytree(judge, tmp_path / "plain")
    tokenizer.chat_template = None
    for file in (tmp_path / "plain").glob("*template*"):
        file.unlink()
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="--reward-model .*plain cannot read the training prompts: .*row 7"):
        opened(str(tmp_path / "plain"), chat)
    opened(str(tmp_path / "plain"), {"prompt": "1+1=", "row_index": 7})


def add_learned(judge, monkeypatch, learned, scores, *, alone):
    """What a judge says where the model, of weight 2, has given `learned`."""
    monkeypatch.setattr(reward_model.RewardModel, "score", lambda *_, **__: learned)
    samples = [Sample([1], [5], [1], [0.0], "stop", 0)] * len(scores)
    limits = dict(max_length=8, max_tokens=8, coef=2.0, is_alone=alone)
    learned_reward = judge_of(load_packed(judge, torch.float32), None, ranks_without_group(), **limits)
    return learned_reward.judge([{"row_index": 0, "prompt": "p"}] * len(scores), samples, scores)


def test_the_accuracy_stays_that_of_the_functions_beside_a_reward_model(judge, monkeypatch):
    scores = [Score("x", 1.0, components, "ok", 0.0) for components in ({}, {"acc": 0.25, "style": 3.0})]
    beside = add_learned(judge, monkeypatch, [0.5, -0.5], scores, alone=False)
    assert [x.value for x in beside] == [2.0, 0.0]
    assert [x.components for x in beside] == [
        {"acc": 1.0, "reward_model": 0.5},
        {"acc": 0.25, "style": 3.0, "reward_model": -0.5},
    ]
    [alone, _] = add_learned(judge, monkeypatch, [0.5, -0.5], scores, alone=True)
    assert alone.components == {"reward_model": 0.5}  # the accuracy is the score, there is no other


def test_a_learned_score_that_is_not_finite_is_none(judge, monkeypatch, capsys):
    scores = [Score("x", value, {}, "ok" if value is not None else "none", 0.0) for value in (1.0, 1.0, 1.0, None)]
    got = add_learned(judge, monkeypatch, [0.5, math.nan, math.inf, 2.0], scores, alone=False)
    assert [x.value for x in got] == [2.0, None, None, None]
    assert [x.status for x in got] == ["ok", "error", "error", "none"]
    assert "gave NaN or infinity for 2 of 4 responses" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Data


PAIR = dict(prompt="1+1=?", chosen="2", rejected="3")


def write_rows(file, rows):
    pq.write_table(pa.Table.from_pylist(rows), file)
    return str(file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rejected": None}, "row 1: rejected is None .* must be a string that is not empty"),
        ({"chosen": " "}, "row 1: chosen is ' ' .* must be a string that is not empty"),
        ({"rejected": "2"}, "row 1: chosen and rejected are both '2' .*; drop the row"),
        ({"prompt": ""}, "row 1: prompt is '' .* must be a string that is not empty"),
    ],
)
def test_pairs_that_teach_nothing_are_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=f"pairs.parquet: {words}"):
        read_comparisons(write_rows(tmp_path / "pairs.parquet", [PAIR, PAIR | change]))


def test_missing_columns_are_named(tmp_path):
    file = write_rows(tmp_path / "pairs.parquet", [{"prompt": "a", "chosen": "b", "loser": "c"}])
    with pytest.raises(
        ValueError, match=r"row 0: no column rejected; add or rename it \(there are prompt, chosen, los"
    ):
        read_comparisons(file)


def test_rows_keep_their_columns_and_get_an_index(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    (tmp_path / "a.jsonl").write_text(json.dumps(PAIR | {"prompt": chat, "source": "x"}) + "\n")
    rows = read_comparisons([tmp_path / "a.jsonl", write_rows(tmp_path / "b.parquet", [PAIR])])
    names = ("a.jsonl", "b.parquet")
    places = [{"row_index": i, "row_place": f"{tmp_path / name}: row 0"} for i, name in enumerate(names)]
    assert list(rows) == [PAIR | {"prompt": chat, "source": "x"} | places[0], PAIR | places[1]]


def test_a_text_answer_ends_with_one_eos(judge):
    tokenizer = AutoTokenizer.from_pretrained(judge)
    plus_two = tokenizer("+2")["input_ids"]
    for response in ("2", "2<|im_end|>"):
        assert encode_conversation(tokenizer, {"prompt": "+"}, response) == [*plus_two, EOS]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="has no eos_token, so no answer can end; set it"):
        encode_conversation(tokenizer, {"prompt": "+"}, "2")


# ---------------------------------------------------------------------------------------------------------------------
# train_reward.py


def test_bradley_terry_by_hand():
    def loss_of(*scores, dtype=torch.float64):
        return train_reward.bradley_terry(*(torch.tensor(x, dtype=dtype) for x in scores)).tolist()

    chosen, rejected = [0.0, math.log(3), 0.0, 5.0, 800.0], [0.0, 0.0, math.log(3), 3.0, -800.0]
    # a gap of log 3 wins with probability 3/4; one of 2 with 1 / (1 + exp(-2))
    expected = [math.log(2), math.log(4 / 3), math.log(4), math.log(1 + math.exp(-2)), 0.0]
    assert loss_of(chosen, rejected) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert loss_of([-800.0], [800.0]) == [1600.0]
    shifted = loss_of([x + 64 for x in chosen], [x + 64 for x in rejected], dtype=torch.float32)
    assert shifted == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_bradley_terry_gradient_is_the_probability_of_being_wrong():
    scores = [[math.log(3), 0.0, -900.0], [0.0, math.log(3), 900.0]]
    chosen, rejected = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in scores)
    train_reward.bradley_terry(chosen, rejected).sum().backward()
    assert chosen.grad.tolist() == pytest.approx([-1 / 4, -3 / 4, -1.0], rel=1e-12)
    assert rejected.grad.tolist() == pytest.approx([1 / 4, 3 / 4, 1.0], rel=1e-12)


def more_x(count, seed):
    """Pairs of ten letters to a prompt, of which the one with more x is preferred."""
    rng = random.Random(seed)

    def answer(num_x):
        letters = ["x"] * num_x + [rng.choice("abcdefgh") for _ in range(10 - num_x)]
        rng.shuffle(letters)
        return "".join(letters)

    rows = []
    for _ in range(count):
        fewer, more = sorted(rng.sample(range(10), 2))
        prompt = [{"role": "user", "content": f"say {rng.randrange(1000)}"}]
        rows.append({"prompt": prompt, "chosen": answer(more), "rejected": answer(fewer)})
    return rows


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Untrained model, 512 pairs to train on, and 200 that are held out."""
    folder = tmp_path_factory.mktemp("preferences")
    arithmetic.save_model(folder / "model", seed=0)
    return dict(
        model=str(folder / "model"),
        train_files=(write_rows(folder / "train.parquet", more_x(512, seed=0)),),
        val_files=(write_rows(folder / "val.parquet", more_x(200, seed=1)),),
    )


@pytest.fixture
def run(task, tmp_path):
    """run(name, **changes) runs train_reward.py in this process, in the folder `name`, and returns its metrics."""

    def main(name, **changes):
        settings = dict(
            train_batch_size=16,
            max_length=64,
            lr=2e-3,
            total_training_steps=4,
            test_freq=-1,
            default_local_dir=str(tmp_path / name),
        )
        return train_reward.main(build(train_reward.Args, **task | settings | changes))

    yield main
    h.leave_distributed()


@pytest.fixture(scope="module")
def trained(task, tmp_path_factory):
    """Folder of train_reward.py on two ranks for 30 steps, from the command line, with its output in output.txt."""
    folder = tmp_path_factory.mktemp("trained")
    settings = dict(max_length=64, train_batch_size=32, lr=2e-3, total_training_steps=30, test_freq=15, log_freq=20)
    words = h.flags(task | settings | dict(default_local_dir=folder, activation_checkpointing="none"))
    (folder / "output.txt").write_text(launch.run_file("train_reward.py", *words, nproc=2))
    return folder


def test_training_finds_the_rule_behind_the_preferences(trained):
    lines = h.read_jsonl(trained / "metrics.jsonl")
    train, val = [x for x in lines if "train/loss" in x], [x for x in lines if "val/loss" in x]
    assert [x["step"] for x in train] == list(range(1, 31)) and [x["step"] for x in val] == [0, 15, 30]
    assert val[0]["val/accuracy"] < 0.9 and val[2]["val/accuracy"] >= 0.95
    assert val[2]["val/loss"] < 0.2 < 0.5 < val[0]["val/loss"]
    for x in train:
        assert x["train/margin"] == pytest.approx(x["train/score_chosen"] - x["train/score_rejected"])
        assert x["train/grad_norm"] > 0 and x["train/accuracy"] * 32 == round(x["train/accuracy"] * 32)
    output = (trained / "output.txt").read_text()
    assert "new run, steps 1-30, 2 rank(s), 32 pairs per step\n" in output
    assert f"step 30 | held out: loss {val[2]['val/loss']:.4f}, accuracy {val[2]['val/accuracy']:.4f}\n" in output
    assert f"step 20/30 | loss {train[19]['train/loss']:.4f} | accuracy {train[19]['train/accuracy']:.3f}" in output


def test_two_ranks_learn_what_one_learns(trained, run, tmp_path):
    settings = dict(train_batch_size=32, total_training_steps=30, test_freq=15, save_freq=0)
    run("one", **settings)
    ours, theirs = h.read_jsonl(tmp_path / "one" / "metrics.jsonl"), h.read_jsonl(trained / "metrics.jsonl")
    for mine, other in zip(ours, theirs, strict=True):  # in float32: only the order of sums differs
        for name in [k for k in mine if k.startswith(("train/", "val/"))]:
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), (mine["step"], name)


def test_the_export_gives_the_scores_that_the_run_reported(trained, task):
    folder = trained / "global_step_30" / "huggingface"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"] and config["id2label"] == {"0": "LABEL_0"}
    scalar_models.ScalarModel().check(AutoConfig.from_pretrained(folder), "--reward-model")
    packed, tokenizer = load_packed(folder, torch.float32), AutoTokenizer.from_pretrained(folder)
    rows = pq.read_table(task["val_files"][0]).to_pylist()
    learned = judge_of(packed, tokenizer, ranks_without_group(), max_length=64, max_tokens=1000)
    prompts, sides = [row["prompt"] for row in rows], ("chosen", "rejected")
    scores = [learned.score(prompts, [row[side] for row in rows]) for side in sides]
    last = [x for x in h.read_jsonl(trained / "metrics.jsonl") if "val/loss" in x][-1]
    assert last["val/accuracy"] == pytest.approx(sum(c > r for c, r in zip(*scores, strict=True)) / 200)
    nll = [math.log1p(math.exp(r - c)) for c, r in zip(*scores, strict=True)]
    assert last["val/loss"] == pytest.approx(sum(nll) / 200, rel=1e-4)
    assert last["val/margin"] == pytest.approx((sum(scores[0]) - sum(scores[1])) / 200, rel=1e-4)
    plain = load_plain(folder, torch.float32)
    for row, expected in list(zip(rows, scores[0], strict=True))[:5]:
        messages = [*row["prompt"], {"role": "assistant", "content": row["chosen"]}]
        ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), return_tensors="pt")["input_ids"]
        assert plain(ids).logits.item() == pytest.approx(expected, abs=1e-5)


@pytest.fixture
def in_double(monkeypatch):
    """Train in float64, so that what is equal up to rounding stays so through Adam."""
    monkeypatch.setattr(Qwen2RMSNorm, "forward", h.norm_in_double)
    monkeypatch.setattr(models, "load_pretrained", h.load_in_double())


def test_two_steps_are_what_plain_transformers_computes(run, task, tmp_path, in_double):
    settings = dict(grad_clip=0.5, weight_decay=0.1, lr_scheduler_type="constant", seed=3, total_training_steps=2)
    metrics = run("run", **settings, beta2=0.9)

    head = load_packed(task["model"], head_seed=3).score.weight.detach()
    model = AutoModelForSequenceClassification.from_pretrained(task["model"], num_labels=1, dtype=torch.float64)
    model.score.weight.data, model.config.pad_token_id = head, None
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    rows = pq.read_table(task["train_files"][0]).to_pylist()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.9), weight_decay=0.1)
    for step in range(2):
        gaps = []
        for row in prompts_for_step(rows, step, 16, 3):
            header = f"<|im_start|>user\n{row['prompt'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
            chosen, rejected = (
                model(**tokenizer(f"{header}{row[side]}<|im_end|>\n", return_tensors="pt")).logits[0, 0]
                for side in ("chosen", "rejected")
            )
            gaps.append(chosen - rejected)
        loss = torch.stack([torch.log1p(torch.exp(-gap)) for gap in gaps]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        optimizer.zero_grad()
    assert norm > 0.5
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-9)
    assert metrics["train/accuracy"] == sum(gap.item() > 0 for gap in gaps) / 16
    assert metrics["train/margin"] == pytest.approx(torch.stack(gaps).mean().item(), rel=1e-9)
    exported = h.weights(tmp_path / "run" / "global_step_2")
    for name, expected in model.named_parameters():
        assert (exported[name] - expected).abs().max() < 2e-6, name


def test_memory_flags_do_not_change_the_numbers(run, in_double):
    runs = [
        run(checkpointing, max_token_len_per_gpu=budget, activation_checkpointing=checkpointing, total_training_steps=2)
        for budget, checkpointing in ((16384, "none"), (128, "full"))
    ]
    for name in ("train/loss", "train/grad_norm", "train/margin", "train/score_chosen"):
        assert runs[1][name] == pytest.approx(runs[0][name], rel=1e-9), name


def test_a_resumed_run_continues_bit_by_bit(run, tmp_path):
    settings = dict(save_freq=1, total_training_steps=2)
    run("unbroken", **settings)
    shutil.copytree(tmp_path / "unbroken", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "global_step_2")
    run("broken", **settings)
    states = [h.saved_state(tmp_path / name / "global_step_2") for name in ("unbroken", "broken")]
    h.assert_same(*states)
    lines = [h.timeless(h.read_jsonl(tmp_path / name / "metrics.jsonl")) for name in ("unbroken", "broken")]
    assert lines[0] == lines[1] and len(lines[0]) == 2


def test_training_goes_on_from_a_reward_model(trained, run):
    metrics = run("on", model=str(trained / "global_step_30" / "huggingface"), total_training_steps=1, lr=0.0)
    assert metrics["train/accuracy"] >= 0.9 and metrics["train/loss"] < 0.25


def test_overlong_pairs_are_refused_or_dropped(run, task, tmp_path, capsys):
    rows = pq.read_table(task["train_files"][0]).to_pylist()[:20]
    rows[7]["rejected"], rows[8]["rejected"] = "y" * 60, "y" * 36  # 88 tokens, and exactly 64
    settings = dict(train_files=(write_rows(tmp_path / "rows.parquet", rows),), train_batch_size=19)
    words = r"row 7: has 88 tokens, over --max-length 64; raise it or add --filter-overlong"
    with pytest.raises(ValueError, match=words):
        run("run", **settings)
    metrics = run("run", **settings, filter_overlong=True, total_training_steps=None)
    assert "dropped 1 of 20 rows longer than --max-length 64" in capsys.readouterr().out
    assert math.isfinite(metrics["train/loss"])
    with pytest.raises(ValueError, match="--train-batch-size 20 must be between 1 and the 19 rows"):
        run("other", **settings | dict(train_batch_size=20, filter_overlong=True))


def test_an_update_that_is_not_finite_stops_the_run(run, task, tmp_path):
    shutil.copytree(task["model"], tmp_path / "broken")
    model = AutoModelForSequenceClassification.from_pretrained(task["model"], num_labels=1)
    model.score.weight.data.fill_(math.inf)
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(
        RuntimeError, match=f"step 1: gradient norm nan; the checkpoints in {tmp_path / 'run'} are intact"
    ):
        run("run", model=str(tmp_path / "broken"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(max_token_len_per_gpu=127), "--max-token-len-per-gpu 127 cannot hold one pair of 2 x --max-length = 128"),
        (dict(max_length=30), "row 0: has .* tokens, over --max-length 30; raise it or add --filter-overlong"),
        (dict(max_length=30, filter_overlong=True), "all 512 rows are longer than --max-length 30; raise it"),
        (dict(max_length=129), "--max-length = 129 tokens, but .* has 128 positions; lower it"),
        (dict(train_batch_size=0), "--train-batch-size 0 must be at least 1"),
        (dict(train_batch_size=513), "--train-batch-size 513 must be between 1 and the 512 rows"),
        (dict(total_training_steps=0), "--total-training-steps 0 must be at least 1"),
        (dict(resume_mode="/no/such/step"), "--resume-mode /no/such/step: not a complete checkpoint"),
    ],
)
def test_mistakes_are_refused_before_a_model_is_loaded(run, monkeypatch, tmp_path, changes, words):
    monkeypatch.setattr(*h.headers_only(AutoModelForSequenceClassification))
    with pytest.raises(ValueError, match=words):
        run("run", **changes)
    assert not (tmp_path / "run").exists()

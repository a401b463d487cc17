"""Values of PPO: packed ones against transformers' own score of every prefix, their gradients, and moving them away."""

import shutil
from dataclasses import replace

import helpers_scripts as h
import launch
import pytest
import torch
from helpers_data import ranks_without_group, update
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    FalconH1Config,
    Qwen2ForSequenceClassification,
)
from workers import values as worker
from workers.objectives import largest_error, make_batch, plain_model

from extras import judges
from extras.judges import critic
from extras.lora import LoRA
from extras.offload import host
from rl.data.types import take_rows
from rl.model import sharding
from rl.model.load import load_pretrained
from rl.ranks import init_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

WORKER = launch.TESTS / "judges" / "workers" / "values.py"
ALONE = ranks_without_group(dtype=torch.float64)


@pytest.fixture(scope="module")
def judge(tiny_model, tmp_path_factory) -> str:
    """Folder of a reward model, which gives a critic a head that is not zero."""
    folder = tmp_path_factory.mktemp("judge") / "model"
    shutil.copytree(tiny_model, folder)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    with torch.no_grad():
        model.score.weight.copy_(worker.head_weight(model.score.in_features))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def batch(tiny_model):
    return make_batch(plain_model(tiny_model))


def plain_critic(folder, dtype=torch.float64):
    """The critic as transformers runs it. Without a pad id it scores the last token of a sequence, whatever it is."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model.config.pad_token_id = None
    return model


def packed_critic(folder, dtype=torch.float64):
    return load_pretrained(str(folder), ALONE, critic.KIND, dtype=dtype)


def prefix_values(model, batch):
    """(B, T): for every token that counts, the score of all that stands before it, one prefix at a time."""
    rows = []
    for ids, mask in zip(batch.input_ids, batch.response_mask, strict=True):
        row = [model(input_ids=ids[None, :t]).logits[0, 0] if mask[t] else torch.tensor(0.0) for t in range(len(ids))]
        rows.append(torch.stack([x.to(model.dtype) for x in row]))
    return torch.stack(rows)


def plain_step(batch, rows, model):
    """Objective and gradients by name of one step with transformers' critic, one row at a time."""
    model.zero_grad()
    total = 0.0
    for i in rows:
        row = take_rows(batch, [i])
        hidden = model(input_ids=row.input_ids, output_hidden_states=True).hidden_states[-1]
        loss = worker.objective(row, nn.functional.pad(hidden[:, :-1] @ model.score.weight[0], (1, 0)))
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


def close(actual, expected, tolerance):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@torch.no_grad()
def test_values_equal_the_plain_score_of_what_stands_before_each_token(judge, batch, dtype, tolerance):
    expected = prefix_values(plain_critic(judge, dtype), batch)
    values = critic.token_values(packed_critic(judge, dtype), batch)
    assert values.shape == batch.input_ids.shape and values.dtype == dtype
    assert values[batch.response_mask > 0].std() > 0.5 and not values[batch.response_mask == 0].any()
    close(values, expected, tolerance)


@torch.no_grad()
def test_the_value_at_t_is_read_off_the_hidden_state_at_t_minus_1(judge, batch):
    model, states = packed_critic(judge), []
    handle = model.base_model.register_forward_hook(lambda m, args, out: states.append(out.last_hidden_state[0]))
    values = critic.token_values(model, batch)
    handle.remove()
    weight = model.score.weight[0]
    assert batch.lengths.tolist()[:2] == [14, 13]
    for row, t, packed_position in ((0, 5, 4), (0, 13, 12), (1, 1, 14), (2, 7, 33)):  # row 1 begins at 14, row 2 at 27
        close(values[row, t], states[0][packed_position] @ weight, 1e-12)


@torch.no_grad()
def test_values_ignore_padding_neighbors_and_the_token_they_precede(judge, batch):
    model = packed_critic(judge)
    values = critic.token_values(model, batch)
    padding = torch.arange(batch.input_ids.shape[1]) >= batch.lengths[:, None]
    assert torch.equal(
        critic.token_values(model, replace(batch, input_ids=batch.input_ids.masked_fill(padding, 79))), values
    )
    for i, length in enumerate(batch.lengths.tolist()):
        close(critic.token_values(model, take_rows(batch, [i]))[0], values[i, :length], 1e-12)
    ids = batch.input_ids.clone()
    ids[0, 8] = 79 - ids[0, 8]
    changed = critic.token_values(model, replace(batch, input_ids=ids))
    assert (changed != values).nonzero().tolist() == [[0, t] for t in range(9, 14)]


@torch.no_grad()
def test_the_head_runs_in_float32_on_bfloat16_states(judge, batch):
    expected = prefix_values(plain_critic(judge), batch)
    values = critic.token_values(packed_critic(judge, torch.bfloat16), batch)
    assert values.dtype == torch.float32 and not torch.equal(values, values.bfloat16().float())
    counts = batch.response_mask > 0
    assert (values - expected)[counts].abs().mean() < 0.1 * expected[counts].std()


def test_fixed_values_fill_their_own_rows(judge, batch):
    values = critic.fixed_values(packed_critic(judge), batch, [update([7, 0], []), update([3])])
    with torch.no_grad():
        expected = prefix_values(plain_critic(judge), batch)
    close(values[[0, 3, 7]], expected[[0, 3, 7]].to(values.dtype), 1e-6)
    assert values.shape == batch.input_ids.shape and not values.requires_grad
    assert not values[[1, 2, 4, 5, 6]].any()


# ---------------------------------------------------------------------------------------------------------------------
# Gradients and ranks


@pytest.fixture(scope="module")
def measured(judge, batch, tmp_path_factory):
    """World size -> what tests/model/workers/values.py found on each of its ranks."""
    folder = tmp_path_factory.mktemp("values")
    torch.save(batch, folder / "batch.pt")
    launch.run_file(WORKER, judge, folder / "batch.pt", folder, nproc=2)
    alone = worker.measure(judge, batch, init_ranks())
    h.leave_distributed()
    return {1: [alone], 2: [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]}


@pytest.fixture(scope="module")
def steps(judge, batch):
    """rows -> objective and gradients of one step by transformers' own model."""
    plain = plain_critic(judge)
    return {name: plain_step(batch, rows, plain) for name, rows in (("all", worker.ALL), ("one", worker.ONE))}


@pytest.mark.parametrize("max_tokens", [1000, 40, 1])
def test_gradients_reach_head_and_backbone_however_the_step_is_cut(judge, batch, steps, max_tokens):
    model = packed_critic(judge)
    expected_loss, expected = steps["all"]
    loss = worker.backward(model, batch, worker.ALL, max_tokens=max_tokens, ranks=ALONE)
    assert loss == pytest.approx(expected_loss, rel=1e-9)
    assert largest_error({name: p.grad for name, p in model.named_parameters()}, expected) < 1e-9
    assert all(x.abs().max() > 1e-3 for x in expected.values())


@pytest.mark.parametrize("rows", ["all", "one"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_do_not_depend_on_the_world_size(measured, steps, world_size, rows):
    """Of one row, a rank of two gets none: it runs an empty micro-batch, or the other one would wait for ever."""
    expected_loss, expected = steps[rows]
    for rank in measured[world_size]:
        loss, gradients = rank[rows]
        assert loss == pytest.approx(expected_loss, rel=1e-9)
        assert largest_error(gradients, expected) < 1e-9


@pytest.mark.parametrize("world_size", [1, 2])
def test_fixed_values_do_not_depend_on_the_world_size(judge, batch, measured, world_size):
    with torch.no_grad():
        expected = prefix_values(plain_critic(judge), take_rows(batch, [0]))[0]
    for rank in measured[world_size]:
        close(rank["values"][0, : len(expected)], expected.to(rank["values"].dtype), 1e-6)
        assert not rank["values"][1:].any()


def test_empty_rows_give_zeros_and_zero_gradients(judge, batch):
    model = packed_critic(judge)
    for rows in ([], [4]):  # row 4 has no token that counts
        micro = take_rows(batch, rows)
        values = critic.token_values(model, micro)
        assert values.shape == micro.input_ids.shape and not values.any()
        values.sum().backward()
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Models


def test_a_new_head_is_zero_and_moves_first(tiny_model, batch):
    model = packed_critic(tiny_model, torch.float32)
    head = model.score
    assert head.weight.shape == (1, 96) and head.weight.dtype == torch.float32 and head.bias is None
    values = critic.token_values(model, batch)
    assert not values.any()
    worker.objective(batch, values).backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()] == ["score.weight"]


def test_a_critic_keeps_the_weights_of_its_files(judge, tiny_model, world):
    for folder in (judge, tiny_model):
        written = load_file(f"{folder}/model.safetensors")
        model = worker.load_critic(folder, world)
        assert all(parameter.requires_grad for parameter in model.parameters())
        loaded = dict(sharding.full_tensors(model))
        assert all(torch.equal(loaded[name], x) for name, x in written.items())
        assert set(loaded) - set(written) == ({"score.weight"} if folder == tiny_model else set())
    assert load_file(f"{judge}/model.safetensors")["score.weight"].std() > 0.1


@pytest.fixture
def refused(judge, tmp_path):
    """Folders that are not critics, by what is wrong with them."""
    folders = {name: tmp_path / name for name in ("two_labels", "incomplete", "bert", "headless")}
    for folder in folders.values():
        shutil.copytree(judge, folder)
    AutoModelForSequenceClassification.from_pretrained(
        judge, num_labels=2, ignore_mismatched_sizes=True
    ).save_pretrained(folders["two_labels"])
    model = Qwen2ForSequenceClassification.from_pretrained(judge)
    weights = {name: x for name, x in model.state_dict().items() if "layers.1" not in name and name != "score.weight"}
    model.save_pretrained(folders["incomplete"], state_dict=weights)
    small = BertConfig(vocab_size=80, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_labels=1)
    AutoModelForSequenceClassification.from_config(small).save_pretrained(folders["bert"])
    FalconH1Config(vocab_size=80).save_pretrained(folders["headless"])
    return folders


def test_models_that_give_no_values_are_refused(refused, tiny_model, judge):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def check(folder, longest=worker.LONGEST):
        judges.check_critic(str(folder), tokenizer, LoRA(), policy=tiny_model, longest=longest)

    for name, words in (
        ("two_labels", "its head gives 2 labels, it has to give 1; choose another model"),
        ("incomplete", "its files lack 12 of its weights, model.layers.1.input_layernorm.weight among"),
        ("bert", "a BertForSequenceClassification has no linear `score` head"),
        ("headless", "transformers has no falcon_h1 with a score head; choose another model"),
    ):
        with pytest.raises(ValueError, match=f"--critic-model .*{name}: {words}"):
            worker.load_critic(str(refused[name]), ALONE)
    with pytest.raises(ValueError, match="--critic-model .*two_labels: its head gives 2 labels"):
        check(refused["two_labels"])
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(refused["headless"])
    with pytest.raises(ValueError, match="--critic-model .*headless: transformers has no falcon_h1"):
        check(refused["headless"])
    for folder in (tiny_model, judge):
        check(folder)
    with pytest.raises(ValueError, match=r"--max-prompt-length \+ --max-response-length = 513 tokens, but .* 512 pos"):
        check(judge, longest=513)
    tokenizer.add_tokens("<tool>")
    with pytest.raises(ValueError, match="--critic-model .*: its tokenizer is not that of --model"):
        check(judge)
    with pytest.raises(ValueError, match="--critic-model runs/no/huggingface: there is no such folder"):
        check("runs/no/huggingface")


# ---------------------------------------------------------------------------------------------------------------------
# Sharding


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_head_is_sharded_with_the_root_from_rank_0(measured, judge, world_size):
    written = load_file(f"{judge}/model.safetensors")
    for rank in measured[world_size]:
        assert rank["units"] == ["", "model.layers.0", "model.layers.1"]
        assert all(torch.equal(rank["loaded"][name], x.double()) for name, x in written.items())
        assert "score.weight" in rank["exported"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_after_offloading_changes_no_bit(measured, world_size):
    for rank in measured[world_size]:
        (expected, _), (actual, places) = rank["trained"]
        assert all(torch.equal(actual[name], x) for name, x in expected.items())
        assert all((x - rank["loaded"][name]).abs().max() > 5e-3 for name, x in expected.items())
        assert places == [{"cpu"}, set(), {"cpu"}, {"cpu"}, {"cpu"}, {"cpu"}]  # there is no state before the first step


@pytest.mark.parametrize("fused", [True, False])
def test_onload_moves_weights_and_moments_but_not_the_step(judge, world, batch, fused):
    """To the meta device, which stands for an accelerator: any machine has it."""
    model = worker.load_critic(judge, world)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    worker.backward(model, batch, worker.ONE, max_tokens=40, ranks=world)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    before = list(model.parameters())
    home = {x["step"].device for x in optimizer.state.values()}
    host.onload(model, torch.device("meta"), optimizer)
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]
    assert optimizer.param_groups[0]["params"] == before and list(optimizer.state) == before
    for p, state in optimizer.state.items():
        assert {p.device.type, state["exp_avg"].device.type, state["exp_avg_sq"].device.type} == {"meta"}
        assert state["step"].device in home and state["step"].item() == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU machine there is nowhere to offload from")
def test_offloading_frees_the_device_and_changes_no_bit(judge, world, batch):
    model = worker.load_critic(judge, world)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        worker.backward(model, batch, worker.ALL, max_tokens=1000, ranks=world)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def tensors():
        return [
            x.to_local() for p, state in optimizer.state.items() for x in (p, state["exp_avg"], state["exp_avg_sq"])
        ]

    step()
    expected, held = [x.cpu() for x in tensors()], torch.cuda.memory_allocated()
    host.offload(model, optimizer)
    assert held - torch.cuda.memory_allocated() >= sum(x.nbytes for x in expected)
    assert {x.device.type for x in tensors()} == {"cpu"}
    host.onload(model, world.device, optimizer)
    assert {x.device.type for x in tensors()} == {"cuda"}
    assert all(torch.equal(x.cpu(), y) for x, y in zip(tensors(), expected, strict=True))
    step()
    assert not any(torch.equal(x.cpu(), y) for x, y in zip(tensors(), expected, strict=True))

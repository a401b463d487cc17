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
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    Qwen2ForSequenceClassification,
)
from workers import values as worker
from workers.objectives import largest_error, make_batch, plain_model

from rl.data.types import Sampling, take_rows
from rl.model import critic, logprobs, reward_model, sharding
from rl.model import load as models
from rl.ranks import init_ranks
from rl.sampling.engines import hf

pytestmark = pytest.mark.usefixtures("one_thread")

WORKER = launch.TESTS / "models" / "workers" / "values.py"
ALONE = ranks_without_group(dtype=torch.float64)
TEMPERATURE = worker.TEMPERATURE


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
    model = reward_model.load_reward_model(str(folder), ALONE, dtype=dtype, new_head=nn.init.zeros_)
    return logprobs.add_packed_forward(model)


def shared_policy(folder, dtype=torch.float64):
    """A policy with a value head that is not zero."""
    policy = models.load_causal_lm(folder, ALONE, dtype=dtype)
    models.add_value_head(policy)
    with torch.no_grad():
        policy.value_head.weight.copy_(worker.head_weight(policy.value_head.in_features))
    return policy


def prefix_values(model, batch):
    """(B, T): for every token that counts, the score of all that stands before it, one prefix at a time."""
    rows = []
    for ids, mask in zip(batch.input_ids, batch.response_mask, strict=True):
        row = [model(input_ids=ids[None, :t]).logits[0, 0] if mask[t] else torch.tensor(0.0) for t in range(len(ids))]
        rows.append(torch.stack([x.to(model.dtype) for x in row]))
    return torch.stack(rows)


def plain_step(batch, rows, model, head=None):
    """Objective and gradients by name of one step with transformers' models, one row at a time.

    `head` (1, H) belongs to a policy, whose log-probs and entropies then take part.
    """
    model.zero_grad()
    weight = model.score.weight if head is None else head.clone().requires_grad_()
    total = 0.0
    for i in rows:
        row = take_rows(batch, [i])
        out = model(input_ids=row.input_ids, output_hidden_states=True)
        terms = [nn.functional.pad(out.hidden_states[-1][:, :-1] @ weight[0], (1, 0))]
        if head is not None:
            full = (out.logits[:, :-1] / TEMPERATURE).log_softmax(-1)
            logp, entropy = full.gather(-1, row.input_ids[:, 1:, None])[..., 0], -(full.exp() * full).sum(-1)
            terms += [nn.functional.pad(x, (1, 0)) for x in (logp, entropy)]
        loss = worker.objective(row, *terms)
        loss.backward()
        total += loss.item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return total, gradients if head is None else gradients | {"value_head.weight": weight.grad}


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
def test_values_ignore_padding_neighbours_and_the_token_they_precede(judge, batch):
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
def test_the_head_runs_in_float32_on_bfloat16_states(judge, tiny_model, batch):
    expected = prefix_values(plain_critic(judge), batch)
    shared = shared_policy(tiny_model, torch.bfloat16)
    *_, joint = critic.token_logprobs_and_values(shared, batch, sampling=Sampling(temperature=TEMPERATURE))
    for values in (critic.token_values(packed_critic(judge, torch.bfloat16), batch), joint):
        assert values.dtype == torch.float32 and not torch.equal(values, values.bfloat16().float())
        counts = batch.response_mask > 0
        assert (values - expected)[counts].abs().mean() < 0.1 * expected[counts].std()


@torch.no_grad()
def test_one_pass_over_a_shared_backbone_equals_two(judge, tiny_model, batch):
    policy = shared_policy(tiny_model)
    logp, entropy, values = critic.token_logprobs_and_values(policy, batch, sampling=Sampling(temperature=TEMPERATURE))
    assert torch.equal(values, critic.token_values(policy, batch))
    expected = logprobs.token_logprobs(policy, batch, sampling=Sampling(temperature=TEMPERATURE))
    assert torch.equal(logp, expected[0]) and torch.equal(entropy, expected[1]) and logp.min() < -8
    close(values, critic.token_values(packed_critic(judge), batch), 1e-12)  # the same backbone, the same head


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
def measured(tiny_model, judge, batch, tmp_path_factory):
    """World size -> what tests/models/workers/values.py found on each of its ranks."""
    folder = tmp_path_factory.mktemp("values")
    torch.save(batch, folder / "batch.pt")
    launch.run_file(WORKER, tiny_model, judge, folder / "batch.pt", folder, nproc=2)
    alone = worker.measure(tiny_model, judge, batch, init_ranks())
    h.leave_distributed()
    return {1: [alone], 2: [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]}


@pytest.fixture(scope="module")
def steps(tiny_model, judge, batch):
    """(kind of critic, rows) -> objective and gradients of one step by transformers' own models."""
    head = worker.head_weight(96).double()
    return {
        (kind, name): plain_step(batch, rows, *arguments)
        for name, rows in (("all", worker.ALL), ("one", worker.ONE))
        for kind, arguments in (("critic", (plain_critic(judge),)), ("shared", (plain_model(tiny_model), head)))
    }


@pytest.mark.parametrize("max_tokens", [1000, 40, 1])
@pytest.mark.parametrize("kind", ["critic", "shared"])
def test_gradients_reach_head_and_backbone_however_the_step_is_cut(judge, tiny_model, batch, steps, kind, max_tokens):
    model = packed_critic(judge) if kind == "critic" else shared_policy(tiny_model)
    expected_loss, expected = steps[kind, "all"]
    loss = worker.backward(model, batch, worker.ALL, max_tokens=max_tokens, ranks=ALONE)
    assert loss == pytest.approx(expected_loss, rel=1e-9)
    assert largest_error({name: p.grad for name, p in model.named_parameters()}, expected) < 1e-9
    assert all(x.abs().max() > 1e-3 for x in expected.values())


@pytest.mark.parametrize("rows", ["all", "one"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["critic", "shared"])
def test_gradients_do_not_depend_on_the_world_size(measured, steps, kind, world_size, rows):
    """Of one row, a rank of two gets none: it runs an empty micro-batch, or the other one would wait for ever."""
    expected_loss, expected = steps[kind, rows]
    for rank in measured[world_size]:
        loss, gradients = rank[kind][rows]
        assert loss == pytest.approx(expected_loss, rel=1e-9)
        assert largest_error(gradients, expected) < 1e-9


@pytest.mark.parametrize("world_size", [1, 2])
def test_fixed_values_do_not_depend_on_the_world_size(judge, batch, measured, world_size):
    with torch.no_grad():
        expected = prefix_values(plain_critic(judge), take_rows(batch, [0]))[0]
    for rank in measured[world_size]:
        for kind in ("critic", "shared"):
            close(rank[kind]["values"][0, : len(expected)], expected.to(rank[kind]["values"].dtype), 1e-6)
            assert not rank[kind]["values"][1:].any()


@pytest.mark.parametrize("kind", ["critic", "shared"])
def test_empty_rows_give_zeros_and_zero_gradients(judge, tiny_model, batch, kind):
    model = packed_critic(judge) if kind == "critic" else shared_policy(tiny_model)
    for rows in ([], [4]):  # row 4 has no token that counts
        micro = take_rows(batch, rows)
        values = critic.token_values(model, micro)
        assert values.shape == micro.input_ids.shape and not values.any()
        if kind == "shared":
            *others, values = critic.token_logprobs_and_values(
                model, micro, sampling=Sampling(temperature=1.0), entropy_grad=True
            )
            assert not values.any() and not any(x.any() for x in others)
            values = values + sum(others)
        values.sum().backward()
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Models


def test_a_new_head_is_zero_and_moves_first(tiny_model, batch):
    separate, policy = packed_critic(tiny_model, torch.float32), models.load_causal_lm(tiny_model, ALONE)
    models.add_value_head(policy)
    for model, head in ((separate, separate.score), (policy, policy.value_head)):
        assert head.weight.shape == (1, 96) and head.weight.dtype == torch.float32 and head.bias is None
        values = critic.token_values(model, batch)
        assert not values.any()
        worker.objective(batch, values).backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()} == {
            "score.weight" if model is separate else "value_head.weight"
        }


@pytest.mark.parametrize("flag", ["--critic-model", "--model"])
def test_a_critic_keeps_the_weights_of_its_files(judge, tiny_model, world, flag):
    for folder in (judge, tiny_model):
        written = load_file(f"{folder}/model.safetensors")
        paths = dict(critic_model=folder, model="unused") if flag == "--critic-model" else dict(model=folder)
        model = critic.load_critic(worker.arguments(**paths), world)
        assert all(parameter.requires_grad for parameter in model.parameters())
        loaded = dict(sharding.full_tensors(model))
        assert all(torch.equal(loaded[name], x) for name, x in written.items())
        assert set(loaded) - set(written) == ({"score.weight"} if folder == tiny_model else set())
    assert load_file(f"{judge}/model.safetensors")["score.weight"].std() > 0.1


@pytest.fixture
def refused(judge, tmp_path):
    """Folders that are no critics, by what is wrong with them."""
    folders = {name: tmp_path / name for name in ("two_labels", "incomplete", "bert")}
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
    return folders


def test_models_that_give_no_values_are_refused(refused, tiny_model, judge):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def check(folder, **changes):
        args = worker.arguments(model=tiny_model, critic_model=folder and str(folder), **changes)
        critic.check_critic(args, tokenizer)

    for name, words in (
        ("two_labels", "its head gives 2 labels, it has to give 1; choose another model"),
        ("incomplete", "its files lack 13 of its weights, model.layers.1.input_layernorm.weight among"),
        ("bert", "a BertForSequenceClassification has no linear `score` head"),
    ):
        with pytest.raises(ValueError, match=f"--critic-model .*{name}: {words}"):
            critic.load_critic(worker.arguments(critic_model=str(refused[name])), ALONE)
    with pytest.raises(ValueError, match="--critic-model .*two_labels: its head gives 2 labels"):
        check(refused["two_labels"])
    for folder in (tiny_model, judge, None):
        check(folder)
    with pytest.raises(ValueError, match=r"--max-prompt-length \+ --max-response-length = 513 tokens, but .* 512 pos"):
        check(judge, max_response_length=501)
    tokenizer.add_tokens("<tool>")
    with pytest.raises(ValueError, match="--critic-model .*: its tokenizer is not that of --model"):
        check(judge)
    with pytest.raises(ValueError, match="--critic-model runs/no/huggingface: no tokenizer can be loaded from there"):
        check("runs/no/huggingface")


# ---------------------------------------------------------------------------------------------------------------------
# Sharding


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_head_is_sharded_with_the_root_from_rank_0(measured, judge, world_size):
    for rank in measured[world_size]:
        for kind in ("critic", "shared"):
            assert rank[kind]["units"] == ["", "model.layers.0", "model.layers.1"]
        assert torch.equal(rank["shared"]["loaded"]["value_head.weight"], torch.zeros(1, 96, dtype=torch.float64))
        written = load_file(f"{judge}/model.safetensors")
        assert all(torch.equal(rank["critic"]["loaded"][name], x.double()) for name, x in written.items())


@pytest.mark.parametrize("world_size", [1, 2])
def test_engines_and_exports_do_not_get_the_value_head(measured, tiny_model, judge, world_size):
    names = [name for name, _ in AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters()]
    for rank in measured[world_size]:
        assert rank["shared"]["for the engine"] == dict.fromkeys(names, torch.float32)  # of the ranks' precision
        assert set(rank["shared"]["loaded"]) == {*names, "value_head.weight"}
        assert "score.weight" in rank["critic"]["for the engine"]


def test_an_engine_takes_a_push_of_a_policy_with_a_value_head(tiny_model, world, batch):
    policy = models.load_policy(worker.arguments(model=tiny_model), world, value_head=True)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    engine = hf.Engine(tiny_model, world, torch.float32, max_model_len=64)
    engine.update_weights(models.weights_for_engine(policy, world))
    pushed = dict(engine.model.named_parameters())
    for name, x in models.exported(policy, sharding.full_tensors(policy)):
        assert torch.equal(pushed.pop(name), x)
    assert not pushed


def test_exported_leaves_out_the_value_head_and_nothing_else(tiny_model):
    names = [
        "model.embed_tokens.weight",
        "value_head.weight",
        "model.value_head.weight",
        "value_head.bias",
        "score.weight",
    ]
    policy = models.load_causal_lm(tiny_model, ALONE)
    kept = models.exported(policy, ((name, torch.tensor(i)) for i, name in enumerate(names)))
    assert [(name, int(x)) for name, x in kept] == [(names[i], i) for i in (0, 2, 4)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["critic", "shared"])
def test_a_step_after_offloading_changes_no_bit(measured, kind, world_size):
    for rank in measured[world_size]:
        (expected, _), (actual, places) = rank[kind]["trained"]
        assert all(torch.equal(actual[name], x) for name, x in expected.items())
        assert all((x - rank[kind]["loaded"][name]).abs().max() > 5e-3 for name, x in expected.items())
        assert places == [{"cpu"}, set(), {"cpu"}, {"cpu"}, {"cpu"}, {"cpu"}]  # there is no state before the first step


@pytest.mark.parametrize("fused", [True, False])
def test_onload_moves_weights_and_moments_but_not_the_step(judge, world, batch, fused):
    """To the meta device, which stands for an accelerator: any machine has it."""
    model = critic.load_critic(worker.arguments(critic_model=judge), world)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    worker.backward(model, batch, worker.ONE, max_tokens=40, ranks=world)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    before = list(model.parameters())
    home = {x["step"].device for x in optimizer.state.values()}
    sharding.onload(model, torch.device("meta"), optimizer)
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]
    assert optimizer.param_groups[0]["params"] == before and list(optimizer.state) == before
    for p, state in optimizer.state.items():
        assert {p.device.type, state["exp_avg"].device.type, state["exp_avg_sq"].device.type} == {"meta"}
        assert state["step"].device in home and state["step"].item() == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU machine there is nowhere to offload from")
def test_offloading_frees_the_device_and_changes_no_bit(judge, world, batch):
    model = critic.load_critic(worker.arguments(critic_model=judge), world)
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
    sharding.offload(model, optimizer)
    assert held - torch.cuda.memory_allocated() >= sum(x.nbytes for x in expected)
    assert {x.device.type for x in tensors()} == {"cpu"}
    sharding.onload(model, world.device, optimizer)
    assert {x.device.type for x in tensors()} == {"cuda"}
    assert all(torch.equal(x.cpu(), y) for x, y in zip(tensors(), expected, strict=True))
    step()
    assert not any(torch.equal(x.cpu(), y) for x, y in zip(tensors(), expected, strict=True))

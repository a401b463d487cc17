"""Router replay: the trainer uses the experts that the engine chose, with its own weights for them."""

import functools
from dataclasses import replace

import helpers_families as families
import helpers_scripts as h
import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM
from workers.objectives import largest_error, make_batch, packed_backward, plain_gradients, plain_logprobs

import train_grpo
from extras.engines import hf
from extras.families import experts
from extras.families.ways import family, use_way
from extras.lora import experts as lora_experts
from rl.data.batching import collate, plan_update
from rl.data.types import Completion, Sample, Sampling, take_rows
from rl.flags import build
from rl.model.load import weights_for_engine
from rl.model.logprobs import token_logprobs
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.groups import sample_groups
from rl.sampling.loop import Loop, Trajectory
from rl.sampling.verify import check_engine

CASE = ("all terms", "token-mean")
NAMES = ("experts", "experts of Mixtral", "experts in groups")
SAMPLING = Sampling(temperature=0.7)  # as in workers/objectives.py
NONE = 255  # stands for no expert
E, K, LAYERS = 6, 2, 2


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    return {name: families.save(name, root / name.replace(" ", "_")) for name in NAMES}


@pytest.fixture(scope="module")
def batch(tiny_model):
    return families.in_float32(make_batch(families.plain(tiny_model).double()))


def replaying(path, ranks, **memory):
    model = families.load(path, ranks, **memory)
    family(model, "experts").replays = True
    return model


def forced(model, routed):
    """A plain model whose routers use the experts `routed` (n, layers, k) of the one sequence that it reads next."""
    kind = model.config.model_type

    def forward(own, layer, hidden):
        logits, gates, chosen = own(hidden)
        chosen, rows = chosen.clone(), []
        for t, given in enumerate(routed[:, layer].tolist()):
            if NONE not in given:
                chosen[t] = torch.tensor(given)
            p = logits[t].sigmoid() if kind == "glm4_moe" else logits[t].softmax(-1)
            row = torch.stack([p[e] for e in chosen[t].tolist()])
            row = row if kind == "qwen3_moe" else row / row.sum()  # whose norm_topk_prob is false by default
            rows.append(row * getattr(model.config, "routed_scaling_factor", 1.0))
        return logits, torch.stack(rows).to(gates), chosen

    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            own = type(module).forward.__get__(module)
            module.forward = functools.partial(forward, own, int(name.split(".")[2]))
    return model


def random_experts(batch):
    """(B, T, layers, k): different experts for each token, the same in rows that begin alike; some are not known."""
    random = np.random.default_rng(0)
    routed = np.array([random.permutation(E)[:K] for _ in range(batch.input_ids.numel() * LAYERS)], np.uint8)
    routed = routed.reshape(*batch.input_ids.shape, LAYERS, K)
    routed[:, 3::4] = NONE
    return torch.from_numpy(routed)


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
@pytest.mark.parametrize("name", NAMES)
def test_replay_gives_the_log_probs_and_gradients_of_the_forced_experts(name, checkpointing, folder_of, batch, world):
    model = replaying(folder_of[name], world, activation_checkpointing=checkpointing)
    routed = random_experts(batch)
    replayed = replace(batch, columns={"routed_experts": routed})
    results, expected = token_logprobs(model, replayed, sampling=SAMPLING), torch.zeros_like(batch.rollout_logp)
    without = token_logprobs(model, batch, sampling=SAMPLING)[0]
    plain = families.plain(folder_of[name])
    sums = {}
    for i, n in enumerate(batch.lengths.tolist()):
        forced(plain, routed[i, :n])
        expected[i, :n] = plain_logprobs(plain, batch.input_ids[i, :n].tolist())[0].detach()
        if batch.response_mask[i].any():
            _, grads = plain_gradients(plain, batch, [i], CASE)
            share = batch.response_mask[i].sum() / batch.response_mask.sum()
            sums = {key: sums.get(key, 0.0) + share * x for key, x in grads.items()}
    torch.testing.assert_close(results[0], expected * batch.response_mask, rtol=0, atol=2e-5)
    assert (results[0] - without).abs().max() > 0.05  # other experts make a difference
    model.zero_grad()
    packed_backward(model, replayed, range(8), CASE, max_tokens=40)
    assert largest_error(families.gradients(model), sums) < 5e-4


@pytest.mark.parametrize("name", NAMES)
def test_replay_of_what_the_router_would_choose_changes_nothing(name, folder_of, batch, world):
    model, plain = replaying(folder_of[name], world), families.plain(folder_of[name])
    routed = torch.full((*batch.input_ids.shape, LAYERS, K), NONE, dtype=torch.uint8)
    for i, n in enumerate(batch.lengths.tolist()):
        routed[i, :n] = torch.from_numpy(families.experts_of(plain, batch.input_ids[i, :n]))
    expected, _ = token_logprobs(model, batch, sampling=SAMPLING)
    found, _ = token_logprobs(model, replace(batch, columns={"routed_experts": routed}), sampling=SAMPLING)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_only_the_policy_replays(folder_of, batch, world):
    replayed = replace(batch, columns={"routed_experts": random_experts(batch)})
    reference = families.load(folder_of["experts"], world)
    expected = token_logprobs(reference, batch, sampling=SAMPLING)[0]
    assert torch.equal(token_logprobs(reference, replayed, sampling=SAMPLING)[0], expected)
    adapted = families.load_with_adapters(folder_of["experts"], world)
    family(adapted, "experts").replays = True
    base = families.models.load_reference(folder_of["experts"], world, adapted)
    changed = token_logprobs(adapted, replayed, sampling=SAMPLING)[0]
    torch.testing.assert_close(token_logprobs(base, replayed, sampling=SAMPLING)[0], expected, rtol=0, atol=1e-6)
    assert (changed - expected).abs().max() > 0.05


def test_the_engine_says_which_experts_it_has_chosen(folder_of, world):
    path = folder_of["experts in groups"]
    policy = replaying(path, world)
    flags = EngineFlags(router_replay=True)
    engine, rollout = hf.Engine(path, world, flags, longest=64), flags
    engine.update_weights(weights_for_engine(policy, world))
    rows = [dict(row_index=i, prompt_ids=[5 + i, 6, 7, 8][: 2 + i]) for i in range(2)]
    sampling = Sampling(n=2, max_tokens=9)
    samples = sample_groups(engine, rows, sampling, seed=1)
    plain = families.plain(path)
    for s in samples:
        ids = [*s.prompt_ids, *s.response_ids]
        routed = s.columns["routed_experts"]
        assert routed.dtype == np.uint8 and routed.shape == (len(ids), LAYERS, K)
        assert (routed[-1] == NONE).all()  # the engine has not read the last token
        expected = families.experts_of(plain, ids)[:-1]
        assert (np.sort(routed[:-1, 1]) == np.sort(expected[:, 1])).all()  # the first layer is dense
    assert check_engine(policy, samples, sampling, rollout, world) < 1e-6
    found = policy.family_metrics
    assert found["router/changed_frac"] == 0 and 1 <= found["router/load_max"] < E / K
    with torch.no_grad():  # the engine does not get this
        dict(policy.named_parameters())["model.layers.1.mlp.gate.weight"].to_local().add_(0.5 * torch.randn(E, 32))
    with pytest.raises(RuntimeError, match="disagree"):
        check_engine(policy, samples, sampling, rollout, world)
    assert policy.family_metrics["router/changed_frac"] > 0.1


@pytest.mark.parametrize(("later", "of_last"), [(3, 20), (4, NONE)], ids=["the same weights", "newer weights"])
def test_experts_of_a_conversation_are_those_of_the_first_time_that_they_were_read(later, of_last):
    """The last token of a turn is read with the answer to it. Here experts are 10 for the first turn, and then 20."""

    def turn(ids, num_read, expert):
        told = [np.full((n, LAYERS, K), expert, np.uint8) for n in (num_read - 1, 1)]
        return Completion(None, 0, ids, [-1.0] * len(ids), "stop", {"routed_experts": told})

    x = Trajectory(("a", 0), {"prompt_ids": [1, 2], "row_index": 0}, Sampling(max_tokens=20), None)
    x.take(turn([5, 6, 7], 4, 10), 3)
    x.tell([8, 9])
    x.take(turn([5, 6], 8, 20), later)
    found = x.sample().columns["routed_experts"]
    assert (found == found[:, :1, :1]).all() and found.shape == (9, LAYERS, K)
    assert found[:, 0, 0].tolist() == [10, 10, 10, 10, of_last, 20, 20, 20, NONE]


class TellsAtTheEnd(hf.Engine):
    """An engine that says which experts it has chosen when a response is complete, as vLLM 0.26 does."""

    def abort(self):
        aborted = super().abort()
        for x in aborted:
            x.columns = {}
        return aborted


@pytest.mark.parametrize("kind", [hf.Engine, TellsAtTheEnd])
def test_experts_of_tokens_that_older_weights_sampled_are_theirs_or_not_known(kind, folder_of, world):
    """A response is interrupted twice, by weights and without new ones. The tokens that older weights sampled have the
    experts that they had then, as far as the engine has said so, and those after them what the new weights choose.
    """
    old, new = (families.plain(folder_of["experts"]) for _ in range(2))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    engine = kind(folder_of["experts"], world, EngineFlags(router_replay=True), longest=64)
    engine.update_weights(dict(weights_for_engine(families.load(folder_of["experts"], world), world)).items())
    loop, before = Loop(engine), engine.policy_version
    way = Sampling(max_tokens=20, temperature=0.7)
    torch.manual_seed(0)
    for name in range(3):
        loop.start(name, dict(row_index=name, prompt_ids=[5 + name, 6, 7]), way)
    begun = loop.is_open() and [loop.step() for _ in range(4)]  # four tokens of each
    assert begun == [[]] * 4
    loop.interrupt()
    loop.start(3, dict(row_index=3, prompt_ids=[9, 8, 7, 6]), way)  # of which older weights have read nothing
    engine.update_weights(families.models.published(new, new.named_parameters()))
    loop.resume()
    assert loop.is_open() and [loop.step() for _ in range(3)] == [[]] * 3  # three more
    loop.interrupt()  # the weights stay the same
    loop.resume()
    done = dict(loop.run())
    assert sorted(done) == [0, 1, 2, 3]
    some = []
    for name, [s] in done.items():
        ids, start = [*s.prompt_ids, *s.response_ids], len(s.prompt_ids)
        versions, found = s.columns["versions"][start:], s.columns["routed_experts"]
        cut = 0 if name == 3 else start + 4  # the number of tokens when the new weights came
        assert (versions == before).sum() == max(cut - start, 0) and (versions > before).any()
        by_old, by_new = (families.experts_of(model, ids)[:-1] for model in (old, new))
        told = max(cut - 1, 0) if kind is hf.Engine else 0  # the engine has not read the last token by then
        assert (np.sort(found[:told]) == np.sort(by_old[:told])).all()
        assert (found[told:cut] == NONE).all() and (found[-1] == NONE).all()
        assert (np.sort(found[cut:-1]) == np.sort(by_new[cut:])).all()
        some.append((np.sort(by_old[:cut]) != np.sort(by_new[:cut])).any())
    assert any(some)  # the new weights would choose others for these tokens


@pytest.mark.parametrize("way", ["packed", "padded", "replayed"])
@pytest.mark.parametrize("name", ["experts", "experts in groups"])
def test_the_auxiliary_loss_by_a_loop(name, way, folder_of, world):
    """Its gradients are those of the formula, token by token; two micro-batches weigh as many tokens as they have."""
    model = families.load(folder_of[name], world, activation_checkpointing="selective")
    use_way(model, "padded" if way == "padded" else "packed")
    family(model, "experts").balance, family(model, "experts").replays = 0.5, way == "replayed"
    random = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 80, (n,), generator=random).tolist() for n in (9, 5, 12)]
    rows = collate([Sample(x[:2], x[2:], [1] * (len(x) - 2), [0.0] * (len(x) - 2), "stop", 0) for x in ids])
    routed = random_experts(rows)
    rows = replace(rows, columns={"routed_experts": routed}) if way == "replayed" else rows
    update = plan_update([9, 5, 12], max_tokens=14, ranks=world)
    assert sorted(update.micro_batches) == [[0, 1], [2]]
    assert [round(26 * take_rows(rows, x).share.sum().item(), 4) for x in ([0, 1], [2])] == [14, 12]
    model.zero_grad()
    for micro in update.micro_batches:
        (0.0 * token_logprobs(model, take_rows(rows, micro))[0].sum()).backward()
    plain, expected = families.plain(folder_of[name]), 0.0
    layers = range(name == "experts in groups", LAYERS)
    for micro in ([0, 1], [2]):
        chosen = []
        for i in micro:
            model_of_row = forced(plain, routed[i, : len(ids[i])]) if way == "replayed" else plain
            chosen.append(routed_tokens(model_of_row, ids[i]))
        for layer in layers:
            tokens = [pair for row in chosen for pair in zip(*row[layer], strict=True)]
            used, mean = [0.0] * E, [0.0] * E
            for logits, experts_of_token in tokens:
                for e in experts_of_token.tolist():
                    used[e] += 1 / len(tokens)
                for e in range(E):
                    mean[e] = mean[e] + logits.softmax(-1)[e] / len(tokens)
            share = sum(len(ids[i]) for i in micro) / 26
            expected = expected + 0.5 * share / len(layers) * E * sum(f * p for f, p in zip(used, mean, strict=True))
    plain.zero_grad()
    expected.backward()
    found = {name: x for name, x in families.gradients(model).items() if x.any()}
    wanted = {name: x.grad for name, x in plain.named_parameters() if x.grad is not None and x.grad.any()}
    assert 0.5 < expected < 3 and len(wanted) > 10
    assert largest_error(found, wanted) < 5e-4
    with torch.no_grad():
        token_logprobs(model, take_rows(rows, update.micro_batches[0]))
    assert all(router.balanced is None for _, router in family(model, "experts").routers)


def routed_tokens(model, ids):
    """By layer, logits (n, E), with gradients, and experts (n, k) of the router for a sequence."""
    found, hooks = {}, []
    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            layer = int(name.split(".")[2])
            note = functools.partial(lambda layer, m, i, out: found.__setitem__(layer, out[::2]), layer)
            hooks.append(module.register_forward_hook(note))
    model(input_ids=torch.tensor([list(ids)]))
    for hook in hooks:
        hook.remove()
    return found


@pytest.fixture(scope="module")
def adapted(folder_of, world):
    """A policy whose experts have adapters that add something."""
    model = families.load_with_adapters(folder_of["experts"], world, lora_rank=8, lora_alpha=12, lora_experts=True)
    return families.make_them_count(model)


def test_experts_with_adapters_compute_and_learn_as_in_peft(folder_of, batch, adapted, world, tmp_path):
    """Ours, PEFT with the files that we write, and the merged weights in transformers."""
    learning = {name: x for name, x in adapted.named_parameters() if x.requires_grad}
    assert sum("_proj_adapter" in name for name in learning) == 2 * LAYERS * 2
    weights = {name: x.detach().full_tensor() for name, x in learning.items()}
    adapted.packed.families[-1].save(tmp_path, "", weights)
    base = families.plain(folder_of["experts"])
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).eval().requires_grad_(True)
    ours = token_logprobs(adapted, batch, sampling=SAMPLING)[0]
    engine = hf.Engine(folder_of["experts"], world, longest=64)
    engine.update_weights(weights_for_engine(adapted, world))
    for i, n in enumerate(batch.lengths.tolist()):
        for model in (theirs, engine.model):
            expected = plain_logprobs(model, batch.input_ids[i, :n].tolist())[0].detach()
            expected = expected * batch.response_mask[i, :n]
            torch.testing.assert_close(ours[i, :n], expected, rtol=0, atol=2e-5)
    reference = families.models.load_reference(folder_of["experts"], world, adapted)
    without = token_logprobs(families.load(folder_of["experts"], world), batch, sampling=SAMPLING)[0]
    torch.testing.assert_close(token_logprobs(reference, batch, sampling=SAMPLING)[0], without, rtol=0, atol=1e-6)
    assert (ours - without).abs().max() > 0.05
    _, expected = plain_gradients(theirs, batch, range(8), CASE)
    expected = {name.replace(".default", ""): x for name, x in expected.items() if "lora" in name}
    adapted.zero_grad()
    packed_backward(adapted, batch, range(8), CASE, max_tokens=60)
    found = dict(lora_experts.for_peft(name, x) for name, x in families.gradients(adapted).items())
    assert largest_error({f"base_model.model.{name}": x for name, x in found.items()}, expected) < 5e-4


@pytest.mark.parametrize("has_experts", [False, True])
def test_peft_has_adapters_beside_experts_where_they_belong(has_experts, folder_of, batch, world, tmp_path):
    """Its layers gate_proj, up_proj and down_proj, of all tokens, are none of the experts'."""
    folder = folder_of["experts in groups"]
    model = families.load_with_adapters(folder, world, lora_rank=8, lora_experts=has_experts)
    learning = {name: x for name, x in families.make_them_count(model).named_parameters() if x.requires_grad}
    weights = {name: x.detach().full_tensor() for name, x in learning.items()}
    model.packed.families[-1].save(tmp_path, "", weights)
    theirs = PeftModel.from_pretrained(families.plain(folder), tmp_path / "adapter").eval()
    ours = token_logprobs(model, batch, sampling=SAMPLING)[0]
    for i, n in enumerate(batch.lengths.tolist()):
        expected = plain_logprobs(theirs, batch.input_ids[i, :n].tolist())[0].detach() * batch.response_mask[i, :n]
        torch.testing.assert_close(ours[i, :n], expected, rtol=0, atol=2e-5)


def test_adapters_of_experts_are_refused_before_weights_are_read(folder_of, tiny_model, world):
    for path, rank, words in ((tiny_model, 8, "has none"), (folder_of["experts"], 4, "a multiple of 8, not 4")):
        with pytest.raises(ValueError, match=f"--lora-experts.*{words}"):
            families.load_with_adapters(path, world, lora_rank=rank, lora_experts=True)


def test_metrics_of_routers_by_hand(world):
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 2.0, 0.0]])
    chosen = torch.tensor([[0, 1], [1, 0], [0, 2], [0, 1]])
    replayed = torch.tensor([[1, 0], [1, 2], [NONE, NONE], [0, 1]], dtype=torch.uint8)  # one of three is another set
    same = experts.Choice(logits, torch.zeros(4, 2), chosen, chosen.to(torch.uint8))
    seen = {0: [same], 3: [experts.Choice(logits, torch.zeros(4, 2), chosen, replayed)]}
    found = experts.describe(seen, world)
    p = logits.softmax(-1)
    # Experts have 4, 3 and 1 of 8 tokens: the busiest has 4 / (8 / 3).
    entropy = pytest.approx(float(-(p * p.log()).sum(-1).mean()), abs=1e-6)
    changed = pytest.approx(1 / 3)
    assert found.pop("router/aux_loss") == pytest.approx(3 * float((torch.tensor([1, 0.75, 0.25]) * p.mean(0)).sum()))
    assert found == {"router/load_max": pytest.approx(1.5), "router/entropy": entropy, "router/changed_frac": changed}
    del seen[0], seen[3]
    assert experts.describe(seen, world) == {}


ROUTERS = {  # what is special -> config and options
    "an argument more": (
        "Lfm2MoeConfig",
        dict(layer_types=["conv", "full_attention"], num_dense_layers=0, moe_intermediate_size=24, num_experts=E),
    ),
    "the opposite order": ("GraniteMoeConfig", dict(num_local_experts=E)),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_another_form(name, batch, world, tmp_path):
    kind, options = ROUTERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**families.SIZES | options | dict(num_experts_per_tok=K))
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for x in plain.parameters():
            x.add_(0.1 * torch.randn(x.shape))
    plain.save_pretrained(tmp_path)
    model = families.load(str(tmp_path), world)
    with experts.watched(family(model, "experts").routers) as seen:
        logp, _ = token_logprobs(model, batch)
    for row, ids, n, mask in zip(logp, batch.input_ids, batch.lengths, batch.response_mask, strict=True):
        own = plain(input_ids=ids[None, :n]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:n, None])[:, 0]
        torch.testing.assert_close(row[1:n], own * mask[1:n], rtol=0, atol=1e-5)
    for [choice] in seen.values():
        assert choice.logits.shape[1] == E and choice.gates.shape == choice.chosen.shape == (len(choice.logits), K)
    assert K < experts.describe(seen, world)["router/aux_loss"] < E
    family(model, "experts").balance = 1.0
    (0.0 * token_logprobs(model, replace(batch, share=torch.tensor(1.0)))[0].sum()).backward()
    assert any(
        x.any() for name, x in families.gradients(model).items() if "feed_forward.gate" in name or "router" in name
    )


def test_an_auxiliary_loss_that_would_do_nothing_is_refused(tmp_path):
    transformers.JetMoeConfig(**families.SIZES | dict(num_local_experts=E)).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"--router-aux-loss-coef 0\.1: .*a jetmoe, has routers that are not known here"
    ):
        experts.check_routed(str(tmp_path), "--router-aux-loss-coef 0.1")


def test_a_run_trains_with_replay(folder_of, tmp_path, runs_here):
    """Two updates per step: the log-probs that stay fixed are of the replayed experts too, so the first ratio is 1."""
    task = h.make_task(tmp_path)
    for flag in (dict(router_replay=True), dict(router_aux_loss_coef=0.1)):
        with pytest.raises(ValueError, match=f"--{next(iter(flag)).replace('_', '-')}.* needs a mixture of experts"):
            train_grpo.main(build(train_grpo.Args, **h.grpo_settings(task, tmp_path / "dense", **flag)))
    AutoConfig.from_pretrained(folder_of["experts"]).save_pretrained(task.model)
    families.plain(folder_of["experts"]).save_pretrained(task.model)
    settings = h.grpo_settings(task, tmp_path / "run", router_replay=True, ppo_mini_batch_size=1, lr=0.0)
    train_grpo.main(build(train_grpo.Args, **settings))
    for line in h.read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        if "actor/ppo_kl" in line:
            assert abs(line["actor/ppo_kl"]) < 1e-6 and line["rollout/logprob_gap_mean"] < 1e-5
            assert K < line["router/aux_loss"] < E
            assert line["router/changed_frac"] == 0 and line["router/load_max"] >= 1
    # With the same weights in each step, what is known of a response that outlives one is what they choose.
    h.add_stops(task)
    partial = dict(partial_rollouts=0.5, rollout_is="token", total_training_steps=4, max_response_length=40)
    changes = settings | partial | dict(default_local_dir=str(tmp_path / "partial"))
    train_grpo.main(build(train_grpo.Args, **changes))
    lines = [x for x in h.read_jsonl(tmp_path / "partial" / "metrics.jsonl") if "router/changed_frac" in x]
    assert len(lines) == 4 and all(x["router/changed_frac"] == 0 for x in lines)
    assert max(x["rollout/mixed_frac"] for x in lines) > 0
    fewer = AutoConfig.from_pretrained(task.model, num_experts=4)
    AutoModelForCausalLM.from_config(fewer).save_pretrained(task.model)
    with pytest.raises(ValueError, match=r"with 2 of 6 experts a token in 2 layers, and --model has 2 of 4 in 2; give"):
        train_grpo.main(build(train_grpo.Args, **settings))


ADAPTERS = dict(lora_rank=8, lora_experts=True)


@pytest.mark.parametrize("lora", h.some([{}, ADAPTERS], ADAPTERS), ids=["all weights", "adapters"])
def test_a_resumed_run_of_experts_is_the_unbroken_one(lora, folder_of, tmp_path, runs_here):
    task = h.make_task(tmp_path)
    families.plain(folder_of["experts"]).save_pretrained(task.model)
    for name, changes in (("unbroken", {}), ("resumed", dict(resume_mode=str(tmp_path / "unbroken/global_step_1")))):
        settings = h.grpo_settings(task, tmp_path / name, save_freq=1, total_training_steps=3, **lora, **changes)
        train_grpo.main(build(train_grpo.Args, **settings))
    left, right = (tmp_path / name / "global_step_3" for name in ("unbroken", "resumed"))
    h.assert_same(h.weights(left), h.weights(right))
    h.assert_same(h.saved_state(left), h.saved_state(right))
    lines = h.timeless(h.read_jsonl(tmp_path / "unbroken" / "metrics.jsonl"))
    assert lines[1:] == h.timeless(h.read_jsonl(tmp_path / "resumed" / "metrics.jsonl"))
    first, last = h.weights(tmp_path / "unbroken" / "global_step_1"), h.weights(left)
    assert any("experts" in name and not torch.equal(x, last[name]) for name, x in first.items())

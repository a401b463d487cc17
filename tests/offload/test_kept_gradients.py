"""Gradients of --param-offload have one place each in host memory: no bit of what is learned changes.

On a CPU all memory is the host's, and FSDP2 runs the same lines as with a GPU.
"""

import itertools
from types import SimpleNamespace

import helpers_scripts as h
import launch
import pytest
import torch
from kept_ranks import BAD, DEVICE, FSDP2, KEPT, Learner, loaded, padded_batch
from test_offload import check_ppo_learns_the_same
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from extras.offload import host
from extras.plan.rehearsal import forget_pass
from rl.model.logprobs import token_logprobs
from rl.model.sharding import own_part, with_part
from rl.ranks import init_ranks

pytestmark = pytest.mark.usefixtures("runs_here")


def check_same(seen):
    """The three ways learn alike, one update is skipped, and gradients are kept in one place, which FSDP2 alone does
    not do.
    """
    for way in (FSDP2, KEPT):
        for kind in ("norms", "gradients"):
            torch.testing.assert_close(seen[way][kind], seen[DEVICE][kind], rtol=0, atol=0, equal_nan=True)
        h.assert_same(seen[way]["weights"], seen[DEVICE]["weights"])
    assert all(seen[KEPT]["gradients"])
    finite = [bool(torch.tensor(x).isfinite()) for x in seen[DEVICE]["norms"]]
    assert finite == [number != BAD for number in range(len(finite))]
    assert len(seen[KEPT]["places"]) == 3 * len(finite) and seen[KEPT]["places"][-1]


def places(seen):
    """The places of gradients after each of the micro-batches that had gradients."""
    return [tuple(x) for x in seen["places"] if x]


@pytest.mark.parametrize("flags", [{}, {"ties": False}, {"learning": "self_attn"}], ids=["all", "untied", "few"])
def test_a_model_learns_the_same_bits_and_its_gradients_stay_where_they_are(tiny_model, monkeypatch, flags):
    monkeypatch.setattr(host, "CHUNK", 100)  # several per parameter
    ranks, seen = init_ranks(), {}
    for way in (DEVICE, FSDP2, KEPT):
        learner = Learner(loaded(tiny_model, ranks, way, **flags), ranks)
        for number in range(4):
            learner.update(number)
        seen[way] = learner.results()
        groups = [group for x in learner.policy.modules() for group in host.groups_of(x)]
        assert all(("post_backward" in vars(group)) == (way == KEPT) for group in groups) and groups
        assert hasattr(learner.policy, "clip_gradients") == (way != DEVICE)
        restored = [x for group in groups for x in group.fsdp_params]
        assert all(x.offload_to_cpu == (way != DEVICE) and "to_sharded_dtensor" not in vars(x) for x in restored)
    check_same(seen)
    assert len(set(places(seen[KEPT]))) == 1
    # Each of these places begins a page of memory. Those that FSDP2 takes do not, and may happen to be the same again.
    begins = {way: [x % 4096 == 0 for micro in seen[way]["places"] for x in micro] for way in (KEPT, FSDP2)}
    assert all(begins[KEPT]) and not all(begins[FSDP2])


def test_two_models_of_one_process_take_turns(tiny_model):
    """As a policy and its critic, each with its gradients there while the other's are computed."""
    ranks, seen = init_ranks(), {}
    for way in (DEVICE, FSDP2, KEPT):
        first, second = (Learner(loaded(tiny_model, ranks, way), ranks) for _ in range(2))
        for number in range(3):
            second.update(number + 1)
            first.update(number)
        seen[way] = [first.results(), second.results()]
    check_same({way: first for way, (first, _) in seen.items()})
    for way in (FSDP2, KEPT):
        h.assert_same(seen[way][1]["weights"], seen[DEVICE][1]["weights"])
    used = [set(places(x)) for x in seen[KEPT]]
    assert [len(x) for x in used] == [1, 1] and not set(*used[0]) & set(*used[1])


def test_gradients_that_are_there_are_added_to(tiny_model):
    """First others than the kept ones, then zeros in the kept ones, and then what an update has left there."""
    ranks, seen = init_ranks(), {}
    for way in (FSDP2, KEPT):
        learner = Learner(loaded(tiny_model, ranks, way), ranks)
        for x in learner.policy.parameters():
            x.grad = with_part(x, torch.full_like(own_part(x.detach()), 2.0))
        learner.add_gradients(0)
        learner.optimizer.zero_grad(set_to_none=False)
        learner.add_gradients(2)
        learner.add_gradients(3)
        seen[way] = learner.results()
    assert seen[KEPT]["norms"] == seen[FSDP2]["norms"]
    assert seen[KEPT]["norms"][0] > seen[KEPT]["norms"][1]
    for one, two in zip(seen[KEPT]["gradients"], seen[FSDP2]["gradients"], strict=True):
        h.assert_same(one, two)
    assert len(set(places(seen[KEPT]))) == 1


def test_a_backward_pass_that_fails_leaves_everything_as_it_was(tiny_model, monkeypatch):
    """As one that does not fit on the GPU, after which the rehearsal tries a smaller one."""
    ranks = init_ranks()
    fails = Learner(loaded(tiny_model, ranks, KEPT), ranks)
    pinned, calls = host._pinned, []

    def no_room(*args):
        calls.append(args)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no room")
        return pinned(*args)

    monkeypatch.setattr(host, "_pinned", no_room)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        fails.update(0)
    groups = [group for x in fails.policy.modules() for group in host.groups_of(x)]
    parameters = [x for group in groups for x in group.fsdp_params]
    assert all(x.offload_to_cpu and "to_sharded_dtensor" not in vars(x) for x in parameters) and parameters
    assert any(x.grad is not None for x in fails.policy.parameters())


@pytest.mark.parametrize("way", [DEVICE, FSDP2, KEPT])
def test_after_a_backward_pass_that_failed_a_model_learns_as_one_that_is_new(tiny_model, monkeypatch, way):
    """The second layer has its gradients by then, and the first one does not. They are zeros, as in the rehearsal."""
    ranks = init_ranks()
    fails, new = (Learner(loaded(tiny_model, ranks, way), ranks) for _ in range(2))

    def no_room(grad):
        raise torch.OutOfMemoryError("no room")

    def fail_behind(module, args, output):
        (output[0] if isinstance(output, tuple) else output).register_hook(no_room)

    hook = fails.policy.model.layers[0].register_forward_hook(fail_behind)
    logp, _ = token_logprobs(fails.policy, fails.batch)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        (0.0 * logp.sum()).backward()
    hook.remove()
    assert forget_pass(fails.policy)
    for number in range(3):
        for learner in (fails, new):
            learner.update(number)
    found, expected = fails.results(), new.results()
    torch.testing.assert_close(found["norms"], expected["norms"], rtol=0, atol=0, equal_nan=True)
    h.assert_same(found["weights"], expected["weights"])
    assert [len(x) for x in found["places"]] == [len(x) for x in expected["places"]] and found["places"][-1]


def test_a_version_of_fsdp2_that_cannot_be_told_of_a_failed_pass(tiny_model, monkeypatch):
    monkeypatch.delattr(FSDPModule, "reset_iter_state")
    assert forget_pass(torch.nn.Linear(1, 1)) and not forget_pass(loaded(tiny_model, init_ranks(), KEPT))


@pytest.fixture(scope="module")
def seen_by_ranks(task, tmp_path_factory):
    """What two ranks have seen, which share a copy of the model or have one each."""
    folder = tmp_path_factory.mktemp("ranks")
    launch.run_file("tests/offload/kept_ranks.py", task.model, folder, nproc=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def test_a_parameter_without_a_gradient_keeps_the_one_that_it_has(seen_by_ranks):
    """A parameter has fewer rows than there are ranks."""
    for seen in seen_by_ranks:
        # x is 1, 2 and 3 on rank 0, and twice that on rank 1.
        expected = [(5 * 3.0, 30.0, 15.0), (5 * 9.0, 30.0, 45.0), (5 * 18.0, 120.0, 90.0)]
        for found, (always, sometimes, one) in zip(seen["by hand"], expected, strict=True):
            assert torch.equal(found["always"], torch.full((3,), always))
            assert torch.equal(found["sometimes"], torch.full((5,), sometimes))
            assert torch.equal(found["one"], torch.full((1,), one))


def test_ranks_learn_the_same_bits(seen_by_ranks):
    for seen in seen_by_ranks:
        cases = {key[0] for key in seen if isinstance(key, tuple)}
        assert len(cases) == 3
        for flags in cases:
            found = {way: seen[flags, way] for way in (DEVICE, FSDP2, KEPT)}
            check_same(found)
            assert len(set(places(found[KEPT]))) == 1


def test_gradients_of_several_passes_of_a_forward_are_those_of_a_plain_loop(task, seen_by_ranks):
    """A rank with fewer passes than another one takes part in all, also where each has a whole model on its device."""
    model = AutoModelForCausalLM.from_pretrained(task.model)
    for rank, micro in itertools.product(range(2), range(2)):
        batch = padded_batch(rank, micro)
        for ids, length in zip(batch.input_ids, batch.lengths.tolist(), strict=True):
            logps = model(ids[None, :length]).logits[0].log_softmax(-1)
            (-sum(logps[t - 1, ids[t]] for t in range(2, length)) * (1 + micro)).backward()
    expected = {name: x.grad for name, x in model.named_parameters()}
    for seen in (rank["in passes"] for rank in seen_by_ranks):
        assert len(seen) == 6
        for gradients, runs, _ in seen.values():
            assert runs == [3, 6]
            torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)
        for shares in ("shared", "copies"):
            h.assert_same(seen[FSDP2, shares][0], seen[KEPT, shares][0])
        _, _, (first, second) = seen[KEPT, "shared"]
        assert len(first) > 20 and first == second


@pytest.mark.parametrize("lora_rank", h.some([0, 4], 0))
def test_ppo_learns_the_same_bits_with_weights_and_gradients_on_the_host(task, tmp_path, lora_rank):
    """A policy with adapters or without, its reference and its critic, and a run that is resumed."""
    check_ppo_learns_the_same(task, tmp_path, lora_rank, list, param_offload=True)


@pytest.mark.parametrize("ranks_here", [1, 10**6])
def test_gradients_are_clipped_by_all_cores_as_by_torch(monkeypatch, ranks_here):
    """With more ranks than cores, each has one core. A gradient may have no elements, and one may be missing."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
    xs, before = [nn.Parameter(torch.zeros(n)) for n in (2, 1, 0, 5)], torch.get_num_threads()
    xs[0].grad, xs[1].grad, xs[2].grad = torch.tensor([1.0, 2.0]), torch.tensor([-2.0]), torch.zeros(0)
    assert host.clip_on_all_cores(iter(xs), 6.0) == 3 and xs[0].grad.tolist() == [1, 2]
    assert host.clip_on_all_cores(iter(xs), 1.0) == 3 and xs[3].grad is None
    torch.testing.assert_close(xs[0].grad, torch.tensor([1 / 3, 2 / 3]))
    assert host.clip_on_all_cores([], 1.0) == 0 and torch.get_num_threads() == before
    others = []
    for x in (ys := [nn.Parameter(torch.zeros(n)) for n in (5000, 70_000, 1)]):
        x.grad = torch.randn(x.shape)
        others.append(nn.Parameter(x.detach()))
        others[-1].grad = x.grad.clone()
    assert torch.equal(host.clip_on_all_cores(ys, 0.5), nn.utils.clip_grad_norm_(others, 0.5))
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(ys, others, strict=True))


@pytest.mark.parametrize("lacks", ["post_backward", "fsdp_params", "device_handle", "to_sharded_dtensor", "nothing"])
def test_a_version_of_fsdp2_with_other_names_goes_its_own_way(lacks):
    """Made-up objects, as torch 2.11 has them: one group of parameters, or none."""
    names = {"sharded_param", "offload_to_cpu", "to_sharded_dtensor", "grad_offload_event"} - {lacks}
    group = {"post_backward": print, "fsdp_params": [SimpleNamespace(**dict.fromkeys(names))], "device_handle": None}
    group = SimpleNamespace(**{name: x for name, x in group.items() if name != lacks})
    unit = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_group=group))
    assert host.groups_of(unit) == [group]
    host.keep_gradients(group)
    assert (getattr(group, "post_backward", print) is print) == (lacks != "nothing")


def test_a_unit_may_have_no_group_of_parameters():
    """As it is said by torch 2.13, by torch 2.11, and by a version that nobody knows."""
    states = SimpleNamespace(_fsdp_param_groups=[]), SimpleNamespace(_fsdp_param_group=None), SimpleNamespace()
    for state in states:
        assert host.groups_of(SimpleNamespace(_get_fsdp_state=lambda state=state: state)) == []
    assert host.groups_of(torch.nn.Linear(1, 1)) == []

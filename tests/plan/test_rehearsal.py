"""What is rehearsed before a run is the largest micro-batch that it can have, and what does not fit gets a next way."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from transformers import Qwen2Config

from extras.offload import NO_OFFLOAD
from extras.plan import rehearsal
from extras.plan.rehearsal import largest_micro_batch
from rl.data.batching import plan_update, shared_prefix
from rl.data.types import take_rows
from rl.model.load import load_model
from rl.model.logprobs import token_logprobs
from rl.model.sharding import UNPLANNED, own_part
from rl.run.arguments import MemoryRL


@pytest.mark.parametrize(
    ("max_tokens", "max_length", "lengths"),
    [
        (16384, 8320, [8320, 8064]),
        (16384, 1152, [1152] * 14 + [256]),
        (2304, 1152, [1152, 1152]),
        (2305, 1152, [1152, 1152]),  # a sequence of one token has nothing to score
        (2306, 1152, [1152, 1152, 2]),
        (100, 1152, [1152]),  # a sequence is never cut
    ],
)
def test_largest_micro_batch_fills_the_budget(max_tokens, max_length, lengths):
    batch = largest_micro_batch(max_tokens, max_length, 1000)
    assert batch.lengths.tolist() == lengths and batch.input_ids.shape == (len(lengths), max_length)
    assert batch.response_mask.sum(1).tolist() == [length - 1 for length in lengths]
    assert all(mask[1:length].all() for mask, length in zip(batch.response_mask, lengths, strict=True))
    shared = shared_prefix(batch).tolist()
    assert shared == [0] * len(lengths)
    update = plan_update(lengths, max_tokens=max_tokens, shared=shared)
    assert update.micro_batches == [list(range(len(lengths)))]
    assert torch.equal(batch.input_ids, largest_micro_batch(max_tokens, max_length, 1000).input_ids)


def test_the_rehearsal_has_tokens_that_a_router_sends_to_many_experts():
    ids = largest_micro_batch(16384, 8320, 1000).input_ids
    assert 0 <= ids.min() and ids.max() < 1000
    counts = ids.flatten().bincount(minlength=1000)  # 16.6 of each on average
    assert counts.min() > 0 and counts.max() < 50


UNIT = 1024  # bytes that stand for a GiB


@pytest.fixture
def plan(monkeypatch, world):
    """plan(engine, **arguments) is the plan for an actor and a critic of 6 GiB each beside an engine of `engine` GiB.
    The GPU has 80 GiB, has `others` in use besides, and needs 10 for a micro-batch. Its counts are made up, since this
    runs where there is no GPU.
    """

    def weights(count):
        return nn.Linear(UNIT // 4, count, bias=False)

    def run(engine, names=("actor", "critic"), stepped=(), others=1, **arguments):
        trained = {name: (model := weights(6), torch.optim.AdamW(model.parameters())) for name in names}
        trained["actor"][0].config = Qwen2Config(vocab_size=80)
        if "reference" in trained:  # one that the run changes
            trained["reference"] = trained["reference"][0].requires_grad_(False), None
        for model, optimizer in (trained[name] for name in stepped):  # as a resumed run has it: 12 GiB of moments
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.state[model.weight].pop("step")
        if arguments.pop("lora", False):
            trained["actor"][0].lora = "adapters"
            trained["actor"][0].frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        flags = {name: arguments.pop(name) for name in ("optimizer_offload", "param_offload") if name in arguments}
        moments = 0 if flags.get("optimizer_offload") else 12 * len(stepped)
        in_use = 0 if flags.get("param_offload") else 6 * len(names) + moments
        counts = dict(
            empty_cache=lambda: None,
            reset_peak_memory_stats=lambda: None,
            memory_allocated=lambda: 0 if flags.get("param_offload") else trained["actor"][0].weight.grad.nbytes,
            max_memory_allocated=lambda: 10 * UNIT + 6 * UNIT,  # with the actor's gradients
            memory_reserved=lambda: UNIT,
            mem_get_info=lambda device: ((80 - in_use - others) * UNIT, 80 * UNIT),
        )
        for name, function in counts.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(rehearsal, "GIB", UNIT)
        monkeypatch.setattr(rehearsal, "take_rows", lambda batch, rows, device: batch)
        logprobs = arguments.pop("logprobs", lambda model, batch: (model.weight.sum(), model.weight.sum()))
        monkeypatch.setattr(rehearsal, "token_logprobs", logprobs)
        ranks = replace(world, device=torch.device("cuda"))
        group = MemoryRL(ppo_max_token_len_per_gpu=8, **UNPLANNED | NO_OFFLOAD | flags)
        sizes = dict(max_length=8, engine_memory=engine * UNIT)
        taken, found = rehearsal.rehearse(trained, [group], **sizes, ranks=ranks, **arguments)
        assert all(x.grad is None for x in trained["actor"][0].parameters())  # nothing is left of the rehearsal
        assert taken is group
        return found

    return run


def test_the_plan_adds_up_what_is_on_the_device(plan):
    """6 GiB of weights, 12 of moments and 6 of gradients for each model, a micro-batch of 10, and 1 of others."""
    end = "; a micro-batch 10.0, the engine 40.0"
    one = "memory of a GPU with 80.0 GiB: training 35.0, generating 59.0" + end
    assert plan(40, ("actor",)) == one and ", generating" not in plan(0, ("actor",))
    assert plan(40, ("actor",), others=4).endswith("training 38.0, generating 62.0" + end)
    assert plan(40).endswith("training 59.0, generating 77.0" + end)
    assert plan(40, offloaded=("critic",)).endswith("training 59.0, generating 59.0" + end)
    # A reference has weights only.
    assert plan(40, ("actor", "reference")).endswith("training 41.0, generating 65.0" + end)


def test_only_what_learns_has_a_gradient_in_the_rehearsal(plan):
    seen = {}

    def logprobs(model, batch):
        seen.update({name: x.grad is not None for name, x in model.named_parameters()})
        return model.weight.sum(), model.weight.sum()

    plan(40, ("actor",), lora=True, logprobs=logprobs)
    assert seen == {"weight": True, "frozen": False}


def test_the_plan_counts_moments_on_the_host_a_piece_at_a_time(plan):
    """12 GiB of weights, 12 of gradients and 1 of others; a pass needs 10, the step of one of the models 12."""
    assert "training 37.0, generating 53.0;" in plan(40, optimizer_offload=True)
    assert "training 37.0, generating 47.0;" in plan(40, optimizer_offload=True, offloaded=("critic",))


def test_the_plan_does_not_count_weights_on_the_host(plan):
    """A micro-batch has its 10 GiB and the actor's gradients, which are its own as soon as they are there."""
    assert "training 17.0, generating 41.0;" in plan(40, param_offload=True)


def test_a_resumed_run_needs_what_a_new_one_does(plan):
    """Of an actor whose first step is still to come the moments are not there, though the critic's are."""
    new = plan(40)
    assert plan(40, stepped=("critic",)) == plan(40, stepped=("actor", "critic")) == new
    for names in (("critic",), ("actor", "critic")):
        assert plan(40, stepped=names, offloaded=("critic",)) == plan(40, offloaded=("critic",))
        assert plan(40, stepped=names, optimizer_offload=True) == plan(40, optimizer_offload=True)


def test_the_plan_refuses_what_does_not_fit_beside_the_engine(plan):
    assert "generating 80.0;" in plan(43)
    with pytest.raises(RuntimeError, match=r"generating 81.0.*\. generating does not fit: lower --max-num-seqs or"):
        plan(44)
    with pytest.raises(RuntimeError, match="generating 81.0;"):  # such as a reference, or what NCCL has
        plan(43, others=2)
    assert plan(61, offloaded=("critic",))
    assert "training 80.0, " in plan(1, ("actor",), others=46)
    with pytest.raises(RuntimeError, match=r"training 81.0.*\. training does not fit: lower the limit of tokens"):
        plan(1, ("actor",), others=47)


def test_the_plan_refuses_a_teacher_that_does_not_fit_beside_the_policy_and_its_moments(plan):
    def teacher(gib):
        return nn.Linear(UNIT // 4, gib, bias=False)

    fits = plan(40, ("actor",), visiting=teacher(61))
    assert "scoring by --teacher-model 80.0;" in fits  # 6 + 12 + 1 beside it
    with pytest.raises(RuntimeError, match="--teacher-model 81.0; .*does not fit: let .* give --teacher-url, or set"):
        plan(40, ("actor",), visiting=teacher(62))
    assert plan(40, ("actor",), visiting=teacher(73), optimizer_offload=True)
    assert plan(40, ("actor",), visiting=teacher(99), param_offload=True)  # and so a layer at a time


def test_a_micro_batch_that_does_not_fit_says_how_much_was_free(plan):
    def logprobs(model, batch):
        raise torch.OutOfMemoryError

    words = "^a micro-batch of 8 tokens does not fit in the 7.0 GiB that were free of this GPU's 80.0 .* lower the "
    with pytest.raises(RuntimeError, match=words):
        plan(40, ("actor",), others=67, logprobs=logprobs)


# --- less fits than was planned


class Planned:
    """A model, and a GPU whose counts follow from the flags that were last taken. A micro-batch takes 2 bytes and, for
    each of its tokens, 4 bytes with "selective" and 1 byte with "full".
    """

    def __init__(self, monkeypatch, world, total, *, engine=0, stepped=False):
        self.model = nn.Linear(10, 1, bias=False)  # 40 bytes of weights and of gradients, and 80 of moments
        self.model.config = Qwen2Config(vocab_size=80)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        if stepped:
            self.model.weight.grad = torch.zeros_like(self.model.weight)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.full, self.passes, self.engine, self.total = 0, [], engine, total
        self.most = 10**6  # tokens of a pass, beyond which the GPU has no memory after all
        self.ranks = replace(world, device=torch.device("cuda"))
        counts = dict(
            empty_cache=lambda: None,
            reset_peak_memory_stats=lambda: None,
            memory_allocated=lambda: 0,
            max_memory_allocated=lambda: self.passes[-1][1],
            mem_get_info=lambda device: (total - 40 - (80 if stepped else 0) - 10, total),  # 10 of others
        )
        for name, function in counts.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(rehearsal, "take_rows", lambda batch, rows, device: batch)
        monkeypatch.setattr(rehearsal, "token_logprobs", self.run)
        monkeypatch.setattr(rehearsal, "FIRST", 20)
        monkeypatch.setattr(rehearsal, "recompute_layers", lambda model: setattr(self, "full", self.full + 1))

    def run(self, model, batch):
        tokens = int(batch.lengths.sum())
        level = 1 if self.full else 4
        if tokens > self.most:
            raise torch.OutOfMemoryError
        self.passes.append((tokens, 2 + level * tokens))
        return model.weight.sum(), model.weight.sum()

    def rehearse(self, *ways, max_length=10):
        trained = {"actor": (self.model, self.optimizer)}
        groups = [MemoryRL(ppo_max_token_len_per_gpu=n, **UNPLANNED | NO_OFFLOAD | flags) for n, flags in ways]
        found, text = rehearsal.rehearse(
            trained, groups, max_length=max_length, engine_memory=self.engine, ranks=self.ranks
        )
        return groups.index(found), text


MOVED, FULL = dict(optimizer_offload=True), dict(activation_checkpointing="full")
WAYS = ((100, {}), (60, {}), (100, MOVED), (60, MOVED), (100, FULL), (100, FULL | MOVED), (50, {}), (50, FULL | MOVED))


@pytest.mark.parametrize(
    ("total", "taken", "passes"),
    [
        # 50 that stay, 80 of moments, 40 of gradients, and the micro-batch
        (50 + 80 + 40 + 402, 0, [20, 20, 40, 100]),
        (50 + 80 + 40 + 401, 1, [20, 20, 40, 60]),
        (50 + 80 + 40 + 242, 1, [20, 20, 40, 60]),
        (50 + 80 + 40 + 241, 3, [20, 20, 40, 60]),  # without moments, 100 tokens are too many
        (50 + 40 + 242, 3, [20, 20, 40, 60]),
        # From here on, all of each layer is recomputed, which is measured again.
        (50 + 40 + 241, 4, [20, 20, 40, 20, 20, 40, 100]),
        (50 + 80 + 40 + 102, 4, [20, 20, 40, 20, 20, 40, 100]),
        (50 + 80 + 40 + 101, 5, [20, 20, 40, 20, 20, 40, 100]),
        (50 + 40 + 102, 5, [20, 20, 40, 20, 20, 40, 100]),
        (50 + 40 + 101, 7, [20, 20, 40, 20, 20, 40, 50]),  # one that would recompute less again is passed over
        # The step of the optimizer has all moments of one parameter on the device in any case.
        (50 + 40 + 80, 7, [20, 20, 40, 20, 20, 40, 50]),
    ],
)
def test_the_next_way_that_fits_is_taken(monkeypatch, world, total, taken, passes):
    seen = Planned(monkeypatch, world, total)
    index, text = seen.rehearse(*WAYS)
    assert index == taken and [n for n, _ in seen.passes] == passes
    assert seen.full == (1 if taken in (4, 5, 7) else 0)
    assert ("Other than planned: " in text) is (index > 0)
    if index == 3:
        assert text.endswith("Other than planned: --optimizer-offload True --ppo-max-token-len-per-gpu 60")


def test_moments_of_a_run_that_is_resumed_count_once(monkeypatch, world):
    assert Planned(monkeypatch, world, 50 + 80 + 40 + 402, stepped=True).rehearse(*WAYS)[0] == 0
    assert Planned(monkeypatch, world, 50 + 80 + 40 + 241, stepped=True).rehearse(*WAYS)[0] == 3


def test_a_way_that_the_engine_leaves_no_room_for_is_passed_over(monkeypatch, world):
    seen = Planned(monkeypatch, world, 1000, engine=1000 - 50 - 79)  # with moments, one byte too much
    assert seen.rehearse(*WAYS)[0] == 2 and [n for n, _ in seen.passes] == [20, 20, 40, 100]


@pytest.mark.parametrize(
    ("max_length", "tokens", "passes"),
    [(30, 30, [15, 15, 30, 30]), (10, 16, [8, 8, 16, 16]), (25, 60, [25, 25, 50, 60])],
)
def test_no_pass_is_larger_than_the_micro_batch_that_is_tried(monkeypatch, world, max_length, tokens, passes):
    seen = Planned(monkeypatch, world, 10**6)
    assert seen.rehearse((tokens, {}), (tokens, FULL), max_length=max_length)[0] == 0
    assert [n for n, _ in seen.passes] == passes


def test_a_pass_that_does_not_fit_after_all_gives_the_next_way(monkeypatch, world):
    seen = Planned(monkeypatch, world, 10**6)
    seen.most = 99
    assert seen.rehearse(WAYS[0], WAYS[1])[0] == 1 and [n for n, _ in seen.passes] == [20, 20, 40, 60]
    with pytest.raises(RuntimeError, match="a micro-batch of 100 tokens does not fit"):
        seen.rehearse(WAYS[0], (100, MOVED))


def test_weights_do_not_move_after_the_models_are_loaded(monkeypatch, world):
    away = dict(param_offload=True)
    seen = Planned(monkeypatch, world, 50 + 80 + 40 + 241)
    with pytest.raises(RuntimeError, match="training does not fit: .* --param-offload"):
        seen.rehearse(WAYS[0], WAYS[1], (100, away))


def test_the_only_way_is_tried_at_once(monkeypatch, world):
    seen = Planned(monkeypatch, world, 10**6)
    assert seen.rehearse(WAYS[0]) == (0, seen.rehearse(WAYS[0])[1]) and [n for n, _ in seen.passes] == [100, 100]


def test_with_weights_on_the_host_the_large_micro_batch_is_tried_at_once(monkeypatch, world):
    """Each pass moves all weights and gradients over the bus, which takes minutes for a 14B."""
    away = dict(param_offload=True)
    seen = Planned(monkeypatch, world, 10**6)
    seen.model.stays_on_host = True
    assert seen.rehearse((100, away), (60, away))[0] == 0 and [n for n, _ in seen.passes] == [100]
    seen.most = 99
    assert seen.rehearse((100, away), (60, away))[0] == 1 and [n for n, _ in seen.passes] == [100, 60]
    # The other one of two ranks would wait in the middle of a pass that does not fit.
    seen.most, seen.ranks = 10**6, replace(seen.ranks, size=2, data_size=2)
    assert seen.rehearse((100, away), (60, away))[0] == 0 and [n for n, _ in seen.passes][2:] == [20, 20, 40, 100]


def test_ranks_that_train_on_the_same_rows_try_a_micro_batch_together(monkeypatch, world):
    """100 tokens of a rank are 200 of two."""
    seen = Planned(monkeypatch, world, 10**6)
    seen.ranks = replace(seen.ranks, size=2, data_size=1)
    assert seen.rehearse((100, {}))[0] == 0 and [n for n, _ in seen.passes] == [200]


def keep(seen, x):
    seen.append(x.numel())
    return x


def test_layers_that_are_recomputed_later_have_the_same_gradients(tiny_model, world):
    batch = largest_micro_batch(40, 20, 80)
    gradients, saved = [], []
    for changes in ({}, dict(activation_checkpointing="none")):
        policy = load_model(tiny_model, world, memory=MemoryRL(compile=False, **changes), longest=20)
        for later in (False, True):
            if later:
                rehearsal.recompute_layers(policy)
            seen = []
            with torch.autograd.graph.saved_tensors_hooks(partial(keep, seen), lambda x: x):
                logp, entropy = token_logprobs(policy, take_rows(batch, range(2), world.device))
            (logp + entropy).sum().backward()
            gradients.append({name: own_part(x.grad).clone() for name, x in policy.named_parameters()})
            saved.append(sum(seen))
            policy.zero_grad()
    assert all(torch.equal(x, gradients[0][name]) for found in gradients[1:] for name, x in found.items())
    assert saved[1] == saved[3] < saved[2]  # what "selective" keeps is seen by its own hooks

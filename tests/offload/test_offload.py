"""Weights and moments in host memory: no bit of what is learned changes.

On a CPU all memory is the host's: this shows that what is moved comes back as it was.
"""

import mmap
from types import SimpleNamespace

import helpers_scripts as h
import launch
import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import sft
import train_ppo
from extras import offload
from extras.offload import host
from rl.flags import build
from rl.model import load as models
from rl.model import sharding
from rl.model.sharding import Memory
from rl.ranks import init_ranks
from rl.run import run
from rl.run.arguments import MemoryRL

pytestmark = pytest.mark.usefixtures("runs_here")


def end_of(folder, step):
    lines = h.timeless(h.read_jsonl(folder / "metrics.jsonl"))
    return h.saved_state(folder / f"global_step_{step}"), h.weights(folder / f"global_step_{step}"), lines


def check_ppo_learns_the_same(task, folder, lora_rank, moved, **flags):
    """PPO with these flags, in a run that is resumed, ends as without them, where nothing is `moved()` yet."""
    settings = dict(
        lora_rank=lora_rank, lr=1e-2, use_kl_loss=True, total_training_steps=2, ppo_max_token_len_per_gpu=130
    )

    def train(name, **changes):
        train_ppo.main(build(train_ppo.Args, **h.ppo_settings(task, folder / name, **settings | changes)))
        h.leave_distributed()
        return folder / name

    expected = end_of(train("plain"), 2)
    assert not moved()
    train("moved", total_training_steps=1, **flags)
    for one, two in zip(end_of(train("moved", **flags), 2), expected, strict=True):
        assert one == two if isinstance(one, list) else h.assert_same(one, two) is None


@pytest.mark.parametrize("lora_rank", h.some([0, 4], 4))
def test_ppo_learns_the_same_bits_wherever_its_state_is(task, tmp_path, monkeypatch, lora_rank):
    """Several micro-batches per update, a reference, a critic that moves as well, and a checkpoint that is resumed."""
    moved = []

    def offload(model, *rest):
        moved.append(type(model).__name__)
        return host.offload(model, *rest)

    monkeypatch.setattr(run, "offload", offload)
    check_ppo_learns_the_same(task, tmp_path, lora_rank, lambda: moved, optimizer_offload=True, critic_offload=True)
    assert set(moved) == {"FSDPQwen2ForSequenceClassification"}


def test_a_model_has_a_home_on_the_host_only_if_a_flag_says_so():
    homes = {x: MemoryRL(param_offload=x).home for x in (True, False, "auto")}
    assert homes[True].policy == CPUOffloadPolicy(pin_memory=False) and homes[False] is homes["auto"] is None
    assert Memory().home is None and MemoryRL(optimizer_offload=True).home is None


def test_two_ranks_learn_the_same_bits_wherever_their_state_is(task, tmp_path):
    found = {}
    for name, flags in {"plain": {}, "everything": dict(param_offload=True, optimizer_offload=True)}.items():
        settings = h.sft_settings(task, tmp_path / name, total_training_steps=2, max_token_len_per_gpu=256, **flags)
        launch.run_file("sft.py", *h.flags(settings), nproc=2)
        found[name] = h.saved_state(tmp_path / name / "global_step_2")
    h.assert_same(found["everything"], found["plain"])
    settings = h.sft_settings(task, tmp_path / "everything", max_token_len_per_gpu=256, total_training_steps=3)
    assert (
        sft.main(build(sft.Args, **settings, force_resume=True))["train/loss"] > 0
    )  # with nothing on the host any more


def test_moments_have_one_place_on_the_host_and_are_whole_for_every_reader(task):
    ranks = init_ranks()
    policy = sharding.shard(models.load_pretrained(task.model, ranks), ranks)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    seen = []
    host.keep_moments_on_host(optimizer, ranks.device)
    for _ in range(3):
        for x in policy.parameters():
            x.grad = torch.ones_like(x)
        optimizer.step()
        moments = [x for state in optimizer.state.values() for kind, x in state.items() if kind != "step"]
        assert all(isinstance(x, DTensor) and not x.requires_grad for x in moments) and len(moments) == 2 * len(
            list(policy.parameters())
        )
        seen.append([x.to_local().data_ptr() for x in moments])
    assert seen[0] == seen[1] == seen[2]
    first, state = next(iter(optimizer.state.items()))
    assert state["exp_avg"].shape == first.shape
    torch.testing.assert_close(state["exp_avg"].full_tensor(), torch.full(first.shape, 1 - 0.9**3))


@pytest.mark.parametrize("is_sharded", [True, False])
def test_steps_of_one_parameter_after_the_other_change_no_bit(task, is_sharded):
    """Frozen parameters, one without a gradient in some steps and one that gets its first late."""
    ranks = init_ranks()

    def train(on_host, steps, loaded=None):
        torch.manual_seed(0)
        policy = models.load_pretrained(task.model, ranks)
        policy = sharding.shard(policy, ranks) if is_sharded else policy
        every = list(policy.parameters())
        every[1].requires_grad_(False)
        optimizer = torch.optim.AdamW(every, lr=1e-2, fused=True)
        if loaded:
            weights, state = loaded
            for x, y in zip(every, weights, strict=True):
                x.data.copy_(y)
            optimizer.load_state_dict(state)
        if on_host:
            host.keep_moments_on_host(optimizer, ranks.device)
        for step in steps:
            for i, x in enumerate(every):
                waits = not x.requires_grad or (i == 2 and step < 2) or (i == 4 and step == 1)
                value = torch.sin(x.detach() * 100 + step)
                x.grad = None if waits else value
            given = [x.grad for x in every]
            optimizer.step()
            assert all(x.grad is y for x, y in zip(every, given, strict=True))  # as AdamW leaves them
        assert every[1] not in optimizer.state and (every[2] in optimizer.state) == (max(steps) >= 2)
        return [x.detach().clone() for x in every], optimizer.state_dict()

    expected = train(False, range(4))
    resumed = train(True, range(2, 4), loaded=train(True, range(2)))
    for weights, state in (train(True, range(4)), resumed):
        assert all(torch.equal(x, y) for x, y in zip(weights, expected[0], strict=True))
        assert state["state"].keys() == expected[1]["state"].keys()
        for i, kinds in state["state"].items():
            h.assert_same(kinds, expected[1]["state"][i])


def test_a_step_has_the_moments_of_one_parameter_on_the_device_at_a_time(task):
    """Seen from within AdamW's own step: only the parameter with a gradient has its moments elsewhere than at home."""
    ranks, seen = init_ranks(), []
    every = list(models.load_pretrained(task.model, ranks).parameters())
    optimizer = torch.optim.AdamW(every, lr=1e-3)
    own_step = optimizer.step

    def places():
        return [[y.data_ptr() for kind, y in optimizer.state.get(x, {}).items() if kind != "step"] for x in every]

    def watched_step():
        seen.append((places(), [x.grad is not None for x in every]))
        own_step()

    optimizer.step = watched_step
    host.keep_moments_on_host(optimizer, ranks.device)
    for _ in range(2):
        for x in every:
            x.grad = torch.ones_like(x)
        optimizer.step()
    home, second = places(), seen[len(every) :]
    assert len(second) == len(every) and all(len(set(pair)) == 2 for pair in home)
    for number, (there, learning) in enumerate(second):
        assert learning == [i == number for i in range(len(every))]
        assert [x != y for x, y in zip(there, home, strict=True)] == learning


@pytest.mark.parametrize("flags", [dict(param_offload=True), dict(optimizer_offload=True), {}])
def test_adamw_steps_on_all_cores_if_the_weights_are_on_the_host(monkeypatch, flags):
    """Also where torch has one thread, as with vLLM on a GPU, or with several ranks under torchrun."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(7)))
    monkeypatch.setattr(torch, "set_num_threads", torch._C.set_num_threads)  # vLLM on a CPU has put a no-op there
    before, memory, seen = torch.get_num_threads(), MemoryRL(**(offload.NO_OFFLOAD | flags)), []
    x, same = (torch.nn.Parameter(torch.linspace(-1, 1, 100_000)) for _ in range(2))
    optimizers = [torch.optim.AdamW([y], lr=0.1, fused=True) for y in (x, same)]
    own_step = optimizers[0].step
    optimizers[0].step = lambda: (seen.append(torch.get_num_threads()), own_step())
    offload.prepare_steps(optimizers[0], memory, torch.device("cpu"))
    torch.set_num_threads(1)
    for _ in range(3):
        for y, optimizer in zip((x, same), optimizers, strict=True):
            y.grad = y.detach().square()
            optimizer.step()
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == 1 and set(seen) == {3 if flags.get("param_offload") else 1}
    assert torch.equal(x, same)


def test_pinned_memory_has_pages_of_its_own():
    empty = torch.zeros(0)  # as a rank has of a parameter with fewer rows than there are ranks
    assert host._pinned(empty, torch.device("cpu")).shape == (0,)
    half = host._pinned(torch.zeros(3, 2).bfloat16(), torch.device("cpu"))
    assert half.data_ptr() % mmap.PAGESIZE == 0 and half.shape == (3, 2) and half.dtype == torch.bfloat16


def test_registered_memory_is_free_again_with_the_last_tensor_in_it(monkeypatch):
    """Made-up calls of the driver: this runs where there is no GPU."""
    registered = {}
    calls = SimpleNamespace(
        cudaHostRegister=lambda address, size, kind: registered.update({address: size}),
        cudaHostUnregister=lambda address: registered.pop(address),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    first, second = (host._pinned(torch.zeros(shape), torch.device("cuda")) for shape in [(3,), (50, 100)])
    assert registered == {x.data_ptr(): x.nbytes for x in (first, second)}
    assert all(address % mmap.PAGESIZE == 0 for address in registered)
    view = second.fill_(7)[1:]
    del first, second
    assert len(registered) == 1 and view.eq(7).all()
    del view
    assert not registered


LARGE = """
import re
import train_grpo
import torch
from extras.offload import host
from rl.ranks import init_ranks
init_ranks()
x = torch.ones(64 << 20, dtype=torch.uint8)
places = [x.data_ptr(), (y := host._pinned(x, torch.device("cpu"))).data_ptr()]
for part in re.split("^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read(), flags=re.M)[1:]:
    begin, end = (int(y, 16) for y in part.split()[0].split("-"))
    for at in places:
        if begin <= at < end:
            print("hg" in part.split("VmFlags:")[1].split())
"""


def test_large_tensors_of_the_host_are_asked_for_in_large_pages():
    """Those of torch, and those that are pinned. The kernel notes it as "hg", also where it has none to give."""
    assert launch.run("-c", LARGE).split()[-2:] == ["True", "True"]
    assert launch.run("-c", LARGE, THP_MEM_ALLOC_ENABLE="0").split()[-2:] == ["False", "False"]

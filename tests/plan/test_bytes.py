"""Bytes of a run by phase, against sums that are worked out by hand."""

import re
from dataclasses import replace

import pytest
import torch
from launch import ROOT
from torch import nn

from benchmarks import limited, make_model
from extras.lora import LoRA, adapters
from extras.plan import hardware, host, memory
from extras.plan.host import host_memory
from extras.plan.memory import GIB, Engine, Load, Model, Way, engine_bytes, host_bytes, least_engine, needed, pass_bytes
from extras.plan.sizes import Layer, Sizes, sizes_of
from rl.model import sharding

# Two layers with linear layers of widths 10, 2, 2, 10, 20, 20 and 10, and an embedding that is no LM head.
LAYER = Layer(parameters=100, results=64, inner=20, attention=10, cache=4, adapted=((10, 10), (20, 10)))
SIZES = Sizes(
    layers=(LAYER, LAYER),
    root=60,
    tower=0,
    head=25,
    vocabulary=5,
    hidden=10,
    key_heads=2,
    tensors=(25, 25, 10, 100, 100),
    expert_share=0.0,
)
P = 260
ONE = Load((Model(SIZES),), None, longest=7, ranks=1, local=1, shards=1)
ENGINE = Engine(SIZES, length=20, sequences=3, share=0.5)
OTHERS, ALONE, TOGETHER = memory.ALONE - memory.WITHOUT_ENGINE, memory.ALONE, memory.TOGETHER


def test_the_sizes_are_those_of_the_sums():
    assert SIZES.total == P and SIZES.adapters(2) == 2 * (20, 20, 40, 20)


@pytest.mark.parametrize(
    ("level", "per_token"),
    [
        ("full", 2 * (10 + 10)),  # the input of both layers
        ("selective", 2 * (10 + 10 + 2 * (64 + 10))),  # and products but the last, and attention
        ("none", 2 * (2 * (64 + 10) + 2 * 20 + 3 * 20) + 2 * 5),  # and the intermediate, and logits of the vocabulary
    ],
)
def test_a_pass_on_one_gpu_by_hand(level, per_token):
    gathered, layer, logits = 2 * P, 4 * 7 * 74, 10 * 5 * 7
    found = pass_bytes(ONE.models[0], ONE, Way(level, 7), learns=True)
    assert found == gathered + 7 * per_token + max(layer, logits)
    assert pass_bytes(ONE.models[0], ONE, Way(level, 3), learns=True) == found  # one sequence is never divided


def test_logits_exist_for_2048_tokens():
    one, two = (pass_bytes(ONE.models[0], ONE, Way("full", n), learns=True) for n in (4096, 8192))
    assert two - one == 4096 * (2 * 20 + 4 * 74)  # no logits
    wide = replace(ONE, models=(Model(replace(SIZES, vocabulary=10**6)),))
    one, two = (pass_bytes(wide.models[0], wide, Way("full", n), learns=True) for n in (4096, 8192))
    assert two - one == 4096 * 2 * 20 and one == 2 * P + 4096 * 40 + 10 * 10**6 * 2048


def test_slices_of_a_row_exchange_copies_of_a_layer():
    # 10 queries and 4 keys and values of two heads, or of four, since each of four ranks needs one: sent and received.
    for size, entries in ((2, 10 + 4), (4, 10 + 8)):
        sliced, way = replace(ONE, sliced=size), Way("full", 7)
        more = [
            pass_bytes(x.models[0], sliced, way, learns=learns) - pass_bytes(x.models[0], ONE, way, learns=learns)
            for x, learns in ((ONE, True), (ONE, False))
        ]
        assert more == [7 * 2 * 2 * entries] * 2


def test_without_compilation_a_layer_and_the_logits_take_more():
    plain = replace(ONE, compiles=False)
    assert pass_bytes(plain.models[0], plain, Way("full", 1000), learns=True) == 2 * P + 1000 * 40 + 8 * 1000 * 74
    wide = replace(plain, models=(Model(replace(SIZES, vocabulary=10**6)),))
    assert pass_bytes(wide.models[0], wide, Way("full", 7), learns=True) == 2 * P + 7 * 40 + 18 * 10**6 * 7


# What a GPU had, in the logs of runs: shape, GPUs, what was kept, tokens, rank of LoRA, layers, compiled, and the error
# that is allowed.
MEASURED = {
    "2026-11-23_2cc152f_ways-to-sample/training": ("1.5B", 1, "none", 16384, 0, None, True, 0.05),
    "2026-11-26_a9ea7f5_hybrid-step/step": ("4B-hybrid", 1, "selective", 8192, 0, None, True, 0.05),
    "2026-11-26_4c6febc_hybrid-step-two-gpus/step": ("4B-hybrid", 2, "selective", 8192, 0, None, True, 0.05),
    "2026-11-26_5f02779_hybrid-four-layers/step": ("4B-hybrid", 1, "selective", 8192, 0, 4, False, 0.1),
    "2026-11-26_5f02779_experts-beside-dense/dense": ("3B-dense", 2, "full", 16384, 32, None, False, 0.1),
    "2026-11-26_5f02779_experts-beside-dense/experts": ("30B-A3B", 2, "full", 16384, 32, None, False, 0.25),
    "2026-11-27_9b00452_lora-four/lora-32b-four": ("32B", 4, "selective", 4096, 32, None, True, 0.05),
    "2026-11-27_9b00452_lora-four/lora-30b-a3b-four": ("30B-A3B", 4, "selective", 16384, 32, None, True, 0.05),
}


@pytest.mark.parametrize("log", MEASURED)
def test_the_formulas_give_what_gpus_had(log, tmp_path):
    shape, gpus, level, tokens, rank, layers, compiled, error = MEASURED[log]
    make_model.config_of(shape, layers).save_pretrained(tmp_path)
    model = Model(sizes_of(str(tmp_path), lora=LoRA(lora_rank=rank)), rank=rank)
    load = Load((model,), None, longest=1152, ranks=gpus, local=gpus, shards=gpus, compiles=compiled)
    text = (ROOT / "benchmarks" / "results" / f"{log}.log").read_text()
    measured = float(re.search(r"a micro-batch ([\d.]+)", text)[1])
    assert pass_bytes(model, load, Way(level, tokens), learns=True) / GIB == pytest.approx(measured, rel=error)


def test_a_pass_on_two_gpus_by_hand():
    two = replace(ONE, ranks=2, local=2, shards=2)
    found = pass_bytes(two.models[0], two, Way("selective", 1000), learns=True)
    summed = (6 + 4 / 2) * 100 + 2 * 25  # of a layer while it is computed, and the head's gradient in bfloat16
    assert found == 2 * (60 + 200) + 1000 * 336 + 4 * 1000 * 74 + summed
    # With few tokens the sum of the largest unit's gradients is the most.
    large = replace(SIZES, root=10**6)
    two = replace(two, models=(Model(large),))
    found = pass_bytes(two.models[0], two, Way("selective", 7), learns=True)
    assert found == 2 * (10**6 + 200) + 8 * 10**6


def test_a_pass_with_adapters_by_hand():
    load = replace(ONE, models=(Model(SIZES, rank=2),))
    found = pass_bytes(load.models[0], load, Way("selective", 1000), learns=True)
    a = 2 * (20 + 20 + 40 + 20)
    per_layer = 64 + 10 + 2 * 2  # results of layers with their adapters, and those of A alone
    assert found == 2 * a + 1000 * 2 * (20 + 2 * per_layer) + 4 * 1000 * per_layer
    plain = replace(load, compiles=False)
    found = pass_bytes(load.models[0], plain, Way("selective", 1000), learns=True)
    assert found == 2 * a + 1000 * 2 * (20 + 2 * (per_layer + 10 + 10)) + 8 * 1000 * (per_layer + 10 + 10)
    # Without gradients nothing is kept but a layer's results, and weights are gathered.
    assert pass_bytes(load.models[0], load, Way("full", 1000), learns=False) == 2 * P + 2 * 1000 * 74


def test_compiled_layers_keep_no_result_of_an_adapter_alone():
    """Numbers that the forward pass of two adapted layers leaves for the backward pass, by torch's own hooks."""
    wide, narrow = (adapters.Adapted(nn.Linear(*x, bias=False), 2, 1.0, None) for x in ((10, 20), (20, 10)))
    unit = nn.Sequential(wide, nn.SiLU(), narrow)
    sharding.recompute([unit], "selective")
    for x in (wide.weight, narrow.weight):
        x.requires_grad_(False)
    compiled, weights = torch.compile(unit.forward, backend="aot_eager_decomp_partition"), {*unit.parameters()}
    kept = {}

    def keep(x):
        if not any(x.data_ptr() == w.data_ptr() for w in weights):
            kept[x.data_ptr()] = x.numel()
        return x

    compiles = torch._dynamo.config.patch(disable=False)  # vLLM's start on a CPU may have disabled it
    with compiles, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        compiled(torch.randn(7, 10, requires_grad=True))
    # The input, the results of both A, and those of the first layer. Those of its B would be 20 more, of the second 10.
    assert sum(kept.values()) == 7 * (10 + 2 + 20 + 2)


def test_the_phases_of_full_training_by_hand():
    way = Way("selective", 7)
    found = needed(ONE, way, 80 * GIB)
    micro = pass_bytes(ONE.models[0], ONE, way, learns=True)
    assert found.phases == {
        "updating": 4 * P + 8 * P + 4 * P + micro + OTHERS,
        "optimizer step": 4 * P + 8 * P + 4 * P + OTHERS,
    }
    found = needed(ONE, way._replace(optimizer_offload=True), 80 * GIB)
    assert found.phases == {
        "updating": 8 * P + micro + OTHERS,
        "optimizer step": 8 * P + 8 * 100 + OTHERS,  # the moments of the largest parameter
    }
    away = way._replace(param_offload=True)
    found, units = needed(ONE, away, 80 * GIB), 2 * (60 + 200)
    assert found.phases["optimizer step"] == OTHERS
    assert found.phases["updating"] == OTHERS + pass_bytes(ONE.models[0], ONE, away, learns=True)
    # In a layer its gradients, 10 bytes per parameter, and the head's come on top; or those of the root at the end.
    assert found.phases["updating"] == OTHERS + units + max(7 * 336 + 4 * 7 * 74 + 10 * 100 + 2 * 25, 10 * 100)


def test_the_engine_by_hand():
    own, sequence = 2 * P + memory.ENGINE, 2 * 2 * 4 * 32  # blocks of 16 tokens
    assert engine_bytes(ENGINE, 80 * GIB) == own + 4 * sequence
    assert engine_bytes(replace(ENGINE, share=0.01), 80 * GIB) == 0.8 * GIB
    assert least_engine(ENGINE) == own + 2 * sequence
    shared = replace(ENGINE, shared_by=2, is_fp8=True)
    assert engine_bytes(shared, 80 * GIB) == (200 + 2 * 60) / 2 + memory.ENGINE + 4 * sequence / 2
    four = replace(ENGINE, shared_by=4)  # two heads of keys: each is on two GPUs
    assert engine_bytes(four, 80 * GIB) == 2 * P / 4 + memory.ENGINE + 4 * sequence / 2


def test_the_phases_with_an_engine_by_hand():
    load = replace(ONE, engine=ENGINE)
    phases = needed(load, Way("full", 7), 80 * GIB).phases
    assert phases["sampling"] == 12 * P + engine_bytes(ENGINE, 80 * GIB) + ALONE
    assert needed(load, Way("full", 7), 80 * GIB).start == 4 * P + 0.5 * 80 * GIB + memory.CONTEXT
    assert needed(load, Way("full", 7, param_offload=True), 80 * GIB).start == 0.5 * 80 * GIB + memory.CONTEXT
    assert needed(ONE, Way("full", 7), 80 * GIB).start == 0
    stays = needed(replace(load, engine=replace(ENGINE, gives_back=False)), Way("full", 7), 80 * GIB).phases
    assert stays["updating"] - phases["updating"] == engine_bytes(ENGINE, 80 * GIB)


def test_other_models_by_hand():
    """A critic that is away while the engine samples, a reference, and a teacher that visits."""
    policy, critic = Model(SIZES), Model(SIZES, is_away=True)
    reference, teacher = Model(SIZES, is_frozen=True), Model(SIZES, is_frozen=True, is_away=True)
    load = replace(ONE, models=(policy, critic, reference, teacher), engine=ENGINE, ranks=2, local=2, shards=2)
    way = Way("full", 7)
    found = needed(load, way, 80 * GIB)
    there = 2 * 4 * P / 2 + 2 * P / 2
    micro = pass_bytes(policy, load, way, learns=True)
    assert found.phases["updating"] == there + 2 * (8 + 4) * P / 2 + micro + TOGETHER
    assert found.phases["sampling"] == there + 8 * P / 2 - 4 * P / 2 + engine_bytes(ENGINE, 80 * GIB) + TOGETHER
    visit = 2 * P / 2 + pass_bytes(teacher, load, way, learns=False)
    assert found.phases["scoring"] == there + 2 * 8 * P / 2 + visit + TOGETHER
    judged = replace(load, models=(policy,), scores=(SIZES,))
    assert needed(judged, way, 80 * GIB).phases["scoring"] == 12 * P / 2 + 2 * P / 2 + TOGETHER


def test_models_that_are_alike_count_each():
    """Such as the policy and the PRM of train_prime.py, which begins as a copy of it."""
    found = needed(replace(ONE, models=(Model(SIZES), Model(SIZES))), Way("full", 7), 80 * GIB)
    assert found.phases["optimizer step"] == 2 * 16 * P + OTHERS
    assert found.parts["weights"] == 2 * 4 * P and found.parts["AdamW"] == 2 * 8 * P


def test_adapters_leave_weights_in_16_bits():
    a = sum(SIZES.adapters(2))
    load = replace(ONE, models=(Model(SIZES, rank=2),))
    found = needed(load, Way("full", 7), 80 * GIB)
    assert found.phases["optimizer step"] == 2 * P + 4 * a + 8 * a + 4 * a + OTHERS


def test_a_vision_tower_does_not_learn_unless_a_flag_says_so():
    sizes = replace(SIZES, tower=25)
    frozen = needed(replace(ONE, models=(Model(sizes),)), Way("full", 7), 80 * GIB)
    learns = needed(replace(ONE, models=(Model(sizes, tower_learns=True),)), Way("full", 7), 80 * GIB)
    assert frozen.phases["optimizer step"] == 16 * (P - 25) + 2 * 25 + OTHERS
    assert learns.phases["optimizer step"] == 16 * P + OTHERS


def test_the_host_by_hand():
    process, staging = memory.PROCESS, memory.STAGING
    saved = 12 * P + 2 * P + staging  # the state, and the export
    assert host_bytes(ONE, Way("full", 7)) == process + saved
    assert host_bytes(replace(ONE, saves=False), Way("full", 7)) == process
    assert host_bytes(ONE, Way("full", 7, optimizer_offload=True)) == process + 8 * P + saved
    assert host_bytes(ONE, Way("full", 7, param_offload=True)) == process + 16 * P + saved
    a = sum(SIZES.adapters(2))
    adapters = replace(ONE, models=(Model(SIZES, rank=2),))
    assert host_bytes(adapters, Way("full", 7)) == process + 12 * a + 4 * P + staging
    assert host_bytes(adapters, Way("full", 7, param_offload=True)) == process + 2 * P + 28 * a + 4 * P + staging
    four = replace(ONE, ranks=8, local=4, shards=8)  # half of the state is on this machine
    assert host_bytes(four, Way("full", 7)) == 4 * (process + staging) + 12 * P / 2 + 2 * P
    copies = replace(ONE, ranks=8, local=4, shards=2)  # one copy is saved, by two of its ranks
    assert host_bytes(copies, Way("full", 7)) == 4 * (process + staging) + 12 * P + 2 * P


def test_the_host_has_what_is_away():
    critic = replace(ONE, models=(Model(SIZES), Model(SIZES, is_away=True)), saves=False)
    assert host_bytes(critic, Way("full", 7)) == memory.PROCESS + 12 * P
    assert host_bytes(critic, Way("full", 7, optimizer_offload=True)) == memory.PROCESS + 2 * 8 * P + 4 * P
    teacher = replace(ONE, models=(Model(SIZES), Model(SIZES, is_frozen=True, is_away=True)), saves=False)
    assert host_bytes(teacher, Way("full", 7)) == memory.PROCESS + 2 * P


def test_the_memory_of_a_container_is_that_of_its_smallest_group(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal:       1000 kB\nMemFree:         10 kB\n")
    assert host_memory(tmp_path) == 1000 * 1024
    write("proc/self/cgroup", "0::/pod/job\n")
    write("sys/fs/cgroup/memory.max", "max\n")
    write("sys/fs/cgroup/pod/memory.max", "512000\n")
    write("sys/fs/cgroup/pod/job/memory.max", "max\n")
    assert host_memory(tmp_path) == 512000
    write("sys/fs/cgroup/pod/job/memory.max", "256000\n")
    assert host_memory(tmp_path) == 256000
    write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/x\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")  # no limit
    assert host_memory(tmp_path) == 1000 * 1024
    write("sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "128000\n")
    assert host_memory(tmp_path) == 128000


def test_the_hardware_of_a_rank(monkeypatch):
    for name, value in dict(WORLD_SIZE="16", LOCAL_WORLD_SIZE="4", LOCAL_RANK="3").items():
        monkeypatch.setenv(name, value)
    assert hardware() is None  # without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 100 + device))  # free, and all of it
    monkeypatch.setattr(host, "host_memory", lambda: 7)
    assert hardware() == (103, 7, 16, 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"torchrun --nproc_per_node 4: this machine has 2 GPU\(s\)"):
        hardware()


def test_a_limited_gpu_looks_smaller_to_all_that_ask(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (5, 80))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device=None: (6, 80), raising=False)
    limited.shrink(24)
    assert torch.cuda.mem_get_info() == torch.cuda.mem_get_info(torch.device("cpu")) == (5, 24)
    assert torch.accelerator.get_memory_info() == (6, 24)

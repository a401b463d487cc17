"""Which way is chosen where memory flags are `auto`: by hand in a small case, and in order in large ones."""

import itertools
import json
import math
import re

import launch
import pytest
from transformers import Qwen2Config

import sft
import train_async
import train_distill
import train_dpo
import train_grpo
import train_ppo
import train_prime
import train_reward
from benchmarks.make_model import SHAPES
from extras.plan import Hardware, settle, ways
from extras.plan.memory import GIB, Load, Model, Way, needed
from extras.plan.sizes import Layer, Sizes
from extras.plan.ways import HOST_USABLE, USABLE, DoesNotFit, choose, load_of
from rl.flags import build
from rl.run.arguments import MemoryRL

SHOWN = ("0.5B", "1.5B", "7B", "14B", "32B")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(shape): a folder with config.json of a Qwen2.5."""

    def write(shape):
        hidden, layers, heads, key_heads, intermediate, tied = SHAPES[shape]
        config = Qwen2Config(
            vocab_size=151936,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            intermediate_size=intermediate,
            tie_word_embeddings=tied,
        )
        folder = tmp_path_factory.mktemp(shape)
        config.save_pretrained(folder)
        return str(folder)

    folders = {shape: write(shape) for shape in SHOWN}
    return folders.__getitem__


def hardware(gpu, host=1000, ranks=1, local=None):
    return Hardware(math.floor(gpu * GIB), math.floor(host * GIB), ranks, local or min(ranks, 8))


def chosen(args, *where, then=None):
    found = settle(args, [hardware(*where)], then)
    memory = found.memory
    _, tokens = ways.budget_of(memory)
    return Way(memory.activation_checkpointing, tokens, memory.optimizer_offload, memory.param_offload)


# --- the order


def test_the_order_of_ways():
    found = ways.ways(MemoryRL(), 3000, has_adapters=False)
    large, moved = (16384, 8192, 4096), lambda level, n: Way(level, n, optimizer_offload=True)
    assert found == [
        *(Way("selective", n) for n in large),
        *(moved("selective", n) for n in large),
        *(Way("full", n) for n in large),
        *(moved("full", n) for n in large),
        Way("selective", 3000),
        moved("selective", 3000),
        Way("full", 3000),
        moved("full", 3000),
        *(Way(level, n, param_offload=True) for n in (*large, 3000) for level in ("selective", "full")),
    ]
    assert ways.ways(MemoryRL(), 3000, has_adapters=True) == [x for x in found if not x.optimizer_offload]


@pytest.mark.parametrize(
    ("least", "counts"),
    [
        (1, {16384, 8192, 4096, 2048, 1024, 512, 1}),
        (600, {16384, 8192, 4096, 2048, 1024, 600}),
        (4096, {16384, 8192, 4096}),
        (5000, {16384, 8192, 5000}),
        (16384, {16384}),
        (20000, {20000}),
    ],
)
def test_a_micro_batch_holds_what_is_never_divided(least, counts):
    found = ways.ways(MemoryRL(), least, has_adapters=False)
    assert {x.tokens for x in found} == counts and len(found) == len(set(found)) == 6 * len(counts)


@pytest.mark.parametrize(
    "given",
    [
        dict(activation_checkpointing="none"),
        dict(activation_checkpointing="selective", ppo_max_token_len_per_gpu=7000),
        dict(optimizer_offload=True),
        dict(optimizer_offload=False, param_offload=False),
        dict(param_offload=True),
        dict(param_offload=False, ppo_max_token_len_per_gpu=500),
    ],
    ids=str,
)
@pytest.mark.parametrize("gpu", [24, 80, 141, 10**4])
def test_what_the_user_gave_wins(folder_of, given, gpu):
    args = build(train_grpo.Args, model=folder_of("1.5B"), max_prompt_length=100, max_response_length=400, **given)
    try:
        memory = settle(args, [hardware(gpu)]).memory
    except DoesNotFit:
        assert gpu < 100
        return
    found = vars(memory)
    assert {name: found[name] for name in given} == given | (
        {"optimizer_offload": False} if found["param_offload"] and "optimizer_offload" in given else {}
    )
    assert "auto" not in (found | dict(compile=True, dtype="bfloat16")).values()  # which are settled elsewhere


# --- a small case, by hand


LAYER = Layer(parameters=10**8, results=5000, inner=2000, attention=1000)
SMALL = Sizes(
    layers=(LAYER,) * 8,
    root=2 * 10**8,
    tower=0,
    head=10**8,
    vocabulary=10**5,
    hidden=1000,
    key_heads=10,
    tensors=(10**8,) * 10,
    expert_share=0.0,
)


def test_the_choice_by_hand():
    """A billion parameters on one GPU without an engine, and sequences of 1,000 tokens.

    Weights and gradients take 8 GB, AdamW 8 GB, gathered weights 2 GB, and others 1 GiB. A token keeps 2,000 bytes of
    each layer, with "selective" 14,000; logits take 2.048 GB, more than a layer.
    """
    load = Load((Model(SMALL),), None, longest=1000, ranks=1, local=1, shards=1)
    rest = 8e9 + 2e9 + GIB
    bytes_of = {
        Way("selective", 16384): rest + 8e9 + 16384 * 8 * 14000 + 2.048e9,
        Way("selective", 8192): rest + 8e9 + 8192 * 8 * 14000 + 2.048e9,
        Way("selective", 4096): rest + 8e9 + 4096 * 8 * 14000 + 2.048e9,
        Way("selective", 16384, True): rest + 16384 * 8 * 14000 + 2.048e9,
        Way("selective", 4096, True): rest + 4096 * 8 * 14000 + 2.048e9,
        Way("full", 16384, True): rest + 16384 * 8 * 2000 + 2.048e9,
        Way("full", 4096, True): rest + 4096 * 8 * 2000 + 2.048e9,
    }
    for way, expected in bytes_of.items():
        assert needed(load, way, 80 * GIB).phases["updating"] == pytest.approx(expected, rel=1e-12), way
        least = math.ceil(expected / USABLE)
        assert choose(load, MemoryRL(), Hardware(least, 10**13, 1, 1)).way == way
        assert choose(load, MemoryRL(), Hardware(least - 2, 10**13, 1, 1)).way != way
    # On the host 5 GiB of the process, 14 GB of a save and its buffer; then 8 GB of moments, or 16 of all.
    saved = 5 * GIB + 14e9 + 2**27
    enough = math.ceil(bytes_of[Way("full", 4096, True)] / USABLE)
    for way, host in ((Way("full", 4096, True), 8e9), (Way("selective", 16384, param_offload=True), 16e9)):
        assert needed(load, way, 80 * GIB).host == pytest.approx(saved + host, rel=1e-12)
    barely = Hardware(enough, math.ceil((saved + 8e9) / HOST_USABLE), 1, 1)
    assert choose(load, MemoryRL(), barely).way == Way("full", 4096, True)
    with pytest.raises(DoesNotFit, match="host memory"):
        choose(load, MemoryRL(), barely._replace(host=barely.host - 2))


# --- real shapes


@pytest.mark.parametrize(
    ("shape", "where", "flags", "expected"),
    [
        ("1.5B", (24, 128), {}, Way("full", 16384, optimizer_offload=True)),
        ("1.5B", (79.2, 128), {}, Way("selective", 16384)),
        ("7B", (79.2, 256), {}, Way("selective", 16384, param_offload=True)),
        ("7B", (79.2, 128), dict(lora_rank=32), Way("selective", 16384)),
        ("14B", (79.2, 512), {}, Way("full", 16384, param_offload=True)),
        # The published configuration of verl: two GPUs share an engine, and there are two updates and a reference.
        (
            "7B",
            (79.2, 512, 4),
            dict(tensor_model_parallel_size=2, use_kl_loss=True, ppo_mini_batch_size=64, max_prompt_length=512),
            Way("selective", 8192),
        ),
    ],
    ids=str,
)
def test_the_defaults_fit(folder_of, shape, where, flags, expected):
    assert chosen(build(train_grpo.Args, model=folder_of(shape), **flags), *where) == expected


LADDER = (8, 16, 20, 24, 32, 48, 80, 96, 141, 288, 1000)
HOSTS = (16, 64, 128, 256, 512, 4096)
CASES = [
    *itertools.product(SHOWN, (1, 2, 8), [{}]),
    *itertools.product(("1.5B", "7B"), (1, 4), [dict(lora_rank=8), dict(use_kl_loss=True), dict(param_offload=False)]),
]


@pytest.mark.parametrize(("shape", "ranks", "flags"), CASES, ids=str)
def test_more_memory_never_chooses_a_more_expensive_way(folder_of, shape, ranks, flags):
    args = build(train_grpo.Args, model=folder_of(shape), **flags)
    load = load_of(args, hardware(80, ranks=ranks))
    every = ways.ways(args.memory, 1536, has_adapters="lora_rank" in flags)

    def place(gpu, host):
        try:
            return every.index(choose(load, args.memory, hardware(gpu, host, ranks)).way)
        except DoesNotFit:
            return len(every)

    places = {(gpu, host): place(gpu, host) for gpu in LADDER for host in HOSTS}
    for (gpu, host), (more_gpu, more_host) in itertools.product(places, places):
        if more_gpu >= gpu and more_host >= host:
            assert places[more_gpu, more_host] <= places[gpu, host], (gpu, host, more_gpu, more_host)
    assert places[1000, 4096] == 0 and places[8, 16] > 0


def test_more_ranks_need_less_of_each_gpu(folder_of):
    args = build(train_grpo.Args, model=folder_of("7B"))
    every = ways.ways(args.memory, 1536, has_adapters=False)
    places = [every.index(chosen(args, 79.2, 4096, ranks)) for ranks in (1, 2, 4, 8)]
    assert places == sorted(places, reverse=True) and places[0] > places[-1]


def test_all_ranks_choose_for_the_smallest_machine(folder_of):
    args = build(train_grpo.Args, model=folder_of("14B"))
    small, large = hardware(80, 2000, 8), hardware(141, 4000, 8)
    mixed = settle(args, [large] * 4 + [small] * 4)
    assert mixed == settle(args, [small] * 8) == settle(args, [small] + [large] * 7)
    assert mixed.memory != settle(args, [large] * 8).memory
    hosts = [hardware(80, 4000, 8), hardware(80, 2000, 8)]
    assert settle(args, hosts) == settle(args, [small] * 2)


def test_the_others_are_the_more_expensive_ways_in_their_order(folder_of):
    args = build(train_grpo.Args, model=folder_of("1.5B"))
    found = settle(args, [hardware(24)])
    every = ways.ways(args.memory, 1536, has_adapters=False)
    rest = [Way(x.activation_checkpointing, x.ppo_max_token_len_per_gpu, *offloads(x)) for x in found.rest]
    assert rest == every[every.index(Way("full", 16384, optimizer_offload=True)) + 1 :]
    assert all(
        "auto" not in (vars(x) | dict(compile=True, dtype="bfloat16")).values() and x.fsdp_size is None
        for x in found.rest
    )


def test_the_others_fit_the_host_too(folder_of):
    """A save of 1.5B takes 14 bytes per parameter on the host, 20 GiB, and moments there 8 more, 32 GiB together."""
    args = build(train_grpo.Args, model=folder_of("1.5B"))
    plenty, little = (settle(args, [hardware(80, host)]).rest for host in (1000, 30))
    assert any(x.optimizer_offload for x in plenty) and any(x.param_offload for x in plenty)
    assert little and not any(x.optimizer_offload or x.param_offload for x in little)


def offloads(memory):
    return memory.optimizer_offload, memory.param_offload


def test_what_is_chosen_is_said(folder_of):
    args = build(train_grpo.Args, model=folder_of("1.5B"))
    lines = settle(args, [hardware(24, 128)]).text.splitlines()
    assert lines[0] == ("memory: --activation-checkpointing full --ppo-max-token-len-per-gpu 16384 --optimizer-offload")
    assert lines[1].startswith("planned for a GPU with 24.0 GiB: updating ") and lines[1].endswith("of 128.0 GiB")


# --- what a run holds


def count(args, *where):
    load = load_of(args, hardware(*where))
    return [(x.is_frozen, x.is_away, x.sizes.head > 0) for x in load.models], load


@pytest.mark.parametrize(
    ("script", "flags", "models"),
    [
        (train_grpo, {}, [(False, False, True)]),
        (train_grpo, dict(use_kl_loss=True), [(False, False, True), (True, False, True)]),
        (train_grpo, dict(use_kl_loss=True, lora_rank=4), [(False, False, True)]),  # the policy without adapters
        (train_ppo, dict(critic_offload=True), [(False, False, True), (False, True, False)]),
        (train_ppo, dict(use_kl_in_reward=True), [(False, False, True), (False, False, False), (True, False, True)]),
        (train_prime, dict(prm_offload=True), [(False, False, True), (False, True, True), (True, False, True)]),
        (train_dpo, {}, [(False, False, True), (True, False, True)]),
        (train_distill, dict(teacher_offload=True), [(False, False, True), (True, True, True)]),
        (train_distill, dict(teacher_url="http://x"), [(False, False, True)]),
        (train_async, {}, [(False, False, True)]),
        (sft, {}, [(False, False, True)]),
        (train_reward, {}, [(False, False, False)]),
    ],
    ids=str,
)
def test_the_models_of_each_script(folder_of, script, flags, models):
    path = folder_of("0.5B")
    teacher = dict(teacher_model=path) if script is train_distill else {}
    args = build(script.Args, model=path, **teacher, **flags)
    found, load = count(args, 80)
    assert found == models
    samples_here = script not in (sft, train_reward, train_async)
    assert (load.engine is not None) is samples_here
    assert load.longest == {sft: 2048, train_reward: 4096, train_dpo: 3072}.get(script, 1536)


def test_other_flags_of_a_run(folder_of):
    flags = dict(fsdp_size=2, save_freq=0, tensor_model_parallel_size=2, max_num_seqs=9, free_cache_engine=False)
    flags |= dict(rollout_quantization="fp8", gpu_memory_utilization=0.3, reward_model=folder_of("1.5B"))
    _, load = count(build(train_grpo.Args, model=folder_of("0.5B"), **flags), 80, 100, 16, 8)
    assert (load.shards, load.ranks, load.local, load.saves) == (2, 16, 8, False)
    engine = load.engine
    assert (engine.shared_by, engine.sequences, engine.share, engine.is_fp8) == (2, 9, 0.3, True)
    assert engine.gives_back is False and engine.length == 1536
    assert [x.head for x in load.scores] == [0] and load.scores[0].hidden == 1536


# --- a run that is resumed


def recorded(args, *where):
    found = settle(args, [hardware(*where)])
    return json.loads(json.dumps(found.record | vars(found.memory)))


def test_a_resumed_run_goes_the_same_way_even_if_another_one_was_planned(folder_of):
    args = build(train_grpo.Args, model=folder_of("1.5B"))
    then = recorded(args, 79.2, 128)
    fewer = then | dict(ppo_max_token_len_per_gpu=4096, activation_checkpointing="full")  # after a rehearsal
    found = settle(args, [hardware(79.2, 128)], fewer)
    assert found.memory.ppo_max_token_len_per_gpu == 4096 and found.memory.activation_checkpointing == "full"
    assert found.text.startswith("memory: as before, --activation-checkpointing full ")


@pytest.mark.parametrize(
    ("where", "flags", "then", "reason"),
    [
        ((79.2, 128, 2), {}, {}, "there were 1 ranks, and there are 2 now"),
        ((47, 128), {}, {}, "a GPU had 79.2 GiB, and has 47.0 now"),
        ((79.2, 128), dict(max_response_length=20000), {}, "flags or lengths have changed"),
        ((79.2, 128), dict(activation_checkpointing="full"), {}, "flags or lengths have changed"),
        ((79.2, 128), dict(use_kl_loss=True, gpu_memory_utilization=0.55), {}, None),
        ((79.2, 20), {}, {}, "it does not fit any more: it takes .* and 25.. of 20.0 on the host"),
        ((79.2, 128), {}, dict(ppo_max_token_len_per_gpu="many"), "flags or lengths have changed"),
        ((79.2, 128), {}, dict(param_offload=None), "flags or lengths have changed"),
    ],
    ids=str,
)
def test_a_resumed_run_says_why_it_goes_another_way(folder_of, where, flags, then, reason):
    model = folder_of("1.5B")
    record = recorded(build(train_grpo.Args, model=model), 79.2, 128) | then
    args = build(train_grpo.Args, model=model, **flags)
    try:
        found = settle(args, [hardware(*where)], record)
    except DoesNotFit:
        with pytest.raises(DoesNotFit):  # and so does a new run
            settle(args, [hardware(*where)])
        return
    if reason is None:
        assert "as before" in found.text
    else:
        first, *rest = found.text.splitlines()
        assert first.startswith("the checkpoint's --activation-checkpointing ") and "is not used again, since" in first
        assert re.search(reason, first), first
        assert "\n".join(rest) == settle(args, [hardware(*where)]).text


def test_a_long_sequence_that_is_too_much_for_a_gpu_is_divided(folder_of):
    flags = dict(
        model=folder_of("7B"), max_prompt_length=1000, max_response_length=255_001, tensor_model_parallel_size=4
    )
    long = build(train_grpo.Args, **flags)
    assert load_of(long, hardware(79.2, ranks=8)).longest == 256_001
    with pytest.raises(DoesNotFit, match="the run does not fit"):
        settle(long, [hardware(79.2, ranks=8)])
    sliced = build(train_grpo.Args, **flags, sequence_parallel_size=4)
    assert load_of(sliced, hardware(79.2, ranks=8)).longest == 64_001  # 256,001 / 4 rounded up
    assert settle(sliced, [hardware(79.2, ranks=8)]).memory.ppo_max_token_len_per_gpu == 64_001


def test_a_resumed_run_with_a_reference_more_may_not_fit_any_more(folder_of):
    args = build(train_grpo.Args, model=folder_of("1.5B"))
    planned = choose(load_of(args, hardware(79.2)), args.memory, hardware(79.2))
    barely = math.ceil(planned.needed.phases["updating"] / USABLE) / GIB
    more = build(train_grpo.Args, model=args.model, use_kl_loss=True)  # 2.9 GiB, and there are 2.8
    found = settle(more, [hardware(barely)], recorded(args, barely))
    first, *rest = found.text.splitlines()
    assert " is not used again, since it does not fit any more: it takes 55.2 of 55.0 GiB of a GPU, and " in first
    assert "\n".join(rest) == settle(more, [hardware(barely)]).text


def test_a_run_that_began_on_a_cpu_is_planned_anew_on_a_gpu(folder_of):
    args = build(train_grpo.Args, model=folder_of("0.5B"))
    then = vars(settle(args, [None]).memory)
    assert settle(args, [hardware(80)], then) == settle(args, [hardware(80)])


# --- nothing fits

NO_ROOM = dict(lora_rank=8, gpu_memory_utilization=0.9, max_num_seqs=8, param_offload=False)


@pytest.mark.parametrize(
    ("shape", "where", "flags", "words"),
    [
        ("7B", (79.2, 128), {}, "--param-offload, and then a machine needs 21.* GiB of host memory and has 128.0"),
        ("7B", (16, 999), {}, "vLLM needs 15.3 GiB of each GPU .* --gpu-memory-utilization 0.5 leaves it 8.0 of 16.0"),
        (
            "7B",
            (24, 999),
            dict(gpu_memory_utilization=0.9, param_offload=False),
            "does not fit: with .* updating takes",
        ),
        ("7B", (79.2, 999), dict(gpu_memory_utilization=0.94), "sampling takes .* lower --gpu-memory-utilization or"),
        ("7B", (79.2, 999), NO_ROOM, "vLLM cannot start: --gpu-memory-utilization 0.9 is 71.3 GiB .* of 79.2"),
        ("0.5B", (80, 8), {}, "host memory and has 8.0"),
    ],
    ids=str,
)
def test_one_sentence_says_what_does_not_fit(folder_of, shape, where, flags, words):
    args = build(train_grpo.Args, model=folder_of(shape), **flags)
    with pytest.raises(DoesNotFit, match=words) as error:
        settle(args, [hardware(*where)])
    assert "\n" not in str(error.value) and str(error.value).count(". ") == 0


def test_the_sentence_names_the_flags_of_the_script(folder_of):
    for script, flag in ((sft, "--max-token-len-per-gpu"), (train_grpo, "--ppo-max-token-len-per-gpu")):
        args = build(script.Args, model=folder_of("7B"))
        with pytest.raises(DoesNotFit, match=f" full {flag} 16384 --param-offload, and then a machine needs 21"):
            settle(args, [hardware(79.2, 128)])


LAUNCHED = """
import sys
from extras.plan import Hardware, settle
from rl.flags import build
from rl.run.command_line import parse
import train_grpo

def main(args):
    settle(args, [Hardware(8 * 2**30, 2**40, 2, 2)])
    print("it fits")

main(parse(train_grpo.Args, ""))
"""


@pytest.mark.thorough
def test_two_ranks_say_it_once_and_without_a_traceback(folder_of, tmp_path):
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    process = launch.start(str(script), "--model", folder_of("7B"), nproc=2, cwd=launch.ROOT, PYTHONPATH=launch.ROOT)
    printed = launch.finish(process)
    assert process.returncode != 0 and "it fits" not in printed
    own = [
        line for line in printed.splitlines() if line.startswith("launched.py: error: vLLM needs 15.3 GiB of each GPU")
    ]
    assert len(own) == 1, printed
    assert printed.count("vLLM needs") == 2  # again at the end of torchrun's report
    assert "in settle" not in printed  # which has a traceback of its own

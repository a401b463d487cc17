"""The model of a step's seconds: against arithmetic by hand, against a simulation, and that more is never slower."""

from dataclasses import replace

import numpy as np
import pytest

from extras.plan import seconds, simulation
from extras.plan.cards import KINDS, Card
from extras.plan.memory import Engine, Load, Model, Way
from extras.plan.seconds import Lengths, Pass, decode_s, generate_s, pass_s, step_s
from extras.plan.sizes import Layer, Sizes

CARD = Card("a card", 80, 100, 1000, 50, 10, 5, 100)  # 1e14 FLOP/s, 1e12 bytes/s, 5e10, 1e10, 5e9
LAYER = Layer(parameters=10**8, inner=4000, attention=1000, cache=1000)
SMALL = Sizes(
    layers=(LAYER,) * 10,
    root=5 * 10**8,
    tower=0,
    head=10**8,
    vocabulary=100_000,
    hidden=1000,
    key_heads=1,
    tensors=(15 * 10**8,),
    expert_share=0.0,
)
PLAIN, FULL = Way("none", 0), Way("full", 0)


def layers(sizes, *, expert_share=0.0, **changes):
    """A model whose layers are changed, all in the same way."""
    return replace(sizes, expert_share=expert_share, layers=tuple(replace(x, **changes) for x in sizes.layers))


# Each layer has 5e7 weights that every token uses, and 8e8 of experts, of which a token uses an eighth.
ROUTED = layers(SMALL, parameters=85 * 10**7, experts=8 * 10**8, expert_share=1 / 8)


def engine(sizes, **changes):
    return Engine(sizes, length=1, sequences=1, share=0.5, **changes)


def load(gpus=1, **changes):
    return Load((), None, longest=1, ranks=gpus, local=gpus, shards=gpus, **changes)


def took(sizes, work, way=PLAIN, *, learns=True, rank=0, card=CARD, **where):
    return pass_s(Model(sizes, rank=rank), load(**where), way, card, work, learns=learns)


@pytest.fixture(autouse=True)
def whole_numbers(monkeypatch):
    """Constants that are easy to multiply, instead of the fitted ones."""
    values = dict(
        READ_WEIGHTS=0.5, READ_CACHE=0.5, DECODE_PRODUCTS=0.5, DRAW_BYTES=10, LAYER_S=1e-5, STEP_S=1e-3, HOST_S=2e-3,
        HOST_SEQUENCE_S=1e-5, SHARED_HOST_S=1e-3, REDUCE_S=1e-5, ROUTED=1.0, PRODUCTS=0.5, ATTENTION=0.2, EXPERTS=0.25,
        HIDDEN_PASSES=10, INNER_PASSES=5, LOGIT_BYTES=10, FORWARD=0.5, UNCOMPILED=3.0, RECURRENT_S=1e-12, LINK=0.5,
        HIDDEN_BEHIND=0.5, BUS=0.5, HOST_ADAMW=1e9, LAYER_PASS_S=1e-3,
    )  # fmt: skip
    for name, value in values.items():
        monkeypatch.setattr(seconds, name, value)


# --- decoding


def test_a_decoding_step_of_few_sequences_reads_the_weights():
    # 2.2e9 bytes of weights at 5e11; 2 sequences of 100 tokens with 2e4 bytes each at 5e11; 2 x 1e5 entries of 10 bytes
    # at 1e12; 10 layers of 1e-5; 1e-3 between steps.
    expected = 2.2e9 / 5e11 + 2 * 100 * 2e4 / 5e11 + 2 * 1e5 * 10 / 1e12 + 1e-4 + 1e-3
    assert decode_s(engine(SMALL), CARD, 2, 100) == pytest.approx(expected)


def test_a_decoding_step_of_many_sequences_multiplies():
    # 2 x 1.1e9 operations for each of 1,000 sequences at 5e13 take longer than reading the weights.
    expected = 2.2e12 / 5e13 + 1000 * 100 * 2e4 / 5e11 + 1000 * 1e5 * 10 / 1e12 + 1e-4 + 1e-3
    assert decode_s(engine(SMALL), CARD, 1000, 100) == pytest.approx(expected)


def test_two_gpus_of_an_engine_halve_what_they_share_and_add_their_numbers():
    expected = 2.2e9 / 1e12 + 2 * 100 * 2e4 / 1e12 + 2 * 1e5 * 10 / 1e12 + 10 * (1e-5 + 2e-5) + 1e-3
    assert decode_s(engine(SMALL, shared_by=2), CARD, 2, 100) == pytest.approx(expected)


def test_a_tiny_model_waits_for_the_host():
    tiny = replace(SMALL, layers=(replace(LAYER, parameters=10**6),), head=10**6, vocabulary=100)
    assert decode_s(engine(tiny), CARD, 100, 10) == pytest.approx(2e-3 + 100 * 1e-5)
    assert decode_s(engine(tiny, shared_by=2), CARD, 100, 10) == pytest.approx(3e-3 + 100 * 1e-5)


def test_few_tokens_touch_few_experts_and_eight_bits_halve_the_weights():
    # Of ROUTED a token uses 1e9 of experts and 0.5e9 besides.
    one, two = (decode_s(engine(ROUTED), CARD, n, 0) for n in (1, 2))
    rest = lambda n: n * 1e5 * 10 / 1e12 + 1e-4 + 1e-3  # noqa: E731
    assert one == pytest.approx(2 * (0.5e9 + 1e9 + 1e8) / 5e11 + rest(1))
    assert two == pytest.approx(2 * (0.5e9 + 8e9 * (1 - (7 / 8) ** 2) + 1e8) / 5e11 + rest(2))
    assert decode_s(engine(ROUTED, is_fp8=True), CARD, 1, 0) == pytest.approx((1.5e9 + 2e8) / 5e11 + rest(1))


def test_a_window_bounds_what_is_read_and_attended_to():
    near, far = Layer(10, cache=10_000, attention=100, window=50), Layer(10, cache=5000, attention=0)
    windowed = replace(SMALL, layers=(near, far, Layer(10, attention=7, state=5)))  # a recurrent one attends to nothing
    assert windowed.cached(30) == 30 * 15_000 and windowed.cached(1000) == 50 * 10_000 + 1000 * 5000
    assert windowed.attended(tokens=1000, squares=1000**2) == 100 * 2 * 50 * 1000  # not 100 * 1e6
    assert windowed.attended(tokens=10, squares=100) == 100 * 100
    assert windowed.state == 5 and SMALL.attended(tokens=10, squares=100) == 10_000 * 100


# --- lengths


@pytest.mark.parametrize(("mean", "limit"), [(50, 200), (100, 128), (20, 1000), (199, 200)])
def test_geometric_lengths_with_a_cut_have_the_mean_that_was_asked_for(mean, limit):
    lengths = Lengths(10, mean, limit)
    drawn = np.minimum(np.random.default_rng(0).exponential(lengths.uncut, 400_000), limit)
    assert drawn.mean() == pytest.approx(mean, rel=0.01)
    assert lengths.squares() == pytest.approx(((10 + drawn) ** 2).mean(), rel=0.02)
    for at in (0, mean / 2, limit - 1):
        assert lengths.open(np.array([at]))[0] == pytest.approx((drawn > at).mean(), abs=0.01)


def test_responses_without_a_mean_run_to_the_limit():
    lengths = Lengths(10, 200, 200)
    assert lengths.open(np.array([0, 199, 200])).tolist() == [1, 1, 0]
    assert lengths.squares() == pytest.approx(210**2)


# --- generation


@pytest.mark.parametrize(("mean", "n"), [(100, 64), (300, 8), (400, 64)])
def test_generation_takes_what_the_simulation_of_single_responses_takes(monkeypatch, mean, n):
    """With a decoding step of 5 + 0.1 n ms, which the simulation adds up token by token."""
    monkeypatch.setattr(seconds, "decode_s", lambda engine, card, n, context: (5 + 0.1 * n) / 1000)
    monkeypatch.setattr(seconds, "prefill_s", lambda *_: 0.0)
    lengths = Lengths(0, mean, 400)
    args = simulation.Args(
        prompts=n // 4, rollout_n=4, prompt_length=0, max_length=400, mean_length=min(lengths.uncut, 1e12),
        base_ms=5, sequence_ms=0.1, read_ms=0, steps=30,
    )  # fmt: skip
    expected = np.mean([x.generate_s for x in simulation.steady(args, 0.0)])
    assert generate_s(engine(SMALL), CARD, lengths, n, slots=1000, prompts=0) == pytest.approx(expected, rel=0.06)


def test_more_responses_than_an_engine_holds_wait_for_their_turn(monkeypatch):
    monkeypatch.setattr(seconds, "decode_s", lambda engine, card, n, context: 0.01)
    monkeypatch.setattr(seconds, "prefill_s", lambda *_: 0.0)
    fixed = Lengths(0, 100, 100)
    one, three = (generate_s(engine(SMALL), CARD, fixed, n, slots=10, prompts=0) for n in (10, 30))
    assert one == pytest.approx(100 * 0.01) and three == pytest.approx(3 * one)


def test_prompts_are_read_once():
    fixed = Lengths(50, 10, 10)
    none, some = (generate_s(engine(SMALL), CARD, fixed, 8, slots=8, prompts=n) for n in (0, 4))
    assert some - none == pytest.approx(2 * 1e9 * 4 * 50 / 5e13)


# --- passes


WORK = Pass(tokens=1000, head_tokens=800, squares=1e6, micro_batches=4)
MOVED = 10 * 2 * (10 * 1000 + 5 * 8000) * 1000  # bytes of layers
LOGITS = 10 * 1e5 * 800
# Bytes of 1.5e9 weights in 4 micro-batches. A forward pass reads them in fp32, writes them in bf16 and reads that: 8
# bytes for each. A backward pass does so again, writes gradients in bf16, reads them, writes them in fp32, and adds
# them to others in fp32: 8 + 2 + 2 + 4 + 12.
READ = 4 * 1.5e9 * 8
LEARNED = 4 * 1.5e9 * 36


def test_a_forward_pass_by_hand():
    flops = 2 * 1e9 * 1000 + 2 * 1e8 * 800
    expected = flops / 5e13 + 2 * 1e4 * 1e6 / 2e13 + (0.5 * MOVED + 0.5 * LOGITS + READ) / 5e11
    assert took(SMALL, WORK, learns=False) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("recompute", "compiled", "of_layers", "of_attention", "moved"),
    [("none", True, 6, 7, 1.0), ("selective", True, 6, 7, 1.3), ("full", True, 8, 9, 1.4), ("none", False, 6, 7, 3.0)],
)
def test_forward_and_backward_by_hand(recompute, compiled, of_layers, of_attention, moved):
    flops = of_layers * 1e9 * 1000 + 6 * 1e8 * 800
    # Attention has two products forward and five backward, of which one computes the scores again.
    expected = flops / 5e13 + of_attention * 1e4 * 1e6 / 2e13 + (moved * MOVED + LOGITS + LEARNED) / 5e11
    assert took(SMALL, WORK, Way(recompute, 0), compiles=compiled) == pytest.approx(expected)


def test_frozen_weights_have_no_gradients_and_adapters_have():
    lora = layers(SMALL, expert_adapters=10**6)
    flops = 4 * (1e9 * 1000 + 1e8 * 800) + 6 * 1e7 * 1000
    # Weights are kept in bf16, so 6 bytes for each in both passes; 1e7 weights of adapters have gradients.
    weights = 4 * (1.5e9 * 12 + 1e7 * 20)
    expected = flops / 5e13 + 7 * 1e4 * 1e6 / 2e13 + (MOVED + LOGITS + weights) / 5e11
    assert took(lora, WORK, rank=1) == pytest.approx(expected)


def test_a_small_micro_batch_takes_as_long_as_the_host_needs_for_its_layers(monkeypatch):
    monkeypatch.setattr(seconds, "LAYER_PASS_S", 1.0)
    assert took(SMALL, WORK) == pytest.approx(4 * 10 * 1.0) and took(SMALL, WORK, learns=False) < 1


def test_products_of_experts_are_slower_and_recurrences_cost_their_states():
    routed = layers(SMALL, parameters=46 * 10**7, experts=4 * 10**8, expert_share=0.1)
    more = 2 * (4e8 / 0.25 - 4e8) * 1000 / 5e13 + 4 * (routed.total - 1.5e9) * 8 / 5e11
    base = took(SMALL, WORK, learns=False)
    assert took(routed, WORK, learns=False) == pytest.approx(base + more)
    recurrent = layers(SMALL, state=10**5)
    assert took(recurrent, WORK, learns=False) == pytest.approx(base + 1e6 * 1000 * 1e-12 * 0.5)


def test_communication_hides_behind_computation_but_for_a_part():
    # Of two ranks, each reads half of the weights, and adds half of the gradients to others.
    half = 4 * 1.5e9 * (2 * 4 + 12) / 2 / 5e11
    alone = took(SMALL, WORK) - half
    # Each of 4 micro-batches gathers the weights twice and sums the gradients: 1.5e9 x (4 + 4) bytes, half of them from
    # the other rank, at 2.5e10. That is 0.96 s, more than the computation, which hides behind it.
    sent = 4 * 1.5e9 * 8 / 2 / 2.5e10
    assert sent > alone
    shared = took(SMALL, WORK, gpus=2)
    assert shared == pytest.approx(alone + max(0.5 * sent, sent - alone))
    much = WORK._replace(tokens=1e6)
    alone = took(SMALL, much) - half
    assert took(SMALL, much, gpus=2) == pytest.approx(alone + 0.5 * sent)
    # Over the network, 5 instead of 50 GB/s, a copy that is spread over two machines sends ten times as long.
    apart = pass_s(Model(SMALL), replace(load(2), local=1), PLAIN, CARD, WORK, learns=True)
    alone = took(SMALL, WORK) - half
    assert apart == pytest.approx(alone + max(5 * sent, 10 * sent - alone))


@pytest.mark.parametrize(("way", "learns", "times"), [(PLAIN, False, 1), (PLAIN, True, 2), (FULL, True, 3)])
def test_ranks_with_slices_of_the_same_rows_exchange_around_the_attention(way, learns, times):
    # Ten layers with 1,000 queries and 1,000 keys and values of one head, of which each of four ranks needs a copy. A
    # pass sends three quarters of these, and of what attention gives, in 16 bits, at 2.5e10 bytes per second. A
    # backward pass does so again, and so does what it computes again.
    sent = times * 1000 * 10 * (1000 + 4 * 1000 + 1000) * 2 * 0.75
    alone, together = (took(SMALL, WORK, way, gpus=4, learns=learns, sliced=size) for size in (1, 4))
    assert together - alone == pytest.approx(sent / 2.5e10)
    apart = pass_s(Model(SMALL), replace(load(4, sliced=4), local=2), way, CARD, WORK, learns=learns)
    base = pass_s(Model(SMALL), replace(load(4), local=2), way, CARD, WORK, learns=learns)
    assert apart - base == pytest.approx(sent / 2.5e9)  # over the network


def test_weights_on_the_host_cross_the_bus_in_every_micro_batch():
    alone = took(SMALL, WORK)
    away = took(SMALL, WORK, PLAIN._replace(param_offload=True))
    # Four micro-batches get the weights in float32, forward and backward. Gradients go to the host four times, and come
    # back three times.
    assert away - alone == pytest.approx((4 * 2 * 4 + (4 + 3) * 4) * 1.5e9 / 5e9)
    forward = [took(SMALL, WORK, PLAIN._replace(param_offload=x), learns=False) for x in (False, True)]
    assert forward[1] - forward[0] == pytest.approx(4 * 4 * 1.5e9 / 5e9)


def test_a_step_of_adamw_by_hand():
    model, away = Model(SMALL), PLAIN._replace(param_offload=True)
    moved = PLAIN._replace(optimizer_offload=True)
    assert step_s(model, load(), PLAIN, CARD) == pytest.approx(28 * 1.5e9 / 5e11)
    assert step_s(model, load(2), PLAIN, CARD) == pytest.approx(14 * 1.5e9 / 5e11)
    assert step_s(model, load(), moved, CARD) == pytest.approx(28 * 1.5e9 / 5e11 + 8 * 1.5e9 / 5e9)
    assert step_s(model, load(), away, CARD) == pytest.approx(1.5)
    lora = Model(layers(SMALL, expert_adapters=10**6), rank=1)
    assert step_s(lora, load(), PLAIN, CARD) == pytest.approx(28 * 1e7 / 5e11)


# --- more is never slower


@pytest.mark.parametrize("field", ["tflops", "memory_gb_s", "link_gb_s", "bus_gb_s"])
@pytest.mark.parametrize("kind", ["h100", "l40s", "rtx4090"])
def test_a_faster_card_is_never_slower(kind, field):
    card = KINDS[kind]
    faster = card._replace(**{field: 1.5 * getattr(card, field)})
    moved, away = PLAIN._replace(optimizer_offload=True), PLAIN._replace(param_offload=True)
    for sizes, rank in (
        (SMALL, 0),
        (layers(ROUTED, state=10**4, expert_share=1 / 8), 0),
        (layers(SMALL, expert_adapters=10**6), 1),
    ):
        shared, model = engine(sizes, shared_by=2), Model(sizes, rank=rank)
        for n in (1, 30, 500):
            assert decode_s(shared, faster, n, 500) <= decode_s(shared, card, n, 500)
        for gpus, way in ((4, PLAIN), (1, away), (1, FULL)):
            before, after = (took(sizes, WORK, way, rank=rank, card=x, gpus=gpus) for x in (card, faster))
            assert after <= before * (1 + 1e-9)
        assert step_s(model, load(), moved, faster) <= step_s(model, load(), moved, card)

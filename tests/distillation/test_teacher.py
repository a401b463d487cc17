"""The teacher of train_distill.py behind a server that answers wrongly: what is said, how soon, in how much memory."""

import json
import re
import socket
import threading
import time
import tracemalloc
from dataclasses import replace

import helpers_servers as servers
import pytest
import torch
from helpers_servers import FORM, reply
from transformers import AutoTokenizer

from extras.distillation import Teacher, add_teacher, check_teacher, token_distances
from extras.distillation.server import REQUESTS
from extras.servers import client
from rl.data.types import Batch
from rl.formulas import distillation
from rl.model import logprobs
from rl.model.load import load_model

K = 2


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    servers.hurry(monkeypatch)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def right(token):
    """What a right answer has at the place of a token: 7 and 9 are likely, others are not."""
    return {str(token): {"logprob": -3.0 - token / 100}, "9": {"logprob": -2.5}, "7": {"logprob": -0.25}}


def answers(tokenizer, *, tokens=None, scores=None):
    """A server that is right except for what it is told: other fields of /tokenize; (right scores) -> others."""

    def way(handler):
        if handler.path == "/tokenize":
            ids = tokenizer(handler.body["prompt"], add_special_tokens=False)["input_ids"]
            return reply({"tokens": ids, "max_model_len": 45} | (tokens or {}))(handler)
        found = [None, *map(right, handler.body["prompt"][1:])]
        data = json.dumps({"choices": [{"prompt_logprobs": scores(found) if scores else found}]})
        return reply(data.encode())(handler)

    return way


def check(tokenizer, tiny_model, url, seconds=servers.LONG):
    """`check_teacher`, which must end by itself if `seconds` are many."""
    flags = Teacher(teacher_model="the-teacher", teacher_url=url, teacher_timeout=seconds)
    start = time.monotonic()
    try:
        check_teacher(flags, tokenizer, student=tiny_model, longest=44, top_k=K)
    finally:
        assert time.monotonic() - start < 50  # less than one try


# The same client reads both paths; what is in an answer is read for each.
FAILURES = [(name, "/tokenize") for name in servers.WAYS]
FAILURES += [
    (name, "/v1/completions") if said == FORM else pytest.param(name, "/v1/completions", marks=pytest.mark.thorough)
    for name, (said, _) in servers.WAYS.items()
    if said != servers.IN_TIME
]


@pytest.mark.parametrize(("name", "path"), FAILURES)
def test_a_server_that_fails_ends_the_run_in_time(name, path, tokenizer, tiny_model):
    said, wrong = servers.WAYS[name]
    way = lambda handler: (wrong if handler.path == path else answers(tokenizer))(handler)  # noqa: E731
    seconds = servers.SECONDS[name]
    with servers.serving(way) as server:
        tracemalloc.start() if name in servers.ENDLESS else None
        message = re.escape(f"--teacher-url {server.url}: {path} failed: {said}")
        with pytest.raises(RuntimeError, match=f"{message}.*vLLM running there, and --teacher-timeout {seconds:g} "):
            check(tokenizer, tiny_model, server.url, seconds)
        if name in servers.ENDLESS:
            assert tracemalloc.get_traced_memory()[1] < 24 << 20
            tracemalloc.stop()


@pytest.mark.parametrize("name", servers.REFUSALS)
def test_a_server_that_refuses_ends_the_run_at_once(name, tokenizer, tiny_model):
    said, way = servers.REFUSALS[name]
    with servers.serving(way) as server:
        message = f"--teacher-url {server.url}: /tokenize was refused with {said}: no such"
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            check(tokenizer, tiny_model, server.url)
        assert server.seen == 1 and len(str(caught.value)) < 700


def with_logprob(value):
    return lambda found: [*found[:-1], found[-1] | {"9": {"logprob": value}}]


def with_token(name):
    return lambda found: [*found[:-1], found[-1] | {name: {"logprob": -9.0}}]


def without_the_sampled_token(found):
    sampled = next(iter(found[-1]))
    return [*found[:-1], {x: {"logprob": -1.5} for x in ("7", "9", "11") if x != sampled}]


OTHER, NUMBER = "no prompt_logprobs of all tokens", "; --model has 80 tokens, and a log-prob is finite and at most 0"
SCORES = {
    "no list": (OTHER, lambda found: None),
    "a text": (OTHER, lambda found: "text"),
    "an object": (OTHER, lambda found: {"0": found}),
    "numbers": (OTHER, lambda found: [-1.0] * len(found)),
    "null for a token": (OTHER, lambda found: [*found[:-1], None]),
    "a list for a token": (OTHER, lambda found: [*found[:-1], [-1.0]]),
    "a number for an entry": (OTHER, lambda found: [*found[:-1], {"9": -1.0}]),
    "an entry without a log-prob": (OTHER, lambda found: [*found[:-1], {"9": {"rank": 1}}]),
    "a word as a token": (OTHER, with_token("seven")),
    "half a token": (OTHER, with_token("7.5")),
    "nothing": (OTHER, lambda found: []),
    "one too few": (OTHER, lambda found: found[:-1]),
    "one too many": (OTHER, lambda found: [*found, found[-1]]),
    "not the sampled token": (OTHER, without_the_sampled_token),
    "too few tokens": (OTHER, lambda found: [*found[:-1], dict([*found[-1].items()][:1])]),
    "a token beyond the vocabulary": ("token 80 has log-prob -9.0" + NUMBER, with_token("80")),
    "a token far beyond": ("token 99999999999999999999 has", with_token("9" * 20)),
    "a token below 0": ("token -1 has log-prob -9.0" + NUMBER, with_token("-1")),
    "NaN": (NUMBER, with_logprob(float("nan"))),
    "infinity": (NUMBER, with_logprob(float("inf"))),
    "minus infinity": (NUMBER, with_logprob(float("-inf"))),
    "beyond float32": (NUMBER, with_logprob(-1e39)),
    "beyond float64": (NUMBER, with_logprob(-(10**400))),
    "above 0": ("token 9 has log-prob 5.0" + NUMBER, with_logprob(5.0)),
    "a probability": (NUMBER, with_logprob(0.001)),
    "null": (NUMBER, with_logprob(None)),
    "true": (NUMBER, with_logprob(False)),
    "a number in quotes": (NUMBER, with_logprob("-1.0")),
    "a list as a number": (NUMBER, with_logprob([-1.0])),
    "too much probability": ("probabilities that add up to more than 1", with_logprob(-0.5)),
}


@pytest.mark.parametrize("name", SCORES)
def test_wrong_scores_end_the_run(name, tokenizer, tiny_model):
    said, scores = SCORES[name]
    with servers.serving(answers(tokenizer, scores=scores)) as server:
        message = f"--teacher-url {server.url}: /v1/completions failed: {FORM} ("
        with pytest.raises(RuntimeError, match=re.escape(message) + ".*" + re.escape(said)):
            check(tokenizer, tiny_model, server.url)
        assert server.seen == 1 + client.TRIES


@pytest.mark.parametrize(
    "found",
    [{"tokens": x} for x in (None, 3, "text", [None], ["one"], [float("inf")], {"a": 1})]
    + [{"max_model_len": x} for x in ("many", [45], float("inf"), float("nan"))],
    ids=str,
)
def test_wrong_tokens_end_the_run(found, tokenizer, tiny_model):
    with servers.serving(answers(tokenizer, tokens=found)) as server:
        message = f"--teacher-url {server.url}: /tokenize failed: {FORM} (no tokens of a text)"
        with pytest.raises(RuntimeError, match=re.escape(message)):
            check(tokenizer, tiny_model, server.url)


@pytest.mark.parametrize("url", ["nowhere", "http://", "ftp://host", "http://127.0.0.1:99999", f"http://{'x' * 70}.y"])
def test_a_url_that_is_none_ends_the_run(url, tokenizer, tiny_model):
    with pytest.raises(RuntimeError, match=re.escape(f"--teacher-url {url}: /tokenize failed: no connection (")):
        check(tokenizer, tiny_model, url)


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "what://127.0.0.1:9", "http://127.0.0.1:9"])
def test_a_proxy_that_is_none_ends_the_run(proxy, tokenizer, tiny_model, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(RuntimeError, match=r"--teacher-url http://server: /tokenize failed: no connection \("):
        check(tokenizer, tiny_model, "http://server")


def test_a_silent_handshake_and_a_slow_look_up_of_a_name_end_in_time(tokenizer, tiny_model, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:  # takes connections, and says nothing
        with pytest.raises(RuntimeError, match="/tokenize failed: no whole answer in time"):
            check(tokenizer, tiny_model, f"https://127.0.0.1:{listening.getsockname()[1]}", servers.SHORT)
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: ended.wait(60))
    with pytest.raises(RuntimeError, match="/tokenize failed: no whole answer in time"):
        check(tokenizer, tiny_model, "http://server", servers.SHORT)
    ended.set()


def make_batch(rows, length=12):
    """Sequences whose tokens but the first four were sampled."""
    ids = torch.arange(rows)[:, None] * 3 % 40 + torch.arange(length)
    mask = (torch.arange(length) >= 4).float().expand(rows, -1)
    return Batch(ids, torch.full((rows,), length), mask, torch.zeros(rows, length))


def ask(batch, url, top_k=K, seconds=servers.LONG):
    flags = Teacher(teacher_model="the-teacher", teacher_url=url, teacher_timeout=seconds)
    model = torch.nn.Module()
    model.vocabulary = 80
    return add_teacher(flags, model, batch, [], top_k=top_k, temperature=1.0)


@pytest.mark.parametrize("top_k", [0, 2])
def test_right_scores_stand_at_their_tokens(top_k, tokenizer):
    batch = make_batch(70)
    small = lambda found: [None, *({**x, "9": {"logprob": -0.0}, "7": {"logprob": 1e-7}} for x in found[1:])]  # noqa: E731
    with servers.serving(answers(tokenizer)) as server:
        scored = ask(batch, server.url, top_k)
    assert server.seen == 70
    expected = torch.tensor([[right(t)[str(t)]["logprob"] for t in row] for row in batch.input_ids.tolist()])
    assert torch.allclose(scored.ref_logp, expected * batch.response_mask)
    assert (scored.ref_logp[:, :4] == 0).all()
    if top_k:
        top_ids, top_logp = scored.columns["top_ids"], scored.columns["top_logp"]
        assert (top_ids[:, 4:] == torch.tensor([7, 9])).all() and (top_ids[:, :4] == 0).all()
        assert (top_logp[:, 4:, 0] == -0.25).all() and (top_logp[:, :4] == 0).all()
    with servers.serving(answers(tokenizer, scores=small)) as server:
        assert ask(batch, server.url, 0).ref_logp.max() == 0


def test_a_batch_ends_with_its_first_request_that_fails(tokenizer):
    """All others wait for a server that says nothing. No request is sent once one has failed."""
    with servers.serving(servers.WAYS["silence"][1]) as server:
        with pytest.raises(RuntimeError, match="/v1/completions failed: no whole answer in time"):
            ask(make_batch(100), server.url, seconds=servers.SHORT)
        assert server.seen <= client.TRIES * REQUESTS


def test_the_largest_answer_is_not_too_large(tokenizer):
    """20 tokens with long texts at each of 2,000 places."""
    text = {"decoded_token": "\U0001f600" * 8}

    def scores(found):
        others = {str(v): {"logprob": -3.1 - v / 7, "rank": 100_000 + v} | text for v in range(20, 40)}
        return [None, *(others | {token: y | text for token, y in x.items()} for x in found[1:])]

    ids = torch.arange(2000)[None] % 79
    batch = Batch(ids, torch.tensor([2000]), torch.ones(1, 2000), torch.zeros(1, 2000))
    with servers.serving(answers(tokenizer, scores=scores)) as server:
        assert ask(batch, server.url, 20).columns["top_ids"].shape == (1, 2000, 20)


def test_a_small_distance_is_not_rounded_where_fsdp_computes_in_bfloat16(tiny_model, world):
    """FSDP2 casts arguments of modules to the compute precision; the teacher's log-probs must not be among them."""
    policy = load_model(tiny_model, replace(world, dtype=torch.bfloat16), longest=64)
    generator = torch.Generator().manual_seed(0)
    batch = make_batch(2)
    top_ids = torch.stack([torch.randperm(80, generator=generator)[:40] for _ in range(24)]).view(2, 12, 40).int()

    def student(model, hidden, targets, ids):
        logits = logprobs.logits_of(logprobs.source_of_logits(model), hidden, 1.0)
        return (logits.log_softmax(-1).gather(-1, ids.long()),)

    scored = logprobs.sampled_positions(batch)
    [student_logps] = logprobs.run_on_responses(policy, batch, student, top_ids[scored])
    noise = 0.06 * torch.randn(student_logps.shape, generator=generator)
    top = {"top_ids": top_ids, "top_logp": student_logps + noise}
    batch = replace(batch, ref_logp=torch.zeros(2, 12), columns=top)
    _, _, gap, _ = token_distances(policy, batch, distillation.forward_kl, beta=0.0, sampling=logprobs.FULL)

    s, t = student_logps.double(), batch.columns["top_logp"].double()
    rest_s, rest_t = 1 - s.exp().sum(-1), 1 - t.exp().sum(-1)  # probability of the 40 other tokens
    expected = (t.exp() * (t - s)).sum(-1) + rest_t * (rest_t / rest_s).log()
    assert 2e-4 < expected[scored].mean() < 5e-3 and expected[scored].min() > 0
    torch.testing.assert_close(gap[scored].double(), expected[scored], rtol=2e-3, atol=1e-6)

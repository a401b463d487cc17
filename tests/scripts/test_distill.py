"""train_distill.py for real: whole steps computed again by the book; teachers on a server and on the host."""

import contextlib
import json
import shutil
import statistics
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import helpers_scripts as h
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig

import train_distill
from data import arithmetic
from extras.distillation import teacher
from extras.offload import host
from extras.servers import client
from rl.flags import build
from rl.model import load as models

pytestmark = pytest.mark.usefixtures("runs_here")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return h.make_task_with_stops(tmp_path_factory.mktemp("task"))


@pytest.fixture
def distill(task, tiny_model, tmp_path):
    return h.Runs(train_distill, partial(h.distill_settings, task, teacher_model=tiny_model), tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Whole steps, computed again


def advantage_by_hand(args, score, scores):
    """What the reward is worth: GRPO's advantage among the responses that have a score, 0 without one."""
    known = [x for x in scores if x is not None]
    if score is None or not args.reward_coef:
        return 0.0
    mean, std = (statistics.mean(known), statistics.stdev(known)) if len(known) > 1 else (0.0, 1.0)
    return args.reward_coef * (score - mean) / (std + 1e-6)


def plain_distill(task, args, rounds, score):
    """Distillation by the book; score: (text, ground truth) -> s. Returns weights and reports."""
    tokenizer, truths = AutoTokenizer.from_pretrained(task.model), h.truths(task)
    model = AutoModelForCausalLM.from_pretrained(task.model).double()
    master = AutoModelForCausalLM.from_pretrained(args.teacher.teacher_model).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    reports = []
    for one_round in rounds:
        sequences = []
        for prompt, group in one_round:
            texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in group]
            scores = [score(text, truths[tuple(prompt)]) for text in texts]
            for c, s in zip(group, scores, strict=True):
                x = {"prompt": prompt, "ids": c.token_ids, "engine": torch.tensor(c.logprobs)}
                x["places"] = torch.arange(len(x["ids"])), torch.tensor(x["ids"])
                with torch.no_grad():
                    x["teacher"] = h.all_logps(master, prompt, x["ids"], args.decoding.temperature)
                    x["old"] = h.all_logps(model, prompt, x["ids"], args.decoding.temperature)[x["places"]]
                x["gap"] = x["engine"].double() - x["teacher"][x["places"]]
                x["A"] = advantage_by_hand(args, s, scores) - (
                    args.distillation_loss_coef * x["gap"] if args.loss_mode == "sampled" else 0 * x["gap"]
                )
                sequences.append(x)
        gaps, norms, distances, student_mass = torch.cat([x["gap"] for x in sequences]), [], [], []
        entropies = []
        size = args.ppo_mini_batch_size * args.rollout_n
        for start in [*range(0, len(sequences), size)] * args.ppo_epochs:
            mini, loss = sequences[start : start + size], 0.0
            count, own = sum(len(x["ids"]) for x in mini), []
            for x in mini:
                mine = h.all_logps(model, x["prompt"], x["ids"], args.decoding.temperature)
                ratio = (mine[x["places"]] - x["old"]).exp()
                entropies += (-(mine.exp() * mine).sum(-1)).tolist()
                bounds = args.clip_ratio_low, args.clip_ratio_high, args.clip_ratio_c
                weight = h.weight_by_hand(args, x["old"], x["engine"])
                loss = loss + (h.surrogate(ratio, x["A"], *bounds) * weight).sum() / count
                if args.loss_mode == "sampled":
                    continue
                for p, t in zip(mine.exp(), x["teacher"].exp(), strict=True):
                    if args.distill_top_k != -1:
                        best = sorted(range(len(t)), key=lambda v, t=t: -t[v].item())[: args.distill_top_k]
                        p, t = ([*(q[v] for v in best), 1 - sum(q[v] for v in best)] for q in (p, t))
                        student_mass.append(sum(p[:-1]).item())
                    own.append(h.divergence(args.loss_mode, p, t, args.jsd_beta))
                    loss = loss + args.distillation_loss_coef * own[-1] / count
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip).item())
            optimizer.step()
            optimizer.zero_grad()
            distances += [statistics.mean(x.item() for x in own)] if own else []
        report = {"distillation/kl": gaps.mean().item(), "actor/grad_norm": statistics.mean(norms)}
        report["actor/entropy"] = statistics.mean(entropies)
        if distances:
            report["distillation/loss"] = statistics.mean(distances)
        if student_mass:
            report["distillation/student_mass"] = statistics.mean(student_mass)
        reports.append(report)
    return dict(model.named_parameters()), reports


CASES = {
    "sampled": dict(loss_mode="sampled", temperature=0.8, rollout_is="token", rollout_is_threshold=1.02),
    "sampled with a reward": dict(
        loss_mode="sampled", reward_coef=0.5, distillation_loss_coef=0.3, ppo_mini_batch_size=3, ppo_epochs=2
    ),
    "forward": dict(loss_mode="forward_kl", distill_top_k=5, temperature=0.7, teacher_offload=True),
    "reverse": dict(loss_mode="reverse_kl", distill_top_k=1, reward_coef=0.1, rollout_is="token"),
    "jsd": dict(
        loss_mode="jsd",
        jsd_beta=0.3,
        distill_top_k=8,
        reward_coef=1.0,
        distillation_loss_coef=2.0,
        ppo_mini_batch_size=2,
    ),
    "all tokens": dict(loss_mode="jsd", distill_top_k=-1, rollout_n=1, train_batch_size=3),
}


@pytest.mark.parametrize("case", h.some(CASES, "sampled with a reward", "jsd"))
def test_steps_are_what_plain_transformers_computes(
    case, distill, task, tiny_model, tmp_path, sometimes, monkeypatch, in_double
):
    """Some responses have no score; the teacher judges them too."""
    rounds = []
    h.make_inexact(monkeypatch.setattr)
    h.record_rounds(rounds, monkeypatch.setattr)
    changes = dict(total_training_steps=2, lr=2e-3, grad_clip=0.5, ppo_max_token_len_per_gpu=120) | CASES[case]
    changes = dict(ppo_mini_batch_size=changes.get("train_batch_size", 4)) | changes
    changes |= dict(max_logprob_gap=1.0, custom_reward_function=sometimes)
    distill(**changes)
    args = build(train_distill.Args, **h.distill_settings(task, tmp_path, teacher_model=tiny_model, **changes))
    weights, reports = plain_distill(task, args, rounds, h.parity_sometimes)
    for line, report in zip(distill.lines(1), reports, strict=True):
        assert {name: line[name] for name in report} == pytest.approx(report, rel=2e-4, abs=1e-5)  # float32 log-probs
        coef = 0.0 if args.loss_mode == "sampled" else args.distillation_loss_coef
        assert line["actor/loss"] == pytest.approx(line["actor/pg_loss"] + coef * line["distillation/loss"], abs=1e-6)
    assert abs(reports[0]["distillation/kl"]) > 0.05
    assert (
        h.distance(distill.weights(1, 2), weights) < 1e-4 < 1e-3 < h.distance(distill.weights(1, 2), h.original(task))
    )


def test_several_updates_a_step_are_clipped_and_the_teacher_is_asked_once(distill, monkeypatch):
    calls = []
    ask = train_distill.add_teacher
    monkeypatch.setattr(train_distill, "add_teacher", lambda *a, **kw: calls.append(1) or ask(*a, **kw))
    distill(ppo_mini_batch_size=2, ppo_epochs=3, lr=1e-2, total_training_steps=1)
    assert distill.lines(1)[0]["actor/pg_clipfrac"] > 0 and len(calls) == 1


def test_a_student_that_is_its_teacher_learns_nothing(distill, task):
    for mode in ("reverse_kl", "sampled"):
        distill(teacher_model=task.model, loss_mode=mode, total_training_steps=1, weight_decay=0.0)
        line = distill.lines(distill.count)[0]
        assert line["actor/grad_norm"] < 1e-4 and abs(line["distillation/loss"]) < 1e-5


def test_an_offloaded_teacher_is_on_the_host_but_while_it_is_asked(distill, monkeypatch):
    moves = []
    for name in ("offload", "onload"):
        moved = lambda model, *where, name=name: moves.append(name) or getattr(host, name)(model, *where)  # noqa: E731
        monkeypatch.setattr(teacher, name, moved)
    distill(teacher_offload=True)
    assert moves == ["offload"] + ["onload", "offload"] * 2


@pytest.mark.thorough
def test_two_ranks_learn_what_one_does(distill, task, tmp_path, monkeypatch, in_double):
    """One prompt a step: one of the ranks samples nothing, and with a budget of one response each has some to learn."""
    changes = dict(train_batch_size=1, ppo_mini_batch_size=1, loss_mode="forward_kl", lr=1e-4, total_training_steps=2)
    changes |= dict(ppo_max_token_len_per_gpu=44, reward_coef=1.0, teacher_offload=True)
    distill.beside_two_ranks(monkeypatch.setattr, **changes)
    final = h.weights(tmp_path / "two" / "global_step_2")
    assert h.distance(final, distill.weights(1, 2)) < 1e-6 < 1e-5 < h.distance(final, h.original(task))


# ---------------------------------------------------------------------------------------------------------------------
# A teacher behind a server


class Server(ThreadingHTTPServer):
    """What vLLM says of prompts, by transformers: /tokenize, and /v1/completions with prompt_logprobs."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        self.requests, self.failures, self.url = [], 0, f"http://127.0.0.1:{self.server_port}"
        self.max_model_len, self.max_logprobs = 45, 20  # the settings need 32 + 12 tokens, and one that is sampled


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        if self.server.failures:
            self.server.failures -= 1
            return self.send_error(500)
        if body["model"] != "the-teacher":
            return self.send_error(404, "there is no such model")
        if self.path == "/tokenize":
            ids = self.server.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            return self.answer({"tokens": ids, "max_model_len": self.server.max_model_len})
        ids, k = body["prompt"], body["prompt_logprobs"]
        if k > self.server.max_logprobs:
            return self.send_error(400, "too many prompt_logprobs")
        with torch.no_grad():
            logps = self.server.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found = [None]
        for token, row in zip(ids[1:], logps, strict=False):
            shown = {v.item(): rank for rank, v in enumerate(row.topk(k).indices, 1)} | {token: 0}
            found.append({str(v): {"logprob": row[v].item(), "rank": r, "decoded_token": ""} for v, r in shown.items()})
        self.answer({"choices": [{"text": "", "prompt_logprobs": found}]})

    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tiny_model):
    with contextlib.closing(Server(tiny_model)) as running:
        running.close = running.server_close
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.mark.parametrize("mode", h.some(["sampled", "jsd"], "jsd"))
def test_a_server_says_what_a_loaded_teacher_does(mode, distill, server, monkeypatch):
    distill(loss_mode=mode)
    monkeypatch.setattr(teacher, "load_model", None)  # nothing is loaded
    server.failures = client.TRIES - 1
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.001)
    distill(loss_mode=mode, teacher_url=f"{server.url}/v1", teacher_model="the-teacher")
    for line, expected in zip(h.timeless(distill.lines(2)), h.timeless(distill.lines(1)), strict=True):
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert h.distance(distill.weights(1, 2), distill.weights(2, 2)) < 1e-5
    asked = [x for x in server.requests if "prompt_logprobs" in x]
    assert len(asked) == 1 + 2 * 16 and {x["prompt_logprobs"] for x in asked} == {0 if mode == "sampled" else 8}


def test_a_server_that_cannot_be_the_teacher_is_refused_before_a_model_is_loaded(distill, server, monkeypatch):
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(models, "load_pretrained", None)
    with pytest.raises(
        RuntimeError, match="--teacher-url http://127.0.0.1:9: /tokenize failed: no connection .*running"
    ):
        distill(teacher_url="http://127.0.0.1:9", teacher_model="the-teacher")
    with pytest.raises(ValueError, match="/tokenize was refused with HTTP status 404"):
        distill(teacher_url=server.url, teacher_model="another")
    server.max_logprobs = 7
    with pytest.raises(ValueError, match="/v1/completions was refused with HTTP status 400"):
        distill(teacher_url=server.url, teacher_model="the-teacher", loss_mode="jsd")
    server.max_model_len = 44
    with pytest.raises(ValueError, match="takes 44 tokens, one more than .* = 44 are needed; .* --max-model-len"):
        distill(teacher_url=server.url, teacher_model="the-teacher")
    server.tokenizer = lambda text, add_special_tokens: {"input_ids": [1, 2, 3]}
    with pytest.raises(ValueError, match="its tokenizer is not that of --model"):
        distill(teacher_url=server.url, teacher_model="the-teacher")


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes

MISTAKES = {
    "no mixture": (dict(loss_mode="jsd", jsd_beta=0.0), ["--jsd-beta 0.0", "forward_kl"]),
    "no mixture either": (dict(loss_mode="jsd", jsd_beta=1.0), ["--jsd-beta 1.0", "reverse_kl"]),
    "no such mixture": (dict(jsd_beta=1.5), ["--jsd-beta 1.5", "within 0 and 1"]),
    "truncated": (dict(loss_mode="forward_kl", top_p=0.9), ["--loss-mode forward_kl", "--top-p"]),
    "warm server": (dict(teacher_url="http://x", temperature=0.5), ["--temperature 0.5", "server"]),
    "whole server": (
        dict(teacher_url="http://x", loss_mode="jsd", distill_top_k=-1),
        ["--distill-top-k -1", "server", "number"],
    ),
    "nothing": (dict(distillation_loss_coef=0.0), ["--distillation-loss-coef 0", "--reward-coef 0", "raise"]),
    "lone response": (dict(reward_coef=0.5, rollout_n=1), ["--reward-coef 0.5", "--rollout-n must be at least 2"]),
    "none": (dict(distill_top_k=0), ["--distill-top-k 0", "at least 1, or -1"]),
    "coefficient": (dict(distillation_loss_coef=-1.0), ["--distillation-loss-coef -1.0", "at least 0"]),
    "moved server": (dict(teacher_url="http://x", teacher_offload=True), ["--teacher-offload", "--teacher-url http"]),
    "no teacher": (dict(teacher_model="/nowhere"), ["--teacher-model /nowhere", "no such folder"]),
    "timeout": (dict(teacher_timeout=0.0), ["--teacher-timeout 0.0", "positive"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_distill_refuses(case, distill, monkeypatch):
    """Before a model is loaded, and naming the flag, the value and the fix."""
    monkeypatch.setattr(models, "load_pretrained", None)
    changes, words = MISTAKES[case]
    with pytest.raises(ValueError) as error:
        distill(**changes)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in {error.value}"
    assert not distill.dir(1).exists()


def test_a_teacher_with_other_tokens_is_refused(distill, tmp_path):
    arithmetic.save_model(tmp_path / "other", seed=0)
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    a, b = list(vocabulary)[10:12]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"--teacher-model .*other: its tokenizer is not that of --model .*family"):
        distill(teacher_model=str(tmp_path / "other"))


def with_rows(model, rows, folder):
    """A copy of a model, with its tokenizer, that has embeddings for this many tokens."""
    shutil.copytree(model, folder)
    resized = AutoModelForCausalLM.from_pretrained(model)
    resized.resize_token_embeddings(rows, mean_resizing=False)
    resized.save_pretrained(folder)
    return str(folder)


def test_probability_that_a_teacher_gives_to_padding_is_that_of_no_token(distill, tiny_model, tmp_path):
    """The student with 16 more rows, likely ones, is a teacher that agrees with it on every token."""
    padded = with_rows(tiny_model, 96, tmp_path / "padded")
    changes = dict(model=tiny_model, teacher_model=padded, total_training_steps=1)
    for k in (8, 200):  # more than there are: all
        distill(loss_mode="forward_kl", distill_top_k=k, **changes)
        line = distill.lines(distill.count)[0]
        assert abs(line["distillation/kl"]) < 1e-5 and abs(line["distillation/loss"]) < 1e-5
        assert line["distillation/teacher_mass"] == pytest.approx(line["distillation/student_mass"], abs=1e-5)


def test_a_family_that_is_refused_is_a_teacher_behind_a_server_only(distill, task, tmp_path):
    shutil.copytree(task.model, tmp_path / "moe")
    GptOssConfig(vocab_size=80, max_position_embeddings=64, num_local_experts=4).save_pretrained(tmp_path / "moe")
    with pytest.raises(ValueError, match="--teacher-model .*moe: gpt_oss cannot be trained here: .* --teacher-url"):
        distill(teacher_model=str(tmp_path / "moe"))


def test_a_teacher_that_lacks_tokens_is_refused(distill, task, tmp_path):
    small = with_rows(task.model, 72, tmp_path / "small")
    with pytest.raises(ValueError, match="--teacher-model .*small: its tokenizer has 80 tokens, and its embedding 72"):
        distill(teacher_model=small)
    padded = with_rows(task.model, 96, tmp_path / "padded")  # whose padding an untrained student samples
    with pytest.raises(RuntimeError, match=r"--teacher-model .*: it has no token [89]\d, which the student"):
        distill(model=padded, teacher_model=task.model)


FAILS = """
class Environment:
    def reset(self, row, seed):
        self.fails = row["extra_info"]["index"] % 2
        return []
    def step(self, reply):
        if self.fails:
            raise OSError("no tool")
"""


def test_a_conversation_whose_environment_fails_teaches_nothing(distill, tmp_path, monkeypatch):
    (tmp_path / "fails.py").write_text(FAILS)
    seen = []

    def note(responses, original=train_distill.make_batch, **kw):
        batch, updates = original(responses, **kw)
        seen.append(([r.finish_reason == "error" for r in responses], batch.response_mask[batch.rows.argsort()]))
        return batch, updates

    monkeypatch.setattr(train_distill, "make_batch", note)
    path = str(tmp_path / "fails.py")
    distill(environment=path, max_response_length=60, reward_max_error_frac=1.0, total_training_steps=1)
    ((failed, mask),) = seen
    assert len(set(failed)) == 2 and (mask.sum(-1) == 0).tolist() == failed

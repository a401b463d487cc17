"""Conversations with environments, for real: processes that answer, hang, die and lie, and engines that go on."""

import os
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import helpers_scripts as h
import launch
import numpy as np
import pytest
import torch
from helpers_data import spans_of
from helpers_engines import TEMPERATURE, logits_of, plain, push, the_only_shared_engine, trainer_gap
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from extras.agents import EnvironmentFlags, open_partner
from extras.agents.conversations import Conversations
from rl.data.batching import collate
from rl.data.types import Sampling
from rl.model.logprobs import token_logprobs
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.engines.vllm import TAKE_EVERY
from rl.sampling.groups import sample_groups
from rl.sampling.loop import Loop
from rl.sampling.verify import check_engine

STOPS = (0, 2, *range(20, 32))  # so that most turns of the tiny model end

# What an environment does is in its row: extra_info["does"], after extra_info["turns"] turns. It writes down its pids.
GAME = r"""
import asyncio, json, os, random, signal, subprocess, sys, threading, time
from pathlib import Path
HERE = Path(__file__).parent

class Environment:
    def reset(self, row, seed):
        self.about, self.count = row["extra_info"], 0
        if self.about.get("does") == "no reset":
            raise ValueError("no reset today")
        with open(HERE / "pids", "a") as file:
            print(os.getpid(), file=file)
        return [{"role": "user", "content": f"s{seed % 1000}"}]

    async def step(self, reply):
        self.count += 1
        await asyncio.sleep(random.random() * 2 * self.about.get("latency", 0))
        if reply.turn == self.about.get("turns", 2):
            return {"hang": self.hang, "exit": lambda: os._exit(3), "kill": lambda: os.kill(os.getpid(), 9),
                    "children": self.children, "print": lambda: print("x" * 100_000), "raise": lambda: 1 / 0,
                    "SystemExit": lambda: sys.exit("bye"),
                    "megabyte": lambda: [{"role": "user", "content": "1" * 10**6}],
                    "large": lambda: [{"role": "user", "content": "1" * 250_000}],
                    "surrogate": lambda: [{"role": "user", "content": "1\ud8002"}],
                    "None": lambda: [{"role": "user", "content": None}], "no role": lambda: [{"content": "1"}],
                    "text": lambda: "text", "number": lambda: 5, "garbage": self.garbage, "forged": self.forged,
                    "NaN reward": lambda: ([], float("nan")), "text as reward": lambda: ([], "much"),
                    "huge reward": lambda: ([], -1e19), "number in a text": lambda: ([], "2"),
                    "left out": lambda: [{"role": "silent", "content": "1"}],
                    "huge field": lambda: [{"role": "user", "content": "1", "image": "1" * 10**7}],
                    "two messages": lambda: ({"role": "user", "content": "1"}, {"role": "user", "content": "2"}),
                    "paid end": lambda: (None, 2), "dies later": self.later,
                    "kill first": lambda: os.kill(os.getppid(), 9),
                    "refused": lambda: [{"role": "user", "content": "1", "refuse": "this"}]}.get(
                        self.about.get("does"), lambda: None)()
        return [{"role": "user", "content": f"{reply.turn}+{len(reply.text)}"}]

    def hang(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    def children(self):
        for session in (False, True):
            child = subprocess.Popen(["sleep", "600"], start_new_session=session)
            with open(HERE / "pids", "a") as file:
                print(child.pid, file=file)

    def garbage(self):
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b"\xff{garbage\n")
            except OSError:
                pass

    def forged(self):
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b'{"messages": 5, "report": 3}\n')
            except OSError:
                pass
        time.sleep(600)

    def later(self):
        threading.Timer(0.05, lambda: os._exit(1)).start()
        return [{"role": "user", "content": "1"}]

    async def report(self):
        more = {"reserved report": {"error_frac": 5}, "huge report": {"text": "x" * 10**7}}
        about = {"count": self.count, "huge": 10**400, "nan": float("nan"), "text": "x"}
        return about | more.get(self.about.get("does"), {})

    async def close(self):
        with open(HERE / "closed", "a") as file:
            print(os.getpid(), file=file)

class Empty:
    pass

def function():
    pass
"""


class Made:
    """A file with environments, and what they leave behind."""

    def __init__(self, folder, tokenizer):
        self.folder, self.tokenizer, self.file = folder, tokenizer, folder / "game.py"
        self.file.write_text(GAME)
        flags = EnvironmentFlags(environment=str(self.file), environment_timeout=15.0, max_turns=8)
        self.partner = open_partner(flags, tokenizer, STOPS)
        self.environments = self.partner.environments

    def pids(self, name="pids"):
        return [int(x) for x in (self.folder / name).read_text().split()]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.refuse %}{{ raise_exception('no ' + m.refuse) }}{% endif %}{% endfor %}"
        + tokenizer.chat_template.replace(
            "{% for message in messages %}", "{% for message in messages if message['role'] != 'silent' %}"
        )
    )
    assert "silent" in tokenizer.chat_template
    return tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer):
    made = Made(tmp_path_factory.mktemp("game"), tokenizer)
    yield made
    made.partner.close()


def rows_of(tokenizer, *about):
    ids = tokenizer("<|im_start|>user\n1+1<|im_end|>\n")["input_ids"]
    return [dict(prompt_ids=ids + [5 + i], row_index=i, extra_info=x, prompt=[]) for i, x in enumerate(about)]


def messages_of(s):
    return s.outcome.extra_info["messages"]


def turns(s):
    return s.outcome.facts["turns"]


def sample(engine, made, rows, *, seed=0, n=2, max_tokens=200):
    way = Sampling(n=n, temperature=TEMPERATURE, max_tokens=max_tokens, stop_token_ids=STOPS)
    return sample_groups(engine, rows, way, partner=made.partner, seed=seed)


def parts(s):
    """[(what the policy was told, what it said)] as ids."""
    ids, mask = s.response_ids.tolist(), s.response_mask.tolist()
    edges = [0, *(i for i in range(1, len(mask)) if mask[i] < mask[i - 1]), len(mask)]
    cut = [(ids[a:b], mask[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    return [([i for i, m in zip(*x, strict=True) if not m], [i for i, m in zip(*x, strict=True) if m]) for x in cut]


# ---------------------------------------------------------------------------------------------------------------------
# Conversations


def test_a_conversation_is_what_it_was_told_and_what_it_said(engine, policy, made, tokenizer, world):
    push(engine, policy)
    rows = rows_of(tokenizer, *({"turns": turns} for turns in range(1, 10)))  # the last one ends by max_turns
    samples, model = sample(engine, made, rows, max_tokens=300), plain(policy)
    assert [s.row_index for s in samples] == [i // 2 for i in range(18)]
    for s in samples:
        first = messages_of(s)[0]["content"]
        assert first == next(messages_of(x)[0]["content"] for x in samples if x.row_index == s.row_index)
        told, before = f"<|im_start|>user\n{first}<|im_end|>\n<|im_start|>assistant\n", None
        messages = [{"role": "user", "content": first}]
        for i, (observed, said) in enumerate(parts(s)):
            text = tokenizer.decode(said, skip_special_tokens=True)
            assert observed == tokenizer(told)["input_ids"] and said
            messages.append({"role": "assistant", "content": text})
            before = f"{i + 1}+{len(text)}"
            told = f"\n<|im_start|>user\n{before}<|im_end|>\n<|im_start|>assistant\n"
            told = told if said[-1] == 2 else "<|im_end|>" + told
            is_last = i + 1 == turns(s)
            if not is_last:
                assert said[-1] in STOPS
                messages.append({"role": "user", "content": before})
        assert list(messages_of(s))[: len(messages)] == messages and turns(s) == len(parts(s))
        if s.finish_reason == "stop":
            assert turns(s) == min(s.row_index + 1, 8) and s.outcome.extra_info["environment"]["count"] == turns(s)
        logp = (logits_of(model, s.prompt_ids, s.response_ids) / TEMPERATURE).log_softmax(-1)
        logp = logp.gather(-1, torch.from_numpy(s.response_ids).long()[:, None])[:, 0] * torch.tensor(s.response_mask)
        torch.testing.assert_close(logp, torch.from_numpy(s.rollout_logprobs), rtol=0, atol=1e-4)
    assert {turns(s) for s in samples} == {*range(1, 9)}
    assert trainer_gap(policy, samples) < 1e-4
    way = Sampling(temperature=TEMPERATURE)
    for s in samples[::5]:  # packed with others, and alone
        both = [token_logprobs(policy, collate(x), sampling=way)[0][0, : s.num_tokens] for x in ([s, *samples], [s])]
        torch.testing.assert_close(*both, rtol=0, atol=1e-5)
    assert check_engine(policy, samples, way, EngineFlags(max_logprob_gap=1e-4), world, num_probe=16) < 1e-5
    for s in samples:
        s.response_mask[:] = 1
    with pytest.raises(RuntimeError, match="the response mask has tokens that it did not sample"):
        check_engine(policy, samples, way, EngineFlags(max_logprob_gap=0.06), world, num_probe=16)


def facts(samples):
    arrays = [(s.response_ids.tolist(), s.response_mask.tolist()) for s in samples]
    return [(*x, s.finish_reason, messages_of(s), turns(s)) for x, s in zip(arrays, samples, strict=True)]


def test_samples_depend_on_the_seed_and_not_on_when_answers_come(engine, policy, made, tokenizer):
    push(engine, policy)
    found = []
    for latency, seed in [(0, 3), (0.2, 3), (0, 4)]:
        rows = rows_of(tokenizer, *[{"turns": 3, "latency": latency}] * 6)
        found.append(facts(sample(engine, made, rows, seed=seed)))
    assert found[0] == found[1] and all(a[0] != b[0] for a, b in zip(found[0], found[2], strict=True))
    assert len({tuple(x[0]) for x in found[0]}) == 12


def test_they_are_equal_to_conversations_of_the_same_process(engine, policy, made, tokenizer):
    push(engine, policy)
    flags = EnvironmentFlags(environment=str(made.file), environment_timeout=15.0, max_turns=8)
    here, partner = Conversations(flags, tokenizer, STOPS), made.partner
    rows = rows_of(tokenizer, *({"turns": turns} for turns in (1, 2, 3, 9)), {"turns": 1, "does": "raise"})
    way = Sampling(n=2, temperature=TEMPERATURE, max_tokens=200, stop_token_ids=STOPS)
    own = sample_groups(engine, rows, way, partner=here, seed=3)
    here.close()
    hosted = sample(engine, made, rows, seed=3)
    assert facts(own) == facts(hosted) and {x.finish_reason for x in own} >= {"stop", "error"}
    assert [x.outcome.facts["rewards"] for x in own] == [x.outcome.facts["rewards"] for x in hosted]
    assert not (partner.open or partner.numbers or partner.sent or partner.outcomes or partner.messages)


def test_an_interruption_keeps_tokens_turns_and_versions(engine, policy, made, tokenizer):
    """Interrupted after every third step, with other weights from then on."""
    push(engine, policy)
    loop, version = Loop(engine, made.partner, seed=1), engine.policy_version
    way = Sampling(n=2, temperature=TEMPERATURE, max_tokens=200, stop_token_ids=STOPS)
    for row in rows_of(tokenizer, {"turns": 2}, {"turns": 3, "latency": 0.02}):
        loop.start(row["row_index"], row, way)
    done, steps = [], 0
    while loop.is_open():
        for _, samples in loop.step():
            done += samples
        steps += 1
        if steps % 3 == 0:
            loop.interrupt()
            assert engine.is_idle and not engine.has_requests()
            if steps == 3:
                loop.resume()
                loop.interrupt()  # before anything was sampled
            push(engine, policy)
            loop.resume()
    assert len(done) == 4 and trainer_gap(policy, done) < 1e-4
    for s in done:
        said = [tokenizer.decode(x, skip_special_tokens=True) for _, x in parts(s)]
        assert [x["content"] for x in messages_of(s) if x["role"] == "assistant"] == said  # whole turns
        versions, counts = zip(*spans_of(s), strict=True)
        assert version <= min(versions) and max(versions) <= engine.policy_version
        assert list(versions) == sorted(set(versions)) and sum(counts) == s.num_sampled
        of_tokens = s.columns["versions"][len(s.prompt_ids) :]
        assert (of_tokens[s.response_mask == 0] == np.iinfo(np.int32).max).all()
        assert of_tokens[s.response_mask == 1].tolist() == np.repeat(versions, counts).tolist()
    assert max(len(spans_of(s)) for s in done) >= 3


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks


@pytest.fixture(scope="module")
def split_model(tiny_model, tmp_path_factory):
    """A model with heads that two ranks can share, and a tokenizer."""
    folder = tmp_path_factory.mktemp("split") / "model"
    heads = dict(num_attention_heads=4, num_key_value_heads=2)  # of 32: vLLM on CPU refuses smaller ones
    sizes = dict(vocab_size=80, hidden_size=128, num_hidden_layers=2, intermediate_size=192, **heads)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, max_position_embeddings=512, eos_token_id=None, pad_token_id=0))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return str(folder)


WORLDS = {"hf": ("hf", 1, 1), "hf, 2 ranks": ("hf", 1, 2), "vllm, 2 ranks": ("vllm", 1, 2), "shared": ("vllm", 2, 2)}


@pytest.fixture(scope="module")
def sampled(split_model, tmp_path_factory):
    """sampled(world): what tests/agents/conversation_ranks.py has found on each of its ranks."""

    @cache
    def found(name):
        (engine, size, nproc), out = WORLDS[name], tmp_path_factory.mktemp("world")
        if engine == "vllm":
            h.needs_vllm()
        (out / "game.py").write_text(GAME)
        arguments = (split_model, out / "game.py", out, engine, size)
        with the_only_shared_engine() if size > 1 else nullcontext():
            launch.run_file(Path(__file__).with_name("conversation_ranks.py"), *arguments, nproc=nproc)
        return [torch.load(out / f"rank{i}.pt", weights_only=False) for i in range(nproc)]

    return found


SOME = h.some(WORLDS, "hf", "hf, 2 ranks", "shared")


def assert_same(*worlds):
    """Worlds have had the same conversations."""
    one, other = (sorted((s for x in world for s in x["samples"]), key=lambda s: s.row_index) for world in worlds)
    assert facts(one) == facts(other)


@pytest.mark.parametrize("name", SOME)
def test_conversations_are_the_same_on_one_rank_and_two_and_over_an_engine_that_they_share(name, sampled, split_model):
    """Log-probs of every sampled token are those of a plain model that reads each conversation by itself."""
    model = AutoModelForCausalLM.from_pretrained(split_model, dtype=torch.float32, attn_implementation="eager")
    samples = [s for rank in sampled(name) for s in rank["samples"]]
    assert len(samples) == 20 and {turns(s) for s in samples} >= {*range(1, 8)}
    for s in samples:
        logp = (logits_of(model, s.prompt_ids, s.response_ids) / TEMPERATURE).log_softmax(-1)
        logp = logp.gather(-1, torch.from_numpy(s.response_ids).long()[:, None])[:, 0] * torch.tensor(s.response_mask)
        torch.testing.assert_close(logp, torch.from_numpy(s.rollout_logprobs), rtol=0, atol=1e-4)
    if name != "shared":
        assert_same(sampled(name), sampled("hf" if "hf" in name else "shared"))
    for rank in sampled(name):
        assert rank["gap"] < 1e-5
        assert "hf" in name or rank["steps waited"] <= TAKE_EVERY
        assert "the response mask has tokens that it did not sample" in rank["message"]


@pytest.mark.parametrize("name", SOME)
def test_groups_that_outlive_steps_are_taken_once_on_every_rank(name, sampled):
    ranks, versions = sampled(name), []
    for step in range(4):
        found = [rank["partial"][step] for rank in ranks]
        assert all(x["rows"] == found[0]["rows"] and len(x["rows"]) == 4 and x["gap"] < 1e-5 for x in found)
        own = [s.row_index for x in found for s in x["samples"][::2]]
        assert own == found[0]["rows"] and all(len(x["samples"]) == 8 // len(ranks) for x in found)
        versions += [len(spans_of(s)) for x in found for s in x["samples"]]
    taken = [i for step in range(4) for i in ranks[0]["partial"][step]["rows"]]
    left = [i for rank in ranks for i in rank["partial"][3]["left"]]
    assert sorted(taken + left) == list(range(20))
    # Some responses have tokens of two policies. The one rank of "hf" takes four whole groups of its batch of eight.
    # With "shared" it depends on the speed of the machine which groups are complete first.
    assert max(versions) >= 2 or name != "hf, 2 ranks"
    assert sum(len(rank["turns"]) for rank in ranks) == 6  # nobody hung, waiting or stopping


# ---------------------------------------------------------------------------------------------------------------------
# Faults

FAULTS = ["hang", "exit", "kill", "raise", "SystemExit", "None", "no role", "text", "number", "garbage", "forged"]
FAULTS += ["dies later", "refused", "no reset", "NaN reward", "text as reward", "huge reward", "number in a text"]
FAULTS += ["left out", "huge field", "reserved report", "huge report"]


def test_a_fault_costs_its_own_conversation(hf_engine, policy, tmp_path, tokenizer, capfd):
    push(hf_engine, policy)
    made = Made(tmp_path, tokenizer)  # whose process prints to where this test prints
    harmless = ["children", "print", "megabyte", "surrogate", "none", "two messages", "paid end"]
    rows = rows_of(tokenizer, *({"turns": 1, "does": x} for x in [*FAULTS, *harmless]))
    samples = sample(hf_engine, made, rows, n=1, max_tokens=300)
    found = {row["extra_info"]["does"]: s for row, s in zip(rows, samples, strict=True)}
    reached = {name for name, s in found.items() if len(messages_of(s)) > 1 and s.response_ids[-1] in STOPS}
    for name, s in found.items():
        failed = s.finish_reason == "error"
        assert failed == (name in FAULTS) or s.finish_reason == "length", (name, s.finish_reason, turns(s))
    assert {name for name, s in found.items() if s.finish_reason == "error"} >= {*FAULTS} - {"dies later"}
    assert reached and found["megabyte"].finish_reason == "length" and len(found["no reset"].response_ids) == 0
    assert all(len(s.response_ids) == 0 for name, s in found.items() if "report" in name)
    nothing = found["no reset"]  # no weights have sampled any of its tokens, which are those of the prompt
    assert nothing.columns["versions"].tolist() == [np.iinfo(np.int32).max] * len(nothing.prompt_ids)
    paid = {name: s.outcome.facts["rewards"] for name, s in found.items() if s.outcome.facts["rewards"]}
    assert paid == {"paid end": [2.0]} and found["paid end"].outcome.reward == 2.0
    assert [x["content"] for x in messages_of(found["two messages"])[2:4]] == ["1", "2"]
    assert messages_of(found["surrogate"])[2]["content"] == "1?2" or turns(found["surrogate"]) == 1
    launch.until(lambda: not any(map(launch.alive, made.pids())), 60, "a process is left behind")
    assert capfd.readouterr().err.count("environment: the conversation of") == 1
    assert len(made.pids("closed")) >= 3
    made.partner.close()


def test_when_the_first_process_is_killed_another_takes_over(hf_engine, policy, made, tokenizer):
    push(hf_engine, policy)
    first = made.environments.process.pid
    assert launch.children(made.partner.pid) == []
    (s,) = sample(hf_engine, made, rows_of(tokenizer, {"turns": 1, "does": "kill first"}), n=1, max_tokens=300)
    assert s.finish_reason in ("stop", "error")  # its answer and its death are on the way at the same time
    launch.until(lambda: not launch.alive(first))  # until then it may take requests that die with it
    after = sample(hf_engine, made, rows_of(tokenizer, {"turns": 1}, {"turns": 2}), max_tokens=300)
    assert {x.finish_reason for x in after} <= {"stop", "length"} and "stop" in {x.finish_reason for x in after}
    (other,) = launch.children(made.partner.pid)
    assert launch.alive(other) and not launch.alive(first)


def test_close_leaves_no_process(tmp_path, tokenizer, hf_engine, policy):
    made = Made(tmp_path, tokenizer)
    for i, row in enumerate(rows_of(tokenizer, {}, {"turns": 1, "does": "hang"})):
        made.environments.start(i, row, 0)
    launch.until(lambda: (made.environments.answers(0.1), all(x.report for x in made.environments.open.values()))[1])
    made.environments.ask(1, "x", [], 1)
    below, first = launch.descendants(made.environments.process.pid), made.environments.process.pid
    assert len(below) == 3 and set(made.pids()) < set(below)
    host = made.partner.pid
    made.environments.close()  # of this process, which has started them here; those of a run belong to the host
    made.partner.close()
    assert not any(map(launch.alive, [first, host, *below]))
    assert len(made.pids("closed")) == 1  # of the one that did not hang


def refused(tokenizer, message, **flags):
    before = launch.children(os.getpid())
    with pytest.raises(ValueError, match=message):
        open_partner(EnvironmentFlags(**flags), tokenizer, STOPS)
    assert [x for x in launch.children(os.getpid()) if x not in before and launch.alive(x)] == []


def test_files_that_cannot_be_loaded_are_refused_with_flag_file_and_reason(made, tmp_path, tokenizer):
    (tmp_path / "broken.py").write_text("import no_such_module")
    (tmp_path / "ends.py").write_text("import os; os._exit(0)")
    (tmp_path / "hidden.py").write_text("def _f(): pass")
    refused(tokenizer, "exclude each other", environment=str(made.file), tools=(str(made.file),))
    refused(
        tokenizer,
        r"--environment no/such.py cannot be loaded(.|\n)*there is no file 'no/such.py'",
        environment="no/such.py",
    )
    refused(
        tokenizer,
        r"broken.py cannot be loaded(.|\n)*No module named 'no_such_module'",
        tools=(str(tmp_path / "broken.py"),),
    )
    refused(tokenizer, "ends.py cannot be loaded: its process ended", environment=str(tmp_path / "ends.py"))
    refused(tokenizer, "has no class 'Environment'", environment=str(tmp_path / "hidden.py"))
    refused(tokenizer, "has no class 'function'", environment=f"{made.file}:function")
    refused(tokenizer, "has no 'Nobody'", environment=f"{made.file}:Nobody")
    refused(tokenizer, "Empty has no `step`", environment=f"{made.file}:Empty")
    refused(tokenizer, "there is no function in it", tools=(str(tmp_path / "hidden.py"),))


MOVES = """{%- for m in messages if m.role == 'system' -%}{{- '<|im_start|>system\n' + m.content + '<|im_end|>\n' -}}
{%- endfor -%}{%- for m in messages if m.role != 'system' -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
SYSTEM = """
class Environment:
    def reset(self, row, seed):
        return [{"role": "system", "content": "1"}] if row["extra_info"]["first"] else []
    def step(self, reply):
        return [{"role": "system", "content": "2"}]
"""


def test_a_message_that_the_template_moves_ends_its_conversation_and_not_the_run(
    tmp_path, tiny_model, hf_engine, policy, capfd
):
    push(hf_engine, policy)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = MOVES
    (tmp_path / "system.py").write_text(SYSTEM)
    partner = open_partner(EnvironmentFlags(environment=str(tmp_path / "system.py")), tokenizer, STOPS)
    try:
        assert "a message of the role 'system' ends its conversation as an error" in capfd.readouterr().err
        rows = rows_of(tokenizer, {"first": True}, {"first": False})
        way = Sampling(n=1, temperature=TEMPERATURE, max_tokens=100, stop_token_ids=STOPS)
        first, later = sample_groups(hf_engine, rows, way, partner=partner, seed=0)
    finally:
        partner.close()
    assert (first.finish_reason, turns(first), len(first.response_ids), messages_of(first)) == ("error", 1, 0, [])
    assert (later.finish_reason, turns(later)) == ("error", 1) and later.response_ids[-1] in STOPS
    assert [x["role"] for x in messages_of(later)] == ["assistant"]
    assert capfd.readouterr().err.count("does not append messages of the roles system, but moves or merges them") == 1

"""What tools cost: conversations with a tool, beside plain responses of as many sampled tokens.

    python benchmarks/tool_latency.py --engine vllm --out latency.jsonl
    python benchmarks/tool_latency.py --model data/smollm2 --num-prompts 64 --max-num-seqs 1024        # on a GPU
    python benchmarks/tool_latency.py --shape 1.5B --tokenizer T --num-prompts 64 --max-num-seqs 1024

A conversation has 1 to 2 * turns - 1 turns of the policy, and a turn half to one and a half times `turn_length` tokens.
Both are drawn from the numbers of the conversation, and do not depend on the model. The engine gets two stop ids, as
most models have them, which the model hardly ever says. A turn is cut at its length, and its last token is replaced by
the one that ends a turn. A tool, which is described to the policy and whose calls are looked for in each turn, answers
with a number after this many seconds, whatever the turn says.

Three kinds of generation are measured, each with the same number of sampled tokens for each response:

    plain           responses without an environment, in one turn
    seeded          the same, each with a seed of its own, as conversations have
    conversations   for each latency of the tool

Prints a line for each of them. It has the seconds of the fastest repeat, sampled tokens per second, and their ratio to
plain responses. It also says how often the engine has decoded, and how many sequences each of these steps had on
average. `parts` says what the trainer's thread did in that repeat: the seconds, for how many of them it used a CPU, and
how often it was done:

    engine                          vLLM's step, in which the thread waits for the GPU; or the step of the hf engine
    engine, also reading            the same, when it also hands a step to the GPU that reads prompts or turns
    reading tokens                  what our engine does with the tokens of a step
    requests, adding                new requests: handed to our engine, and by that to vLLM
    beginning conversations, after turns, answers, and waiting for them, ending conversations
                                    the calls of the policy's partner
    the rest                        the loop itself, and the objects of responses

With --profile, a further run of each kind tells for how many seconds the GPU was busy, and what its kernels took.

For a latency: the longest that one conversation has waited for its own chain of calls, and by how much of that
generation has grown.
"""

import functools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import step_time
from data import arithmetic, smollm2
from extras.agents import EnvironmentFlags, open_partner
from rl.data.template import load_tokenizer, stop_token_ids
from rl.data.types import Completion, Request, Sample, Sampling
from rl.model.load import load_pretrained
from rl.ranks import init_ranks
from rl.sampling.engines import Engine, make_engine
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.groups import seeded
from rl.sampling.loop import Loop

TOOL = '''
import time
from pathlib import Path

def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: such as 48/2 or (3+4)*12.5
    """

class Environment:
    tools = (calculate,)

    def step(self, reply):
        time.sleep(float(Path(__file__).with_name("latency").read_text()))
        answer = {"role": "tool", "name": "calculate", "tool_call_id": "call00000", "content": "24"}
        return None if reply.text.endswith("####") else [answer]
'''
TURN, LAST_TURN = "<|im_end|>", "####<|im_end|>"  # how they end
WORDS = (
    "<tool_call>",
    "</tool_call>",
    '{"name": "',
    '", "arguments": {"',
    '": ',
    "}}",
)  # a token each, in a tiny model
PARTS = {  # methods of the partner, and what they are called in the lines
    "begin": "beginning conversations",
    "after": "after turns",
    "answers": "answers, and waiting for them",
    "end": "ending conversations",
}


@dataclass(frozen=True)
class Args:
    engine: str = "vllm"
    """The engine is vllm or hf."""
    model: Path | None = None
    """This is the folder of a model whose tokenizer knows ChatML."""
    shape: str = "arithmetic"
    """Without --model, a model with random weights has this shape. It is a tiny one, or a Qwen2.5 by
    benchmarks/make_model.py."""
    tokenizer: str | None = None
    """Such a Qwen2.5 needs the folder or Hugging Face id of a Qwen2 tokenizer."""
    cache: Path = Path("runs/benchmark_models")
    """Such models are kept in this folder for the next time."""
    num_prompts: int = 16
    """There are this many prompts."""
    rollout_n: int = 8
    """Each prompt gets this many conversations."""
    prompt_length: int = 50
    """A prompt has this many tokens."""
    turns: int = 4
    """A conversation has this many turns of the policy, on average."""
    turn_length: int = 50
    """The policy samples this many tokens in a turn, on average."""
    latencies: tuple[float, ...] = (0.0, 0.5)
    """The tool takes this many seconds. The first value is what the others are compared with."""
    max_num_seqs: int = 128
    """This many conversations are decoded at a time."""
    repeats: int = 5
    """There are this many repeats, of which the fastest counts, since other programs on the machine make some
    slower."""
    profile: bool = False
    """Also run each kind once under torch's profiler, on a GPU."""
    out: Path | None = None
    """Append the lines to this file."""


def clocks() -> np.ndarray:
    """Seconds that have passed, and seconds that this thread has used a CPU."""
    return np.array([time.perf_counter(), time.thread_time()])


class Watch:
    """What this thread spends in functions, by label, without what it spends in others that are watched."""

    def __init__(self):
        self.inner = np.zeros(2)  # `clocks` in watched functions that the one which runs now has called
        self.clear()

    def clear(self) -> None:
        self.spent: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        self.calls: dict[str, int] = defaultdict(int)

    def wrap(self, owner: Any, name: str, label: str | Callable[[], str]) -> None:
        """Watch a function. A label that is a function is asked for after each call."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            start, outer, self.inner = clocks(), self.inner, np.zeros(2)
            try:
                return function(*arguments, **named)
            finally:
                took, name = clocks() - start, label if isinstance(label, str) else label()
                self.spent[name] += took - self.inner
                self.calls[name] += 1
                self.inner = outer + took

        setattr(owner, name, timed)


class Run(NamedTuple):
    """One generation."""

    seconds: float
    parts: dict[str, list]  # by what the trainer's thread did: seconds, of them on a CPU, calls
    steps: int  # of the engine
    running: float  # sequences in a step, on average
    samples: list[Sample]


class Script:
    """How long the turns of each conversation are, and how they end, whatever the policy samples."""

    def __init__(self, args: Args, turn: list[int], last_turn: list[int]):
        self.args, self.turn, self.last_turn = args, turn, last_turn
        self.has_turns = False  # or all that a conversation samples is one turn
        self.begun: dict[Hashable, int] = defaultdict(int)  # turns of each response
        self.lengths = functools.cache(self._lengths)
        # Tokens after the prompt of the longest conversation. An answer of the tool gets 50.
        self.longest = (2 * args.turns - 1) * (args.turn_length * 3 // 2 + 50) + 50

    def _lengths(self, key: Hashable) -> list[int]:
        """Of the turns of a conversation."""
        draw, length = random.Random(repr(key)), self.args.turn_length
        return [draw.randint(length // 2, length * 3 // 2) for _ in range(draw.randint(1, 2 * self.args.turns - 1))]

    def direct(self, engine: Engine) -> None:
        """Let an engine end turns as it is written here."""
        add, step = engine.add, engine.step

        def add_cut(requests: list[Request]) -> None:
            cut = []
            for x in requests:
                lengths = self.lengths(x.key)
                size = lengths[self.begun[x.key]] if self.has_turns else sum(lengths)
                self.begun[x.key] += 1
                cut.append(x._replace(sampling=replace(x.sampling, max_tokens=size)))
            add(cut)

        def step_to_end() -> list[Completion]:
            done = step()
            for i, x in enumerate(done if self.has_turns else ()):
                key = x.request.key
                said = self.last_turn if self.begun[key] == len(self.lengths(key)) else self.turn
                said = said[-len(x.token_ids) :]  # shorter if the model has ended the turn itself
                done[i] = replace(x, token_ids=x.token_ids[: -len(said)] + said, finish_reason="stop")
            return done

        engine.add, engine.step = add_cut, step_to_end


def model_of(args: Args, folder: Path) -> Path:
    """The folder of the model, whose two tokens that end a response are the last ones of its vocabulary."""
    if args.model is not None:
        model = args.model
    elif args.shape != "arithmetic":
        model = step_time.model_folder(args.shape, args.tokenizer, args.cache, "fixed", 0.0)
    else:
        model, characters = folder / "tiny", "\n" + "".join(map(chr, range(32, 127)))
        tokenizer = arithmetic.make_tokenizer(characters, (*arithmetic.ROLES, *WORDS), smollm2.TOOLS)
        step_time.save_tiny_model(model, tokenizer, vocabulary=49152)
    changed = folder / "model"
    changed.mkdir()
    for file in model.iterdir():
        if file.name in ("config.json", "generation_config.json"):
            last = json.loads((model / "config.json").read_text())["vocab_size"] - 1
            ends = {"eos_token_id": [last, last - 1]}
            (changed / file.name).write_text(json.dumps(json.loads(file.read_text()) | ends))
        else:
            (changed / file.name).symlink_to(file.resolve())
    return changed


class Generation:
    """A model, its engine and a tool, which measure one kind of generation after the other."""

    def __init__(self, args: Args, folder: Path):
        self.args, self.folder, self.watch = args, folder, Watch()
        model, tool = model_of(args, folder), folder / "tool.py"
        tool.write_text(TOOL)
        tokenizer = load_tokenizer(str(model))
        tokenizer.chat_template = smollm2.TOOLS
        flags = EnvironmentFlags(environment=str(tool), max_turns=2 * args.turns)
        said = [tokenizer(x, add_special_tokens=False)["input_ids"] for x in (TURN, LAST_TURN)]
        # The token that ends a turn here may be none of those that end a response of the model.
        self.partner = open_partner(flags, tokenizer, [*stop_token_ids(str(model), tokenizer), *said[0]])
        self.script, ranks = Script(args, *said), init_ranks()
        rollout = EngineFlags(engine=args.engine, max_num_seqs=args.max_num_seqs, free_cache_engine=False)
        longest = self.script.longest
        self.engine = make_engine(str(model), ranks, rollout, longest=args.prompt_length + longest)
        policy = load_pretrained(str(model), ranks)
        self.engine.update_weights(policy.named_parameters())
        stops = tuple(policy.config.eos_token_id)
        self.way = Sampling(args.rollout_n, max_tokens=longest, stop_token_ids=stops)
        some = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
        draw = random.Random(0)
        prompts = [draw.choices(some, k=args.prompt_length) for _ in range(args.num_prompts)]
        self.rows = [dict(prompt_ids=ids, row_index=i) for i, ids in enumerate(prompts)]
        self.script.direct(self.engine)
        watched = [(self.partner, name, label) for name, label in PARTS.items()]
        watched += [(self.engine, "step", "reading tokens"), (self.engine, "add", "requests")]
        self.reads = False  # whether the step that was scheduled last also reads
        if args.engine == "vllm":
            scheduler = self.engine.scheduler
            scheduler.schedule = functools.partial(self.scheduled, scheduler.schedule)
            label = lambda: "engine, also reading" if self.reads else "engine"  # noqa: E731
            watched += [(self.engine.core, "get_output", label), (self.engine, "_take_new", "adding")]
        else:
            watched[-2] = (self.engine, "step", "engine")
        for owner, name, label in watched:
            self.watch.wrap(owner, name, label)

    def scheduled(self, schedule: Callable, *args: Any) -> Any:
        """What vLLM's scheduler says, of which it is noted whether more than one token of a sequence is computed."""
        said = schedule(*args)
        self.reads = said.total_num_scheduled_tokens > len(said.num_scheduled_tokens)
        return said

    def measure(self, kind: str, latency: float | None) -> Run:
        """Sample once."""
        self.script.begun.clear()
        self.script.has_turns = latency is not None
        (self.folder / "latency").write_text(str(latency))
        self.watch.clear()
        start, found = clocks(), {}
        loop = Loop(self.engine, self.partner if kind == "conversations" else None, seed=0)
        with seeded(0, self.engine.device):
            for i, row in enumerate(self.rows):
                loop.start(i, row, self.way, i if kind == "seeded" else None)
            for i, samples in loop.run():
                found[i] = samples
        took, spent, calls = clocks() - start, self.watch.spent, self.watch.calls
        parts = {name: [*x.round(3).tolist(), calls[name]] for name, x in spent.items()}
        parts["the rest"] = (took - sum(spent.values())).round(3).tolist()
        samples = [x for i in sorted(found) for x in found[i]]
        assert len(samples) == len(self.rows) * self.args.rollout_n
        assert all(x.finish_reason != "error" for x in samples), "a conversation has failed"
        steps, tokens = calls["engine"] + calls["engine, also reading"], sum(x.num_sampled for x in samples)
        return Run(took[0], parts, steps, tokens / steps, samples)

    def close(self) -> None:
        self.partner.close()
        self.engine.close()


def profiled(run: Callable[[], Run]) -> dict[str, Any]:
    """For how many seconds the GPU was busy in a run, of how many, and the kernels that took longest, in seconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds = run().seconds
    busy, end, kernels = 0, 0, Counter()
    events = (x for x in profile.profiler.kineto_results.events() if x.device_type() == torch.autograd.DeviceType.CUDA)
    for x in sorted(events, key=lambda x: x.start_ns()):
        busy += max(0, x.end_ns() - max(x.start_ns(), end))
        end = max(end, x.end_ns())
        kernels[x.name()] += x.duration_ns() / 1e9
    longest = {name[:80]: round(x, 3) for name, x in kernels.most_common(10)}
    return dict(gpu_busy_s=round(busy / 1e9, 3), profiled_s=round(seconds, 3), kernels_s=longest)


def main(args: Args) -> list[dict]:
    """Measure. Returns the lines. Raises ValueError if there is no GPU to profile."""
    if args.profile and not torch.cuda.is_available():
        raise ValueError("--profile: no GPU is visible here, and only kernels of a GPU are profiled; leave it out")
    kinds = [("plain", None), ("seeded", None), *(("conversations", latency) for latency in args.latencies)]
    with tempfile.TemporaryDirectory() as folder:
        generation = Generation(args, Path(folder))
        for kind in kinds:
            generation.measure(*kind)  # a warm-up
        runs = [[generation.measure(*kind) for kind in kinds] for _ in range(args.repeats)]
        profiles = [profiled(lambda kind=kind: generation.measure(*kind)) if args.profile else {} for kind in kinds]
        generation.close()
    lines: list[dict] = []
    for (kind, latency), same, profile in zip(kinds, zip(*runs, strict=True), profiles, strict=True):
        best = min(same, key=lambda run: run.seconds)
        tokens = sum(x.num_sampled for x in best.samples)
        line = dict(
            kind=kind,
            engine=args.engine,
            responses=len(best.samples),
            max_num_seqs=args.max_num_seqs,
            turns=round(statistics.mean(x.outcome.facts["turns"] if x.outcome else 1 for x in best.samples), 2),
            sampled=tokens,
            told=sum(len(x.response_ids) for x in best.samples) - tokens,
            generation_s=round(best.seconds, 3),
            median_s=round(statistics.median(run.seconds for run in same), 3),
            slowest_s=round(max(run.seconds for run in same), 3),
            tokens_per_s=round(tokens / best.seconds),
            steps=best.steps,
            running=round(best.running, 1),
        )
        line["of_plain"] = round(line["tokens_per_s"] / (lines or [line])[0]["tokens_per_s"], 3)
        if latency is not None:
            first = runs[0][2].samples  # of the first latency
            pairs = [pair for run in same for pair in zip(run.samples, first, strict=True)]
            equal = statistics.mean(x.response_ids.tolist() == y.response_ids.tolist() for x, y in pairs)
            chain = max(x.outcome.facts["turns"] - 1 for x in best.samples) * latency
            waits = (max(x.outcome.extra_info["environment"]["seconds"] for x in run.samples) for run in same)
            grown = best.seconds - (lines[2]["generation_s"] if len(lines) > 2 else best.seconds)
            # With a GPU's kernels a token's last bits depend on what is decoded beside it, so some responses differ.
            assert equal == 1 or torch.cuda.is_available(), "latency has changed what was sampled"
            line |= dict(latency_s=latency, equal=round(equal, 3), chain_s=chain, grown_s=round(grown, 3))
            line |= dict(longest_wait_s=round(statistics.median(waits), 3))
            line |= dict(grown_chains=round(grown / chain, 3) if chain else None)
        lines.append(line | {"parts": best.parts} | profile)
        print(json.dumps(lines[-1]), flush=True)
    if args.out:
        with open(args.out, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return lines


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

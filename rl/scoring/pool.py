"""Turn responses into rewards: a pool of killable processes that call the user's `compute_score`.

    scorer = Scorer(("rewards/gsm8k.py", "my_style.py:brevity:0.2"), tokenizer)
    samples, tickets = sample_groups(..., on_group=scorer.submit)   responses are scored while others are still sampled
    scores = scorer.collect(tickets)                                one for each sample

A ticket stands for the responses to one prompt. Any number of them may be open, also several of one prompt.

A reward function runs in a process of its own (rl/scoring/worker.py), with limits on CPU time and memory, one task at a
time. Past its deadline, or when it dies, the process is replaced and the task has no score. A wrong answer is the
function's business (0); "no score" is None: the response leaves the group statistics and the loss, and is counted.
"""

import collections
import json
import math
import os
import pickle
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from rl import stop
from rl.console import say
from rl.data.encode import load_tokenizer
from rl.data.rows import no_ground_truth
from rl.data.types import Response, Sample, Score
from rl.flags import AtLeast1, Count, Free, PositiveFinite, Share
from rl.model import reward_model
from rl.model.load import shard_as
from rl.model.sharding import BARE, offload
from rl.ranks import Ranks
from rl.scoring.stopwatch import Stopwatch
from rl.scoring.worker import HEADER

REPOSITORY = Path(__file__).resolve().parents[2]
BY_DATA_SOURCE = "rewards/by_data_source.py"  # the default reward
START_SECONDS = 120  # to import the reward functions
WALL_FACTOR = 4  # a response may take this many times its CPU seconds by the clock: it waits, or the machine is busy
MAX_REPLY = 64 << 20  # bytes that a worker may send for one task
RECHECK_EVERY = 100  # one task in so many is scored twice, to find rewards that are not functions of their input
# How responses give their answers, for the check of data without reference answers.
ANSWER_FORMS = (r"\boxed{...}", "Answer: ...", "#### ...", "<answer>...</answer>")


@dataclass(frozen=True)
class Scoring:
    """processes that score"""

    # processes of a rank that score; default: the machine's cores over its ranks, at most 16
    reward_workers: Free[AtLeast1 | None] = None
    # CPU seconds to score a response, and four times as many by the clock; then the response has no score
    reward_timeout: Free[PositiveFinite] = 10.0
    reward_memory_mb: Free[Count] = 4096  # MiB of private memory of such a process; 0 for no limit
    allow_unsafe_code_execution: Free[bool] = False  # let code rewards run model-written code without a full sandbox


@dataclass(frozen=True)
class Rewards:
    """reward: what scores a response"""

    # file.py[:function[:weight]] ..., summed; verl's signature (data_source, solution_str, ground_truth, extra_info).
    # Default: rewards/by_data_source.py; no function if there is a --reward-model
    custom_reward_function: tuple[str, ...] | None = None
    reward_model: str | None = None  # a model of train_reward.py, by id or folder; its score joins the sum
    reward_model_coef: float = 1.0  # weight of that score
    # tokens of prompt and response in the reward model's own template; longer ones are truncated on the left
    reward_model_max_length: AtLeast1 = 4096
    reward_max_error_frac: Free[Share] = 0.05  # stop the run if more of a step's responses raise or time out

    @property
    def functions(self) -> tuple[str, ...]:
        """The reward functions that a run calls."""
        return self.custom_reward_function or (() if self.reward_model else (BY_DATA_SOURCE,))

    @property
    def need_truth(self) -> bool:
        """Whether a row without a ground truth cannot be scored."""
        return any(function.startswith(BY_DATA_SOURCE) for function in self.functions)


class Ticket(NamedTuple):
    """The responses to one prompt, handed in to be scored."""

    row: dict[str, Any]
    samples: Sequence[Sample]
    tasks: list[int]  # numbers of what the workers got, one or more responses each


class Scorer:
    """A pool of worker processes: `submit` the responses to one prompt after the other, then `collect` their scores.

    Args:
        functions: each `path/to/file.py[:function[:weight]]`; function defaults to compute_score, weight to 1. The
            score of a response is the weighted sum. The signature is verl's: compute_score(data_source, solution_str,
            ground_truth, extra_info=None) -> float, or dict with "score", or None; with plural names it gets lists, the
            responses to one prompt, and returns a list. It may be `async`. Without functions every score is 0.
        tokenizer: of the policy, to decode responses.
        workers: processes; default: this machine's cores over its ranks, at most 16.
        timeout_s: CPU seconds that a response may take; four times as many by the clock.
        memory_mb: private memory of a worker in MiB; 0 for no limit.
        extra_info: joins every row's extra_info, as response_length (tokens) does.

    Raises ValueError for an impossible limit, or if a function cannot be loaded.
    """

    def __init__(
        self,
        functions: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        workers: int | None = None,
        timeout_s: float = 10.0,
        memory_mb: int = 4096,
        extra_info: dict[str, Any] | None = None,
    ):
        if (workers is not None and workers < 1) or not 0 < timeout_s < math.inf or memory_mb < 0:
            raise ValueError(
                f"--reward-workers {workers} must be at least 1, --reward-timeout {timeout_s} a positive number of "
                f"seconds, --reward-memory-mb {memory_mb} at least 0"
            )
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.workers = workers or min(max((os.cpu_count() or 1) // ranks, 1), 16)
        self.tokenizer, self.timeout_s, self.extra_info = tokenizer, timeout_s, extra_info or {}
        self.functions = parse_functions(functions)
        self.setup = pickle.dumps((self.functions, timeout_s, memory_mb))
        # (number, row, samples, whether to score twice), or None to stop
        self.tasks: queue.SimpleQueue = queue.SimpleQueue()
        self.total = 0  # tasks ever submitted
        self.open: set[int] = set()  # numbers of those that were not collected
        self.finished: dict[int, tuple[list[Score], str | None]] = {}  # number -> scores, what went wrong
        self.reward_model: reward_model.RewardModel | None = None  # joins the functions, see `add_reward_model`
        self.report = ""  # what `check` said
        self.components: set[str] = set()  # names of parts of the scores that `check` saw
        self.broken: Exception | None = None  # why a thread gave up: a process could not be started, or our own bug
        self.news = threading.Condition()
        started: queue.SimpleQueue = queue.SimpleQueue()
        for _ in range(self.workers):  # a worker dies with the thread that started it, so each has its own
            threading.Thread(target=self._serve, args=(started,), daemon=True).start()
        hellos = [started.get() for _ in range(self.workers)]
        if problems := [hello["problem"] for hello in hellos if "problem" in hello]:
            self.close()
            raise ValueError(f"--custom-reward-function {' '.join(functions)} cannot be loaded: {problems[0]}")
        self.batched = hellos[0]["batched"]

    def submit(self, row: dict[str, Any], samples: Sequence[Sample]) -> Ticket:
        """Hand in all responses to the prompt of `row`; scoring begins at once. Returns what `collect` wants."""
        size = len(samples) if self.batched else 1
        ticket = Ticket(row, samples, [])
        for i in range(0, len(samples), size):
            self.tasks.put((self.total, row, samples[i : i + size], self.total % RECHECK_EVERY == 0))
            ticket.tasks.append(self.total)
            self.open.add(self.total)
            self.total += 1
        return ticket

    def collect(self, tickets: Sequence[Ticket]) -> list[Score]:
        """Wait for the scores of these tickets: one for each of their samples, in their order.

        The first failure is printed. If the run was asked to stop, no sample has a score: call `run.exit_if_asked`
        then. With a reward model all ranks must enter.

        Raises RuntimeError if the pool itself has failed, for instance because no process can be started.
        """
        samples = [sample for ticket in tickets for sample in ticket.samples]
        wanted = [number for ticket in tickets for number in ticket.tasks]
        assert len(self.open & set(wanted)) == len(wanted), "a ticket is collected twice, or comes from another Scorer"
        waiting = collections.deque(wanted)
        with self.news:
            while True:
                while waiting and waiting[0] in self.finished:
                    waiting.popleft()
                if self.broken or stop.requested() or not waiting:
                    break
                self.news.wait(0.2)
            if self.broken is not None:
                raise RuntimeError("the pool of reward processes failed") from self.broken
            stopped = bool(waiting)
            finished = [] if stopped else [self.finished.pop(number) for number in wanted]
        self.open -= set(wanted)
        if problems := [problem for _, problem in finished if problem is not None]:
            say(f"reward: {len(problems)} problem(s), the first: {problems[0]}", sys.stderr)
        scores = [score for part, _ in finished for score in part]
        if stopped:
            scores = [Score("", None, {}, "none", 0.0) for _ in samples]
        if self.reward_model is None or stop.requested(self.reward_model.ranks.group):
            return scores
        rows = [ticket.row for ticket in tickets]
        return reward_model.add_scores(self.reward_model, rows, samples, scores, alone=not self.functions)

    def add_reward_model(self, rewards: Rewards, ranks: Ranks, max_tokens: int, fsdp_size: int | None) -> None:
        """Load --reward-model, if there is one, onto the host: its score joins those of the functions from here on.

        Args: max_tokens, of one pass of the model on a GPU; fsdp_size, see `Memory`. All ranks must enter. Raises
        ValueError if it is no reward model or its files lack weights.
        """
        if (path := rewards.reward_model) is None:
            return
        model = reward_model.load_reward_model(path, ranks, dtype=ranks.dtype).requires_grad_(False)
        memory, longest = replace(BARE, fsdp_size=fsdp_size), rewards.reward_model_max_length
        shard_as(memory, model, ranks, longest=longest, flag="--reward-model")
        offload(model)
        tokenizer = load_tokenizer(path, flag="--reward-model")
        coef, max_length = rewards.reward_model_coef, rewards.reward_model_max_length
        self.reward_model = reward_model.RewardModel(model, tokenizer, coef, max_length, max_tokens, ranks)

    def require_components(self, names: Iterable[str], *, flag: str) -> None:
        """Raise ValueError naming `flag` if scores have no components of these names, as far as `check` has seen."""
        if missing := sorted(set(names) - self.components):
            self.close()
            found = ", ".join(sorted(self.components)) or "none"
            raise ValueError(
                f"{flag} {' '.join(missing)}: scores of the first rows have {found}; "
                "a reward function's dict has components, or give several functions"
            )

    def check(self, rows: Iterable[dict[str, Any]]) -> str:
        """Score an empty response and the reference answer of the first row of every data source, and say the scores.

        Raises ValueError if either cannot be scored: wrong columns, a missing package, a sandbox that cannot be built;
        or if a function fails on a row without a ground truth.
        """
        if not self.functions:
            return "rewards: no function"
        first: dict[str, dict[str, Any]] = {}
        blank: dict[str, dict[str, Any]] = {}  # the first row without a ground truth
        for row in rows:
            first.setdefault(row["data_source"], row)
            if no_ground_truth(row):
                blank.setdefault(row["data_source"], row)
        scores = self._try([(row, [_reference(row), ""]) for row in first.values()])
        self.components = {name for score in scores for name in score.components}
        for source, score in zip([s for s in first for _ in range(2)], scores, strict=True):
            if score.status in ("error", "timeout"):
                raise ValueError(
                    f"--custom-reward-function fails on the first row of data source {source!r} with the response "
                    f"{score.text[-100:]!r} ({score.status}; the traceback is above); mend the function or the data"
                )
        for (source, row), score in zip(blank.items(), self._try([(r, [""]) for r in blank.values()]), strict=True):
            if score.status in ("error", "timeout"):
                raise ValueError(
                    f"row {row['row_index']} of data source {source!r} has an empty ground_truth, and the reward "
                    f"function fails on it ({score.status}; the traceback is above); leave such rows out of the file"
                )
        pairs = zip(first.items(), scores[::2], scores[1::2], strict=True)
        said = "; ".join(f"{source}: {self._say(row, *pair)}" for (source, row), *pair in pairs)
        return f"rewards: {said or 'nothing to score'}"

    def _say(self, row: dict[str, Any], right: Score, empty: Score) -> str:
        """What a row's reference and an empty response scored. Where the reference is the bare ground truth and earns
        nothing, the forms in which responses give their answers are tried.
        """
        if no_ground_truth(row):
            return f"without a ground truth, an empty response scores {_show(empty)}"
        if isinstance(row["extra_info"].get("answer"), str):
            what = "the reference answer scores"
        elif _value(right) > _value(empty):
            what = "the ground truth scores"
        else:
            truth = _reference(row)
            forms = ANSWER_FORMS if len(truth) < 1000 else ()  # the tests of a program are no answer
            tried = self._try([(row, [form.replace("...", truth)]) for form in forms])
            right, form = max(zip([right, *tried], ["", *forms], strict=True), key=lambda pair: _value(pair[0]))
            found = _value(right) > _value(empty)
            what = f"the ground truth as {form} scores" if found else "the ground truth, in every form tried, scores"
        return f"{what} {_show(right)}, an empty one {_show(empty)}"

    def _try(self, texts: Sequence[tuple[dict[str, Any], list[str]]]) -> list[Score]:
        """The scores of (row, responses to it), one after the other."""
        tickets = []
        for i, (row, responses) in enumerate(texts):
            ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else [] for text in responses]
            tickets.append(self.submit(row, [Sample([], r, [1] * len(r), [0.0] * len(r), "stop", i) for r in ids]))
        return self.collect(tickets)

    def close(self) -> None:
        """End the workers."""
        for _ in range(self.workers):
            self.tasks.put(None)

    def _serve(self, started: queue.SimpleQueue) -> None:
        """One thread: `_score_tasks`, and a word to those who wait if it fails."""
        try:
            self._score_tasks(started)
        except Exception as error:
            started.put({"problem": repr(error)})
            with self.news:
                self.broken = error
                self.news.notify()

    def _score_tasks(self, started: queue.SimpleQueue) -> None:
        """Keep one worker alive, and take tasks from the queue."""
        worker = _Worker(self.setup)
        started.put(worker.hello)
        while (task := self.tasks.get()) is not None:
            number, row, samples, twice = task
            texts = decode_responses(self.tokenizer, [s.response_ids.tolist() for s in samples])
            truth = row["reward_model"]["ground_truth"]
            facts = [row["extra_info"] | self.extra_info | {"response_length": len(s.response_ids)} for s in samples]
            calls = [(row["data_source"], text, truth, fact) for text, fact in zip(texts, facts, strict=True)]
            if worker.ended or worker.process.poll() is not None:
                worker.kill()
                worker = _Worker(self.setup)
            start = time.monotonic()
            reply = worker.score(calls, self.timeout_s, twice=twice)
            seconds = (time.monotonic() - start) / len(calls)
            problem, results = reply.get("problem"), reply.get("scored", [(None, {})] * len(calls))
            if problem is None and not reply["same"]:
                problem = "the same response scored twice gave two scores; the reward is not a function of its input"
            scores = [
                Score(text, value, parts, "ok" if value is not None else reply.get("status", "none"), seconds)
                for text, (value, parts) in zip(texts, results, strict=True)
            ]
            if problem is not None:
                problem = f"row {row['row_index']}: {problem}\nresponse: {texts[0][-300:]!r}"
            with self.news:
                self.finished[number] = scores, problem
                self.news.notify()
        worker.kill()


def make_scorer(
    rewards: Rewards,
    scoring: Scoring,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    *,
    max_response_length: int,
) -> Scorer:
    """The scorer that the flags ask for, tried on `rows`; what it says of them is its `report`.

    max_response_length joins the extra_info of every row. Raises ValueError, before anything is loaded, if a function
    or the reward model cannot score the first row of every data source.
    """
    if scoring.allow_unsafe_code_execution:
        os.environ["GLASSRL_ALLOW_UNSAFE_CODE_EXECUTION"] = "1"  # read by rewards/sandbox.py, in the workers
    if rewards.reward_model:
        reward_model.open_reward_model(rewards.reward_model, rows[0], rewards.reward_model_max_length)
    scorer = Scorer(
        rewards.functions,
        tokenizer,
        workers=scoring.reward_workers,
        timeout_s=scoring.reward_timeout,
        memory_mb=scoring.reward_memory_mb,
        extra_info={"max_response_length": max_response_length},
    )
    scorer.report = scorer.check(rows)
    if rewards.reward_model:
        scorer.components.add("reward_model")
    return scorer


def decode_responses(tokenizer: PreTrainedTokenizerBase, responses: list[list[int]]) -> list[str]:
    """The texts of responses, as `batch_decode` gives them, without special tokens; other threads run meanwhile.

    In `batch_decode` none does: it holds the interpreter's lock, half a millisecond for a thousand tokens.
    """
    if not tokenizer.is_fast or tokenizer.clean_up_tokenization_spaces:
        return tokenizer.batch_decode(responses, skip_special_tokens=True)
    return tokenizer.backend_tokenizer.decode_batch(responses, skip_special_tokens=True)


def raise_if_failing(responses: Sequence[Response], limit: float) -> None:
    """Raise RuntimeError if more than the share `limit` of the scores are missing by an error or a timeout."""
    failed = sum(r.score.status in ("error", "timeout") for r in responses)
    if failed > limit * len(responses):
        raise RuntimeError(
            f"{failed} of {len(responses)} responses could not be scored, more than --reward-max-error-frac {limit}; "
            "the first failure is printed above with its row. Mend the reward function, or raise the limit"
        )


class _Worker:
    """One process and its pipes. `hello` is its first message: {"batched": ...} or {"problem": ...}."""

    def __init__(self, setup: bytes):
        self.results, writing = os.pipe()
        code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from rl.scoring.worker import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=(writing,),
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        os.close(writing)
        self.tasks = self.process.stdin.fileno()
        os.set_blocking(self.tasks, False)
        self.ended = False
        self.hello = self._exchange(setup, START_SECONDS)

    def score(self, calls: list[tuple], timeout_s: float, *, twice: bool) -> dict[str, Any]:
        """{"scored": [(score, components)], "same": ...} or {"problem": text, "status": "error" or "timeout"}."""
        if "problem" in self.hello:
            return {"problem": self.hello["problem"], "status": "error"}
        message = pickle.dumps((calls, twice))
        return self._exchange(message, WALL_FACTOR * timeout_s * len(calls) * (2 if twice else 1))

    def _exchange(self, message: bytes, seconds: float) -> dict[str, Any]:
        """Send a message and wait for the reply; a worker that is late or dies is killed, and that is the reply."""
        waited = Stopwatch(min(seconds / 10, 0.5))  # a suspended job is not late
        outgoing, incoming = memoryview(HEADER.pack(len(message)) + message), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self.results, selectors.EVENT_READ)
            selector.register(self.tasks, selectors.EVENT_WRITE)
            while True:
                ready = {key.fd for key, _ in selector.select(waited.tick)}
                if waited.look() > seconds:
                    self.kill()
                    return {"status": "timeout", "problem": f"no score after {seconds:.0f} s; the worker was killed"}
                if self.tasks in ready:
                    try:
                        outgoing = outgoing[os.write(self.tasks, outgoing) :]
                    except BrokenPipeError:
                        outgoing = outgoing[:0]  # it died: the other pipe will say so
                    if not outgoing:
                        selector.unregister(self.tasks)
                if self.results in ready:
                    data = os.read(self.results, 1 << 16)
                    incoming += data
                    if not data:
                        return self._death()
                    size = HEADER.unpack_from(incoming)[0] if len(incoming) >= HEADER.size else 0
                    if max(size, len(incoming)) > MAX_REPLY:  # a reward function has written to our pipe
                        self.kill()
                        return {"status": "error", "problem": f"the worker sent {max(size, len(incoming))} bytes"}
                    if len(incoming) >= HEADER.size + size > HEADER.size:
                        try:
                            reply = json.loads(incoming[HEADER.size :])
                            last = bool(reply.get("last"))
                        except (ValueError, AttributeError, RecursionError) as error:
                            self.kill()
                            return {"status": "error", "problem": f"the worker sent something else: {error}"}
                        if last:
                            self.kill()
                        return reply

    def _death(self) -> dict[str, Any]:
        self.process.send_signal(signal.SIGCONT)  # a reward function may have stopped the guard
        code = self.process.wait()
        self.kill()
        if code == -signal.SIGXCPU:
            return {"status": "timeout", "problem": "no score within --reward-timeout; the worker was killed"}
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return {"status": "error", "problem": f"the worker process died ({how})"}

    def kill(self) -> None:
        """End the process and all that it started."""
        if self.ended:
            return
        self.process.terminate()  # its guard kills the rest
        self.process.send_signal(signal.SIGCONT)  # as above
        self.process.wait()
        self.process.stdin.close()
        os.close(self.results)
        self.ended = True


def parse_functions(specs: Sequence[str]) -> list[tuple[str, float, str, str]]:
    """`path/to/file.py[:function[:weight]]` -> (label, weight, file, function). The label is the file's stem, with the
    function's name added where two files share it. Raises ValueError naming the spec.
    """
    parsed = []
    for spec in specs:
        path, _, rest = spec.partition(":")
        name, _, weight = rest.partition(":")
        file = Path(path) if Path(path).is_file() else REPOSITORY / path  # wherever the script was started
        if not file.is_file():
            raise ValueError(f"--custom-reward-function {spec!r}: no file {path!r}; give path/to/file.py:function")
        try:
            number = float(weight or 1)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"--custom-reward-function {spec!r}: the weight {weight!r} is no number; give file.py:function:0.5"
            )
        parsed.append((number, str(file.resolve()), name or "compute_score"))
    stems = [Path(file).stem for _, file, _ in parsed]
    labels = [s if stems.count(s) == 1 else f"{s}.{name}" for s, (_, _, name) in zip(stems, parsed, strict=True)]
    if len(set(labels)) < len(labels):
        raise ValueError(f"--custom-reward-function {' '.join(specs)}: a function is named twice; add up its weights")
    return [(label, *rest) for label, rest in zip(labels, parsed, strict=True)]


def _reference(row: dict[str, Any]) -> str:
    """extra_info.answer, a whole right response, else the ground truth; of a list or dict the first text in it."""
    answer, truth = row["extra_info"].get("answer"), row["reward_model"]["ground_truth"]
    if isinstance(answer, str):
        return answer
    while isinstance(truth, (list, dict)) and truth:
        truth = next(iter(truth.values() if isinstance(truth, dict) else truth))
    return str(truth)


def _value(score: Score) -> float:
    return -math.inf if score.value is None else score.value


def _show(score: Score) -> str:
    return "nothing" if score.value is None else f"{score.value:g}"

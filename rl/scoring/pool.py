"""Turn responses into rewards: a pool of killable processes that call the user's `compute_score`.

    scorer = Scorer(("rewards/gsm8k.py", "my_style.py:brevity:0.2"), tokenizer)
    samples, tickets = sample_groups(..., on_group=scorer.submit)   responses are scored while others are still sampled
    scores = scorer.collect(tickets)                                one for each sample

A ticket stands for the responses to one prompt. Any number of them may be open, also several of one prompt.

Reward functions run in processes of their own (rl/scoring/worker.py), with limits on CPU time and memory, one task at a
time. Past its deadline, or when it dies, a process is replaced, and its task has no score: None. Such a response leaves
the group statistics and the loss, and is counted. (A wrong answer has a score, usually 0.)
"""

import math
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from rl import children, stop
from rl.console import say
from rl.data.rows import Row, named, no_ground_truth
from rl.data.types import Outcome, Response, Sample, Score
from rl.ranks import Ranks
from rl.scoring.flags import BY_DATA_SOURCE, Scoring
from rl.scoring.process import Worker

TASKS_PER_WORKER = 1000  # then a fresh process takes over, whatever the functions have leaked
FAILED = ("error", "timeout")  # status of a response that could not be scored
RECHECK_EVERY = 100  # one task in so many is scored twice, to find rewards that are not functions of their input
# How responses give their answers, for the check of data without reference answers.
ANSWER_FORMS = (r"\boxed{...}", "Answer: ...", "#### ...", "<answer>...</answer>")

Scored = tuple[list[Score], str | None]  # of a task: its scores, and what went wrong

DEFAULT = Scoring()


class Judge(Protocol):
    """Changes the scores that functions gave, as a learned reward does. The judges of a scorer take turns."""

    component: str  # the part of a score that is its own

    def load(self, ranks: Ranks, max_tokens: int, fsdp_size: int | None) -> None:
        """Get ready before the first score. All ranks must enter. Args: max_tokens, of one pass of a model on a GPU;
        fsdp_size, see `rl.model.sharding.Memory`.
        """

    def judge(self, rows: Sequence[Row], samples: Sequence[Sample], scores: Sequence[Score]) -> list[Score]:
        """New scores of this rank's samples, from `scores` so far; `rows` hold the prompts. All ranks must enter."""


class Ticket(NamedTuple):
    """The responses to one prompt, handed in to be scored."""

    row: Row
    samples: Sequence[Sample]
    tasks: list["Future[Scored]"]  # each of one response, or of all if the functions take lists


class Scorer:
    """A pool of worker processes: `submit` the responses to one prompt after the other, then `collect` their scores.

    Args: functions, each `path/to/file.py[:function[:weight]]`, as docs/rewards.md says; the score of a response is
    their weighted sum, and 0 without functions. tokenizer, of the policy, to decode responses. extra_info joins every
    row's, as response_length (tokens) does. Raises ValueError if a function cannot be loaded.
    """

    def __init__(
        self, functions: Sequence[str], tokenizer: PreTrainedTokenizerBase, flags: Scoring = DEFAULT, **extra_info: Any
    ):
        own_cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.workers = flags.reward_workers or min(max(own_cores, 1), 16)
        self.tokenizer, self.timeout_s, self.extra_info = tokenizer, flags.reward_timeout, extra_info
        self.functions = parse_functions(functions)
        self.setup = pickle.dumps((self.functions, flags.reward_timeout, flags.reward_memory_mb))
        self.tasks: queue.SimpleQueue = queue.SimpleQueue()  # (future, arguments of `_score`), or None to stop
        self.total = 0  # tasks ever submitted
        self.open: set[Future] = set()  # those that were not collected
        self.judges: Sequence[Judge] = ()  # change what the functions gave; they have to be loaded before `collect`
        self.report = ""  # what `check` said
        # What a partner of the policy would say of a response that is this text; None without a partner.
        self.outcome_of: Callable[[str], Outcome] | None = None
        self.components: dict[str, set[str]] = {}  # data source -> names of parts of the scores that `check` saw
        hellos: list[Future] = [Future() for _ in range(self.workers)]
        for hello in hellos:  # a worker dies with the thread that started it, so each has its own
            threading.Thread(target=self._serve, args=(hello,), daemon=True).start()
        if problems := [hello.result()["problem"] for hello in hellos if "problem" in hello.result()]:
            self.close()
            raise ValueError(f"--custom-reward-function {' '.join(functions)} cannot be loaded: {problems[0]}")
        self.batched = hellos[0].result()["batched"]

    def submit(self, row: Row, samples: Sequence[Sample]) -> Ticket:
        """Hand in all responses to the prompt of `row`; scoring begins at once. Returns what `collect` wants."""
        size = len(samples) if self.batched else 1
        ticket = Ticket(row, samples, [])
        for i in range(0, len(samples), size):
            ticket.tasks.append(Future())
            self.tasks.put((ticket.tasks[-1], row, samples[i : i + size], self.total % RECHECK_EVERY == 0))
            self.total += 1
        self.open |= set(ticket.tasks)
        return ticket

    def collect(self, tickets: Sequence[Ticket]) -> list[Score]:
        """Wait for the scores of these tickets, one for each of their samples in their order. Prints the first failure.

        If the run was asked to stop, no sample has a score: call `run.may_stop_after` then. With judges all ranks
        must enter. Raises RuntimeError if the pool itself has failed.
        """
        samples = [sample for ticket in tickets for sample in ticket.samples]
        wanted = [task for ticket in tickets for task in ticket.tasks]
        assert len(self.open & set(wanted)) == len(wanted), "a ticket is collected twice, or comes from another Scorer"
        waiting = wait(wanted, timeout=0).not_done
        while waiting and not stop.requested():
            waiting = wait(waiting, timeout=0.2).not_done
        if errors := [task.exception() for task in wanted if task.done() and task.exception()]:
            raise RuntimeError("the pool of reward processes failed") from errors[0]
        self.open -= set(wanted)
        finished = [] if waiting else [task.result() for task in wanted]
        if problems := [problem for _, problem in finished if problem is not None]:
            say(f"reward: {len(problems)} problem(s), the first: {problems[0]}", sys.stderr)
        scores = [score for part, _ in finished for score in part]
        scores = scores or [Score("", None, {}, "none", 0.0) for _ in samples]  # if the run was asked to stop
        rows = [ticket.row for ticket in tickets]
        for judge in self.judges:
            scores = judge.judge(rows, samples, scores)
        return scores

    def load_judges(self, ranks: Ranks, max_tokens: int, fsdp_size: int | None) -> None:
        """Load each of the judges, as `Judge.load` says. All ranks must enter."""
        for judge in self.judges:
            judge.load(ranks, max_tokens, fsdp_size)

    def require_components(self, names: Iterable[str], *, flag: str) -> None:
        """Raise ValueError naming `flag` if scores have no components of these names, as far as `check` has seen."""
        for source, found in (self.components or {"": set()}).items():
            if missing := sorted(set(names) - found):
                self.close()
                raise ValueError(
                    f"{flag} {' '.join(missing)}: scores of the first rows{source and f' of {source}'} have "
                    f"{', '.join(sorted(found)) or 'none'}; a reward function's dict has components, or give several "
                    "functions"
                )

    def check(self, rows: Iterable[Row]) -> str:
        """Score an empty response and the reference answer of the first row of every data source, and of its first row
        without a ground truth, and say the scores. Raises ValueError if they cannot be scored: wrong columns, a missing
        package, a sandbox that cannot be built.
        """
        if not self.functions:
            return "rewards: no function"
        first: dict[tuple[str, str], Row] = {}  # by data source, with a ground truth and without
        for row in rows:
            which = "first row with an empty ground_truth" if no_ground_truth(row) else "first row"
            first.setdefault((row["data_source"], which), row)
        said: dict[str, str] = {}
        for (source, which), row in first.items():
            right, empty = self._try(row, [_reference(row), ""])
            for score in (right, empty):
                self.components.setdefault(source, set()).update(score.components)
                if score.status in FAILED:
                    raise ValueError(
                        f"--custom-reward-function fails on the {which} of data source {source!r} with the response "
                        f"{score.text[-100:]!r} ({score.status}; the traceback is above); mend the function or the data"
                    )
            said.setdefault(source, f"{source}: {self._say(row, right, empty)}")
        return f"rewards: {'; '.join(said.values()) or 'nothing to score'}"

    def _say(self, row: Row, right: Score, empty: Score) -> str:
        """What a reference and an empty response scored. A bare truth that earns nothing is tried in ANSWER_FORMS."""
        if no_ground_truth(row):
            return f"without a ground truth, an empty response scores {_show(empty)}"
        if isinstance(row["extra_info"].get("answer"), str):
            what = "the reference answer scores"
        elif _value(right) > _value(empty):
            what = "the ground truth scores"
        else:
            what, truth = "the ground truth, in every form tried, scores", _reference(row)
            for form in ANSWER_FORMS if len(truth) < 1000 else ():  # the tests of a program are no answer
                [score] = self._try(row, [form.replace("...", truth)])
                if _value(score) > _value(right):
                    right = score
                    what = f"the ground truth as {form} scores" if _value(score) > _value(empty) else what
        return f"{what} {_show(right)}, an empty one {_show(empty)}"

    def _try(self, row: Row, texts: Sequence[str]) -> list[Score]:
        """The scores of responses to a row."""
        samples = []
        for text in texts:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
            outcome = self.outcome_of(text) if self.outcome_of else None
            samples.append(Sample([], ids, [1] * len(ids), [0.0] * len(ids), "stop", 0, outcome))
        return self.collect([self.submit(row, samples)])

    def close(self) -> None:
        """End the workers."""
        for _ in range(self.workers):
            self.tasks.put(None)

    def _serve(self, hello: Future) -> None:
        """One thread: keep one worker alive, and give it tasks."""
        try:
            worker = Worker(self.setup)
            hello.set_result(worker.hello)
        except Exception as error:  # such as that no process can be started: whoever made the pool waits for it
            return hello.set_result({"problem": repr(error)})
        while (task := self.tasks.get()) is not None:
            future, *arguments = task
            try:
                if worker.has_ended or worker.num_tasks == TASKS_PER_WORKER or worker.process.poll() is not None:
                    worker.kill()
                    worker = Worker(self.setup)
                future.set_result(self._score(worker, *arguments))
            except Exception as error:  # `collect` raises it
                future.set_exception(error)
        worker.kill()

    def _score(self, worker: Worker, row: Row, samples: Sequence[Sample], twice: bool) -> Scored:
        """Let a worker score responses to a row."""
        texts = decode_responses(self.tokenizer, [s.response_ids.tolist() for s in samples])
        texts = [s.outcome.text if s.outcome else text for s, text in zip(samples, texts, strict=True)]
        scores = [Score(text, None, {}, "none", 0.0) for text in texts]
        asked = [i for i, s in enumerate(samples) if s.finish_reason != "error"]  # where no partner has failed
        if not asked:
            return scores, None
        source, truth = row["data_source"], row["reward_model"]["ground_truth"]
        known = row["extra_info"] | self.extra_info
        calls = [(source, texts[i], truth, known | _facts(samples[i])) for i in asked]
        start = time.monotonic()
        reply = worker.score(calls, self.timeout_s, twice=twice)
        seconds = (time.monotonic() - start) / len(calls)
        problem, results = reply.get("problem"), reply.get("scored", [(None, {})] * len(calls))
        if not reply.get("same", True):
            problem = "the same response scored twice gave two scores; the reward is not a function of its input"
        for i, (value, parts) in zip(asked, results, strict=True):
            status = reply.get("status", "none") if value is None else "ok"
            by_partner = samples[i].outcome.reward if samples[i].outcome else 0.0
            whole = None if value is None else value + by_partner
            scores[i] = Score(texts[i], whole, parts, status, seconds)
        if problem is not None:
            problem = f"{named(row)}: {problem}\nresponse: {texts[0][-300:]!r}"
        return scores, problem


def _facts(sample: Sample) -> dict[str, Any]:
    """What extra_info says of a response: how many tokens the policy sampled, and what its partner says, if any."""
    return {"response_length": sample.num_sampled} | (sample.outcome.extra_info if sample.outcome else {})


def make_scorer(
    functions: Sequence[str],
    flags: Scoring,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    *,
    max_response_length: int,
    outcome_of: Callable[[str], Outcome] | None = None,
    judges: Sequence[Judge] = (),
) -> Scorer:
    """The scorer that the flags ask for, tried on `rows`; what it says of them is its `report`. Args: outcome_of,
    what the policy's partner would say of a response that is this text, if there is a partner; judges, which are not
    loaded yet. Raises ValueError if a function cannot score the first row of every data source.
    """
    if flags.allow_unsafe_code_execution:
        os.environ["GLASSRL_ALLOW_UNSAFE_CODE_EXECUTION"] = "1"  # read by rewards/sandbox, in the workers
    scorer = Scorer(functions, tokenizer, flags, max_response_length=max_response_length)
    scorer.outcome_of = outcome_of
    scorer.report = scorer.check(rows)
    scorer.judges = judges
    of_judges, of_functions = {judge.component for judge in judges}, scorer.components or {"": set()}  # "": all sources
    scorer.components = {source: names | of_judges for source, names in of_functions.items()}
    return scorer


def need_truth(functions: Sequence[str]) -> bool:
    """Whether a row without a ground truth cannot be scored by these reward functions."""
    return any(function.startswith(BY_DATA_SOURCE) for function in functions)


def decode_responses(tokenizer: PreTrainedTokenizerBase, responses: list[list[int]]) -> list[str]:
    """The texts of responses without special tokens, as `batch_decode` gives them. That holds the interpreter's lock,
    half a millisecond for a thousand tokens; here other threads run meanwhile.
    """
    if not tokenizer.is_fast or tokenizer.clean_up_tokenization_spaces:
        return tokenizer.batch_decode(responses, skip_special_tokens=True)
    return tokenizer.backend_tokenizer.decode_batch(responses, skip_special_tokens=True)


def raise_if_failing(responses: Sequence[Response], limit: float) -> None:
    """Raise RuntimeError if more than the share `limit` of the scores are missing by an error or a timeout."""
    failed = sum(r.score.status in FAILED for r in responses)
    if failed > limit * len(responses):
        raise RuntimeError(
            f"{failed} of {len(responses)} responses could not be scored, more than --reward-max-error-frac {limit}; "
            "the first failure is printed above with its row. Mend the reward function, or raise the limit"
        )


def parse_functions(specs: Sequence[str]) -> list[tuple[str, float, str, str]]:
    """`path/to/file.py[:function[:weight]]` -> (label, weight, file, function). The label is the file's stem, and the
    function's name where two share a stem. Raises ValueError naming the spec.
    """
    parsed = []
    for spec in specs:
        path, name, weight = (spec.split(":", 2) + ["", ""])[:3]
        file = Path(path) if Path(path).is_file() else children.REPOSITORY / path  # wherever the script was started
        if not file.is_file():
            raise ValueError(f"--custom-reward-function {spec!r}: no file {path!r}; give path/to/file.py:function")
        try:
            number = float(weight or 1)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"--custom-reward-function {spec!r}: the weight {weight!r} is no number, such as 0.5")
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

"""Turn responses into rewards: a pool of killable processes that call the user's `compute_score`.

    scorer = Scorer(("rewards/gsm8k.py", "my_style.py:brevity:0.2"), tokenizer, Scoring())
    samples = sample_groups(..., on_group=scorer.submit)    responses are scored while others are still sampled
    samples = scorer.collect(samples)                       the same samples, with their scores

Responses to any number of prompts may wait to be collected, also several groups of one prompt.

Reward functions run in processes of their own (rl/scoring/worker.py), with limits on CPU time and memory, one task at a
time. Past its deadline, or when it dies, a process is replaced, and its task has no score: None. Such a response leaves
the group statistics and the loss, and is counted. (A wrong answer has a score, usually 0.)
"""

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from rl import stop
from rl.console import say
from rl.data.rows import Row, named
from rl.data.types import Outcome, Sample, Score
from rl.ranks import Ranks
from rl.scoring.flags import BY_DATA_SOURCE, Scoring, parse_functions
from rl.scoring.process import Worker
from rl.scoring.trial import FAILED, try_functions

RECHECK_EVERY = 100  # one task in this many is scored twice, to find rewards that are not functions of their input


class Judge(Protocol):
    """Changes the scores that functions gave, as a learned reward does. The judges of a scorer take turns."""

    component: str  # the part of a score that is its own

    def load(self, ranks: Ranks, max_tokens: int, fsdp_size: int | None) -> None:
        """Get ready before the first score. All ranks must enter. Args: max_tokens, of one pass of a model on a GPU;
        fsdp_size, see `rl.model.sharding.Memory`.
        """

    def judge(self, rows: Sequence[Row], samples: Sequence[Sample], scores: Sequence[Score]) -> list[Score]:
        """New scores of this rank's samples, from `scores` so far. Args: rows, the prompt of each sample. All ranks
        must enter.
        """


class Scorer:
    """A pool of worker processes. `submit` the responses to one prompt after the other, then `collect` their scores.

    Args:
        functions: each `path/to/file.py[:function[:weight]]`, as docs/rewards.md says; the score of a response is their
            weighted sum, and 0 without functions.
        tokenizer: of the policy, to decode responses.
        rows: on which the functions are tried, see `trial.try_functions`; `report` says what they have scored.
        partner: of the policy, see `rl.sampling.loop.Partner`, if there is one.
        judges: which are not loaded yet.
        extra_info: what reward functions get in addition to the extra_info of each row. They also get response_length,
            the number of tokens that the policy sampled.

    Raises ValueError if a function cannot be loaded, or cannot score the first row of every data source, or if the
    processes cannot be started.
    """

    def __init__(
        self,
        functions: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        flags: Scoring,
        *,
        rows: Iterable[Row] = (),
        partner: Any = None,
        judges: Sequence[Judge] = (),
        **extra_info: Any,
    ):
        if flags.allow_unsafe_code_execution:
            os.environ["GLASSRL_ALLOW_UNSAFE_CODE_EXECUTION"] = "1"  # read by rewards/sandbox, in the workers
        setup = parse_functions(functions), flags.reward_timeout, flags.reward_memory_mb
        own_cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.num_workers = flags.reward_workers or min(max(own_cores, 1), 16)
        self.tokenizer, self.timeout_s, self.extra_info = tokenizer, flags.reward_timeout, extra_info
        self.total = 0  # tasks ever submitted
        # This has, for each sample that was not collected yet, its row, the task that scores it, and its place among
        # the scores that the task returns.
        self.submitted: dict[Sample, tuple[Row, AsyncResult, int]] = {}
        self.judges: Sequence[Judge] = ()  # change what the functions gave. They have to be loaded before `collect`.
        # A worker ends with the thread that has started it, so `close` ends the threads. These are daemons, since the
        # threads of an executor would be waited for when a trainer fails.
        try:
            self.threads = ThreadPool(self.num_workers)
        except (RuntimeError, AttributeError) as error:  # a ThreadPool whose threads cannot start raises either
            raise ValueError(f"--reward-workers {self.num_workers}: too many threads ({error}); lower it") from error
        self.idle = self.threads.starmap(Worker, [setup] * self.num_workers)  # workers without a task
        if problems := [worker.loaded["problem"] for worker in self.idle if "problem" in worker.loaded]:
            self.threads.terminate()
            raise ValueError(f"--custom-reward-function {' '.join(functions)} cannot be loaded: {problems[0]}")
        self.batched = self.idle[0].loaded["batched"]
        # `components` has, for each data source, the names of the parts of its scores.
        self.report, self.components = try_functions(self, rows if functions else (), partner)
        self.judges = judges

    def submit(self, row: Row, samples: Sequence[Sample]) -> None:
        """Hand in all responses to the prompt of `row`. Scoring begins at once. `collect` waits for the scores."""
        size = len(samples) if self.batched else 1
        for i in range(0, len(samples), size):
            scored_together, twice = samples[i : i + size], self.total % RECHECK_EVERY == 0
            task = self.threads.apply_async(self._score, (row, scored_together, twice))
            self.submitted |= {sample: (row, task, place) for place, sample in enumerate(scored_together)}
            self.total += 1

    def collect(self, samples: Sequence[Sample]) -> list[Sample]:
        """Wait for the scores of these samples, each of which was submitted. Returns them with their scores, in order.
        Prints the first failure.

        If the run was asked to stop, no sample has a score. Call `run.may_stop_after` then. With judges all ranks
        must enter. Raises what has failed in the pool itself, and KeyError for a sample that is collected twice or was
        submitted to another scorer.
        """
        submitted = [self.submitted.pop(sample) for sample in samples]
        tasks = list(dict.fromkeys(task for _, task, _ in submitted))
        while (waiting := [task for task in tasks if not task.ready()]) and not stop.requested():
            waiting[0].wait(timeout=0.2)
        results = [] if waiting else [task.get() for task in tasks]
        if problems := [problem for _, problem in results if problem]:
            say(f"reward: {len(problems)} problem(s), the first: {problems[0]}", sys.stderr)
        unknown = Score("", None, {}, "none", 0.0)  # of all samples, if the run was asked to stop
        scores = [unknown if waiting else task.get()[0][place] for _, task, place in submitted]
        for judge in self.judges:
            scores = judge.judge([row for row, _, _ in submitted], samples, scores)
        return [replace(sample, score=score) for sample, score in zip(samples, scores, strict=True)]

    def close(self) -> None:
        """End the workers. What was submitted, and not scored yet, gets no score any more."""
        self.threads.terminate()
        while self.idle:  # a worker that is not idle ends with its thread
            self.idle.pop().kill()

    def _score(self, row: Row, samples: Sequence[Sample], twice: bool) -> tuple[list[Score], str]:
        """Let a worker score responses to a row, in one of the threads. Returns the scores, and what went wrong, "" if
        nothing did.
        """
        texts = decode_responses(self.tokenizer, [s.response_ids.tolist() for s in samples])
        outcomes = [s.outcome or Outcome({}, 0.0, text, {}, {}) for s, text in zip(samples, texts, strict=True)]
        scores = [Score(x.text, None, {}, "none", 0.0) for x in outcomes]
        asked = [i for i, s in enumerate(samples) if s.finish_reason != "error"]  # "error": the partner has failed
        if not asked:
            return scores, ""
        source, truth = row["data_source"], row["reward_model"]["ground_truth"]
        known, lengths = row["extra_info"] | self.extra_info, [{"response_length": s.num_sampled} for s in samples]
        calls = [(source, outcomes[i].text, truth, known | lengths[i] | outcomes[i].extra_info) for i in asked]
        # There are as many threads as workers, so a thread always finds an idle worker.
        worker, start = self.idle.pop(), time.monotonic()
        reply = worker.score(calls, self.timeout_s, twice=twice)
        self.idle.append(worker)
        seconds = (time.monotonic() - start) / len(calls)
        problem, results = reply.get("problem", ""), reply.get("scored", [(None, {})] * len(calls))
        for i, (value, parts) in zip(asked, results, strict=True):
            status = reply.get("status", "none") if value is None else "ok"
            total = None if value is None else value + outcomes[i].reward
            scores[i] = Score(outcomes[i].text, total, parts, status, seconds)
        if problem:
            problem = f"{named(row)}: {problem}\nresponse: {outcomes[0].text[-300:]!r}"
        return scores, problem


def need_truth(functions: Sequence[str]) -> bool:
    """Whether a row without a ground truth cannot be scored by these reward functions."""
    return any(function.startswith(BY_DATA_SOURCE) for function in functions)


def decode_responses(tokenizer: PreTrainedTokenizerBase, responses: list[list[int]]) -> list[str]:
    """The texts of responses without special tokens, as `batch_decode` gives them. That holds the interpreter's lock,
    half a millisecond for a thousand tokens. Here other threads run meanwhile.
    """
    if not tokenizer.is_fast or tokenizer.clean_up_tokenization_spaces:
        return tokenizer.batch_decode(responses, skip_special_tokens=True)
    return tokenizer.backend_tokenizer.decode_batch(responses, skip_special_tokens=True)


def raise_if_failing(responses: Sequence[Sample], limit: float) -> None:
    """Raise RuntimeError if more than the share `limit` of the scores are missing by an error or a timeout."""
    failed = sum(r.score.status in FAILED for r in responses)
    if failed > limit * len(responses):
        raise RuntimeError(
            f"{failed} of {len(responses)} responses could not be scored, more than --reward-max-error-frac {limit}; "
            "the first failure is printed above with its row. Fix the reward function, or raise the limit"
        )

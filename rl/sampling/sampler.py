"""The responses of a step: sampled with the policy's weights, checked, scored, and known to every rank.

    sampler = open_sampler(args, task, run)           see rl/run/task.py
    for step in ...:
        responses = sampler.sample(policy, step)      G responses to each of the step's P prompts, on all ranks
    sampler.evaluate(policy)                          metrics of responses to held-out prompts

A step has four phases here. First the engine wakes and gets the policy's weights (update_weights). Then it samples
(gen). The trainer computes the log-probs of a few responses, and compares them with the engine's (verify). At last it
waits for the scores of the responses (reward). Other processes score each group as soon as it is complete.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedTokenizerBase

from rl.data.order import derive_seed, prompts_for_step
from rl.data.packed import Lazy, Row
from rl.data.types import Evaluation, Sample, Sampling
from rl.model.load import weights_for_engine
from rl.ranks import Ranks
from rl.sampling.engines import Engine
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.evaluation import summarize
from rl.sampling.flags import Validation
from rl.sampling.groups import sample_groups
from rl.sampling.loop import Partner
from rl.sampling.responses import gather_responses
from rl.sampling.verify import check_engine
from rl.scoring.pool import Scorer, raise_if_failing


class Task(NamedTuple):
    """What responses are sampled for. It has the prompts, how they are answered, and what scores the answers."""

    tokenizer: PreTrainedTokenizerBase  # of --model
    train_rows: Lazy[Row]  # of --train-files, with their prompts' tokens
    val_rows: Lazy[Row]  # of --val-files
    scorer: Scorer  # has started the processes that score responses
    sampling: Sampling  # how responses are sampled, with temperature, stop tokens, limit ...
    partner: Partner | None  # what answers the policy in the middle of a response
    total_steps: int
    batch_size: int  # prompts to which a step has responses (P)
    longest: int  # tokens of a prompt and its response
    rollout: EngineFlags  # flags of the engine
    validation: Validation  # flags of evaluations
    max_error_frac: float  # share of a step's responses that may fail to get a score
    seed: int


@dataclass(eq=False)
class Sampler:
    """Samples, checks and scores the responses of each step, see the top of this file. All ranks must make all
    calls.

    If the run was asked to stop, `end_phase` saves and exits instead of returning, so that nobody sees the incomplete
    responses.
    """

    engine: Engine  # asleep
    task: Task
    ranks: Ranks
    states: Sequence[dict[str, Any]]  # what `state` gave on each rank when the checkpoint was saved, or [] in a new run
    end_phase: Callable[[str], None]  # called with the name of each phase when it ends
    make_room: Callable[[], None]  # called before the engine wakes up, to free the memory that the engine needs
    take_back: Callable[[], None]  # called after the engine went to sleep, to move back what `make_room` has moved away
    is_awake: bool = False
    # The last call of `sample` leaves the prompts of all ranks, and the responses that this rank has sampled, until the
    # engine is woken again. `sleep` checks these responses, and `Run.log_step` shows some of them.
    rows: Sequence[Row] = ()
    own_samples: Sequence[Sample] = ()

    @property
    def version(self) -> int:
        """The number of the engine's weights. Each push adds one, and a resumed run counts on from its first step."""
        return self.engine.policy_version

    def wake(self, policy: nn.Module) -> None:
        """Wake the engine and give it the policy's weights, unless it is awake and so has them."""
        if not self.is_awake:
            self.make_room()
            self.engine.wake()
            self.engine.update_weights(weights_for_engine(policy, self.ranks))
            self.is_awake, self.own_samples = True, []
            self.end_phase("update_weights")

    def sample(self, policy: nn.Module, step: int, *, stays_awake: bool = False) -> list[Sample]:
        """The responses of a step on all ranks, in the order of `self.rows`, with the G responses to a prompt side by
        side. The prompts depend only on the seed and the step, so a resumed run sees those of the unbroken run.

        Args: stays_awake, whether the engine may be asked for more before the policy changes; `sleep` must follow.
        Raises RuntimeError if the engine does not hold the policy's weights, or too many responses get no score.
        """
        self.wake(policy)
        self.rows, self.own_samples = self.complete_groups(step)
        self.end_phase("gen")
        if not stays_awake:
            self.sleep(policy)
        self.own_samples = self.collect(self.own_samples)
        self.end_phase("reward")
        responses = gather_responses(self.own_samples, self.rows, self.ranks)
        raise_if_failing(responses, self.task.max_error_frac)
        return responses

    def prompts(self, step: int) -> list[Row]:
        """The P prompts of a step, on all ranks."""
        return prompts_for_step(self.task.train_rows, step, self.task.batch_size, self.task.seed)

    def complete_groups(self, step: int) -> tuple[Sequence[Row], list[Sample]]:
        """The prompts of a step, on all ranks, and this rank's responses to its share of them, groups side by side."""
        rows = self.prompts(step)
        return rows, self.ask(self.ranks.own_slice(rows), self.task.sampling, step)

    def ask(self, own_rows: Sequence[Row], sampling: Sampling | Sequence[Sampling], *numbers: int) -> list[Sample]:
        """Responses to this rank's prompts, which the scorer has been given already. What is sampled is a function of
        --seed, of `numbers`, such as the number of the step, and of the weights. Args: sampling, one for all prompts or
        one for each.
        """
        task, seed = self.task, derive_seed(self.task.seed, *numbers, self.engine.first_rank)
        return sample_groups(self.engine, own_rows, sampling, task.scorer.submit, task.partner, seed=seed)

    def collect(self, samples: Sequence[Sample]) -> list[Sample]:
        """Wait for the scores of this rank's samples. Returns the samples with their scores."""
        return self.task.scorer.collect(samples)

    def sleep(self, policy: nn.Module) -> None:
        """Put the engine to sleep. Then check with a few of the last samples that the engine had the policy's weights.
        The trainer computes their log-probs, and compares them with those that came with the samples.
        """
        self.engine.sleep()
        self.is_awake = False
        self.take_back()
        check_engine(policy, self.own_samples, self.task.sampling, self.task.rollout, self.ranks, version=self.version)
        self.end_phase("verify")

    def evaluate(self, policy: nn.Module) -> Evaluation:
        """Score --val-n responses of the policy to each held-out prompt, sampled as the other --val flags say.

        The engine stays awake, so that `sample` need not push the weights again. These responses are not checked.
        """
        self.wake(policy)
        task, own_rows = self.task, self.ranks.own_slice(self.task.val_rows)
        own_samples = self.ask(own_rows, task.validation.settings(task.sampling))
        shown = task.val_rows[: task.validation.log_val_generations]
        return summarize(own_rows, task.scorer.collect(own_samples), task.tokenizer, self.ranks, shown=shown)

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold of this rank's sampler. Here that is nothing, since prompts and seeds follow
        from the number of the step. A sampler whose responses outlive a step returns them.
        """
        return {}

    def close(self) -> None:
        """End the processes that score, and the engine."""
        self.task.scorer.close()
        self.engine.close()

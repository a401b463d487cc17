"""The judge of --reward-model: a model with a scalar head, whose score joins those of the reward functions."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from transformers import PreTrainedTokenizerBase

from extras.demonstrations import encode_conversation
from extras.judges import RewardModelFlags
from extras.judges.scalar_models import ScalarModel, fixed_scores
from extras.offload import offload, onload
from rl import stop
from rl.console import say
from rl.data.batching import collate, plan_update
from rl.data.rows import Row
from rl.data.template import Rendering, rendering_of, variables
from rl.data.types import Sample, Score
from rl.model.checks import check_model
from rl.model.load import load_model
from rl.model.sharding import BARE
from rl.ranks import Ranks


def open_reward_model(
    flags: RewardModelFlags, rows: Sequence[Row], policy: PreTrainedTokenizerBase, *, is_alone: bool
) -> "RewardModel":
    """The reward model of the flags, without its weights. Raises ValueError if it has no score head, fewer positions
    than --reward-model-max-length, no tokenizer, no chat template for the prompts, or if its files lack weights.

    Of all `rows` whose messages have the same roles and fields, the first is tried. The template gets the same date and
    arguments as that of the `policy`, whose tokenizer is given, as far as it reads them.
    """
    path, flag = flags.reward_model, "--reward-model"
    longest = flags.reward_model_max_length
    tokenizer = check_model(path, ScalarModel(), flag=flag, longest=longest, limits="--reward-model-max-length")
    tokenizer = prepare_like(tokenizer, policy)
    try:
        for row in {_shape_of(row): row for row in reversed(rows)}.values():
            encode_conversation(tokenizer, row, "a response")
    except ValueError as error:
        raise ValueError(f"{flag} {path} cannot read the training prompts: {error}") from error
    return RewardModel(flags, prepare_like(tokenizer, policy, allow_dropped_text=True), is_alone=is_alone)


def prepare_like(
    tokenizer: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase, *, allow_dropped_text: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a reward model, whose template gets the day of the policy's, and those of its arguments that it
    reads.

    Args: allow_dropped_text, even if the policy's does not, so that no response that a policy samples can end the run.
    """
    like, read = rendering_of(policy), variables(tokenizer)
    arguments = {name: x for name, x in like.arguments.items() if name in read}
    tokenizer.rendering = Rendering(arguments, like.day, allow_dropped_text or like.allow_dropped_text)
    return tokenizer


def _shape_of(row: Row) -> tuple:
    """The roles and fields of a row's prompt, which decide what most templates drop of it, or () for a string."""
    messages = row["prompt"] if isinstance(row["prompt"], list) else []
    return (bool(row.get("tools")), *((x["role"], *x) for x in messages))


class RewardModel:
    """A judge in the scorer, see `rl.scoring.pool.Judge`.

    Args: tokenizer, its own, whose chat template renders prompt and response; is_alone, whether no function scores.
    """

    component = "reward_model"

    def __init__(self, flags: RewardModelFlags, tokenizer: PreTrainedTokenizerBase, *, is_alone: bool):
        self.flags, self.tokenizer, self.is_alone = flags, tokenizer, is_alone

    def load(self, ranks: Ranks, max_tokens: int, fsdp_size: int | None) -> None:
        """Load the model onto the host. For the arguments see `rl.scoring.pool.Judge`. Raises ValueError if its files
        lack weights.
        """
        path, longest = self.flags.reward_model, self.flags.reward_model_max_length
        memory = replace(BARE, fsdp_size=fsdp_size)
        model = load_model(path, ranks, None, memory, kind=ScalarModel(), longest=longest, flag="--reward-model")
        offload(model)
        self.use(model, ranks, max_tokens)

    def use(self, model: nn.Module, ranks: Ranks, max_tokens: int) -> None:
        """Score with a model that is loaded, in passes of at most this many tokens per GPU."""
        self.model, self.ranks, self.max_tokens = model, ranks, max_tokens

    def judge(self, rows: Sequence[Row], samples: Sequence[Sample], scores: Sequence[Score]) -> list[Score]:
        """Add the model's score, times its weight, to this rank's scores, and name it as the component `reward_model`.

        `rows` has the prompt of each sample. The model comes from the host to the device for it. A response without a
        score gets none here either, and one for which the model gives NaN or infinity loses its own. Unless the model
        is alone, the accuracy of an evaluation stays that of the functions: the component `acc`. If a rank was asked to
        stop, the scores stay as they are. All ranks must enter.
        """
        if stop.requested(self.ranks.group):
            return list(scores)
        said = [s.outcome.extra_info["messages"][:-1] if s.outcome else [] for s in samples]  # before the last turn
        before = [[*row["prompt"], *x] if x else row["prompt"] for row, x in zip(rows, said, strict=True)]
        onload(self.model, self.ranks.device)
        learned = self.score(before, [score.text for score in scores], [row.get("tools") for row in rows])
        offload(self.model)
        if failed := sum(not math.isfinite(x) for x in learned):
            say(f"reward: the reward model gave NaN or infinity for {failed} of {len(learned)} responses", sys.stderr)
        return [self._joined(score, x) for score, x in zip(scores, learned, strict=True)]

    def _joined(self, score: Score, learned: float) -> Score:
        """A score with what the model gave for its response."""
        if not math.isfinite(learned):
            return score._replace(value=None, status="error")
        if score.value is None:
            return score
        components = ({} if self.is_alone else {"acc": score.value}) | score.components | {self.component: learned}
        return score._replace(value=score.value + self.flags.reward_model_coef * learned, components=components)

    def score(
        self,
        prompts: Sequence[str | list[dict]],
        responses: Sequence[str],
        tools: Sequence[list[dict] | None] | None = None,
    ) -> list[float]:
        """The model's scores of this rank's responses to prompts (text or messages), in their order. A conversation
        that is too long loses its beginning, never the end of the response, and how many did is printed. All ranks must
        enter, with any number of responses each.

        Args: tools, of the prompts' rows, by default none.
        """
        ranks, most = self.ranks, self.flags.reward_model_max_length
        rows = [{"prompt": x, "tools": y} for x, y in zip(prompts, tools or [None] * len(prompts), strict=True)]
        ids = [encode_conversation(self.tokenizer, row, x) for row, x in zip(rows, responses, strict=True)]
        if overlong := sum(len(x) > most for x in ids):
            what = f"{overlong} of {len(ids)} conversations have more than {most} tokens for the reward model"
            say(f"rank {ranks.rank}: {what}; their beginning was cut off", sys.stderr)
        parts = ranks.of_same_rows([x[-most:] for x in ids])  # of the ranks that compute together
        ids, start = [x for part in parts for x in part], sum(map(len, parts[: ranks.rank % ranks.sequence_size]))
        own = slice(start, start + len(prompts))
        max_tokens = self.max_tokens * ranks.sequence_size
        micros = plan_update([len(x) for x in ids], max_tokens=max_tokens).micro_batches
        passes = max(ranks.all_gather([len(micros)]))  # collectives: ranks with less to score run empty ones
        batch = collate([Sample(x, [], [], [], "stop", i) for i, x in enumerate(ids or [[0, 0]])], pad_id=0)
        return fixed_scores(self.model, batch, micros + [[]] * (passes - len(micros)))[own].tolist()

"""What an RL script works on: prompts, the processes that score responses, and how responses are sampled."""

from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from rl.data import images
from rl.data.encode import named
from rl.data.packed import Lazy, Row
from rl.data.prompts import count_steps, load_prompts
from rl.data.types import Sampling
from rl.flags import flat
from rl.run.arguments import check
from rl.sampling.environments import Environments, check_rows, make_environments
from rl.sampling.rollout import sampling_settings
from rl.scoring.pool import Scorer, make_scorer


def _text_only(args: Any) -> str | None:
    """Which part of a run sees no images, if any."""
    values = flat(args)
    if "critic_lr" in values:
        return "the critic of train_ppo.py"
    if "prm_lr" in values:
        return "the reward model of train_prime.py"
    if values.get("reward_model") is not None:
        return "--reward-model"
    if values.get("teacher_url") is not None:
        return "the server of --teacher-url"
    return next((group.text_only for group in vars(args).values() if hasattr(group, "text_only")), None)


class Task(NamedTuple):
    """What `load_task` gives a script."""

    tokenizer: PreTrainedTokenizerBase  # of --model
    train_rows: Lazy[Row]  # of --train-files, with their prompts' tokens
    val_rows: Lazy[Row]  # of --val-files
    scorer: Scorer  # has started the processes that score responses
    sampling: Sampling  # how responses are sampled: temperature, stop tokens, limit ...
    environments: Environments | None  # what answers the policy, with --environment or --tools
    total_steps: int


def load_task(args: Any, *, prompts_per_step: int | None = None, pairs: bool = False) -> Task:
    """Check a script's flags, data and reward function, and make of them what the script needs: see `Task`.

    Args: prompts_per_step, that are sampled, by default --train-batch-size; pairs, whether --train-files hold
    comparisons, whose rows no function scores. Raises ValueError for mistakes in these, before a model is loaded.
    """
    tokenizer, rewards = check(args), args.rewards
    lengths = dict(n=args.rollout_n, max_tokens=args.max_response_length)
    sampling = sampling_settings(args.decoding, args.model, tokenizer, **lengths)
    environments = make_environments(args.envs, tokenizer, sampling.stop_token_ids)
    tools = environments.chat.tools if environments else None
    kept = dict(needs_truth=rewards.need_truth, evaluates=args.validation.is_on, pairs=pairs, tools=tools)
    train_rows, val_rows = load_prompts(args.data, tokenizer, args.max_prompt_length, **kept)
    check_rows(args.envs, train_rows + val_rows)
    if images.in_use() and (blind := _text_only(args)):
        place = next(named(row) for row in train_rows + val_rows if row.get("images"))
        raise ValueError(f"{place}: has images, and {blind} reads text only; leave such rows out, or it")
    num_prompts = prompts_per_step or args.train_batch_size
    flag = "--train-batch-size" if num_prompts == args.train_batch_size else "--gen-batch-size"
    total_steps = count_steps(args.data, len(train_rows), num_prompts, flag=flag)
    judged = val_rows if pairs else train_rows + val_rows
    limit, in_turns = args.max_response_length, environments is not None
    scorer = make_scorer(rewards, args.scoring, tokenizer, judged, max_response_length=limit, in_turns=in_turns)
    return Task(tokenizer, train_rows, val_rows, scorer, sampling, environments, total_steps)

"""What an RL script works on: prompts, the processes that score responses, and how responses are sampled."""

from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from extras.agents import check_rows, open_partner
from extras.judges import open_judges
from rl.data.attachments import refuse_attachments
from rl.data.packed import Lazy, Reader, Row
from rl.data.prompts import load_prompts
from rl.data.types import Sampling
from rl.run.arguments import check
from rl.sampling.groups import sampling_settings
from rl.sampling.rollouts import Partner
from rl.scoring.pool import Scorer, need_truth


class Task(NamedTuple):
    """What `load_task` gives a script."""

    tokenizer: PreTrainedTokenizerBase  # of --model
    train_rows: Lazy[Row]  # of --train-files, with their prompts' tokens
    val_rows: Lazy[Row]  # of --val-files
    scorer: Scorer  # has started the processes that score responses
    sampling: Sampling  # how responses are sampled: temperature, stop tokens, limit ...
    partner: Partner | None  # what answers the policy, with --environment or --tools
    total_steps: int


def load_task(args: Any, *, prompts_per_step: int | None = None, read_train: Reader | None = None) -> Task:
    """Check a script's flags, data and reward function, and make of them what the script needs: see `Task`.

    Args: prompts_per_step, that are sampled, by default --train-batch-size; read_train, a reader of --train-files
    whose rows no function scores. Raises ValueError for mistakes in these, before a model is loaded.
    """
    tokenizer, rewards = check(args), args.rewards
    lengths = dict(n=args.rollout_n, max_tokens=args.max_response_length)
    sampling = sampling_settings(args.decoding, args.model, tokenizer, **lengths)
    partner = open_partner(args.envs, tokenizer, sampling.stop_token_ids)
    train_rows, val_rows = load_prompts(
        args.data,
        tokenizer,
        args.max_prompt_length,
        needs_truth=need_truth(rewards.functions),
        evaluates=args.validation.is_on,
        read_train=read_train,
        text_of=partner.prompt_text if partner else None,
    )
    check_rows(args.envs, train_rows + val_rows)
    parts = (getattr(x, "text_only", None) for x in (args, *vars(args).values()))  # of the script and of its groups
    for reader in filter(None, parts):
        refuse_attachments(train_rows + val_rows, f"{reader} reads", "leave such rows out, or it")
    num_prompts = prompts_per_step or args.train_batch_size
    flag = "--train-batch-size" if num_prompts == args.train_batch_size else "--gen-batch-size"
    total_steps = args.data.count_steps(len(train_rows), num_prompts, flag=flag)
    scored_rows = val_rows if read_train else train_rows + val_rows
    scorer = Scorer(
        rewards.functions,
        tokenizer,
        args.scoring,
        rows=scored_rows,
        partner=partner,
        judges=open_judges(rewards, scored_rows, tokenizer, are_alone=not rewards.functions),
        max_response_length=args.max_response_length,
    )
    return Task(tokenizer, train_rows, val_rows, scorer, sampling, partner, total_steps)

"""What an RL script works on, made from its flags: prompts, what scores responses to them, and what samples these."""

from typing import TYPE_CHECKING, Any

from extras.agents import check_rows, open_partner
from extras.judges import open_judges
from rl.data.attachments import refuse_attachments
from rl.data.encode import load_prompts
from rl.data.packed import Reader
from rl.run.training import check
from rl.sampling.engines import check_engine_flags, make_engine
from rl.sampling.groups import sampling_settings
from rl.sampling.sampler import Sampler, Task
from rl.scoring.pool import Scorer, need_truth

if TYPE_CHECKING:
    from rl.run.run import Run


def load_task(args: Any, *, prompts_per_step: int | None = None, read_train: Reader | None = None) -> Task:
    """Check a script's flags, data and reward function, and make of them what the script needs, see `Task`.

    Args: prompts_per_step, that are sampled, by default --train-batch-size; read_train, a reader of --train-files
    whose rows no function scores. Raises ValueError for mistakes in these, before a model is loaded.
    """
    tokenizer, rewards = check(args), args.rewards
    check_engine_flags(args.rollout, args.model)
    n, max_tokens = args.rollout_n, args.max_response_length
    sampling = sampling_settings(args.decoding, args.model, tokenizer, n=n, max_tokens=max_tokens)
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
    # Names of what reads nothing but text, from the script and from its groups of flags.
    text_readers = (getattr(x, "text_only", None) for x in (args, *vars(args).values()))
    for reader in filter(None, text_readers):
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
    return Task(
        tokenizer=tokenizer,
        train_rows=train_rows,
        val_rows=val_rows,
        scorer=scorer,
        sampling=sampling,
        partner=partner,
        total_steps=total_steps,
        batch_size=num_prompts,
        longest=args.longest,
        rollout=args.rollout,
        validation=args.validation,
        max_error_frac=rewards.reward_max_error_frac,
        seed=args.seed,
    )


def open_sampler(args: Any, task: Task, run: "Run", kind: type[Sampler] | None = None) -> Sampler:
    """The sampler that the flags ask for, or one of the class `kind`, with its engine, which is asleep."""
    engine = make_engine(args.model, run.ranks, args.rollout, longest=task.longest, seed=args.seed)
    kind = kind or args.decoding.sampler() or Sampler
    return kind(engine, task, run.ranks, run.states, run.may_stop_after, make_room=run.offload, take_back=run.onload)

"""Online preference optimisation: sample responses, pair better with worse ones, and learn from each pair directly.

    torchrun train_dpo.py --model Qwen/Qwen2.5-1.5B-Instruct                                       # one GPU, GSM8K
    torchrun train_dpo.py --pairs solution --ref-update-steps 58 --total-epochs 3                  # SPIN
    torchrun train_dpo.py --offline --train-files data/preferences/train.parquet                   # DPO as published

Direct Preference Optimization (DPO, arXiv 2305.18290) needs no advantage and no critic. A pair is two responses to one
prompt: one is chosen, the other rejected. The *log-ratio* of a response is its log-prob by the policy, less that by a
frozen reference, which is the policy before training; beta times that is its *implicit reward*. The loss makes the
implicit reward of the chosen response larger than that of the rejected one. --loss-type has the losses of IPO
(2310.12036), SPPO (2405.00675), SLiC (2305.10425) and KTO (2402.01306) too. Self-play (SPIN, 2401.01335; SPPO) makes
the policy the new reference every so many steps.

Deviations from the papers:
  1. pairs are sampled by the policy that learns and scored by the reward (OAIF, arXiv 2402.04792), unless --offline;
  2. SPPO's probability to win is 1 or 0, not a model's estimate, and IPO's log-ratios are means over tokens, as in TRL;
  3. KTO, which can do without pairs, gets pairs too, and its KL is estimated from those of the step;
  4. SPIN's responses come from the policy of today, not from that of the last iteration, which is the reference.

Shapes: P prompts of a step, n responses sampled for each, N pairs, 2N rows of which b are this rank's, chosen and
rejected side by side; T tokens. Position t of a (b, T) tensor describes token t given those before it. See
docs/train_dpo.md.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from rl import flags
from rl.data.batching import make_batch
from rl.data.order import derive_seed, prompts_for_step
from rl.data.prompts import add_given, load_prompts, sampling_of
from rl.data.types import take_rows
from rl.flags import AtLeast1, Count, NotNegative, Positive, PositiveShare, Share, TopK
from rl.formulas import preference, schedule
from rl.model import load as models
from rl.model import lora, sharding
from rl.model.logprobs import fixed_logprobs, token_logprobs
from rl.run import metrics
from rl.run.run import Run
from rl.sampling import engines
from rl.sampling.evaluation import evaluate
from rl.sampling.rollout import gather_responses, given_responses, sample_groups, scores_of, side_by_side, verify_engine
from rl.scoring.pool import make_scorer, stop_if_failing

PAIRS = {  # (scores (P, R), margin) -> pairs (N, 2) of chosen and rejected
    "best_worst": preference.best_against_worst,
    "all": preference.all_pairs,
    "solution": preference.first_against_all,
}
LOSSES = {  # (log-ratios (N, 2), lengths (N, 2), KLs (2,), beta) -> loss (N,)
    "dpo": preference.dpo,
    "ipo": preference.ipo,
    "sppo": preference.sppo,
    "hinge": preference.hinge,
    "kto_pair": preference.kto_pair,
}


@dataclass(frozen=True)
class Args(flags.RL, lora.LoRA):
    experiment_name: str = "dpo"  # run in the trackers, and part of the folder
    # metrics and limits; a step beyond one prints a line that begins with ALARM
    alarms: tuple[str, ...] = (
        "train/num_pairs<1",
        "response_length/clip_ratio>0.5",
        "actor/entropy<0.01",
    )

    # --- model and data
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # Hugging Face id or folder of the policy, and of the first reference
    offline: bool = False  # learn from the pairs in --train-files, see train_reward.py, and sample nothing
    train_batch_size: AtLeast1 = 128  # prompts a step (P); responses a step are train_batch_size * rollout_n
    max_prompt_length: AtLeast1 = 512  # tokens; a longer prompt is an error unless --filter-overlong-prompts
    max_response_length: AtLeast1 = 1024  # tokens; longer ones are cut and counted in response_length/clip_ratio
    filter_overlong_prompts: bool = False  # drop prompts longer than --max-prompt-length
    seed: int = 0  # decides data order and sampling, together with the step

    # --- reward

    # file.py[:function[:weight]] ..., summed; verl's signature (data_source, solution_str, ground_truth, extra_info).
    # Default: rewards/by_data_source.py; no function if there is a --reward-model
    custom_reward_function: tuple[str, ...] | None = None
    reward_model: str | None = None  # a model of train_reward.py, by id or folder; its score joins the sum
    reward_model_coef: float = 1.0  # weight of that score
    reward_model_max_length: AtLeast1 = 4096  # tokens of prompt and response in its own template; longer lose the start

    # --- rollout
    engine: Literal["vllm", "hf"] = "vllm"  # vllm in this process, or the slow and simple sampler of transformers
    rollout_n: AtLeast1 = 8  # responses sampled per prompt (n)
    temperature: Positive = 1.0  # of sampling; the trainer divides its logits by it too
    top_p: PositiveShare = 1.0  # the fewest likeliest tokens that together have this probability, also in the trainer
    top_k: TopK = -1  # sample among the k likeliest tokens; -1 all
    min_p: Share = 0.0  # leave out tokens less than this times as likely as the likeliest

    # --- algorithm

    # which responses are compared: the best with the worst, every two, or the reference solution with each (SPIN)
    pairs: Literal[*PAIRS] = "best_worst"
    pair_margin: NotNegative = 0.0  # scores of a pair must differ by more than this; not looked at with solutions
    solution_key: str = "answer"  # the reference solution's name in extra_info, for --pairs solution
    loss_type: Literal[*LOSSES] = "dpo"  # what a pair costs
    beta: Positive = 0.1  # how much a nat of log-ratio is worth; a small one lets the policy go far from the reference
    ref_update_steps: AtLeast1 | None = None  # make the policy the new reference every so many steps; default: never
    ppo_mini_batch_size: AtLeast1 | None = None  # prompts whose pairs make an optimizer step; default: all of the step
    ppo_epochs: AtLeast1 = 1  # passes over a step's pairs

    # --- optimizer
    lr: NotNegative = 1e-6  # AdamW's learning rate after warm-up; LoRA wants about ten times that of full training
    lr_warmup_steps: Count = 0  # steps of linear warm-up
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"  # shape of the learning rate after warm-up
    weight_decay: NotNegative = 0.01  # AdamW's decoupled weight decay
    grad_clip: Positive = 1.0  # largest global gradient norm


def validate(args: Args) -> None:
    """Refuse settings that contradict each other, naming the flag, the value and the fix."""
    flags.check(args)
    if args.offline and (args.pairs != "best_worst" or args.pair_margin):
        raise ValueError(
            "--offline has its pairs from --train-files; leave --pairs and --pair-margin at their defaults"
        )
    if (args.offline or args.pairs == "solution") and (args.top_p < 1 or args.top_k > 0 or args.min_p > 0):
        raise ValueError("--top-p, --top-k and --min-p leave out tokens that the data's responses may have; drop them")
    if not args.offline and args.pairs != "solution" and args.rollout_n < 2:
        raise ValueError(f"--rollout-n {args.rollout_n} makes no pair; sample at least 2, or add --pairs solution")
    longest = 2 * (args.max_prompt_length + args.max_response_length)
    if args.ppo_max_token_len_per_gpu < longest:
        raise ValueError(
            f"--ppo-max-token-len-per-gpu {args.ppo_max_token_len_per_gpu} cannot hold one pair of 2 x "
            f"(--max-prompt-length + --max-response-length) = {longest} tokens; raise it to at least that"
        )


def main(args: Args) -> dict[str, float]:
    """Train on pairs; returns the metrics of the last step and of the last evaluation."""
    # Everything a user can get wrong is refused here, before a model is loaded.
    validate(args)
    tokenizer, train_rows, val_rows = load_prompts(args, pairs=args.offline)
    scorer = make_scorer(args, tokenizer, val_rows if args.offline else train_rows + val_rows)
    train_rows = add_given(args, tokenizer, train_rows)  # responses that the data has: solutions, or pairs
    sampling = sampling_of(args, tokenizer)
    total_steps = args.total_training_steps or args.total_epochs * (len(train_rows) // args.train_batch_size)
    mini_batch_size = args.ppo_mini_batch_size or args.train_batch_size  # prompts
    mini_batches = math.ceil(args.train_batch_size / mini_batch_size)  # of a step

    run = Run(args, tokenizer, total_steps)
    ranks = run.ranks
    policy = models.load_policy(args, ranks)
    engine = engines.make_engine(args, ranks)
    reference = models.load_reference(args, ranks, policy)
    scorer.add_reward_model(args, ranks)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    refreshed = {"reference": (reference, None)} if args.ref_update_steps else {}  # part of checkpoints, if it changes
    n = 0 if args.offline else args.rollout_n
    run.resume(
        {"actor": (policy, optimizer), **refreshed},
        about=f"{args.train_batch_size} prompts x {n} sampled responses and up to {mini_batches * args.ppo_epochs} "
        f"update(s) a step, {len(train_rows)} prompts to draw from\n{scorer.report}",
        engine=engine,
    )
    step_metrics, val_metrics = {}, {}

    for step in range(run.start, total_steps + 1):  # the last round only evaluates
        # Saves what `step` steps have made, if a save is due. A run that is asked to stop saves it too and ends, at a
        # call of the clock or of leave_if_asked. Once an optimizer step has been made, it ends after the step.
        clock = run.begin(step, state={})

        # 1. Prompts: a pure function of (seed, step), so that a resumed run sees what the unbroken one would have seen.
        rows = prompts_for_step(train_rows, step, args.train_batch_size, args.seed)  # P
        asked = [] if args.offline else rows

        # 2. Rollouts: push the policy into the engine, sample n responses per prompt, prove that both sides agree.
        engine.wake()
        engine.update_weights(models.weights_for_engine(policy, ranks))
        clock("update_weights")
        if run.evaluation_is_due(step):
            val_metrics = run.log_evaluation(step, *evaluate(args, engine, scorer, val_rows, sampling, ranks))
            clock("testing")
        if step == total_steps:
            break
        own_rows, seed = (
            ranks.own_slice(asked),
            derive_seed(args.seed, step, engine.first_rank),
        )
        own_samples, tickets = sample_groups(engine, own_rows, sampling, seed=seed, on_group=scorer.submit)
        clock("gen")
        engine.sleep()
        verify_engine(policy, own_samples, sampling=sampling, limit=args.max_logprob_gap, ranks=ranks)
        clock("verify")

        # 3. Rewards: other processes have been scoring since the first responses were complete. Then all ranks get the
        # scores and lengths of the whole step; the tokens stay where they are until one rank trains on them.
        own_scores = scorer.collect(tickets)
        sampled = gather_responses(own_samples, own_scores, asked, ranks)  # P * n
        stop_if_failing(sampled, args.reward_max_error_frac)
        clock("reward")

        # 4. Pairs and batch: R responses to a prompt, first those of the data, which score 1 (the chosen one, or the
        # solution) and 0. A response may be in several pairs, and both rows of a pair are in the same micro-batch. A
        # step whose responses all score the same has no pair.
        responses = side_by_side(given_responses(rows, ranks), sampled, rows)  # P * R
        pairs = PAIRS[args.pairs](scores_of(responses).view(len(rows), -1), args.pair_margin)  # (N, 2)
        paired = [responses[i] for i in pairs.flatten().tolist()]  # 2N
        batch, updates = make_batch(
            paired,
            learn=torch.ones(len(paired), dtype=torch.bool),
            mini_batch_size=2 * max(math.ceil(len(pairs) / mini_batches), 1),
            max_tokens=args.ppo_max_token_len_per_gpu,
            pad_id=tokenizer.pad_token_id or 0,
            ranks=ranks,
            rows_per_unit=2,
        )  # (b, T)
        clock("batch")

        # === algorithm ================================================================================================
        # 5. Fixed log-probs of the reference, without gradients. Self-play begins an iteration by making it the policy.
        if args.ref_update_steps and step > 0 and step % args.ref_update_steps == 0:
            run.refresh(reference, policy)
        batch = replace(batch, ref_logp=fixed_logprobs(reference, batch, updates, sampling=sampling))
        clock("ref")

        # 6. How far has the step's policy moved already? For KTO, the mean log-ratio of chosen and of rejected ones.
        moved = torch.zeros(2)
        if args.loss_type == "kto_pair" and len(pairs):
            old_logp = fixed_logprobs(policy, batch, updates, sampling=sampling)
            moved = ranks.all_rows((old_logp - batch.ref_logp).sum(1), batch.rows, len(paired)).view(-1, 2).mean(0)
            clock("old_log_prob")

        # 7. Update: a mini-batch is one optimizer step; its micro-batches only bound the memory. The loss of a pair
        # depends on two numbers with gradients: how much likelier is each response than it was to the reference?
        lr = args.lr * schedule.lr_factor(args.lr_scheduler_type, step, args.lr_warmup_steps, total_steps)
        optimizer.param_groups[0]["lr"] = lr
        means, norms = metrics.Means(ranks, num_updates=len(updates) * args.ppo_epochs), []
        for update in updates * args.ppo_epochs:
            num_pairs = len(update.rows) / 2  # of the mini-batch on all ranks: gradients of ranks simply add up
            for micro_rows in update.micro_batches:
                run.leave_if_asked()
                micro = take_rows(batch, micro_rows, ranks.device)  # (b', t)
                mask = micro.response_mask
                logp, entropy = token_logprobs(policy, micro, sampling=sampling)
                sums = torch.stack([logp, logp - micro.ref_logp, mask]).sum(2)  # (3, b')
                # (b' / 2, 2) each, chosen and rejected; without the empty row of a rank that has run out of pairs
                logps, ratios, lengths = sums[:, : len(micro_rows)].view(3, -1, 2)
                losses = LOSSES[args.loss_type](ratios, lengths, moved.to(ranks.device), beta=args.beta)
                loss = losses.sum() / num_pairs
                sharding.last_micro_batch(policy, micro_rows is update.micro_batches[-1])  # the last syncs copies
                loss.backward()  # adds to the gradients, and sums them over ranks
                means.over_updates({"actor/loss": loss})
                means.over_tokens(mask, {"actor/entropy": entropy})
                means.over_sequences(metrics.of_pairs(logps, args.beta * ratios))
            norms.append({"actor": sharding.clip_grad_norm(policy, args.grad_clip)})
            if run.is_usable(norms[-1], update.num_tokens, batch):  # raises at the third in a row that is not
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        clock("update_actor")
        # === end ======================================================================================================

        # 8. Report: losses are means over updates, diagnostics means over all pairs, or their tokens, of all ranks.
        found = {
            **metrics.of_sampled(sampled, rows, n),
            **metrics.of_norms(norms),
            **means.reduce(),
            "train/num_pairs": float(len(pairs)),
            "actor/lr": lr,
        }
        generated = sum(r.response_length for r in sampled)
        step_metrics = run.log_step(step + 1, found, tokens=sum(r.num_tokens for r in paired), generated=generated)
        run.show_sample(own_samples, own_scores)
        # 9. Checkpoint: weights, optimizer and state are saved by the next round's `begin`.

    run.close(scorer, engine)
    return step_metrics | val_metrics


if __name__ == "__main__":
    main(flags.parse(Args, __doc__))

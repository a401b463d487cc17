"""GRPO in one short file. Everything that the algorithm computes is written out in plain PyTorch.

    make demo                        # makes the model and the data with which this file begins
    python examples/grpo_small.py    # 60 steps on a CPU; each prints its mean score

You need to know PyTorch, but no reinforcement learning. A language model, which is called the policy, gets a prompt. It
writes a response one token at a time, and draws each token from the probabilities that it gives to all tokens. Then a
reward function gives the whole response a score. In arithmetic the score is 1 if the answer is right, and 0 otherwise.
Nobody tells the policy which of its tokens were good, and the score has no gradient.

GRPO (Group Relative Policy Optimization, arXiv 2402.03300) samples G responses to each prompt. These G responses are
the prompt's group. GRPO makes the responses that beat the rest of their group more likely, and the others less likely.
Let s_i be the score of response i. Let l_it be the logarithm of the probability that the policy gives to token t of
response i, given the tokens before it. This is called the token's log-prob.

    advantage   A_i      = (s_i - mean of its group) / (standard deviation of its group + 1e-6)
    ratio       ratio_it = exp(l_it - l_old_it)     l_old_it is what l_it was when the step began
    loss        L        = mean over all sampled tokens of max(-A_i ratio_it, -A_i clip(ratio_it, 1 - 0.2, 1 + 0.2))

Given the same responses, this file and train_grpo.py compute the same weights, which a test checks. The only exception
is the dual clip of train_grpo.py, which can act if --ppo-epochs is above 1. This file leaves out what else
train_grpo.py has, such as several GPUs, vLLM, packing, checkpoints, evaluation, a KL term, corrections, and a schedule
for the learning rate. It calls the plain engine of this project to sample, since the loop that samples tokens is not
part of GRPO. Read `main` first, and then the two functions above it.

P is the number of prompts per step, G is the number of responses to each prompt, and B = P * G. A micro-batch has b
responses. T is the number of tokens in its longest prompt with response, and V is the size of the vocabulary.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.append(str(Path(__file__).parent.parent))  # so that this file finds rewards/ and rl/ from any folder

from rewards.gsm8k import compute_score  # noqa: E402
from rl.data.encode import encode_prompts  # noqa: E402
from rl.data.order import derive_seed, prompts_for_step  # noqa: E402
from rl.data.rows import read_rows  # noqa: E402
from rl.data.template import load_tokenizer, stop_token_ids  # noqa: E402
from rl.data.types import Sample, Sampling  # noqa: E402
from rl.flags import AtLeast1, Count, NotNegative, check_limits  # noqa: E402
from rl.ranks import init_ranks, shutdown_ranks  # noqa: E402
from rl.sampling.engines import make_engine  # noqa: E402
from rl.sampling.engines.flags import EngineFlags  # noqa: E402
from rl.sampling.groups import sample_groups  # noqa: E402


@dataclass(frozen=True)
class Args:
    # The policy is loaded from this folder or Hugging Face id.
    model: str = "runs/demo/sft/global_step_450/huggingface"
    # These files have prompts and their right answers.
    train_files: tuple[str, ...] = ("runs/demo/data/train.parquet",)
    output_dir: str = "runs/grpo_small"  # The trained model is saved in this folder, from which eval.py can read it.
    # This is the number of steps. Each of them samples responses and learns from them.
    total_training_steps: AtLeast1 = 60
    train_batch_size: AtLeast1 = 32  # Each step takes this many prompts (P).
    # Each prompt gets this many responses (G). They are compared with each other, so it is at least 2.
    rollout_n: AtLeast1 = 8
    max_response_length: AtLeast1 = 40  # A response has at most this many tokens. A longer one is cut.
    # Each step makes this many optimizer steps. Each of them learns from all responses of the step.
    ppo_epochs: AtLeast1 = 1
    # This many responses are in memory at a time (b). It changes results only by rounding.
    micro_batch_size: AtLeast1 = 64
    lr: NotNegative = 1e-4  # AdamW has this learning rate.
    seed: Count = 0  # The seed decides the prompts of each step and what is sampled.


def token_log_probs(policy: PreTrainedModel, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """The log-prob of every token given the tokens before it, and a mask that is 1 where the policy sampled the token.

    Both tensors are (b, T - 1). Column t describes token t + 1, since nothing predicts the first token.
    """
    # 1. Padding. Each row begins with a prompt and its response, and ends with zeros, so that all rows have T tokens.
    # A token of a causal model sees only what is on its left. No real token sees the padding, so the model needs no
    # attention mask.
    width = max(sample.num_tokens for sample in samples)  # T
    tokens = torch.zeros(len(samples), width, dtype=torch.long, device=policy.device)  # (b, T)
    mask = torch.zeros(len(samples), width, device=policy.device)  # (b, T)
    for i, sample in enumerate(samples):
        start, end = len(sample.prompt_ids), sample.num_tokens
        tokens[i, :end] = torch.tensor([*sample.prompt_ids, *sample.response_ids])
        # The policy learns from the response, with the end-of-sequence token that it has sampled as well. It has not
        # chosen the prompt, and the padding means nothing.
        mask[i, start:end] = 1

    # 2. Token shift. The logits at a position predict the next token, so those at position t belong to token t + 1. The
    # logits at the last position predict a token that is not there.
    logits = policy(input_ids=tokens).logits[:, :-1]  # (b, T - 1, V)
    targets = tokens[:, 1:]  # (b, T - 1)

    # 3. Log-probs. The logits become log-probs of all V possible tokens, and of these we pick that of the actual token.
    # Responses are sampled at temperature 1. At any other temperature we would divide the logits by it.
    log_probs = logits.log_softmax(-1).gather(-1, targets[:, :, None])[:, :, 0]  # (b, T - 1)
    return log_probs, mask[:, 1:]


def group_advantages(scores: Tensor) -> Tensor:
    """How much better each response is than its group: scores (P, G) -> advantages (P, G).

    For example, the scores 1, 0, 0, 1 of a group have the mean 0.5 and the standard deviation 0.577. So the advantages
    are 0.866, -0.866, -0.866, 0.866. If all scores of a group are equal, then all its advantages are 0, and the prompt
    teaches nothing.
    """
    # The mean is called the baseline. Without it every response with a positive score would be made more likely. The
    # division makes the advantages of easy and of hard prompts about equally large. torch divides by G - 1 in the
    # standard deviation.
    mean, std = scores.mean(1, keepdim=True), scores.std(1, keepdim=True)  # (P, 1)
    return (scores - mean) / (std + 1e-6)


def main(args: Args) -> PreTrainedModel:
    """Train with GRPO, print the mean score of each step, and save the model. Returns the trained policy."""
    check_limits(args)
    if args.rollout_n == 1:
        raise ValueError("--rollout-n 1 leaves a response without others to compare it with; use at least 2")
    if args.model == Args.model and not Path(args.model).exists():
        raise ValueError(f"--model {args.model} is not there yet; run `make demo`, or give --model and --train-files")

    # A row of the data has a prompt and its right answer. `encode_prompts` adds the token ids of the prompt.
    tokenizer = load_tokenizer(args.model)
    rows = encode_prompts(tokenizer, read_rows(args.train_files))
    if len(rows) < args.train_batch_size:
        raise ValueError(f"--train-batch-size {args.train_batch_size} is more than the {len(rows)} rows; lower it")

    # The policy is in evaluation mode, in which there is no dropout, also while it learns. The log-probs that we
    # compute for the tokens of a response are therefore those with which the engine has sampled them. Gradients are
    # computed in this mode too.
    ranks = init_ranks()  # this process, which is the only one, and its device
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(ranks.device).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.01)  # as in train_grpo.py

    # The engine samples. It has its own copy of the model, and gets the policy's weights at the start of each step.
    longest = max(len(row["prompt_ids"]) for row in rows) + args.max_response_length
    engine = make_engine(args.model, ranks, EngineFlags(engine="hf"), longest=longest)
    ends = stop_token_ids(args.model, tokenizer)  # a response ends with one of these tokens
    sampling = Sampling(n=args.rollout_n, max_tokens=args.max_response_length, stop_token_ids=ends)

    for step in range(args.total_training_steps):
        # 1. Sample G responses to each of the step's P prompts. The responses to a prompt are side by side.
        prompts = prompts_for_step(rows, step, args.train_batch_size, args.seed)  # P
        engine.update_weights(policy.named_parameters())
        samples = sample_groups(engine, prompts, sampling, seed=derive_seed(args.seed, step, ranks.rank))  # B

        # 2. Score each response. To teach something else, replace compute_score by another function of the text.
        scores = torch.zeros(args.train_batch_size, args.rollout_n, device=ranks.device)  # (P, G)
        for i, sample in enumerate(samples):
            row = prompts[i // args.rollout_n]
            text = tokenizer.decode(sample.response_ids.tolist(), skip_special_tokens=True)
            scores.view(-1)[i] = compute_score(row["data_source"], text, row["reward_model"]["ground_truth"])

        # 3. Compare each response with its group. All tokens of a response get the response's advantage.
        advantages = group_advantages(scores).view(-1, 1)  # (B, 1)

        # 4. Learn. Each pass of this loop makes one optimizer step. Its loss is the mean over all sampled tokens of the
        # step, but only a micro-batch fits into memory at a time. We therefore divide the sum over a micro-batch by the
        # tokens of the whole step. Then the gradients of the micro-batches add up to the gradient of that mean.
        num_tokens = sum(sample.num_sampled for sample in samples)
        old_log_probs: dict[int, Tensor] = {}  # of each micro-batch, by the index of its first response
        for _ in range(args.ppo_epochs):
            for start in range(0, len(samples), args.micro_batch_size):
                micro = slice(start, start + args.micro_batch_size)
                A = advantages[micro]  # (b, 1), so that all tokens of a row have the same advantage
                log_probs, mask = token_log_probs(policy, samples[micro])  # (b, T - 1)

                # In the first pass the policy is still the one that sampled. Its log-probs are the old log-probs, and
                # every ratio is 1. But the gradient of a ratio is not 0, since `detach` makes the old log-prob a
                # constant. It is the gradient of the log-prob. The optimizer step therefore pushes the
                # log-probs of a response up if its advantage is positive, and down if its advantage is negative.
                old = old_log_probs.setdefault(start, log_probs.detach())
                ratio = (log_probs - old).exp()

                # In later passes the policy is no longer the one that sampled, and the ratios correct for that. They do
                # so reliably only near 1. The clip therefore stops pushing a token up once its ratio is above 1.2, and
                # stops pushing it down once its ratio is below 0.8. There the clipped term is the larger one, and it is
                # a constant, which has no gradient.
                loss = torch.maximum(-A * ratio, -A * ratio.clamp(1 - 0.2, 1 + 0.2))  # (b, T - 1)
                ((loss * mask).sum() / num_tokens).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm=1.0)  # so that no step is very large
            optimizer.step()
            optimizer.zero_grad()

        print(f"step {step + 1}/{args.total_training_steps} | score {scores.mean():.3f}", flush=True)

    policy.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(f"The trained model is in {args.output_dir}.")
    shutdown_ranks()
    return policy


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

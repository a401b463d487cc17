"""The cells of docs/afternoon.ipynb. tools/afternoon.py describes the format.

After a change of this file, run `python tools/afternoon.py`, which makes the notebook.
"""

# %% [markdown]
# # GRPO in one afternoon
#
# You know PyTorch, and you have never seen reinforcement learning. In this notebook you follow the algorithm GRPO
# from the tokens of one response to a model that has learned something. Then you break it on purpose.
#
# 1. **One prompt and four responses**: every number on the way to the loss and its gradient, checked by hand
# 2. **Ten steps of training**: the curve, and the responses that it comes from
# 3. **What breaks when one thing is changed**: no baseline, a learning rate that is too high, a careless reward
# 4. **Exercises**: four changes for you to make, with the curves of their solutions
#
# The notebook runs in less than 15 minutes on two CPU cores, and it needs no GPU. You can also read it without
# running it, since its outputs are saved here. To run it, do `make install` in the folder of the repository, then
# `.venv/bin/pip install jupyter`, and start `.venv/bin/jupyter lab docs/afternoon.ipynb`. To make all outputs again
# without Jupyter, do `.venv/bin/python tools/afternoon.py`.
#
# Two files are worth reading beside it: [examples/grpo_small.py](../examples/grpo_small.py), which is GRPO in one
# short file, and [train_grpo.py](../train_grpo.py), which is the version that trains on many GPUs.

# %%
import os
import shutil
import sys
from pathlib import Path

# Files are named as seen from the folder of the repository. One thread is enough for a model this small.
os.chdir(next(x for x in (Path.cwd(), *Path.cwd().parents) if (x / "train_grpo.py").exists()))
sys.path.insert(0, os.getcwd())
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForCausalLM

from examples.grpo_small import group_advantages, token_log_probs
from rewards.gsm8k import compute_score
from rl.data.batching import collate
from rl.data.encode import encode_prompts
from rl.data.rows import read_rows
from rl.data.template import load_tokenizer, stop_token_ids
from rl.data.types import Sampling
from rl.model.load import load_model
from rl.model.logprobs import token_logprobs
from rl.ranks import init_ranks, shutdown_ranks
from rl.sampling.engines import make_engine
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.groups import sample_groups
from tools.afternoon import curve, curves, quiet, responses, script, train, visible

torch.set_num_threads(1)

# %% [markdown]
# ## The model and its task
#
# The task is a chain of four additions and subtractions of one-digit numbers, such as `4+3-5+2+1=?`. A response is
# right if the number after its last `####` is right, as in `#### 5`. The model is a transformer with 0.2 million
# parameters. Each of its tokens is a character, except for a few special tokens, such as the one that ends a response.
#
# A model that writes noise cannot learn from scores, because no response is ever right. So the model first sees
# demonstrations, which is called supervised fine-tuning (SFT). These demonstrations are imperfect on purpose. About a
# quarter show correct work and end in `####` and the result. Another quarter show correct work, but end in a form that
# earns nothing, such as `Answer: 5` or `So 5`. Half are bare guesses, such as `#### 7`, and most of these answer
# prompts that begin with 5 or more. So the model can already solve the task, but it does so in only about 30 % of its
# responses. What is left to learn is which of its habits earn a point.
#
# `script` runs a script of this repository, and prints the last line of its output.

# %%
FOLDER = "runs/afternoon"  # for data, models and runs
SFT_STEPS, FIRST_STEPS, STEPS = 450, 10, 30  # 450 steps of SFT, as in `make demo`; then runs of 10 and of 30 steps

shutil.rmtree(FOLDER, ignore_errors=True)  # of an earlier run of this notebook
DATA, START = f"{FOLDER}/data", f"{FOLDER}/sft/global_step_{SFT_STEPS}/huggingface"
script(f"data/arithmetic.py --output-dir {DATA} --num-sft {SFT_STEPS * 128}")
script(
    f"sft.py --model {DATA}/model --train-files {DATA}/sft.parquet --max-length 128 --lr 4e-3 --beta2 0.98 "
    f"--lr-warmup-steps 30 --total-training-steps {SFT_STEPS} --activation-checkpointing none --log-freq 50 "
    f"--default-local-dir {FOLDER}/sft"
)

# %% [markdown]
# # 1. One prompt and four responses
#
# The **policy** is the model that learns. We sample four responses to each of 64 prompts, at temperature 1, which gives
# 256 responses. The engine that samples has its own copy of the model.

# %%
ranks = init_ranks()  # this process, which is the only one
tokenizer = load_tokenizer(START)
policy = AutoModelForCausalLM.from_pretrained(START, dtype=torch.float32).eval()
with quiet():
    engine = make_engine(START, ranks, EngineFlags(engine="hf"), longest=72)
engine.update_weights(policy.named_parameters())

rows = encode_prompts(tokenizer, read_rows([f"{DATA}/train.parquet"]))[:64]
sampling = Sampling(n=4, max_tokens=40, stop_token_ids=stop_token_ids(START, tokenizer))
samples = sample_groups(engine, rows, sampling, seed=0)  # 4 responses to the first prompt, then 4 to the second, ...
len(samples)

# %% [markdown]
# A **reward function** gives each response a **score**. Here it is 1 if the number after the last `####` is right, and
# 0 otherwise. Nobody says which token was good or bad, and the score has no gradient.
#
# The four responses to a prompt are its **group**. From here on we look at one group alone, the first one that has
# four different responses, of which two are right. In the saved outputs these are a wrong guess, correct work with an
# ending that is not graded, a lucky guess, and correct work. GRPO sees nothing but the four scores.


# %%
def text_of(sample):
    return tokenizer.decode(sample.response_ids.tolist(), skip_special_tokens=True)


groups = [samples[4 * i : 4 * i + 4] for i in range(len(rows))]
scores_of_groups = [
    [compute_score("", text_of(sample), row["reward_model"]["ground_truth"]) for sample in group]
    for row, group in zip(rows, groups)
]
is_clear = [sum(scores) == 2 and len({*map(text_of, group)}) == 4 for scores, group in zip(scores_of_groups, groups)]
chosen = is_clear.index(True)
row, group, scores = rows[chosen], groups[chosen], torch.tensor([scores_of_groups[chosen]])

print("the prompt:", repr(tokenizer.decode(row["prompt_ids"])))
print("the right answer:", row["reward_model"]["ground_truth"])
for sample, score in zip(group, scores[0]):
    print(f"score {score:g}: {text_of(sample)!r}")

# %% [markdown]
# ## Token ids and the mask
#
# The model sees numbers. We put each prompt and its response into one row, and fill the shorter rows up at the end.
# This gives a tensor with b = 4 rows and T columns. The **mask** is 1 for the tokens that the policy has sampled. These
# include the token that ends the response (`■`). The mask is 0 for the prompt, which the policy has not chosen, and for
# the padding, which means nothing. A line break is shown as `⏎`, a space as `␣`, and padding as `<pad>`.

# %%
batch = collate(group)  # `batch` has all tensors of this page
ids, mask = batch.input_ids, batch.response_mask  # (b, T)
print("shape", tuple(ids.shape), "| lengths", batch.lengths.tolist(), "| sampled tokens", mask.sum(1).int().tolist())

shortest = int(batch.lengths.argmin())
begin, end = len(row["prompt_ids"]), int(batch.lengths[shortest])
print(f"\nresponse {shortest}, from the last 3 tokens of the prompt to 2 tokens of padding:")
print("position  id  token  mask")
for at in range(begin - 3, min(end + 2, ids.shape[1])):
    token = visible(tokenizer.decode([ids[shortest, at]])) if at < end else "<pad>"
    print(f"{at:8}  {ids[shortest, at]:2}  {token:>5}  {mask[shortest, at]:4g}")

# %% [markdown]
# ## Log-probs, and the shift by one
#
# At each position the model gives one number, a **logit**, to each of the V possible next tokens. Softmax turns the
# logits into probabilities. The logarithm of the probability of the token that really came next is this token's
# **log-prob**. We write l_it for the log-prob of token t of response i.
#
# The logits at position t - 1 belong to the token at position t. This shift by one is the most common mistake in code
# of this kind. We compute one log-prob by hand, and then all of them with the function of `examples/grpo_small.py`.

# %%
t = end - 2  # the last token before the end of the response
logits = policy(input_ids=ids).logits  # (b, T, V)
z, y = logits[shortest, t - 1], int(ids[shortest, t])
by_hand = z[y] - z.exp().sum().log()
print(f"the token at position {t} is {tokenizer.decode([y])!r}")
print(f"its logit at position {t - 1} is {z[y]:.4f}")
print(f"the log of the sum of the exponentials of all logits there is {z.exp().sum().log():.4f}")
print(
    f"its log-prob is {z[y]:.4f} - {z.exp().sum().log():.4f} = {by_hand:.4f}, and its probability {by_hand.exp():.4f}"
)

log_probs, shifted_mask = token_log_probs(policy, group)  # (b, T - 1): column t - 1 describes the token at position t
assert torch.equal(shifted_mask, mask[:, 1:])
assert torch.isclose(log_probs[shortest, t - 1], by_hand, atol=1e-5)

# %% [markdown]
# The log-probs of all tokens of this response tell where the policy was sure of itself, and where it could just as well
# have written something else. In the saved outputs it took an unlikely token twice. At the first token it
# chose to guess, and not to work. Later it chose the number 7. The engine computed the same numbers when it sampled.

# %%
print("token  log-prob  probability")
for at in range(begin, end):
    logp = log_probs[shortest, at - 1].detach()
    print(f"{visible(tokenizer.decode([ids[shortest, at]])):>5}  {logp:8.4f}  {logp.exp():.4f}")
gap = ((log_probs - batch.rollout_logp[:, 1:]) * mask[:, 1:]).abs().max()
print(f"largest difference from the log-probs of the engine: {gap:.0e}")
assert gap < 1e-4

# %% [markdown]
# `train_grpo.py` uses another function for this. It spends no time on padding, and it runs the prompt of a group
# through the model only once. Its results have the shape (b, T), so column t describes the token at position t. The
# numbers are the same.

# %%
with quiet():
    large_policy = load_model(START, ranks)
with torch.no_grad():
    of_library, entropy = token_logprobs(large_policy, batch, sampling=sampling)  # both (b, T), 0 where the mask is 0
assert torch.allclose(of_library[:, 1:], log_probs.detach() * mask[:, 1:], atol=1e-5)
print("the same log-probs, to", f"{(of_library[:, 1:] - log_probs.detach() * mask[:, 1:]).abs().max():.0e}")
shutdown_ranks()

# %% [markdown]
# ## Advantages
#
# The **advantage** of a response says how much better it is than its group. All tokens of a response get this number.
#
# ```
# A_i = (s_i - mean of the group) / (standard deviation of the group + 1e-6)
# ```
#
# With two scores of 1 and two of 0, the mean is 0.5. The deviations are 0.5 and -0.5. PyTorch's standard deviation
# divides by 4 - 1 = 3, so it is the square root of (4 * 0.25) / 3, which is 0.577. So the advantages are 0.5 / 0.577
# = 0.866 and -0.866.

# %%
mean, std = scores.mean().item(), scores.std().item()
advantages = group_advantages(scores)  # (P, G), and here (1, 4)
print(f"scores {scores[0].tolist()}, mean {mean:.3f}, standard deviation {std:.3f}")
print("advantages", [round(a, 3) for a in advantages[0].tolist()])
assert abs(std - (4 * 0.25 / 3) ** 0.5) < 1e-6 and abs(advantages.abs().max() - 0.866) < 1e-3

print("a group whose scores are all 1:", group_advantages(torch.ones(1, 4)).tolist(), "teaches nothing")

# %% [markdown]
# ## The ratio is 1, and still has a gradient
#
# The **ratio** of a token is its probability now, divided by its probability when the step began. That is the
# probability with which the policy sampled it:
#
# ```
# ratio_it = exp(l_it - l_old_it)
# ```
#
# Nothing has been learned yet, so every ratio is 1. But l_old_it is a constant, and l_it depends on the weights. The
# derivative of exp(l - l_old) with respect to l is exp(l - l_old), which is 1 here. So the ratio has the gradient of
# the log-prob. In PyTorch the constant is made by `detach`.

# %%
logp = log_probs[shortest, t - 1].detach().requires_grad_()
ratio = (logp - logp.detach()).exp()
ratio.backward()
print(f"ratio {ratio.item():g}, derivative with respect to the log-prob {logp.grad:g}")
assert (ratio.item(), logp.grad.item()) == (1.0, 1.0)

# %% [markdown]
# ## The loss
#
# ```
# L = mean over all sampled tokens of max(-A_i ratio_it, -A_i clip(ratio_it, 0.8, 1.2))
# ```
#
# All ratios are 1, so the clip changes nothing, and each token of response i has the loss -A_i. If response i has n_i
# sampled tokens, then the loss is the sum of -A_i n_i over the responses, divided by the number of all sampled tokens.
# The advantages of a group add up to 0. So this loss would be 0 if all responses were equally long, and otherwise it
# says only how long they are. It does not fall during training, and only its gradient matters.

# %%
A = advantages.view(-1, 1)  # (b, 1)
M = mask[:, 1:]  # (b, T - 1), like the log-probs
log_probs.retain_grad()
ratio = (log_probs - log_probs.detach()).exp()
token_loss = torch.maximum(-A * ratio, -A * ratio.clamp(0.8, 1.2))  # (b, T - 1)
loss = (token_loss * M).sum() / M.sum()

n = M.sum(1).int().tolist()
terms = " + ".join(f"({-a:.3f} * {k})" for a, k in zip(A[:, 0].tolist(), n))
print(f"({terms}) / {sum(n)} = {sum(-a * k for a, k in zip(A[:, 0].tolist(), n)) / sum(n):.4f}")
print(f"the loss of the code: {loss.item():.4f}")
assert torch.isclose(loss, -(A[:, 0] * M.sum(1)).sum() / M.sum(), atol=1e-6)

# %% [markdown]
# ## The gradient
#
# Let N be the number of all sampled tokens. As the section on the ratio has shown, the derivative of the loss with
# respect to the log-prob of a sampled token is -A_i / N. For all other tokens it is 0. An optimizer moves the weights
# against the gradient. So it raises the log-probs of responses with a positive advantage, and lowers those of responses
# with a negative advantage.

# %%
loss.backward()
N = int(M.sum())
for i in range(4):
    first = begin - 1  # the column of the first token of the response
    print(f"response {i}: -A / N = {-A[i].item() / N:+.6f}, and PyTorch has {log_probs.grad[i, first].item():+.6f}")
assert torch.allclose(log_probs.grad, -A / N * M, atol=1e-7)

# %% [markdown]
# The log-prob depends on all V logits of its position. With p the probabilities, its derivative is 1 - p_y for the
# logit of the sampled token y, and -p_v for each other token v. The gradient of the loss is -A_i / N times that. So
# the first tokens to be pushed are those of which the policy was not sure. A token with probability 1 gets no
# gradient at all.

# %%
z = logits[shortest, t - 1].detach().requires_grad_()
z.log_softmax(-1)[int(ids[shortest, t])].backward()
p = z.detach().softmax(-1)
print(f"the token at position {t} has the probability {p[int(ids[shortest, t])]:.4f}, and 1 minus that is", end=" ")
print(f"{1 - p[int(ids[shortest, t])]:.4f}; PyTorch has {z.grad[int(ids[shortest, t])]:.4f}")
expected = torch.nn.functional.one_hot(ids[shortest, t], len(p)) - p
assert torch.allclose(z.grad, expected, atol=1e-5)

# %% [markdown]
# ## One optimizer step
#
# We make a single step, and compute the log-probs again. The ratios are no longer 1. The sum of the log-probs of a
# response is the logarithm of the probability of the whole response.

# %%
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
optimizer.step()
with torch.no_grad():
    after, _ = token_log_probs(policy, group)
ratio = (after - log_probs.detach()).exp()

print("response  score  advantage  log-prob of the response before -> after   ratios of its tokens")
for i in range(4):
    before_i, after_i = (log_probs[i] * M[i]).sum().item(), (after[i] * M[i]).sum().item()
    own = ratio[i][M[i] > 0]
    print(f"{i:8}  {scores[0, i]:5g}  {A[i].item():+9.3f}  {before_i:19.3f} -> {after_i:8.3f}   ", end="")
    print(f"                {own.min():.3f} to {own.max():.3f}")

# %% [markdown]
# Responses share weights and often their first tokens, so a response can move against its own advantage. In the saved
# outputs this happens to response 2, which begins with `####` as response 0 does. But taken together, the changes go
# with the advantages. The gradient of the loss is -1 / N times the gradient of this sum: A_i times the log-prob of
# response i, added up over the responses. So a small step against the gradient of the loss makes the sum larger.

# %%
change = ((after - log_probs.detach()) * M).sum(1)
print(f"sum of advantage times change of the log-prob: {(A[:, 0] * change).sum():+.4f}")
assert (A[:, 0] * change).sum() > 0

# %% [markdown]
# ## The clip
#
# If we made further optimizer steps with the same responses, the ratios would move further away from 1. In the saved
# outputs, one of them is 0.782 after a single small step.
#
# Why is that a problem? The responses were sampled by the old policy. We want to know what is good for the new one,
# which writes some tokens more often and others less often. The ratio corrects for that, as a weight of each token. But
# with few samples this is reliable only near 1, since a few large weights would decide everything.
#
# So the **clip** takes the gradient away from a token that has moved far enough in the direction in which its advantage
# pushes it. With a positive advantage this happens as soon as its ratio is above 1.2, and with a negative advantage as
# soon as its ratio is below 0.8. A token that has moved in the wrong direction keeps its gradient, which pushes it
# back. The clip does not hold a ratio where it is. Other tokens share the same weights, and may still move it.

# %%
print("advantage  ratio  -A ratio  -A clip(ratio)    loss  derivative with respect to the log-prob")
for a in (0.866, -0.866):
    for r in (0.7, 1.0, 1.3):
        change = torch.tensor(r).log().requires_grad_()  # l - l_old
        unclipped, clipped = -a * change.exp(), -a * change.exp().clamp(0.8, 1.2)
        larger = torch.maximum(unclipped, clipped)
        larger.backward()
        print(f"{a:9.3f}  {r:5.1f}  {unclipped:8.3f}  {clipped:14.3f}  {larger:6.3f}  {change.grad:+.3f}")

# %% [markdown]
# The derivative is 0 in the two rows in which the clipped term is the larger one, since that is a constant. In all
# other rows it is -A times the ratio.
#
# # 2. Ten steps of training
#
# A **step** samples 8 responses to each of 32 prompts, scores them, and makes one optimizer step as above. So a group
# now has 8 responses instead of 4. We run `train_grpo.py` with the flags of the demo for ten steps.
#
# These functions of [tools/afternoon.py](../tools/afternoon.py) are used from here on:
#
# - `train(folder, (old, new), **flags)` runs a copy of `train_grpo.py` with these flags. In the copy the text `old` is
#   replaced by the text `new`. There may be several such pairs. Without any, the script runs as it is. `train` returns
#   the folder of the run.
# - `curve(run, metric)` reads the values of a metric, and `curves(title, lines)` draws such curves.
# - `responses(run, step)` draws responses of a step.

# %%
FLAGS = {
    "model": START,
    "train_files": (f"{DATA}/train.parquet",),
    "val_files": (f"{DATA}/test.parquet",),
    "engine": "hf",
    "max_prompt_length": 32,
    "max_response_length": 40,
    "train_batch_size": 32,
    "rollout_n": 8,
    "lr": 1e-4,
    "activation_checkpointing": "none",
    "test_freq": -1,  # no evaluation on held-out prompts
    "log_samples_freq": 1,
    "save_freq": 0,
}
first = train(f"{FOLDER}/first", quiet=False, total_training_steps=FIRST_STEPS, **FLAGS | {"test_freq": 5})

# %% [markdown]
# Each line has numbers of one step. `reward` is the mean score of the 256 sampled responses, and `len` is their mean
# length in tokens. `entropy` says how undecided the policy is about the next token. `clip` is the share of tokens whose
# gradient the clip removed. `gap` is the mean absolute difference between the log-probs of engine and trainer, and
# `|g|` is the norm of the gradient. At the end are the seconds of the step, and those of some of its parts.
#
# `held out` is the share of right answers to 512 prompts that are not trained on. There the model always takes its most
# likely token, which is called greedy decoding. Why does this number jump from 0.52 to 1.00 between steps 5 and 10,
# while the reward of the last five steps stays between 0.38 and 0.53? With greedy decoding a habit shows only if it is
# the most likely one. At steps 0 and 5 guessing is the most likely habit for prompts that begin with 5 or more, which
# are 280 of the 512 prompts. The mean length that is printed below is exactly that of 280 guesses with 7 tokens and 232
# worked solutions with 31. By step 10 the worked solution with `####` has become the most likely response to every
# prompt. A sampled response still guesses now and then, or ends in another form.

# %%
print("mean length of the held-out responses, by step:", dict(curve(first, "val/response_length")))
curves("mean score of the sampled responses", {"GRPO": curve(first, "critic/score/mean")})

# %% [markdown]
# The next picture shows four of the eight responses to one prompt in the first step, with each token in the color of
# its advantage. Green tokens are made more likely, and red ones less likely. All tokens of a response have the same
# color. In the saved outputs, all four have done the work. Those that end with `####` beat those that end in another
# way, since nobody grades those. Four of the eight responses have the score 1, so the standard deviation is 0.53 and
# the advantages are 0.94 and -0.94.

# %%
responses(first, 1)

# %% [markdown]
# And this is the last of the ten steps.

# %%
responses(first, FIRST_STEPS)

# %% [markdown]
# `tools/view.py` makes a page with all curves and logged responses of a run, for your browser: `python tools/view.py
# runs/afternoon/first`.
#
# # 3. What breaks when one thing is changed
#
# Before each picture, say what you expect. First the unchanged script, for 30 steps, to compare with.

# %%
base = train(f"{FOLDER}/base", total_training_steps=STEPS, **FLAGS)
SCORE = "critic/score/mean"
ADVANTAGE = "advantages_PG = ((scores_PG - mean) / (std + 1e-6)).nan_to_num()"  # the line of train_grpo.py

# %% [markdown]
# ## No baseline
#
# The mean of the group is the **baseline**. Without it and without the division, the advantage is the score itself. The
# division has to go as well. In a group that is all right the standard deviation is 0, so the advantage would be a
# million. Wrong responses then have the advantage 0 and teach nothing, and right ones are still made more likely. Will
# it learn?
#
# And what if the reward function is generous, and gives 9 points for a wrong response and 10 for a right one?

# %%
no_baseline = train(
    f"{FOLDER}/no_baseline", (ADVANTAGE, "advantages_PG = scores_PG.nan_to_num()"), total_training_steps=STEPS, **FLAGS
)
generous = train(
    f"{FOLDER}/generous",
    (ADVANTAGE, "advantages_PG = (scores_PG + 9).nan_to_num()"),
    total_training_steps=STEPS,
    **FLAGS,
)
for run in (no_baseline, generous):
    print(f"{run.name}: norm of the first gradient {curve(run, 'actor/grad_norm')[0][1]:.2f}")
curves(
    "share of right responses",
    {
        "GRPO": curve(base, SCORE),
        "no baseline, scores 0 and 1": curve(no_baseline, SCORE),
        "no baseline, scores 9 and 10": curve(generous, SCORE),
    },
)

# %% [markdown]
# With scores of 0 and 1 the baseline is not missed on this task. The curve without it is even a little higher here.
# This does not hold in general, as the other curve shows. With 9 and 10 the model learns nothing, and even gets worse,
# although these scores say exactly the same thing.
#
# Every response is now pushed up, right or wrong. If we could push up all possible responses, each as much as it is
# probable, then nothing would change, because their probabilities always add up to 1. But we have only 256 samples.
# Some responses are sampled more often than their probability says, and most are not sampled at all. So pushing up
# whatever was sampled changes the model at random. What counts is how large the noise is beside the signal. The signal
# is the difference of 1 between right and wrong, with both kinds of scores. The common 9 adds only noise. In the first
# step, where the responses are the same, the norm of the gradient is 1.13 with the scores 9 and 10, and 0.12 with the
# scores 0 and 1.
#
# With the baseline it makes no difference what is added to all scores, since the mean takes it away. You can check that
# without any run:

# %%
assert torch.allclose(group_advantages(scores + 9), group_advantages(scores), atol=1e-4)
print("advantages of scores 9 and 10:", [round(a, 3) for a in group_advantages(scores + 9)[0].tolist()])

# %% [markdown]
# ## A learning rate that is too high
#
# The demo learns with a rate of 1e-4. What happens with ten times as much, and with thirty times?

# %%
ten_times = train(f"{FOLDER}/ten_times", total_training_steps=STEPS, **FLAGS | {"lr": 1e-3})
thirty_times = train(f"{FOLDER}/thirty_times", total_training_steps=STEPS, **FLAGS | {"lr": 3e-3})
curves(
    "mean score",
    {
        "learning rate 1e-4": curve(base, SCORE),
        "1e-3": curve(ten_times, SCORE),
        "3e-3": curve(thirty_times, SCORE),
    },
)

# %% [markdown]
# Ten times as much looks better at first, and then the score jitters and ends below that of the lower rate. Thirty
# times as much destroys the model within a few steps. It cannot come back, because once no response is right, all
# scores of a group are equal and all advantages are 0. Supervised training often recovers from a step that was too
# large. Here the model makes its own training data, so bad weights make bad data.
#
# ## A reward that can be hacked
#
# Suppose that we forget to check the answer, and give a point for the form alone: the response has to end with `####`
# and a digit. Right responses of this model have this form, so the reward looks harmless. The reward function also
# reports under `acc` whether the answer was right. This number is only logged, and nothing learns from it.

# %%
Path(f"{FOLDER}/form.py").write_text('''"""A point for the form of a response."""
import re

from rewards.gsm8k import compute_score as is_right


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    has_form = re.search(r"#### \\d$", solution_str) is not None
    return {"score": float(has_form), "acc": is_right(data_source, solution_str, ground_truth)}
''')
hacked = train(
    f"{FOLDER}/hacked", total_training_steps=STEPS, **FLAGS | {"custom_reward_function": (f"{FOLDER}/form.py",)}
)
curves(
    "what the reward says, and what is true",
    {
        "score: the form": curve(hacked, SCORE),
        "right answers": curve(hacked, "reward/arithmetic/acc"),
        "right answers of GRPO with the honest reward": curve(base, SCORE),
    },
)

# %%
responses(hacked, STEPS)

# %% [markdown]
# The score goes to 1, and everything looks fine. But the model has found the easiest way to earn its point, which is to
# write `####` and a digit. A guess always ends in this form, while worked responses often end in one that earns
# nothing. So guesses are above the mean of their group. This is called **reward hacking**: the policy optimizes what
# the function says, and not what its author meant. In the saved picture no token has a color, because all responses
# have the score 1, and then all advantages are 0. Read responses in every run, since no curve of the score can show
# this.
#
# # 4. Exercises
#
# Make each change with `train`, as above, or in a copy of `train_grpo.py`. A flag such as `--ppo-epochs 8` is written
# `**FLAGS | {"ppo_epochs": 8}` here. Say first what you expect. The solutions with their curves are in the last cells.
#
# 1. **Without the division.** Leave out the standard deviation, so that the advantage is the score minus the mean of
#    its group. This is part of a published variant, Dr. GRPO (arXiv 2503.20783). Why does it change so little here?
# 2. **A price for length.** Write a reward that subtracts `PRICE` points for each token of the response. It is a
#    function like that of the hacked reward above, and finds the number of tokens in `extra_info["response_length"]`. A
#    worked solution has about 31 tokens and is nearly always right. A guess has about 7 tokens and is right in 15 % of
#    the cases. From which price on does guessing pay? Try 0.01 and 0.06.
# 3. **Many updates per step.** Make eight optimizer steps with the responses of each step, at three times the rate
#    (`--ppo-epochs 8 --lr 3e-4`). Then switch off the clip (`--clip-ratio-low 1e6 --clip-ratio-high 1e6`) and also the
#    dual clip (`--clip-ratio-c 1e9`). The dual clip is a second limit in `train_grpo.py`. It bounds the loss of a token
#    with a negative advantage whose ratio is above 3. What does the clip prevent?
# 4. **Pairs.** Use 128 prompts with 2 responses each, instead of 32 prompts with 8. The number of responses is the
#    same. In what share of the pairs are both scores equal, so that they teach nothing, if 30 % of all responses are
#    right? In what share of the groups of eight?

# %% [markdown]
# ## Solution of exercise 1
#
# One line differs. The scores of a group are 0 or 1, so the standard deviation of a group that teaches something is
# between 0.35 and 0.53. The division makes all advantages about two to three times as large, and AdamW does not care
# about a common factor of the gradient. The limit on the norm of the gradient, which is 1, does not act here, because
# the norm stays below 1. The division matters where the scores of some groups lie much closer together than those of
# others.

# %%
no_division = train(
    f"{FOLDER}/no_division",
    (ADVANTAGE, "advantages_PG = (scores_PG - mean).nan_to_num()"),
    total_training_steps=STEPS,
    **FLAGS,
)
curves("mean score", {"GRPO": curve(base, SCORE), "without the division": curve(no_division, SCORE)})

# %% [markdown]
# ## Solution of exercise 2
#
# A worked solution earns 1 - 31 * PRICE, and a guess earns 0.15 - 7 * PRICE on average. They are equal at a price of
# 0.85 / 24, which is 0.035. The picture shows the share of right answers among the sampled responses.

# %%
LENGTH_REWARD = """
from rewards.gsm8k import compute_score as is_right


def compute_score(data_source, solution_str, ground_truth, extra_info):
    acc = is_right(data_source, solution_str, ground_truth)
    return {"score": acc - PRICE * extra_info["response_length"], "acc": acc}
"""
priced = {}
for price in (0.01, 0.06):
    name = f"{FOLDER}/price_{round(100 * price)}"
    Path(f"{name}_reward.py").write_text(LENGTH_REWARD.replace("PRICE", str(price)))
    reward = {"custom_reward_function": (f"{name}_reward.py",)}
    priced[f"{price} points per token"] = train(name, total_training_steps=STEPS, **FLAGS | reward)
RIGHT = "reward/arithmetic/acc"
curves("share of right answers", {"no price": curve(base, SCORE)} | {k: curve(run, RIGHT) for k, run in priced.items()})

# %%
LENGTH = "response_length/mean"
curves("tokens per response", {"no price": curve(base, LENGTH)} | {k: curve(run, LENGTH) for k, run in priced.items()})

# %% [markdown]
# ## Solution of exercise 3
#
# Counted in steps, many updates learn faster at first. After the first update the responses are no longer samples of
# the policy that learns. The ratio corrects for that only as long as it is near 1. Without the clip, the later updates
# go on pushing tokens whose ratio is already far from 1, and the policy ends worse than it began. With the clip it
# stays better, but eight updates at this rate are still too many. These two runs have 15 steps.

# %%
many = {"ppo_epochs": 8, "lr": 3e-4, "total_training_steps": min(STEPS, 15)}
no_clip = {"clip_ratio_low": 1e6, "clip_ratio_high": 1e6, "clip_ratio_c": 1e9}
clipped = train(f"{FOLDER}/many_updates", **FLAGS | many)
unclipped = train(f"{FOLDER}/many_updates_no_clip", **FLAGS | many | no_clip)
curves(
    "mean score",
    {
        "GRPO": curve(base, SCORE),
        "eight updates": curve(clipped, SCORE),
        "eight updates, no clip": curve(unclipped, SCORE),
    },
)

# %% [markdown]
# ## Solution of exercise 4
#
# Both are right with probability 0.3 * 0.3 and both are wrong with probability 0.7 * 0.7, if the prompts are equally
# hard. So 58 % of the pairs teach nothing. In the other pairs each response is compared with a single other one. Of
# groups of eight only 0.3 ** 8 + 0.7 ** 8, which is 6 %, teach nothing. In spite of this the curve is nearly the same
# here, since four times as many prompts make up for it.

# %%
pairs = train(f"{FOLDER}/pairs", total_training_steps=STEPS, **FLAGS | {"train_batch_size": 128, "rollout_n": 2})
curves("mean score", {"32 prompts x 8": curve(base, SCORE), "128 prompts x 2": curve(pairs, SCORE)})

# %% [markdown]
# ## What to read next
#
# - [docs/train_grpo.md](train_grpo.md) explains the same in words, with the parts that this notebook leaves out.
# - [train_grpo.py](../train_grpo.py) is the script that you have just changed.
# - [docs/modify.md](modify.md) shows how to build your own variant on it.

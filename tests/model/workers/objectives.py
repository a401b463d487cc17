"""One optimizer step's gradients, computed twice: in packed micro-batches as train_grpo.py does, and row by row."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

import torch
from helpers_data import plan_micro_batches
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

import train_grpo_variants
from extras.correction import Correction
from rl.data.batching import collate
from rl.data.types import Batch, Sample, Sampling, take_rows
from rl.formulas import losses
from rl.model import sharding
from rl.model.logprobs import token_logprobs

TEMPERATURE = 0.7
SCALE = 24  # divisor of seq-mean-token-sum-norm
NUMBERS = dict(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, tau_pos=1.0, tau_neg=1.05, ppo_kl_coef=0.3)
NARROW = {"dppo_tv": 3e-3, "dppo_kl": 1e-3}  # clips for losses that bound probabilities, which are about 1 / 80 here
CORRECTION = Correction(rollout_is="sequence", rollout_mask="token", rollout_mask_threshold=1.2)
EXTRAS = dict(entropy=0.1, kl=0.2)  # weights of the entropy bonus and of the KL term in "all terms"
LOSS_MODES = [
    *(name for name in train_grpo_variants.LOSSES if name != "luspo"),
    "all terms",
]  # which is gspo with another mean
AGG_MODES = list(get_args(train_grpo_variants.Args.__annotations__["loss_agg_mode"]))
# Each loss with a mean that it takes, and two of them with every mean.
CASES = [(name, train_grpo_variants.AGGREGATIONS.get(name, "token-mean")) for name in LOSS_MODES]
CASES += [x for x in itertools.product(("ppo_clip", "all terms"), AGG_MODES) if x not in CASES]


def plain_model(path: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model as transformers runs it, without packing."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")


def plain_logprobs(model: nn.Module, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(T,) log-probs and entropies of one sequence, from the full logits; 0 for the first token."""
    full = (model(input_ids=torch.tensor([list(ids)])).logits[0] / TEMPERATURE).log_softmax(-1)  # (T, V)
    logp = full[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    entropy = -(full[:-1].exp() * full[:-1]).sum(-1)
    return nn.functional.pad(logp, (1, 0)), nn.functional.pad(entropy, (1, 0))


def make_batch(model: nn.Module) -> Batch:
    """Eight rows (B, T) with everything that has to be survived, off policy enough for every clip to bite somewhere.

    Row 1 has a prompt of one token, row 2 a response of one, row 3 a gap of tool output, row 4 no token that counts.
    """
    random = torch.Generator().manual_seed(3)
    shapes = [(5, 9), (1, 12), (7, 1), (4, 14), (6, 5), (11, 6), (3, 3), (2, 17)]  # tokens of prompt and response
    ids = [torch.randint(3, 80, (p + r,), generator=random).tolist() for p, r in shapes]
    masks = [[1] * r for _, r in shapes]
    masks[3][4:9], masks[4] = [0] * 5, [0] * 5
    samples = [
        Sample(x[:p], x[p:], mask, [0.0] * r, "stop", i)
        for i, ((p, r), x, mask) in enumerate(zip(shapes, ids, masks, strict=True))
    ]
    batch = collate(samples, pad_id=0)
    logp = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
    with torch.no_grad():
        for i, x in enumerate(ids):
            logp[i, : len(x)] = plain_logprobs(model, x)[0]
    advantages = torch.tensor([1.3, -0.7, 0.4, 0.9, 5.0, -1.1, 0.6, -2.0], dtype=torch.float64)[:, None]
    mask = batch.response_mask

    def near(spread: float) -> torch.Tensor:
        return (logp + spread * torch.randn(logp.shape, generator=random, dtype=torch.float64)) * mask

    fixed = dict(old_logp=near(0.4), ref_logp=near(0.5), rollout_logp=near(0.1))
    chosen = mask.bool() & (torch.rand(mask.shape, generator=random) < 0.3)
    return replace(batch, **fixed, advantages=advantages * mask, columns={**batch.columns, "chosen": chosen})


def token_objective(
    loss_mode: str, logp: torch.Tensor, entropy: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """(b, T) values to aggregate, and which of them the clip decided."""
    formula = train_grpo_variants.LOSSES["ppo_clip" if loss_mode == "all terms" else loss_mode]
    near = NARROW.get(loss_mode)
    numbers = NUMBERS if near is None else NUMBERS | dict(clip_ratio_low=near, clip_ratio_high=near)
    inputs = logp, batch.old_logp, batch.advantages, batch.response_mask
    loss, clipped = formula(*inputs, chosen=batch.columns.get("chosen"), **numbers)
    if loss_mode == "all terms":
        both = batch.rollout_logp, batch.advantages, batch.response_mask
        loss = loss * CORRECTION.weights(logp, batch.old_logp, *both)
        loss = loss - EXTRAS["entropy"] * entropy + EXTRAS["kl"] * losses.kl(logp, batch.ref_logp, "k3")
    return loss, clipped


def packed_backward(
    model: nn.Module, batch: Batch, rows: Iterable[int], case: tuple[str, str],
    *, max_tokens: int, rank: int = 0, world_size: int = 1,
) -> float:  # fmt: skip
    """This rank's micro-batches of one optimizer step, as train_grpo.py runs them; returns its share of the loss."""
    loss_mode, agg_mode = case
    rows = list(rows)
    mask = batch.response_mask[rows]
    denominators = dict(num_tokens=mask.sum().item(), num_seqs=mask.any(1).sum().item(), scale=SCALE)
    total = 0.0
    plans = plan_micro_batches(batch.lengths.tolist(), rows, world_size=world_size, max_tokens=max_tokens)
    for micro_rows in plans[rank]:
        micro = take_rows(batch, micro_rows, "cpu")
        logp, entropy = token_logprobs(
            model, micro, sampling=Sampling(temperature=TEMPERATURE), entropy_grad=loss_mode == "all terms"
        )
        objective, _ = token_objective(loss_mode, logp, entropy, micro)
        loss = losses.aggregate(objective, micro.response_mask, agg_mode, **denominators)
        if isinstance(model, FSDPModule):
            sharding.backward(model, loss, is_last=micro_rows is plans[rank][-1])
        else:
            loss.backward()
        total += loss.item()
    return total


def plain_gradients(
    model: nn.Module, batch: Batch, rows: Iterable[int], case: tuple[str, str]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the same step, one unpadded sequence at a time, with the weight of each row spelled out."""
    loss_mode, agg_mode = case
    rows = [i for i in rows if batch.response_mask[i].any()]
    num_tokens = sum(int(batch.response_mask[i].sum()) for i in rows)
    model.zero_grad()
    total = 0.0
    for i in rows:
        row = take_rows(batch, [i])
        logp, entropy = plain_logprobs(model, row.input_ids[0].tolist())
        objective, _ = token_objective(loss_mode, logp[None], entropy[None], row)
        row_weight = {
            "token-mean": 1 / num_tokens,
            "seq-mean-token-sum": 1 / len(rows),
            "seq-mean-token-mean": 1 / len(rows) / int(row.response_mask.sum()),
            "seq-mean-token-sum-norm": 1 / len(rows) / SCALE,
        }[agg_mode]
        loss = objective[0][row.response_mask[0] > 0].sum() * row_weight
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def largest_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest deviation of any parameter's tensor, relative to the largest entry of that tensor."""
    assert actual.keys() == expected.keys()
    return max(float((actual[n].double() - e).abs().max() / e.abs().max()) for n, e in expected.items())

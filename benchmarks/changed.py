"""train_grpo.py with one thing changed that is no flag of it, since nobody has shown that it helps.

    python benchmarks/changed.py --change mixed --model ... --train-files ...       # other flags are train_grpo.py's

mixed               mini-batches of responses drawn at random from the whole step, and not of whole groups
float32_residual    layers add to a residual stream in float32; what they compute with keeps its precision

Both are what TRL's GRPOTrainer does. benchmarks/pretrained.py runs them.
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_grpo  # noqa: E402
from rl.data import batching  # noqa: E402
from rl.data.types import MicroBatch  # noqa: E402
from rl.model import sharding  # noqa: E402


def mix() -> None:
    """Let every step's responses be dealt out to its mini-batches at random."""
    plan, random = batching.plan_updates, np.random.default_rng(0)

    def planned(lengths: Sequence[int], *, learned: Sequence[int], shared: Sequence[int], **settings: Any) -> Any:
        order = random.permutation(len(lengths)).tolist()  # the same on all ranks

        def back(rows: Sequence[int]) -> list[int]:
            return sorted(order[i] for i in rows)

        updates = plan([lengths[i] for i in order], learned=[learned[i] for i in order], **settings)
        return [
            update._replace(
                micro_batches=[MicroBatch(back(x), x.share) for x in update.micro_batches],
                rows_of_rank=[back(x) for x in update.rows_of_rank],
            )
            for update in updates
        ]

    batching.plan_updates = planned


def widen(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the residual stream of a Llama or Qwen2 be float32, and what its layers compute with be `dtype`."""

    def to(kind: torch.dtype, module: nn.Module, args: Any, out: Any) -> Any:
        return tuple(x.to(kind) for x in out) if isinstance(out, tuple) else out.to(kind)

    model.get_input_embeddings().register_forward_hook(functools.partial(to, torch.float32))
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "RotaryEmbedding")):
            module.register_forward_hook(functools.partial(to, dtype))


def widen_policy() -> None:
    """Let `train_grpo.load_policy` give such a model."""
    load = train_grpo.load_policy
    # FSDP2 would round the stream at the border of every layer.
    sharding.MixedPrecisionPolicy = functools.partial(sharding.MixedPrecisionPolicy, cast_forward_inputs=False)

    def loaded(path: str, ranks: Any, *args: Any, **kwargs: Any) -> nn.Module:
        model = load(path, ranks, *args, **kwargs)
        widen(model, ranks.dtype)
        return model

    train_grpo.load_policy = loaded


CHANGES = {"mixed": mix, "float32_residual": widen_policy}

if __name__ == "__main__":
    at = sys.argv.index("--change")
    CHANGES[sys.argv[at + 1]]()
    train_grpo.main(
        tyro.cli(train_grpo.Args, args=sys.argv[1:at] + sys.argv[at + 2 :], config=(tyro.conf.OmitArgPrefixes,))
    )

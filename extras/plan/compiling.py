"""Whether a run takes less time if its layers and its LM head are compiled. A pure function of its arguments."""

import math
from typing import Any

from extras.plan import USUAL_TOKENS, budget_of
from extras.plan.ways import AUTO
from rl.flags import flat
from rl.model.checks import read_config

# Estimates, in seconds: compiling takes 15 (torch 2.14) to 60 (2.11) where nothing is kept from an earlier start.
COMPILING = 30.0
# In each layer, for each hidden dimension: what stays on the chip between operations. By the constants of seconds.py it
# is 9e-10 for shapes of 0.5B to 32B on an H100. Not compiled, a 7B with LoRA took a quarter longer than these say.
SAVED_PER_TOKEN = 9e-10
SAVED_PER_PASS = 3e-3  # in each layer: Python's time for single operations, above all where "selective" looks at each


def seconds_saved(args: Any, steps: int, ranks: int) -> float:
    """What compiled code saves in a run of this many steps, in seconds:

        steps * layers * (tokens * hidden size * SAVED_PER_TOKEN + micro-batches * SAVED_PER_PASS)

    Tokens and micro-batches are those of one rank in a step, whose rows are half as long as they may be, as a guess.
    """
    _, most = budget_of(args.memory)
    rows = args.train_batch_size * flat(args).get("rollout_n", args.rows_per_unit)
    tokens = rows * args.longest / 2 / ranks
    passes = math.ceil(tokens / (USUAL_TOKENS if most == AUTO else most))
    config = read_config(args.model, flag="--model").get_text_config()
    per_layer = tokens * config.hidden_size * SAVED_PER_TOKEN + passes * SAVED_PER_PASS
    return steps * config.num_hidden_layers * per_layer


def compiling_pays(args: Any, steps: int, ranks: int) -> bool:
    """See `extras.plan.compiling_pays`."""
    return seconds_saved(args, steps, ranks) > COMPILING

"""Gated delta nets on a GPU: are packed sequences right with flash-linear-attention's kernels, and what do they save?

    python benchmarks/hybrids.py check --families qwen3_5_text qwen3_next olmo_hybrid     # each a process of its own
    python benchmarks/hybrids.py speed --rows 64 --shortest 500 --longest 4000
    python benchmarks/hybrids.py check --kernels torch --dtype float32    # on a CPU: torch's function in their place

`check` makes a small random model, loads it as train_grpo.py does, and compares log-probs and gradients with those of
transformers' own forward in float32 by torch's function, one sequence at a time. What the padded way, and the own
forward in the same precision, differ by is the yardstick: rounding. `speed` times forward and backward passes over
sequences of many lengths, packed and padded, with kernels and without. Both count how often the kernels are called.
"""

import importlib
import inspect
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.flops import train_flops  # noqa: E402
from benchmarks.make_model import Random, config_of  # noqa: E402
from extras.families import delta_rule, recurrent, ways  # noqa: E402
from extras.lora import LoRA  # noqa: E402
from rl.data.batching import collate, plan_update  # noqa: E402
from rl.data.types import Batch, Sample, take_rows  # noqa: E402
from rl.model import load as models  # noqa: E402
from rl.model import sharding  # noqa: E402
from rl.model.logprobs import token_logprobs  # noqa: E402
from rl.model.roles import CausalLM  # noqa: E402
from rl.ranks import Ranks, init_ranks  # noqa: E402

WAYS = {"borders": "packed, nothing shared", "rows": "packed but in recurrent layers", "padded": "padded"}
SIZES = dict(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    linear_num_key_heads=2, linear_num_value_heads=4, layer_types=["linear_attention"] * 3 + ["full_attention"],
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, shared_expert_intermediate_size=128,
)  # fmt: skip
QWEN = "transformers.models.qwen3_5.modeling_qwen3_5"
CALLS = {"all": 0, "with borders": 0}  # of the kernels


@dataclass(frozen=True)
class Check:
    """Log-probs and gradients of small models against transformers' own."""

    families: tuple[str, ...] = ("qwen3_5_text",)
    head: int = 128  # width of the heads of the gated delta nets
    lengths: tuple[int, ...] = (9, 300, 64, 1, 129, 700, 65, 511)  # tokens after the first
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    kernels: Literal["fla", "torch"] = "fla"
    compile: bool = True  # try compiled layers too
    out: Path = Path("runs/hybrids")  # check.jsonl


@dataclass(frozen=True)
class Speed:
    """Seconds of an update, by the way in which a model runs."""

    layers: int | None = None  # of 32 of the 4B shape of benchmarks/make_model.py
    rows: int = 64
    shortest: int = 500  # tokens; lengths are spread evenly
    longest: int = 4000
    max_tokens: int = 16384  # of a micro-batch
    micros: int | None = None  # Only this many micro-batches are run, the first ones.
    lora_rank: int = 32
    checkpointing: Literal["none", "selective", "full"] = "selective"
    ways: tuple[Literal["borders", "padded", "rows", "rows without kernels", "padded without kernels"], ...] = (
        "borders", "padded",
    )  # fmt: skip
    compile: bool = True
    tiny: bool = False  # layers of 64: for a CPU
    kernels: Literal["fla", "torch"] = "fla"
    out: Path = Path("runs/hybrids")  # speed.jsonl


def count_calls(kernels: str) -> None:
    """Let CALLS count the calls of the kernels, or put torch's function in their place."""
    torchs(QWEN)
    if kernels == "torch":
        recurrent._has_kernels = lambda package, device: package == "fla"

    def counted(*args: Any, borders: Tensor | None) -> Tensor:
        CALLS["all"] += 1
        CALLS["with borders"] += borders is not None
        return own(*args, borders=borders)

    own = delta_rule.kernel if kernels == "fla" else one_by_one
    delta_rule.kernel = counted


@cache
def torchs(name: str) -> Callable:
    """transformers' function in plain torch, of its module `name`; first asked for before this package changes that."""
    return delta_rule.without_kernels(inspect.unwrap(getattr(importlib.import_module(name), recurrent.DELTA_RULE)))


def one_by_one(*states: Tensor, borders: Tensor | None) -> Tensor:
    """In the place of the kernels: torch's function for each sequence."""
    rule, sizes = torchs(QWEN), states[0].shape[1] if borders is None else borders.diff().tolist()
    parts = zip(*(x.split(sizes, 1) for x in states), strict=True)
    return torch.cat([rule(q, k, v, g=g, beta=beta)[0] for q, k, v, g, beta in parts], 1)


@contextmanager
def without_kernels(model: nn.Module) -> Iterator[None]:
    """Let the gated delta nets of a model run by torch's function."""
    names = [x.__module__ for x in type(model).__mro__]  # FSDP2 has made a class of its own
    name = next(x for x in names if hasattr(sys.modules[x], recurrent.DELTA_RULE))
    own = vars(sys.modules[name])[recurrent.DELTA_RULE]
    setattr(sys.modules[name], recurrent.DELTA_RULE, torchs(name))
    try:
        yield
    finally:
        setattr(sys.modules[name], recurrent.DELTA_RULE, own)


def random_batch(lengths: list[int], vocabulary: int) -> Batch:
    """Sequences of a first token and this many others, all of which count."""
    random = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, vocabulary, (n + 1,), generator=random).tolist() for n in lengths]
    return collate([Sample(x[:1], x[1:], [1] * (len(x) - 1), [0.0] * (len(x) - 1), "stop", 0) for x in ids], pad_id=0)


# ---------------------------------------------------------------------------------------------------------------------
# check


def save(family: str, head: int, folder: Path) -> str:
    """A random model, livelier than a new one: else a wrong layer would go unnoticed."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SIZES | dict(linear_key_head_dim=head, linear_value_head_dim=head))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for x in model.parameters():
            x.add_((0.03 if x.ndim > 1 else 0.1) * torch.randn(x.shape))
    model.save_pretrained(folder)
    return str(folder)


def weights_of(batch: Batch) -> Tensor:
    """What every log-prob counts in the loss (b, T): signs, as advantages have them, over the number of tokens."""
    random = torch.Generator().manual_seed(2)
    signs = torch.randn(len(batch.lengths), 1, generator=random).sign()
    mask = batch.response_mask
    return signs.to(mask.device) * mask / mask.sum()


def own_forward(path: str, batch: Batch, ranks: Ranks, dtype: torch.dtype, kernels: bool):
    """Log-probs (b, T) and gradients by transformers' own forward, one sequence at a time."""
    options = dict(dtype=dtype, attn_implementation="eager", experts_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(path, **options).to(ranks.device).eval()
    found, weights = torch.zeros(batch.input_ids.shape), weights_of(batch)
    with nullcontext() if kernels else without_kernels(model):
        for i, n in enumerate(batch.lengths.tolist()):
            ids = batch.input_ids[i, :n].to(ranks.device)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
            logp = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            (logp * weights[i, 1:n].to(ranks.device)).sum().backward()
            found[i, 1:n] = logp.detach().cpu()
    return found, {name: x.grad.float().cpu() for name, x in model.named_parameters() if x.grad is not None}


def of_policy(model: nn.Module, batch: Batch, device: torch.device):
    """The same by a policy in the way that it runs."""
    model.zero_grad()
    logp, _ = token_logprobs(model, take_rows(batch, range(len(batch.lengths)), device))
    sharding.backward(model, (logp * weights_of(batch).to(device)).sum(), is_last=True)
    grads = {n: x.grad.full_tensor().float().cpu() for n, x in model.named_parameters() if x.grad is not None}
    return logp.detach().float().cpu(), grads


def differences(found: Any, expected: Any, mask: Tensor) -> dict[str, float]:
    """Of log-probs, in nats; of gradients, norms relative to that of what is expected: of all, and the worst weight's,
    where a weight counts whose gradient is not next to nothing.
    """
    gap = (found[0] - expected[0]).abs()[mask > 0]
    names = expected[1].keys()
    assert found[1].keys() == names, f"gradients of {sorted(found[1].keys() ^ names)[:3]} are missing or new"
    norms = {n: float(expected[1][n].norm()) for n in names}
    errors = {n: float((found[1][n] - expected[1][n]).norm()) for n in names}
    total = sum(x * x for x in norms.values()) ** 0.5
    counted = [n for n in names if norms[n] > 1e-3 * total]
    worst = max(counted, key=lambda n: errors[n] / norms[n])
    return {
        "logp_mean": float(gap.mean()),
        "logp_max": float(gap.max()),
        "grad": sum(x * x for x in errors.values()) ** 0.5 / total,
        "grad_worst": errors[worst] / norms[worst],
        "worst": worst,
    }


def check(args: Check) -> list[dict[str, Any]]:
    """Returns its lines."""
    ranks = replace(init_ranks(), dtype=getattr(torch, args.dtype))
    batch, lines = random_batch(list(args.lengths), SIZES["vocab_size"]), []
    args.out.mkdir(parents=True, exist_ok=True)

    def line(family: str, what: str, expected: Any, run: Callable, **more: Any) -> None:
        start = time.perf_counter()
        CALLS.update(dict.fromkeys(CALLS, 0))
        try:
            result = differences(run(), expected, batch.response_mask) | CALLS
        except Exception as error:  # the others are worth knowing
            result = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        more |= {"seconds": round(time.perf_counter() - start, 2)}
        lines.append({"family": family, "dtype": args.dtype, "what": what} | result | more)
        print(json.dumps(lines[-1]), flush=True)
        with open(args.out / "check.jsonl", "a") as file:
            file.write(json.dumps(lines[-1]) + "\n")

    for family in args.families:
        with tempfile.TemporaryDirectory() as folder:
            path = save(family, args.head, Path(folder))
            expected = own_forward(path, batch, ranks, torch.float32, kernels=False)
            own = partial(own_forward, path, batch, ranks, ranks.dtype)
            line(family, "own forward, one by one", expected, partial(own, kernels=True))
            for compiled in (False, True) if args.compile else (False,):
                for kept in ("selective", "none", "full"):
                    memory = sharding.Memory(activation_checkpointing=kept, compile=compiled)
                    model = models.load_model(path, ranks, memory=memory, longest=1024)
                    way, run = model.packed.way, partial(of_policy, model, batch, ranks.device)
                    what = f"{'compiled' if compiled else 'eager'}, checkpointing {kept}"
                    line(family, what, expected, run, way=way)
                    if kept == "selective" and not compiled:
                        for other in WAYS.values():
                            ways.use_way(model, other)
                            line(family, f"eager, {other}", expected, run, way=other)
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# speed


class RandomModel(CausalLM):
    """What the model is read as."""

    def class_of(self, path: str) -> type:
        """See above."""
        return Random


def speed(args: Speed) -> list[dict[str, Any]]:
    """Returns its lines, one for each way."""
    ranks, lines = init_ranks(), []
    tiny = dict(hidden_size=64, num_hidden_layers=4, intermediate_size=64, vocab_size=512, head_dim=32)
    config = config_of("4B-hybrid", args.layers, **tiny if args.tiny else {}).get_text_config()
    args.out.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(args.out / "model")
    model = models.load_pretrained(str(args.out / "model"), ranks, RandomModel(), dtype=ranks.dtype)
    LoRA(lora_rank=args.lora_rank).apply(model, path="", seed=0, ranks=ranks)
    compiles = args.compile and ranks.device.type == "cuda"
    memory = sharding.Memory(activation_checkpointing=args.checkpointing, compile=compiles)
    model = sharding.shard(model, ranks, memory)
    models.choose_forward(model, ranks, longest=args.longest)
    chosen = model.packed.way
    spread = torch.linspace(args.shortest, args.longest, args.rows).long() - 1
    order = torch.randperm(args.rows, generator=torch.Generator().manual_seed(0))
    batch = random_batch(spread[order].tolist(), config.vocab_size)
    plan = plan_update(batch.lengths.tolist(), max_tokens=args.max_tokens).micro_batches
    plan = plan[: args.micros]

    def update() -> None:
        for rows in plan:
            micro = take_rows(batch, rows, ranks.device)
            logp, _ = token_logprobs(model, micro)
            sharding.backward(model, (logp * weights_of(micro)).sum(), is_last=rows is plan[-1])
        for x in model.parameters():
            x.grad = None

    done = [i for rows in plan for i in rows]
    lengths = batch.lengths[done].double()
    work = dict(tokens=float(lengths.sum()), sum_squares=float((lengths * lengths).sum()), frozen=True)
    flops = train_flops(model, response_tokens=work["tokens"] - len(done), **work)
    for way in args.ways:
        ways.use_way(model, WAYS[way.split()[0]])
        with without_kernels(model) if way.endswith("without kernels") else nullcontext():
            start, line = now(), {"way": way, "chosen": chosen, "micro_batches": len(plan), "tokens": work["tokens"]}
            try:
                update()
                line["first_s"], start = now() - start, now()
                CALLS.update(dict.fromkeys(CALLS, 0))
                if ranks.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                update()
                line["seconds"] = now() - start
                line |= {"tokens_per_s": work["tokens"] / line["seconds"], **CALLS}
                line["tflops"] = flops / line["seconds"] / 1e12
                if ranks.device.type == "cuda":
                    line["gib"] = torch.cuda.max_memory_allocated() / 2**30
            except torch.OutOfMemoryError as error:
                line["error"] = str(error).splitlines()[0][:200]
        for x in model.parameters():
            x.grad = None
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        lines.append(line)
        print(json.dumps(line), flush=True)
        with open(args.out / "speed.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
    return lines


def now() -> float:
    """Seconds, once the device has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main(args: Check | Speed) -> list[dict[str, Any]]:
    count_calls(args.kernels)
    return check(args) if isinstance(args, Check) else speed(args)


if __name__ == "__main__":
    main(tyro.extras.subcommand_cli_from_dict({"check": Check, "speed": Speed}, description=__doc__))

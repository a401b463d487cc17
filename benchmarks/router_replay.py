"""Router replay: how far are the trainer's log-probs from the engine's, with it and without, in bfloat16?

    python benchmarks/router_replay.py --out runs/router_replay                     # one GPU of 80 GB
    python benchmarks/router_replay.py --shape tiny --engine hf --dtype float32     # on a CPU, to see that it works

A random model of Qwen3-30B-A3B's layers samples, and then scores what it has sampled. A model with fewer layers is the
same one whose further layers add nothing: o_proj and down_proj are zero there, so that one engine serves all depths.
Weights of the LM head are three times as large as new ones, so that the entropy is that of a trained model. Prints a
line for each depth and writes it to report.jsonl.
"""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.make_model import Random, config_of  # noqa: E402
from extras.families import experts  # noqa: E402
from extras.families.ways import family  # noqa: E402
from rl.data.batching import collate  # noqa: E402
from rl.data.types import Batch, Sampling, take_rows  # noqa: E402
from rl.model.load import load_model, weights_for_engine  # noqa: E402
from rl.model.logprobs import token_logprobs  # noqa: E402
from rl.model.roles import CausalLM  # noqa: E402
from rl.model.sharding import Memory  # noqa: E402
from rl.ranks import init_ranks  # noqa: E402
from rl.sampling.engines import make_engine  # noqa: E402
from rl.sampling.engines.flags import EngineFlags  # noqa: E402
from rl.sampling.groups import sample_groups  # noqa: E402


@dataclass(frozen=True)
class Args:
    out: Path = Path("runs/router_replay")  # Results are written to this folder.
    # Layers have this shape. 3B-dense shows what rounding does alone.
    shape: Literal["30B-A3B", "3B-dense", "tiny"] = "30B-A3B"
    depths: tuple[int, ...] = (2, 8, 16)  # This many layers count, with the largest number last.
    engine: Literal["vllm", "hf"] = "vllm"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    prompts: int = 64  # There are this many prompts of 64 random tokens, with a response each.
    max_tokens: int = 256  # A response has at most this many tokens.
    seed: int = 0


class Lively(Random):
    """The same with a larger LM head."""

    @staticmethod
    def from_pretrained(path: str, **options: Any) -> tuple[PreTrainedModel, dict]:
        model, info = Random.from_pretrained(path, **options)
        model.lm_head.weight.data *= 3
        return model, info


class RandomModel(CausalLM):
    """What the model is read as."""

    def class_of(self, path: str) -> type:
        """See above."""
        return Lively


def shape_config(args: Args) -> PreTrainedConfig:
    """The config of the deepest model."""
    if args.shape != "tiny":
        return config_of(args.shape, args.depths[-1])
    sizes = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=2048)
    sizes |= dict(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=64, initializer_range=0.08)
    return config_of("30B-A3B", args.depths[-1], **sizes)


def local_of(x: torch.Tensor) -> torch.Tensor:
    """A parameter as a plain tensor. There is one rank."""
    return x.to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def cut(model: torch.nn.Module, depth: int, whole: dict[str, torch.Tensor]) -> None:
    """Let layers from `depth` on add nothing, those before be as in `whole`: output weights by name on the host."""
    for name, parameter in model.named_parameters():
        if name in whole:
            is_in = int(name.split(".")[2]) < depth
            local_of(parameter).copy_(whole[name] if is_in else torch.zeros_like(whole[name]))


@torch.no_grad()
def differences(model: torch.nn.Module, batch: Batch, sampling: Sampling, replays: bool, depth: int):
    """|log-prob of the engine - trainer's| of all sampled tokens, and for each real token (one, where no router is
    known) whether a layer has chosen other experts than the engine did.
    """
    mixture, found, changed = family(model, "experts"), [], []
    if mixture:
        mixture.replays = replays
    for i in range(0, len(batch.lengths), 8):
        rows = take_rows(batch, range(i, min(i + 8, len(batch.lengths))), model.packed.device)
        routers = tuple((layer, x) for layer, x in (mixture.routers if mixture else ()) if layer < depth)
        with experts.watched(routers) as seen:
            logp, _ = token_logprobs(model, rows, sampling=sampling)
        found.append((logp - rows.rollout_logp).abs()[rows.response_mask > 0].cpu())
        if replays and routers:
            pairs = [(x.chosen, x.replayed.to(x.chosen.dtype), x.logits.shape[-1]) for (x,) in seen.values()]
            known = torch.stack([(b < count).all(-1) for _, b, count in pairs]).all(0)
            other = torch.stack([(a.sort(-1).values != b.sort(-1).values).any(-1) for a, b, _ in pairs]).any(0)
            changed.append(other[known].cpu())
    return torch.cat(found).double(), torch.cat(changed).double() if changed else torch.zeros(1)


def main(args: Args) -> list[dict]:
    """Measure each depth. Returns its lines."""
    ranks = replace(init_ranks(), dtype=getattr(torch, args.dtype))
    args.out.mkdir(parents=True, exist_ok=True)
    config = shape_config(args)
    config.architectures = [config.__class__.__name__.replace("Config", "ForCausalLM")]  # which vLLM goes by
    config.save_pretrained(args.out / "model")
    longest = 64 + args.max_tokens
    if args.engine == "hf":  # which reads files
        Lively.from_pretrained(str(args.out / "model"), dtype=ranks.dtype)[0].save_pretrained(args.out / "model")
    model = load_model(str(args.out / "model"), ranks, None, Memory(compile=False), kind=RandomModel(), longest=longest)
    has_experts = family(model, "experts") is not None
    rollout = EngineFlags(engine=args.engine, router_replay=has_experts, max_num_seqs=64, gpu_memory_utilization=0.4)
    engine = make_engine(str(args.out / "model"), ranks, rollout, longest=longest, seed=args.seed)
    ends = ("o_proj.weight", "down_proj", "down_proj.weight")
    whole = {name: local_of(x.detach()).cpu().clone() for name, x in model.named_parameters() if name.endswith(ends)}
    random = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(3, config.vocab_size, (args.prompts, 64), generator=random).tolist()
    rows = [dict(row_index=i, prompt_ids=x) for i, x in enumerate(ids)]
    sampling, lines = Sampling(n=1, max_tokens=args.max_tokens), []
    for depth in args.depths:
        cut(model, depth, whole)
        engine.wake()
        engine.update_weights(weights_for_engine(model, ranks))
        samples = sample_groups(engine, rows, sampling, seed=args.seed + depth)
        engine.sleep()
        batch = collate(samples)
        line = {"shape": args.shape, "layers": depth, "tokens": int(batch.response_mask.sum())}
        line["sampled_nats"] = float(-(batch.rollout_logp * batch.response_mask).sum() / line["tokens"])
        for replays in (False, True) if "routed_experts" in batch.columns else (False,):
            gap, changed = differences(model, batch, sampling, replays, depth)
            key = "with_replay" if replays else "without"
            line |= {f"gap_{key}": gap.mean().item(), f"gap_{key}_p99": gap.quantile(0.99).item()}
            line |= {"changed_frac": changed.mean().item()} if replays else {}
        lines.append(line)
        print(json.dumps(line), flush=True)
    (args.out / "report.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
    sys.stdout.flush()
    os._exit(0)  # vLLM takes its time to end

"""What becomes of the families of models that transformers has: benchmarks/results/models.md has the table.

    python benchmarks/models.py --out FOLDER        # half an hour on a CPU core; continues where it was stopped
    python benchmarks/models.py --out FOLDER --write
    python benchmarks/models.py --out FOLDER --gradients        # of new models, on one rank and on two
    python benchmarks/models.py --out FOLDER --learn olmo2 mistral

Each family gets a tiny model with random weights, with which this script does what a user would do. sft.py trains it
for two steps on the arithmetic task, and transformers loads its export again. The policy is loaded from there as
train_grpo.py does. Its log-probs are compared with those of transformers' own forward for one sequence at a time. Then
its weights are changed and pushed into vLLM, whose log-probs of what it samples are compared with the policy's.

models.jsonl has a line per family, and families that it has already are not run again. If vLLM does not serve a family,
the line has vLLM's error. gradients.jsonl compares the gradients, relative to their norm, and the log-probs of a new
model on one rank and on two.
"""

import contextlib
import gc
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from extras.families import ways
from rl.flags import build

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "benchmarks" / "results" / "models.md"
OWN_HEAD, WAYS = ways.OWN_HEAD, tuple(ways.WAYS)
SHORT = {way: way.replace(OWN_HEAD, ", own head") for way in WAYS}  # on the page
ENGINES = ("yes", "by transformers", "other numbers", "no", "not tried", "")
LIMIT = 1e-4  # of the gap in float32, see `check_engine`: a larger one ends a run
BEGIN, END = "<!-- models -->\n", "<!-- end of models -->"

IDS = dict(vocab_size=80, bos_token_id=1, eos_token_id=2, pad_token_id=0)
HEADS = dict(num_hidden_layers=2, num_attention_heads=4)
PLAIN = IDS | HEADS | dict(hidden_size=128, intermediate_size=128, max_position_embeddings=256)
GROUPED = PLAIN | dict(num_key_value_heads=2)
GPT2 = IDS | dict(n_embd=128, n_layer=2, n_head=4, n_positions=256)
EXPERTS = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
STATES = dict(mamba_d_state=16, mamba_n_heads=8, mamba_d_head=32, mamba_n_groups=1, mamba_chunk_size=16, mamba_expand=2)
DELTA = dict(
    head_dim=32, linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
GROUPS = dict(n_group=1, topk_group=1, first_k_dense_replace=0)
LATENT = dict(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32)

# model_type -> options of its config. Windows are shorter than the sequences.
FAMILIES: dict[str, dict[str, Any]] = {
    name: GROUPED
    for name in (
        "llama", "qwen2", "qwen3", "phi3", "glm", "glm4", "olmo", "olmo2", "smollm3", "granite", "starcoder2",
        "ernie4_5", "arcee", "apertus", "bitnet", "diffllama", "jais2", "hyperclovax",
        "persimmon", "seed_oss", "stablelm", "nemotron", "cohere", "nanochat", "doge", "ministral3",
    )
}  # fmt: skip
FAMILIES |= {
    "mistral": GROUPED | dict(sliding_window=16),
    "ministral": GROUPED | dict(head_dim=32, sliding_window=16),
    "olmo3": GROUPED | dict(sliding_window=16),
    "exaone4": GROUPED | dict(sliding_window=16),
    "cwm": GROUPED | dict(sliding_window=16),
    "cohere2": GROUPED | dict(sliding_window=16),
    "gemma": GROUPED | dict(head_dim=32),
    "gemma2": GROUPED | dict(head_dim=32, sliding_window=16, query_pre_attn_scalar=32),
    "gemma3_text": GROUPED | dict(head_dim=32, sliding_window=16, query_pre_attn_scalar=32),
    "vaultgemma": GROUPED | dict(head_dim=32, sliding_window=16, query_pre_attn_scalar=32),
    "gemma4_text": GROUPED
    | dict(head_dim=32, global_head_dim=32, sliding_window=16, hidden_size_per_layer_input=0, num_kv_shared_layers=0),
    "granite_logits": GROUPED | dict(logits_scaling=8.0),
    "phi": PLAIN | dict(intermediate_size=512),
    "hunyuan_v1_dense": GROUPED | dict(head_dim=32, use_qk_norm=True),
    "helium": GROUPED | dict(head_dim=32),
    "youtu": PLAIN | LATENT,
    "minicpm3": PLAIN | LATENT | dict(dim_model_base=32),
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "openai-gpt": GPT2,
    "gptj": GPT2 | dict(rotary_dim=16),
    "codegen": GPT2 | dict(rotary_dim=16),
    "ctrl": IDS | dict(n_embd=128, n_layer=2, n_head=4, n_positions=256, dff=128),
    "gpt_neo": IDS
    | dict(hidden_size=128, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=16)
    | dict(max_position_embeddings=256),
    "gpt_neox": PLAIN,
    "gpt_neox_japanese": PLAIN,
    "bloom": IDS | dict(hidden_size=128, n_layer=2, n_head=4),
    "falcon": IDS | HEADS | dict(hidden_size=128),
    "mpt": IDS | dict(d_model=128, n_heads=4, n_layers=2, max_seq_len=256),
    "opt": PLAIN | dict(ffn_dim=128, word_embed_proj_dim=128),
    "biogpt": PLAIN,
    "xglm": IDS | dict(d_model=128, num_layers=2, attention_heads=4, ffn_dim=128, max_position_embeddings=256),
    "modernbert-decoder": PLAIN | dict(local_attention=16, cls_token_id=3, sep_token_id=3),
    "lfm2": GROUPED | dict(layer_types=["conv", "full_attention"], conv_dim=128, block_dim=128),
    "qwen3_5_text": GROUPED | DELTA,
    "qwen3_5": dict(  # as published, with a vision tower, of which text is trained
        text_config=GROUPED
        | DELTA
        | dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=1.0, mrope_section=[8, 4, 4])),
        vision_config=dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=128)
        | dict(num_position_embeddings=16),
        **dict(image_token_id=76, video_token_id=77, vision_start_token_id=78, vision_end_token_id=79),
    ),
    "qwen3_next": GROUPED | DELTA | EXPERTS | dict(shared_expert_intermediate_size=64),
    "olmo_hybrid": GROUPED | DELTA,
    "bamba": GROUPED | STATES | dict(attn_layer_indices=[1]),
    "granitemoehybrid": GROUPED
    | STATES
    | dict(layer_types=["mamba", "attention"], num_local_experts=0, shared_intermediate_size=128),
    "falcon_h1": GROUPED | STATES | dict(mamba_d_ssm=256),
    "nemotron_h": GROUPED
    | dict(layers_block_type=["mamba", "attention"], mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=16)
    | dict(n_groups=1, chunk_size=16, head_dim=32),
    "jamba": GROUPED | dict(num_experts=1, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=16, mamba_dt_rank=8),
    "zamba2": GROUPED
    | dict(mamba_d_state=16, n_mamba_heads=8, mamba_ngroups=1, chunk_size=16, layers_block_type=["mamba", "hybrid"])
    | dict(hybrid_layer_ids=[1], num_mem_blocks=1, attention_head_dim=64),
    "mamba": IDS | dict(hidden_size=128, num_hidden_layers=2, state_size=16),
    "mamba2": IDS
    | dict(hidden_size=128, num_hidden_layers=2, state_size=16, num_heads=8, head_dim=32, n_groups=1, chunk_size=16),
    "falcon_mamba": IDS | dict(hidden_size=128, num_hidden_layers=2, state_size=16),
    "recurrent_gemma": GROUPED | dict(head_dim=32, lru_width=128, attention_window_size=16, num_hidden_layers=3),
    "rwkv": IDS | dict(hidden_size=128, num_hidden_layers=2, attention_hidden_size=128, intermediate_size=128),
    "xlstm": IDS | dict(hidden_size=128, num_hidden_layers=2, num_heads=4, chunk_size=16),
    "mixtral": GROUPED | EXPERTS,
    "qwen3_moe": GROUPED | EXPERTS,
    "olmoe": GROUPED | EXPERTS,
    "glm4_moe": GROUPED | EXPERTS | GROUPS | dict(head_dim=32, n_shared_experts=1),
    # vLLM on a CPU knows the published size of a latent only
    "deepseek_v3": PLAIN
    | EXPERTS
    | LATENT
    | GROUPS
    | dict(topk_method="noaux_tc", kv_lora_rank=512, qk_rope_head_dim=64),
    "gpt_oss": GROUPED | EXPERTS | dict(head_dim=32),
    "qwen3_5_moe_text": GROUPED | DELTA | EXPERTS,
}
FAMILIES["granite4_experts"] = FAMILIES["granitemoehybrid"] | dict(num_local_experts=4, num_experts_per_tok=2)
LEARNING = {  # other options for `learn`
    "mistral": dict(sliding_window=24),
    # vLLM's kernels of gated delta nets want heads of 128
    "qwen3_5": dict(
        text_config=FAMILIES["qwen3_5"]["text_config"] | dict(linear_key_head_dim=128, linear_value_head_dim=128)
    ),
}
ALIASES = {"granite_logits": "granite", "granite4_experts": "granitemoehybrid"}  # second lines of families


@dataclass(frozen=True)
class Args:
    out: Path  # models.jsonl is written to this folder.
    families: tuple[str, ...] = ()  # These families are tested. By default all are.
    engine: bool = True  # Try vLLM, too.
    write: bool = False  # Write the table into benchmarks/results/models.md, and run nothing.
    gradients: bool = False  # Compare gradients instead, on one rank and on two.
    # Instead, run SFT and then GRPO for these families, on the arithmetic task or on that of dots.
    learn: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)  # With --learn, these seeds decide the model, the data and what is sampled.
    sft_steps: int = 250  # SFT makes this many steps of 128 demonstrations.
    rl_steps: int = 10  # GRPO then makes this many steps of 32 prompts.
    rollout_engine: Literal["vllm", "hf"] = "vllm"  # GRPO samples with this engine.


def make(name: str, folder: Path) -> None:
    """A random model in the folder of the arithmetic task's model, with its tokenizer. Weights are livelier than new
    ones: else all tokens would be about equally likely, and a wrong layer would go unnoticed.
    """
    torch.manual_seed(0)
    model = new(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((0.05 if parameter.ndim > 1 else 0.2) * torch.randn(parameter.shape))
    model.save_pretrained(folder)


def new(name: str, **options: Any) -> torch.nn.Module:
    """A new model of a family, with other options."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    config = CONFIG_MAPPING[ALIASES.get(name, name)](**FAMILIES[name] | options)
    kind = AutoModelForImageTextToText if "vision_config" in FAMILIES[name] else AutoModelForCausalLM
    return kind.from_config(config, dtype=torch.float32)


def one_by_one(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """(n - 1,) log-probs by the model's own forward."""
    tokens = torch.tensor([ids])
    logp = model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logp.gather(-1, tokens[0, 1:, None])[:, 0]


@torch.no_grad()
def measure(name: str, with_engine: bool, folder: Path) -> dict[str, Any]:
    """What the table says of a family. Refusals are among it. Other errors are raised."""
    from transformers import AutoConfig

    import sft
    from data import arithmetic
    from extras.demonstrations import load_demonstrations
    from rl.data.template import load_tokenizer
    from rl.data.types import take_rows
    from rl.model import load as models
    from rl.model.checks import check_trainable
    from rl.model.logprobs import token_logprobs
    from rl.model.sharding import Memory
    from rl.ranks import init_ranks

    found: dict[str, Any] = {"family": name, "type": ALIASES.get(name, name)}
    arithmetic.main(arithmetic.Args(output_dir=folder, num_sft=64, num_train=8, num_test=8))
    make(name, folder / "model")
    try:
        check_trainable(AutoConfig.from_pretrained(folder / "model"), "model", 64)
    except ValueError as error:
        return found | {"refused": str(error).split(": ", 1)[1]}
    settings = dict(max_length=128, train_batch_size=16, total_training_steps=2, lr=1e-3, test_freq=2)
    files = dict(train_files=(str(folder / "sft.parquet"),), val_files=(str(folder / "sft.parquet"),))
    args = build(sft.Args, model=str(folder / "model"), default_local_dir=str(folder / "run"), **settings, **files)
    with torch.enable_grad():
        metrics = sft.main(args)
    export = str(folder / "run" / "global_step_2" / "huggingface")

    from transformers import AutoModelForCausalLM

    plain, info = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
    plain.eval()
    found["export_missing"] = len(info["missing_keys"]) + len(info["unexpected_keys"])
    limits = dict(max_length=args.max_length, filter_overlong=False)
    rows = load_demonstrations(args.data.val_files, load_tokenizer(export), **limits)
    total = count = 0.0
    for row in rows:
        mask = torch.tensor(row.response_mask[1:])
        total, count = total - float((one_by_one(plain, row.response_ids) * mask).sum()), count + float(mask.sum())
    found["export_loss_gap"] = abs(metrics["val/loss"] - total / count)

    ranks = init_ranks()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        policy = models.load_model(export, ranks, memory=Memory(compile=False), longest=64)
    found["way"] = policy.packed.way
    if found["way"] == "padded":
        found["reason"] = printed.getvalue().split("since it cannot run packed: ")[1].split(". Padding")[0]
    ids, batch = sequences()
    logp, _ = token_logprobs(policy, take_rows(batch, range(len(ids))))
    expected = [one_by_one(plain, x) for x in ids]
    found["logprob_gap"] = max(
        float((row[1 : len(x)] - y).abs().max()) for row, x, y in zip(logp, ids, expected, strict=True)
    )
    found["logprob_std"] = float(torch.cat(expected).std())
    return found | (engine_gap(export, policy, ranks) if with_engine else {})


def sequences() -> tuple[list[list[int]], Any]:
    """Seven random sequences, and a batch of them."""
    from rl.data.batching import collate
    from rl.data.types import Sample

    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 80, (n,), generator=generator).tolist() for n in (2, 60, 17, 33, 48, 5)]
    ids.append(ids[1][:40] + ids[3])  # begins as another one does
    batch = collate([Sample(x[:1], x[1:], [1] * (len(x) - 1), [0.0] * (len(x) - 1), "stop", 0) for x in ids], pad_id=0)
    return ids, batch


def compare(name: str, folder: Path, port: int, size: int, rank: int) -> dict[str, Any]:
    """On one of `size` ranks, which divide the sequences: log-probs and gradients against transformers' own forward for
    one sequence at a time. Every log-prob counts in the loss, those of half of the sequences with a minus.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from data import arithmetic
    from rl.data.types import take_rows
    from rl.model import load as models
    from rl.model import sharding
    from rl.model.checks import check_trainable
    from rl.model.logprobs import token_logprobs
    from rl.ranks import init_ranks

    places = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ |= {key: str(value) for key, value in places.items()}
    path = folder / str(rank)
    arithmetic.main(arithmetic.Args(output_dir=path, num_sft=8, num_train=8, num_test=8))
    make(name, path / "model")
    try:
        check_trainable(AutoConfig.from_pretrained(path / "model"), "model", 64)
    except ValueError as error:
        return {"family": name, "refused": str(error).split(": ", 1)[1]}
    ranks = init_ranks()
    policy = models.load_model(str(path / "model"), ranks, memory=sharding.Memory(compile=False), longest=64)
    ids, batch = sequences()
    own, signs = ranks.own_slice(range(len(ids))), [(-1.0) ** i for i in range(len(ids))]
    logp, _ = token_logprobs(policy, take_rows(batch, own))
    found = [row[1 : len(ids[i])] for row, i in zip(logp, own, strict=True)]
    loss = sum(signs[i] * x.sum() for x, i in zip(found, own, strict=True))
    sharding.backward(policy, loss, is_last=True)
    gradients = {k: x.grad.full_tensor() for k, x in policy.named_parameters() if x.grad is not None}

    plain = AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float32).eval()
    expected = [one_by_one(plain, x) for x in ids]
    sum(sign * x.sum() for sign, x in zip(signs, expected, strict=True)).backward()
    wanted = {k: x.grad for k, x in plain.named_parameters() if x.grad is not None}
    assert gradients.keys() == wanted.keys(), sorted(gradients.keys() ^ wanted.keys())[:3]
    gap = max(float((x - expected[i]).detach().abs().max()) for x, i in zip(found, own, strict=True))
    error, norm = (
        sum(float(x.double().square().sum()) for x in xs) ** 0.5
        for xs in ([gradients[k] - x for k, x in wanted.items()], wanted.values())
    )
    gaps = {"logprob_gap": max(ranks.all_gather([gap])), "grad_gap": error / norm}
    return {"family": name, "way": policy.packed.way} | {f"{key}_{size}": x for key, x in gaps.items()}


def engine_gap(export: str, policy: torch.nn.Module, ranks: Any) -> dict[str, Any]:
    """Between vLLM's log-probs of what it samples and the policy's, after a push of changed weights."""
    from rl.data.types import Sampling
    from rl.model import load as models
    from rl.sampling.engines import vllm
    from rl.sampling.engines.flags import EngineFlags
    from rl.sampling.groups import sample_groups
    from rl.sampling.verify import check_engine

    rows = [dict(row_index=i, prompt_ids=[5 + i, 6, 7, 40 - i]) for i in range(4)]
    sampling = Sampling(n=2, temperature=1.0, max_tokens=40)
    try:
        engine = vllm.Engine(export, ranks, EngineFlags(max_num_seqs=8), longest=64)
        for x in policy.parameters():
            x.mul_(1.05)
        engine.update_weights(models.weights_for_engine(policy, ranks))
        model = engine.llm.apply_model(lambda model: type(model).__name__)[0]
        samples = sample_groups(engine, rows, sampling, seed=1)
        gap = check_engine(policy, samples, sampling, EngineFlags(max_logprob_gap=1e9), ranks, num_probe=8)
    except Exception as error:  # whatever vLLM says of a model that it does not serve
        traceback.print_exc()
        return {"engine_error": " ".join(f"{type(error).__name__}: {error}".split()).partition(" [type=")[0][:250]}
    return {"engine": model, "engine_gap": gap}


def run_in_fork(name: str, with_engine: bool, log: Path) -> dict[str, Any]:
    """`measure` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return in_forks(name, [partial(measure, name, with_engine, Path(folder))], log)[0]


def gradients(name: str, log: Path) -> dict[str, Any]:
    """`compare` on one rank, then on two."""
    found = {}
    for size in (1, 2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            runs = [partial(compare, name, Path(folder), port, size, rank) for rank in range(size)]
            for line in in_forks(name, runs, log):
                found |= line
    return found


def in_forks(name: str, runs: list[Callable[[], dict[str, Any]]], log: Path) -> list[dict[str, Any]]:
    """What each of `runs` returns, in processes of their own, all at the same time, with what they print in `log`:
    models may crash in many ways.
    """
    with tempfile.TemporaryDirectory() as results:
        paths, pids = [Path(results) / str(i) for i in range(len(runs))], []
        for run, path in zip(runs, paths, strict=True):
            if (pid := os.fork()) == 0:
                gc.freeze()  # what the caller has left is not for this process to clean up: its threads are not here
                with open(log, "a") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                try:
                    found = run()
                except BaseException as error:
                    traceback.print_exc()
                    found = {"family": name, "error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
                path.write_text(json.dumps(found))
                sys.stdout.flush()
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        died = {"family": name, "error": "the process died"}
        return [json.loads(path.read_text()) if path.exists() else died for path in paths]


def learn(name: str, seed: int, args: Args) -> None:
    """Teach a new model of a family the arithmetic task, or one that sees images to count dots (data/dots.py). Leaves
    NAME-SEED.log and NAME-SEED.metrics.jsonl, of GRPO.
    """
    from data import dots

    def run(log: Path, *command: object) -> None:
        with open(log, "w") as file:
            subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, stdout=file, stderr=file, check=True)

    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        data, model, task = Path(folder) / "data", Path(folder) / "data" / "model", Path(folder) / "task"
        if sees := name in dots.FAMILIES:
            run(task, "data/dots.py", "--output-dir", data, "--family", name, "--seed", seed)
        else:
            run(task, "data/arithmetic.py", "--output-dir", data, "--num-sft", args.sft_steps * 128)
            torch.manual_seed(seed)
            new(name, **LEARNING.get(name, {})).save_pretrained(model)
        common = ("--seed", seed, "--activation-checkpointing", "none", "--default-local-dir")
        run(
            task, "sft.py", "--model", model, "--train-files", data / "sft.parquet", "--max-length", 128,
            "--lr", 1e-3 if sees else 4e-3, "--beta2", 0.98, "--lr-warmup-steps", 30,
            "--total-training-steps", args.sft_steps, *(("--no-freeze-vision-tower",) if sees else ()),
            *common, Path(folder) / "sft",
        )  # fmt: skip
        run(
            out / f"{name}-{seed}.log", "train_grpo.py", "--engine", args.rollout_engine,
            "--model", Path(folder) / "sft" / f"global_step_{args.sft_steps}" / "huggingface",
            "--train-files", data / "train.parquet", "--val-files", data / "test.parquet", "--test-freq", 10,
            "--max-prompt-length", 64 if sees else 32, "--max-response-length", 40, "--train-batch-size", 32,
            "--rollout-n", 8, "--lr", 1e-4, "--total-training-steps", args.rl_steps,
            *common, Path(folder) / "grpo",
        )  # fmt: skip
        metrics = (Path(folder) / "grpo" / "metrics.jsonl").read_text()
        (out / f"{name}-{seed}.metrics.jsonl").write_text(metrics.replace(folder, "runs"))
        log = out / f"{name}-{seed}.log"
        log.write_text(log.read_text().replace(folder, "runs"))


def read(folder: Path, name: str = "models.jsonl") -> dict[str, dict[str, Any]]:
    """The newest line of every family."""
    path = folder / name
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {x["family"]: x for x in lines}


def main(args: Args) -> None:
    """Run what has no line yet, or write the table."""
    if args.learn:
        for name in args.learn:
            for seed in args.seeds:
                learn(name, seed, args)
        return
    if args.write:
        PAGE.write_text(with_table(PAGE.read_text(), table(read(args.out))))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    import sft  # noqa: F401  # once for all forks

    kind = "gradients.jsonl" if args.gradients else "models.jsonl"
    for name in args.families or FAMILIES:
        if args.families or name not in read(args.out, kind):
            log = Path(tempfile.gettempdir()) / f"models-{name}.log"
            log.unlink(missing_ok=True)
            found = gradients(name, log) if args.gradients else run_in_fork(name, args.engine, log)
            print(json.dumps(found), flush=True)
            with open(args.out / kind, "a") as file:
                file.write(json.dumps(found) + "\n")


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown of the results: families by how they run, then why some run padded, and why vLLM does not serve some.

    A difference above 1e-5 stands behind its family. A line has the largest of all others.
    """
    groups, padded, errors = {}, {}, {}
    largest = {"logprob_gap": 0.0, "export_loss_gap": 0.0, "engine_gap": 0.0}
    for x in (found[name] for name in FAMILIES if name in found):
        name = x["family"].replace("granite_logits", "granite with scaled logits")
        if "refused" in x:
            groups.setdefault(("refused", ""), []).append(name)
            continue
        if "reason" in x and "log-probs would differ" not in x["reason"]:
            padded.setdefault(x["reason"], []).append(name)
        if "engine_error" in x:
            errors.setdefault(textwrap.shorten(x["engine_error"], 90, placeholder=" ..."), []).append(name)
        for key, title in (("export_loss_gap", "export"), ("engine_gap", "gap"), ("logprob_gap", "log-probs")):
            if x.get(key, 0.0) > 1e-5:
                name += f" ({title} {x[key]:.0e})"
            else:
                largest[key] = max(largest[key], x.get(key, 0.0))
        by = "by transformers" if x.get("engine", "").startswith("Transformers") else "yes"
        by = "other numbers" if x.get("engine_gap", 0.0) > LIMIT else by
        engine = "no" if "engine_error" in x else by if "engine_gap" in x else "not tried"
        groups.setdefault((SHORT[x["way"]], engine), []).append(name)
    order = [(way, engine) for way in (*SHORT.values(), "refused") for engine in ENGINES if (way, engine) in groups]
    lines = ["| runs | in vLLM | families |", "|---|---|---|"]
    lines += [f"| {way} | {engine} | {', '.join(groups[way, engine])} |" for way, engine in order]
    logprobs, export, gap = (f"{x:.0e}" for x in largest.values())
    others = f"{logprobs} (log-probs), {export} (export) and {gap} (gap)"
    lines += ["", f"The largest differences of all others are {others}."]
    lines += ["", "Some families run padded for the reason below. The others would have other log-probs if packed:", ""]
    lines += [f"- {', '.join(names)}: {reason}" for reason, names in padded.items()]
    lines += ["", "vLLM ends with these errors for families that it does not serve:", ""]
    lines += [f"- {', '.join(names)}: `{error}`" for error, names in errors.items()]
    return "\n".join(lines) + "\n"


def with_table(page: str, rows: str) -> str:
    """The page with these rows between its markers."""
    before, rest = page.split(BEGIN, 1)
    return before + BEGIN + rows + rest[rest.index(END) :]


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

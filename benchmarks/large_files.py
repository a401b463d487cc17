"""How much memory and time does a large data file take until the first step? On two ranks, with a tiny model.

    python benchmarks/large_files.py --out /tmp/large                                          # a million short prompts
    python benchmarks/large_files.py --out /tmp/large --rows 2200 --characters 1000000 --max-length 512     # 2 GB
    python benchmarks/large_files.py --out /tmp/large --form sft --suffix parquet --repository ../older

Texts are slices of a long text of invented words. The memory is that of each rank, at its peak (VmHWM), with all that
Python, torch and transformers take.
"""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SCRIPTS = {"rl": "train_grpo.py", "sft": "sft.py", "preference": "train_reward.py"}


@dataclass(frozen=True)
class Args:
    out: Path
    """The file, the model and the run are in this folder."""
    form: Literal["rl", "sft", "preference"] = "rl"
    """Rows have the form that train_grpo.py (rl), sft.py (sft) or train_reward.py (preferences) reads."""
    suffix: Literal["jsonl", "parquet"] = "jsonl"
    """The file has this suffix."""
    rows: int = 1_000_000
    """The file has this many rows."""
    characters: int = 75
    """The texts of a row have this many characters together, which vary by a third."""
    max_length: int | None = None
    """A prompt, or a row of the other forms, has at most this many tokens. Longer rows are dropped, and every tenth row
    is short. By default no row is too long."""
    max_gib: float = 18.0
    """The run is ended if a rank takes more GiB than this."""
    repository: Path = Path(__file__).resolve().parent.parent
    """The script of this checkout runs."""


def texts(characters: int, *, some_short: bool = False) -> Iterator[list[str]]:
    """Two texts for each row. Those of every tenth row may be short."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(50_000)]
    long = " ".join(rng.choices(words, k=5_000_000))
    for i in itertools.count():
        most = 75 if some_short and i % 10 == 0 else characters
        sizes = [rng.randint(most // 3, 2 * most // 3) for _ in range(2)]
        yield [long[start : start + size].strip() for size in sizes for start in [rng.randrange(len(long) - size)]]


def row_of(form: str, i: int, first: str, second: str) -> dict[str, Any]:
    user = {"role": "user", "content": f"{first} {second}" if form == "rl" else first}
    if form == "rl":
        about = {"data_source": "openai/gsm8k", "ability": "math", "extra_info": {"split": "train", "index": i}}
        return about | {"prompt": [user], "reward_model": {"style": "rule", "ground_truth": str(i)}}
    if form == "sft":
        return {"messages": [user, {"role": "assistant", "content": second}]}
    return {"prompt": [user], "chosen": second, "rejected": second[: len(second) // 2]}


def write(args: Args) -> Path:
    """The data file."""
    file = args.out / f"{args.form}-{args.rows}x{args.characters}-{args.max_length}.{args.suffix}"
    if file.exists():
        return file
    made = texts(args.characters, some_short=args.max_length is not None)
    rows = (row_of(args.form, i, *pair) for i, pair in enumerate(islice(made, args.rows)))
    if args.suffix == "jsonl":
        with open(file, "w") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)
    else:
        writer = None
        for part in iter(lambda: list(islice(rows, 10_000)), []):
            table = pa.Table.from_pylist(part)
            writer = writer or pq.ParquetWriter(file, table.schema)
            writer.write_table(table)
        writer.close()
    return file


def make_model(folder: Path) -> None:
    """A tiny Qwen2 with a byte-level BPE of 4,000 tokens."""
    bpe = ByteLevelBPETokenizer()
    sample = [text for pair in islice(texts(2_000), 500) for text in pair]
    bpe.train_from_iterator(sample, 4_000, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=CHATML
    )
    tokenizer.save_pretrained(folder)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=2**16, **sizes)
    config.eos_token_id = tokenizer.eos_token_id
    Qwen2ForCausalLM(config).save_pretrained(folder)


def flags_of(args: Args, file: Path, model: Path) -> list[str]:
    limit = args.max_length or 64 + args.characters
    run = [
        "--model",
        model,
        "--train-files",
        file,
        "--total-training-steps",
        1,
        "--default-local-dir",
        args.out / "runs",
    ]
    run += ["--save-freq", -1, "--train-batch-size", 4]
    if args.form != "rl":
        return [*run, "--max-length", limit, *["--filter-overlong"] * bool(args.max_length)]
    run += ["--engine", "hf", "--rollout-n", 2, "--max-prompt-length", limit, "--max-response-length", 8]
    run += ["--no-val-before-train", "--test-freq", -1]
    return [*run, *["--filter-overlong-prompts"] * bool(args.max_length)]


def usage(pid: int) -> tuple[float, float]:
    """Peak GiB of memory and seconds of CPU of a process until now."""
    [peak] = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM")]
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(peak.split()[1]) / 2**20, (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def main(args: Args) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    file, model = write(args), args.out / "model"
    if not model.exists():
        make_model(model)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    command += [SCRIPTS[args.form], *flags_of(args, file, model)]
    shutil.rmtree(args.out / "runs", ignore_errors=True)  # another run would be continued
    place, start, seen = args.repository, time.monotonic(), {}
    process = subprocess.Popen([*map(str, command)], cwd=place, env=os.environ | {"PYTHONPATH": str(place)})
    while process.poll() is None:
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            try:
                seen[pid] = usage(int(pid))
            except (OSError, ValueError):  # it has ended
                continue
        if any(peak > args.max_gib for peak, _ in seen.values()):
            process.terminate()
            print(f"a rank took more than {args.max_gib} GiB")
            break
        time.sleep(0.1)
    process.wait()
    print(f"file {file.name}: {file.stat().st_size / 1e9:.3f} GB, {args.rows} rows; exit code {process.returncode}")
    for peak, seconds in seen.values():
        print(f"rank: peak {peak:.2f} GiB, {seconds:.0f} CPU seconds")
    print(f"wall: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

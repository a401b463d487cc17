"""What a step of a script computes, from its flags: how many tokens are sampled, and which passes of which models."""

import json
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from extras.plan.memory import Model
from extras.plan.seconds import Lengths
from extras.plan.ways import is_of_rewards, models_of
from rl.flags import flat

LOOKED_AT = 128  # rows of the data whose lengths are measured


class Phase(NamedTuple):
    """Passes of one model over the rows of a step."""

    name: str  # of the phase, as timing_s/ in the metrics has it
    model: Model
    learns: bool = False  # forward and backward passes, and steps of AdamW. Otherwise there are forward passes only.
    times: int = 1  # passes over the rows
    updates: int = 1  # into which these are divided, each with a step of AdamW
    prompt: float | None = None  # mean tokens of a prompt, if it is another one than that which is answered


class Work(NamedTuple):
    """A step of a script."""

    prompts: int  # that are answered, or 0 if nothing is sampled
    answers: int  # to each of them
    rows: int  # sequences that are learned from
    same_prompt: int  # of these, this many have the same prompt, which is computed once
    lengths: Lengths
    phases: tuple[Phase, ...]
    assumed: tuple[str, ...]  # in sentences
    steps: int | None  # of the run. None means that it is not known.
    questions: int  # held-out prompts that an evaluation answers
    evaluations: int


def work_of(args: Any, response_length: float | None) -> Work:
    """The work of a step, from Args of any script. Data files and the tokenizer are looked at where they are there."""
    v = flat(args)
    samples = "max_response_length" in v and not v.get("offline")
    data = look_at(args, v)
    lengths, notes = (_sampled if samples else _given)(v, data, response_length)
    assumed = [*data.notes, *notes]
    prompts, answers, rows, same = _counts(args, v, samples)
    if samples and v["engine"] != "vllm":
        assumed.append(f"responses are sampled as fast as by vllm; --engine {v['engine']} is many times slower")
    if v.get("environment") or v.get("tools"):
        assumed.append("tools and environments answer at once")
    if v.get("filter_groups"):
        assumed.append("no group of responses is dropped by --filter-groups")
    taken = prompts if "prm_lr" in v else v["train_batch_size"]
    steps = v.get("total_training_steps") or (data.rows and v.get("total_epochs", 1) * (data.rows // taken) or None)
    if steps is None:
        assumed.append("how many steps there are is not known without --train-files; --total-training-steps says it")
    questions = (data.held_out or 0) * v.get("val_n", 1) if samples else 0
    every, evaluates_first = v.get("test_freq", -1), bool(v.get("val_before_train"))
    evaluations = 0
    if steps and questions:
        evaluations = (math.ceil(steps / every) if every > 0 else 0) + evaluates_first
    if samples and (every > 0 or evaluates_first) and data.held_out is None:
        assumed.append(f"--val-files {' '.join(v['val_files'])} cannot be read, so no evaluation is counted")
    hinted = data.hinted
    if v.get("hint_from") == "group":
        hinted = lengths.prompt + lengths.response
        assumed.append("every response has another one as its hint, which is as long as the mean")
    if "hint_key" in v and hinted is None:
        hinted = float(v["max_hinted_prompt_length"])
        assumed.append(f"every prompt with its hint has --max-hinted-prompt-length {hinted:g} tokens")
    phases = tuple(_phases(args, v, hinted))
    return Work(prompts, answers, rows, same, lengths, phases, tuple(assumed), steps, questions, evaluations)


def _sampled(v: dict[str, Any], data: "Data", response_length: float | None) -> tuple[Lengths, list[str]]:
    """Lengths where responses are sampled, and what is assumed about them."""
    limit, prompt, assumed = v["max_response_length"], data.prompt, []
    if prompt is None:
        prompt = v["max_prompt_length"]
        assumed.append(f"every prompt has --max-prompt-length {prompt} tokens")
    if response_length is not None and not 1 <= response_length <= limit:
        raise ValueError(
            f"--plan-response-length {response_length:g} must be between 1 and --max-response-length {limit}"
        )
    if response_length is None:
        assumed.append(
            f"every response runs to --max-response-length {limit}; --plan-response-length gives the mean if you "
            "know it, and the run is faster then"
        )
    return Lengths(float(prompt), float(response_length or limit), limit), assumed


def _given(v: dict[str, Any], data: "Data", response_length: float | None) -> tuple[Lengths, list[str]]:
    """Lengths where the data has the responses, and what is assumed about them."""
    if response_length is not None:
        raise ValueError(
            f"--plan-response-length {response_length:g}: this run samples no responses; leave it out, since the "
            "lengths are those of the data"
        )
    if data.response is not None:
        answer, assumed = max(1, round(data.response)), []
    else:
        answer = v.get("max_length") or v["max_response_length"]
        assumed = [f"every row has {answer} tokens to learn"]
    return Lengths(data.prompt or 0.0, float(answer), answer), assumed


def _counts(args: Any, v: dict[str, Any], samples: bool) -> tuple[int, int, int, int]:
    """Prompts and responses to each that a step samples. Rows that it learns from, and how many share a prompt."""
    batch, n = v["train_batch_size"], v.get("rollout_n", 1)
    if not samples:
        rows = 2 if "pairs" in v or is_of_rewards(args) else 1
        return 0, 0, batch * rows, rows
    prompts = batch
    if round_size := v.get("gen_batch_size"):
        prompts = round_size if "prm_lr" in v else round_size * math.ceil(batch / round_size)
    answers = n + (v.get("adv_estimator") == "remax")
    if "pairs" in v:
        rows = {"best_worst": min(2, n), "all": n, "solution": 2 * n}[v["pairs"]]
        return prompts, answers, batch * rows, rows
    return prompts, answers, batch * n, n


def _phases(args: Any, v: dict[str, Any], hinted: float | None) -> list[Phase]:
    models = models_of(args)
    policy, critic, prm = (models.get(role) for role in ("policy", "critic", "prm"))
    if "ppo_epochs" not in v:
        return [Phase("update", policy, learns=True)]
    quarter = critic or "filter_groups" in v
    mini = v["ppo_mini_batch_size"] or (math.ceil(v["train_batch_size"] / 4) if quarter else v["train_batch_size"])
    epochs = v["ppo_epochs"]
    updates = epochs * math.ceil(v["train_batch_size"] / mini)
    old = updates > 1 and "pairs" not in v and hinted is None and v.get("proximal_policy", "recomputed") == "recomputed"
    if "gamma" in v and not critic:
        old = old or v["use_kl_in_reward"] or v["adv_estimator"] == "optimal_token_baseline"
    phases = [Phase("reward", models["judge"])] if "judge" in models else []
    phases += [Phase("values", critic)] if critic else []
    phases += [Phase("old_log_prob", policy)] if old else []
    phases += [Phase("ref", models[role]) for role in ("reference", "teacher") if role in models and hinted is None]
    phases += [Phase("prm", prm), Phase("prm", prm, learns=True)] if prm else []
    if hinted is not None:  # The policy itself, or another teacher, reads the prompts with hints as often as it learns.
        phases += [Phase("update_actor", models.get("teacher", policy), times=epochs, prompt=hinted)]
    learning = [critic, policy] if critic else [policy]
    return phases + [Phase("update_actor", model, learns=True, times=epochs, updates=updates) for model in learning]


# --- the data, as far as it can be read cheaply


class Data(NamedTuple):
    """What files of data say. None means that they say nothing."""

    rows: int | None  # of --train-files
    held_out: int | None  # of --val-files
    prompt: float | None  # mean tokens of a prompt
    response: float | None  # mean tokens of a given response
    notes: tuple[str, ...]
    hinted: float | None = None  # mean tokens of a prompt with its hint


def look_at(args: Any, v: dict[str, Any]) -> Data:
    """Rows and mean lengths. Only the first rows are tokenized, and a file that is not there is no error."""
    rows, held_out = count(v["train_files"]), count(v["val_files"])
    if rows is None:
        return Data(None, held_out, None, None, (f"--train-files {' '.join(v['train_files'])} cannot be read",))
    try:
        prompt, response, hinted = mean_lengths(args, v, first_rows(Path(v["train_files"][0])))
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Data(rows, held_out, None, None, (f"lengths of the data are not known ({reason})",))
    return Data(rows, held_out, prompt, response, (), hinted)


def count(files: tuple[str, ...]) -> int | None:
    """Rows of parquet and jsonl files, or None if one of them is not there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    total = 0
    for file in map(Path, files):
        if not file.is_file():
            return None
        if file.suffix == ".parquet":
            try:
                total += pq.ParquetFile(file).metadata.num_rows
            except pa.ArrowException:
                return None
        else:
            with file.open("rb") as lines:
                total += sum(1 for line in lines if line.strip())
    return total


def first_rows(file: Path) -> list[dict]:
    """The first rows of a parquet or jsonl file, as many as are looked at."""
    import pyarrow.parquet as pq

    if file.suffix == ".parquet":
        batches = pq.ParquetFile(file).iter_batches(LOOKED_AT)
        return next((batch.to_pylist() for batch in batches), [])
    with file.open() as lines:
        return [json.loads(line) for line, _ in zip(lines, range(LOOKED_AT), strict=False) if line.strip()]


def mean_lengths(args: Any, v: dict[str, Any], rows: list[dict]) -> tuple[float, float | None, float | None]:
    """Mean tokens of prompts, of responses that the data has, and of prompts with hints, of some rows. Raises as the
    readers of data do.
    """
    from extras.demonstrations import mean_tokens
    from extras.self_distillation import add_hints
    from rl.data.encode import encode_prompts
    from rl.data.rows import read_rows
    from rl.data.template import load_tokenizer

    if not rows or any(row.get("images") for row in rows):
        raise ValueError("rows with images are not measured" if rows else "there are no rows")
    tokenizer = load_tokenizer(v["model"], args.data)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if v.get("offline") or "ppo_epochs" not in v:
            return *mean_tokens(tokenizer, file, pairs=v.get("offline") or is_of_rewards(args)), None
        encoded = encode_prompts(tokenizer, read_rows([file]))
        lengths, hinted = [len(row["prompt_ids"]) for row in encoded], None
        if "hint_key" in v and v.get("hint_from") != "group":
            options = dict(max_length=v["max_hinted_prompt_length"], drops_overlong=True, partner=None)
            hinted = mean([len(row["hinted_ids"]) for row in add_hints(args.hints, encoded, tokenizer, **options)])
    return mean([x for x in lengths if x <= v["max_prompt_length"]] or lengths), None, hinted


def mean(numbers: list[int]) -> float:
    """Their mean, in tokens."""
    return sum(numbers) / len(numbers)

"""Turn responses into rewards with the user's `compute_score`."""

import importlib.util
import math
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence

from rl.types import Sample

ComputeScore = Callable[..., float | dict]


def load_reward_function(spec: str) -> ComputeScore:
    """`path/to/file.py:name` (name defaults to compute_score) -> the function. Raises ValueError if there is none.

    The signature is verl's: compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict
    with "score".
    """
    path, _, name = spec.partition(":")
    file, name = pathlib.Path(path), name or "compute_score"
    if not file.is_file():
        file = pathlib.Path(__file__).parent.parent / path  # relative to the repository, wherever the script started
    if not file.is_file():
        raise ValueError(f"--custom-reward-function {spec!r}: no file {path!r}; give path/to/file.py:function")
    module_spec = importlib.util.spec_from_file_location(f"reward_{file.stem}", file)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    module_spec.loader.exec_module(module)
    if not callable(vars(module).get(name)):
        raise ValueError(f"--custom-reward-function {spec!r}: {file} has no function {name!r}")
    return vars(module)[name]


def score_samples(
    compute_score: ComputeScore, samples: Sequence[Sample], texts: Sequence[str], rows: Sequence[dict]
) -> list[float | None]:
    """One reward per sample; `rows` is indexed by `sample.row_index`.

    None where the function raised or returned no finite number. A wrong answer is the function's business (0); None
    leaves the group statistics and the loss, and is counted. The first failure of a call is printed with its row.
    """
    scores: list[float | None] = []
    for sample, text in zip(samples, texts, strict=True):
        row = rows[sample.row_index]
        try:
            result = compute_score(row["data_source"], text, row["reward_model"]["ground_truth"], row.get("extra_info"))
            score = float(result["score"] if isinstance(result, dict) else result)
            problem = None if math.isfinite(score) else f"returned {score}"
        except Exception:  # a user's function may raise anything; one response must not end the run
            score, problem = math.nan, traceback.format_exc()
        if problem is not None and None not in scores:
            print(
                f"reward function failed on row {sample.row_index}: {problem}\nresponse: {text[-300:]!r}",
                file=sys.stderr,
                flush=True,
            )
        scores.append(None if problem is not None else score)
    return scores

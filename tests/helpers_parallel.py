"""Cases of tests/sequence_parallel/sliced_ranks.py, in which ranks that share the work stand beside one process."""

import json

import launch
import pytest

WORKER = launch.TESTS / "sequence_parallel" / "sliced_ranks.py"
FULL, SELECTIVE = ({"activation_checkpointing": x} for x in ("full", "selective"))


def measure(cases: dict[int, dict]) -> dict[tuple[int, str], dict]:
    """What sliced_ranks.py has found for each number of ranks and name of a case."""
    found = {}
    for ranks, changes in cases.items():
        output = launch.run_file(WORKER, json.dumps(changes), nproc=ranks)
        found |= {(ranks, line["case"]): line for line in launch.objects(output, "case")}
    return found


def names(cases: dict[int, dict]) -> list[tuple[int, str]]:
    """Number of ranks and name of each case."""
    return [(ranks, name) for ranks, changes in cases.items() for name in changes]


def assert_as_one_process(found: dict) -> None:
    """The numbers of a case are those of one process."""
    assert found["logp"] < 1e-5 and found["entropy"] < 1e-5
    assert found["gradients"] < 1e-6  # the norm of all differences by that of all gradients
    assert found["loss"] == pytest.approx(0, abs=1e-6)
    assert found["norm"] == pytest.approx(1, abs=1e-6)  # before clipping

"""benchmarks/slices.py on two CPU ranks: its lines say what was computed."""

import launch
import pytest
from transformers import AutoModelForCausalLM

from benchmarks import make_model, slices
from extras.plan.memory import GIB, TOGETHER, WITHOUT_ENGINE

LENGTH, LAYERS, ROWS = 48, 1, 3
FLAGS = f"--shape tiny --layers {LAYERS} --degrees 1 2 --lengths {LENGTH} --rows {ROWS} --steps 1"


def measure(program, what, folder):
    """The lines of a measurement."""
    flags = [*FLAGS.split(), "--measure", *what, "--out", folder / "lines.jsonl"]
    lines = launch.objects(launch.run_file(program, *flags, nproc=2), "measure")
    assert lines == launch.objects((folder / "lines.jsonl").read_text(), "measure")
    return lines


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The lines of updates at degree 1 and 2, with layers that are compiled."""
    return measure(
        "tests/sequence_parallel/measured.py", ("step", "share", "graphs"), tmp_path_factory.mktemp("updates")
    )


def of(lines, measure, **values):
    """The only line of this measurement with these values."""
    [line] = [x for x in lines if x["measure"] == measure and values.items() <= x.items()]
    return line


def test_agreement_is_rounding(tmp_path):
    lines = measure("benchmarks/slices.py", ["agreement"], tmp_path)
    exact = of(lines, "agreement", precision="float32", degree=2)
    assert exact["beside_float32"] == exact["beside_degree_1"]
    assert exact["beside_degree_1"]["logp_max"] < 1e-5 and 0 < exact["beside_degree_1"]["gradients"] < 1e-6
    alone = of(lines, "agreement", precision="bfloat16", degree=1, order="as given")
    assert set(alone["beside_degree_1"].values()) == {0}
    assert 1e-4 < alone["beside_float32"]["logp_mean"] < alone["beside_float32"]["logp_max"] < 0.1
    assert 1e-3 < alone["beside_float32"]["gradients"] < 0.1
    for order, degree in {"backwards": 1, "as given": 2}.items():
        line = of(lines, "agreement", precision="bfloat16", degree=degree, order=order)
        assert line["beside_float32"] == pytest.approx(alone["beside_float32"], rel=0.3)
        assert 0 < line["beside_degree_1"]["gradients"] < alone["beside_float32"]["gradients"]


@pytest.mark.thorough
@pytest.mark.parametrize("degree", [1, 2])
def test_a_step_has_its_tokens_and_what_was_planned(lines, degree):
    line = of(lines, "step", degree=degree)
    assert line["tokens"] == ROWS * LENGTH and line["micro_batches"] == 1
    assert line["tokens_per_s"] * line["seconds"] == pytest.approx(ROWS * LENGTH)
    assert line["tokens_per_s_per_gpu"] == pytest.approx(line["tokens_per_s"] / 2)
    assert line["all_seconds"] == [line["seconds"]] and 0 < line["planned_seconds"] < 1
    shape, options = slices.TINY_SHAPES["tiny"]
    model = AutoModelForCausalLM.from_config(make_model.config_of(shape, LAYERS, **options))
    parameters = sum(x.numel() for x in model.parameters())
    # Two ranks share the weights in float32, their gradients, and two moments of each.
    parts = line["planned_parts_gib"]
    assert parts["weights"] == parts["gradients"] == parts["AdamW"] / 2 == 4 * parameters / 2 / GIB
    assert line["planned_gib"] == pytest.approx(sum(parts.values()))
    assert parts["others"] == (TOGETHER - WITHOUT_ENGINE) / GIB
    assert line["used_gib"] == 0  # there is no GPU


@pytest.mark.thorough
def test_exchanges_are_counted(lines):
    """At degree 2 there are two of them in the forward pass of a layer, which is made twice, and two backward."""
    alone, sliced = (of(lines, "share", degree=degree) for degree in (1, 2))
    assert alone["calls"]["all-to-all"] == alone["all_to_all_share"] == 0
    assert sliced["calls"]["all-to-all"] == 6 * LAYERS
    assert 0 < sliced["least_share"] <= sliced["all_to_all_share"] < 1
    assert sliced["kernels"]["gloo:all_to_all"]["calls"] == 6 * LAYERS
    assert sliced["seconds_of"]["all-to-all"] < sliced["seconds"]
    # FSDP2 gathers the root and both layers, and the layers again in the backward pass.
    assert alone["calls"]["all-gather"] == sliced["calls"]["all-gather"] == 1 + 2 * LAYERS


@pytest.mark.thorough
@pytest.mark.parametrize("degree", [1, 2])
def test_graphs_are_compiled_once(lines, degree):
    line = of(lines, "graphs", degree=degree)
    assert line["graphs"]["the same"] == line["graphs"]["the same again"] == line["graphs"]["shorter"] > 0
    assert line["graphs"] == line["frames"] and set(line["breaks"].values()) == {0}


def test_degrees_that_cannot_be_measured(tmp_path):
    for degree, problem in {
        3: "--degrees 3 does not divide the 2 rank(s)",
        16: "does not divide the 2 rank(s)",
    }.items():
        log = tmp_path / f"{degree}.log"
        forked = launch.fork_file("benchmarks/slices.py", "--shape", "tiny", "--degrees", degree, log=log, nproc=2)
        assert forked.ends() == [1, 1] and problem in log.read_text()

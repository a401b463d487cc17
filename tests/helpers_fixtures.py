"""One engine of each kind for all tests of a file: to start vLLM takes as long as most of them together."""

import contextlib
from collections.abc import Iterator

import helpers_scripts as h
import launch
import pytest
from helpers_engines import without_shortcuts
from torch import nn

from extras.engines import hf
from rl.model.load import load_pretrained
from rl.model.sharding import shard
from rl.ranks import Ranks
from rl.sampling.engines import vllm
from rl.sampling.engines.base import Engine
from rl.sampling.engines.flags import EngineFlags

MAX_NUM_SEQS = 8  # fewer than most tests sample, so that engines have to queue
LONGEST = 320


@contextlib.contextmanager
def engine_of(kind: str, model: str, world: Ranks, longest: int = LONGEST) -> Iterator[Engine]:
    """An engine, "hf" or "vllm", that holds this model."""
    if kind == "vllm":
        h.needs_vllm()
        launch.look_at_classes_here()
    make = {"hf": hf.Engine, "vllm": vllm.Engine}[kind]
    engine = make(model, world, EngineFlags(max_num_seqs=MAX_NUM_SEQS), longest=longest)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def hf_engine(world, tiny_model) -> Iterator[Engine]:
    """The plain engine."""
    with engine_of("hf", tiny_model, world) as engine:
        yield engine


@pytest.fixture(scope="module")
def vllm_engine(world, tiny_model) -> Iterator[Engine]:
    """vLLM, with shortcuts."""
    with engine_of("vllm", tiny_model, world) as engine:
        yield engine


@pytest.fixture(params=["hf", "vllm"])
def engine(request) -> Engine:
    """An engine that other tests have used, so a test must push the weights it wants to see."""
    return request.getfixturevalue(f"{request.param}_engine")


@pytest.fixture(params=["hf", "vllm", pytest.param("vllm without shortcuts", marks=pytest.mark.thorough)])
def every_engine(request) -> Iterator[Engine]:
    """Also vLLM without the shortcuts, as on a version that nobody has tested them with; test_requests.py compares the
    responses of both.
    """
    engine = request.getfixturevalue(f"{request.param.split()[0]}_engine")
    with without_shortcuts(engine) if "without" in request.param else contextlib.nullcontext():
        yield engine


@pytest.fixture
def policy(tiny_model, world) -> nn.Module:
    """The policy of the tiny model, for a test to change."""
    return shard(load_pretrained(tiny_model, world), world)

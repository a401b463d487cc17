"""Flags of samplers that contradict each other or other flags of a run are refused before a model is looked for."""

import re

import pytest

import train_async
import train_grpo
from rl.flags import build
from rl.run.training import check

CONTRADICTIONS = [
    (dict(partial_rollouts=0.5), "--partial-rollouts 0.5 and --max-staleness exclude each other; leave the first out"),
    (
        dict(weights_dir="/tmp/weights", weights_transfer="gloo"),
        "--weights-dir /tmp/weights and --weights-transfer gloo exclude each other; leave one of them out",
    ),
    (
        dict(tensor_model_parallel_size=2, weights_transfer="nccl"),
        "--weights-transfer nccl: the 2 GPUs of a sampler read weights from the host; leave it out",
    ),
]


@pytest.mark.parametrize(("flags", "sentence"), CONTRADICTIONS)
def test_flags_that_contradict_samplers_are_refused(flags, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check(build(train_async.Args, model="no/model of this name", **flags))


@pytest.mark.parametrize(
    "flags",
    [
        dict(weights_dir="/tmp/weights"),
        dict(weights_transfer="gloo"),
        dict(tensor_model_parallel_size=1, weights_transfer="nccl", partial_rollouts=0.0),
        dict(tensor_model_parallel_size=2),
        dict(tensor_model_parallel_size=2, router_replay=True),
    ],
)
def test_flags_that_samplers_have_pass(flags):
    """What is refused then is the model."""
    with pytest.raises(ValueError, match="no/model of this name"):
        check(build(train_async.Args, model="no/model of this name", **flags))


def test_a_script_without_samplers_is_not_asked():
    flags = dict(tensor_model_parallel_size=2, partial_rollouts=0.5, rollout_is="token")
    with pytest.raises(ValueError, match="no/model of this name"):
        check(build(train_grpo.Args, model="no/model of this name", **flags))

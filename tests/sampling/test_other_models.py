"""vLLM with models that are not Qwen2: run by classes of transformers, with buffers, with other names than ours."""

from importlib.util import find_spec

import helpers_families as families
import helpers_scripts as h
import launch
import pytest
import torch

from rl.data.types import Sampling
from rl.model import load as models
from rl.sampling.engines import vllm
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.groups import sample_groups
from rl.sampling.verify import check_engine

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


def gap(policy, engine, world, pushed=True):
    """Between what vLLM said of its tokens and what the policy says."""
    if pushed:
        engine.update_weights(models.weights_for_engine(policy, world))
    sampling = Sampling(n=2, temperature=1.0, max_tokens=20)
    rows = [dict(row_index=i, prompt_ids=[5 + i, 6, 7]) for i in range(2)]
    samples = sample_groups(engine, rows, sampling, seed=1, on_group=lambda *_: None)
    return check_engine(policy, samples, sampling, EngineFlags(max_logprob_gap=100.0), world, num_probe=4)


# tests/model/test_families.py pushes constants to the plain engine, by the same names.
KINDS = h.some(["Olmo2Config", "ApertusConfig", "Qwen3MoeConfig"], "Olmo2Config", "Qwen3MoeConfig")


@pytest.mark.parametrize("kind", KINDS)
def test_engine_holds_the_weights_of(kind, world, tmp_path, monkeypatch):
    """OLMo 2 runs in vLLM by the class of transformers that our policy is made of; Apertus has constants as buffers; on
    a CPU vLLM packs experts.
    """
    sizes = families.SIZES | dict(hidden_size=128)
    if kind == "Qwen3MoeConfig":
        sizes |= families.EXPERTS | dict(head_dim=32, moe_intermediate_size=64)
    monkeypatch.setitem(families.FAMILIES, kind, (kind, sizes, families.PACKED))
    folder = families.save(kind, tmp_path)
    before = families.load(folder, world)
    launch.look_at_classes_here()
    engine = vllm.Engine(folder, world, EngineFlags(max_num_seqs=8), longest=64)
    after = families.load(folder, world)  # such as a reference
    with torch.no_grad():
        for x in after.parameters():
            x.mul_(1.1)
        for _, x in models.buffers_in_files(after):
            x.mul_(2)
    limit = 0.02 if kind == "ApertusConfig" else 1e-5  # vLLM keeps Apertus' constants in bfloat16, whatever it runs in
    assert gap(after, engine, world) < limit and gap(before, engine, world) < limit
    assert gap(after, engine, world) < limit
    for expert in range(6 if kind == "Qwen3MoeConfig" else 0):  # each reaches the engine
        with torch.no_grad():
            for name, x in after.named_parameters():
                if name.endswith((".gate_up_proj", ".down_proj")):
                    x.to_local()[expert] *= -1.5
        assert gap(after, engine, world, pushed=False) > 100 * limit
        assert gap(after, engine, world) < limit
    engine.close()

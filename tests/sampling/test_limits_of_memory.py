"""The check of the engine has at most the tokens of a micro-batch, and vLLM takes what it can use."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers_data import versions_of

from rl.data.batching import collate
from rl.data.types import Sample, Sampling
from rl.model.load import load_model
from rl.model.logprobs import token_logprobs
from rl.sampling import verify
from rl.sampling.engines.flags import EngineFlags


def test_the_check_of_the_engine_has_a_pass_of_at_most_the_tokens_of_a_micro_batch(tiny_model, world, monkeypatch):
    """Log-probs of an engine that are 0.01 too high in the first ten sampled tokens, and 5 behind them."""
    policy, generator = load_model(tiny_model, world, longest=64), torch.Generator().manual_seed(0)
    samples, passes = [], []
    for i in range(4):
        ids = torch.randint(3, 80, (40,), generator=generator).tolist()
        samples.append(Sample(ids[:8], ids[8:], [1] * 32, [0.0] * 32, "stop", i, columns=versions_of(ids[:8], (2, 32))))
    batch = collate(samples)
    true = token_logprobs(policy, batch)[0].detach()
    off = torch.tensor([0.01] * 10 + [5.0] * 22)
    samples = [replace(s, rollout_logprobs=(true[i, 8:] + off).numpy()) for i, s in enumerate(samples)]

    def watched(model, batch, **options):
        passes.append(int(batch.lengths.sum()))
        return token_logprobs(model, batch, **options)

    monkeypatch.setattr(verify, "token_logprobs", watched)

    def gap(max_tokens, **options):
        policy.packed = replace(policy.packed, max_tokens=max_tokens)
        return verify.check_engine(policy, samples, Sampling(), EngineFlags(max_logprob_gap=99.0), world, **options)

    expected = (10 * 0.01 + 22 * 5) / 32
    assert gap(160) == pytest.approx(expected, rel=1e-4) and passes == [160]
    assert gap(159) == pytest.approx(expected, rel=1e-4) and passes[1:] == [120]
    assert gap(40, version=2) == pytest.approx(expected, rel=1e-4) and passes[2:] == [40]
    assert gap(160, num_probe=1) == pytest.approx(expected, rel=1e-4) and passes[3:] == [40]
    samples[:] = samples[:2]
    assert gap(79) == pytest.approx(expected, rel=1e-4) and passes[4:] == [40]
    samples.clear()
    assert gap(160) == 0 and passes[5:] == [2]  # nothing but the row of a rank without samples


def test_vllm_takes_no_more_memory_than_its_sequences_fill(monkeypatch):
    gpu_worker = pytest.importorskip("vllm.v1.worker.gpu_worker")
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from rl.sampling.engines.vllm_worker import Worker, most_cache

    layer = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    assert layer.page_size_bytes == 16 * 2 * 2 * 128 * 2  # keys and values
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=100),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
    )
    most = 4 * 7 * 28 * layer.page_size_bytes  # sequences and one more, blocks of 16 for 100 tokens, layers
    assert most_cache(dict.fromkeys(map(str, range(28)), layer), config) == most

    worker = object.__new__(Worker)
    worker.vllm_config, worker.model_runner = config, SimpleNamespace()
    worker.get_kv_cache_spec = lambda: {str(k): layer for k in range(28)}
    for room, taken in ((most + 1, most), (most - 1, most - 1)):
        monkeypatch.setattr(gpu_worker.Worker, "determine_available_memory", lambda self, room=room: room)
        assert worker.determine_available_memory() == taken
        assert worker.model_runner.profile_cudagraph_memory() == 2**30  # of CUDA graphs, without capturing any


@pytest.mark.parametrize("free, sleeps, woken", [(101, True, True), (100, True, False), (101, False, False)])
def test_an_engine_that_is_closed_wakes_up_if_there_is_room(monkeypatch, free, sleeps, woken):
    pytest.importorskip("vllm")
    from rl.sampling.engines import vllm

    calls = []
    engine = object.__new__(vllm.Engine)
    engine.can_sleep, engine.memory = True, 100  # bytes that sleeping has given back
    core = SimpleNamespace(shutdown=lambda: calls.append("end"))
    llm_engine = SimpleNamespace(is_sleeping=lambda: sleeps, engine_core=core)
    engine.llm = SimpleNamespace(llm_engine=llm_engine, wake_up=lambda: calls.append("wake up"))
    monkeypatch.setattr(vllm, "final_barrier", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 1000))
    engine.close()
    assert calls == ["wake up"] * woken + ["end"]

"""vLLM's schedulers with the shortcuts of vllm_scheduler.py decide as without, in every decoding step.

No model runs: the next token of a sequence is a number that depends on the sequence and the position.
"""

import importlib.util
from collections import deque
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers_engines import drop_shortcuts

from rl.data.types import Completion
from rl.sampling.engines.vllm_scheduler import take_shortcuts

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

BLOCK, MAX_NUM_SEQS, BUDGET = 16, 6, 64
KINDS = ["in turn", "running ahead", "running ahead, new runner"]
# Tokens of the prompt and limit of the response, many at the borders of blocks of the cache.
LENGTHS = [(5, 40), (60, 20), (16, 1), (15, 33), (17, 31), (31, 2), (32, 64), (33, 100), (1, 15), (1, 16), (100, 60)]
LENGTHS += [(48, 17)] + [(1 + 13 * i % 50, 1 + 37 * i % 90) for i in range(40)]
REQUESTS = {f"r{i}": lengths for i, lengths in enumerate(LENGTHS)}


def next_token(name, position):
    """Whichever of 101 tokens; one in 101 ends the response."""
    return (hash(int(name[1:]) * 7919 + position) * 2654435761 >> 7) % 101


def ends_of(name):
    """Tokens that end a response: of every third one three more than of the others."""
    return {7, 20, 21, 22} if int(name[1:]) % 3 == 0 else {7}


def expected(name):
    prompt, limit = REQUESTS[name]
    ids = []
    while len(ids) < limit and not ends_of(name) & set(ids):
        ids.append(next_token(name, prompt + len(ids)))
    return ids, [-float(prompt + i) for i in range(len(ids))]


@pytest.fixture(scope="module")
def config(tiny_model):
    from vllm.engine.arg_utils import EngineArgs

    limits = dict(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET, max_model_len=256)
    return EngineArgs(tiny_model, skip_tokenizer_init=True, dtype="float32", **limits).create_engine_config()


def make_scheduler(config, kind, num_blocks):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    ahead = kind != "in turn"
    config.scheduler_config.async_scheduling = ahead
    config.cache_config.num_gpu_blocks, config.cache_config.block_size = num_blocks, BLOCK
    layer = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)])
    scheduler = (AsyncScheduler if ahead else Scheduler)(
        config, cache, StructuredOutputManager(config), block_size=BLOCK, hash_block_size=BLOCK
    )
    scheduler.use_v2_model_runner = kind.endswith("new runner")
    return scheduler


def run_model(counts, computed, known):
    """What a model returns for these counts of tokens, after those computed before; `known` tokens get one longer."""
    from vllm.v1.outputs import ModelRunnerOutput

    sampled, logprobs = [], []
    for name, count in counts.items():
        position = computed[name] + count
        sampled.append([next_token(name, position)] if position == known[name] else [])
        known[name] += len(sampled[-1])
        logprobs.append(-float(position))
    output = ModelRunnerOutput(list(counts), {name: i for i, name in enumerate(counts)}, sampled)
    output.logprobs = SimpleNamespace(logprobs=np.array(logprobs)[:, None]) if logprobs else None
    return output


def drive(scheduler, *, shortcuts, pushes=()):
    """Run all REQUESTS to their ends. Returns the decisions of every step, and (ids, log-probs) by name.

    Before the steps `pushes` the cache is dropped, as after a push of weights, and tokens on their way with it.
    """
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    responses = {name: Completion(None) for name in REQUESTS}
    take_shortcuts(scheduler, responses if shortcuts else {})
    if not shortcuts:
        vars(scheduler).pop("schedule")  # and update_from_output passes on what it does not expect
    hasher = get_request_block_hasher(BLOCK, sha256)
    for name, (length, limit) in REQUESTS.items():
        params = SamplingParams(max_tokens=limit, stop_token_ids=list(ends_of(name)), logprobs=0)
        prompt = [int(name[1:]) // 2] + [3] * (length - 1)  # each shares what it can with one other
        scheduler.add_request(Request(name, prompt, params, None, block_hasher=hasher))
    known = {name: length for name, (length, _) in REQUESTS.items()}  # tokens that there are, sampled ones included
    in_flight, steps, pushed = deque(), [], []
    for _ in range(2000):
        if len(steps) in pushes and len(steps) not in pushed:
            pushed.append(len(steps))
            assert scheduler.running and scheduler.reset_prefix_cache(reset_running_requests=True)
            known |= {name: len(request._all_token_ids) for name, request in scheduler.requests.items()}
        if scheduler.has_requests():
            scheduled = scheduler.schedule(False)
            computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
            cached = scheduled.scheduled_cached_reqs
            computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            in_flight.append((scheduled, run_model(scheduled.num_scheduled_tokens, computed, known)))
            steps.append(
                {
                    "tokens": dict(scheduled.num_scheduled_tokens),
                    "total": scheduled.total_num_scheduled_tokens,
                    "computed": computed,
                    "output": dict(zip(cached.req_ids, cached.num_output_tokens, strict=True)),
                    "blocks": {
                        name: None if new is None else len(new[0])
                        for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True)
                    },
                    "new": [new.req_id for new in scheduled.scheduled_new_reqs],
                    "finished": scheduled.finished_req_ids,
                    "prefilling": {request.request_id for request in scheduler._inflight_prefills},
                    "resent": set(cached.all_token_ids),
                    "usage": scheduler.kv_cache_manager.usage,
                    "reusable": len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block),
                }
            )
            if scheduler.scheduler_config.async_scheduling and len(in_flight) < 2 and scheduler.has_requests():
                continue
        elif not in_flight:
            break
        scheduled, output = in_flight.popleft()
        for result in scheduler.update_from_output(scheduled, output).values():
            for one in result.outputs:
                if one.new_token_ids:
                    responses[one.request_id].token_ids.extend(one.new_token_ids)
                    responses[one.request_id].logprobs.append(one.new_logprobs)
    assert not scheduler.has_requests() and not in_flight and pushed == list(pushes)
    return steps, {name: (x.token_ids, x.logprobs) for name, x in responses.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_what_vllm_alone_would_do(config, kind):
    """Many sequences, six at a time, prompts that take several steps, and room in the cache for all of them."""
    plain, plain_responses = drive(make_scheduler(config, kind, 200), shortcuts=False)
    ours, responses = drive(make_scheduler(config, kind, 200), shortcuts=True)
    assert responses == plain_responses == {name: expected(name) for name in REQUESTS}
    assert len(ours) == len(plain) > 250
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine == theirs


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_that_are_preempted_get_the_same_tokens(config, kind):
    scheduler = make_scheduler(config, kind, 16)  # one long sequence and a few short ones
    with mock.patch.object(scheduler, "_preempt_request", wraps=scheduler._preempt_request) as preempt:
        _, responses = drive(scheduler, shortcuts=True)
    assert len({call.args[0].request_id for call in preempt.call_args_list}) > 5
    assert responses == {name: expected(name) for name in REQUESTS}
    assert scheduler.kv_cache_manager.usage == 0


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_that_a_push_of_weights_throws_out_get_the_same_tokens(config, kind):
    scheduler = make_scheduler(config, kind, 200)
    with mock.patch.object(scheduler, "_preempt_request", wraps=scheduler._preempt_request) as preempt:
        _, responses = drive(scheduler, shortcuts=True, pushes=[9, 40, 41, 130])
    assert preempt.call_count > 12
    assert responses == {name: expected(name) for name in REQUESTS}
    assert scheduler.kv_cache_manager.usage == 0


def test_dropped_shortcuts_leave_vllms_own_methods(config):
    scheduler = make_scheduler(config, "in turn", 200)
    own = scheduler.schedule, scheduler.update_from_output
    take_shortcuts(scheduler, {})
    assert scheduler.schedule != own[0] and scheduler.update_from_output != own[1]
    drop_shortcuts(scheduler)
    assert (scheduler.schedule, scheduler.update_from_output) == own


def test_a_sequence_that_just_grows_does_not_reach_vllm(config):
    """But for its first and last token, 15 of 16 do not."""
    scheduler = make_scheduler(config, "running ahead", 200)
    update = scheduler._update_request_with_output
    with mock.patch.object(scheduler, "_update_request_with_output", wraps=update) as seen:
        _, responses = drive(scheduler, shortcuts=True)
    total = sum(len(ids) for ids, _ in responses.values())
    assert total > 300 and seen.call_count < 0.25 * total

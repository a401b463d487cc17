"""Shortcuts around vLLM's scheduler, for sequences that just get one token longer.

Seconds to sample 512 responses of 1,024 tokens, and of 360 on average (1.5B, one H200, vLLM 0.26). The experiment is in
benchmarks/results/README.md.

    LLMEngine.step, which makes objects of each token    17 to 22 (a slower host, where shortcuts took 9 to 10)
    vLLM's core read directly, as vllm.py does           10.8       6.0 to 6.5
    the same with shortcuts                               8.2       4.4

The scheduler's Python takes longer for every sequence of a step than the GPU. It is needed when a sequence begins or
ends, when it begins or fills a block of the cache, and for one that was preempted. In 15 of 16 steps, a sequence just
gets one token longer, and that is written down here. Two methods of a live scheduler are replaced, in TESTED versions.
"""

import math
from types import SimpleNamespace
from typing import Any

from rl.data.types import Completion

TESTED = ("0.26.", "0.28.", "0.32.", "0.33.")  # of vLLM. tests/sampling/test_shortcuts.py has run on these


def take_shortcuts(scheduler: Any, in_flight: dict[str, Completion]) -> None:
    """Let sequences of `in_flight`, by vLLM's name, bypass the scheduler where they just get one token longer.

    Their tokens and log-probs are put there directly. Other tokens pass as ever, with a number as `new_logprobs`.
    """
    schedule, update_from_output, requests = scheduler.schedule, scheduler.update_from_output, scheduler.requests
    block_size = math.gcd(*(group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups))
    ahead = int(scheduler.scheduler_config.async_scheduling)  # whether steps are scheduled before the last one ends
    # Limits on what a step takes in. From 0.31 on, vLLM asks max_num_active_reqs before it lets a request begin.
    limits = ["max_num_scheduled_tokens", "max_num_running_reqs", "max_num_active_reqs"]
    limits = [name for name in limits if hasattr(scheduler, name)]

    def shrink(by: int) -> None:
        for name in limits:
            setattr(scheduler, name, getattr(scheduler, name) - by)

    def schedule_others(*args: Any) -> Any:
        plain, others = [], []
        for request in scheduler.running:
            # `unknown` is the number of tokens that are being sampled, which is 0 unless steps are scheduled ahead
            position, unknown = request.num_computed_tokens, request.num_output_placeholders
            is_plain = (
                0 < position % block_size < block_size - 1 + ahead  # ahead, a full block is noted when the next begins
                and position + 1 == len(request._all_token_ids) + unknown  # one token to compute, which is sampled
                and position + 2 - unknown < request.num_prompt_tokens + request.max_tokens  # and not the last one
                and not request.is_prefill_chunk
                and not request.num_preemptions
            )
            (plain if is_plain else others).append(request)

        scheduler.running = others  # vLLM sees these only, and that much less room for new ones
        shrink(len(plain))
        scheduled = schedule(*args)
        scheduler.running = plain + scheduler.running
        shrink(-len(plain))

        names, cached = [request.request_id for request in plain], scheduled.scheduled_cached_reqs
        cached.req_ids += names
        cached.new_block_ids += [None] * len(plain)
        cached.num_computed_tokens += [request.num_computed_tokens for request in plain]
        cached.num_output_tokens += [len(r._output_token_ids) + r.num_output_placeholders for r in plain]
        scheduled.num_scheduled_tokens |= dict.fromkeys(names, 1)
        scheduled.total_num_scheduled_tokens += len(plain)
        scheduler.prev_step_scheduled_req_ids.update(names)
        for request in plain:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += ahead
        return scheduled

    def update_others(scheduled: Any, output: Any) -> Any:
        # Numbers instead of vLLM's LogprobsLists, which makes three arrays for every token. All requests ask for them.
        logprobs: list[float] = [] if output.logprobs is None else output.logprobs.logprobs[:, 0].tolist()
        output.logprobs = output.logprobs and SimpleNamespace(slice_request=lambda sequence, _: logprobs[sequence])
        others = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            others[name] = count
            request, known = requests.get(name), in_flight.get(name)
            if request is None or request.num_preemptions or known is None or not known.token_ids:
                continue
            index, length = output.req_id_to_index[name], len(request._all_token_ids) + 1
            if (
                length % block_size
                and length < request.num_prompt_tokens + request.max_tokens
                and (token_id := output.sampled_token_ids[index][0]) not in request.sampling_params.all_stop_token_ids
            ):
                request._all_token_ids.append(token_id)
                request._output_token_ids.append(token_id)
                request.num_in_flight_tokens -= 1
                request.num_output_placeholders -= ahead
                known.token_ids.append(token_id)
                known.logprobs.append(logprobs[index])
                del others[name]
        scheduled.num_scheduled_tokens = others
        return update_from_output(scheduled, output)

    scheduler.schedule, scheduler.update_from_output = schedule_others, update_others

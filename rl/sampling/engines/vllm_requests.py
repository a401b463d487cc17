"""Requests in flight in vLLM: everything this package knows about its inside, to sample without most of its Python.

Seconds to sample 512 responses of 1,024 tokens, and of 360 on average (1.5B, one H200, vLLM 0.26; docs/log.md):

    LLMEngine.step, vLLM's own way to hand out tokens    17 to 20
    Requests, which reads vLLM's core                    10.8       6.0 to 6.5
    Shortcuts, which also leaves the scheduler out        8.2       4.4

`Shortcuts` replaces two methods of a live scheduler. So only versions have it on which its contract test has run
(tests/sampling/test_shortcuts.py); others have `Requests`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

TESTED = ("0.26.", "0.28.", "0.32.")  # beginnings of vLLM's versions on which the contract test has run


class Growing(NamedTuple):
    """A response that is being sampled."""

    token_ids: list[int]
    logprobs: list[float]
    ends: set[int]  # ids that end it


class Output(NamedTuple):
    """What a decoding step did for a response, by vLLM's name of the request."""

    name: str
    finish_reason: str | None  # None: it goes on


def connect(llm: Any, version: str) -> "Requests":
    """The fastest way to sample with a vllm.LLM of this version."""
    return Shortcuts(llm) if version.startswith(TESTED) else Requests(llm)


class Requests:
    """The requests of a vllm.LLM. `growing` has what is known of each response, until the caller takes it out."""

    def __init__(self, llm: Any):
        self.llm, self.core = llm, llm.llm_engine.engine_core
        self.scheduler = self.core.engine_core.scheduler
        self.growing: dict[str, Growing] = {}

    def add(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[str]:
        """Take requests, prompts as token ids and a SamplingParams for each; returns their names."""
        names = self.llm.enqueue([{"prompt_token_ids": list(x)} for x in prompts], list(params), use_tqdm=False)
        # What is aborted is the interest of vLLM's own loop over the outputs; the core goes on with the requests.
        self.llm.llm_engine.output_processor.abort_requests(names, internal=True)
        for name in names:
            self.growing[name] = Growing([], [], self.scheduler.requests[name].sampling_params.all_stop_token_ids)
        return names

    def step(self) -> list[Output]:
        """Sample about one more token for each; returns the responses that vLLM's scheduler has looked at."""
        found, outputs = [], self.core.get_output()
        if (stats := self.llm.llm_engine.logger_manager) is not None and outputs.scheduler_stats is not None:
            stats.record(outputs.scheduler_stats, None)
        for output in outputs.outputs:
            if (growing := self.growing.get(output.request_id)) is None:
                continue  # aborted, and its last token was on the way
            if output.new_token_ids:
                growing.token_ids.extend(output.new_token_ids)
                growing.logprobs.append(self._logprob(output.new_logprobs))
            reason = None if output.finish_reason is None else str(output.finish_reason)
            found.append(Output(output.request_id, reason))
        return found

    def _logprob(self, found: Any) -> float:
        """The log-prob of the one new token, from what vLLM says of it."""
        return float(found.logprobs[0, 0])

    def has_requests(self) -> bool:
        """Whether vLLM has anything left to do."""
        return self.scheduler.has_requests()

    def begun(self) -> set[str]:
        """Names of the requests that have a token."""
        return {name for name, growing in self.growing.items() if growing.token_ids}

    def abort(self, names: Sequence[str]) -> None:
        """Drop requests; what they have so far stays in `growing`."""
        self.core.abort_requests(list(names))


class Shortcuts(Requests):
    """Requests that only get one token longer in a decoding step do not pass through vLLM's scheduler, whose Python
    takes longer for every one of them than the GPU.

    The scheduler is needed when a sequence begins or ends, when it begins or fills a block of the cache, and for one
    that was preempted. In 15 of 16 steps a sequence just gets one token longer, and that is written down here.
    """

    def __init__(self, llm: Any):
        super().__init__(llm)
        self.growing = take_shortcuts(self.scheduler)

    def _logprob(self, found: float) -> float:
        return found  # see _Logprobs


def take_shortcuts(scheduler: Any) -> dict[str, Growing]:
    """Let sequences that only get one token longer bypass the scheduler, see `Shortcuts`.

    Returns where these tokens go, by vLLM's name of the request; it is empty, and the caller fills it.
    """
    schedule, update_from_output, requests = scheduler.schedule, scheduler.update_from_output, scheduler.requests
    block_size = math.gcd(*(group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups))
    ahead = int(scheduler.scheduler_config.async_scheduling)  # whether steps are scheduled before the last one ends
    # Limits on what a step takes in. From 0.31 on, vLLM asks max_num_active_reqs before it lets a request begin.
    limits = ["max_num_scheduled_tokens", "max_num_running_reqs", "max_num_active_reqs"]
    limits = [name for name in limits if hasattr(scheduler, name)]
    every: dict[str, Growing] = {}

    def shrink(by: int) -> None:
        for name in limits:
            setattr(scheduler, name, getattr(scheduler, name) - by)

    def schedule_others(*args: Any) -> Any:
        plain, others = [], []
        for request in scheduler.running:
            # in_flight: tokens that are being sampled and not known yet, none unless steps are scheduled ahead
            position, in_flight = request.num_computed_tokens, request.num_output_placeholders
            is_plain = (
                0 < position % block_size < block_size - 1 + ahead  # ahead, a full block is noted when the next begins
                and position + 1 == len(request._all_token_ids) + in_flight  # one token to compute, which is sampled
                and position + 2 - in_flight < request.num_prompt_tokens + request.max_tokens  # and not the last one
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
        if output.logprobs is not None:  # (sequences, 1): of the sampled tokens
            output.logprobs = _Logprobs(output.logprobs.logprobs[:, 0].tolist())
        others = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            others[name] = count
            request, growing = requests.get(name), every.get(name)
            if request is None or request.num_preemptions or growing is None or not growing.token_ids:
                continue
            index, length = output.req_id_to_index[name], len(request._all_token_ids) + 1
            if (
                length % block_size
                and length < request.num_prompt_tokens + request.max_tokens
                and (token_id := output.sampled_token_ids[index][0]) not in growing.ends
            ):
                request._all_token_ids.append(token_id)
                request._output_token_ids.append(token_id)
                request.num_in_flight_tokens -= 1
                request.num_output_placeholders -= ahead
                growing.token_ids.append(token_id)
                growing.logprobs.append(output.logprobs.of_sampled[index])
                del others[name]
        scheduled.num_scheduled_tokens = others
        return update_from_output(scheduled, output)

    scheduler.schedule, scheduler.update_from_output = schedule_others, update_others
    return every


def drop_shortcuts(scheduler: Any) -> None:
    """Give vLLM its own methods back, for measuring it alone."""
    del scheduler.schedule, scheduler.update_from_output


class _Logprobs(NamedTuple):
    """In place of vLLM's LogprobsLists, which makes three arrays for every token; here `new_logprobs` is the number."""

    of_sampled: list[float]

    def slice_request(self, sequence: int, num_tokens: int) -> float:
        """The log-prob of the one token that a sequence has got in this step."""
        return self.of_sampled[sequence]

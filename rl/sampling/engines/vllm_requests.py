"""Requests in flight in vLLM, read from its core: tokens and log-probs of every decoding step.

`LLM.generate` and `LLMEngine.step` turn each token of each sequence into objects for their users, in Python, which
takes twice as long as the GPU: 17 to 21 s for 512 responses of 1,024 tokens in place of 9 to 10 (docs/log.md).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Growing(NamedTuple):
    """A response that is being sampled."""

    token_ids: list[int]
    logprobs: list[float]


class Output(NamedTuple):
    """What a decoding step did for a response, by vLLM's name of the request."""

    name: str
    finish_reason: str | None  # None: it goes on


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
        self.growing |= {name: Growing([], []) for name in names}
        return names

    def step(self) -> list[Output]:
        """Sample about one more token for each."""
        found, outputs = [], self.core.get_output()
        if (stats := self.llm.llm_engine.logger_manager) is not None and outputs.scheduler_stats is not None:
            stats.record(outputs.scheduler_stats, None)
        for output in outputs.outputs:
            if (growing := self.growing.get(output.request_id)) is None:
                continue  # aborted, and its last token was on the way
            if output.new_token_ids:
                growing.token_ids.extend(output.new_token_ids)
                growing.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())
            reason = None if output.finish_reason is None else str(output.finish_reason)
            found.append(Output(output.request_id, reason))
        return found

    def has_requests(self) -> bool:
        """Whether vLLM has anything left to do."""
        return self.scheduler.has_requests()

    def begun(self) -> set[str]:
        """Names of the requests that have a token."""
        return {name for name, growing in self.growing.items() if growing.token_ids}

    def abort(self, names: Sequence[str]) -> None:
        """Drop requests; what they have so far stays in `growing`."""
        self.core.abort_requests(list(names))

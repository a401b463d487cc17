"""Requests in flight in vLLM, by its own `LLMEngine.add_request` and `step`: tokens and log-probs as they come.

(Keeping sequences that only get one token longer out of vLLM's scheduler was tried: on an idle host a decoding step
took 8.0 ms in place of 8.1, see docs/log.md.)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Growing(NamedTuple):
    """A response that is being sampled."""

    token_ids: list[int]
    logprobs: list[float]


class Output(NamedTuple):
    """What a step says of a response, by vLLM's name of the request."""

    name: str
    finish_reason: str | None  # None: it goes on


class Requests:
    """The requests of a vllm.LLM. `growing` has what is known of each response, until the caller takes it out."""

    def __init__(self, llm: Any):
        self.engine, self.count = llm.llm_engine, 0
        self.growing: dict[str, Growing] = {}
        self.scheduler = self.engine.engine_core.engine_core.scheduler

    def add(self, prompts: Sequence[Sequence[int]], params: Sequence[Any], watched: Sequence[bool]) -> list[str]:
        """Take requests, prompts as token ids and a SamplingParams for each; returns their names.

        `watched`: whether the caller looks at a response after every token; else vLLM reports its end only.
        """
        from vllm.sampling_params import RequestOutputKind

        names = []
        for prompt, param, every_token in zip(prompts, params, watched, strict=True):
            names.append(f"glassrl-{self.count}")
            self.count += 1
            param = param.clone()
            param.output_kind = RequestOutputKind.DELTA if every_token else RequestOutputKind.FINAL_ONLY
            self.engine.add_request(names[-1], {"prompt_token_ids": list(prompt)}, param)
            self.growing[names[-1]] = Growing([], [])
        return names

    def step(self) -> list[Output]:
        """Sample about one more token for each; returns the responses that have ended or are watched."""
        found = []
        for output in self.engine.step():
            [part], growing = output.outputs, self.growing[output.request_id]
            growing.token_ids.extend(part.token_ids)
            growing.logprobs.extend(at[i].logprob for i, at in zip(part.token_ids, part.logprobs, strict=True))
            found.append(Output(output.request_id, part.finish_reason if output.finished else None))
        return found

    def has_requests(self) -> bool:
        """Whether vLLM has anything left to do. Its engine would also count what its core has dropped."""
        return self.scheduler.has_requests()

    def _states(self) -> dict[str, Any]:
        """What vLLM has so far, by our name of the request."""
        return {state.external_req_id: state for state in self.engine.output_processor.request_states.values()}

    def begun(self) -> set[str]:
        """Names of the requests that have a token."""
        return {name for name, state in self._states().items() if state.detokenizer.output_token_ids}

    def abort(self, names: Sequence[str]) -> None:
        """Drop requests; what they have so far stays in `growing`."""
        states = self._states()
        for name in names:
            if (state := states.get(name)) is not None and not self.growing[name].token_ids:
                ids, at = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
                self.growing[name].token_ids.extend(ids)
                self.growing[name].logprobs.extend(x[i].logprob for i, x in zip(ids, at, strict=True))
        self.engine.abort_request(list(names))

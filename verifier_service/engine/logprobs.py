"""Log probabilities of a request, read off a step's logits and handed out with its runs.

Knows rows of logits, nothing of a step's layout. Invariant: what goes out with a run is as
long as its ids, whatever part of a verified path joined the text; requests that do not ask cost
nothing.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from protos.generation import GenerationRequest, TokenLogprobs, TokenRun
from verifier_service.sampling.logprobs import token_logprobs
from verifier_service.sampling.walk import WalkEnd, WalkStart


class Report:
    """What one request wants to know, and what was found and not yet handed out."""

    def __init__(self, request: GenerationRequest) -> None:
        self._num_top = request.num_logprobs
        self._num_prompt_top = request.num_prompt_logprobs
        self._prompt_ids = request.prompt_ids
        self._has_output = bool(request.output_ids)
        self._said: list[TokenLogprobs] = []
        self._prompt: dict[int, TokenLogprobs] = {}

    @property
    def wants_prompt(self) -> bool:
        """True until the first token went out: every row of the prompt must give logits."""
        return self._num_prompt_top is not None and not self._has_output

    def read_prompt(self, logits: torch.Tensor, first_row: int, start: int, num_rows: int) -> None:
        """Rows of the prompt at positions [start, start + num_rows), each for the token after."""
        assert self._num_prompt_top is not None, "only what was asked for is read"
        end = min(start + num_rows, len(self._prompt_ids) - 1)
        rows = range(first_row, first_row + end - start)
        tokens = self._prompt_ids[start + 1 : end + 1]
        found = token_logprobs(logits, rows, tokens, self._num_prompt_top)
        self._prompt |= zip(range(start + 1, end + 1), found, strict=True)

    def read_path(self, logits: torch.Tensor, start: WalkStart, end: WalkEnd) -> None:
        """The choices of a walk."""
        if self._num_top is not None:
            rows = [start.first_row + node for node in (0, *end.nodes)][: len(end.choices)]
            self._said = token_logprobs(logits, rows, end.choices, self._num_top)

    def completing(self, emit: Callable[[TokenRun], None]) -> Callable[[TokenRun], None]:
        """`emit` for runs that do not hold what was found yet."""
        return lambda run: emit(self._completed(run))

    def _completed(self, run: TokenRun) -> TokenRun:
        said, prompt = self._said[: len(run.ids)], self._prompt
        self._said, self._prompt = [], {}
        self._has_output = self._has_output or bool(run.ids)
        whole = tuple(prompt[position] for position in sorted(prompt))
        return replace(run, logprobs=tuple(said), prompt_logprobs=whole)


def report_of(request: GenerationRequest) -> Report | None:
    """None for a request that asks for no log probabilities."""
    if request.num_logprobs is None and request.num_prompt_logprobs is None:
        return None
    return Report(request)

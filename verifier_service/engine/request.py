"""A request on its way: the caller's request, its committed ids, and where its KV lies.

Knows nothing of batches, drafts or the target. Invariant (law 6): everything that decides its next
token is a function of the request and its committed ids; the rest (slots, tallies) may be thrown
away and made again, which is what preemption does. There is no prefill phase and no decode phase:
computed_len chases known_len.

    tokens   prompt ............ | output ......... anchor |
             [ KV written        | to compute              |
             0 ........ computed_len ............. known_len
             [ cached |            found when it was admitted, in pages that others may share
    slots    [ usable as far as pages were granted, draft nodes behind the anchor ... ]
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from protos.generation import FinishReason, GenerationRequest, TokenRun
from verifier_service.engine.logprobs import report_of
from verifier_service.engine.prefix_cache import PageKeys
from verifier_service.engine.tally import Tally
from verifier_service.grammar.compiling import Grammars
from verifier_service.grammar.state import GrammarState
from verifier_service.sampling.history import History

Emit = Callable[[TokenRun], None]


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends a text at the level of tokens. max_context: prompt and output together."""

    max_context: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Cut:
    """How much of a run joins the text, and whether the text ends there."""

    num_committed: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class RunningRequest:
    """One accepted request, queued or running; changed by the engine's thread alone."""

    def __init__(
        self,
        key: int,
        request: GenerationRequest,
        ends: Ends,
        emit: Emit,
        arrived_s: float,
        grammars: Grammars | None = None,
    ) -> None:
        """arrived_s: on the clock that `is_late` is asked by. grammars: for a request with one;
        raises InvalidRequest when its output does not match it."""
        self.key = key
        self.request = request
        self.report = report_of(request)
        self.emit = emit if self.report is None else self.report.completing(emit)
        self.tokens = [*request.prompt_ids, *request.output_ids]
        self.computed_len = 0
        self._late_s = math.inf if request.timeout_s is None else arrived_s + request.timeout_s
        self.page_keys = PageKeys()
        self.tally = Tally(num_prompt=len(request.prompt_ids), waiting_since_s=arrived_s)
        self._max_len = min(ends.max_context, len(request.prompt_ids) + request.params.max_tokens)
        model_ends = frozenset[int]() if request.params.ignore_eos else ends.eos_token_ids
        self._stop_ids = model_ends | frozenset(request.params.stop_token_ids)
        self.grammar: GrammarState | None = None
        if request.options.grammar is not None and grammars is not None:
            num_prompt = len(request.prompt_ids)
            self.grammar = grammars.open(request.options.grammar, self.tokens, num_prompt)
        self.history = _history_of(request, self.tokens, ends, self.grammar)
        self._slots = torch.empty(0, dtype=torch.int64)
        self._num_slots = 0
        self._run_len = 0

    @property
    def known_len(self) -> int:
        """Committed tokens, anchor included: base_len of a draft."""
        return len(self.tokens)

    @property
    def extend_len(self) -> int:
        """Committed tokens whose KV is not written yet, at least 1."""
        return self.known_len - self.computed_len

    @property
    def wants_prompt_logits(self) -> bool:
        """True while every row of the prompt must be computed and give logits."""
        return self.report is not None and self.report.wants_prompt

    @property
    def is_decoding(self) -> bool:
        """True when only the anchor is left to compute.

        The last token of a prompt is no anchor, however much of the prompt came from a cache:
        what is drafted depends on the text alone.
        """
        return self.extend_len == 1 and self.num_output > 0

    @property
    def num_output(self) -> int:
        """Output tokens committed, those that the request arrived with included."""
        return self.known_len - len(self.request.prompt_ids)

    @property
    def max_len(self) -> int:
        """Tokens at which the text ends with `length`."""
        return self._max_len

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self._max_len - self.known_len

    @property
    def num_slots(self) -> int:
        """Slots granted so far."""
        return self._num_slots

    def is_late(self, now_s: float) -> bool:
        """True when the time that the request came with is over."""
        return now_s >= self._late_s

    def cut(self, choices: Sequence[int]) -> Cut:
        """Where a run of the target's tokens ends the text, if it does."""
        room = max(self.remaining, 0)
        for index, token in enumerate(choices[:room]):
            if token in self._stop_ids:
                return Cut(index + 1, FinishReason.STOP, token)
        if len(choices) >= room:
            return Cut(room, FinishReason.LENGTH)
        return Cut(len(choices))

    def arrived_finished(self) -> Cut | None:
        """The end that the committed output already holds, for a request that arrives with some."""
        output = self.request.output_ids
        if output and output[-1] in self._stop_ids:
            return Cut(0, FinishReason.STOP, output[-1])
        return Cut(0, FinishReason.LENGTH) if self.remaining <= 0 else None

    def grant(self, pages: Sequence[int], page_size: int) -> None:
        """Append the slots of these pages."""
        needed = self._num_slots + len(pages) * page_size
        if needed > self._slots.shape[0]:
            grown = torch.empty(max(needed, 2 * self._slots.shape[0]), dtype=torch.int64)
            grown[: self._num_slots] = self._slots[: self._num_slots]
            self._slots = grown
        for page in pages:
            first, end = page * page_size, self._num_slots + page_size
            self._slots[self._num_slots : end] = torch.arange(first, first + page_size)
            follows = self._num_slots == 0 or int(self._slots[self._num_slots - 1]) + 1 == first
            if follows and self._run_len == self._num_slots:
                self._run_len = end
            self._num_slots = end

    def withdraw(self, num_slots: int) -> None:
        """Keep only the first `num_slots` slots."""
        self._num_slots = min(self._num_slots, num_slots)
        self._run_len = min(self._run_len, self._num_slots)

    def slots(self, end: int) -> torch.Tensor:
        """Slots of rows [0, end): a view, valid until the next grant."""
        assert end <= self._num_slots, "rows need slots before they are run"
        return self._slots[:end]

    def first_slot(self, end: int) -> int | None:
        """The first slot when the first `end` are one ascending run, else None."""
        return int(self._slots[0]) if 0 < end <= self._run_len else None

    def restart(self) -> None:
        """Forget where KV lay: the state in which a request with committed output arrives."""
        self.computed_len = 0
        self.page_keys.num_published = 0
        self.withdraw(0)


def _history_of(
    request: GenerationRequest, tokens: Sequence[int], ends: Ends, grammar: GrammarState | None
) -> History | None:
    """What logit options look at; None for requests without any."""
    if request.options.changes_nothing:
        return None
    # min_tokens holds EOS back whether or not it would end the text, as in vLLM.
    end_ids = ends.eos_token_ids | frozenset(request.params.stop_token_ids)
    return History(request.options, tokens, len(request.prompt_ids), end_ids, grammar)

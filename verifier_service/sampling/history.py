"""What a request has said so far, as its logit options need it, at any node of its own tree.

Knows the committed ids (read from the live list), never logits. Invariant (law 6): everything here
is a function of the request and its committed ids, so a request that was preempted, or arrives with
output, gets the same counts; a node's counts are those of its own path.

Shapes: D distinct ids of prompt and output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from protos.options import LogitOptions


@dataclass(frozen=True, slots=True)
class Seen:
    """Distinct ids, int64 [D], and how often each stands in the output, float32 [D]."""

    ids: torch.Tensor
    counts: torch.Tensor


class GrammarMask(Protocol):
    """What a request's grammar allows, at any node of its own tree."""

    def allowed(self, path: Sequence[int]) -> torch.Tensor:
        """int32 [W], bit i % 32 of word i // 32 for id i, behind the committed ids and `path`."""


class History:
    """Committed ids of one request, counted; used by one thread.

    tokens: the live list of committed ids, prompt first; it only ever grows. end_ids: EOS and stop
    ids, masked until min_tokens. grammar: of requests that have one.
    """

    def __init__(
        self,
        options: LogitOptions,
        tokens: Sequence[int],
        num_prompt: int,
        end_ids: frozenset[int],
        grammar: GrammarMask | None = None,
    ) -> None:
        self.options = options
        self.grammar = grammar
        self.end_ids = tuple(sorted(end_ids))
        self.num_prompt = num_prompt
        self._tokens = tokens
        self._num_counted = 0
        self._place: dict[int, int] = {}
        self._ids: list[int] = []
        self._counts: list[float] = []
        self._seen: Seen | None = None

    def seen(self, path: Sequence[int]) -> Seen:
        """Ids of prompt, output and `path`, a node's own tokens behind the anchor."""
        whole = self._committed()
        if not path:
            return whole
        counts = whole.counts.clone()
        new: dict[int, float] = {}
        for token in path:
            place = self._place.get(token)
            if place is None:
                new[token] = new.get(token, 0.0) + 1.0
            else:
                counts[place] += 1.0
        if not new:
            return Seen(whole.ids, counts)
        ids = torch.cat([whole.ids, torch.tensor(list(new))])
        return Seen(ids, torch.cat([counts, torch.tensor(list(new.values()))]))

    def _committed(self) -> Seen:
        if self._seen is None or self._num_counted < len(self._tokens):
            for index in range(self._num_counted, len(self._tokens)):
                self._count(self._tokens[index], index >= self.num_prompt)
            self._num_counted = len(self._tokens)
            counts = torch.tensor(self._counts, dtype=torch.float32)
            self._seen = Seen(torch.tensor(self._ids, dtype=torch.int64), counts)
        return self._seen

    def _count(self, token: int, is_output: bool) -> None:
        place = self._place.setdefault(token, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token)
            self._counts.append(0.0)
        self._counts[place] += is_output


@dataclass(frozen=True, slots=True)
class Past:
    """What stands before one row: the request's history, and the node's path behind the anchor."""

    history: History
    path: tuple[int, ...] = ()

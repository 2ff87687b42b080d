"""Where one request's text stands in its grammar, at its committed end or at any node of its tree.

Knows a compiled grammar as a matcher that takes tokens and takes them back; knows no logits.
Invariant (law 6): what is allowed at a node is a function of the grammar, the committed output and
the node's own path. A matcher that failed is thrown away and made again from these; what fails then
as well is a fault of this request alone.

    committed output .......... | path of a node behind the anchor
    settled: never taken back   | ahead: taken back when the walk, or the text, goes elsewhere

EOS ids are no part of a text and never reach the matcher: they may follow where it accepts, and
behind one there is only another (a row behind the end is computed, and never read).

Shapes: W words of 32 ids each.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch

from protos.errors import InvalidRequest
from protos.tree import CandidateTree
from verifier_service.grammar.vocabulary import Vocabulary

_MAX_SAID: Final = 300


class Matcher(Protocol):
    """What is used of llguidance's LLMatcher, whose methods never raise but set an error."""

    def is_error(self) -> bool:
        """True once something failed, for good."""

    def get_error(self) -> str:
        """Why."""

    def is_accepting(self) -> bool:
        """True where the tokens taken are a matching text."""

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Take tokens up to the first that is forbidden; how many."""

    def rollback(self, num_tokens: int) -> bool:
        """Take back the last tokens; False when that failed."""

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        """Write a bit per id that may follow."""


def num_words(vocab_size: int) -> int:
    """Words of a mask over so many ids."""
    return (vocab_size + 31) // 32


class GrammarState:
    """One request's place in its grammar; used by one thread."""

    def __init__(
        self,
        make: Callable[[], Matcher],
        vocabulary: Vocabulary,
        tokens: Sequence[int],
        num_prompt: int,
    ) -> None:
        """make: a matcher that took nothing yet. tokens: the live list of committed ids, prompt
        first; it only ever grows. Raises InvalidRequest when its output does not match."""
        self._make = make
        self._eos_ids = frozenset(vocabulary.eos_ids)
        self._num_words = num_words(len(vocabulary.tokens))
        self._tokens = tokens
        self._num_prompt = num_prompt
        self._restart()
        # Why nothing may follow the committed output; what a draft met is no fault of the text.
        self.fault = ""
        if not self._seek(()):
            raise InvalidRequest("the output so far does not match the grammar", "output_ids")

    def allowed(self, path: Sequence[int]) -> torch.Tensor:
        """Which ids may follow `path`, a node's own tokens behind the anchor.

        int32 [W], bit i % 32 of word i // 32 for id i. All zero for a path that the grammar forbids
        (nobody can get there), and where the matcher fails: `fault` then explains it, unless only a
        draft stands there, which is asked again once the text does.
        """
        words_W = torch.zeros(self._num_words, dtype=torch.int32)
        for _ in range(2):
            if self._seek(path):
                self._fill(words_W)
            if not self._matcher.is_error():
                if self._has_strayed() and not path:
                    self._blame("the text has left it")
                return words_W
            # What it learnt on other paths may have used up its limits: asked once more, afresh.
            error = self._matcher.get_error()
            words_W.zero_()
            self._restart()
        if not path:
            self._blame(" ".join(error.split()))
        return words_W

    def fitting(self, tree: CandidateTree) -> list[int]:
        """Nodes of a draft that the grammar allows, in order; what hangs below others goes too."""
        children = tree.children()
        kept: list[int] = []
        waiting: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        while waiting:
            node, path = waiting.pop()
            if self._seek(path):
                kept.append(node)
                waiting += [(child, (*path, token)) for token, child in children[node].items()]
            elif self._matcher.is_error():
                self._restart()
        return sorted(kept)[1:]

    def _fill(self, words_W: torch.Tensor) -> None:
        """Bits of what may follow where the state stands now."""
        if not self._has_ended:
            self._matcher.unsafe_compute_mask_ptr(words_W.data_ptr(), 4 * self._num_words)
            return
        for token in self._eos_ids:
            place = token % 32
            words_W[token // 32] |= 1 << place if place < 31 else -(1 << 31)

    def _blame(self, why: str) -> None:
        self.fault = f"the grammar cannot be followed: {why}"[:_MAX_SAID]

    def _has_strayed(self) -> bool:
        """True when committed text was not taken."""
        left = self._tokens[self._num_settled :]
        return bool(left) and left[0] not in self._eos_ids

    def _restart(self) -> None:
        self._matcher = self._make()
        self._num_settled = self._num_prompt
        self._ahead: list[int] = []
        self._has_ended = False

    def _seek(self, path: Sequence[int]) -> bool:
        """Stand behind the committed output and `path`; False when that is forbidden or fails."""
        committed = self._tokens[self._num_settled :]
        wanted = [*committed, *path]
        end = next((at for at, token in enumerate(wanted) if token in self._eos_ids), len(wanted))
        text, ends = wanted[:end], wanted[end:]
        same = _num_equal(self._ahead, text)
        surplus = len(self._ahead) - same
        if surplus and not self._matcher.rollback(surplus):
            self._restart()
            return self._seek(path)
        rest = text[same:]
        num_taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._ahead = text[: same + num_taken]
        num_settled = min(len(committed), len(self._ahead))
        self._num_settled += num_settled
        del self._ahead[:num_settled]
        if num_taken < len(rest):
            return False
        self._has_ended = bool(ends)
        return not ends or (self._eos_ids.issuperset(ends) and self._matcher.is_accepting())


def _num_equal(held: Sequence[int], wanted: Sequence[int]) -> int:
    """Tokens that both begin with."""
    for at, (one, other) in enumerate(zip(held, wanted, strict=False)):
        if one != other:
            return at
    return min(len(held), len(wanted))

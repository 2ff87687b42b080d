"""A recorded text: what one request became, and the feature rows that a drafter saw on the way.

By law 1 the text does not depend on drafters, so any of them can be replayed against it without
the target. Knows no file and no tensor.

    tokens   prompt ............ | answer ............ | what the target would have said next
             0 ........ prompt_len ................. end .......... len(tokens)
    rows     0 .......................... >= end - 2
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from protos.errors import MalformedRows
from protos.features import FeatureRows
from protos.params import SamplingParams

NUM_BEYOND: Final = 16
"""Tokens recorded past an end of text: a draft that foresees the end may be right about them too,
and a live run counts them as accepted though they are never committed."""


class RawRows(Protocol):
    """Where the feature rows of one text come from."""

    def __call__(self, aux_layers: Sequence[int]) -> FeatureRows:
        """Raw rows [0, n) of these aux layers, concatenated in this order.

        Raises OutriderError when they were not recorded or cannot be read.
        """


@dataclass(frozen=True, slots=True)
class RecordedText:
    """One text. end: where it ended (the end token is inside); max_len: where it had to end.

    params: what the request asked for, seed included. target_digest: empty when it is not known.
    """

    tokens: tuple[int, ...]
    prompt_len: int
    end: int
    max_len: int
    params: SamplingParams
    rows: RawRows
    target_digest: str = ""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if not 0 < self.prompt_len < self.end <= min(n, self.max_len):
            raise MalformedRows(
                f"a text of {n} tokens whose prompt has {self.prompt_len} cannot end at "
                f"{self.end} of at most {self.max_len}"
            )

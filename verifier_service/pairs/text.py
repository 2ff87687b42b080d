"""The built-in text that pairs are tested on, as one target reads it.

One forward of the target over the text gives its own choice after every prefix and the feature
rows of every token: all that a drafter is shown. Knows no drafter. Runs before the engine
allocates its pool, because it allocates one itself.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from transformers import AutoTokenizer

from protos.features import FeatureRows
from protos.params import SamplingParams
from verifier_service.sampling.choice import ChoiceRow, choose
from verifier_service.step import Span, Target

NUM_POSITIONS: Final = 64
"""Guesses that decide over a pair."""

NUM_CONTEXT: Final = 32
"""Tokens that stand before the first guess."""

TEXT: Final = """\
What is the water cycle?

The water cycle is the way that water moves around the Earth. Heat from the sun warms the water in \
rivers, lakes and oceans, and some of it turns into water vapor. The water vapor rises into the \
air, where it cools down and turns back into tiny drops of water. These drops come together to \
form clouds. When the drops of water in the clouds become too heavy, they fall back to the ground \
as rain or snow. Some of this water flows into rivers and lakes, and some of it soaks into the \
ground. Then the water flows back to the ocean, and the cycle starts again.

In short, the water cycle has three main steps: evaporation, condensation and precipitation. \
Evaporation is when water turns into water vapor. Condensation is when water vapor turns back into \
drops of water. Precipitation is when the drops of water fall to the ground as rain or snow.
"""
"""Plain and predictable on purpose: a drafter that fits its target guesses much of it."""


UNREADABLE: Final = (
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What transformers raises for files that it cannot make a tokenizer of: a package is missing
(sentencepiece, tiktoken, protobuf), code of the model's own would have to run, odd settings."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadText:
    """What the target made of the text. Of N tokens (0: there is no text, nothing is tested):

    choices: its greedy choice after tokens [0, t], for every t. rows: rows [0, N) by tap key.
    """

    token_ids: tuple[int, ...]
    choices: tuple[int | None, ...]
    rows: Mapping[str, FeatureRows]


def text_ids(target_dir: Path, vocab_size: int) -> tuple[int, ...]:
    """The text in the target's ids, as many as are looked at.

    A target without a tokenizer reads a fixed walk over its vocabulary instead. One whose
    tokenizer cannot be read has no text: (). Tests of pairs never keep a target from starting.
    """
    most = NUM_CONTEXT + NUM_POSITIONS
    if any((target_dir / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        try:
            tokenizer = AutoTokenizer.from_pretrained(target_dir, local_files_only=True)
            ids = [token for token in tokenizer.encode(TEXT) if token < vocab_size]
        except UNREADABLE as error:
            logger.warning(
                "pairs are not tested: the tokenizer in %s cannot be read: %s: %s",
                target_dir.name,
                type(error).__name__,
                error,
            )
            return ()
        if len(ids) >= most:
            return tuple(ids[:most])
    return tuple((7 + 31 * place) % vocab_size for place in range(most))


def read_text(target: Target, token_ids: Sequence[int], taps: Sequence[str]) -> ReadText:
    """One forward over the text. taps: keys of the rows to keep.

    Allocates the target's pool anew, unless there is no text.
    """
    ids = tuple(token_ids[: target.facts.max_context])
    if not ids:
        return ReadText((), (), {})
    target.allocate(1 + len(ids))
    slots = torch.arange(1, 1 + len(ids), dtype=torch.int64)
    logits = target.forward([Span(0, ids, 0, slots, num_logits=len(ids), first_slot=1)])
    greedy = SamplingParams(temperature=0.0)
    choices = choose(logits, [ChoiceRow(row, greedy, row + 1) for row in range(len(ids))])
    rows = {
        tap: FeatureRows(
            start=0,
            count=len(ids),
            width=target.row_width(tap),
            dtype=target.row_dtype(tap),
            data=target.read_rows(tap, slots),
        )
        for tap in taps
    }
    return ReadText(ids, tuple(choices), rows)

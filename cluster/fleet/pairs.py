"""A drafter's checkpoint beside a target: the rows it eats, and how well it guesses.

The one place where a drafter and a target are held at once without an engine: `outrider check`
uses it, and a starting verifier for checkpoints that do not say which layers their ids count.
Torch-free itself. Invariant: taps are keyed by the checkpoint's digest, whoever runs it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from protos.exchange import DraftResult, DraftWork

if TYPE_CHECKING:
    from drafter_service.drafter import Drafter
    from drafter_service.kinds import Description
    from verifier_service.pairs.probe import PairScore
    from verifier_service.step import TapSpec, Target

logger = logging.getLogger(__name__)

TEST_SESSION = 1


@dataclass(frozen=True, slots=True)
class TriedPair:
    """The score with one reading of the checkpoint's layer ids (empty: it eats tokens only)."""

    aux_layers: tuple[int, ...]
    score: "PairScore"


def candidate_taps(description: "Description | None") -> "list[TapSpec]":
    """Rows for every reading of the layer ids; one where the checkpoint is clear."""
    from verifier_service.step import TapSpec

    if description is None or not description.aux_layers:
        return []
    readings = description.aux_candidates or (description.aux_layers,)
    projection = description.projection
    return [
        TapSpec(
            description.digest if len(readings) == 1 else f"{description.digest}/{number}",
            layers,
            None if projection is None else replace(projection, aux_layers=layers),
        )
        for number, layers in enumerate(readings)
    ]


def try_readings(
    target: "Target", target_dir: Path, taps: "Sequence[TapSpec]", drafter: "Drafter"
) -> list[TriedPair]:
    """Score a drafter on the test text, once with the rows of each tap; one without taps.

    Allocates the target's pool anew.
    """
    from verifier_service.engine.draft_form import RowForm
    from verifier_service.pairing import row_form
    from verifier_service.pairs.probe import try_pair
    from verifier_service.pairs.text import read_text, text_ids

    def ask(work: DraftWork) -> DraftResult | None:
        results = drafter.handle([work])
        return results[0] if results else None

    facts = target.facts
    ids = text_ids(target_dir, facts.vocab_size)
    text = read_text(target, ids, [tap.key for tap in taps])
    forms = [row_form(tap, target.row_width(tap.key), facts.dtype) for tap in taps] or [RowForm()]
    layers = [tap.aux_layers for tap in taps] or [()]
    return [
        TriedPair(read, try_pair(text, form, drafter.capabilities, TEST_SESSION, ask))
        for read, form in zip(layers, forms, strict=True)
    ]


def best_reading(tried: Sequence[TriedPair]) -> TriedPair:
    """The reading whose guesses agree most; the first of equals."""
    return max(tried, key=lambda pair: pair.score.agreement)


def log_choice(name: str, tried: Sequence[TriedPair], chosen: TriedPair) -> None:
    """Say what was tried and kept."""
    logger.warning(
        "%s does not say how its layer ids count; %s; kept %s",
        name,
        ", ".join(
            f"{list(pair.aux_layers)} agrees at {pair.score.num_agreed} of "
            f"{pair.score.num_positions}"
            for pair in tried
        ),
        list(chosen.aux_layers),
    )

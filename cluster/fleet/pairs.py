"""A drafter's checkpoint beside a target: the rows it eats, and how well it guesses.

The one place where a drafter and a target are held at once without an engine: `outrider check`
uses it, and a starting verifier for checkpoints whose files leave open how they are meant.
Torch-free itself. Invariant: every reading is scored with rows and weights of its own.
"""

import logging
from collections.abc import Callable, Sequence
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
class Reading:
    """One way to read a checkpoint. label: its `variant`; tap None: it eats tokens only."""

    label: str = ""
    tap: "TapSpec | None" = None

    @property
    def name(self) -> str:
        """For people."""
        layers = f"aux layers {list(self.tap.aux_layers)}" if self.tap else ""
        return ": ".join(part for part in (self.label, layers) if part) or "tokens only"


@dataclass(frozen=True, slots=True)
class TriedReading:
    """A reading and its score."""

    reading: Reading
    score: "PairScore"


def readings_of(description: "Description | None", variant: str = "") -> list[Reading]:
    """Every reading that is open; one where the files are clear or `variant` names one.

    Raises: CheckpointError for a variant that the checkpoint does not have.
    """
    if description is None:
        return [Reading()]
    if variant or not description.variants:
        return [_reading(description.choose(variant), variant)]
    labels = [variant.label for variant in description.variants]
    return [_reading(description.choose(label), label) for label in labels]


def taps_of(readings: Sequence[Reading]) -> "list[TapSpec]":
    """The rows that all readings need, each once."""
    return list({r.tap.key: r.tap for r in readings if r.tap is not None}.values())


def try_readings(
    target: "Target",
    target_dir: Path,
    readings: Sequence[Reading],
    build: "Callable[[str], Drafter]",
) -> list[TriedReading]:
    """Score each reading on the test text. build: makes the drafter of a variant.

    The target was loaded with `taps_of(readings)`; its pool is allocated anew.
    """
    from verifier_service.engine.draft_form import RowForm
    from verifier_service.pairing import row_form
    from verifier_service.pairs.probe import try_pair
    from verifier_service.pairs.text import read_text, text_ids

    facts = target.facts
    ids = text_ids(target_dir, facts.vocab_size)
    text = read_text(target, ids, [tap.key for tap in taps_of(readings)])
    tried = []
    for reading in readings:
        tap, drafter = reading.tap, build(reading.label)
        form = RowForm()
        if tap is not None:
            form = row_form(tap, target.row_width(tap.key), facts.dtype)

        def ask(work: DraftWork, drafter: "Drafter" = drafter) -> DraftResult | None:
            results = drafter.handle([work])
            return results[0] if results else None

        score = try_pair(text, form, drafter.capabilities, TEST_SESSION, ask)
        tried.append(TriedReading(reading, score))
    return tried


def best_reading(tried: Sequence[TriedReading]) -> TriedReading:
    """The reading whose guesses agree most; the likeliest of equals."""
    return max(tried, key=lambda one: one.score.agreement)


def log_choice(name: str, tried: Sequence[TriedReading], kept: TriedReading) -> None:
    """Say what was tried and kept."""
    found = "; ".join(
        f"{one.reading.name} agrees at {one.score.num_agreed} of {one.score.num_positions}"
        for one in tried
    )
    logger.warning("the files of %s can be read in %d ways: %s", name, len(tried), found)
    logger.warning("%s is read as %s", name, kept.reading.name)


def _reading(description: "Description", label: str) -> Reading:
    from verifier_service.step import TapSpec

    layers = description.aux_layers
    if not layers:
        return Reading(label)
    # Readings with the same layers share their rows.
    key = f"{description.digest}/{'.'.join(map(str, layers))}"
    spec = description.projection
    return Reading(label, TapSpec(key, layers, spec and replace(spec, aux_layers=layers)))

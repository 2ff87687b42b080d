"""The kinds of drafters by name: where each one's loader stands, ours and other packages'.

Torch-free, and imports no drafter until one is asked for, so that a head node can check a whole
cluster. A loader is `load(settings, target_dir, incarnation) -> Drafter`. A kind that eats feature
rows also names `describe(directory, num_target_layers)`, torch-free, which says which
rows a verifier must keep. Other packages register in the entry point groups
`outrider.drafters` (the loader) and `outrider.descriptions`, under the kind's name. A name of ours
stays ours.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from protos.errors import ConfigError
from protos.features import ProjectionSpec

logger = logging.getLogger(__name__)

DRAFTERS_GROUP = "outrider.drafters"
DESCRIPTIONS_GROUP = "outrider.descriptions"
_DESCRIBE = "drafter_service.checkpoint.describe:describe"


@dataclass(frozen=True, slots=True)
class Kind:
    """Where a kind's code stands, as `module:function`. No `describe`: it eats tokens only."""

    load: str
    describe: str = ""


BUILT_IN = {
    "ngram": Kind("drafter_service.ngram.load:load_ngram"),
    "draft_model": Kind("drafter_service.draft_model.load:load_draft_model"),
    "eagle": Kind("drafter_service.eagle.load:load_eagle", _DESCRIBE),
    "eagle3": Kind("drafter_service.eagle3.load:load_eagle3", _DESCRIBE),
    "dflash": Kind("drafter_service.dflash.load:load_block", _DESCRIBE),
    "dspark": Kind("drafter_service.dflash.load:load_block", _DESCRIBE),
}


class Description(Protocol):
    """What a checkpoint says of itself, as far as a verifier must know it."""

    @property
    def digest(self) -> str:
        """Identifies the checkpoint; as in the drafter's capability record."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose states make a row (design 2); empty when no rows are wanted."""

    @property
    def projection(self) -> ProjectionSpec | None:
        """The input projection that the verifier runs; None: rows are sent raw."""

    @property
    def variants(self) -> Sequence["Labelled"]:
        """Every way to read files that leave something open, the likeliest first; else empty."""

    def choose(self, label: str) -> "Description":
        """The checkpoint read in one of its variants."""


class Labelled(Protocol):
    """One way to read a checkpoint."""

    @property
    def label(self) -> str:
        """What `variant` in a configuration calls it."""


@dataclass(frozen=True, slots=True)
class PlainDescription:
    """A checkpoint that leaves nothing open: what a kind of another package may answer with."""

    digest: str
    aux_layers: tuple[int, ...] = ()
    projection: ProjectionSpec | None = None
    variants: tuple[Labelled, ...] = ()

    def choose(self, label: str) -> "PlainDescription":
        """Itself."""
        return self


def known_kinds() -> tuple[str, ...]:
    """Every name that `kind` may have here: ours, then those of installed packages."""
    others = {point.name for point in entry_points(group=DRAFTERS_GROUP)}
    return (*BUILT_IN, *sorted(others - BUILT_IN.keys()))


def check_kind(kind: str) -> str:
    """The name itself. Raises ValueError, naming what is known."""
    if kind not in BUILT_IN and kind not in (known := known_kinds()):
        raise ValueError(f"no drafter of kind {kind!r}; known: {', '.join(known)}")
    return kind


def find_kind(kind: str) -> Kind:
    """Where this kind's code stands. Raises ConfigError for an unknown or ambiguous name."""
    if kind in BUILT_IN:
        if _installed(DRAFTERS_GROUP, kind):
            logger.warning("%s is a built-in kind: another package's is not used", kind)
        return BUILT_IN[kind]
    load = _installed(DRAFTERS_GROUP, kind)
    if not load:
        raise ConfigError(f"no drafter of kind {kind!r}; known: {', '.join(known_kinds())}")
    return Kind(load, _installed(DESCRIPTIONS_GROUP, kind))


def describe_checkpoint(
    kind: str, directory: Path, num_target_layers: int | None
) -> Description | None:
    """What a checkpoint says of itself; None for kinds that eat tokens only.

    Raises ConfigError, CheckpointError.
    """
    place = find_kind(kind).describe
    if not place:
        return None
    description: Description = import_place(place)(directory, num_target_layers)
    return description


def import_place(place: str) -> Callable[..., Any]:
    """The function at `module:function`. Raises ConfigError when it cannot be imported."""
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{place} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"{place} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]  # whatever another package put there


def _installed(group: str, kind: str) -> str:
    """What packages registered for a kind; empty when none did."""
    places = sorted({point.value for point in entry_points(group=group, name=kind)})
    if len(places) > 1:
        raise ConfigError(f"{group}: {kind!r} stands for several: {', '.join(places)}")
    return places[0] if places else ""

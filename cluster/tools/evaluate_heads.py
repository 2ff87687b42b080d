"""The drafters that an evaluation replays: named on the command line, described, built.

Torch-free until something is built. A head is `[NAME=][KIND:]CHECKPOINT`, where CHECKPOINT is a
directory or a shipped head's name; NAME is what tables call it (its kind, where that is enough);
KIND is read off the files unless it is given; one that needs no files stands alone, as `KIND:`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cluster.fleet.assembly import checkpoint_dir
from cluster.fleet.pairs import Reading, readings_of
from drafter_service.config import DrafterLimits, DrafterSettings
from drafter_service.kinds import BUILT_IN, describe_checkpoint, known_kinds
from protos.errors import ConfigError
from protos.exchange import Plan, PlanKind

if TYPE_CHECKING:
    from drafter_service.drafter import Drafter
    from drafter_service.kinds import Description
    from protos.recorded import RecordedText

NGRAM: Final = "ngram"
_TRIED_PLAN: Final = Plan(PlanKind.CHAIN, depth=4)
_TRIED_TEXTS: Final = 8
_CACHE_MB: Final = 2048
"""Of address space: what no session reaches costs nothing."""


@dataclass(frozen=True, slots=True)
class Head:
    """A drafter to replay. readings: more than one where the files leave open how they are meant.

    directory: None for kinds without files. digest: empty when the checkpoint describes nothing.
    """

    name: str
    kind: str
    directory: Path | None
    readings: tuple[Reading, ...]
    digest: str = ""

    @property
    def layers(self) -> frozenset[int]:
        """Aux layers whose rows some reading needs."""
        return frozenset(n for r in self.readings if r.tap is not None for n in r.tap.aux_layers)


def shipped_heads() -> list[str]:
    """Names of the heads that come with drafter_service."""
    import drafter_service

    folder = Path(drafter_service.__file__).parent / "heads"
    return sorted(path.name for path in folder.glob("*") if (path / "config.json").is_file())


def find_heads(given: Sequence[str], target_dir: Path) -> list[Head]:
    """The heads named, or all that are shipped. Raises ConfigError or CheckpointError."""
    from drafter_service.checkpoint.describe import target_layers

    num_layers = target_layers(target_dir)
    found = [_find(spec, num_layers) for spec in given or shipped_heads()]
    kinds = Counter(head.kind for head in found)
    named = [_named(head, kinds[head.kind] > 1) for head in found]
    twice = [name for name, count in Counter(head.name for head in named).items() if count > 1]
    if twice:
        raise ConfigError(f"two heads are called {twice[0]!r}: give one as NAME=CHECKPOINT")
    if any(head.name == NGRAM for head in named):
        raise ConfigError(f"{NGRAM!r} is the look-up's own name: give the head another one")
    return named


def build_head(
    head: Head,
    variant: str,
    target_dir: Path,
    dtype: str,
    window: int,
    longest: int,
    device: str = "cpu",
) -> "Drafter":
    """The real drafter, with room for `window` texts of at most `longest` tokens.

    device: auto, cpu or cuda.
    Raises ConfigError, CheckpointError or IncompatiblePair.
    """
    from drafter_service.build import build_drafter

    settings = DrafterSettings.model_validate(
        {
            "kind": head.kind,
            "name": head.name,
            "checkpoint": str(head.directory or ""),
            "variant": variant,
            "target": str(target_dir),
            "dtype": dtype,
            "device": device,
            "limits": _limits(window, longest),
        }
    )
    return build_drafter(settings, target_dir)


def best_reading(
    head: Head, build: "Callable[[str], Drafter]", texts: "Sequence[RecordedText]"
) -> Reading:
    """The reading whose chains are right most often on some of these texts.

    build: makes the drafter of a variant. The likeliest of equals. Chains, not first guesses as in
    the test of pairs: some readings differ in what a head feeds itself only.
    """
    from drafter_service.replay import replay_drafter

    def tau(reading: Reading) -> float:
        return replay_drafter(build(reading.label), texts[:_TRIED_TEXTS], _TRIED_PLAN).tau

    return max(head.readings, key=tau)


def build_ngram(window: int, longest: int) -> "Drafter":
    """The look-up that stands beside every head."""
    from drafter_service.build import build_drafter

    return build_drafter(DrafterSettings(kind=NGRAM, name=NGRAM, limits=_limits(window, longest)))


def _limits(window: int, longest: int) -> DrafterLimits:
    return DrafterLimits(max_sessions=window, max_context=max(longest + 1, 16), cache_mb=_CACHE_MB)


def _find(spec: str, num_layers: int | None) -> Head:
    name, equals, rest = spec.rpartition("=")
    if equals and not name:
        raise ConfigError(f"a head is [NAME=][KIND:]CHECKPOINT, not {spec!r}")
    kind, colon, checkpoint = rest.partition(":")
    if not colon or kind not in known_kinds():
        kind, checkpoint = "", rest
    if kind and not checkpoint:
        return Head(name, kind, None, (Reading(),))
    directory = checkpoint_dir(checkpoint)
    description: Description | None
    if kind in ("", *BUILT_IN):
        from drafter_service.check import checkpoint_facts

        facts = checkpoint_facts(directory, num_layers)
        if kind and kind != facts.kind:
            raise ConfigError(f"{spec!r}: the checkpoint is one of kind {facts.kind}")
        kind, description = facts.kind, facts.described
    else:
        description = describe_checkpoint(kind, directory, num_layers)
    digest = description.digest if description is not None else ""
    return Head(name, kind, directory, tuple(readings_of(description)), digest)


def _named(head: Head, is_crowded: bool) -> Head:
    """Under its given name, its kind, or the directory's name where its kind is not enough."""
    own = head.directory.name if is_crowded and head.directory is not None else head.kind
    return replace(head, name=head.name or own)

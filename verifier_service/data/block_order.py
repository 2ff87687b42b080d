"""Parts in block order: out of the folder where they are held, else computed and kept first.

Knows neither what parts mean nor who computes. Invariants: a part is on disk before it is handed
on; every part comes from the same target, with the same numerics.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from protos.errors import ConfigError, OutriderError
from verifier_service.data.parts import Part, PartsFolder, unpack_part
from verifier_service.data.worker import Item

Compute = Callable[[Sequence[Sequence[Item]]], Generator[bytes, None, None]]
"""Packed parts of the given blocks of items, in any order; closing it ends the work."""

OnPart = Callable[[int, int], None]
"""Called with items whose parts are there, and answer tokens of those computed in this run."""


class BlockOrder:
    """One run's parts. num_tokens: answer tokens of parts computed in this run."""

    def __init__(
        self,
        folder: PartsFolder,
        digest: str,
        fingerprint: str,
        compute: Compute,
        items_of: Callable[[int], list[Item]],
    ) -> None:
        """digest, fingerprint: what every part must come from; "": what the first one says."""
        self.folder = folder
        self._digest = digest
        self._fingerprint = fingerprint or folder.fingerprint
        self._compute = compute
        self._items_of = items_of
        self.num_tokens = 0

    def parts(self, blocks: Sequence[int], on_part: OnPart) -> Generator[Part, None, None]:
        """The blocks' parts one after another; those that the folder lacks are computed.

        Raises ConfigError for parts of another target, OutriderError for what is no part.
        """
        waiting = {block for block in blocks if not self.folder.holds(block)}
        num_items = sum(len(self._items_of(b)) for b in blocks if b not in waiting)
        on_part(num_items, self.num_tokens)
        with closing(self._computed(sorted(waiting))) as computed:
            for block in blocks:
                while not self.folder.holds(block):
                    part = self._received(next(computed, None), waiting)
                    self.folder.write(part)
                    num_items += len(part.outcomes)
                    self.num_tokens += sum(outcome.num_tokens for outcome in part.outcomes)
                    on_part(num_items, self.num_tokens)
                yield self._checked(self.folder.read(block))

    def _computed(self, blocks: Sequence[int]) -> Generator[bytes, None, None]:
        if blocks:
            yield from self._compute([self._items_of(block) for block in blocks])

    def _received(self, packed: bytes | None, waiting: set[int]) -> Part:
        if packed is None:
            raise OutriderError(f"{len(waiting)} blocks were not computed")
        part = unpack_part(packed)
        if part is None or part.block not in waiting:
            raise OutriderError("a replica sent what is no part of this run")
        expected = [index for index, _ in self._items_of(part.block)]
        if [outcome.index for outcome in part.outcomes] != expected:
            raise OutriderError(f"block {part.block} came back with other items")
        waiting.discard(part.block)
        return self._checked(part)

    def _checked(self, part: Part) -> Part:
        if part.digest != self._digest:
            raise ConfigError("a replica holds another target than the one here")
        self._fingerprint = self._fingerprint or part.fingerprint
        if part.fingerprint != self._fingerprint:
            raise ConfigError(
                f"parts were computed differently (fingerprints {self._fingerprint} and "
                f"{part.fingerprint}), and one file holds answers of one kind; move the parts "
                "that are there away to begin anew"
            )
        return part

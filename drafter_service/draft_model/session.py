"""One request in a draft model: its tokens, and how many of them have their KV in the slab.

    slab rows   [ 0 ............ cached_len | drafted rows, of the newest draft ]
    tokens      [ 0 ..................... base_len )

KV is a function of tokens alone, so what a draft computed is true for the tokens that were then
committed: `adopt` keeps those rows instead of computing them again. Knows no model.
"""

from dataclasses import dataclass, field

import torch

from drafter_service.cache import KvSlab, Segment
from drafter_service.session import Session
from protos.exchange import SessionOpen


@dataclass(slots=True)
class DraftedRows:
    """Rows written behind `base_len` committed ones, in slab order.

    parents: the row each follows, -1 for the anchor.
    """

    base_len: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def path(self, committed: list[int]) -> list[int]:
        """Rows that the committed tokens follow from the anchor on."""
        found: list[int] = []
        here = -1
        for token in committed:
            following = [
                row
                for row, parent in enumerate(self.parents)
                if parent == here and self.tokens[row] == token
            ]
            if not following:
                break
            here = following[0]
            found.append(here)
        return found


class ModelSession(Session):
    """A session with its place in the slab."""

    def __init__(self, session_id: int, opened: SessionOpen) -> None:
        super().__init__(session_id, opened)
        self.segment: Segment | None = None
        self.cached_len = 0
        self.drafted: DraftedRows | None = None

    def truncate(self, base_len: int) -> None:
        """KV of the tokens that stay stays."""
        super().truncate(base_len)
        self.cached_len = min(self.cached_len, base_len)
        if self.drafted is not None and self.drafted.base_len > base_len:
            self.drafted = None

    def adopt(self, slab: KvSlab, num_layers: int) -> None:
        """Keep the drafted rows whose tokens were committed; forget the rest."""
        drafted, self.drafted = self.drafted, None
        if drafted is None or self.segment is None or self.cached_len != drafted.base_len:
            return
        path = drafted.path(self.tokens[drafted.base_len :])
        if path != list(range(len(path))):
            _make_contiguous(slab, num_layers, self.segment.start + drafted.base_len, path)
        self.cached_len += len(path)


def _make_contiguous(slab: KvSlab, num_layers: int, first: int, path: list[int]) -> None:
    """Move rows first + path[i] to first + i."""
    index = torch.tensor(path)
    for layer in range(num_layers):
        k_KLD, v_KLD = slab.read(first, max(path) + 1, layer)
        moved = [x[:, index.to(x.device)].transpose(0, 1) for x in (k_KLD, v_KLD)]
        slab.write(first, moved[0], moved[1], layer)

"""A branching span as one order of keys that serves many of its rows, or as few such orders.

Where keys may stand, and why, is tree_parts.py's; here its parts become what blocks are made of.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verifier_service.model.tree_parts import UNIT, Part, place_tree


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Some rows of a span and the keys that they need, from column `first` on.

    Columns before `first` are the positions of the prefix, which all rows see. rows: of the span,
    ascending. keys: [W] the number of the key (its position in the prefix, or the span's start plus
    its row) in column first + w, -1 for none. visible: bool [len(rows), W].
    """

    first: int
    rows: tuple[int, ...]
    keys: torch.Tensor
    visible: torch.Tensor


def pack_tree(parents: Sequence[int], start: int) -> list[PackedPart]:
    """Lay out a branching span that begins at position `start`; every row is in one part.

    parents: of the span's rows, -1 for row 0. Which row is where: `tree_parts`.
    """
    parts, numbers = place_tree(parents, start)
    rows: list[list[int]] = [[] for _ in parts]
    for row, number in enumerate(numbers):
        rows[number].append(row)
    return [_packed(part, own, start) for part, own in zip(parts, rows, strict=True)]


def _packed(part: Part, rows: Sequence[int], start: int) -> PackedPart:
    first = start // UNIT * UNIT
    keys = np.full(max(part.keys) + 1 - first, -1)
    keys[np.fromiter(part.keys, np.int64) - first] = list(part.keys.values())
    visible = np.zeros((len(rows), len(keys)), dtype=np.bool_)
    own = [part.columns[row] for row in rows]
    counts = [len(columns) for columns in own]
    seen = np.fromiter(itertools.chain.from_iterable(own), np.int64, sum(counts))
    visible[np.repeat(np.arange(len(rows)), counts), seen - first] = True
    return PackedPart(first, tuple(rows), torch.from_numpy(keys), torch.from_numpy(visible))

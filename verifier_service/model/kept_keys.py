"""Gathered K and V that are kept from step to step: only columns that changed are copied again.

A group of blocks whose slots are no single run must be gathered for every layer of every step,
although a decoding request adds one column a step to the hundreds it has. Here each block has a
lane of a buffer per group; a block comes back to the lane that its owner had, and a column is
copied when its slot is another one or was written since (Pool.stamp).

Invariant: what is read equals a gather of this step (of scrap, which is masked, an older one),
whatever owners and groups do; owners only decide how much must be copied. Buffers take at most half
of what the pool's K and V take; a group gets one when it is met for the second time.

Shapes: B blocks, H key-value heads, P columns, D head_dim, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch

from verifier_service.model.block_keys import BlockKeys, KeyValue
from verifier_service.model.block_layout import BlockGroup, Owner
from verifier_service.model.kv import TILE, Pool, as_words
from verifier_service.step import Span

_SHARE: Final = 0.5
"""Of the bytes of the pool's K and V that buffers may take."""
_LANES: Final = 4
"""Buffers have room for a multiple of so many blocks, and for a tile more, while that fits."""
_FORGOTTEN: Final = 16
"""Stamps after which a group that was not met loses its buffer."""
_LATELY: Final = 2
"""Stamps that a step may take: its own, and that of a move after it."""
_FEW: Final = 0.25
"""A larger share of changed columns is gathered whole: by torch's threads instead of numpy."""


@dataclass(slots=True)
class _Lanes:
    """A group as it was last met. slots: [B, P]. stamp: the pool's when columns were copied.

    buffer: [L, 2, lanes, H, columns, D]; words: the same memory per layer, vectors in words; views:
    its part in use, per layer K and V [B, H, P, D]. num_read: layers copied since the stamp.
    """

    owners: list[Owner]
    slots: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    stamp: int = -1
    num_read: int = 0
    buffer: torch.Tensor | None = None
    words: list[np.ndarray] = field(default_factory=list)
    views: list[KeyValue] = field(default_factory=list)

    def drop(self) -> None:
        """Give the buffer back."""
        self.buffer, self.words, self.views, self.num_read = None, [], [], 0

    def arrange(self, owners: Sequence[Owner]) -> list[int]:
        """Which block of `owners` goes to which lane: the own one, else any; sets the owners."""
        number = {owner: index for index, owner in enumerate(owners)}
        lanes: list[int | None] = [number.get(owner) for owner in self.owners[: len(owners)]]
        lanes += [None] * (len(owners) - len(lanes))
        taken = set(lanes)
        waiting = iter([index for index in range(len(owners)) if index not in taken])
        order = [next(waiting) if lane is None else lane for lane in lanes]
        self.owners = [owners[index] for index in order]
        return order


class KeptKeys:
    """The kept groups of one pool on the CPU. Used by the thread that steps."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._budget = int(pool.kv.nbytes * _SHARE)
        self._groups: list[_Lanes] = []

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(lanes.buffer.nbytes for lanes in self._groups if lanes.buffer is not None)

    def order(self, spans: Sequence[Span]) -> list[int]:
        """Numbers of spans in the order of the lanes that they had."""
        place = {
            owner[0]: (number, lane)
            for number, lanes in enumerate(sorted(self._groups, key=lambda one: one.stamp))
            for lane, owner in enumerate(lanes.owners)
        }
        last = (len(self._groups), 0)
        return sorted(range(len(spans)), key=lambda index: place.get(spans[index].key, last))

    def take(self, group: BlockGroup) -> tuple[BlockGroup, "KeptGroup | None"]:
        """The group, its blocks in the order of their lanes; its K and V, unless not kept."""
        pool = self._pool
        if group.slots is None or group.num_rows > TILE or pool.words is None:
            return group, None
        if len(set(group.owners)) < len(group.owners):
            return group, None
        lanes = self._lanes_of(group.owners)
        group = _reordered(group, lanes.arrange(group.owners))
        assert group.slots is not None
        before, since = lanes.slots, lanes.stamp
        lanes.slots, lanes.stamp = group.slots.numpy(), pool.clock
        if since < 0 or not self._make_room(lanes):
            return group, None
        # A step that failed between two layers, and a new buffer, leave nothing to build on.
        is_whole, lanes.num_read = lanes.num_read == len(pool.layers), 0
        changed = _changed(lanes.slots, before, pool.written, since) if is_whole else None
        return group, KeptGroup(lanes, group, pool, changed)

    def _lanes_of(self, owners: Sequence[Owner]) -> _Lanes:
        """The group that most of these were in, not met in this step yet; else a new one."""
        clock, asked = self._pool.clock, set(owners)
        self._groups = [one for one in self._groups if one.stamp > clock - _FORGOTTEN]
        free = [one for one in self._groups if one.stamp < clock]
        best = max(free, key=lambda one: len(asked.intersection(one.owners)), default=None)
        if best is not None and 2 * len(asked.intersection(best.owners)) >= len(asked):
            return best
        self._groups.append(_Lanes(list(owners)))
        return self._groups[-1]

    def _make_room(self, lanes: _Lanes) -> bool:
        """Whether the buffer holds lanes.slots now."""
        pool, (blocks, columns) = self._pool, lanes.slots.shape
        old = lanes.buffer
        if old is not None and old.shape[2] >= blocks and old.shape[4] >= columns:
            if not lanes.views or lanes.views[0][0].shape[::2] != (blocks, columns):
                lanes.views = _views(old, pool, blocks, columns)
            return True
        lanes.drop()
        roomy = (-(-blocks // _LANES) * _LANES if blocks > 1 else 1, columns + TILE)
        found = self._new_buffer(*roomy)
        if found is None:
            found = self._new_buffer(blocks, columns)
        if found is None:
            return False
        lanes.buffer, lanes.views = found, _views(found, pool, blocks, columns)
        lanes.words = [as_words(layer.view(-1, pool.head_dim)) for layer in found]
        return True

    def _new_buffer(self, blocks: int, columns: int) -> torch.Tensor | None:
        """None where it would take too much."""
        pool = self._pool
        size = (len(pool.layers), 2, blocks, pool.num_heads, columns, pool.head_dim)
        needed = pool.kv.itemsize * int(np.prod(size))
        if self.num_bytes + needed > self._budget:
            # Of groups that may come back only those of the last step surely do.
            for one in self._groups:
                if one.stamp < pool.clock - _LATELY:
                    one.drop()
        return pool.kv.new_empty(size) if self.num_bytes + needed <= self._budget else None


class KeptGroup:
    """K and V of one group in this step."""

    def __init__(
        self, lanes: _Lanes, group: BlockGroup, pool: Pool, changed: np.ndarray | None
    ) -> None:
        """changed: [B, P], the columns to copy; None: all."""
        assert lanes.buffer is not None
        self._lanes, self._pool = lanes, pool
        self._whole: BlockKeys | None = None
        if changed is None or changed.mean() > _FEW:
            self._whole = BlockKeys(group, pool)
            self._gathered = self._whole.new_buffer()
            return
        blocks, columns = changed.nonzero()
        _, _, num_lanes, num_heads, size, _ = lanes.buffer.shape
        side, head = np.arange(2)[:, None, None], np.arange(num_heads)[:, None]
        self._into = ((side * num_lanes + blocks) * num_heads + head) * size + columns
        self._from = (side * num_heads + head) * pool.num_slots + lanes.slots[blocks, columns]

    @property
    def num_copied(self) -> int:
        """Columns of blocks that are copied for every layer."""
        if self._whole is None:
            return int(self._from.shape[-1])
        return int(self._lanes.slots.size)

    def read(self, layer: int) -> KeyValue:
        """K and V of a layer, [B, H, P, D] each; the layer's own rows are in the pool."""
        lanes = self._lanes
        keys, values = lanes.views[layer]
        if self._whole is None:
            assert self._pool.words is not None
            lanes.words[layer][self._into] = self._pool.words[layer][self._from]
        else:
            self._whole.read(layer, self._gathered)
            keys.copy_(self._gathered[0])
            values.copy_(self._gathered[1])
        lanes.num_read += 1
        return keys, values


def _changed(slots: np.ndarray, before: np.ndarray, written: np.ndarray, since: int) -> np.ndarray:
    """[B, P]: columns of another slot than before, or written after the stamp `since`."""
    changed = np.ones(slots.shape, dtype=bool)
    blocks, columns = (min(pair) for pair in zip(slots.shape, before.shape, strict=True))
    own = slots[:blocks, :columns]
    changed[:blocks, :columns] = (own != before[:blocks, :columns]) | (written[own] > since)
    return changed


def _views(buffer: torch.Tensor, pool: Pool, blocks: int, columns: int) -> list[KeyValue]:
    used = buffer[:, :, :blocks, :, :columns]
    return [(used[layer, 0], used[layer, 1]) for layer in range(len(pool.layers))]


def _reordered(group: BlockGroup, order: list[int]) -> BlockGroup:
    """The same blocks in another order."""
    if order == list(range(len(order))):
        return group
    rows = group.rows
    if rows is None:
        assert group.first_row is not None
        rows = torch.arange(group.num_blocks * group.num_rows) + group.first_row
    rows = rows.view(group.num_blocks, -1)[order].flatten()
    first = int(rows[0])
    is_run = torch.equal(rows, torch.arange(first, first + len(rows)))
    return replace(
        group,
        first_row=first if is_run else None,
        rows=None if is_run else rows,
        owners=tuple(group.owners[index] for index in order),
        positions=group.positions[order],
        slots=None if group.slots is None else group.slots[order],
        key_positions=None if group.key_positions is None else group.key_positions[order],
        mask=None if group.mask is None else group.mask[order],
    )

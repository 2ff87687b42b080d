"""The drafter's own KV: one slab with a byte budget, contiguous rows per session.

    segment  start ............................ start + capacity
    rows     [ committed, true features | this round's draft | free ]

A segment that is too small is replaced by one at least twice as large and its committed rows are
moved. The slab never grows; who must leave is decided by the caller. Invariant: live segments never
overlap, and everything between them is on the free list, neighbours joined.

Shapes: Y layers, C slots of the slab, K key-value heads, D head_dim, L rows read, N rows written.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SEGMENT_UNIT = 64
"""Segments are multiples of this many rows."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Slots [start, start + capacity) of the slab."""

    start: int
    capacity: int


class KvSlab:
    """Keys and values [Y, 2, K, C, D] of all sessions."""

    def __init__(
        self,
        num_bytes: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        num_layers: int = 1,
    ) -> None:
        row_bytes = 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
        self.num_slots = max(1, num_bytes // row_bytes // SEGMENT_UNIT) * SEGMENT_UNIT
        # empty: pages that no session has reached yet cost nothing.
        self._kv = torch.empty(
            (num_layers, 2, num_kv_heads, self.num_slots, head_dim), dtype=dtype, device=device
        )
        self._free: list[Segment] = [Segment(0, self.num_slots)]

    @property
    def num_free(self) -> int:
        """Slots in no segment."""
        return sum(gap.capacity for gap in self._free)

    def reserve(self, segment: Segment | None, num_used: int, num_rows: int) -> Segment | None:
        """A segment for `num_rows` that holds the first `num_used` rows of `segment`.

        None when no gap is large enough; `segment` is then untouched.
        """
        if segment is not None and num_rows <= segment.capacity:
            return segment
        least = -(-num_rows // SEGMENT_UNIT) * SEGMENT_UNIT
        doubled = max(least, 2 * segment.capacity if segment else 0)
        found = self._take(doubled) or self._take(least)
        if found is None or segment is None:
            return found
        source = slice(segment.start, segment.start + num_used)
        self._kv[:, :, :, found.start : found.start + num_used] = self._kv[:, :, :, source]
        self.release(segment)
        return found

    def release(self, segment: Segment | None) -> None:
        """Give a segment back."""
        if segment is None:
            return
        gaps = sorted([*self._free, segment], key=lambda gap: gap.start)
        joined = [gaps[0]]
        for gap in gaps[1:]:
            last = joined[-1]
            if last.start + last.capacity == gap.start:
                joined[-1] = Segment(last.start, last.capacity + gap.capacity)
            else:
                joined.append(gap)
        self._free = joined

    def write(self, start: int, k_NKD: Tensor, v_NKD: Tensor, layer: int = 0) -> None:
        """Store a layer's rows from slot `start` on."""
        slots = slice(start, start + len(k_NKD))
        self._kv[layer, 0, :, slots] = k_NKD.transpose(0, 1)
        self._kv[layer, 1, :, slots] = v_NKD.transpose(0, 1)

    def read(self, start: int, num_rows: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Views [K, L, D] of a layer's keys and values of slots [start, start + num_rows)."""
        slots = slice(start, start + num_rows)
        return self._kv[layer, 0, :, slots], self._kv[layer, 1, :, slots]

    def _take(self, capacity: int) -> Segment | None:
        for index, gap in enumerate(self._free):
            if gap.capacity < capacity:
                continue
            rest = Segment(gap.start + capacity, gap.capacity - capacity)
            self._free[index : index + 1] = [rest] if rest.capacity else []
            return Segment(gap.start, capacity)
        return None

"""What every backend that works on BlockGroups needs of one: its rows, its keys, its mask.

Shapes: B blocks, n rows per block, H key-value heads, D head_dim, P columns in whole tiles.
"""

import torch

from verifier_service.model.block_layout import BlockGroup
from verifier_service.model.heads import hide
from verifier_service.model.kv import TILE, Pool

KeyValue = tuple[torch.Tensor, torch.Tensor]
"""K and V of one layer, [B, H, P, D] each."""


class BlockKeys:
    """K and V of all positions of a group's blocks, in a pool."""

    def __init__(self, group: BlockGroup, pool: Pool) -> None:
        self._pool = pool
        self._runs = self._index = None
        self._shape = (2, group.num_blocks, pool.num_heads, group.num_tiles * TILE, pool.head_dim)
        if group.first_slot is not None:
            self._runs = pool.runs(group.first_slot, group.num_tiles * TILE)
        else:
            assert group.slots is not None
            sides = [pool.index(side, group.slots).transpose(0, 1) for side in (0, 1)]
            self._index = torch.stack(sides).flatten()

    def new_buffer(self) -> torch.Tensor:
        """[2, B, H, P, D]"""
        return self._pool.kv.new_empty(self._shape)

    def read(self, layer: int, out: torch.Tensor) -> None:
        """Copy a layer's K and V into `out`, of `new_buffer`."""
        if self._runs is not None:
            out[:, 0].copy_(self._runs[layer])
        else:
            assert self._index is not None
            vectors = out.view(-1, out.shape[-1])
            torch.index_select(self._pool.vectors[layer], 0, self._index, out=vectors)

    def views(self) -> tuple[torch.Tensor, ...] | None:
        """Per layer [2, 1, H, P, D] without a copy, where the slots are one run; else None."""
        return None if self._runs is None else tuple(run[:, None] for run in self._runs)


class GatheredKeys:
    """A group's K and V where they lie when that is one run, else gathered for every layer."""

    def __init__(self, group: BlockGroup, pool: Pool) -> None:
        source = BlockKeys(group, pool)
        self._source, self._views = source, source.views()
        self._buffer = None if self._views is not None else source.new_buffer()

    def read(self, layer: int) -> KeyValue:
        """K and V of a layer."""
        if self._views is not None:
            keys, values = self._views[layer]
            return keys, values
        assert self._buffer is not None
        self._source.read(layer, self._buffer)
        return self._buffer[0], self._buffer[1]


def flat_rows(group: BlockGroup) -> slice | torch.Tensor:
    """The group's rows in the flat batch, block after block."""
    if group.first_row is not None:
        return slice(group.first_row, group.first_row + group.num_blocks * group.num_rows)
    assert group.rows is not None
    return group.rows


def block_mask(
    group: BlockGroup, window: int | None, dtype: torch.dtype
) -> tuple[int, torch.Tensor] | None:
    """(first column, mask [B, n, P - first] of 0 and -inf), earlier ones being visible to all.

    None when every row sees everything.
    """
    own = None if group.mask is None else (group.mask_start, group.mask)
    if window is None or int(group.positions.max()) < window:
        return own
    columns = group.key_positions
    if columns is None:
        columns = torch.arange(group.num_tiles * TILE, device=group.positions.device)[None]
    mask = hide(columns[:, None] <= group.positions[..., None] - window, dtype)
    if group.mask is not None:
        mask[..., group.mask_start :] += group.mask
    return 0, mask

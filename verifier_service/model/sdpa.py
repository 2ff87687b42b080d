"""Attention by torch's fused kernel for CPUs: one call a group, where it keeps to the exactness.

The kernel (scaled_dot_product_attention, flash attention after Dao et al., arXiv 2205.14135) keeps
scores and sums in float32 and walks keys in blocks of fixed positions, so a row's bits are its own
when three things are done: heads that share keys become rows of one product, rows are padded to a
multiple, and positions to whole tiles. That holds for kernels on some machines and not on others:
`fault_of_kernel` tries it at load. A branching span is packed for it (packed_tree.py). Knows no
model, no soft-cap and no sinks. Tiles (attention.py) are the reference.

Shapes: as in attention.py.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from verifier_service.model.block_keys import GatheredKeys, block_mask, flat_rows
from verifier_service.model.block_layout import BlockGroup, BlockRules
from verifier_service.model.heads import AttentionShape, HeadRows, Scoring
from verifier_service.model.kept_keys import KeptGroup, KeptKeys
from verifier_service.model.kv import Pool
from verifier_service.model.layout import StepLayout
from verifier_service.model.step_attention import GroupsAttention, PoolAttention, StepAttention
from verifier_service.model.tree_layout import TreeGroup
from verifier_service.step import Span

SDPA_RULES: Final = BlockRules(
    block_rows=256, group_cost=45.0, tree_cost=None, tile_cost=7.0, row_cost=0.5
)


class Sdpa:
    """The fused backend."""

    name = "sdpa"
    rules = SDPA_RULES

    def over(self, pool: Pool) -> PoolAttention:
        """Backend.over."""
        return _OverPool(pool)


class _OverPool:
    """PoolAttention; keeps what was gathered."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._kept = KeptKeys(pool)

    def order(self, spans: Sequence[Span]) -> Sequence[int]:
        """PoolAttention.order: blocks that share a group lie together, so that rows are a run."""
        return self._kept.order(spans)

    def attention(self, layout: StepLayout, shape: AttentionShape) -> StepAttention:
        """PoolAttention.attention."""
        return GroupsAttention([self._group(group, shape) for group in layout.groups])

    def _group(self, group: BlockGroup | TreeGroup, shape: AttentionShape) -> "_GroupAttention":
        assert isinstance(group, BlockGroup), "laid out by SDPA_RULES"
        group, kept = self._kept.take(group)
        source = kept or GatheredKeys(group, self._pool)
        return _GroupAttention(group, shape, self._pool, source)


class _GroupAttention:
    """One group of blocks, for all layers of one shape. Neither soft-cap nor sinks are for it."""

    def __init__(
        self,
        group: BlockGroup,
        shape: AttentionShape,
        pool: Pool,
        source: KeptGroup | GatheredKeys,
    ) -> None:
        self._group = group
        self._dtype = pool.kv.dtype
        self.queries = HeadRows(group.num_blocks, group.num_rows, shape, pool.kv, flat_rows(group))
        by_head = (group.num_blocks, shape.num_kv_heads, self.queries.num_rows, shape.head_dim)
        self._asked = self.queries.queries.view(by_head)
        self._source = source
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def attend(self, layer: int, scoring: Scoring) -> None:
        """StepAttention.attend for this group's rows."""
        assert scoring.softcap is None
        assert scoring.sinks is None
        self.queries.load()
        keys, values = self._source.read(layer)
        found = scaled_dot_product_attention(
            self._asked, keys, values, attn_mask=self._mask(scoring.window), scale=1.0
        )
        self.queries.store(found)

    def _mask(self, window: int | None) -> torch.Tensor | None:
        """[B, 1, M, P], 0 or -inf."""
        if window not in self._masks:
            found = block_mask(self._group, window, self._dtype)
            self._masks[window] = found and pad(
                self.queries.by_row(found[1])[:, None], (found[0], 0)
            )
        return self._masks[window]

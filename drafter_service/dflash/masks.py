"""What a block's rows may see in one layer: the rule, and the rule as a mask over cached rows.

Context rows stand at positions 0, 1, 2, ... without a gap; the block stands at its anchor's
position and after. Rows still under way leave a gap between the two, which windows count as if it
were filled. Knows no tensors of a model. Sources: `reference/dflash.md` 0 and 1.7.

Shapes: B block rows, L rows read: context from `first` on, then the block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_service.dflash.config import LayerMask


@dataclass(frozen=True, slots=True)
class Sight:
    """Context rows [first, num_context) and the block are read. hidden [B, L]: what of it is not
    seen, None when every row sees all of it."""

    first: int
    hidden: Tensor | None


def is_visible(mask: LayerMask, anchor: int, query: int, key: int, in_block: bool) -> bool:
    """Whether the block row at position `query` sees the key at position `key`."""
    if in_block and mask.causal and key > query:
        return False
    if mask.window is None:
        return True
    if mask.window_from_anchor:
        return in_block or key >= anchor - mask.window
    return abs(query - key) < mask.window


def sight(mask: LayerMask, num_context: int, anchor: int, block_size: int) -> Sight:
    """The rule for a whole block as one mask over the rows worth reading."""
    first = 0
    if mask.window is not None:
        oldest = anchor - mask.window + (0 if mask.window_from_anchor else 1)
        first = min(max(oldest, 0), num_context)
    if not mask.causal and mask.window is None:
        return Sight(first, None)
    block_B = anchor + torch.arange(block_size)
    keys_L = torch.cat([torch.arange(first, num_context), block_B])
    hidden_BL = torch.zeros(block_size, len(keys_L), dtype=torch.bool)
    if mask.causal:
        # Context keys are never after a block row.
        hidden_BL |= keys_L[None] > block_B[:, None]
    if mask.window is not None and not mask.window_from_anchor:
        hidden_BL |= (block_B[:, None] - keys_L[None]).abs() >= mask.window
    return Sight(first, hidden_BL if bool(hidden_BL.any()) else None)

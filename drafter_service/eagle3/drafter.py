"""`eagle3` as an algorithm: EAGLE-3, EAGLE-3.1 and P-EAGLE. Knows no file and no wire."""

import torch

from drafter_service.cache import KvSlab
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.eagle3.packed import PackedHead
from drafter_service.feature_head import Mask
from drafter_service.head_algorithm import HeadAlgorithm


class Eagle3(HeadAlgorithm):
    """Chains, dynamic and static trees; out of one pass where the head fills masked rows."""

    def __init__(self, head: Eagle3Head, cache_bytes: int, max_positions: int) -> None:
        config = head.config
        weight = head.lm_head.weight
        self.head = head.eval().requires_grad_(False)
        slab = KvSlab(
            cache_bytes,
            config.num_kv_heads,
            config.head_dim,
            weight.dtype,
            weight.device,
            config.num_layers,
        )
        mask: Mask | None = None
        if config.mask_token_id is not None:
            with torch.inference_mode():
                mask = Mask(config.mask_token_id, self.head.masked())
        packed = PackedHead(self.head, max_positions)
        super().__init__(packed, slab, head.target_ids, weight.dtype, config.windows, mask)

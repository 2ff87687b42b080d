"""`eagle` as an algorithm: EAGLE-1 chains and its static tree, EAGLE-2 dynamic trees."""

from drafter_service.cache import KvSlab
from drafter_service.eagle.head import EagleHead
from drafter_service.eagle.packed import PackedEagle
from drafter_service.head_algorithm import HeadAlgorithm


class Eagle(HeadAlgorithm):
    """Every layer sees all rows; rows are the target's final states."""

    def __init__(self, head: EagleHead, cache_bytes: int, max_positions: int) -> None:
        config = head.config
        weight = head.lm_head.weight
        self.head = head.eval().requires_grad_(False)
        slab = KvSlab(
            cache_bytes,
            config.layer.num_kv_heads,
            config.layer.head_dim,
            weight.dtype,
            weight.device,
            config.num_layers,
        )
        windows = (None,) * config.num_layers
        packed = PackedEagle(self.head, max_positions)
        super().__init__(packed, slab, head.target_ids, weight.dtype, windows)

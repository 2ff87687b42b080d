"""Running a head over flat rows of many sessions. Knows no draft and no plan.

Linear layers see one flat batch of rows; attention sees each session alone.

Shapes: N flat rows, C hidden size of the head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter_service.attention import Part, attend_over
from drafter_service.cache import KvSlab
from drafter_service.feature_head import FeatureHead


class HeadRunner:
    """One head over one slab. windows: see `attend_over`."""

    def __init__(
        self,
        head: FeatureHead,
        slab: KvSlab,
        device: torch.device,
        dtype: torch.dtype,
        windows: Sequence[int | None],
    ) -> None:
        self.head = head
        self.device = device
        self.dtype = dtype
        self._slab = slab
        self._windows = tuple(windows)

    def step(
        self, ids: Sequence[int], g_NC: Tensor, positions: Sequence[int], parts: Sequence[Part]
    ) -> Tensor:
        """y [N, C] of rows; their keys and values are written behind the parts' cached ones."""
        ids_N = torch.tensor(ids, device=self.device)
        positions_N = torch.tensor(positions, device=self.device)
        attend = attend_over(self._slab, parts, self._windows)
        return self.head.step(ids_N, g_NC, positions_N, attend)

"""How the workers of a run add up what each of them found. Knows no network and no launcher.

Invariant: after `add_up`, every worker holds the same sums, so workers that began alike and take
the same steps stay alike.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Workers(Protocol):
    """The workers of one run, as one of them sees them."""

    @property
    def rank(self) -> int:
        """This worker, from 0; worker 0 alone writes files and reports."""

    @property
    def count(self) -> int:
        """Workers in all."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over the workers, in place."""


class Alone:
    """A run of one worker."""

    rank = 0
    count = 1

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to add."""


class ProcessGroup:
    """The workers of torch's default process group, which a launcher has set up."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """One all-reduce over all of them, joined."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        start = 0
        for tensor in tensors:
            tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()

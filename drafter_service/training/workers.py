"""How the workers of a run add up what each of them found, and agree. Knows no launcher.

Invariant: after `add_up` and `agree` every worker holds the same numbers, so workers that began
alike and take the same steps stay alike. Every call is met by the same call of all the others.
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

    def agree(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """The first worker's numbers, as many as everybody brings; its clock counts for all."""


class Alone:
    """A run of one worker."""

    rank = 0
    count = 1

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to add."""

    def agree(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Its own."""
        return tuple(numbers)


class ProcessGroup:
    """The workers of torch's default process group, which a launcher has set up."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """One all-reduce per device and dtype, over all tensors of it joined."""
        kinds = {(tensor.device, tensor.dtype): None for tensor in tensors}
        for kind in kinds:
            alike = [tensor for tensor in tensors if (tensor.device, tensor.dtype) == kind]
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            dist.all_reduce(flat)
            sizes = [tensor.numel() for tensor in alike]
            for tensor, summed in zip(alike, torch.split(flat, sizes), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def agree(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """A broadcast in float64, of host memory: a group for GPUs needs gloo beside nccl."""
        told = torch.tensor(list(numbers), dtype=torch.float64)
        dist.broadcast(told, 0)
        return tuple(told.tolist())

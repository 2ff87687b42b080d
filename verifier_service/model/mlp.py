"""The gated MLP of a Llama-shaped layer: x + down(silu(gate(x)) * up(x)).

Few rows go through the two products as they are. Many rows, where the invariance check has found
that it sums alike, go through both turned (W x^T): what the first leaves [I, R] is what the second
reads, so nothing is laid out anew between them, and a part of the rows stays in the caches. Knows
no model.

Shapes: R rows, H hidden_size, I intermediate_size.
"""

import torch
from torch.nn import functional

from verifier_service.model.invariance import Matrix
from verifier_service.model.linear import Linear, added_turned, part_sizes, turned_product


class GatedMlp:
    """gate_up [2 I, H] and down [H, I]."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up, self._down = gate_up, down
        self._wide_rows = 0
        self._wide: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def matrix(self) -> Matrix:
        """The whole as one product, as the invariance check sees it."""
        biased = "" if self._gate_up.bias is None else " with bias"
        kind = f"gated product of {self._down.shape[1]}{biased}"
        size = self._down.shape[0]
        wideners = (self.widen,) if self._down.bias is None else ()
        return Matrix(size, size, lambda x: self.add(x, x), kind, self.limit, wideners)

    def limit(self, most_rows: int) -> None:
        """Multiply at most so many rows at once from now on."""
        self._gate_up.limit(most_rows)
        self._down.limit(most_rows)

    def widen(self, wide_rows: int) -> None:
        """Beyond the limit, take up to so many rows at once, turned; 0: as limited.

        Keeps second copies of packed weights.
        """
        self._wide_rows = wide_rows
        if not wide_rows:
            self._wide = None
        elif self._wide is None:
            self._wide = self._gate_up.plain(), self._down.plain()

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual [R, H] + the MLP of x [R, H]."""
        if self.turns(x.shape[0]):
            return added_turned(self, x, residual)
        return self._straight(x, residual)

    def turns(self, num_rows: int) -> bool:
        """Whether so many rows go through turned, but for a rest."""
        return self._wide is not None and not self._gate_up.fits(num_rows)

    def add_turned(self, x: torch.Tensor, stream: torch.Tensor) -> None:
        """Add the MLP of x [R, H] to stream [H, R] in place, as `add` rounds. Where it `turns`."""
        assert self._wide is not None
        gate_up, down = self._wide
        low = 0
        for size in part_sizes(x.shape[0], self._wide_rows):
            rows, own = x[low : low + size], stream[:, low : low + size]
            low += size
            if self._gate_up.fits(size):
                own.copy_(self._straight(rows, own.t().contiguous()).t())
            else:
                turned = _turned(gate_up, self._gate_up.bias, rows)
                torch.addmm(own, down, turned, out=own)

    def _straight(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down.add(functional.silu(gate).mul_(up), residual)


def _turned(gate_up: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """silu(gate(x)) * up(x), [I, R]."""
    gate, up = turned_product(gate_up, bias, x).chunk(2, dim=0)
    return functional.silu(gate).mul_(up)

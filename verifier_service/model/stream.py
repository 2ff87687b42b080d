"""The residual stream of a step: what every layer reads and adds to.

Few rows lie row by row. Where products sum turned (linear.py), many rows lie turned, so that a sum
is made in place and only the norms, which need whole rows, turn them back. Knows no layer.

Shapes: R rows, H hidden_size.
"""

from typing import Protocol

import torch


class Adds(Protocol):
    """What adds its output to the stream: Linear, GatedMlp."""

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual [R, H] + its output for x."""

    def turns(self, num_rows: int) -> bool:
        """Whether so many rows are summed turned."""

    def add_turned(self, x: torch.Tensor, stream: torch.Tensor) -> None:
        """The same in place, on [H, R]. Where it `turns`."""


class Stream(Protocol):
    """[R, H]."""

    def rows(self) -> torch.Tensor:
        """The rows, to be read before the next `add` or `rows`."""

    def keep(self) -> torch.Tensor:
        """The rows, to stay as they are."""

    def add(self, layer: Adds, x: torch.Tensor) -> None:
        """Add a layer's output for x."""


class RowStream:
    """Row by row; every sum is a new tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        self._rows = x

    def rows(self) -> torch.Tensor:
        """Stream.rows."""
        return self._rows

    def keep(self) -> torch.Tensor:
        """Stream.keep."""
        return self._rows

    def add(self, layer: Adds, x: torch.Tensor) -> None:
        """Stream.add."""
        self._rows = layer.add(x, self._rows)


class TurnedStream:
    """Turned, [H, R]; sums are made in place."""

    def __init__(self, x: torch.Tensor) -> None:
        self._turned = x.t().contiguous()
        self._rows = torch.empty_like(x)

    def rows(self) -> torch.Tensor:
        """Stream.rows."""
        return self._rows.copy_(self._turned.t())

    def keep(self) -> torch.Tensor:
        """Stream.keep."""
        return self._turned.t().contiguous()

    def add(self, layer: Adds, x: torch.Tensor) -> None:
        """Stream.add."""
        layer.add_turned(x, self._turned)

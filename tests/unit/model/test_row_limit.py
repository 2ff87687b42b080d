"""Kernels that change their sums with the number of rows: limited, or reported."""

import torch

from verifier_service.model.invariance import Matrix, find_multiple
from verifier_service.model.linear import Linear


class Moody:
    """A product that depends on how many of `turns` the number of rows is beyond."""

    def __init__(self, *turns: int) -> None:
        self._turns = turns
        self._most_rows = 1 << 20

    def limit(self, most_rows: int) -> None:
        self._most_rows = most_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.split(self._most_rows)
        return torch.cat([part + sum(len(part) > turn for turn in self._turns) for part in parts])


def test_rows_are_limited_where_kernels_change_their_sums() -> None:
    moody, steady = Moody(32), Moody(1 << 20)
    matrices = [Matrix(8, 8, moody, limit=moody.limit), Matrix(16, 8, steady, limit=steady.limit)]
    assert find_multiple(matrices, torch.float32) == (4, "")
    assert len(moody(torch.zeros(70, 8)).unique()) == 1


def test_a_product_that_cannot_be_limited_is_reported() -> None:
    multiple, note = find_multiple([Matrix(8, 8, Moody(32))], torch.float32)
    assert multiple == 4
    assert "a row among" in note


def test_parts_too_small_to_pay_are_reported() -> None:
    moody = Moody(8, 40)
    _, note = find_multiple([Matrix(8, 8, moody, limit=moody.limit)], torch.float32)
    assert "a row among" in note


def test_a_limited_linear_multiplies_in_parts() -> None:
    generator = torch.Generator().manual_seed(1)
    linear = Linear(torch.randn(24, 16, generator=generator))
    x = torch.randn(50, 16, generator=generator)
    residual = torch.randn(50, 24, generator=generator)
    whole, added = linear(x), linear.add(x, residual)
    linear.limit(16)
    torch.testing.assert_close(linear(x), whole)
    torch.testing.assert_close(linear.add(x, residual), added)
    parts = [linear(part) for part in x.split(16)]
    assert torch.equal(linear(x), torch.cat(parts))

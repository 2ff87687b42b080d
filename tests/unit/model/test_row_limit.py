"""Kernels that change their sums with the number of rows: limited, or reported."""

import pytest
import torch

from verifier_service.model.invariance import Matrix, find_multiple
from verifier_service.model.linear import Linear, part_sizes
from verifier_service.model.mlp import GatedMlp


class Moody:
    """A product that depends on how many of `turns` the number of rows is beyond."""

    def __init__(self, *turns: int) -> None:
        self._turns = turns
        self._most_rows = 1 << 20
        self.wide_rows = 0
        self.wide_turn = 0

    def limit(self, most_rows: int) -> None:
        self._most_rows = most_rows

    def widen(self, wide_rows: int) -> None:
        self.wide_rows = wide_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.wide_rows and len(x) > self._most_rows:
            return torch.cat([p + (len(p) > self.wide_turn) for p in x.split(self.wide_rows)])
        parts = x.split(self._most_rows)
        return torch.cat([part + sum(len(part) > turn for turn in self._turns) for part in parts])


def test_rows_are_limited_where_kernels_change_their_sums() -> None:
    moody, steady = Moody(32), Moody(1 << 20)
    matrices = [Matrix(8, 8, moody, limit=moody.limit), Matrix(16, 8, steady, limit=steady.limit)]
    assert find_multiple(matrices, torch.float32) == (4, "")
    assert len(moody(torch.zeros(70, 8)).unique()) == 1


def test_a_larger_padding_is_taken_where_a_smaller_one_leaves_too_few_rows() -> None:
    """float32 on two threads: one product wants rows in sixteens, another changes beyond 48."""
    limits: list[int] = []

    def in_sixteens(x: torch.Tensor) -> torch.Tensor:
        parts = x.split(limits[-1] if limits else len(x))
        return torch.cat([part + (len(part) % 16 != 0) for part in parts])

    moody = Moody(48)
    matrices = [Matrix(8, 8, moody, limit=moody.limit)]
    matrices.append(Matrix(16, 8, in_sixteens, limit=limits.append))
    assert find_multiple(matrices, torch.float32) == (16, "")
    assert limits == [48]


def test_a_limited_product_takes_the_most_rows_that_its_other_form_multiplies_alike() -> None:
    good, bad = Moody(32), Moody(32)
    good.wide_turn = 128
    matrices = [Matrix(8, 8, good, limit=good.limit, wideners=(good.widen,))]
    matrices.append(Matrix(16, 8, bad, limit=bad.limit, wideners=(bad.widen,)))
    assert find_multiple(matrices, torch.float32) == (4, "")
    assert (good.wide_rows, bad.wide_rows) == (128, 0)


def test_the_other_form_is_given_to_every_matrix_of_a_shape() -> None:
    twins = [Moody(32), Moody(32)]
    for twin in twins:
        twin.wide_turn = 64
    matrices = [Matrix(8, 8, twin, limit=twin.limit, wideners=(twin.widen,)) for twin in twins]
    find_multiple(matrices, torch.float32)
    assert [twin.wide_rows for twin in twins] == [64, 64]


def test_a_difference_in_one_element_of_many_thousands_is_not_passed_over() -> None:
    """What matrix units do beyond their limit: a few rows seldom show it."""
    limits: list[int] = []

    def rare(x: torch.Tensor) -> torch.Tensor:
        parts = x.split(limits[-1] if limits else len(x))
        return torch.cat([p + ((p.abs() > 3.7) & (len(p) > 32)) for p in parts])

    seldom = torch.randn(10**6, generator=torch.Generator().manual_seed(1)).abs() > 3.7
    assert 1e-4 < seldom.float().mean() < 4e-4
    assert find_multiple([Matrix(64, 64, rare, limit=limits.append)], torch.float32) == (4, "")
    assert limits == [32]


def test_a_product_that_cannot_be_limited_is_reported() -> None:
    multiple, note = find_multiple([Matrix(8, 8, Moody(32))], torch.float32)
    assert multiple == 4
    assert "a row among" in note


def test_products_of_one_shape_with_and_without_bias_are_measured_apart() -> None:
    weight = torch.ones(8, 8)
    kinds = [one.key for bias in (None, weight[0]) for one in Linear(weight, bias).matrices]
    assert len(set(kinds)) == 4


def test_rows_are_padded_further_rather_than_cut_into_tiny_parts() -> None:
    moody = Moody(8, 40)
    assert find_multiple([Matrix(8, 8, moody, limit=moody.limit)], torch.float32) == (16, "")
    assert len(moody(torch.zeros(96, 8)).unique()) == 1


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


FORMS = ("widen_straight", "widen_turned")


@pytest.mark.parametrize("form", FORMS)
def test_a_widened_linear_gives_the_same_product(form: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for bias in (None, torch.randn(24, generator=generator)):
        linear = Linear(torch.randn(24, 16, generator=generator), bias)
        x = torch.randn(50, 16, generator=generator)
        residual = torch.randn(50, 24, generator=generator)
        whole, added = linear(x), linear.add(x, residual)
        linear.limit(8)
        getattr(linear, form)(32)
        torch.testing.assert_close(linear(x), whole)
        torch.testing.assert_close(linear.add(x, residual), added)
        assert linear(x).is_contiguous()


@pytest.mark.parametrize("form", FORMS)
def test_a_widened_packed_linear_multiplies_its_own_weight(form: str) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(32, 64, generator=generator).bfloat16()
    x = torch.randn(48, 64, generator=generator).bfloat16()
    linear = Linear(weight)
    linear.limit(16)
    getattr(linear, form)(64)
    torch.testing.assert_close(linear(x), x @ weight.t())


def test_of_two_forms_the_one_that_takes_more_rows_is_kept() -> None:
    short, long = Moody(32), Moody(32)
    short.wide_turn, long.wide_turn = 64, 128

    def both(x: torch.Tensor) -> torch.Tensor:
        return short(x) if short.wide_rows else long(x)

    def limit(most_rows: int) -> None:
        short.limit(most_rows)
        long.limit(most_rows)

    matrix = Matrix(8, 8, both, limit=limit, wideners=(short.widen, long.widen))
    assert find_multiple([matrix], torch.float32) == (4, "")
    assert (short.wide_rows, long.wide_rows) == (0, 128)


@pytest.mark.parametrize("form", FORMS)
def test_a_widened_linear_multiplies_a_short_last_part_as_it_does_alone(monkeypatch, form) -> None:
    generator = torch.Generator().manual_seed(3)
    linear = Linear(torch.randn(24, 16, generator=generator))
    linear.limit(8)
    getattr(linear, form)(32)
    wide_rows = _counted_products(monkeypatch, 24)
    for rows, wide in ((36, [32]), (40, [32]), (44, [32, 12])):
        x = torch.randn(rows, 16, generator=generator)
        for product in (linear, lambda x: linear.add(x, torch.zeros(len(x), 24))):
            wide_rows.clear()
            product(x)
            assert wide_rows == wide


def _counted_products(monkeypatch: pytest.MonkeyPatch, num_outputs: int) -> list[int]:
    """Row counts of all products from now on that torch.mm and torch.addmm make."""
    counts: list[int] = []

    def count(found: torch.Tensor) -> torch.Tensor:
        counts.append(next(n for n in found.shape if n != num_outputs))
        return found

    for name in ("mm", "addmm"):
        whole = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *parts, do=whole, **options: count(do(*parts, **options))
        )
    return counts


def test_rows_behind_the_last_whole_part_are_multiplied_in_smaller_ones() -> None:
    assert part_sizes(1000, 512) == [512, 128, 128, 128, 104]
    assert part_sizes(256, 512) == [128, 128]
    assert part_sizes(1024, 512) == [512, 512]
    assert part_sizes(40, 32) == [32, 8]
    assert part_sizes(7, 32) == [7]


def gated(biased: bool = False) -> tuple[GatedMlp, Linear, Linear]:
    generator = torch.Generator().manual_seed(4)
    bias = torch.randn(48, generator=generator) if biased else None
    gate_up = Linear(torch.randn(48, 16, generator=generator), bias)
    down = Linear(torch.randn(16, 24, generator=generator))
    return GatedMlp(gate_up, down), gate_up, down


@pytest.mark.parametrize("biased", [False, True])
def test_a_gated_mlp_computes_its_formula_in_any_form(biased: bool) -> None:
    mlp, gate_up, down = gated(biased)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(50, 16, generator=generator)
    residual = torch.randn(50, 16, generator=generator)
    gate, up = gate_up(x)[:, :24], gate_up(x)[:, 24:]
    expected = residual + down(gate * torch.sigmoid(gate) * up)
    torch.testing.assert_close(mlp.add(x, residual), expected)
    mlp.limit(8)
    torch.testing.assert_close(mlp.add(x, residual), expected)
    for wide_rows in (32, 16):
        mlp.widen(wide_rows)
        torch.testing.assert_close(mlp.add(x, residual), expected)
    mlp.widen(0)
    torch.testing.assert_close(mlp.add(x, residual), expected)


def test_a_gated_mlp_with_a_bias_behind_is_not_turned() -> None:
    weight = torch.ones(16, 16)
    down = Linear(torch.ones(16, 8), weight[0])
    assert GatedMlp(Linear(weight), down).matrix.wideners == ()


def test_a_gated_mlp_takes_a_short_last_part_as_it_does_alone() -> None:
    mlp, *_ = gated()
    x = torch.randn(36, 16, generator=torch.Generator().manual_seed(6))
    mlp.limit(8)
    mlp.widen(32)
    assert torch.equal(mlp.add(x, x)[32:], mlp.add(x[32:], x[32:]))

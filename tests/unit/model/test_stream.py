"""The residual stream is the same, row by row or turned, and what was kept of it stays."""

import pytest
import torch

from verifier_service.model.linear import Linear
from verifier_service.model.mlp import GatedMlp
from verifier_service.model.stream import RowStream, TurnedStream

WIDTH, INNER = 16, 24


def whole(generator: torch.Generator, *size: int) -> torch.Tensor:
    """Small whole numbers: sums of them are exact in any order."""
    return torch.randint(-3, 4, size, generator=generator).float()


def linear(biased: bool, generator: torch.Generator) -> Linear:
    return pair(biased, generator)[0]


def pair(biased: bool, generator: torch.Generator) -> tuple[Linear, Linear]:
    """The same product twice: in parts, turned, and all rows at once."""
    bias = whole(generator, WIDTH) if biased else None
    weight = whole(generator, WIDTH, WIDTH)
    found = Linear(weight, bias)
    found.limit(8)
    found.widen_turned(32)
    return found, Linear(weight, bias)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_rows", [9, 32, 50, 71])
def test_a_turned_stream_adds_what_rows_add(num_rows: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    layers = [pair(biased, generator) for _ in range(2)]
    x = whole(generator, num_rows, WIDTH)
    rows, turned = RowStream(x.clone()), TurnedStream(x.clone())
    for layer, at_once in layers:
        assert layer.turns(num_rows)
        given = whole(generator, num_rows, WIDTH)
        rows.add(at_once, given)
        turned.add(layer, given)
        assert torch.equal(turned.rows(), rows.rows())


@pytest.mark.parametrize("num_rows", [9, 32, 50, 71])
def test_a_turned_stream_adds_what_a_gated_mlp_adds_to_rows(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(2 * INNER, WIDTH, generator=generator)
    down = torch.randn(WIDTH, INNER, generator=generator)
    mlp, at_once = (GatedMlp(Linear(weights), Linear(down)) for _ in range(2))
    mlp.limit(8)
    mlp.widen(32)
    assert mlp.turns(num_rows)
    x, given = torch.randn(2, num_rows, WIDTH, generator=generator)
    rows, turned = RowStream(x.clone()), TurnedStream(x.clone())
    rows.add(at_once, given)
    turned.add(mlp, given)
    torch.testing.assert_close(turned.rows(), rows.rows())


def test_what_was_kept_of_a_stream_stays_when_it_goes_on() -> None:
    generator = torch.Generator().manual_seed(3)
    x = whole(generator, 40, WIDTH)
    for stream in (RowStream(x.clone()), TurnedStream(x.clone())):
        kept = stream.keep()
        stream.add(linear(False, generator), whole(generator, 40, WIDTH))
        assert torch.equal(kept, x)
        assert kept.is_contiguous()
        assert not torch.equal(stream.rows(), x)


def test_few_rows_and_other_forms_do_not_turn() -> None:
    one = linear(False, torch.Generator().manual_seed(4))
    assert not one.turns(8)
    one.widen_straight(32)
    assert not one.turns(50)
    assert not GatedMlp(one, one).turns(50)

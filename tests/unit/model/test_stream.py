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
    bias = whole(generator, WIDTH) if biased else None
    found = Linear(whole(generator, WIDTH, WIDTH), bias)
    found.limit(8)
    found.widen_turned(32)
    return found


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_rows", [9, 32, 50, 71])
def test_a_turned_stream_adds_what_rows_add(num_rows: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    layers = [linear(biased, generator) for _ in range(2)]
    x = whole(generator, num_rows, WIDTH)
    rows, turned = RowStream(x.clone()), TurnedStream(x.clone())
    for layer in layers:
        assert layer.turns(num_rows)
        given = whole(generator, num_rows, WIDTH)
        rows.add(layer, given)
        turned.add(layer, given)
        assert torch.equal(turned.rows(), rows.rows())


@pytest.mark.parametrize("num_rows", [9, 32, 50, 71])
def test_a_turned_stream_adds_what_a_gated_mlp_adds_to_rows(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    gate_up = Linear(torch.randn(2 * INNER, WIDTH, generator=generator))
    mlp = GatedMlp(gate_up, Linear(torch.randn(WIDTH, INNER, generator=generator)))
    mlp.limit(8)
    mlp.widen(32)
    assert mlp.turns(num_rows)
    x, given = torch.randn(2, num_rows, WIDTH, generator=generator)
    rows, turned = RowStream(x.clone()), TurnedStream(x.clone())
    rows.add(mlp, given)
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

"""`outrider bench train`: every product is counted, and every recipe can be measured."""

import time

import pytest
import torch

from drafter_service.training.bench import Measured, Variant, main, measure, variants
from drafter_service.training.bench_products import ProductCounter, ProductsAlone
from drafter_service.training.bench_world import write_world
from drafter_service.training.loss import Comparison, fused_loss
from drafter_service.training.recipe import RECIPES
from drafter_service.training.targets import top_targets
from protos.errors import ConfigError

HEAD = {"num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}


def test_products_of_forward_backward_and_written_gradients_are_counted():
    layer = torch.nn.Linear(16, 24)
    x = torch.randn(10, 16)
    with ProductCounter() as counter:
        layer(x).sum().backward()
    assert counter.flops == 2 * (2 * 10 * 16 * 24)  # x takes no gradient
    hidden, weight = (torch.randn(n, 16, requires_grad=True) for n in (10, 40))
    targets = top_targets(
        torch.zeros(10, 1, dtype=torch.long), torch.zeros(10, 1), torch.arange(40)
    )
    rows = torch.arange(10)
    with ProductCounter() as counter:
        total, _ = fused_loss(hidden, weight, targets, rows, torch.zeros_like(rows), Comparison())
        total.backward()
    assert counter.flops == 3 * (2 * 10 * 16 * 40)
    with ProductCounter() as counter:
        _ = torch.randn(3, 4, 5) @ torch.randn(3, 5, 6)
    assert counter.flops == 2 * 3 * 4 * 5 * 6


def test_products_run_alone_as_they_were_laid_out():
    with ProductCounter() as counter:
        _ = torch.randn(12, 8).T @ torch.randn(12, 4)
        _ = torch.randn(12, 8).T @ torch.randn(12, 4)
    ((product, count),) = counter.counts.items()
    assert count == 2
    left = product.left.random()
    assert (left.shape, left.stride()) == ((8, 12), (1, 8))
    alone = ProductsAlone(counter.counts)
    assert alone.flops == counter.flops
    ticks = iter(range(100))
    assert alone.seconds(lambda: float(next(ticks))) == 1.0


def test_eagle3_has_a_line_per_step_and_others_one():
    names = [variant.name for variant in variants(["eagle3", "eagle"], {})]
    assert names == ["eagle3/1", "eagle3/2", "eagle3/3", "eagle3/3/full", "eagle"]
    (changed, *_) = variants(["eagle"], {"eagle": {"token_loss": "top"}})
    assert changed.changes == {"token_loss": "top"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("world") / "w", 2000, hidden=32, vocab=256)


@pytest.mark.parametrize("kind", sorted(RECIPES))
def test_every_recipe_is_measured(world, kind):
    changes = {"head": HEAD | ({"draft_vocab_size": 64} if kind == "eagle3" else {})}
    if kind in ("dflash", "dspark"):
        changes["head"] = {**HEAD, "head_dim": 8, "num_layers": 1}
        changes["loss_vocab_size"] = 64
    measured = {kind: Measured(Variant(kind, kind, changes), world, 64, torch.get_num_threads())}
    row = measure(measured, 2, time.perf_counter)[kind]
    assert row["rows"] > 0
    assert row["gflop"] > 0
    assert row["share"] * row["update_ms"]["median"] == pytest.approx(
        row["products_alone_ms"]["median"]
    )
    assert sum(row["compared_by_step"]) > 0


def test_a_wrong_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="KIND=FILE"):
        main(["--config", str(tmp_path / "x.yaml")])

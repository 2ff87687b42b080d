"""Experts give what transformers' own modules give, and a row's result ignores its neighbours."""

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tests.tiny import write_tiny
from tests.unit.model.family_cases import FAMILIES
from verifier_service.model.experts import router_matrices, take_experts
from verifier_service.model.invariance import find_multiple

LAYOUTS = {"qwen3_moe": 3, "mixtral": 4, "gpt_oss": 4}
"""Layers with experts: a matrix per expert as it is used, and transposed with biases."""


@pytest.fixture(scope="module", params=LAYOUTS)
def experts(request, tmp_path_factory):
    """Family, its experts' module before and after, rows and what a router chose for them."""
    path = write_tiny(FAMILIES[request.param].config(), tmp_path_factory.mktemp("moe"), seed=0)
    own, theirs = (
        AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").eval()
        for _ in range(2)
    )
    taken = take_experts(own)
    assert len(taken) == LAYOUTS[request.param] == len(router_matrices(own))
    # What was taken is not kept twice.
    assert not [name for name, _ in own.named_parameters() if "experts" in name]
    name = next(n for n, m in own.named_modules() if hasattr(m, "has_gate"))
    module = theirs.get_submodule(name)
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(40, 48, generator=generator)
    scores = torch.rand(40, module.num_experts, generator=generator)
    weights, chosen = scores.softmax(-1).topk(2)
    return taken[0], module, rows, chosen, weights


@torch.inference_mode()
def test_experts_give_what_transformers_modules_give(experts):
    own, module, rows, chosen, weights = experts
    own.multiple = 4
    expected = module(rows, chosen, weights)
    torch.testing.assert_close(own(rows, chosen, weights), expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_row_alone_is_the_row_among_others_bit_for_bit(experts):
    own, _, rows, chosen, weights = experts
    own.multiple, note = find_multiple(own.matrices, torch.float32)
    assert not note
    whole = own(rows, chosen, weights)
    for row in (0, 7, 39):
        one = slice(row, row + 1)
        assert torch.equal(own(rows[one], chosen[one], weights[one]), whole[one])
    crowd = torch.full_like(chosen, int(chosen[5, 0]))
    crowd[:, 1] = chosen[5, 1]
    assert torch.equal(own(rows, crowd, weights[5].expand(40, 2))[5], whole[5])


@torch.inference_mode()
def test_padding_rows_ask_no_expert_and_change_nothing(experts):
    own, _, rows, chosen, weights = experts
    own.multiple, own.num_rows = 4, None
    expected = own(rows, chosen, weights)
    own.num_rows = 37
    found = own(rows, chosen, weights)
    own.num_rows = None
    assert torch.equal(found[:37], expected[:37])
    assert not found[37:].any()


@torch.inference_mode()
@pytest.mark.parametrize("family", LAYOUTS)
def test_a_limited_router_routes_in_parts_to_the_same_experts(family):
    """Where a machine's product changes with the number of rows, routers are cut as others are."""
    model = AutoModelForCausalLM.from_config(FAMILIES[family].config()).eval()
    router = next(m for m in model.modules() if hasattr(m, "top_k") and hasattr(m, "weight"))
    rows = torch.randn(50, router.weight.shape[1], generator=torch.Generator().manual_seed(2))
    whole = router(rows)
    matrix = router_matrices(model)[0]
    product = matrix.apply(rows)
    matrix.limit(16)
    counts = []
    multiply = functional.linear

    def counting(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        counts.append(len(x))
        return multiply(x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "linear", counting)
        found = router(rows)
        torch.testing.assert_close(matrix.apply(rows), product)
    assert counts == [16, 16, 16, 2] * 2
    for ours, theirs in zip(found, whole, strict=True):
        torch.testing.assert_close(ours, theirs)

"""The packed head computes what the definition computes, for every option a checkpoint can have."""

import pytest
import torch

from drafter_service.eagle3.config import Rope
from drafter_service.eagle3.packed import PackedHead
from tests.unit.drafter_service.eagle3_cases import VOCAB, features_of, tiny_head

OPTIONS = [
    {},
    {"norm_before_residual": True, "qk_norm": True},
    {"fc_norm": True, "norm_feedback": True},
    {"norm_before_fc": True, "attention_bias": True, "norm_logits": False},
    {"input_norm_on_hidden": True, "num_kv_heads": 4, "head_dim": 16},
    {"num_layers": 3, "windows": (None, 4, None), "mlp_bias": True, "qkv_bias": True},
    {"num_layers": 2, "windows": (None, None), "doubled_layers": True, "fc_bias": True},
    {"rope": Rope(10000.0, "yarn", 4.0, original_max_positions=16, attention_factor=1.1)},
]


def attend(layer, q, k, v):
    """Any mixture will do that depends on all of its inputs."""
    group = q.shape[1] // k.shape[1]
    mixed = q * k.repeat_interleave(group, 1) + v.repeat_interleave(group, 1) + layer
    return mixed.flatten(1)


@pytest.mark.parametrize("facts", OPTIONS)
@pytest.mark.parametrize("num_rows", [1, 7])
def test_packed_equals_the_definition(facts, num_rows):
    head = tiny_head(**facts)
    packed = PackedHead(tiny_head(**facts), 64)
    ids = torch.arange(num_rows) * 5 % VOCAB
    positions = torch.arange(num_rows) * 9 % 64
    with torch.inference_mode():
        g = head.fuse(features_of(num_rows))
        y = head.step(ids, g, positions, attend)
        torch.testing.assert_close(packed.fuse(features_of(num_rows)), g)
        torch.testing.assert_close(packed.step(ids, g, positions, attend), y)
        torch.testing.assert_close(packed.logits(y), head.logits(y))
        torch.testing.assert_close(packed.feedback(y), head.feedback(y))


def test_packing_keeps_the_head_as_it_was_and_nothing_twice():
    head, untouched = tiny_head(), tiny_head()
    PackedHead(head, 64)
    for name, weight in untouched.state_dict().items():
        assert torch.equal(head.state_dict()[name], weight)
    stores = {p.untyped_storage().data_ptr() for p in head.layer.parameters()}
    assert len(stores) == len(list(head.layer.parameters())) - 3

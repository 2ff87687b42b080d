"""A target on a foreign device: nothing of a step is made on the CPU, and values are the same."""

import random

import pytest
import torch
from safetensors.torch import save_file

from protos.features import ProjectionSpec
from tests.tiny import tiny_llama_dir, tiny_qwen3_dir
from tests.unit.device.foreign.far_device import FAR, MixedDevices, far_device
from tests.unit.model.stepping import NUM_SLOTS, contiguous, paged, random_parents
from verifier_service.model import backend
from verifier_service.model.backend import Attention
from verifier_service.model.load import load_target
from verifier_service.step import Span, TapSpec

IDS = tuple(random.Random(11).randrange(384) for _ in range(150))


def test_the_trap_catches_a_tensor_of_the_cpu():
    with far_device(), pytest.raises(MixedDevices):
        torch.zeros(3, device=FAR) + torch.zeros(3)


@pytest.fixture(scope="module")
def taps(tmp_path_factory):
    """A raw tap and a projected one."""
    path = tmp_path_factory.mktemp("head") / "head.safetensors"
    save_file({"fc.weight": torch.randn(48, 128), "norm.weight": torch.rand(48)}, path)
    spec = ProjectionSpec(
        digest="d",
        file=str(path),
        aux_layers=(0, 2),
        width=48,
        fc="fc.weight",
        norms=("norm.weight",),
        norm_eps=1e-5,
        norm_form="after",
    )
    return [TapSpec("raw", (1,)), TapSpec("fused", (0, 2), spec)]


def run(target) -> dict[str, object]:
    """A prompt in two chunks, steps of several spans, trees, moves and rows."""
    target.allocate(NUM_SLOTS)
    rng = random.Random(5)
    one, two = paged(IDS, page=16, seed=1), contiguous(IDS, first=1500, key=2)
    parents = random_parents(rng, 12, 6)
    tree = Span(1, tuple(IDS[60:72]), 60, one.slots[:72], parents, 12)
    slots = torch.cat([two.slots[:70], torch.arange(1700, 1712)])
    other = Span(2, tuple(IDS[70:82]), 70, slots, random_parents(rng, 12, 4), 12, None)
    logits = [
        target.forward([one.span(0, 40, 0)]),
        target.forward([one.span(40, 60), two.span(0, 70, 1)]),
        target.forward([tree, other]),
        target.forward([one.span(60, 61), two.span(70, 71)]),
        target.forward([two.span(71, 75)]),
    ]
    target.move(one.slots[63:66], one.slots[61:64])
    logits.append(target.forward([one.span(64, 65)]))
    rows = {key: target.read_rows(key, one.slots[30:65]) for key in ("raw", "fused")}
    return {"logits": [x.cpu() for x in logits], "rows": rows}


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "modules"])
@pytest.mark.parametrize("make", [tiny_llama_dir, tiny_qwen3_dir], ids=["llama", "qwen3"])
def test_logits_and_rows_are_those_of_the_cpu(make, fuse, taps, tmp_path):
    directory = make(tmp_path / "target")
    expected = run(load_target(directory, torch.float32, taps, fuse=fuse))
    with far_device():
        target = load_target(directory, torch.float32, taps, fuse=fuse, device=FAR)
        found = run(target)
    assert found["rows"] == expected["rows"]
    for ours, theirs in zip(found["logits"], expected["logits"], strict=True):
        assert torch.equal(ours, theirs)
    assert not target.facts.invariant
    assert "privateuseone" in target.facts.invariance_note


def test_a_step_crosses_once_for_indices_and_once_for_masks(tmp_path):
    directory = tiny_llama_dir(tmp_path / "target")
    with far_device() as traffic:
        target = load_target(directory, torch.float32, device=FAR)
        target.allocate(NUM_SLOTS)
        one = contiguous(IDS)
        target.forward([one.span(0, 60, 1)])
        sent, read = traffic.sent, traffic.read
        target.forward([one.span(60, 61)])
        assert traffic.sent - sent <= 2
        assert traffic.read == read


def dense_flex(queries, keys, values, score_mod, block_mask, scale, enable_gqa, return_aux):
    """What FlexAttention is asked for, by its definition; only listed blocks are looked at."""
    count, heads, num_rows, _ = queries.shape
    num_slots, device = keys.shape[2], queries.device
    b, h, q, kv = torch.meshgrid(
        *(torch.arange(n, device=device) for n in (count, 1, num_rows, num_slots)), indexing="ij"
    )
    assert enable_gqa
    assert score_mod is None
    assert return_aux is None
    order = torch.arange(block_mask.kv_indices.shape[-1], device=device)
    is_real = order < block_mask.kv_num_blocks[..., None]
    listed = torch.zeros_like(block_mask.kv_indices)
    listed.scatter_add_(-1, block_mask.kv_indices.to(torch.int64), is_real.to(torch.int32))
    seen = block_mask.mask_mod(b, h, q, kv) & (listed[b, h, q // 128, kv // 128] > 0)
    share = heads // keys.shape[1]
    keys, values = (x.repeat_interleave(share, 1).expand(count, -1, -1, -1) for x in (keys, values))
    scores = (queries @ keys.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1).nan_to_num(0.0) @ values


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "modules"])
def test_flex_is_given_tensors_of_the_device_and_every_block_it_needs(
    monkeypatch, fuse, taps, tmp_path
):
    monkeypatch.setattr(backend, "compiled_flex", lambda: dense_flex)
    directory = tiny_llama_dir(tmp_path / "target")
    expected = run(load_target(directory, torch.float32, taps, fuse=fuse))
    with far_device():
        found = run(
            load_target(
                directory, torch.float32, taps, fuse=fuse, device=FAR, attention=Attention.FLEX
            )
        )
    for ours, theirs in zip(found["logits"], expected["logits"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)

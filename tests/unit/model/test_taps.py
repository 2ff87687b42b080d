"""Feature rows are transformers' hidden states, projected as the drafter's checkpoint says."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from protos.errors import CheckpointError
from protos.features import FINAL_LAYER, DType, ProjectionSpec
from tests.unit.model.stepping import contiguous, paged
from verifier_service.model.load import load_target
from verifier_service.step import Span, TapSpec

IDS = tuple(range(40, 115))
HIDDEN = 64


def read(target, key, slots):
    data = bytearray(target.read_rows(key, slots))
    dtype = torch.float32 if target.row_dtype(key) is DType.FP32 else torch.bfloat16
    return torch.frombuffer(data, dtype=dtype).view(len(slots), target.row_width(key))


@pytest.fixture(scope="module")
def states(tiny_dirs):
    model = AutoModelForCausalLM.from_pretrained(tiny_dirs["llama"])
    with torch.inference_mode():
        hidden = model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    return [state[0] for state in hidden]


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "modules"])
def test_rows_are_hidden_states_and_survive_a_move(tiny_dirs, states, fuse):
    taps = [TapSpec("low", (0,)), TapSpec("both", (0, 1))]
    target = load_target(tiny_dirs["llama"], torch.float32, taps, fuse=fuse)
    target.allocate(512)
    request = paged(IDS, page=16, high=512)
    target.forward([request.span(0, 30, 0)])
    target.forward([request.span(30, len(IDS), 0)])
    expected = torch.cat([states[1], states[2]], dim=-1)
    torch.testing.assert_close(read(target, "both", request.slots), expected, rtol=1e-4, atol=1e-4)
    before = read(target, "low", request.slots[50:60])
    target.move(request.slots[50:60], request.slots[52:62])
    assert torch.equal(read(target, "low", request.slots[52:62]), before)
    assert target.facts.bytes_per_slot == 4 * (3 * 2 * 2 * 16 + 3 * HIDDEN)


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "modules"])
def test_the_final_state_is_what_the_lm_head_reads(tiny_dirs, states, fuse):
    taps = [TapSpec("final", (FINAL_LAYER,)), TapSpec("both", (1, FINAL_LAYER))]
    target = load_target(tiny_dirs["llama"], torch.float32, taps, fuse=fuse)
    target.allocate(512)
    request = paged(IDS, page=16, high=512)
    target.forward([request.span(0, 30, 0)])
    target.forward([request.span(30, len(IDS), 0)])
    rows = read(target, "final", request.slots)
    torch.testing.assert_close(rows, states[-1], rtol=1e-4, atol=1e-4)
    assert torch.equal(read(target, "both", request.slots)[:, HIDDEN:], rows)


def test_a_projection_adds_its_bias(tiny_dirs, tmp_path):
    generator = torch.Generator().manual_seed(2)
    tensors = {"fc.weight": torch.randn(8, HIDDEN, generator=generator), "fc.bias": torch.ones(8)}
    save_file(tensors, tmp_path / "head.safetensors")
    plain = ProjectionSpec("a", (0,), 8, str(tmp_path / "head.safetensors"), "fc.weight")
    taps = [
        TapSpec("a", (0,), plain),
        TapSpec("b", (0,), replace(plain, digest="b", fc_bias="fc.bias")),
    ]
    target = load_target(tiny_dirs["llama"], torch.float32, taps)
    target.allocate(512)
    request = paged(IDS, page=16, high=512)
    target.forward([request.span(0, len(IDS), 0)])
    rows = read(target, "b", request.slots)
    torch.testing.assert_close(rows, read(target, "a", request.slots) + 1)


def test_tree_rows_carry_the_rows_of_their_path(tiny_dirs):
    target = load_target(tiny_dirs["llama"], torch.bfloat16, [TapSpec("t", (1, 2))])
    target.allocate(512)
    request = contiguous(IDS)
    target.forward([request.span(0, len(IDS), 0)])
    plain = read(target, "t", request.slots)
    start, parents = 66, (-1, 0, 0, 2, 3)
    tokens = (IDS[66], 3, IDS[67], IDS[68], IDS[69])
    slots = torch.cat([request.slots[:start], torch.arange(200, 205)])
    target.forward([Span(1, tokens, start, slots, parents, 0)])
    rows = read(target, "t", slots[start + torch.tensor([0, 2, 3, 4])])
    assert torch.equal(rows, plain[66:70])


def norm(x, weight, eps=1e-5):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("form", ["none", "concat", "each", "after"])
def test_projection_is_the_straightforward_one(tiny_dirs, states, tmp_path, form):
    generator = torch.Generator().manual_seed(1)
    width = 48
    tensors = {"fc.weight": torch.randn(width, 2 * HIDDEN, generator=generator) / 8}
    sizes = {"none": [], "concat": [2 * HIDDEN], "each": [HIDDEN, HIDDEN], "after": [width]}[form]
    names = tuple(f"norm.{number}" for number in range(len(sizes)))
    for name, size in zip(names, sizes, strict=True):
        tensors[name] = 1 + torch.randn(size, generator=generator) / 4
    save_file(tensors, tmp_path / "head.safetensors")
    spec = ProjectionSpec(
        "d1", (0, 2), width, str(tmp_path / "head.safetensors"), "fc.weight", names, 1e-5, form
    )
    target = load_target(tiny_dirs["llama"], torch.float32, [TapSpec("d1", (0, 2), spec)])
    target.allocate(512)
    request = paged(IDS, page=16, high=512)
    target.forward([request.span(0, len(IDS), 0)])
    # hidden_states of the last layer are normed by transformers: take ours for layer 2.
    low, high = states[1], raw_last_layer(tiny_dirs["llama"])
    if form == "each":
        low, high = norm(low, tensors["norm.0"]), norm(high, tensors["norm.1"])
    joined = torch.cat([low, high], dim=-1)
    if form == "concat":
        joined = norm(joined, tensors["norm.0"])
    expected = joined @ tensors["fc.weight"].T
    if form == "after":
        expected = norm(expected, tensors["norm.0"])
    torch.testing.assert_close(read(target, "d1", request.slots), expected, rtol=1e-4, atol=1e-4)


def raw_last_layer(directory):
    model = AutoModelForCausalLM.from_pretrained(directory)
    kept = []
    model.model.layers[-1].register_forward_hook(
        lambda _m, _i, out: kept.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.inference_mode():
        model(torch.tensor([IDS]))
    return kept[0][0]


@pytest.mark.parametrize(
    ("tap", "words"),
    [
        (TapSpec("x", (0, 3)), "aux layers"),
        (TapSpec("x", (1, 0)), "ascending"),
        (TapSpec("x", ()), "ascending"),
        (TapSpec("x", (0,), ProjectionSpec("d", (1,), 8, "f", "fc")), "projection"),
        (TapSpec("x", (0,), ProjectionSpec("d", (0,), 8, "nowhere", "fc")), "does not exist"),
        (TapSpec("x", (0,), ProjectionSpec("d", (0,), 8, "f", "fc", (), 1e-6, "no")), "norm_form"),
        (TapSpec("x", (0,), ProjectionSpec("d", (0,), 8, "f", "fc", (), 1e-6, "after")), "norms"),
    ],
)
def test_a_tap_that_cannot_be_served_is_refused_at_load(tiny_dirs, tap, words):
    with pytest.raises(CheckpointError, match=words):
        load_target(tiny_dirs["llama"], torch.float32, [tap])


def test_a_projection_of_the_wrong_shape_names_the_tensor(tiny_dirs, tmp_path):
    save_file({"fc.weight": torch.zeros(8, 65)}, tmp_path / "head.safetensors")
    spec = ProjectionSpec("d", (0,), 8, str(tmp_path / "head.safetensors"), "fc.weight")
    with pytest.raises(CheckpointError, match=r"fc.weight must be \[8, 64\]"):
        load_target(tiny_dirs["llama"], torch.float32, [TapSpec("d", (0,), spec)])

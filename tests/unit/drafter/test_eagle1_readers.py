"""EAGLE-1 checkpoints: known by their tensors, refused by name where they contradict themselves."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.eagle3_reader import SharedWeights
from drafter_service.checkpoint.eagle_reader import eagle_head_of
from drafter_service.eagle3.reference import draft_rows
from protos.errors import CheckpointError
from protos.features import FINAL_LAYER
from tests.unit.drafter.reader_cases import flat_config
from tests.unit.drafter_service.eagle3_cases import (
    HIDDEN,
    VOCAB,
    features_of,
    tiny_eagle_head,
    tiny_head,
)

IDS = torch.arange(6) * 7 % VOCAB


def eagle_copy(directory, head, **changes):
    """An EAGLE-1 head in the words of the original project."""
    directory.mkdir()
    config = flat_config(tiny_head(), num_hidden_layers=head.config.num_layers)
    config.pop("draft_vocab_size")
    (directory / "config.json").write_text(json.dumps(config | changes))
    names = describe_names(head)
    tensors = {
        names[ours]: parameter.detach().contiguous() for ours, parameter in head.named_parameters()
    }
    tensors.pop("lm_head.weight")
    save_file(tensors, directory / "model.safetensors")
    return directory


def describe_names(head):
    public = {"fc.weight", "fc.bias", "embed_tokens.weight", "lm_head.weight"}
    found = {name: name for name in public}
    for ours, _ in head.named_parameters():
        if ours in public:
            continue
        number, rest = 0, ours.removeprefix("layer.")
        if ours.startswith("later."):
            _, index, rest = ours.split(".", 2)
            number = int(index) + 1
        if "_proj" in rest:
            rest = f"{'self_attn' if rest[0] in 'qkvo' else 'mlp'}.{rest}"
        found[ours] = f"layers.{number}.{rest}"
    return found


@pytest.mark.parametrize("layers", [1, 2])
def test_an_eagle_head_is_known_by_its_tensors(tmp_path, layers):
    head = tiny_eagle_head(num_layers=layers)
    directory = eagle_copy(tmp_path / "head", head)
    shared = SharedWeights(None, head.lm_head.weight.detach())
    described = describe(directory)
    assert (described.kind, described.aux_layers) == ("eagle", (FINAL_LAYER,))
    read = eagle_head_of(described, directory, shared, torch.float32)
    rows = [
        draft_rows(h, features_of(6, width=HIDDEN), IDS, [5], (None,) * layers)
        for h in (head, read)
    ]
    assert torch.equal(rows[0].logits, rows[1].logits)
    with pytest.raises(CheckpointError, match=r"no lm_head\.weight"):
        eagle_head_of(described, directory, SharedWeights(), torch.float32)


@pytest.mark.parametrize(
    ("changes", "edit", "reason"),
    [
        ({"bias": False}, None, "bias: false and an fc.bias"),
        ({"bias": True}, lambda t: t.pop("fc.bias"), "bias: true and no fc.bias"),
        ({"attention_bias": True}, None, "missing.*q_proj.bias"),
        ({"hidden_act": "gelu"}, None, "gelu"),
        ({"quantization_config": {"bits": 4}}, None, "quantization_config"),
        ({"num_hidden_layers": 2}, None, "missing.*layers.1"),
        ({"rms_norm_eps": None}, None, "TypeError"),
        ({}, lambda t: t.update({"norm.weight": torch.ones(HIDDEN)}), "unknown.*norm.weight"),
        (
            {},
            lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(HIDDEN)}),
            "unknown.*input_layernorm",
        ),
        ({}, lambda t: t.update({"fc.weight": torch.ones(HIDDEN, HIDDEN)}), "fc.weight: expected"),
    ],
)
def test_an_eagle_head_that_contradicts_itself_is_refused(tmp_path, changes, edit, reason):
    directory = eagle_copy(tmp_path / "head", tiny_eagle_head(), **changes)
    if edit is not None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path)
    with pytest.raises(CheckpointError, match=reason):
        describe(directory)

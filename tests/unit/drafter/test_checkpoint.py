"""Checkpoints: what the writer writes the reader reads; what cannot be honoured is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.eagle3_reader import read_eagle3_head
from drafter_service.checkpoint.safetensors_header import read_header
from drafter_service.checkpoint.target import read_target_weights
from drafter_service.checkpoint.writer import write_eagle3
from protos.errors import CheckpointError
from tests.unit.drafter.training_fakes import DRAFT, HIDDEN, LAYERS, VOCAB, tiny_head

HEADS = Path(__file__).resolve().parents[3] / "drafter_service" / "heads"


@pytest.fixture
def written(tmp_path):
    head = tiny_head(norm_before_residual=False)
    write_eagle3(tmp_path, head, "a target", torch.float32)
    return tmp_path, head


def _edit_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        part = config["transformer_layer_config"] if key in _LAYER_KEYS else config
        part[key] = value
    path.write_text(json.dumps(config))


_LAYER_KEYS = {
    "attention_bias",
    "hidden_act",
    "layer_types",
    "mlp_bias",
    "num_hidden_layers",
    "rope_parameters",
    "sliding_window",
}


def _edit_tensors(directory, edit):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_a_written_head_is_read_back_bit_for_bit(written):
    directory, head = written
    again = read_eagle3_head(directory, head.embed_tokens.weight.detach(), torch.float32)
    assert again.config == head.config
    assert torch.equal(again.target_ids, head.target_ids)
    for (name, ours), (_, theirs) in zip(
        head.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    features, ids = torch.randn(5, head.config.feature_size), torch.arange(5)
    positions = torch.arange(5)
    outputs = [
        h.step(ids, h.fuse(features), positions, lambda layer, q, k, v: q.flatten(1))
        for h in (head, again)
    ]
    assert torch.equal(*outputs)


def test_aux_layers_are_written_as_inputs_and_read_as_outputs(written):
    directory, _ = written
    config = json.loads((directory / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in LAYERS]
    assert config["norm_before_residual"] is False
    assert describe(directory).config.aux_layers == LAYERS


def test_describe_names_the_projection_and_needs_no_torch(written):
    directory, _ = written
    script = (
        "import sys; from pathlib import Path;"
        "from drafter_service.checkpoint.describe import describe;"
        "d = describe(Path(sys.argv[1])); assert 'torch' not in sys.modules;"
        "print(d.kind, d.projection.norm_form, d.projection.width, len(d.digest))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["eagle3", "each", str(HIDDEN), "32"]


def test_digest_changes_with_any_weight(written):
    directory, _ = written
    before = describe(directory).digest
    _edit_tensors(directory, lambda tensors: tensors["fc.weight"].add_(1))
    assert describe(directory).digest != before


def test_the_embedding_must_come_from_somewhere_and_fit(written):
    directory, _ = written
    assert not describe(directory).own_embedding
    with pytest.raises(CheckpointError, match="embed_tokens"):
        read_eagle3_head(directory)
    with pytest.raises(CheckpointError, match="target embed_tokens"):
        read_eagle3_head(directory, torch.zeros(VOCAB + 1, HIDDEN))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda t: t.update({"layers.0.extra.weight": torch.zeros(1)}), "unknown.*extra"),
        (
            lambda t: t.update({"layers.1.input_layernorm.weight": torch.zeros(1)}),
            "unknown.*layers.1",
        ),
        (lambda t: t.pop("fc_norm.1.weight"), "missing.*fc_norm.1"),
        (lambda t: t.pop("d2t"), "without d2t"),
        (lambda t: t.update(d2t=t["d2t"][1:].clone()), "d2t: expected shape"),
        (lambda t: t["d2t"].add_(VOCAB), "outside the vocabulary"),
        (lambda t: t["d2t"].index_fill_(0, torch.tensor([1]), int(t["d2t"][0]) - 1), "two draft"),
        (lambda t: t.update(d2t=t["d2t"].float()), "expected integers"),
        (lambda t: t["t2d"].logical_not_(), "t2d and d2t"),
        (lambda t: t.update({"norm.weight": torch.zeros(HIDDEN + 1)}), "norm.weight: expected"),
        (lambda t: t.update({"norm.weight": torch.zeros(HIDDEN).int()}), "floating point"),
        (lambda t: t.update({"fc.weight": torch.zeros(HIDDEN, HIDDEN)}), "does not take 2 aux"),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(written, edit, reason):
    directory, head = written
    _edit_tensors(directory, edit)
    with pytest.raises(CheckpointError, match=reason):
        read_eagle3_head(directory, head.embed_tokens.weight)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speculators_model_type": "medusa"}, "medusa"),
        ({"num_hidden_layers": 2}, "missing.*layers.1"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor"),
        ({"rope_parameters": {"rope_type": "alibi"}}, "alibi"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"layer_types": ["sliding_attention"]}, "without sliding_window"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"mlp_bias": True}, "missing.*gate_proj.bias"),
        ({"attention_bias": True}, "missing.*q_proj.bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "names no aux layers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3]}, "counted from 0"),
        ({"draft_vocab_size": DRAFT - 1}, "expected"),
        ({"draft_vocab_size": VOCAB + 1}, "draft vocabulary"),
        ({"norm_before_fc": True}, "exclude each other"),
        ({"transformer_layer_config": {}}, "KeyError"),
    ],
)
def test_configs_that_ask_for_more_are_refused_by_name(written, changes, reason):
    directory, head = written
    _edit_config(directory, **changes)
    with pytest.raises(CheckpointError, match=reason):
        read_eagle3_head(directory, head.embed_tokens.weight)


def test_pickled_weights_are_refused(written):
    directory, _ = written
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only pickled weights"):
        describe(directory)


def test_a_header_that_lies_about_its_length_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="header of"):
        read_header(path)


def test_a_sharded_target_gives_the_same_weights_as_a_single_file(tmp_path):
    tensors = {
        "model.embed_tokens.weight": torch.randn(8, 4),
        "model.norm.weight": torch.randn(4),
        "lm_head.weight": torch.randn(8, 4),
    }
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, tmp_path / f"part-{number}.safetensors")
    weight_map = {name: f"part-{number}.safetensors" for number, name in enumerate(tensors)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    found = read_target_weights(tmp_path)
    assert torch.equal(found.embed_tokens, tensors["model.embed_tokens.weight"])
    assert torch.equal(found.lm_head, tensors["lm_head.weight"])


@pytest.mark.parametrize(
    "directory", sorted(path for path in HEADS.glob("*eagle3*") if path.is_dir())
)
def test_shipped_heads_are_small_and_readable(directory):
    described = describe(directory)
    size = sum(path.stat().st_size for path in directory.iterdir())
    assert size <= 25_000_000
    assert not described.own_embedding
    provenance = json.loads((directory / "provenance.json").read_text())
    assert provenance["held_out"]["chain_tau"] > 1.0

"""Shapes and starts of EAGLE-3 heads that a run may choose: all train, and all are read again."""

import json
from dataclasses import replace

import pytest
import torch

from drafter_service.checkpoint.eagle3_reader import read_eagle3_head
from drafter_service.checkpoint.target import read_target_weights
from drafter_service.checkpoint.writer import write_eagle3
from drafter_service.eagle3.reference import draft_rows
from drafter_service.training.batches import load_batch
from drafter_service.training.eagle3_loss import Eagle3Loss, LossShape
from drafter_service.training.eagle3_settings import HeadSettings
from drafter_service.training.norms import with_trained_norms
from drafter_service.training.start import copy_target_layers, head_config, new_head
from drafter_service.training.target_layers import read_target_layers
from drafter_service.training.trainer import OptimiserSettings, Trainer
from protos.errors import ConfigError
from tests.tiny import tiny_llama_dir
from tests.unit.drafter.training_fakes import (
    HIDDEN,
    VOCAB,
    TinyStore,
    draft_index_of,
    tiny_head,
    tiny_records,
)

RECORDS = tiny_records(8)
TARGET_HIDDEN, TARGET_VOCAB = 32, 64
VARIANTS = {
    "one feature layer": ({"aux_layers": (2,)}, 3),
    "two layers": ({"num_layers": 2, "windows": (None, None)}, 3),
    "EAGLE-3.0 norms": (
        {"fc_norm": False, "norm_feedback": False, "norm_before_residual": False},
        3,
    ),
    "one step": ({}, 1),
    "five steps": ({}, 5),
}


class OneLayerStore(TinyStore):
    """Only the deepest of the recorded layers."""

    def read(self, record_index, layers=None):
        recorded = super().read(record_index)
        return replace(recorded, aux=recorded.aux[:, -HIDDEN * len(layers) :])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_learns_and_is_read_again(variant, tmp_path):
    changes, num_steps = VARIANTS[variant]
    head = tiny_head(**changes)
    with_trained_norms(head)
    index = draft_index_of(head.target_ids, VOCAB)
    loss = Eagle3Loss(head, None, index, LossShape(num_steps=num_steps))
    trainer = Trainer(head, loss, OptimiserSettings(), torch.float32)
    store, layers = OneLayerStore(RECORDS), head.config.aux_layers
    batch = load_batch(RECORDS, (0, 1, 2, 3), store, layers, 2, torch.float32)
    reports = [trainer.update([batch], 1e-2, number) for number in range(12)]
    assert len(reports[0].steps.counts) == num_steps
    assert reports[-1].loss < 0.9 * reports[0].loss
    net = trainer.averaged_net()
    write_eagle3(tmp_path / "head", net, "tiny", torch.float32)
    read = read_eagle3_head(tmp_path / "head", net.embed_tokens.weight.detach(), torch.float32)
    assert read.config.num_aux == len(layers)
    windows = (None,) * head.config.num_layers
    rows = [
        draft_rows(each, batch.features[:6], batch.ids[:6], [5], windows) for each in (net, read)
    ]
    torch.testing.assert_close(rows[0].logits, rows[1].logits, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("target")
    return tiny_llama_dir(root / "target", vocab=TARGET_VOCAB, hidden=TARGET_HIDDEN)


def _settings(**changes):
    facts = {"num_heads": 4, "num_kv_heads": 2, "aux_layers": (0, 1, 2), "draft_vocab_size": 16}
    return HeadSettings(**facts | changes)


def _new(target_dir, settings):
    config = head_config(settings, json.loads((target_dir / "config.json").read_text()))
    return new_head(config, read_target_weights(target_dir), torch.arange(16), seed=0)


def test_layers_start_as_the_targets_last_ones(target_dir):
    last, second = reversed(read_target_layers(target_dir, 2))
    width = last["mlp.gate_proj.weight"].shape[0]
    settings = _settings(intermediate_size=width, num_layers=2)
    fresh, head = _new(target_dir, settings), _new(target_dir, settings)
    copy_target_layers(head, target_dir)
    for name in "qkv":
        ours = head.layer.get_parameter(f"{name}_proj.weight")
        embedding, hidden = ours.chunk(2, dim=1)
        assert torch.equal(hidden, second[f"self_attn.{name}_proj.weight"])
        first = fresh.layer.get_parameter(f"{name}_proj.weight")[:, :TARGET_HIDDEN]
        assert 0 < embedding.abs().max() < 0.2 * first.abs().max()
    assert torch.equal(head.layer.hidden_norm.weight, second["input_layernorm.weight"])
    assert torch.equal(head.layer.input_layernorm.weight, torch.ones(TARGET_HIDDEN))
    assert torch.equal(head.layer.down_proj.weight, second["mlp.down_proj.weight"])
    assert torch.equal(head.later[0].q_proj.weight, last["self_attn.q_proj.weight"])
    assert torch.equal(head.later[0].input_layernorm.weight, last["input_layernorm.weight"])


def test_a_head_of_other_sizes_cannot_start_as_the_targets_layers(target_dir):
    head = _new(target_dir, _settings(intermediate_size=20))
    with pytest.raises(ConfigError, match=r"_proj.*head has room"):
        copy_target_layers(head, target_dir)
    with pytest.raises(ConfigError, match="expected 9 layers"):
        read_target_layers(target_dir, 9)

"""Recipes of block drafters: how a net begins, is checked, is written and is read again."""

import pytest
import torch
from safetensors.torch import save_file

from drafter_service.checkpoint.block_reader import read_block_net
from drafter_service.checkpoint.block_writer import write_block
from drafter_service.checkpoint.describe import describe
from drafter_service.dflash.config import ConfidenceInput, LayerMask, Layout, Markov, MarkovKind
from drafter_service.dflash.net import BlockNet
from drafter_service.dflash.reference import greedy_chain, run_block
from drafter_service.training.block_check import agreement, check_blocks
from drafter_service.training.block_loss import BlockLoss, BlockLossShape
from drafter_service.training.block_settings import BlockHeadSettings
from drafter_service.training.block_start import (
    block_config,
    copy_target_layers,
    inherited_block,
)
from drafter_service.training.first_weights import FROZEN
from drafter_service.training.trainer import OptimiserSettings, Trainer
from protos.errors import CheckpointError, ConfigError
from tests.unit.drafter.block_fakes import tiny_block, tiny_target
from tests.unit.drafter.training_fakes import VOCAB, tiny_batch, tiny_records

HEADS = {
    "layout": Layout.ANCHOR_FIRST,
    "markov": Markov(MarkovKind.VANILLA, 4),
    "confidence": ConfidenceInput.HIDDEN_AND_TOKEN,
}
TARGET = {
    "hidden_size": 576,
    "vocab_size": 49152,
    "num_hidden_layers": 30,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def test_updates_lower_the_loss_and_leave_the_target_s_weights_alone():
    net, batch = tiny_block(), tiny_batch(tiny_records(6), tuple(range(6)))
    frozen = {name: p.clone() for name, p in net.named_parameters() if name in FROZEN}
    loss = BlockLoss(net, tiny_target().lm_head, torch.arange(VOCAB), BlockLossShape(1.0))
    trainer = Trainer(net, loss, OptimiserSettings(), torch.float32)
    losses = [trainer.update([batch], 0.01, number).loss for number in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(frozen[name], net.get_parameter(name)) for name in FROZEN)


@pytest.mark.parametrize("switches", [{}, HEADS], ids=["in place", "with small heads"])
def test_a_written_drafter_is_read_back_as_it_was_with_the_target_s_tensors(tmp_path, switches):
    net, target = tiny_block(**switches), tiny_target()
    write_block(tmp_path, net, 5, "some-target", {"commit": "abc"}, torch.float32)
    described = describe(tmp_path)
    assert described.config == net.config
    assert (described.own_embedding, described.own_lm_head) == (False, False)
    assert described.kind == ("dspark" if switches else "dflash")
    again = read_block_net(tmp_path, described, target.embed_tokens, target.lm_head, torch.float32)
    for name, parameter in net.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


def test_what_no_layout_can_say_is_not_written(tmp_path):
    net = tiny_block(masks=(LayerMask(causal=True), LayerMask()))
    with pytest.raises(CheckpointError, match="masks"):
        write_block(tmp_path / "new", net, 5, "")
    assert not (tmp_path / "new").exists()


def test_a_written_drafter_can_be_trained_further_and_another_shape_cannot(tmp_path):
    net, target = tiny_block(), tiny_target()
    write_block(tmp_path, net, 5, "", None, torch.float32)
    weights = inherited_block(tmp_path, target, tiny_block(seed=1))
    assert set(weights) == {name for name, p in net.named_parameters() if p.requires_grad}
    assert torch.equal(weights["fc.weight"], net.fc.weight)
    with pytest.raises(ConfigError, match="another drafter"):
        inherited_block(tmp_path, target, tiny_block(block_size=6))


def test_a_mask_token_that_ends_texts_or_has_no_embedding_is_refused():
    for mask_id in (2, 49152):
        with pytest.raises(ConfigError, match="mask_id"):
            block_config(BlockHeadSettings(mask_id=mask_id), TARGET, Layout.IN_PLACE)
    config = block_config(BlockHeadSettings(), TARGET, Layout.IN_PLACE)
    assert (config.mask_id, config.num_layers, config.num_drafts) == (16, 3, 7)


def test_layers_can_begin_as_the_last_ones_of_the_target(tmp_path):
    net = tiny_block()
    shapes = {
        name.split(".", 2)[2]: p.shape
        for name, p in net.named_parameters()
        if name.startswith("layers.0.") and "_norm" not in name.replace("layernorm", "")
    }
    tensors = {
        f"model.layers.{layer}.{name}": torch.randn(shape)
        for layer in range(5)
        for name, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    copy_target_layers(net, tmp_path)
    copied = net.get_parameter("layers.1.self_attn.k_proj.weight")
    assert torch.equal(copied, tensors["model.layers.4.self_attn.k_proj.weight"])
    assert torch.equal(net.hidden_norm.weight, tensors["model.layers.3.input_layernorm.weight"])
    with pytest.raises(ConfigError, match="start: random"):
        copy_target_layers(tiny_block(intermediate_size=48), tmp_path)


def test_agreement_is_that_of_each_anchor_s_own_draft():
    net, records = tiny_block(), tiny_records(6)
    batch = tiny_batch(records, (4, 1))
    agreed, counted = agreement(net, batch)
    for rows in batch.records:
        features = torch.cat([batch.prompt_features[rows.prompt], batch.features[rows.answer]])
        for row in range(rows.answer.start, rows.answer.stop):
            with torch.no_grad():
                fused = net.fuse(features[: int(batch.positions[row]) + 1])
                block = run_block(net, fused, int(batch.ids[row]))
                chain = greedy_chain(net, block, int(batch.ids[row]))
            for draft, guess in enumerate(chain.target_ids):
                exists = row + draft < rows.answer.stop and int(batch.choices[row + draft]) >= 0
                assert bool(counted[draft, row]) == exists
                right = exists and guess == int(batch.choices[row + draft])
                assert bool(agreed[draft, row]) == right


def test_replayed_tau_counts_the_drafts_accepted_in_a_row():
    batch = tiny_batch(tiny_records(6), (4,))
    found = check_blocks(tiny_block(), [(batch, (True,))], None)
    rounds, accepted = found.figures["num_rounds"], found.figures["accepted_by_depth"]
    assert found.score == pytest.approx(1.0 + sum(accepted))
    assert rounds * found.score == pytest.approx(
        batch.num_rows, abs=3
    )  # all rows but what a last round may overrun


def test_settings_of_the_shipped_config_make_a_drafter_of_at_most_25_megabytes(tmp_path):
    config = block_config(BlockHeadSettings(), TARGET, Layout.IN_PLACE)
    with torch.device("meta"):
        net = BlockNet(config)
    size = sum(p.numel() * 2 for name, p in net.named_parameters() if name not in FROZEN)
    assert size <= 25_000_000

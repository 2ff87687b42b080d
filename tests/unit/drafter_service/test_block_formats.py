"""Every public format of block drafters loads as what it says; every trap is refused by name."""

import json

import pytest
import torch
from block_cases import AUX, BLOCK, SWITCHES, VOCAB, WINDOW, tiny_net
from block_files import deepspec, jetspec, specforge, speculators, write, zlab, zlab2
from safetensors.torch import load_file, save_file

from drafter_service.checkpoint.block_reader import read_block_net
from drafter_service.checkpoint.describe import describe
from drafter_service.dflash.config import BlockConfig, LayerMask, Layout
from drafter_service.dflash.reference import run_block
from protos.errors import CheckpointError

CAUSAL = {"masks": (LayerMask(True), LayerMask(True))}
DFLASH2_AS_SPECULATORS = SWITCHES["dflash2"] | {"masks": (LayerMask(False, WINDOW, True),) * 2}

FORMATS = {
    "zlab-dflash": (zlab, {}, "dflash"),
    "zlab-dflash2": (zlab2, SWITCHES["dflash2"], "dflash"),
    "jetspec": (jetspec, CAUSAL, "dflash"),
    "specforge": (specforge, {}, "dflash"),
    "specforge dspark": (specforge, SWITCHES["gated"], "dspark"),
    "deepspec": (deepspec, SWITCHES["anchor first"], "dflash"),
    "deepspec dspark": (deepspec, SWITCHES["rnn"], "dspark"),
    "speculators": (speculators, {}, "dflash"),
    "speculators reduced": (speculators, SWITCHES["reduced vocabulary"], "dflash"),
    "speculators dflash2": (speculators, DFLASH2_AS_SPECULATORS, "dflash"),
    "speculators dspark": (speculators, SWITCHES["serial over a reduced vocabulary"], "dspark"),
    "speculators window": (speculators, SWITCHES["window from the anchor"], "dflash"),
}


def read(directory, net):
    described = describe(directory)
    return read_block_net(
        directory, described, net.embed_tokens.weight, net.lm_head.weight, torch.float32
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_of_every_format_is_read_back_whole(tmp_path, name):
    form, switches, kind = FORMATS[name]
    net = tiny_net(**switches)
    directory = write(tmp_path, net, form(net))
    described = describe(directory)
    assert described.kind == kind
    assert described.format == name.split(" ")[0]
    config: BlockConfig = described.config
    assert config == net.config
    assert described.projection.norm_form == "after"
    back = read(directory, net)
    fused = net.fuse(torch.randn(9, net.config.feature_size))
    expected, got = run_block(net, fused, 3), run_block(back, fused, 3)
    assert torch.equal(expected.logits, got.logits)
    assert torch.equal(back.target_ids, net.target_ids)


def test_own_embedding_and_lm_head_are_not_overwritten_by_the_targets(tmp_path):
    net = tiny_net(**SWITCHES["vanilla"])
    directory = write(tmp_path, net, deepspec(net), own=True)
    described = describe(directory)
    assert described.own_embedding
    assert described.own_lm_head
    other = torch.zeros(VOCAB, net.config.hidden_size)
    back = read_block_net(directory, described, other, other, torch.float32)
    assert torch.equal(back.lm_head.weight, net.lm_head.weight)
    assert torch.equal(back.embed_tokens.weight, net.embed_tokens.weight)


def test_layer_ids_that_no_file_names_come_from_the_public_default(tmp_path):
    net = tiny_net(aux_layers=(1, 4))
    config = zlab(net)
    del config["dflash_config"]["target_layer_ids"]
    assert describe(write(tmp_path, net, config)).aux_layers == (1, 4)


def test_what_the_file_leaves_open_is_said(tmp_path):
    net = tiny_net()
    notes = describe(write(tmp_path / "a", net, zlab(net))).config.notes
    assert any("in-place" in note for note in notes)
    config = speculators(net)
    del config["sample_from_anchor"]
    notes = describe(write(tmp_path / "b", net, config)).config.notes
    assert any("sample_from_anchor" in note for note in notes)


def test_a_stray_weights_file_is_passed_over(tmp_path):
    net = tiny_net()
    directory = write(tmp_path, net, zlab(net))
    for name in ("aaa.safetensors", "zzz.safetensors"):
        save_file({"norm.weight": torch.zeros(1)}, directory / name)
    assert torch.equal(read(directory, net).norm.weight, net.norm.weight)


def nested(key, **values):
    def change(config):
        config[key] = {**config[key], **values}

    return change


def top(**values):
    return lambda config: config.update(values)


def without(*keys):
    def change(config):
        for key in keys:
            for part in (config, config.get("dflash_config", {})):
                part.pop(key, None)

    return change


MUTATIONS = {
    "no mask id": (zlab, {}, without("mask_token_id"), "mask_token_id is missing"),
    "mask id outside the vocabulary": (
        zlab,
        {},
        nested("dflash_config", mask_token_id=VOCAB),
        "outside the vocabulary",
    ),
    "mask token without an id": (
        zlab,
        {},
        lambda c: c.update(dflash_config={"mask_token": "<|MASK|>", "target_layer_ids": [0, 1, 2]}),
        "mask_token_id is needed",
    ),
    "no block size": (zlab, {}, without("block_size"), "block_size"),
    "block of the anchor alone": (zlab, {}, top(block_size=1), "drafts nothing"),
    "a layer id too few": (
        zlab,
        {},
        nested("dflash_config", target_layer_ids=[0, 1]),
        "fc.weight of shape",
    ),
    "layer ids out of order": (
        zlab,
        {},
        nested("dflash_config", target_layer_ids=[2, 1, 0]),
        "ascending",
    ),
    "layer ids twice": (
        zlab,
        {},
        nested("dflash_config", target_layer_ids=[0, 1, 1]),
        "ascending",
    ),
    "unknown projector": (
        specforge,
        {},
        nested("dflash_config", projector_type="domino"),
        "projector_type 'domino'",
    ),
    "another attention": (
        specforge,
        SWITCHES["gated"],
        nested("dflash_config", attention_mode="mla"),
        "attention_mode 'mla'",
    ),
    "unknown serial head": (
        deepspec,
        SWITCHES["rnn"],
        top(markov_head_type="mamba"),
        "markov_head_type 'mamba'",
    ),
    "serial head switched off in the config": (
        deepspec,
        SWITCHES["rnn"],
        top(markov_rank=0),
        "unknown: \\['markov_head",
    ),
    "serial head switched on without weights": (
        deepspec,
        SWITCHES["anchor first"],
        top(markov_rank=8),
        "missing: \\['markov_head",
    ),
    "confidence head switched off in the config": (
        deepspec,
        SWITCHES["rnn"],
        top(enable_confidence_head=False),
        "unknown: \\['confidence_head",
    ),
    "confidence head over another input": (
        deepspec,
        SWITCHES["rnn"],
        top(confidence_head_with_markov=True),
        "confidence_head.proj.weight: expected shape",
    ),
    "DFlash 2 read as DFlash 1": (
        zlab2,
        SWITCHES["dflash2"],
        without("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"),
        "unknown:",
    ),
    "windows without a size": (
        zlab,
        {},
        top(layer_types=["sliding_attention"] * 2),
        "need sliding_window",
    ),
    "a layer of no known kind": (
        zlab,
        {},
        top(layer_types=["linear_attention"] * 2),
        "layer_types",
    ),
    "fewer kinds than layers": (zlab, {}, top(layer_types=["full_attention"]), "layer_types"),
    "windows in an engine's words": (
        zlab,
        {},
        nested("dflash_config", use_swa=True, swa_window_size=4),
        "use_swa",
    ),
    "interleaved positions": (zlab, {}, top(is_neox_style=False), "interleaved"),
    "another family of layers": (zlab, {}, top(model_type="llama"), "model_type 'llama'"),
    "sinks": (zlab, {}, nested("dflash_config", attention_sink_bias=True), "attention_sink_bias"),
    "quantised weights": (zlab, {}, top(quantization_config={"bits": 4}), "quantization_config"),
    "another rope": (zlab, {}, top(rope_scaling={"rope_type": "spiral"}), "rope"),
    "more layers in the config": (
        zlab,
        {},
        top(num_hidden_layers=3, layer_types=["full_attention"] * 3),
        "missing:",
    ),
    "fewer layers in the config": (
        zlab,
        {},
        top(num_hidden_layers=1, layer_types=["full_attention"]),
        "unknown:",
    ),
    "a reduced vocabulary that the weights do not have": (
        speculators,
        {},
        top(draft_vocab_size=VOCAB // 2),
        "lm_head.weight is missing",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_trap_in_a_config_is_refused_by_name(tmp_path, name):
    form, switches, change, said = MUTATIONS[name]
    net = tiny_net(**switches)
    config = form(net)
    change(config)
    with pytest.raises(CheckpointError, match=said):
        describe(write(tmp_path, net, config))


def _without_map(tensors):
    del tensors["d2t"]


def _map_outside(tensors):
    tensors["d2t"][-1] = VOCAB


def _map_twice(tensors):
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def _other_marks(tensors):
    tensors["t2d"] = ~tensors["t2d"]


def _short_map(tensors):
    tensors["d2t"] = tensors["d2t"][:-1].clone()


WEIGHTS = {
    "no map": (_without_map, "without d2t"),
    "a map outside the vocabulary": (_map_outside, "outside the vocabulary"),
    "a map that is not one to one": (_map_twice, "two draft ids to one"),
    "marks of other ids": (_other_marks, "different target ids"),
    "a shorter map": (_short_map, "d2t: expected shape"),
    "no norm": (lambda tensors: tensors.pop("hidden_norm.weight"), "missing"),
    "an unknown tensor": (lambda t: t.update(extra=torch.zeros(1)), "unknown: \\['extra'\\]"),
    "integer weights": (
        lambda t: t.update({"norm.weight": torch.ones(32, dtype=torch.int64)}),
        "floating point",
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_trap_in_the_weights_is_refused_by_name(tmp_path, name):
    change, said = WEIGHTS[name]
    net = tiny_net(**SWITCHES["reduced vocabulary"])
    directory = write(tmp_path, net, speculators(net))
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        read(directory, net)


def test_weights_in_shards_are_read_and_a_missing_shard_is_named(tmp_path):
    net = tiny_net()
    directory = write(tmp_path, net, zlab(net))
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {name: f"part{number % 3}.safetensors" for number, name in enumerate(names)}
    for shard in set(index.values()):
        own = {name: tensors[name] for name in names if index[name] == shard}
        save_file(own, directory / shard)
    file = directory / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": index}))
    back = read(directory, net)
    assert torch.equal(back.norm.weight, net.norm.weight)
    (directory / "part1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="part1"):
        describe(directory)


def test_a_projection_over_two_files_leaves_rows_raw(tmp_path):
    net = tiny_net()
    directory = write(tmp_path, net, zlab(net))
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    norm = {"hidden_norm.weight": tensors.pop("hidden_norm.weight")}
    save_file(norm, directory / "b.safetensors")
    save_file(tensors, directory / "a.safetensors")
    index = dict.fromkeys(tensors, "a.safetensors") | dict.fromkeys(norm, "b.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert describe(directory).projection is None


def test_a_layout_read_as_the_other_changes_every_draft(tmp_path):
    net = tiny_net()
    config = speculators(net) | {"sample_from_anchor": True}
    wrong = describe(write(tmp_path, net, config)).config
    assert wrong.layout is Layout.ANCHOR_FIRST
    assert (wrong.num_drafts, net.config.num_drafts) == (BLOCK, BLOCK - 1)
    assert wrong.aux_layers == AUX

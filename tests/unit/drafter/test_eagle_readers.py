"""Traps of EAGLE checkpoints: a copy of a working head for each, refused by name or read right."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_service.checkpoint.aux_ids import Convention, read_aux_ids
from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.eagle3_reader import SharedWeights, head_of, read_eagle3_head
from drafter_service.checkpoint.writer import write_eagle3
from drafter_service.eagle3.config import Rope
from drafter_service.eagle3.reference import draft_rows
from protos.errors import CheckpointError
from protos.features import FINAL_LAYER
from tests.unit.drafter.reader_cases import flat_config
from tests.unit.drafter_service.eagle3_cases import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    features_of,
    tiny_head,
)

IDS = torch.arange(6) * 7 % VOCAB
AUX = (1, 3, 4)


class Copy:
    """A head in a directory whose config and tensors can be changed."""

    def __init__(self, directory, head, config=None):
        self.directory, self.head = directory, head
        write_eagle3(directory, head, "a target", torch.float32)
        if config is not None:
            (directory / "config.json").write_text(json.dumps(config))

    def config(self, **changes):
        path = self.directory / "config.json"
        config = json.loads(path.read_text())
        layer = config.get("transformer_layer_config", config)
        for key, value in changes.items():
            (layer if key in layer and key not in config else config)[key] = value
        path.write_text(json.dumps(config))
        return self

    def tensors(self, edit):
        path = self.directory / "model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path)
        return self

    def read(self, num_target_layers=8, label=""):
        described = describe(self.directory, num_target_layers).choose(label)
        embedding = self.head.embed_tokens.weight.detach()
        shared = SharedWeights(embedding, embedding.flip(0))
        return head_of(described, self.directory, shared, torch.float32)

    def logits(self, **how):
        return logits_of(self.read(**how))


def logits_of(head):
    features = features_of(6, width=head.config.feature_size)
    return draft_rows(head, features, IDS, [5, 9], head.config.windows).logits


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path / "head", tiny_head(aux_layers=AUX))


def midlayer(tensors):
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        tensors[f"midlayer.{name.removeprefix('layers.0.')}"] = tensors.pop(name)


FORGE = {"architectures": ["LlamaForCausalLMEagle3"]}
NVIDIA = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
DIALECTS = {
    "safeailab": ({}, midlayer),
    "specforge": (FORGE, midlayer),
    "modelopt": (
        FORGE | {"eagle_config": NVIDIA | {"use_input_layernorm_in_first_layer": False}},
        lambda tensors: tensors.pop("t2d"),
    ),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_one_head_drafts_the_same_in_every_dialect(tmp_path, copy, name):
    more, edit = DIALECTS[name]
    other = Copy(tmp_path / name, copy.head, flat_config(copy.head, **more)).tensors(edit)
    described = describe(other.directory, 8)
    assert (described.kind, described.format) == ("eagle3", name)
    assert described.aux_layers == AUX
    assert torch.equal(other.logits(), copy.logits())


def test_a_model_prefix_is_passed_over_but_not_half_of_one(copy):
    expected = copy.logits()

    def prefix(tensors):
        for key in [key for key in tensors if key not in ("lm_head.weight", "d2t", "t2d")]:
            tensors[f"model.{key}"] = tensors.pop(key)

    assert torch.equal(copy.tensors(prefix).logits(), expected)
    copy.tensors(lambda t: t.update({"norm.weight": t["model.norm.weight"].clone()}))
    with pytest.raises(CheckpointError, match="with and without"):
        copy.read()


@pytest.mark.parametrize(
    ("ids", "convention", "layers", "expected"),
    [
        ([2, 4, 5], Convention.INPUTS, 8, {"inputs": (1, 3, 4)}),
        ([1, 3, 4], Convention.OUTPUTS, 8, {"outputs": (1, 3, 4)}),
        (None, Convention.UNKNOWN, 8, {"inputs": (1, 3, 4)}),
        (None, Convention.UNKNOWN, 6, {"inputs": (1, 2)}),
        ([1, 15, 28], Convention.UNKNOWN, 32, {"outputs": (1, 15, 28)}),
        ([2, 16, 29], Convention.UNKNOWN, 32, {"inputs": (1, 15, 28)}),
        ([2, 16, 29], Convention.UNKNOWN, None, {"outputs": (2, 16, 29), "inputs": (1, 15, 28)}),
        ([4, 20, 40], Convention.UNKNOWN, 48, {"outputs": (4, 20, 40), "inputs": (3, 19, 39)}),
        ([24, 30, 36], Convention.OUTPUTS, 36, {"inputs": (23, 29, 35)}),
    ],
)
def test_aux_ids_of_both_conventions_become_outputs(ids, convention, layers, expected):
    assert read_aux_ids(ids, convention, layers) == expected


@pytest.mark.parametrize(
    ("ids", "convention", "layers", "reason"),
    [
        (None, Convention.UNKNOWN, None, "depth is unknown"),
        ([0, 3], Convention.INPUTS, 8, "counted from 0"),
        ([1, 9], Convention.OUTPUTS, 8, "do not fit a target of 8"),
        ([3, 3], Convention.OUTPUTS, 8, "distinct"),
    ],
)
def test_aux_ids_that_fit_nowhere_are_refused(ids, convention, layers, reason):
    with pytest.raises(CheckpointError, match=reason):
        read_aux_ids(ids, convention, layers)


def test_an_unknown_convention_is_said_with_both_candidates(tmp_path, copy):
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}}
    config = flat_config(copy.head, **FORGE, **ids)
    other = Copy(tmp_path / "other", copy.head, config).tensors(midlayer)
    described = describe(other.directory, 8)
    assert described.aux_convention == "unknown"
    assert described.aux_candidates == ((3, 5, 6), (2, 4, 5))
    chosen = described.choose("aux inputs")
    assert chosen.aux_layers == chosen.projection.aux_layers == (2, 4, 5)
    assert (chosen.aux_convention, chosen.config.aux_layers) == ("known", (2, 4, 5))
    with pytest.raises(CheckpointError, match="no variant 'aux nothing'"):
        described.choose("aux nothing")


def test_layer_ids_shifted_by_one_change_the_draft(golden_dir):
    """The tree of a trained head on its target's own states, and on those one layer later."""
    directory = golden_dir / "eagle" / "e2e_safeailab"
    io = load_file(directory / "io.safetensors")
    described = describe(directory, 8)
    target = load_file(directory / "target.safetensors")
    head = read_eagle3_head(directory, target["model.embed_tokens.weight"], torch.float32, 8)
    boundaries = io["prompt0.target_hidden_all_boundaries"]
    ids = io["prompt0.tree_16_3_4.round0.input_ids"]
    logits = []
    for shift in (1, 2):
        rows = torch.cat([boundaries[layer + shift] for layer in described.aux_layers], dim=-1)
        logits.append(draft_rows(head, rows, ids[1:]).logits)
        if shift == 1:
            torch.testing.assert_close(rows, io["prompt0.eagle_captured_features"])
    assert (logits[0] - logits[1]).abs().max() > 1.0


def test_a_reduced_vocabulary_needs_its_map_and_an_equal_one_does_not(tmp_path, copy):
    copy.tensors(lambda t: (t.pop("d2t"), t.pop("t2d")))
    with pytest.raises(CheckpointError, match="without d2t"):
        copy.read()
    full = Copy(tmp_path / "full", tiny_head(aux_layers=AUX, draft_vocab_size=VOCAB))
    assert "d2t" not in load_file(full.directory / "model.safetensors")
    assert torch.equal(full.logits(), logits_of(full.head))


def test_a_full_vocabulary_may_leave_the_lm_head_to_the_target(tmp_path):
    full = Copy(tmp_path / "full", tiny_head(aux_layers=AUX, draft_vocab_size=VOCAB))
    full.config(draft_vocab_size=None)
    full.tensors(lambda t: t.pop("lm_head.weight"))
    assert not describe(full.directory).own_lm_head
    read = full.read()
    assert torch.equal(read.lm_head.weight, full.head.embed_tokens.weight.flip(0))
    described = describe(full.directory)
    with pytest.raises(CheckpointError, match=r"no lm_head\.weight"):
        head_of(described, full.directory, SharedWeights(torch.zeros(VOCAB, HIDDEN)), torch.float32)
    own = full.head.embed_tokens.weight.detach().roll(1, 0).contiguous()
    full.config(tie_word_embeddings=True).tensors(lambda t: t.update({"embed_tokens.weight": own}))
    assert torch.equal(full.read().lm_head.weight, own)


def test_a_reduced_vocabulary_has_its_own_lm_head_whatever_the_tie_flag_says(copy):
    expected = copy.logits()
    assert expected.shape[1] == DRAFT_VOCAB
    assert torch.equal(copy.config(tie_word_embeddings=True).logits(), expected)
    copy.tensors(lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing: \['lm_head.weight'\]"):
        copy.read()


def test_a_head_of_another_width_brings_projection_and_embedding(tmp_path):
    narrow = Copy(tmp_path / "narrow", tiny_head(aux_layers=AUX, target_hidden_size=2 * HIDDEN))
    assert torch.equal(narrow.logits(), logits_of(narrow.head))
    narrow.tensors(lambda t: t.pop("embed_tokens.weight"))
    with pytest.raises(CheckpointError, match=f"width {HIDDEN} cannot share.*{2 * HIDDEN}"):
        narrow.read()
    narrow.tensors(lambda t: t.pop("fc.weight"))
    with pytest.raises(CheckpointError, match=f"width {2 * HIDDEN} into a head of width {HIDDEN}"):
        narrow.read()


def test_norms_before_the_projection_are_used_or_refused(copy):
    plain = copy.logits()
    weight = {"input_norm.weight": torch.linspace(0.5, 2, 3 * HIDDEN)}
    copy.tensors(lambda t: t.update(weight))
    with pytest.raises(CheckpointError, match=r"unknown: \['input_norm.weight'\]"):
        copy.read()
    normed = copy.config(norm_before_fc=True).logits()
    assert (normed - plain).abs().max() > 0.1
    copy.tensors(lambda t: t.pop("input_norm.weight"))
    with pytest.raises(CheckpointError, match=r"missing: \['input_norm.weight'\]"):
        copy.read()


def test_a_missing_residual_flag_means_what_vllm_takes_it_for(copy):
    path = copy.directory / "config.json"
    config = json.loads(path.read_text())
    config.pop("norm_before_residual")
    path.write_text(json.dumps(config))
    assert copy.read().config.norm_before_residual


def test_specforge_flags_are_read_as_written_and_as_meant_later(tmp_path, copy):
    config = flat_config(copy.head, **FORGE, norm_output=True)
    other = Copy(tmp_path / "forge", copy.head, config).tensors(midlayer)
    labels = [variant.label for variant in describe(other.directory, 8).variants]
    assert labels == ["as written", "normed feedback"]
    assert torch.equal(other.logits(), copy.logits())
    assert other.read(label="normed feedback").config.norm_feedback
    assert not torch.equal(other.logits(label="normed feedback"), copy.logits())
    bare = other.config(norm_output=False).read().config
    assert (bare.norm_logits, bare.norm_feedback) == (False, False)


def test_nvidia_heads_are_read_with_and_without_what_their_export_adds(tmp_path, copy):
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    config = flat_config(copy.head, **FORGE, eagle_config=NVIDIA, rope_scaling=yarn)
    other = Copy(tmp_path / "nvidia", copy.head, config).tensors(lambda t: t.pop("t2d"))
    described = describe(other.directory, 8)
    assert [variant.label for variant in described.variants] == [
        "as written",
        "one hidden norm",
        "plain rope",
        "one hidden norm, plain rope",
    ]
    first = described.choose("").config
    assert (first.rope.kind, first.input_norm_on_hidden) == ("yarn", True)
    assert math.isclose(first.rope.attention_factor, 0.1 * math.log(32) + 1)
    assert torch.equal(other.logits(label="one hidden norm, plain rope"), copy.logits())
    described.choose("one hidden norm")
    for key, value in {"parallel_draft_step": 2, "use_mtp_layernorm": True}.items():
        other.config(eagle_config=NVIDIA | {key: value})
        with pytest.raises(CheckpointError, match=key):
            other.read()


def test_a_head_on_one_final_state_may_lack_the_projection(tmp_path):
    head = tiny_head(aux_layers=(FINAL_LAYER,), has_fc=False)
    shutil.rmtree(tmp_path / "final", ignore_errors=True)
    config = flat_config(head, **FORGE, eagle_config={"use_aux_hidden_state": False})
    template = Copy(tmp_path / "final", tiny_head(aux_layers=(2,)), config)
    template.tensors(lambda t: t.pop("fc.weight"))
    described = describe(template.directory, 8)
    assert (described.aux_layers, described.projection) == ((FINAL_LAYER,), None)
    assert template.read().fc is None


@pytest.mark.parametrize(
    "facts", [{"attention_bias": True}, {"qkv_bias": True}, {"mlp_bias": True}]
)
@pytest.mark.parametrize("flag", [True, False, None])
def test_biases_are_there_where_the_file_has_them(tmp_path, facts, flag):
    """Families disagree on what `attention_bias` covers; tensors do not."""
    biased = Copy(tmp_path / "head", tiny_head(aux_layers=AUX, **facts))
    if not flag:
        biased.config(attention_bias=False, mlp_bias=False, qkv_bias=False)
    elif "qkv_bias" in facts:
        biased.config(attention_bias=True)
    assert torch.equal(biased.logits(), logits_of(biased.head))


def test_quantised_heads_are_refused(copy):
    copy.config(quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match="quantization_config"):
        copy.read()


def test_weights_in_eight_bits_are_refused_even_without_a_word_in_the_config(copy):
    copy.tensors(lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match=r"fc\.weight: expected floating point"):
        copy.read()


def shard(directory):
    """The single file in three, with an index."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    weight_map = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(names)}
    weight_map["fc.weight"] = "part-0.safetensors"
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, directory / file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_read_as_one_file_and_a_missing_one_is_named(copy):
    expected = copy.logits()
    shard(copy.directory)
    assert torch.equal(copy.logits(), expected)
    (copy.directory / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors"):
        copy.read()


@pytest.mark.parametrize("name", ["aaa.safetensors", "zzz.safetensors"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_stray_file_beside_the_weights_changes_nothing(copy, name, sharded):
    expected, digest = copy.logits(), describe(copy.directory).digest
    if sharded:
        shard(copy.directory)
        digest = describe(copy.directory).digest
    save_file({"lm_head.weight": torch.zeros(DRAFT_VOCAB, HIDDEN)}, copy.directory / name)
    assert torch.equal(copy.logits(), expected)
    assert describe(copy.directory).digest == digest


def test_an_empty_directory_says_what_was_expected(tmp_path):
    with pytest.raises(CheckpointError, match="found no weights"):
        describe(tmp_path)


@pytest.mark.parametrize("files", [["pytorch_model.bin"], ["a.bin", "b.bin"], ["model.pt"]])
def test_pickled_weights_name_the_command_that_makes_them_safe(copy, files):
    (copy.directory / "model.safetensors").unlink()
    for name in files:
        (copy.directory / name).write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match="outrider convert"):
        copy.read()


PARALLEL = {"mask_token_id": 3, "num_layers": 2, "windows": (None, None)}
WRITTEN = {
    "several layers and windows": {"num_layers": 3, "windows": (None, 5, None), "qk_norm": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qkv bias": {"qkv_bias": True},
    "yarn": {"rope": Rope(5e5, "yarn", 8.0, original_max_positions=64, attention_factor=1.3)},
    "another width": {"target_hidden_size": 2 * HIDDEN},
    "parallel": PARALLEL,
}


@pytest.mark.parametrize("facts", WRITTEN.values(), ids=WRITTEN)
def test_what_is_written_is_read_back(tmp_path, facts):
    written = Copy(tmp_path / "head", tiny_head(aux_layers=AUX, **facts))
    read = written.read()
    assert read.config == written.head.config
    assert torch.equal(logits_of(read), logits_of(written.head))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mask_token_id": None}, "needs one of mask_token_id"),
        ({"mask_token_id": VOCAB}, "outside the vocabulary"),
        ({"mask_token_id": -1}, "outside the vocabulary"),
    ],
)
def test_a_parallel_head_needs_a_mask_inside_the_vocabulary(tmp_path, changes, reason):
    parallel = Copy(tmp_path / "head", tiny_head(aux_layers=AUX, **PARALLEL)).config(**changes)
    with pytest.raises(CheckpointError, match=reason):
        parallel.read()


def test_a_parallel_head_is_known_by_its_placeholder_and_other_words_for_the_mask(tmp_path):
    head = tiny_head(aux_layers=AUX, **PARALLEL)
    parallel = Copy(tmp_path / "head", head).config(mask_token_id=None, ptd_token_id=3)
    parallel.tensors(lambda t: t.update(mask_hidden=t["mask_hidden"].view(1, 1, -1).contiguous()))
    assert parallel.read().config.mask_token_id == 3
    torch.testing.assert_close(parallel.read().masked(), head.masked())
    parallel.tensors(lambda t: t.pop("mask_hidden"))
    with pytest.raises(CheckpointError, match=r"missing: \['mask_hidden'\]"):
        parallel.read()

"""`outrider convert`: keys of the public layouts, weights bit for bit, facts read back."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cluster.tools.cli import main
from drafter_service.checkpoint.convert.cli import convert
from drafter_service.checkpoint.describe import describe
from protos.errors import CheckpointError, ConfigError

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT.parent / "shared" / "golden"
SHIPPED = ROOT / "drafter_service" / "heads" / "smollm2-135m-eagle3"
LAYOUTS = ("speculators", "sglang")

LAYER = [
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
]
EAGLE3_LAYER = ["hidden_norm.weight", *LAYER]
EAGLE3 = ["fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"]
EMBED = "embed_tokens.weight"
FC_NORMS = [f"fc_norm.{number}.weight" for number in range(3)]
QK_NORMS = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
BLOCK = ["fc.weight", "hidden_norm.weight", "norm.weight"]
CONVOLUTIONS = [
    f"{name}_conv.{part}"
    for name in ("attention", "mlp")
    for part in ("base_kernel", "kernel_projection.weight")
]
SELECTOR = [
    f"candidate_selector.{name}"
    for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
]
MARKOV = ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
CONFIDENCE = ["confidence_head.proj.weight", "confidence_head.proj.bias"]


def eagle3_keys(prefix, *more):
    return {*EAGLE3, *more, *(f"{prefix}{name}" for name in EAGLE3_LAYER)}


def block_keys(num_layers, *more, per_layer=()):
    names = [*LAYER, *QK_NORMS, *per_layer]
    return {*BLOCK, *more, *(f"layers.{n}.{name}" for n in range(num_layers) for name in names)}


EXPECTED = {
    ("eagle/eagle3_1_speculators", "speculators"): eagle3_keys("layers.0.", *FC_NORMS, EMBED),
    ("eagle/eagle3_1_speculators", "sglang"): eagle3_keys("midlayer.", *FC_NORMS, EMBED),
    ("eagle/eagle3_specforge", "speculators"): eagle3_keys("layers.0."),
    ("eagle/eagle3_specforge", "sglang"): eagle3_keys("midlayer."),
    ("eagle/eagle3_safeailab", "speculators"): eagle3_keys("layers.0."),
    ("eagle/eagle3_safeailab", "sglang"): eagle3_keys("midlayer."),
    ("dflash/dflash_v1_zlab", "speculators"): block_keys(3),
    ("dflash/dflash_v1_zlab", "sglang"): block_keys(3),
    ("dflash/dflash2_pypi", "sglang"): block_keys(2, *SELECTOR, per_layer=CONVOLUTIONS),
    ("dflash/dspark_deepspec_vanilla", "speculators"): block_keys(2, *MARKOV, *CONFIDENCE),
    ("dflash/dspark_deepspec_vanilla", "sglang"): block_keys(2, *MARKOV, *CONFIDENCE),
    ("dflash/jetspec", "sglang"): block_keys(2),
}

UNSAYABLE = {
    ("eagle/eagle3_deepspec", "sglang"): "norms on queries and keys",
    ("eagle/eagle3_deepspec_two_layers_train_only", "speculators"): "doubled input",
    ("eagle/eagle3_modelopt_neutral_input_norm", "speculators"): "a norm before the hidden norm",
    ("eagle/eagle3_speculators_two_layers", "sglang"): "several layers",
    ("eagle/eagle3_speculators_sliding_window", "sglang"): "sliding windows",
    ("dflash/dflash_swa", "speculators"): "windows counted from each slot",
    ("dflash/dflash2_pypi/scaled_softcap", "speculators"): "a soft cap",
    ("dflash/jetspec", "speculators"): "full layers that are causal",
}

SAYABLE = [
    "eagle/eagle3_safeailab_theta500k_fullvocab",
    "eagle/eagle3_specforge_headdim32_rope_llama3",
    "eagle/eagle3_specforge_no_rope_theta",
    "eagle/eagle3_1_specforge_fcnorm",
    "eagle/eagle3_speculators_nbr_false",
    "eagle/eagle3_speculators_nbr_true",
    "eagle/eagle3_speculators_rope_llama3_fullvocab",
    "dflash/dflash_deepspec",
    "dflash/dflash_speculators",
    "dflash/dspark_deepspec_gated",
    "dflash/dspark_deepspec_conf_plain",
]


@pytest.fixture
def target(tmp_path) -> Path:
    """All that a conversion asks of a target: its depth (that of the golden cases' own)."""
    directory = tmp_path / "target"
    directory.mkdir()
    (directory / "config.json").write_text('{"num_hidden_layers": 8}')
    return directory


def golden(name: str) -> Path:
    if not (GOLDEN / name / "model.safetensors").is_file():
        pytest.skip(f"shared/golden/{name} is not here")
    return GOLDEN / name


@pytest.mark.parametrize(("name", "layout"), EXPECTED, ids=lambda value: value.replace("/", "-"))
def test_keys_are_those_of_the_public_layout(name, layout, target, tmp_path):
    convert(golden(name), tmp_path / "out", layout, target)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == EXPECTED[name, layout]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SAYABLE)
def test_every_family_goes_there_and_back_bit_for_bit(name, layout, target, tmp_path):
    source, there, back = golden(name), tmp_path / "there", tmp_path / "back"
    convert(source, there, layout, target)
    other = LAYOUTS[1 - LAYOUTS.index(layout)]
    convert(there, back, other, target)
    described = describe(source, 8)
    written, returned = (
        load_file(there / "model.safetensors"),
        load_file(back / "model.safetensors"),
    )
    original = load_file(source / "model.safetensors")
    names = describe(there, 8).names
    for ours, public in names.items():
        assert torch.equal(written[public], original[described.names[ours]]), ours
        assert torch.equal(returned[describe(back, 8).names[ours]], written[public]), ours
    borrowed = {"embed_tokens.weight", "lm_head.weight"}
    assert set(described.names) - set(names) <= borrowed
    for mapping in ("d2t", "t2d"):
        assert (mapping in written) == (mapping in original)


@pytest.mark.parametrize(("name", "layout"), UNSAYABLE, ids=lambda value: value.replace("/", "-"))
def test_what_a_layout_cannot_say_is_refused_by_name(name, layout, target, tmp_path):
    with pytest.raises(CheckpointError, match=UNSAYABLE[name, layout]):
        convert(golden(name), tmp_path / "out", layout, target)
    assert not (tmp_path / "out").exists()
    assert sorted(tmp_path.iterdir()) == [target]


def test_the_shipped_head_is_written_for_vllm_with_its_switches_spelled_out(tmp_path):
    convert(SHIPPED, tmp_path / "out", "speculators", verifier_name="SmolLM2")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert config["norm_before_residual"] is True
    assert config["speculators_config"]["verifier"]["name_or_path"] == "SmolLM2"
    assert describe(tmp_path / "out").config == describe(SHIPPED).config


def test_layer_ids_for_sglang_begin_with_one_or_are_inputs_with_a_note(tmp_path):
    notes = convert(SHIPPED, tmp_path / "one", "sglang")
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 14, 26]
    assert not any("layer inputs" in note for note in notes)
    shifted = tmp_path / "shifted"
    shutil.copytree(SHIPPED, shifted)
    config = json.loads((shifted / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [3, 15, 27]
    (shifted / "config.json").write_text(json.dumps(config))
    notes = convert(shifted, tmp_path / "two", "sglang")
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 15, 27]
    assert any("layer inputs" in note for note in notes)


def pickled(directory: Path, shards: int = 1) -> dict[str, torch.Tensor]:
    """The shipped head as an EAGLE repository would publish it: weights in `.bin` files."""
    directory.mkdir()
    shutil.copy(SHIPPED / "config.json", directory)
    tensors = load_file(SHIPPED / "model.safetensors")
    if shards == 1:
        torch.save(tensors, directory / "pytorch_model.bin")
        return tensors
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05d}-of-{shards:05d}.bin"
        part = {name: tensors[name] for name in names[shard::shards]}
        torch.save(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = json.dumps({"weight_map": weight_map})
    (directory / "pytorch_model.bin.index.json").write_text(index)
    return tensors


@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_weights_become_safetensors(tmp_path, shards):
    tensors = pickled(tmp_path / "bin", shards)
    with pytest.raises(CheckpointError, match="outrider convert"):
        describe(tmp_path / "bin")
    assert main(["convert", str(tmp_path / "bin"), str(tmp_path / "o"), "--to", "safetensors"]) == 0
    written = load_file(tmp_path / "o" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert describe(tmp_path / "o").config == describe(SHIPPED).config


def test_pickled_weights_go_straight_into_another_layout(tmp_path):
    pickled(tmp_path / "bin")
    convert(tmp_path / "bin", tmp_path / "out", "sglang")
    assert describe(tmp_path / "out", 30).kind == "eagle3"


class Harmful:
    """What a pickle can do when it is merely loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path):
    pickled(tmp_path / "bin")
    mark = tmp_path / "ran"
    torch.save({"fc.weight": Harmful(mark)}, tmp_path / "bin" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="more than tensors"):
        convert(tmp_path / "bin", tmp_path / "out", "safetensors")
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x02]."])
def test_files_that_are_no_weights_are_refused(tmp_path, content):
    pickled(tmp_path / "bin")
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError):
        convert(tmp_path / "bin", tmp_path / "out", "safetensors")


def test_a_missing_shard_is_named(tmp_path):
    pickled(tmp_path / "bin", 2)
    (tmp_path / "bin" / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match="pytorch_model-00002"):
        convert(tmp_path / "bin", tmp_path / "out", "safetensors")


def test_nothing_is_overwritten_and_nothing_is_made_of_nothing(tmp_path, capsys):
    with pytest.raises(ConfigError, match="exists already"):
        convert(SHIPPED, tmp_path, "sglang")
    with pytest.raises(ConfigError, match="safetensors already"):
        convert(SHIPPED, tmp_path / "out", "safetensors")
    absent = ["convert", str(tmp_path / "no"), str(tmp_path / "out"), "--to", "sglang"]
    assert main(absent) == 1
    assert "no directory" in capsys.readouterr().err


@pytest.mark.parametrize("broken", ["{", "[]", "{}"])
def test_a_broken_index_of_pickles_is_refused_by_name(tmp_path, capsys, broken):
    source = tmp_path / "head"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"")
    (source / "pytorch_model.bin.index.json").write_text(broken)
    assert main(["convert", str(source), str(tmp_path / "new"), "--to", "safetensors"]) == 1
    assert "pytorch_model.bin.index.json" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()

"""Weights are read from one file or from the shards of an index; what is wrong is named."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from protos.errors import CheckpointError
from tests.tiny import write_tiny
from tests.unit.model.family_cases import SIZES
from tests.unit.model.stepping import contiguous
from verifier_service.model.load import load_target
from verifier_service.model.weights import INDEX, SINGLE, check_weight_files

NORM = "model.norm.weight"


@pytest.fixture
def single(tiny_dirs, tmp_path) -> Path:
    path = tmp_path / "single"
    shutil.copytree(tiny_dirs["llama"], path)
    return path


@pytest.fixture
def sharded(tiny_dirs, tmp_path) -> Path:
    """Three shards or more, and their index."""
    path = tmp_path / "sharded"
    shutil.copytree(tiny_dirs["llama"], path)
    model = AutoModelForCausalLM.from_pretrained(path)
    (path / SINGLE).unlink()
    model.save_pretrained(path, max_shard_size="150KB")
    assert len(list(path.glob("*.safetensors"))) >= 3
    return path


def logits(path: Path) -> torch.Tensor:
    target = load_target(path, torch.float32)
    target.allocate(256)
    return target.forward([contiguous(range(20, 60)).span(0, 40)])


def first_shard(path: Path) -> Path:
    return min(path.glob("model-*.safetensors"))


def edit_index(path: Path, **placed: str | None) -> None:
    """Place tensors elsewhere, or nowhere."""
    index = json.loads((path / INDEX).read_text())
    for name, file in placed.items():
        index["weight_map"].pop(name, None)
        if file is not None:
            index["weight_map"][name] = file
    (path / INDEX).write_text(json.dumps(index))


def refused(path: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_target(path, torch.float32)


def test_shards_give_the_logits_of_one_file(single, sharded):
    assert torch.equal(logits(sharded), logits(single))
    assert len(check_weight_files(sharded)) == len(list(sharded.glob("*.safetensors")))


def test_a_tied_target_has_no_head_of_its_own(tmp_path):
    path = write_tiny(LlamaConfig(**SIZES | {"tie_word_embeddings": True}), tmp_path, seed=0)
    assert "lm_head.weight" not in load_file(path / SINGLE)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.inference_mode():
        expected = model(torch.arange(20, 60)[None]).logits[0]
    torch.testing.assert_close(logits(path), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["aaa.safetensors", "zzz.safetensors"])
def test_a_file_that_the_index_does_not_name_is_not_read(single, sharded, name):
    expected = logits(single)
    other = load_file(single / SINGLE)
    other["lm_head.weight"] = -other["lm_head.weight"]
    save_file(other, sharded / name, {"format": "pt"})
    assert torch.equal(logits(sharded), expected)
    save_file(other, single / name, {"format": "pt"})
    assert torch.equal(logits(single), expected)


def test_a_missing_shard_is_named(sharded):
    shard = first_shard(sharded)
    shard.unlink()
    refused(sharded, f"{shard.name}, which is missing")


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff" * 64], ids=["empty", "short", "noise"])
def test_a_damaged_shard_is_named(sharded, data):
    shard = first_shard(sharded)
    shard.write_bytes(data)
    refused(sharded, f"{shard.name} cannot be read")


def test_a_shard_that_was_cut_off_is_named(sharded, single):
    for path, file in ((sharded, first_shard(sharded)), (single, single / SINGLE)):
        file.write_bytes(file.read_bytes()[:-64])
        refused(path, f"{file.name} cannot be read")


def test_one_file_beside_an_index_that_does_not_name_it_is_refused(sharded, single):
    shutil.copy(single / SINGLE, sharded / SINGLE)
    refused(sharded, "remove one")


def test_shards_without_an_index_are_refused(sharded):
    (sharded / INDEX).unlink()
    refused(sharded, "shards need their index")


def test_an_index_that_disagrees_with_its_shards_is_refused(sharded):
    home = json.loads((sharded / INDEX).read_text())["weight_map"][NORM]
    elsewhere = next(f.name for f in sharded.glob("model-*.safetensors") if f.name != home)
    edit_index(sharded, **{NORM: elsewhere})
    refused(sharded, NORM)
    edit_index(sharded, **{NORM: None})
    refused(sharded, f"{home} holds {NORM}, against")


@pytest.mark.parametrize("name", ["../other.safetensors", "/x.safetensors", "model.bin", 3])
def test_an_index_may_name_safetensors_files_of_its_directory_only(sharded, name):
    edit_index(sharded, **{NORM: name})
    refused(sharded, "no safetensors file")


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": {}}', '{"weight_map": []}'])
def test_an_index_that_cannot_be_read_is_refused(sharded, text):
    (sharded / INDEX).write_text(text)
    refused(sharded, INDEX)


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    held = load_file(path / SINGLE)
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, path / SINGLE, {"format": "pt"})


def test_a_tensor_that_the_weights_lack_is_named(single):
    change(single, **{NORM: None})
    refused(single, f"lack {NORM}")


def test_a_tensor_that_the_config_does_not_describe_is_named(single):
    change(single, **{"model.layers.3.mlp.down_proj.weight": torch.zeros(64, 128)})
    refused(single, "does not describe: model.layers.3.mlp")


def test_a_tensor_of_another_shape_is_named(single):
    change(single, **{NORM: torch.ones(63)})
    refused(single, f"another shape to {NORM}")


class _Mark:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


def test_a_pickle_is_never_opened_beside_safetensors_or_alone(single, tmp_path):
    mark = tmp_path / "was-here"
    (single / "pytorch_model.bin").write_bytes(pickle.dumps(_Mark(mark)))
    logits(single)
    (single / SINGLE).unlink()
    refused(single, r"pytorch_model\.bin is pickled")
    assert not mark.exists()
    pickle.loads((single / "pytorch_model.bin").read_bytes())
    assert mark.exists(), "the trap does nothing"

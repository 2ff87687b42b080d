"""A GGUF file is a target like any other: written once as a directory, with the same logits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from protos.errors import CheckpointError, ConfigError
from tests.tiny import tiny_llama_dir
from tests.unit.model.stepping import contiguous
from verifier_service.model import gguf as gguf_target
from verifier_service.model.embedded import ensure_target
from verifier_service.model.gguf import ensure_gguf_target
from verifier_service.model.load import load_target

gguf = pytest.importorskip("gguf", reason="the extra outrider[gguf] is not installed")

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""llama.cpp's names of a layer's tensors."""
_OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A tiny Llama whose weights bf16 holds exactly."""
    path = tiny_llama_dir(tmp_path_factory.mktemp("llama"), layers=2)
    file = path / "model.safetensors"
    rounded = {name: w.bfloat16().float() for name, w in load_file(file).items()}
    save_file(rounded, file, {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def file(directory, tmp_path_factory) -> Path:
    """The same model as llama.cpp would write it, in float32."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, directory)
    for name, weight in load_file(directory / "model.safetensors").items():
        writer.add_tensor(*_renamed(name, weight, config["head_dim"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: "gguf.GGUFWriter", directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    core = json.loads((directory / "tokenizer.json").read_text())["model"]
    ids = range(len(tokenizer))
    special = set(tokenizer.all_special_ids)
    types = [gguf.TokenType.CONTROL if n in special else gguf.TokenType.NORMAL for n in ids]
    merges = [one if isinstance(one, str) else " ".join(one) for one in core["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokenizer.convert_ids_to_tokens(n) for n in ids])
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)


def _renamed(name: str, weight: torch.Tensor, head_dim: int) -> tuple[str, object]:
    stem = name.removesuffix(".weight")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.weight", weight.numpy()
    _, _, layer, part = stem.split(".", 3)
    if part in ("self_attn.q_proj", "self_attn.k_proj"):
        # llama.cpp turns neighbours, transformers halves: the same rows in another order.
        halves = weight.view(-1, 2, head_dim // 2, weight.shape[1])
        weight = halves.transpose(1, 2).reshape(weight.shape).contiguous()
    return f"blk.{layer}.{_NAMES[part]}.weight", weight.numpy()


def logits(path: Path) -> torch.Tensor:
    target = load_target(path, torch.float32)
    target.allocate(256)
    return target.forward([contiguous(range(20, 90)).span(0, 70)])


def test_a_gguf_file_has_the_logits_and_ids_of_the_directory(file, directory, tmp_path):
    found = ensure_gguf_target(file, tmp_path)
    assert torch.equal(logits(found), logits(directory))
    text = "the river ran to 7 towns"
    here, there = (
        AutoTokenizer.from_pretrained(path)(text).input_ids for path in (found, directory)
    )
    assert here == there
    assert load_target(found).facts.eos_token_ids == load_target(directory).facts.eos_token_ids


def test_the_directory_is_written_once_and_anew_for_another_file(file, tmp_path, monkeypatch):
    first = ensure_gguf_target(file, tmp_path)
    other = tmp_path / "tiny.gguf"
    other.write_bytes(file.read_bytes() + b"\0" * 32)
    assert ensure_gguf_target(other, tmp_path) != first

    def refuse(*_):
        raise AssertionError("converted twice")

    monkeypatch.setattr(gguf_target, "_convert", refuse)
    assert ensure_gguf_target(file, tmp_path) == first


def test_a_target_may_be_named_as_a_gguf_file(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = ensure_target(str(file))
    assert found.parent == tmp_path / "outrider"
    assert found.name.startswith("tiny-")
    assert (found / "config.json").is_file()


@pytest.mark.parametrize("data", [b"", b"no model at all", b"GGUF\x03\0\0\0" + b"\0" * 16])
def test_a_file_that_holds_no_model_is_refused_and_leaves_nothing_behind(data, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"broken\.gguf"):
        ensure_gguf_target(tmp_path / "broken.gguf", tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["gguf.lock"]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.gguf"):
        ensure_target(str(tmp_path / "nothing.gguf"))


def test_without_its_reader_the_extra_is_named(file, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_target, "_READERS", ("no_such_package",))
    with pytest.raises(ConfigError, match=r"outrider\[gguf\]"):
        ensure_gguf_target(file, tmp_path)

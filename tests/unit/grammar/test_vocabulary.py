"""The bytes of a target's ids: as its own tokenizer decodes them, whatever files there are."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from protos.errors import ConfigError
from tests.tiny import EOS_ID, byte_tokenizer
from verifier_service.grammar.vocabulary import read_vocabulary


def test_every_id_of_the_embedded_default_decodes_to_its_bytes(smollm2_dir: Path):
    backend = AutoTokenizer.from_pretrained(smollm2_dir).backend_tokenizer
    found = read_vocabulary(smollm2_dir, 49_160, (2, 0))
    assert len(found.tokens) == 49_160
    assert set(found.tokens[49_152:]) == {b""}
    assert found.special_ids == frozenset(range(17))
    for token_id in range(0, 49_152, 7):
        shown = backend.decode([token_id], skip_special_tokens=False)
        assert found.tokens[token_id].decode("utf-8", "replace") == shown, token_id
    text = 'Gr\u00fc\u00dfe \u4e16\u754c \U0001f600\n  {"a": 1}'
    joined = b"".join(found.tokens[token_id] for token_id in backend.encode(text).ids)
    assert joined.decode() == text


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Spaces as U+2581 and lone bytes as <0x..>, as in Llama 2, Mistral and Gemma."""
    lone = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab = (
        {"<unk>": 0, "<s>": 1, "</s>": 2} | lone | {"\u2581a": 259, "\u2581": 260, "\u00e4": 261}
    )
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    core.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def test_spaces_lone_bytes_and_added_tokens_have_their_bytes(tmp_path: Path):
    sentencepiece_like().save_pretrained(tmp_path)
    found = read_vocabulary(tmp_path, 270, (2,))
    assert found.tokens[259:262] == (b" a", b" ", "\u00e4".encode())
    assert found.tokens[3 + 0xE4] == b"\xe4"
    assert found.tokens[262] == b"<tool>"
    assert found.special_ids == {0, 1, 2}


def test_tokens_that_only_the_configuration_adds_count(tmp_path: Path):
    byte_tokenizer(384).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"] = {"390": {"content": "<|call|>", "special": True}}
    path.write_text(json.dumps(config))
    found = read_vocabulary(tmp_path, 400, (EOS_ID,))
    assert found.tokens[390] == b"<|call|>"
    assert 390 in found.special_ids


def test_ends_that_are_no_ids_of_the_model_are_left_out(tmp_path: Path):
    byte_tokenizer(384).save_pretrained(tmp_path)
    assert read_vocabulary(tmp_path, 384, (EOS_ID, 384, 390)).eos_ids == (EOS_ID,)
    with pytest.raises(ConfigError, match="no end-of-sequence id"):
        read_vocabulary(tmp_path, 384, (384,))


@pytest.mark.parametrize(
    "stored", [None, "", "{", "[]", '{"model": {}}', '{"model": {"vocab": [1]}}', '{"model": 3}']
)
def test_files_that_are_no_tokenizer_are_a_clear_error(tmp_path: Path, stored: str | None):
    if stored is not None:
        (tmp_path / "tokenizer.json").write_text(stored)
    with pytest.raises(ConfigError, match="tokenizer"):
        read_vocabulary(tmp_path, 10, (2,))

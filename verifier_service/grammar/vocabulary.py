"""What a grammar must know of a target's tokenizer: the bytes of every id, and which ids are none.

Read from the target's directory when the first grammar comes. Knows no grammar. Invariant: bytes
are those that replies show (`protos.token_bytes`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protos.errors import ConfigError
from protos.token_bytes import bytes_of_entries

_UNREADABLE: Final = (
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What odd files raise, here and in transformers."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """tokens: bytes by id, empty for ids that no text has; special_ids: those that are no text.

    eos_ids: what may end a text; at least one.
    """

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.eos_ids:
            raise ConfigError("the target has no end-of-sequence id, so no grammar could end")


def read_vocabulary(target_dir: Path, vocab_size: int, eos_ids: Sequence[int]) -> Vocabulary:
    """The vocabulary of `vocab_size` ids in a target's directory. Raises ConfigError.

    eos_ids: a tokenizer may name ends that are no ids of the model; they are left out.
    """
    try:
        stored = json.loads(_stored_tokenizer(target_dir))
        vocab = stored["model"]["vocab"]
        if isinstance(vocab, dict):
            pieces = {int(token_id): str(piece) for piece, token_id in vocab.items()}
        else:
            pieces = {token_id: str(piece) for token_id, (piece, _) in enumerate(vocab)}
        added = _added_tokens(stored, target_dir)
        decoder = stored.get("decoder") or {}
        steps = decoder.get("decoders", [decoder])
    except _UNREADABLE as error:
        raise ConfigError("the target's tokenizer cannot be read") from error
    special = frozenset(token_id for token_id, (_, is_special) in added.items() if is_special)
    bytes_of = bytes_of_entries(
        pieces.get,
        special,
        {token_id: content for token_id, (content, _) in added.items()},
        byte_level=any(step.get("type") == "ByteLevel" for step in steps),
    )
    tokens = tuple(bytes_of(token_id).data for token_id in range(vocab_size))
    return Vocabulary(tokens, special, tuple(token for token in eos_ids if token < vocab_size))


def _stored_tokenizer(target_dir: Path) -> str:
    """tokenizer.json, or what transformers makes of other files.

    Read without transformers where it can be: making a tokenizer holds up every other thread.
    """
    path = target_dir / "tokenizer.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(
        str(target_dir), local_files_only=True, trust_remote_code=False, use_fast=True
    )
    return str(tokenizer.backend_tokenizer.to_str())


def _added_tokens(stored: dict[str, Any], target_dir: Path) -> dict[int, tuple[str, bool]]:
    """Content, and whether it is special, of ids that no model made: of both files."""
    path = target_dir / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    listed = [(token["id"], token) for token in stored.get("added_tokens", [])]
    listed += (config.get("added_tokens_decoder") or {}).items()
    return {int(at): (str(token["content"]), bool(token.get("special"))) for at, token in listed}

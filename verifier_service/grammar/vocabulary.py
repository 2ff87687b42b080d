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
"""What transformers raises for files that it cannot make a tokenizer of."""


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
    """The vocabulary of `vocab_size` ids in a target's directory. Raises ConfigError."""
    # Here, so that an engine without a model needs none of it.
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(target_dir), local_files_only=True, trust_remote_code=False, use_fast=True
        )
        backend = tokenizer.backend_tokenizer
    except _UNREADABLE as error:
        raise ConfigError("the target's tokenizer cannot be read") from error
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = decoder.get("decoders", [decoder])
    added = backend.get_added_tokens_decoder()
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    bytes_of = bytes_of_entries(
        backend.id_to_token,
        special,
        {token_id: token.content for token_id, token in added.items()},
        byte_level=any(step.get("type") == "ByteLevel" for step in steps),
    )
    tokens = tuple(bytes_of(token_id).data for token_id in range(vocab_size))
    return Vocabulary(tokens, special, tuple(eos_ids))

"""The bytes that single token ids stand for: shown one by one in replies, matched by grammars.

Pure: a tokenizer's facts come as arguments. Byte-level vocabularies write each byte as a printable
character; sentencepiece ones write a space as U+2581 and lone bytes as <0x..>. What is neither is
taken as the text it is.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

_SPACE: Final = "\u2581"
_LONE_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """One token's bytes. is_text: False for special tokens, which text leaves out."""

    data: bytes
    is_text: bool = True

    @property
    def shown(self) -> str:
        """As text; a token that is no text on its own says its bytes."""
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


BytesOf = Callable[[int], TokenBytes]


def bytes_of_entries(
    entry: Callable[[int], str | None],
    special: frozenset[int],
    added: Mapping[int, str],
    *,
    byte_level: bool,
) -> BytesOf:
    """Bytes by id. entry: the vocabulary's string; added: content of ids the model did not make."""
    alphabet = _byte_level_alphabet()

    def bytes_of(token_id: int) -> TokenBytes:
        if token_id in added:
            return TokenBytes(added[token_id].encode(), token_id not in special)
        text = entry(token_id) or ""
        if byte_level and all(char in alphabet for char in text):
            return TokenBytes(bytes(alphabet[char] for char in text))
        lone = _LONE_BYTE.fullmatch(text)
        if lone:
            return TokenBytes(bytes([int(lone[1], 16)]))
        return TokenBytes(text.replace(_SPACE, " ").encode("utf-8", "replace"))

    return bytes_of


def _byte_level_alphabet() -> dict[str, int]:
    """Byte by character: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    return alphabet | {chr(0x100 + number): byte for number, byte in enumerate(others)}

"""Vocabularies and grammars for tests: the tiny byte-level tokenizer, and forms to keep."""

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from protos.grammar import Grammar, GrammarKind
from tests.tiny import EOS_ID, byte_tokenizer
from verifier_service.grammar.compiling import Grammars
from verifier_service.grammar.state import GrammarState
from verifier_service.grammar.vocabulary import Vocabulary, read_vocabulary

VOCAB = 384
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", '\u00e4 "b"']},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def schema(value: object) -> Grammar:
    """A JSON schema as a grammar."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


ONE_OF_EACH = (
    schema(PERSON),
    schema({"type": "object"}),
    regex(r"(ab|a)c*(/|\d{2,4})"),
    lark('start: expr\nexpr: "(" expr ")" | NUM\nNUM: /[0-9]+/'),
)


@functools.cache
def tokenizer():
    """The tiny targets' tokenizer."""
    return byte_tokenizer(VOCAB)


@functools.cache
def vocabulary(vocab_size: int = VOCAB, eos_ids: tuple[int, ...] = (EOS_ID,)) -> Vocabulary:
    """The tiny targets' vocabulary; ids past the tokenizer's have no bytes."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer().save_pretrained(folder)
        return read_vocabulary(Path(folder), vocab_size, eos_ids)


def ids_of(text: str) -> list[int]:
    """A text in tokens."""
    return list(tokenizer().encode(text, add_special_tokens=False))


def opened(
    grammar: Grammar, output: Sequence[int] = (), prompt: Sequence[int] = (5,)
) -> tuple[GrammarState, list[int]]:
    """A state and the live list it reads."""
    tokens = [*prompt, *output]
    return Grammars(vocabulary).open(grammar, tokens, len(prompt)), tokens


def maker(grammar: Grammar) -> Callable:
    """Makes fresh matchers, for the reference."""
    grammars = Grammars(vocabulary)
    grammars.compile(grammar)
    return grammars._kept[grammar].deep_copy


def ids_in(words) -> frozenset[int]:
    """Ids of a mask, bit by bit."""
    values = [int(word) & 0xFFFFFFFF for word in words]
    return frozenset(
        32 * place + bit
        for place, word in enumerate(values)
        for bit in range(32)
        if word >> bit & 1
    )

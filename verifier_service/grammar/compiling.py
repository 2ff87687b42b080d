"""Grammars compiled against one target's vocabulary, kept by their text.

Used by any thread; blocks for a millisecond, for a second at worst, so never called by the thread
that steps. Invariants: what cannot be kept is refused before the request is let in; work and memory
of a grammar are bounded, whatever its text; nothing is forced, so an id is allowed exactly when its
bytes can go on to a matching text.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from protos.errors import ConfigError
from protos.grammar import Grammar, GrammarKind
from verifier_service.grammar.bounds import check_lark, check_regex, refused, schema_of
from verifier_service.grammar.state import GrammarState, num_words
from verifier_service.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT: Final = 32
"""Compiled grammars, least recently used first out."""

_MAX_LEXER_STATES: Final = 20_000
"""One or two kB each, counted per request."""

_MAX_GRAMMAR_SIZE: Final = 100_000
"""Symbols in productions: bounds what a nested repetition unfolds to."""

_WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between JSON tokens: without a bound a weak model may go on with line breaks for ever."""

_UNFORCED: Final = '%llguidance {"no_forcing": true}\nstart: @body'
"""Where only one spelling is left llguidance would otherwise allow one split into tokens alone."""


class Grammars:
    """Compiles, keeps and opens grammars for one target."""

    def __init__(self, read: Callable[[], Vocabulary]) -> None:
        """read: gives the target's vocabulary, for the first grammar; may raise ConfigError."""
        self._read = read
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        # Held while one grammar is compiled; whoever finds his in `_kept` does not wait for it.
        self._compiling = threading.Lock()

    def compile(self, grammar: Grammar) -> None:
        """Have this grammar at hand. Raises InvalidRequest, saying why it cannot be kept."""
        self._prototype(grammar)

    def open(self, grammar: Grammar, tokens: Sequence[int], num_prompt: int) -> GrammarState:
        """Where a text stands in its grammar; compiles it when it is not at hand.

        tokens: the live list of committed ids, prompt first. Raises InvalidRequest when the grammar
        cannot be kept, or the output so far does not match it.
        """
        prototype = self._prototype(grammar)
        return GrammarState(prototype.deep_copy, self._own_vocabulary(), tokens, num_prompt)

    def _prototype(self, grammar: Grammar) -> "LLMatcher":
        found = self._find(grammar)
        if found is not None:
            return found
        with self._compiling:
            found = self._find(grammar)
            if found is not None:
                return found
            vocabulary = self._own_vocabulary()
            if self._tokenizer is None:
                self._tokenizer = _tokenizer_of(vocabulary)
            made = _compiled(self._tokenizer, len(vocabulary.tokens), grammar)
        with self._lock:
            self._kept[grammar] = made
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return made

    def _find(self, grammar: Grammar) -> "LLMatcher | None":
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
            return found

    def _own_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            try:
                self._vocabulary = self._read()
            except ConfigError as error:
                raise refused(str(error)) from error
        return self._vocabulary


class _Tokens:
    """A vocabulary as llguidance takes it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.special_ids | set(vocabulary.eos_ids))

    def __call__(self, text: bytes) -> list[int]:
        """Asked for the tokens of what is forced, and nothing is."""
        return []


def _tokenizer_of(vocabulary: Vocabulary) -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    # Without slices: they cost half as much again to make, under the interpreter's lock.
    wrapped = TokenizerWrapper(_Tokens(vocabulary))
    return LLTokenizer(wrapped, eos_token=list(vocabulary.eos_ids), slices=[])


def _compiled(tokenizer: "LLTokenizer", vocab_size: int, grammar: Grammar) -> "LLMatcher":
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_lexer_states=_MAX_LEXER_STATES,
        max_grammar_size=_MAX_GRAMMAR_SIZE,
        # Run over the whole vocabulary beforehand, a hostile expression takes minutes.
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    parts = {"grammars": [{"lark_grammar": _UNFORCED}, {"name": "body", **_body(grammar)}]}
    matcher = LLMatcher(tokenizer, json.dumps(parts), log_level=0, limits=limits)
    if matcher.is_error():
        raise refused(matcher.get_error())
    _try(matcher, vocab_size)
    return matcher


def _body(grammar: Grammar) -> dict[str, Any]:
    from llguidance import LLMatcher

    if grammar.kind is GrammarKind.LARK:
        check_lark(grammar.text)
        return {"lark_grammar": grammar.text}
    if grammar.kind is GrammarKind.REGEX:
        check_regex(grammar.text)
        made = json.loads(LLMatcher.grammar_from_regex(grammar.text))
        return {"lark_grammar": made["grammars"][0]["lark_grammar"]}
    schema = schema_of(grammar.text)
    return {"json_schema": {"x-guidance": {"whitespace_pattern": _WHITESPACE}, **schema}}


def _try(matcher: "LLMatcher", vocab_size: int) -> None:
    """Raise InvalidRequest unless a text can begin, and a draft of it can be taken back."""
    words_W = torch.zeros(num_words(vocab_size), dtype=torch.int32)
    matcher.unsafe_compute_mask_ptr(words_W.data_ptr(), 4 * words_W.shape[0])
    if matcher.is_error() or not words_W.any():
        raise refused(matcher.get_error() or "no text matches")
    word = int(words_W.nonzero()[0])
    bits = int(words_W[word]) & 0xFFFFFFFF
    tried = matcher.deep_copy()
    first = 32 * word + (bits & -bits).bit_length() - 1
    if not (tried.consume_token(first) and tried.rollback(1)):
        # Among others, max_tokens= and stop= of Lark know no way back.
        raise refused(tried.get_error() or "drafts of its texts cannot be taken back")

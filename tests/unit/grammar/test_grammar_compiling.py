"""Grammars against a vocabulary: what is refused and how, what is kept, what bounds the work."""

import json
import sys
import threading

import pytest
from jsonschema import Draft202012Validator

from protos.errors import ConfigError, InvalidRequest
from protos.grammar import Grammar, GrammarKind
from tests.tiny import EOS_ID
from tests.unit.grammar.grammar_cases import (
    PERSON,
    VOCAB,
    ids_in,
    ids_of,
    lark,
    opened,
    regex,
    schema,
    tokenizer,
    vocabulary,
)
from verifier_service.grammar import compiling
from verifier_service.grammar.compiling import Grammars


def as_schema(text: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, text)


DIVISOR = {"type": "integer", "multipleOf": 1_234_567}
LOOKS_LIKE_A_SCHEMA = {
    "$ref": "http://example.com/x",
    "multipleOf": 9973,
    "pattern": "(" * 2_500,
    "patternProperties": {f"({n}": {"multipleOf": 0} for n in range(30)},
}
VALUES = [{"no": n, "said": LOOKS_LIKE_A_SCHEMA} for n in range(4)]
SMALL_VALUES = [{"no": n, "$ref": "y", "multipleOf": n} for n in range(1500)]

REFUSED = {
    "no such type": (schema({"type": "objekt"}), "objekt"),
    "a keyword that cannot be kept": (schema({"type": "object", "not": {}}), "not"),
    "a reference elsewhere": (schema({"$ref": "http://example.com/x"}), "example.com"),
    "no schema": (schema([1]), "object"),
    "no JSON": (as_schema("{"), "JSON"),
    "too deep": (as_schema("[" * 100_000), "JSON"),
    "a pattern that is none": (schema({"type": "string", "pattern": "("}), "regex"),
    "a regex that is none": (regex("("), "regex"),
    "an unknown name": (lark('start: "a" | b'), "unknown name"),
    "no Lark": (lark("garbage"), "Expected"),
    "nothing matches": (lark("start: A\nA: /a/ & /b/"), "grammar"),
    "a count of tokens": (lark('start: A "c"\nA[max_tokens=3]: /.*/'), "max_tokens"),
    "a long expression": (regex("a?" * 30_000), "2048"),
    "a long pattern": (schema({"type": "string", "pattern": "(a*)*" * 10_000}), "2048"),
    "a long chain of references": (
        schema(
            {"$ref": "#/$defs/d0"}
            | {"$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3000)}}
        ),
        "references",
    ),
    "a long chain of rules": (
        lark("start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(8000)) + '\nr8000: "a"'),
        "8192",
    ),
    "a divisor that needs a state each": (schema({"multipleOf": 1_234_567}), "20000"),
    "a divisor written with an exponent": (as_schema('{"multipleOf": 19997e3}'), "20000"),
    "a divisor of many digits": (as_schema('{"multipleOf": 0.%s}' % ("1" * 5000)), "20000"),
    "divisors that meet": (
        schema({"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}),
        "20000",
    ),
    "a divisor in small print": (lark('start: %json {"multipleOf": 1234567}'), "%json"),
    "many patterns": (
        schema({"patternProperties": {f"^{n}x*$": {} for n in range(101)}}),
        "patternProperties",
    ),
    "a divisor among values that a reference makes a schema": (
        schema({"$ref": "#/default/a", "default": {"a": DIVISOR}}),
        "20000",
    ),
    "the same, spelt otherwise": (
        schema({"$ref": "#/def%61ult/a", "default": {"a": DIVISOR}}),
        "20000",
    ),
    "the same, from a base": (
        schema({"$id": "http://x/y", "$ref": "y#/default/a", "default": {"a": DIVISOR}}),
        "20000",
    ),
    "a divisor below a property that is called like a keyword": (
        schema({"properties": {"enum": {"properties": {"const": DIVISOR}}}}),
        "20000",
    ),
    "a divisor below an unknown key": (
        schema({"own": {"const": DIVISOR}, "$ref": "#/own/const"}),
        "20000",
    ),
    "too many members": (
        schema({"type": "object", "properties": {f"p{n}": {} for n in range(1500)}}),
        "items",
    ),
    "too much to compile": (lark("start: A\nA: /.*a.{15}/ & /.*b.{16}/ & ~/.*c.{9}/"), "fuel"),
}


LARGE = {
    "references": schema(
        {"$ref": "#/$defs/d0", "$defs": {"d199": {"type": "null"}}}
        | {
            "$defs": {
                f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}}
                for n in range(199)
            }
            | {"d199": {"type": "null"}}
        }
    ),
    "rules": lark("start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(600)) + '\nr600: "a"'),
    "options": schema({"enum": [f"value {7919 * n % 10007}" for n in range(5000)]}),
    "a divisor": schema({"type": "number", "multipleOf": 0.01}),
    "a long text": schema({"const": "ab" * 50_000}),
    "values that look like schemas": schema({"enum": VALUES}),
    "many values that look like schemas": schema({"enum": SMALL_VALUES}),
    "one value that looks like a schema": schema({"const": VALUES}),
    "values that say nothing of the text": schema(
        {"type": "object", "default": VALUES[0], "examples": VALUES}
    ),
    "values deep in a schema": schema(
        {
            "type": "object",
            "properties": {
                "const": {"anyOf": [{"items": {"enum": VALUES}}, {"$ref": "#/$defs/pet"}]}
            },
            "$defs": {"pet": {"const": LOOKS_LIKE_A_SCHEMA}},
        }
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_large_but_within_bounds_is_kept(name: str):
    state = Grammars(vocabulary).open(LARGE[name], [5], 1)
    assert ids_in(state.allowed(()))
    assert state.fault == ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_and_says_why(name: str):
    grammar, word = REFUSED[name]
    grammars = Grammars(vocabulary)
    with pytest.raises(InvalidRequest) as caught:
        grammars.compile(grammar)
    assert caught.value.param == "grammar"
    assert word in str(caught.value)
    assert len(str(caught.value)) <= 300
    assert "\n" not in str(caught.value)
    grammars.compile(regex("still served"))


def test_a_target_without_tokenizer_or_end_refuses_every_grammar_by_name():
    def read():
        raise ConfigError("the target's tokenizer cannot be read")

    with pytest.raises(InvalidRequest, match="tokenizer") as caught:
        Grammars(read).compile(regex("a"))
    assert caught.value.param == "grammar"
    with pytest.raises(InvalidRequest, match="end-of-sequence"):
        Grammars(lambda: vocabulary(VOCAB, ())).compile(regex("a"))


def test_a_grammar_is_compiled_once_and_the_least_used_is_dropped(monkeypatch):
    compiled: list[Grammar] = []
    real = compiling._compiled

    def counting(tokenizer, vocab_size, grammar):
        compiled.append(grammar)
        return real(tokenizer, vocab_size, grammar)

    monkeypatch.setattr(compiling, "_compiled", counting)
    grammars = Grammars(vocabulary)
    first, others = regex("first"), [regex(f"x{n}") for n in range(compiling.MAX_KEPT)]
    grammars.compile(first)
    for other in others[:-1]:
        grammars.compile(other)
    grammars.open(first, [1], 1)
    grammars.compile(others[-1])
    grammars.compile(first)
    assert compiled == [first, *others]
    grammars.compile(others[0])
    assert compiled[-1] == others[0], "the one that was not asked for was dropped"


def test_threads_that_want_one_grammar_get_one_and_do_not_share_a_text():
    grammars, states = Grammars(vocabulary), []

    def work(text: str) -> None:
        states.append((text, grammars.open(schema(PERSON), [1, *ids_of(text)], 1)))

    threads = [threading.Thread(target=work, args=(t,)) for t in ("", "{", '{"name"', '{"name":"')]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(states) == 4
    for text, state in states:
        assert ids_in(state.allowed(())) == ids_in(
            opened(schema(PERSON), ids_of(text))[0].allowed(())
        )


def test_between_json_tokens_stands_a_bounded_space():
    state, _ = opened(schema(PERSON), ids_of("{" + "\n" * 40))
    assert not ids_in(state.allowed(())) & {*ids_of("\n"), *ids_of(" ")}
    state, _ = opened(schema(PERSON), ids_of("{" + "\n" * 39))
    assert ids_in(state.allowed(())) >= {*ids_of("\n"), *ids_of(" ")}


def test_a_schema_may_choose_its_own_spaces():
    tight = PERSON | {"x-guidance": {"whitespace_flexible": False}}
    state, _ = opened(schema(tight), ids_of("{"))
    assert not ids_in(state.allowed(())) & {*ids_of("\n"), *ids_of(" ")}


def test_one_spelling_may_be_split_into_tokens_in_any_way():
    state, _ = opened(schema({"const": "abab"}), ids_of('"'))
    allowed = {tokenizer().decode([token]) for token in ids_in(state.allowed(()))}
    assert allowed == {"a", "ab"}


def test_ids_that_the_tokenizer_does_not_know_are_never_allowed():
    padded = Grammars(lambda: vocabulary(VOCAB + 70))
    state = padded.open(schema({"type": "string"}), [1, *ids_of('"')], 1)
    allowed = ids_in(state.allowed(()))
    assert len(allowed) > 250
    assert max(allowed) < VOCAB


def test_several_ends_are_allowed_together():
    grammars = Grammars(lambda: vocabulary(VOCAB, (EOS_ID, 0)))
    state = grammars.open(regex("a"), [1, *ids_of("a")], 1)
    assert ids_in(state.allowed(())) == {0, EOS_ID}
    assert ids_in(state.allowed((0,))) == {0, EOS_ID}


def test_properties_keep_the_order_of_the_schema():
    value = {"b": 1, "a": 2}
    ordered = {"type": "object", "properties": {key: {"const": v} for key, v in value.items()}}
    ordered |= {"required": ["a", "b"], "additionalProperties": False}
    text = json.dumps(value)
    Draft202012Validator(ordered).validate(value)
    state, _ = opened(schema(ordered), ids_of(text))
    assert ids_in(state.allowed(())) == {EOS_ID}
    with pytest.raises(InvalidRequest):
        opened(schema(ordered), ids_of('{"a"'))


def test_llguidance_is_imported_for_the_first_grammar_only(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammars = Grammars(vocabulary)
    with pytest.raises(ImportError):
        grammars.compile(regex("a"))

"""Grammars that are refused for their size before anything compiles them.

llguidance bounds its own work by fuel and counts, but not everything: chains of references and
rules go as deep as the stack (3,000 and 4,000 of them end the process), and long expressions, large
divisors and many patterns take minutes, in code that nothing can interrupt. These bounds stand well
inside what was tried with the usual stack of 8 MiB: 1,000 references, 2,000 rules, 8,000 characters
of optional letters, a divisor of 120,000.

What stands in `const`, `enum`, `default` and `examples` are values, whatever their keys are called:
they are not looked at, unless a reference may point there and make schemas of them.

Pure. Invariant: what passes is compiled in about two seconds at worst, or refused by llguidance.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from protos.errors import InvalidRequest
from protos.grammar import GRAMMAR_PARAM

MAX_REGEX_LEN: Final = 2_048
MAX_LARK_LEN: Final = 8_192
MAX_REFERENCES: Final = 200
"""`$ref` and the like, of one schema."""
MAX_PATTERNS: Final = 100
"""In all `patternProperties` of one schema: each is held against every other."""
MAX_DIVISOR: Final = 20_000
"""All `multipleOf` of one schema, multiplied: where they meet, their common multiple counts."""

_REFERENCES: Final = frozenset(("$ref", "$dynamicRef", "$recursiveRef"))
_VALUES: Final = frozenset(("const", "enum", "default", "examples"))
_BY_NAME: Final = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""Hold schemas under names of the user's own, which are no keywords."""
_IN_LISTS: Final = frozenset(("items", "prefixItems", "additionalItems", "contains"))
_IN_OBJECTS: Final = frozenset(("additionalProperties", "propertyNames"))
_COMBINED: Final = frozenset(("anyOf", "oneOf", "allOf", "not", "if", "then", "else"))
_SCHEMAS: Final = _IN_LISTS | _IN_OBJECTS | _COMBINED
_PLAIN_POINTER: Final = re.compile(r"#(/[^%~]*)?")
"""What this says is what it means; others may be spelt in many ways."""


def schema_of(text: str) -> dict[str, Any]:
    """A JSON schema within bounds. Raises InvalidRequest."""
    try:
        schema = json.loads(text, parse_float=Decimal)
        # Once more as llguidance is to read it: the first reading keeps divisors exact.
        kept = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused("the schema is not valid JSON") from error
    if not isinstance(kept, dict):
        raise refused("a schema must be an object")
    num_references, num_patterns, divisor = 0, 0, 1
    members = list(_members(schema, is_schema=True))
    if any(key in _REFERENCES and _may_reach_values(value) for key, value in members):
        members = list(_members(schema, is_schema=False))
    for key, value in members:
        num_references += key in _REFERENCES
        if key == "multipleOf" and isinstance(value, int | Decimal):
            divisor *= max(abs(_digits(value)), 1)
        if key in ("pattern", "patternProperties", "x-guidance"):
            _check_patterns(value)
        if key == "patternProperties" and isinstance(value, dict):
            num_patterns += len(value)
        if divisor > MAX_DIVISOR:
            raise refused(f"multipleOf, multiplied, must be at most {MAX_DIVISOR}")
    if num_patterns > MAX_PATTERNS:
        raise refused(f"a schema has at most {MAX_PATTERNS} patternProperties")
    if num_references > MAX_REFERENCES:
        raise refused(f"a schema has at most {MAX_REFERENCES} references")
    return kept


def check_regex(text: str) -> None:
    """Raise InvalidRequest for an expression that is too long."""
    if len(text) > MAX_REGEX_LEN:
        raise refused(f"a regular expression has at most {MAX_REGEX_LEN} characters")


def check_lark(text: str) -> None:
    """Raise InvalidRequest for a grammar that is too long, or holds what is not bounded there."""
    if len(text) > MAX_LARK_LEN:
        raise refused(f"a Lark grammar has at most {MAX_LARK_LEN} characters")
    if "%json" in text:
        raise refused("%json is not supported inside a Lark grammar")


def refused(why: str) -> InvalidRequest:
    """The error for a grammar that cannot be used; bounded, in one line."""
    said = " ".join(why.split())
    return InvalidRequest(f"the grammar cannot be used: {said}"[:300], GRAMMAR_PARAM)


def _members(value: object, is_schema: bool) -> Iterator[tuple[str, object]]:
    """Every member of every object, however deep.

    is_schema: `value` is one; the values in it, and in the schemas that it surely holds, are left
    out. Below a key that is not known here nothing is.
    """
    waiting = [(value, is_schema)]
    while waiting:
        here, is_schema = waiting.pop()
        if isinstance(here, list):
            waiting.extend((inner, is_schema) for inner in here)
        elif isinstance(here, dict):
            for key, inner in here.items():
                if is_schema and key in _VALUES:
                    continue
                yield key, inner
                if is_schema and key in _BY_NAME and isinstance(inner, dict):
                    yield from inner.items()
                    waiting.extend((named, True) for named in inner.values())
                else:
                    waiting.append((inner, is_schema and key in _SCHEMAS))


def _may_reach_values(reference: object) -> bool:
    """True unless a reference surely points at no value: a pointer may go through any member."""
    if not isinstance(reference, str) or not _PLAIN_POINTER.fullmatch(reference):
        return True
    return not _VALUES.isdisjoint(reference.split("/"))


def _check_patterns(value: object) -> None:
    if isinstance(value, str):
        check_regex(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            check_regex(key)
            if isinstance(inner, str):
                check_regex(inner)


def _digits(value: int | Decimal) -> int:
    """A divisor without its decimal point: 0.25 counts as 25, 25e2 as 2500."""
    if isinstance(value, int):
        return value
    _, digits, exponent = value.as_tuple()
    zeros = exponent if isinstance(exponent, int) else 0
    # A few digits and zeros are beyond every bound; thousands would take long, or raise.
    return int("".join(map(str, digits[:20])) + "0" * min(max(zeros, 0), 20))

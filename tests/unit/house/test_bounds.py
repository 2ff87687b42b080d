"""The README's table of bounds says what the code does."""

import re
from pathlib import Path

from cluster.config import HttpSection
from cluster.http import fields, structured
from protos.generation import MAX_LOGPROBS
from protos.grammar import MAX_GRAMMAR_BYTES
from protos.options import MAX_ALLOWED_TOKEN_IDS, MAX_BIASES
from protos.params import MAX_STOP_TOKEN_IDS
from verifier_service.grammar.bounds import (
    MAX_DIVISOR,
    MAX_LARK_LEN,
    MAX_PATTERNS,
    MAX_REFERENCES,
    MAX_REGEX_LEN,
)

README = (Path(__file__).resolve().parents[3] / "README.md").read_text()
LIMITS = HttpSection().limits()
BOUNDS = {
    "bytes of a body": (LIMITS.max_body_bytes,),
    "prompts of a call": (LIMITS.max_prompts,),
    "n of a prompt": (fields.MAX_CHOICES, LIMITS.max_choices),
    "requests in the house": (LIMITS.max_requests,),
    "stop strings": (fields.MAX_STOPS, fields.MAX_STOP_LEN),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS,),
    "logprobs": (MAX_LOGPROBS,),
    "entries of logit_bias": (MAX_BIASES, MAX_ALLOWED_TOKEN_IDS),
    "messages of a chat": (fields.MAX_MESSAGES, fields.MAX_PARTS),
    "bytes of a schema or grammar": (MAX_GRAMMAR_BYTES, structured.MAX_OPTIONS),
    "characters of regex": (MAX_REGEX_LEN, MAX_LARK_LEN, MAX_REFERENCES),
    "patternProperties of a schema; its multipleOf": (MAX_PATTERNS, MAX_DIVISOR),
    "seconds of timeout_s": (fields.MAX_TIMEOUT_S,),
}


def test_the_table_of_bounds_is_the_codes() -> None:
    table = re.search(r"<!-- bounds: begin -->\n(.*?)<!-- bounds: end -->", README, re.DOTALL)
    assert table is not None
    said: dict[str, tuple[int, ...]] = {}
    for row in table[1].splitlines()[2:]:
        _, name, value, _ = row.split("|")
        first = re.split(r"[,(]", name.replace("`", ""))[0].strip()
        said[first] = tuple(int(part.replace(",", "")) for part in value.split(", "))
    assert said == BOUNDS

"""Grammars beside `acceptance: rejection`: the distribution is the target's own, masked.

p is the masked distribution and q whatever the drafter has: the rule is exact for any q, as long as
no chain is cut for what it holds. So drafts of such requests are not filtered.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from protos.options import LogitOptions
from tests.fakes import Client, TableTarget, small_settings
from tests.unit.engine.test_rejection_requests import (
    LEAST_P,
    TABLE,
    TEMPERATURE,
    QDrafting,
    QOf,
    certain,
    far,
    near,
    p_value,
    rejected,
)
from tests.unit.grammar.grammar_cases import regex
from verifier_service.engine.loop import Engine
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.grammar.compiling import Grammars
from verifier_service.grammar.vocabulary import Vocabulary

END = 3
WORDS = Vocabulary((b"a", b"b", b"c", b"</s>"), frozenset({END}), (END,))
FORM = regex("(ab|[bc]a?c?)b?")
TEXTS = {"ab", "abb"} | {
    f"{first}{a}{c}{b}" for first, a, c, b in product("bc", ("", "a"), ("", "c"), ("", "b"))
}
PROMPT_END = 0


def follows(said: str) -> list[int]:
    """By the list of matching texts alone."""
    longer = {text[len(said)] for text in TEXTS if text.startswith(said) and len(text) > len(said)}
    return ["abc".index(letter) for letter in sorted(longer)] + [END] * (said in TEXTS)


def truth(num_tokens: int) -> dict[tuple[int, ...], float]:
    """Probability of every run of tokens, ended by the end or by its length."""
    found: dict[tuple[int, ...], float] = {}
    waiting: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while waiting:
        said, value = waiting.pop()
        if len(said) == num_tokens or END in said:
            found[said] = value
            continue
        ids = follows("".join("abc"[token] for token in said))
        logits = torch.tensor(TABLE[said[-1] if said else PROMPT_END])[ids] / TEMPERATURE
        for token, p in zip(ids, torch.softmax(logits, -1).tolist(), strict=True):
            waiting.append(((*said, token), value * p))
    return found


@pytest.mark.parametrize("q_of", [near, far, certain])
def test_texts_are_distributed_as_the_masked_target_samples_them(q_of: QOf):
    target = TableTarget(TABLE, eos_token_ids=(END,))
    grammars = Grammars(lambda: WORDS)
    engine = Engine(target, QDrafting(q_of), StaticPlanner(), small_settings(), grammars=grammars)
    client = Client(engine)
    options = LogitOptions(grammar=FORM)
    for first in range(0, 960, 64):
        for seed in range(first, min(first + 64, 960)):
            client.submit(replace(rejected(str(seed), seed), options=options))
        client.finish()
    engine.check_idle()
    texts = list(client.texts().values())
    expected = truth(3)
    assert sum(expected.values()) == pytest.approx(1.0)
    assert set(texts) <= set(expected)
    assert p_value(texts, expected) > LEAST_P
    assert engine.stats().num_accepted > 0


def test_the_distribution_without_the_grammar_would_show():
    """The control: texts drawn from the unmasked target do not even match."""
    engine = Engine(
        TableTarget(TABLE, eos_token_ids=(END,)), QDrafting(near), StaticPlanner(), small_settings()
    )
    client = Client(engine)
    for seed in range(64):
        client.submit(rejected(str(seed), seed))
    client.finish()
    assert not set(client.texts().values()) <= set(truth(3))

"""Where a text stands in its grammar: fast path and plain loops, at any node, in any order."""

import json
import random
from collections.abc import Callable, Sequence

import pytest

from protos.errors import InvalidRequest
from protos.grammar import Grammar
from protos.tree import CandidateTree
from tests.tiny import EOS_ID
from tests.unit.grammar.grammar_cases import (
    ONE_OF_EACH,
    PERSON,
    VOCAB,
    ids_in,
    ids_of,
    maker,
    opened,
    regex,
    schema,
    tokenizer,
    vocabulary,
)
from verifier_service.grammar.reference import allowed_reference
from verifier_service.grammar.state import GrammarState


def some_text(grammar: Grammar, rng: random.Random, most: int = 30) -> list[int]:
    """A matching text's tokens, at random, without the EOS; cut off after `most`."""
    state, tokens = opened(grammar)
    while len(tokens) <= most:
        ids = sorted(ids_in(state.allowed(())))
        # Seldom a space or a digit more: texts should get somewhere.
        token = rng.choice([i for i in ids if tokenizer().decode([i]).strip()] or ids)
        if token == EOS_ID:
            break
        tokens.append(token)
    return tokens[1:]


@pytest.mark.parametrize("grammar", ONE_OF_EACH, ids=lambda g: g.kind)
def test_what_is_allowed_equals_asking_new_matchers_id_by_id(grammar: Grammar):
    rng, make = random.Random(1), maker(grammar)
    text = some_text(grammar, rng)
    assert len(text) >= 3
    for at in sorted({0, 1, len(text) // 2, len(text)}):
        state, _ = opened(grammar, text[:at])
        assert ids_in(state.allowed(())) == allowed_reference(
            make, range(VOCAB), {EOS_ID}, text[:at]
        )
        path = text[at : at + 4]
        assert ids_in(state.allowed(path)) == allowed_reference(
            make, range(VOCAB), {EOS_ID}, text[: at + 4]
        )


@pytest.mark.parametrize("grammar", ONE_OF_EACH, ids=lambda g: g.kind)
@pytest.mark.parametrize("seed", range(5))
def test_the_way_to_a_node_does_not_matter(grammar: Grammar, seed: int):
    rng = random.Random(seed)
    texts = [some_text(grammar, rng) for _ in range(3)]
    state, tokens = opened(grammar)
    for _ in range(40):
        now = tuple(tokens[1:])
        followers = [text[len(now) :] for text in texts if tuple(text[: len(now)]) == now]
        path = rng.choice(followers)[: rng.randrange(8)]
        if rng.random() < 0.3:
            path = [*path, *rng.choices(range(VOCAB), k=rng.randrange(3))]
        straight, _ = opened(grammar, now)
        assert ids_in(state.allowed(path)) == ids_in(straight.allowed(path))
        if rng.random() < 0.3:
            tokens += rng.choice(followers)[: rng.randrange(3)]
    assert state.fault == ""


def test_nothing_follows_a_forbidden_path_and_nobody_is_blamed():
    state, _ = opened(schema(PERSON))
    assert ids_in(state.allowed(ids_of("["))) == frozenset()
    assert ids_in(state.allowed(())) == {*ids_of("{")}
    assert state.fault == ""


def test_an_end_is_allowed_only_where_the_text_matches():
    state, _ = opened(regex("ab+"), ids_of("a"))
    assert EOS_ID not in ids_in(state.allowed(()))
    assert EOS_ID in ids_in(state.allowed(ids_of("b")))
    assert len(ids_in(state.allowed(ids_of("b")))) > 1
    over, _ = opened(schema({"const": 7}), ids_of("7"))
    assert ids_in(over.allowed(())) == {EOS_ID}
    assert ids_in(over.allowed((EOS_ID,))) == {EOS_ID}, "a row behind the end must not break"
    assert ids_in(over.allowed((EOS_ID, 5))) == frozenset()
    assert over.fault == ""


def test_a_string_holds_any_text_but_no_special_token():
    state, _ = opened(schema({"type": "string"}), ids_of('"\u00e4'))
    allowed = ids_in(state.allowed(()))
    assert not allowed & {0, 1, 2}
    assert allowed >= {*ids_of("z"), *ids_of("\u20ac")[:1]}


def test_half_a_character_goes_on_with_its_other_half_only():
    first, *rest = ids_of("\u20ac")
    state, _ = opened(schema({"type": "string"}), [*ids_of('"'), first])
    allowed = ids_in(state.allowed(()))
    assert rest[0] in allowed
    assert not allowed & {*ids_of('"'), *ids_of("a")}


def keep_by_reference(make, tree: CandidateTree, output: Sequence[int]) -> list[int]:
    kept: list[int] = []
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), 1):
        path = paths[node] = (*paths[parent], token)
        if allowed_reference(make, [token], {EOS_ID}, [*output, *path[:-1]]):
            kept.append(node)
    return kept


@pytest.mark.parametrize("grammar", ONE_OF_EACH, ids=lambda g: g.kind)
@pytest.mark.parametrize("seed", range(4))
def test_a_draft_keeps_exactly_the_nodes_that_the_grammar_allows(grammar: Grammar, seed: int):
    rng, make = random.Random(seed), maker(grammar)
    text = some_text(grammar, rng)
    at = rng.randrange(len(text))
    state, _ = opened(grammar, text[:at])
    nodes: list[tuple[int, int]] = []
    right = 0
    for token in (*text[at:], EOS_ID, EOS_ID):
        siblings = {token, *rng.sample(range(VOCAB), 2)}
        below = [(right, sibling) for sibling in sorted(siblings)]
        nodes += below
        right = len(nodes) - len(below) + below.index((right, token)) + 1
        nodes.append((right, rng.randrange(VOCAB)))
    tree = CandidateTree(
        tuple(token for _, token in dict.fromkeys(nodes)),
        tuple(parent for parent, _ in dict.fromkeys(nodes)),
        (0.0,) * len(dict.fromkeys(nodes)),
    )
    kept = state.fitting(tree)
    assert kept == keep_by_reference(make, tree, text[:at])
    assert kept
    assert tree.keep(kept).num_nodes == len(kept)
    assert ids_in(state.allowed(())) == ids_in(opened(grammar, text[:at])[0].allowed(()))


def test_output_that_does_not_match_is_refused_by_name():
    with pytest.raises(InvalidRequest) as caught:
        opened(schema(PERSON), ids_of('{"nam": 1'))
    assert caught.value.param == "output_ids"


class Breaking:
    """A matcher whose n-th mask fails, where `fails(n)`; masks of all that are made count on."""

    def __init__(self, inner, counter: list[int], fails: Callable[[int], bool]) -> None:
        self._inner, self._counter, self._fails, self._failed = inner, counter, fails, False

    def is_error(self) -> bool:
        return self._failed

    def get_error(self) -> str:
        return "too\ncomplex" if self._failed else ""

    def is_accepting(self) -> bool:
        return self._inner.is_accepting()

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return 0 if self._failed else self._inner.try_consume_tokens(tokens)

    def rollback(self, num_tokens: int) -> bool:
        return not self._failed and self._inner.rollback(num_tokens)

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        self._failed = self._failed or self._fails(self._counter[0])
        self._counter[0] += 1
        self._inner.unsafe_compute_mask_ptr(pointer, size)


def breaking(fails: Callable[[int], bool]) -> tuple[GrammarState, list[int]]:
    make, counter, tokens = maker(schema(PERSON)), [0], [5]
    state = GrammarState(lambda: Breaking(make(), counter, fails), vocabulary(), tokens, 1)
    return state, tokens


def test_a_matcher_that_fails_is_made_again_and_the_text_goes_on():
    state, tokens = breaking(lambda number: number % 3 == 2)
    straight, same = opened(schema(PERSON))
    for token in ids_of('{"name":"x","kind":"cat"}'):
        assert ids_in(state.allowed(())) == ids_in(straight.allowed(()))
        tokens.append(token)
        same.append(token)
    assert state.fault == ""


def test_a_matcher_that_fails_again_is_the_fault_of_its_request():
    state, tokens = breaking(lambda number: number >= 3)
    for token in ids_of('{"n'):
        assert token in ids_in(state.allowed(()))
        tokens.append(token)
    assert ids_in(state.allowed(())) == frozenset()
    assert state.fault == "the grammar cannot be followed: too complex"


def test_a_matcher_that_fails_on_a_draft_is_nobodys_fault():
    state, tokens = breaking(lambda number: number in (1, 2))
    straight, same = opened(schema(PERSON))
    brace = ids_of("{")
    assert ids_in(state.allowed(())) == {*brace}
    assert ids_in(state.allowed(brace)) == frozenset(), "failed twice: nothing may follow there"
    assert state.fault == ""
    for token in ids_of('{"name":"x","kind":"cat"}'):
        assert ids_in(state.allowed(())) == ids_in(straight.allowed(()))
        tokens.append(token)
        same.append(token)
    assert state.fault == ""


def test_a_committed_text_that_left_its_grammar_is_told():
    state, tokens = opened(schema(PERSON))
    tokens += ids_of("[")
    assert ids_in(state.allowed(())) == frozenset()
    assert "left" in state.fault


def test_a_state_grows_with_its_live_list():
    state, tokens = opened(schema(PERSON))
    text = json.dumps({"name": "ab", "kind": "dog", "tags": [True, False]})
    for token in ids_of(text):
        assert token in ids_in(state.allowed(()))
        tokens.append(token)
    assert ids_in(state.allowed(())) == {EOS_ID}

"""What a grammar allows, in plain loops: the definition that `state.GrammarState` must equal.

A new matcher for every question, fed token by token, and every id asked for by itself: no masks, no
way back, nothing kept. Slow on purpose; tests use it, serving never does.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from verifier_service.grammar.state import Matcher


def allowed_reference(
    make: Callable[[], Matcher], ids: Iterable[int], eos_ids: Collection[int], output: Sequence[int]
) -> frozenset[int]:
    """Those of `ids` that may follow `output`; none when it does not match so far."""
    found = set[int]()
    for token in ids:
        matcher, has_ended, fits = make(), False, True
        for said in (*output, token):
            if said in eos_ids:
                fits = fits and matcher.is_accepting()
                has_ended = True
            else:
                fits = fits and not has_ended and bool(matcher.try_consume_tokens([said]))
        if fits:
            found.add(token)
    return frozenset(found)

"""Which verification rules keep the target's distribution, by enumeration in exact rationals.

One step, four tokens, target p and drafter q of reference/eagle.md 1.7 and EXACTNESS.md. Each rule
is a function to the exact distribution of the first emitted token; TV is its distance from p. The
lossless rules give 0, the biased ones exactly the figures of that table.
"""

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest

from protos.params import SamplingParams
from protos.tree import CandidateTree
from verifier_service.sampling.choice import ChoiceRow
from verifier_service.sampling.walk import WalkStart, walk

P = (Fraction(4, 10), Fraction(3, 10), Fraction(2, 10), Fraction(1, 10))
Q = (Fraction(1, 10), Fraction(5, 10), Fraction(3, 10), Fraction(1, 10))
TOKENS = range(4)
Dist = tuple[Fraction, ...]
ZERO: Dist = (Fraction(0),) * 4


def tv(emitted: Dist) -> Fraction:
    assert sum(emitted) == 1
    return sum((abs(a - b) for a, b in zip(emitted, P, strict=True)), Fraction(0)) / 2


def scale(weight: Fraction, dist: Sequence[Fraction]) -> Dist:
    return tuple(weight * value for value in dist)


def add(*dists: Dist) -> Dist:
    return tuple(sum(values, Fraction(0)) for values in zip(*dists, strict=True))


def point(token: int) -> Dist:
    return tuple(Fraction(int(t == token)) for t in TOKENS)


def norm(dist: Sequence[Fraction]) -> Dist:
    total = sum(dist, Fraction(0))
    return tuple(value / total for value in dist)


def residual(p: Sequence[Fraction], q: Sequence[Fraction]) -> Dist:
    return tuple(max(Fraction(0), a - b) for a, b in zip(p, q, strict=True))


def without(dist: Sequence[Fraction], tokens: Sequence[int]) -> Dist:
    return tuple(Fraction(0) if t in tokens else value for t, value in enumerate(dist))


# Sample, then walk, and its equals.


def conditional(prefix: Sequence[int]) -> Dist:
    """The target after a prefix: P, turned by the last token so that history matters."""
    turn = prefix[-1] if prefix else 0
    return tuple(P[(t - turn) % 4] for t in TOKENS)


def texts_of_rounds(tree: CandidateTree) -> dict[tuple[int, int], Fraction]:
    """Exact distribution of two tokens committed by `walk`, round by round, over this tree.

    A draw is fixed by its position and path, so a token that one round drew in vain would be drawn
    again, equal, by the next; the walk may ask nowhere but along the text itself.
    """
    found: dict[tuple[int, int], Fraction] = {}
    for drawn in itertools.product(TOKENS, TOKENS):
        weight = conditional(())[drawn[0]] * conditional(drawn[:1])[drawn[1]]
        text: tuple[int, ...] = ()
        while len(text) < 2:
            rest = tree.reroot(text)
            done = len(text)

            def chooser(
                rows: Sequence[ChoiceRow], drawn: tuple[int, ...] = (*drawn, 0, 0)
            ) -> list[int | None]:
                return [drawn[row.position] for row in rows]

            (end,) = walk([WalkStart(rest, 0, SamplingParams(), base_len=done)], chooser)
            text += end.choices
        key = (text[0], text[1])
        found[key] = found.get(key, Fraction(0)) + weight
    return found


def sample_then_walk(children: Sequence[int]) -> Dist:
    """First token of `texts_of_rounds` for an anchor with these children, each with children."""
    tokens = (*children, *(t for _ in children for t in range(2)))
    parents = (*(0 for _ in children), *(n for n, _ in enumerate(children, 1) for _ in range(2)))
    found = texts_of_rounds(CandidateTree(tokens, parents, (0.0,) * len(tokens)))
    assert all(found[x, y] == P[x] * conditional((x,))[y] for x in TOKENS for y in TOKENS)
    return tuple(sum((found[x, y] for y in TOKENS), Fraction(0)) for x in TOKENS)


def membership_coins(children: Sequence[int]) -> Dist:
    """The same by a coin per child: accept c with p(c), else renormalise without it."""
    emitted, left, reach = ZERO, P, Fraction(1)
    for child in children:
        emitted = add(emitted, scale(reach * left[child], point(child)))
        reach *= 1 - left[child]
        if not reach:
            return emitted
        left = norm(without(left, [child]))
    return add(emitted, scale(reach, left))


def sglang_coin(
    children: Sequence[int], acc: Fraction = Fraction(1), single: Fraction = Fraction(1)
) -> Dist:
    """One coin u per node against the running mass over `acc`; p >= `single` always passes."""
    emitted, mass, below = ZERO, Fraction(0), Fraction(0)
    for child in children:
        mass += P[child]
        passes = Fraction(1) if P[child] >= single else min(Fraction(1), mass / acc)
        if passes > below:
            emitted = add(emitted, scale(passes - below, point(child)))
            below = passes
    if below == 1:
        return emitted
    return add(emitted, scale(1 - below, norm(without(P, children))))


# Rules with a coin of p over q.


def accept_or_residual(x: int, q: Sequence[Fraction]) -> Dist:
    """Drafted x, tested with q: min(1, p/q), else the normalised residual."""
    passes = min(Fraction(1), P[x] / q[x])
    rejected = ZERO if passes == 1 else scale(1 - passes, norm(residual(P, q)))
    return add(scale(passes, point(x)), rejected)


def p_over_q(drawn_from: Sequence[Fraction], tested_with: Sequence[Fraction]) -> Dist:
    return add(
        *(scale(drawn_from[x], accept_or_residual(x, tested_with)) for x in TOKENS if drawn_from[x])
    )


def pruned(dropped: Callable[[int], Fraction]) -> Dist:
    """x ~ q, withdrawn with probability dropped(x): then the token is a plain draw from p."""
    return add(
        *(
            add(
                scale(Q[x] * dropped(x), P),
                scale(Q[x] * (1 - dropped(x)), accept_or_residual(x, Q)),
            )
            for x in TOKENS
        )
    )


def multi_round(candidates: Sequence[int], qs: Sequence[Dist]) -> Dist:
    """Candidates tested in turn, each with its q; p becomes the residual after a rejection."""
    emitted, p, reach = ZERO, P, Fraction(1)
    for x, q in zip(candidates, qs, strict=True):
        passes = min(Fraction(1), p[x] / q[x])
        emitted = add(emitted, scale(reach * passes, point(x)))
        reach *= 1 - passes
        if not reach:
            return emitted
        p = norm(residual(p, q))
    return add(emitted, scale(reach, p))


def iid_candidates(count: int) -> Dist:
    return add(
        *(
            scale(Q[a] * Q[b], multi_round((a, b)[:count], (Q, Q)[:count]))
            for a, b in itertools.product(TOKENS, TOKENS)
        )
    )


def without_replacement(order: Callable[[int, int], tuple[int, int]]) -> Dist:
    """Two siblings drawn from q without replacement, tested in the order given."""
    emitted = ZERO
    for a, b in itertools.permutations(TOKENS, 2):
        drawn = Q[a] * Q[b] / (1 - Q[a])
        first, second = order(a, b)
        qs = (Q, norm(without(Q, [first])))
        emitted = add(emitted, scale(drawn, multi_round((first, second), qs)))
    return emitted


def subsets() -> list[tuple[int, ...]]:
    return [s for n in range(5) for s in itertools.permutations(TOKENS, n)]


@pytest.mark.parametrize("rule", [sample_then_walk, membership_coins, sglang_coin])
def test_membership_is_lossless_for_every_child_set_in_every_order(rule):
    assert all(tv(rule(children)) == 0 for children in subsets())


def test_membership_is_lossless_when_children_are_sampled_or_dropped_by_value():
    sampled = add(
        *(
            scale(Q[a] * Q[b], membership_coins(tuple(dict.fromkeys((a, b)))))
            for a, b in itertools.product(TOKENS, TOKENS)
        )
    )
    dropped = add(*(scale(Q[x], membership_coins((x,) if x < 2 else ())) for x in TOKENS))
    assert tv(sampled) == 0
    assert tv(dropped) == 0


TRUNCATED = norm(without(Q, (0, 3)))


@pytest.mark.parametrize(
    ("name", "emitted"),
    [
        ("p/q, x sampled from exactly that q", p_over_q(Q, Q)),
        ("q truncated before sampling, same q tested", p_over_q(TRUNCATED, TRUNCATED)),
        ("pruning independent of the value", pruned(lambda x: Fraction(1, 3))),
        ("SpecInfer, i.i.d. candidates", iid_candidates(2)),
        ("without replacement, in draw order", without_replacement(lambda a, b: (a, b))),
    ],
)
def test_rules_that_use_the_q_that_was_sampled_are_lossless(name: str, emitted: Dist):
    assert tv(emitted) == 0, name


def by_q(a: int, b: int) -> tuple[int, int]:
    first, second = sorted((a, b), key=lambda t: -Q[t])
    return first, second


TOP2 = (1, 2)


@pytest.mark.parametrize(
    ("name", "emitted", "expected"),
    [
        (
            "coin with accumulated threshold 0.5",
            sglang_coin(TOP2, acc=Fraction(1, 2)),
            Fraction(1, 2),
        ),
        (
            "coin with single threshold 0.3",
            sglang_coin(TOP2, single=Fraction(3, 10)),
            Fraction(7, 10),
        ),
        ("x from truncated q, tested with whole q", p_over_q(TRUNCATED, Q), Fraction(1, 8)),
        ("without replacement, sorted by q", without_replacement(by_q), None),
        ("deterministic top-1 tested with soft q", accept_or_residual(1, Q), Fraction(3, 10)),
        (
            "draft dropped by its own value",
            pruned(lambda x: Fraction(int(x >= 2))),
            Fraction(18, 100),
        ),
    ],
)
def test_biased_rules_are_off_by_the_stated_distance(
    name: str, emitted: Dist, expected: Fraction | None
):
    if expected is None:
        assert round(float(tv(emitted)), 3) == 0.195, name
    else:
        assert tv(emitted) == expected, name


def test_p_over_q_with_one_shared_uniform_is_biased():
    """Draft, coin and residual from one uniform u (inverse CDF): why purposes are separate keys."""
    steps = 1000
    counts = [0] * 4
    for i in range(steps):
        u = Fraction(2 * i + 1, 2 * steps)
        x = inverse_cdf(Q, u)
        if u < min(Fraction(1), P[x] / Q[x]):
            counts[x] += 1
        else:
            counts[inverse_cdf(norm(residual(P, Q)), u)] += 1
    assert tv(tuple(Fraction(c, steps) for c in counts)) > Fraction(4, 100)


def inverse_cdf(dist: Sequence[Fraction], u: Fraction) -> int:
    running = Fraction(0)
    for token, value in enumerate(dist):
        running += value
        if u < running:
            return token
    raise AssertionError("u lies in [0, 1)")

"""Rejection over whole rounds, enumerated in exact rationals: two committed tokens, any history.

One position is the business of `test_exactness_rational`; here rounds follow each other as in the
engine. Chains of any length are drafted, walked by the real `walk`, cut at the first refusal, and
drafted again *with the same noise*: a draft's noise belongs to its position, so a position that
was drafted in vain is drafted from the same numbers again. The draft's noise is a grid of ten
values per position (q in tenths), coin and residual branch with their exact weights.

Shapes of the argument that may fail, and the tests that show them failing: chains kept because of
their own tokens, and a residual out of the draft's noise.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product

import pytest

from protos.params import Acceptance, SamplingParams
from protos.sparse import SparseQ
from protos.tree import chain
from verifier_service.sampling.choice import ChoiceRow
from verifier_service.sampling.walk import WalkStart, walk

TOKENS = range(3)
NUM_TOKENS = 2
PARAMS = SamplingParams(acceptance=Acceptance.REJECTION)
Dist = tuple[Fraction, ...]
Text = tuple[int, ...]
Length = Callable[[int, Text], int]
"""How many drafted tokens are tested, of a chain drafted after so many committed tokens."""


def tenths(*values: int) -> Dist:
    assert sum(values) == 10
    return tuple(Fraction(value, 10) for value in values)


def target(path: Text) -> Dist:
    """History matters: by the last token."""
    return {None: tenths(5, 3, 2), 0: tenths(1, 6, 3), 1: tenths(7, 1, 2), 2: tenths(2, 2, 6)}[
        path[-1] if path else None
    ]


def drafter(path: Text) -> Dist:
    return {None: tenths(2, 6, 2), 0: tenths(4, 4, 2), 1: tenths(3, 3, 4), 2: tenths(0, 5, 5)}[
        path[-1] if path else None
    ]


def inverse_cdf(dist: Sequence[Fraction], tenth: int) -> int:
    running = Fraction(0)
    for token, value in enumerate(dist):
        running += value
        if Fraction(2 * tenth + 1, 20) < running:
            return token
    raise AssertionError("the grid ends below 1")


def residual(p: Dist, q: Dist) -> Dist:
    left = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
    return tuple(value / sum(left) for value in left)


def outcomes(path: Text, proposed: int | None) -> Iterator[tuple[int, Fraction]]:
    """Tokens that the rule may give at one row, with their exact chances."""
    p, q = target(path), drafter(path)
    if proposed is None:
        yield from ((t, p[t]) for t in TOKENS if p[t])
        return
    passes = min(Fraction(1), p[proposed] / q[proposed])
    yield proposed, passes
    if passes < 1:
        left = residual(p, q)
        yield from ((t, (1 - passes) * left[t]) for t in TOKENS if left[t])


class NeedsChoice(Exception):
    """The walk asked for a row that the script does not answer yet."""

    def __init__(self, row: ChoiceRow, path: Text) -> None:
        self.row, self.path = row, path


def rounds(tenth_of: Sequence[int], length: Length, script: Sequence[int]) -> Text:
    """The committed text, rows answered in order by `script`. Raises NeedsChoice at its end."""
    text: Text = ()
    answers = list(script)
    while len(text) < NUM_TOKENS:
        drafted = text
        for position in range(len(text), NUM_TOKENS):
            drafted += (inverse_cdf(drafter(drafted), tenth_of[position]),)
        tokens = drafted[len(text) :][: length(len(text), drafted)]
        q = tuple(
            SparseQ(tuple(TOKENS), tuple(float(v) or 1e-9 for v in drafter(drafted[:at])))
            for at in range(len(text), len(text) + len(tokens))
        )

        def chooser(rows: Sequence[ChoiceRow], before: Text = text, new: Text = tokens) -> list:
            (row,) = rows
            path = before + new[: row.position - len(before)]
            if not answers:
                raise NeedsChoice(row, path)
            return [answers.pop(0)]

        (end,) = walk([WalkStart(chain(tokens), 0, PARAMS, len(text), q)], chooser)
        text += end.choices
    return text[:NUM_TOKENS]


def distribution(length: Length, tied_to_draft: bool = False) -> dict[Text, Fraction]:
    """Exact distribution of the text over all noise."""
    found: dict[Text, Fraction] = {}
    for tenth_of in product(range(10), repeat=NUM_TOKENS):
        open_scripts: list[tuple[tuple[int, ...], Fraction]] = [((), Fraction(1, 100))]
        while open_scripts:
            script, weight = open_scripts.pop()
            try:
                text = rounds(tenth_of, length, script)
            except NeedsChoice as asked:
                row = asked.row
                proposed = row.proposal.token if row.proposal else None
                for token, chance in outcomes(asked.path, proposed):
                    if tied_to_draft and token != proposed and proposed is not None:
                        left = residual(target(asked.path), drafter(asked.path))
                        token = inverse_cdf(left, tenth_of[row.position])
                    open_scripts.append(((*script, token), weight * chance))
                continue
            found[text] = found.get(text, Fraction(0)) + weight
    return found


def truth() -> dict[Text, Fraction]:
    return {(a, b): target(())[a] * target((a,))[b] for a, b in product(TOKENS, TOKENS)}


def distance(found: dict[Text, Fraction]) -> Fraction:
    expected = truth()
    assert sum(found.values()) == 1
    return (
        sum(
            (abs(found.get(text, Fraction(0)) - value) for text, value in expected.items()),
            Fraction(0),
        )
        / 2
    )


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("no drafts", lambda base, drafted: 0),
        ("one token a round", lambda base, drafted: 1),
        ("two, the second again when the first was refused", lambda base, drafted: 2),
        ("a length that depends on where the round begins", lambda base, drafted: 2 - base),
        ("a length that depends on what was committed", lambda base, d: 1 + (d[:base] == (1,))),
    ],
)
def test_rounds_keep_the_distribution_exactly(name: str, length: Length) -> None:
    found = distribution(length)
    assert distance(found) == 0, name
    assert {text: value for text, value in found.items() if value} == truth()


def test_a_chain_kept_for_its_own_tokens_is_biased() -> None:
    """Why nothing prunes these chains by score: a draft of token 1 is withdrawn."""
    assert distance(distribution(lambda base, d: 0 if d[base] == 1 else 2)) > Fraction(1, 20)


def test_a_residual_out_of_the_drafts_noise_is_biased() -> None:
    assert distance(distribution(lambda base, drafted: 2, tied_to_draft=True)) > Fraction(1, 25)

"""Sample, then walk (law 2): the text is the choice function's own, whatever the tree."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from protos.params import SamplingParams
from protos.tree import CandidateTree, chain
from verifier_service.sampling.choice import ChoiceRow
from verifier_service.sampling.walk import WalkEnd, WalkStart, blamed, walk

GREEDY = SamplingParams(temperature=0.0)


def draw_everywhere_then_walk(tree: CandidateTree, choices: Sequence[int]) -> list[int]:
    """The definition: a choice at every node first, then the walk. Returns the tokens."""
    here, tokens = 0, []
    while True:
        tokens.append(choices[here])
        children = [
            node
            for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), 1)
            if parent == here and token == choices[here]
        ]
        if not children:
            return tokens
        here = children[0]


def random_tree(rng: random.Random, vocab_size: int, num_nodes: int) -> CandidateTree:
    tokens, parents, taken = [], [], set()
    for _ in range(num_nodes):
        parent, token = rng.randint(0, len(tokens)), rng.randrange(vocab_size)
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return CandidateTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))


def test_walking_in_lock_step_equals_drawing_everywhere_first():
    rng = random.Random(1)
    for _ in range(200):
        trees = [random_tree(rng, 3, rng.randint(0, 12)) for _ in range(rng.randint(1, 5))]
        firsts = [0, *itertools.accumulate(t.num_nodes + 1 for t in trees)]
        choices = [rng.randrange(3) for _ in range(firsts[-1])]
        starts = [
            WalkStart(tree, first, GREEDY, base_len=10 * first + 1)
            for tree, first in zip(trees, firsts, strict=False)
        ]

        def chooser(rows: Sequence[ChoiceRow], drawn: list[int] = choices) -> list[int | None]:
            return [drawn[row.row] for row in rows]

        for start, end in zip(starts, walk(starts, chooser), strict=True):
            own = choices[start.first_row : start.first_row + start.tree.num_nodes + 1]
            assert list(end.choices) == draw_everywhere_then_walk(start.tree, own)
            assert [start.tree.tokens[node - 1] for node in end.nodes] == list(end.choices[:-1])


def test_choices_are_asked_for_the_position_of_the_token_they_give():
    asked: list[tuple[int, int]] = []

    def chooser(rows: Sequence[ChoiceRow]) -> list[int | None]:
        asked.extend((row.row, row.position) for row in rows)
        return [7] * len(rows)

    (end,) = walk([WalkStart(chain([7, 7, 8]), 20, GREEDY, base_len=5)], chooser)
    assert asked == [(20, 5), (21, 6), (22, 7)]
    assert end.num_accepted == 2
    assert end.choices == (7, 7, 7)


def test_only_nodes_on_the_way_are_drawn():
    num_drawn = 0

    def chooser(rows: Sequence[ChoiceRow]) -> list[int | None]:
        nonlocal num_drawn
        num_drawn += len(rows)
        return [0] * len(rows)

    bushy = CandidateTree((1, 2, 3, 4), (0, 0, 0, 0), (0.0,) * 4)
    walk([WalkStart(bushy, 0, GREEDY, 1)] * 3, chooser)
    assert num_drawn == 3


def test_a_row_without_a_choice_breaks_its_own_walk_only():
    def chooser(rows: Sequence[ChoiceRow]) -> list[int | None]:
        return [None if row.row == 1 else 4 for row in rows]

    broken, whole = walk(
        [WalkStart(chain([4]), 0, GREEDY, 1), WalkStart(chain([4]), 2, GREEDY, 1)], chooser
    )
    assert broken.is_broken
    assert broken.broken_row == 1
    assert broken.choices == (4,)
    assert not whole.is_broken
    assert whole.choices == (4, 4)


@pytest.mark.parametrize(
    ("row", "is_targets_fault"),
    [([0.0, -torch.inf], False), ([-torch.inf] * 2, True), ([0.0, torch.nan], True)],
)
def test_the_target_is_blamed_for_rows_without_a_finite_best_score(row, is_targets_fault: bool):
    logits = torch.tensor([[1.0, 2.0], row])
    assert blamed(WalkEnd((), (), 1), logits).is_targets_fault is is_targets_fault
    assert not blamed(WalkEnd((), (4,)), logits).is_targets_fault


@pytest.mark.parametrize("vocab_size", [2])
def test_every_tree_reveals_the_same_text_for_every_choice_function(vocab_size: int):
    """All choice functions of depth 3 over 2 tokens x all trees of depth 2: exhaustive law 2."""
    paths = [p for d in range(3) for p in itertools.product(range(vocab_size), repeat=d)]
    places = [p for p in paths if 1 <= len(p) <= 2]
    for values in itertools.product(range(vocab_size), repeat=len(paths)):
        choice = dict(zip(paths, values, strict=True))
        text: tuple[int, ...] = ()
        while len(text) < 3:
            text += (choice[text],)
        for keep in itertools.product([False, True], repeat=len(places)):
            nodes = {(): 0}
            tokens, parents = [], []
            for path, wanted in zip(places, keep, strict=True):
                if wanted and path[:-1] in nodes:
                    nodes[path] = len(nodes)
                    tokens.append(path[-1])
                    parents.append(nodes[path[:-1]])
            tree = CandidateTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))
            at = {node: path for path, node in nodes.items()}

            def chooser(rows: Sequence[ChoiceRow], at=at, choice=choice) -> list[int | None]:
                return [choice[at[row.row]] for row in rows]

            (end,) = walk([WalkStart(tree, 0, GREEDY, 1)], chooser)
            assert end.choices == text[: len(end.choices)]
            assert len(end.choices) >= 1

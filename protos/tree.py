"""The candidate tree: what a drafter guessed, as a value.

Node 0 is the anchor (the newest committed token) and is not stored; draft node i >= 1 stands at
index i - 1 of every field. A node's parent has a smaller number, siblings carry distinct tokens.
Decides nothing about the text: a tree only chooses how many of the target's tokens one step
reveals (design, law 2). Token ids are not checked here against a vocabulary; `codec` does that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from protos.errors import MalformedTree

LEAST_CONFIDENCE: Final = 2.0**-24
"""A confidence of 0 is the smallest that float16 can tell from it."""


@dataclass(frozen=True, slots=True)
class CandidateTree:
    """A draft of `num_nodes` tokens below the anchor.

    tokens[i - 1], parents[i - 1] (0 = anchor) and scores[i - 1] (log-score summed along the
    node's path, float16 precision on the wire) describe node i.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if len(self.parents) != n or len(self.scores) != n:
            raise MalformedTree(
                f"{n} tokens need as many parents and scores, "
                f"not {len(self.parents)} and {len(self.scores)}"
            )
        seen: set[tuple[int, int]] = set()
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), 1):
            if not 0 <= parent < node:
                raise MalformedTree(f"node {node} names parent {parent}, not an earlier node")
            if (parent, token) in seen:
                raise MalformedTree(f"node {parent} has two children with token {token}")
            seen.add((parent, token))

    @property
    def num_nodes(self) -> int:
        """Draft nodes, the anchor not counted."""
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """True when every node's parent is the node before it (also when empty)."""
        return all(parent == node for node, parent in enumerate(self.parents))

    def depths(self) -> tuple[int, ...]:
        """Depth of each draft node; a child of the anchor has depth 1."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths[1:])

    @property
    def depth(self) -> int:
        """Length of the longest path; 0 for an empty tree."""
        return max(self.depths(), default=0)

    def children(self) -> list[dict[int, int]]:
        """For every node, the anchor first: token of a child -> number of that child."""
        table: list[dict[int, int]] = [{} for _ in range(self.num_nodes + 1)]
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), 1):
            table[parent][token] = node
        return table

    def follow(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Node numbers from the anchor down, as far as `tokens` follow one of the paths."""
        table, path = self.children(), [0]
        for token in tokens:
            found = table[path[-1]].get(token)
            if found is None:
                break
            path.append(found)
        return tuple(path[1:])

    def best_path(self) -> tuple[int, ...]:
        """Node numbers from the anchor down, the child of highest score each time."""
        path: list[int] = []
        table = self.children()
        while following := table[path[-1] if path else 0]:
            path.append(max(following.values(), key=lambda n: (self.scores[n - 1], -n)))
        return tuple(path)

    def believing(self, confidences: Sequence[float]) -> "CandidateTree":
        """The draft with its best path scored by `confidences`, probabilities per depth.

        They take the place of the nodes' own steps; siblings never outrank the best path, and
        what hangs below moves along. Unchanged without confidences.
        """
        if not confidences:
            return self
        steps = [
            score - (self.scores[parent - 1] if parent else 0.0)
            for parent, score in zip(self.parents, self.scores, strict=True)
        ]
        for node, confidence in zip(self.best_path(), confidences, strict=False):
            believed = math.log(max(confidence, LEAST_CONFIDENCE))
            for sibling, parent in enumerate(self.parents, 1):
                if parent == self.parents[node - 1]:
                    steps[sibling - 1] = min(steps[sibling - 1], believed)
            steps[node - 1] = believed
        scores: list[float] = []
        for parent, step in zip(self.parents, steps, strict=True):
            scores.append(step + (scores[parent - 1] if parent else 0.0))
        return CandidateTree(self.tokens, self.parents, tuple(scores))

    def keep(self, nodes: Sequence[int]) -> "CandidateTree":
        """The subtree of `nodes` (draft node numbers, every parent before its children)."""
        number = {0: 0} | {old: new for new, old in enumerate(nodes, 1)}
        return CandidateTree(
            tokens=tuple(self.tokens[n - 1] for n in nodes),
            parents=tuple(number[self.parents[n - 1]] for n in nodes),
            scores=tuple(self.scores[n - 1] for n in nodes),
        )

    def best(self, num_nodes: int) -> "CandidateTree":
        """The `num_nodes` nodes of highest score, closed under parents, order kept.

        A node never outranks its parent: effective score is the minimum along its path, ties go
        to the lower number, so the kept set is closed by construction.
        """
        if num_nodes >= self.num_nodes:
            return self
        effective: list[float] = []
        for parent, score in zip(self.parents, self.scores, strict=True):
            effective.append(min(score, effective[parent - 1]) if parent else score)
        ranked = sorted(range(1, self.num_nodes + 1), key=lambda n: (-effective[n - 1], n))
        return self.keep(sorted(ranked[: max(num_nodes, 0)]))

    def reroot(self, committed: Sequence[int]) -> "CandidateTree":
        """What is left of the draft after `committed` tokens followed one of its paths.

        The last committed token becomes the anchor. Empty when the path leaves the tree. Scores
        are made relative to the new anchor.
        """
        table = self.children()
        root = 0
        for token in committed:
            found = table[root].get(token)
            if found is None:
                return CandidateTree()
            root = found
        if root == 0:
            return self
        number = {root: 0}
        kept: list[int] = []
        for node, parent in enumerate(self.parents, 1):
            if parent in number:
                kept.append(node)
                number[node] = len(kept)
        base = self.scores[root - 1]
        return CandidateTree(
            tokens=tuple(self.tokens[n - 1] for n in kept),
            parents=tuple(number[self.parents[n - 1]] for n in kept),
            scores=tuple(self.scores[n - 1] - base for n in kept),
        )


def chain(tokens: Sequence[int], scores: Sequence[float] | None = None) -> CandidateTree:
    """A tree with one leaf. Scores default to 0 at every node."""
    given = tuple(scores) if scores is not None else (0.0,) * len(tokens)
    return CandidateTree(tuple(tokens), tuple(range(len(tokens))), given)


def merge(trees: Sequence[CandidateTree]) -> tuple[CandidateTree, tuple[tuple[int, ...], ...]]:
    """One tree out of several; equal children become one node with the better score.

    Returns the tree and, per draft node, the indices of the trees that proposed it.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    sources: list[list[int]] = []
    table: dict[tuple[int, int], int] = {}
    for index, tree in enumerate(trees):
        number = [0]
        for token, parent, score in zip(tree.tokens, tree.parents, tree.scores, strict=True):
            key = (number[parent], token)
            node = table.get(key)
            if node is None:
                tokens.append(token)
                parents.append(key[0])
                scores.append(score)
                sources.append([])
                node = table[key] = len(tokens)
            else:
                scores[node - 1] = max(scores[node - 1], score)
            sources[node - 1].append(index)
            number.append(node)
    merged = CandidateTree(tuple(tokens), tuple(parents), tuple(scores))
    return merged, tuple(tuple(s) for s in sources)

"""Sample, then walk (law 2): follow a tree while the target's own choices agree with it.

The first choice without a child is the bonus. Knows trees and rows of logits, nothing of engines.
All trees of a step walk in lock-step, one depth at a time, so a choice is drawn only at nodes that
the walk reaches: a tree of 32 nodes costs as many draws as tokens it commits. What is drawn at a
node does not depend on what else is drawn, so this equals drawing everywhere first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from protos.params import SamplingParams
from protos.sparse import SparseQ
from protos.tree import CandidateTree
from verifier_service.sampling.choice import ChoiceRow
from verifier_service.sampling.history import History, Past
from verifier_service.sampling.rejection import Proposal

Chooser = Callable[[Sequence[ChoiceRow]], list[int | None]]


@dataclass(frozen=True, slots=True)
class WalkStart:
    """A tree to walk: its anchor's row of logits (draft node n stands at first_row + n).

    base_len: committed tokens, anchor included; the anchor's choice is for this position.
    q: what each token of a chain was sampled from, for requests that use rejection. history: of
    requests with logit options.
    """

    tree: CandidateTree
    first_row: int
    params: SamplingParams
    base_len: int
    q: tuple[SparseQ, ...] = ()
    history: History | None = None

    def row(self, node: int, depth: int) -> ChoiceRow:
        """What is asked at a node that stands `depth` below the anchor."""
        # q comes with chains only, whose node d is the one below node d - 1.
        tested = Proposal(self.tree.tokens[depth], self.q[depth]) if depth < len(self.q) else None
        past = None if self.history is None else Past(self.history, self._path(node))
        return ChoiceRow(self.first_row + node, self.params, self.base_len + depth, tested, past)

    def _path(self, node: int) -> tuple[int, ...]:
        """The tokens from the anchor's child down to a node; none for the anchor."""
        path: list[int] = []
        while node:
            path.append(self.tree.tokens[node - 1])
            node = self.tree.parents[node - 1]
        return tuple(reversed(path))


@dataclass(frozen=True, slots=True)
class WalkEnd:
    """nodes: accepted draft nodes, from the anchor down. choices: their tokens, then the bonus.

    broken_row: the row of logits on the way that had no finite score, options applied; `choices`
    then lacks the bonus. is_targets_fault: nor had it before them (`blamed` says).
    """

    nodes: tuple[int, ...]
    choices: tuple[int, ...]
    broken_row: int | None = None
    is_targets_fault: bool = False

    @property
    def is_broken(self) -> bool:
        """A row on the way gave no choice."""
        return self.broken_row is not None

    @property
    def num_accepted(self) -> int:
        """Draft tokens that the walk agreed with."""
        return len(self.nodes)


def walk(starts: Sequence[WalkStart], chooser: Chooser) -> list[WalkEnd]:
    """Walk all trees; each ends with its bonus."""
    children = [start.tree.children() for start in starts]
    nodes: list[list[int]] = [[] for _ in starts]
    choices: list[list[int]] = [[] for _ in starts]
    broken: dict[int, int] = {}
    here = dict.fromkeys(range(len(starts)), 0)
    while here:
        asked = [starts[index].row(node, len(nodes[index])) for index, node in here.items()]
        going: dict[int, int] = {}
        for (index, node), token in zip(here.items(), chooser(asked), strict=True):
            if token is None:
                broken[index] = starts[index].first_row + node
                continue
            choices[index].append(token)
            child = children[index][node].get(token)
            if child is not None:
                nodes[index].append(child)
                going[index] = child
        here = going
    return [WalkEnd(tuple(nodes[i]), tuple(choices[i]), broken.get(i)) for i in range(len(starts))]


def blamed(end: WalkEnd, logits: torch.Tensor) -> WalkEnd:
    """The end, saying whether the target broke it: by the step's logits [*, V], without options."""
    if end.broken_row is None:
        return end
    best = logits[end.broken_row].max()  # NaN when there is one
    return replace(end, is_targets_fault=not bool(torch.isfinite(best)))

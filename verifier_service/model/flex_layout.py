"""How a step's spans lie for FlexAttention: spans of like size as one batch, slots where they are.

Pure index work on the host, once per step. Nothing is gathered: keys stay in the pool, and each
span names the blocks of slots that it reads. Two numbers per row say who sees whom:

    rows of a span are numbered in pre-order; `enter` is a row's number, `leave` the first number
    behind its descendants. A row sees itself and its ancestors: enter[a] <= enter[row] < leave[a].

A chain is a tree of one path. The prefix is entered before all rows and never left, so one rule
serves every key of every span.

Shapes: N spans (batch entries), n rows per entry (padded), M real rows, P positions of all spans,
Q blocks of rows, B blocks of slots (padded).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verifier_service.step import Span

BLOCK = 128
"""Rows and slots of one block of FlexAttention's mask."""
NEVER = 2**31 - 1
"""A row number above all others: what leaves there is never left, what enters there never seen."""
_FEWEST_ROWS = 16
"""Rows of the smallest batch entry: the kernel computes as many at least."""
_FEWEST = 2
"""Of batch entries and blocks: compilers treat sizes of one as another program."""


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """Rows of a span in pre-order: depth below row 0, and the two numbers above; int64 [n]."""

    depth: np.ndarray
    enter: np.ndarray
    leave: np.ndarray


@dataclass(frozen=True, slots=True)
class FlexGroup:
    """Spans of one batch.

    rows: [N * n] flat rows, a span's last one repeated. entries, targets: [M] where real rows are
    among them, and their flat rows. enter, positions: int32 [N, n], of the rows.
    slots, owners: [P] slot and batch entry of every key of every span. key_enter, key_leave,
    key_positions: int32 [P], of the keys. num_blocks: int32 [N, 1, Q]. blocks: int32 [N, 1, Q, B],
    in ascending order.
    """

    rows: torch.Tensor
    entries: torch.Tensor
    targets: torch.Tensor
    enter: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    owners: torch.Tensor
    key_enter: torch.Tensor
    key_leave: torch.Tensor
    key_positions: torch.Tensor
    num_blocks: torch.Tensor
    blocks: torch.Tensor

    @property
    def num_spans(self) -> int:
        """N."""
        return self.enter.shape[0]

    @property
    def num_rows(self) -> int:
        """n."""
        return self.enter.shape[1]


def node_order(span: Span) -> NodeOrder:
    """Pre-order of a span's rows; parents stand before their children."""
    n = span.num_rows
    if span.parents is None:
        numbers = np.arange(n)
        return NodeOrder(numbers, numbers, np.full(n, n))
    size = np.ones(n, dtype=np.int64)
    for row in range(n - 1, 0, -1):
        size[span.parents[row]] += size[row]
    depth, enter = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    # The number that a row's next child gets.
    following = np.ones(n, dtype=np.int64)
    for row in range(1, n):
        parent = span.parents[row]
        depth[row] = depth[parent] + 1
        enter[row] = following[parent]
        following[parent] += size[row]
        following[row] = enter[row] + 1
    return NodeOrder(depth, enter, enter + size)


def flex_groups(placed: Sequence[tuple[Span, int]]) -> tuple[FlexGroup, ...]:
    """Groups of a step's spans, each given with its first flat row."""
    sizes: dict[int, list[tuple[Span, int, NodeOrder]]] = {}
    for span, first in placed:
        num_rows = max(_FEWEST_ROWS, 1 << (span.num_rows - 1).bit_length())
        sizes.setdefault(num_rows, []).append((span, first, node_order(span)))
    return tuple(_group(entries, num_rows) for num_rows, entries in sizes.items())


def _group(placed: Sequence[tuple[Span, int, NodeOrder]], num_rows: int) -> FlexGroup:
    count = max(_FEWEST, len(placed))
    rows = np.zeros((count, num_rows), dtype=np.int64)
    enter, positions = (np.zeros((count, num_rows), dtype=np.int32) for _ in range(2))
    for number, (span, first, order) in enumerate(placed):
        pad = (0, num_rows - span.num_rows)
        rows[number] = np.pad(np.arange(first, first + span.num_rows), pad, "edge")
        enter[number] = np.pad(order.enter, pad, "edge")
        positions[number] = np.pad(span.start + order.depth, pad, "edge")
    lengths = [len(span.slots) for span, _, _ in placed]
    starts = [span.start for span, _, _ in placed]
    entries = [n * num_rows + np.arange(span.num_rows) for n, (span, _, _) in enumerate(placed)]
    targets = [np.arange(first, first + span.num_rows) for span, first, _ in placed]
    num_blocks, blocks = _blocks([span for span, _, _ in placed], count, -(-num_rows // BLOCK))
    return FlexGroup(
        rows=torch.from_numpy(rows.reshape(-1)),
        entries=torch.from_numpy(np.concatenate(entries)),
        targets=torch.from_numpy(np.concatenate(targets)),
        enter=torch.from_numpy(enter),
        positions=torch.from_numpy(positions),
        slots=torch.cat([span.slots for span, _, _ in placed]),
        owners=torch.from_numpy(np.repeat(np.arange(len(placed)), lengths)),
        key_enter=_of_keys([(-1, order.enter) for _, _, order in placed], starts),
        key_leave=_of_keys([(NEVER, order.leave) for _, _, order in placed], starts),
        key_positions=_of_keys([(None, s.start + o.depth) for s, _, o in placed], starts),
        num_blocks=num_blocks,
        blocks=blocks,
    )


def _of_keys(
    values: Sequence[tuple[int | None, np.ndarray]], starts: Sequence[int]
) -> torch.Tensor:
    """Values of all keys, int32 [P]: per span one for its whole prefix (None: the position), then
    one per row."""
    parts: list[np.ndarray] = []
    for (prefix, rows), start in zip(values, starts, strict=True):
        parts.append(np.arange(start) if prefix is None else np.full(start, prefix))
        parts.append(rows)
    return torch.from_numpy(np.concatenate(parts).astype(np.int32))


def _blocks(spans: Sequence[Span], count: int, num_q: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks of slots that each span reads, the same for all of its blocks of rows."""
    own = [np.unique(span.slots.numpy() // BLOCK) for span in spans]
    width = max(_FEWEST, *(len(numbers) for numbers in own))
    num_blocks = np.zeros((count, 1, num_q), dtype=np.int32)
    blocks = np.zeros((count, 1, num_q, width), dtype=np.int32)
    for number, numbers in enumerate(own):
        num_blocks[number] = len(numbers)
        blocks[number, ..., : len(numbers)] = numbers
    return torch.from_numpy(num_blocks), torch.from_numpy(blocks)

"""The load-time check that a token's logits depend on its own prefix alone, bit for bit.

Two parts. `find_multiple` measures, for every distinct matrix, to what multiple rows must be
padded so that a row's result ignores its neighbours and their number; where no padding does, it
limits how many rows that matrix takes at once, and looks for another form of the product that
takes more with the same sums. `check_steps` then runs small steps through the whole target (prompt
in one chunk, in pieces, token by token on scattered slots, branching trees, several requests at
once) and compares logits with torch.equal. Nothing is taken on faith from another machine; what
fails is reported, not hidden.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch

from verifier_service.model.kv import TILE
from verifier_service.step import Span, Target

MULTIPLES = (4, 8, 16, 32)
"""Padding multiples tried, in this order."""
_COUNTS: tuple[int, ...] = (*range(4, 68, 4), *range(80, 272, 16), 512, 1024)
"""Row counts tried: every padded size that decoding has and that parts of a prompt have, and those
of whole chunks. Rows of experts and of logits beyond 64 have sizes between these."""
_ELEMENTS: Final = 1 << 17
"""Outputs compared for every count."""
_WIDE = 16_384
"""Matrices with more outputs than this (lm_head) are tried with fewer rows."""
_LEAST_LIMIT = 16
"""Matrices are not cut into parts of fewer rows than this: rows are padded further instead."""
_WIDE_ROWS = (512, 256, 128, 64)
"""Numbers of rows tried for the other form of a limited matrix, in this order."""
CHECK_SLOTS = 512
"""Slots that check_steps needs."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a target: y = apply(x) for x [R, num_inputs].

    kind: what tells products of the same shape apart (a residual added by the kernel).
    limit: makes `apply` take at most so many rows at once; None where that cannot be done.
    wideners: each makes it take more than that, up to so many, in another form (0: not).
    """

    num_outputs: int
    num_inputs: int
    apply: Callable[[torch.Tensor], torch.Tensor]
    kind: str = "product"
    limit: Callable[[int], None] | None = None
    wideners: tuple[Callable[[int], None], ...] = ()

    @property
    def key(self) -> tuple[int, int, str]:
        """Equal for matrices whose kernels are the same."""
        return self.num_outputs, self.num_inputs, self.kind


@torch.inference_mode()
def find_multiple(
    matrices: Iterable[Matrix], dtype: torch.dtype, device: torch.device | None = None
) -> tuple[int, str]:
    """The smallest padding that makes rows independent, and "" or what nothing cures.

    Where no padding does, kernels change with the number of rows: then every matrix is limited to
    the most rows up to which all agree under the smallest padding that leaves enough of them.
    device: where the matrices are; None: the CPU.
    """
    found = list(matrices)
    distinct = {matrix.key: matrix for matrix in found}
    failed = ""
    for multiple in MULTIPLES:
        failed = _failure(distinct.values(), multiple, dtype, device)
        if not failed:
            return multiple, ""
    if any(matrix.limit is None for matrix in found):
        return MULTIPLES[0], failed
    for multiple in MULTIPLES:
        rows = min(_agreeing_rows(matrix, multiple, dtype, device) for matrix in distinct.values())
        # The last ones always pass: as many rows as they pad to are one kernel.
        if rows >= _LEAST_LIMIT:
            break
    for matrix in found:
        if matrix.limit is not None:
            matrix.limit(rows)
    for key, matrix in distinct.items():
        form, wide = _widest(matrix, multiple, dtype, device)
        for alike in found:
            if alike.key == key and alike.wideners:
                alike.wideners[form](wide)
    return multiple, _failure(distinct.values(), multiple, dtype, device)


def _widest(
    matrix: Matrix, multiple: int, dtype: torch.dtype, device: torch.device | None
) -> tuple[int, int]:
    """(number of the widener, rows) of a limited matrix's form that takes the most rows with the
    same sums; 0 rows for none."""
    trial = _Trial(matrix, multiple, dtype, device)
    best = (0, 0)
    for form, widen in enumerate(matrix.wideners):
        for rows in _WIDE_ROWS:
            if best[1] < rows <= trial.counts[-1]:
                widen(rows)
                if not trial.first_difference():
                    best = (form, rows)
        widen(0)
    return best


def _failure(
    matrices: Iterable[Matrix], multiple: int, dtype: torch.dtype, device: torch.device | None
) -> str:
    """The first matrix whose rows depend on their number, "" if there is none."""
    for matrix in matrices:
        count = _Trial(matrix, multiple, dtype, device).first_difference()
        if count:
            return (
                f"{matrix.kind} ({matrix.num_outputs}, {matrix.num_inputs}) in {dtype}: a "
                f"row among {count} differs from the same row among fewer"
            )
    return ""


def _agreeing_rows(
    matrix: Matrix, multiple: int, dtype: torch.dtype, device: torch.device | None
) -> int:
    """The most rows up to which every number of rows gives what the fewest rows give."""
    trial = _Trial(matrix, multiple, dtype, device)
    count = trial.first_difference()
    return trial.counts[trial.counts.index(count) - 1] if count else trial.counts[-1]


class _Trial:
    """A matrix's rows in parts of every count against the same rows in parts of the fewest.

    Two kernels may differ in one element of 10,000 (AMX does): so many elements are compared, for
    every count, that one which differs so seldom is not passed over.
    """

    def __init__(
        self, matrix: Matrix, multiple: int, dtype: torch.dtype, device: torch.device | None
    ) -> None:
        self._matrix = matrix
        self.counts = _counts(matrix, multiple)
        wanted = max(_ELEMENTS // matrix.num_outputs, self.counts[0])
        self._few = min(wanted, self.counts[-1])
        generator = torch.Generator().manual_seed(matrix.num_inputs)
        rows = torch.randn(self.counts[-1], matrix.num_inputs, generator=generator)
        self._rows = rows.to(device, dtype)
        self._alone: list[torch.Tensor] = []

    def first_difference(self) -> int:
        """The fewest rows among which one changes, or 0."""
        for count in self.counts[1:]:
            total = max(self._few // count, 1) * count
            if not torch.equal(self._in_parts(count, 0, total), self._one_by_one(total)):
                return count
        return 0

    def _one_by_one(self, total: int) -> torch.Tensor:
        """In parts of the fewest rows, in which no form of the matrix differs; kept."""
        done = sum(len(part) for part in self._alone)
        if done < total:
            self._alone.append(self._in_parts(self.counts[0], done, total))
        return torch.cat(self._alone)[:total]

    def _in_parts(self, count: int, first: int, end: int) -> torch.Tensor:
        parts = self._rows[first:end].split(count)  # type: ignore[no-untyped-call]
        return torch.cat([self._matrix.apply(part.contiguous()) for part in parts])


def _counts(matrix: Matrix, multiple: int) -> list[int]:
    counts = [n for n in _COUNTS if n % multiple == 0]
    return [n for n in counts if n <= TILE] if matrix.num_outputs > _WIDE else counts


def device_note(device: torch.device) -> str:
    """Why a device's kernels are not taken for invariant, whatever a check finds; "" for the CPU.

    On a CPU kernels change at few row counts, which are tried; a GPU's libraries choose among many
    by the shape of each product, and no sample of shapes speaks for the others.
    """
    if device.type == "cpu":
        return ""
    return f"kernels on {device.type} are chosen by the number of rows"


def check_steps(target: Target) -> str:
    """Run the same tokens in different company; "" when all logits are equal, else what differs.

    Needs `allocate(CHECK_SLOTS)` before; leaves the pool dirty.
    """
    vocab = target.facts.vocab_size
    length = min(TILE + 6, target.facts.max_context - 8)
    if length < 8:
        return ""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(vocab, (length + 8,), generator=generator).tolist()
    scattered = torch.randperm(CHECK_SLOTS - 1, generator=generator) + 1
    far, near = scattered[:length], scattered[length : 2 * length]
    tail = scattered[2 * length : 2 * length + 16]

    prompt = _logits(target, [_chunk(1, ids[:length], 0, torch.arange(1, length + 1), 1)])
    cut = length // 2 + 1
    _logits(target, [_chunk(1, ids[:cut], 0, far, 0)])
    pieces = _logits(target, [_chunk(1, ids[cut:length], cut, far, 0)])
    if not torch.equal(pieces, prompt[cut:]):
        return "a prompt in two chunks differs from the prompt in one"
    last = length - 1
    one = _logits(target, [_chunk(1, ids[last:length], last, far, None)])
    if not torch.equal(one[0], prompt[last]):
        return "one token at a time differs from a chunk"

    parents = (-1, 0, 0, 1, 1, 2, 3, 3, 6)
    tree_slots = torch.cat([far[:last], tail[: len(parents)]])
    tokens = tuple(ids[last : last + 1] + [(ids[length] + 7 * n) % vocab for n in range(8)])
    tree = Span(1, tokens, last, tree_slots, parents, len(parents))
    other = _chunk(2, ids[:9], 0, near[:9], 0)
    branched = _logits(target, [other, tree])
    if not torch.equal(branched[9], prompt[last]) or not torch.equal(branched[:9], prompt[:9]):
        return "a tree's anchor or its neighbour differs from plain decoding"
    return _check_paths(target, tokens, parents, last, far[:last], tail, branched[9:])


def _check_paths(
    target: Target,
    tokens: tuple[int, ...],
    parents: tuple[int, ...],
    start: int,
    prefix: torch.Tensor,
    spare: torch.Tensor,
    branched: torch.Tensor,
) -> str:
    """Every leaf's path as a chain, against the tree's rows."""
    for leaf in set(range(len(parents))) - set(parents):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        slots = torch.cat([prefix, spare[-len(path) :]])
        chain = _logits(target, [_chunk(1, [tokens[n] for n in path], start, slots, 0)])
        if not torch.equal(chain, branched[path]):
            return "a tree's node differs from plain decoding of its path"
    return ""


def _logits(target: Target, spans: list[Span]) -> torch.Tensor:
    return target.forward(spans).cpu()


def _chunk(
    key: int, ids: list[int], start: int, slots: torch.Tensor, first_slot: int | None
) -> Span:
    """An unbranched span with logits for all rows; first_slot 0 or None: slots are scattered."""
    end = start + len(ids)
    return Span(key, tuple(ids), start, slots[:end], None, len(ids), first_slot or None)

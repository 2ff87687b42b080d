"""The load-time trial of torch's fused attention: is a row's output its own, bit for bit?

Rows of one prompt, computed as a whole, are computed again alone, in chunks of many lengths, in the
company of others and as nodes of a tree, on slots in order and scattered. Everything goes through
the layout and the backend that serving uses. Knows no weights.
"""

import random

import torch

from verifier_service.model.attention import Tiles
from verifier_service.model.heads import AttentionShape, Scoring
from verifier_service.model.kv import TILE, Pool
from verifier_service.model.layout import lay_out
from verifier_service.model.sdpa import Sdpa
from verifier_service.model.step_attention import Backend
from verifier_service.step import Span

_LENGTH = 17 * TILE + 5
"""Positions tried: past two of the kernel's blocks of 512 keys."""
_EDGES = (1, 2, 63, 64, 65, 255, 256, 257, 511, 512, 513, 576, 577, 1023, 1024, 1025, _LENGTH)
_COUNTS = (2, 3, 4, 5, 6, 7, 8, 11, 16, 17, 31, 32, 33, 64, 100, 200, 256)
_TOLERANCE = 0.05
"""Largest difference from tiles in bf16, as a share of the largest output."""
_WINDOW = 300
_PARENTS = (-1, 0, 1, 2, 3, 4, 0, 6, 7, 6, 0, 10, *[0] * 24)
"""A tree of more rows than kernels take for few."""
_MAIN = (0, 6, 7, 8)
"""Its rows whose keys are the prompt's own: behind a deeper path, so that they do not stand in the
columns of their positions (packed_tree.py)."""
_STEPS = 3
"""From the third on keys come from kept lanes (kept_keys.py)."""
_STARTS = (3, 17, 20, 45, 61, 128, 255, 496, 509, 1022)


def fault_of_kernel(shape: AttentionShape, dtype: torch.dtype) -> str:
    """Why the fused kernel must not be used for layers of `shape`; "" when it may."""
    trial = _Trial(shape, dtype)
    for window in (None, _WINDOW):
        whole = trial.run(Sdpa(), [trial.chunk(0, _LENGTH)], window)
        expected = trial.run(Tiles(), [trial.chunk(0, _LENGTH)], window)
        apart = float((whole.float() - expected.float()).abs().max() / expected.abs().max())
        # Not apart <= ...: a NaN is no agreement.
        if not apart <= _TOLERANCE:
            return f"its outputs are {apart:.2g} of the largest off"
        fault = _fault_beside(trial, whole, window)
        if fault:
            return fault if window is None else f"{fault} (within a window of {window})"
    return ""


def _fault_beside(trial: "_Trial", whole: torch.Tensor, window: int | None) -> str:
    """Where rows in other company differ from the rows of a whole prompt."""
    starts = random.Random(1)
    spans = [
        *((end - 1, end) for end in _EDGES),
        *((start, start + n) for n in _COUNTS for start in [starts.randrange(_LENGTH - n)]),
    ]
    for start, end in spans:
        for scattered in (False, True):
            found = trial.run(Sdpa(), [trial.chunk(start, end, scattered)], window)
            if not torch.equal(found, whole[start:end]):
                return f"rows {start} to {end} alone differ from the rows of a longer chunk"
    together = [trial.chunk(start, end, True) for start, end in spans[: len(_EDGES) + 8]]
    expected = torch.cat([whole[one.start :][: one.num_rows] for one in together])
    for steps in (1, _STEPS):
        if not torch.equal(trial.run(Sdpa(), together, window, steps), expected):
            return "rows of several requests differ from the rows of one"
    for start in _STARTS:
        found = trial.run(Sdpa(), [trial.chunk(5, 9, True), trial.tree(start)], window)[4:]
        if not torch.equal(found[list(_MAIN)], whole[start : start + len(_MAIN)]):
            return f"a tree's nodes behind {start} positions differ from the rows of a chunk"
    return ""


class _Trial:
    """One layer's keys of one prompt, twice (in order and scattered), and a query per position."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self._shape, self._dtype = shape, dtype
        num_slots = 2 * _LENGTH + len(_PARENTS) + 1
        self._pool = Pool(1, num_slots, shape.num_kv_heads, shape.head_dim, dtype, {})
        self._pool.kv.copy_(torch.randn(self._pool.kv.shape, generator=generator))
        order = torch.arange(1, _LENGTH + 1)
        self._scattered = torch.randperm(_LENGTH, generator=generator) + 1 + _LENGTH
        self._pool.move(order, self._scattered)
        queries = torch.randn(_LENGTH, shape.num_heads, shape.head_dim, generator=generator)
        self._queries = (2 * queries * shape.head_dim**-0.5).to(dtype)

    def chunk(self, start: int, end: int, scattered: bool = False) -> Span:
        """Rows of positions start to end."""
        slots = self._scattered[:end] if scattered else torch.arange(1, end + 1)
        key, first_slot = start * _LENGTH + end, None if scattered else 1
        return Span(key, (0,) * (end - start), start, slots, None, 0, first_slot)

    def tree(self, start: int) -> Span:
        """_PARENTS behind `start` positions; rows of _MAIN have the prompt's own keys."""
        rows = torch.arange(len(_PARENTS)) + 2 * _LENGTH + 1
        rows[list(_MAIN)] = self._scattered[start : start + len(_MAIN)]
        slots = torch.cat([self._scattered[:start], rows])
        return Span(0, (0,) * len(_PARENTS), start, slots, _PARENTS, 0)

    def run(
        self, backend: Backend, spans: list[Span], window: int | None, steps: int = 1
    ) -> torch.Tensor:
        """Outputs of all rows, [R, A, D], in span order, of the last of so many equal steps."""
        layout = lay_out(spans, self._shape.multiple, self._dtype, backend.rules)
        queries = self._queries[layout.positions]
        out = torch.zeros_like(queries)
        over_pool = backend.over(self._pool)
        for _ in range(steps):
            self._pool.stamp(layout.slots)
            attention = over_pool.attention(layout, self._shape)
            attention.bind(queries, out)
            attention.attend(0, Scoring(window))
        return out[: layout.num_rows]

"""Attention in plain loops over rows and tiles: the definition that attention.py must meet.

Reads a span as design 2 words it: a row sees positions [0, start), its ancestors and itself. Slow,
in float64, with the running maximum and sum of online softmax from tile to tile. Not used in
serving.

Shapes: n rows of the span, A query heads, H key-value heads, D head_dim, S slots.
"""

import torch

from verifier_service.model.kv import TILE
from verifier_service.step import Span


def visible_slots(span: Span) -> list[list[int]]:
    """For each row, the slot at every position it sees, in position order."""
    slots = span.slots.tolist()
    prefix, own = slots[: span.start], slots[span.start :]
    paths: list[list[int]] = []
    for row in range(span.num_rows):
        parent = row - 1 if span.parents is None else span.parents[row]
        before = paths[parent] if parent >= 0 else prefix
        paths.append([*before, own[row]])
    return paths


def attend_span(
    span: Span,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[n, A, D] in float64 from queries [n, A, D] and the pool's keys and values [S, H, D]."""
    out = torch.zeros(queries.shape, dtype=torch.float64)
    num_heads, num_kv_heads = queries.shape[1], keys.shape[1]
    for row, slots in enumerate(visible_slots(span)):
        first = 0 if window is None else max(0, len(slots) - window)
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            sink = None if sinks is None else float(sinks[head])
            out[row, head] = _attend_row(
                queries[row, head].double() * scale,
                keys[:, kv_head].double(),
                values[:, kv_head].double(),
                list(enumerate(slots))[first:],
                softcap,
                sink,
            )
    return out


def _attend_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    where: list[tuple[int, int]],
    softcap: float | None,
    sink: float | None,
) -> torch.Tensor:
    """One head of one row over (position, slot) pairs, tile by tile."""
    top = torch.tensor(float("-inf") if sink is None else sink, dtype=torch.float64)
    total = torch.tensor(0.0 if sink is None else 1.0, dtype=torch.float64)
    mixed = torch.zeros_like(query)
    for tile in range(where[0][0] // TILE, where[-1][0] // TILE + 1):
        slots = [slot for position, slot in where if position // TILE == tile]
        scores = keys[slots] @ query
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        new_top = torch.maximum(top, scores.max())
        weights = torch.exp(scores - new_top)
        shrink = torch.exp(top - new_top)
        total = total * shrink + weights.sum()
        mixed = mixed * shrink + weights @ values[slots]
        top = new_top
    return mixed / total

"""Absorbing the rows of all sessions together: KV of committed rows, from true features only.

A head that fills masked rows gets them behind a session's last true row in the same forward, so
that absorbing and drafting are one pass. Knows nothing of the prefix rule or of what the head
computes.

    row t = (feature of token t, token t + 1), position t; its logits are for token t + 2

Shapes: N flat rows, C hidden size of the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from drafter_service.attention import Part, causal_tail
from drafter_service.feature_head import HeadSession, Mask
from drafter_service.growing import num_levels
from drafter_service.head_draft import num_missing, refused
from drafter_service.head_runner import HeadRunner
from drafter_service.rows import decode_rows
from drafter_service.service import Job, Outcome
from protos.features import FeatureForm, FeatureRows

ROWS_PER_FORWARD = 256
"""Rows of one session absorbed in one forward."""


@dataclass(slots=True)
class _Taken:
    """Rows [start, computed_len) taken from one session, to be absorbed now; and how many masked
    ones go behind them."""

    place: int
    session: HeadSession
    start: int
    pieces: list[FeatureRows] = field(default_factory=list)
    num_masked: int = 0

    @property
    def count(self) -> int:
        return self.session.computed_len - self.start


class Absorber:
    """Computes usable rows. mask: set for a head that fills masked rows."""

    def __init__(self, runner: HeadRunner, mask: Mask | None) -> None:
        self._runner = runner
        self._mask = mask

    def absorb(
        self, jobs: Sequence[Job[HeadSession]], outcomes: dict[int, Outcome]
    ) -> dict[int, Tensor]:
        """Compute all usable rows of all jobs; refuse sessions whose rows are not finite.

        Returns y [levels, C] by a job's place, where its masked rows were filled on the way.
        """
        filled: dict[int, Tensor] = {}
        while True:
            taken = [
                _Taken(place, job.session, job.session.computed_len)
                for place, job in enumerate(jobs)
                if place not in outcomes and job.session.computed_len < job.session.num_usable_rows
            ]
            if not taken:
                return filled
            for share in taken:
                share.pieces = share.session.take_rows(ROWS_PER_FORWARD)
            g_NC = self._features(taken)
            finite_N = torch.isfinite(g_NC).all(-1)
            if not bool(finite_N.all()):
                taken, g_NC = _without_broken(taken, g_NC, finite_N, outcomes)
            if self._mask is not None:
                for share in taken:
                    if not num_missing(share.session):
                        share.num_masked = max(num_levels(jobs[share.place].plan) - 1, 0)
                g_NC = _with_masks(taken, g_NC, self._mask)
            if taken:
                filled |= self._absorb_finite(taken, g_NC)

    def _absorb_finite(self, taken: Sequence[_Taken], g_NC: Tensor) -> dict[int, Tensor]:
        """One forward over the rows just taken; keeps y of each session's newest row."""
        ids: list[int] = []
        positions: list[int] = []
        parts: list[Part] = []
        for share in taken:
            session, start, end = share.session, share.start, share.session.computed_len
            assert session.segment is not None  # every session here was placed
            ids.extend(session.tokens[start + 1 : end + 1])
            parts.append(Part(session.segment.start, start, end - start, causal_tail(end - start)))
            if share.num_masked:
                assert self._mask is not None  # else there were none
                ids.extend([self._mask.token_id] * share.num_masked)
                tail = causal_tail(share.num_masked)
                parts.append(Part(session.segment.start, end, share.num_masked, tail, end - 1))
            positions.extend(range(start, end + share.num_masked))
        y_NC = self._runner.step(ids, g_NC, positions, parts)
        filled: dict[int, Tensor] = {}
        first = 0
        for share in taken:
            newest = first + share.count - 1
            share.session.newest_y_C = y_NC[newest].clone()
            first = newest + 1 + share.num_masked
            if share.num_masked:
                filled[share.place] = y_NC[newest:first]
        return filled

    def _features(self, taken: Sequence[_Taken]) -> Tensor:
        """g [N, C] of rows in session order; runs of equally shaped rows are decoded together."""
        head = self._runner.head
        parts: list[Tensor] = []
        for (form, _), run in groupby(taken, key=lambda t: (t.session.form, t.session.dtype)):
            rows = decode_rows([piece for share in run for piece in share.pieces])
            rows = rows.to(self._runner.device, self._runner.dtype)
            parts.append(head.fuse(rows) if form is FeatureForm.RAW else rows)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _with_masks(taken: Sequence[_Taken], g_NC: Tensor, mask: Mask) -> Tensor:
    """Every session's rows with its masked ones behind them."""
    rows: list[Tensor] = []
    first = 0
    for share in taken:
        rows += [g_NC[first : first + share.count], mask.g_C.expand(share.num_masked, -1)]
        first += share.count
    return torch.cat(rows) if rows else g_NC


def _without_broken(
    taken: Sequence[_Taken], g_NC: Tensor, finite_N: Tensor, outcomes: dict[int, Outcome]
) -> tuple[list[_Taken], Tensor]:
    """The sessions whose rows are all finite, and their rows; the others are refused."""
    kept: list[_Taken] = []
    rows: list[Tensor] = []
    first = 0
    for share in taken:
        own = slice(first, first + share.count)
        first = own.stop
        if bool(finite_N[own].all()):
            kept.append(share)
            rows.append(g_NC[own])
        else:
            outcomes[share.place] = refused("feature rows must be finite")
    return kept, torch.cat(rows) if rows else g_NC[:0]

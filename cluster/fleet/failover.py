"""Which verifiers to keep away from: those that a request has lost, those that look dead to all.

Pure, and the only thing that the ingress and Serve's request router share: a `Ticket` goes with
each call, the router reads it and writes on it who got the call. Knows no Ray and no tokens.
Invariants: nobody is kept away from while nobody else is left; a verifier that looks dead is let
in again after a sign of life, or after a time without one; a request's losses come to an end.
"""

import time
from collections.abc import Callable, Iterable
from typing import Final

MAX_LOSSES: Final = 8
"""Verifiers that one request may lose before it is given up, however many there are."""
MAX_FAILED: Final = 3
"""Verifiers that may fail under one request in a row without a token in between: it may be what
fails them, and must not bring down all there are."""


class Ticket:
    """What a call carries for the router, beside the request.

    lost: replica ids that this request has lost. suspects: those that look dead to the ingress,
    which keeps them up to date while the call waits. replica_id: who the call went to, written by
    the router, on a thread of its own, before the replica is asked; None until then, and while
    nobody has room. A replica that gets the ticket reads an empty one.
    """

    __slots__ = ("lost", "replica_id", "suspects")

    def __init__(
        self, lost: frozenset[str] = frozenset(), suspects: frozenset[str] = frozenset()
    ) -> None:
        self.lost = lost
        self.suspects = suspects
        self.replica_id: str | None = None

    def __reduce__(self) -> tuple[type["Ticket"], tuple[()]]:
        return Ticket, ()

    def preferred(self, replica_ids: Iterable[str]) -> frozenset[str]:
        """Those to choose among: no suspects if possible, and none that were lost; else all."""
        running = frozenset(replica_ids)
        kept = running - self.lost
        return kept - self.suspects or kept or running


class Suspects:
    """Verifiers that look dead to this ingress. Used on one event loop."""

    def __init__(self, forget_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """forget_s: without a sign of life for so long, a suspect gets another chance. A look may
        be unable to see that it lives again, and Serve has replaced it long ago if it does not."""
        self._forget_s = forget_s
        self._clock = clock
        self._since_s: dict[str, float] = {}

    def add(self, replica_id: str) -> None:
        """It was lost just now."""
        self._since_s[replica_id] = self._clock()

    def clear(self, replica_id: str | None) -> None:
        """It gave a sign of life."""
        if replica_id is not None:
            self._since_s.pop(replica_id, None)

    def current(self) -> frozenset[str]:
        """Those to keep away from now."""
        since_s = self._clock() - self._forget_s
        self._since_s = {name: at for name, at in self._since_s.items() if at > since_s}
        return frozenset(self._since_s)


class Losses:
    """The verifiers that one request has lost."""

    def __init__(self) -> None:
        self.replica_ids: frozenset[str] = frozenset()
        self._num_lost = 0
        self._num_unknown = 0
        self._num_failed = 0
        self._is_met_again = False

    def add(self, replica_id: str | None, *, has_failed: bool, gave_tokens: bool) -> None:
        """One more. replica_id: None when it is not known who had the call. has_failed: it broke
        with the request inside, rather than fall silent or refuse it on leaving."""
        self._num_lost += 1
        self._num_failed = (0 if gave_tokens else self._num_failed) + has_failed
        if replica_id is None:
            self._num_unknown += 1
        else:
            self._is_met_again = replica_id in self.replica_ids
            self.replica_ids |= {replica_id}

    @property
    def is_enough(self) -> bool:
        """Whether to give the request up: the router knew nobody but a verifier that was lost
        already, or a bound is reached."""
        return self._is_met_again or self._num_lost >= MAX_LOSSES or self._num_failed >= MAX_FAILED

    def leave_another(self, replica_ids: Iterable[str]) -> bool:
        """Whether one of these is certainly not among the lost."""
        return len(frozenset(replica_ids) - self.replica_ids) > self._num_unknown

"""One exchange in progress: what was asked of whom, and what is still waited for.

Lives from the sending of a step's messages to the end of its wait. Knows no session contents.
"""

from dataclasses import dataclass, field

from protos.exchange import ContextRows, DraftWork
from verifier_service.engine.draft_peer import DraftPeer


@dataclass(slots=True)
class Parcel:
    """What one replica is sent in this step."""

    peer: DraftPeer
    step: int
    works: list[DraftWork] = field(default_factory=list)
    pieces: list[ContextRows] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Awaited:
    """A planned draft that has not come yet."""

    peer: DraftPeer
    base_len: int


class DraftRound:
    """One step's questions. began_s: monotonic time; until_s: when the wait ends."""

    def __init__(self, began_s: float, wait_s: float, bulk_budget: int) -> None:
        self.began_s = began_s
        self.wait_s = wait_s
        self.until_s = began_s + wait_s
        self.bulk_budget = bulk_budget
        self.parcels: dict[int, Parcel] = {}
        self.awaited: dict[int, Awaited] = {}
        self.last_answer_s: dict[str, float] = {}
        self._answered: set[int] = set()

    def parcel(self, peer: DraftPeer) -> Parcel:
        """This step's parcel for a replica; its number is taken when it is first needed."""
        parcel = self.parcels.get(peer.peer_id)
        if parcel is None:
            parcel = self.parcels[peer.peer_id] = Parcel(peer, peer.next_step())
        return parcel

    def expect(self, session_id: int, peer: DraftPeer, base_len: int) -> None:
        """A draft was asked that this step waits for."""
        self.awaited[session_id] = Awaited(peer, base_len)

    def withdraw(self, session_id: int, peer: DraftPeer) -> None:
        """The session ends before anything was sent."""
        parcel = self.parcel(peer)
        parcel.works = [work for work in parcel.works if work.session_id != session_id]
        parcel.pieces = [piece for piece in parcel.pieces if piece.session_id != session_id]
        self.awaited.pop(session_id, None)

    def answered(self, session_id: int, base_len: int, now_s: float) -> bool:
        """An answer came; True when it was still waited for."""
        awaited = self.awaited.get(session_id)
        if awaited is None or awaited.base_len != base_len:
            return False
        del self.awaited[session_id]
        self._answered.add(awaited.peer.peer_id)
        self.last_answer_s[awaited.peer.source] = now_s
        return True

    def give_up_on(self, peer: DraftPeer) -> None:
        """Its connection ended: nothing of it is waited for."""
        self.awaited = {i: a for i, a in self.awaited.items() if a.peer is not peer}

    def give_up_session(self, session_id: int) -> None:
        """The session ended: its draft is not waited for."""
        self.awaited.pop(session_id, None)

    def silent_peers(self) -> list[DraftPeer]:
        """Replicas that answered nothing of what was waited for."""
        peers = {awaited.peer.peer_id: awaited.peer for awaited in self.awaited.values()}
        return [peer for peer_id, peer in peers.items() if peer_id not in self._answered]

    def held_s(self, now_s: float) -> dict[str, float]:
        """How long each source held the step."""
        held = {source: at - self.began_s for source, at in self.last_answer_s.items()}
        for awaited in self.awaited.values():
            held[awaited.peer.source] = now_s - self.began_s
        return held

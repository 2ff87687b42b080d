"""All draft sessions of the engine, by request and source, and where each of them lives.

Used by the engine's thread alone. Opening, moving and closing happen here; what is inside a
session is `draft_session`'s. Invariant: a session id is listed at exactly the replica that its
entry names.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from verifier_service.engine.draft_peer import DraftPeer
from verifier_service.engine.draft_session import DraftSession
from verifier_service.engine.replica_pool import ReplicaPool


@dataclass(slots=True)
class Entry:
    """One (request, source): its session and the replica that keeps it."""

    key: int
    source: str
    peer: DraftPeer
    session: DraftSession


class SessionBook:
    """Which request has which session where."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._by_key: dict[int, dict[str, Entry]] = {}
        self._by_id: dict[int, Entry] = {}
        self._refused: dict[int, set[str]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def by_id(self, session_id: int) -> Entry | None:
        """The entry of a session that is not closed yet."""
        return self._by_id.get(session_id)

    def of_request(self, key: int) -> list[Entry]:
        """All sessions of a request."""
        return list(self._by_key.get(key, {}).values())

    def at(self, peer: DraftPeer) -> Iterator[Entry]:
        """All sessions at a replica."""
        for session_id in list(peer.session_ids):
            entry = self._by_id.get(session_id)
            if entry is not None:
                yield entry

    def is_refused(self, key: int, source: str) -> bool:
        """The source cannot serve this request."""
        return source in self._refused.get(key, ())

    def find(self, key: int, pool: ReplicaPool) -> Entry | None:
        """The request's session with a source, ready to be used now; made where there is none.

        A session whose replica is gone, or silent for longer than a hiccup, moves to another one.
        None when no replica can be used.
        """
        entry = self._by_key.get(key, {}).get(pool.source)
        if entry is not None:
            peer = entry.peer
            if peer.is_usable:
                return entry
            is_hiccup = peer.is_up and peer.is_offered and not peer.trouble and not peer.is_stuck
            if is_hiccup:
                return None
        peer_now = pool.pick()
        if peer_now is None:
            return None
        if entry is not None:
            self.close(entry)
        return self._open(key, peer_now)

    def close(self, entry: Entry) -> None:
        """End a session, telling its replica where that is possible."""
        self._by_id.pop(entry.session.session_id, None)
        sources = self._by_key.get(entry.key, {})
        if sources.get(entry.source) is entry:
            del sources[entry.source]
        if entry.session.is_open:
            entry.peer.send_close(entry.session.close_work())
        else:
            entry.peer.session_ids.discard(entry.session.session_id)

    def refuse(self, entry: Entry) -> None:
        """End a session, and do not ask its source again for this request."""
        self.close(entry)
        self._refused.setdefault(entry.key, set()).add(entry.source)

    def forget(self, key: int) -> None:
        """The request left."""
        for entry in self.of_request(key):
            self.close(entry)
        self._by_key.pop(key, None)
        self._refused.pop(key, None)

    def forget_all(self) -> None:
        """Every request left."""
        for key in list(self._by_key):
            self.forget(key)

    def _open(self, key: int, peer: DraftPeer) -> Entry:
        assert peer.capabilities is not None, "only a replica that described itself is picked"
        session_id = 0
        while session_id == 0 or session_id in self._by_id:
            session_id = self._rng.getrandbits(64)
        session = DraftSession(session_id, peer.capabilities.incarnation, peer.form)
        entry = Entry(key, peer.source, peer, session)
        self._by_id[session_id] = entry
        self._by_key.setdefault(key, {})[peer.source] = entry
        peer.session_ids.add(session_id)
        return entry

"""The replicas of one source of drafts, and which of them a new session goes to.

The set is replaced by whoever watches the cluster, from any thread; everything else belongs to
the engine's thread. A replica that is no longer offered keeps its place until the engine's thread
has closed its sessions there.
"""

import threading
from collections.abc import Callable, Sequence

from protos.exchange import DrafterReplica
from verifier_service.engine.draft_counts import SourceTally
from verifier_service.engine.draft_peer import DraftPeer
from verifier_service.engine.ports import SourceInfo


class ReplicaPool:
    """One source: its replicas and its sums."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tally = SourceTally(source)
        self._lock = threading.Lock()
        self._peers: tuple[DraftPeer, ...] = ()

    @property
    def peers(self) -> tuple[DraftPeer, ...]:
        """All replicas, those being left included."""
        return self._peers

    def add(self, peer: DraftPeer) -> None:
        """One more replica."""
        with self._lock:
            self._peers = (*self._peers, peer)

    def offer(
        self, replicas: Sequence[DrafterReplica], make_peer: Callable[[str, str], DraftPeer]
    ) -> None:
        """The running set, from any thread: connect to new addresses, leave those not named."""
        with self._lock:
            standing = {peer.address: peer for peer in self._peers if peer.is_offered}
            named = {replica.address: replica for replica in replicas}
            for address, peer in standing.items():
                if address not in named:
                    peer.is_offered = False
                    if peer.transport is not None:
                        peer.transport.retire()
            fresh = []
            for address, replica in named.items():
                peer = standing.get(address) or make_peer(self.source, address)
                peer.load = replica.load
                if address not in standing:
                    fresh.append(peer)
            self._peers = (*self._peers, *fresh)

    def drop(self, peer: DraftPeer) -> None:
        """A replica that was left, and whose sessions are closed."""
        with self._lock:
            self._peers = tuple(other for other in self._peers if other is not peer)

    def pick(self) -> DraftPeer | None:
        """The usable replica with room that has least to do."""
        usable = [peer for peer in self._peers if peer.is_usable and peer.has_room]
        return min(usable, key=lambda peer: peer.rank, default=None)

    def info(self) -> SourceInfo | None:
        """The source as the planner sees it; None while nobody answers for it."""
        usable = [peer for peer in self._peers if peer.is_usable]
        if not usable or usable[0].capabilities is None:
            return None
        p50_s, p95_s = self.tally.percentiles_s()
        return SourceInfo(
            name=self.source,
            capabilities=usable[0].capabilities,
            local=usable[0].is_local,
            reply_p50_s=p50_s,
            reply_p95_s=p95_s,
            num_replicas=len(usable),
        )

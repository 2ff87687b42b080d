"""Serve's request router of the verifier deployment: power of two choices, lost ones left out.

Serve's own router takes a replica that hangs for one with little to do: its queue is only known
to get shorter, as callers give up. This one chooses as Serve's does, by queue length between two
random replicas, nearer ones first where that is asked for, but among those that the call's
`Ticket` prefers; and it writes on the ticket who gets the call, before that replica says anything.
Calls without a ticket are routed as by Serve. Knows no requests and no verifiers.

Built on `ray.serve.request_router`, with three private names of it (Ray 2.60), two of them in
`_fulfill_next_pending_request`: Serve gives a replica to the first call in the queue rather than
to the call it was chosen for. Its exact matching would be no help: it goes by an id that all
calls of one HTTP request share, so the second of them would wait for ever. The third,
`_choose_replica_for_request`, is where a call enters the queue, again when a replica refused it.

Serve pickles this module by value: what others must recognise (`Ticket`) lies elsewhere.
"""

import random
from typing import Any

from ray.serve.request_router import (
    FIFOMixin,
    LocalityMixin,
    PendingRequest,
    RequestRouter,
    RunningReplica,
)

from cluster.fleet.failover import Ticket


class VerifierRouter(FIFOMixin, LocalityMixin, RequestRouter):
    """Runs in the ingress, on the event loop of Serve's routers."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Two replicas at most, of which Serve takes the one with the shorter queue. None when
        the near ones are to be kept away from: Serve then asks again, for all."""
        near = self.apply_locality_routing(pending_request)
        chosen = [r for r in candidate_replicas if r.replica_id in near]
        ticket = ticket_of(pending_request)
        if ticket is not None:
            names = ticket.preferred(r.replica_id.unique_id for r in candidate_replicas)
            chosen = [r for r in chosen if r.replica_id.unique_id in names]
        return [random.sample(chosen, min(2, len(chosen)))]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Wait until a replica takes the call. Until then nobody has it, whoever had it before.

        Not in `choose_replicas`: that may ask once more for a call that was given away meanwhile.
        """
        ticket = ticket_of(pending_request)
        if ticket is not None:
            ticket.replica_id = None
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    def _fulfill_next_pending_request(
        self,
        replica: RunningReplica,
        request_metadata: Any = None,  # noqa: ANN401
    ) -> None:
        """Give the replica to the call it was chosen for; when that has gone, to the first one
        that may have it."""
        queue = self._pending_requests_to_fulfill
        name = replica.replica_id.unique_id
        running = [r.unique_id for r in self.curr_replicas]
        waiting = [(at, pending) for at, pending in enumerate(queue) if not pending.future.done()]
        mine = [pair for pair in waiting if pair[1].metadata is request_metadata]
        for at, pending in mine or waiting:
            ticket = ticket_of(pending)
            if mine or ticket is None or name in ticket.preferred(running):
                del queue[at]
                queue.appendleft(pending)
                if ticket is not None:
                    ticket.replica_id = name
                super()._fulfill_next_pending_request(replica, request_metadata)
                return


def ticket_of(pending_request: PendingRequest | None) -> Ticket | None:
    """The ticket that a call carries."""
    if pending_request is None:
        return None
    values = (*pending_request.args, *pending_request.kwargs.values())
    return next((value for value in values if isinstance(value, Ticket)), None)

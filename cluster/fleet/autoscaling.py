"""How many drafter replicas to run: a pure function of what the replicas report, and its policy.

Drafters get their traffic on gRPC streams that Ray Serve cannot see, so Serve's own count of
ongoing requests is 0 for them. Each replica reports `drafter_statistics` instead
(`record_autoscaling_stats`) and Serve calls `DrafterPolicy` with the values; delays, factors and
bounds stay Serve's. Knows nothing of requests, drafts or Ray's objects beyond the context it is
handed, and keeps no state: the same statistics give the same count.

A pool never scales itself to zero: with no replica left, nobody would report the demand that
ought to bring it back.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from protos.exchange import DrafterLoad

SESSIONS = "num_sessions"
BUSY = "busy_fraction"
WAITING = "num_waiting"


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """One replica over Serve's look-back: open sessions, share of time computing (0..1), and
    sessions found waiting for a draft."""

    num_sessions: float = 0.0
    busy_fraction: float = 0.0
    num_waiting: float = 0.0


@dataclass(frozen=True, slots=True)
class Targets:
    """What one replica should carry. slack: relative excess that is borne before a replica is
    added, and margin that must be left before one is removed, so that a load on the line does not
    make the count swing."""

    num_sessions: float = 16.0
    busy_fraction: float = 0.6
    num_waiting: float = 4.0
    slack: float = 0.1

    def __post_init__(self) -> None:
        if min(self.num_sessions, self.busy_fraction, self.num_waiting) <= 0:
            raise ValueError(f"targets must be above 0, not {self}")
        if not 0 <= self.slack < 1:
            raise ValueError(f"slack must be in [0, 1), not {self.slack}")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Replica counts allowed, both ends included."""

    min_replicas: int
    max_replicas: int

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ValueError(f"bounds must satisfy 0 <= min <= max and 1 <= max, not {self}")

    def clip(self, count: int) -> int:
        """The allowed count nearest to `count`."""
        return max(self.min_replicas, min(self.max_replicas, count))


def drafter_statistics(before: DrafterLoad, now: DrafterLoad) -> dict[str, float]:
    """What `record_autoscaling_stats` returns: numbers only, of the time since `before`."""
    elapsed_s = now.up_s - before.up_s
    busy = (now.busy_s - before.busy_s) / elapsed_s if elapsed_s > 0 else 0.0
    return {
        SESSIONS: float(now.num_sessions),
        BUSY: min(1.0, max(0.0, busy)),
        WAITING: float(now.num_waiting),
    }


def desired_replicas(
    replicas: Iterable[ReplicaStatistics], current: int, targets: Targets, bounds: Bounds
) -> int:
    """Replicas that carry the whole load at the targets; the scarcest of the three decides.

    current: replicas counted as running. Those that have not reported yet count as idle: they are
    the ones that the last decision added. Nothing reported: the count stays.
    """
    reported = list(replicas)
    if not reported or current < 1:
        return bounds.clip(max(1, current))
    need = max(
        sum(r.num_sessions for r in reported) / targets.num_sessions,
        sum(r.busy_fraction for r in reported) / targets.busy_fraction,
        sum(r.num_waiting for r in reported) / targets.num_waiting,
    )
    if need > current:
        wanted = max(current, math.ceil(need / (1.0 + targets.slack)))
    else:
        wanted = min(current, math.ceil(need * (1.0 + targets.slack)))
    return bounds.clip(max(1, wanted))


class PolicyContext(Protocol):
    """The part of Serve's AutoscalingContext that is read here."""

    current_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[object, float]] | None:
        """Per name of a reported number, its value by replica."""


class DrafterPolicy:
    """Serve's class policy: `policy_function: cluster.fleet.autoscaling.DrafterPolicy`, with the
    fields of `Targets` as `policy_kwargs`. Called on the controller ten times a second."""

    def __init__(
        self,
        num_sessions: float = 16.0,
        busy_fraction: float = 0.6,
        num_waiting: float = 4.0,
        slack: float = 0.1,
    ) -> None:
        self._targets = Targets(num_sessions, busy_fraction, num_waiting, slack)

    def __call__(self, context: PolicyContext) -> tuple[int, dict[str, object]]:
        """(replicas wanted, no state of our own)."""
        bounds = Bounds(
            context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        )
        replicas = statistics_by_replica(context.aggregated_metrics or {})
        current = context.current_num_replicas
        return desired_replicas(replicas, current, self._targets, bounds), {}


def statistics_by_replica(
    metrics: Mapping[str, Mapping[object, float]],
) -> list[ReplicaStatistics]:
    """Serve's {name: {replica: value}} turned around; replicas without our numbers are left out."""
    sessions = metrics.get(SESSIONS, {})
    busy = metrics.get(BUSY, {})
    waiting = metrics.get(WAITING, {})
    return [
        ReplicaStatistics(sessions[replica], busy.get(replica, 0.0), waiting.get(replica, 0.0))
        for replica in sessions
    ]

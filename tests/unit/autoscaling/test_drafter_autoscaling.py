"""Drafter autoscaling: the table of decisions, and that Serve can load and call the policy."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from cluster.fleet.autoscaling import (
    Bounds,
    DrafterPolicy,
    ReplicaStatistics,
    Targets,
    desired_replicas,
    drafter_statistics,
    statistics_by_replica,
)
from protos.exchange import DrafterLoad

TARGETS = Targets(num_sessions=16, busy_fraction=0.6, num_waiting=4, slack=0.1)
IDLE = ReplicaStatistics()


def load(sessions=0.0, busy=0.0, waiting=0.0):
    return ReplicaStatistics(sessions, busy, waiting)


TABLE = [
    ("nothing to do, down to one", [IDLE, IDLE, IDLE], 3, (1, 8), 1),
    ("nothing to do, minimum holds", [IDLE, IDLE, IDLE], 3, (2, 8), 2),
    ("minimum zero still keeps one", [IDLE], 1, (0, 8), 1),
    ("at the target, the count stays", [load(16, 0.6, 4)], 1, (1, 8), 1),
    ("a little over the target is borne", [load(17)], 1, (1, 8), 1),
    ("sessions ask for more", [load(40)], 1, (1, 8), 3),
    ("busy asks for more", [load(2, 1.0)], 1, (1, 8), 2),
    ("waiting asks for more", [load(2, 0.1, 9)], 1, (1, 8), 3),
    ("the scarcest decides", [load(40, 0.1, 0), load(0, 0.9, 13)], 2, (1, 8), 3),
    ("the maximum holds", [load(400)], 1, (1, 4), 4),
    ("a newcomer without numbers counts as idle", [load(30)], 2, (1, 8), 2),
    ("two thirds leave", [load(5), load(5), load(5)], 3, (1, 8), 2),
    ("too close to the line to remove one", [load(15.5), load(15.5), load(0)], 3, (1, 8), 3),
    ("room enough to remove one", [load(14), load(14), load(0)], 3, (1, 8), 2),
    ("no numbers yet, the count stays", [], 3, (1, 8), 3),
    ("no replica and no numbers, one starts", [], 0, (0, 8), 1),
    ("no numbers, but bounds moved", [], 9, (1, 4), 4),
]


@pytest.mark.parametrize(
    ("replicas", "current", "bounds", "expected"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_desired_replicas(replicas, current, bounds, expected):
    assert desired_replicas(replicas, current, TARGETS, Bounds(*bounds)) == expected


@pytest.mark.parametrize("sessions", [0, 1, 15, 16, 17, 18, 31, 33, 47, 50, 64, 100])
def test_a_constant_load_settles_and_never_swings(sessions):
    counts = [1]
    for _ in range(12):
        each = [load(sessions / counts[-1])] * counts[-1]
        counts.append(desired_replicas(each, counts[-1], TARGETS, Bounds(1, 10)))
    assert counts[2:] == [counts[2]] * 11
    assert sessions / counts[-1] <= 16 * 1.1


def test_more_load_never_means_fewer_replicas():
    counts = [desired_replicas([load(s), load(s)], 2, TARGETS, Bounds(1, 20)) for s in range(100)]
    assert counts == sorted(counts)


@pytest.mark.parametrize("bad", [(3, 2), (-1, 2), (0, 0)])
def test_bounds_that_contradict_themselves_are_refused(bad):
    with pytest.raises(ValueError, match="bounds"):
        Bounds(*bad)


@pytest.mark.parametrize("bad", [{"num_sessions": 0}, {"busy_fraction": -1}, {"slack": 1}])
def test_targets_that_cannot_be_met_are_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        Targets(**bad)


def test_statistics_are_of_the_time_since_the_last_report():
    before = DrafterLoad(num_sessions=9, busy_s=10.0, up_s=100.0)
    now = DrafterLoad(num_sessions=3, num_waiting=2, busy_s=11.5, up_s=103.0)
    expected = {"num_sessions": 3.0, "busy_fraction": 0.5, "num_waiting": 2.0}
    assert drafter_statistics(before, now) == expected
    assert drafter_statistics(now, now)["busy_fraction"] == 0.0
    assert all(type(v) is float for v in drafter_statistics(before, now).values())


def context(metrics, current=1, bounds=(1, 8)):
    return SimpleNamespace(
        current_num_replicas=current,
        capacity_adjusted_min_replicas=bounds[0],
        capacity_adjusted_max_replicas=bounds[1],
        aggregated_metrics=metrics,
    )


def test_policy_reads_the_reported_numbers_by_replica():
    metrics = {
        "num_sessions": {"a": 20.0, "b": 20.0},
        "busy_fraction": {"a": 0.2, "b": 0.1},
        "num_waiting": {"a": 0.0, "b": 0.0},
        "running_requests": {"a": 0.0, "b": 0.0, "c": 0.0},
    }
    assert len(statistics_by_replica(metrics)) == 2
    assert DrafterPolicy(num_sessions=10.0)(context(metrics, current=2)) == (4, {})
    assert DrafterPolicy()(context(None, current=2)) == (2, {})


def test_serve_ships_the_policy_by_import_path():
    """Serve imports the class, pickles its module by value and calls the copy."""
    code = """
from types import SimpleNamespace
from ray.serve.config import AutoscalingConfig
config = AutoscalingConfig(
    min_replicas=1,
    max_replicas=4,
    policy={
        "policy_function": "cluster.fleet.autoscaling.DrafterPolicy",
        "policy_kwargs": {"num_sessions": 10.0},
    },
)
policy = config.policy.get_policy()
ctx = SimpleNamespace(
    current_num_replicas=1, capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=4,
    aggregated_metrics={"num_sessions": {"a": 31.0}, "busy_fraction": {}, "num_waiting": {}},
)
assert policy(**config.policy.policy_kwargs)(ctx) == (3, {}), "wrong decision"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

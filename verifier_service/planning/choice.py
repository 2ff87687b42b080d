"""The choice of one step: which sources to wait for, and how many nodes each request gets.

Pure. An option is a set of sources with the wait it exposes and one profile per request; the best
option and node counts maximise expected committed tokens per second

    Theta = (R + sum of gains of the taken nodes) / (t_verify(base rows + nodes) + wait)

(reference/disagg.md 2.2 F, rate_wait). Because gains never increase along a profile, the best n
nodes of a step are the n best of all requests together, so one scan over n is exact;
`choose_slowly` tries every combination and is what the fast choice is tested against.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from verifier_service.planning.shapes import Profile


@dataclass(frozen=True, slots=True)
class Option:
    """Something a step may do.

    label: names it for hysteresis and counters. profiles: per request, empty for requests that
    do not speculate. cost_s: [n + 1] time of the step with 0 .. n draft nodes. wait_s: exposed
    draft wait. may_spend_s: most that the step may cost beyond plain_s.
    """

    label: tuple[str, ...]
    profiles: tuple[Profile, ...]
    cost_s: NDArray[np.float64]
    wait_s: float
    plain_s: float
    may_spend_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The best of the options: nodes per request, and the rate it promises in tokens a second."""

    index: int
    num_nodes: tuple[int, ...]
    expected: float
    rate: float


def choose(options: Sequence[Option]) -> list[Choice]:
    """The best node counts of each option that may be afforded, in the options' order."""
    choices = []
    for index, option in enumerate(options):
        gains, owners = _sorted_gains(option)
        limit = min(len(gains), len(option.cost_s) - 1)
        expected_n = len(option.profiles) + np.concatenate(([0.0], np.cumsum(gains[:limit])))
        time_n = option.cost_s[: limit + 1] + option.wait_s
        allowed_n = time_n <= option.plain_s + option.may_spend_s + 1e-12
        if not allowed_n.any():
            continue
        rate_n = np.where(allowed_n, expected_n / time_n, -1.0)
        best = int(np.argmax(rate_n))
        counts = [0] * len(option.profiles)
        for owner in owners[:best]:
            counts[owner] += 1
        choices.append(Choice(index, tuple(counts), float(expected_n[best]), float(rate_n[best])))
    return choices


def choose_slowly(options: Sequence[Option]) -> list[Choice]:
    """The reference: every combination of node counts, in plain loops."""
    choices = []
    for index, option in enumerate(options):
        best: Choice | None = None
        for counts in product(*(range(len(p.gains) + 1) for p in option.profiles)):
            total = sum(counts)
            if total >= len(option.cost_s):
                continue
            time_s = float(option.cost_s[total]) + option.wait_s
            if time_s > option.plain_s + option.may_spend_s + 1e-12:
                continue
            expected = float(len(counts))
            for profile, count in zip(option.profiles, counts, strict=True):
                expected += sum(profile.gains[:count])
            if best is None or expected / time_s > best.rate + 1e-12:
                best = Choice(index, counts, expected, expected / time_s)
        if best is not None:
            choices.append(best)
    return choices


def _sorted_gains(option: Option) -> tuple[list[float], list[int]]:
    """Gains of all requests in falling order, and whose they are; stable within a request."""
    pairs = [
        (-gain, place, owner)
        for owner, profile in enumerate(option.profiles)
        for place, gain in enumerate(profile.gains)
    ]
    pairs.sort()
    return [-gain for gain, _, _ in pairs], [owner for _, _, owner in pairs]

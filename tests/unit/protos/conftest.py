"""Hypothesis on a machine that is shared: no deadline per example, and few examples."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "shared", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared")

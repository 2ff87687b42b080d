"""Bodies drawn from the OpenAPI document by schemathesis, against the real face over a fake.

In process, without sockets; the same seed draws the same bodies. `tests/benchmarks/fuzz_http.py`
runs it for longer.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema
from starlette.types import ASGIApp

REFUSALS: Final = [400, 401, 404, 405, 413]
# What a schema cannot say, such as a vocabulary or a context, is refused all the same.
UNCHECKED: Final = ("positive_data_acceptance",)


@dataclass
class Found:
    """num_checks: of each kind, made; faults: a line for each that failed."""

    num_checks: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def fuzz(app: ASGIApp, key: str, num_examples: int, seed: int = 1) -> Found:
    """Every endpoint with every boundary of its schema, and with `num_examples` random bodies."""
    checks: dict[str, object] = {name: {"enabled": False} for name in UNCHECKED}
    checks["negative_data_rejection"] = {"expected-statuses": REFUSALS}
    settings = {
        "seed": seed,
        "workers": 1,
        "headers": {"Authorization": f"Bearer {key}"},
        "generation": {
            "max-examples": num_examples,
            "deterministic": True,
            "database": "none",
            "no-shrink": True,
        },
        "checks": checks,
        "phases": {"stateful": {"enabled": False}},
        "suppress-health-check": ["all"],
    }
    config = SchemathesisConfig.from_dict(settings)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=config)
    found = Found()
    for event in from_schema(schema).execute():
        if isinstance(event, events.NonFatalError | events.FatalError):
            found.faults.append(f"schemathesis itself: {event}")
        if not isinstance(event, events.ScenarioFinished):
            continue
        for case_id, results in event.recorder.checks.items():
            for result in results:
                found.num_checks[result.name] += 1
                if result.failure_info is not None:
                    case = event.recorder.cases[case_id].value
                    what = f"{case.method} {case.path} {case.body!r}"[:300]
                    said = result.failure_info.failure.message[:300]
                    found.faults.append(f"{result.name}: {what}: {said}")
    return found

"""What deployments tell each other over Serve handles, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.errors import OutriderError
from protos.exchange import Capabilities, DrafterLoad
from protos.generation import TokenRun

StreamItem = TokenRun | OutriderError
"""One item of a verifier's `generate`: errors travel as values, so that their class survives."""


@dataclass(frozen=True, slots=True)
class SourceReport:
    """One drafter as a verifier sees it. gives_q: `acceptance: rejection` can use it now."""

    name: str
    num_replicas: int
    local: bool
    gives_q: bool = False


@dataclass(frozen=True, slots=True)
class VerifierReport:
    """One verifier replica. `statistics` holds counts and sums, nested by name.

    silent_s: how long it has made no step with work present; inf when its engine has failed.
    """

    replica_id: str
    pid: int
    max_context: int
    vocab_size: int
    fingerprint: str
    invariant: bool
    sources: tuple[SourceReport, ...]
    statistics: Mapping[str, object] = field(default_factory=dict)
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """One drafter replica and where its gRPC server listens."""

    replica_id: str
    pid: int
    address: str
    capabilities: Capabilities
    load: DrafterLoad
    draining: bool = False

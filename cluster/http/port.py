"""The port behind the HTTP face: whoever turns prompt ids into runs of ids.

Knows neither HTTP nor Ray: a Serve handle or a fake implements it. Invariant: closing a
generation cancels it.
"""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Protocol

from protos.generation import GenerationRequest, TokenRun


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, as the verifier describes it.

    drafters_with_q: those that `acceptance: rejection` can use.
    """

    max_context: int
    vocab_size: int
    fingerprint: str
    drafters: tuple[str, ...]
    drafters_with_q: tuple[str, ...] = ()


class Backend(Protocol):
    """Whoever turns prompt ids into runs of ids."""

    def served(self) -> Served:
        """The newest description. Raises: PeerUnavailable while there is none."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenRun, None]:
        """Runs of one request; an async generator: closing it cancels the request.

        Raises: Overloaded, PeerUnavailable, InvalidRequest.
        """

    async def statistics(self) -> Mapping[str, object]:
        """Numbers of verifiers and drafters, nested by name."""

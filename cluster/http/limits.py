"""Bounds on what one caller may ask: body size, prompts per call, requests in the house.

Knows no HTTP framework. Invariant: nothing is parsed, tokenised or queued before its bound was
checked, and a ticket that was given is given back.
"""

import re
from collections.abc import AsyncIterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from protos.errors import InvalidRequest, Overloaded


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds an ingress keeps; sizes in bytes, others counts.

    max_choices: of one call, over all its prompts. timeout_s: the longest any call may take; None:
    no such bound.
    """

    max_body_bytes: int = 4 * 1024 * 1024
    max_prompts: int = 16
    max_requests: int = 256
    retry_after_s: float = 1.0
    max_choices: int = 64
    timeout_s: float | None = None


_PLAIN_LENGTH: Final = re.compile("[0-9]{1,18}")
"""What a Content-Length that says anything looks like; others are not believed."""


class BodyTooLarge(InvalidRequest):
    """The request body passes the limit (HTTP 413)."""


async def read_body(
    chunks: AsyncIterable[bytes], content_length: str | None, max_bytes: int
) -> bytes:
    """The whole body, never holding more than the limit, whatever Content-Length said.

    Raises: BodyTooLarge.
    """
    declared = _PLAIN_LENGTH.fullmatch(content_length or "")
    size = int(declared[0]) if declared else 0
    body = bytearray()
    if size <= max_bytes:
        async for chunk in chunks:
            body += chunk
            size = len(body)
            if size > max_bytes:
                break
    if size > max_bytes:
        raise BodyTooLarge(f"the body must be at most {max_bytes} bytes")
    return bytes(body)


class Gate:
    """Counts requests in the house and refuses those beyond the limit.

    Used on one event loop: `with gate.enter(n):` holds n places.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.num_running = 0
        self.num_refused = 0

    def enter(self, num_requests: int) -> "Ticket":
        """Places for num_requests, held until the ticket's exit.

        Raises: Overloaded.
        """
        if self.num_running + num_requests > self._limits.max_requests:
            self.num_refused += 1
            raise Overloaded("the queue is full", self._limits.retry_after_s)
        return Ticket(self, num_requests)


class Ticket:
    """Places held in a Gate; giving them back twice is harmless."""

    def __init__(self, gate: Gate, num_places: int) -> None:
        self._gate = gate
        self._num_places = num_places
        gate.num_running += num_places

    def leave(self) -> None:
        """Give the places back."""
        self._gate.num_running -= self._num_places
        self._num_places = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

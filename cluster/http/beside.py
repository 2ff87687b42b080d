"""Work on a caller's text, done beside the event loop where it would hold it up.

Knows no subject. Invariant: what is long never runs between two tokens of somebody else's stream.
"""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

MUCH: Final = 20_000
"""Characters or ids; handling fewer takes about as long as a thread's hand-over and back."""

_T = TypeVar("_T")


async def beside(work: Callable[[], _T], size: int) -> _T:
    """What `work` returns. size: characters or ids that it handles."""
    return await asyncio.to_thread(work) if size > MUCH else work()

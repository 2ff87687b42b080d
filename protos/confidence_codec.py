"""A draft's confidences <-> bytes, checked: no more than the best path is long, each a probability.

Pure functions, used by `codec`.
"""

import struct
from collections.abc import Sequence

from protos.errors import MalformedTree
from protos.tree import CandidateTree


def encode_confidences(confidences: Sequence[float]) -> bytes:
    """float16, little-endian."""
    return struct.pack(f"<{len(confidences)}e", *confidences)


def decode_confidences(data: bytes, tree: CandidateTree) -> tuple[float, ...]:
    """Raises MalformedTree. None at all is well-formed."""
    if not data:
        return ()
    most = tree.depth
    if len(data) % 2 or len(data) // 2 > most:
        raise MalformedTree(f"a draft {most} deep has at most {2 * most} bytes of confidences")
    confidences = struct.unpack(f"<{len(data) // 2}e", data)
    # A comparison with NaN is false.
    if not all(0.0 <= confidence <= 1.0 for confidence in confidences):
        raise MalformedTree("confidences must lie in [0, 1]")
    return confidences

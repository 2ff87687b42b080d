"""What one end accepts from the other: the numbers behind every check of law 5.

Pure values: knows no wire format. A count or size is compared with these before anything of that
size is built; `codec` calls the checks in that order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from protos.errors import MalformedRows, MalformedTree, ProtocolError
from protos.exchange import CONTEXT_PIECE_BYTES, Capabilities
from protos.features import DType

NO_BOUND: Final = 2**31 - 1
"""Ids and lengths stay below this even where a capability record names no bound."""

MAX_TEXT: Final = 512
"""Characters of any string inside a message."""

MAX_RANKED_IDS: Final = 64
"""Ids kept per depth of the best path."""

MAX_LAYERS: Final = 64
"""Aux layers, projection norms and end-of-sequence ids a record may name."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on a peer's messages.

    vocab_size, max_context: ids below, lengths up to. max_nodes, max_depth, max_width: of a plan
    and of a tree. max_works: entries of one message. max_tokens_per_work: ids of one entry.
    row_widths: elements a feature row may have (empty: no rows are taken); row_dtypes: their
    types; max_piece_bytes: of one run of rows.
    """

    vocab_size: int = NO_BOUND
    max_context: int = NO_BOUND
    max_nodes: int = 256
    max_depth: int = 64
    max_width: int = 64
    max_works: int = 1024
    max_tokens_per_work: int = NO_BOUND
    row_widths: tuple[int, ...] = ()
    row_dtypes: tuple[DType, ...] = tuple(DType)
    max_piece_bytes: int = CONTEXT_PIECE_BYTES

    def __post_init__(self) -> None:
        bounds = (
            self.vocab_size,
            self.max_context,
            self.max_works,
            self.max_tokens_per_work,
            self.max_piece_bytes,
        )
        if min(bounds) < 1 or min(self.max_nodes, self.max_depth, self.max_width) < 0:
            raise ProtocolError(f"limits must be positive, not {self}")


def drafter_limits(capabilities: Capabilities, max_works: int = 1024) -> Limits:
    """What a drafter with these capabilities takes; 0 in the record means no bound of its own."""
    context = capabilities.max_context or NO_BOUND
    widths = {capabilities.raw_width, capabilities.fused_width} - {0}
    default = Limits()
    return Limits(
        vocab_size=capabilities.vocab_size or NO_BOUND,
        max_context=context,
        max_nodes=capabilities.max_nodes or default.max_nodes,
        max_depth=capabilities.max_depth or default.max_depth,
        max_width=capabilities.max_width or default.max_width,
        max_works=max_works,
        max_tokens_per_work=context,
        row_widths=tuple(sorted(widths)),
    )


def check_count(name: str, count: int, most: int) -> None:
    """Refuse more entries than `most`, before they are looked at."""
    if count > most:
        raise ProtocolError(f"at most {most} {name}, not {count}")


def check_text(name: str, text: str) -> str:
    """Refuse overlong strings."""
    check_count(f"characters of {name}", len(text), MAX_TEXT)
    return text


def check_ids(name: str, ids: Sequence[int], limits: Limits) -> tuple[int, ...]:
    """Ids of an unsigned field, all inside the vocabulary."""
    if ids and max(ids) >= limits.vocab_size:
        raise ProtocolError(f"{name} must be below {limits.vocab_size}, not {max(ids)}")
    return tuple(ids)


def check_tree_fields(
    tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float], limits: Limits
) -> None:
    """Everything about a tree that `CandidateTree` itself cannot know: ids, depth, scores."""
    if tokens and max(tokens) >= limits.vocab_size:
        raise MalformedTree(f"draft ids must be below {limits.vocab_size}, not {max(tokens)}")
    if not all(math.isfinite(score) for score in scores):
        raise MalformedTree("scores must be finite")
    depths = [0]
    for node, parent in enumerate(parents, 1):
        if parent >= node:
            raise MalformedTree(f"node {node} names parent {parent}, not an earlier node")
        depths.append(depths[parent] + 1)
    if max(depths) > limits.max_depth:
        raise MalformedTree(f"at most {limits.max_depth} levels, not {max(depths)}")


def check_row_shape(start: int, count: int, width: int, dtype: DType, limits: Limits) -> None:
    """Where rows stand and how large they are, before their bytes are looked at."""
    if width not in limits.row_widths:
        raise MalformedRows(f"rows must be {limits.row_widths or 'absent'} wide, not {width}")
    if dtype not in limits.row_dtypes:
        raise MalformedRows(f"rows must be of {limits.row_dtypes}, not {dtype}")
    if count < 1 or start + count > limits.max_context:
        raise MalformedRows(f"rows [{start}, {start + count}) must lie in {limits.max_context}")
    size = count * width * dtype.num_bytes
    # A single row is let through whatever its size: it cannot be cut into smaller pieces.
    if size > limits.max_piece_bytes and count > 1:
        raise MalformedRows(f"at most {limits.max_piece_bytes} bytes of rows, not {size}")

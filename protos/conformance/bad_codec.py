"""Messages that break the contract, each in one way: made from good ones by hand.

The codec cannot make them, which is why they are made here.
"""

from collections.abc import Callable
from typing import Final

from protos import drafting_pb2 as pb
from protos.codec import encode_draft_request
from protos.exchange import DraftWork

Spoil = Callable[[pb.DraftWork], None]
"""Breaks an entry that opens a session, in one way."""


def _cut_tokens(entry: pb.DraftWork) -> None:
    del entry.tokens[-1]


def _no_tokens(entry: pb.DraftWork) -> None:
    del entry.tokens[:]
    entry.base_len = 0


def _set(name: str, value: object) -> Spoil:
    """Set a field by its dotted name."""
    *parents, last = name.split(".")

    def spoil(entry: pb.DraftWork) -> None:
        place: object = entry
        for parent in parents:
            place = getattr(place, parent)
        setattr(place, last, value)

    return spoil


SPOILS: Final[dict[str, Spoil]] = {
    "tokens that do not end at base_len": _cut_tokens,
    "a base_len of 0": _no_tokens,
    "an unknown plan kind": _set("plan.kind", 99),
    "an unknown feature form": _set("open.form", 99),
    "an unknown element type": _set("open.dtype", 99),
    "a temperature that is no number": _set("open.sampling.temperature", float("nan")),
    "a temperature of 3": _set("open.sampling.temperature", 3.0),
    "a top_p of 2": _set("open.sampling.top_p", 2.0),
    "a request id of 4,000 characters": _set("open.request_id", "x" * 4000),
    "rows of a width that is not taken": _set("open.width", 7),
    "a close that carries more": _set("close", True),
}

ROW_SPOILS: Final[dict[str, Spoil]] = {
    "rows shorter than they say": lambda entry: setattr(entry.rows, "data", entry.rows.data[:-1]),
    "rows beyond the anchor": _set("rows.start", 10_000),
    "rows of another width than opened": _set("rows.width", 7),
    "no rows": _set("rows.count", 0),
}


def spoiled(spoil: Spoil, good: DraftWork, neighbour: DraftWork) -> pb.DraftRequest:
    """A message of two entries, the first spoiled."""
    message = encode_draft_request(0, 1.0, [good, neighbour])
    spoil(message.works[0])
    return message


def repeated(work: DraftWork) -> pb.DraftRequest:
    """The same session twice in one message."""
    return encode_draft_request(0, 1.0, [work, work])


def nameless(work: DraftWork, neighbour: DraftWork) -> pb.DraftRequest:
    """An entry whose session id is 0, and one beside it."""
    message = encode_draft_request(0, 1.0, [work, neighbour])
    message.works[0].session_id = 0
    return message

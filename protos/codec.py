"""Draft contract: values <-> protobuf messages, with every check of law 5 on the way in.

Pure functions; knows no channel, no session and no model. Counts are compared with `Limits` before
contents are copied. A malformed entry is handed back beside the good ones, so it ends its own
session and nothing else; only a broken envelope raises.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from protos import drafting_pb2 as pb
from protos.confidence_codec import decode_confidences, encode_confidences
from protos.errors import InvalidRequest, MalformedRows, MalformedTree, ProtocolError
from protos.exchange import (
    ContextAck,
    ContextRows,
    DraftResult,
    DraftStatus,
    DraftWork,
    Plan,
    SessionOpen,
)
from protos.features import FeatureForm, FeatureRows
from protos.limits import (
    MAX_RANKED_IDS,
    MAX_TEXT,
    Limits,
    check_count,
    check_ids,
    check_text,
    check_tree_fields,
)
from protos.parts_codec import (
    DTYPE_OF,
    DTYPES,
    FORM_OF,
    FORMS,
    STATUS_OF,
    STATUSES,
    decode_plan,
    decode_rows,
    decode_sampling,
    encode_plan,
    encode_rows,
    encode_sampling,
    known,
    micros,
)
from protos.sparse_codec import decode_q, encode_q
from protos.tree import CandidateTree

_FLOAT16_MAX: Final = 65504.0


@dataclass(frozen=True, slots=True)
class Malformed:
    """An entry that breaks the contract; it ends the session it names."""

    session_id: int
    incarnation: int
    base_len: int
    error: ProtocolError


@dataclass(frozen=True, slots=True)
class DraftCall:
    """One decoded `DraftRequest`. remaining_s: what the verifier will still wait."""

    step: int
    remaining_s: float
    works: tuple[DraftWork, ...]
    malformed: tuple[Malformed, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftAnswer:
    """One decoded `DraftReply`. queue_s, draft_s: time inside the drafter."""

    step: int
    results: tuple[DraftResult, ...]
    malformed: tuple[Malformed, ...] = ()
    queue_s: float = 0.0
    draft_s: float = 0.0


def encode_draft_request(
    step: int, remaining_s: float, works: Sequence[DraftWork]
) -> pb.DraftRequest:
    """One step's message to one drafter. remaining_s is clamped to what the field holds."""
    return pb.DraftRequest(
        step=step, remaining_us=micros(remaining_s), works=[_encode_work(work) for work in works]
    )


def decode_draft_request(message: pb.DraftRequest, limits: Limits) -> DraftCall:
    """Raises ProtocolError when there are too many entries; entries fail one by one."""
    check_count("works", len(message.works), limits.max_works)
    works: list[DraftWork] = []
    malformed: list[Malformed] = []
    seen: set[int] = set()
    for entry in message.works:
        try:
            _check_session(entry.session_id, seen)
            works.append(_decode_work(entry, limits))
        except (ProtocolError, InvalidRequest) as error:
            malformed.append(_malformed(entry, error))
    return DraftCall(message.step, message.remaining_us / 1e6, tuple(works), tuple(malformed))


def encode_draft_reply(
    step: int, results: Sequence[DraftResult], queue_s: float = 0.0, draft_s: float = 0.0
) -> pb.DraftReply:
    """The answer to one step's message; `step` repeats the request's."""
    return pb.DraftReply(
        step=step,
        results=[_encode_result(result) for result in results],
        queue_us=micros(queue_s),
        draft_us=micros(draft_s),
    )


def decode_draft_reply(message: pb.DraftReply, limits: Limits) -> DraftAnswer:
    """A drafter's answer under the verifier's own limits; entries fail one by one."""
    check_count("results", len(message.results), limits.max_works)
    results: list[DraftResult] = []
    malformed: list[Malformed] = []
    seen: set[int] = set()
    for entry in message.results:
        try:
            _check_session(entry.session_id, seen)
            results.append(_decode_result(entry, limits))
        except ProtocolError as error:
            malformed.append(_malformed(entry, error))
    queue_s, draft_s = message.queue_us / 1e6, message.draft_us / 1e6
    return DraftAnswer(message.step, tuple(results), tuple(malformed), queue_s, draft_s)


def encode_context(piece: ContextRows) -> pb.ContextPiece:
    """One piece of bulk rows."""
    return pb.ContextPiece(
        session_id=piece.session_id,
        incarnation=piece.incarnation,
        rows=encode_rows(piece.rows),
    )


def decode_context(message: pb.ContextPiece, limits: Limits) -> ContextRows:
    """Raises ProtocolError; the caller ends the session that `message.session_id` names."""
    _check_session(message.session_id, set())
    if not message.HasField("rows"):
        raise MalformedRows("a piece needs rows")
    return ContextRows(message.session_id, message.incarnation, decode_rows(message.rows, limits))


def encode_ack(ack: ContextAck) -> pb.ContextAck:
    """Acknowledgement by row."""
    return pb.ContextAck(
        session_id=ack.session_id,
        incarnation=ack.incarnation,
        held_rows=ack.held_rows,
        lost=ack.lost,
        detail=ack.detail[:MAX_TEXT],
    )


def decode_ack(message: pb.ContextAck, limits: Limits) -> ContextAck:
    """Raises ProtocolError."""
    check_count("rows held", message.held_rows, limits.max_context)
    return ContextAck(
        session_id=message.session_id,
        incarnation=message.incarnation,
        held_rows=message.held_rows,
        lost=message.lost,
        detail=check_text("detail", message.detail),
    )


def _malformed(
    entry: pb.DraftWork | pb.DraftResult, error: ProtocolError | InvalidRequest
) -> Malformed:
    if isinstance(error, InvalidRequest):
        error = ProtocolError(f"sampling: {error}")
    return Malformed(entry.session_id, entry.incarnation, entry.base_len, error)


def _check_session(session_id: int, seen: set[int]) -> None:
    if session_id == 0:
        raise ProtocolError("session ids are not 0")
    if session_id in seen:
        raise ProtocolError("one entry per session and message")
    seen.add(session_id)


def _encode_work(work: DraftWork) -> pb.DraftWork:
    return pb.DraftWork(
        session_id=work.session_id,
        incarnation=work.incarnation,
        base_len=work.base_len,
        token_start=work.token_start,
        tokens=work.tokens,
        plan=encode_plan(work.plan),
        open=None if work.open is None else _encode_open(work.open),
        rows=None if work.rows is None else encode_rows(work.rows),
        close=work.close,
    )


def _decode_work(entry: pb.DraftWork, limits: Limits) -> DraftWork:
    check_count("tokens", len(entry.tokens), limits.max_tokens_per_work)
    check_count("committed tokens", entry.base_len, limits.max_context)
    if entry.token_start + len(entry.tokens) != entry.base_len:
        raise ProtocolError(
            f"{len(entry.tokens)} tokens from {entry.token_start} do not end at {entry.base_len}"
        )
    if entry.close:
        if entry.tokens or entry.HasField("open") or entry.HasField("rows"):
            raise ProtocolError("a closing entry carries nothing else")
    elif entry.base_len < 1:
        raise ProtocolError("base_len is at least 1: the anchor")
    opened = _decode_open(entry.open, limits) if entry.HasField("open") else None
    rows = decode_rows(entry.rows, limits) if entry.HasField("rows") else None
    if rows is not None:
        _check_inline_rows(rows, entry.base_len, opened)
    return DraftWork(
        session_id=entry.session_id,
        incarnation=entry.incarnation,
        base_len=entry.base_len,
        token_start=entry.token_start,
        tokens=check_ids("tokens", entry.tokens, limits),
        plan=decode_plan(entry.plan, limits) if entry.HasField("plan") else Plan(),
        open=opened,
        rows=rows,
        close=entry.close,
    )


def _check_inline_rows(rows: FeatureRows, base_len: int, opened: SessionOpen | None) -> None:
    """Rows trail tokens by one; rows beside an open have the form it names."""
    if rows.end > base_len - 1:
        raise MalformedRows(f"{base_len} tokens have {base_len - 1} rows, not {rows.end}")
    if opened is not None and (rows.width, rows.dtype) != (opened.width, opened.dtype):
        raise MalformedRows(
            f"the session was opened for {opened.width} {opened.dtype} elements, "
            f"not {rows.width} {rows.dtype}"
        )


def _encode_open(opened: SessionOpen) -> pb.SessionOpen:
    return pb.SessionOpen(
        request_id=opened.request_id[:MAX_TEXT],
        sampling=encode_sampling(opened.params),
        form=FORMS[opened.form],
        width=opened.width,
        dtype=DTYPES[opened.dtype],
    )


def _decode_open(message: pb.SessionOpen, limits: Limits) -> SessionOpen:
    form = known(FORM_OF, "feature form", message.form)
    if form is FeatureForm.NONE and message.width:
        raise MalformedRows(f"no features are {message.width} wide")
    if form is not FeatureForm.NONE and message.width not in limits.row_widths:
        raise MalformedRows(f"rows must be {limits.row_widths} wide, not {message.width}")
    dtype = known(DTYPE_OF, "element type", message.dtype)
    if form is not FeatureForm.NONE and dtype not in limits.row_dtypes:
        raise MalformedRows(f"rows must be of {limits.row_dtypes}, not {dtype}")
    return SessionOpen(
        request_id=check_text("request_id", message.request_id),
        params=decode_sampling(message.sampling, limits),
        form=form,
        width=message.width,
        dtype=dtype,
    )


def _encode_result(result: DraftResult) -> pb.DraftResult:
    return pb.DraftResult(
        session_id=result.session_id,
        incarnation=result.incarnation,
        base_len=result.base_len,
        status=STATUSES[result.status],
        held_tokens=result.held_tokens,
        held_rows=result.held_rows,
        tree=pb.Tree(
            tokens=result.tree.tokens,
            parents=result.tree.parents,
            scores=_encode_scores(result.tree.scores),
        ),
        ranked=[pb.RankedIds(ids=ids[:MAX_RANKED_IDS]) for ids in result.ranked_ids],
        detail=result.detail[:MAX_TEXT],
        q=encode_q(result.q),
        confidences=encode_confidences(result.confidences),
    )


def _decode_result(entry: pb.DraftResult, limits: Limits) -> DraftResult:
    check_count("levels of ranked ids", len(entry.ranked), limits.max_depth)
    held = max(entry.base_len, entry.held_tokens, entry.held_rows)
    check_count("tokens or rows held", held, limits.max_context)
    for ranked in entry.ranked:
        check_count("ranked ids", len(ranked.ids), MAX_RANKED_IDS)
    status = known(STATUS_OF, "draft status", entry.status)
    tree = _decode_tree(entry.tree, limits)
    if status is not DraftStatus.OK and tree.num_nodes:
        raise MalformedTree(f"a result that is {status} carries no draft")
    return DraftResult(
        session_id=entry.session_id,
        incarnation=entry.incarnation,
        base_len=entry.base_len,
        status=status,
        held_tokens=entry.held_tokens,
        held_rows=entry.held_rows,
        tree=tree,
        ranked_ids=tuple(check_ids("ranked ids", ranked.ids, limits) for ranked in entry.ranked),
        detail=check_text("detail", entry.detail),
        q=decode_q(entry.q, tree, limits),
        confidences=decode_confidences(entry.confidences, tree),
    )


def _encode_scores(scores: Sequence[float]) -> bytes:
    """float16, little-endian; sums below its range saturate."""
    clamped = (min(max(score, -_FLOAT16_MAX), _FLOAT16_MAX) for score in scores)
    return struct.pack(f"<{len(scores)}e", *clamped)


def _decode_tree(message: pb.Tree, limits: Limits) -> CandidateTree:
    """Sizes first, then places and ids; siblings are compared by `CandidateTree`."""
    num_nodes = len(message.tokens)
    if num_nodes > limits.max_nodes:
        raise MalformedTree(f"at most {limits.max_nodes} nodes, not {num_nodes}")
    data = message.scores
    if len(message.parents) != num_nodes or len(data) != 2 * num_nodes:
        raise MalformedTree(
            f"{num_nodes} tokens need as many parents and twice as many bytes of scores, "
            f"not {len(message.parents)} and {len(data)}"
        )
    scores = struct.unpack(f"<{num_nodes}e", data)
    check_tree_fields(message.tokens, message.parents, scores, limits)
    return CandidateTree(tuple(message.tokens), tuple(message.parents), scores)

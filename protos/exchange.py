"""The draft exchange as values: what a verifier asks of a drafter and what it gets back.

The same values travel over gRPC (`codec`) and into an in-process drafter, so both forms draft the
same trees. One `DraftWork` per request and step opens, extends, plans and closes a session; the
prefix rule (PROTOCOL.md) is all the synchronisation there is.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from protos.features import DType, FeatureForm, FeatureRows
from protos.params import SamplingParams
from protos.sparse import SparseQ
from protos.tree import CandidateTree

PROTOCOL_VERSION = 1


class PlanKind(StrEnum):
    """Shape asked of a drafter for one round."""

    NONE = "none"
    CHAIN = "chain"
    TREE = "tree"
    BLOCK = "block"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of one drafter for one round.

    chain: `depth` tokens. tree: at most `nodes` draft nodes (anchor not counted), `depth` levels,
    `width` nodes expanded per level. static: EAGLE-1's fixed tree of 25 nodes on 5 levels, cut at
    `depth` and `nodes`. block: `depth` masked positions (`nodes` > 0 asks for a tree
    out of the block). none: absorb only.
    """

    kind: PlanKind = PlanKind.NONE
    depth: int = 0
    width: int = 1
    nodes: int = 0


STATIC_PLAN = Plan(PlanKind.STATIC, depth=5, nodes=25)
"""EAGLE-1's fixed tree, whole."""


@dataclass(frozen=True, slots=True)
class SessionOpen:
    """Opens or re-opens a session: everything a drafter is told once.

    `params` (seed included) let the drafter share the target's noise (design 4).
    """

    request_id: str
    params: SamplingParams
    form: FeatureForm = FeatureForm.NONE
    width: int = 0
    dtype: DType = DType.BF16


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One session's share of a step.

    `tokens` are committed ids [token_start, base_len), the anchor last. `rows` may be given here
    when they are few, else they come over `Context`. `open` present: (re-)open first. A plan of
    kind none asks for no reply tree. `close` ends the session; nothing is answered.
    """

    session_id: int
    incarnation: int
    base_len: int
    token_start: int
    tokens: tuple[int, ...]
    plan: Plan = field(default_factory=Plan)
    open: SessionOpen | None = None
    rows: FeatureRows | None = None
    close: bool = False


class DraftStatus(StrEnum):
    """What became of one DraftWork."""

    OK = "ok"
    LOST = "lost"
    """The drafter does not hold the prefix: send tokens and rows from held_* on again."""
    NOT_READY = "not_ready"
    """Prefix held, but too many rows are still under way to draft."""
    REFUSED = "refused"
    """This session cannot be served (limits, malformed input); `detail` says why."""


@dataclass(frozen=True, slots=True)
class DraftResult:
    """The answer to one DraftWork, for the prefix of `base_len` tokens.

    ranked_ids: per depth of the best path, the drafter's best ids there in falling order: the
    planner's evidence (reference/disagg.md 2.2). q: for acceptance: rejection, what each token of
    the chain was sampled from. confidences: per depth of the best path, the drafter's own
    probability that its node is accepted given those before; empty when it has no such head.
    """

    session_id: int
    incarnation: int
    base_len: int
    status: DraftStatus
    held_tokens: int = 0
    held_rows: int = 0
    tree: CandidateTree = field(default_factory=CandidateTree)
    ranked_ids: tuple[tuple[int, ...], ...] = ()
    detail: str = ""
    q: tuple[SparseQ, ...] = ()
    confidences: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Bulk feature rows for a session, one piece of at most CONTEXT_PIECE_BYTES."""

    session_id: int
    incarnation: int
    rows: FeatureRows


@dataclass(frozen=True, slots=True)
class ContextAck:
    """Rows [0, held_rows) of a session are held without a gap; `lost`: the session is not."""

    session_id: int
    incarnation: int
    held_rows: int
    lost: bool = False
    detail: str = ""


CONTEXT_PIECE_BYTES = 256 * 1024
INLINE_ROWS_BYTES = 32 * 1024
"""Rows up to this size per work ride inside the Draft stream; more go over Context."""


@dataclass(frozen=True, slots=True)
class Projection:
    """How fused rows are made, by tensor names inside the drafter's checkpoint."""

    fc: str
    norms: tuple[str, ...] = ()
    norm_eps: float = 1e-6
    norm_form: str = "none"
    fc_bias: str = ""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """A drafter's capability record. Lengths in tokens, widths in elements.

    `digest` identifies the checkpoint, `target_digest` the target it was loaded beside (empty:
    needs none). `incarnation` changes with every start of the process. raw_width / fused_width
    are 0 where that form is not taken. gives_q: chains can be sampled from a sparse q that comes
    with them.
    """

    kind: str
    name: str
    incarnation: int
    plan_kinds: tuple[PlanKind, ...]
    digest: str = ""
    target_digest: str = ""
    aux_layers: tuple[int, ...] = ()
    raw_width: int = 0
    fused_width: int = 0
    projection: Projection | None = None
    vocab_size: int = 0
    max_context: int = 0
    max_sessions: int = 0
    max_depth: int = 0
    max_width: int = 0
    max_nodes: int = 0
    protocol_version: int = PROTOCOL_VERSION
    gives_q: bool = False


@dataclass(frozen=True, slots=True)
class DrafterLoad:
    """A drafter's load, for routing and autoscaling; counts and sums, never means."""

    num_sessions: int = 0
    num_waiting: int = 0
    busy_s: float = 0.0
    up_s: float = 0.0
    num_rounds: int = 0


@dataclass(frozen=True, slots=True)
class DrafterReplica:
    """A running replica as a directory offers it. incarnation 0: not known."""

    address: str
    incarnation: int = 0
    load: DrafterLoad = field(default_factory=DrafterLoad)

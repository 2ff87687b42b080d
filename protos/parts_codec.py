"""Parts that several messages share: plan, sampling, feature rows, enumerations.

Pure functions on values and messages; used by the other codec files only. An unknown enumeration
value is refused, an absent part has its stated default.
"""

from collections.abc import Mapping
from typing import Final, TypeVar

from protos import drafting_pb2 as pb
from protos.errors import MalformedRows, ProtocolError, VersionMismatch
from protos.exchange import PROTOCOL_VERSION, DraftStatus, Plan, PlanKind
from protos.features import DType, FeatureForm, FeatureRows
from protos.limits import Limits, check_count, check_ids, check_row_shape
from protos.params import MAX_STOP_TOKEN_IDS, Acceptance, SamplingParams

KINDS: Final = {
    PlanKind.NONE: pb.PLAN_KIND_NONE,
    PlanKind.CHAIN: pb.PLAN_KIND_CHAIN,
    PlanKind.TREE: pb.PLAN_KIND_TREE,
    PlanKind.BLOCK: pb.PLAN_KIND_BLOCK,
    PlanKind.STATIC: pb.PLAN_KIND_STATIC,
}
FORMS: Final = {
    FeatureForm.NONE: pb.FEATURE_FORM_NONE,
    FeatureForm.RAW: pb.FEATURE_FORM_RAW,
    FeatureForm.FUSED: pb.FEATURE_FORM_FUSED,
}
DTYPES: Final = {
    DType.BF16: pb.D_TYPE_BF16,
    DType.FP32: pb.D_TYPE_FP32,
    DType.FP16: pb.D_TYPE_FP16,
}
STATUSES: Final = {
    DraftStatus.OK: pb.DRAFT_STATUS_OK,
    DraftStatus.LOST: pb.DRAFT_STATUS_LOST,
    DraftStatus.NOT_READY: pb.DRAFT_STATUS_NOT_READY,
    DraftStatus.REFUSED: pb.DRAFT_STATUS_REFUSED,
}
ACCEPTANCES: Final = {
    Acceptance.EXACT: pb.ACCEPTANCE_EXACT,
    Acceptance.REJECTION: pb.ACCEPTANCE_REJECTION,
}
ACCEPTANCE_OF: Final[dict[int, Acceptance]] = {
    pb.ACCEPTANCE_UNSPECIFIED: Acceptance.EXACT,
    **{wire: acceptance for acceptance, wire in ACCEPTANCES.items()},
}
KIND_OF: Final[dict[int, PlanKind]] = {wire: kind for kind, wire in KINDS.items()}
FORM_OF: Final[dict[int, FeatureForm]] = {wire: form for form, wire in FORMS.items()}
DTYPE_OF: Final[dict[int, DType]] = {wire: dtype for dtype, wire in DTYPES.items()}
STATUS_OF: Final[dict[int, DraftStatus]] = {wire: status for status, wire in STATUSES.items()}

_UINT32_MAX: Final = 2**32 - 1

Value = TypeVar("Value")


def known(table: Mapping[int, Value], name: str, wire: int) -> Value:
    """The value of a wire enumeration; unknown ones (0 included) are refused."""
    value = table.get(wire)
    if value is None:
        raise ProtocolError(f"{name} {wire} is not known")
    return value


def check_version(version: int) -> None:
    """Raises VersionMismatch unless the peer speaks our version."""
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(f"protocol version {PROTOCOL_VERSION} is spoken here, not {version}")


def micros(seconds: float) -> int:
    """Whole microseconds, clamped to [0, 2^32)."""
    return min(max(int(seconds * 1e6), 0), _UINT32_MAX)


def encode_plan(plan: Plan) -> pb.Plan:
    """A plan as sent."""
    return pb.Plan(kind=KINDS[plan.kind], depth=plan.depth, width=plan.width, nodes=plan.nodes)


def decode_plan(message: pb.Plan, limits: Limits) -> Plan:
    """A plan inside the limits, with the sizes that its kind needs."""
    kind = known(KIND_OF, "plan kind", message.kind)
    check_count("levels of a plan", message.depth, limits.max_depth)
    check_count("nodes of width in a plan", message.width, limits.max_width)
    check_count("nodes of a plan", message.nodes, limits.max_nodes)
    if kind is not PlanKind.NONE and message.depth < 1:
        raise ProtocolError(f"a plan of kind {kind} needs a depth of at least 1")
    if kind is PlanKind.TREE and min(message.width, message.nodes) < 1:
        raise ProtocolError("a tree plan needs a width and nodes of at least 1")
    if kind is PlanKind.STATIC and message.nodes < 1:
        raise ProtocolError("a static plan needs nodes of at least 1")
    return Plan(kind, message.depth, message.width, message.nodes)


def encode_sampling(params: SamplingParams) -> pb.Sampling:
    """Sampling values as sent."""
    return pb.Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        acceptance=ACCEPTANCES[params.acceptance],
    )


def decode_sampling(message: pb.Sampling, limits: Limits) -> SamplingParams:
    """Raises ProtocolError, or InvalidRequest naming the field."""
    check_count("stop_token_ids", len(message.stop_token_ids), MAX_STOP_TOKEN_IDS)
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        max_tokens=message.max_tokens,
        stop_token_ids=check_ids("stop_token_ids", message.stop_token_ids, limits),
        ignore_eos=message.ignore_eos,
        acceptance=known(ACCEPTANCE_OF, "acceptance", message.acceptance),
    )


def encode_rows(rows: FeatureRows) -> pb.FeatureRows:
    """Feature rows as sent."""
    return pb.FeatureRows(
        start=rows.start,
        count=rows.count,
        width=rows.width,
        dtype=DTYPES[rows.dtype],
        data=rows.data,
    )


def decode_rows(message: pb.FeatureRows, limits: Limits) -> FeatureRows:
    """Raises MalformedRows; place and size are checked before the bytes are copied."""
    dtype = DTYPE_OF.get(message.dtype)
    if dtype is None:
        raise MalformedRows(f"element type {message.dtype} is not known")
    check_row_shape(message.start, message.count, message.width, dtype, limits)
    return FeatureRows(message.start, message.count, message.width, dtype, message.data)

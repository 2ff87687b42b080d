from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlanKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_KIND_UNSPECIFIED: _ClassVar[PlanKind]
    PLAN_KIND_NONE: _ClassVar[PlanKind]
    PLAN_KIND_CHAIN: _ClassVar[PlanKind]
    PLAN_KIND_TREE: _ClassVar[PlanKind]
    PLAN_KIND_BLOCK: _ClassVar[PlanKind]
    PLAN_KIND_STATIC: _ClassVar[PlanKind]

class Acceptance(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPTANCE_UNSPECIFIED: _ClassVar[Acceptance]
    ACCEPTANCE_EXACT: _ClassVar[Acceptance]
    ACCEPTANCE_REJECTION: _ClassVar[Acceptance]

class FeatureForm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_FORM_UNSPECIFIED: _ClassVar[FeatureForm]
    FEATURE_FORM_NONE: _ClassVar[FeatureForm]
    FEATURE_FORM_RAW: _ClassVar[FeatureForm]
    FEATURE_FORM_FUSED: _ClassVar[FeatureForm]

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    D_TYPE_UNSPECIFIED: _ClassVar[DType]
    D_TYPE_BF16: _ClassVar[DType]
    D_TYPE_FP32: _ClassVar[DType]
    D_TYPE_FP16: _ClassVar[DType]

class DraftStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_STATUS_UNSPECIFIED: _ClassVar[DraftStatus]
    DRAFT_STATUS_OK: _ClassVar[DraftStatus]
    DRAFT_STATUS_LOST: _ClassVar[DraftStatus]
    DRAFT_STATUS_NOT_READY: _ClassVar[DraftStatus]
    DRAFT_STATUS_REFUSED: _ClassVar[DraftStatus]
PLAN_KIND_UNSPECIFIED: PlanKind
PLAN_KIND_NONE: PlanKind
PLAN_KIND_CHAIN: PlanKind
PLAN_KIND_TREE: PlanKind
PLAN_KIND_BLOCK: PlanKind
PLAN_KIND_STATIC: PlanKind
ACCEPTANCE_UNSPECIFIED: Acceptance
ACCEPTANCE_EXACT: Acceptance
ACCEPTANCE_REJECTION: Acceptance
FEATURE_FORM_UNSPECIFIED: FeatureForm
FEATURE_FORM_NONE: FeatureForm
FEATURE_FORM_RAW: FeatureForm
FEATURE_FORM_FUSED: FeatureForm
D_TYPE_UNSPECIFIED: DType
D_TYPE_BF16: DType
D_TYPE_FP32: DType
D_TYPE_FP16: DType
DRAFT_STATUS_UNSPECIFIED: DraftStatus
DRAFT_STATUS_OK: DraftStatus
DRAFT_STATUS_LOST: DraftStatus
DRAFT_STATUS_NOT_READY: DraftStatus
DRAFT_STATUS_REFUSED: DraftStatus

class DescribeRequest(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("protocol_version", "kind", "name", "incarnation", "plan_kinds", "digest", "target_digest", "aux_layers", "raw_width", "fused_width", "projection", "vocab_size", "max_context", "max_sessions", "max_depth", "max_width", "max_nodes", "load", "gives_q")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PLAN_KINDS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TARGET_DIGEST_FIELD_NUMBER: _ClassVar[int]
    AUX_LAYERS_FIELD_NUMBER: _ClassVar[int]
    RAW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    FUSED_WIDTH_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAX_WIDTH_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    GIVES_Q_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    kind: str
    name: str
    incarnation: int
    plan_kinds: _containers.RepeatedScalarFieldContainer[PlanKind]
    digest: str
    target_digest: str
    aux_layers: _containers.RepeatedScalarFieldContainer[int]
    raw_width: int
    fused_width: int
    projection: Projection
    vocab_size: int
    max_context: int
    max_sessions: int
    max_depth: int
    max_width: int
    max_nodes: int
    load: Load
    gives_q: bool
    def __init__(self, protocol_version: _Optional[int] = ..., kind: _Optional[str] = ..., name: _Optional[str] = ..., incarnation: _Optional[int] = ..., plan_kinds: _Optional[_Iterable[_Union[PlanKind, str]]] = ..., digest: _Optional[str] = ..., target_digest: _Optional[str] = ..., aux_layers: _Optional[_Iterable[int]] = ..., raw_width: _Optional[int] = ..., fused_width: _Optional[int] = ..., projection: _Optional[_Union[Projection, _Mapping]] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., max_sessions: _Optional[int] = ..., max_depth: _Optional[int] = ..., max_width: _Optional[int] = ..., max_nodes: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., gives_q: bool = ...) -> None: ...

class Projection(_message.Message):
    __slots__ = ("fc", "norms", "norm_eps", "norm_form", "fc_bias")
    FC_FIELD_NUMBER: _ClassVar[int]
    NORMS_FIELD_NUMBER: _ClassVar[int]
    NORM_EPS_FIELD_NUMBER: _ClassVar[int]
    NORM_FORM_FIELD_NUMBER: _ClassVar[int]
    FC_BIAS_FIELD_NUMBER: _ClassVar[int]
    fc: str
    norms: _containers.RepeatedScalarFieldContainer[str]
    norm_eps: float
    norm_form: str
    fc_bias: str
    def __init__(self, fc: _Optional[str] = ..., norms: _Optional[_Iterable[str]] = ..., norm_eps: _Optional[float] = ..., norm_form: _Optional[str] = ..., fc_bias: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_sessions", "num_waiting", "busy_s", "up_s", "num_rounds")
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    UP_S_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    num_sessions: int
    num_waiting: int
    busy_s: float
    up_s: float
    num_rounds: int
    def __init__(self, num_sessions: _Optional[int] = ..., num_waiting: _Optional[int] = ..., busy_s: _Optional[float] = ..., up_s: _Optional[float] = ..., num_rounds: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("kind", "depth", "width", "nodes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    kind: PlanKind
    depth: int
    width: int
    nodes: int
    def __init__(self, kind: _Optional[_Union[PlanKind, str]] = ..., depth: _Optional[int] = ..., width: _Optional[int] = ..., nodes: _Optional[int] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("step", "remaining_us", "works")
    STEP_FIELD_NUMBER: _ClassVar[int]
    REMAINING_US_FIELD_NUMBER: _ClassVar[int]
    WORKS_FIELD_NUMBER: _ClassVar[int]
    step: int
    remaining_us: int
    works: _containers.RepeatedCompositeFieldContainer[DraftWork]
    def __init__(self, step: _Optional[int] = ..., remaining_us: _Optional[int] = ..., works: _Optional[_Iterable[_Union[DraftWork, _Mapping]]] = ...) -> None: ...

class DraftWork(_message.Message):
    __slots__ = ("session_id", "incarnation", "base_len", "token_start", "tokens", "plan", "open", "rows", "close")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    incarnation: int
    base_len: int
    token_start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    plan: Plan
    open: SessionOpen
    rows: FeatureRows
    close: bool
    def __init__(self, session_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., base_len: _Optional[int] = ..., token_start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., open: _Optional[_Union[SessionOpen, _Mapping]] = ..., rows: _Optional[_Union[FeatureRows, _Mapping]] = ..., close: bool = ...) -> None: ...

class SessionOpen(_message.Message):
    __slots__ = ("request_id", "sampling", "form", "width", "dtype")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sampling: Sampling
    form: FeatureForm
    width: int
    dtype: DType
    def __init__(self, request_id: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., form: _Optional[_Union[FeatureForm, str]] = ..., width: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "acceptance")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    acceptance: Acceptance
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., acceptance: _Optional[_Union[Acceptance, str]] = ...) -> None: ...

class FeatureRows(_message.Message):
    __slots__ = ("start", "count", "width", "dtype", "data")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    width: int
    dtype: DType
    data: bytes
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ..., width: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class DraftReply(_message.Message):
    __slots__ = ("step", "results", "queue_us", "draft_us")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    step: int
    results: _containers.RepeatedCompositeFieldContainer[DraftResult]
    queue_us: int
    draft_us: int
    def __init__(self, step: _Optional[int] = ..., results: _Optional[_Iterable[_Union[DraftResult, _Mapping]]] = ..., queue_us: _Optional[int] = ..., draft_us: _Optional[int] = ...) -> None: ...

class DraftResult(_message.Message):
    __slots__ = ("session_id", "incarnation", "base_len", "status", "held_tokens", "held_rows", "tree", "ranked", "detail", "q", "confidences")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_ROWS_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    RANKED_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    incarnation: int
    base_len: int
    status: DraftStatus
    held_tokens: int
    held_rows: int
    tree: Tree
    ranked: _containers.RepeatedCompositeFieldContainer[RankedIds]
    detail: str
    q: _containers.RepeatedCompositeFieldContainer[SparseQ]
    confidences: bytes
    def __init__(self, session_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., base_len: _Optional[int] = ..., status: _Optional[_Union[DraftStatus, str]] = ..., held_tokens: _Optional[int] = ..., held_rows: _Optional[int] = ..., tree: _Optional[_Union[Tree, _Mapping]] = ..., ranked: _Optional[_Iterable[_Union[RankedIds, _Mapping]]] = ..., detail: _Optional[str] = ..., q: _Optional[_Iterable[_Union[SparseQ, _Mapping]]] = ..., confidences: _Optional[bytes] = ...) -> None: ...

class SparseQ(_message.Message):
    __slots__ = ("ids", "weights")
    IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    weights: bytes
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., weights: _Optional[bytes] = ...) -> None: ...

class Tree(_message.Message):
    __slots__ = ("tokens", "parents", "scores")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    scores: bytes
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., scores: _Optional[bytes] = ...) -> None: ...

class RankedIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ContextPiece(_message.Message):
    __slots__ = ("session_id", "incarnation", "rows")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    incarnation: int
    rows: FeatureRows
    def __init__(self, session_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., rows: _Optional[_Union[FeatureRows, _Mapping]] = ...) -> None: ...

class ContextAck(_message.Message):
    __slots__ = ("session_id", "incarnation", "held_rows", "lost", "detail")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HELD_ROWS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    incarnation: int
    held_rows: int
    lost: bool
    detail: str
    def __init__(self, session_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., held_rows: _Optional[int] = ..., lost: bool = ..., detail: _Optional[str] = ...) -> None: ...

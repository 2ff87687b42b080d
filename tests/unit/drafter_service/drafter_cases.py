"""Works, opens and rows for drafter tests."""

import torch

from protos.exchange import DraftWork, Plan, PlanKind, SessionOpen
from protos.features import DType, FeatureForm, FeatureRows
from protos.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
CHAIN4 = Plan(kind=PlanKind.CHAIN, depth=4)
ABSORB = Plan()

_DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}


def tokens_only(params: SamplingParams = GREEDY) -> SessionOpen:
    """An open for a drafter that takes no rows."""
    return SessionOpen(request_id="r", params=params)


def opening(
    form: FeatureForm, width: int, dtype: DType = DType.FP32, params: SamplingParams = GREEDY
) -> SessionOpen:
    """An open for a drafter that takes rows."""
    return SessionOpen(request_id="r", params=params, form=form, width=width, dtype=dtype)


def rows_of(features: torch.Tensor, start: int = 0) -> FeatureRows:
    """Feature rows [start, start + N) out of a tensor [N, width]."""
    data = features.contiguous().view(torch.uint8).numpy().tobytes()
    return FeatureRows(start, len(features), features.shape[1], _DTYPES[features.dtype], data)


def work(
    incarnation: int,
    tokens: list[int],
    *,
    session_id: int = 1,
    token_start: int = 0,
    plan: Plan = CHAIN4,
    open: SessionOpen | None = None,
    rows: FeatureRows | None = None,
    close: bool = False,
) -> DraftWork:
    """A work whose tokens start at token_start."""
    return DraftWork(
        session_id=session_id,
        incarnation=incarnation,
        base_len=token_start + len(tokens),
        token_start=token_start,
        tokens=tuple(tokens),
        plan=plan,
        open=open,
        rows=rows,
        close=close,
    )

"""A tiny draft model, loaded as a service would, and texts for it."""

from pathlib import Path

import torch

from drafter_service.config import DrafterLimits, DrafterSettings
from drafter_service.draft_model.load import load_draft_model
from drafter_service.draft_model.session import ModelSession
from drafter_service.service import SessionDrafter
from protos.exchange import DraftResult, DraftWork, Plan, SessionOpen
from protos.params import SamplingParams
from tests.unit.drafter_service.drafter_cases import work

INCARNATION = 5


def load_tiny(
    directory: Path, target: Path | None = None, **limits: int
) -> SessionDrafter[ModelSession]:
    settings = DrafterSettings(
        kind="draft_model",
        checkpoint=str(directory),
        dtype="fp32",
        device="cpu",
        limits=DrafterLimits(**({"cache_mb": 8, "max_context": 1024} | limits)),
    )
    return load_draft_model(settings, target, INCARNATION)


def text(seed: int, length: int, vocab: int = 384) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


def open_work(
    tokens: list[int], params: SamplingParams, plan: Plan, session_id: int = 1
) -> DraftWork:
    opened = SessionOpen(request_id="r", params=params)
    return work(INCARNATION, tokens, plan=plan, open=opened, session_id=session_id)


def next_work(tokens: list[int], start: int, plan: Plan, session_id: int = 1) -> DraftWork:
    return work(INCARNATION, tokens[start:], token_start=start, plan=plan, session_id=session_id)


def one(drafter: SessionDrafter[ModelSession], entry: DraftWork) -> DraftResult:
    (result,) = drafter.handle([entry])
    return result

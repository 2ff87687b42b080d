"""Recorded texts of tiny targets, and the same requests live: both sides of a replay's tests."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from drafter_service.build import build_drafter
from drafter_service.config import DrafterLimits, DrafterSettings
from drafter_service.drafter import Drafter
from drafter_service.replay import Source, replay
from protos.digest import directory_digest
from protos.exchange import Plan, PlanKind
from protos.features import DType
from protos.generation import GenerationRequest, Speculation, SpeculationMode
from protos.recorded import RecordedText
from tests.fakes import small_settings
from tests.integration.block_house import BlockHouse
from verifier_service.data.recorded import RecordSettings, TextRecorder
from verifier_service.data.recording_engine import engine_around, taps_of
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.load import load_target

CHAIN4 = Plan(PlanKind.CHAIN, depth=4)
TREE = Plan(PlanKind.TREE, depth=6, width=10, nodes=31)
SMALL_TREE = Plan(PlanKind.TREE, depth=5, width=3, nodes=9)
NGRAM8 = Plan(PlanKind.CHAIN, depth=8)
LIMITS = DrafterLimits(max_context=512)
SIZES = small_settings(page_size=16, num_slots=8192, max_prefill_chunk=64, max_tokens_per_step=512)


@dataclass(frozen=True)
class World:
    """A target, and by temperature what it said."""

    target: Path
    texts: dict[float, list[RecordedText]]

    def head(self, kind: str, checkpoint: Path, name: str = "head") -> Drafter:
        """A drafter of this target."""
        settings = DrafterSettings(
            kind=kind, name=name, checkpoint=str(checkpoint), dtype="fp32", limits=LIMITS
        )
        return build_drafter(settings, self.target)


def ngram() -> Drafter:
    return build_drafter(DrafterSettings(kind="ngram", limits=LIMITS))


def make_world(
    target: Path,
    cache: Path,
    prompts: Sequence[tuple[int, ...]],
    layers: Sequence[int],
    temperatures: Sequence[float] = (0.0, 1.0),
    max_new: int = 24,
) -> World:
    """Record the texts of all prompts."""
    model = load_target(target, torch.float32, taps_of(layers))
    texts = {}
    for temperature in temperatures:
        # Few ids to draw from, so that drafts are right now and then.
        settings = RecordSettings(
            directory_digest(target), DType.FP32, temperature, top_k=4, seed=5, max_new=max_new
        )
        texts[temperature] = TextRecorder(cache, settings).texts(
            prompts, layers, lambda layers, longest: engine_around(model, layers, 4, longest)
        )
    return World(target, texts)


def with_end(target: Path, directory: Path, token: int) -> Path:
    """The same weights, but `token` ends a text."""
    shutil.copytree(target, directory)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(values | {"eos_token_id": token}))
    return directory


def house_of(world, drafters, planner=None, checkpoints=None):
    """An engine with these drafters. checkpoints: whose rows the verifier projects."""
    given = checkpoints or [None] * len(drafters)
    planner = planner or StaticPlanner(deadline_s=5.0)
    return BlockHouse(world.target, drafters, given, planner, settings=SIZES)


def live(house, texts, names, plan):
    """Counts per request of a live run that `names` draft for."""
    speculation = Speculation(SpeculationMode.FIXED, tuple(names), plan)
    first = len(house.client.runs)
    asked = [
        GenerationRequest(
            f"{first + n}", t.tokens[: t.prompt_len], t.params, speculation=speculation
        )
        for n, t in enumerate(texts)
    ]
    found = house.run(asked)
    for one, text in zip(asked, texts, strict=True):
        assert found[one.request_id] == text.tokens[text.prompt_len : text.end]
    return [numbers(house.client.last(one.request_id).counts) for one in asked]


def replayed(texts, drafters, plan, admission=None, window=64):
    """Counts per text of a replay, which leaves no session behind."""
    sources = [Source(drafter.capabilities.name, drafter) for drafter in drafters]
    counts = replay(texts, sources, plan, admission, window)
    assert all(drafter.load().num_sessions == 0 for drafter in drafters)
    return [numbers(one, live=False) for one in counts]


def numbers(counts, live=True):
    """What both kinds of counts say, under one name; the prompt's own step left out."""
    return {
        "rounds": counts.num_rounds - live,
        "committed": counts.num_output - 1 if live else counts.num_committed,
        "draft rounds": counts.num_draft_rounds,
        "drafted": counts.num_drafted,
        "accepted": counts.num_accepted,
        "by depth": counts.accepted_by_depth,
        "by source": counts.accepted_by_source,
    }

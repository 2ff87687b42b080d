"""An engine over a real tiny target with real drafters in its own process."""

from collections.abc import Sequence
from pathlib import Path

import torch

from drafter_service.drafter import Drafter
from protos.features import DType
from protos.generation import GenerationRequest
from tests.fakes import Client, small_settings
from verifier_service.engine.draft_form import TargetEnd
from verifier_service.engine.drafting import DraftExchange, ExchangeSettings
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import Planner
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.settings import EngineSettings
from verifier_service.model.load import load_target
from verifier_service.pairing import row_form, tap_for

Texts = dict[str, tuple[int, ...]]


class BlockHouse:
    """One engine; `checkpoints` beside the drafters make their rows fused, None leaves them raw."""

    def __init__(
        self,
        target_dir: Path,
        drafters: Sequence[Drafter],
        checkpoints: Sequence[Path | None],
        planner: Planner,
        dtype: torch.dtype = torch.float32,
        settings: EngineSettings | None = None,
    ) -> None:
        pairs = zip(drafters, checkpoints, strict=True)
        found = [tap_for(drafter.capabilities, checkpoint) for drafter, checkpoint in pairs]
        taps = list({tap.key: tap for tap in found if tap is not None}.values())
        target = load_target(target_dir, dtype, taps)
        rows = PagedRows(target)
        row_type = DType.FP32 if dtype is torch.float32 else DType.BF16
        forms = {tap.key: row_form(tap, target.row_width(tap.key), row_type) for tap in taps}
        facts = target.facts
        end = TargetEnd(facts.vocab_size, facts.max_context, facts.digest, forms)
        self.exchange = DraftExchange(end, rows, ExchangeSettings())
        for drafter in drafters:
            self.exchange.add_local(drafter)
        sizes = settings or small_settings(page_size=16, num_slots=4096, max_prefill_chunk=64)
        self.engine = Engine(target, self.exchange, planner, sizes, rows)
        self.client = Client(self.engine)

    def run(self, requests: Sequence[GenerationRequest]) -> Texts:
        """All requests together, to their ends."""
        for request in requests:
            self.client.submit(request)
        texts = self.client.finish()
        self.engine.check_idle()
        return texts

    def rounds(self, name: str) -> list[int]:
        """Tokens committed per step of a request, its first token left out."""
        return [len(run.ids) for run in self.client.runs[name] if run.ids][1:]

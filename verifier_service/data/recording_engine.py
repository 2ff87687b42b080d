"""An engine that records: no drafters, many requests at once, rows kept when a request leaves.

Every aux layer is a tap of its own, raw, so that the rows of any drafter can be put together later.
Knows no files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from protos.features import DType
from verifier_service.device import resolve_device
from verifier_service.engine.draft_form import TargetEnd
from verifier_service.engine.drafting import DraftExchange
from verifier_service.engine.loop import Engine
from verifier_service.engine.request import RunningRequest
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.load import load_target
from verifier_service.model.target import ROW_DTYPES
from verifier_service.step import TapSpec, Target

TORCH_TYPES: Final = {row_type: dtype for dtype, row_type in ROW_DTYPES.items()}
_SLOTS_A_REQUEST: Final = 1024
_STEP_ROWS: Final = 512


class KeptRows(PagedRows):
    """Rows beside the KV, kept when their request leaves. layers: see `taps_of`."""

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        super().__init__(target)
        self._from = target
        self._layers = tuple(layers)
        self._left: dict[str, dict[int, Tensor]] = {}

    def remove(self, key: int) -> None:
        """The request left: nobody writes into its pages before this returns."""
        request = self._requests.get(key)
        if request is not None and request.computed_len:
            name = request.request.request_id
            self._left[name] = {layer: self._read(request, layer) for layer in self._layers}
        super().remove(key)

    def take(self, request_id: str) -> dict[int, Tensor]:
        """Rows [computed positions, H] by layer of a request that left."""
        return self._left.pop(request_id)

    def _read(self, request: RunningRequest, layer: int) -> Tensor:
        tap, target = tap_key(layer), self._from
        data = bytearray(target.read_rows(tap, request.slots(request.computed_len)))
        dtype = TORCH_TYPES[target.row_dtype(tap)]
        return torch.frombuffer(data, dtype=dtype).view(-1, target.row_width(tap))


@dataclass(frozen=True, slots=True)
class Recording:
    """window: requests that may be handed over at once, so that the batch stays full."""

    engine: Engine
    rows: KeptRows
    window: int


def tap_key(layer: int) -> str:
    """The key of one layer's raw rows."""
    return f"layer-{layer}"


def taps_of(layers: Sequence[int]) -> list[TapSpec]:
    """A tap for every layer on its own."""
    return [TapSpec(tap_key(layer), (layer,)) for layer in sorted(set(layers))]


class RecordingTarget:
    """A target that is loaded when something has to be recorded, and once for equal layers."""

    def __init__(
        self,
        directory: Path,
        dtype: DType,
        batch: int,
        num_threads: int | None = None,
        device: str = "cpu",
    ) -> None:
        """batch: requests that run at once. device: auto, cpu or cuda."""
        self._directory = directory
        self._dtype = TORCH_TYPES[dtype]
        self._batch = batch
        self._num_threads = num_threads
        self._device = device
        self._layers: tuple[int, ...] = ()
        self._target: Target | None = None

    def engine(self, layers: Sequence[int], longest: int) -> Recording:
        """An engine that keeps rows of these layers. longest: tokens of one request.

        Raises CheckpointError, ConfigError.
        """
        if self._target is None or tuple(layers) != self._layers:
            self._layers = tuple(layers)
            self._target = load_target(
                self._directory,
                self._dtype,
                taps_of(layers),
                num_threads=self._num_threads,
                device=resolve_device(self._device),
            )
        return engine_around(self._target, layers, self._batch, longest)


def engine_around(target: Target, layers: Sequence[int], batch: int, longest: int) -> Recording:
    """An engine over a target that was loaded with `taps_of(layers)`."""
    facts = target.facts
    settings = EngineSettings(
        num_slots=max(batch * min(facts.max_context, _SLOTS_A_REQUEST), 2 * longest + 256),
        max_running=batch,
        max_tokens_per_step=max(_STEP_ROWS, batch),
        max_queued=2 * batch,
    )
    rows = KeptRows(target, layers)
    end = TargetEnd(facts.vocab_size, facts.max_context, facts.digest, {})
    engine = Engine(target, DraftExchange(end, rows), StaticPlanner(()), settings, rows)
    return Recording(engine, rows, settings.max_running + settings.max_queued)

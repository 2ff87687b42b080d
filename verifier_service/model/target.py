"""The target of step.py: a decoder, a pool and taps behind one `forward`.

Lays spans out, runs the decoder, keeps K, V and feature rows in their slots. Knows no request and
samples nothing. Used by one thread.
"""

import itertools
import threading
from collections.abc import Sequence

import torch

from protos.errors import ConfigError
from protos.features import DType
from verifier_service.device import ship
from verifier_service.model.decoder import Decoder, StepContext
from verifier_service.model.kv import Pool
from verifier_service.model.layout import lay_out
from verifier_service.model.step_attention import Backend, PoolAttention
from verifier_service.model.taps import Taps
from verifier_service.model.tree_parts import tree_parts
from verifier_service.step import Span, TargetFacts

ROW_DTYPES = {
    torch.float32: DType.FP32,
    torch.bfloat16: DType.BF16,
    torch.float16: DType.FP16,
}
"""Element types a target may have, with the row type each gives."""


class TransformersTarget:
    """Target (step.py) for a transformers model. `load_target` makes it."""

    def __init__(
        self,
        facts: TargetFacts,
        decoder: Decoder,
        taps: Taps,
        kv_heads: tuple[int, int],
        dtype: torch.dtype,
        multiple: int,
        device: torch.device,
        backend: Backend,
    ) -> None:
        """kv_heads: key-value heads and head_dim. multiple: rows are padded to it.

        device: where decoder and taps are, and the pool will be. backend: computes attention.
        """
        self.facts = facts
        """Constant after loading."""
        self._decoder = decoder
        self._taps = taps
        self._kv_heads = kv_heads
        self.dtype = dtype
        """Of weights, KV and logits."""
        self._multiple = multiple
        self._device = device
        self._backend = backend
        self._pool: Pool | None = None
        self._over_pool: PoolAttention | None = None
        self._num_threads = torch.get_num_threads()
        self._thread: int | None = None

    def allocate(self, num_slots: int) -> None:
        """Create the pool of `num_slots` slots, slot 0 included.

        Raises ConfigError when there is no memory for it.
        """
        heads, head_dim = self._kv_heads
        self.free()
        try:
            self._pool = Pool(
                self.facts.num_layers,
                num_slots,
                heads,
                head_dim,
                self.dtype,
                self._taps.widths,
                self._device,
            )
        except RuntimeError as error:
            # What torch's allocators raise, of the CPU and of GPUs.
            needed = num_slots * self.facts.bytes_per_slot / 2**20
            raise ConfigError(
                f"no memory on {self._device} for {num_slots} token places of KV: "
                f"{needed:.0f} MiB at {self.facts.bytes_per_slot} bytes each"
            ) from error
        self._over_pool = self._backend.over(self._pool)

    def free(self) -> None:
        """Drop the pool."""
        self._pool = self._over_pool = None

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Run one step; logits [sum num_logits, V] in span order, dtype and device of the target.

        Behind a device this returns before the step is done; whoever reads a value waits.
        """
        pool, over_pool = self._require_pool(), self._over_pool
        assert over_pool is not None
        self._settle()
        order = over_pool.order(spans)
        ordered = [spans[index] for index in order]
        layout = lay_out(ordered, self._multiple, self.dtype, self._backend.rules)
        pool.stamp(layout.slots)
        wanted = _in_span_order(layout.logit_rows, ordered, order)
        count = max(len(wanted), 1)
        padded = [*wanted, *[0] * (-(-count // self._multiple) * self._multiple - len(wanted))]
        there, logit_rows = ship((layout, torch.tensor(padded)), self._device)
        context = StepContext(there, pool, self._multiple, over_pool)
        output = self._decoder.run(context, logit_rows, self._taps.aux_layers)
        for key, rows in self._taps.rows(output.states).items():
            pool.rows[key].write(layout.slots, rows)
        return output.logits[: len(wanted)]

    def tree_parts(self, parents: Sequence[int], start: int, most: int) -> Sequence[int]:
        """Target.tree_parts: of a backend that packs trees; others take any in one."""
        rules = self._backend.rules
        packs = rules is not None and rules.tree_cost is None
        return tree_parts(parents, start, most) if packs else [0] * len(parents)

    @torch.inference_mode()
    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy KV and feature rows between slots, all layers at once. Host int64 [n] each."""
        self._require_pool().move(source, destination)

    def read_rows(self, key: str, slots: torch.Tensor) -> bytes:
        """Feature rows of these slots, little-endian, in the target's row dtype."""
        rows = self._require_pool().rows[key].read(slots)
        return rows.view(torch.uint8).numpy().tobytes()

    def row_width(self, key: str) -> int:
        """Elements of one row under this tap."""
        return self._taps.widths[key]

    def row_dtype(self, key: str) -> DType:
        """Element type of rows under this tap."""
        assert key in self._taps.widths
        return ROW_DTYPES[self.dtype]

    def _settle(self) -> None:
        """Give a thread that steps for the first time the thread count of the facts.

        OpenMP keeps that count per thread; another one would run other kernels.
        """
        if self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            torch.set_num_threads(self._num_threads)

    def _require_pool(self) -> Pool:
        assert self._pool is not None, "allocate() comes before the first step"
        return self._pool


def _in_span_order(rows: Sequence[int], ordered: Sequence[Span], order: Sequence[int]) -> list[int]:
    """Flat rows with logits of `ordered`, whose spans are numbered by `order`, by that number."""
    ends = itertools.accumulate(span.num_logits for span in ordered)
    own = {
        index: rows[end - span.num_logits : end]
        for index, span, end in zip(order, ordered, ends, strict=True)
    }
    return [row for index in sorted(own) for row in own[index]]

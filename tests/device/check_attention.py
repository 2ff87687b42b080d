"""Question: do FlexAttention and tiles compute attention's definition on this device, how fast?

Every form of scoring (windows, soft-cap, sinks) over a step of chunks, chains and trees, in float32
and bf16, against the plain loops of model/reference.py; then both backends at the sizes of decoding
and of a prompt chunk. Confounded by first calls, which compile (timed apart). Off the CPU the
kernel is compiled; on it torch's own definition runs, which says that this script works.

    python tests/device/check_attention.py [--device cuda] [--json FILE]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn.attention import flex_attention as torch_flex

from protos.errors import ConfigError
from tests.unit.model.test_attention_reference import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    SCORINGS,
    SLOTS,
    rows_by_span,
    spans_of,
)
from verifier_service.device import resolve_device, ship
from verifier_service.model.attention import Tiles
from verifier_service.model.flex import Flex, FlexBackend, compiled_flex
from verifier_service.model.heads import AttentionShape, Scoring
from verifier_service.model.kv import Pool
from verifier_service.model.layout import lay_out
from verifier_service.model.reference import attend_span
from verifier_service.step import Span

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 4e-2}
"""Of outputs of about 1. float32 products may run on tensor cores."""
SHAPE = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, 8)
LARGE = AttentionShape(32, 8, 128, 8)
"""An 8B Llama's heads."""


class Steps:
    """Steps of one shape over one pool on a device, by either backend."""

    def __init__(
        self, shape: AttentionShape, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.pool = Pool(1, num_slots, shape.num_kv_heads, shape.head_dim, dtype, {}, device)
        generator = torch.Generator().manual_seed(3)
        self.pool.kv.copy_(torch.randn(self.pool.kv.shape, generator=generator))

    def attend(
        self, spans: Sequence[Span], scoring: Scoring, flex: Flex | None
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[], None]]:
        """(queries, outputs, what computes outputs again), laid out and computed once."""
        backend = Tiles() if flex is None else FlexBackend(flex)
        layout = ship(lay_out(spans, 8, self.dtype, backend.rules), self.device)
        size = (len(layout.ids), self.shape.num_heads, self.shape.head_dim)
        generator = torch.Generator().manual_seed(4)
        queries = torch.randn(size, generator=generator).to(self.device, self.dtype)
        out = torch.zeros_like(queries)
        attention = backend.over(self.pool).attention(layout, self.shape)
        attention.bind(queries * self.shape.head_dim**-0.5, out)
        attention.attend(0, scoring)
        return queries, out, lambda: attention.attend(0, scoring)


def largest_error(
    steps: Steps, spans: Sequence[Span], options: dict[str, object], flex: Flex | None
) -> float:
    """Against the plain loops, over all rows."""
    there = {
        name: value.to(steps.device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    queries, out, _ = steps.attend(spans, Scoring(**there), flex)
    keys, values = steps.pool.kv[0].cpu().transpose(1, 2)
    slots = lay_out(spans, 8, steps.dtype).slots
    worst = 0.0
    for span, rows in zip(spans, rows_by_span(slots, list(spans)), strict=True):
        expected = attend_span(
            span, queries.cpu()[rows], keys, values, steps.shape.head_dim**-0.5, **options
        )
        worst = max(worst, float((out.cpu()[rows].double() - expected).abs().max()))
    return worst


def accuracy(device: torch.device, flex: Flex) -> dict[str, float]:
    """Largest error by dtype, backend and form of scoring."""
    found = {}
    for dtype, tolerance in TOLERANCE.items():
        steps = Steps(SHAPE, SLOTS, dtype, device)
        for name, options in SCORINGS.items():
            for backend, kernel in (("tiles", None), ("flex", flex)):
                began = time.perf_counter()
                error = largest_error(steps, spans_of(seed=4), options, kernel)
                took_s = time.perf_counter() - began
                # Not error <= ...: a NaN is no agreement.
                verdict = "" if error <= tolerance else "   TOO LARGE"
                key = f"{str(dtype)[6:]} {backend} {name}"
                print(f"{key:<32}{error:.2e}{took_s:>8.1f} s{verdict}", flush=True)
                found[key] = error
    return found


def speed(device: torch.device, flex: Flex) -> dict[str, float]:
    """Microseconds of one layer's attention."""
    num_slots = 65_536 if device.type == "cuda" else 4_096
    steps = Steps(LARGE, num_slots, torch.bfloat16, device)
    context, batch = (2_000, 16) if device.type == "cuda" else (400, 2)
    cases = {
        "one row": [_span(0, context, 1)],
        "one row of each": [_span(n, context, 1) for n in range(batch)],
        "a tree of 32": [_span(0, context, 32, branching=True)],
        "trees of 16": [_span(n, context, 16, branching=True) for n in range(batch)],
        "a chunk of 512": [_span(0, context - 400, 512)],
    }
    found = {}
    for name, spans in cases.items():
        backends = {"tiles": None, "flex": flex}
        if device.type == "cpu":
            # Its definition, uncompiled, looks at every slot: its time would say nothing.
            del backends["flex"]
        for backend, kernel in backends.items():
            _, out, again = steps.attend(spans, Scoring(), kernel)
            taken = []
            for _ in range(20 if device.type == "cuda" else 2):
                out[:1, :1, :1].tolist()
                began = time.perf_counter()
                again()
                out[:1, :1, :1].tolist()
                taken.append((time.perf_counter() - began) * 1e6)
            found[f"{backend} {name}"] = statistics.median(taken)
            print(f"{backend:<8}{name:<18}{statistics.median(taken):>10.0f} us", flush=True)
    return found


def _plain_flex() -> Flex:
    """torch's own definition of the kernel, run as it is."""
    torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    return torch_flex.flex_attention


def _span(number: int, context: int, num_rows: int, branching: bool = False) -> Span:
    """One request's span on slots of its own."""
    first = 1 + number * (context + num_rows)
    slots = torch.arange(first, first + context + num_rows)
    parents = tuple(max(row - 2, 0) if row else -1 for row in range(num_rows))
    return Span(number, (0,) * num_rows, context, slots, parents if branching else None)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all errors are small, 1 when one is not, 3 without the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args(argv)
    try:
        device = resolve_device(args.device)
    except ConfigError as error:
        print(f"attention was not checked: {error}")
        return 3
    flex = compiled_flex() if device.type == "cuda" else _plain_flex()
    with torch.inference_mode():
        errors, times = accuracy(device, flex), speed(device, flex)
    if args.json is not None:
        args.json.write_text(json.dumps({"errors": errors, "us": times}) + "\n")
    by_name = {str(dtype)[6:]: tolerance for dtype, tolerance in TOLERANCE.items()}
    faults = [key for key, error in errors.items() if not error <= by_name[key.split()[0]]]
    print(f"faults: {', '.join(faults) or 'none'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

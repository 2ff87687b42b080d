"""The door of `outrider bench engine`: options in, a table and one JSON line out.

Imports nothing that loads torch before the environment is set: OpenMP reads it once, on loading.
What is measured, and what would confound it, is in bench_engine.py.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from verifier_service.config import THREAD_WAITING

_ENVIRONMENT = THREAD_WAITING | {"HF_HUB_OFFLINE": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of `outrider bench engine`; the exit status."""
    given = _parser().parse_args(argv)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from verifier_service.bench_engine import BenchSettings, measure
    from verifier_service.device import resolve_device
    from verifier_service.model.embedded import ensure_embedded_target
    from verifier_service.model.target import ROW_DTYPES

    by_name = {row_dtype.value: dtype for dtype, row_dtype in ROW_DTYPES.items()}
    result = measure(
        BenchSettings(
            model=given.model or ensure_embedded_target(),
            num_threads=given.threads,
            dtype=by_name[given.dtype],
            prompts=given.prompts,
            contexts=tuple(given.contexts),
            repeats=given.repeats,
            device=resolve_device(given.device),
        )
    )
    _print_table(result)
    line = json.dumps(result)
    print(line)
    if given.json:
        given.json.write_text(line + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider bench engine", description=__doc__)
    parser.add_argument("--json", type=Path, help="write one JSON object to this file")
    parser.add_argument("--prompts", type=Path, help="JSONL with `turns` or `q`")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", type=Path, help="a directory; default: the embedded target")
    parser.add_argument("--dtype", choices=("bf16", "fp32", "fp16"), default="bf16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--contexts", type=int, nargs="+", default=[200, 1000])
    return parser


def _print_table(result: dict[str, object]) -> None:
    def rows(figures: object, context: str) -> None:
        assert isinstance(figures, dict)
        for name, figure in figures.items():
            print(
                f"{context:>8}  {name:<24}{figure['ratio']:>7.2f}"
                f"   {figure['min']:.2f} .. {figure['max']:.2f}"
                f"   {figure['variant_ms']:>8.1f}   {figure['baseline_ms']:>8.1f}"
            )

    print(" context  figure                    ratio   spread      variant ms  baseline ms")
    plain, steps = result["plain"], result["steps"]
    rows(result["batch"], "")
    assert isinstance(plain, dict)
    assert isinstance(steps, dict)
    for context, figure in plain.items():
        rows({"plain_over_transformers": figure}, context)
    for context, figures in steps.items():
        rows(figures, context)


if __name__ == "__main__":
    sys.exit(main())

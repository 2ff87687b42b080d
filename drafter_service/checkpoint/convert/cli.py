"""`outrider convert SOURCE DEST --to LAYOUT`: a checkpoint in the layout another engine reads.

Layouts: `speculators` (vLLM), `sglang` (SpecForge's for EAGLE-3 and DSpark, z-lab's for DFlash) and
`safetensors` (the same layout, `.bin` files made safe). Weights are copied bit for bit; what a
layout cannot say is refused by name, never left out. The result is read back before it is kept.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from drafter_service.checkpoint.convert import blocks, eagle3
from drafter_service.checkpoint.convert.pickled import has_only_pickles, read_pickled
from drafter_service.checkpoint.convert.source import Converted, Source, read_source
from drafter_service.checkpoint.describe import describe, target_layers
from drafter_service.checkpoint.safetensors_header import read_json
from drafter_service.eagle3.config import Eagle3Config
from protos.errors import CheckpointError, ConfigError, OutriderError

SPECULATORS, SGLANG, SAFETENSORS = "speculators", "sglang", "safetensors"
_BLOCKS = ("dflash", "dspark")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 when DEST was written."""
    given = _parser().parse_args(argv)
    try:
        notes = convert(
            given.source,
            given.dest,
            given.to,
            target_dir=given.target,
            variant=given.variant,
            verifier_name=given.verifier_name,
        )
    except OutriderError as error:
        print(f"outrider convert: {error}", file=sys.stderr)
        return 1
    for note in notes:
        print(f"note: {note}")
    print(f"{given.dest} written in the {given.to} layout")
    return 0


def convert(
    source: Path,
    dest: Path,
    layout: str,
    target_dir: Path | None = None,
    variant: str = "",
    verifier_name: str = "",
) -> tuple[str, ...]:
    """Write `source` to the new directory `dest`; what its user should know.

    target_dir: needed by files that do not name their aux layers. Raises CheckpointError or
    ConfigError; `dest` is then not there.
    """
    if not source.is_dir():
        raise ConfigError(f"{source.name!r} is no directory")
    if dest.exists():
        raise ConfigError(f"{dest.name!r} exists already")
    num_layers = None if target_dir is None else target_layers(target_dir)
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dest.parent, prefix=f".{dest.name}-") as scratch:
        folder, safe = Path(scratch), source
        if has_only_pickles(source):
            safe = folder / "safe"
            config = read_json(source / "config.json")
            write_checkpoint(safe, Converted(config, read_pickled(source)))
        elif layout == SAFETENSORS:
            raise ConfigError(f"{source.name!r} holds safetensors already")
        made = safe
        notes: tuple[str, ...] = ()
        if layout != SAFETENSORS:
            opened = read_source(safe, num_layers, variant)
            converted = _convert(opened, layout, num_layers, verifier_name)
            made, notes = folder / "made", converted.notes
            write_checkpoint(made, converted)
            _read_back(opened, made, num_layers)
        shutil.move(made, dest)
    return notes


def write_checkpoint(directory: Path, converted: Converted) -> None:
    """config.json and model.safetensors in a new directory."""
    directory.mkdir(parents=True)
    weights = directory / "model.safetensors"
    save_file(_distinct(converted.tensors), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes files for their owner alone
    text = json.dumps(converted.config, indent=2, sort_keys=True)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def _convert(
    source: Source, layout: str, num_target_layers: int | None, verifier_name: str
) -> Converted:
    kind = source.described.kind
    if kind not in ("eagle3", "peagle", *_BLOCKS):
        raise CheckpointError(f"a checkpoint of kind {kind} has no {layout} layout")
    if kind in _BLOCKS:
        if layout == SPECULATORS:
            return blocks.to_speculators(source, verifier_name)
        return blocks.to_sglang(source, num_target_layers)
    if layout == SPECULATORS:
        return eagle3.to_speculators(source, verifier_name)
    return eagle3.to_specforge(source)


def _read_back(source: Source, made: Path, num_target_layers: int | None) -> None:
    """Raises CheckpointError unless our own reader finds the same drafter in what was written."""
    written = describe(made, num_target_layers)
    readings: list[Any] = [variant.config for variant in written.variants] or [written.config]
    if _comparable(source.described.config) not in [_comparable(config) for config in readings]:
        raise CheckpointError(
            "the layout does not hold all facts of this drafter: read back as "
            f"{_difference(source.described.config, readings[0])}"
        )


def _comparable(config: object) -> object:
    """With one layer, doubled input says nothing: the first layer always has it."""
    if isinstance(config, Eagle3Config) and config.num_layers == 1:
        return replace(config, doubled_layers=False)
    return config


def _difference(wanted: object, found: object) -> str:
    names = getattr(type(wanted), "__dataclass_fields__", {})
    changed = [name for name in names if getattr(wanted, name) != getattr(found, name, None)]
    return ", ".join(f"{n} {getattr(found, n, None)!r}" for n in changed)


def _distinct(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser("outrider convert", description=summary)
    parser.add_argument("source", type=Path, help="directory of a checkpoint that outrider reads")
    parser.add_argument("dest", type=Path, help="directory to write; must not exist")
    parser.add_argument("--to", required=True, choices=(SPECULATORS, SGLANG, SAFETENSORS))
    parser.add_argument("--target", type=Path, help="directory of the target, for its depth")
    parser.add_argument("--variant", default="", help="a reading of files that leave one open")
    parser.add_argument("--verifier-name", default="", help="the target's name, for vLLM")
    return parser

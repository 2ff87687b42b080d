"""`outrider train KIND`: record the target's states, train a drafter, write its checkpoint.

    outrider train eagle3 --config configs/train/eagle3.yaml --output heads/my-head

Every stage continues where it was stopped, so the same command may simply be given again.
`--stage` runs one of them alone. Knows argv and stdout; the work is in `run` and `recording`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from drafter_service.checkpoint.target import read_target_weights
from drafter_service.training.data import parts
from drafter_service.training.provenance import provenance, sha256_of
from drafter_service.training.recipe import RECIPES, family_of
from drafter_service.training.recording import write_features
from drafter_service.training.run import Run
from drafter_service.training.settings import TrainSettings, load_settings
from protos.errors import OutriderError

STAGES = ("all", "features", "train", "export")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 with the reason on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    try:
        settings_type = family_of(arguments.kind).settings_type
        settings = load_settings(arguments.config, settings_type, arguments.changes)
        torch.set_num_threads(settings.threads)
        if arguments.stage in ("all", "features"):
            record_target(settings)
        if arguments.stage in ("all", "train"):
            run = Run(arguments.kind, settings, _say)
            started = run.start(arguments.warm_from)
            run.extra.update(_started_from(arguments.warm_from))
            run.train(started)
        if arguments.stage in ("all", "export") and arguments.output is not None:
            export(arguments.kind, settings, arguments.output, arguments.name, words)
    except (OutriderError, OSError) as error:
        print(f"outrider train: {error}", file=sys.stderr)
        return 1
    return 0


def record_target(settings: TrainSettings) -> None:
    """Feature shards of all recorded answers; whole shards are kept."""
    model = AutoModelForCausalLM.from_pretrained(settings.target, dtype=torch.bfloat16).eval()
    lm_head = read_target_weights(settings.target).lm_head
    for part in parts(settings):
        layers = settings.record_layers
        write_features(model.model, lm_head, part.records, layers, part.features, _say)


def export(
    kind: str, settings: TrainSettings, output: Path, name: str, command: Sequence[str]
) -> None:
    """The best weights of the run, averaged, with their held-out figures."""
    run = Run(kind, settings, _say)
    run.start()
    net, position = run.best_net()
    held_out = run.check(net, position)
    origin = json.loads(run.extra["origin"]) if "origin" in run.extra else None
    words = ["outrider", "train", *command]
    told = provenance(words, settings, position, run.recipe.facts, held_out, origin)
    run.recipe.write(output, net, name, told)
    _say(f"wrote {output}")


def _started_from(warm_from: Path | None) -> dict[str, str]:
    """What a warm start began with, for provenance: digest, and its own provenance if any."""
    if warm_from is None:
        return {}
    weights = warm_from / "model.safetensors" if warm_from.is_dir() else warm_from
    origin: dict[str, Any] = {"name": warm_from.name, "weights_sha256": sha256_of(weights)}
    told = warm_from / "provenance.json"
    if warm_from.is_dir() and told.exists():
        earlier = json.loads(told.read_text())
        kept = ("commit", "data", "trained", "started_from")
        origin |= {key: earlier[key] for key in kept if key in earlier}
    return {"origin": json.dumps(origin)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider train", description=__doc__)
    parser.add_argument("kind", choices=sorted(RECIPES), help="family to train")
    parser.add_argument("--config", type=Path, required=True, help="training settings (YAML)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="changes",
        metavar="FIELD=VALUE",
        help="change a setting, e.g. num_steps=5 or head.aux_layers=[14]; YAML, may be repeated",
    )
    parser.add_argument("--output", type=Path, help="directory of the checkpoint to write")
    parser.add_argument("--stage", choices=STAGES, default="all", help="run one stage only")
    parser.add_argument("--name", default="", help="target's name, noted in the checkpoint")
    parser.add_argument(
        "--warm-from",
        type=Path,
        help="state file of another run, or a checkpoint, to take first weights from",
    )
    return parser


def _say(line: str) -> None:
    print(line, flush=True)

"""`outrider train eagle3`: record the target's states, train a head, write the checkpoint.

    outrider train eagle3 --config configs/train/eagle3.yaml --output heads/my-head

Every stage continues where it was stopped, so the same command may simply be given again.
`--stage` runs one of them alone. Knows argv and stdout; the work is in `run` and `features`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from drafter_service.checkpoint.target import read_target_weights
from drafter_service.checkpoint.writer import write_eagle3
from drafter_service.training.choices import write_choices
from drafter_service.training.data import CHOICES_NAME, parts
from drafter_service.training.features import FeatureStore, write_features
from drafter_service.training.provenance import provenance
from drafter_service.training.run import Run
from drafter_service.training.settings import TrainSettings, load_settings
from protos.errors import OutriderError

STAGES = ("all", "features", "train", "export")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 with the reason on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    try:
        settings = load_settings(arguments.config)
        torch.set_num_threads(settings.threads)
        if arguments.stage in ("all", "features"):
            record_target(settings)
        if arguments.stage in ("all", "train"):
            run = Run(settings, _say)
            run.train(run.start(arguments.warm_from))
        if arguments.stage in ("all", "export") and arguments.output is not None:
            export(settings, arguments.output, arguments.name, words)
    except (OutriderError, OSError) as error:
        print(f"outrider train: {error}", file=sys.stderr)
        return 1
    return 0


def record_target(settings: TrainSettings) -> None:
    """Feature shards and choices of all recorded answers; done parts are kept."""
    model = AutoModelForCausalLM.from_pretrained(settings.target, dtype=torch.bfloat16).eval()
    lm_head = read_target_weights(settings.target).lm_head
    for part in parts(settings):
        write_features(model.model, part.records, settings.record_layers, part.features, _say)
        path = part.features / CHOICES_NAME
        if not path.exists():
            write_choices(part.records, FeatureStore(part.features), lm_head, path, _say)


def export(settings: TrainSettings, output: Path, name: str, command: Sequence[str]) -> None:
    """The averaged weights of the run's last checkpoint, with their held-out figures."""
    run = Run(settings, _say)
    started = run.start()
    head = started.trainer.averaged_head()
    held_out = run.check(head, started.position)
    coverage = run.vocab_coverage
    told = provenance(
        ["outrider", "train", *command], settings, started.position, coverage, held_out
    )
    write_eagle3(output, head, name, provenance=told)
    _say(f"wrote {output}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider train", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    eagle3 = kinds.add_parser("eagle3", help="train an EAGLE-3 head for a target")
    eagle3.add_argument("--config", type=Path, required=True, help="training settings (YAML)")
    eagle3.add_argument("--output", type=Path, help="directory of the checkpoint to write")
    eagle3.add_argument("--stage", choices=STAGES, default="all", help="run one stage only")
    eagle3.add_argument("--name", default="", help="target's name, noted in the checkpoint")
    eagle3.add_argument(
        "--warm-from",
        type=Path,
        help="state file of another run, or a checkpoint, to take first weights from",
    )
    return parser


def _say(line: str) -> None:
    print(line, flush=True)

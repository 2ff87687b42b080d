"""`outrider train KIND`: record the target's states, train a drafter, write its checkpoint.

    outrider train eagle3 --config configs/train/eagle3.yaml --output heads/my-head

Every stage continues where it was stopped, so the same command may simply be given again; Ctrl-C
ends training after the update in hand. `--stage` runs one stage alone. Knows argv and stdout; the
work is in `job` and `recording`, and who trains is the caller's choice.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from drafter_service.checkpoint.target import read_target_weights
from drafter_service.training.data import parts
from drafter_service.training.job import Job, export_job, run_job
from drafter_service.training.recipe import RECIPES, family_of
from drafter_service.training.recording import write_features
from drafter_service.training.settings import TrainSettings, load_settings
from drafter_service.training.stopping import stop_wish
from protos.errors import OutriderError

DESCRIPTION = """Record the target's states, train a drafter, write its checkpoint. Every stage
goes on where it was stopped, so the same command may simply be given again; Ctrl-C ends training
after the update in hand."""
STAGES = ("all", "features", "train", "export")
STOPPED = 130
"""Exit status after Ctrl-C, as shells have it."""

Say = Callable[[str], None]
TrainJob = Callable[[Job, Say], bool]
"""Trains a job; False when it was stopped before its end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 with the reason on stderr, or 130 when stopped."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_command(train_parser().parse_args(words), words, train_here)


def run_command(arguments: argparse.Namespace, words: Sequence[str], train: TrainJob) -> int:
    """The stages asked for, training done by `train`; the exit status."""
    try:
        return 0 if _run_stages(arguments, words, train) else STOPPED
    except (OutriderError, OSError) as error:
        print(f"outrider train: {error}", file=sys.stderr)
        return 1


def _run_stages(arguments: argparse.Namespace, words: Sequence[str], train: TrainJob) -> bool:
    settings_type = family_of(arguments.kind).settings_type
    settings = load_settings(arguments.config, settings_type, arguments.changes)
    job = Job(arguments.kind, settings, ("outrider", "train", *words), arguments.warm_from)
    torch.set_num_threads(settings.threads)
    if arguments.stage in ("all", "features"):
        record_target(settings)
    if arguments.stage in ("all", "train") and not train(job, _say):
        return False
    if arguments.stage in ("all", "export") and arguments.output is not None:
        export_job(job, arguments.output, arguments.name, _say)
    return True


def train_here(job: Job, say: Say) -> bool:
    """In this process, alone."""
    with stop_wish() as wish:
        return run_job(job, say, stopped=wish.is_set)


def record_target(settings: TrainSettings) -> None:
    """Feature shards of all recorded answers; whole shards are kept."""
    model = AutoModelForCausalLM.from_pretrained(settings.target, dtype=torch.bfloat16).eval()
    lm_head = read_target_weights(settings.target).lm_head
    for part in parts(settings):
        layers = settings.record_layers
        write_features(model.model, lm_head, part.records, layers, part.features, _say)


def train_parser() -> argparse.ArgumentParser:
    """The arguments of a training on this machine; a launcher adds its own."""
    parser = argparse.ArgumentParser(prog="outrider train", description=DESCRIPTION)
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

"""`outrider train`: in this process or, with `--workers`, as a Ray Train job.

    outrider train eagle3 --config FILE --output DIR --workers 2 --address auto

States are recorded and the checkpoint is written here, where the command was given; workers train.
Knows no recipes; Ray is imported only when it is asked for.
"""

import argparse
import sys
from collections.abc import Sequence

from drafter_service.training.cli import TrainJob, run_command, train_here, train_parser
from protos.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = train_parser()
    _add_cluster(parser)
    arguments = parser.parse_args(words)
    return run_command(arguments, words, _trainer_of(arguments))


def _trainer_of(arguments: argparse.Namespace) -> TrainJob:
    """Who trains. Raises ConfigError for options that cannot be, before anything is done."""
    if arguments.workers is None:
        names = ("address", "cpus_per_worker", "max_failures")
        given = [name for name in names if getattr(arguments, name) is not None]
        if given:
            words = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"{words} without --workers: nothing to place")
        return train_here

    from cluster.tools.train_jobs import WorkerGroup, require_ray_train, train_on_ray

    group = WorkerGroup(
        count=arguments.workers,
        num_cpus=arguments.cpus_per_worker,
        max_failures=3 if arguments.max_failures is None else arguments.max_failures,
    )
    require_ray_train()
    return lambda job, say: train_on_ray(job, group, arguments.address, say)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with Ray Train (needs outrider[train])")
    group.add_argument(
        "--workers", type=int, help="processes that share every update; without: this process alone"
    )
    group.add_argument(
        "--address", help="of a Ray cluster; `auto`: the running one; without: a new one here"
    )
    group.add_argument(
        "--cpus-per-worker", type=float, help="reserved of Ray; default: the setting `threads`"
    )
    group.add_argument(
        "--max-failures", type=int, help="restarts after lost workers, -1 without end; default 3"
    )

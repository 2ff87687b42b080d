"""`outrider data`: on one engine here or, with `--address`, as a Ray Data job over replicas.

Both write the same file: a run may begin here and go on there. Knows no formats and no engines.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from protos.errors import ConfigError
from verifier_service.data.chat import Chat
from verifier_service.data.cli import (
    data_parser,
    engine_choice,
    openings_of,
    rules_of,
    run_here,
    sampler_of,
    say_answers,
    say_turns,
)
from verifier_service.data.divided import (
    answers_work,
    regenerate_divided,
    synthesise_divided,
    turns_work,
)
from verifier_service.data.engines import EngineChoice
from verifier_service.data.meter import Meter
from verifier_service.data.prompt_files import read_prompts
from verifier_service.data.synthesise import TurnsRun

if TYPE_CHECKING:
    from cluster.tools.data_jobs import Replicas


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parsers = data_parser()
    for parser in (parsers.regenerate, parsers.synthesise):
        _add_cluster(parser)
    args = parsers.parser.parse_args(argv)
    if getattr(args, "address", None) is None:
        return run_here(args)
    return _synthesise(args) if args.command == "synthesise" else _regenerate(args)


def _regenerate(args: argparse.Namespace) -> int:
    choice, replicas, sampler = _choice_of(args), _replicas_of(args), sampler_of(args)
    prompts = read_prompts(args.prompts, args.limit)
    target = choice.summarise()
    chat = Chat(choice.directory())
    work = answers_work(target, prompts.conversations, sampler, args.block)
    meter = Meter("conversations")

    from cluster.tools.data_jobs import ray_compute

    with ray_compute(args.address, choice, work, replicas) as compute:
        totals = regenerate_divided(
            chat, target, prompts.conversations, work, args.out, compute, meter.report
        )
    meter.close()
    say_answers(args.out, totals, prompts)
    return 0


def _synthesise(args: argparse.Namespace) -> int:
    choice, replicas = _choice_of(args), _replicas_of(args)
    sampler, openings = sampler_of(args), openings_of(args)
    target = choice.summarise()
    chat = Chat(choice.directory())
    run = TurnsRun(args.out, chat, target.ends, target.digest, sampler, openings, rules_of(args))
    work = turns_work(run, sampler, openings, args.block)
    meter = Meter("turns")

    from cluster.tools.data_jobs import ray_compute

    with ray_compute(args.address, choice, work, replicas) as compute:
        synthesise_divided(run, target, work, args.count, compute, meter.report)
    meter.close()
    say_turns(run)
    return 0


def _choice_of(args: argparse.Namespace) -> EngineChoice:
    """As here, but a replica has as many threads as it reserves CPUs."""
    if args.device == "cuda" and not args.gpus_per_replica:
        raise ConfigError("--device cuda needs --gpus-per-replica")
    if args.threads is None:
        args.threads = max(int(args.cpus_per_replica), 1)
    return engine_choice(args)


def _replicas_of(args: argparse.Namespace) -> "Replicas":
    from cluster.tools.data_jobs import Replicas

    if args.block < 1:
        raise ConfigError(f"--block must be at least 1, not {args.block}")
    return Replicas(args.replicas, args.cpus_per_replica, args.gpus_per_replica)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on a cluster, as a Ray Data job (needs outrider[data])")
    group.add_argument(
        "--address", help="of a Ray cluster; `auto`: the running one; `local`: a new one here"
    )
    group.add_argument("--replicas", type=int, default=1, help="engines")
    group.add_argument("--cpus-per-replica", type=float, default=1.0)
    group.add_argument("--gpus-per-replica", type=float, default=0.0)
    group.add_argument("--block", type=int, default=128, help="conversations or candidates a part")

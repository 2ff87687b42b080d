"""What a launcher is given and every worker of a run is told; and the two things done with it.

Knows neither argv nor processes. Invariant: `run_job` gives the same state file wherever it runs,
and can be called again after any failure.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from drafter_service.training.continuing import check_same_data
from drafter_service.training.facts_file import read_facts
from drafter_service.training.provenance import Origin, Start, add_start, run_facts
from drafter_service.training.run import Run
from drafter_service.training.settings import TrainSettings
from drafter_service.training.workers import Alone, Workers
from protos.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Job:
    """One training run. settings: of the kind's type; command: for provenance, as it was given."""

    kind: str
    settings: TrainSettings
    command: tuple[str, ...]
    warm_from: Path | None = None


def run_job(
    job: Job,
    report: Callable[[str], None],
    workers: Workers | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Train from wherever the run stands until its end (True) or until `stopped` (False).

    Raises ConfigError when the run was begun with other settings or other data.
    """
    workers = Alone() if workers is None else workers
    run = Run(job.kind, job.settings, report, workers)
    started = run.start(job.warm_from)
    if workers.rank == 0:
        start = Start(job.command, workers.count, asdict(started.position)).facts()
        facts = _facts_of(job, run, start, started.origin)
        if started.position.update:
            check_same_data(read_facts(job.settings.run).get("data"), facts["data"])
        add_start(job.settings.run, facts)
    return run.train(started, stopped) is not None


def export_job(job: Job, output: Path, name: str, report: Callable[[str], None]) -> None:
    """Write the averaged weights of the run's best check, with their held-out figures.

    Raises ConfigError before the first check, and where the settings are not the run's.
    """
    run = Run(job.kind, job.settings, report)
    if not run.has_best:
        raise ConfigError(f"nothing to export: {job.settings.run.name} holds no checked weights")
    started = run.start()
    net, position = run.best_net()
    held_out = run.recipe.check(net, run.data)
    start = Start(job.command, 1, asdict(position)).facts()
    facts = _facts_of(job, run, start, started.origin)
    told = {
        **{key: start[key] for key in ("command", "commit", "commit_has_changes", "versions")},
        **facts,
        "starts": read_facts(job.settings.run).get("starts", []),
        "trained": asdict(position),
        "held_out": {"tau": held_out.score, **held_out.figures},
        "embedding": "left out; it is the target's, frozen in training, and readers share it",
        "weights": "running average of the float32 master weights, rounded to bfloat16",
    }
    run.recipe.write(output, net, name, told)
    report(f"wrote {output}")


def _facts_of(
    job: Job, run: Run, start: dict[str, object], origin: Origin | None
) -> dict[str, object]:
    records, split = run.data.records, run.data.split
    sizes = {
        "train_answers": len(split.train),
        "train_answer_tokens": sum(records[index].answer_len for index in split.train),
        "held_out_answers": len(split.held_out),
    }
    return run_facts(job.kind, job.settings, sizes, run.recipe.facts, [start], origin)

"""A training run on Ray Train: one process per worker, joined by torch's process group.

    here: fit() in a thread     Board (actor)      workers: run_job(job)
    prints lines       <------- lines <----------- what the first one reports
    Ctrl-C             -------> wish to stop ----> asked before every update

Workers keep their state in the run's directory, not in Ray's checkpoints: after a lost worker the
group is started again and goes on from there, as the same command would. Knows no recipe, no torch.
Invariant: whatever ends the command, no worker outlives it.
"""

import logging
import math
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cluster.tools.serving import prepare_environment
from drafter_service.training.cli import Say
from drafter_service.training.job import Job
from drafter_service.training.stopping import stop_wish
from protos.errors import ConfigError, OutriderError
from verifier_service.config import THREAD_WAITING

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

_STORE_BYTES: Final = 100 * 2**20
_LOOK_EVERY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """How many workers, what each reserves, and how often the group may be started again.

    num_cpus: of each worker; None: as many as it has threads.
    """

    count: int
    num_cpus: float | None = None
    max_failures: int = 3

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"--workers must be at least 1, not {self.count}")
        if (self.num_cpus or 0.0) < 0:
            raise ConfigError(f"--cpus-per-worker cannot be negative: {self.num_cpus:g}")
        if self.max_failures < -1:
            raise ConfigError(f"--max-failures is a number or -1, not {self.max_failures}")

    def resources(self, num_threads: int) -> dict[str, float]:
        """Of one worker, by Ray's names."""
        cpus = float(num_threads) if self.num_cpus is None else self.num_cpus
        return {"CPU": cpus}


@dataclass(frozen=True, slots=True)
class News:
    """What the board has to tell. error: of a worker whose job cannot be done as it is."""

    lines: tuple[str, ...]
    has_begun: bool
    error: str | None
    is_finished: bool | None


class Board:
    """Where workers leave lines and read wishes; an actor, since they live in other processes."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._wants_stop = self._has_begun = False
        self._error: str | None = None
        self._is_finished: bool | None = None

    def say(self, line: str) -> None:
        """A line for whoever gave the command."""
        self._lines.append(line)

    def begin(self) -> None:
        """A worker has started."""
        self._has_begun = True

    def end(self, is_finished: bool) -> None:
        """The run is over: at its end, or where it was stopped."""
        self._is_finished = is_finished

    def fail(self, error: str) -> None:
        """A worker found that trying again cannot help."""
        self._error = error

    def stop(self) -> None:
        """Workers shall stop after the update in hand."""
        self._wants_stop = True

    def wants_stop(self) -> bool:
        """Whether they shall."""
        return self._wants_stop

    def news(self) -> News:
        """Lines since the last call, and how things stand."""
        lines, self._lines = tuple(self._lines), []
        return News(lines, self._has_begun, self._error, self._is_finished)


def train_on_ray(job: Job, group: WorkerGroup, address: str | None, say: Say) -> bool:
    """Train with a group of workers; False when stopped before the end.

    Raises ConfigError when Ray Train is not installed, the cluster cannot be joined or the job is
    wrong, and OutriderError when workers failed too often.
    """
    require_ray_train()
    resources = group.resources(job.settings.threads)
    with _joined(address, math.ceil(group.count * resources["CPU"])):
        import ray

        _say_room(group.count, resources, say)
        board = ray.remote(num_cpus=0)(Board).remote()
        fit = _Fit(_trainer(_with_whole_paths(job), board, group))
        with stop_wish() as wish:
            fit.start()
            return _watch(fit, board, wish, say)


def _watch(fit: "_Fit", board: Any, wish: threading.Event, say: Say) -> bool:  # noqa: ANN401
    """Until the workers are through, or cannot be helped."""
    import ray

    is_told = False
    while True:
        fit.join(_LOOK_EVERY_S)
        is_over = not fit.is_alive()
        try:
            news: News = ray.get(board.news.remote())
        except ray.exceptions.RayError as error:
            raise OutriderError(f"the cluster is gone: {_reason(error)}") from error
        for line in news.lines:
            say(line)
        if news.error is not None:
            raise ConfigError(news.error)
        if is_over:
            break
        if wish.is_set() and not is_told:
            say("stopping after the update in hand; once more to stop at once")
            board.stop.remote()
            is_told = True
        if is_told and not news.has_begun:
            return False
    if fit.error is not None:
        raise OutriderError(f"workers failed too often: {_reason(fit.error)}") from fit.error
    return news.is_finished is True


class _Fit(threading.Thread):
    """`fit()` outside of the main thread, where it would take Ctrl-C as a wish to abort."""

    def __init__(self, trainer: "TorchTrainer") -> None:
        super().__init__(daemon=True)
        self._trainer = trainer
        self.error: Exception | None = None

    def run(self) -> None:
        import ray
        from ray.train import TrainingFailedError

        try:
            self._trainer.fit()
        except (TrainingFailedError, ray.exceptions.RayError) as error:
            self.error = error


def _work(config: dict[str, Any]) -> None:
    """What a worker does, in its own process, with the process group already set up."""
    import ray

    from drafter_service.training.job import run_job
    from drafter_service.training.workers import ProcessGroup

    job, board = config["job"], config["board"]
    workers = ProcessGroup()
    ray.get(board.begin.remote())
    try:
        is_finished = run_job(
            job,
            lambda line: ray.get(board.say.remote(line)),
            workers,
            lambda: bool(ray.get(board.wants_stop.remote())),
        )
    except ConfigError as error:
        ray.get(board.fail.remote(str(error)))
        raise
    if workers.rank == 0:
        ray.get(board.end.remote(is_finished))


def _trainer(job: Job, board: Any, group: WorkerGroup) -> "TorchTrainer":  # noqa: ANN401
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.config import FailureConfig, LoggingConfig, RunConfig, ScalingConfig

    threads = str(job.settings.threads)
    environment = {**THREAD_WAITING, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return TorchTrainer(
        _work,
        train_loop_config={"job": job, "board": board},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=group.count,
            resources_per_worker=group.resources(job.settings.threads),
        ),
        run_config=RunConfig(  # type: ignore[arg-type]  # ray.train's own, whatever mypy resolves
            name="ray",
            storage_path=str(job.settings.run),
            failure_config=FailureConfig(max_failures=group.max_failures),
            worker_runtime_env={"env_vars": environment},
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )


def _with_whole_paths(job: Job) -> Job:
    """Workers may have another working directory than this process."""
    settings = job.settings
    whole = {
        name: value.expanduser().absolute() for name, value in settings if isinstance(value, Path)
    }
    whole_answers = tuple(path.expanduser().absolute() for path in settings.answers)
    changed = settings.model_copy(update={**whole, "answers": whole_answers})
    warm_from = None if job.warm_from is None else job.warm_from.expanduser().absolute()
    return replace(job, settings=changed, warm_from=warm_from)


def require_ray_train() -> None:
    """Raises ConfigError where Ray Train cannot be imported."""
    prepare_environment()
    # Paths are whole, so workers need no directory of their own.
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    try:
        import ray.train.torch  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--workers needs Ray Train ({error}); pip install 'outrider[train]'"
        ) from error


@contextmanager
def _joined(address: str | None, num_cpus: int) -> Iterator[None]:
    """Connected to a cluster: the one at `address`, or a new one of at least so many CPUs."""
    import ray

    try:
        if address is None or address == "local":
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, num_cpus),
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no Ray cluster at {address}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _say_room(num_workers: int, resources: Mapping[str, float], say: Say) -> None:
    """Say what is missing: a cluster that grows may still get it, another never will."""
    import ray

    found = ray.cluster_resources()  # type: ignore[no-untyped-call]  # Ray is not annotated there
    for name, each in resources.items():
        needed, there = num_workers * each, found.get(name, 0.0)
        if there < needed:
            say(f"the workers need {needed:g} {name}, the cluster has {there:g}: waiting for more")


def _reason(error: Exception) -> str:
    """The last line that says something, of a worker's own failure where there is one."""
    failures = getattr(error, "worker_failures", None)
    if isinstance(failures, dict) and failures:
        error = failures[min(failures)]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

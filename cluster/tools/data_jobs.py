"""Data runs on Ray Data: prompts as a Dataset, an actor pool of engines, parts back one by one.

    Dataset (a row an item, a block a part) -> map_batches(DataReplica) -> packed parts

Knows neither files nor formats. Ray restarts a replica that died and computes its block again.
Invariant: a batch is one whole block, so a part is the same wherever and however often it is made.
"""

import logging
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from cluster.tools.serving import prepare_environment
from protos.errors import ConfigError, OutriderError
from verifier_service.config import THREAD_WAITING
from verifier_service.data.block_order import Compute
from verifier_service.data.engines import EngineChoice
from verifier_service.data.worker import Item, Work, Worker

if TYPE_CHECKING:
    import pyarrow
    import ray.data

_STORE_BYTES: Final = 200 * 2**20
"""Object store of a cluster of our own: rows of text and ids are small."""


_AHEAD: Final = 2
"""Blocks that a replica has or waits with: the next one is there when one is done."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """The actor pool: how many engines, and what each reserves."""

    count: int
    num_cpus: float
    num_gpus: float

    def __post_init__(self) -> None:
        if self.count < 1 or self.num_cpus < 0 or self.num_gpus < 0:
            raise ConfigError("a run needs at least one replica, and no negative resources")


class DataReplica:
    """The callable class of the pool: one engine, loaded once."""

    def __init__(self, choice: EngineChoice, work: Work) -> None:
        self._worker = Worker(choice, work)

    def __call__(self, batch: "pyarrow.Table") -> "pyarrow.Table":
        """Rows of items in (index, text), rows of parts out (block, part)."""
        import pyarrow

        items = list(zip(batch["index"].to_pylist(), batch["text"].to_pylist(), strict=True))
        blocks, parts = zip(*self._worker.compute(items), strict=True)
        return pyarrow.table({"block": list(blocks), "part": list(parts)})


@contextmanager
def ray_compute(
    address: str, choice: EngineChoice, work: Work, replicas: Replicas
) -> Iterator[Compute]:
    """What computes blocks on the cluster at `address`, connected for as long as needed.

    Raises ConfigError when Ray Data is not installed, or the cluster cannot be joined or can never
    place a replica.
    """
    prepare_environment()
    _require_ray_data()
    import ray

    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.WARNING,
            object_store_memory=_STORE_BYTES if address == "local" else None,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no Ray cluster at {address}: {error}") from error
    try:
        _check_room(replicas)

        def compute(blocks: Sequence[Sequence[Item]]) -> Generator[bytes, None, None]:
            return _parts(blocks, choice, work, replicas)

        yield compute
    finally:
        ray.shutdown()


def _parts(
    blocks: Sequence[Sequence[Item]], choice: EngineChoice, work: Work, replicas: Replicas
) -> Generator[bytes, None, None]:
    import ray
    from ray.data import ActorPoolStrategy, DataContext

    DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    parts = _dataset(blocks).map_batches(
        DataReplica,
        fn_constructor_args=(choice, work),
        batch_size=work.block_size,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(
            size=min(replicas.count, len(blocks)), max_tasks_in_flight_per_actor=_AHEAD
        ),
        num_cpus=replicas.num_cpus,
        num_gpus=replicas.num_gpus,
        runtime_env={"env_vars": dict(THREAD_WAITING)},
    )
    try:
        batches = parts.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
        for batch in cast("Iterable[pyarrow.Table]", batches):
            yield from batch["part"].to_pylist()
    except ray.exceptions.RayError as error:
        raise OutriderError(f"a replica failed: {_reason(error)}") from error


def _dataset(blocks: Sequence[Sequence[Item]]) -> "ray.data.Dataset":
    """One row an item, one block of the Dataset a block of the run."""
    import pyarrow
    import ray.data

    tables = [
        pyarrow.table({"index": [i for i, _ in block], "text": [text for _, text in block]})
        for block in blocks
    ]
    return ray.data.from_arrow(tables)


def _require_ray_data() -> None:
    try:
        import pyarrow  # noqa: F401
        import ray.data  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"a run on a cluster needs Ray Data ({error}); pip install 'outrider[data]'"
        ) from error


def _check_room(replicas: Replicas) -> None:
    """Raises ConfigError when no node could hold a replica: the job would wait for ever."""
    import ray

    found = ray.nodes()  # type: ignore[no-untyped-call]  # Ray is not annotated there
    nodes = [node["Resources"] for node in found if node["Alive"]]
    needs = {"CPU": replicas.num_cpus, "GPU": replicas.num_gpus}
    if not any(all(node.get(k, 0.0) >= v for k, v in needs.items()) for node in nodes):
        raise ConfigError(
            f"no node of the cluster has {replicas.num_cpus:g} CPUs and {replicas.num_gpus:g} GPUs "
            "for a replica"
        )


def _reason(error: Exception) -> str:
    """The last line that says something: our own error's, where one of ours was raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

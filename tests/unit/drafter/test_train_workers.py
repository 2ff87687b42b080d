"""Several workers make one run: same losses as one worker, one clock, one wish to stop."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from safetensors.torch import load_file

from drafter_service.training.cli import main
from drafter_service.training.recipe import RECIPES, family_of
from drafter_service.training.run import Run
from drafter_service.training.settings import TrainSettings, load_settings
from protos.errors import ConfigError
from tests.tiny_training import tiny_training

TIMEOUT_S = 60


class Group:
    """Workers in threads of this process: each brings its part, all take what `join` makes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=TIMEOUT_S)
        self._parts: list[object] = [None] * count

    def meet(self, rank: int, part: object, join: Callable[[list], object]) -> object:
        self._parts[rank] = part
        self._barrier.wait()
        joined = join(list(self._parts))
        self._barrier.wait()
        return joined


class Member:
    """See `workers.Workers`."""

    def __init__(self, group: Group, rank: int) -> None:
        self._group, self.rank, self.count = group, rank, group.count

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        mine = [tensor.clone() for tensor in tensors]
        sums = self._group.meet(
            self.rank, mine, lambda parts: [sum(of_one) for of_one in zip(*parts, strict=True)]
        )
        for tensor, summed in zip(tensors, sums, strict=True):
            tensor.copy_(summed)

    def agree(self, numbers: Sequence[float]) -> tuple[float, ...]:
        assert len(numbers) > 0
        return self._group.meet(self.rank, tuple(numbers), lambda parts: parts[0])


def run_together(count: int, work: Callable[[Member], object]) -> list[object]:
    """What each worker's `work` returns; an error of one is raised here."""
    group, found = Group(count), [None] * count

    def one(rank: int) -> None:
        try:
            found[rank] = work(Member(group, rank))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "a worker waits for ever"
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tiny_training(tmp_path_factory.mktemp("workers"), compute_dtype="float32")
    assert main(["eagle3", "--config", str(path), "--stage", "features"]) == 0
    return path


SHAPE = "num_heads: 4, num_kv_heads: 2, intermediate_size: 48"
BLOCK = f"aux_layers: [0, 1, 2], num_layers: 1, block_size: 4, head_dim: 8, mask_id: 1, {SHAPE}"
KINDS = {
    "eagle": [f"head={{{SHAPE}}}", "loss_vocab_size=32"],
    "eagle3": [],
    "dflash": [f"head={{{BLOCK}}}", "loss_vocab_size=32", "anchors_per_update=32"],
    "dspark": [f"head={{{BLOCK}, markov_rank: 4}}", "loss_vocab_size=32"],
}
"""What the tiny training changes for each family."""


def settings_of(config, run, *changes: str, kind: str = "eagle3") -> TrainSettings:
    changes = (f"run={run}", *KINDS[kind], *changes)
    return load_settings(config, family_of(kind).settings_type, changes)


def update_losses(run) -> list[float]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [loss for line in lines for loss in line.get("update_losses", ())]


def quiet(_line: str) -> None:
    pass


def test_every_family_is_tried_here():
    assert set(KINDS) == set(RECIPES)


@pytest.mark.parametrize(("kind", "count"), [*((kind, 2) for kind in KINDS), ("eagle3", 3)])
def test_workers_give_the_losses_and_weights_of_one(config, tmp_path, kind, count):
    def run_of(name: str, member: Member | None = None) -> None:
        settings = settings_of(config, tmp_path / name, "epochs=4", kind=kind)
        run = Run(kind, settings, quiet, member)
        run.train(run.start())

    run_together(count, lambda member: run_of("many", member))
    run_of("one")
    expected = update_losses(tmp_path / "one")
    assert len(expected) >= 8
    assert update_losses(tmp_path / "many") == pytest.approx(expected, rel=1e-4)
    one = load_file(tmp_path / "one" / "state.safetensors")
    many = load_file(tmp_path / "many" / "state.safetensors")
    for name, weight in one.items():
        torch.testing.assert_close(many[name], weight, atol=2e-4, rtol=2e-3)


class Clock:
    """Hours apart from the others' clocks, a second later at every look."""

    def __init__(self, start_s: float) -> None:
        self.now = start_s

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_under_a_deadline_the_first_workers_clock_counts_for_all(config, tmp_path):
    changes = ("minutes=0.5", "epochs=null")

    def work(member: Member) -> tuple[int, dict[str, torch.Tensor]]:
        clock = Clock(3600.0 * member.rank)
        settings = settings_of(config, tmp_path / "run", *changes)
        run = Run("eagle3", settings, quiet, member, clock)
        started = run.start()
        run.train(started)
        return dict(started.trainer.master_weights())

    first, second = run_together(2, work)
    assert len(update_losses(tmp_path / "run")) > 5
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name


def test_a_wish_to_stop_that_reaches_one_worker_stops_all_and_the_run_goes_on(config, tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"

    def work(run_dir, num_updates: int | None, member: Member) -> object:
        asked = 0

        def stopped() -> bool:
            nonlocal asked
            assert member.rank == 0, "the wish of another worker would never be heard"
            asked += 1
            return num_updates is not None and asked > num_updates

        run = Run("eagle3", settings_of(config, run_dir, "epochs=3"), quiet, member)
        return run.train(run.start(), stopped)

    assert run_together(2, lambda member: work(broken, 4, member)) == [None, None]
    assert len(update_losses(broken)) == 4
    run_together(2, lambda member: work(broken, None, member))
    run_together(2, lambda member: work(unbroken, None, member))
    assert update_losses(broken) == update_losses(unbroken)
    whole, pieces = (load_file(path / "state.safetensors") for path in (unbroken, broken))
    for name, weight in whole.items():
        assert torch.equal(weight, pieces[name]), name


def test_workers_that_see_other_states_are_refused(config, tmp_path):
    alone = Run("eagle3", settings_of(config, tmp_path / "run0", "epochs=1"), quiet)
    alone.train(alone.start())

    def work(member: Member) -> None:
        Run("eagle3", settings_of(config, tmp_path / f"run{member.rank}"), quiet, member).start()

    with pytest.raises(ConfigError, match="must be shared"):
        run_together(2, work)


GLOO = """
import sys, torch, torch.distributed as dist
from drafter_service.training.workers import ProcessGroup
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
workers = ProcessGroup()
mixed = [torch.full((2, 3), rank + 1.0), torch.tensor([rank, 5]), torch.ones(1) * 10 ** rank]
workers.add_up(mixed)
told = workers.agree((0.1 + rank, 7.0))
sys.stdout.write(repr([workers.rank, workers.count, [t.tolist() for t in mixed], told]))
dist.destroy_process_group()
"""


def test_a_process_group_adds_up_every_dtype_and_tells_the_firsts_numbers(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", GLOO, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    sums = [[[3.0] * 3] * 2, [1, 10], [11.0]]
    assert outputs == [repr([rank, 2, sums, (0.1, 7.0)]) for rank in range(2)]

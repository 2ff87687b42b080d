"""`outrider train` without Ray, and what it refuses before any worker is started."""

import subprocess
import sys

import pytest

from cluster.tools.cli import main
from cluster.tools.train_jobs import Board, WorkerGroup
from tests.tiny_training import tiny_training


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return str(tiny_training(tmp_path_factory.mktemp("command"), epochs=1, num_records=8))


def test_without_workers_nothing_of_ray_is_imported(config, tmp_path):
    code = (
        "import sys\n"
        "from cluster.tools.cli import main\n"
        "status = main(sys.argv[1:])\n"
        "sys.exit(status or any(name.split('.')[0] == 'ray' for name in sys.modules))\n"
    )
    words = ["train", "eagle3", "--config", config, "--output", str(tmp_path / "head")]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "head" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "option", [["--address", "auto"], ["--cpus-per-worker", "1"], ["--max-failures", "0"]]
)
def test_options_of_a_cluster_need_workers(config, option, capsys):
    assert main(["train", "eagle3", "--config", config, *option]) == 1
    assert f"{option[0]} without --workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (["--workers", "0"], "--workers must be at least 1"),
        (["--workers", "2", "--cpus-per-worker", "-1"], "--cpus-per-worker cannot be negative"),
        (["--workers", "2", "--max-failures", "-2"], "a number or -1"),
    ],
)
def test_groups_that_cannot_be_are_refused(config, option, reason, capsys):
    assert main(["train", "eagle3", "--config", config, "--stage", "train", *option]) == 1
    assert reason in capsys.readouterr().err


def test_without_ray_train_the_extra_is_named(config, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray.train.torch", None)
    assert main(["train", "eagle3", "--config", config, "--stage", "train", "--workers", "2"]) == 1
    assert "outrider[train]" in capsys.readouterr().err


def test_a_group_reserves_what_its_workers_use():
    assert WorkerGroup(2, 1.5).resources(num_threads=4) == {"CPU": 1.5}
    assert WorkerGroup(2).resources(num_threads=4) == {"CPU": 4.0}


def test_the_board_gives_every_line_once_and_keeps_how_things_stand():
    board = Board()
    assert (board.news().lines, board.news().has_begun, board.wants_stop()) == ((), False, False)
    board.begin()
    board.say("one")
    board.say("two")
    board.stop()
    assert board.news().lines == ("one", "two")
    assert board.news().lines == ()
    assert board.news().has_begun
    assert board.wants_stop()
    board.end(False)
    assert board.news().is_finished is False
    board.fail("no such layer")
    assert board.news().error == "no such layer"
